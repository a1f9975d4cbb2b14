"""The figure of Clustered FL's tree of clusters, drawn with matplotlib as those in figures.py."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.data.partition_figure import short_name
from kindred.messages import ClientId
from kindred.server_app.run_files import labels_of

from .figures import COLOURS, new_figure, round_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT_WIDTH, TEXT_LINES = 52, 4  # characters per line, and lines, of the list of a cluster's clients


def tree_figure(
    clusters: Sequence[Mapping[str, Any]],
    last: int,
    groups: Mapping[ClientId, int] | None,
    title: str,
    names: Sequence[str] = (),
) -> Figure:
    """Draw the tree of clusters over rounds: when each was divided, the similarity across the cut, and its clients.

    Parameters
    ----------
    clusters : sequence of mapping
        As in `ClusteredFL.tree`.
    last : int
        The last round.
    groups : mapping, optional
        client -> its true group, where there are groups.
    title : str
    names : sequence of str
        The names of clients 0, 1, 2 and so on, if they have names.
    """
    if groups and len(set(groups.values())) == 1:  # one group: nothing to distinguish
        groups = None
    texts = {cluster["cluster"]: _cluster_text(cluster, groups, names) for cluster in clusters}
    leaves = _in_tree_order(clusters)
    places: dict[int, float] = {}  # in lines of text, from the top
    end = 0.0
    for number in leaves:
        lines = len(texts[number])
        places[number] = end + lines / 2
        end += lines + 0.9
    for cluster in reversed(clusters):  # the parts of a cluster come after it
        if cluster["parts"]:
            places[cluster["cluster"]] = float(np.mean([places[part] for part in cluster["parts"]]))

    right = last + max(0.07 * last, 0.2)  # space for a cut in the last round
    figure, axes = new_figure(title, (9.0, 1.7 + 0.175 * max(end, 6)))
    for cluster in clusters:
        number, stop = cluster["cluster"], cluster["divided"] or right
        place, colour = places[number], "#444444"
        axes.plot([cluster["since"], stop], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
        if cluster["parts"]:
            axes.plot([stop, stop], [places[part] for part in cluster["parts"]], color=colour, linewidth=1.6)
            axes.plot(stop, place, "o", color=COLOURS[1], markersize=6, zorder=3)
            axes.annotate(
                "\n".join([f"{cluster['cross-similarity']:.2f}", *texts[number]]),
                (stop, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=COLOURS[1],
                zorder=4,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )
        else:
            axes.annotate(
                "\n".join(texts[number]),
                (stop, place),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                annotation_clip=False,
            )
    if len(clusters) > 1:
        axes.set_title(
            "at each cut: the largest cosine of two clients' updates across it", fontsize=9.5, color=COLOURS[1]
        )
    axes.set_ylim(end, -0.9)
    axes.set_yticks([])
    round_axis(axes, np.arange(last + 1))
    axes.set_xlim(0, right)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= last])
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _in_tree_order(clusters: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the clusters that have not been divided, with the parts of one cluster side by side."""
    leaves, to_see = [], [0]
    while to_see:
        number = to_see.pop()
        if parts := clusters[number]["parts"]:
            to_see += reversed(parts)
        else:
            leaves.append(number)
    return leaves


def _cluster_text(cluster: Mapping[str, Any], groups: Mapping[ClientId, int] | None, names: Sequence[str]) -> list[str]:
    """Return the lines that list a cluster's clients; for a divided cluster, the number not yet in one of its parts."""
    clients = cluster["clients"]
    if cluster["parts"]:
        return [f"{len(clients)} to be placed"] if clients else []
    lines = [f"cluster {cluster['cluster']}: {len(clients)} client{'' if len(clients) == 1 else 's'}"]
    if groups is None:
        return lines + _wrapped("", labels_of(clients, names))
    for group in sorted({groups[client] for client in clients}):
        members = [client for client in clients if groups[client] == group]
        lines += _wrapped(f"true group {group}: ", labels_of(members, names))
    return lines


def _wrapped(start: str, labels: Sequence[str]) -> list[str]:
    """Return clients' labels in lines of bounded length; the first `TEXT_LINES` lines only."""
    listed = ", ".join(short_name(label).replace(" ", "\u00a0") for label in labels)
    return textwrap.wrap(start + listed, TEXT_WIDTH, max_lines=TEXT_LINES, placeholder=" …")
