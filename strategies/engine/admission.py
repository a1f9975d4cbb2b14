"""Admission of replies: each reply is checked as a whole before any part of it is used.

These are pure functions; the caller counts and logs the refused replies.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from kindred.interrupts import raise_interrupt
from kindred.messages import (
    CLIENT_ID,
    LOSS,
    MAX_NAME,
    MODEL_BYTES,
    MOST,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    SAMPLES_PREDICTED,
    SAMPLES_TRAINED,
    config_of,
    is_name,
    ordinary_names,
    read_array,
    read_record,
    records_of,
)

REFUSED = "refused: "  # how the status of a refused reply begins; its reason follows
MAX_EXAMPLES = 10**12
LEAST_WEIGHT = 1e-12  # smaller ones would lose digits of a float32 model, or all of them, in a weighted sum
LARGEST = 1e15  # largest float: its square, and sums weighted by numbers of samples, stay far below float32's maximum
MAX_METRICS = 1000
MAX_ROW = 16_000  # bytes of a reply's metrics in the history: their names, and NUMBER for each
NUMBER = 8
MAX_STEPS = 10**7  # of training in a round: what an integer buffer, such as a counter of batches, can have changed by
MAX_NUMBERS = 10_000  # in all lists of a reply's metrics together
# Metrics that are counts: whole numbers from 0 to MAX_EXAMPLES, if a reply has them.
COUNTS = (NUM_EXAMPLES, NUM_TEST_EXAMPLES, SAMPLES_TRAINED, SAMPLES_PREDICTED, MODEL_BYTES)
# Bounds of an introduction: entries, items of a list, characters of a text.
MAX_ENTRIES, MAX_ITEMS, MAX_TEXT = 100, 1000, 10_000


# Exceptions that are the server's own fault: no reply is refused for them.
SERVER_ERRORS = (MemoryError, OSError)


def raise_own(error: Exception) -> None:
    """Raise an error of SERVER_ERRORS, and KeyboardInterrupt if an error has come from one; return for all others."""
    if isinstance(error, SERVER_ERRORS):
        raise error
    raise_interrupt(error)


class Refused(ValueError):
    """A reply cannot be used; the message is the reason."""


@dataclass(frozen=True)
class Reply:
    """The content of an admitted reply.

    Attributes
    ----------
    arrays : dict of str to ndarray
        Views into the message: copy those that must outlive it. Empty if no arrays were expected.
    metrics : MetricRecord
        Numbers, and lists of numbers; see `number`.
    config : dict
        The entries of the reply that are not numbers.
    """

    arrays: dict[str, np.ndarray]
    metrics: MetricRecord
    config: dict[str, Any]

    def number(self, name: str) -> float:
        """Return a metric that is one number; raise `Refused` if it is missing or a list."""
        value = self.metrics.get(name)
        if value is None or isinstance(value, list):
            raise Refused(f"its {name} is {reprlib.repr(value)}, expected a number")
        return float(value)

    def numbers(self) -> dict[str, int | float]:
        """Return all metrics that are one number."""
        return {name: value for name, value in self.metrics.items() if not isinstance(value, list)}

    def loss(self) -> float:
        """Return the loss, under any of its names; raise `Refused` if it is missing or not finite."""
        found = next((self.metrics[name] for name in ordinary_names(LOSS) if name in self.metrics), None)
        if not isinstance(found, int | float) or not np.isfinite(found):
            raise Refused(f"its loss is {reprlib.repr(found)}, expected a finite number")
        return float(found)


Mismatch = Callable[[dict[str, np.ndarray]], str | None]


def admit(content: RecordDict, weighted_by_key: str, mismatch: Mismatch | None = None, least: int = 1) -> Reply:
    """Check a reply and return its content.

    Parameters
    ----------
    content : RecordDict
        One MetricRecord and, if arrays are expected, one ArrayRecord, under any names (as in Flower's FedAvg); also at
        most one ConfigRecord.
    weighted_by_key : str
        The metric that counts the client's samples: a whole number from `least` to `MAX_EXAMPLES`, also as a float
        (10.0). If it is none of COUNTS it is a weight: any number from `LEAST_WEIGHT` up to that, or 0 if that is
        the least.
    mismatch : callable, optional
        Given the arrays by name, says how their names, shapes and types differ from those expected; None if they do
        not. In addition, floats must be finite and at most `LARGEST`. Omitted if no arrays are expected: those that
        come are ignored.
    least : int
        0 or 1.

    Raises
    ------
    Refused
        The reply cannot be used; the message says why in a few words.
    """
    all_metrics, configs = records_of(content, MetricRecord), records_of(content, ConfigRecord)
    if len(all_metrics) != 1:
        raise Refused(f"it has {len(all_metrics)} metric records, expected 1")
    if len(configs) > 1:
        raise Refused(f"it has {len(configs)} config records, expected 1 at the most")
    (metrics,) = all_metrics
    examples = metrics.get(weighted_by_key)
    if weighted_by_key in COUNTS:
        if not is_count(examples, least):
            raise Refused(f"{weighted_by_key} is {reprlib.repr(examples)}, allowed: {least} to {MAX_EXAMPLES}")
    elif not isinstance(examples, int | float) or not (LEAST_WEIGHT <= examples <= MAX_EXAMPLES or examples == least):
        allowed = f"{LEAST_WEIGHT:g} to {MAX_EXAMPLES}"
        raise Refused(f"{weighted_by_key} is {reprlib.repr(examples)}, allowed: {allowed}")
    _check_metrics(metrics)
    arrays: dict[str, np.ndarray] = {}
    if mismatch is not None:
        records = records_of(content, ArrayRecord)
        if len(records) != 1:
            raise Refused(f"it has {len(records)} array records, expected 1")
        (record,) = records
        for name, packed in record.items():
            try:
                arrays[name] = read_array(packed)
            except ValueError as error:
                raise Refused(f"array {reprlib.repr(name)} {error}") from None
        if (difference := mismatch(arrays)) is not None:
            raise Refused(difference)
        for name, values in arrays.items():
            if np.issubdtype(values.dtype, np.floating):
                _check_values(name, values.reshape(-1))
    return Reply(arrays, metrics, config_of(content))


def admit_evaluation(content: RecordDict, weighted_by_key: str, mismatch: Mismatch | None = None) -> Reply:
    """Check an evaluation reply and return its content, with the number of test samples as NUM_TEST_EXAMPLES.

    That may be 0: the reply then has no metrics, but perhaps a model, or the losses of several.

    Parameters
    ----------
    content, mismatch
        As for `admit`.
    weighted_by_key : str
        The metric that counts the samples where the reply has no NUM_TEST_EXAMPLES, as that of an ordinary ClientApp.

    Raises
    ------
    Refused
        The reply cannot be used; the message says why in a few words.
    """
    has_own_key = any(NUM_TEST_EXAMPLES in metrics for metrics in records_of(content, MetricRecord))
    key = NUM_TEST_EXAMPLES if has_own_key else weighted_by_key
    reply = admit(content, key, mismatch, least=0)
    metrics = {name: value for name, value in reply.metrics.items() if name != key}
    return replace(reply, metrics=MetricRecord({**metrics, NUM_TEST_EXAMPLES: reply.metrics[key]}))


def norm(arrays: Iterable[np.ndarray]) -> float:
    """Return the L2 norm of all arrays' values together."""
    with np.errstate(over="ignore"):
        return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays)))


def admit_introduction(content: RecordDict) -> dict[str, Any]:
    """Check a client's introduction and return its entries.

    Returns
    -------
    dict
        Texts of up to `MAX_TEXT` characters, numbers, and lists of up to `MAX_ITEMS` of these, by name.

    Raises
    ------
    Refused
        The introduction cannot be used; the message says why in a few words.
    """
    about = config_of(content)
    if len(about) > MAX_ENTRIES:
        raise Refused(f"its introduction has {len(about)} entries, allowed: up to {MAX_ENTRIES}")
    for key, value in about.items():
        if key == CLIENT_ID:  # the caller checks the id
            continue
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_ITEMS:
            raise Refused(
                f"its introduction has {len(items)} items under {reprlib.repr(key)}, allowed: up to {MAX_ITEMS}"
            )
        for item in items:
            if isinstance(item, str | bytes) and len(item) > MAX_TEXT:
                raise Refused(
                    f"its introduction has {len(item)} characters under {reprlib.repr(key)}, allowed: up to {MAX_TEXT}"
                )
            if isinstance(item, int) and not -MOST <= item <= MOST:
                raise Refused(
                    f"its introduction has {reprlib.repr(item)} under {reprlib.repr(key)}, "
                    f"allowed: whole numbers from {-MOST} to {MOST}"
                )
    return about


def _check_metrics(metrics: MetricRecord) -> None:
    """Raise `Refused` for metrics that cannot become columns of a table or cannot be averaged."""
    if len(metrics) > MAX_METRICS:
        raise Refused(f"it has {len(metrics)} metrics, allowed: up to {MAX_METRICS}")
    listed = size = 0
    for name, value in metrics.items():
        if not is_name(name):
            raise Refused(f"a metric is called {reprlib.repr(name)}, allowed: 1 to {MAX_NAME} printable characters")
        size += len(str(name).encode()) + NUMBER
        numbers: Sequence[object] = value if isinstance(value, list) else [value]
        if isinstance(value, list):
            listed += len(value)
            if not value or listed > MAX_NUMBERS:
                raise Refused(
                    f"metric {name!r} is a list of {len(value)} numbers, allowed: 1 or more, and up to "
                    f"{MAX_NUMBERS} in all lists together"
                )
        for number in numbers:
            if not isinstance(number, int | float):
                raise Refused(f"metric {name!r} holds {reprlib.repr(number)}, allowed: numbers")
            if isinstance(number, int) and not -MOST <= number <= MOST:
                raise Refused(
                    f"metric {name!r} holds {reprlib.repr(number)}, allowed: whole numbers from {-MOST} to {MOST}"
                )
        if name in COUNTS and not is_count(value, least=0):
            raise Refused(f"{name} is {reprlib.repr(value)}, allowed: 0 to {MAX_EXAMPLES}")
    if size > MAX_ROW:
        raise Refused(f"its {len(metrics)} metrics take {size} bytes with their names, allowed: up to {MAX_ROW}")


def integer_ranges(record: ArrayRecord) -> dict[str, tuple[int, int]]:
    """Return the least and the greatest number in each integer buffer, by its name without the prefix of a model."""
    ranges: dict[str, tuple[int, int]] = {}
    for name, packed in record.items():
        if np.dtype(packed.dtype).kind in "iu" and (array := read_array(packed)).size:
            numbers = [*ranges.get(_without_prefix(name), ()), int(array.min()), int(array.max())]
            ranges[_without_prefix(name)] = min(numbers), max(numbers)
    return ranges


def check_integers(arrays: Mapping[str, np.ndarray], sent: Mapping[str, tuple[int, int]]) -> None:
    """Raise `Refused` if integer buffers are farther than a round can move them from those sent, `integer_ranges`."""
    for name, array in arrays.items():
        if array.dtype.kind in "iu" and array.size and (known := sent.get(_without_prefix(name))):
            low, high = known[0] - MAX_STEPS, known[1] + MAX_STEPS
            for number in (int(array.min()), int(array.max())):
                if not low <= number <= high:
                    raise Refused(f"array {name!r} holds {number}, allowed after a round: {low} to {high}")


def _without_prefix(name: str) -> str:
    return name.rpartition("/")[2]


def are_numbers(value: object, count: int, least: float, most: float) -> bool:
    """Return whether `value` is a list of `count` numbers from `least` to `most`, none of them NaN."""
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(number, int | float) and least <= number <= most for number in value)
    )


def check_numbers(name: str, reported: object, count: int, least: float, most: float) -> None:
    """Raise `Refused` where a reported value is not a list of `count` numbers in a range."""
    if not are_numbers(reported, count, least, most):
        raise Refused(f"its {name} are {reprlib.repr(reported)}, expected {count} numbers from {least:g} to {most:g}")


def is_count(examples: object, least: int = 1) -> TypeGuard[int | float]:
    """Return whether this is a number of samples. Flower's apps may send a whole number as a float."""
    return (
        isinstance(examples, int | float)
        and not isinstance(examples, bool)
        and least <= examples <= MAX_EXAMPLES
        and examples == int(examples)
    )


def check_initial(record: ArrayRecord) -> None:
    """Raise ValueError if a model has floats that are not finite, or too large: each reply would be refused."""
    for name, array in read_record(record).items():
        if np.issubdtype(array.dtype, np.floating) and not (np.isfinite(array).all() and _largest(array) <= LARGEST):
            raise ValueError(
                f"initial_arrays: array {name!r} has numbers that are not finite or above {LARGEST:g}; a constant, "
                "such as a mask, can be a buffer with persistent=False, which is not sent"
            )


def _check_values(name: str, values: np.ndarray) -> None:
    """Raise `Refused` if floats (k,) are not finite or too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        if float(np.dot(values, values)) <= LARGEST**2:  # as fast as memory allows, without a mask
            return  # else check precisely: in half precision the product may overflow
    if not np.isfinite(values).all():
        raise Refused(f"array {name!r} has values that are not finite: did training diverge?")
    if (largest := _largest(values)) > LARGEST:
        raise Refused(f"array {name!r} holds {largest:g}, allowed: up to {LARGEST:g}")


def _largest(values: np.ndarray) -> float:
    """Return the largest magnitude of finite floats, of any shape; 0 if there are none."""
    return float(max(values.max(), -values.min())) if values.size else 0.0
