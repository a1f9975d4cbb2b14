"""Types of the arguments that all strategies share, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, TypedDict

from flwr.app import MetricRecord, RecordDict


class Shared(TypedDict, total=False):
    """The arguments of `PersonalizedStrategy`, which documents their meanings, ranges and defaults."""

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None
    evaluate_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None
    seed: int
    sampling: str
    max_local_epochs: int
    wait_timeout: float
    quorum: float
    grace: float
    max_strikes: int
    max_client_share: float
    max_update_norm: float | Literal["auto"]
    max_empty_rounds: int
    buffers: Collection[str] | None
    metric: str
    task: str
    stop_after: int


class AveragedShared(Shared, total=False):
    """The arguments of `Averaging` and `SeveralModels` that the methods based on them share."""

    aggregation: str


class StoredShared(Shared, total=False):
    """The arguments of `StoredModels`."""

    store: str
