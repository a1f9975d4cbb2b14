"""ClientApps as another author would write them, and one of the library with very few samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file

from kindred import Site, make_client_app
from kindred.engine.simulated_state import saved_files
from kindred.messages import CLIENT_ID, IDENTITY_QUERY, VERSION_KEY, by_prefix, in_order, to_record
from kindred.versions import VERSION

SIZE = 4


def initial() -> ArrayRecord:
    """A model of 2 x 2 weights, a running mean, and a counter."""
    return ArrayRecord(
        {
            "layer.weight": _array(np.zeros((2, 2), np.float32)),
            "norm.running_mean": _array(np.zeros(3, np.float32)),
            "norm.num_batches_tracked": _array(np.array(0)),
        }
    )


def _array(values: np.ndarray) -> Array:
    return Array(np.asarray(values))


class Plain(torch.nn.Module):
    """A network whose model is `initial()`, for a server that uses the network; its images are POINTS."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2, bias=False)
        self.norm = torch.nn.Module()
        self.norm.register_buffer("running_mean", torch.zeros(3))
        self.norm.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.tensor([1.0, -1.0])  # the rows of `target` are equal, but classes must differ


POINTS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.5, 0.5], [0.2, -0.7]])


def target(client: int) -> np.ndarray:
    """Optimum of a client's data: clients 0 and 1, 2 and 3, ... have nearly the same one."""
    return np.full((2, 2), 1.0 + client // 2 + 0.01 * client, np.float32)


def plain_app(evaluates_in_training: bool = False) -> ClientApp:
    """Return clients that do ten steps to their target with mu/2 ||w - w_received||^2, and know no query."""
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
            metrics |= {
                "trained-accuracy": closeness(w, client),
                "num-test-examples": 5,
                "received-accuracy": closeness(received["layer.weight"], client),
                "tuned-accuracy": closeness(w, client),
                "between-accuracy": closeness(w, client),
            }
        return Message(RecordDict({"arrays": ArrayRecord(reply), "metrics": MetricRecord(metrics)}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        client = context.node_config["partition-id"]
        w = message.content["arrays"]["layer.weight"].numpy()
        metrics = {
            "eval_loss": float(((w - target(client)) ** 2).sum()),
            "eval_acc": closeness(w, client),
            "num-examples": 5,
        }
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def logits_app(evaluates_in_training: bool = False) -> ClientApp:
    """Return clients of one parameter each, kept in their Context. They step towards their target, and half as fast
    towards the nearest centroid's. Messages have class probabilities of three public inputs."""
    app = ClientApp()
    inputs = np.array([-1.0, 0.5, 2.0])

    def probabilities(own: float) -> np.ndarray:
        first = 1 / (1 + np.exp(-own * inputs))
        return np.stack([first, 1 - first], axis=1).astype(np.float32)  # (P, N)

    def kept(context) -> float:
        return context.state["own"]["value"] if "own" in context.state else 0.1 * context.node_config["partition-id"]

    @app.query("identity")
    def identity(message, context):
        client = context.node_config["partition-id"]
        about = {
            "client-id": context.node_id,
            "num-examples": 10 * (client + 1),
            "public-set": "3-cafe",
            "num-public": 3,
            "num-classes": 2,
        }
        return Message(RecordDict({"config": ConfigRecord(about)}), reply_to=message)

    @app.train()
    def train(message, context):
        client, config, own = context.node_config["partition-id"], message.content["config"], kept(context)
        wanted = float(target(client)[0, 0])
        pull = 0.0
        if "centroids" in message.content["arrays"]:
            centroids = message.content["arrays"]["centroids"].numpy().astype(np.float32)
            nearest = np.square(centroids - probabilities(own)).sum(axis=(1, 2)).argmin()
            pull = float(centroids[nearest][2, 0] - probabilities(own)[2, 0])
        for _ in range(config["local-steps"]):
            own += 0.1 * (wanted - own) + 0.05 * config["distill-weight"] * pull
        context.state["own"] = ConfigRecord({"value": own})
        metrics = {"train_loss": (own - wanted) ** 2, "num-examples": 10 * (client + 1), "model-bytes": 8}
        if evaluates_in_training:
            metrics |= {"trained-accuracy": closeness(own, client), "num-test-examples": 5}
        logits = probabilities(own).astype(config["logits-dtype"])
        return Message(
            RecordDict(
                {
                    "arrays": ArrayRecord({"logits": _array(logits)}),
                    "metrics": MetricRecord(metrics),
                    "config": ConfigRecord({"public-set": "3-cafe"}),
                }
            ),
            reply_to=message,
        )

    @app.evaluate()
    def evaluate(message, context):
        client, own = context.node_config["partition-id"], kept(context)
        metrics = {
            "eval_loss": float(((own - target(client)) ** 2).sum()),
            "eval_acc": closeness(own, client),
            "num-examples": 5,
        }
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def collaboration_app(evaluates_in_training: bool = False) -> ClientApp:
    """FedeRiCo's client for the targets of `plain_app`: each model's loss is its distance from the client's target.

    It keeps no losses: weights are those of the last losses, among the received models.
    """
    app = ClientApp()

    def loss(w: np.ndarray, client: int) -> float:
        return float(((w - target(client)) ** 2).mean())

    def shares(scores: np.ndarray) -> np.ndarray:
        return np.exp(scores) / np.exp(scores).sum()

    def weights_of(arrays: ArrayRecord, count: int, client: int) -> list[np.ndarray]:
        own = np.full((2, 2), 0.1 * client, np.float32)
        return [arrays[f"{k}/layer.weight"].numpy() if f"{k}/layer.weight" in arrays else own for k in range(count)]

    @app.query("identity")
    def identity(message, context):
        about = {"client-id": context.node_id, "methods": ["federico"], VERSION_KEY: VERSION}
        return Message(RecordDict({"config": ConfigRecord(about)}), reply_to=message)

    @app.train()
    def train(message, context):
        client = context.node_config["partition-id"]
        config, arrays = message.content["config"], message.content["arrays"]
        models = weights_of(arrays, len(json.loads(config["models"])), client)
        losses = [loss(w, client) for w in models]
        weights = shares(-np.array(losses) / config["temperature"])
        sent = {}
        if "0/layer.weight" not in arrays:
            sent |= {
                "model/layer.weight": models[0],
                "model/norm.running_mean": np.zeros(3, np.float32),
                "model/norm.num_batches_tracked": np.array(0),
            }
        for k, (w, weight) in enumerate(zip(models, weights)):
            sent[f"{k}/layer.weight"] = (weight * 0.6 * (target(client) - w)).astype(np.float32)
        sent["0/norm.running_mean"] = np.full(3, client + 1, np.float32)
        metrics = {"train_loss": losses[0], "num-examples": 10 * (client + 1)}
        if evaluates_in_training:
            metrics |= {"mixture-accuracy": closeness(models[0], client), "num-test-examples": 5}
        return Message(
            RecordDict(
                {
                    "arrays": ArrayRecord({name: _array(array) for name, array in sent.items()}),
                    "metrics": MetricRecord(metrics),
                    "config": ConfigRecord({"losses": losses}),
                }
            ),
            reply_to=message,
        )

    @app.evaluate()
    def evaluate(message, context):
        client, config = context.node_config["partition-id"], message.content["config"]
        models = weights_of(message.content["arrays"], len(json.loads(config["models"])), client)
        weights = shares(-np.array([loss(w, client) for w in models]) / config["temperature"])
        metrics = {
            "eval_loss": float(sum(weight * loss(w, client) for w, weight in zip(models, weights))),
            "eval_acc": float(sum(weight * closeness(w, client) for w, weight in zip(models, weights))),
            "num-examples": 5,
        }
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


class Small(torch.nn.Module):
    """The model of `small_app`: a body, a normalisation, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2, bias=False)
        self.norm = torch.nn.BatchNorm1d(2)
        self.head = torch.nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer(x)).relu())


def small(seed: int = 0) -> Small:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Small()


def small_site(client: int) -> Site:
    """Site with three classes by angle; from one pair of clients to the next the classes are rotated."""
    generator = torch.Generator().manual_seed(client)

    def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = 2 * torch.pi * torch.rand(count, generator=generator)
        images = torch.stack([angles.cos(), angles.sin()], dim=1)  # (n, 2)
        return images, ((3 * angles / (2 * torch.pi)).long() + client // 2) % 3

    return Site(model=small, train=samples(10 * (client + 1)), test=samples(5))


DIVERGING = {"optimizer": "sgd", "learning-rate": 1000.0, "weight-decay": 1e6}  # weights grow 10^9-fold a step
LITTLE_TRAINING = {"local-epochs": 1, "batch-size": 32, "optimizer": "sgd", "learning-rate": 0.01}


def _with_little_training(answer: Callable[[Message, Context], Message]) -> Callable[[Message, Context], Message]:
    def lighter(message: Message, context: Context) -> Message:
        config = message.content["config"]
        for key in LITTLE_TRAINING.keys() - config.keys():
            config[key] = LITTLE_TRAINING[key]
        return answer(message, context)

    return lighter


def small_app(evaluates_in_training: bool = True) -> ClientApp:
    """The library's own ClientApp, for clients with a few points in the plane, chosen by node number.

    Unless a message sets it, clients train little, as tests do not depend on accuracy.
    """
    app = make_client_app(lambda context: small_site(context.node_config["partition-id"]))
    introduce = app._registered_funcs.pop(IDENTITY_QUERY)
    for kind in ("train.default", "evaluate.default"):
        app._registered_funcs[kind] = _with_little_training(app._registered_funcs[kind])

    @app.query("identity")
    def identity(message, context):
        reply = introduce(message, context)
        reply.content["config"][CLIENT_ID] = context.node_id
        return reply

    return app


def introduced(app: ClientApp, reported: Callable[[Context], Mapping[str, object]]) -> ClientApp:
    """Return the app, whose clients report this too when they connect; those without an identity get one."""
    known = app._registered_funcs.pop(IDENTITY_QUERY, None)

    @app.query("identity")
    def identity(message, context):
        if known:
            reply = known(message, context)
        else:
            about = ConfigRecord({CLIENT_ID: context.node_id, "num-examples": 10})
            reply = Message(RecordDict({"config": about}), reply_to=message)
        reply.content["config"].update(reported(context))
        return reply

    return app


def saved_models(run_id: int) -> dict[object, ArrayRecord]:
    """Models that the clients of a run store on this machine, in order of client; or their mixtures, see below."""
    files = saved_files(run_id, "model") or saved_files(run_id, "mixture")
    return {client: to_record(load_file(files[client])) for client in in_order(files)}


def models_in(record: ArrayRecord) -> list[Mapping[str, Array]]:
    """Models in a client's stored record: its only one, or those of its mixture."""
    if "shares" not in record:
        return [record]
    return [model for prefix, model in by_prefix(record).items() if prefix != "shares"]


def closeness(w: np.ndarray | float, client: int) -> float:
    return float(np.exp(-np.abs(w - target(client)).mean()))
