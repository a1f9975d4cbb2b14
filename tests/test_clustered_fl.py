"""Clustered FL: when and how a cluster is divided, and which cluster absent clients join."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from matplotlib.image import imread

from kindred import REGISTRY, InlineGrid
from kindred.baselines.clustered_fl import (
    ClusteredFL,
    is_to_be_divided,
    largest_coordinates,
    nearest_part,
    optimal_bipartition,
    update_norms,
)
from kindred.client.training import get_arrays
from kindred.client_app.app import app as client_app
from kindred.engine.checkpoint import pack, unpack
from kindred.messages import read_record, to_record
from kindred.server_app.app import run as run_app
from kindred.server_app.config import Config

from . import two_weights
from .client_apps import initial, plain_app, small, small_app
from .grids import FaultyGrid
from .test_conformance import everything, make, values

# --- The mathematics ------------------------------------------------------------------------------------


def test_update_norms_by_hand() -> None:
    updates = np.array([[3.0, 4.0], [-3.0, 0.0]], np.float32)
    mean, each = update_norms(lambda: iter([updates[:, :1], updates[:, 1:]]), np.array([1.0, 2.0]))
    assert mean == pytest.approx(np.hypot((3 - 2 * 3) / 3, 4 / 3))
    assert each == pytest.approx([5, 3])


def test_largest_coordinates_are_norms_over_an_axis_of_length_one() -> None:
    updates = np.array([[3.0, -4.0, 1.0], [-2.0, 0.0, 0.5]], np.float32)
    found = largest_coordinates(lambda: iter([updates[:, :1], updates[:, 1:]]), 2)
    assert found.tolist() == [4, 2]
    assert found.max() == np.linalg.norm(updates[:, np.newaxis], axis=1).max()


@pytest.mark.parametrize(
    ("mean", "each", "divided"),
    [
        (0.1, [1.0, 3.0], True),
        (0.5, [1.0, 3.0], False),
        (0.1, [1.0, 2.0], False),
        (0.1, [3.0], False),
        (0.0, [1.0, 1.0], False),
        (np.nan, [3.0, 3.0], False),
    ],
)
def test_a_cluster_is_divided_when_its_mean_is_stationary_and_a_client_is_far_from_it(mean, each, divided) -> None:
    assert is_to_be_divided(mean, np.array(each), eps1=0.5, eps2=2.0) is divided


def test_no_cluster_is_ever_divided_with_eps1_0() -> None:
    assert not is_to_be_divided(0.0, np.array([9.0, 9.0]), eps1=0.0, eps2=0.0)


def similarities_of(degrees: list[float]) -> np.ndarray:
    angles = np.radians(degrees)
    return np.cos(angles[:, None] - angles[None, :])


def test_the_bipartition_cuts_the_largest_angle_between_adjacent_updates() -> None:
    """Complete linkage would put 80 and 130 degrees together."""
    first, cross = optimal_bipartition(similarities_of([0, 40, 80, 130]))
    assert first.tolist() == [True, True, True, False]
    assert cross == pytest.approx(np.cos(np.radians(50)))
    first, _ = optimal_bipartition(similarities_of([130, 40, 0, 80]))
    assert first.tolist() == [True, False, False, False]  # the part of client 0


@pytest.mark.parametrize("seed", range(20))
def test_no_other_bipartition_has_a_smaller_largest_similarity(seed) -> None:
    rng = np.random.default_rng(seed)
    m = int(rng.integers(2, 8))
    updates = rng.normal(size=(m, 3))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    similarities = updates @ updates.T
    _, cross = optimal_bipartition(similarities)
    cuts = [np.array([True, *rest]) for rest in itertools.product([True, False], repeat=m - 1) if not all(rest)]
    assert cross == min(similarities[np.ix_(cut, ~cut)].max() for cut in cuts)


def test_equal_similarities_are_divided_too() -> None:
    first, cross = optimal_bipartition(np.ones((5, 5)))
    assert first[0] and not first.all() and cross == 1


def test_a_client_joins_the_cluster_with_the_nearest_update() -> None:
    parts = [np.array([[1.0, 0.0], [0.0, 5.0]]), np.array([[-1.0, 0.0], [1.0, 1.0]])]
    assert nearest_part(np.array([0.1, 9.0]), parts) == 0  # beside (0, 5), and 45 degrees from (1, 1)
    assert nearest_part(np.array([3.0, 2.0]), parts) == 1
    assert nearest_part(np.array([0.0, 0.0]), parts) == 1  # equally near to all
    assert nearest_part(np.array([1.0, 1.0]), [np.zeros((1, 2)), np.array([[-1.0, 0.0]])]) == 0


# --- Rounds ---------------------------------------------------------------------------------------------

STEPS = {0: (1.0, 0.1), 1: (1.0, -0.1), 2: (-1.0, 0.1), 3: (-1.0, -0.1)}


def moving_app(steps: dict[int, tuple[float, float]] = STEPS) -> ClientApp:
    """Clients whose training adds a fixed step of their own to any model; they have 10 samples each."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        w = message.content["arrays"]["w"].numpy() + np.array(steps[context.node_config["partition-id"]], np.float32)
        count = message.content["arrays"]["count"].numpy() + context.node_config["partition-id"] + 1
        arrays = ArrayRecord({"w": Array(w), "count": Array(np.asarray(count))})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        seen = float(message.content["arrays"]["w"].numpy()[0])
        return Message(RecordDict({"metrics": MetricRecord({"eval_loss": seen, "num-examples": 5})}), reply_to=message)

    return app


def start() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(2, np.float32)), "count": Array(np.array(0))})


def models_of(strategy: ClusteredFL) -> dict[int, list[float]]:
    return {
        client - 1001: read_record(model)["w"].astype(float).round(4).tolist()
        for client, model in strategy.client_models().items()
    }


def test_four_clients_with_two_directions_form_two_clusters() -> None:
    strategy, seen = ClusteredFL(eps1=0.5, eps2=0.9), {}

    def on_round(server_round: int) -> None:
        seen[server_round] = models_of(strategy), strategy.collaboration()[1].tolist()

    strategy.start(InlineGrid(moving_app(), 4), start(), 3, on_round=on_round)
    quarters, halves = [[0.25] * 4] * 4, [[0.5, 0.5, 0, 0]] * 2 + [[0, 0, 0.5, 0.5]] * 2
    # Round 1: the mean update is 0; both parts start from the mean model. Then each has its own, with equal updates.
    assert seen[1] == ({c: [0, 0] for c in range(4)}, np.eye(4).tolist())
    assert seen[2] == ({0: [1, 0], 1: [1, 0], 2: [-1, 0], 3: [-1, 0]}, quarters)
    assert seen[3] == ({0: [2, 0], 1: [2, 0], 2: [-2, 0], 3: [-2, 0]}, halves)
    assert strategy.tree == [
        {
            "cluster": 0,
            "parent": None,
            "since": 0,
            "parts": [1, 2],
            "divided": 1,
            "cross-similarity": pytest.approx((-1 + 0.01) / 1.01),
            "clients": [],
        },
        {
            "cluster": 1,
            "parent": 0,
            "since": 1,
            "parts": [],
            "divided": None,
            "cross-similarity": None,
            "clients": [1001, 1002],
        },
        {
            "cluster": 2,
            "parent": 0,
            "since": 1,
            "parts": [],
            "divided": None,
            "cross-similarity": None,
            "clients": [1003, 1004],
        },
    ]
    assert read_record(strategy.global_arrays())["w"] == pytest.approx([0, 0], abs=1e-6)  # of all clients' models
    assert [line["clusters"] for line in strategy.history.rounds] == [2, 2, 2]
    first = strategy.history.rows[0]
    assert first["cluster"] == 1 and first["update-norm"] == pytest.approx(np.sqrt(1.01))
    assert first["mean-update-norm"] == pytest.approx(0, abs=1e-6)
    assert strategy.history.rows[4]["mean-update-norm"] == pytest.approx(1)
    counters = {c - 1001: int(read_record(m)["count"]) for c, m in strategy.client_models().items()}
    assert counters == dict.fromkeys(range(4), 2 + 2 + 2)  # of all clients, of whom each adds its number


@pytest.mark.parametrize(("eps1", "eps2"), [(0.5, 1.1), (1e-9, 0.9), (0.0, 0.0)])
def test_both_thresholds_decide_about_a_division(eps1, eps2) -> None:
    steps = {**STEPS, 0: (1.0, 0.1001)}  # the mean is not quite stationary
    strategy = ClusteredFL(eps1=eps1, eps2=eps2)
    strategy.start(InlineGrid(moving_app(steps), 4), start(), 2)
    assert len(strategy.tree) == 1
    divided = ClusteredFL(eps1=0.5, eps2=0.9)
    divided.start(InlineGrid(moving_app(steps), 4), start(), 2)
    assert len(divided.tree) == 3 and models_of(divided) != models_of(strategy)


@pytest.mark.parametrize(
    ("criterion", "eps2", "divided"),
    [("norm", 1.002, True), ("norm", 1.01, False), ("coordinate", 0.999, True), ("coordinate", 1.002, False)],
)
def test_the_criterion_says_whether_eps2_bounds_a_norm_or_a_coordinate(criterion, eps2, divided) -> None:
    """All updates have norm 1.00499 and a largest coordinate of 1."""
    strategy = ClusteredFL(eps1=0.5, eps2=eps2, criterion=criterion)
    strategy.start(InlineGrid(moving_app(), 4), start(), 1)
    assert len(strategy.tree) == (3 if divided else 1)
    for row in strategy.history.rows[:4]:
        assert row["update-norm"] == pytest.approx(np.sqrt(1.01))
        assert row.get("largest-coordinate") == (1 if criterion == "coordinate" else None)


def test_an_absent_client_is_placed_by_its_next_reply_which_enters_no_mean() -> None:
    strategy, seen = ClusteredFL(eps1=0.5, eps2=0.9), {}

    def on_round(server_round: int) -> None:
        places = {client - 1001: row["cluster"] for row in strategy.tree for client in row["clients"]}
        seen[server_round] = places, models_of(strategy)

    def fate(server_round: int, client: int) -> str:
        return "error" if (server_round, client) == (1, 3) else "ok"

    steps = {**STEPS, 0: (0.5, 0.0), 1: (0.5, 0.0)}  # so that three clients are stationary
    strategy.start(FaultyGrid(moving_app(steps), 4, fate), start(), 4, on_round=on_round)
    # The mean of 0.5, 0.5 and -1 is 0; client 3 has the model it was sent.
    assert seen[1] == ({0: 1, 1: 1, 2: 2, 3: 0}, {0: [0, 0.0333], 1: [0, 0.0333], 2: [0, 0.0333], 3: [0, 0]})
    # Its update (-1, -0.1) is near client 2's. Cluster 2 has learned from client 2 alone.
    assert seen[2][0] == {0: 1, 1: 1, 2: 2, 3: 2}
    assert seen[2][1][2] == seen[2][1][3] == [-1, 0.1333]
    assert seen[3][1][2] == seen[3][1][3] == [-2, 0.1333]  # both steps, whose second numbers cancel
    _, weights = strategy.collaboration()
    assert weights.tolist() == [[0.5, 0.5, 0, 0]] * 2 + [[0, 0, 0.5, 0.5]] * 2


def test_a_late_client_descends_the_tree_one_level_per_reply() -> None:
    """Eight directions, in two pairs of pairs: divided twice before client 8 replies for the first time."""

    def direction(degrees: float, length: float = 1.0) -> tuple[float, float]:
        return length * np.cos(np.radians(degrees)), length * np.sin(np.radians(degrees))

    pairs = [(0, 80), (180, 260)]
    steps = {i: direction(degrees) for i, degrees in enumerate(d for pair in pairs for d in pair)} | {4: direction(258)}
    strategy, places = ClusteredFL(eps1=0.8, eps2=0.9), []
    strategy.start(
        FaultyGrid(moving_app(steps), 5, lambda r, c: "error" if c == 4 and r < 3 else "ok"),
        start(),
        5,
        on_round=lambda r: places.append(next(row["cluster"] for row in strategy.tree if 1005 in row["clients"])),
    )
    tree = {row["cluster"]: row for row in strategy.tree}
    assert (tree[0]["divided"], tree[1]["divided"], tree[2]["divided"]) == (1, 2, 2)
    assert places == [0, 0, 2, tree[2]["parts"][1], tree[2]["parts"][1]]
    assert tree[tree[2]["parts"][1]]["clients"] == [1004, 1005]  # with the client of its direction


def test_a_cluster_without_replies_does_not_change() -> None:
    strategy, seen = ClusteredFL(eps1=0.5, eps2=0.9), {}
    fates = FaultyGrid(moving_app(), 4, lambda r, c: "error" if r == 3 and c < 2 else "ok")
    strategy.start(fates, start(), 3, on_round=lambda r: seen.update({r: models_of(strategy)}))
    assert seen[2] == {0: [1, 0], 1: [1, 0], 2: [-1, 0], 3: [-1, 0]}
    assert seen[3] == {0: [1, 0], 1: [1, 0], 2: [-2, 0], 3: [-2, 0]}


def test_an_update_is_bounded_relative_to_the_model_sent_to_the_client() -> None:
    """After ten rounds the clusters have distance 20, and each step has its first length."""
    strategy = ClusteredFL(eps1=0.5, eps2=0.9, max_update_norm=1.2)
    strategy.start(InlineGrid(moving_app(), 4), start(), 10)
    assert all(row["status"] == "ok" for row in strategy.history.rows)
    strategy = ClusteredFL(eps1=0.5, eps2=0.9, max_update_norm=1.0, max_empty_rounds=9)
    with pytest.raises(RuntimeError, match=r"its update has norm 1.00499, allowed: up to 1"):
        strategy.start(InlineGrid(moving_app(), 4), start(), 1)


def test_the_tree_is_part_of_the_checkpoint() -> None:
    strategy = ClusteredFL(eps1=0.5, eps2=0.9)
    strategy.start(FaultyGrid(moving_app(), 4, lambda r, c: "error" if c == 3 else "ok"), start(), 2)
    arrays: dict[str, np.ndarray] = {}
    packed = json.loads(json.dumps(pack(strategy, arrays)))
    again = ClusteredFL(eps1=0.5, eps2=0.9)
    again.begin(start())
    again.restore(unpack(packed, arrays))
    assert again.tree == strategy.tree
    for one, other in zip(again._tree.clusters, strategy._tree.clusters, strict=True):
        assert values(one.model) == values(other.model) and one.updates.tobytes() == other.updates.tobytes()
        assert one.examples == other.examples and one.sent == other.sent
    assert again.collaboration()[1].tobytes() != b""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps1": -1.0, "eps2": 1.0}, "eps1 is -1.0, allowed: 0 to 1e\\+12"),
        ({"eps1": 1.0, "eps2": -2.0}, "eps2 is -2.0, allowed: 0 to 1e\\+12"),
        ({"criterion": "median"}, "criterion is 'median', allowed: norm, coordinate"),
    ],
)
def test_a_bad_threshold_is_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        ClusteredFL(**settings)


# --- Compared with FedAvg -------------------------------------------------------------------------------

OWN = {"cluster", "update-norm", "mean-update-norm", "bytes-down"}  # the method's name travels


@pytest.mark.parametrize("app", [plain_app, small_app])
def test_with_eps1_0_it_equals_fedavg_bit_for_bit(app) -> None:
    def found(name: str, **settings) -> tuple:
        grid = FaultyGrid(app(), 6, lambda r, c: "error" if (r + c) % 5 == 0 else "ok")
        strategy = REGISTRY[name].strategy(fraction_train=0.7, **settings)
        strategy.start(grid, initial() if app is plain_app else to_record(get_arrays(small())), 5)
        models, clients, weights, rows = everything(strategy)
        return models, clients, weights, [{k: v for k, v in row.items() if k not in OWN} for row in rows]

    assert found("clustered-fl", eps1=0.0, eps2=0.0) == found("fedavg")
    assert found("clustered-fl", eps1=100.0, eps2=0.0)[0] != found("fedavg")[0]


def test_clients_train_and_report_as_in_fedavg() -> None:
    """Results are of the received model, as in FedAvg; a closing exchange evaluates the last one."""
    strategy = make("clustered-fl")
    strategy.start(InlineGrid(small_app(), 6), to_record(get_arrays(small())), 4)
    assert strategy.personal == "received" and not strategy.clients_keep_state
    assert [line["round"] for line in strategy.history.rounds] == [1, 2, 3, 4, 5]
    assert len(strategy.tree) > 1
    for row in strategy.history.rows:
        if row["round"] < 5:
            assert row["samples-trained"] == row["num-examples"] == 10 * (row["client"] - 1000)  # one epoch
            assert row["samples-predicted"] == 0
            assert row["personal-accuracy"] == row["received-accuracy"]


# --- Results --------------------------------------------------------------------------------------------


def test_the_results_have_the_tree_and_a_picture_of_it(tmp_path) -> None:
    config = Config(
        strategy="clustered-fl",
        num_clients=6,
        num_groups=2,
        num_rounds=3,
        local_epochs=1,
        eps1=100.0,
        eps2=0.0,
        samples_per_client=10,
        device="cpu",
        output_dir=str(tmp_path),
    )
    folder = run_app(InlineGrid(client_app, 6, config.run_config()), config).path
    tree = json.loads((folder / "clusters.json").read_text())
    assert sorted(client for cluster in tree for client in cluster["clients"]) == list(range(6))
    assert tree[0]["parts"] == [1, 2] and tree[0]["divided"] == 1 and -1 <= tree[0]["cross-similarity"] <= 1
    pixels = imread(folder / "clusters.png")
    assert pixels.shape[0] > 300 and pixels.shape[1] > 900 and pixels[..., :3].std() > 0.02


def test_the_picture_shows_the_cluster_of_each_client() -> None:
    from kindred.server_app.report.tree_figure import tree_figure

    def cluster(number, parent, since, clients=(), parts=(), divided=None, cross=None):
        return {
            "cluster": number,
            "parent": parent,
            "since": since,
            "parts": list(parts),
            "divided": divided,
            "cross-similarity": cross,
            "clients": list(clients),
        }

    tree = [cluster(0, None, 0, ["late"], (1, 2), 3, -0.25), cluster(1, 0, 3, range(90)), cluster(2, 0, 3, ["a$b"])]
    groups = {"late": 1, "a$b": 1} | dict.fromkeys(range(90), 0)
    for known, lines in ((groups, "true group 1: a"), (None, "a")):
        figure = tree_figure(tree, 3, known, "Clusters")
        texts = [text.get_text() for text in figure.axes[0].texts]
        assert texts[0] == "-0.25\n1 to be placed"
        assert texts[1].startswith("cluster 1: 90 clients\n") and texts[1].endswith(" …")
        assert texts[2].startswith(f"cluster 2: 1 client\n{lines}")
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in figure.axes[0].texts]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_the_norm_of_the_mean_update_is_weighted_by_samples() -> None:
    clients = [two_weights.Client(1.0, 0), two_weights.Client(1.0, 1, 3)]
    strategy = two_weights.start(ClusteredFL(), clients, [0.0, 0.0])  # updates (1, -1)/4 and, of 3 samples, (-1, 1)/4
    rows = [row for row in strategy.history.rows if row["round"] == 1]
    assert [row["mean-update-norm"] for row in rows] == pytest.approx([np.sqrt(2) / 8] * 2)


def test_the_model_of_several_clusters_is_the_mean_over_clients() -> None:
    ours, other = two_weights.Client(1.0, 0), two_weights.Client(1.0, 1)
    strategy = two_weights.start(ClusteredFL(eps1=0.2, eps2=0.3), [ours, ours, other], [0.0, 0.0], rounds=2)
    mean = (2 * ours.step(np.zeros(2)) + other.step(np.zeros(2))) / 3  # divided after round 1, 2 clients and 1
    assert [row["cluster"] for row in strategy.history.rows if row["round"] == 2] == [1, 1, 2]
    expected = (2 * ours.step(mean) + other.step(mean)) / 3
    assert two_weights.weights_of(strategy.global_arrays()) == pytest.approx(expected, abs=1e-6)
