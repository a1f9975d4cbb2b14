"""The numbers of a run that a comparison shows."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """A number of a run: in tables it is multiplied by `factor` and has `digits` after the point."""

    title: str
    meaning: str
    factor: float
    digits: int


METRICS = {
    "accuracy-best": Metric("best %", "mean test accuracy over clients, in the best round (BMTA)", 100, 1),
    "accuracy": Metric("last %", "mean test accuracy over clients, in the end", 100, 1),
    "accuracy-weighted": Metric("by size %", "the same, clients weighted by their test images", 100, 1),
    "accuracy-p10": Metric("bottom decile %", "accuracy below which a tenth of the clients lie, in the end", 100, 1),
    "better-than-local": Metric(
        "above local %", "share of the clients that are better than with local, in the end", 100, 1
    ),
    "bytes": Metric("MB", "payload of all messages, both ways, 10^6 bytes", 1e-6, 1),
    "floats": Metric("numbers sent", "numbers sent both ways, in millions, as PerFed-CKT's paper counts them", 1e-6, 1),
    "samples-trained": Metric(
        "trained, 1000s", "images that clients trained on, each time counted, in thousands", 1e-3, 1
    ),
    "samples-predicted": Metric(
        "predicted, 1000s", "images that clients predicted for, other than to evaluate or train, in thousands", 1e-3, 1
    ),
    "seconds": Metric("seconds", "of the rounds, without start and end", 1, 1),
}
