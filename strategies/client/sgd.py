"""Common parts of the methods that use plain SGD, with a step size that is independent of the clients' settings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Unpack

from kindred.baselines.fedavg import FedAvg
from kindred.engine.arguments import Shared
from kindred.messages import ClientId
from kindred.settings import Setting, above

if TYPE_CHECKING:
    from torch import Tensor

SGD_LEARNING_RATE = Setting(
    "sgd_learning_rate",
    0.05,
    above(0),
    "step size of these methods' plain SGD, which ignores optimizer and learning-rate",
    trial=0.1,
)

# --- The mathematics ----------------------------------------------------------------------------------


def descend(weights: Iterable[Tensor], gradients: Iterable[Tensor], step_size: float) -> None:
    """Compute w = w - eta g in place, bit for bit as `training.train` does."""
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.sub_(gradient, alpha=step_size)


class MeanLoss:
    """The mean loss over the samples of batches. It does not wait for the device before `result`."""

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._count = 0

    def add(self, loss: Tensor, count: int) -> None:
        """Add the mean loss of a batch of `count` samples."""
        self._total = self._total + count * loss.double()
        self._count += count

    def result(self) -> float:
        """Return the mean; NaN if nothing was added."""
        return float(self._total) / self._count if self._count else math.nan


# --- The server ---------------------------------------------------------------------------------------


class PlainSGDShared(Shared, total=False):
    """The arguments of `PlainSGD`."""

    sgd_learning_rate: float


class PlainSGD(FedAvg):
    """FedAvg that sends clients the step size of their SGD.

    Parameters
    ----------
    sgd_learning_rate : float (default: 0.05)
        Above 0.
    **shared
        Those of `FedAvg`.
    """

    def __init__(self, *, sgd_learning_rate: float = SGD_LEARNING_RATE.default, **shared: Unpack[Shared]) -> None:
        super().__init__(**shared)
        self.sgd_learning_rate = SGD_LEARNING_RATE.check(sgd_learning_rate)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {**super().round_config(server_round, client), SGD_LEARNING_RATE.key: self.sgd_learning_rate}
