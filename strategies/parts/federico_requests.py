"""Models that clients of FedeRiCo request, and those of them that they receive.

With `selection` "relay" a client keeps its losses and sends its request; otherwise the server makes the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kindred.client.state import MIXTURE
from kindred.client.visit import Visit
from kindred.engine.collaboration import Collaboration
from kindred.engine.model_store import ClientModels
from kindred.engine.roster import Roster
from kindred.messages import NEIGHBOURS, WEIGHTS, ClientId, decode, encode, in_order

from .federico_losses import Losses
from .neighbours import choose_neighbours

# Keys in messages.
CLIENTS = "clients"
CHOICE_SEED = "choice-seed"
WEIGHTS_OF = "weights-of"

OVERSAMPLING = 2
"""Candidates drawn for each neighbour: the others are spares for clients whose models are unavailable."""


@dataclass(frozen=True)
class Request:
    """Models that a client requests, and weights that it reports.

    Attributes
    ----------
    neighbours : list of client ids
        Owners of the models requested for the next round, preferred ones first, with spares for unavailable clients.
    mixture : list of client ids
        Owners of the models that the client predicts with, itself first.
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


def mixture_members(own: ClientId, weights: Mapping[ClientId, float], threshold: float, size: int) -> list[ClientId]:
    """Return the owners of the models that a client predicts with: itself, then the others, the best first.

    Parameters
    ----------
    own : client id
    weights : mapping
        w_ij of the models that it has received: client -> weight, in order.
    threshold : float
        The least weight of another client's model.
    size : int
        The most models of other clients; 0: no limit.
    """
    best_first = sorted(weights, key=lambda client: -weights[client])
    others = [client for client in best_first if client != own and weights[client] >= threshold]
    return [own, *others[: size or None]]


def choose_request(
    own: ClientId,
    clients: Sequence[ClientId],
    losses: Losses,
    weights: Mapping[ClientId, float],
    *,
    num_neighbours: int,
    epsilon: float,
    seed: int,
    threshold: float,
    size: int,
) -> Request:
    """Choose what a client requests for the next round.

    Parameters
    ----------
    own : client id
    clients : sequence of client ids
        Clients that share their models.
    losses : Losses
    weights : mapping
        w_ij of the models that it has received: client -> weight, in order.
    num_neighbours, epsilon, seed
        Number of neighbours M; the other two are as for `choose_neighbours`.
    threshold, size
        As for `mixture_members`.
    """
    others = [client for client in clients if client != own]
    drawn = choose_neighbours(losses.averages(others), epsilon, seed, OVERSAMPLING * num_neighbours)
    return Request([others[i] for i in drawn], mixture_members(own, weights, threshold, size), dict(weights))


def request_of(visit: Visit, losses: Losses, weights: Mapping[ClientId, float]) -> Request:
    """Return the request that a client makes with `selection` "relay"."""
    config = visit.config
    request = choose_request(
        visit.client,
        decode(config[CLIENTS]),
        losses,
        weights,
        num_neighbours=int(config["num-neighbours"]),
        epsilon=float(config["epsilon"]),
        seed=config[CHOICE_SEED],
        threshold=float(config["mixture-threshold"]),
        size=int(config["mixture-size"]),
    )
    return request if visit.reports_weights else replace(request, weights={})


class Requests:
    """Last request of each client, and the models that are available to it.

    Parameters
    ----------
    models : ClientModels
        The last model of each client.
    roster : Roster
        The clients that are connected.
    share_absent : bool
        Whether models of clients that are not connected are available to others.
    """

    def __init__(self, models: ClientModels, roster: Roster, share_absent: bool) -> None:
        self._models = models
        self._roster = roster
        self._share_absent = share_absent
        self._private: set[ClientId] = set()
        self._last: dict[ClientId, Request] = {}

    def make_private(self, clients: Iterable[ClientId]) -> None:
        """From now on, send these clients' models to no other client, and no other client's model to them."""
        self._private |= set(clients)

    def is_private(self, client: ClientId) -> bool:
        """Return whether `make_private` has been called for a client."""
        return client in self._private

    def shared(self) -> list[ClientId]:
        """Return the clients whose models others may receive, in order; some may not have sent theirs yet."""
        return in_order(filter(self._shares, {*self._roster.nodes, *self._models}))

    def _shares(self, client: ClientId) -> bool:
        return client not in self._private and (self._share_absent or client in self._roster.nodes)

    def __contains__(self, client: ClientId) -> bool:
        return client in self._last

    def put(self, client: ClientId, request: Request) -> None:
        """Keep a client's request until its next one."""
        self._last[client] = request

    def existing(self, request: Request) -> Request:
        """Return a request without clients that do not exist, each client once: clients may request anything."""
        return replace(request, neighbours=self._existing(request.neighbours), mixture=self._existing(request.mixture))

    def _existing(self, clients: Iterable[ClientId]) -> list[ClientId]:
        return [client for client in dict.fromkeys(clients) if client in self._models or client in self._roster.nodes]

    def neighbours(self, client: ClientId, most: int) -> list[ClientId]:
        """Return the other clients, at most `most`, whose models a client receives to train."""
        return self._available(client, self._last[client].neighbours)[:most]

    def mixture(self, client: ClientId, size: int) -> list[ClientId]:
        """Return the other clients, at most `size` unless it is 0, whose models a client receives to predict with."""
        return self._available(client, self._last[client].mixture)[: size or None] if client in self._last else []

    def _available(self, client: ClientId, requested: Iterable[ClientId]) -> list[ClientId]:
        if client in self._private:
            return []
        others = (other for other in dict.fromkeys(requested) if other != client)
        return [other for other in others if other in self._models and self._shares(other)]

    def shared_rows(self) -> Collaboration:
        """Return the clients' weights w_ij; the row of a client that reports none is 0."""
        known = {client: request.weights for client, request in self._last.items() if request.weights}
        clients = in_order({*known, *self._models}) if known else []
        rows = np.zeros((len(known) + 1, len(clients)))  # (k, m); the last one remains 0
        for k, weights in enumerate(known.values()):
            rows[k] = [weights.get(client, 0.0) for client in clients]
        place = {client: k for k, client in enumerate(known)}
        which = np.array([place.get(client, len(known)) for client in clients], np.int64)
        return Collaboration(clients, rows, which, np.zeros(len(clients)))

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        last = {client: [each.neighbours, each.mixture, each.weights] for client, each in self._last.items()}
        return {"private": self._private, "last": last}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._private = state["private"]
        self._last = {client: Request(*request) for client, request in state["last"].items()}
