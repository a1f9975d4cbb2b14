"""The metrics that clients report of their models, by name: what each means, and which values are better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard

from .extensions import Registry


@dataclass(frozen=True)
class Metric:
    """A metric of predictions on a client's test data.

    Attributes
    ----------
    title : str
        Its name in tables and pictures, without unit.
    meaning : str
        A phrase.
    higher : bool
        Whether higher values are better.
    percent : bool
        Whether it is shown in percent.
    low, high : float
        Its smallest and largest possible value.
    """

    title: str
    meaning: str
    higher: bool = True
    percent: bool = False
    low: float = 0.0
    high: float = math.inf

    def holds(self, value: object) -> TypeGuard[int | float]:
        """Return whether a reported value can be one of the metric: clients may report anything."""
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and self.low <= value <= self.high
        )

    @property
    def values(self) -> str:
        """The possible values, as text."""
        if math.isinf(self.low):
            return "a number" if math.isinf(self.high) else f"a number up to {self.high:g}"
        return f"a number from {self.low:g}" + ("" if math.isinf(self.high) else f" to {self.high:g}")

    @property
    def worst_decile(self) -> float:
        """The quantile, over clients, that a tenth of them does not reach."""
        return 0.1 if self.higher else 0.9

    @property
    def decile(self) -> str:
        """Name of the decile with the worst values."""
        return "bottom decile" if self.higher else "top decile"

    def worse(self, first: float, second: float) -> bool:
        """Return whether the first value is worse than the second; no value is worse than NaN."""
        return first < second if self.higher else first > second

    def improves(self, value: tuple[float, float], best: tuple[float, float]) -> bool:
        """Return whether a model is better than the best one so far; each has a value of the metric, and a loss.

        Of equal values, which few validation samples often give, that with the lower loss is better; so it is where the
        samples do not define the metric, and the values are NaN. A loss of NaN represents no model so far.
        """
        if math.isnan(best[1]):
            return not math.isnan(value[1])
        same = value[0] == best[0] or math.isnan(value[0]) or math.isnan(best[0])
        return value[1] < best[1] if same else self.worse(best[0], value[0])

    def better(self, first: float, second: float) -> float:
        """Return the better of two values."""
        return max(first, second) if self.higher else min(first, second)

    def text(self, value: float, digits: int = 1) -> str:
        """Return a value as text: in percent with this number of digits, or with four significant digits."""
        return f"{value:.{digits}%}" if self.percent else f"{value:.4g}"


METRICS: Registry[Metric] = Registry(
    "kindred.metrics",
    Metric,
    {
        "accuracy": Metric("accuracy", "share of predictions that are right", percent=True, high=1),
        "balanced-accuracy": Metric(
            "balanced accuracy", "mean over the classes of the share predicted rightly", percent=True, high=1
        ),
        "auroc": Metric("AUROC", "area under the ROC curve; of several classes the mean, each against others", high=1),
        "average-precision": Metric("average precision", "area under the precision-recall curve", high=1),
        "f1": Metric("F1", "harmonic mean of precision and recall; of several classes the mean", high=1),
        "sensitivity": Metric("sensitivity", "share of the second class predicted as it", percent=True, high=1),
        "specificity": Metric("specificity", "share of the first class predicted as it", percent=True, high=1),
        "log-loss": Metric("log-loss", "mean cross-entropy", higher=False),
        "brier": Metric("Brier score", "mean squared error of the probabilities", higher=False, high=2),
        "calibration-error": Metric(
            "calibration error", "mean distance of accuracy from confidence", higher=False, high=1
        ),
        "loss": Metric("loss", "mean loss of the samples", higher=False, low=-math.inf),
        "rmse": Metric("RMSE", "root of the mean squared error, in the target's unit", higher=False),
        "mae": Metric("MAE", "mean absolute error, in the target's unit", higher=False),
        "r2": Metric("R2", "share of the targets' variance that is explained", low=-math.inf, high=1),
        "bits": Metric("bits", "mean cross-entropy of the next token, in bits", higher=False),
    },
)
"""The metrics by name."""
