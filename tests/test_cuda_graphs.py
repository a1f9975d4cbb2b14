"""Training steps as CUDA graphs: which are captured and when, and that results do not change."""

from __future__ import annotations

import copy
import gc
import logging
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from kindred import REGISTRY
from kindred.client import cuda_graphs as graphs
from kindred.client.models import make_model
from kindred.client.training import get_arrays, pick_device, set_arrays, train, trained_weights

from . import test_client
from .scores import evaluate
from .test_conformance import everything
from .test_training import images, one_thread, order  # noqa: F401

SETTINGS = {"epochs": 3, "batch_size": 4, "optimizer": "adam", "learning_rate": 0.01}


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 36, 10)
        )


class Capture:
    """Stand-in for a capture on the CPU: does the warm-up steps, and replays by calling the step itself."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, step):
        for _ in range(graphs.WARM_UP):
            step()
        self.captures += 1

        def replay():
            self.replays += 1
            return step()

        return replay


@pytest.fixture
def capture(monkeypatch):
    """Capture from the first step on."""
    capture = Capture()
    monkeypatch.setitem(graphs.CAPTURE, "cpu", capture)
    monkeypatch.setattr(graphs, "PAYS", 1)
    return capture


def message(model: nn.Module, seed: int, n: int, **settings):
    """Train as for one message, from its own weights and data; return all results."""
    device = next(model.parameters()).device
    set_arrays(model, get_arrays(network(seed)))
    x, y = (part.to(device) for part in images(n, seed=seed))
    settings = SETTINGS | settings
    others = trained_weights(network(seed + 100).to(device))
    for name in ("towards", "correction"):
        if settings.pop(name, False):
            settings[name] = [0.1 * tensor for tensor in others]
    if settings.pop("weighted", False):
        settings["sample_weights"] = torch.linspace(0.1, 2.0, n, device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        loss = train(model, x, y, generator=order(seed), **settings)
        drawn = torch.rand(1, device=device).item()  # the final random state
    return loss, drawn, get_arrays(model)


def assert_same(one, two) -> None:
    assert one[:2] == two[:2]
    assert {name for name in one[2] if not np.array_equal(one[2][name], two[2][name])} == set()


CASES = {
    "adam": {},
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "weight decay": {"weight_decay": 0.1},
    "sgd with weight decay": {"optimizer": "sgd", "weight_decay": 0.1},
    "proximal": {"proximal_mu": 0.5},
    "towards": {"proximal_mu": 0.5, "towards": True},
    "correction": {"optimizer": "sgd", "correction": True},
    "weights": {"weighted": True},
    "smoothed": {"label_smoothing": 0.1},
    "weights, smoothed": {"weighted": True, "label_smoothing": 0.1},
    "all": {
        "optimizer": "sgd",
        "momentum": 0.5,
        "proximal_mu": 0.5,
        "towards": True,
        "correction": True,
        "weighted": True,
    },
    "bfloat16": {"precision": "bfloat16"},
    "steps": {"epochs": 0, "steps": 7},
    "steps of more than all": {"epochs": 0, "steps": 5, "batch_size": 20},
}
SIZES = {8: 2, 11: 2, 9: 1, 3: 1}  # samples: batches of the usual size in an epoch, of 4, 4+3, 4+5, 3


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_captured_training_gives_the_same_bits(capture, monkeypatch, case, n):
    settings = CASES[case]
    model = network()
    made = [message(model, seed, n, **settings) for seed in (1, 2)]
    usual = settings.get("steps") or 3 * SIZES[n]
    assert (capture.captures, capture.replays) == (1, 2 * usual)
    monkeypatch.delitem(graphs.CAPTURE, "cpu")
    for seed, one in zip((1, 2), made):
        assert_same(one, message(network(), seed, n, **settings))
    assert capture.replays == 2 * usual


@pytest.mark.parametrize("settings", [{}, {"optimizer": "sgd", "momentum": 0.9}])
def test_an_optimiser_that_is_kept_continues_in_a_graph_with_the_same_bits(capture, monkeypatch, settings):
    def rounds(model):
        memory: list[torch.Tensor] = []
        made = [message(model, seed, 11, memory=memory, **settings) for seed in (1, 2, 1)]
        return made, [tensor.numpy() for tensor in memory]

    made, memory = rounds(network())
    assert capture.captures == 1 and capture.replays > 0
    monkeypatch.delitem(graphs.CAPTURE, "cpu")
    plain, plain_memory = rounds(network())
    for one, two in zip(made, plain, strict=True):
        assert_same(one, two)
    assert all(np.array_equal(one, two) for one, two in zip(memory, plain_memory, strict=True))
    assert any(not np.array_equal(made[0][2][name], made[2][2][name]) for name in made[0][2])


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_gives_the_same_bits_with_graphs(capture, monkeypatch, name):
    graphs.graphs_by_module.clear()
    made = everything(test_client.run(name))
    monkeypatch.delitem(graphs.CAPTURE, "cpu")
    assert made == everything(test_client.run(name))
    steps_of_its_own = {"apfl", "perfed-ckt"}
    assert (capture.replays > 0) == (name not in steps_of_its_own)


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.02},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.5},
        {"weight_decay": 0.1},
        {"proximal_mu": 1.0},
        {"proximal_mu": 2.0},
        {"correction": True},
        {"weighted": True},
        {"precision": "bfloat16"},
        {"batch_size": 3},
        {"label_smoothing": 0.1},
    ],
)
def test_each_setting_has_its_own_graph(capture, monkeypatch, change):
    model = network()
    message(model, 1, 8)
    changed, again = message(model, 2, 8, **change), message(model, 1, 8)
    assert capture.captures == 2
    monkeypatch.delitem(graphs.CAPTURE, "cpu")
    assert_same(changed, message(network(), 2, 8, **change))
    assert_same(again, message(network(), 1, 8))


def freeze(model: nn.Module) -> None:
    model[0].requires_grad_(False)


def move(model: nn.Module) -> None:
    model[5].weight.data = model[5].weight.data.clone()


def move_buffer(model: nn.Module) -> None:
    model[1].running_mean = model[1].running_mean.clone()


@pytest.mark.parametrize("change", [freeze, move, move_buffer])
def test_a_changed_module_gets_another_graph(capture, monkeypatch, change):
    model, expected = network(), network()
    message(model, 1, 8)
    change(model)
    change(expected)
    made = message(model, 2, 8)
    assert capture.captures == 2
    monkeypatch.delitem(graphs.CAPTURE, "cpu")
    assert_same(made, message(expected, 2, 8))


def test_a_step_is_captured_only_if_that_saves_time(capture, monkeypatch):
    monkeypatch.setattr(graphs, "PAYS", 10)
    model = network()
    counts = []
    for n in (11, 11, 8, 11):  # 6 full batches, of 4, in each message
        message(model, 1, n)
        counts.append((capture.captures, capture.replays))
    assert counts == [(0, 0), (1, 6), (1, 12), (1, 18)]
    message(model, 1, 40)  # 30 of the same
    message(model, 1, 8, learning_rate=0.5)  # 6 of another kind
    assert (capture.captures, capture.replays) == (1, 48)


def test_nothing_is_captured_on_an_unsupported_device_or_with_an_extra_loss_term(capture, monkeypatch):
    x, y = images(8)
    model = network()
    train(model, x, y, **SETTINGS, generator=order(), term=lambda: model[5].weight.square().sum())
    monkeypatch.delitem(graphs.CAPTURE, "cpu")
    train(model, x, y, **SETTINGS, generator=order())
    assert capture.captures == 0
    assert set(graphs.CAPTURE) == {"cuda"}


@pytest.fixture
def log_lines():
    """Lines of the log; Flower's log does not reach pytest."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Lines()
    logging.getLogger("flwr").addHandler(handler)
    yield lines
    logging.getLogger("flwr").removeHandler(handler)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_step_that_cannot_be_captured_is_trained_normally_and_tried_once(
    capture, monkeypatch, log_lines, steps_before
):
    tried = []

    def fails(step):
        tried.append(step)
        for _ in range(steps_before):
            step()
        try:
            raise RuntimeError("operation not permitted\nwhen capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error")  # as at the end of a capture

    monkeypatch.setitem(graphs.CAPTURE, "cpu", fails)
    model = network()
    made = [message(model, seed, 11, optimizer="sgd", momentum=0.5) for seed in (1, 2)]
    made.append(message(model, 3, 11))  # another kind of step of the same module
    assert len(tried) == 1
    assert log_lines == [
        "kindred: a step of Sequential cannot be captured as a CUDA graph and runs without one: operation not permitted"
    ]
    monkeypatch.delitem(graphs.CAPTURE, "cpu")
    for seed, one in zip((1, 2), made):
        assert_same(one, message(network(), seed, 11, optimizer="sgd", momentum=0.5))
    assert_same(made[2], message(network(), 3, 11))


def test_a_step_that_fails_without_capture_raises_its_error(capture):
    model = network()
    x, y = images(8)
    with pytest.raises(IndexError, match=r"Target \d+ is out of bounds"):
        train(model, x, y + 10, **SETTINGS, generator=order())


def test_graphs_are_freed_with_their_module_and_are_no_part_of_its_state(capture, monkeypatch):
    class Replay:
        def __call__(self):
            return torch.zeros(())

    replays = []

    def recorded(step):
        replay = Replay()
        replays.append(weakref.ref(replay))
        return replay

    monkeypatch.setitem(graphs.CAPTURE, "cpu", recorded)
    model = network()
    message(model, 1, 8)
    other = copy.deepcopy(model)
    assert model in graphs.graphs_by_module and other not in graphs.graphs_by_module
    gc.collect()
    assert replays[0]() is not None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and replays[0]() is None


def test_a_module_keeps_only_the_most_recently_used_graphs(capture):
    model = network()
    for rate in (0.01, 0.02, 0.03, 0.04, 0.01, 0.05, 0.01):  # four; the fifth puts 0.02 out
        message(model, 1, 8, learning_rate=rate)
    assert graphs.GRAPHS_KEPT == 4 and capture.captures == 5
    message(model, 1, 8, learning_rate=0.02)
    assert capture.captures == 6


# On a GPU


def on_gpu(monkeypatch, pays: float, seeds=(1, 2), n: int = 11, model: nn.Module | None = None, **settings):
    """Train one module for several messages; return the results and the final random state."""
    monkeypatch.setattr(graphs, "PAYS", pays)
    model = (network() if model is None else model).to(pick_device("cuda"))
    return model, [message(model, seed, n, **settings) for seed in seeds]


def num_graphs(model: nn.Module) -> int:
    return len(graphs.graphs_of(model))


def assert_near(made, expected, tolerance: float = 1e-4) -> None:
    for one, two in zip(made, expected, strict=True):
        assert one[0] == pytest.approx(two[0], rel=tolerance)
        assert one[1] == two[1]  # the same count of random numbers was drawn: dropout uses the message's seed
        for name, array in two[2].items():
            np.testing.assert_allclose(one[2][name], array, rtol=tolerance, atol=tolerance, err_msg=name)


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize("case", CASES)
    def test_captured_training_gives_the_same_bits(self, monkeypatch, case, n):
        settings = {"optimizer": "sgd"} | CASES[case]  # Adam divides by gradients that are nearly 0
        model, made = on_gpu(monkeypatch, 1, n=n, **settings)
        assert num_graphs(model) == 1
        plain, expected = on_gpu(monkeypatch, float("inf"), n=n, **settings)
        assert num_graphs(plain) == 0
        assert_near(made, expected, 2e-2 if case == "bfloat16" else 1e-4)

    def test_captured_adam_gives_nearly_the_same_parameters(self, monkeypatch):
        made, expected = (on_gpu(monkeypatch, pays, optimizer="adam")[1] for pays in (1, float("inf")))
        for one, two in zip(made, expected, strict=True):
            assert one[0] == pytest.approx(two[0], rel=1e-2)
            for name, array in two[2].items():
                # 9 steps of at most the learning rate each; few may have the opposite sign.
                assert np.mean(np.abs(one[2][name] - array) > 1e-4) < 0.02, name

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    @pytest.mark.parametrize(("name", "shape"), [("mcmahan-cnn", (1, 8, 8)), ("resnet18", (3, 8, 8))])
    def test_captured_training_learns_as_well(self, monkeypatch, name, shape, precision):
        device = pick_device("cuda")
        x, y = (part.to(device) for part in images(100, shape))
        accuracies = []
        for pays in (1, float("inf")):
            monkeypatch.setattr(graphs, "PAYS", pays)
            model = make_model(name, shape, 10, seed=0).to(device)
            train(
                model,
                x,
                y,
                epochs=20,
                batch_size=20,
                optimizer="adam",
                learning_rate=1e-3,
                precision=precision,
                generator=order(),
            )
            accuracies.append(evaluate(model, x, y)[0])
        assert min(accuracies) > 0.9 and abs(accuracies[0] - accuracies[1]) < 0.05

    @pytest.mark.parametrize("kind", ["waits", "draws on the host"])
    def test_what_cannot_be_captured_is_trained_as_without(self, monkeypatch, log_lines, kind):
        class Stubborn(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = network()

            def forward(self, x):
                logits = self.inner(x)
                if kind == "waits":
                    return logits * 1.0 if logits.sum().item() > 0 else logits
                return logits * (1.0 + 0.0 * random.random())

        settled, before = on_gpu(monkeypatch, 1, optimizer="sgd")  # has a graph that draws random numbers
        runs = []
        for pays in (1, float("inf")):
            monkeypatch.setattr(graphs, "PAYS", pays)
            device = pick_device("cuda")
            model = Stubborn().to(device)
            made = []
            for seed in (1, 2):
                set_arrays(model.inner, get_arrays(network(seed)))
                x, y = (part.to(device) for part in images(11, seed=seed))
                with torch.random.fork_rng(devices=[device]):
                    torch.manual_seed(seed)
                    loss = train(model, x, y, **SETTINGS | {"optimizer": "sgd"}, generator=order(seed))
                    made.append((loss, torch.rand(1, device=device).item(), get_arrays(model)))
            runs.append(made)
        assert len(log_lines) == 1 and "Stubborn" in log_lines[0]
        assert_near(*runs)
        monkeypatch.setattr(graphs, "PAYS", 1)
        assert_near([message(settled, seed, 11, optimizer="sgd") for seed in (1, 2)], before)
