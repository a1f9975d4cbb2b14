"""Kindred with one of its steps removed or changed, on seven partitions of scikit-learn's digits or other data.

    python -m benchmarks.ablation [--partitions NAME,...] [--seeds N,...] [--set KEY=VALUE ...]

Settings and defaults are those of `kindred run`, except that Dirichlet has alpha 0.1: 20 clients with about 40 images
each. Natural clients are the partition by-client, with their data in --set. The table shows the mean over clients of
the headline metric, for accuracy in percent, as a mean over seeds: with validation data that of the selected models,
otherwise that of the final ones. The first row is the method.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from kindred import kindred
from kindred.parts import held_out
from kindred.server_app.app import run_inline
from kindred.server_app.cli.run import given_settings
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.headline import Headline
from kindred.server_app.run_files import read_summary

from . import markdown

PARTITIONS = ("iid", "pathological", "practical", "label-groups", "dirichlet", "rotated", "permuted")

centred_cosines = kindred.centred_cosines


def plain_cosines(blocks: Iterable[np.ndarray], rows: Sequence[int], m: int) -> np.ndarray:
    """Return cos(w_i, w_j): with the negative of each model added, the mean is 0."""
    return centred_cosines((np.concatenate([block, -block]) for block in blocks), rows, 2 * m)[:, :m]


def uniform(evidence: np.ndarray) -> np.ndarray:
    """Return the same share of clients for each of w_i, v_i and g."""
    return np.full(evidence.shape[-1], 1 / evidence.shape[-1])


def only(k: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a replacement of `shares` that gives all to one of w_i, v_i and g."""
    return lambda prior, evidence: np.broadcast_to(np.eye(3)[k], (*evidence.shape[:-1], 3))


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "its own model alone": {"shares": only(0)},
    "the neighbours' mean alone": {"shares": only(1)},
    "the mean of all alone": {"shares": only(2)},
    "a uniform prior": {"prevalence": uniform},
    "evidence of the last round alone: memory 0": {"MEMORY": 0.0},
    "all rounds count the same: memory 1": {"MEMORY": 1.0},
    "all held-out samples count, not 8": {"COUNTED": float("inf")},
    "judged in every round": {"WORK": float("inf")},
    "always the same tenth held out": {"STAYS": 0.0},
    "another tenth held out in each round": {"STAYS": float("inf")},
    "held out in all rounds but the last": {"HOLDING": 1.0},
    "a fifth held out, not a tenth": {"FOLDS": 5},
    "classes not corrected by rarity": {"rarity": lambda trained, held_out: np.ones(len(trained))},
    "no temperatures": {"TEMPERATURES": np.array([1.0])},
    "cosines of whole models": {"centred_cosines": plain_cosines},
    "sharpness 5, not 10": {"SHARPNESS": 5.0},
    "sharpness 20, not 10": {"SHARPNESS": 20.0},
    "no largest weight": {"LARGEST_WEIGHT": float("inf")},
    "huge models count": {"HUGE": float("inf")},
}
"""Replacements of names in strategies/kindred.py or strategies/parts/held_out.py, by row of the table."""

TAKEN = ("strategy", "partition", "seed", "output-dir")
"""Settings that --set does not allow: the benchmark sets them itself."""


def module_of(name: str) -> ModuleType:
    """Return the module that has a name of VARIANTS."""
    return kindred if hasattr(kindred, name) else held_out


def measure(config: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a run in which these names are replaced."""
    with contextlib.ExitStack() as changed, tempfile.TemporaryDirectory() as folder:
        for name, other in changes.items():
            changed.enter_context(patch.object(module_of(name), name, other))
        return read_summary(run_inline(replace(config, output_dir=folder)).path)


def cell(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean over runs of the selected models' value, or of the final models' without validation data."""
    headline = Headline.of(summaries)
    mean, selected = headline.columns.mean, headline.columns.selected
    values = [summary[mean] if summary.get(selected) is None else summary[selected] for summary in summaries]
    return headline.number(float(np.mean(values)))


def table(config: Config, partitions: Sequence[str], seeds: Sequence[int]) -> str:
    """Return a Markdown table: a row for each variant of Kindred, a column for each partition."""
    rows = {name: [name] for name in ("unchanged", *VARIANTS)}
    for partition in partitions:
        for name, row in rows.items():
            print(f"{partition}: {name}", flush=True)
            runs = [replace(config, strategy="kindred", partition=partition, seed=seed) for seed in seeds]
            row.append(cell([measure(each, VARIANTS.get(name, {})) for each in runs]))
    return markdown(["Kindred", *partitions], rows.values())


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", default=",".join(PARTITIONS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--seeds", type=numbers, default="0", help="separated by commas (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for kindred run")
    given = parser.parse_args()
    partitions = given.partitions.split(",")
    try:
        settings = given_settings({}, given.set)
        if taken := [key for key in settings if key in TAKEN]:
            raise ConfigError(f"--set has {taken[0]}, allowed: any setting but {', '.join(TAKEN)}")
        settings = {"dirichlet-alpha": 0.1, **settings, "partition": partitions[0]}
        config = Config.from_run_config(settings).absolute()
        for partition in partitions:  # a wrong name ends the program here, not after other runs
            replace(config, partition=partition)
    except ConfigError as error:
        parser.error(str(error))
    print(f"\n{table(config, partitions, given.seeds)}")


if __name__ == "__main__":
    main()
