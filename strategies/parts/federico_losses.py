"""Losses of the models that a client of FedeRiCo has received, and their moving averages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import repeat

import numpy as np

from kindred.client.state import ClientState
from kindred.messages import ClientId, in_order

LOSSES = "losses"  # in a reply, and the name under which a client keeps them

LARGEST_LOSS = 1e12
"""Loss of a model whose loss is larger, or not finite."""


def smooth(smoothed: np.ndarray, losses: np.ndarray, beta: float) -> np.ndarray:
    """Return the moving average (1 - beta) Lhat + beta l; Algorithm 1, line 15. All of shape (k,)."""
    return (1 - beta) * smoothed + beta * losses


class Losses:
    """One client's losses on the models that it has received: l_ij and Lhat_ij.

    Attributes
    ----------
    latest, smoothed : dict
        client -> loss.
    """

    def __init__(
        self, latest: Mapping[ClientId, float] | None = None, smoothed: Mapping[ClientId, float] | None = None
    ) -> None:
        self.latest = dict(latest or {})
        self.smoothed = dict(smoothed or {})

    def averages(self, clients: Sequence[ClientId]) -> np.ndarray:
        """Return Lhat_ij of these clients' models, shape (k,); 0 for models not yet received."""
        return np.fromiter(map(self.smoothed.get, clients, repeat(0.0)), np.float64, len(clients))

    def update(self, clients: Sequence[ClientId], losses: Sequence[float], beta: float) -> None:
        """Add the losses of these models; the averages of the other models repeat their latest losses."""
        self.latest |= dict(zip(clients, losses, strict=True))
        known = in_order(self.latest)
        self.smoothed = dict(zip(known, self._next_averages(known, beta).tolist(), strict=True))

    def averages_without(self, clients: Sequence[ClientId], beta: float) -> np.ndarray:
        """Return Lhat_ij, as after the next `update`, of the models received before that are not these clients'."""
        return self._next_averages(in_order(self.latest.keys() - set(clients)), beta)

    def _next_averages(self, clients: Sequence[ClientId], beta: float) -> np.ndarray:
        latest = np.array([self.latest[client] for client in clients], dtype=np.float64)
        return smooth(self.averages(clients), latest, beta)

    def state(self) -> tuple[dict[ClientId, float], dict[ClientId, float]]:
        """Return the arguments that make this object again."""
        return self.latest, self.smoothed

    @classmethod
    def load(cls, state: ClientState) -> Losses:
        """Return the losses that a client kept; none at first."""
        pairs = {json.loads(name): losses.tolist() for name, losses in (state.load(LOSSES) or {}).items()}
        latest, smoothed = ({client: pair[which] for client, pair in pairs.items()} for which in (0, 1))
        return cls(latest, smoothed)

    def save(self, state: ClientState) -> None:
        """Keep the losses at the client, for `load`."""
        pairs = {client: np.array([self.latest[client], self.smoothed[client]]) for client in self.latest}
        state.save(LOSSES, {json.dumps(client): pair for client, pair in pairs.items()})
