"""Write the files of a comparison: JSON, CSV, Markdown, pictures and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kindred.files import write_bytes
from kindred.server_app.config import Config
from kindred.server_app.headline import Headline
from kindred.server_app.report.reading import REPORT
from kindred.server_app.report.write import write_report
from kindred.server_app.run_files import failing_is_a_warning, save_figure, write_json
from kindred.server_app.tables import table_lines

from .metrics import numbers_of
from .pictures import pictures
from .texts import VERDICTS, cell, metrics_table, remarks, tables


def write(content: Mapping[str, Any], folder: Path) -> None:
    """Write the files, the report last; a picture or report that cannot be made is a warning."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", content)
    for name, data in (("comparison.csv", as_csv(content)), ("comparison.md", as_markdown(content).encode())):
        write_bytes(folder / name, data)
    for name, draw in pictures(content, folder).items():
        with failing_is_a_warning(folder / f"{name}.png"):
            if figure := draw():
                save_figure(figure, folder / f"{name}.png")
    with failing_is_a_warning(folder / REPORT):
        write_report(folder)


def as_csv(content: Mapping[str, Any]) -> bytes:
    """Return the rows of `csv_rows` as CSV."""
    rows = csv_rows(content)
    last = ("scale", "preset", "folder", "failed", "versions", "command")
    columns = dict.fromkeys(("strategy", "seed", *content["metrics"], "paper", "paper-floats", "reference"))
    columns |= dict.fromkeys(key for row in rows for key in row if key not in last)
    return table_lines([*columns, *last], rows, header=True)


def csv_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each run, and rows with the seeds "mean" and "std"; accuracies are in [0, 1]."""
    about = {
        "scale": content["scale"],
        "preset": content["preset"] and content["preset"]["name"],
        "command": content["command"],
    }
    rows: list[dict[str, Any]] = []
    varied = content["varied"]
    for name, each in content["strategies"].items():
        if varied:
            about |= {"of": each["of"], varied["setting"]: each["value"]}
        for run in each["runs"]:
            rows.append(
                {
                    "strategy": name,
                    "seed": run["seed"],
                    **run.get("metrics", {}),
                    **about,
                    "folder": run.get("folder"),
                    "versions": _versions_text(run.get("versions")),
                    "failed": run.get("reason"),
                }
            )
        test = {f"wilcoxon-{key}": value for key, value in (each["wilcoxon"] or {}).items()}
        paper = each["paper"] or {}
        versions = _versions_text(content["versions"])
        rows.append(
            {
                "strategy": name,
                "seed": "mean",
                **each["mean"],
                **about,
                **test,
                "versions": versions,
                "reference": content["reference"],
                "paper": paper.get("mean"),
                "paper-floats": paper.get("floats"),
            }
        )
        rows.append(
            {"strategy": name, "seed": "std", **each["std"], **about, "paper": paper.get("std"), "versions": versions}
        )
    return rows


def _versions_text(versions: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (versions or {}).items() if version)


def as_markdown(content: Mapping[str, Any]) -> str:
    """Return the comparison in Markdown: tables, remarks, settings, runs, notes."""
    strategies, preset = content["strategies"], content["preset"]
    results, cost, *others = tables(content)
    headline = Headline.of([content])
    numbers = numbers_of(headline)
    shown = {key: numbers[key] for key in (headline.columns.best, headline.columns.mean)}
    defaults = Config().run_config()
    set_to = [
        f"`{key}` = {value}"
        for key, value in content["settings"].items()
        if value != defaults[key] and key != "output-dir"
    ]
    parts = [
        f"# {content['title']}",
        "",
        f"    {content['command']}",
        "",
        f"{content['finished']}, {content['platform']}; {_versions_text(content['versions'])}.",
        "",
        *_rows(results),
        "",
        *_rows(cost),
        "",
        *(line for other in others for line in (*_rows(other), "")),
        *(f"- {line}" for line in remarks(content)),
        "",
        *(["## All metrics", "", *_rows(all_of_them), ""] if (all_of_them := metrics_table(content)) else []),
        "## Columns",
        "",
        *(f"- {metric.title}: {metric.meaning}" for metric in numbers.values() if metric.title in results[0] + cost[0]),
        *(f"- {title}: {meaning}" for title, meaning in VERDICTS.items() if title in results[0]),
        "",
        "Mean ± standard deviation (of a sample) over seeds.",
        "",
        "## Settings",
        "",
        "Of all methods, where not the default: " + (", ".join(set_to) or "none") + ".",
        "",
        *(
            f"- {name}"
            + (f" ({each['strategy']})" if name != each["strategy"] else "")
            + ": "
            + (", ".join(f"`{key}` = {value}" for key, value in each["settings"].items()) or "no own settings")
            for name, each in strategies.items()
        ),
        "",
        "## Runs",
        "",
        *_rows(
            [
                ["strategy", "seed", "", *(metric.title for metric in shown.values()), "folder"],
                *(
                    [
                        name,
                        str(run["seed"]),
                        run["how"],
                        *(cell(run.get("metrics", {}).get(key), None, metric) for key, metric in shown.items()),
                        run.get("folder") or run["reason"],
                    ]
                    for name, each in strategies.items()
                    for run in each["runs"]
                ),
            ]
        ),
    ]
    if preset:
        parts += ["", f"## Preset {preset['name']}", "", *(f"- {note}" for note in preset["notes"])]
    return "\n".join(parts) + "\n"


def _rows(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first line given has the titles."""
    first, *others = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return [first, "|" + " --- |" * len(lines[0]), *others]
