"""Means of clients' models, weighted by their numbers of samples: the bound on a client's share, and the sum itself."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from kindred.messages import ClientId


def largest_weight(weights: Collection[float], share: float) -> float:
    """Return the weight to which larger ones are lowered, so that none is above a share of the sum of all.

    It is the largest c with c <= share * sum_k min(n_k, c). If there are too few clients for the share, at most
    1 / share, it is the smallest weight, which makes all weights equal.

    Parameters
    ----------
    weights : collection of float
        n_k, above 0.
    share : float
        More than 0; 1 bounds nothing.

    Returns
    -------
    float
        Infinity without weights, or with share 1.
    """
    if share >= 1 or not weights:
        return math.inf
    descending = sorted(weights, reverse=True)
    for lowered, weight in enumerate(descending):
        if lowered * share >= 1 or len(descending) * share <= 1:
            break
        level = share * math.fsum(descending[lowered:]) / (1 - lowered * share)  # c, if so many weights are lowered
        if weight <= level:
            return level
    return descending[-1]


def capped(weights: np.ndarray, share: float) -> np.ndarray:
    """Return weights (m,), 0 or more, of which the larger ones are lowered as `largest_weight` says; 0 stays 0."""
    return np.minimum(weights, largest_weight(weights[weights > 0].tolist(), share))


class WeightedMean:
    """Weighted mean sum_k n_k w_k / sum_k n_k, in which no client has more than a share.

    Terms are added up as they come. With a share below 1 those whose weight may still be lowered wait, fewer than
    1 / share of them and one more.

    Parameters
    ----------
    size : int
    dtype : np.dtype
    share : float (default: 1.0)
        The largest share of a client, see `largest_weight`.

    Attributes
    ----------
    claimed : dict
        client -> n_k of all terms, in the order in which they were added.
    weights : dict
        client -> weight of the terms in the sum. After `result` these are all terms.
    """

    def __init__(self, size: int, dtype: np.dtype, share: float = 1.0) -> None:
        self._sum = np.zeros(size, dtype)  # (d,)
        self._share = share
        self._waiting: dict[ClientId, np.ndarray] = {}  # (d,) each
        self.claimed: dict[ClientId, float] = {}
        self.weights: dict[ClientId, float] = {}

    def add(self, client: ClientId, weight: float, row: np.ndarray) -> None:
        """Add a client's term; `row`, of shape (d,), is changed in place."""
        self.claimed[client], self._waiting[client] = weight, row
        level = self._level()  # it never falls when terms are added, unless it is the smallest weight
        for other in [other for other in self._waiting if self.claimed[other] < level]:
            self._count(other, self.claimed[other])

    def _level(self) -> float:
        return largest_weight(self.claimed.values(), self._share)

    def _count(self, client: ClientId, weight: float) -> None:
        row = self._waiting.pop(client)
        row *= weight
        self._sum += row
        self.weights[client] = weight

    def result(self) -> np.ndarray | None:
        """Return the mean, shape (d,), of the terms added; None if there are none."""
        level = self._level()
        for client in list(self._waiting):
            self._count(client, min(self.claimed[client], level))
        return self._sum / sum(self.weights.values()) if self.weights else None
