"""The figures of whole runs: compute the content of summary.json, and show finished runs side by side."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.text import Text

from kindred.engine.history import COMPUTE, HeadlineColumns
from kindred.messages import NUM_TEST_EXAMPLES, PERSONAL, SELECTED, ClientId, in_order
from kindred.metrics import METRICS

from .headline import Headline
from .intervals import mean_intervals, means
from .report.comparison_figures import comparison_figure
from .run_files import failing_is_a_warning, name_of, read_summary, save_figure, what_data
from .tables import read_table
from .terminal import Column, number, print_table
from .verdict import reported_gains, verdict_of

if TYPE_CHECKING:
    from kindred.engine.history import History

MODELS = {"selected": SELECTED, "last": PERSONAL}  # names in the summary of the evaluations of clients' models
SUMMED = (*COMPUTE, "floats", "bytes-fedavg")


def summarise(
    settings: Mapping[str, Any],
    history: History,
    models: Mapping[ClientId, str],
    names: Sequence[str] = (),
    targets: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the figures of a whole run.

    Parameters
    ----------
    settings : mapping
        The run's settings, kebab-case.
    history : History
    models : mapping
        client -> file of its model.
    names : sequence of str
        The name of each client, if they have names.
    targets : sequence of mapping
        What is known of each client's training targets, see `Federation.targets`.

    Returns
    -------
    dict
        None represents what nobody reported.

        - `rounds`: number of training rounds.
        - `metric`: the headline metric. For accuracy the next columns are `accuracy` (mean over clients),
          `accuracy-weighted`, `accuracy-p10`, `accuracy-best` (BMTA), `accuracy-validation` and `accuracy-selected`, as
          in the last line of rounds.csv. `HeadlineColumns` names those of other metrics.
        - `personal`: the evaluation that these are of.
        - `seconds`, `bytes-down`, `bytes-up`: of all rounds, with evaluations before and after them. The seconds
          include those for files and checkpoints, up to this summary, and not those of the start-up.
        - `seconds-per-round`: of training rounds.
        - `seconds-by-part`: the seconds by `clients`, `server` and `results`, and those before the first round as
          `start-up`; see `kindred.engine.times.Times`.
        - `samples-trained`, `samples-predicted`: by all clients.
        - `asked`, `answered`: numbers of messages to train, and of their replies that were used.
        - `floats`, `bytes-fedavg`: of PerFed-CKT, numbers sent as its paper counts them, and the bytes that FedAvg
          would have sent with the same models, both ways.
        - `left-out`: a list of `client` and `reason`.
        - `remarks`: what is named once for a client, a list of `client`, `round` and `remark`; see `History.remarks`.
        - `refused`: a list of `client` and `reasons`: reasons for refused replies, with their counts.
        - `clients`: a list of `client`, its `name` if it has one, of its training targets the number of `classes` or
          the `range` of a number, where the run knows them, its last known `accuracy` (or the other metric), and
          its `model` file; with validation data `selected`, all metrics of its selected model on test data, and
          `last`, those of its last one.
        - `validators`: a list of the sites that only validate: `client`, its `samples`, the `status` of its last
          evaluation of the global model, and the metrics of its last successful one as `last`.
        - `metrics`: the means of these over the clients that have them; `intervals`: low and high of each mean, see
          `intervals.mean_intervals`.
        - `verdict`: see `verdict.Verdict.to_dict`; None where no client trained a model alone, or all did.
    """
    training = training_rounds(settings, history)
    last = history.rounds[-1] if history.rounds else {}
    values, columns = history.last_values(), HeadlineColumns.of(history.metric)
    reported = {which: _last_metrics(history, which) for which in MODELS.values()}
    federates = settings["strategy"] != "local"
    verdict = verdict_of(reported_gains(history.rows), int(settings["seed"])) if federates else None
    return {
        **{key: settings[key] for key in ("strategy", "dataset", "partition", "seed")},
        "rounds": len(training),
        "metric": history.metric,
        **{key: last.get(key) for key in ("personal", *columns)},
        "seconds": float(sum(line["seconds"] for line in history.rounds)) + history.times.since_last_round(),
        "seconds-per-round": float(sum(line["seconds"] for line in training)) / len(training) if training else None,
        "seconds-by-part": dict(history.times.seconds),
        "bytes-down": int(sum(line["bytes-down"] for line in history.rounds)),
        "bytes-up": int(sum(line["bytes-up"] for line in history.rounds)),
        **{
            key: sum(line.get(key, 0) for line in history.rounds)
            for key in SUMMED
            if any(key in line for line in history.rounds)
        },
        **{key: int(sum(line[key] for line in training)) for key in ("asked", "answered")},
        "left-out": [{"client": client, "reason": history.left_out[client]} for client in in_order(history.left_out)],
        "remarks": [{key: each[key] for key in ("client", "round", "remark")} for each in history.remarks],
        "refused": [{"client": client, "reasons": reasons} for client, reasons in history.refused().items()],
        "clients": [
            {
                "client": client,
                **({"name": name} if (name := name_of(client, names)) else {}),
                **(targets[client] if isinstance(client, int) and 0 <= client < len(targets) else {}),
                history.metric: values.get(client),
                "model": models.get(client),
                **{title: reported[which][client] for title, which in MODELS.items() if client in reported[which]},
            }
            for client in in_order({row["client"] for row in history.rows} | models.keys())
        ],
        "validators": validators(history.validations),
        "metrics": {title: means(reported[which].values()) for title, which in MODELS.items()},
        "intervals": {
            title: mean_intervals(reported[which].values(), int(settings["seed"])) for title, which in MODELS.items()
        },
        "verdict": verdict and verdict.to_dict(),
    }


def validators(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the sites that only validate, in order, from their rows; see `summarise`."""
    last = {row["client"]: row for row in rows}
    sizes = {row["client"]: row[NUM_TEST_EXAMPLES] for row in rows if NUM_TEST_EXAMPLES in row}
    known = {row["client"]: row for row in rows if row["status"] == "ok"}
    return [
        {
            "client": client,
            "samples": sizes.get(client),
            "status": last[client]["status"],
            "last": {name: row[name] for name in METRICS if name in (row := known.get(client, {}))},
        }
        for client in in_order(last)
    ]


def _last_metrics(history: History, which: str) -> dict[ClientId, dict[str, float]]:
    """Return client -> the last value that it reported of each metric of a model."""
    found: dict[ClientId, dict[str, float]] = {}
    for row in history.rows:
        values = {name: row[key] for name, metric in METRICS.items() if metric.holds(row.get(key := f"{which}-{name}"))}
        if values:
            found[row["client"]] = values
    return found


def training_rounds(settings: Mapping[str, Any], history: History) -> list[dict[str, Any]]:
    """Return the training rounds, without exchanges before the first or after the last."""
    last = history.stopped_after or settings["num-rounds"]
    return [line for line in history.rounds if 1 <= line["round"] <= last]


def comparison_table(summaries: Sequence[Mapping[str, Any]]) -> tuple[list[Column], list[list[str | Text]]]:
    """Return a table of runs side by side for `print_table`: headline metric, seconds, megabytes (10^6 bytes).

    Of several runs the best of each column of the metric is bold.

    Parameters
    ----------
    summaries : sequence of mapping
        From `RunFolder.finish` or `read_summary`, in the order of the lines.

    Raises
    ------
    ConfigError
        The runs have different headline metrics.
    """
    headline = Headline.of(summaries)
    columns = headline.columns
    titles = {"mean": columns.mean, "best": columns.best, headline.decile: columns.worst_decile}
    if any(summary.get(columns.selected) is not None for summary in summaries):
        titles = {"mean": columns.mean, "selected": columns.selected, headline.decile: columns.worst_decile}
    heads = (*(f"{title} {headline.unit}" for title in titles), "seconds", "MB down", "MB up")
    known = {key: [each[key] for each in summaries if each.get(key) is not None] for key in titles.values()}
    top = {key: reduce(headline.metric.better, values) for key, values in known.items() if values}
    lines: list[list[str | Text]] = []
    for summary in summaries:
        cells: list[str | Text] = [summary["strategy"]]
        for key in titles.values():
            value = summary.get(key)
            text = "-" if value is None else headline.number(value)
            cells.append(Text(text, style="bold" if value == top.get(key, math.nan) else ""))
        cells.append(f"{summary['seconds']:.1f}")
        cells += [f"{1e-6 * summary[key]:.1f}" for key in ("bytes-down", "bytes-up")]
        lines.append(cells)
    return [Column("strategy"), *map(number, heads)], lines


def compare_runs(folders: Sequence[Path], picture: Path, file: TextIO | None = None) -> None:
    """Put finished runs side by side: print the table, and draw their headline metric over rounds.

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
        One of the runs is not finished, or they have different headline metrics.
    """
    summaries = [read_summary(folder) for folder in folders]
    file = file or sys.stdout
    print_table(*comparison_table(summaries), file=file, ruled=file.isatty())
    runs = [
        (summary["strategy"], [read_table(folder / "rounds.csv")])
        for summary, folder in zip(summaries, folders, strict=True)
    ]
    settings = {f"{what_data(summary)}, seed {summary['seed']}" for summary in summaries}
    with failing_is_a_warning(picture):
        title = settings.pop() if len(settings) == 1 else "Runs compared"
        save_figure(comparison_figure(runs, Headline.of(summaries), title), picture)
