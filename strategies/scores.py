"""Scores of predicted probabilities beyond accuracy, by name: scikit-learn's, and the expected calibration error.

A score is None where the samples do not define it: a client whose samples are all of one class has no AUROC.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from .lazy import lazy

if TYPE_CHECKING:
    from sklearn import metrics
else:
    metrics = lazy("sklearn.metrics")

BINS = 15
"""Bins of equal width into which probabilities are sorted for the expected calibration error."""

Score = Callable[[np.ndarray, np.ndarray], float | None]
"""Function of predictions and targets: probabilities (n, N) and classes (n,), or of several labels (n, L) each."""


def computed(
    known: Mapping[str, Score], names: Collection[str], predictions: np.ndarray, targets: np.ndarray
) -> dict[str, float]:
    """Return the scores of `known` that are among `names` and that the samples define.

    Raises
    ------
    ValueError
        There are such scores, and a prediction is not finite.
    """
    asked = [name for name in known if name in names]
    if asked and not np.isfinite(predictions).all():
        raise ValueError("predictions are not finite: did training diverge? a smaller learning-rate may help")
    found = {name: known[name](predictions, targets) for name in asked}
    return {name: float(value) for name, value in found.items() if value is not None}


# --- Of classes ---------------------------------------------------------------------------------------


def balanced_accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean, over the classes that occur, of the share of a class's samples that are predicted as it."""
    return metrics.recall_score(
        targets, predictions.argmax(axis=1), labels=np.unique(targets), average="macro", zero_division=0
    )


def mean_of_classes(score: Score) -> Score:
    """Return the score of one class against the others: of the second of two, else the mean over the classes.

    Classes of which there are only, or no, samples do not count.
    """

    def of_classes(predictions: np.ndarray, targets: np.ndarray) -> float | None:
        classes = [1] if predictions.shape[1] == 2 else range(predictions.shape[1])
        values = [score(predictions[:, c], targets == c) for c in classes if 0 < (targets == c).sum() < len(targets)]
        return float(np.mean([value for value in values if value is not None])) if values else None

    return of_classes


def auroc(probabilities: np.ndarray, true: np.ndarray) -> float:
    """Return the area under the ROC curve, of (n,) each."""
    return metrics.roc_auc_score(true, probabilities)


def average_precision(probabilities: np.ndarray, true: np.ndarray) -> float:
    """Return the average precision, of (n,) each."""
    return metrics.average_precision_score(true, probabilities)


def f1(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the F1 score of the second of two classes, else the mean over the classes that occur."""
    average, labels = ("binary", None) if predictions.shape[1] == 2 else ("macro", np.unique(targets))
    return metrics.f1_score(targets, predictions.argmax(axis=1), labels=labels, average=average, zero_division=0)


def recall_of(which: int) -> Score:
    """Return the share of one class's samples that are predicted as it, where there are two classes."""

    def recall(predictions: np.ndarray, targets: np.ndarray) -> float | None:
        if predictions.shape[1] != 2 or not (targets == which).any():
            return None
        return float((predictions.argmax(axis=1)[targets == which] == which).mean())

    return recall


def brier(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean squared error of the probabilities: of the second of two classes, else summed over classes."""
    true = np.eye(predictions.shape[1])[targets]  # (n, N)
    errors = np.square(predictions - true).sum(axis=1)
    return float(errors.mean() / (2 if predictions.shape[1] == 2 else 1))


def log_loss(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean cross-entropy."""
    rows = predictions / predictions.sum(axis=1, keepdims=True, dtype=np.float64)  # float32 sums are near 1
    return metrics.log_loss(targets, rows, labels=np.arange(predictions.shape[1]))


def calibration_error(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the expected calibration error: the mean distance, in bins of confidence, of accuracy from confidence."""
    return calibration(predictions.max(axis=1), predictions.argmax(axis=1) == targets)


def calibration(confidence: np.ndarray, right: np.ndarray) -> float:
    """Return the mean over samples of |mean `right` - mean confidence| in the sample's bin, of (n,) each."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=BINS)
    return float(np.abs(gaps).sum() / len(bins))


OF_TWO_CLASSES = ("sensitivity", "specificity")
"""Scores of which there are none where there are more than two classes."""

OF_CLASSES: Mapping[str, Score] = {
    "balanced-accuracy": balanced_accuracy,
    "auroc": mean_of_classes(auroc),
    "average-precision": mean_of_classes(average_precision),
    "f1": f1,
    "sensitivity": recall_of(1),
    "specificity": recall_of(0),
    "log-loss": log_loss,
    "brier": brier,
    "calibration-error": calibration_error,
}

# --- Of several labels --------------------------------------------------------------------------------


def mean_of_labels(score: Score) -> Score:
    """Return the mean over the labels of which there are both true and false ones."""

    def of_labels(predictions: np.ndarray, targets: np.ndarray) -> float | None:
        both = [i for i in range(targets.shape[1]) if 0 < targets[:, i].sum() < len(targets)]
        values = [score(predictions[:, i], targets[:, i] > 0.5) for i in both]
        return float(np.mean([value for value in values if value is not None])) if values else None

    return of_labels


OF_LABELS: Mapping[str, Score] = {
    "auroc": mean_of_labels(auroc),
    "average-precision": mean_of_labels(average_precision),
    "f1": lambda p, y: metrics.f1_score(y > 0.5, p > 0.5, average="macro", zero_division=0),
    "brier": lambda p, y: float(np.square(p - y).mean()),
    "calibration-error": lambda p, y: calibration(p.ravel(), y.ravel()),
}
