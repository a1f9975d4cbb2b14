"""The networks: what they are made of, that a seed fixes them, and what images they refuse."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from strategies.models import MODELS, choose_model, make_model

# name, image shape, classes, parameters by hand: kernel area * in * out + out of each convolution, in * out + out
# of each FC.
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
]


@pytest.mark.parametrize(("name", "image_shape", "num_classes", "count"), HAND_COUNTED)
def test_number_of_parameters(name, image_shape, num_classes, count):
    model = make_model(name, image_shape, num_classes, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_every_model_is_counted():
    assert {name for name, *_ in HAND_COUNTED} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("image_shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 13, 10)])
def test_logits_for_every_image(name, image_shape):
    model = make_model(name, image_shape, 7, seed=0).eval()
    with torch.inference_mode():
        assert model(torch.randn(3, *image_shape)).shape == (3, 7)


def test_resnet18_keeps_small_images_large():
    model = make_model("resnet18", (3, 32, 32), 10, seed=0).eval()
    seen = []
    model.layer4.register_forward_hook(lambda module, given, made: seen.append(made.shape))
    with torch.inference_mode():
        model(torch.randn(2, 3, 32, 32))
    assert seen == [(2, 512, 4, 4)]  # torchvision's own stem would leave 1x1


def test_every_layer_matters():
    """The logits depend on every parameter."""
    for name, image_shape, num_classes, _ in HAND_COUNTED:
        model = make_model(name, image_shape, num_classes, seed=0)
        model(torch.randn(4, *image_shape)).square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters()), name


@pytest.mark.parametrize(
    ("image_shape", "name"),
    [((1, 8, 8), "digits-cnn"), ((1, 28, 28), "mcmahan-cnn"), ((3, 32, 32), "cnn2"), ((1, 32, 32), "cnn2")],
)
def test_auto_goes_by_the_images_size(image_shape, name):
    assert choose_model(image_shape) == name
    automatic, named = (make_model(which, image_shape, 10, seed=3).state_dict() for which in ("auto", name))
    assert list(automatic) == list(named)
    assert all(torch.equal(automatic[key], named[key]) for key in named)


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_fixes_the_weights_and_leaves_the_global_state(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make_model(name, (3, 32, 32), 10, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = make_model(name, (3, 32, 32), 10, seed=5).state_dict()
    other = make_model(name, (3, 32, 32), 10, seed=6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


@pytest.mark.parametrize(
    ("name", "image_shape", "num_classes", "words"),
    [
        ("auto", (1, 20, 20), 10, ["auto", "20x20", "8x8", "28x28", "32x32", "mcmahan-cnn"]),
        ("auto", (3, 28, 28), 10, ["28x28 with 3 channels", "28x28 grey"]),
        ("digits-cnn", (1, 3, 8), 10, ["digits-cnn", "4x4", "3x8"]),
        ("mcmahan-cnn", (1, 28, 2), 10, ["mcmahan-cnn", "4x4", "28x2"]),
        ("cnn2", (3, 7, 7), 10, ["cnn2", "8x8", "7x7"]),
        ("resnet18", (3, 4, 4), 10, ["resnet18", "8x8", "4x4"]),
        ("vgg", (3, 32, 32), 10, ["'vgg'", "auto", *MODELS]),
        ("cnn2", (3, 32, 32), 1, ["num_classes is 1", "2 or more"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(name, image_shape, num_classes, words):
    with pytest.raises(ValueError) as refused:
        make_model(name, image_shape, num_classes, seed=0)
    text = str(refused.value)
    assert "\n" not in text
    assert [word for word in words if word not in text] == []


def test_names_are_there_before_pytorch():
    code = "import sys, strategies.models as m; print(len(m.MODELS), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(MODELS)), "False"]
