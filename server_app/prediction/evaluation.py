"""Evaluation of predictions against the truth: metrics, and a figure of the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.metrics import confusion_matrix

from kindred.data.partition_figure import short_name
from kindred.lazy import lazy
from kindred.objectives import Labels, Objective
from kindred.server_app.config import ConfigError
from kindred.server_app.report.figures import MOST_NAMED, new_figure

from .inputs import read_test_part
from .predictor import Predictor

if TYPE_CHECKING:
    import matplotlib
    from matplotlib.figure import Figure
else:
    matplotlib = lazy("matplotlib")

MOST_EVALUATED = 2000  # classes; a confusion matrix has the square of this number of entries
SMALLEST_PRINT = 5  # points; the smallest font in which a count is readable


def evaluate_model(model: Path, data_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """Compare a model's predictions with a site's test data.

    Parameters
    ----------
    model : Path
        A file of `Predictor.load`.
    data_dir : Path
        A site's data, as `data.read_site` reads them. If they have no test part, all samples are used.

    Returns
    -------
    found : dict
        The two paths, `model` and `data-dir`, and the result of `evaluation`.
    remarks : list of str
        Lines about the data.

    Raises
    ------
    ConfigError, DataError
        The model or the data cannot be used.
    """
    predictor = Predictor.load(model)
    objective = predictor.task.objective
    if objective.has_classes and objective.num_outputs > MOST_EVALUATED:
        raise ConfigError(
            f"--model is {str(model)!r}, of {objective.num_outputs:,} classes, allowed: up to {MOST_EVALUATED:,}"
        )
    x, y, remarks = read_test_part(data_dir, predictor.task)
    found = evaluation(predictor.predictions(x), y, objective, predictor.names)
    return {"model": str(model), "data-dir": str(data_dir), **found}, remarks


def evaluation(
    predictions: np.ndarray, targets: np.ndarray, objective: Objective, names: Sequence[str]
) -> dict[str, Any]:
    """Compare predictions with the truth.

    Parameters
    ----------
    predictions : ndarray, (n, N)
    targets : ndarray, (n, ...)
        In the data's units.
    objective : Objective
    names : sequence of N str
        The names of the outputs.

    Returns
    -------
    dict
        `samples` n; the objective's metrics, by name; `loss`, its mean. With classes also `classes`: for each its name
        `class`, its `samples`, `accuracy` (the recall: the fraction of its samples that are predicted as it) and
        `precision` (the fraction of samples predicted as it that are of it), None where there are none; and
        `confusion` (N, N): numbers of samples by true class (row) and predicted class (column). With several labels
        also `labels`: for each its name `label`, its `samples` (in which it is true) and `accuracy`.
    """
    found: dict[str, Any] = {
        "samples": len(targets),
        **objective.evaluated(predictions, objective.scaled(targets)),
    }
    if objective.has_classes:
        return found | _of_classes(predictions, targets, names)
    if isinstance(objective, Labels):
        right = ((predictions > 0.5) == (targets > 0.5)).mean(axis=0).tolist()
        true = (targets > 0.5).sum(axis=0).tolist()
        lines = zip(names, true, right, strict=True)
        return found | {"labels": [{"label": name, "samples": n, "accuracy": hits} for name, n, hits in lines]}
    return found


def _of_classes(probabilities: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    confusion = confusion_matrix(labels, probabilities.argmax(axis=1), labels=np.arange(len(classes)))

    def share(hits: int, of: int) -> float | None:
        return hits / of if of else None

    lines = zip(
        classes,
        confusion.diagonal().tolist(),
        confusion.sum(axis=1).tolist(),
        confusion.sum(axis=0).tolist(),
        strict=True,
    )
    return {
        "classes": [{"class": name, "samples": there, "accuracy": share(hits, there), "precision": share(hits, said)}
                    for name, hits, there, said in lines],
        "confusion": confusion.tolist(),
    }  # fmt: skip


def confusion_figure(confusion: np.ndarray, classes: Sequence[str], title: str) -> Figure:
    """Draw the confusion matrix: shades show fractions of the true class, numbers are written where they fit.

    Parameters
    ----------
    confusion : ndarray, (N, N), int
        Row: the true class; column: the predicted one.
    classes : sequence of N str
    title : str
    """
    count = len(classes)
    totals = confusion.sum(axis=1, keepdims=True)  # (N, 1)
    shares = np.where(totals > 0, confusion / np.maximum(totals, 1), np.nan)  # (N, N)

    side = 6.4 if count <= 15 else 8.4
    figure, axes = new_figure(title, (side + 0.9, side))
    # One hue that only darkens is readable without colour vision.
    image = axes.imshow(shares, cmap=matplotlib.colormaps["Blues"].with_extremes(bad="#d0d0d0"), vmin=0.0, vmax=1.0)
    figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02).set_label("share of the true class's samples")
    if (totals == 0).any():
        axes.set_title("grey: no samples of this class", fontsize=9.5)

    ticks = np.arange(0, count, max(1, -(-count // MOST_NAMED)))
    names = [short_name(classes[i], 24) for i in ticks.tolist()]
    size = 8.5 if count <= 25 else 6.5
    axes.set_xticks(ticks, names, fontsize=size, rotation=90 if max(map(len, names)) > 3 else 0)
    axes.set_yticks(ticks, names, fontsize=size)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")

    # The axes take up about 0.75 of the figure. A digit is 0.6 times as wide as high, and a cell needs a margin.
    points = min(10.0, 0.75 * 72 * side / count / (0.6 * len(str(confusion.max())) + 0.6))
    if points >= SMALLEST_PRINT:
        for (true, predicted), number in np.ndenumerate(confusion):
            if number:
                axes.text(
                    predicted,
                    true,
                    str(number),
                    ha="center",
                    va="center",
                    fontsize=points,
                    color="white" if shares[true, predicted] > 0.6 else "black",
                )
    return figure
