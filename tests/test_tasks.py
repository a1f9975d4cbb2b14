"""Every method on a small task of each kind: a table with classes, signals with several labels, numbers, tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn

from kindred import REGISTRY, InlineGrid, Site, make_client_app
from kindred.client.training import get_arrays
from kindred.messages import to_record
from kindred.metrics import METRICS
from kindred.objectives import Classes, Labels, NextToken, Number, Objective

from .grids import ShuffledGrid
from .test_conformance import everything, make

CLIENTS, TRAIN, TEST, PUBLIC = 4, 40, 40, 24
SETTINGS = {"local-epochs": 4, "batch-size": 8, "optimizer": "adam", "learning-rate": 0.02, "device": "cpu"}
# Steps of plain SGD are made for these methods' own problems; on these they need other sizes.
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "scaffold": {"sgd_learning_rate": 0.1},
    "apfl": {"sgd_learning_rate": 0.1},
    "per-fedavg": {"sgd_learning_rate": 0.1},
    "perfed-ckt": {"local_steps": 20},
    "federico": {"m_step": "epochs", "likelihood": "mean", "temperature": 1.0},
}


class LastOfSequence(nn.Module):
    """Logits of the next token from a sequence's last two tokens."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 6)
        self.head = nn.Linear(12, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x[:, -2:]).flatten(1))


@dataclass(frozen=True)
class Kind:
    """A small task.

    Attributes
    ----------
    objective : Objective
    network : callable
        Returns a module.
    draw : callable
        Takes a generator and a number; returns inputs and targets.
    trivial : float
        The headline metric of the best constant prediction, or worse.
    """

    objective: Objective
    network: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], tuple[torch.Tensor, torch.Tensor]]
    trivial: float


def table(rng: torch.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 5, generator=rng)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def signals(rng: torch.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 2, 8, generator=rng) + torch.randn(n, 2, 1, generator=rng)
    return x, (x.mean(dim=2) > 0).float()  # (n, 2)


def numbers(rng: torch.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 3, generator=rng)
    return x, (x[:, 0] - x[:, 1]) / 2**0.5  # standardised


def sequences(rng: torch.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(4, (n, 6), generator=rng)
    return x, (x[:, -1] + 1) % 4


def seeded(make_network: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make_network()

    return build


KINDS = {
    "table": Kind(Classes(2), seeded(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))), table, 0.65),
    "signal": Kind(
        Labels(2), seeded(lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(24, 2))), signals, 0.65
    ),
    "number": Kind(
        Number(1, mean=100.0, deviation=10.0),
        seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))),
        numbers,
        9.0,  # in the target's unit: its deviation is 10
    ),
    "tokens": Kind(NextToken(4), seeded(lambda: LastOfSequence(4)), sequences, 0.4),
}


@functools.cache
def app_of(kind: str):
    about = KINDS[kind]
    public = about.draw(torch.Generator().manual_seed(99), PUBLIC)[0]

    def load_site(context) -> Site:
        x, y = about.draw(torch.Generator().manual_seed(context.node_config["partition-id"]), TRAIN + TEST)
        train, test = (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])
        return Site(about.network, train, test, public=public, objective=about.objective)

    return make_client_app(load_site), public


def run(name: str, kind: str, rounds: int = 4, shuffled: bool = False):
    about = KINDS[kind]
    app, public = app_of(kind)
    own = {"metric": about.objective.metric, **OWN_SETTINGS.get(name, {})}
    if REGISTRY[name].distils:
        own["objective"] = about.objective
    strategy = make(name, about.network, public, **own)
    config, initial = ConfigRecord(SETTINGS), to_record(get_arrays(about.network()))
    grid = ShuffledGrid(app, CLIENTS, seed=1) if shuffled else InlineGrid(app, CLIENTS)
    strategy.start(grid, initial, rounds, 60, config, config)
    return strategy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_learns_a_task_of_each_kind(name, kind) -> None:
    about = KINDS[kind]
    metric = METRICS[about.objective.metric]
    strategy = run(name, kind)
    assert all(row["status"] == "ok" for row in strategy.history.rows)
    reached = strategy.history.last_values()
    assert list(reached) == list(range(CLIENTS)) and all(map(metric.holds, reached.values()))
    assert metric.worse(about.trivial, float(np.mean(list(reached.values()))))


@pytest.mark.parametrize("name", REGISTRY)
def test_the_order_of_replies_changes_no_bit_of_models_of_a_number(name) -> None:
    assert everything(run(name, "number", rounds=2)) == everything(run(name, "number", rounds=2, shuffled=True))


def test_a_client_whose_targets_do_not_fit_its_network_takes_no_part() -> None:
    about = KINDS["signal"]

    def load_site(context) -> Site:
        client = context.node_config["partition-id"]
        x, y = about.draw(torch.Generator().manual_seed(client), 20)
        y = {0: y, 1: y, 2: y[:, :1], 3: y + 0.5}[client]
        return Site(about.network, (x, y), (x, y), objective=about.objective)

    strategy = make("fedavg")
    strategy.start(InlineGrid(make_client_app(load_site), 4), to_record(get_arrays(about.network())), 1, 60)
    assert strategy.history.left_out == {
        2: "it cannot introduce itself: ValueError: train: targets have the shape (20, 1), its network has 2 labels",
        3: "it cannot introduce itself: ValueError: train: targets of labels have a value other than 0 and 1",
    }


def test_a_client_with_another_task_takes_no_part() -> None:
    about = KINDS["table"]

    def load_site(context) -> Site:
        client = context.node_config["partition-id"]
        x, y = about.draw(torch.Generator().manual_seed(client), 20)
        texts = {} if client == 0 else {"task": "a table" if client < 3 else "another table"}
        return Site(about.network, (x, y), (x, y), objective=about.objective, about=texts)

    expected, other = (sha256(text.encode()).hexdigest()[:16] for text in ("a table", "another table"))
    strategy = make("fedavg", task=expected)
    strategy.start(InlineGrid(make_client_app(load_site), 4), to_record(get_arrays(about.network())), 1, 60)
    assert strategy.history.left_out == {
        3: f"its task has the fingerprint {other}, expected {expected}: its schema differs"
    }
