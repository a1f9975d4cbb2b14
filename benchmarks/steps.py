"""SCAFFOLD, APFL and Per-FedAvg with several step sizes, shares and adaptations, on MNIST and EMNIST.

    python -m benchmarks.steps --data-dir DIR [--output-dir DIR] [--datasets NAME,...] [--partitions NAME,...]

The methods' defaults were chosen by these tables; no other table uses the two data sets. 20 clients with 60 images each
train for 15 rounds of 5 epochs, with the network ckt-cnn, seed 100 and one thread. There is a table for each method: a
row for each combination of settings, and the final mean accuracy over clients, in percent. A dash stands for a run that
failed, because models were no longer finite. Runs that the folder of --output-dir holds already are not repeated.
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

SEED = 100
SAME: Mapping[str, Any] = {"clients": 20, "rounds": 15, "samples_per_client": 60, "local_epochs": 5, "model": "ckt-cnn"}
STEP_SIZES = (0.02, 0.05, 0.1, 0.2, 0.4)

GRIDS: Mapping[str, Sequence[Mapping[str, Sequence[Any]]]] = {
    "scaffold": [{"sgd_learning_rate": STEP_SIZES, "server_learning_rate": [1.0]}],
    "apfl": [
        {"sgd_learning_rate": STEP_SIZES, "mixing_weight": [0.5], "adapt_mixing": [False]},
        {"sgd_learning_rate": [0.1, 0.2], "mixing_weight": [0.25, 0.75], "adapt_mixing": [False]},
        {"sgd_learning_rate": [0.1, 0.2], "mixing_weight": [0.5], "adapt_mixing": [True]},
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


def tables(data: Mapping[str, Any], datasets: Sequence[str], partitions: Sequence[str]) -> str:
    """Return a Markdown table for each method: a row for each combination of settings.

    Parameters
    ----------
    data : mapping
        `data_dir` and `output` of every run.
    datasets, partitions : sequence of str
        There is a column for each pair.
    """
    ways = {f"{method}-{place}": (method, own) for method in GRIDS for place, own in enumerate(rows(method))}
    methods = {name: {"method": method, **own} for name, (method, own) in ways.items()}
    found: dict[str, list[float | None]] = {name: [] for name in ways}
    for dataset, partition in product(datasets, partitions):
        done = compare(methods, dataset, partition=partition, seeds=[SEED], **data, **SAME)
        for name, accuracies in found.items():
            accuracies.append(done.content["strategies"][name]["mean"]["accuracy"])
    columns = [f"{dataset} {partition}" for dataset, partition in product(datasets, partitions)]
    return "\n\n".join(
        _table(method, columns, [found[name] for name in ways if ways[name][0] == method]) for method in GRIDS
    )


def _table(method: str, columns: Sequence[str], accuracies: Sequence[Sequence[float | None]]) -> str:
    """Return a method's table."""
    first, *others = (kebab(name) for name in GRIDS[method][0])
    head = [f"{method}: {first}", *others, *columns, "mean"]
    lines = [
        [*(str(value).lower() for value in own.values()), *map(_cell, each), _cell(_mean(each))]
        for own, each in zip(rows(method), accuracies, strict=True)
    ]
    return markdown(head, lines)


def _mean(accuracies: Sequence[float | None]) -> float | None:
    """Return the mean; None if a run failed."""
    known = [each for each in accuracies if each is not None]
    return float(np.mean(known)) if len(known) == len(accuracies) else None


def _cell(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{100 * accuracy:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True, help="folder of mnist.npz and emnist.npz, or torchvision's files")
    parser.add_argument("--output-dir", default="results", help="folder of the runs (default: %(default)s)")
    parser.add_argument("--datasets", default="mnist,emnist", help="separated by commas (default: %(default)s)")
    parser.add_argument("--partitions", default="iid,practical,rotated", help="the same (default: %(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = {"data_dir": given.data_dir, "output": given.output_dir}
    print(f"\n{tables(data, given.datasets.split(','), given.partitions.split(','))}")


if __name__ == "__main__":
    main()
