"""Compute the content of comparison.json: means, standard deviations over seeds, tests against the reference."""

from __future__ import annotations

import math
import os
import platform
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.client.gain import Gain
from kindred.client.state import PREDICTIONS
from kindred.data import load_federation
from kindred.lazy import lazy
from kindred.messages import ClientId, in_order
from kindred.server_app.headline import Headline
from kindred.server_app.newcomers import over_seeds
from kindred.server_app.run_files import folder_of_run, versions
from kindred.server_app.verdict import KINDS, Verdict, paired_gains, pooled_gain, verdict_of

from .metrics import numbers_of
from .plan import Plan
from .variation import text_of

if TYPE_CHECKING:
    from scipy import stats
else:
    stats = lazy("scipy.stats")  # takes a second to import, and only comparisons need it

LOCAL = "local"  # the method that `better-than-local` compares each client's last value with


def content_of(plan: Plan, runs: Mapping[str, list[dict[str, Any]]], command: Sequence[str]) -> dict[str, Any]:
    """Return the content of comparison.json (docs/comparing.md); folders of runs are relative to the comparison's.

    Raises
    ------
    ConfigError
        The runs have different headline metrics.
    """
    summaries = {name: {run["seed"]: run["summary"] for run in runs[name] if "summary" in run} for name in runs}
    headline = Headline.of(summary for each in summaries.values() for summary in each.values())
    numbers = numbers_of(headline)
    preset = plan.preset
    has_paper = preset is not None and preset.metric in numbers  # a paper's numbers are accuracies
    strategies: dict[str, Any] = {}
    for name, config in plan.configs.items():
        local, reference = (plan.compared_with(other, name) for other in (LOCAL, plan.reference))
        alone = summaries[local] if local else {}
        for run in runs[name]:
            if "summary" in run:
                run["metrics"] = metrics_of(run["summary"], alone.get(run["seed"]), headline, name == local)
        measured = [run["metrics"] for run in runs[name] if "metrics" in run]
        values = {key: [each[key] for each in measured if each[key] is not None] for key in numbers}
        paper = preset.paper.get(name) if preset and has_paper else None
        strategies[name] = {
            "strategy": config.strategy,
            "of": plan.variants[name].of,
            "value": plan.variants[name].text,
            "settings": plan.own[name],
            "runs": runs[name],
            "mean": {key: float(np.mean(each, dtype=float)) if each else None for key, each in values.items()},
            "std": {
                key: float(np.std(each, ddof=1, dtype=float)) if len(each) > 1 else None for key, each in values.items()
            },
            "wilcoxon": signed_rank(
                *paired(summaries[name], summaries[reference], headline.name), headline.metric.higher
            )
            if reference not in (name, None)
            else None,
            "verdict": verdict_over_seeds(plan, runs[name], runs[local], headline.name)
            if local not in (name, None)
            else None,
            "all-metrics": all_metrics(summaries[name].values()),
            "newcomers": over_seeds([each["newcomers"] for each in summaries[name].values() if each.get("newcomers")]),
            "paper": paper and {key: each if key == "floats" else round(each / 100, 6) for key, each in paper.items()},
        }
    settings = plan.common.run_config()
    return {
        "title": plan.title,
        "command": shlex.join(command),
        "finished": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "versions": versions(),
        "scale": plan.scale,
        "scaled": plan.scaled,
        "preset": preset and {
            "name": preset.name, "source": preset.source, "measures": preset.measures,
            "metric": preset.metric if has_paper else headline.columns.mean,
            "notes": preset.notes, "changed": plan.changed,
        },
        "settings": {key: value for key, value in settings.items() if key not in ("strategy", "seed", "resume")},
        "seeds": plan.seeds,
        "varied": plan.variation and {
            "setting": plan.variation.setting, "values": [text_of(value) for value in plan.variation.values],
        },
        "reference": plan.reference,
        "metric": headline.name,
        "metrics": {key: metric._asdict() for key, metric in numbers.items()},
        "strategies": strategies,
    }  # fmt: skip


def verdict_over_seeds(
    plan: Plan, ours: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]], metric: str
) -> dict[str, Any] | None:
    """Return for how many clients a method is better and worse than `local`, over all seeds, and its pooled gain.

    Parameters
    ----------
    plan : Plan
    ours, alone : sequence of mapping
        The runs of the method, and of `local`.
    metric : str
        The headline metric.

    Returns
    -------
    dict or None
        Numbers of clients, counted once for each seed, with the verdicts HELPED, HURT and UNDECIDED; `of`, how many
        have a last value of the metric in both runs; `gain`, `low` and `high` of the mean score over all samples, for
        which a client with a name is one in all seeds; and whether this is shown in `percent`. None without
        predictions.
    """
    folders = {run["seed"]: folder_of_run(plan.folder, run) for run in alone if "folder" in run}
    tested_alone = {run["seed"]: last_values(run["summary"], metric).keys() for run in alone if "summary" in run}
    if not any((folder / PREDICTIONS).exists() for folder in folders.values()):
        return None
    objective = load_federation(plan.common.run_config()).task.objective
    counts, found, pooled = Counter[str](), list[Verdict](), defaultdict[ClientId, list[Gain]](list)
    due = 0
    for run in ours:
        if "summary" in run and run["seed"] in folders:
            gains = paired_gains(folder_of_run(plan.folder, run), folders[run["seed"]], objective, run["seed"])
            due += len(last_values(run["summary"], metric).keys() & tested_alone[run["seed"]])
            if verdict := verdict_of(gains, run["seed"]):
                found.append(verdict)
                counts.update(each.verdict for each in verdict.clients)
            who = people(run["summary"], run["seed"])
            for client, gain in gains.items():
                pooled[who[client]].append(gain)
    if not found:
        return None
    mean, low, high = pooled_gain([pooled[each] for each in in_order(pooled)])
    return {
        **{which: counts[which] for which in KINDS},
        "of": due,
        "gain": mean, "low": low, "high": high, "percent": all(each.of_shares for each in found),
    }  # fmt: skip


def people(summary: Mapping[str, Any], seed: int) -> dict[ClientId, str]:
    """Return who each client of a run is: by its name the same in all seeds; without a name another in each seed."""
    return {each["client"]: each.get("name", f"{seed}-{each['client']}") for each in summary["clients"]}


def all_metrics(summaries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return mean and standard deviation over runs of each metric's mean over clients, by the metric's name.

    It is that of the selected models, or where there are none of the last ones.
    """
    found: dict[str, list[float]] = {}
    for summary in summaries:
        metrics = summary.get("metrics", {})
        for name, value in (metrics.get("selected") or metrics.get("last") or {}).items():
            found.setdefault(name, []).append(value)
    return {
        name: {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None}
        for name, values in found.items()
    }


def metrics_of(
    summary: Mapping[str, Any], local: Mapping[str, Any] | None, headline: Headline, is_local: bool = False
) -> dict[str, Any]:
    """Return a run's numbers by the names of `numbers_of`; None where there is none.

    Parameters
    ----------
    summary : mapping
        Summary of the run.
    local : mapping, optional
        Summary of the run of method `local` with the same seed, in which every client learns alone.
    headline : Headline
    is_local : bool
        Whether `summary` is of `local` itself, which is not compared with itself.
    """
    derived = {"bytes": summary["bytes-down"] + summary["bytes-up"], "better-than-local": None}
    if local and not is_local:
        gained = improvements(*paired({0: summary}, {0: local}, headline.name), headline.metric.higher)
        if len(gained):
            derived["better-than-local"] = float((gained > 0).mean())
    return {key: derived.get(key, summary.get(key)) for key in numbers_of(headline)}


def paired(
    ours: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]], metric: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the last values, (n,) each, of clients that have one in both, over all seeds of both.

    A client with a name is one in all seeds, with the means of its values.
    """
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for seed in sorted(ours.keys() & others.keys()):
        theirs, who = last_values(others[seed], metric), people(ours[seed], seed)
        for client, value in last_values(ours[seed], metric).items():
            if client in theirs:
                pairs[who[client]].append((value, theirs[client]))
    means = [(fmean(mine), fmean(other)) for mine, other in (zip(*each, strict=True) for each in pairs.values())]
    first, second = np.array(sorted(means), dtype=float).reshape(-1, 2).T
    return first, second


def last_values(summary: Mapping[str, Any], metric: str) -> dict[Any, float]:
    """Return client -> last value of the metric, for the clients that have one."""
    return {each["client"]: each[metric] for each in summary["clients"] if each[metric] is not None}


def improvements(ours: np.ndarray, others: np.ndarray, higher: bool) -> np.ndarray:
    """Return how much better ours are, (n,), rounded so that values which differ only in the last bits are equal."""
    largest = max(np.abs(ours).max(initial=0), np.abs(others).max(initial=0), 1)
    digits = 12 - math.ceil(math.log10(largest))
    return np.round(ours - others if higher else others - ours, digits)


def signed_rank(ours: np.ndarray, reference: np.ndarray, higher: bool = True) -> dict[str, Any] | None:
    """Return Wilcoxon's signed-rank test (1945) of last values (n,) against the reference's, pair by pair.

    Two-sided: the null hypothesis is that differences lie symmetrically about 0. Pairs without a difference are
    excluded (Wilcoxon's way); equal differences share their ranks. Without any difference p is 1.

    Returns
    -------
    dict or None
        `pairs`, of which `better`, `worse` and `equal`; `median-difference`, above 0 where ours are better;
        `statistic`, the smaller sum of ranks; `p`; `alternative` and `zeros`, as described above. None without pairs.
    """
    differences = improvements(ours, reference, higher)
    if not len(differences):
        return None
    nonzero = differences[differences != 0]
    test = stats.wilcoxon(nonzero, alternative="two-sided") if len(nonzero) else None
    return {
        "pairs": len(differences),
        "better": int((differences > 0).sum()),
        "worse": int((differences < 0).sum()),
        "equal": int((differences == 0).sum()),
        "median-difference": float(np.median(differences)),
        "statistic": float(test.statistic) if test else 0.0,
        "p": float(test.pvalue) if test else 1.0,
        "alternative": "two-sided",
        "zeros": "left out",
    }
