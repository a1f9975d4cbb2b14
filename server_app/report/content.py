"""`report.html`: the results of a run, or of a comparison of runs, in one self-contained file.

`run_content` and `comparison_content` collect the content of the page from the files in the folder, as plain JSON.
`render.page` puts it into the page, whose script draws it. A run in progress writes the same files, so `kindred watch`
shows the same page.

Names of clients and reasons of failures are texts from others. In the page they are data, never a part of its code.
"""

from __future__ import annotations

import base64
import csv
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from kindred import REGISTRY
from kindred.client.state import MIXTURE
from kindred.engine.history import is_status, statuses
from kindred.files import write_bytes
from kindred.messages import BETWEEN, MOST, PERSONAL, RECEIVED, SAMPLES_TRAINED, TRAINED, TUNED, ClientId, in_order
from kindred.server_app.comparison.metrics import numbers_of
from kindred.server_app.comparison.texts import remarks, tables
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.flower_app import CONNECTION, toml
from kindred.server_app.headline import Headline
from kindred.server_app.newcomers import tables as newcomer_tables
from kindred.server_app.run_files import folder_of_run, is_finished, labels_of, what_data
from kindred.server_app.tables import read_table

from .clients import (
    client_curves,
    clients_table,
    last_values,
    metrics_content,
    numbers,
    validators_content,
    verdict_content,
)
from .collaboration import collaboration_content, groups_of
from .figures import MIXED, ONE_MODEL, carried_forward
from .render import page
from .weights import component_curves

REPORT = "report.html"
COMPARISON = "comparison.json"
TEXTS = ("client", "personal")  # columns with texts, as is the status of replies; all other columns shown are numbers
MOST_LISTED = 200  # pairs of client and reason in the table of unused replies
OPTIONS = {
    "strategy": "strategy",
    "dataset": "dataset",
    "data-dir": "data-dir",
    "partition": "partition",
    "num-clients": "clients",
    "num-rounds": "rounds",
    "metric": "metric",
    "seed": "seed",
}  # options of `kindred run`, by setting
PLACES = ("output-dir", "resume")  # settings of where a run is stored; they do not change what it computes
STAGES = {
    RECEIVED: "model as received",
    TRAINED: "after local training",
    TUNED: "after fine-tuning",
    BETWEEN: "between received and own",
    MIXTURE: MIXED,
    PERSONAL: "personal model",
}


def write_report(folder: Path, summary: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` into the folder of a run, or of a comparison.

    Parameters
    ----------
    folder : Path
    summary : mapping, optional
        The summary of a run that has not written its summary file yet.

    Raises
    ------
    ConfigError
        The folder holds neither a run nor a comparison, or a file cannot be read.
    """
    is_comparison = (folder / COMPARISON).exists()
    content = comparison_content(folder) if is_comparison else run_content(folder, summary)
    path = folder / REPORT
    write_bytes(path, page(content).encode())
    return path


def command(settings: Mapping[str, Any]) -> str:
    """Return the command that repeats a run: its main settings, and all others that differ from their defaults.

    It names neither the folder of the results nor the engine, which does not change the results.
    """
    defaults = Config().run_config()
    shown = ("strategy", "dataset", "partition", "seed")
    differing = {
        key: value
        for key, value in settings.items()
        if key not in PLACES and (key in shown or key not in defaults or value != defaults[key])
    }
    if settings.get("dataset") == "sites":
        return shlex.join(
            [
                "flwr",
                "run",
                ".",
                CONNECTION,
                "--stream",
                "--run-config",
                " ".join(line.replace(" = ", "=", 1) for line in toml(differing).splitlines()),
            ]
        )

    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    words = ["kindred", "run"]
    for key, value in differing.items():
        words += [f"--{OPTIONS[key]}", text(value)] if key in OPTIONS else ["--set", f"{key}={text(value)}"]
    return shlex.join(words)


def run_content(folder: Path, summary: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a run's page, up to its last complete round.

    Parameters
    ----------
    folder : Path
    summary : mapping, optional
        As in `write_report`.

    Returns
    -------
    dict
        Plain JSON; unknown values are None. Accuracies are in [0, 1].

    Raises
    ------
    ConfigError
        The folder is not the folder of a run, or a file in it cannot be read.
    """
    config = _read_json(folder / "config.json")
    if not isinstance(config.get("settings"), dict):
        raise ConfigError(f"{folder / 'config.json'} holds no settings: it is not of a run")
    settings, groups = config["settings"], config.get("groups")
    finished = summary is not None or is_finished(folder)
    summary = summary or _read_json(folder / "summary.json", {})
    asked = summary.get("rounds", settings["num-rounds"])  # fewer where stop-after ended the run
    lines = _table(folder / "rounds.csv", "round")
    done = {line["round"] for line in lines}  # a round in progress may have rows of some clients
    rows = [
        {"client": "", **row}  # an empty name is an empty cell in the file
        for row in _table(folder / "history.csv", "round", "status")
        if row["round"] in done
    ]
    validations = [row for row in _table(folder / "validators.csv", "round", "status") if row["round"] in done]
    clients = in_order({row["client"] for row in rows})
    defaults = Config().run_config()
    name = settings["strategy"]
    title = REGISTRY[name].title if name in REGISTRY else name
    headline, names = Headline.of([config]), config.get("names") or ()
    metric, holds = headline.name, headline.metric.holds
    stages = _stages(rows, lines, headline)
    before, after = f"{RECEIVED}-{metric}", f"{stages['after']}-{metric}"
    both = [row for row in rows if holds(row.get(before)) and holds(row.get(after))]
    clusters = _read_json(folder / "clusters.json", None)
    return {
        "kind": "run",
        "title": f"{title} on {what_data(settings)}, seed {settings['seed']}",
        "about": ([] if settings["dataset"] == "sites" else [f"{settings['num-clients']} clients"])
        + ([f"started {config['started']}"] if "started" in config else []),
        "finished": finished,
        "asked": asked,
        "metric": headline.to_dict(),
        "figures": _figures(lines, headline),
        "curve": _curve(lines, rows, headline),
        "verdict": verdict_content(summary.get("verdict")),
        "table": clients_table(clients, rows, summary.get("clients", []), headline, names),
        "curves": client_curves(clients, rows, lines, f"{PERSONAL}-{metric}", headline),
        "newcomers": summary.get("newcomers") and newcomer_tables(summary["newcomers"], name, headline),
        "metrics": metrics_content(summary),
        "stages": stages,
        "clients": {
            "names": labels_of(clients, names),
            "groups": groups_of(clients, groups),
            "last": last_values(rows, clients, f"{PERSONAL}-{metric}", headline),
            "before": last_values(both, clients, before, headline),
            "after": last_values(both, clients, after, headline),
        },
        "collaboration": collaboration_content(folder / "collaboration", groups, names),
        "clusters": clusters and [{**each, "clients": labels_of(each["clients"], names)} for each in clusters],
        "components": _components(rows, asked, groups, names),
        "partition": _picture(folder / "partition.png"),
        "networks": _picture(folder / "networks.png"),
        "validators": validators_content(validations, names),
        "unused": _unused(rows, names),
        "remarks": [
            [*labels_of([each["client"]], names), each["remark"], each["round"]] for each in summary.get("remarks", [])
        ],
        "left-out": [[*labels_of([each["client"]], names), each["reason"]] for each in summary.get("left-out", [])],
        "command": command(settings),
        "settings": _settings(settings, defaults),
        "versions": [*(config.get("versions") or {}).items(), ("platform", config.get("platform"))],
    }


def _settings(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[list[Any]]:
    """Return each setting's name, its value, and whether the page treats the value as the default."""
    return [
        [key, value, key in PLACES or key in defaults and value == defaults[key]] for key, value in settings.items()
    ]


def _figures(lines: Sequence[Mapping[str, Any]], headline: Headline) -> dict[str, Any]:
    """Return the last round's values of the metric, and the total costs of all rounds."""
    last = lines[-1] if lines else {}
    return {
        **{name.replace("_", "-"): last.get(key) for name, key in headline.columns._asdict().items()},
        **{key: sum(line.get(key, 0) for line in lines) for key in ("bytes-down", "bytes-up", "seconds")},
        SAMPLES_TRAINED: _total(lines, SAMPLES_TRAINED),
    }


def _total(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return sum(line.get(key, 0) for line in lines) if any(key in line for line in lines) else None


def _curve(lines: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], headline: Headline) -> dict[str, Any]:
    """Return, for every round, the metric over clients and the total costs up to that round."""
    rounds, _, values = carried_forward(rows, f"{PERSONAL}-{headline.name}", headline.metric.holds)  # (r,), .., (r, m)
    known = ~np.isnan(values).all(axis=1)

    def decile(share: float) -> list[float | None]:
        found = np.nanquantile(values[known], share, axis=1).tolist()
        of_round = dict(zip(rounds[known].tolist(), found, strict=True))
        return numbers(of_round.get(line["round"]) for line in lines)

    return {
        "rounds": [line["round"] for line in lines],
        "mean": numbers(line.get(headline.columns.mean) for line in lines),
        "p10": decile(0.1),
        "p90": decile(0.9),
        **_costs(lines),
    }


def _costs(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the total bytes, and training samples where they were counted, up to each round."""

    def until(*keys: str) -> list[float]:
        return np.cumsum([sum(line.get(key, 0) for key in keys) for line in lines], dtype=float).tolist()

    counted = any(SAMPLES_TRAINED in line for line in lines)
    return {"bytes": until("bytes-down", "bytes-up"), "samples": until(SAMPLES_TRAINED) if counted else None}


def _stages(
    rows: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], headline: Headline
) -> dict[str, Any]:
    """Return the mean by round of each model that clients report on, and the names of the two that are compared."""
    curves, holds = {}, headline.metric.holds
    for stage in STAGES:
        if stage == PERSONAL:
            continue
        key = f"{stage}-{headline.name}"
        rounds, _, values = carried_forward(rows, key, holds)
        reported = {row["round"] for row in rows if holds(row.get(key))}
        if reported:
            mean = {
                number: float(np.nanmean(line))
                for number, line in zip(rounds.tolist(), values, strict=True)
                if number in reported
            }
            curves[stage] = {"name": STAGES[stage], "mean": numbers(mean.get(line["round"]) for line in lines)}
    personal = next((line["personal"] for line in reversed(lines) if "personal" in line), None)
    after = next((stage for stage in (TRAINED, TUNED, MIXTURE) if stage in curves), PERSONAL)
    before = ONE_MODEL if after == MIXTURE else STAGES[RECEIVED]
    if RECEIVED in curves:
        curves[RECEIVED]["name"] = before
    return {
        "curves": list(curves.values()),
        "personal": STAGES.get(personal, personal) if personal else None,
        "after": after,
        "after-name": STAGES[after],
        "before-name": before,
    }


def _components(
    rows: Sequence[Mapping[str, Any]], last: int, groups: Sequence[int] | None, names: Sequence[str]
) -> dict[str, Any] | None:
    """Return the clients' shares of component models over rounds; None where no client reports any."""
    curves = component_curves(rows, last)
    if not curves or len(curves[0].rounds) < 2:
        return None
    clients = curves[0].clients
    return {
        "names": labels_of(clients, names),
        "groups": groups_of(clients, groups),
        "rounds": curves[0].rounds.tolist(),
        "shares": [[numbers(shares) for shares in each.weights] for each in curves],
    }


def _unused(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the replies that were not used: for each client and reason their number, first and last round."""
    found: dict[tuple[ClientId, str], list[int]] = {}
    for row in rows:
        for status in statuses(row):
            if status != "ok":
                found.setdefault((row["client"], status), []).append(row["round"])
    order = in_order({client for client, _ in found})
    listed = sorted(found, key=lambda each: order.index(each[0]))
    return {
        "number": sum(map(len, found.values())),
        "reasons": len(found),
        "listed": [
            [*labels_of([client], names), status, len(rounds := found[client, status]), rounds[0], rounds[-1]]
            for client, status in listed[:MOST_LISTED]
        ],
    }


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
    comparison = _read_json(path)
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
            "settings": _settings(common, defaults),
            "notes": (comparison["preset"] or {}).get("notes", []),
            "versions": [*comparison["versions"].items(), ("platform", comparison["platform"])],
        }
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} was not written by `kindred compare`: {type(error).__name__}: {error}") from None


def _compared_run(folder: Path, run: Mapping[str, Any], headline: Headline) -> dict[str, Any]:
    """Return the content for one run of a comparison; it may have failed, or its folder may have been removed."""
    place = folder_of_run(folder, {"folder": "", **run})
    lines = _table(place / "rounds.csv", "round") if "folder" in run else []
    is_there = "folder" in run and (place / REPORT).exists()
    return {
        "seed": run["seed"],
        "name": place.name,
        "report": quote(os.path.relpath(place / REPORT, folder)) if is_there else None,
        "failed": run.get("reason"),
        "curve": {
            "rounds": [line["round"] for line in lines],
            "mean": [line.get(headline.columns.mean) for line in lines],
            **_costs(lines),
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


_REQUIRED: Any = object()


def _read_json(path: Path, otherwise: Any = _REQUIRED) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if otherwise is not _REQUIRED:
            return otherwise
        raise ConfigError(
            f"{str(path.parent)!r} holds neither the config.json of a run nor the {COMPARISON} of a comparison"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _table(path: Path, *needed: str) -> list[dict[str, Any]]:
    """Return the rows of a table that have been written so far; their numbers up to `MOST`, `TEXTS` and statuses alone.

    The list is empty where the file does not exist. ConfigError where a row lacks one of the `needed` columns.
    """
    try:
        rows = [
            {
                key: value
                for key, value in row.items()
                if key in TEXTS or is_status(key) or (not isinstance(value, str) and abs(value) <= MOST)
            }
            for row in read_table(path)
        ]
        for key in needed:
            if any(key not in row for row in rows):
                raise ValueError(f"a line has no {key}")
    except FileNotFoundError:
        return []
    except (OSError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return rows


def _picture(path: Path) -> str | None:
    """Return a PNG file as a data URL; None where it cannot be read."""
    try:
        return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return None
