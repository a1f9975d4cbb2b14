"""The figures of a run, drawn with matplotlib.

Each function returns a `Figure` made without pyplot, so nothing here needs a display or changes shared state.
Colours are those of Okabe and Ito and the viridis map, which colour-blind people can distinguish; lines also
differ in dash and marker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kindred.client.state import MIXTURE
from kindred.data.partition_figure import short_name
from kindred.lazy import lazy
from kindred.messages import PERSONAL, RECEIVED, TRAINED, TUNED, ClientId, in_order
from kindred.server_app.headline import Headline
from kindred.server_app.run_files import labels_of

if TYPE_CHECKING:
    import matplotlib
    from matplotlib import figure as mpl_figure, ticker
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    matplotlib = lazy("matplotlib")
    mpl_figure, ticker = lazy("matplotlib.figure"), lazy("matplotlib.ticker")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # those of Okabe and Ito
DASHES = ("-", "--", "-.", ":", (0, (6, 1.5, 1, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MIXED = "mixture of models"
ONE_MODEL = "one model alone, as received"  # beside the mixture
MOST_NAMED = 40  # largest number of clients whose names fit along an axis of the heatmap
PANELS_LEGEND: dict[str, Any] = {"loc": "lower center", "frameon": False, "fontsize": 9}  # below several panels


def carried_forward(
    rows: Sequence[Mapping[str, Any]], key: str, holds: Callable[[object], bool]
) -> tuple[np.ndarray, list[ClientId], np.ndarray]:
    """Return one value of every client after every round; a client that did not report keeps its last value.

    Parameters
    ----------
    rows : sequence of mapping
        A history's rows, in order of round.
    key : str
        The column, such as "personal-accuracy".
    holds : callable
        Whether a value can be one of the column's, such as `Metric.holds`; others count as not reported.

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
        if holds(row.get(key)):
            values[line[row["round"]], column[row["client"]]] = row[key]
    last = np.where(np.isnan(values), 0, np.arange(len(rounds))[:, None])
    last = np.maximum.accumulate(last, axis=0)  # (r, m), the line of each client's last report
    return rounds, clients, np.take_along_axis(values, last, axis=0)


def metric_figure(rows: Sequence[Mapping[str, Any]], headline: Headline, title: str) -> Figure:
    """Draw a metric over rounds: mean over clients, bottom to top decile of clients, and the best mean.

    Where the metric of the received models differs from that of the personal models, its mean is a second line.

    Parameters
    ----------
    rows : sequence of mapping
        A history's rows.
    headline : Headline
    title : str
    """
    metric, factor = headline.metric, headline.factor
    rounds, clients, values = carried_forward(rows, f"{PERSONAL}-{headline.name}", metric.holds)
    figure, axes = new_figure(title, (7.2, 4.8))
    known = ~np.isnan(values).all(axis=1)  # rounds after the first report
    if not known.any():
        empty_axes(axes, headline)
        return figure
    rounds, values = rounds[known], factor * values[known]
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
    if _same(rows, RECEIVED, headline) is False:
        stage, key = _stage(rows, headline), f"{RECEIVED}-{headline.name}"
        name += f", {stage}"
        other = ONE_MODEL if stage == MIXED else "before local training (model as received)"
        numbers, _, received = carried_forward(rows, key, metric.holds)
        # A closing evaluation may cover the personal models alone.
        reported_in = np.isin(numbers, [row["round"] for row in rows if metric.holds(row.get(key))])
        axes.plot(
            numbers[reported_in],
            factor * np.nanmean(received[reported_in], axis=1),
            color=COLOURS[1],
            linestyle="--",
            marker="s" if marker else None,
            markersize=4,
            label=f"mean, {other}",
        )
    axes.plot(rounds, mean, color=COLOURS[0], linewidth=2, marker=marker, markersize=4.5, label=name)
    best = int(mean.argmax() if metric.higher else mean.argmin())
    axes.plot(
        rounds[best],
        mean[best],
        linestyle="none",
        marker="*",
        markersize=15,
        color="#000000",
        markeredgecolor="white",
        zorder=5,
        label=f"best mean: {headline.text(mean[best] / factor)} in round {rounds[best]}",
    )
    metric_axes(axes, rounds, headline)
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
    clients: Sequence[ClientId],
    weights: np.ndarray,
    groups: Sequence[int] | None,
    title: str,
    names: Sequence[str] = (),
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
    names : sequence of str
        The names of clients 0, 1, 2 and so on, if they have names.
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
        labels_of_ticks = [short_name(label) for label in labels_of((clients[order[i]] for i in ticks), names)]
        size = 8 if count <= 25 or count > MOST_NAMED else 6.5
        upright = size < 8 or max(map(len, labels_of_ticks)) > 3
        axes.set_xticks(ticks, labels_of_ticks, fontsize=size, rotation=90 if upright else 0)
        axes.set_yticks(ticks, labels_of_ticks, fontsize=size)
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


def networks_figure(sizes: Mapping[str, Sequence[int]], title: str) -> Figure:
    """Draw the number of clients that have each network, with their fraction and their mean number of samples.

    Parameters
    ----------
    sizes : mapping
        network -> number of training samples of each client that has it; smallest network first.
    title : str
    """
    counts = [len(each) for each in sizes.values()]
    total = sum(counts) or 1
    figure, axes = new_figure(title, (7.2, 1.5 + 0.45 * len(sizes)))
    axes.barh(range(len(sizes)), counts, color=COLOURS[0], height=0.65)
    for place, each in enumerate(sizes.values()):
        text = f"{len(each)} ({len(each) / total:.0%})" + (f", {np.mean(each):.0f} samples on average" if each else "")
        axes.annotate(text, (len(each), place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(sizes)), [short_name(name) for name in sizes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max(*counts, 1))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_xlabel("clients")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _stage(rows: Sequence[Mapping[str, Any]], headline: Headline) -> str:
    """Return the name of the reported model whose metric is that of the personal model."""
    for stage, words in ((TRAINED, "after local training"), (TUNED, "after fine-tuning"), (MIXTURE, MIXED)):
        if _same(rows, stage, headline):
            return words
    return "personal model"


def _same(rows: Sequence[Mapping[str, Any]], stage: str, headline: Headline) -> bool | None:
    """Return whether this stage's metric equals the personal one wherever both are reported; None if nowhere."""
    pairs = [(row.get(f"{stage}-{headline.name}"), row.get(f"{PERSONAL}-{headline.name}")) for row in rows]
    both = [pair for pair in pairs if all(map(headline.metric.holds, pair))]
    return all(first == second for first, second in both) if both else None


def new_figure(title: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Return an empty white figure with a title, and its axes."""
    figure = _titled_figure(title, size)
    return figure, figure.add_subplot()


def panels_figure(
    title: str,
    count: int,
    size: tuple[float, float],
    columns: int,
    across: str,
    upward: str,
    legend_lines: int,
) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels with the same axes, and the panels' axes, by rows.

    Parameters
    ----------
    title : str
    count : int
        Number of panels, 1 or more.
    size : (width, height)
        Size of a panel in inches, with its title and the space at its left.
    columns : int
        Largest number of panels in a row.
    across, upward : str
        Names of the axes.
    legend_lines : int
        Lines for which there is room below, in `PANELS_LEGEND`.
    """
    wide = min(columns, count)
    high = -(-count // wide)
    above, below = 0.4, 0.55 + 0.22 * legend_lines  # inches
    width, height = max(wide * size[0], 5.0) + 0.7, high * size[1] + above + below
    # To look for these margins would take matplotlib as long as drawing 20 panels.
    figure = _titled_figure(title, (width, height), layout=None, y=1 - 0.12 / height)
    margins = {"left": 0.9 / width, "right": 1 - 0.15 / width, "bottom": below / height}
    margins |= {"top": 1 - (above + 0.25) / height, "wspace": 0.12, "hspace": 0.35 / (size[1] - 0.35)}
    axes = figure.subplots(high, wide, sharex=True, sharey=True, squeeze=False, gridspec_kw=margins).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    for place, each in enumerate(axes[:count]):
        _plain_axes(each)
        if place % wide == 0:
            each.set_ylabel(upward)
        if place + wide >= count:  # the lowest of its column
            each.set_xlabel(across)
            each.tick_params(labelbottom=True)
    return figure, axes[:count]


def _titled_figure(
    title: str, size: tuple[float, float], layout: Literal["constrained"] | None = "constrained", **place: float
) -> Figure:
    figure = mpl_figure.Figure(figsize=size, dpi=150, layout=layout, facecolor="white")
    figure.suptitle(short_name(title, 90), fontsize=11, fontweight="bold", **place)
    return figure


def empty_axes(axes: Axes, headline: Headline) -> None:
    """Say in place of a curve that there are no values."""
    text = f"no client reported its {headline.metric.title}"
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
    axes.set(xticks=[], yticks=[])


def metric_axes(axes: Axes, rounds: np.ndarray, headline: Headline, suffix: str = "") -> None:
    """Give axes of a metric over rounds (r,) their names, ranges and grid."""
    round_axis(axes, rounds)
    axes.set_ylabel(f"test {headline.axis}{suffix}")
    metric_range(axes, headline)
    _plain_axes(axes)


def metric_range(axes: Axes, headline: Headline) -> None:
    """Cut the vertical axis where no value can be, a little beyond the metric's bounds."""
    (low, high), (least, most) = axes.get_ylim(), headline.bounds
    room = 0.02 * (most - least if np.isfinite(most - least) else high - low)
    axes.set_ylim(max(low, least - room), min(high, most + room))


def _plain_axes(axes: Axes) -> None:
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def round_axis(axes: Axes, rounds: np.ndarray) -> None:
    """Let the horizontal axis have the rounds (r,)."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    room = max(0.5, 0.02 * (rounds[-1] - rounds[0]))
    axes.set_xlim(rounds[0] - room, rounds[-1] + room)
