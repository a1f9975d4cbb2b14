"""A simulated round against the same work in a tuned loop (`tuned_loop`), and each method's cost over FedAvg.

    python -m benchmarks.simulation [--strategies NAME,...|all] [--workloads NAME,...] [--data-dir DIR]
        [--engine local|flower] [--rounds N] [--repeats N]

Workloads, each with 20 clients: `cnn`, the McMahan CNN on Fashion-MNIST's practical non-IID partition with 300 samples
a client, 2 epochs a round with batches of 100 and Adam; `mlp`, the same with a network of two layers; `mlp-10`, this
network with 1 epoch in batches of 10; `digits`, the defaults of `kindred run`. HeurFedAMP, unless other methods are
named. DIR holds Fashion-MNIST as for `kindred run --data-dir`.

The loop does what the method's clients did in the same rounds, by the run's history: as many steps, as many
predictions, and the same evaluations on test data. It runs with a process of one thread for each CPU and with one
process that has them all, and the better one counts. Run and loop alternate; ratios are medians over the repetitions.
Only the last third of the rounds counts, so that start-up rounds do not. Two more rounds follow, because a run's last
rounds may differ (Kindred's do). Memory is the largest proportional set size of all processes of the run and of the
loop, each without what one process has after its imports.

Settings make batches full and methods comparable: PerFed-CKT makes as many steps as the epochs have, FedRep trains the
last layers for as many epochs as the others, public batches are as large as private ones, the public set has 500
samples of Fashion-MNIST and 150 of the digits. Everything else is as in `kindred run`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
import psutil

from kindred import REGISTRY
from kindred.client.state import MIXTURE
from kindred.messages import (
    BETWEEN,
    NUM_EXAMPLES,
    OWN,
    RECEIVED,
    SAMPLES_PREDICTED,
    SAMPLES_TRAINED,
    TRAINED,
    TUNED,
    decode,
)
from kindred.server_app.config import Config
from kindred.server_app.engines import Engine, execute
from kindred.server_app.tables import read_table

from . import markdown, methods_named
from .tuned_loop import Work, loop

CLIENTS = 20
NOT_COUNTED = 2  # rounds at the end that do not count
INTERVAL = 0.5  # s, between two looks at the memory

FASHION_MNIST = {
    "dataset": "fashion-mnist",
    "partition": "practical",
    "samples_per_client": 300,
    "local_epochs": 2,
    "batch_size": 100,
    "public_size": 500,
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "cnn": {**FASHION_MNIST, "model": "mcmahan-cnn"},
    "mlp": {**FASHION_MNIST, "model": "mlp"},
    "mlp-10": {**FASHION_MNIST, "model": "mlp", "local_epochs": 1, "batch_size": 10},
    "digits": {"public_size": 150},
}


def settings(strategy: str, workload: str, rounds: int, data_dir: str = "", output_dir: str = "") -> Config:
    plain = Config(strategy=strategy, **WORKLOADS[workload])
    samples = plain.samples_per_client or 40  # of the digits, 40 by default
    of_methods: dict[str, Any] = {
        "head_epochs": plain.local_epochs,
        "public_batch_size": plain.batch_size,
        "ala_share": 2 / 3,
    }
    return Config(
        strategy=strategy,
        **WORKLOADS[workload],
        data_dir=data_dir if plain.dataset != "digits" else "",
        num_clients=CLIENTS,
        num_rounds=rounds + NOT_COUNTED,
        output_dir=output_dir,
        local_steps=plain.local_epochs * samples // plain.batch_size,
        **of_methods,
    )


# --- Work of a round ----------------------------------------------------------------------------------


def work_of(row: Mapping[str, Any], config: Config) -> Work:
    """Return the work of a client in a round, from its row of the history."""
    method, trained = REGISTRY[config.strategy], int(row[SAMPLES_TRAINED])
    # Where the last layers train separately, the message's epochs are for the other layers, or for all.
    whole = min(trained, config.local_epochs * int(row[NUM_EXAMPLES])) if "head_layers" in method else trained
    if method.strategy.personal == MIXTURE:
        tests = 1 + len(decode(row["neighbours"])) if "neighbours" in row else config.num_components
    else:
        tests = sum(row.get(f"{which}-accuracy") is not None for which in (RECEIVED, TRAINED, TUNED, OWN, BETWEEN))
    # A step of PerFed-CKT uses a private batch and a public one.
    return Work(whole, trained - whole, int(row[SAMPLES_PREDICTED]), tests, 1 if method.models_travel else 2)


def work_of_server(config: Config, answered: int, num_public: int) -> Work:
    """Return the server's work with networks: in FedDF, the clients' predictions and its own steps."""
    if not REGISTRY[config.strategy].distils:
        return Work(0, 0, 0, 0)
    return Work(config.distill_steps * config.public_batch_size, 0, answered * num_public, 0)


# --- A run, and the loop ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulated:
    """The counted rounds of a run.

    Attributes
    ----------
    rounds : list of dict
        The lines of these rounds in rounds.csv.
    rows : list of list of dict
        For each round, the clients' rows in history.csv.
    """

    rounds: list[dict[str, Any]]
    rows: list[list[dict[str, Any]]]

    def median(self, column: str) -> float:
        return float(np.median([line[column] for line in self.rounds]))


def simulated(config: Config, engine: str) -> Simulated:
    """Run a method."""
    outcome = execute(config, Engine(engine), lambda line: None)
    if outcome.code or outcome.results is None:
        raise SystemExit(outcome.reason)
    folder, last = outcome.results, config.num_rounds - NOT_COUNTED
    counted = range(last - max(last // 3, 1) + 1, last + 1)
    lines = {line["round"]: line for line in read_table(folder / "rounds.csv")}
    history = read_table(folder / "history.csv")
    rows = [[row for row in history if row["round"] == number] for number in counted]
    if failed := [row for each in rows for row in each if row["status"] != "ok"]:
        raise SystemExit(f"{config.strategy}: client {failed[0]['client']}: {failed[0]['status']}")
    return Simulated([lines[number] for number in counted], rows)


def looped(config: Config, run: Simulated, processes: int) -> float:
    """Return the median seconds of the rounds of a run in the tuned loop."""
    rounds = [[(int(row["client"]), work_of(row, config)) for row in rows] for rows in run.rows]
    server = [work_of_server(config, len(clients), config.public_size) for clients in rounds]
    seconds = loop(config, [rounds[0], *rounds], [server[0], *server], processes)
    return float(np.median(seconds[1:]))  # the first round is for one-time costs


@dataclass
class Peak:
    """The largest memory of a process and those that it has started, in bytes above its own at the start."""

    largest: int = 0


@contextmanager
def memory_of(process: psutil.Process) -> Iterator[Peak]:
    """Look at the memory of a process and of those that it starts, until the context ends."""
    peak, ended = Peak(), threading.Event()

    def size() -> int:
        total = 0
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_full_info().pss
        return total

    before = size()

    def look() -> None:
        while not ended.wait(INTERVAL):
            with suppress(psutil.Error):
                peak.largest = max(peak.largest, size() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def apart(work: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Call a function in a process of its own, which has imported what it needs; return its result and peak memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        process = psutil.Process(executor.submit(os.getpid).result())
        executor.submit(imported).result()
        with memory_of(process) as peak:
            return executor.submit(work, *arguments).result(), peak.largest


def imported() -> None:
    """Import what a run and the loop import."""
    import kindred.client_app.app
    import kindred.server_app.app  # noqa: F401


@dataclass
class Compared:
    """A method's run and the loop, measured several times.

    Attributes
    ----------
    run : Simulated
        The last one.
    ours, theirs : list of float
        Seconds of a round of the run, and of the better loop.
    memory, loop_memory : list of int
        Peaks in bytes, of the run and of the loop of processes.
    """

    run: Simulated
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    loop_memory: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return float(np.median(np.divide(self.ours, self.theirs)))


def compared(
    name: str, workload: str, engine: str, rounds: int, repeats: int, data_dir: str
) -> tuple[Config, Compared]:
    """Measure a method and the loop in turns."""
    found: Compared | None = None
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            config = settings(name, workload, rounds, data_dir, folder)
            run, memory = apart(simulated, config, engine)
        found = found or Compared(run)
        loops = [apart(looped, config, run, processes) for processes in (os.cpu_count() or 1, 1)]
        found.run = run
        found.ours.append(run.median("seconds"))
        found.theirs.append(min(seconds for seconds, _ in loops))
        found.memory.append(memory)
        found.loop_memory.append(loops[0][1])
    assert found is not None  # at least one repetition
    return config, found


# --- The table ----------------------------------------------------------------------------------------


def table(found: Mapping[str, Compared]) -> str:
    """Return a Markdown table: a row for each method; its work relative to FedAvg's, where FedAvg is one of them."""
    head = ["method", "a round, s", "loop, s", "ratio", "MB", "loop, MB"]
    columns = SAMPLES_TRAINED, SAMPLES_PREDICTED, "bytes-down", "bytes-up"
    reference = found.get("fedavg")
    head += ["time", "trained on", "predicted for", "down", "up"] if reference else [*columns]
    lines = []
    for name, each in found.items():
        costs = [each.run.median(column) for column in columns]
        ours = float(np.median(each.ours))
        line = [
            name,
            f"{ours:.2f}",
            f"{np.median(each.theirs):.2f}",
            f"{each.ratio:.2f}",
            f"{np.median(each.memory) / 1e6:.0f}",
            f"{np.median(each.loop_memory) / 1e6:.0f}",
        ]
        if reference:
            # FedAvg predicts nothing: divide by the samples that it trains on.
            theirs = [reference.run.median(column) for column in (SAMPLES_TRAINED, *columns[:1], *columns[2:])]
            line.append(f"{ours / np.median(reference.ours):.2f}")
            line += [f"{cost / their:.2f}" for cost, their in zip(costs, theirs)]
        else:
            line += [f"{cost:,.0f}" for cost in costs]
        lines.append(line)
    return markdown(head, lines)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: 1 or more")
    return int(text)


def _workloads(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is no workload, allowed: {', '.join(WORKLOADS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--strategies", type=methods_named, default="heurfedamp", help="names, separated by commas, or all"
    )
    parser.add_argument("--workloads", type=_workloads, default="cnn", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--data-dir", default="", help="folder of Fashion-MNIST (default: as in kindred run)")
    parser.add_argument("--engine", choices=("local", "flower"), default="local")
    parser.add_argument("--rounds", type=_positive, help="default: 10, with several methods 3")
    parser.add_argument("--repeats", type=_positive, default=1)
    arguments = parser.parse_args()
    rounds = arguments.rounds or (10 if len(arguments.strategies) == 1 else 3)
    data_dir = arguments.data_dir and os.path.abspath(arguments.data_dir)
    for workload in arguments.workloads:
        found = {}
        for name in arguments.strategies:
            print(f"{workload}: {name}", flush=True)
            started = time.perf_counter()
            _, found[name] = compared(name, workload, arguments.engine, rounds, arguments.repeats, data_dir)
            print(f"    {time.perf_counter() - started:.0f} s", flush=True)
        over = "; over FedAvg on the right (predicted for: over the samples that FedAvg trains on)"
        print(f"\n{workload}, a round{over if 'fedavg' in found else ''}:\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
