"""The content of a comparison's page, as plain JSON, from comparison.json and the tables of its runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from kindred.server_app.comparison.metrics import numbers_of
from kindred.server_app.comparison.texts import remarks, tables
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.headline import Headline
from kindred.server_app.run_files import folder_of_run

from .clients import (
    numbers,
)
from .content import costs, settings_lines
from .reading import COMPARISON, REPORT, read_json, rows_of


def comparison_content(folder: Path) -> dict[str, Any]:
    """Return the content of a comparison's page.

    Parameters
    ----------
    folder : Path
        Holds `comparison.json`.

    Returns
    -------
    dict
        Plain JSON, as in `run_content`.

    Raises
    ------
    ConfigError
        The file, or one of the runs that it names, cannot be read.
    """
    path = folder / COMPARISON
    comparison = read_json(path)
    try:
        common, defaults = comparison["settings"], Config().run_config()
        headline = Headline.of([comparison])
        metric = (comparison["preset"] or {}).get("metric", headline.columns.mean)
        varied = comparison.get("varied")
        methods = []
        for name, found in comparison["strategies"].items():
            runs = [_compared_run(folder, run, headline) for run in found["runs"]]
            methods.append(
                {
                    "name": name,
                    "strategy": found["strategy"],
                    "of": found.get("of", name),
                    "value": found.get("value", ""),
                    "at": {key: found[key][metric] for key in ("mean", "std")},
                    "settings": list(found["settings"].items()),
                    "asked": found["settings"].get("num-rounds", common["num-rounds"]),
                    "runs": [{key: run[key] for key in ("seed", "name", "report", "failed")} for run in runs],
                    "curve": mean_over_seeds([run["curve"] for run in runs if run["curve"]]),
                    "last": [value for run in runs for value in run["last"]],
                }
            )
        return {
            "kind": "comparison",
            "title": f"Comparison: {comparison['title']}",
            "about": [f"{common['num-clients']} clients", f"finished {comparison['finished']}"],
            "metric": headline.to_dict(),
            "tables": tables(comparison),
            "remarks": remarks(comparison),
            "methods": methods,
            "varied": varied and {**varied, "measure": numbers_of(headline)[metric].meaning},
            "seeds": comparison["seeds"],
            "command": comparison["command"],
            "settings": settings_lines(common, defaults),
            "notes": (comparison["preset"] or {}).get("notes", []),
            "versions": [*comparison["versions"].items(), ("platform", comparison["platform"])],
        }
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} was not written by `kindred compare`: {type(error).__name__}: {error}") from None


def _compared_run(folder: Path, run: Mapping[str, Any], headline: Headline) -> dict[str, Any]:
    """Return the content for one run of a comparison; it may have failed, or its folder may have been removed."""
    place = folder_of_run(folder, run)
    lines = rows_of(place / "rounds.csv", "round") if "folder" in run else []
    is_there = "folder" in run and (place / REPORT).exists()
    return {
        "seed": run["seed"],
        "name": place.name,
        "report": quote(os.path.relpath(place / REPORT, folder)) if is_there else None,
        "failed": run.get("reason"),
        "curve": {
            "rounds": [line["round"] for line in lines],
            "mean": [line.get(headline.columns.mean) for line in lines],
            **costs(lines),
        }
        if lines
        else None,
        "last": [
            each[headline.name]
            for each in run.get("summary", {}).get("clients", [])
            if headline.metric.holds(each[headline.name])
        ],
    }


def mean_over_seeds(curves: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return mean and standard deviation over runs, for the rounds that all of them have."""
    if not curves:
        return None
    rounds = sorted(set.intersection(*(set(curve["rounds"]) for curve in curves)))

    def stacked(key: str) -> np.ndarray:
        values = [dict(zip(curve["rounds"], curve[key], strict=False)) for curve in curves]
        return np.array([[np.nan if each[number] is None else each[number] for number in rounds] for each in values])

    means = stacked("mean")  # (seeds, r)
    mean = means.mean(axis=0)
    deviation = means.std(axis=0, ddof=1) if len(curves) > 1 else None
    samples = None if any(curve["samples"] is None for curve in curves) else stacked("samples")
    return {
        "rounds": rounds,
        "mean": numbers(mean),
        "low": None if deviation is None else numbers(mean - deviation),
        "high": None if deviation is None else numbers(mean + deviation),
        "bytes": stacked("bytes").mean(axis=0).tolist(),
        "samples": None if samples is None else samples.mean(axis=0).tolist(),
    }
