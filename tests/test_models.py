"""The networks: their layers and seeds, the inputs they refuse, and the choice of a client's network."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kindred.client.models import (
    KINDS,
    MODELS,
    choose_model,
    client_network,
    make_model,
    model_for_size,
    network_names,
    parse_models,
)
from kindred.messages import seed_for
from kindred.server_app.cli.run import app

# name, shape of the inputs, outputs, parameters by hand: kernel area * in * out + out of each convolution, in * out +
# out of each FC.
HAND_COUNTED = [
    # 9*1*16+16 = 160, 9*16*32+32 = 4640, 32*2*2 = 128 -> 64: 8256, 64 -> 10: 650
    ("digits-cnn", (1, 8, 8), 10, 160 + 4640 + 8256 + 650),
    # 25*1*32+32 = 832, 25*32*64+64 = 51264, 64*7*7 = 3136 -> 512: 1606144, 512 -> 10: 5130
    ("mcmahan-cnn", (1, 28, 28), 10, 1_663_370),
    # the last FC alone differs: 512 -> 62: 31806
    ("mcmahan-cnn", (1, 28, 28), 62, 1_663_370 - 5130 + 31806),
    # 9*3*128+128 = 3584, twice 9*128*128+128 = 147584, 128*4*4 = 2048 -> 10: 20490
    ("cnn2", (3, 32, 32), 10, 3584 + 2 * 147584 + 20490),
    # Stages of two blocks of two 3x3 convolutions without bias, each with 2 numbers a channel for its batch
    # normalisation, and a 1x1 shortcut where the width changes:
    # 64: 4*(9*64*64 + 2*64) = 147968; 128: 525568; 256: 2099712; 512: 8393728;
    # stem 9*3*64 + 2*64 = 1856; FC 512 -> 10: 5130
    ("resnet18", (3, 32, 32), 10, 1856 + 147968 + 525568 + 2099712 + 8393728 + 5130),
    # 25*3*6+6 = 456, 25*6*16+16 = 2416, 16*8*8 = 1024 -> 120: 123000, -> 100: 12100, -> 84: 8484, -> 50: 4250,
    # -> 10: 510
    ("ckt-cnn", (3, 32, 32), 10, 456 + 2416 + 123000 + 12100 + 8484 + 4250 + 510),
    # 512 -> 1000: 513000, -> 200: 200200, -> 65: 13065
    ("office-mlp", (512, 1, 1), 65, 513_000 + 200_200 + 13_065),
    # the first FC alone differs: 3*4*5 = 60 -> 1000: 61000
    ("office-mlp", (3, 4, 5), 65, 61_000 + 200_200 + 13_065),
    # 8 convolutions 9*in*out + out, with 2 numbers a channel for their batch normalisation:
    # 3 -> 64: 1792 + 128, -> 128: 73856 + 256, -> 256: 295168 + 512, -> 256: 590080 + 512,
    # -> 512: 1180160 + 1024, three times 512 -> 512: 2359808 + 1024;
    # twice 512 -> 512: 262656, 512 -> 10: 5130
    ("vgg11", (3, 32, 32), 10, 1920 + 74112 + 295680 + 590592 + 1181184 + 3 * 2360832 + 2 * 262656 + 5130),
    # and 64 -> 64: 36928 + 128, 128 -> 128: 147584 + 256
    ("vgg13", (3, 32, 32), 10, 9_756_426 + 37056 + 147840),
    # 15 -> 64: 1024, 64 -> 2: 130
    ("mlp", (15,), 2, 1024 + 130),
    # 5*6*16+16 = 496, 5*16*32+32 = 2592, 32 -> 32: 1056, 32 -> 7: 231
    ("cnn1d", (6, 100), 7, 496 + 2592 + 1056 + 231),
    # 100 tokens of 8 numbers: 800; four gates of (8 + 64) * 64 weights and twice 64 biases: 18944; 64 -> 100: 6500
    ("lstm", (100, 80), 100, 800 + 18944 + 6500),
]

SHAPES = {name: shape for name, shape, *_ in HAND_COUNTED}


def inputs_for(name: str, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Random inputs of a network."""
    random = torch.Generator().manual_seed(0)
    if name == "lstm":
        return torch.randint(shape[0], (count, shape[1]), generator=random)
    return torch.randn(count, *shape, generator=random)


SMALLEST = {"cnn2": 8, "resnet18": 8, "vgg11": 32, "vgg13": 32, "office-mlp": 1, "mlp": 1}  # others: 4


@pytest.mark.parametrize(("name", "shape", "num_outputs", "count"), HAND_COUNTED)
def test_the_number_of_parameters_by_hand(name, shape, num_outputs, count):
    model = make_model(name, shape, num_outputs, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_the_parameters_of_every_model_are_tested():
    assert {name for name, *_ in HAND_COUNTED} == set(MODELS)


def test_vgg11_has_the_size_implied_by_the_papers_communication():
    """PerFed-CKT, Table 1, C = 0.1, millions of floats in 200 rounds: m = 10 uploads, c broadcasts."""
    count = sum(parameter.numel() for parameter in make_model("vgg11", (3, 32, 32), 10, seed=0).parameters())
    for broadcasts, millions in ((2, 23400), (3, 25400), (5, 29300), (6, 31200)):
        assert count * 200 * (10 + broadcasts) / 1e6 == pytest.approx(millions, abs=100)  # the paper gives three digits


@pytest.mark.parametrize("name", [name for name in MODELS if "image" in KINDS[name]])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 13, 10), (2, 70, 45), (7, 1, 1)])
def test_every_image_gets_logits(name, shape):
    if min(shape[1:]) < SMALLEST.get(name, 4):
        with pytest.raises(ValueError, match=f"{name} needs images of at least"):
            make_model(name, shape, 7, seed=0)
        return
    model = make_model(name, shape, 7, seed=0).eval()
    with torch.inference_mode():
        assert model(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", MODELS)
def test_one_step_lowers_the_loss(name):
    """One small gradient step in evaluation mode: without dropout and with fixed batch statistics."""
    model = make_model(name, SHAPES[name], 3, seed=0).eval()
    x, labels = inputs_for(name, 2, SHAPES[name]), torch.tensor([0, 2])
    before = torch.nn.functional.cross_entropy(model(x), labels)
    before.backward()
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
        assert torch.nn.functional.cross_entropy(model(x), labels) < before


def test_resnet18_does_not_shrink_small_images():
    model = make_model("resnet18", (3, 32, 32), 10, seed=0).eval()
    seen = []
    model.layer4.register_forward_hook(lambda module, given, made: seen.append(made.shape))
    with torch.inference_mode():
        model(torch.randn(2, 3, 32, 32))
    assert seen == [(2, 512, 4, 4)]  # torchvision's own stem would leave 1x1


@pytest.mark.parametrize(("side", "pixels"), [(32, 1), (63, 1), (64, 2)])
def test_vgg_averages_over_the_output_of_the_last_stage(side, pixels):
    model = make_model("vgg11", (1, side, side), 10, seed=0).eval()
    with torch.inference_mode():
        images = torch.randn(2, 1, side, side)
        features = model.features(images)
        assert features.shape == (2, 512, pixels, pixels)
        assert torch.allclose(model[3:](features.mean((2, 3))), model(images), atol=1e-6)


def test_vgg_uses_dropout_in_training_only():
    model = make_model("vgg13", (3, 32, 32), 10, seed=0)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert not torch.equal(model(images), model(images))
        model.eval()
        assert torch.equal(model(images), model(images))


def test_office_mlp_is_three_layers_with_relu_between():
    model = make_model("office-mlp", (2, 1, 1), 2, seed=0)
    given = torch.tensor([[[[1.0]], [[-2.0]]]])
    (w1, b1), (w2, b2), (w3, b3) = [
        (layer.weight, layer.bias) for layer in model.modules() if isinstance(layer, torch.nn.Linear)
    ]
    hidden = torch.relu(w2 @ torch.relu(w1 @ torch.tensor([1.0, -2.0]) + b1) + b2)
    assert torch.allclose(model(given)[0], w3 @ hidden + b3, atol=1e-6)


def test_vgg_initialises_weights_like_pytorchs_layers():
    """Uniform within 1 / sqrt(inputs); with torchvision's N(0, 0.01) in the linear layers it would not learn."""
    model = make_model("vgg11", (3, 32, 32), 10, seed=0)
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) == 8 + 3
    for layer in layers:
        inputs = layer.weight[0].numel()
        assert float(layer.weight.detach().std()) == pytest.approx((3 * inputs) ** -0.5, rel=0.05)


def test_every_parameter_affects_the_logits():
    """The logits depend on every parameter."""
    for name, shape, num_outputs, _ in HAND_COUNTED:
        model = make_model(name, shape, num_outputs, seed=0)
        model(inputs_for(name, 4, shape)).square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters()), name


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 8, 8), "digits-cnn"),
        ((1, 28, 28), "mcmahan-cnn"),
        ((3, 32, 32), "cnn2"),
        ((1, 32, 32), "cnn2"),
        ((512, 1, 1), "office-mlp"),
        ((3, 1, 1), "office-mlp"),
    ],
)
def test_auto_chooses_by_image_size(shape, name):
    assert choose_model("image", shape) == name
    automatic, named = (make_model(which, shape, 10, seed=3).state_dict() for which in ("auto", name))
    assert list(automatic) == list(named)
    assert all(torch.equal(automatic[key], named[key]) for key in named)


@pytest.mark.parametrize(
    ("kind", "shape", "name"),
    [("table", (15,), "mlp"), ("signal", (6, 100), "cnn1d"), ("tokens", (100, 80), "lstm")],
)
def test_auto_chooses_by_kind(kind, shape, name):
    assert network_names("auto", kind, shape) == [name]


@pytest.mark.parametrize(
    ("name", "kind"), [("lstm", "signal"), ("cnn1d", "tokens"), ("mlp", "tokens"), ("cnn2", "table")]
)
def test_a_network_for_another_kind_of_inputs_is_refused_in_one_line(name, kind):
    with pytest.raises(ValueError, match=f"^model {name} takes inputs of kind .*, these are {kind}; allowed: .*$"):
        network_names(name, kind, (6, 100))


def test_the_lstm_reads_the_order_of_tokens():
    model = make_model("lstm", (3, 4), 2, seed=0).eval()
    tokens = torch.tensor([[0, 1, 2, 2], [1, 0, 2, 2]])
    with torch.inference_mode():
        outputs = model(tokens)
        assert not torch.equal(outputs[0], outputs[1])
        steps, (last, _) = torch.nn.LSTM.forward(model.lstm, model.embedding(tokens))
        assert torch.equal(outputs, model.fc(steps[:, -1])) and torch.equal(steps[:, -1], last[0])


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_fixes_the_weights_and_leaves_the_global_state_unchanged(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make_model(name, SHAPES[name], 10, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = make_model(name, SHAPES[name], 10, seed=5).state_dict()
    other = make_model(name, SHAPES[name], 10, seed=6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    weights = next(key for key in first if key.endswith(".weight"))
    assert not torch.equal(first[weights], other[weights])


@pytest.mark.parametrize(
    ("name", "shape", "num_outputs", "words"),
    [
        ("auto", (1, 20, 20), 10, ["auto", "20x20", "8x8", "28x28", "32x32", "1x1", "mcmahan-cnn"]),
        ("auto", (512, 1, 2), 10, ["auto", "1x2 with 512 channels"]),
        ("auto", (3, 28, 28), 10, ["28x28 with 3 channels", "28x28 grey"]),
        ("digits-cnn", (1, 3, 8), 10, ["digits-cnn", "4x4", "3x8"]),
        ("mcmahan-cnn", (1, 28, 2), 10, ["mcmahan-cnn", "4x4", "28x2"]),
        ("cnn2", (3, 7, 7), 10, ["cnn2", "8x8", "7x7"]),
        ("resnet18", (3, 4, 4), 10, ["resnet18", "8x8", "4x4"]),
        ("ckt-cnn", (3, 3, 8), 10, ["ckt-cnn", "4x4", "3x8"]),
        ("vgg11", (1, 28, 28), 10, ["vgg11", "32x32", "28x28"]),
        ("vgg13", (3, 32, 31), 10, ["vgg13", "32x32", "32x31"]),
        ("vgg", (3, 32, 32), 10, ["'vgg'", "auto", *MODELS]),
        ("cnn2", (3, 32, 32), 0, ["num_outputs is 0", "1 or more"]),
        ("cnn2", (6, 100), 7, ["cnn2", "images", "(6, 100)"]),
        ("auto", (6, 100), 7, ["auto", "images", "(6, 100)"]),
        ("cnn1d", (6, 3), 7, ["cnn1d", "4 times", "(6, 3)"]),
        ("cnn1d", (3, 32, 32), 7, ["cnn1d", "signals", "(3, 32, 32)"]),
        ("lstm", (15,), 7, ["lstm", "tokens", "(15,)"]),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_one_line(name, shape, num_outputs, words):
    with pytest.raises(ValueError) as refused:
        make_model(name, shape, num_outputs, seed=0)
    text = str(refused.value)
    assert "\n" not in text
    assert [word for word in words if word not in text] == []


def test_names_are_known_before_pytorch_is_imported():
    code = "import sys, kindred.client.models as m; print(len(m.MODELS), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(MODELS)), "False"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("auto", ["auto"]),
        ("cnn2", ["cnn2"]),
        ("ckt-cnn,vgg11,vgg13", ["ckt-cnn", "vgg11", "vgg13"]),
        (" vgg13, cnn2 ", ["vgg13", "cnn2"]),  # the order is that of the setting
    ],
)
def test_names_in_a_setting_are_read(text, names):
    assert parse_models(text) == names


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("vgg", "vgg"),
        ("cnn2,vgg", "vgg"),
        ("cnn2,auto", "auto"),
        ("auto,cnn2", "auto"),
        ("auto,auto", "auto"),
        ("cnn2,vgg11,cnn2", "cnn2"),
        ("", ""),
        ("cnn2,", ""),
        ("vgg11 vgg13", "vgg11 vgg13"),
        ("VGG11", "VGG11"),
    ],
)
def test_a_bad_name_in_a_setting_is_named(text, bad):
    with pytest.raises(ValueError) as refused:
        parse_models(text)
    assert str(refused.value) == (
        f"model is {text!r}, where {bad!r} is not valid; "
        f"allowed: auto alone, or any of {', '.join(MODELS)}, each once, separated by commas"
    )


@pytest.mark.parametrize(
    ("num_examples", "typical", "shares"),
    [
        (100, 100, [1 / 4, 1 / 2, 1 / 4]),  # r = 1/2
        (300, 100, [1 / 16, 6 / 16, 9 / 16]),  # r = 3/4
        (25, 100.0, [16 / 25, 8 / 25, 1 / 25]),  # r = 1/5
        (0, 100, [1, 0, 0]),
        (7, 7, [1 / 2, 1 / 2]),
        (100, 100, [1 / 8, 3 / 8, 3 / 8, 1 / 8]),
        (5, 100, [1]),
    ],
)
def test_the_probability_of_a_network_follows_the_client_s_size(num_examples, typical, shares):
    draws, names = 4000, ["a", "b", "c", "d"][: len(shares)]
    drawn = Counter(model_for_size(names, num_examples, typical, seed) for seed in range(draws))
    for name, share in zip(names, shares, strict=True):
        within = 4 * math.sqrt(share * (1 - share) / draws)  # four standard deviations
        assert drawn[name] / draws == pytest.approx(share, abs=within)


def test_more_data_never_give_a_smaller_network():
    names = ["small", "medium", "large"]
    for seed in range(40):
        places = [names.index(model_for_size(names, n, 37.5, seed)) for n in range(0, 400, 3)]
        assert places == sorted(places)
        assert places == [names.index(model_for_size(names, n, 37.5, seed)) for n in range(0, 400, 3)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([], 10, 5, 0), "names is [], allowed: one name or more"),
        ((["a"], -1, 5, 0), "num_examples is -1, allowed: 0 or more"),
        ((["a"], math.inf, 5, 0), "num_examples is inf, allowed: 0 or more"),
        ((["a"], 10, 0, 0), "typical is 0, allowed: more than 0"),
        ((["a"], 10, math.nan, 0), "typical is nan, allowed: more than 0"),
        ((["a"], 10, math.inf, 0), "typical is inf, allowed: more than 0"),
        ((["a"], 10, 5, -1), "seed is -1, allowed: 0 or more"),
    ],
)
def test_an_invalid_random_choice_is_refused_in_one_line(arguments, text):
    with pytest.raises(ValueError) as refused:
        model_for_size(*arguments)
    assert str(refused.value) == text


def test_a_client_s_network_is_the_only_one_or_drawn_by_its_size() -> None:
    assert network_names("auto", "image", (3, 32, 32)) == ["cnn2"]
    assert network_names("vgg11,cnn2", "image", (1, 8, 8)) == ["vgg11", "cnn2"]
    assert {client_network("auto", "image", (1, 8, 8), n, 50, 0, client) for n in (1, 99) for client in (0, "a")} == {
        "digits-cnn"
    }
    several = "ckt-cnn,vgg11"
    for client in range(9):
        draw = seed_for(3, client, "architecture")
        expected = model_for_size(several.split(","), 30, 50, draw)
        assert client_network(several, "image", (3, 32, 32), 30, 50, 3, client) == expected
        # Without a typical number the client's own is used: the second network has probability 1/2.
        assert client_network(several, "image", (3, 32, 32), 30, 0, 3, client) == model_for_size(
            several.split(","), 1, 1, draw
        )


@pytest.mark.parametrize("model", ["auto", "cnn1d"])
def test_signals_that_are_too_short_are_refused_before_a_run(model, tmp_path):
    x, y = np.zeros((40, 2, 3)), np.arange(40) % 2
    np.savez(tmp_path / "short.npz", x=x, y=y)
    arguments = [
        "run",
        "--dataset",
        "npz",
        "--data-dir",
        str(tmp_path / "short.npz"),
        "--clients",
        "2",
        "--partition=iid",
    ]
    done = CliRunner().invoke(app, [*arguments, "--set", f"model={model}"])
    assert done.exit_code == 2 and "signals, (channels, time), of 4 times or more" in done.output
