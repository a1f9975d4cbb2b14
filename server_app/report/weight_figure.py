"""The figure of weights over rounds: a panel for each client or component, coloured by true groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.data.partition_figure import short_name
from kindred.lazy import lazy
from kindred.messages import ClientId
from kindred.server_app.run_files import labels_of

from .figures import COLOURS, DASHES, PANELS_LEGEND, panels_figure, round_axis
from .weights import Curves

if TYPE_CHECKING:
    from matplotlib import collections as mpl_collections, lines as mpl_lines
    from matplotlib.figure import Figure
else:
    mpl_collections, mpl_lines = lazy("matplotlib.collections"), lazy("matplotlib.lines")

MOST_CURVES = 40  # of a panel: those with the largest weights
OTHERS = "#8a949e"  # colour of clients where there are neither groups nor a few clients
COLUMNS = 5  # of the legend
FEW = 8  # most clients that each have a colour, where there are no groups


def weights_figure(
    curves: Sequence[Curves], groups: Mapping[ClientId, int] | None, title: str, names: Sequence[str] = ()
) -> Figure:
    """Draw weights over rounds, a panel for each `Curves`, a line for each client whose weight it is.

    A line has the colour of its client's true group; a client's own weight is a thick line.

    Parameters
    ----------
    curves : sequence of Curves
        One or more.
    groups : mapping, optional
        client -> its true group, where there are groups.
    title : str
    names : sequence of str
        The names of clients 0, 1, 2 and so on, if they have names.
    """
    clients = list(dict.fromkeys(client for each in curves for client in each.clients))
    kind = _kinds(clients, groups, names)
    shown = dict.fromkeys(kind.values()) if len(set(kind.values())) > 1 else {}
    styles = {name: _style(i) for i, name in enumerate(sorted(shown, key=list(shown).index))}
    entries: dict[str, dict[str, Any]] = {name: {"linewidth": 1.4, **style} for name, style in styles.items()}
    if any(each.own is not None for each in curves):
        entries["thick: the client itself"] = {"linewidth": 2.8, "color": COLOURS[0] if not styles else "#444444"}
    lines = -(-len(entries) // COLUMNS)
    figure, places = panels_figure(title, len(curves), (2.7, 2.1), 4, "round", "weight", lines)
    for axes, each in zip(places, curves, strict=True):
        axes.set_title(short_name(each.about, 40), fontsize=9.5)
        largest = np.nanmax(np.nan_to_num(each.weights), axis=0, initial=0)  # (m,)
        strongest = [j for j in np.argsort(-largest, kind="stable")[:MOST_CURVES].tolist() if j != each.own]
        plain = {"color": OTHERS, "linestyle": "-"}
        drawn = [styles.get(kind[each.clients[j]], plain) for j in strongest]
        axes.add_collection(
            mpl_collections.LineCollection(
                [np.column_stack([each.rounds, each.weights[:, j]]) for j in strongest],
                colors=[style["color"] for style in drawn],
                linestyles=[style["linestyle"] for style in drawn],
                linewidths=1.1,
                alpha=0.85,
            ),
            autolim=False,
        )
        if each.own is not None:
            colour = styles.get(kind[each.clients[each.own]], {"color": COLOURS[0]})["color"]
            axes.plot(each.rounds, each.weights[:, each.own], linewidth=2.8, color=colour)
    numbers = np.concatenate([each.rounds for each in curves])
    round_axis(places[-1], np.array([numbers.min(), numbers.max()]))  # the others share its axes
    highest = max(np.nanmax(each.weights, initial=0) for each in curves)
    places[0].set_ylim(0, 1.05 * highest or 1)
    if entries:
        handles = [mpl_lines.Line2D([], [], label=name, **style) for name, style in entries.items()]
        figure.legend(handles=handles, ncols=COLUMNS, **PANELS_LEGEND)
    return figure


def _kinds(
    clients: Sequence[ClientId], groups: Mapping[ClientId, int] | None, names: Sequence[str]
) -> dict[ClientId, str]:
    """Return what gives a client its colour: its true group, else itself if there are few clients, else nothing."""
    if groups and len(set(groups.values())) > 1 and all(client in groups for client in clients):
        ordered = sorted(clients, key=lambda client: groups[client])
        return {client: f"true group {groups[client]}" for client in ordered}
    labels = zip(clients, labels_of(clients, names), strict=True)
    return {client: f"client {short_name(label)}" if len(clients) <= FEW else "others" for client, label in labels}


def _style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
