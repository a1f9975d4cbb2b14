"""Kindred with one of its steps removed or changed, on seven partitions of scikit-learn's digits or other data.

    python -m benchmarks.ablation [--partitions NAME,...] [--seeds N,...] [--set KEY=VALUE ...] [--others]

Settings and defaults are those of `kindred run`, except that Dirichlet has alpha 0.1: 20 clients with about 40 images
each. The table shows the final mean accuracy over clients, in percent, as a mean over seeds. The first row is the
method. The next two rows are the same runs with another model as the client's own: the model after its last training,
before it is averaged with the previous one, and the start of that training. --others runs other methods instead, with
their labels smoothed as Kindred's are.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from kindred import kindred
from kindred.client.visit import Visit
from kindred.messages import PERSONAL, RECEIVED, TRAINED
from kindred.parts import kindred_momentum, kindred_places
from kindred.server_app.app import run_inline
from kindred.server_app.cli.run import given_settings
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.tables import read_table

from . import markdown

PARTITIONS = ("iid", "pathological", "practical", "label-groups", "dirichlet", "rotated", "permuted")
STAGES = {PERSONAL: "unchanged", TRAINED: "the model after the last training", RECEIVED: "the start before it"}

centred_cosines, neighbour_share = kindred.centred_cosines, kindred.neighbour_share
own_share, start_weights = kindred.own_share, kindred.start_weights
train_as_asked = Visit.train


def plain_cosines(blocks: Iterable[np.ndarray], rows: Sequence[int], m: int) -> np.ndarray:
    """cos(w_i, w_j): with the negative of each model added, the mean is 0."""
    return centred_cosines((np.concatenate([block, -block]) for block in blocks), rows, 2 * m)[:, :m]


def whole_probes(neighbours: np.ndarray, latest: np.ndarray, own: np.ndarray) -> dict[str, np.ndarray]:
    """Weights of probes that include the client, as one more of its neighbours."""
    own_shares = own_share(neighbours, np.ones(len(latest)), own, np.ones(len(neighbours)))
    return {
        kindred.NEIGHBOUR_MEAN: start_weights(neighbours, latest, own, 1.0, own_shares),
        kindred.GLOBAL_MEAN: start_weights(neighbours, latest, own, 0.0, own_shares),
    }


def unjudged(neighbours: np.ndarray, samples: np.ndarray, own: np.ndarray, likelihoods: np.ndarray) -> np.ndarray:
    """Return c_i with exp(-l(v_i)) = 1."""
    return own_share(neighbours, samples, own, np.ones(len(likelihoods)))


def nothing(neighbours: np.ndarray, samples: np.ndarray, own: np.ndarray, likelihoods: np.ndarray) -> np.ndarray:
    """Return c_i = 0, except for a client without neighbours."""
    return np.where(neighbours.any(axis=1), 0.0, own_share(neighbours, samples, own, likelihoods))


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "logits not adjusted": {"ADJUSTMENT": 0.0, "PROBE_ADJUSTMENT": 0.0},
    "logits adjusted in full": {"ADJUSTMENT": 1.0},
    "cosines of whole models": {"centred_cosines": plain_cosines},
    "sharpness 5, not 10": {"SHARPNESS": 5.0},
    "sharpness 20, not 10": {"SHARPNESS": 20.0},
    "probes with the client's part": {"probe_weights": whole_probes},
    "a without regard to t": {"neighbour_share": lambda ahead, kept: neighbour_share(ahead, 0.0)},
    "a = 0: the mean of all": {"neighbour_share": lambda ahead, kept: 0.0},
    "a = 1: neighbours alone": {"neighbour_share": lambda ahead, kept: 1.0},
    "exp(-l) = 1: neighbours are not judged": {"own_share": unjudged},
    "nothing probed: q = 1/2, exp(-l) = 1": {
        "neighbour_share": lambda ahead, kept: neighbour_share([], kept),
        "own_share": unjudged,
    },
    "nothing of its own: c = 0": {"own_share": nothing},
    "no momentum": {"MOMENTUM": 0.0},
    "the last models alone at the end": {"TAIL": float("inf")},
    "labels not smoothed": {"SMOOTHING": 0.0},
    "no proximal term": {"PROXIMAL": 0.0},
    "labels not smoothed, no proximal term": {"SMOOTHING": 0.0, "PROXIMAL": 0.0},
    "t by labels smoothed as for training": {"JUDGED_SMOOTHING": kindred.SMOOTHING},
    "halfway everywhere: t = 1/2, in a as well": {
        "place_probabilities": lambda before, losses: np.eye(len(kindred_places.PLACES))[2]
    },
}
"""Replacements of names in strategies/kindred.py and in the files of its parts, by row of the table."""

OTHERS: Mapping[str, Mapping[str, Any]] = {
    "local": {},
    "fedavg": {},
    "fedavg-ft": {"finetune_epochs": 5},
    "fedprox-ft": {"finetune_epochs": 5},
    "ditto": {},
    "heurfedamp": {},
    "fedprox": {},
    "hypcluster": {"num_clusters": 4},
}
"""Methods that run with smoothed labels, and their settings."""

TAKEN = ("strategy", "partition", "seed", "output-dir")
"""Settings that --set does not allow: the benchmark sets them itself."""


def on_smoothed_labels(visit: Visit, *given: Any, **settings: Any) -> float:
    """Train with smoothed labels; replaces `Visit.train`."""
    return train_as_asked(visit, *given, **{**settings, "label_smoothing": kindred.SMOOTHING})


def measure(config: Config, changes: Mapping[str, Any]) -> dict[str, float]:
    """Return the final mean accuracy over clients in a run, for those of `STAGES` that the method has."""
    with contextlib.ExitStack() as changed, tempfile.TemporaryDirectory() as folder:
        for name, other in changes.items():
            home = next(part for part in (kindred, kindred_momentum, kindred_places) if hasattr(part, name))
            changed.enter_context(patch.object(home, name, other))
        return last_accuracies(run_inline(replace(config, output_dir=folder)).path)


def last_accuracies(results: Path) -> dict[str, float]:
    """Return the mean over clients for each stage that was evaluated, from the folder of a run."""
    last: dict[str, dict[Any, float]] = {stage: {} for stage in STAGES}
    for row in read_table(results / "history.csv"):  # the last row with a value counts
        for stage in STAGES:
            if (accuracy := row.get(f"{stage}-accuracy")) is not None:
                last[stage][row["client"]] = accuracy
    return {stage: float(np.mean(list(accuracies.values()))) for stage, accuracies in last.items() if accuracies}


Ways = Mapping[str, tuple[Config, Mapping[str, Any]]]  # settings and replacements, by name of the row


def table(config: Config, partitions: Sequence[str], seeds: Sequence[int]) -> str:
    """Return a Markdown table: a row for each variant of Kindred, a column for each partition."""
    config = replace(config, strategy="kindred")
    ways: Ways = {name: (config, changes) for name, changes in {STAGES[PERSONAL]: {}, **VARIANTS}.items()}
    return _table("Kindred", ways, partitions, seeds)


def table_of_others(config: Config, partitions: Sequence[str], seeds: Sequence[int]) -> str:
    """Return a Markdown table: a row for each of `OTHERS`, a column for each partition."""
    ways: Ways = {name: (replace(config, strategy=name, **settings), {}) for name, settings in OTHERS.items()}
    with patch.object(Visit, "train", on_smoothed_labels):
        return _table("with smoothed labels", ways, partitions, seeds)


def _table(head: str, ways: Ways, partitions: Sequence[str], seeds: Sequence[int]) -> str:
    """Return a Markdown table with a row for each of `ways`; for unchanged Kindred, a row for each stage."""
    lines: dict[str, list[str]] = {}
    for partition in partitions:
        for name, (config, changes) in ways.items():
            print(f"{partition}: {name}", flush=True)
            found = [measure(replace(config, partition=partition, seed=seed), changes) for seed in seeds]
            for stage, words in STAGES.items() if name == STAGES[PERSONAL] else [(PERSONAL, name)]:
                lines.setdefault(words, []).append(f"{100 * np.mean([run[stage] for run in found]):.1f}")
    return markdown([head, *partitions], ([name, *cells] for name, cells in lines.items()))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", default=",".join(PARTITIONS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--seeds", type=numbers, default="0", help="separated by commas (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for kindred run")
    parser.add_argument("--others", action="store_true", help="run other methods, with smoothed labels")
    given = parser.parse_args()
    partitions = given.partitions.split(",")
    try:
        settings = given_settings({}, given.set)
        if taken := [key for key in settings if key in TAKEN]:
            raise ConfigError(f"--set has {taken[0]}, allowed: any setting but {', '.join(TAKEN)}")
        config = Config.from_run_config({"dirichlet-alpha": 0.1, **settings}).absolute()
        for partition in partitions:  # a wrong name ends the program here, not after other runs
            replace(config, partition=partition)
    except ConfigError as error:
        parser.error(str(error))
    tabulate = table_of_others if given.others else table
    print(f"\n{tabulate(config, partitions, given.seeds)}")


if __name__ == "__main__":
    main()
