"""The model card of an exported model, in Markdown: how it is used, what it was made of, and how good it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kindred.data.files import safetensors_header
from kindred.metrics import METRICS
from kindred.server_app.config import ConfigError
from kindred.server_app.run_files import read_config, read_summary, what_data

from .predictor import Predictor

UNKNOWN = "The model's file lies in no folder of a run, so this is not known here."


def model_card(predictor: Predictor, model: Path, output: Path, about: Mapping[str, str], difference: float) -> str:
    """Return the card of a model that was exported to the file `output`, with the texts `about`."""
    model = model.expanduser().absolute()
    texts, _ = safetensors_header(model)
    summary, config = _of_run(model.parent.parent)
    given, result = json.loads(about["input"]), json.loads(about["output"])
    count = len(predictor.mixture.models)
    network = f"{texts['model']}" + (f", a mixture of {count} models" if count > 1 else "")
    client = texts.get("client", "")
    of = f" of client {client}" if client else ""
    parts = [
        f"# Model{of}: {output.name}",
        "",
        "## Use",
        "",
        f"- Input `x`: {given['kind']}, {given['type']}, shape ({', '.join(map(str, given['shape']))}); it is prepared "
        "inside the program.",
        *_columns(given.get("columns", ())),
        f"- Output `{result['name']}`: shape (n, {len(result['names'])}), {_names(result['names'])}.",
        f"- It was compared with `kindred predict` on random inputs: the largest difference is {difference:.1e}.",
        "",
        "## Task and data",
        "",
        f"- Objective: {result['objective']}. Network: {network}.",
        *([f"- Data: {what_data(summary)}."] if summary else [f"- {UNKNOWN}"]),
        "",
        "## Method",
        "",
        *_method(texts, summary, config),
        "",
        "## Metrics",
        "",
        *_metrics(client, summary, model.parent.name),
        "",
        "## Better than training alone?",
        "",
        _verdict(client, summary),
        "",
        "## Privacy",
        "",
        "- The samples stayed at the clients; models, or what is computed from them, were exchanged. There is no "
        "differential privacy: whoever has this file may learn something about the samples that it was trained on.",
        "- The model may predict badly for people or places unlike those of its client's data.",
    ]
    return "\n".join(parts) + "\n"


def _of_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return summary and settings of the run in a folder; empty if there is none."""
    try:
        return read_summary(folder), read_config(folder)["settings"]
    except (ConfigError, OSError, ValueError):
        return {}, {}


def _columns(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    if not columns:
        return []
    lines = ["- Columns of `x`, in order; NaN where a cell is missing:", ""]
    for each in columns:
        kind = "a number"
        if "categories" in each:
            codes = ", ".join(f"{place} = {name}" for place, name in enumerate(each["categories"]))
            kind = f"{codes}, {len(each['categories'])} = another"
        lines.append(f"  - `{each['name']}`: {kind}")
    return [*lines, ""]


def _names(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"in this order: {', '.join(names[:most])}{more}"


def _method(texts: Mapping[str, str], summary: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    lines = [f"- Strategy: {texts['strategy']}, after round {texts['round']}."] if "strategy" in texts else []
    if summary:
        lines.append(f"- {summary['rounds']} rounds with {len(summary['clients'])} clients, seed {summary['seed']}.")
    keys = ("local-epochs", "local-steps", "batch-size", "optimizer", "learning-rate")
    if config:
        lines.append("- Local training: " + ", ".join(f"{key} {config[key]}" for key in keys if key in config) + ".")
    return lines or [f"- {UNKNOWN}"]


def _metrics(client: str, summary: Mapping[str, Any], folder: str) -> list[str]:
    if not summary:
        return [UNKNOWN]
    own: dict[str, Any] = next(
        (each for each in summary["clients"] if client in (str(each["client"]), json.dumps(each["client"]))), {}
    )
    which = "selected" if folder == "selected" and summary["metrics"]["selected"] else "last"
    means, intervals = summary["metrics"][which], summary["intervals"][which]
    lines = [
        f"On test data, of the {which} models. The mean is over all clients of the run, with a 95 % interval.",
        "",
        "| metric | this client | mean | interval |",
        "| --- | --- | --- | --- |",
    ]
    for name, mean in means.items():
        about, (low, high) = METRICS[name], intervals.get(name) or (None, None)
        value = own.get(which, {}).get(name)
        interval = "-" if low is None or high is None else f"{about.text(low)} to {about.text(high)}"
        lines.append(
            f"| {about.title} | {'-' if value is None else about.text(value)} | {about.text(mean)} | {interval} |"
        )
    return lines


def _verdict(client: str, summary: Mapping[str, Any]) -> str:
    verdict = summary.get("verdict")
    if not verdict:
        return (
            "It was not tested: no client trained a model alone for comparison (`shadow-local`, or `--against local`)."
        )
    own = next(
        (each for each in verdict["clients"] if client in (str(each["client"]), json.dumps(each["client"]))), None
    )
    mine = f" This client: {own['verdict']} (p {own['p']:.2g})." if own else ""
    which = "selected" if summary["metrics"]["selected"] else "last"
    return f"{verdict['sentence']}.{mine} The verdict compares the {which} models."
