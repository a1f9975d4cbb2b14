"""The runs of a comparison: find those that exist already, and carry out the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kindred.data import DataError, load_federation
from kindred.server_app.app import samples_of
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.run_files import is_finished, read_config, read_summary, versions
from kindred.server_app.run_log import Outcome

from .plan import Plan, run_hash
from .statistics import content_of

INTERRUPTED = 128  # exit codes from here on are signals


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


def carry_out(
    plan: Plan,
    execute: Callable[[Config], Outcome],
    say: Callable[[str], None],
    unusable: Mapping[str, str],
    command: Sequence[str],
) -> tuple[dict[str, Any], int]:
    """Run what has not been run yet, and return the content of the comparison.

    Parameters
    ----------
    plan : Plan
    execute : callable
        Starts or resumes the run of the given settings, and returns its outcome.
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
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in plan.configs}
    code = 0
    todo = plan.runs
    for number, (name, config) in enumerate(todo, 1):
        head = f"run {number}/{len(todo)}  {name}, seed {config.seed}"
        key = run_hash(config.run_config(), samples_of_run(config))
        folder = known.get(key) or known.get(run_hash(config.run_config()))  # the latter: without samples
        if folder and is_finished(folder):
            how, outcome = "reused", Outcome(0, "", folder)
            say(f"{head}: reused, {folder}{_unlike(folder)}")
        elif name in unusable:
            how, outcome = "failed", Outcome(2, unusable[name])
        elif folder:
            how = "resumed"
            say(f"{head}: resumed, {folder}")
            outcome = execute(replace(config, resume=str(folder)))
        else:
            how = "run"
            say(head)
            outcome = execute(config)
        if outcome.code >= INTERRUPTED:
            code = outcome.code
            say(f"{head}: {outcome.reason}; the same command continues")
            break
        run: dict[str, Any] = {"seed": config.seed, "how": how, "hash": key}
        if outcome.code == 0 and outcome.results:
            folder = known[key] = outcome.results
            run |= {
                "folder": os.path.relpath(folder, plan.folder),
                "versions": read_config(folder).get("versions"),
                "summary": read_summary(folder),
            }
        else:
            code = 1
            reason = " ".join(outcome.reason.split())
            if how == "resumed":
                reason += f"; to start it again, remove {folder}"
            say(f"{head}: failed, {reason}")
            run |= {"how": "failed", "reason": reason}
        runs[name].append(run)
    return content_of(plan, runs, command), code


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
