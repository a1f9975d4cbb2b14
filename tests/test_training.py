"""Local training: its steps by hand and against plain PyTorch, the order of samples, and its arrays."""

from __future__ import annotations

import copy
import math
import tracemalloc
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

from kindred import FedAMP
from kindred.client import training
from kindred.client.models import make_model
from kindred.client.training import batches, get_arrays, mean_gradient, num_batches, pick_device, set_arrays, train

from .scores import evaluate

SETTINGS = {"epochs": 1, "batch_size": 10, "optimizer": "sgd", "learning_rate": 0.1}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def order(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int, shape=(1, 8, 8), classes: int = 10, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a bright row that indicates the class."""
    generator = order(seed)
    y = torch.arange(n) % classes
    x = 0.3 * torch.randn(n, *shape, generator=generator)
    x[torch.arange(n), :, y % shape[1]] += 1.0 + (y // shape[1])[:, None, None]
    return x, y


def two_weights() -> nn.Module:
    """Logits w0 x and w1 x, from w = 0."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    return model


ONE = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)  # x = 1 of class 0


# Steps by hand


def test_one_step_of_sgd_by_hand():
    # softmax(0, 0) = (1/2, 1/2), gradient (1/2 - 1, 1/2), step 0.1
    model = two_weights()
    loss = train(model, *ONE, **SETTINGS, generator=order())
    assert loss == pytest.approx(math.log(2), abs=1e-7)
    assert model.weight.flatten().tolist() == pytest.approx([0.05, -0.05], abs=1e-7)


@pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
def test_the_proximal_term_by_hand(mu):
    # The first step is as above, as the term is 0 at the start. Then w = (0.05, -0.05), where class 1 has
    # probability q = 1 / (1 + e^0.1): gradient of F (-q, q), of the term mu (0.05, -0.05).
    q = 1 / (1 + math.exp(0.1))
    expected = 0.05 - 0.1 * (-q + mu * 0.05)
    model = two_weights()
    loss = train(model, *ONE, **SETTINGS | {"epochs": 2}, proximal_mu=mu, generator=order())
    assert model.weight.flatten().tolist() == pytest.approx([expected, -expected], abs=1e-7)
    # The loss is that of F alone: ln 2, then ln(1 + e^-0.1).
    assert loss == pytest.approx((math.log(2) + math.log1p(math.exp(-0.1))) / 2, abs=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.4])
def test_weight_decay_by_hand(decay):
    # As above: the weights are 0 at the first step, and (0.05, -0.05) at the second, to which decay adds that fraction.
    q = 1 / (1 + math.exp(0.1))
    expected = 0.05 - 0.1 * (-q + decay * 0.05)
    model = two_weights()
    loss = train(model, *ONE, **SETTINGS | {"epochs": 2}, weight_decay=decay, generator=order())
    assert model.weight.flatten().tolist() == pytest.approx([expected, -expected], abs=1e-7)
    assert loss == pytest.approx((math.log(2) + math.log1p(math.exp(-0.1))) / 2, abs=1e-6)  # without the decay


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
def test_smoothed_labels_by_hand(smoothing):
    # Class 0 has target 1 - smoothing / 2: the loss gradients at 0 are -(1 - smoothing) / 2 and its opposite.
    model = two_weights()
    loss = train(model, *ONE, **SETTINGS | {"epochs": 2}, label_smoothing=smoothing, generator=order())
    w = 0.05 * (1 - smoothing)
    q = 1 / (1 + math.exp(2 * w))  # of class 1
    second = w - 0.1 * (smoothing / 2 - q)
    assert model.weight.flatten().tolist() == pytest.approx([second, -second], abs=1e-7)
    smoothed = -(1 - smoothing / 2) * math.log(1 - q) - smoothing / 2 * math.log(q)
    assert loss == pytest.approx((math.log(2) + smoothed) / 2, abs=1e-6)


def test_the_smoothed_loss_of_float16_is_finite():
    model = nn.Linear(2, 1000).half()
    x, y = torch.ones(64, 2, dtype=torch.float16), torch.arange(64)
    loss = train(model, x, y, **SETTINGS | {"batch_size": 64}, label_smoothing=0.1, generator=order())
    assert 6 < loss < 8  # about ln 1000


def test_gradients_left_from_before_are_ignored():
    model = two_weights()
    (100 * model.weight.sum()).backward()
    train(model, *ONE, **SETTINGS, generator=order())
    assert model.weight.flatten().tolist() == pytest.approx([0.05, -0.05], abs=1e-7)


def test_two_steps_of_sgd_with_momentum_by_hand():
    # v1 = (-0.5, 0.5), w1 = (0.05, -0.05); v2 = 0.9 v1 + (-q, q), w2 = w1 - 0.1 v2
    q = 1 / (1 + math.exp(0.1))
    expected = 0.05 + 0.1 * (0.45 + q)
    model = two_weights()
    train(model, *ONE, **SETTINGS | {"epochs": 2}, momentum=0.9, generator=order())
    assert model.weight.flatten().tolist() == pytest.approx([expected, -expected], abs=1e-7)


def test_one_step_of_adam_is_the_learning_rate():
    # m / sqrt(v) after the corrections is the gradient's sign.
    model = two_weights()
    train(model, *ONE, **SETTINGS | {"optimizer": "adam", "learning_rate": 0.002}, generator=order())
    assert model.weight.flatten().tolist() == pytest.approx([0.002, -0.002], rel=1e-5)


def test_the_loss_weights_every_sample_equally():
    # Batches of 2 and 3 with a learning rate that moves nothing: their means must be weighted by size.
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])
    y = torch.tensor([0, 0, 0, 0, 1])
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    # Two classes and logits (x, -x): -ln p of class 0 is ln(1 + e^-2x), of class 1 ln(1 + e^2x).
    expected = (sum(math.log1p(math.exp(-2 * v)) for v in range(4)) + math.log1p(math.exp(8))) / 5
    loss = train(model, x, y, **SETTINGS | {"batch_size": 2, "learning_rate": 1e-12, "epochs": 3}, generator=order())
    assert loss == pytest.approx(expected, rel=1e-6)


# Against plain PyTorch


def plain(model, x, y, steps, optimizer, mu):
    """Full-batch training with the proximal term in the loss."""
    received = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if mu:
            loss = loss + mu / 2 * sum(((w - u) ** 2).sum() for w, u in zip(model.parameters(), received, strict=True))
        loss.backward()
        optimizer.step()


OPTIMIZERS = {
    "adam": lambda model, decay=0.0: torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=decay),
    "sgd": lambda model, decay=0.0: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=decay),
}


def assert_close(model: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, one), two in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("name", "optimizer", "mu"),
    [
        ("digits-cnn", "adam", 0.0),
        ("digits-cnn", "adam", 0.5),
        ("digits-cnn", "sgd", 0.0),
        ("digits-cnn", "sgd", 0.5),
        ("resnet18", "adam", 0.5),
    ],
)
def test_steps_match_plain_pytorch(name, optimizer, mu):
    x, y = images(12, (3, 8, 8))
    model = make_model(name, (3, 8, 8), 10, seed=1).double()
    expected, start = copy.deepcopy(model), copy.deepcopy(model)
    plain(expected, x.double(), y, 4, OPTIMIZERS[optimizer](expected), mu)
    train(
        model,
        x.double(),
        y,
        epochs=4,
        batch_size=12,
        optimizer=optimizer,
        learning_rate=0.01,
        momentum=0.9,
        proximal_mu=mu,
        generator=order(),
    )
    assert_close(model, expected, 1e-7)
    assert (model.conv1.weight - start.conv1.weight).abs().max() > 1e-4  # far more than the tolerance


def with_buffers() -> nn.Module:
    """Return a small network with batch normalisation."""
    layers = {"conv1": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "relu": nn.ReLU(), "flatten": nn.Flatten()}
    return nn.Sequential(OrderedDict(layers, last=nn.Linear(8 * 36, 10)))


@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("has_buffers", [False, True])  # they do not decay
def test_weight_decay_is_that_of_torch(has_buffers, optimizer, mu):
    x, y = images(12, (3, 8, 8))
    torch.manual_seed(1)
    model = (with_buffers() if has_buffers else make_model("digits-cnn", (3, 8, 8), 10, seed=1)).double()
    expected, without = copy.deepcopy(model), copy.deepcopy(model)
    plain(expected, x.double(), y, 4, OPTIMIZERS[optimizer](expected, 0.3), mu)
    settings = {"batch_size": 12, "optimizer": optimizer, "learning_rate": 0.01, "momentum": 0.9, "proximal_mu": mu}
    train(model, x.double(), y, epochs=4, weight_decay=0.3, generator=order(), **settings)
    train(without, x.double(), y, epochs=4, generator=order(), **settings)
    assert_close(model, expected, 1e-7)
    assert (model.conv1.weight - without.conv1.weight).abs().max() > 1e-4  # far more than the tolerance


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimiser_that_is_kept_continues_like_one_of_torch(optimizer):
    """Three times the model starts from other weights, as from a server, and its optimiser from its last state."""
    x, y = images(12, (3, 8, 8))
    models = [make_model("digits-cnn", (3, 8, 8), 10, seed=1).double() for _ in range(3)]
    kept, expected, anew = models
    reference, memory = OPTIMIZERS[optimizer](expected, 0.1), []
    settings = {"epochs": 2, "batch_size": 12, "optimizer": optimizer, "learning_rate": 0.01, "momentum": 0.9}
    for seed in range(3):
        received = get_arrays(make_model("digits-cnn", (3, 8, 8), 10, seed=seed).double())
        for model in models:
            set_arrays(model, received)
        plain(expected, x.double(), y, 2, reference, 0.0)
        train(kept, x.double(), y, weight_decay=0.1, memory=memory, generator=order(), **settings)
        train(anew, x.double(), y, weight_decay=0.1, generator=order(), **settings)
        assert_close(kept, expected, 1e-7)
    assert (kept.conv1.weight - anew.conv1.weight).abs().max() > 1e-4  # far more than the tolerance
    before = [tensor.clone() for tensor in memory]
    train(kept, x.double(), y, memory=memory, generator=order(), **settings | {"epochs": 0})
    assert all(torch.equal(one, two) for one, two in zip(memory, before, strict=True))


@pytest.mark.parametrize(
    ("name", "shape", "n"),
    [
        ("digits-cnn", (1, 8, 8), 12),  # few images
        ("digits-cnn", (3, 8, 8), 40),
        ("mcmahan-cnn", (1, 28, 28), 12),
        ("cnn2", (3, 16, 16), 20),
    ],
)
def test_layout_and_kernels_change_no_value(name, shape, n):
    x, y = images(n, shape)
    model = make_model(name, shape, 10, seed=1)
    expected = copy.deepcopy(model)
    plain(expected, x, y, 3, torch.optim.SGD(expected.parameters(), lr=0.01), 0.0)
    train(model, x, y, epochs=3, batch_size=n, optimizer="sgd", learning_rate=0.01, generator=order())
    assert_close(model, expected, 1e-4)


def test_unused_and_frozen_parameters_do_not_change():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(self.frozen(x))

    for optimizer in OPTIMIZERS:
        model = Heads()
        before = get_arrays(model)
        train(
            model,
            torch.randn(6, 4),
            torch.arange(6) % 2,
            **SETTINGS | {"optimizer": optimizer},
            momentum=0.5,
            proximal_mu=1.0,
            generator=order(),
        )
        after = get_arrays(model)
        assert {name for name in after if not np.array_equal(after[name], before[name])} == {"used.weight", "used.bias"}


# Learning


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_it_learns(optimizer, precision):
    x, y = images(60)
    model = make_model("digits-cnn", (1, 8, 8), 10, seed=0)
    accuracy, loss = evaluate(model, x, y)
    rate = {"adam": 0.003, "sgd": 0.1}[optimizer]
    means = [
        train(
            model,
            x,
            y,
            epochs=5,
            batch_size=10,
            optimizer=optimizer,
            learning_rate=rate,
            momentum=0.5,
            precision=precision,
            generator=order(k),
        )
        for k in range(4)
    ]
    learnt_accuracy, learnt_loss = evaluate(model, x, y)
    assert means[-1] < 0.5 * means[0]
    assert learnt_loss < 0.2 * loss
    assert accuracy < 0.4 and learnt_accuracy > 0.95
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_bfloat16_gives_different_but_nearly_equal_results():
    x, y = images(20)
    results = []
    for precision in ("float32", "bfloat16"):
        model = make_model("digits-cnn", (1, 8, 8), 10, seed=0)
        train(model, x, y, **SETTINGS, precision=precision, generator=order())
        results.append(np.concatenate([array.ravel() for array in get_arrays(model).values()]))
    assert 1e-4 < np.abs(results[0] - results[1]).max() < 0.02  # rounding of float32 is 1e-7


def test_a_strong_proximal_term_holds_the_model_back():
    x, y = images(40)
    moved = []
    for mu in (0.0, 1.0, 10.0):
        model = make_model("digits-cnn", (1, 8, 8), 10, seed=0)
        before = get_arrays(model)
        train(model, x, y, **SETTINGS | {"epochs": 5, "learning_rate": 0.05}, proximal_mu=mu, generator=order())
        moved.append(sum(float(((array - before[name]) ** 2).sum()) for name, array in get_arrays(model).items()))
    assert moved[0] > 2 * moved[1] > 4 * moved[2] > 0


@pytest.mark.parametrize("mu", [10.0, 1e3, 1e38])
def test_a_proximal_weight_above_1_over_the_learning_rate_acts_as_that(mu):
    # Towards (3, 4) from w = 0: the step of the term alone ends there, that of F adds (0.05, -0.05).
    model = two_weights()
    train(model, *ONE, **SETTINGS, proximal_mu=mu, towards=[torch.tensor([[3.0], [4.0]])], generator=order())
    assert model.weight.flatten().tolist() == pytest.approx([3.05, 3.95], abs=1e-6)


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0)])
@pytest.mark.parametrize("server_round", [600, 10_000])
def test_training_stays_near_the_cloud_model_however_far_alpha_has_decayed(optimizer, momentum, server_round):
    x, y = images(40)
    mu = FedAMP().round_config(server_round, 0)["proximal-mu"]
    assert 1e14 < mu < np.finfo(np.float32).max
    moved = []
    for weight in (0.0, mu):
        model = make_model("digits-cnn", (1, 8, 8), 10, seed=0)
        before = get_arrays(model)
        own = {"optimizer": optimizer, "learning_rate": 0.01, "epochs": 20}
        train(model, x, y, **SETTINGS | own, momentum=momentum, proximal_mu=weight, generator=order())
        after = get_arrays(model)
        assert all(np.isfinite(array).all() for array in after.values())
        moved.append(math.sqrt(sum(float(((array - before[name]) ** 2).sum()) for name, array in after.items())))
    assert 0 < moved[1] < 0.1 * moved[0]


# Batch normalisation


class Normalised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_single_sample_left_over_is_trained_on():
    # Batches of 10 from 21 samples; BatchNorm1d raises on a batch of one.
    x, y = torch.randn(21, 3, generator=order()), torch.arange(21) % 2
    model = Normalised()
    assert math.isfinite(train(model, x, y, **SETTINGS, generator=order()))
    assert int(model[0].num_batches_tracked) == 2


def test_the_proximal_term_excludes_buffers():
    # One full batch: the running mean is 0.1 times the batch's, whatever mu is.
    x, y = torch.randn(8, 3, generator=order()) + 5, torch.arange(8) % 2
    model = Normalised()
    train(model, x, y, **SETTINGS, proximal_mu=5.0, generator=order())
    torch.testing.assert_close(model[0].running_mean, 0.1 * x.mean(0))
    assert int(model[0].num_batches_tracked) == 1


def test_training_uses_training_mode_and_evaluation_does_not():
    x, y = torch.randn(8, 3, generator=order()), torch.arange(8) % 2
    model = Normalised()
    for mode in (True, False):
        model.train(mode)
        before = get_arrays(model)
        evaluate(model, x, y)
        assert model.training is mode
        assert all(np.array_equal(array, before[name]) for name, array in get_arrays(model).items())
    train(model, x, y, **SETTINGS, generator=order())  # training mode even after eval()
    assert int(model[0].num_batches_tracked) == 1


# Order and determinism


class Recorder(nn.Module):
    """Records which samples form a batch; sample k is the number k."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.batches = []

    def forward(self, x):
        self.batches.append([int(value) for value in x[:, 0]])
        return torch.cat([x, -x], 1) * self.scale * 1e-3


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), batch_size=st.integers(1, 45), epochs=st.integers(1, 3), seed=st.integers(0, 99))
def test_an_epoch_uses_every_sample_once(n, batch_size, epochs, seed):
    def batches():
        model = Recorder()
        train(
            model,
            torch.arange(n)[:, None].float(),
            torch.arange(n) % 2,
            **SETTINGS | {"epochs": epochs, "batch_size": batch_size},
            generator=order(seed),
        )
        return model.batches

    made = batches()
    assert made == batches()
    samples = [sample for batch in made for sample in batch]
    assert len(samples) == epochs * n
    for epoch in range(epochs):
        assert sorted(samples[epoch * n : (epoch + 1) * n]) == list(range(n))
    sizes = [len(batch) for batch in made]
    assert max(sizes) <= batch_size + 1
    assert min(sizes) > 1 or n == 1 or batch_size == 1
    assert len(sizes) <= epochs * math.ceil(n / batch_size)


def test_the_order_differs_between_epochs_and_seeds():
    orders = []
    for seed in (0, 1):
        model = Recorder()
        train(
            model,
            torch.arange(30)[:, None].float(),
            torch.arange(30) % 2,
            **SETTINGS | {"epochs": 2, "batch_size": 30},
            generator=order(seed),
        )
        orders += [tuple(batch) for batch in model.batches]
    assert len(set(orders)) == 4


def test_training_neither_uses_nor_changes_the_global_random_state():
    x, y = images(25)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        model = make_model("digits-cnn", (1, 8, 8), 10, seed=0)
        train(model, x, y, **SETTINGS, generator=order())
        assert torch.equal(torch.get_rng_state(), before)
        results.append(get_arrays(model))
    assert all(np.array_equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(("name", "shape"), [("digits-cnn", (1, 8, 8)), ("resnet18", (3, 8, 8))])
def test_a_module_used_for_another_client_gives_the_same_bits(name, shape, optimizer):
    received = get_arrays(make_model(name, shape, 10, seed=0))

    def work(model, seed):
        set_arrays(model, received)
        x, y = images(11, shape, seed=seed)
        loss = train(
            model,
            x,
            y,
            epochs=2,
            batch_size=5,
            optimizer=optimizer,
            learning_rate=0.01,
            momentum=0.9,
            proximal_mu=0.1,
            generator=order(seed),
        )
        return loss, evaluate(model, x, y), get_arrays(model)

    fresh = work(make_model(name, shape, 10, seed=0), 1)
    model = make_model(name, shape, 10, seed=3)
    work(model, 2)
    again = work(model, 1)
    assert again[:2] == fresh[:2]
    assert all(np.array_equal(again[2][key], fresh[2][key]) for key in received)


# Evaluation


def test_accuracy_and_loss_by_hand():
    # The samples are the logits: probabilities of class 1 are 3/4 and 1/4, so -ln p = ln 4/3 and ln 4.
    x = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]])
    accuracy, loss = evaluate(nn.Identity(), x, torch.tensor([1, 1]))
    assert accuracy == 0.5
    assert loss == pytest.approx((math.log(4 / 3) + math.log(4)) / 2, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 7, 50, 1000])
def test_evaluation_in_batches_equals_evaluation_of_all_samples(batch_size):
    x, y = images(50)
    model = make_model("digits-cnn", (1, 8, 8), 10, seed=0)
    with torch.inference_mode():
        logits = model(x)
    expected = (float((logits.argmax(1) == y).double().mean()), float(F.cross_entropy(logits, y)))
    assert evaluate(model, x, y, batch_size) == pytest.approx(expected, rel=1e-5)


# Nothing to do, and refused input


@pytest.mark.parametrize(("epochs", "n"), [(0, 8), (3, 0)])
def test_without_steps_the_model_does_not_change_and_there_is_no_loss(epochs, n):
    model = make_model("digits-cnn", (1, 8, 8), 10, seed=0)
    before = get_arrays(model)
    loss = train(
        model,
        torch.zeros(n, 1, 8, 8),
        torch.zeros(n, dtype=torch.int64),
        **SETTINGS | {"epochs": epochs},
        proximal_mu=1.0,
        generator=order(),
    )
    assert math.isnan(loss)
    assert all(np.array_equal(array, before[name]) for name, array in get_arrays(model).items())


def test_evaluation_of_no_samples_is_nan():
    accuracy, loss = evaluate(nn.Identity(), torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    assert math.isnan(accuracy) and math.isnan(loss)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("epochs", -1, "0 or more"),
        ("batch_size", 0, "1 to 1,000,000"),
        ("optimizer", "adagrad", "adam, sgd"),
        ("learning_rate", 0.0, "more than 0, at most 1,000"),
        ("learning_rate", math.nan, "more than 0, at most 1,000"),
        ("momentum", 1.5, "0 to 1"),
        ("weight_decay", -0.1, "0 to 1,000,000"),
        ("weight_decay", math.inf, "0 to 1,000,000"),
        ("proximal_mu", -0.1, "0 or more"),
        ("proximal_mu", math.inf, "0 or more"),
        ("label_smoothing", -0.1, "0 to 1"),
        ("label_smoothing", math.nan, "0 to 1"),
        ("precision", "float16", "float32, bfloat16"),
    ],
)
def test_bad_settings_are_refused_before_any_step(name, value, allowed):
    model = two_weights()
    with pytest.raises(ValueError) as refused:
        train(model, *ONE, **SETTINGS | {name: value}, generator=order())
    assert str(refused.value) == f"{name} is {value!r}, allowed: {allowed}"
    assert model.weight.abs().sum() == 0


def test_a_failing_model_leaves_the_state_of_torch_unchanged():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise ArithmeticError

    x, y = images(10)
    with pytest.raises(ArithmeticError):
        train(Failing(), x, y, **SETTINGS, generator=order())
    assert torch.backends.mkldnn.enabled
    assert torch.is_grad_enabled()


# Arrays


@pytest.mark.parametrize(("name", "shape"), [("digits-cnn", (3, 8, 8)), ("resnet18", (3, 8, 8))])
def test_arrays_transfer_a_trained_model_to_another_module(name, shape):
    x, y = images(20, shape)
    model = make_model(name, shape, 10, seed=0)
    standard = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    train(model, x, y, **SETTINGS, generator=order())
    arrays = get_arrays(model)
    assert {key: array.shape for key, array in arrays.items()} == standard
    assert all(array.flags.c_contiguous for array in arrays.values())
    for key, tensor in model.state_dict().items():
        assert np.array_equal(arrays[key], tensor.numpy())
    other = make_model(name, shape, 10, seed=9)
    set_arrays(other, arrays)
    assert evaluate(other, x, y) == pytest.approx(evaluate(model, x, y), rel=1e-5)
    assert all(np.array_equal(array, arrays[key]) for key, array in get_arrays(other).items())


def test_arrays_and_model_share_no_memory():
    model = make_model("digits-cnn", (1, 8, 8), 10, seed=0)
    arrays = get_arrays(model)
    kept = {name: array.copy() for name, array in arrays.items()}
    train(model, *images(10), **SETTINGS, generator=order())
    assert all(np.array_equal(arrays[name], kept[name]) for name in kept)
    set_arrays(model, arrays)
    for array in arrays.values():
        array += 1
    assert all(np.array_equal(array, kept[name]) for name, array in get_arrays(model).items())


def test_read_only_float64_and_strided_arrays_are_accepted():
    model = Normalised()
    arrays = {name: np.array(array + 1) for name, array in get_arrays(model).items()}
    arrays["1.weight"] = np.asfortranarray(arrays["1.weight"].astype(np.float64))
    for array in arrays.values():
        array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_arrays(model, dict(reversed(arrays.items())))
    assert all(np.array_equal(array, arrays[name]) for name, array in get_arrays(model).items())
    assert model[1].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays: arrays.pop("1.bias"), ["'1.bias'", "missing"]),
        (lambda arrays: arrays.update({"2.bias": np.zeros(2)}), ["'2.bias'", "1.bias"]),
        (lambda arrays: arrays.update({"1.weight": np.zeros((3, 2))}), ["'1.weight'", "(3, 2)", "(2, 3)"]),
        (lambda arrays: arrays.update({"1.bias": np.zeros((1, 2))}), ["'1.bias'", "(1, 2)", "(2,)"]),
        (lambda arrays: arrays.update({"0.num_batches_tracked": np.array(1.5)}), ["num_batches", "float64", "int64"]),
        (lambda arrays: arrays.update({"1.bias": np.zeros(2, complex)}), ["'1.bias'", "complex128", "float32"]),
    ],
)
def test_arrays_of_another_model_are_refused_without_any_change(change, words):
    model = Normalised()
    before = get_arrays(model)
    arrays = {name: array + 1 for name, array in before.items()}
    change(arrays)
    with pytest.raises(ValueError) as refused:
        set_arrays(model, arrays)
    text = str(refused.value)
    assert "\n" not in text
    assert [word for word in words if word not in text] == []
    assert all(np.array_equal(array, before[name]) for name, array in get_arrays(model).items())


# Devices


def test_device_names_are_resolved_or_refused():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="device is 'tpu', allowed: auto, cpu, cuda"):
        pick_device("tpu")


def test_a_missing_gpu_is_an_error():
    with pytest.raises(ValueError, match="device is cuda and torch finds no CUDA GPU.*cpu or auto"):
        pick_device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(
    ("name", "shape"),
    # For images of 8x8 ResNet-18 ends in 1x1, and normalising a batch of two there enlarges rounding errors too much.
    [("digits-cnn", (1, 8, 8)), ("cnn2", (3, 8, 8)), ("resnet18", (3, 16, 16))],
)
def test_a_gpu_matches_the_cpu(name, shape, optimizer):
    x, y = images(22, shape)
    results = []
    for device in (torch.device("cpu"), pick_device("cuda")):
        model = make_model(name, shape, 10, seed=0).double().to(device)
        there = x.double().to(device), y.to(device)
        loss = train(
            model,
            *there,
            epochs=2,
            batch_size=10,
            optimizer=optimizer,
            learning_rate=0.01,
            momentum=0.9,
            proximal_mu=0.1,
            generator=order(),
        )
        assert next(model.parameters()).device.type == device.type
        results.append((loss, evaluate(model, *there), get_arrays(model)))
    (loss, evaluation, arrays), (gpu_loss, gpu_evaluation, gpu_arrays) = results
    assert gpu_loss == pytest.approx(loss, rel=1e-6)
    assert gpu_evaluation == pytest.approx(evaluation, rel=1e-6)
    for key, array in arrays.items():
        np.testing.assert_allclose(gpu_arrays[key], array, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_learns_on_a_gpu(precision):
    device = pick_device("cuda")
    x, y = (tensor.to(device) for tensor in images(60))
    model = make_model("digits-cnn", (1, 8, 8), 10, seed=0).to(device)
    train(
        model,
        x,
        y,
        epochs=20,
        batch_size=10,
        optimizer="adam",
        learning_rate=0.003,
        precision=precision,
        generator=order(),
    )
    assert evaluate(model, x, y)[0] > 0.95


@pytest.mark.gpu
def test_arrays_move_between_gpu_and_host():
    model = make_model("resnet18", (3, 8, 8), 10, seed=0).to(pick_device("cuda"))
    arrays = get_arrays(make_model("resnet18", (3, 8, 8), 10, seed=1))
    set_arrays(model, arrays)
    returned = get_arrays(model)
    assert all(np.array_equal(returned[name], arrays[name]) for name in arrays)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in returned.values())


@pytest.mark.parametrize(("epochs", "steps"), [(0, 0), (3, 0), (0, 5)])
@pytest.mark.parametrize("batch_size", [1, 4, 9, 10, 11])
def test_batches_are_counted_without_drawing_them(epochs, steps, batch_size) -> None:
    drawn = list(batches((torch.arange(10),), epochs, steps, batch_size, torch.Generator()))
    assert num_batches(10, epochs, steps, batch_size) == len(drawn)


def test_the_gradient_is_the_mean_over_all_samples_with_a_smaller_last_batch() -> None:
    model, x = torch.nn.Linear(4, 3), torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    whole, parts = (mean_gradient(model, x, torch.arange(20) % 3, size) for size in (20, 8))
    assert parts["weight"] == pytest.approx(whole["weight"], abs=1e-6)


# Much work in one message


def test_nothing_is_drawn_long_before_it_is_used(monkeypatch):
    drawn = []
    orders, places = torch.randperm, torch.randint

    def limited(draw):
        def counting(*arguments, **options):
            drawn.append(draw(*arguments, **options))
            assert sum(each.numel() for each in drawn) <= 2 * training.DRAWN
            return drawn[-1]

        return counting

    monkeypatch.setattr(torch, "randperm", limited(orders))
    monkeypatch.setattr(torch, "randint", limited(places))
    samples = (torch.arange(1000.0),)
    for epochs, steps in ((400_000, 0), (0, 40_000_000)):
        drawn.clear()
        assert len(next(batches(samples, epochs, steps, 10, order()))[0]) == 10


@pytest.mark.parametrize(("epochs", "steps"), [(7, 0), (0, 40)])
def test_the_bits_do_not_depend_on_how_many_are_drawn_or_added_up_at_a_time(monkeypatch, epochs, steps):
    def trained() -> tuple[float, bytes]:
        model = two_weights()
        x = torch.linspace(-1, 1, 43)[:, None]
        loss = train(model, x, (x[:, 0] > 0).long(), **SETTINGS | {"epochs": epochs}, steps=steps, generator=order())
        return loss, model.weight.detach().numpy().tobytes()

    loss, weights = trained()
    monkeypatch.setattr(training, "DRAWN", 90)
    assert trained() == (loss, weights)
    monkeypatch.setattr(training, "LOSSES_KEPT", 3)
    again = trained()
    assert again == (pytest.approx(loss, rel=1e-12), weights)


def test_much_training_takes_no_memory_before_its_first_step():
    class First(Exception):
        pass

    def first() -> torch.Tensor:
        raise First

    x = torch.zeros(1000, 1)
    tracemalloc.start()
    try:
        with pytest.raises(First):
            train(
                two_weights(), x, torch.zeros(1000, dtype=torch.int64), **SETTINGS | {"epochs": 400_000},
                generator=order(), term=first,
            )  # fmt: skip
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
