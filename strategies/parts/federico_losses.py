"""Losses of the models that a client of FedeRiCo has received, and their averages or sums over rounds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import numpy as np

from kindred.client.state import ClientState
from kindred.messages import ClientId, in_order

LOSSES = "losses"  # in a reply, and the name under which a client keeps them
_ROUNDS = "rounds"  # in the file; the names of the other arrays there are JSON texts, which this is not

LARGEST_LOSS = 1e12
"""Loss of a model whose loss is larger, or not finite."""


def smooth(smoothed: np.ndarray, losses: np.ndarray, beta: float) -> np.ndarray:
    """Return the moving average (1 - beta) Lhat + beta l; Algorithm 1, line 15. All of shape (k,)."""
    return (1 - beta) * smoothed + beta * losses


def accumulate(total: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return the accumulated loss L + l; Eq. 24. All of shape (k,).

    The softmax of -L is the posterior of Eq. 3, w_ij ~ Pi_ij exp(-l_ij), whose prior Pi_ij is the last round's w_ij
    (Eq. 4). After t rounds with the same losses, L = t l, while their moving average Lhat is near l whatever beta is: L
    gives the weights that Lhat gives at 1/t of the temperature, and they become one-hot.
    """
    return total + losses


class Losses:
    """One client's losses on the models that it has received: l_ij and Lhat_ij.

    Attributes
    ----------
    latest, smoothed : dict
        client -> loss. `smoothed` has the moving averages Lhat_ij or, if losses are accumulated, their sums L_ij.
    rounds : int
        Number of updates.
    """

    def __init__(
        self,
        latest: Mapping[ClientId, float] | None = None,
        smoothed: Mapping[ClientId, float] | None = None,
        rounds: int = 0,
    ) -> None:
        self.latest = dict(latest or {})
        self.smoothed = dict(smoothed or {})
        self.rounds = rounds

    def averages(self, clients: Iterable[ClientId]) -> np.ndarray:
        """Return Lhat_ij of these clients' models, shape (k,); 0 for models not yet received."""
        return np.fromiter(map(self.smoothed.get, clients, repeat(0.0)), np.float64)

    def update(self, clients: Sequence[ClientId], losses: Sequence[float], beta: float | None) -> None:
        """Add a round's losses of these models; for the other models the latest ones count again.

        Parameters
        ----------
        clients : sequence of k client ids
        losses : sequence of k floats
        beta : float or None
            Momentum of the moving average; None: the losses are accumulated. The accumulated loss of a model that is
            received for the first time is that of a model with the same loss in all earlier rounds.
        """
        self.latest |= dict(zip(clients, losses, strict=True))
        known = in_order(self.latest)
        latest = np.array([self.latest[client] for client in known], dtype=np.float64)
        if beta is None:
            before = [self.smoothed.get(client, self.rounds * self.latest[client]) for client in known]
            values = accumulate(np.array(before), latest)
        else:
            values = smooth(self.averages(known), latest, beta)
        self.smoothed = dict(zip(known, values.tolist(), strict=True))
        self.rounds += 1

    def state(self) -> tuple[dict[ClientId, float], dict[ClientId, float], int]:
        """Return the arguments that make this object again."""
        return self.latest, self.smoothed, self.rounds

    @classmethod
    def load(cls, state: ClientState) -> Losses:
        """Return the losses that a client kept; none at first."""
        kept = state.load(LOSSES) or {}
        rounds = int(kept.pop(_ROUNDS, 0))
        pairs = {json.loads(name): losses.tolist() for name, losses in kept.items()}
        latest, smoothed = ({client: pair[which] for client, pair in pairs.items()} for which in (0, 1))
        return cls(latest, smoothed, rounds)

    def save(self, state: ClientState) -> None:
        """Keep the losses at the client, for `load`."""
        pairs = {client: np.array([self.latest[client], self.smoothed[client]]) for client in self.latest}
        state.save(
            LOSSES,
            {json.dumps(client): pair for client, pair in pairs.items()} | {_ROUNDS: np.array(self.rounds)},
        )
