"""A number that nine of ten patients stay below: the progression of diabetes after a year, from ten measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.metrics import mean_pinball_loss

from kindred.data.dataset import Dataset
from kindred.data.schema import Column, Schema
from kindred.data.sources import Source
from kindred.metrics import Metric
from kindred.objectives import Number, reduced

if TYPE_CHECKING:
    from torch import Tensor

SHARE = 0.9


@dataclass(frozen=True)
class UpperBound(Number):
    """A bound that a share of 0.9 of the numbers does not exceed: their quantile, given the inputs."""

    name = "upper-bound"
    metric = "pinball"
    reports: ClassVar[tuple[str, ...]] = ("pinball", "covered", "loss")

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
        """Return the pinball loss: a number above its bound costs nine times as much as one below."""
        above = targets.reshape(-1) - outputs[:, 0]  # (n,)
        return reduced((SHARE * above).maximum((SHARE - 1) * above), reduction)

    def losses(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the pinball loss of each sample."""
        above = targets - predictions[:, 0]
        return np.maximum(SHARE * above, (SHARE - 1) * above)

    def metrics(self, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return the pinball loss in the target's unit, and the share of numbers that do not exceed their bound."""
        bounds, true = self.readable(predictions)[:, 0], self.readable(targets)
        return {"pinball": mean_pinball_loss(true, bounds, alpha=SHARE), "covered": float((true <= bounds).mean())}

    def prepare(self, x: np.ndarray) -> np.ndarray:
        """Return measurements without extreme values: most are within 0.1."""
        return np.clip(x, -0.1, 0.1)


PINBALL = Metric("pinball loss", "cost of bounds that are exceeded or too high, in the target's unit", higher=False)


def read(data_dir: str) -> Dataset:
    """Return all 442 patients, every third for test; data-dir is not used, as they are part of scikit-learn."""
    patients = load_diabetes()
    x, y = patients.data, patients.target
    test = np.arange(len(y)) % 3 == 2
    schema = Schema(tuple(Column(name) for name in patients.feature_names))
    objective = UpperBound(1, names=("progression",))
    return Dataset(x[~test], y[~test], x[test], y[test], objective, kind="table", schema=schema)


DIABETES = Source("10 measurements of patients with diabetes, a number, 295 + 147 samples, part of scikit-learn", read)
