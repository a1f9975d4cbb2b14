"""The figures of a run, drawn with matplotlib.

Each function returns a `Figure` made without pyplot, so nothing here needs a display or changes shared state.
Colours are those of Okabe and Ito and the viridis map, which colour-blind people can distinguish; lines also
differ in dash and marker.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.client.state import MIXTURE
from kindred.lazy import lazy
from kindred.messages import PERSONAL, RECEIVED, TRAINED, TUNED, ClientId, in_order

if TYPE_CHECKING:
    import matplotlib
    from matplotlib import figure as mpl_figure, ticker
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from sklearn import isotonic
else:
    matplotlib, isotonic = lazy("matplotlib"), lazy("sklearn.isotonic")
    mpl_figure, ticker = lazy("matplotlib.figure"), lazy("matplotlib.ticker")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # those of Okabe and Ito
DASHES = ("-", "--", "-.", ":", (0, (6, 1.5, 1, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MIXED = "mixture of models"
MOST_NAMED = 40  # largest number of clients whose names fit along an axis of the heatmap
LONGEST_NAME = 14  # characters of a client's name in a figure
TEXT_WIDTH, TEXT_LINES = 52, 4  # characters per line, and lines, of the list of a cluster's clients


def is_accuracy(value: object) -> bool:
    """Return whether a reported value is a number in [0, 1]: clients may report anything as an accuracy."""
    return isinstance(value, int | float) and 0 <= value <= 1


def carried_forward(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, list[ClientId], np.ndarray]:
    """Return one accuracy of every client after every round; a client that did not report keeps its last value.

    Parameters
    ----------
    rows : sequence of mapping
        A history's rows, in order of round.
    key : str
        The column, such as "personal-accuracy". Values outside [0, 1] count as not reported.

    Returns
    -------
    rounds : ndarray of int, shape (r,)
    clients : list of m client ids
    values : ndarray, shape (r, m)
        NaN until a client's first report.
    """
    clients = in_order({row["client"] for row in rows})
    rounds = np.unique(np.array([row["round"] for row in rows], dtype=np.int64))
    column = {client: i for i, client in enumerate(clients)}
    line = {number: i for i, number in enumerate(rounds.tolist())}
    values = np.full((len(rounds), len(clients)), np.nan)  # (r, m)
    for row in rows:
        if is_accuracy(row.get(key)):
            values[line[row["round"]], column[row["client"]]] = row[key]
    last = np.where(np.isnan(values), 0, np.arange(len(rounds))[:, None])
    last = np.maximum.accumulate(last, axis=0)  # (r, m), the line of each client's last report
    return rounds, clients, np.take_along_axis(values, last, axis=0)


def accuracy_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw accuracy over rounds: mean over clients, bottom to top decile of clients, and the best mean.

    Where the accuracy of the received models differs from the personal accuracy, its mean is a second line.

    Parameters
    ----------
    rows : sequence of mapping
        A history's rows; accuracies are in [0, 1].
    title : str
    """
    rounds, clients, values = carried_forward(rows, f"{PERSONAL}-accuracy")
    figure, axes = new_figure(title, (7.2, 4.8))
    known = ~np.isnan(values).all(axis=1)  # rounds after the first report
    if not known.any():
        axes.text(0.5, 0.5, "no client reported an accuracy", transform=axes.transAxes, ha="center", va="center")
        axes.set(xticks=[], yticks=[])
        return figure
    rounds, values = rounds[known], 100 * values[known]
    mean = np.nanmean(values, axis=1)
    bottom, top = np.nanquantile(values, (0.1, 0.9), axis=1)
    reported = int((~np.isnan(values[-1])).sum())
    of = "clients" if reported == len(clients) else f"the {reported} of {len(clients)} clients that reported"

    # One round gives no line and no area: draw points and a bar instead.
    marker = "o" if len(rounds) <= 40 else None
    if len(rounds) == 1:
        axes.vlines(rounds, bottom, top, color=COLOURS[0], alpha=0.25, linewidth=14, label="bottom to top decile")
    else:
        axes.fill_between(rounds, bottom, top, color=COLOURS[0], alpha=0.18, linewidth=0, label="bottom to top decile")
    name = f"mean over {of}"
    if _same(rows, RECEIVED) is False:
        name += f", {_stage(rows)}"
        other = "one model alone, as received" if _stage(rows) == MIXED else "before local training (model as received)"
        numbers, _, received = carried_forward(rows, f"{RECEIVED}-accuracy")
        # A closing evaluation may cover the personal models alone.
        reported_in = np.isin(numbers, [row["round"] for row in rows if is_accuracy(row.get(f"{RECEIVED}-accuracy"))])
        axes.plot(
            numbers[reported_in],
            100 * np.nanmean(received[reported_in], axis=1),
            color=COLOURS[1],
            linestyle="--",
            marker="s" if marker else None,
            markersize=4,
            label=f"mean, {other}",
        )
    axes.plot(rounds, mean, color=COLOURS[0], linewidth=2, marker=marker, markersize=4.5, label=name)
    best = int(mean.argmax())
    axes.plot(
        rounds[best],
        mean[best],
        linestyle="none",
        marker="*",
        markersize=15,
        color="#000000",
        markeredgecolor="white",
        zorder=5,
        label=f"best mean: {mean[best]:.1f} % in round {rounds[best]}",
    )
    _accuracy_axes(axes, rounds)
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: not labels[i].startswith("mean over"))
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    return figure


def collaboration_figure(
    clients: Sequence[ClientId], weights: np.ndarray, groups: Sequence[int] | None, title: str
) -> Figure:
    """Draw the collaboration weights as a heatmap, with clients of a group side by side.

    Colours show the weights of other clients. A client's own share, often many times as large, is grey; the range of
    own shares is written above the heatmap.

    Parameters
    ----------
    clients : sequence of m client ids
    weights : ndarray, shape (m, m)
        Row i: the shares of all clients in what client i receives.
    groups : sequence of m int, optional
        The true group of each client, where there are groups.
    title : str
    """
    count = len(clients)
    labels = np.zeros(count, dtype=np.int64) if groups is None else np.asarray(groups)
    order = np.argsort(labels, kind="stable")
    labels = labels[order]
    shares = np.array(weights, dtype=np.float64)[np.ix_(order, order)]  # (m, m)
    own = shares.diagonal().copy()
    np.fill_diagonal(shares, np.nan)

    side = 6.4 if count <= MOST_NAMED else 7.4
    figure, axes = new_figure(title, (side + 0.9, side))
    cmap = matplotlib.colormaps["viridis"].with_extremes(bad="#b0b0b0")
    strongest = np.nanmax(shares, initial=0.0) or 1.0
    image = axes.imshow(shares, cmap=cmap, vmin=0.0, vmax=strongest)
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    bar.set_label("share of the other client")
    low, high = f"{own.min():.2f}", f"{own.max():.2f}"
    axes.set_title(f"grey: a client's own share, {low}" + (f" to {high}" if high != low else ""), fontsize=9.5)

    starts = np.flatnonzero(np.diff(labels)) + 1
    edges = np.concatenate(([0], starts, [count]))
    centres, numbers = (edges[:-1] + edges[1:] - 1) / 2, [str(group) for group in labels[edges[:-1]]]
    by_group = ""
    if count > MOST_NAMED and len(starts):  # names that are not in order would not help
        axes.set_xticks([])
        axes.set_yticks(centres, numbers, fontsize=8.5)
        axes.tick_params(length=0)
        by_group = ", by true group"
    else:
        ticks = np.arange(count) if count <= MOST_NAMED else np.arange(0, count, -(-count // 200) * 10)
        names = [short_name(clients[order[i]]) for i in ticks]
        size = 8 if count <= 25 or count > MOST_NAMED else 6.5
        axes.set_xticks(ticks, names, fontsize=size, rotation=90 if size < 8 or max(map(len, names)) > 3 else 0)
        axes.set_yticks(ticks, names, fontsize=size)
    axes.set_xlabel(f"client that is learnt from{by_group}")
    axes.set_ylabel(f"client that learns{by_group}")

    if len(starts):
        width = 1.2 if len(starts) < 10 else 0.6
        for at in starts - 0.5:
            for colour, factor in (("black", 2), ("white", 1)):  # visible on dark and on bright cells
                axes.axhline(at, color=colour, linewidth=factor * width)
                axes.axvline(at, color=colour, linewidth=factor * width)
        above = axes.secondary_xaxis("top")
        above.set_xticks(centres, numbers, fontsize=8.5)
        above.tick_params(length=0)
        above.set_xlabel("true group", fontsize=9)
    return figure


def tree_figure(
    clusters: Sequence[Mapping[str, Any]], last: int, groups: Mapping[ClientId, int] | None, title: str
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
    """
    if groups and len(set(groups.values())) == 1:  # one group: nothing to distinguish
        groups = None
    texts = {cluster["cluster"]: _cluster_text(cluster, groups) for cluster in clusters}
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
    _round_axis(axes, np.arange(last + 1))
    axes.set_xlim(0, right)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= last])
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def comparison_figure(methods: Sequence[tuple[str, Sequence[Sequence[Mapping[str, Any]]]]], title: str) -> Figure:
    """Draw mean accuracy over rounds of several methods, with each method's name at the end of its line.

    Where a method has several runs, the line is their mean, with a band of one standard deviation on either side.

    Parameters
    ----------
    methods : sequence of (str, sequence of sequence of mapping)
        A method's name, and the rounds of the history of each of its runs.
    title : str
    """
    figure, axes = new_figure(title, (8.0, max(4.6, 0.3 * len(methods) + 1.6)))
    lines: list[tuple[str, np.ndarray, np.ndarray, dict[str, Any]]] = []  # (name, rounds, percent, style)
    for i, (name, runs) in enumerate(methods):
        accuracies = [
            {line["round"]: line["accuracy"] for line in rounds if is_accuracy(line.get("accuracy"))} for rounds in runs
        ]
        known = sorted(set.intersection(*map(set, accuracies))) if accuracies else []  # the rounds of all runs
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": DASHES[i % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
        }
        if known:
            percents = 100 * np.array([[accuracy[number] for number in known] for accuracy in accuracies])  # (runs, r)
            numbers, percent = np.array(known), percents.mean(axis=0)
            lines.append((short_name(name, 24), numbers, percent, style))
            if len(accuracies) > 1:
                spread = percents.std(axis=0, ddof=1)
                axes.fill_between(
                    numbers, percent - spread, percent + spread, color=style["color"], alpha=0.15, linewidth=0
                )
    if not lines:
        axes.text(0.5, 0.5, "no client reported an accuracy", transform=axes.transAxes, ha="center", va="center")
        axes.set(xticks=[], yticks=[])
        return figure
    for _, numbers, percent, style in lines:
        axes.plot(
            numbers,
            percent,
            linewidth=2,
            markersize=5.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            markevery=max(1, len(numbers) // 15),
            **style,
        )
    first, last = min(line[1][0] for line in lines), max(line[1][-1] for line in lines)
    _accuracy_axes(axes, np.arange(first, last + 1), suffix=", mean over clients")
    low, high = axes.get_ylim()
    # A label is about 0.2 inch high, and the axes take up about 0.75 of the figure's height.
    gap = 0.2 / (0.75 * figure.get_figheight()) * (high - low)
    places = _apart(np.array([percent[-1] for _, _, percent, _ in lines]), gap, low, high)
    for (name, numbers, percent, style), place in zip(lines, places, strict=True):
        # x is in units of the axes' width, beyond its right edge; y is the accuracy in percent.
        axes.annotate(
            "",
            xy=(numbers[-1], percent[-1]),
            xytext=(1.03, place),
            textcoords=axes.get_yaxis_transform(),
            arrowprops={"arrowstyle": "-", "color": style["color"], "linewidth": 0.8, "shrinkA": 0},
            annotation_clip=False,
        )
        axes.plot(
            [1.03, 1.06, 1.09],
            [place] * 3,
            transform=axes.get_yaxis_transform(),
            clip_on=False,
            linewidth=2,
            markersize=5.5,
            markevery=[1],
            **style,
        )
        axes.text(1.105, place, f"{name}  {percent[-1]:.1f} %", transform=axes.get_yaxis_transform(), va="center")
    return figure


def _stage(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the reported model whose accuracy is the personal accuracy."""
    for stage, words in ((TRAINED, "after local training"), (TUNED, "after fine-tuning"), (MIXTURE, MIXED)):
        if _same(rows, stage):
            return words
    return "personal model"


def _same(rows: Sequence[Mapping[str, Any]], stage: str) -> bool | None:
    """Return whether this stage's accuracy equals the personal one wherever both are reported; None if nowhere."""
    pairs = [(row.get(f"{stage}-accuracy"), row.get(f"{PERSONAL}-accuracy")) for row in rows]
    both = [pair for pair in pairs if all(map(is_accuracy, pair))]
    return all(first == second for first, second in both) if both else None


def _apart(values: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Move values apart, as little as needed for gaps of `gap`, inside [low, high] if they fit."""
    order = np.argsort(values, kind="stable")
    steps = gap * np.arange(len(values))
    # With i gaps subtracted from value i, "at least a gap apart" becomes "not decreasing": isotonic regression.
    least, most = low + gap / 2, high - gap / 2 - steps[-1]
    result = np.empty(len(values))
    result[order] = steps + isotonic.isotonic_regression(values[order] - steps, y_min=least, y_max=max(least, most))
    return result


def new_figure(title: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Return an empty white figure with a title, and its axes."""
    figure = mpl_figure.Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
    figure.suptitle(short_name(title, 90), fontsize=11, fontweight="bold")
    return figure, figure.add_subplot()


def _accuracy_axes(axes: Axes, rounds: np.ndarray, suffix: str = "") -> None:
    _round_axis(axes, rounds)
    axes.set_ylabel(f"test accuracy (%){suffix}")
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -2), min(high, 102))
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _round_axis(axes: Axes, rounds: np.ndarray) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    room = max(0.5, 0.02 * (rounds[-1] - rounds[0]))
    axes.set_xlim(rounds[0] - room, rounds[-1] + room)


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


def _cluster_text(cluster: Mapping[str, Any], groups: Mapping[ClientId, int] | None) -> list[str]:
    """Return the lines that list a cluster's clients; for a divided cluster, the number not yet in one of its parts."""
    clients = cluster["clients"]
    if cluster["parts"]:
        return [f"{len(clients)} to be placed"] if clients else []
    lines = [f"cluster {cluster['cluster']}: {len(clients)} client{'' if len(clients) == 1 else 's'}"]
    if groups is None:
        return lines + _wrapped("", clients)
    for group in sorted({groups[client] for client in clients}):
        lines += _wrapped(f"true group {group}: ", [client for client in clients if groups[client] == group])
    return lines


def _wrapped(start: str, clients: Sequence[ClientId]) -> list[str]:
    """Return clients' names in lines of bounded length; the first `TEXT_LINES` lines only."""
    names = ", ".join(short_name(client).replace(" ", "\u00a0") for client in clients)
    return textwrap.wrap(start + names, TEXT_WIDTH, max_lines=TEXT_LINES, placeholder=" …")


def short_name(text: object, longest: int = LONGEST_NAME) -> str:
    """Return a name for matplotlib: one line, at most `longest` characters, with dollar signs escaped."""
    text = " ".join(str(text).split())
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return text.replace("$", r"\$")
