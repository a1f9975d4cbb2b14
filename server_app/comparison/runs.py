"""The runs of a comparison: find those that exist already, and carry out the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from kindred.data import DataError, load_federation
from kindred.server_app.app import samples_of
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.headline import Headline
from kindred.server_app.run_files import IN_USE, is_finished, read_config, read_summary, versions
from kindred.server_app.run_log import Outcome

from .metrics import numbers_of
from .plan import Plan, run_hash
from .statistics import content_of

INTERRUPTED = 128  # exit codes from here on are signals

Outcomes = Generator[tuple[int, Outcome], None, None]


def known_runs(output_dir: Path) -> dict[str, Path]:
    """Return `run_hash` -> folder for the runs in `output_dir`; of equal runs the last finished one, if any."""
    found: dict[str, Path] = {}
    defaults = Config().run_config()  # of settings that an older run did not have
    for path in sorted(output_dir.glob("*/config.json")):
        try:
            config = read_config(path.parent)
            key = run_hash(defaults | config["settings"], config.get("images"))
        except (ConfigError, KeyError, TypeError):  # not the folder of a run, or one of another version
            continue
        if key not in found or is_finished(path.parent) or not is_finished(found[key]):
            found[key] = path.parent
    return found


@dataclass
class _Run:
    """A run of a comparison.

    Attributes
    ----------
    name : str
        The method's, among the compared ones.
    config : Config
    head : str
        Beginning of the lines about it.
    key : str
        Its `run_hash`.
    folder : Path or None
        Of its results, finished or not.
    entry : dict
        What comparison.json says of it; empty until it has ended.
    """

    name: str
    config: Config
    head: str
    key: str = ""
    folder: Path | None = None
    entry: dict[str, Any] = field(default_factory=dict)


def carry_out(
    plan: Plan,
    execute: Callable[[Iterator[tuple[int, Config]]], Outcomes],
    say: Callable[[str], None],
    unusable: Mapping[str, str],
    command: Sequence[str],
) -> tuple[dict[str, Any], int]:
    """Run what has not been run yet, and return the content of the comparison.

    Parameters
    ----------
    plan : Plan
    execute : callable
        Starts or resumes the runs of these numbers and settings, and yields the number and the outcome of each that
        ends, as `jobs.execute_runs`.
    say : callable
        Called with each line of progress.
    unusable : mapping
        name -> reason why the method cannot be run.
    command : sequence of str
        The words of the command, for the record.

    Returns
    -------
    content : dict
        The content of comparison.json.
    code : int
        0: every run is finished. 1: some failed. 128 + n: ended by signal n; the content has the runs up to then.
    """
    known = known_runs(Path(plan.common.output_dir))
    todo = plan.runs
    runs = [
        _Run(name, config, f"run {number}/{len(todo)}  {name}, seed {config.seed}")
        for number, (name, config) in enumerate(todo, 1)
    ]
    working: dict[str, list[_Run]] = {}  # by key: a run that works, and those that are equal to it
    signalled = 0

    def enter(run: _Run, how: str, outcome: Outcome) -> None:
        run.entry = {"seed": run.config.seed, "how": how, "hash": run.key}
        if outcome.code == 0 and outcome.results:
            folder = known[run.key] = outcome.results
            if how == "reused":
                say(f"{run.head}: reused, {folder}{_unlike(folder)}")
            run.entry |= {
                "folder": os.path.relpath(folder, plan.folder),
                "versions": read_config(folder).get("versions"),
                "summary": read_summary(folder),
            }
        else:
            reason = " ".join(outcome.reason.split())
            if how == "resumed" and IN_USE not in reason:
                reason += f"; to start it again, remove {run.folder}"
            say(f"{run.head}: failed, {reason}")
            run.entry |= {"how": "failed", "reason": reason}

    def to_execute() -> Iterator[tuple[int, Config]]:
        for number, run in enumerate(runs, 1):
            if signalled:
                return
            run.key = run_hash(run.config.run_config(), samples_of_run(run.config))
            run.folder = known.get(run.key) or known.get(run_hash(run.config.run_config()))  # the latter: no samples
            if run.key in working:
                working[run.key].append(run)
            elif run.folder and is_finished(run.folder):
                enter(run, "reused", Outcome(0, "", run.folder))
            elif run.name in unusable:
                enter(run, "failed", Outcome(2, unusable[run.name]))
            else:
                working[run.key] = [run]
                say(f"{run.head}: resumed, {run.folder}" if run.folder else run.head)
                yield number, replace(run.config, resume=str(run.folder)) if run.folder else run.config

    with closing(execute(to_execute())) as outcomes:
        for number, outcome in outcomes:
            run, *equal = working.pop(runs[number - 1].key)
            if outcome.code >= INTERRUPTED:
                signalled = outcome.code
                say(f"{run.head}: {outcome.reason}; the same command continues")
                continue
            enter(run, "resumed" if run.folder else "run", outcome)
            for each in equal:
                enter(each, "reused", outcome)
            if outcome.code == 0 and not all(each.entry for each in runs):
                say(_so_far(runs))
    entries: dict[str, list[dict[str, Any]]] = {name: [] for name in plan.configs}
    for run in runs:
        if run.entry:
            entries[run.name].append(run.entry)
    failed = any(run.entry.get("how") == "failed" for run in runs)
    return content_of(plan, entries, command), signalled or int(failed)


def _so_far(runs: Sequence[_Run]) -> str:
    """Return a line with each method's mean over its finished runs, and how many of its runs these are."""
    summaries = [(run.name, run.entry["summary"]) for run in runs if "summary" in run.entry]
    headline = Headline.of(summary for _, summary in summaries)
    column, seeds = headline.columns.mean, {run.config.seed for run in runs}
    number = numbers_of(headline)[column]
    found: dict[str, list[float]] = {}
    for name, summary in summaries:
        if summary.get(column) is not None:
            found.setdefault(name, []).append(summary[column])
    means = ", ".join(f"{name} {number.text(fmean(each))} ({len(each)}/{len(seeds)})" for name, each in found.items())
    return f"so far, {number.title}: {means}"


def samples_of_run(config: Config) -> str | None:
    """Return the text that identifies a run's samples; None if they cannot be loaded, which the run will report."""
    try:
        return samples_of(config, load_federation(config.run_config()))
    except DataError:
        return None


def _unlike(folder: Path) -> str:
    """Return how a run with the same settings may still differ: versions, and no record of its samples."""
    before = read_config(folder)
    differences = [
        f"{name} was {version}"
        for name, version in (before.get("versions") or {}).items()
        if version != versions().get(name)
    ]
    if not before.get("images"):
        differences.append("its samples are not recorded")
    return f" ({', '.join(differences)})" if differences else ""
