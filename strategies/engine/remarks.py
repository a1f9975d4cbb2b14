"""Remarks about clients: their numbers of samples and the norms of their updates, where these stand out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kindred.messages import ClientId, in_order

from .norms import LEAST, OUTLIER

LARGE_SHARE = 0.5  # of a mean of LEAST clients or more: a client above it is named
LARGE_NUMBER = 20.0  # of samples, in medians of LEAST clients or more

SAMPLES, SHARE, NUMBER, NORM, SCALED = "samples", "share", "number", "norm", "scaled"  # kinds of remarks


class Remark(NamedTuple):
    """A remark: its client, its kind, and a text that follows the client's name."""

    client: ClientId
    about: str
    text: str


def on_samples(numbers: Mapping[ClientId, float], means: Iterable[Mapping[ClientId, float]]) -> Iterator[Remark]:
    """Yield remarks about numbers of samples that give a client a large part in a round.

    Parameters
    ----------
    numbers : mapping
        client -> its number of samples, for all that replied.
    means : iterable of mapping
        For each mean of clients' models, client -> its number of samples.
    """
    if len(numbers) >= LEAST:
        median = statistics.median(numbers.values())
        for client in in_order(numbers):
            if numbers[client] > LARGE_NUMBER * median:
                text = f"has {numbers[client]:.15g} samples, the median of {len(numbers)} clients is {median:.15g}"
                yield Remark(client, NUMBER, text)
    for mean in means:
        total = sum(mean.values())
        for client in in_order(mean) if len(mean) >= LEAST else ():
            if mean[client] > LARGE_SHARE * total:
                text = f"has {mean[client] / total:.0%} of the samples in a mean of {len(mean)} clients' models"
                yield Remark(client, SHARE, text)


def on_updates(rows: Iterable[Mapping[str, Any]]) -> Iterator[Remark]:
    """Yield remarks about updates, given their rows, see `History.updates`."""
    for row in rows:
        length = row.get("relative-to-largest", 0.0)
        if length > OUTLIER:
            text = f"sent an update of norm {row['norm']:.3g}, {length:.3g} times the largest median of a round so far"
            yield Remark(row["client"], NORM, text)
        if "scaled-by" in row:
            text = f"sent an update of norm {row['norm']:.3g}, which was scaled by {row['scaled-by']:.3g}"
            yield Remark(row["client"], SCALED, text)
