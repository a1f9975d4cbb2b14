"""A ClientApp as somebody else would write it for FedProx, and Grids on which things go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from strategies import InlineGrid

SIZE = 4


def initial() -> ArrayRecord:
    """A model of 2 x 2 weights, a running mean, and a counter."""
    return ArrayRecord({
        "layer.weight": _array(np.zeros((2, 2), np.float32)),
        "norm.running_mean": _array(np.zeros(3, np.float32)),
        "norm.num_batches_tracked": _array(np.array(0)),
    })


def _array(values: np.ndarray) -> Array:
    return Array(np.asarray(values))


def target(client: int) -> np.ndarray:
    """What a client's data ask for: clients 0 and 1, 2 and 3, ... want nearly the same."""
    return np.full((2, 2), 1.0 + client // 2 + 0.01 * client, np.float32)


def plain_app(evaluates_in_training: bool = False) -> ClientApp:
    """Ten steps towards the client's target under mu/2 ||w - w_received||^2; knows no query."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        client = context.node_config["partition-id"]
        received = {name: array.numpy() for name, array in message.content["arrays"].items()}
        mu = message.content["config"].get("proximal-mu", 0.0)
        w = received["layer.weight"].copy()
        for _ in range(10):
            w -= np.float32(0.1) * ((w - target(client)) + np.float32(mu) * (w - received["layer.weight"]))
        reply = {
            "layer.weight": _array(w),
            "norm.running_mean": _array(received["norm.running_mean"] + np.float32(client + 1)),
            "norm.num_batches_tracked": _array(received["norm.num_batches_tracked"] + client + 1),
        }
        metrics = {"train_loss": float(((w - target(client)) ** 2).sum()), "num-examples": 10 * (client + 1)}
        if evaluates_in_training:
            metrics |= {"trained-accuracy": closeness(w, client), "num-test-examples": 5,
                        "received-accuracy": closeness(received["layer.weight"], client),
                        "tuned-accuracy": closeness(w, client)}
        return Message(RecordDict({"arrays": ArrayRecord(reply), "metrics": MetricRecord(metrics)}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        client = context.node_config["partition-id"]
        w = message.content["arrays"]["layer.weight"].numpy()
        metrics = {"eval_loss": float(((w - target(client)) ** 2).sum()), "eval_acc": closeness(w, client),
                   "num-examples": 5}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def closeness(w: np.ndarray, client: int) -> float:
    return float(np.exp(-np.abs(w - target(client)).mean()))


class ShuffledGrid(InlineGrid):
    """Replies come in an order of their own."""

    def __init__(self, app: ClientApp, num_clients: int, seed: int) -> None:
        super().__init__(app, num_clients)
        self._random = random.Random(seed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        waiting = [message_id for message_id in message_ids if message_id in self._waiting]
        return super().pull_messages([self._random.choice(waiting)]) if waiting else []


class FaultyGrid(InlineGrid):
    """`fate(round, client)` says what becomes of a training message: "ok", "error", "silent", or a function
    that changes the reply's content."""

    def __init__(self, app: ClientApp, num_clients: int, fate: Callable[[int, int], object]) -> None:
        super().__init__(app, num_clients)
        self._fate = fate

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            message = self._waiting.get(message_id)
            if message is None:
                continue
            if message.metadata.message_type != "train":
                replies += super().pull_messages([message_id])
                continue
            fate = self._fate(int(message.metadata.group_id), message.metadata.dst_node_id - 1001)
            if fate == "silent":
                continue
            if fate == "error":
                reply = Message(Error(0, "the worker\nwas lost"), reply_to=self._waiting.pop(message_id))
                # As Flower reports a node that died: signed by the SuperLink, not by the node.
                reply.metadata.__dict__["_src_node_id"] = 1
                replies.append(reply)
                continue
            (reply,) = super().pull_messages([message_id])
            if callable(fate):
                fate(reply.content)
            replies.append(reply)
        return replies
