"""Which replies are used: each is checked as a whole before anything of it is.

Pure functions; the caller counts and logs what they refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import MetricRecord, RecordDict

from .messages import read_array

MAX_EXAMPLES = 10**12


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
        One MetricRecord and, if arrays are due, one ArrayRecord, under any names (as Flower's FedAvg has it).
    weighted_by_key : str
        The metric that counts the client's samples: a whole number from 1 to `MAX_EXAMPLES`.
    mismatch : callable, optional
        Given the arrays by name, says how their names, shapes and types are not those due, None if they are. Floats
        must be finite besides. Left out where no arrays are due.

    Raises
    ------
    Refused
        With the reason, in a few words.
    """
    if len(content.metric_records) != 1:
        raise Refused(f"it has {len(content.metric_records)} metric records, expected 1")
    (metrics,) = content.metric_records.values()
    examples = metrics.get(weighted_by_key)
    if not isinstance(examples, int | float) or examples != examples or not 1 <= examples <= MAX_EXAMPLES:
        raise Refused(f"{weighted_by_key} is {examples!r}, allowed: 1 to {MAX_EXAMPLES}")
    arrays: dict[str, np.ndarray] = {}
    if mismatch is not None:
        if len(content.array_records) != 1:
            raise Refused(f"it has {len(content.array_records)} array records, expected 1")
        (record,) = content.array_records.values()
        for name, array in record.items():
            try:
                arrays[name] = read_array(array)
            except ValueError as error:
                raise Refused(f"array {name!r} {error}") from None
        if (difference := mismatch(arrays)) is not None:
            raise Refused(difference)
        for name, array in arrays.items():
            if np.issubdtype(array.dtype, np.floating) and not _is_finite(array.reshape(-1)):
                raise Refused(f"array {name!r} has values that are not finite")
    config = {key: value for record in content.config_records.values() for key, value in record.items()}
    return Reply(arrays, metrics, config)


def _is_finite(values: np.ndarray) -> bool:
    """Whether all values (k,) are: their squares' sum then is, or overflows. As fast as memory, and without a mask."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(values, values))) or bool(np.isfinite(values).all())
