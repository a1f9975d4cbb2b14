"""Which replies are used: each is checked as a whole before anything of it is.

Pure functions; the caller counts and logs what they refuse.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from .messages import MAX_NAME, NUMBERS, is_name, read_array, records_of

REFUSED = "refused: "  # how the status of a refused reply begins; its reason follows
MAX_EXAMPLES = 10**12
LARGEST = 1e15  # of floats: their sums, times so many samples, and squares stay far from what float32 cannot hold
MAX_METRICS = 1000  # each is a column of the history


class Refused(ValueError):
    """A reply that is not used; its text is the reason."""


@dataclass(frozen=True)
class Reply:
    """What a reply carries, once it is found good.

    Attributes
    ----------
    arrays : dict of str to ndarray
        Views into the message: copy what is to outlive it. Empty where none was asked for.
    metrics : MetricRecord
    config : dict
        What the reply says besides numbers.
    """

    arrays: dict[str, np.ndarray]
    metrics: MetricRecord
    config: dict[str, Any]


Mismatch = Callable[[dict[str, np.ndarray]], str | None]


def admit(content: RecordDict, weighted_by_key: str, mismatch: Mismatch | None = None) -> Reply:
    """Check a reply.

    Parameters
    ----------
    content : RecordDict
        One MetricRecord and, if arrays are due, one ArrayRecord, under any names (as Flower's FedAvg has it); besides
        these one ConfigRecord at the most.
    weighted_by_key : str
        The metric that counts the client's samples: a whole number from 1 to `MAX_EXAMPLES`, 10.0 for 10 too.
    mismatch : callable, optional
        Given the arrays by name, says how their names, shapes and types are not those due, None if they are. Floats
        must be finite besides, and at most `LARGEST`. Left out where no arrays are due.

    Raises
    ------
    Refused
        With the reason, in a few words.
    """
    all_metrics, configs = records_of(content, MetricRecord), records_of(content, ConfigRecord)
    if len(all_metrics) != 1:
        raise Refused(f"it has {len(all_metrics)} metric records, expected 1")
    if len(configs) > 1:
        raise Refused(f"it has {len(configs)} config records, expected 1 at the most")
    (metrics,) = all_metrics
    _check_metrics(metrics)
    examples = metrics.get(weighted_by_key)
    if not is_count(examples):
        raise Refused(f"{weighted_by_key} is {reprlib.repr(examples)}, allowed: 1 to {MAX_EXAMPLES}")
    arrays: dict[str, np.ndarray] = {}
    if mismatch is not None:
        records = records_of(content, ArrayRecord)
        if len(records) != 1:
            raise Refused(f"it has {len(records)} array records, expected 1")
        (record,) = records
        for name, array in record.items():
            try:
                arrays[name] = read_array(array)
            except ValueError as error:
                raise Refused(f"array {reprlib.repr(name)} {error}") from None
        if (difference := mismatch(arrays)) is not None:
            raise Refused(difference)
        for name, array in arrays.items():
            if np.issubdtype(array.dtype, np.floating):
                _check_values(name, array.reshape(-1))
    config = {key: value for record in configs for key, value in record.items()}
    return Reply(arrays, metrics, config)


def norm(arrays: Iterable[np.ndarray]) -> float:
    """The L2 norm of all values together."""
    with np.errstate(over="ignore"):
        return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays)))


def _check_metrics(metrics: MetricRecord) -> None:
    """Refuse metrics that cannot become columns of a table."""
    if len(metrics) > MAX_METRICS:
        raise Refused(f"it has {len(metrics)} metrics, allowed: up to {MAX_METRICS}")
    for name, value in metrics.items():
        if not is_name(name):
            raise Refused(f"a metric is called {reprlib.repr(name)}, allowed: 1 to {MAX_NAME} printable characters")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and not NUMBERS[0] <= number <= NUMBERS[1]:
                raise Refused(f"metric {name!r} has a number of more than 64 bits")


def are_numbers(told: object, count: int, least: float, most: float) -> bool:
    """Whether this is a list of so many numbers, none of them out of bounds or NaN."""
    return (isinstance(told, list) and len(told) == count
            and all(isinstance(number, int | float) and least <= number <= most for number in told))


def is_count(examples: object, least: int = 1) -> bool:
    """Whether this is a number of samples. Flower's apps may send a whole number as a float."""
    return (isinstance(examples, int | float) and not isinstance(examples, bool)
            and least <= examples <= MAX_EXAMPLES and examples == int(examples))


def _check_values(name: str, values: np.ndarray) -> None:
    """Refuse floats (k,) that are not finite, or too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        if float(np.dot(values, values)) <= LARGEST**2:  # as fast as memory, and without a mask
            return  # in half precision it may overflow
    if not np.isfinite(values).all():
        raise Refused(f"array {name!r} has values that are not finite")
    if (largest := float(max(values.max(), -values.min()))) > LARGEST:
        raise Refused(f"array {name!r} holds {largest:g}, allowed: up to {LARGEST:g}")
