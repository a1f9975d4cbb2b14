"""Local training ("Separate" in the FedAMP paper): each client trains alone.

Between rounds the server keeps each client's model, so that clients need to keep nothing. No model reaches another
client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flwr.app import ArrayRecord

from kindred.engine.collaboration import Collaboration
from kindred.engine.stored import StoredModels
from kindred.messages import ClientId
from kindred.registry import Method
from kindred.settings import STORE


class Local(StoredModels):
    """Local training as a Flower strategy.

    Parameters
    ----------
    **shared
        Arguments of `PersonalizedStrategy`.
    """

    name = "local"
    needs_shared_models = False
    mixes_updates = False

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self.welcome(clients)
        return ((client, self.models[client]) for client in clients)

    def newcomer_visits(self, rounds: int) -> int:
        """Return the run's rounds: a newcomer trains as long as the other clients did."""
        return rounds

    def shared_rows(self) -> Collaboration:
        """Return that each client has its own model alone."""
        return Collaboration.alone(list(self.models))


METHOD = Method(
    title="Local",
    paper="training alone",
    travels="the client's own model, both ways",
    strategy=Local,
    settings=(STORE,),
)
