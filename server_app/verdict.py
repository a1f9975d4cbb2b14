"""The verdict on a federation: which clients have better models by it than by training alone.

Each client's two models are compared on its test samples (`kindred.client.gain`). The p values are corrected for the
number of clients by Holm's method. Since few test samples seldom show a difference, the gain over all clients' samples
is given too, with an interval over clients and their samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from kindred.client.gain import RESAMPLES, Gain, gain_of_predictions, interval
from kindred.client.state import PREDICTIONS
from kindred.messages import ALONE, ClientId, in_order, seed_for
from kindred.objectives import Objective
from kindred.server_app.config import ConfigError

KINDS = HELPED, HURT, UNDECIDED = "helped", "hurt", "no difference shown"
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
        first, second = _predictions(file), _predictions(other)
        if len(first["targets"]) and np.array_equal(first["targets"], second["targets"]):
            client = client_of(file)
            found[client] = gain_of_predictions(
                objective, first[PREDICTIONS], second[PREDICTIONS], first["targets"], seed_for(seed, client, ALONE)
            )
    return found


def _predictions(file: Path) -> dict[str, np.ndarray]:
    """Return what a file of predictions holds; ConfigError where it is damaged."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): remove the run's folder, and run it again") from None


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
    return Verdict(found, *pooled_gain([[gains[client]] for client in clients], seed))


def pooled_gain(of_clients: Sequence[Sequence[Gain]], seed: int = 0) -> tuple[float, float, float]:
    """Return the mean gain over all samples, and the ends of its interval.

    Parameters
    ----------
    of_clients : sequence of sequences of Gain
        For each client its gains, one for each run in which it was. The runs of a client are not independent.
    seed : int
        Of the bootstrap.
    """
    sizes = np.array([sum(each.samples for each in runs) for runs in of_clients])  # (m,)
    means = np.array([
        sum(each.gain * (each.samples / size) for each in runs) for runs, size in zip(of_clients, sizes, strict=True)
    ])  # fmt: skip
    # Runs may have the same test samples, so that a client's mean is no more certain than in one of them.
    errors = np.array([np.mean([each.deviation / np.sqrt(each.samples) for each in runs]) for runs in of_clients])
    resampled = pooled_means(means, errors, sizes, np.random.default_rng(seed))
    return (float(np.average(means, weights=sizes)), *interval(resampled))


def holm(p: np.ndarray) -> np.ndarray:
    """Return p values (m,) corrected by Holm's step-down method (1979)."""
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(np.minimum(p[order] * np.arange(len(p), 0, -1), 1))
    corrected = np.empty(len(p))
    corrected[order] = stepped
    return corrected


def pooled_means(means: np.ndarray, errors: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the mean gains, (RESAMPLES,), over all samples of as many clients drawn with replacement.

    A drawn client's mean gain is drawn, too: about its own, with its standard error. All arrays are (m,).
    """
    drawn = rng.integers(len(sizes), size=(RESAMPLES, len(sizes)))  # (R, m)
    values = rng.normal(means[drawn], errors[drawn])
    return (values * sizes[drawn]).sum(axis=1) / sizes[drawn].sum(axis=1)
