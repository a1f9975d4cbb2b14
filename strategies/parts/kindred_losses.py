"""Losses of the neighbours' mean model and of all clients' mean model, as Kindred's clients report them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from kindred.messages import ClientId, in_order

Losses = Mapping[str, float]  # probe -> loss
LEAST_LOSS, LARGEST_LOSS = 1e-30, 1e30


class ReportedLosses:
    """Losses of the probes that each client reported first and last, and those of the last exchange alone.

    Parameters
    ----------
    probes : collection of str
        Names of the probes. A client's report counts only where it has the losses of all of them.
    """

    def __init__(self, probes: Collection[str]) -> None:
        self._probes = probes
        self._first: dict[ClientId, Losses] = {}
        self._last: dict[ClientId, Losses] = {}
        self._latest: dict[ClientId, Losses] = {}  # of the last exchange with any report
        self._reported: dict[ClientId, dict[str, float]] = {}  # since the last update

    def add(self, client: ClientId, probe: str, loss: float) -> None:
        """Add a client's loss of a probe, which counts from the next update on."""
        self._reported.setdefault(client, {})[probe] = min(max(loss, LEAST_LOSS), LARGEST_LOSS)

    def update(self) -> None:
        """Process the reports of an exchange: those since the last update."""
        reported, self._reported = self._reported, {}
        complete: dict[ClientId, Losses] = {
            client: reported[client] for client in in_order(reported) if len(reported[client]) == len(self._probes)
        }
        if complete:
            self._first, self._last, self._latest = complete | self._first, self._last | complete, complete

    def changes(self, clients: Collection[ClientId]) -> list[tuple[Losses, Losses]]:
        """Return the first and the last losses of each of these clients whose losses have changed, in order."""
        return [
            (self._first[client], self._last[client])
            for client in in_order(self._last)
            if client in clients and self._last[client] != self._first[client]
        ]

    def likelihoods(self, probe: str, clients: Sequence[ClientId]) -> np.ndarray:
        """Return exp(-l) of a probe for each of these clients, shape (r,), from the last exchange with any report.

        A client that did not report has the mean of those that did; without any report, each has 1.
        """
        reported = {client: float(np.exp(-losses[probe])) for client, losses in self._latest.items()}
        mean = sum(reported.values()) / len(reported) if reported else 1.0
        return np.array([reported.get(client, mean) for client in clients])

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"first": self._first, "last": self._last, "latest": self._latest, "reported": self._reported}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._first, self._last, self._latest = state["first"], state["last"], state["latest"]
        self._reported = state["reported"]
