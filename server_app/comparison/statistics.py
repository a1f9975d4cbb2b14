"""Compute the content of comparison.json: means, standard deviations over seeds, tests against the reference."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.lazy import lazy
from kindred.server_app.run_files import versions

from .metrics import METRICS
from .plan import Plan
from .variation import text_of

if TYPE_CHECKING:
    from scipy import stats
else:
    stats = lazy("scipy.stats")  # takes a second to import, and only comparisons need it

LOCAL = "local"  # the method that `better-than-local` compares each client's accuracy with


def content_of(plan: Plan, runs: Mapping[str, list[dict[str, Any]]], command: Sequence[str]) -> dict[str, Any]:
    """Return the content of comparison.json (docs/comparing.md); folders of runs are relative to the comparison's."""
    summaries = {name: {run["seed"]: run["summary"] for run in runs[name] if "summary" in run} for name in runs}
    preset = plan.preset
    strategies: dict[str, Any] = {}
    for name, config in plan.configs.items():
        local, reference = (plan.compared_with(other, name) for other in (LOCAL, plan.reference))
        alone = summaries[local] if local else {}
        for run in runs[name]:
            if "summary" in run:
                run["metrics"] = metrics_of(run["summary"], alone.get(run["seed"]), name == local)
        measured = [run["metrics"] for run in runs[name] if "metrics" in run]
        values = {key: [each[key] for each in measured if each[key] is not None] for key in METRICS}
        paper = preset.paper.get(name) if preset else None
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
            "wilcoxon": signed_rank(*paired(summaries[name], summaries[reference]))
            if reference not in (name, None)
            else None,
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
            "name": preset.name, "source": preset.source, "measures": preset.measures, "metric": preset.metric,
            "notes": preset.notes, "changed": plan.changed,
        },
        "settings": {key: value for key, value in settings.items() if key not in ("strategy", "seed", "resume")},
        "seeds": plan.seeds,
        "varied": plan.variation and {
            "setting": plan.variation.setting, "values": [text_of(value) for value in plan.variation.values],
        },
        "reference": plan.reference,
        "metrics": {key: metric._asdict() for key, metric in METRICS.items()},
        "strategies": strategies,
    }  # fmt: skip


def metrics_of(summary: Mapping[str, Any], local: Mapping[str, Any] | None, is_local: bool = False) -> dict[str, Any]:
    """Return a run's numbers by the names of `METRICS`; None where there is none.

    Parameters
    ----------
    summary : mapping
        Summary of the run.
    local : mapping, optional
        Summary of the run of method `local` with the same seed, in which every client learns alone.
    is_local : bool
        Whether `summary` is of `local` itself, which is not compared with itself.
    """
    derived = {"bytes": summary["bytes-down"] + summary["bytes-up"], "better-than-local": None}
    if local and not is_local:
        ours, alone = paired({0: summary}, {0: local})
        if len(ours):
            derived["better-than-local"] = float((_differences(ours, alone) > 0).mean())
    return {key: derived.get(key, summary.get(key)) for key in METRICS}


def paired(
    ours: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the last accuracies, (n,) each, of clients that have one in both, over all seeds of both."""
    pairs = []
    for seed in ours.keys() & others.keys():
        theirs = accuracies(others[seed])
        pairs += [(mine, theirs[client]) for client, mine in accuracies(ours[seed]).items() if client in theirs]
    first, second = np.array(sorted(pairs), dtype=float).reshape(-1, 2).T
    return first, second


def accuracies(summary: Mapping[str, Any]) -> dict[Any, float]:
    """Return client -> last accuracy, for the clients that have one."""
    return {each["client"]: each["accuracy"] for each in summary["clients"] if each["accuracy"] is not None}


def _differences(ours: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return differences, rounded so that accuracies which differ only in the last bits count as equal."""
    return np.round(ours - others, 12)


def signed_rank(ours: np.ndarray, reference: np.ndarray) -> dict[str, Any] | None:
    """Return Wilcoxon's signed-rank test (1945) of accuracies (n,) against the reference's, pair by pair.

    Two-sided: the null hypothesis is that differences lie symmetrically about 0. Pairs without a difference are
    excluded (Wilcoxon's way); equal differences share their ranks. Without any difference p is 1.

    Returns
    -------
    dict or None
        `pairs`, of which `better`, `worse` and `equal`; `median-difference`; `statistic`, the smaller sum of ranks;
        `p`; `alternative` and `zeros`, as described above. None without pairs.
    """
    differences = _differences(ours, reference)
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
