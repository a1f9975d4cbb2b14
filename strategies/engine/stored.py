"""Bases of the methods whose server keeps every client's model: `StoredModels`, and `CloudModels` that mix them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

import numpy as np
from flwr.app import ArrayRecord

from kindred.messages import ClientId, in_order, read_record
from kindred.settings import STORE

from .admission import Reply
from .arguments import Shared
from .collaboration import Collaboration
from .layout import Layout
from .model_store import ClientModels
from .strategy import PersonalizedStrategy


class StoredModels(PersonalizedStrategy):
    """Base of the methods whose server keeps every client's trained model.

    Parameters
    ----------
    store : {"memory", "disk"}
        Where the models are stored. On disk they are in a file, and memory holds little more than the models of a
        round's clients; results are the same, bit for bit. See `ClientModels`.
    **shared
        Arguments of `PersonalizedStrategy`.

    Attributes
    ----------
    models : ClientModels
        The last model of each client that has taken part.
    online : list of client ids, in order
        Clients that answered in the last round. A round without answers changes nothing.
    """

    STATE = (*PersonalizedStrategy.STATE, "models", "online")
    models: ClientModels

    def __init__(self, *, store: str = STORE.default, **shared: Unpack[Shared]) -> None:
        super().__init__(**shared)
        self.store = STORE.check(store)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        self.initial = initial_arrays
        self.layout = Layout(initial_arrays, self.buffers)
        self.models = ClientModels(self.layout, self.store)
        self.online: list[ClientId] = []

    def first_model(self, client: ClientId) -> ArrayRecord:
        """Return the model from which a client starts; by default the initial model."""
        return self.initial

    def welcome(self, clients: Sequence[ClientId]) -> None:
        """Store `first_model` of those of these clients that have no model yet."""
        self.models.reserve(len(self.roster.nodes))
        for client in clients:
            if client not in self.models:
                self.models.put(client, read_record(self.first_model(client)))

    def take(self, client: ClientId, reply: Reply) -> None:
        self.models.put(client, reply.arrays)

    def update_origin(self, client: ClientId) -> Mapping[str, np.ndarray]:
        """Return the client's last model; the model sent to the client is not stored."""
        return self.layout.views(self.models.row(client))

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        if answered:
            self.online = list(answered)

    def global_arrays(self) -> ArrayRecord:
        clients = list(self.models)
        if not clients:
            return self.initial
        mean = next(self.models.combinations(np.full((1, len(clients)), 1 / len(clients)), clients))
        return self.models.shared_record(mean)

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        if not self.models:  # before the first round; storing a model for every client would take memory
            return self.first_model(client)
        self.welcome([client])
        return self.models[client]

    def client_models(self) -> Mapping[ClientId, ArrayRecord]:
        return self.models


# Receivers, senders and their weights, (r, m), of a round in which no client received a model.
NO_WEIGHTS: tuple[list[ClientId], list[ClientId], np.ndarray] = ([], [], np.zeros((0, 0)))


class CloudModels(StoredModels):
    """Base of the methods in which a client trains from a weighted sum of the clients' models, its cloud model.

    Parameters
    ----------
    **shared
        Arguments of `StoredModels`.
    """

    STATE = (*StoredModels.STATE, "_weights")

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._weights = NO_WEIGHTS

    def cloud_weights(self, server_round: int, clients: Sequence[ClientId]) -> tuple[list[ClientId], np.ndarray]:
        """Return the mixing weights of these clients' cloud models.

        Returns
        -------
        senders : list of m client ids
            Empty until a client has trained: every cloud model is then the initial model.
        weights : ndarray, shape (r, m)
            Rows sum to 1.
        """
        raise NotImplementedError

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._weights = NO_WEIGHTS
        self.welcome(clients)
        senders, rows = self.cloud_weights(server_round, clients)
        if senders:
            self._weights = (list(clients), senders, rows)
        yield from zip(clients, self.clouds(clients, senders, rows), strict=False)

    def clouds(
        self, clients: Sequence[ClientId], senders: Sequence[ClientId], rows: np.ndarray
    ) -> Iterator[ArrayRecord]:
        """Yield the cloud model of each of these clients; the initial model if there are no senders."""
        if not senders:
            yield from (self.initial for _ in clients)
            return
        for client, cloud_model in zip(clients, self.models.combinations(rows, senders), strict=False):
            yield self.models.combined_record(cloud_model, client)

    def shared_rows(self) -> Collaboration:
        """Return the weights of the last round; a client that received nothing has weight 1 on its own model."""
        clients = in_order({*self.models, *self.clients()})
        column = {client: i for i, client in enumerate(clients)}
        receivers, senders, received = self._weights
        rows = np.zeros((len(receivers), len(clients)))  # (r, m)
        rows[:, [column[client] for client in senders]] = received
        which, own = np.zeros(len(clients), np.int64), np.ones(len(clients))
        for row, client in enumerate(receivers):
            which[column[client]], own[column[client]] = row, 0
        return Collaboration(clients, rows, which, own)
