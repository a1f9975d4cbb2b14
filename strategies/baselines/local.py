"""Local training ("Separate" in the FedAMP paper): every client learns alone.

The model goes to the server and back between rounds, so that a client needs no memory of its own;
nothing of it reaches another client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from flwr.app import ArrayRecord

from kindred.engine.stored import StoredModels
from kindred.messages import ClientId
from kindred.registry import Method
from kindred.settings import STORE


class Local(StoredModels):
    """Local training as a Flower strategy.

    Parameters
    ----------
    **shared
        Those of `PersonalizedStrategy`.
    """

    name = "local"
    needs_shared_models = False

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self.welcome(clients)
        return ((client, self.models[client]) for client in clients)

    def collaboration(self) -> tuple[list[ClientId], np.ndarray]:
        """Everybody learns from itself."""
        clients = list(self.models)
        return clients, np.eye(len(clients))


METHOD = Method(
    title="Local",
    paper="training alone",
    travels="the client's own model, both ways",
    strategy=Local,
    settings=(STORE,),
)
