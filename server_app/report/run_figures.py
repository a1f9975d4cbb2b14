"""The figures of a run, by the names of their files, and the data that each is drawn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred import data
from kindred.messages import ClientId
from kindred.server_app.run_files import what_data

from . import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_figures(
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    last: int,
    collaboration: Callable[[], tuple[Sequence[ClientId], np.ndarray]],
    tree: Sequence[Mapping[str, Any]] | None,
    federation: data.Federation | None,
) -> dict[str, Callable[[], Figure | None]]:
    """Return a function for each figure of a run, by the figure's name: "accuracy", "collaboration" and others.

    Parameters
    ----------
    settings : mapping
        The run's settings, kebab-case.
    rows : sequence of mapping
        The history: a row for each client and round.
    last : int
        The last round of training.
    collaboration : callable
        Returns the m clients and the weights (m, m) of the last round.
    tree : sequence of mapping, optional
        The clusters, where the method divides its clients.
    federation : Federation, optional
        None where sites have their own data.

    Returns
    -------
    dict
        name -> function that returns the figure, or None where there is nothing to draw.
    """
    name, where = settings["strategy"], f"{what_data(settings)}, seed {settings['seed']}"

    def groups_of(clients: Sequence[ClientId]) -> np.ndarray | None:
        return true_groups(clients, federation) if federation else None

    def draw_collaboration() -> Figure | None:
        clients, weights = collaboration()
        if not clients:
            return None
        title = f"Who learns from whom: {name}, round {last}, {where}"
        groups = groups_of(clients)
        return figures.collaboration_figure(clients, weights, None if groups is None else groups.tolist(), title)

    def draw_clusters() -> Figure:
        members = [client for cluster in tree or () for client in cluster["clients"]]
        groups = groups_of(members)
        known = None if groups is None else dict(zip(members, groups.tolist(), strict=True))
        return figures.tree_figure(tree or (), last, known, f"Clusters: {name} on {where}")

    pictures: dict[str, Callable[[], Figure | None]] = {
        "accuracy": lambda: figures.accuracy_figure(rows, f"{name} on {where}"),
        "collaboration": draw_collaboration,
    }
    if tree:
        pictures["clusters"] = draw_clusters
    if federation:
        pictures["partition"] = lambda: data.partition_figure(federation)
    return pictures


def true_groups(clients: Sequence[ClientId], federation: data.Federation) -> np.ndarray | None:
    """Return the true group of each client; None unless every one is a partition of the federation."""
    known = [client for client in clients if isinstance(client, int) and 0 <= client < federation.num_clients]
    return federation.groups[known] if len(known) == len(clients) else None
