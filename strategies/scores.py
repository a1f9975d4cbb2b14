"""Scores of predicted probabilities beyond accuracy, by name.

Clients compute them in every round. So each is a few operations on whole arrays: calls of scikit-learn, with which the
tests compare them, take longer than a small client's training.

A score is None where the samples do not define it: a client whose samples are all of one class has no AUROC.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

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
    if asked:
        check_finite(predictions)
    found = {name: known[name](predictions, targets) for name in asked}
    return {name: float(value) for name, value in found.items() if value is not None}


def check_finite(predictions: np.ndarray) -> None:
    """Raise ValueError if a prediction is not finite."""
    if not np.isfinite(predictions).all():
        raise ValueError("predictions are not finite: did training diverge? a smaller learning-rate may help")


# --- Of classes ---------------------------------------------------------------------------------------


def class_counts(predictions: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each class's support, number of predictions, and number of true positives, (N,) each."""
    predicted = predictions.argmax(axis=1)
    support, predictions_of, true_positives = (
        np.bincount(classes, minlength=predictions.shape[1])
        for classes in (targets, predicted, targets[predicted == targets])
    )
    return support, predictions_of, true_positives


def balanced_accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean, over the classes that occur, of the share of a class's samples that are predicted as it."""
    support, _, true_positives = class_counts(predictions, targets)
    return float((true_positives[support > 0] / support[support > 0]).mean())


def auroc(probabilities: np.ndarray, true: np.ndarray) -> float | None:
    """Return the mean over columns, (n, N) each, of the area under the ROC curve.

    The area is the share of the pairs of a true and a false sample in which the true one has the larger probability,
    equal ones counting half (Mann and Whitney, 1947). Columns that are true, or false, everywhere do not count.
    """
    found = []
    for p, y in zip(probabilities.T, true.T, strict=True):
        if 0 < y.sum() < len(y):
            false = np.sort(p[~y])
            below, up_to = (np.searchsorted(false, p[y], side).sum() for side in ("left", "right"))
            found.append((below + up_to) / (2 * y.sum() * len(false)))
    return float(np.mean(found)) if found else None


def average_precision(probabilities: np.ndarray, true: np.ndarray) -> float | None:
    """Return the mean over columns, (n, N) each, of the average precision.

    It is the mean, over a column's true samples, of the share of true ones among all that have the probability of this
    one or a larger one. Columns that are true, or false, everywhere do not count.
    """
    found = []
    for p, y in zip(-probabilities.T, true.T, strict=True):
        if 0 < y.sum() < len(y):
            among_true, among_all = (np.searchsorted(np.sort(each), p[y], "right") for each in (p[y], p))
            found.append((among_true / among_all).mean())
    return float(np.mean(found)) if found else None


def by_class(score: Score) -> Score:
    """Return the score of each class against the others: of the second of two, else the mean over the classes."""

    def of_classes(predictions: np.ndarray, targets: np.ndarray) -> float | None:
        classes = np.arange(predictions.shape[1])[1 if predictions.shape[1] == 2 else 0 :]  # (N,)
        return score(predictions[:, classes], targets[:, None] == classes)

    return of_classes


def macro_f1(support: np.ndarray, predictions_of: np.ndarray, true_positives: np.ndarray) -> float:
    """Return the mean F1 score of classes with these counts; it is 0 for a class without samples and predictions."""
    return float((2 * true_positives / np.maximum(support + predictions_of, 1)).mean())


def f1(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the F1 score of the second of two classes, else the mean over the classes that occur."""
    support, predictions_of, true_positives = class_counts(predictions, targets)
    which = [1] if predictions.shape[1] == 2 else np.flatnonzero(support)
    return macro_f1(support[which], predictions_of[which], true_positives[which])


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
    """Return the mean cross-entropy, of probabilities clipped to keep it finite."""
    rows = predictions / predictions.sum(axis=1, keepdims=True, dtype=np.float64)  # float32 sums are near 1
    least = np.finfo(np.float64).eps
    return float(-np.log(rows[np.arange(len(rows)), targets].clip(least, 1 - least)).mean())


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
    "auroc": by_class(auroc),
    "average-precision": by_class(average_precision),
    "f1": f1,
    "sensitivity": recall_of(1),
    "specificity": recall_of(0),
    "log-loss": log_loss,
    "brier": brier,
    "calibration-error": calibration_error,
}

# --- Of several labels --------------------------------------------------------------------------------


OF_LABELS: Mapping[str, Score] = {
    "auroc": lambda p, y: auroc(p, y > 0.5),
    "average-precision": lambda p, y: average_precision(p, y > 0.5),
    "f1": lambda p, y: macro_f1(*(each.sum(axis=0) for each in (y > 0.5, p > 0.5, (y > 0.5) & (p > 0.5)))),
    "brier": lambda p, y: float(np.square(p - y).mean()),
    "calibration-error": lambda p, y: calibration(p.ravel(), y.ravel()),
}
