"""Weights of classes or labels in the loss, from the setting class-weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kindred.objectives import Labels, Objective, Weighted

from .files import DataError

BALANCED = "balanced"


def weighted(objective: Objective, class_weights: str, counts: np.ndarray | None, num_samples: int = 0) -> Objective:
    """Return an objective with weights of its classes or labels.

    Parameters
    ----------
    objective : Objective
    class_weights : str
        "": none, or those that the objective has. "balanced": such that all classes, or each label where it is true and
        where it is false, count the same in the loss of all training samples. Otherwise a number for each class or
        label, separated by commas.
    counts : ndarray, (C,), int, or None
        Number of training samples of each class, or with each label true; None where it is not known.
    num_samples : int
        Number of training samples.

    Raises
    ------
    DataError
        The text is none of these, the objective has no classes, or a class has no training samples.
    """
    if not class_weights:
        return objective
    if not isinstance(objective, Weighted):
        raise DataError(f"class-weights is {class_weights!r}, and the objective {objective.name} has no classes")
    if class_weights == BALANCED:
        if counts is None:
            raise DataError(
                f"class-weights is {BALANCED!r}, which needs the number of samples of each class at all sites: give a "
                "number for each class"
            )
        others = (
            num_samples - counts if isinstance(objective, Labels) else np.full(len(counts), num_samples / len(counts))
        )
        if not (counts.all() and others.all()):
            place = int(np.flatnonzero((counts == 0) | (others == 0))[0])
            name = objective.names[place] if objective.names else place
            raise DataError(
                f"class-weights is {BALANCED!r}, and {counts[place]} of {num_samples} training samples are {name}"
            )
        weights = tuple((others / counts).tolist())
    else:
        try:
            weights = tuple(float(word) for word in class_weights.split(","))
        except ValueError:
            raise DataError(
                f"class-weights is {class_weights!r}, allowed: {BALANCED}, or numbers separated by commas"
            ) from None
    try:
        return replace(objective, weights=weights)
    except ValueError as error:
        raise DataError(f"class-weights is {class_weights!r}: {error}") from None
