"""Growth of the cost of a round: with the number of clients, and with the size of the model.

    python -m benchmarks.scale [--methods NAME,...|all] [--clients 100,1000]

Prints Markdown tables, for every registered method with its default settings and all clients in every round. Measured
are bytes per round, the server's seconds per round and its peak memory:

- with 100 and 1,000 clients and a model of 3,700 numbers,
- with 8 clients and models of 10 and 45 MB,
- with 30 and 300 clients and a model of 1 MB.

The tables also show how each cost grows, and its extrapolation to 100,000 clients.

Each measurement has its own process, which is the server. Its clients generate their replies one at a time, when the
server requests them; messages to them are counted and released, as over a network. So seconds are those of the
strategy, without clients and grid, and memory is the strategy's alone. A SuperLink also holds the messages in transit,
at most a round's bytes. Memory is the peak over four rounds and the closing evaluation. Seconds are of the second and
third round: the last round may differ (Kindred's does).

There are 8 kinds of clients, and their models differ accordingly; in Clustered FL clusters are divided in each round.
PerFed-CKT sends no model: its public set always has 2,000 images of 10 classes.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from kindred import REGISTRY, InlineGrid
from kindred.messages import (
    ARRAYS,
    CLIENT_ID,
    CONFIG,
    METHOD,
    METHODS,
    METRICS,
    NUM_CLASSES,
    NUM_EXAMPLES,
    NUM_PUBLIC,
    NUM_TEST_EXAMPLES,
    PUBLIC_SET,
    TUNED,
    VERSION_KEY,
    by_prefix,
    decode,
    records_of,
    to_record,
    with_prefix,
)
from kindred.versions import VERSION

from . import markdown, methods_named

CLIENTS = (100, 1000)
MEGABYTES, FEW_CLIENTS = (10, 45), 8
MANY, MANY_MEGABYTES = (30, 300), 1
FAR = 100_000
ROUNDS = 3

INPUTS, CLASSES, HIDDEN = 64, 10, 50
PUBLIC, KINDS = 2000, 8

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Measured:
    """Measured costs of a round.

    Attributes
    ----------
    messages : int
        Messages to clients; each has a reply.
    down, up : int
        Bytes to the clients, and from them.
    seconds : float
        The server's time.
    memory : int
        Peak memory of the process above its memory before the run, in bytes.
    """

    messages: int
    down: int
    up: int
    seconds: float
    memory: int


# --- The model and the clients ------------------------------------------------------------------------


def hidden_for(megabytes: float) -> int:
    """Return the width of the two-layer network whose float32 numbers take this many megabytes."""
    return max(round(megabytes * 1e6 / 4 / (INPUTS + CLASSES)), 1)


def network(hidden: int) -> Any:
    """Return the network, for a server that computes with it."""
    from collections import OrderedDict

    from torch import nn

    return nn.Sequential(
        OrderedDict(
            body=nn.Linear(INPUTS, hidden, bias=False), act=nn.ReLU(), head=nn.Linear(hidden, CLASSES, bias=False)
        )
    )


def model_of(hidden: int) -> Arrays:
    """Return the arrays of the network's state dict."""
    rng = np.random.default_rng(0)
    return {
        "body.weight": rng.standard_normal((hidden, INPUTS), np.float32) / np.float32(INPUTS**0.5),
        "head.weight": rng.standard_normal((CLASSES, hidden), np.float32) / np.float32(hidden**0.5),
    }


def trained(model: Arrays, client: int) -> Arrays:
    """Return a client's model: one number of the body is changed for its kind, and one for the client."""
    body = model["body.weight"].copy()
    body.flat[client % KINDS] += 1
    body.flat[KINDS + client % (body.size - KINDS)] += 0.5
    return {**model, "body.weight": body}


def answer(model: Arrays, client: int, config: ConfigRecord, received: Sequence[str]) -> RecordDict:
    """Return a client's reply to TRAIN, with all that the server uses, in the form of the method.

    Parameters
    ----------
    model : dict of str to ndarray
        The initial model of all clients.
    client : int
    config : ConfigRecord
        The ConfigRecord of the message.
    received : sequence of str
        The names of the arrays in the message.
    """
    name = str(config[METHOD])
    metrics: dict[str, float] = {
        NUM_EXAMPLES: 10,
        NUM_TEST_EXAMPLES: 5,
        f"{REGISTRY[name].strategy.personal}-accuracy": 0.5,
    }
    reported: dict[str, Any] = {}
    if name == "perfed-ckt":
        arrays, reported = {"logits": probabilities(client)}, {PUBLIC_SET: "public"}
    else:
        arrays = trained(model, client)
    places = list(by_prefix(dict.fromkeys(received)))
    if name == "fedem":
        arrays = {key: array for place in places for key, array in with_prefix(place, arrays).items()}
    elif name == "federico":
        owners = decode(config["models"])
        reported = {"losses": [0.1 if (int(other) - client) % KINDS == 0 else 1.0 for other in owners]}
        arrays = {} if "0" in places else with_prefix("model", arrays)
        for place in range(len(owners)):
            arrays |= with_prefix(place, {key: np.full_like(array, 1e-3) for key, array in model.items()})
    elif name == "fedfomo":
        reported = {"weights": [1.0, *[0.0] * (len(places) - 1)]}
    elif name == "hypcluster":
        metrics["cluster"] = client % len(places)
    elif name == "scaffold":
        arrays |= with_prefix("control", {key: np.zeros_like(array) for key, array in model.items()})
    elif name == "apfl":
        metrics["mixing-weight"] = 0.5
    elif name == "fedrep":
        head = cast(list[str], config["head"])
        arrays = {key: array for key, array in arrays.items() if key not in head}
    return RecordDict({ARRAYS: to_record(arrays), METRICS: MetricRecord({**metrics}), CONFIG: ConfigRecord(reported)})


def probabilities(client: int) -> np.ndarray:
    """Return class probabilities for the public images, shape (P, N)."""
    kind, own = (np.random.default_rng(seed) for seed in (client % KINDS, KINDS + client))
    scores = 2 * kind.random((PUBLIC, CLASSES), np.float32) + own.random((PUBLIC, CLASSES), np.float32)
    return scores / scores.sum(axis=1, keepdims=True)


def introduction(client: int) -> ConfigRecord:
    return ConfigRecord(
        {
            CLIENT_ID: client,
            METHODS: list(REGISTRY),
            VERSION_KEY: VERSION,
            NUM_EXAMPLES: 10,
            PUBLIC_SET: "public",
            NUM_PUBLIC: PUBLIC,
            NUM_CLASSES: CLASSES,
        }
    )


class ServerAlone(InlineGrid):
    """A grid whose clients take no memory, and which measures the time of grid and clients.

    Attributes
    ----------
    messages : int
        Number of messages sent.
    seconds : float
        Time that grid and clients have taken.
    """

    def __init__(self, model: Arrays, num_clients: int) -> None:
        super().__init__(ClientApp(), num_clients)
        self._model = model
        self._received: dict[str, list[str]] = {}  # the names of the arrays in a message
        self.messages, self.seconds = 0, 0.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids: list[str] = []
        for message in messages:
            started = time.perf_counter()
            names = [key for record in records_of(message.content, ArrayRecord) for key in record]
            message.content = RecordDict(
                {key: record for key, record in message.content.items() if not isinstance(record, ArrayRecord)}
            )
            (message_id,) = super().push_messages([message])
            self._received[message_id] = names
            ids.append(message_id)
            self.messages += 1
            self.seconds += time.perf_counter() - started
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        started = time.perf_counter()
        replies = []
        if (message_id := next((each for each in message_ids if each in self._waiting), None)) is not None:
            message = self._waiting.pop(message_id)
            replies = [Message(self._reply(message, self._received.pop(message_id)), reply_to=message)]
        self.seconds += time.perf_counter() - started
        return replies

    def _reply(self, message: Message, received: Sequence[str]) -> RecordDict:
        client = int(self._contexts[message.metadata.dst_node_id].node_config["partition-id"])
        if message.metadata.message_type.startswith(MessageType.QUERY):
            return RecordDict({CONFIG: introduction(client)})
        (config,) = records_of(message.content, ConfigRecord)
        if message.metadata.message_type == MessageType.TRAIN:
            return answer(self._model, client, config, received)
        content = RecordDict({METRICS: MetricRecord({"accuracy": 0.5, "loss": 1.0, NUM_EXAMPLES: 5})})
        if REGISTRY[str(config[METHOD])].strategy.personal == TUNED:
            content[ARRAYS] = to_record(trained(self._model, client))
        return content


# --- Measuring ----------------------------------------------------------------------------------------


def measure(name: str, clients: int, hidden: int = HIDDEN, store: str = "memory") -> Measured:
    """Run a method in this process.

    Raises
    ------
    RuntimeError
        A reply was not used: the clients' replies do not fit the method.
    """
    _run(name, 3, 2, "memory")  # a first small run, so that one-time costs are not counted
    gc.collect()
    return _run(name, clients, hidden, store)


def _run(name: str, clients: int, hidden: int, store: str) -> Measured:
    from kindred.server_app.app import make_strategy
    from kindred.server_app.config import Config

    given: dict[str, Any] = {}
    if REGISTRY[name].distils:
        import torch

        given = {
            "models": {"network": lambda: network(hidden)},
            "device": "cpu",
            "public": torch.rand(PUBLIC, INPUTS, generator=torch.Generator().manual_seed(0)),
        }
    model = model_of(hidden)
    initial = to_record(model) if REGISTRY[name].models_travel else ArrayRecord()
    of_method: dict[str, Any] = {"store": store}
    strategy = make_strategy(Config(strategy=name, num_clients=clients, **of_method), **given)
    grid = ServerAlone(model, clients)
    seconds, messages = [], []
    before, forget = memory_now(), forget_peak()
    began, of_others, sent = time.perf_counter(), 0.0, 0

    def on_round(server_round: int) -> None:
        nonlocal began, of_others, sent
        now = time.perf_counter()
        if 1 < server_round <= ROUNDS:
            seconds.append(now - began - (grid.seconds - of_others))
            messages.append(grid.messages - sent)
        began, of_others, sent = time.perf_counter(), grid.seconds, grid.messages

    strategy.start(grid, initial, ROUNDS + 1, on_round=on_round)
    peak = forget()
    if refused := [row["status"] for row in strategy.history.rows if row["status"] != "ok"]:
        raise RuntimeError(f"{name}: {refused[0]}")
    (line,) = (line for line in strategy.history.rounds if line["round"] == ROUNDS)
    return Measured(
        messages[-1], line["bytes-down"], line["bytes-up"], float(np.median(seconds)), int(max(peak - before, 0))
    )


def memory_now() -> int:
    return psutil.Process().memory_info().rss


def forget_peak() -> Callable[[], float]:
    """Reset the peak memory of this process; return a function that returns the peak since then, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux: the kernel's own record
        Path("/proc/self/clear_refs").write_text("5")
        return lambda: next(
            1024 * int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )
    from .cloud_models import peak

    return peak


def in_a_process(name: str, clients: int, hidden: int = HIDDEN, store: str = "memory") -> Measured:
    """Call `measure` in a new process."""
    print(f"{name}: {clients} clients, {4 * hidden * (INPUTS + CLASSES) / 1e6:.3g} MB, {store}", file=sys.stderr)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(measure, name, clients, hidden, store).result()


# --- How it grows -------------------------------------------------------------------------------------


def growth(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the exponent a of cost ~ size^a: the slope of a line through the points' logarithms.

    Only sizes within a factor of 10 of the largest are used: with smaller ones, a round's fixed costs may hide the
    growth.
    """
    points = [(size, max(cost, 1e-12)) for size, cost in zip(sizes, costs) if 10 * size >= max(sizes)]
    if len(points) < 2:
        return float("nan")
    logarithms = np.log(points)  # (k, 2)
    return round(float(np.polyfit(logarithms[:, 0], logarithms[:, 1], 1)[0]), 3)


def at(far: float, sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Extrapolate the cost to another size, from the last measurement."""
    return costs[-1] * (far / sizes[-1]) ** growth(sizes, costs)


# --- Tables -------------------------------------------------------------------------------------------


def size_text(count: float) -> str:
    """Return bytes as text, to two or three figures."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{_figures(count / size)} {unit}"
    return f"{count:.0f} B"


def time_text(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 1.995 * length:
            return f"{_figures(seconds / length)} {unit}"
    return f"{_figures(1000 * seconds)} ms"


def _figures(number: float) -> str:
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"


COSTS: dict[str, tuple[Callable[[Measured], float], Callable[[float], str]]] = {
    "server's time": (lambda found: found.seconds, time_text),
    "memory": (lambda found: found.memory, size_text),
}


def traffic_table(found: dict[str, Measured], clients: int) -> str:
    """Return a table of a client's messages and bytes in a round, from measurements with so many clients."""
    rows = [
        [
            name,
            f"{each.messages / clients:g}",
            *(size_text(count / clients) for count in (each.down, each.up)),
        ]
        for name, each in found.items()
    ]
    return markdown(["method", "messages", "down", "up"], rows)


def cost_table(
    found: dict[str, list[Measured]], on_disk: dict[str, Measured], sizes: Sequence[float], symbol: str, unit: str
) -> str:
    """Return a table of the server's costs: a row for each method, a column for each size, and the growth.

    Parameters
    ----------
    found : dict
        method -> measurements at each of the sizes.
    on_disk : dict
        method -> measurement at the last size, with the models on disk.
    symbol, unit : str
        Symbol of the size, as in m^2, and the unit after its numbers.
    """
    head = ["method"]
    for cost in COSTS:
        head += [f"{cost}, {size:,g} {unit}" for size in sizes] + [f"~ {symbol}^"]
    rows = []
    for name, line in found.items():
        row = [name]
        for of, text in COSTS.values():
            values = [of(each) for each in line]
            row += [*map(text, values), f"{growth(sizes, values) + 0:.1f}"]
        rows.append([*row, size_text(on_disk[name].memory) if name in on_disk else ""])
    return markdown([*head, "memory, store=disk"], rows)


def far_table(columns: Sequence[tuple[str, Sequence[float], dict[str, list[Measured]]]]) -> str:
    """Return a table of the server's costs extrapolated to `FAR` clients, for each series of measurements."""
    head = ["method"] + [f"{cost}, {what}" for what, _, _ in columns for cost in COSTS]
    rows = [
        [name]
        + [
            text(at(FAR, sizes, [of(each) for each in found[name]]))
            for _, sizes, found in columns
            for of, text in COSTS.values()
        ]
        for name in columns[0][2]
    ]
    return markdown(head, rows)


def report(methods: Sequence[str], clients: Sequence[int], megabytes: Sequence[float], many: Sequence[int]) -> str:
    """Measure, and return the tables."""
    with_store = [name for name in methods if "store" in REGISTRY[name]]
    wide = {size: hidden_for(size) for size in (*megabytes, MANY_MEGABYTES)}
    by_clients = {name: [in_a_process(name, m) for m in clients] for name in methods}
    by_size = {name: [in_a_process(name, FEW_CLIENTS, wide[size]) for size in megabytes] for name in methods}
    by_many = {name: [in_a_process(name, m, wide[MANY_MEGABYTES]) for m in many] for name in methods}
    clients_disk = {name: in_a_process(name, clients[-1], store="disk") for name in with_store}
    size_disk = {name: in_a_process(name, FEW_CLIENTS, wide[megabytes[-1]], "disk") for name in with_store}
    many_disk = {name: in_a_process(name, many[-1], wide[MANY_MEGABYTES], "disk") for name in with_store}
    numbers = HIDDEN * (INPUTS + CLASSES)
    small, large = size_text(4 * numbers), f"{MANY_MEGABYTES:g} MB"
    return "\n\n".join(
        [
            f"For a client in a round, with a model of {large}:",
            traffic_table({name: line[-1] for name, line in by_many.items()}, many[-1]),
            f"A round with a model of {numbers:,} numbers ({small}), m clients, all of them in it:",
            cost_table(by_clients, clients_disk, clients, "m", "clients"),
            f"A round with {FEW_CLIENTS} clients, models of d bytes:",
            cost_table(by_size, size_disk, megabytes, "d", "MB"),
            f"A round with a model of {large}, m clients, all of them in it:",
            cost_table(by_many, many_disk, many, "m", "clients"),
            f"A round with {FAR:,} clients, all of them in it, extrapolated:",
            far_table([(small, clients, by_clients), (large, many, by_many)]),
        ]
    )


def _counts(text: str) -> list[int]:
    counts = sorted({int(part) for part in text.split(",") if part.isdecimal()})
    if len(counts) != len(text.split(",")) or counts[0] < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed: different numbers of 2 or more, separated by commas"
        )
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--methods", type=methods_named, default="all", help="names, separated by commas (default: all)"
    )
    parser.add_argument(
        "--clients", type=_counts, default=list(CLIENTS), help="separated by commas (default: 100,1000)"
    )
    arguments = parser.parse_args()
    os.environ["FLWR_LOG_LEVEL"] = "ERROR"
    print(report(arguments.methods, arguments.clients, MEGABYTES, MANY))


if __name__ == "__main__":
    main()
