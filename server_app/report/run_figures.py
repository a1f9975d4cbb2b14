"""The figures of a run except its partition, by the names of their files, and the data that each is drawn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kindred import data
from kindred.client.models import client_network, network_names
from kindred.engine.collaboration import Collaboration
from kindred.messages import ClientId
from kindred.server_app.headline import Headline
from kindred.server_app.run_files import png_of, what_data

from . import figures
from .collaboration import groups_of
from .tree_figure import tree_figure
from .weight_figure import weights_figure
from .weights import run_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CLIENTS = 2000  # whose matrix is drawn: more do not show at the picture's resolution


def run_figures(
    folder: Path,
    settings: Mapping[str, Any],
    metric: str,
    rows: Sequence[Mapping[str, Any]],
    last: int,
    collaboration: Callable[[], Collaboration],
    tree: Sequence[Mapping[str, Any]] | None,
    federation: data.Federation | None,
) -> dict[str, Callable[[], Figure | None]]:
    """Return a function for each figure of a run, by the figure's name: that of the metric, "collaboration" and others.

    The figure of the partition is not among them: runs with the same data share it, see `partition_picture`.

    Parameters
    ----------
    folder : Path
        The run's folder, which has the collaboration matrices of all rounds.
    settings : mapping
        The run's settings, kebab-case.
    metric : str
        Name of the headline metric.
    rows : sequence of mapping
        The history: a row for each client and round.
    last : int
        The last round of training.
    collaboration : callable
        Returns the collaboration of the last round.
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
    names = federation.names if federation else ()
    true_groups = federation.groups.tolist() if federation else None

    def draw_collaboration() -> Figure | None:
        found = collaboration()
        if not found.clients or len(found.clients) > MOST_CLIENTS:
            return None
        title = f"Who learns from whom: {name}, round {last}, {where}"
        known = groups_of(found.clients, true_groups)
        return figures.collaboration_figure(found.clients, found.matrix(), known, title, names)

    def draw_clusters() -> Figure:
        members = [client for cluster in tree or () for client in cluster["clients"]]
        groups = groups_of(members, true_groups)
        known = None if groups is None else dict(zip(members, groups, strict=True))
        return tree_figure(tree or (), last, known, f"Clusters: {name} on {where}", names)

    def draw_weights() -> Figure | None:
        known: dict[ClientId, int] | None = dict(enumerate(true_groups)) if true_groups else None
        curves = run_curves(folder, rows, last, known, names)
        return weights_figure(curves, known, f"Weights over rounds: {name} on {where}", names) if curves else None

    def draw_networks() -> Figure | None:
        assert federation
        sizes = networks_of(settings, federation)
        return figures.networks_figure(sizes, f"Networks of the clients: {where}") if len(sizes) > 1 else None

    pictures: dict[str, Callable[[], Figure | None]] = {
        metric: lambda: figures.metric_figure(rows, Headline(metric), f"{name} on {where}"),
        "collaboration": draw_collaboration,
        "weights": draw_weights,
    }
    if tree:
        pictures["clusters"] = draw_clusters
    if federation:
        pictures["networks"] = draw_networks
    return pictures


@lru_cache(maxsize=1)
def partition_picture(federation: data.Federation) -> bytes:
    """Return the content of partition.png; it is kept, because all runs of a comparison have the same."""
    return png_of(data.partition_figure(federation))


def networks_of(settings: Mapping[str, Any], federation: data.Federation) -> dict[str, list[int]]:
    """Return each network of a run, smallest first, and the numbers of training samples of the clients that have it.

    Clients without training samples take no part.
    """
    model, inputs = settings["model"], federation.task.inputs
    found: dict[str, list[int]] = {name: [] for name in network_names(model, inputs.kind, inputs.shape)}
    for client, size in enumerate(federation.train_sizes.tolist()):
        if size:
            network = client_network(
                model, inputs.kind, inputs.shape, size, federation.typical_size, settings["seed"], client
            )
            found[network].append(size)
    return found
