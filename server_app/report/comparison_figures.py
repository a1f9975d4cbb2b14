"""The figures of a comparison, drawn with matplotlib as those of a run in figures.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kindred.data.partition_figure import short_name
from kindred.lazy import lazy
from kindred.server_app.headline import Headline

from .figures import (
    COLOURS,
    DASHES,
    MARKERS,
    PANELS_LEGEND,
    empty_axes,
    metric_axes,
    metric_range,
    new_figure,
    panels_figure,
    round_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from scipy import optimize
else:
    optimize = lazy("scipy.optimize")

COLUMNS = 4  # of a legend

Method = tuple[str, Sequence[Sequence[Mapping[str, Any]]]]
"""A method's name, and the rounds of the history of each of its runs."""


class Line(NamedTuple):
    """Values of a method as they are shown, each with the standard deviation over its runs if there are several.

    `at` (n,) are their places on the horizontal axis: rounds, or the numbers of a setting's values.
    """

    name: str
    at: np.ndarray
    shown: np.ndarray
    deviation: np.ndarray | None
    style: dict[str, Any]


def comparison_figure(methods: Sequence[Method], headline: Headline, title: str) -> Figure:
    """Draw the mean of a metric over rounds of several methods, with each method's name at the end of its line.

    Where a method has several runs, the line is their mean, with a band of one standard deviation on either side.
    """
    figure, axes = new_figure(title, (8.0, max(4.6, 0.3 * len(methods) + 1.6)))
    lines = _over_rounds(methods, headline)
    if not lines:
        empty_axes(axes, headline)
        return figure
    for line in lines:
        _draw(axes, line)
    first, last = _ends(lines)
    metric_axes(axes, np.arange(first, last + 1), headline, suffix=", mean over clients")
    low, high = axes.get_ylim()
    # A label is about 0.2 inch high, and the axes take up about 0.75 of the figure's height.
    gap = 0.2 / (0.75 * figure.get_figheight()) * (high - low)
    places = _apart(np.array([line.shown[-1] for line in lines]), gap, low, high)
    for line, place in zip(lines, places, strict=True):
        # x is in units of the axes' width, beyond its right edge; y is the number that is shown.
        axes.annotate(
            "",
            xy=(line.at[-1], line.shown[-1]),
            xytext=(1.03, place),
            textcoords=axes.get_yaxis_transform(),
            arrowprops={"arrowstyle": "-", "color": line.style["color"], "linewidth": 0.8, "shrinkA": 0},
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
            **line.style,
        )
        text = f"{line.name}  {headline.text(line.shown[-1] / headline.factor)}"
        axes.text(1.105, place, text, transform=axes.get_yaxis_transform(), va="center")
    return figure


def comparison_panels(panels: Sequence[tuple[str, Sequence[Method]]], headline: Headline, title: str) -> Figure:
    """Draw a panel for each value of a setting: the mean over rounds of each method, as `comparison_figure`.

    Parameters
    ----------
    panels : sequence of (str, sequence of Method)
        A panel's title, and its methods. A method looks the same in all panels.
    headline : Headline
    title : str
    """
    names = list(dict.fromkeys(name for _, methods in panels for name, _ in methods))
    rows = -(-len(names) // COLUMNS)
    figure, places = panels_figure(title, len(panels), (3.4, 3.4), 3, "round", f"test {headline.axis}", rows)
    drawn = [_over_rounds(methods, headline, names) for _, methods in panels]
    known = [line for lines in drawn for line in lines]
    handles: dict[str, Any] = {}
    for axes, (above, _), lines in zip(places, panels, drawn, strict=True):
        axes.set_title(short_name(above, 40), fontsize=10)
        handles |= {line.name: _draw(axes, line) for line in lines}
    if known:
        first, last = _ends(known)
        round_axis(places[-1], np.array([first, last]))  # the others share its axes
        metric_range(places[-1], headline)
    shown = [name for name in map(_shown, names) if name in handles]
    figure.legend([handles[name] for name in shown], shown, ncols=COLUMNS, **PANELS_LEGEND)
    return figure


def sweep_figure(
    setting: str,
    values: Sequence[str],
    methods: Mapping[str, Mapping[str, tuple[float, float | None]]],
    headline: Headline,
    measure: str,
    title: str,
) -> Figure:
    """Draw a metric over the values of a setting, a line for each method, with one standard deviation over its runs.

    Values are at equal distances, in their order. A method that is not varied is a horizontal line without marks.

    Parameters
    ----------
    setting : str
        The varied setting.
    values : sequence of str
    methods : mapping
        name -> value -> mean and standard deviation of the metric; the value is "" for a method that is not varied.
    headline : Headline
    measure : str
        Which mean: of the last or the best round.
    title : str
    """
    figure, axes = new_figure(title, (7.2, 4.8))
    axes.set_title(measure, fontsize=9.5)
    for i, (name, found) in enumerate(methods.items()):
        each = [(0, found[""]), (len(values) - 1, found[""])] if "" in found else []
        each += [(place, found[value]) for place, value in enumerate(values) if value in found]
        if not each:
            continue
        means = headline.factor * np.array([mean for _, (mean, _) in each])
        deviations = [deviation for _, (_, deviation) in each]
        spread = None if None in deviations else headline.factor * np.array(deviations, dtype=float)
        style = _style(i) | ({"marker": None, "linestyle": (0, (1, 1.5))} if "" in found else {})
        _draw(axes, Line(_shown(name), np.array([place for place, _ in each]), means, spread, style))
    metric_axes(axes, np.arange(len(values)), headline)
    axes.set_xlabel(setting)
    axes.set_xticks(range(len(values)), [short_name(value) for value in values])
    if handles := axes.get_legend_handles_labels()[0]:
        figure.legend(handles=handles, loc="outside lower center", ncols=COLUMNS, frameon=False, fontsize=9)
    return figure


def _over_rounds(methods: Sequence[Method], headline: Headline, order: Sequence[str] = ()) -> list[Line]:
    """Return the line of each method that has rounds; styles are by the place in `order`, by default in `methods`."""
    lines, key, holds = [], headline.columns.mean, headline.metric.holds
    order = order or [name for name, _ in methods]
    for name, runs in methods:
        means = [{line["round"]: line[key] for line in rounds if holds(line.get(key))} for rounds in runs]
        known = sorted(set.intersection(*map(set, means))) if means else []  # the rounds of all runs
        if known:
            shown = headline.factor * np.array([[each[number] for number in known] for each in means])  # (runs, r)
            spread = shown.std(axis=0, ddof=1) if len(means) > 1 else None
            style = _style(order.index(name))
            lines.append(Line(_shown(name), np.array(known), shown.mean(axis=0), spread, style))
    return lines


def _style(i: int) -> dict[str, Any]:
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": DASHES[i % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
    }


def _shown(name: str) -> str:
    return short_name(name, 24)


def _draw(axes: Axes, line: Line) -> Any:
    """Draw a line in its band, and return it."""
    if line.deviation is not None:
        low, high = line.shown - line.deviation, line.shown + line.deviation
        axes.fill_between(line.at, low, high, color=line.style["color"], alpha=0.15, linewidth=0)
    (drawn,) = axes.plot(
        line.at,
        line.shown,
        label=line.name,
        linewidth=2,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        markevery=max(1, len(line.at) // 15),
        **line.style,
    )
    return drawn


def _ends(lines: Sequence[Line]) -> tuple[int, int]:
    return min(line.at[0] for line in lines), max(line.at[-1] for line in lines)


def _apart(values: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Move values apart, as little as needed for gaps of `gap`, inside [low, high] if they fit."""
    order = np.argsort(values, kind="stable")
    steps = gap * np.arange(len(values))
    # With i gaps subtracted from value i, "at least a gap apart" becomes "not decreasing": isotonic regression.
    least, most = low + gap / 2, high - gap / 2 - steps[-1]
    result = np.empty(len(values))
    result[order] = steps + optimize.isotonic_regression(values[order] - steps).x.clip(least, max(least, most))
    return result
