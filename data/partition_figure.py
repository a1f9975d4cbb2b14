"""A figure of the samples that each client has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kindred.lazy import lazy

from .federation import Federation

if TYPE_CHECKING:
    from matplotlib import colors, figure as mpl_figure, ticker
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from scipy import special
else:
    special = lazy("scipy.special")
    colors, mpl_figure, ticker = lazy("matplotlib.colors"), lazy("matplotlib.figure"), lazy("matplotlib.ticker")

LONGEST_NAME = 14  # characters of a client's name in a figure
LEVEL = 0.05  # p value of the chi-square test below which clients' shares of the classes differ


def partition_figure(federation: Federation) -> Figure:
    """Draw the training samples of each client by class, or by label that is true, as a heatmap."""
    counts = federation.class_counts()  # (m, C)
    m, num_classes = counts.shape
    few = m <= 30 and num_classes <= 15
    width = np.clip((0.42 if few else 0.12) * num_classes, 4.2, 12)
    height = np.clip((0.24 if few else 0.09) * m, 3, 16)
    figure = mpl_figure.Figure(figsize=(width + 2.4, height + 1.1), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    # With a linear scale, clients with few images would look empty beside clients with very many: take square roots.
    sizes = federation.train_sizes
    norm = colors.PowerNorm(0.5 if sizes.max() > 10 * np.median(sizes) else 1, vmin=0, vmax=max(counts.max(), 1))
    # One hue from light to dark looks the same with any colour vision; orange lines are visible on all its shades.
    image = axes.imshow(counts, cmap="Blues", norm=norm, aspect="auto", interpolation="none")
    if few:
        for client, label in np.argwhere(counts > 0):
            count = counts[client, label]
            colour = "white" if norm(count) > 0.55 else "black"
            axes.text(label, client, count, ha="center", va="center", fontsize=7, color=colour)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(nbins=25, steps=[1, 2, 5, 10], integer=True))
    if federation.names and m <= 60:
        axes.set_yticks(np.arange(m), [short_name(name, 20) for name in federation.names], fontsize=7)
    if num_classes == 1:
        axes.set_xticks([])
    labels = "label that is true" if num_classes > 1 else "all"
    labels = "class, as the client labels it" if federation.task.objective.has_classes else labels
    even = _evenness(counts)
    axes.set_title(f"{federation.title}\n{even}" if even else federation.title, fontsize=10 if even else None)
    axes.set(xlabel=labels, ylabel="client")
    _mark_groups(axes, federation)
    figure.colorbar(image, ax=axes, label="training samples", pad=0.02, ticks=ticker.MaxNLocator(integer=True))
    return figure


def _evenness(counts: np.ndarray) -> str:
    """Return two lines that no difference of clients' shares (m, C) of the classes is shown; empty where one is."""
    there = counts[counts.sum(axis=1) > 0][:, counts.sum(axis=0) > 0]
    if min(there.shape) < 2:
        return ""
    expected = there.sum(axis=1, keepdims=True) * there.sum(axis=0) / there.sum()  # (m, C), if all mixtures were equal
    degrees_of_freedom = (there.shape[0] - 1) * (there.shape[1] - 1)
    statistic = ((there - expected) ** 2 / expected).sum()
    if (p := float(special.chdtrc(degrees_of_freedom, statistic))) < LEVEL:
        return ""
    return f"no difference in shares of classes shown\n(chi-square test, p = {p:.2f})"


def short_name(text: object, longest: int = LONGEST_NAME) -> str:
    """Return a name for matplotlib: one line, at most `longest` characters, with dollar signs escaped."""
    text = " ".join(str(text).split())
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return text.replace("$", r"\$")


def _mark_groups(axes: Axes, federation: Federation) -> None:
    """Draw a line between groups, and write the name of each group beside it."""
    starts = np.flatnonzero(np.diff(federation.groups, prepend=-1))
    if len(starts) < 2:
        return
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="darkorange", linewidth=1.5)
    right = axes.secondary_yaxis("right")
    middles = (starts + np.append(starts[1:], federation.num_clients) - 1) / 2
    turns = federation.quarter_turns[starts]
    names = [f"{group}: {90 * turn}°" if turns.any() else str(group) for group, turn in enumerate(turns)]
    right.set_yticks(middles, names)
    right.tick_params(length=0)
    right.set_ylabel("group")
