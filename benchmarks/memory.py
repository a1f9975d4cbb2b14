"""The server's memory over a run, against the size of the models that it keeps, in memory and on disk.

    python -m benchmarks.memory [CLIENTS] [MILLIONS OF PARAMETERS] [CLIENTS A ROUND] [ROUNDS]

The defaults are HeurFedAMP with 1,000 clients, the digits CNN (no number of parameters, or 0) and 20 rounds of 100
clients. With a number of parameters, models are kept on disk only. Each run has its own process, whose memory is the
server's: its clients change one number of the model that they receive, send it back, one after the other, and keep
nothing. Memory is the increase over the process's memory before the run. It is read at every message; the largest value
counts.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
import psutil
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from kindred import REGISTRY, InlineGrid
from kindred.messages import read_record, records_of, to_record

OWN_SETTINGS = {name: {"sigma": 100.0, "self_weight": 0.2} for name in ("fedamp", "heurfedamp")}


@dataclass
class Measured:
    """Measurements of a run, by round; an evaluation after the last round is one more entry.

    Attributes
    ----------
    models : list of int
        Bytes of the models that the server keeps.
    peaks : list of int
        Peak memory of the process in the round, in bytes above its memory before the run.
    seconds : list of float
    """

    models: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Ratio of the peak memory to the size of the models that are kept at the end."""
        return max(self.peaks) / self.models[-1]


class WatchedGrid(InlineGrid):
    """A grid that reads the memory of this process at every message.

    Attributes
    ----------
    peak : int
        The largest memory since `peak` was set to 0, in bytes.
    """

    def __init__(self, app: ClientApp, num_clients: int) -> None:
        super().__init__(app, num_clients)
        self._memory_info = psutil.Process().memory_info
        self.peak = 0

    def look(self) -> int:
        now = self._memory_info().rss
        self.peak = max(self.peak, now)
        return now

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = super().push_messages(messages)
        self.look()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = super().pull_messages(message_ids)
        self.look()
        return replies


def changing_app() -> ClientApp:
    app = ClientApp()
    metrics = {"num-examples": 1, "num-test-examples": 1, "accuracy": 0.5, "trained-accuracy": 0.5}

    @app.train()
    def train(message: Message, context: Any) -> Message:
        arrays = read_record(records_of(message.content, ArrayRecord)[0])
        name = next(iter(arrays))
        changed = arrays[name].copy()
        changed.flat[context.node_config["partition-id"] % changed.size] += 1
        content = RecordDict({"arrays": to_record({**arrays, name: changed}), "metrics": MetricRecord({**metrics})})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({**metrics})}), reply_to=message)

    return app


def initial(millions: float) -> ArrayRecord:
    if millions:
        return to_record({"weight": np.random.default_rng(0).standard_normal(int(millions * 1e6), np.float32)})
    from kindred import make_model

    model = make_model("digits-cnn", (1, 8, 8), 10, 0)
    return to_record({name: tensor.numpy() for name, tensor in model.state_dict().items()})


def measure(
    store: str,
    name: str = "heurfedamp",
    clients: int = 1000,
    millions: float = 0,
    a_round: int = 100,
    rounds: int = 20,
    closing: bool = True,
    full: bool = False,
) -> Measured:
    """Run a method in this process.

    Parameters
    ----------
    store, name
        Where models are kept, and the name of the method.
    clients, millions, a_round, rounds
        As in the description of this module.
    closing : bool
        Whether clients that were never sampled are evaluated at the end.
    full : bool
        Whether every client has a model from the end of the first round.
    """
    model = initial(millions)
    settings = {**OWN_SETTINGS.get(name, {}), "store": store, "fraction_evaluate": float(closing)}
    # A first small run, so that imports and other one-time costs are not counted.
    REGISTRY[name].strategy(**settings, fraction_train=0.5).start(InlineGrid(changing_app(), 20), initial(0), 3)
    gc.collect()
    strategy = REGISTRY[name].strategy(**settings, fraction_train=a_round / clients)
    grid = WatchedGrid(changing_app(), clients)
    before, found, started = grid.look(), Measured(), time.perf_counter()

    def on_round(server_round: int) -> None:
        nonlocal started
        found.seconds.append(time.perf_counter() - started)
        if full:
            strategy.welcome(strategy.clients())
        grid.look()
        found.models.append(len(strategy.models) * strategy.layout.size * strategy.layout.dtype.itemsize)
        found.peaks.append(grid.peak - before)
        grid.peak, started = 0, time.perf_counter()

    strategy.start(grid, model, rounds, on_round=on_round)
    grid.look()
    found.peaks[-1] = max(found.peaks[-1], grid.peak - before)
    return found


def in_a_process(**settings: Any) -> Measured:
    """Call `measure` in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(measure, **settings).result()


def main(clients: int, millions: float, a_round: int, rounds: int) -> None:
    os.environ["FLWR_LOG_LEVEL"] = "ERROR"
    for store in ("disk",) if millions else ("memory", "disk"):
        found = in_a_process(
            store=store,
            clients=clients,
            millions=millions,
            a_round=a_round,
            rounds=rounds,
            closing=not millions,
            full=bool(millions),
        )
        models = found.models[-1]
        print(
            f"{store}: {clients} clients, {models / 1e6:.1f} MB of models, of which {a_round} a round are "
            f"{models * a_round / clients / 1e6:.1f} MB; a round takes {np.median(found.seconds[1:]):.2f} s"
        )
        print(f"largest memory: {max(found.peaks) / 1e6:.1f} MB, over the models' size: {found.ratio:.2f}")


if __name__ == "__main__":
    numbers = [float(argument) for argument in sys.argv[1:]]
    defaults: list[float] = [1000, 0, 100, 20]
    clients, millions, a_round, rounds = (*numbers, *defaults[len(numbers) :])
    main(int(clients), millions, int(a_round), int(rounds))
