"""What the methods have in common that are made of plain SGD: a step size of their own, whatever clients are set to."""

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
    "step size of the plain SGD that they are made of, whatever optimizer and learning-rate say",
    trial=0.1,
)

# --- The mathematics ----------------------------------------------------------------------------------


def descend(weights: Iterable[Tensor], gradients: Iterable[Tensor], step_size: float) -> None:
    """w = w - eta g, in place, with the bits that `training.train` gives."""
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.sub_(gradient, alpha=step_size)


class MeanLoss:
    """The mean over the samples of batches. Nothing waits for the device before the end."""

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._count = 0

    def add(self, loss: Tensor, count: int) -> None:
        """Add the mean loss of a batch of so many samples."""
        self._total = self._total + count * loss.double()
        self._count += count

    def result(self) -> float:
        """The mean; NaN of nothing."""
        return float(self._total) / self._count if self._count else math.nan


# --- The server ---------------------------------------------------------------------------------------


class PlainSGDShared(Shared, total=False):
    """The arguments of `PlainSGD`."""

    sgd_learning_rate: float


class PlainSGD(FedAvg):
    """FedAvg whose clients are told the step size of their SGD.

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
