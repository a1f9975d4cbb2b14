"""Aggregation of the clients' models: their mean, weighted by samples, or a rule that a minority cannot move far.

| rule | from | here |
| --- | --- | --- |
| median, of each coordinate | D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, ICML 2018, arXiv:1803.01498 | `np.median` |
| trimmed mean, of each coordinate | the same | Flower's `trim_mean` |
| Krum, Multi-Krum | P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, arXiv:1703.02757 | `krum_scores` |
| biweight, of the updates' lengths | A. E. Beaton, J. W. Tukey, Technometrics 16(2), 1974 | `biweights` |

In these rules a client's weight does not depend on its number of samples, which is a claim. The trimmed mean and Krum
assume that up to ASSUMED of the clients attack. The biweight compares a client's update with updates outside this mean
too (`engine.norms`), so it also works where a mean has only two or three models. An update's length does not include
floating-point buffers; their aggregate is the median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean

from kindred.engine.means import WeightedMean
from kindred.engine.model_store import BLOCK
from kindred.lazy import lazy
from kindred.messages import ClientId
from kindred.settings import Setting, one_of

if TYPE_CHECKING:
    from scipy.spatial import distance
else:
    distance = lazy("scipy.spatial.distance")

ASSUMED = 0.3  # share of the clients that may attack: the trimmed mean cuts it off at both ends, Krum's f is from it
REACH = 4.0  # times the median length: a longer update has no weight by the biweight
MEAN, MEDIAN, TRIMMED_MEAN, KRUM, MULTI_KRUM = "mean", "median", "trimmed-mean", "krum", "multi-krum"
BIWEIGHT = "biweight"
AGGREGATION = Setting(
    "aggregation",
    MEAN,
    one_of(MEAN, MEDIAN, TRIMMED_MEAN, KRUM, MULTI_KRUM, BIWEIGHT),
    "how the server aggregates the clients' models: by their mean, weighted by samples; or, against attackers and with "
    "no regard to samples, by the median or trimmed mean of each coordinate, by Krum or Multi-Krum, or by the biweight "
    f"mean, in which an update has less weight the longer it is, and none above {REACH:g} times the median length; "
    f"trimmed mean and Krum assume that up to {100 * ASSUMED:.0f} % of the clients attack",
)

# --- The mathematics ----------------------------------------------------------------------------------

COORDINATES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    MEDIAN: partial(np.median, axis=0),
    TRIMMED_MEAN: partial(trim_mean, cut_fraction=ASSUMED),
}
"""Rules for each coordinate: from models (m, b) to (b,)."""


def assumed(count: int) -> int:
    """Return f, the number of attackers assumed among so many clients."""
    return int(ASSUMED * count)


def krum_scores(distances: np.ndarray) -> np.ndarray:
    """Return each model's sum of distances to its m - f - 2 nearest others, shape (m,).

    Parameters
    ----------
    distances : ndarray, shape (m (m - 1) / 2,)
        Squared L2 distances ||w_i - w_j||^2 of the pairs, in the order of `scipy.spatial.distance.pdist`.

    Notes
    -----
    f is `assumed` of m; at least one neighbour counts.
    """
    each = distance.squareform(distances)  # (m, m)
    nearest = max(len(each) - assumed(len(each)) - 2, 1)
    return np.sort(each, axis=1)[:, 1 : nearest + 1].sum(axis=1)  # without the model itself, at 0


def biweights(lengths: np.ndarray) -> np.ndarray:
    """Return Tukey's weights (1 - (l / REACH)^2)^2, 0 from REACH on, (m,).

    Parameters
    ----------
    lengths : ndarray, shape (m,)
        Lengths l of updates, over the median of comparable ones.
    """
    return (1 - np.minimum(lengths / REACH, 1) ** 2) ** 2


def _mean_of(kept: list[int], models: np.ndarray) -> np.ndarray:
    """Return the mean, (b,), of these rows of models, (m, b)."""
    return models[kept].mean(axis=0)


# --- Aggregates ---------------------------------------------------------------------------------------

Lengths = Callable[[], Mapping[ClientId, float]]
"""Returns, at the end of a round, client -> length of its update over the median; see `engine.norms`."""


class Aggregate(Protocol):
    """Aggregation of the models of a round.

    Attributes
    ----------
    claimed : dict
        client -> n_k of all models, in the order in which they were added.
    weights : dict
        client -> its weight in the result.
    """

    claimed: dict[ClientId, float]
    weights: dict[ClientId, float]

    def add(self, client: ClientId, weight: float, row: np.ndarray) -> None:
        """Add a client's model; `row`, of shape (d,), is taken over."""

    def result(self) -> np.ndarray | None:
        """Return the aggregate, shape (d,), of the models added; None if there are none, or none has a weight."""


class RobustCentre:
    """A robust aggregate of models, which are kept until the end of the round.

    Parameters
    ----------
    rule : {"median", "trimmed-mean", "krum", "multi-krum", "biweight"}
    lengths : Lengths
    parameters : int, optional
        Number of the first values of a model that are parameters, not buffers; by default all.
    """

    def __init__(self, rule: str, lengths: Lengths, parameters: int | None = None) -> None:
        self._rule, self._lengths, self._parameters = rule, lengths, parameters
        self._rows: list[np.ndarray] = []  # (d,) each
        self.claimed: dict[ClientId, float] = {}
        self.weights: dict[ClientId, float] = {}

    def add(self, client: ClientId, weight: float, row: np.ndarray) -> None:
        """Add a client's model, shape (d,); `weight` is recorded and has no effect on the result."""
        self._rows.append(row)
        self.claimed[client], self.weights[client] = weight, 1.0

    def result(self) -> np.ndarray | None:
        """Return the centre, shape (d,), of the models added; None if there are none, or none has a weight."""
        if not self._rows:
            return None
        of_block = COORDINATES.get(self._rule)
        if self._rule == BIWEIGHT:
            lengths = self._lengths()
            weights = biweights(np.array([lengths.get(client, 1.0) for client in self.weights]))  # (m,)
            self.weights = dict(zip(self.weights, weights.tolist(), strict=True))
            if not weights.any():
                return None
            of_block = partial(np.average, axis=0, weights=weights)
        elif of_block is None:
            kept = self._nearest_to_others(1 if self._rule == KRUM else len(self._rows) - assumed(len(self._rows)))
            self.weights = {client: float(i in kept) for i, client in enumerate(self.weights)}
            of_block = partial(_mean_of, kept)
        centre = np.empty_like(self._rows[0])  # (d,)
        for columns, block in self._blocks():  # (m, b)
            centre[columns] = of_block(block)
        if self._rule == BIWEIGHT and self._parameters is not None:
            centre[self._parameters :] = np.median([row[self._parameters :] for row in self._rows], axis=0)
        return centre

    def _nearest_to_others(self, count: int) -> list[int]:
        """Return the places of so many models with the smallest Krum scores, in order; of equals the first."""
        pairs = np.zeros(len(self._rows) * (len(self._rows) - 1) // 2)
        for _, block in self._blocks():
            pairs += distance.pdist(block, "sqeuclidean")
        return sorted(np.argsort(krum_scores(pairs), kind="stable")[:count].tolist())

    def _blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield columns, and these columns of all models, (m, b)."""
        step = max(BLOCK // len(self._rows), 1)
        for start in range(0, len(self._rows[0]), step):
            columns = slice(start, start + step)
            yield columns, np.stack([row[columns] for row in self._rows])


def aggregate(
    rule: str, size: int, dtype: np.dtype, lengths: Lengths, parameters: int | None = None, share: float = 1.0
) -> Aggregate:
    """Return an empty aggregate for models of `size` floats.

    Parameters
    ----------
    rule : {"mean", "median", "trimmed-mean", "krum", "multi-krum", "biweight"}
    size : int
    dtype : dtype
    lengths, parameters
        As for `RobustCentre`.
    share : float (default: 1.0)
        The largest share of a client in the mean. The other rules ignore it.
    """
    return WeightedMean(size, dtype, share) if rule == MEAN else RobustCentre(rule, lengths, parameters)
