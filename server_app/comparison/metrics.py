"""The numbers of a run that a comparison shows."""

from __future__ import annotations

from typing import NamedTuple

from kindred.server_app.headline import Headline, significant


class Metric(NamedTuple):
    """A number of a run.

    Tables show it multiplied by `factor`, with `digits` digits after the point, or where this is None with four
    significant digits.
    """

    title: str
    meaning: str
    factor: float
    digits: int | None

    def text(self, value: float, at_most: int = 4) -> str:
        """Return a value as tables show it, where `digits` is None with `at_most` significant digits."""
        shown = self.factor * value
        return significant(shown, at_most) if self.digits is None else f"{shown:.{self.digits}f}"


COSTS = {
    "bytes": Metric("MB both ways", "payload of all messages, in both directions, 10^6 bytes", 1e-6, 1),
    "floats": Metric(
        "million numbers sent", "sent in both directions, in millions, counted as in PerFed-CKT's paper", 1e-6, 1
    ),
    "samples-trained": Metric(
        "thousand samples trained", "samples that clients trained on, counted each time, in thousands", 1e-3, 1
    ),
    "samples-predicted": Metric(
        "thousand samples predicted",
        "samples that clients predicted for, except to evaluate or train, in thousands",
        1e-3,
        1,
    ),
    "seconds": Metric("seconds", "duration of the rounds, with their files, without start and end of the run", 1, 1),
}


def numbers_of(headline: Headline) -> dict[str, Metric]:
    """Return the numbers by their keys: those of the headline metric, then `COSTS`."""
    title, unit, higher = headline.metric.title, headline.unit, headline.metric.higher
    factor, digits = headline.factor, 1 if headline.metric.percent else None
    mean, weighted, worst_decile, best, _, selected = headline.columns
    above, below, more = ("above", "below", "higher") if higher else ("below", "above", "lower")
    over_clients = f"mean test {title} over clients"
    bmta = " (BMTA)" if headline.name == "accuracy" else ""
    in_best = f"{over_clients}, in the best round{bmta}, which is chosen on test data"
    of_selected = f"{over_clients}, of each client's model that is best on its validation data"
    by_size = "the same, clients weighted by their number of test samples"
    return {
        selected: Metric(f"selected {unit}", of_selected, factor, digits),
        best: Metric(f"best {unit}", in_best, factor, digits),
        mean: Metric(f"last {unit}", f"{over_clients}, after the last round", factor, digits),
        weighted: Metric(f"by size {unit}", by_size, factor, digits),
        worst_decile: Metric(
            f"{headline.decile} {unit}",
            f"{title} {below} which a tenth of the clients lie, last round",
            factor,
            digits,
        ),
        "better-than-local": Metric(
            f"{above} local %", f"share of the clients with a {more} last {title} than with local", 100, 1
        ),
        **COSTS,
    }
