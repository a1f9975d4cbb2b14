"""The parts of a run's page that are about single clients: their values, curves, metrics and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kindred.messages import NUM_EXAMPLES, NUM_TEST_EXAMPLES, PERSONAL, ClientId
from kindred.metrics import METRICS
from kindred.server_app.headline import Headline
from kindred.server_app.run_files import labels_of, name_of
from kindred.server_app.summary import validators

MOST_VALUES = 100_000  # of all clients' curves together


def validators_content(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the sites that only validate, as `summary.validators` does, with their labels."""
    return [
        {**each, "client": labels_of([each["client"]], names)[0], "metrics": list(each["last"].items())}
        for each in validators(rows)
    ]


def verdict_content(verdict: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the verdict of a run's summary, with the clients' ids as texts."""
    if not verdict:
        return None
    return {**verdict, "clients": [{**each, "client": str(each["client"])} for each in verdict["clients"]]}


def clients_table(
    clients: Sequence[ClientId],
    rows: Sequence[Mapping[str, Any]],
    summarised: Sequence[Mapping[str, Any]],
    headline: Headline,
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """Return each client's id and name as texts, numbers of samples, targets, and last and selected value."""
    sizes = {key: {row["client"]: row[key] for row in rows if key in row} for key in (NUM_EXAMPLES, NUM_TEST_EXAMPLES)}
    last = last_values(rows, clients, f"{PERSONAL}-{headline.name}", headline)
    about = {each["client"]: each for each in summarised}
    return [
        {
            "client": str(client),
            "name": name_of(client, names),
            "train": sizes[NUM_EXAMPLES].get(client),
            "test": sizes[NUM_TEST_EXAMPLES].get(client),
            "classes": about.get(client, {}).get("classes"),
            "range": about.get(client, {}).get("range"),
            "last": value,
            "selected": about.get(client, {}).get("selected", {}).get(headline.name),
        }
        for client, value in zip(clients, last, strict=True)
    ]


def client_curves(
    clients: Sequence[ClientId],
    rows: Sequence[Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    key: str,
    headline: Headline,
) -> list[list[float | None]] | None:
    """Return each client's values of the metric, for every round; None where they are too many for the page."""
    if len(clients) * len(lines) > MOST_VALUES:
        return None
    values: dict[ClientId, dict[int, float]] = {client: {} for client in clients}
    for row in rows:
        if headline.metric.holds(row.get(key)):
            values[row["client"]][row["round"]] = row[key]
    return [numbers(values[client].get(line["round"]) for line in lines) for client in clients]


def metrics_content(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return each metric's number of clients, mean over these and value of all predictions, with intervals, as texts.

    They are of the selected models, or where there are none of the last ones. None in a summary without intervals.
    """
    if not summary.get("intervals"):
        return None
    which = "selected" if summary["metrics"]["selected"] else "last"
    of_mean = summary["metrics"][which], summary["intervals"][which]
    pooled = summary.get("pooled") or {"metrics": {}, "intervals": {}}
    of_all = pooled["metrics"], pooled["intervals"]

    def text(name: str, values: Mapping[str, float], ends: Mapping[str, Sequence[float]]) -> str:
        headline, between = Headline(name), ends.get(name)
        return ("-" if name not in values else headline.text(values[name])) + (
            f" ({' to '.join(map(headline.number, between))})" if between else ""
        )

    return {
        "selected": which == "selected",
        "samples": pooled.get("samples"),
        "rows": [
            [
                METRICS[name].title,
                str(sum(name in each.get(which, {}) for each in summary["clients"])),
                text(name, *of_mean),
                text(name, *of_all),
            ]
            for name in METRICS
            if name in of_mean[0] or name in of_all[0]
        ],
    }


def last_values(
    rows: Sequence[Mapping[str, Any]], clients: Sequence[ClientId], key: str, headline: Headline
) -> list[float | None]:
    """Return the last value that each client reported."""
    last = {row["client"]: row[key] for row in rows if headline.metric.holds(row.get(key))}
    return numbers(last.get(client) for client in clients)


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Round to six significant digits, which is more than a figure shows; None for values that are not finite."""
    return [None if value is None or not np.isfinite(value) else float(f"{value:.6g}") for value in values]
