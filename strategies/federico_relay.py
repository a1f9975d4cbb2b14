"""FedeRiCo with `selection` "relay": a client keeps its losses, and requests the models that it chose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .client.site import true_or_false
from .client.state import MIXTURE, ClientState
from .client.visit import Visit
from .messages import NEIGHBOURS, REPORT_WEIGHTS, WEIGHTS, ClientId, decode, encode

LOSSES = "losses"
WEIGHTS_OF = "weights-of"


@dataclass(frozen=True)
class Request:
    """What a client requests of the server, and what it reports.

    Attributes
    ----------
    neighbours : list of client ids
        Whose models it requests for the next round, preferred ones first, with spares for unavailable clients.
    mixture : list of client ids
        Whose models it predicts with, its own first.
    weights : dict
        client -> w_ij; empty where the client does not report its weights.
    """

    neighbours: list[ClientId]
    mixture: list[ClientId]
    weights: dict[ClientId, float] = field(default_factory=dict)

    def pack(self) -> dict[str, Any]:
        """Return the entries of the reply's settings."""
        packed: dict[str, Any] = {NEIGHBOURS: encode(self.neighbours), MIXTURE: encode(self.mixture)}
        if self.weights:
            packed |= {WEIGHTS_OF: encode(list(self.weights)), WEIGHTS: list(self.weights.values())}
        return packed

    @classmethod
    def unpack(cls, config: Mapping[str, Any]) -> Request:
        """Read a reply's settings; what is missing or malformed is empty."""
        clients, weights = decode(config.get(WEIGHTS_OF)), config.get(WEIGHTS)
        if (
            not isinstance(weights, list)
            or len(weights) != len(clients)
            or len(set(clients)) != len(clients)
            or not all(isinstance(weight, float) and 0 <= weight <= 1 for weight in weights)
            or not abs(sum(weights) - 1) < 1e-6
        ):
            clients, weights = [], []
        return cls(
            decode(config.get(NEIGHBOURS)), decode(config.get(MIXTURE)), dict(zip(clients, weights, strict=True))
        )


def reports_weights(visit: Visit) -> bool:
    """Return whether the client reports its weights: `report-weights` of its node config, true in a simulation."""
    # A client of a simulation has a number alone in its node config.
    is_simulated = "partition-id" in visit.node_config and "client-id" not in visit.node_config and not visit.is_site
    return true_or_false(visit.node_config, REPORT_WEIGHTS, is_simulated)


def load_losses(state: ClientState) -> tuple[dict[ClientId, float], dict[ClientId, float]]:
    """Return the losses that a client kept, the latest and the moving averages: client -> loss."""
    pairs = {json.loads(name): losses.tolist() for name, losses in (state.load(LOSSES) or {}).items()}
    return {client: pair[0] for client, pair in pairs.items()}, {client: pair[1] for client, pair in pairs.items()}


def save_losses(state: ClientState, latest: Mapping[ClientId, float], smoothed: Mapping[ClientId, float]) -> None:
    """Keep losses at the client, for `load_losses`."""
    state.save(LOSSES, {json.dumps(client): np.array([latest[client], smoothed[client]]) for client in latest})
