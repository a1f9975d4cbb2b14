"""A round in Flower's simulation against the same work in a bare PyTorch loop, and each method's cost over FedAvg.

    python -m benchmarks.simulation [--strategies NAME,...|all] [--data-dir DIR] [--rounds N]

20 clients, Fashion-MNIST practical non-IID with 300 samples a client, McMahan CNN, 2 epochs a round with batches of 100
and Adam; HeurFedAMP, unless other methods are named. DIR holds Fashion-MNIST as for `kindred run --data-dir`.

The simulation runs one-thread clients on all cores. The bare loop is one process with all cores and does, client by
client, what the method's clients did in the same rounds, and nothing else: as many steps on batches of 100, as many
predictions, and the same evaluations on test data. These numbers are from the run's history (`samples-trained`,
`samples-predicted`, which models were evaluated). The bare loop omits a method's own arithmetic on weights, such as a
proximal term, means and distances at the server, k-means, and all work with messages and files. FedDF's server computes
with networks itself, and so does the bare loop.

Only the last third of the rounds counts, so that start-up rounds do not: the last of 3 where several methods run, the
last three of 10 with one method, unless `--rounds` is given. Two more rounds follow, because a run's last rounds may
differ (Kindred's do). Settings make batches full and methods comparable: PerFed-CKT makes as many steps as 2 epochs
have, FedRep trains the last layers for 2 epochs and the others for 2, public batches have 100 images, the public set
has 500. Everything else is as in `kindred run`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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

from . import markdown, methods_named

CLIENTS, SAMPLES, EPOCHS, BATCH = 20, 300, 2, 100
NOT_COUNTED = 2  # rounds at the end that do not count
AT_ONCE = 500  # images per batch, where no gradient is needed


def settings(strategy: str, data_dir: str, rounds: int, output_dir: str) -> Config:
    of_methods: dict[str, Any] = {
        "head_epochs": EPOCHS,
        "public_batch_size": BATCH,
        "validation_share": 1 / 3,
        "ala_share": 2 / 3,
    }
    return Config(
        strategy=strategy,
        dataset="fashion-mnist",
        data_dir=data_dir,
        partition="practical",
        num_clients=CLIENTS,
        samples_per_client=SAMPLES,
        model="mcmahan-cnn",
        num_rounds=rounds + NOT_COUNTED,
        local_epochs=EPOCHS,
        batch_size=BATCH,
        learning_rate=1e-3,
        output_dir=output_dir,
        local_steps=EPOCHS * SAMPLES // BATCH,
        public_size=500,
        **of_methods,
    )


# --- Work of a round ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The work of a client in a round.

    Attributes
    ----------
    whole, head : int
        Samples that go through the network forward and backward, for all weights and for those of the last layers.
    predicted : int
        Samples that go through the network forward only.
    tests : int
        Models evaluated on the test data.
    batches_a_step : int
        Number of batches in the gradient of a step.
    """

    whole: int
    head: int
    predicted: int
    tests: int
    batches_a_step: int = 1


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


# --- The two ways to do it ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulated:
    """The counted rounds of a run in Flower's simulation engine.

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


def simulated(config: Config) -> Simulated:
    """Run a method in Flower's simulation engine."""
    from kindred.server_app.simulation import run_simulation
    from kindred.server_app.tables import read_table

    outcome = run_simulation(
        config.run_config(),
        num_clients=config.num_clients,
        on_line=lambda line: print("   ", line, flush=True),
    )
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


def bare(config: Config, rounds: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Return the median seconds of these rounds, given by their clients' rows, in a plain loop."""
    import torch

    from kindred import make_model
    from kindred.data import load_federation
    from kindred.engine.model_store import last_layers

    torch.set_num_threads(os.cpu_count() or 1)
    federation = load_federation(config.run_config())
    sites = [federation.site_data(client) for client in range(config.num_clients)]
    model = make_model(config.model, federation.task.inputs.shape, federation.task.objective.num_outputs, 0)
    head = last_layers(model.state_dict(), config.head_layers)
    needs_public = REGISTRY[config.strategy].needs_public_set
    public = federation.public_set() if needs_public else sites[0].train[0][:0]
    # Public images have no labels: use zeros.
    public_samples = public, torch.zeros(len(public), dtype=torch.int64)
    seconds = []
    for rows in (rounds[0][:1], *rounds):  # the first visit is for one-time costs and does not count
        started = time.perf_counter()
        for row in rows:
            site = sites[row["client"]]
            do(model, work_of(row, config), config, site.train, site.test, head)
        do(model, work_of_server(config, len(rows), len(public)), config, public_samples, public_samples, head)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:]))


def do(model: Any, work: Work, config: Config, train: tuple[Any, Any], test: tuple[Any, Any], head: list[str]) -> None:
    """Do a client's work in plain PyTorch."""
    import torch
    from torch.nn.functional import cross_entropy

    x, y = train
    for _ in range(work.tests):
        evaluate(model, *test)
    for count in _parts(work.predicted, AT_ONCE):
        predict(model, next(drawn(x, y, count))[0])
    step_size = config.own_settings().get("sgd_learning_rate")
    for samples, names in ((work.head, head), (work.whole, None)):
        if not samples:
            continue
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(names is None or name in names)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = (
            torch.optim.SGD(weights, step_size) if step_size else torch.optim.Adam(weights, config.learning_rate)
        )
        model.train()
        batches = drawn(x, y, BATCH)
        for number, count in enumerate(_parts(samples, BATCH)):
            images, labels = (part[:count] for part in next(batches))
            if number % work.batches_a_step == 0:
                optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            if (number + 1) % work.batches_a_step == 0:
                optimizer.step()


def drawn(x: Any, y: Any, size: int) -> Iterator[tuple[Any, Any]]:
    """Yield full batches of a client's samples, epoch after epoch; samples repeat where it has too few."""
    import torch

    while True:
        order = torch.randperm(len(y))
        while len(order) < size:
            order = torch.cat([order, torch.randperm(len(y))])
        for batch in order.split(size):
            if len(batch) == size:
                yield x[batch], y[batch]


def predict(model: Any, x: Any) -> Any:
    import torch

    model.eval()
    with torch.inference_mode():
        return model(x)


def evaluate(model: Any, x: Any, y: Any) -> float:
    return float((predict(model, x).argmax(1) == y).float().mean())


def _parts(total: int, size: int) -> list[int]:
    full, left = divmod(total, size)
    return [size] * full + ([left] if left else [])


# --- The table ----------------------------------------------------------------------------------------


def table(found: Mapping[str, tuple[Simulated, float]]) -> str:
    """Return a Markdown table: a row for each method, and ratios to FedAvg where FedAvg is one of them.

    Parameters
    ----------
    found : mapping
        method -> the run, and the seconds of a round in the bare loop.
    """
    head = ["method", "simulated, s", "bare, s", "ratio", "trained on", "predicted for", "MB down", "MB up"]
    reference = found["fedavg"][0] if "fedavg" in found else None
    if reference:
        head += ["time", "trained on", "predicted for", "down", "up"]
    lines = []
    columns = SAMPLES_TRAINED, SAMPLES_PREDICTED, "bytes-down", "bytes-up"
    for name, (run, seconds) in found.items():
        ours, costs = run.median("seconds"), [run.median(column) for column in columns]
        line = [
            name,
            f"{ours:.2f}",
            f"{seconds:.2f}",
            f"{ours / seconds:.2f}",
            *(f"{cost:,.0f}" for cost in costs[:2]),
            *(f"{cost / 1e6:.1f}" for cost in costs[2:]),
        ]
        if reference:
            # FedAvg predicts nothing: divide by the samples that it trains on.
            theirs = [reference.median(column) for column in ("seconds", SAMPLES_TRAINED, *columns[:1], *columns[2:])]
            line += [f"{cost / their:.2f}" for cost, their in zip((ours, *costs), theirs)]
        lines.append(line)
    return markdown(head, lines)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: 1 or more")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--strategies", type=methods_named, default="heurfedamp", help="names, separated by commas, or all"
    )
    parser.add_argument("--data-dir", default="", help="folder of Fashion-MNIST (default: as in kindred run)")
    parser.add_argument("--rounds", type=_positive, help="default: 10, with several methods 3")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (10 if len(arguments.strategies) == 1 else 3)
    found = {}
    for name in arguments.strategies:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            config = settings(name, arguments.data_dir and os.path.abspath(arguments.data_dir), rounds, folder)
            run = simulated(config)
        found[name] = run, bare(config, run.rows)
    over = "; over FedAvg on the right (predicted for: over the samples that FedAvg trains on)"
    print(f"\nA round{over if 'fedavg' in found else ''}:\n\n{table(found)}")


if __name__ == "__main__":
    main()
