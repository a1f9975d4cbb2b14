"""Clients so small that their rounds can be computed by hand, here with NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp

from kindred import InlineGrid, PersonalizedStrategy, Site, make_client_app
from kindred.messages import to_record

RATE = 0.5
SETTINGS = {"local-epochs": 1, "batch-size": 100, "optimizer": "sgd", "learning-rate": RATE, "device": "cpu"}


class TwoWeights(torch.nn.Module):
    """Scores w_0 x and w_1 x of two classes, for a number x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight  # (n, 1) by (2,)


@dataclass(frozen=True)
class Client:
    """A client with equal samples: a number, its class, the number of samples, and its label smoothing."""

    x: float
    label: int
    count: int = 1
    validation: tuple[float, int] | None = None
    smoothing: float = 0.0

    def site(self) -> Site:
        held_out = None if self.validation is None else samples(*self.validation, 1)
        train = samples(self.x, self.label, self.count)
        return Site(TwoWeights, train, samples(self.x, self.label, 2), validation=held_out)

    def loss(self, w: np.ndarray, q: float = 1.0) -> float:
        """Return q times the loss of a sample."""
        return -q * np.log(probabilities(w, self.x)[self.label])

    def step(self, w: np.ndarray, q: float = 1.0) -> np.ndarray:
        """Return the weights (2,) after an epoch: one step on the mean of q times the loss."""
        label = (1 - self.smoothing) * np.eye(2)[self.label] + self.smoothing / 2
        return w - RATE * q * self.x * (probabilities(w, self.x) - label)


def samples(x: float, label: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count, 1), float(x)), torch.full((count,), label)


def probabilities(w: np.ndarray, x: float) -> np.ndarray:
    """Probabilities of the two classes, shape (2,)."""
    powers = np.exp(w * x)
    return powers / powers.sum()


def model(w: Sequence[float]) -> ArrayRecord:
    return to_record({"weight": np.array(w, np.float32)})


def weights_of(record: ArrayRecord) -> np.ndarray:
    return record["weight"].numpy()


def app_of(clients: Sequence[Client]) -> ClientApp:
    sites = [client.site() for client in clients]
    return make_client_app(lambda context: sites[context.node_config["partition-id"]])


def start(
    strategy: PersonalizedStrategy,
    clients: Sequence[Client],
    initial: Sequence[float],
    rounds: int = 1,
    grid: InlineGrid | None = None,
    **more,
) -> PersonalizedStrategy:
    settings = ConfigRecord(SETTINGS)
    grid = grid or InlineGrid(app_of(clients), len(clients), {"clients": repr(clients)})
    strategy.start(grid, model(initial), rounds, 60, settings, settings, **more)
    return strategy
