"""Intervals of a run's metrics: of their means over clients, and of all clients' test samples pooled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from kindred.client.gain import interval, resampled_means
from kindred.client.state import PREDICTIONS
from kindred.messages import ClientId, in_order
from kindred.metrics import METRICS
from kindred.objectives import Objective

RESAMPLES = 200
"""Resamples of pooled predictions: scikit-learn takes up to 10 ms for a metric of 10,000 samples of two classes."""
FEWEST = 50
"""Resamples where there are many predictions."""
MANY = 20_000
"""Predicted numbers, samples times outputs, above which there are fewer resamples."""
MOST = 10_000_000
"""Predicted numbers above which predictions are not pooled."""


def means(of_clients: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the clients that have it."""
    return {name: fmean(values) for name, values in _by_metric(of_clients).items()}


def mean_intervals(of_clients: Iterable[Mapping[str, float]], seed: int) -> dict[str, list[float]]:
    """Return low and high of the interval of each mean over clients, which are drawn with replacement."""
    return {
        name: [*interval(resampled_means(np.array(values), np.random.default_rng(seed)))]
        for name, values in _by_metric(of_clients).items()
    }


def _by_metric(of_clients: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    clients = list(of_clients)
    found = {name: [each[name] for each in clients if name in each] for name in METRICS}
    return {name: values for name, values in found.items() if values}


def pooled_metrics(
    files: Mapping[ClientId, Path], objective: Objective, headline: str, seed: int
) -> dict[str, Any] | None:
    """Return the metrics of all clients' predictions together.

    Parameters
    ----------
    files : mapping
        client -> file of its predictions, with their targets.
    objective : Objective
        Of all clients.
    headline : str
        Name of the headline metric.
    seed : int
        Of the bootstrap.

    Returns
    -------
    dict or None
        - `samples`: their number.
        - `metrics`: name -> value.
        - `intervals`: name -> low and high, of the headline metric and `Objective.metrics`. A resample draws clients
          with replacement, and within each as many samples as it has. There are `RESAMPLES` of them. Above `MANY`
          predicted numbers there are fewer, in proportion, and at least `FEWEST`. The 200 take about 2 s for AUROC of
          10,000 samples of two classes. Other metrics have no interval: all together take several times as long.

        None without predictions, with more than `MOST`, or with one that is not finite.
    """
    found = [load_file(files[client]) for client in in_order(files)]
    found = [each for each in found if len(each["targets"])]
    amount = sum(each[PREDICTIONS].size for each in found)
    if not 0 < amount <= MOST:
        return None
    predictions, targets = (np.concatenate([each[part] for each in found]) for part in (PREDICTIONS, "targets"))
    if not np.isfinite(predictions).all():
        return None
    sizes, rng = np.array([len(each["targets"]) for each in found]), np.random.default_rng(seed)
    values: dict[str, list[float]] = defaultdict(list)
    for _ in range(min(RESAMPLES, max(FEWEST, RESAMPLES * MANY // amount))):
        rows = resampled_rows(sizes, rng)
        for name, value in objective.evaluated(predictions[rows], targets[rows], (headline,)).items():
            values[name].append(value)
    return {
        "samples": len(targets),
        "metrics": objective.evaluated(predictions, targets, objective.reports),
        "intervals": {name: [*interval(np.array(each))] for name, each in values.items()},
    }


def resampled_rows(sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return rows of pooled samples, of clients drawn with replacement, and within each of samples drawn likewise.

    `sizes` (m,) has the number of samples of each client; its samples are consecutive rows.
    """
    drawn = rng.integers(len(sizes), size=len(sizes))  # (m,)
    lengths = sizes[drawn]
    within = rng.random(lengths.sum()) * lengths.repeat(lengths)
    return (np.cumsum(sizes) - sizes)[drawn].repeat(lengths) + within.astype(int)
