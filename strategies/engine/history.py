"""The history of a run: a row for each client and round, and a summary line for each round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from logging import WARNING
from typing import Any, NamedTuple

import numpy as np
from flwr.supercore import log

from kindred.messages import (
    KNOWN_METRICS,
    LOSS,
    NUM_TEST_EXAMPLES,
    PERSONAL,
    SAMPLES_PREDICTED,
    SAMPLES_TRAINED,
    TRAIN_LOSS,
    VALIDATION,
    ClientId,
    in_order,
)
from kindred.metrics import METRICS

from .admission import COUNTS, MAX_EXAMPLES, REFUSED, is_count
from .checkpoint import HistoryRows
from .times import Times

COMPUTE = (SAMPLES_TRAINED, SAMPLES_PREDICTED)
MAX_COLUMNS = 500  # names of metrics that a run keeps, in addition to KNOWN_METRICS
MOST_SENT = 5  # names of metrics in the line that says which ones a run has in place of its headline metric


def is_status(key: str) -> bool:
    """Return whether a column of a row holds the status of a reply."""
    return key == "status" or key.endswith("-status")


def statuses(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the statuses of a client's replies in a round; a number under such a name is the client's own metric."""
    return (value for key, value in row.items() if is_status(key) and isinstance(value, str))


class HeadlineColumns(NamedTuple):
    """Names of the columns of the headline metric in a round's summary line: its statistics over clients."""

    mean: str
    weighted: str
    worst_decile: str
    best: str
    validation: str
    selected: str

    @classmethod
    def of(cls, metric: str) -> HeadlineColumns:
        """Return the names for a metric: accuracy, accuracy-weighted, accuracy-p10, accuracy-best, ..."""
        decile = round(100 * METRICS[metric].worst_decile)
        ends = ("weighted", f"p{decile}", "best", "validation", "selected")
        return cls(metric, *(f"{metric}-{end}" for end in ends))


class History:
    """The history of a run.

    Parameters
    ----------
    metric : str
        Name of the headline metric, one of `METRICS`.

    Attributes
    ----------
    metric : str
    rows : list of dict
        One row for each round and client that was asked:

        - `round`, `client`
        - `status`: "ok", or the reason why the reply was not used
        - `evaluate-status`: the reason why a separate evaluation failed, if it did
        - NAME-loss and NAME-status: the loss of a side evaluation, and the reason why it failed, if it did
        - `seconds` from sending to reply
        - `bytes-down`, `bytes-up` (payload)
        - the numbers that the client reported, by their names
        - `personal-accuracy`, `personal-loss`: the evaluation that is the method's result for the client; other metrics
          that the client reports likewise

    rounds : list of dict
        One summary line for each round. Round 0 is an evaluation before the first one, the round after the last one a
        closing evaluation. A line has `round`, `asked`, `answered`, `seconds`, `bytes-down`, `bytes-up`, and those
        below. `seconds` are those from the end of the round before to the end of this one, so that those for the files
        and the checkpoint of the round before are among them.

        - `evaluated`, the number of clients with a value of the headline metric (one that was not asked keeps its last
          value), and statistics over these clients: `accuracy` (plain mean), `accuracy-weighted` (by test size),
          `accuracy-p10` (worst decile), `accuracy-best` (best plain mean so far; BMTA in the FedAMP paper). With
          validation data also `accuracy-validation` (plain mean on these) and `accuracy-selected`, the plain mean, on
          test data, of each client's model of the round with its best validation value;
          `HeadlineColumns` names them for another metric than accuracy
        - `personal`: the evaluation that these are from ("trained", "mixture")
        - `samples-trained`, `samples-predicted`: samples that the clients processed in the round, if they report it
        - the method's own numbers
        - `metrics-dropped`: metrics that were dropped because the run already has `MAX_COLUMNS` names of metrics

    validations : list of dict
        A row for each round and site that only validates: `round`, `client`, `status`, `bytes-down`, `bytes-up`,
        `num-test-examples`, and the metrics of the global model by name. They are part of no other number.
    updates : list of dict
        A row for each update, the change of a model in an admitted training reply: `round`, `client`, `visit` ("first",
        "return" after absence, or "further"), `norm`, the L2 norm over the parameters, `relative-norm`, the norm over
        the median of comparable updates, `relative-to-largest`, the norm over the largest such median so far (both
        where there are enough, see `norms`), and `scaled-by`, the factor by which the update was scaled down, if it
        was.
    remarks : list of dict
        What is named once for a client: `round`, `client`, `about`, a word for the kind of remark, and `remark`.
    left_out : dict
        client -> the reason why it takes no part at all, such as having no data.
    times : Times
        What the run's seconds are spent on.
    """

    def __init__(self, metric: str = "accuracy") -> None:
        self.metric = metric
        self.rows = HistoryRows()
        self.rounds = HistoryRows()
        self.validations = HistoryRows()
        self.updates = HistoryRows()
        self.remarks: list[dict[str, Any]] = []
        self.left_out: dict[ClientId, str] = {}
        self.times = Times()
        self.stopped_after = 0  # the last training round of a run that ended early, by `stop_after`; 0: it did not
        self._open: dict[ClientId, dict[str, Any]] = {}  # rows of the round in progress
        self._reported: dict[ClientId, set[str]] = {}  # names of the metrics in them that the clients chose
        self._columns: set[str] = set()  # such names that the run keeps
        self._counts: dict[ClientId, dict[str, float]] = {}  # the method's own numbers for these rows
        self._counted: dict[str, float] = {}  # the method's own numbers for the round
        self._headline: dict[ClientId, tuple[float, float]] = {}  # last known headline metric, and its test size
        self._validation: dict[ClientId, float] = {}  # last known headline metric on validation data
        self._selected: dict[ClientId, float] = {}  # value on test data
        self._best: dict[ClientId, tuple[float, float]] = {}  # that model's value and loss on validation data
        self._invalid = ""  # the first value of the headline metric that it cannot have
        self._undefined = False  # whether a client sent NaN for it

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, between two rounds."""
        return {
            "rows": self.rows,
            "rounds": self.rounds,
            "validations": self.validations,
            "updates": self.updates,
            "remarks": self.remarks,
            "left_out": self.left_out,
            "headline": self._headline,
            "validation": self._validation,
            "selected": self._selected,
            "best": self._best,
            "columns": self._columns,
            "times": self.times.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what `state` returned."""
        self.rows, self.rounds = HistoryRows(state["rows"]), HistoryRows(state["rounds"])
        self.validations = HistoryRows(state.get("validations", []))  # the checkpoints of earlier versions have none
        self.updates, self.remarks, self.left_out = HistoryRows(state["updates"]), state["remarks"], state["left_out"]
        self._headline, self._columns = state["headline"], state["columns"]
        self._validation, self._selected, self._best = state["validation"], state["selected"], state["best"]
        self.times.restore(state.get("times", {}))

    def add(self, row: dict[str, Any], reported: Collection[str] = ()) -> None:
        """Add a client's row to the round in progress; a second exchange's row is merged into the first.

        `reported` are the keys of the row that the client itself chose.
        """
        self._reported.setdefault(row["client"], set()).update(reported)
        first = self._open.setdefault(row["client"], row)
        if first is not row:
            together = {
                key: first[key] + row[key]
                for key in ("seconds", "bytes-down", "bytes-up", *COMPUTE)
                if key in first and key in row
            }
            if row["status"] != "ok":
                together["evaluate-status"] = row["status"]
            # A client cannot change texts.
            texts = {key: value for key, value in first.items() if isinstance(value, str)}
            first.update({**row, **together, **texts})

    def count(self, client: ClientId | None = None, **numbers: float) -> None:
        """Add a method's own numbers to the round in progress, or to one client's row in it.

        Names are given in snake_case and kept in kebab-case.
        """
        into = self._counted if client is None else self._counts.setdefault(client, {})
        into.update({name.replace("_", "-"): number for name, number in numbers.items()})

    def remark(self, server_round: int, client: ClientId, about: str, remark: str) -> None:
        """Log and keep a remark about a client, unless it already has one about this."""
        if not any((each["client"], each["about"]) == (client, about) for each in self.remarks):
            log(WARNING, "kindred: round %d: client %s %s", server_round, client, remark)
            self.remarks.append({"round": server_round, "client": client, "about": about, "remark": remark})

    def open_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the round in progress, in order of client."""
        return [{**self._open[client], **self._counts.get(client, {})} for client in in_order(self._open)]

    def record_invalid(self, client: ClientId, value: float) -> None:
        """Record a value that the headline metric cannot have; warn of the first. NaN is what samples do not define."""
        if math.isnan(value):
            self._undefined = True
        elif not self._invalid:
            self._invalid = f"client {client} sent {self.metric} {value}, allowed: {METRICS[self.metric].values}"
            log(WARNING, "kindred: %s; such values do not count", self._invalid)

    def close_round(self, server_round: int, seconds: float, personal: str) -> dict[str, Any]:
        """End a round: add its rows, in order of client, and its summary line, and return this line."""
        rows = self.open_rows()
        dropped = self._drop_columns(rows)
        self._open, self._reported, self._counts = {}, {}, {}
        self.rows += rows
        line: dict[str, Any] = {
            "round": server_round,
            "asked": len(rows),
            "answered": sum(row["status"] == "ok" for row in rows),
            "seconds": seconds,
            "bytes-down": sum(row["bytes-down"] for row in rows),
            "bytes-up": sum(row["bytes-up"] for row in rows),
            **{
                key: sum(counts)
                for key in COMPUTE
                if (counts := [int(row[key]) for row in rows if is_count(row.get(key), least=0)])
            },
        }
        metric, columns = METRICS[self.metric], HeadlineColumns.of(self.metric)
        for row in rows:
            if metric.holds(value := row.get(f"{PERSONAL}-{self.metric}")):
                size = row.get(NUM_TEST_EXAMPLES)
                if not isinstance(size, int | float) or not 0 < size <= MAX_EXAMPLES:
                    size = 1
                self._headline[row["client"]] = (value, size)
                self._select(row, value)
        if self._headline:
            known = np.array([self._headline[client] for client in in_order(self._headline)])  # (m, 2)
            line["evaluated"] = len(known)
            line["personal"] = personal
            line[columns.mean] = mean = float(known[:, 0].mean())
            line[columns.weighted] = float(np.average(known[:, 0], weights=known[:, 1]))
            line[columns.worst_decile] = float(np.quantile(known[:, 0], metric.worst_decile))
            before = self.rounds[-1] if self.rounds else {}
            if line["answered"]:
                line[columns.best] = metric.better(before.get(columns.best, mean), mean)
            elif columns.best in before:
                line[columns.best] = before[columns.best]
        if self._selected and self._validation:
            on_validation = [self._validation[client] for client in in_order(self._validation)]
            line[columns.validation] = float(np.mean(on_validation))
            line[columns.selected] = float(np.mean(list(self.selected_values().values())))
        line.update(self._counted)
        if dropped:
            line["metrics-dropped"] = dropped
        self._counted = {}
        self.rounds.append(line)
        return line

    def _drop_columns(self, rows: list[dict[str, Any]]) -> int:
        """Remove metrics with new names from rows once the run has too many names; return the number removed.

        `KNOWN_METRICS` are always kept. Of the other names those that most clients report are kept first.
        """
        names = {
            client: self._reported[client] - self._counts.get(client, {}).keys() - KNOWN_METRICS
            for client in (row["client"] for row in rows)
        }
        reporting = Counter(name for own in names.values() for name in own if name not in self._columns)
        new = sorted(reporting, key=lambda name: (-reporting[name], name))
        too_many = set(new[max(MAX_COLUMNS - len(self._columns), 0) :])
        self._columns.update(reporting.keys() - too_many)
        if not too_many:
            return 0
        log(
            WARNING,
            "kindred: %d metrics with new names are dropped, such as %s: a run keeps %d names",
            len(too_many),
            min(too_many),
            MAX_COLUMNS,
        )
        for row in rows:
            for name in too_many & names[row["client"]]:
                del row[name]
        return sum(reporting[name] for name in too_many)

    def _select(self, row: Mapping[str, Any], test: float) -> None:
        """Record a client's model as its selected one if it is the best so far by validation data, if it has any."""
        client, metric = row["client"], METRICS[self.metric]
        value, loss = (row.get(f"{VALIDATION}-{name}", math.nan) for name in (self.metric, LOSS))
        if not METRICS[LOSS].holds(loss):
            return
        if metric.holds(value):
            self._validation[client] = value
        model = value if metric.holds(value) else math.nan, loss
        if metric.improves(model, self._best.get(client, (math.nan, math.nan))):
            self._best[client], self._selected[client] = model, test

    def selected_values(self) -> dict[ClientId, float]:
        """Return the headline metric, on test data, of each client's selected model, in order of client.

        It is the model with the best value on the client's validation data; of several, or where there is no value, the
        one with the lowest loss.
        """
        return {client: self._selected[client] for client in in_order(self._selected)}

    def rounds_since_best(self) -> int:
        """Return the number of rounds since the one with the best mean on validation data; 0 without such data.

        A mean over fewer clients than now, before some first reported, is not compared with.
        """
        metric, name = METRICS[self.metric], HeadlineColumns.of(self.metric).validation
        lines = [line for line in self.rounds if name in line]
        known = [(line["round"], line[name]) for line in lines if line["evaluated"] == lines[-1]["evaluated"]]
        if not known:
            return 0
        best = known[0]
        for each in known[1:]:
            if metric.worse(best[1], each[1]):
                best = each
        return known[-1][0] - best[0]

    def last_values(self) -> dict[ClientId, float]:
        """Return each client's last known value of the headline metric, in order of client."""
        return {client: self._headline[client][0] for client in in_order(self._headline)}

    def unreported(self) -> str:
        """Return a line that no client reported the headline metric, and what they sent; empty if one did."""
        if self._headline or not any(line["answered"] for line in self.rounds):
            return ""
        if self._invalid:
            return f"no client reported {self.metric}: {self._invalid}"
        if self._undefined:
            return f"no client reported {self.metric}: all that sent it sent nan"
        known = KNOWN_METRICS - {*COUNTS, TRAIN_LOSS, "train_loss"}
        others = sorted(self._columns.union(*(row.keys() & known for row in self.rows)))
        more = f" and {len(others) - MOST_SENT} more" if len(others) > MOST_SENT else ""
        sent = ", ".join(others[:MOST_SENT]) + more if others else "no metric that tables show"
        return f"no client reported {self.metric}: it sent {sent}"

    def refused(self) -> dict[ClientId, dict[str, int]]:
        """Return client -> reason -> number of replies refused for it, for clients with any, in order."""
        counts: dict[ClientId, dict[str, int]] = {}
        for row in self.rows:
            for status in statuses(row):
                if status.startswith(REFUSED):
                    reasons = counts.setdefault(row["client"], {})
                    reason = status.removeprefix(REFUSED)
                    reasons[reason] = reasons.get(reason, 0) + 1
        return {client: counts[client] for client in in_order(counts)}


OPENING, CLOSING = "opening evaluation", "closing evaluation"  # titles of the lines before and after the rounds


def title(server_round: int, first_round: int, num_rounds: int) -> str:
    """Return the name of a round, or of an evaluation before or after the rounds."""
    if server_round < first_round:
        return OPENING
    if server_round > num_rounds:
        return CLOSING
    return f"round {server_round:{len(str(num_rounds))}}/{num_rounds}"


def progress(line: dict[str, Any], metric: str, first_round: int, num_rounds: int) -> str:
    """Return the summary line of a round, or of an evaluation before or after the rounds, as one line of text."""
    about, columns = METRICS[metric], HeadlineColumns.of(metric)
    parts = [title(line["round"], first_round, num_rounds)]
    if columns.best in line:
        parts += [
            f"{about.title} {about.text(line[columns.mean])}",
            f"{about.decile} {about.text(line[columns.worst_decile])}",
            f"best {about.text(line[columns.best])}",
        ]
    if columns.selected in line:
        parts += [
            f"validation {about.text(line[columns.validation])}",
            f"selected {about.text(line[columns.selected])}",
        ]
    parts += [
        f"{line['seconds']:.1f} s",
        f"up {line['bytes-up'] / 1e6:.2f} MB",
        f"down {line['bytes-down'] / 1e6:.2f} MB",
        f"{line['answered']}/{line['asked']} clients",
    ]
    return "  ".join(parts)
