"""SCAFFOLD, APFL and Per-FedAvg with several step sizes, shares and adaptations, on MNIST and EMNIST.

    python -m benchmarks.steps --data-dir DIR [--output-dir DIR]

The methods' defaults have the highest mean of these tables; no other table uses the two data sets. 10 clients with 60
images each train for 15 rounds of 5 epochs, with the network ckt-cnn, seed 100 and one thread. There is a table for
each method: a row for each combination of settings, and the final mean accuracy over clients, in percent. A dash marks
a run that failed, because models were no longer finite. Runs that the folder of --output-dir holds already are not
repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from kindred import compare
from kindred.settings import kebab

from . import markdown

COLUMNS = (("mnist", "iid"), ("mnist", "rotated"), ("mnist", "dirichlet"), ("emnist", "practical"))
SEED = 100
SAME: Mapping[str, Any] = {
    "clients": 10, "rounds": 15, "samples_per_client": 60, "dirichlet_alpha": 0.1, "local_epochs": 5, "model": "ckt-cnn"
}  # fmt: skip
STEP_SIZES = (0.05, 0.1, 0.2, 0.4)

GRIDS: Mapping[str, Sequence[Mapping[str, Sequence[Any]]]] = {
    "scaffold": [{"sgd_learning_rate": (0.02, *STEP_SIZES), "server_learning_rate": [1.0]}],
    "apfl": [
        {"sgd_learning_rate": STEP_SIZES, "mixing_weight": [0.5], "adapt_mixing": [False]},
        {"sgd_learning_rate": [0.2], "mixing_weight": [0.25, 0.75], "adapt_mixing": [False]},
        {"sgd_learning_rate": [0.2], "mixing_weight": [0.5], "adapt_mixing": [True]},
    ],
    "per-fedavg": [
        {"sgd_learning_rate": STEP_SIZES, "adapt_learning_rate": [0.01], "adapt_epochs": [0]},
        {"sgd_learning_rate": [0.2], "adapt_learning_rate": [0.05, 0.1], "adapt_epochs": [0]},
        {"sgd_learning_rate": [0.2], "adapt_learning_rate": [0.01, 0.05, 0.1], "adapt_epochs": [1]},
    ],
}
"""Settings of each method: all combinations of the values in each of its grids are run."""


def rows(method: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of each row of a method's table."""
    for grid in GRIDS[method]:
        yield from (dict(zip(grid, values, strict=True)) for values in product(*grid.values()))


def tables(data_dir: str, output_dir: str) -> str:
    """Return a Markdown table for each method: a row for each combination of settings."""
    ways = {method: {f"{method}-{place}": own for place, own in enumerate(rows(method))} for method in GRIDS}
    methods = {name: {"method": method, **own} for method, named in ways.items() for name, own in named.items()}
    found: dict[str, list[float | None]] = {name: [] for name in methods}
    for dataset, partition in COLUMNS:
        done = compare(
            methods, dataset, partition=partition, seeds=[SEED], data_dir=data_dir, output=output_dir, **SAME
        )
        for name, accuracies in found.items():
            accuracies.append(done.content["strategies"][name]["mean"]["accuracy"])
    return "\n\n".join(table(method, [found[name] for name in named]) for method, named in ways.items())


def table(method: str, found: Sequence[Sequence[float | None]]) -> str:
    """Return a method's table; `found` has the accuracies of each row, None where a run failed."""
    first, *others = (kebab(name) for name in GRIDS[method][0])
    lines = []
    for own, accuracies in zip(rows(method), found, strict=True):
        mean = None if None in accuracies else float(np.mean([each for each in accuracies if each is not None]))
        cells = ["-" if each is None else f"{100 * each:.1f}" for each in (*accuracies, mean)]
        lines.append([*(str(value).lower() for value in own.values()), *cells])
    return markdown([f"{method}: {first}", *others, *(" ".join(column) for column in COLUMNS), "mean"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True, help="folder of mnist.npz and emnist.npz, or torchvision's files")
    parser.add_argument("--output-dir", default="results", help="folder of the runs (default: %(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"\n{tables(given.data_dir, given.output_dir)}")


if __name__ == "__main__":
    main()
