"""Messages with several clients' models, and replies with updates of these models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord

from kindred.messages import ClientId, by_prefix, in_order, to_record, with_prefix

from .admission import norm
from .in_turn import InTurn
from .model_store import ClientModels
from .norms import scaled
from .optimizers import OptimizerSteps

NEW_MODEL = "model"  # prefix of a model that the server does not have yet; an update's prefix is the model's place


class SentModels:
    """The models that each client receives in one message: its own, then its neighbours'.

    Parameters
    ----------
    models : ClientModels
        The last model of each client.

    Attributes
    ----------
    models
    owners : dict
        client -> the clients whose models its last message is about, starting with the client itself.
    count : int
        Number of models in all these messages together.
    """

    def __init__(self, models: ClientModels) -> None:
        self.owners: dict[ClientId, list[ClientId]] = {}
        self.count = 0
        self.models = models
        self._packed: dict[ClientId, ArrayRecord] = {}  # a model that several clients receive is packed once

    def pack(self, client: ClientId, neighbours: Sequence[ClientId], *, keep: bool = True) -> ArrayRecord:
        """Return the arrays of a message to a client.

        The prefix of a name is the model's place among the owners: 0 is the client's own model, which is missing as
        long as the client has none. Neighbours' models have `shared_integers`, not their owners' integer buffers. With
        `keep` packed models are kept for other clients, until `forget_packed`.
        """
        self.owners[client] = [client, *neighbours]
        shared = to_record(self.models.shared_integers()) if neighbours else {}
        record = ArrayRecord()
        for place, owner in enumerate(self.owners[client]):
            if owner in self.models:
                packed = self._packed.get(owner) or self.models[owner]
                if keep:
                    self._packed[owner] = packed
                record.update(with_prefix(place, {**packed, **shared} if place else packed))
                self.count += 1
        return record

    def neighbours(self, client: ClientId) -> list[ClientId]:
        """Return the other clients whose models were in the last message to a client."""
        return self.owners.get(client, [client])[1:]

    def mismatch(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Say in a few words why arrays are not updates of the models that were sent; None if they are.

        The arrays must also hold the client's own model if, and only if, the server does not have it yet. An update may
        omit arrays; updates of buffers are accepted only from the model's owner.
        """
        layout, updates = self.models.layout, by_prefix(arrays)
        new = updates.pop(NEW_MODEL, None)
        if (new is None) != (client in self.models):
            return "it holds a model where an update is expected" if new else "its model is missing"
        if new is not None and (difference := layout.mismatch(new)) is not None:
            return difference
        places = {str(place) for place in range(len(self.owners[client]))}
        for prefix, update in updates.items():
            if prefix not in places:
                return f"arrays {prefix!r} belong to no model that was sent"
            if (difference := layout.mismatch(update, whole=False)) is not None:
                return difference
            for name in update:
                if prefix != "0" and layout.slices[name].start >= layout.num_parameters:
                    return f"array {name!r} may be changed by the model's owner alone"
        return None

    def update_norm(self, arrays: Mapping[str, np.ndarray]) -> float | None:
        """Return the largest norm of the updates; a model that is new to the server does not count as an update.

        None if there is no update.
        """
        updates = (update for prefix, update in by_prefix(arrays).items() if prefix != NEW_MODEL)
        return max(map(self.length, updates), default=None)

    def length(self, update: Mapping[str, np.ndarray]) -> float:
        """Return the L2 norm of an update of one model, over the parameters."""
        return norm(update[name] for name in self.models.layout.parameters if name in update)

    def scaled_updates(self, arrays: Mapping[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
        """Return updates times a factor; a model that is new to the server is unchanged."""
        zero = np.zeros(())
        return {
            name: array if name.startswith(f"{NEW_MODEL}/") else scaled({name: array}, {name: zero}, factor)[name]
            for name, array in arrays.items()
        }

    def forget_packed(self) -> None:
        """Drop the packed models; to be called before the models change."""
        self._packed = {}


class Updates:
    """Sums of clients' updates of each other's models; the bits do not depend on the order of arrival.

    Parameters
    ----------
    sent : SentModels
        The models that the clients received.
    order : sequence of client ids
        The order in which the clients' updates are added.
    steps : OptimizerSteps, optional
        If given, updates are gradients: at the end it moves each model by the sum of its gradients. Otherwise updates
        are changes that are added to the model.
    bound : float
        If not 0, an update by another client than the model's owner is shortened to at most this times the length of
        the owner's last update. Lengths are L2 norms over the parameters.
    lengths : dict, optional
        owner -> length of the last update of its own model, which this object keeps up to date. An update of a model
        whose owner has sent none counts as 0.

    Attributes
    ----------
    shortened : dict
        client -> number of its updates that were shortened.
    """

    def __init__(
        self,
        sent: SentModels,
        order: Sequence[ClientId],
        steps: OptimizerSteps | None = None,
        bound: float = 0.0,
        lengths: dict[ClientId, float] | None = None,
    ) -> None:
        self._sent = sent
        self._steps = steps
        self._bound = bound
        self._lengths = {} if lengths is None else lengths
        self._bounded: list[tuple[ClientId, ClientId, Mapping[str, np.ndarray]]] = []  # sender, owner, update
        self.shortened: dict[ClientId, int] = {}
        self._gradients: dict[ClientId, np.ndarray] = {}  # owner -> sum, (d,)
        self._in_turn: InTurn[Mapping[str, Mapping[str, np.ndarray]]] = InTurn(order, self._add)

    def add(self, client: ClientId, parts: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Add a client's updates, by place, and under NEW_MODEL its own model if the server does not have it yet."""
        self._in_turn.add(client, parts)

    def _add(self, client: ClientId, parts: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        if NEW_MODEL in parts:
            self._sent.models.put(client, parts[NEW_MODEL])
        for prefix, update in parts.items():
            if prefix == NEW_MODEL:
                continue
            owner = self._sent.owners[client][int(prefix)]
            if self._bound and owner != client:
                self._bounded.append((client, owner, update))  # the owner's own update may still come
                continue
            if self._bound:
                self._lengths[owner] = self._sent.length(update)
            self._apply(owner, update)

    def _apply(self, owner: ClientId, update: Mapping[str, np.ndarray]) -> None:
        row, slices = self._sent.models.row(owner), self._sent.models.layout.slices  # (d,)
        if self._steps is not None:
            row = self._gradients.setdefault(owner, np.zeros_like(row))
        for name, array in update.items():
            row[slices[name]] += array.reshape(-1)

    def _apply_bounded(self) -> None:
        for client, owner, update in self._bounded:
            length, most = self._sent.length(update), self._bound * self._lengths.get(owner, 0.0)
            if length > most:
                self.shortened[client] = self.shortened.get(client, 0) + 1
                update = {name: (most / length) * array for name, array in update.items()}
            self._apply(owner, update)
        self._bounded = []

    def finish(self) -> None:
        """Add the updates that still wait for their turn or for a bound, and move models by their gradients."""
        self._in_turn.finish()
        self._apply_bounded()
        trained = self._sent.models.layout.num_parameters
        for owner in in_order(self._gradients):
            row, gradient = self._sent.models.row(owner), self._gradients.pop(owner)
            if self._steps is not None:
                self._steps.move(owner, row[:trained], gradient[:trained])
            row[trained:] += gradient[trained:]  # buffers of normalisation layers
