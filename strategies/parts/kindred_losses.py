"""The losses of the neighbours' and of all clients' mean model that Kindred's clients report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from kindred.messages import ClientId, in_order

Losses = Mapping[str, float]  # probe -> loss
LEAST_LOSS, LARGEST_LOSS = 1e-30, 1e30


class ReportedLosses:
    """The losses of the probes that each client reported first and last, and those of the last reports alone.

    Parameters
    ----------
    probes : collection of str
        A client counts where it reported the losses of all of them.
    """

    def __init__(self, probes: Collection[str]) -> None:
        self._probes = probes
        self._first: dict[ClientId, Losses] = {}
        self._last: dict[ClientId, Losses] = {}
        self._latest: dict[ClientId, Losses] = {}  # of the last exchange with any report
        self._reported: dict[ClientId, dict[str, float]] = {}  # since the last update

    def add(self, client: ClientId, probe: str, loss: float) -> None:
        """Take a client's loss of a probe, which counts from the next update on."""
        self._reported.setdefault(client, {})[probe] = min(max(loss, LEAST_LOSS), LARGEST_LOSS)

    def update(self) -> None:
        """Take in the reports of an exchange: those since the last update."""
        reported, self._reported = self._reported, {}
        complete: dict[ClientId, Losses] = {
            client: reported[client] for client in in_order(reported) if len(reported[client]) == len(self._probes)
        }
        if complete:
            self._first, self._last, self._latest = complete | self._first, self._last | complete, complete

    def changes(self, clients: Collection[ClientId]) -> list[tuple[Losses, Losses]]:
        """The first and the last losses of those of these clients whose losses have changed, in order."""
        return [
            (self._first[client], self._last[client])
            for client in in_order(self._last)
            if client in clients and self._last[client] != self._first[client]
        ]

    def likelihoods(self, probe: str, clients: Sequence[ClientId]) -> np.ndarray:
        """exp(-l) of a probe for each of these clients, shape (r,), by the last exchange with any report.

        The mean of the reporting clients for one that did not report, and 1 without any report.
        """
        reported = {client: float(np.exp(-losses[probe])) for client, losses in self._latest.items()}
        usual = sum(reported.values()) / len(reported) if reported else 1.0
        return np.array([reported.get(client, usual) for client in clients])

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"first": self._first, "last": self._last, "latest": self._latest, "reported": self._reported}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._first, self._last, self._latest = state["first"], state["last"], state["latest"]
        self._reported = state["reported"]
