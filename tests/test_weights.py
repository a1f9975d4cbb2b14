"""Weights over rounds: what the figures and the page show of matrices and of shares, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from kindred.server_app.report.content import run_content
from kindred.server_app.report.weight_figure import weights_figure
from kindred.server_app.report.weights import MOST_POINTS, Curves, collaboration_curves, component_curves, run_curves
from kindred.server_app.results import RunFolder

from .test_results import is_picture, row, run_of, settings

FIRST = [[0.5, 0.5, 0.0], [0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]
SECOND = [[0.9, 0.0, 0.1], [0.25, 0.75, 0.0], [0.3, 0.3, 0.4]]


def write(folder, number: int, weights, clients=None) -> None:
    weights = np.array(weights, np.float32)
    folder.mkdir(exist_ok=True)
    clients = np.arange(len(weights)) if clients is None else np.array(clients)
    np.savez_compressed(folder / f"round-{number:04d}.npz", clients=clients, weights=weights)


def test_curves_are_the_rows_of_the_matrices_over_rounds(tmp_path) -> None:
    write(tmp_path, 1, FIRST)
    write(tmp_path, 2, SECOND)
    write(tmp_path, 3, np.eye(3))  # a closing evaluation
    curves = collaboration_curves(tmp_path, 2)
    assert [(each.about, each.clients, each.own) for each in curves] == [
        (f"client {i}", [0, 1, 2], i) for i in range(3)
    ]
    for i, each in enumerate(curves):
        assert each.rounds.tolist() == [1, 2]
        assert each.weights == pytest.approx(np.array([FIRST[i], SECOND[i]]))


def test_a_client_that_is_absent_or_reports_no_weights_has_none(tmp_path) -> None:
    write(tmp_path, 1, [[1.0]], [1])
    write(tmp_path, 2, [[0.5, 0.5], [0.0, 0.0]], [1, 2])
    first, second = collaboration_curves(tmp_path, 2)
    assert first.weights.tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert np.isnan(second.weights).all()


def test_clients_are_in_the_order_of_their_groups_and_some_of_many_are_shown(tmp_path) -> None:
    for number in range(1, 2 * MOST_POINTS + 1):
        write(tmp_path, number, np.eye(5))
    curves = collaboration_curves(tmp_path, 10**6, {0: 1, 1: 0, 2: 1, 3: 0, 4: 2}, 3)
    assert [each.about for each in curves] == ["client 1", "client 0", "client 4"]  # of the order 1 3 0 2 4
    assert all(each.clients == [1, 3, 0, 2, 4] for each in curves)
    rounds = curves[0].rounds
    assert len(rounds) == MOST_POINTS and (rounds[0], rounds[-1]) == (1, 2 * MOST_POINTS)


ROWS = [
    row(1, 0, **{"share-0": 0.25, "share-1": 0.75}),
    row(1, 1, **{"share-0": 0.5, "share-1": 0.5}),
    row(2, 0, **{"share-0": 1.0, "share-1": 0.0}),
    row(2, 1, "timed out"),
    row(3, 0, personal_accuracy=0.5),
]


def test_component_curves_are_the_shares_that_clients_report() -> None:
    first, second = component_curves(ROWS, 2)
    assert (first.about, second.about, first.own) == ("component 0", "component 1", None)
    assert first.rounds.tolist() == [1, 2] and first.clients == [0, 1]
    assert first.weights.tolist() == [[0.25, 0.5], [1.0, 0.5]]  # client 1 keeps its last share
    assert second.weights.tolist() == [[0.75, 0.5], [0.0, 0.5]]
    assert component_curves([row(1, 0, personal_accuracy=0.5)], 2) == []


def test_weights_that_do_not_change_have_no_figure(tmp_path) -> None:
    folder = tmp_path / "collaboration"
    write(folder, 1, FIRST)
    assert run_curves(tmp_path, [], 2, None) == []  # one round
    write(folder, 2, FIRST)
    assert run_curves(tmp_path, [], 2, None) == []
    write(folder, 3, SECOND)
    assert len(run_curves(tmp_path, [], 3, None)) == 3
    write(folder, 1, np.eye(len(FIRST)))  # before any client has sent a model
    write(folder, 3, FIRST)
    assert run_curves(tmp_path, [], 3, None) == []
    assert [each.about for each in run_curves(tmp_path, ROWS, 2, None)] == ["component 0", "component 1"]


def test_a_line_has_the_colour_of_its_clients_group_and_the_own_one_is_thick() -> None:
    rounds, weights = np.array([1, 2]), np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
    figure = weights_figure([Curves("client 0", rounds, [0, 1, 2], weights, 0)], {0: 7, 1: 4, 2: 7}, "t")
    (axes,) = figure.axes
    (own,), (others,) = axes.lines, axes.collections
    assert own.get_ydata().tolist() == weights[:, 0].tolist()
    drawn = dict(zip((tuple(segment[:, 1]) for segment in others.get_segments()), range(2), strict=True))
    first, second = (drawn[tuple(column)] for column in weights.T[1:])
    colours, dashes = others.get_colors()[:, :3], others.get_linestyles()
    assert to_rgb(own.get_color()) == tuple(colours[second]) != tuple(colours[first])
    assert own.get_linewidth() > 2 * others.get_linewidths()[0] and dashes[first] != dashes[second]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "true group 4",
        "true group 7",
        "thick: the client itself",
    ]
    assert to_rgb(legend.get_lines()[0].get_color()) == tuple(colours[first])


@pytest.mark.parametrize(("count", "panels", "groups"), [(1, 1, None), (3, 2, None), (60, 5, None), (60, 12, 20)])
def test_the_figure_can_have_any_size(tmp_path, count, panels, groups) -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(count), 4)
    weights[0] = np.nan
    curves = [Curves(f"client {i}", np.arange(1, 5), list(range(count)), weights, i % count) for i in range(panels)]
    known = groups and {client: client % groups for client in range(count)}
    weights_figure(curves, known, "t").savefig(tmp_path / "w.png")
    assert is_picture(tmp_path / "w.png", (500, 300))


def test_a_run_has_the_figure_and_the_page_has_the_shares(tmp_path) -> None:
    folder = RunFolder(settings(tmp_path, strategy="fedem"), [0, 1])
    rounds = [[row for row in ROWS if row["round"] == number] for number in (1, 2)]
    for number in (1, 2):
        folder.record_round(run_of(rounds[:number], clients=(0, 1)))
    folder.finish(run_of(rounds, clients=(0, 1)), None)
    assert is_picture(folder.path / "weights.png", (500, 300))
    assert run_content(folder.path)["components"] == {
        "names": ["0", "1"],
        "groups": [0, 1],
        "rounds": [1, 2],
        "shares": [[[0.25, 0.5], [1.0, 0.5]], [[0.75, 0.5], [0.0, 0.5]]],
    }


def test_a_run_of_changing_matrices_has_the_figure_and_the_page_no_components(tmp_path) -> None:
    folder = RunFolder(settings(tmp_path))
    rounds = [[row(number, client, personal_accuracy=0.5) for client in range(3)] for number in (1, 2)]
    for number, weights in ((1, FIRST), (2, SECOND)):
        folder.record_round(run_of(rounds[:number], weights=weights))
    folder.finish(run_of(rounds, weights=SECOND), None)
    assert is_picture(folder.path / "weights.png", (500, 300))
    assert run_content(folder.path)["components"] is None


@pytest.mark.parametrize("count", [1, 5, 30])
def test_the_title_and_the_legend_of_a_figure_of_panels_lie_over_no_panel(count) -> None:
    rounds, weights = np.arange(1, 4), np.full((3, 2), 0.5)
    curves = [Curves(f"client {i}", rounds, [0, 1], weights, 0) for i in range(count)]
    figure = weights_figure(curves, {0: 0, 1: 1}, "Weights over rounds: a method on data, seed 0")
    figure.draw_without_rendering()
    panels = [axes.get_tightbbox() for axes in figure.axes]
    (title, *_), (legend,) = figure.texts, figure.legends
    assert title.get_window_extent().y0 > max(panel.y1 for panel in panels)
    assert legend.get_window_extent().y1 < min(panel.y0 for panel in panels)
    assert min(panel.x0 for panel in panels) > 0 and max(panel.x1 for panel in panels) < figure.bbox.x1
