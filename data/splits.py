"""Division of a client's samples: those for test, where the data bring no test part, and those for validation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kindred.lazy import lazy

from .files import DataError

if TYPE_CHECKING:
    from sklearn import model_selection
else:
    model_selection = lazy("sklearn.model_selection")


def split(
    n: int,
    test_share: float,
    rng: np.random.Generator,
    classes: np.ndarray | None = None,
    times: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Divide samples into a share for test and the others.

    Parameters
    ----------
    n : int
        Number of samples.
    test_share : float
        Fraction for test, rounded to at least one sample; above 0, below 1.
    rng : numpy.random.Generator
    classes : ndarray, (n,), optional
        The samples' classes: the same share of each is for test, where every class allows it.
    times : ndarray, (n,), optional
        When the samples were: the later ones are for test, and nothing is drawn.

    Returns
    -------
    train, test : ndarray
        Places of the samples, in order; each has one or more.

    Raises
    ------
    DataError
        There are fewer than two samples.
    """
    if n < 2:
        raise DataError(f"there are {n} samples, and training and test need one each")
    count = min(max(round(n * (1 - test_share)), 1), n - 1)
    if times is None:
        return draw_places(n, count, rng, classes)
    order = np.argsort(times, kind="stable")
    return np.sort(order[:count]), np.sort(order[count:])


def draw_places(
    n: int, count: int, rng: np.random.Generator, classes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` of n samples, 1 to n - 1, by class as in `split`; return the places of these and of the others."""
    if classes is not None:
        _, sizes = np.unique(classes, return_counts=True)
        if sizes.min() < 2 or min(count, n - count) < len(sizes):  # scikit-learn refuses to divide these by class
            classes = None
    drawn, others = model_selection.train_test_split(
        np.arange(n), train_size=count, stratify=classes, random_state=int(rng.integers(2**32))
    )
    return np.sort(drawn), np.sort(others)


def hold_out(
    n: int,
    share: float,
    rng: np.random.Generator,
    classes: np.ndarray | None = None,
    times: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Divide a client's training samples into those that stay, and a share for validation.

    Samples are divided as in `split`, except that a class without a training sample gets its first one back. A sample
    of a class with several training samples replaces it, where there is one.

    Parameters
    ----------
    n, rng, classes, times
        As in `split`.
    share : float
        Fraction for validation, rounded to at least one sample; above 0, below 1.

    Returns
    -------
    train, validation : ndarray
        Places of the samples, in order. There are none for validation if all stay: one alone, or one of each class.
    """
    if n < 2:
        return np.arange(n), np.arange(0)
    train, validation = split(n, share, rng, classes, times)
    if classes is None:
        return train, validation
    _, first = np.unique(classes[validation], return_index=True)
    lost = validation[first[~np.isin(classes[validation[first]], classes[train])]]
    _, only = np.unique(classes[train], return_index=True)
    spare = np.delete(train, only)[-len(lost) :] if len(lost) else lost
    return np.sort(np.r_[np.setdiff1d(train, spare), lost]), np.sort(np.r_[np.setdiff1d(validation, lost), spare])
