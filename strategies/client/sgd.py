"""Common parts of the methods whose clients make their own steps of plain SGD."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


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
