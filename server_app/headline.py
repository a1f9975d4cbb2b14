"""The headline metric of a run, as tables, pictures and texts show it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kindred.engine.history import HeadlineColumns
from kindred.metrics import METRICS, Metric
from kindred.objectives import Objective
from kindred.scores import OF_TWO_CLASSES

from .config import ConfigError


def significant(value: float, digits: int = 4) -> str:
    """Return a number rounded to this many significant digits, up to 10^10 without an exponent."""
    return f"{float(f'{value:.{digits}g}'):.10g}"


@dataclass(frozen=True)
class Headline:
    """A headline metric, as tables, pictures and texts show it: in percent, or with four significant digits.

    Parameters
    ----------
    name : str
        One of `kindred.metrics.METRICS`.

    Raises
    ------
    ConfigError
        There is no such metric.
    """

    name: str = "accuracy"

    def __post_init__(self) -> None:
        if self.name not in METRICS:
            raise ConfigError(f"metric is {self.name!r}, allowed: {', '.join(METRICS)}")

    @classmethod
    def chosen(cls, name: str, objective: Objective) -> Headline:
        """Return the metric that the setting `metric` names; ConfigError if clients do not report it."""
        if name == "auto":
            return cls(objective.metric)
        of_two = OF_TWO_CLASSES if objective.num_outputs > 2 else ()
        reported = [each for each in objective.reports if each not in of_two]
        if name not in reported:
            classes = f" and {objective.num_outputs} classes" if name in of_two and objective.has_classes else ""
            allowed = ", ".join(("auto", *reported))
            raise ConfigError(f"metric is {name!r}, allowed with the objective {objective.name}{classes}: {allowed}")
        return cls(name)

    @classmethod
    def of(cls, runs: Iterable[Mapping[str, Any]]) -> Headline:
        """Return the metric of runs, from their summaries; accuracy where none is named.

        Raises
        ------
        ConfigError
            They have different ones, or one that does not exist here.
        """
        names = sorted({run.get("metric", "accuracy") for run in runs})
        if len(names) > 1:
            raise ConfigError(f"the runs have the headline metrics {', '.join(names)}, allowed: one for all")
        return cls(*names)

    @property
    def metric(self) -> Metric:
        """Meaning and direction."""
        return METRICS[self.name]

    @property
    def columns(self) -> HeadlineColumns:
        """Names of its columns in rounds.csv and summary.json."""
        return HeadlineColumns.of(self.name)

    @property
    def factor(self) -> float:
        """Factor between a value and the number that is shown."""
        return 100.0 if self.metric.percent else 1.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest possible number that is shown."""
        return self.factor * self.metric.low, self.factor * self.metric.high

    @property
    def unit(self) -> str:
        """The word after "mean" or "best" in a column's title: "%", or the metric's title."""
        return "%" if self.name == "accuracy" else self.axis

    @property
    def axis(self) -> str:
        """Name of an axis."""
        return f"{self.metric.title} (%)" if self.metric.percent else self.metric.title

    @property
    def decile(self) -> str:
        """Name of the decile with the worst values."""
        return self.metric.decile

    @property
    def plural(self) -> str:
        """Words for several values."""
        return {"accuracy": "accuracies", "loss": "losses"}.get(self.name, f"values of {self.metric.title}")

    def number(self, value: float) -> str:
        """Return a value as a table shows it, without unit."""
        return f"{self.factor * value:.1f}" if self.metric.percent else significant(value)

    def text(self, value: float) -> str:
        """Return a value with its unit, if it has one."""
        return f"{self.number(value)} %" if self.metric.percent else self.number(value)

    def to_dict(self) -> dict[str, Any]:
        """Return what the script of a page needs; None in place of an infinite bound."""
        low, high = (bound if math.isfinite(bound) else None for bound in self.bounds)
        return {
            "title": self.metric.title,
            "axis": self.axis,
            "plural": self.plural,
            "decile": self.decile,
            "percent": self.metric.percent,
            "higher": self.metric.higher,
            "bounds": [low, high],
        }
