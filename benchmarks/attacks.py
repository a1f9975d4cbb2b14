"""Accuracy that honest clients lose to attackers, by method, attack and defence, on scikit-learn's digits.

    python -m benchmarks.attacks [--methods NAME,...] [--attacks NAME,...] [--defences NAME,...] [--attackers N,...]
                                 [--seeds N,...] [--set KEY=VALUE ...] [--output-dir DIR]

10 clients train for 10 rounds, in this process, with the defaults of `kindred run` and the settings of --set. There is
a table for each number of attackers. Its column "nobody attacks" is the mean accuracy of the clients that are honest in
that table, in percent; "costs" is what the defence costs them while nobody attacks. An attack's column is what it costs
them with the same defence. All costs are points of accuracy, as means over seeds; less than 0 is a gain. A dash marks a
run that failed.

attacks.json in the output folder has the finished runs, which are not repeated; remove it after a change of the code.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord

from kindred import InlineGrid
from kindred.client.site import forget_sites
from kindred.client_app.app import load_site
from kindred.data import load_clients
from kindred.messages import PERSONAL
from kindred.server_app.app import prepare
from kindred.server_app.cli.run import given_settings
from kindred.server_app.config import SETTINGS, Config, ConfigError, is_used_by
from kindred.server_app.run_files import write_json
from kindred.settings import TRAINING

from . import markdown, methods_named, names_of
from .attackers import ATTACKS, Attack, attacked_app

CLIENTS, ROUNDS = 10, 10
TAKEN = ("strategy", "seed", "num-clients", "num-rounds")
"""Settings that --set does not allow: the benchmark sets them itself."""

# --- Runs ---------------------------------------------------------------------------------------------

DEFENCES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "median": {"aggregation": "median"},
    "trimmed-mean": {"aggregation": "trimmed-mean"},
    "krum": {"aggregation": "krum"},
    "multi-krum": {"aggregation": "multi-krum"},
    "biweight": {"aggregation": "biweight"},
    "sender-bound": {"sender-bound": 0.5},
    "norms": {"max-update-norm": "auto"},
    "shares": {"max-client-share": 0.2},
    "median and norms": {"aggregation": "median", "max-update-norm": "auto"},
    "norms and shares": {"max-update-norm": "auto", "max-client-share": 0.2},
}
"""The defences by name: settings of a run. Methods that do not have a setting have no row for its defence."""


@dataclass(frozen=True)
class Case:
    """A run: of a method with a defence, an attack ("" for none) by so many attackers, a seed, and other settings."""

    method: str
    defence: str
    attack: str
    attackers: int
    seed: int
    others: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        others = "".join(f", {key} {value}" for key, value in self.others)
        return f"{self.method}, {self.defence}, {self.attack or 'nobody'} x {self.attackers}, seed {self.seed}{others}"

    def config(self) -> Config:
        """Return the settings; ConfigError where they are unknown or not allowed."""
        settings = {"strategy": self.method, "seed": self.seed, "num-clients": CLIENTS, "num-rounds": ROUNDS}
        return Config.from_run_config({**settings, **dict(self.others), **DEFENCES[self.defence]})


def attackers_of(count: int) -> list[int]:
    """Return the attackers: evenly spaced, so that they are in different groups of clients."""
    return [i * CLIENTS // count for i in range(count)]


def measure(case: Case) -> dict[str, float] | str:
    """Run a case; return each client's last accuracy by its name, or the reason why the run failed."""
    config = case.config()
    attackers = attackers_of(case.attackers)
    app = attacked_app(load_site, ATTACKS.get(case.attack, Attack()), attackers)
    strategy, initial = prepare(config, load_clients(config.run_config()))
    local = ConfigRecord({each.key: getattr(config, each.name) for each in TRAINING})
    forget_sites()  # of another case, with other labels
    try:
        strategy.start(
            InlineGrid(app, CLIENTS, config.run_config()), initial, ROUNDS, train_config=local, evaluate_config=local
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    last: dict[str, float] = {}
    for row in strategy.history.rows:
        if f"{PERSONAL}-accuracy" in row:
            last[str(row["client"])] = row[f"{PERSONAL}-accuracy"]
    return last


class Runs:
    """Finished runs, in a file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "attacks.json"
        self.found: dict[str, dict[str, float] | str] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def run(self, cases: Sequence[Case]) -> None:
        """Run those of these cases that are not finished, and print a line for each."""
        due = [case for case in dict.fromkeys(cases) if case.key not in self.found]
        for place, case in enumerate(due, start=1):
            found = self.found[case.key] = measure(case)
            write_json(self.path, self.found)
            accuracy = self.accuracy([case], attackers_of(case.attackers))
            text = found if accuracy is None else f"{accuracy:.1f} %"
            print(f"{place}/{len(due)} {case.key}: {text}", flush=True)

    def accuracy(self, cases: Sequence[Case], without: Collection[int]) -> float | None:
        """Return the mean accuracy, in percent, of the clients that are not among these; None if a run failed."""
        means = []
        for case in cases:
            found = self.found.get(case.key, "not run")
            if isinstance(found, str):
                return None
            means.append(np.mean([value for client, value in found.items() if int(client) not in without]))
        return 100 * float(np.mean(means))


# --- The tables ---------------------------------------------------------------------------------------


def usable_defences(names: Sequence[str]) -> Iterator[str]:
    """Yield the defences whose settings this version has; print a line for each of the others."""
    for name in names:
        if unknown := DEFENCES[name].keys() - SETTINGS.keys():
            print(f"defence {name} is left out: this version has no setting {min(unknown)}")
            continue
        try:
            Config.from_run_config({**DEFENCES[name]})
        except ConfigError as error:
            print(f"defence {name} is left out: {error}")
        else:
            yield name


def has(method: str, defence: str) -> bool:
    """Return whether a method has all settings of a defence."""
    return all(is_used_by(key, method) for key in DEFENCES[defence])


def table(
    runs: Runs,
    methods: Sequence[str],
    attacks: Sequence[str],
    defences: Sequence[str],
    attackers: int,
    seeds: Sequence[int],
    others: tuple[tuple[str, Any], ...] = (),
) -> str:
    """Return a Markdown table for a number of attackers."""

    def accuracy(method: str, defence: str, attack: str) -> float | None:
        count = attackers if attack else 0
        return runs.accuracy(
            [Case(method, defence, attack, count, seed, others) for seed in seeds], attackers_of(attackers)
        )

    def cost(before: float | None, after: float | None) -> str:
        return "-" if before is None or after is None else f"{round(before - after, 1) + 0:.1f}"  # no -0.0

    rows = []
    for method, defence in product(methods, defences):
        if has(method, defence):
            clean, without = accuracy(method, defence, ""), accuracy(method, "none", "")
            costs = [cost(clean, accuracy(method, defence, attack)) for attack in attacks]
            known = "-" if clean is None else f"{clean:.1f}"
            rows.append([method, defence, known, "" if defence == "none" else cost(without, clean), *costs])
    return markdown([f"{attackers} of {CLIENTS} attack", "defence", "nobody attacks", "costs", *attacks], rows)


def numbers_from(low: int, high: float) -> Callable[[str], list[int]]:
    """Return a parser of whole numbers in a range, separated by commas."""

    def parse(text: str) -> list[int]:
        for word in text.split(","):
            if not word.isdecimal() or not low <= int(word) <= high:
                raise argparse.ArgumentTypeError(f"{word!r} is no whole number, allowed: {low} to {high:g}")
        return [int(word) for word in text.split(",")]

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", type=methods_named, default="all", help="separated by commas, or all")
    parser.add_argument("--attacks", type=names_of(ATTACKS), default="all", help=f"all, {', '.join(ATTACKS)}")
    parser.add_argument("--defences", type=names_of(DEFENCES), default="all", help=f"all, {', '.join(DEFENCES)}")
    parser.add_argument("--attackers", type=numbers_from(1, CLIENTS - 1), default="1,3", help="default: %(default)s")
    parser.add_argument("--seeds", type=numbers_from(0, 2**32 - 1), default="0,1,2", help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for kindred run")
    parser.add_argument("--output-dir", type=Path, default="results", help="folder of attacks.json: %(default)s")
    given = parser.parse_args()
    try:
        settings = given_settings({}, given.set)
        if taken := [key for key in settings if key in TAKEN]:
            raise ConfigError(f"--set has {taken[0]}, allowed: any setting but {', '.join(TAKEN)}")
        Config.from_run_config(settings)
    except ConfigError as error:
        parser.error(str(error))
    others = tuple(settings.items())
    torch.set_num_threads(1)
    defences = list(usable_defences(given.defences))
    runs = Runs(given.output_dir)
    ways = [("", 0), *product(given.attacks, given.attackers)]
    runs.run([
        Case(method, defence, attack, count, seed, others)
        for seed, method, defence, (attack, count) in product(given.seeds, given.methods, defences, ways)
        if has(method, defence)
    ])  # fmt: skip
    for count in given.attackers:
        print(f"\n{table(runs, given.methods, given.attacks, defences, count, given.seeds, others)}")


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    main()
