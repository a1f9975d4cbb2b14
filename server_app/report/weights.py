"""Weights over rounds: how much each client learns from others, and its shares of component models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kindred.messages import SHARE, ClientId, in_order
from kindred.server_app.run_files import labels_of

from .collaboration import matrix_files, read_collaboration, round_of
from .figures import carried_forward

MOST_PANELS = 12  # clients, or components, whose curves a figure shows
MOST_POINTS = 100  # rounds of a curve
STEADY = 1e-6  # weights that change by less are constant: float32 rounds


class Curves(NamedTuple):
    """Weights over rounds that belong together: those of all clients for one client, or in one component.

    Attributes
    ----------
    about : str
        Whose weights: "client 3" or "component 0".
    rounds : ndarray of int, shape (r,)
    clients : list of m client ids
    weights : ndarray, shape (r, m)
        NaN where the weights are not known.
    own : int or None
        Place of the client that learns among `clients`.
    """

    about: str
    rounds: np.ndarray
    clients: list[ClientId]
    weights: np.ndarray
    own: int | None = None


def collaboration_curves(
    folder: Path,
    last: int,
    groups: Mapping[ClientId, int] | None = None,
    most: int = MOST_PANELS,
    names: Sequence[str] = (),
) -> list[Curves]:
    """Return the rows of the collaboration matrices over rounds, a `Curves` for each client that learns.

    Parameters
    ----------
    folder : Path
        The folder `collaboration` of a run.
    last : int
        The last round of training; later matrices are omitted.
    groups : mapping, optional
        client -> its true group, where there are groups. Clients are then in the order of their groups.
    most : int
        Largest number of clients that learn. If there are more, they are chosen at equal distances.
    names : sequence of str
        The names of clients 0, 1, 2 and so on, if they have names.

    Returns
    -------
    list of Curves
        Of at most `MOST_POINTS` rounds. A row without weights, as of a client that does not report them, is not known.
    """
    files = [path for path in matrix_files(folder) if round_of(path) <= last]
    chosen = [files[at] for at in _spread(len(files), MOST_POINTS)]
    read = [(round_of(path), found) for path in chosen if (found := read_collaboration(path))]
    clients = in_order({client for _, found in read for client in found.clients})
    if groups:
        clients.sort(key=lambda client: groups.get(client, -1))
    place = {client: i for i, client in enumerate(clients)}
    learners = _spread(len(clients), most)
    weights = np.zeros((len(learners), len(read), len(clients)))  # (k, r, m)
    for number, (_, found) in enumerate(read):
        to = [place[client] for client in found.clients]
        among = {client: at for at, client in enumerate(found.clients)}
        known = [(k, among[clients[i]]) for k, i in enumerate(learners) if clients[i] in among]
        if known:
            rows, places = (list(each) for each in zip(*known, strict=True))
            weights[np.ix_(rows, [number], to)] = np.nan_to_num(found.rows_of(np.array(places)), posinf=0).clip(0)[
                :, None
            ]
    weights[weights.sum(axis=2) == 0] = np.nan
    rounds = np.array([number for number, _ in read], dtype=np.int64)
    labels = labels_of(clients, names)
    return [Curves(f"client {labels[i]}", rounds, clients, rows, i) for i, rows in zip(learners, weights, strict=True)]


def is_share(value: object) -> bool:
    """Return whether a reported value is a number in [0, 1]: clients may report anything as a share."""
    return isinstance(value, int | float) and 0 <= value <= 1


def component_curves(rows: Sequence[Mapping[str, Any]], last: int) -> list[Curves]:
    """Return the clients' shares of each component over rounds, where clients report them; at most `MOST_PANELS`.

    A client that did not report in a round keeps its last share.

    Parameters
    ----------
    rows : sequence of mapping
        The history.
    last : int
        The last round of training.
    """
    rows = [row for row in rows if row["round"] <= last]
    curves = []
    for number in range(MOST_PANELS):
        key = f"{SHARE}{number}"
        if not any(is_share(row.get(key)) for row in rows):
            break
        rounds, clients, shares = carried_forward(rows, key, is_share)
        at = _spread(len(rounds), MOST_POINTS)
        curves.append(Curves(f"component {number}", rounds[at], clients, shares[at]))
    return curves


def run_curves(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    last: int,
    groups: Mapping[ClientId, int] | None,
    names: Sequence[str] = (),
) -> list[Curves]:
    """Return a run's `component_curves`, else its `collaboration_curves`; none if no weight changes over rounds."""
    curves = component_curves(rows, last) or collaboration_curves(folder / "collaboration", last, groups, names=names)
    return curves if any(map(changes, curves)) else []


def changes(curves: Curves) -> bool:
    """Return whether a weight changes over rounds.

    The first round does not count where the client learnt from itself alone: no other client had sent a model yet.
    """
    known = curves.weights[~np.isnan(curves.weights).any(axis=1)]  # (k, m)
    if curves.own is not None and len(known) and known[0, curves.own] == 1:
        known = known[1:]
    return len(known) > 1 and bool((np.ptp(known, axis=0) > STEADY).any())


def _spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers below `count`, at equal distances, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
