"""Collaboration in each round: the files in the folder `collaboration`, and the matrices for the page."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.data import DataError
from kindred.data.files import open_npz
from kindred.engine.collaboration import Collaboration
from kindred.files import replacing
from kindred.lazy import lazy
from kindred.messages import ClientId, in_order
from kindred.server_app.run_files import client_array, labels_of

if TYPE_CHECKING:
    from scipy.cluster import hierarchy
    from scipy.spatial import distance
else:
    hierarchy, distance = lazy("scipy.cluster.hierarchy"), lazy("scipy.spatial.distance")

MOST_ROUNDS = 50  # matrices that the page holds
MATRIX_TIMES = 1100  # a matrix of clients that learn alone is nearly all zeros; deflate compresses at most 1,032 times
MATRIX_BYTES = 4_000_000  # size of these matrices together, one byte per weight


def collaboration_content(
    folder: Path, groups: Sequence[int] | None, names: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Return the matrices of up to `MOST_ROUNDS` rounds, one byte per weight; None where there are none.

    For each round, `strongest` is the largest weight of another client. In `weights`, by rows, the byte 255 means that
    weight; in `own`, each client's own share, it means 1. Clients are ordered by true group where groups are known;
    otherwise clients that learn from each other are side by side.
    """
    files = matrix_files(folder)
    matrices, damaged = [], []
    if files:
        last = read_collaboration(files[-1])
        clients = last.clients if last else []
        fitting = min(MOST_ROUNDS, MATRIX_BYTES // max(1, len(clients)) ** 2, len(files))
        for at in np.unique(np.linspace(len(files) - 1, 0, fitting).round().astype(int)):
            if read := read_collaboration(files[at]):
                matrices.append((round_of(files[at]), read.clients, read.matrix()))
            else:
                damaged.append(files[at].name)
        if not fitting:
            return {"too-many": len(clients), "rounds": []}
    if not matrices:
        return {"damaged": damaged, "rounds": []} if damaged else None

    clients = in_order({client for _, some, _ in matrices for client in some})
    place = {client: i for i, client in enumerate(clients)}
    shares = np.zeros((len(matrices), len(clients), len(clients)))  # (r, m, m)
    for share, (_, some, weights) in zip(shares, matrices, strict=True):
        at = [place[client] for client in some]
        share[np.ix_(at, at)] = np.nan_to_num(weights, posinf=0).clip(0)
    known = groups_of(clients, groups)
    order = np.argsort(known, kind="stable") if known else _order_by_similarity(shares[-1])
    shares = shares[:, order][:, :, order]
    diagonal = np.arange(len(clients))
    own = shares[:, diagonal, diagonal].copy()  # (r, m)
    shares[:, diagonal, diagonal] = 0
    strongest = shares.max(axis=(1, 2), initial=0)  # (r,)
    return {
        "names": labels_of((clients[i] for i in order), names),
        "groups": [known[i] for i in order] if known else None,
        "rounds": [number for number, _, _ in matrices],
        "of": len(files),
        "damaged": damaged,
        "strongest": [float(f"{value:.4g}") for value in strongest],
        "weights": [_bytes(share / (value or 1)) for share, value in zip(shares, strongest, strict=True)],
        "own": [_bytes(share) for share in own],
    }


def matrix_files(folder: Path) -> list[Path]:
    """Return the files of the rounds, in the order of the rounds."""
    return sorted(folder.glob("round-*.npz"), key=round_of)


def round_of(path: Path) -> int:
    """Return the round of a file."""
    return int(re.sub(r"\D", "", path.stem))


def write_collaboration(folder: Path, server_round: int, found: Collaboration) -> Path:
    """Write the file of a round and return its path, for `flush_files`. Rows that are mostly zeros are compressed."""
    folder.mkdir(exist_ok=True)
    rows = found.rows.astype(np.float32)
    save = np.savez if 2 * np.count_nonzero(rows) > rows.size else np.savez_compressed
    path = folder / f"round-{server_round:04d}.npz"
    with replacing(path, flush=False) as temporary:
        save(
            temporary,
            clients=client_array(found.clients),
            rows=rows,
            which=found.which.astype(np.int32),
            own=found.own.astype(np.float32),
        )
    return path


def read_collaboration(path: Path) -> Collaboration | None:
    """Return what a file holds; None if it is damaged."""
    try:
        with open_npz(path, MATRIX_TIMES) as file:
            clients = file["clients"].tolist()
            if "weights" in file:  # of an earlier version
                found = Collaboration.of_matrix(clients, file["weights"])
            else:
                found = Collaboration(clients, file["rows"], file["which"], file["own"])
    except DataError:
        return None
    rows, which, m = found.rows, found.which, len(clients)
    fits = rows.ndim == 2 and rows.shape[1] == m and which.shape == found.own.shape == (m,)
    return found if fits and ((which >= 0) & (which < max(len(rows), 1))).all() else None


def _order_by_similarity(shares: np.ndarray) -> np.ndarray:
    """Order clients by hierarchical clustering: those that learn much from each other are adjacent."""
    if len(shares) < 3:
        return np.arange(len(shares))
    both = (shares + shares.T) / 2
    distances = both.max() - both
    np.fill_diagonal(distances, 0)
    distances = distances.clip(0)
    return hierarchy.leaves_list(hierarchy.linkage(distance.squareform(distances, checks=False), "average"))


def _bytes(values: np.ndarray) -> str:
    """Return numbers in [0, 1] as one byte each, in base64."""
    return base64.b64encode(np.rint(255 * values.clip(0, 1)).astype(np.uint8).tobytes()).decode()


def groups_of(clients: Sequence[ClientId], groups: Sequence[int] | None) -> list[int] | None:
    """Return the true group of each client; None unless all clients are partitions with a known group."""
    if not groups:
        return None
    known = [groups[client] for client in clients if isinstance(client, int) and 0 <= client < len(groups)]
    return known if len(known) == len(clients) else None
