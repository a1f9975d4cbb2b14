"""Means of the metrics that clients report, for Flower's Result."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from logging import DEBUG, WARNING
from typing import Any

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from flwr.supercore import log

from kindred.messages import ClientId, first_line, in_order, records_of

from .admission import raise_own

Aggregate = Callable[[list[RecordDict], str], MetricRecord]


def mean_metrics(contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Return Flower's weighted mean of the metrics that all clients report in the same form (a number, n numbers)."""

    def form(value: Any) -> int | None:
        return None if value is None else len(value) if isinstance(value, list) else 0

    records = [records_of(content, MetricRecord)[0] for content in contents]
    shared = [key for key in records[0] if all(form(r.get(key)) == form(records[0][key]) for r in records)]
    if any(len(record) > len(shared) for record in records):
        contents = [RecordDict({"metrics": MetricRecord({key: record[key] for key in shared})}) for record in records]
    return aggregate_metricrecords(contents, weighted_by_key)


def aggregated(
    aggregate: Aggregate, metrics: Mapping[ClientId, MetricRecord], weighted_by_key: str, server_round: int
) -> MetricRecord | None:
    """Aggregate clients' metrics, in order of client; None if there are none, or if `aggregate` raises an exception."""
    if not metrics:
        return None
    try:
        return aggregate([RecordDict({"metrics": metrics[client]}) for client in in_order(metrics)], weighted_by_key)
    except Exception as error:
        raise_own(error)
        log(
            WARNING,
            "kindred: the metrics of round %d could not be aggregated: %s raised %s",
            server_round,
            getattr(aggregate, "__name__", aggregate),
            first_line(f"{type(error).__name__}: {error}"),
        )
        log(DEBUG, "%s", traceback.format_exc())
        return None
