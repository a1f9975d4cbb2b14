"""The numbers of a run that a comparison shows."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """A number of a run; tables show it multiplied by `factor`, with `digits` digits after the point."""

    title: str
    meaning: str
    factor: float
    digits: int


METRICS = {
    "accuracy-best": Metric("best %", "mean test accuracy over clients, in the best round (BMTA)", 100, 1),
    "accuracy": Metric("last %", "mean test accuracy over clients, after the last round", 100, 1),
    "accuracy-weighted": Metric("by size %", "the same, clients weighted by their number of test images", 100, 1),
    "accuracy-p10": Metric("bottom decile %", "accuracy below which a tenth of the clients lie, last round", 100, 1),
    "better-than-local": Metric(
        "above local %", "share of the clients with a higher last accuracy than with local", 100, 1
    ),
    "bytes": Metric("MB", "payload of all messages, in both directions, 10^6 bytes", 1e-6, 1),
    "floats": Metric("numbers sent", "sent in both directions, in millions, counted as in PerFed-CKT's paper", 1e-6, 1),
    "samples-trained": Metric(
        "trained, 1000s", "images that clients trained on, counted each time, in thousands", 1e-3, 1
    ),
    "samples-predicted": Metric(
        "predicted, 1000s", "images that clients predicted for, except to evaluate or train, in thousands", 1e-3, 1
    ),
    "seconds": Metric("seconds", "duration of the rounds, without start and end of the run", 1, 1),
}
