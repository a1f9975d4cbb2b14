"""The content of a run's page, as plain JSON, from the files in the run's folder.

A run in progress writes the same files, so `kindred watch` shows the same page.

Names of clients and reasons of failures are texts from others. In the page they are data, never a part of its code.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kindred import REGISTRY
from kindred.client.state import MIXTURE
from kindred.engine.history import statuses
from kindred.messages import BETWEEN, PERSONAL, RECEIVED, SAMPLES_TRAINED, TRAINED, TUNED, ClientId, in_order
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.flower_app import CONNECTION, toml
from kindred.server_app.headline import Headline
from kindred.server_app.newcomers import tables as newcomer_tables
from kindred.server_app.run_files import is_finished, labels_of, what_data

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
from .reading import picture, read_json, rows_of
from .weights import component_curves

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
    config = read_json(folder / "config.json")
    if not isinstance(config.get("settings"), dict):
        raise ConfigError(f"{folder / 'config.json'} holds no settings: it is not of a run")
    settings, groups = config["settings"], config.get("groups")
    finished = summary is not None or is_finished(folder)
    summary = summary or read_json(folder / "summary.json", {})
    asked = summary.get("rounds", settings["num-rounds"])  # fewer where stop-after ended the run
    lines = rows_of(folder / "rounds.csv", "round")
    done = {line["round"] for line in lines}  # a round in progress may have rows of some clients
    rows = [
        {"client": "", **row}  # an empty name is an empty cell in the file
        for row in rows_of(folder / "history.csv", "round", "status")
        if row["round"] in done
    ]
    validations = [row for row in rows_of(folder / "validators.csv", "round", "status") if row["round"] in done]
    clients = in_order({row["client"] for row in rows})
    defaults = Config().run_config()
    name = settings["strategy"]
    title = REGISTRY[name].title if name in REGISTRY else name
    headline, names = Headline.of([config]), config.get("names") or ()
    metric, holds = headline.name, headline.metric.holds
    stages = _stages(rows, lines, headline)
    before, after = f"{RECEIVED}-{metric}", f"{stages['after']}-{metric}"
    both = [row for row in rows if holds(row.get(before)) and holds(row.get(after))]
    clusters = read_json(folder / "clusters.json", None)
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
        "partition": picture(folder / "partition.png"),
        "networks": picture(folder / "networks.png"),
        "validators": validators_content(validations, names),
        "unused": _unused(rows, names),
        "remarks": [
            [*labels_of([each["client"]], names), each["remark"], each["round"]] for each in summary.get("remarks", [])
        ],
        "left-out": [[*labels_of([each["client"]], names), each["reason"]] for each in summary.get("left-out", [])],
        "command": command(settings),
        "settings": settings_lines(settings, defaults),
        "versions": [*(config.get("versions") or {}).items(), ("platform", config.get("platform"))],
    }


def settings_lines(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[list[Any]]:
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
        **costs(lines),
    }


def costs(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
