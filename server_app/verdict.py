"""The verdict on a federation: which clients have better models by it than by training alone.

Each client's two models are compared on its test samples (`kindred.client.gain`). The p values are corrected for the
number of clients by Holm's method. Since few test samples seldom show a difference, the gain over all clients' samples
is given too, with an interval over clients and their samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from kindred.client.gain import RESAMPLES, Gain, gain_of_predictions, interval
from kindred.client.state import PREDICTIONS
from kindred.messages import ALONE, ClientId, in_order, seed_for
from kindred.objectives import Objective

HELPED, HURT, UNDECIDED = "helped", "hurt", "no difference shown"
LEVEL = 0.05
"""Largest corrected p value that shows a difference."""


@dataclass(frozen=True)
class ClientVerdict:
    """Verdict on the federation for one client.

    Attributes
    ----------
    client : client id
    gain : Gain
    p : float
        Corrected for the number of clients.
    verdict : str
        HELPED, HURT or UNDECIDED.
    """

    client: ClientId
    gain: Gain
    p: float
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as entries of a JSON file."""
        return {"client": self.client, **asdict(self.gain), "gain": self.gain.gain, "p": self.p,
                "verdict": self.verdict}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Verdict on the federation for all clients.

    Attributes
    ----------
    clients : list of ClientVerdict
        In order of client.
    gain, low, high : float
        Mean difference of scores over all clients' samples, and its interval.
    """

    clients: list[ClientVerdict]
    gain: float
    low: float
    high: float

    def count(self, verdict: str) -> int:
        """Return the number of clients with a verdict."""
        return sum(each.verdict == verdict for each in self.clients)

    @property
    def sentence(self) -> str:
        """The verdict as a line of text."""
        gain, low, high = (
            f"{100 * value:+.1f}" if self.of_shares else f"{value:+.3g}" for value in (self.gain, self.low, self.high)
        )
        points = " points" if self.of_shares else ""
        return (
            f"Federating helped {self.count(HELPED)} of {len(self.clients)} clients, hurt {self.count(HURT)}, "
            f"{UNDECIDED} for {self.count(UNDECIDED)}; over all test samples the gain is {gain}{points} ({low} to "
            f"{high})"
        )

    @property
    def of_shares(self) -> bool:
        """True if scores are shares of right predictions, not negative errors of numbers."""
        return all(min(each.gain.federated, each.gain.alone) >= 0 for each in self.clients)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as entries of a JSON file."""
        return {
            "sentence": self.sentence, "percent": self.of_shares, HELPED: self.count(HELPED), HURT: self.count(HURT),
            UNDECIDED: self.count(UNDECIDED), "gain": self.gain, "low": self.low, "high": self.high,
            "clients": [each.to_dict() for each in self.clients],
        }  # fmt: skip


def reported_gains(rows: Iterable[Mapping[str, Any]]) -> dict[ClientId, Gain]:
    """Return the last comparison that each client reported (`kindred.client.shadow`) in the rows of a history."""
    names, found = [each.name for each in fields(Gain)], {}
    for row in rows:
        values: dict[str, Any] = {name: row.get(f"gain-{name}") for name in names}
        if all(isinstance(value, int | float) and math.isfinite(value) for value in values.values()):
            found[row["client"]] = Gain(**values | {"samples": int(values["samples"])})
    return found


def paired_gains(ours: Path, alone: Path, objective: Objective, seed: int) -> dict[ClientId, Gain]:
    """Return the comparison of clients' predictions in the folders of two runs, of the clients that are in both.

    Parameters
    ----------
    ours, alone : Path
        Folders of finished runs with the same data, the second of the method `local`.
    objective : Objective
        Of both.
    seed : int
        Of the bootstrap.
    """
    found = {}
    for file in sorted((ours / PREDICTIONS).glob("*.safetensors")):
        if not (other := alone / PREDICTIONS / file.name).exists():
            continue
        first, second = load_file(file), load_file(other)
        if len(first["targets"]) and np.array_equal(first["targets"], second["targets"]):
            client = client_of(file)
            found[client] = gain_of_predictions(
                objective, first[PREDICTIONS], second[PREDICTIONS], first["targets"], seed_for(seed, client, ALONE)
            )
    return found


def client_of(file: Path) -> ClientId:
    """Return the client that saved a file."""
    with safe_open(file, "numpy") as content:
        return json.loads(content.metadata()["client"])


def verdict_of(gains: Mapping[ClientId, Gain], seed: int = 0) -> Verdict | None:
    """Return what the federation did for its clients; None without clients. `seed` is the bootstrap's."""
    clients = in_order(gains)
    if not clients:
        return None
    corrected = holm(np.array([gains[client].p for client in clients]))
    found = []
    for client, p in zip(clients, corrected.tolist(), strict=True):
        gain = gains[client].gain
        shown = UNDECIDED if p > LEVEL or gain == 0 else HELPED if gain > 0 else HURT
        found.append(ClientVerdict(client, gains[client], p, shown))
    ordered = [gains[client] for client in clients]
    sizes = np.array([each.samples for each in ordered])  # (m,)
    mean = float(np.average([each.gain for each in ordered], weights=sizes))
    return Verdict(found, mean, *interval(pooled_means(ordered, np.random.default_rng(seed))))


def holm(p: np.ndarray) -> np.ndarray:
    """Return p values (m,) corrected by Holm's step-down method (1979)."""
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(np.minimum(p[order] * np.arange(len(p), 0, -1), 1))
    corrected = np.empty(len(p))
    corrected[order] = stepped
    return corrected


def pooled_means(gains: list[Gain], rng: np.random.Generator) -> np.ndarray:
    """Return the mean gains, (RESAMPLES,), over all samples of as many clients drawn with replacement.

    A drawn client's mean gain is drawn, too: about its own, with the standard error of its samples' differences.
    """
    sizes = np.array([each.samples for each in gains])  # (m,)
    means, errors = np.array([(each.gain, each.deviation / np.sqrt(each.samples)) for each in gains]).T  # (m,) each
    drawn = rng.integers(len(gains), size=(RESAMPLES, len(gains)))  # (R, m)
    values = rng.normal(means[drawn], errors[drawn])
    return (values * sizes[drawn]).sum(axis=1) / sizes[drawn].sum(axis=1)
