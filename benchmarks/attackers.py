"""Clients that attack: their replies are altered at the edge of the ClientApp, so that every method can be attacked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord
from flwr.clientapp import ClientApp

from kindred import Site, make_client_app
from kindred.baselines.scaffold import CONTROL
from kindred.client.site import LoadSite
from kindred.engine.admission import MAX_EXAMPLES, norm
from kindred.engine.sent_models import NEW_MODEL
from kindred.messages import (
    ARRAYS,
    IDENTITY_QUERY,
    METHOD,
    NUM_EXAMPLES,
    SERVER_ROUND,
    by_prefix,
    config_of,
    read_record,
    records_of,
    seed_for,
    to_record,
)
from kindred.perfed_ckt import CENTROIDS, LOGITS, nearest_centroid

Arrays = dict[str, np.ndarray]

# --- Attacks ------------------------------------------------------------------------------------------


def flipped(times: float, change: Arrays, rng: np.random.Generator) -> Arrays:
    """Return so many times the change in the opposite direction."""
    return {name: -times * array for name, array in change.items()}


def noise(change: Arrays, rng: np.random.Generator) -> Arrays:
    """Return a change in a random direction, as long as the honest one."""
    drawn = {name: rng.standard_normal(array.shape) for name, array in change.items()}
    factor = norm(change.values()) / max(norm(drawn.values()), 1e-12)
    return {name: factor * array for name, array in drawn.items()}


def huge(change: Arrays, rng: np.random.Generator) -> Arrays:
    """Return a change of 1e14 in each coordinate: little below the largest number that is admitted."""
    return {name: np.full(array.shape, 1e14) for name, array in change.items()}


def nothing(change: Arrays, rng: np.random.Generator) -> Arrays:
    """Return no change: the client sends what it received."""
    return {name: np.zeros(array.shape) for name, array in change.items()}


@dataclass(frozen=True)
class Attack:
    """An attack by a client.

    Attributes
    ----------
    changed : callable, optional
        Given the change that the client would report, and a generator, returns the one that it does report; by default
        the same.
    claims : int
        Number of training samples that it claims, from its introduction on; 0: its true number.
    shuffles : bool
        Whether it trains on its labels in a random order.
    """

    changed: Callable[[Arrays, np.random.Generator], Arrays] | None = None
    claims: int = 0
    shuffles: bool = False


ATTACKS: Mapping[str, Attack] = {
    "flip x10": Attack(partial(flipped, 10)),
    "flip x2": Attack(partial(flipped, 2)),  # near the length at which the biweight lets most through
    "noise": Attack(noise),
    "labels": Attack(shuffles=True),
    "huge": Attack(huge),
    "free rider": Attack(nothing, claims=10**6),
    "claim": Attack(claims=MAX_EXAMPLES),
    "flip and claim": Attack(partial(flipped, 10), claims=MAX_EXAMPLES),
}
"""The attacks by name: the columns of the table."""


def start_of(method: str, received: Arrays, sent: Arrays) -> Arrays:
    """Return the arrays in relation to which the floats of a training reply are a change.

    These are the model in the message; of several models the one nearest to the reply. The reply of PerFed-CKT has
    class probabilities, which are compared with the nearest centroid. Some arrays of FedeRiCo and SCAFFOLD are changes
    themselves. A model that the server does not have yet is no change.
    """
    floats = {name: array for name, array in sent.items() if np.issubdtype(array.dtype, np.floating)}
    models = [part for part in by_prefix(received).values() if floats.keys() <= part.keys()]
    start = min(models, key=lambda model: norm(floats[name] - model[name] for name in floats), default={})
    start = {name: array for name, array in {**floats, **start, **received}.items() if name in floats}
    if method == "federico":
        start |= {name: np.zeros_like(array) for name, array in floats.items() if not name.startswith(f"{NEW_MODEL}/")}
    if method == "scaffold":
        start |= {name: np.zeros_like(array) for name, array in floats.items() if name.startswith(f"{CONTROL}/")}
    if LOGITS in floats:
        centroids = received.get(CENTROIDS, np.full((1, *floats[LOGITS].shape), 1 / floats[LOGITS].shape[1]))
        start[LOGITS] = centroids[nearest_centroid(floats[LOGITS], centroids)]
    return start


def attacked(attack: Attack, method: str, received: Arrays, sent: Arrays, rng: np.random.Generator) -> Arrays:
    """Return the arrays that an attacker sends in place of the honest ones."""
    if attack.changed is None:
        return sent
    start = start_of(method, received, sent)
    change = attack.changed({name: sent[name] - start[name] for name in start}, rng)
    found = {name: (start[name] + change[name]).astype(sent[name].dtype) for name in start}
    if LOGITS in found:  # anything but probabilities is refused
        positive = found[LOGITS].clip(0, None).astype(np.float64) + 1e-9
        found[LOGITS] = (positive / positive.sum(axis=1, keepdims=True)).astype(sent[LOGITS].dtype)
    return {name: found.get(name, array) for name, array in sent.items()}  # in the order of the reply


class AttackedApp(ClientApp):
    """A ClientApp whose attackers alter their replies.

    Parameters
    ----------
    app : ClientApp
        The honest one.
    attack : Attack
        `shuffles` is the data's matter, see `with_shuffled_labels`.
    attackers : collection of int
        Their partitions (`partition-id` of the node config).
    """

    def __init__(self, app: ClientApp, attack: Attack, attackers: Collection[int]) -> None:
        super().__init__()
        self.app, self.attack, self.attackers = app, attack, attackers

    def __call__(self, message: Message, context: Context) -> Message:
        kind, asked = message.metadata.message_type, message.content
        client = context.node_config["partition-id"]
        received = {name: array for each in records_of(asked, ArrayRecord) for name, array in read_record(each).items()}
        config = config_of(asked)
        reply = self.app(message, context)
        if client not in self.attackers or reply.has_error():
            return reply
        if kind == MessageType.TRAIN:
            rng = np.random.default_rng(seed_for("attack", config.get("seed", 0), client, config[SERVER_ROUND]))
            (arrays,), (metrics,) = records_of(reply.content, ArrayRecord), records_of(reply.content, MetricRecord)
            changed = attacked(self.attack, str(config[METHOD]), received, read_record(arrays), rng)
            reply.content[ARRAYS] = to_record(changed)
            if self.attack.claims:
                metrics[NUM_EXAMPLES] = self.attack.claims
        elif kind == IDENTITY_QUERY and self.attack.claims:
            for about in records_of(reply.content, ConfigRecord):
                about[NUM_EXAMPLES] = self.attack.claims
        return reply


def with_shuffled_labels(load: LoadSite, attackers: Collection[int]) -> LoadSite:
    """Return a function that loads sites as `load` does, those of attackers with training labels in a random order."""

    def loaded(context: Context) -> Site:
        site, client = load(context), int(context.node_config["partition-id"])
        if client not in attackers:
            return site
        x, y = site.train
        return replace(site, train=(x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(client))]))

    return loaded


def attacked_app(load: LoadSite, attack: Attack, attackers: Collection[int]) -> ClientApp:
    """Return the library's ClientApp with attackers among its clients."""
    return AttackedApp(
        make_client_app(with_shuffled_labels(load, attackers) if attack.shuffles else load), attack, attackers
    )
