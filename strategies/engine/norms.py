"""Norms of clients' updates: each beside the median of comparable ones, and the factor that scales a larger one down.

Updates are comparable if they are of the same network and of the same kind of visit: a client's first one, one after
absence (the client did not reply in the last round that had replies), or a further one. First updates are the longest,
and one after absence may be measured from an old model.

- In the history, the median is that of the comparable updates of the round. If these are fewer than LEAST, those of the
  latest rounds are added.
- An update is named if it is longer than OUTLIER times the largest median of comparable updates in any round so far.
  Once clients have converged, the median of a round is so small that an honest update can be 50 times as long.
- The bound of `max_update_norm` "auto" must be known when a reply arrives. It is BOUND times the median of comparable
  updates of the latest rounds. Where these have none, that kind of visit with the largest median counts. In the first
  round, replies wait for each other, and the median is that of this round.
- `aggregation` "biweight" weighs an update by its length over the median of the history, see `lengths`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kindred.messages import ClientId, in_order

LATEST = 20  # comparable updates, or more, of the latest rounds are kept, if there are as many
LEAST = 3  # of fewer updates no median is taken
BOUND = 5.0  # of the norm with "auto", in medians
OUTLIER = 8.0  # norm, in the largest medians, above which an update is named

FIRST, RETURN, FURTHER = "first", "return", "further"  # kinds of visits

Pools = dict[str, list[list[float]]]  # visit -> rounds -> norms


class Update(NamedTuple):
    """An update of the round in progress."""

    network: str
    visit: str
    norm: float
    factor: float


class UpdateNorms:
    """The norms of a run's updates.

    Parameters
    ----------
    bounds : bool
        Whether updates above the bound are to be scaled down.
    """

    def __init__(self, bounds: bool) -> None:
        self._bounds = bounds
        self._latest: dict[str, Pools] = {}  # network -> norms of the latest rounds
        self._largest: dict[str, float] = {}  # network -> the largest median of comparable updates in a round
        self._last: dict[ClientId, int] = {}  # client -> the last round in which it replied
        self._replied = 0  # the last round in which any client did
        self.begin_round()

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, between two rounds."""
        return {"latest": self._latest, "largest": self._largest, "last": self._last, "replied": self._replied}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned."""
        self._latest, self._largest = state["latest"], state["largest"]
        self._last, self._replied = state["last"], state["replied"]

    def begin_round(self) -> None:
        """Forget the updates of a round that was not ended."""
        self._round: dict[ClientId, Update] = {}
        self._previewed: dict[str, Pools] = {}

    @property
    def needs_preview(self) -> bool:
        """True if updates are to be bounded and the latest rounds give no median."""
        return self._bounds and not any(_medians(pools) for pools in self._latest.values())

    def preview(self, client: ClientId, network: str, norm: float) -> None:
        """Let an update that `add` will receive count in the medians of its own round."""
        pools = self._previewed.setdefault(network, {})
        pools.setdefault(self._visit(client), [[]])[0].append(norm)

    def add(self, client: ClientId, network: str, norm: float) -> float:
        """Record an update, and return the factor, more than 0 and up to 1, by which it is to be scaled."""
        visit, factor = self._visit(client), 1.0
        if self._bounds:
            medians = _medians(self._latest.get(network, {})) or _medians(self._previewed.get(network, {}))
            median = medians.get(visit) or max(medians.values(), default=0.0)
            factor = min(1.0, BOUND * median / norm) if median and norm else 1.0
        self._round[client] = Update(network, visit, norm, factor)
        return factor

    def _visit(self, client: ClientId) -> str:
        last = self._last.get(client)
        return FIRST if last is None else FURTHER if last == self._replied else RETURN

    def _by_kind(self) -> dict[tuple[str, str], tuple[list[float], float | None]]:
        """Return the round's norms, in order of client, and their median, by network and kind of visit.

        If the norms are too few for a median, those of the latest rounds are added.
        """
        found: dict[tuple[str, str], list[float]] = {}
        for client in in_order(self._round):
            update = self._round[client]
            found.setdefault((update.network, update.visit), []).append(update.norm)
        return {
            (network, visit): (
                norms,
                _median(norms) or _median([*_flat(self._latest.get(network, {}).get(visit, [])), *norms]),
            )
            for (network, visit), norms in found.items()
        }

    def lengths(self) -> dict[ClientId, float]:
        """Return the round's norms over the median of comparable updates.

        Where these have none, the largest median so far counts, so that a client gains nothing by being absent. Before
        there is any, a client is missing.
        """
        by_kind = self._by_kind()
        return {
            client: update.norm / median
            for client, update in self._round.items()
            if (median := by_kind[update.network, update.visit][1] or self._largest.get(update.network))
        }

    def end_round(self, server_round: int) -> list[dict[str, Any]]:
        """End a round, and return a row for each of its updates, in order of client; see `History.updates`."""
        by_kind = self._by_kind()
        for (network, visit), (norms, median) in by_kind.items():
            self._largest[network] = max(self._largest.get(network, 0.0), median or 0.0)
            pool = self._latest.setdefault(network, {}).setdefault(visit, [])
            pool.append(norms)
            while len(_flat(pool[1:])) >= LATEST:
                del pool[0]
        rows = []
        for client in in_order(self._round):
            update = self._round[client]
            row = {"round": server_round, "client": client, "visit": update.visit, "norm": update.norm}
            if median := by_kind[update.network, update.visit][1]:
                row["relative-norm"] = update.norm / median
            if largest := self._largest[update.network]:
                row["relative-to-largest"] = update.norm / largest
            if update.factor < 1:
                row["scaled-by"] = update.factor
            rows.append(row)
            self._last[client] = self._replied = server_round
        self.begin_round()
        return rows


def scaled(arrays: Mapping[str, np.ndarray], origin: Mapping[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
    """Return o + factor (a - o) for arrays a, in their types; integer arrays are unchanged."""
    return {
        name: (origin[name] + factor * (array.astype(np.float64) - origin[name])).astype(array.dtype)
        if array.dtype.kind == "f"
        else array
        for name, array in arrays.items()
    }


def _flat(rounds: Iterable[Iterable[float]]) -> list[float]:
    return [norm for norms in rounds for norm in norms]


def _median(norms: list[float]) -> float | None:
    """Return the median of LEAST norms or more, else None; also None where it is 0."""
    return (float(np.median(norms)) or None) if len(norms) >= LEAST else None


def _medians(pools: Pools) -> dict[str, float]:
    """Return the median of each kind of visit that has one."""
    found = {visit: _median(_flat(rounds)) for visit, rounds in pools.items()}
    return {visit: median for visit, median in found.items() if median}
