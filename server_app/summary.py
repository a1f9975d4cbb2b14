"""The figures of whole runs: compute the content of summary.json, and show finished runs side by side."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from kindred.engine.history import COMPUTE
from kindred.messages import ClientId, in_order

from .report.comparison_figures import comparison_figure
from .run_files import failing_is_a_warning, read_summary, save_figure, what_data
from .tables import read_table

if TYPE_CHECKING:
    from kindred.engine.history import History

SUMMED = (*COMPUTE, "floats", "bytes-fedavg")


def summarise(settings: Mapping[str, Any], history: History, models: Mapping[ClientId, str]) -> dict[str, Any]:
    """Return the figures of a whole run.

    Parameters
    ----------
    settings : mapping
        The run's settings, kebab-case.
    history : History
    models : mapping
        client -> file of its model.

    Returns
    -------
    dict
        None represents what nobody reported.

        - `rounds`: number of training rounds.
        - `accuracy` (mean over clients), `accuracy-weighted`, `accuracy-p10`, `accuracy-best` (BMTA): as in the last
          line of rounds.csv.
        - `personal`: the evaluation that accuracies are of.
        - `seconds`, `bytes-down`, `bytes-up`: of the whole run, with evaluations before and after the rounds.
        - `seconds-per-round`: of training.
        - `samples-trained`, `samples-predicted`: by all clients.
        - `floats`, `bytes-fedavg`: of PerFed-CKT, numbers sent as its paper counts them, and the bytes that FedAvg
          would have sent with the same models, both ways.
        - `left-out`: a list of `client` and `reason`.
        - `refused`: a list of `client` and `reasons`: reasons for refused replies, with their counts.
        - `clients`: a list of `client`, its last known `accuracy` and its `model` file.
    """
    training = training_rounds(settings, history)
    last = history.rounds[-1] if history.rounds else {}
    accuracies = history.last_accuracies()
    return {
        **{key: settings[key] for key in ("strategy", "dataset", "partition", "seed")},
        "rounds": len(training),
        **{
            key: last.get(key) for key in ("personal", "accuracy", "accuracy-weighted", "accuracy-p10", "accuracy-best")
        },
        "seconds": float(sum(line["seconds"] for line in history.rounds)),
        "seconds-per-round": float(sum(line["seconds"] for line in training)) / len(training) if training else None,
        "bytes-down": int(sum(line["bytes-down"] for line in history.rounds)),
        "bytes-up": int(sum(line["bytes-up"] for line in history.rounds)),
        **{
            key: sum(line.get(key, 0) for line in history.rounds)
            for key in SUMMED
            if any(key in line for line in history.rounds)
        },
        "left-out": [{"client": client, "reason": history.left_out[client]} for client in in_order(history.left_out)],
        "refused": [{"client": client, "reasons": reasons} for client, reasons in history.refused().items()],
        "clients": [
            {"client": client, "accuracy": accuracies.get(client), "model": models.get(client)}
            for client in in_order({row["client"] for row in history.rows} | models.keys())
        ],
    }


def training_rounds(settings: Mapping[str, Any], history: History) -> list[dict[str, Any]]:
    """Return the training rounds, without exchanges before the first or after the last."""
    return [line for line in history.rounds if 1 <= line["round"] <= settings["num-rounds"]]


def comparison_table(summaries: Sequence[Mapping[str, Any]], terminal: bool = True) -> Table:
    """Return a table of runs side by side: accuracies in percent, seconds, megabytes (10^6 bytes).

    Parameters
    ----------
    summaries : sequence of mapping
        From `RunFolder.finish` or `read_summary`, in the order of the lines.
    terminal : bool
        If false, there are no rules, and the best of each column of accuracies is not emphasised.
    """
    table = Table(box=box.SIMPLE_HEAD if terminal else None, show_edge=terminal, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    columns = {"mean %": "accuracy", "best %": "accuracy-best", "bottom decile %": "accuracy-p10"}
    for name in (*columns, "seconds", "MB down", "MB up"):
        table.add_column(name, justify="right", no_wrap=True)
    most = {key: max((s[key] for s in summaries if s[key] is not None), default=None) for key in columns.values()}
    for summary in summaries:
        cells = []
        for key in columns.values():
            text = _digit(summary[key], 100)
            cells.append(f"[bold]{text}[/bold]" if terminal and summary[key] == most[key] is not None else text)
        cells += [_digit(summary["seconds"]), *(_digit(summary[key], 1e-6) for key in ("bytes-down", "bytes-up"))]
        table.add_row(summary["strategy"], *cells)
    return table


def _digit(value: float | None, factor: float = 1) -> str:
    """Return a number with one digit after the point; "-" if it is not known."""
    return "-" if value is None else f"{factor * value:.1f}"


def compare_runs(folders: Sequence[Path], picture: Path, file: TextIO | None = None) -> None:
    """Put finished runs side by side: print the table, and draw their accuracies over rounds in one picture.

    Parameters
    ----------
    folders : sequence of Path
        Folders of finished runs.
    picture : Path
        The PNG to write.
    file : text stream, optional
        Stream to print to, by default standard output; plain text unless it is a terminal.

    Raises
    ------
    ValueError
        One of the runs is not finished.
    """
    summaries = [read_summary(folder) for folder in folders]
    console = Console(file=file or sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = 200  # files and pipes have no width: lines are never cut
    console.print(comparison_table(summaries, console.is_terminal))
    runs = [
        (summary["strategy"], [read_table(folder / "rounds.csv")])
        for summary, folder in zip(summaries, folders, strict=True)
    ]
    settings = {f"{what_data(summary)}, seed {summary['seed']}" for summary in summaries}
    with failing_is_a_warning(picture):
        save_figure(comparison_figure(runs, settings.pop() if len(settings) == 1 else "Runs compared"), picture)
