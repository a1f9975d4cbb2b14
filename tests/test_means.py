"""Means of models by numbers of samples: the bound on a client's share, and who is named for a large one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, strategies as st

from kindred import FedAvg, InlineGrid, Kindred, PersonalizedStrategy
from kindred.engine.means import WeightedMean, capped, largest_weight
from kindred.engine.remarks import on_samples
from kindred.messages import in_order, read_record, to_record

from .grids import ShuffledGrid
from .test_conformance import app_of, initial_of, make

# --- The bound ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "share", "bounded"),
    [
        ([1, 1, 8], 1, [1, 1, 8]),
        ([1, 1, 8], 0.8, [1, 1, 8]),
        ([1, 1, 8], 0.5, [1, 1, 2]),  # 2 of 4
        ([1, 2, 3, 94], 0.4, [1, 2, 3, 4]),  # 4 of 10
        ([1, 1, 50, 90], 0.4, [1, 1, 4, 4]),  # each 4 of 10
        ([1, 1, 0, 8], 0.5, [1, 1, 0, 2]),  # one that does not take part
        ([5, 7], 0.4, [5, 5]),  # too few clients: equal
        ([3, 9, 6], 1 / 3, [3, 3, 3]),
        ([7], 0.5, [7]),
        ([], 0.5, []),
    ],
)
def test_no_client_has_more_than_the_share_by_hand(weights, share, bounded) -> None:
    assert capped(np.array(weights, float), share) == pytest.approx(bounded)


counts = st.lists(st.integers(1, 10**12).map(float), min_size=1, max_size=12)


@given(counts, st.floats(0.01, 1))
def test_a_bounded_weight_is_at_most_the_share_and_no_smaller_than_needed(weights, share) -> None:
    found = capped(np.array(weights), share)
    largest = share * found.sum()
    if len(weights) * share <= 1:
        assert set(found) == {min(weights)}
        return
    assert (found <= largest * (1 + 1e-9)).all()
    assert (found <= weights).all()
    lowered = found < weights
    assert found[lowered] == pytest.approx(largest, rel=1e-6)  # only weights at the bound are lowered
    assert np.array_equal(found, np.minimum(weights, found.max()))  # all to the same level


@given(counts, st.floats(0.01, 1))
def test_a_mean_with_a_bound_keeps_few_models_waiting(weights, share) -> None:
    rows = np.random.default_rng(0).normal(size=(len(weights), 3))
    mean = WeightedMean(3, np.dtype(float), share)
    for client, weight in enumerate(weights):
        mean.add(client, weight, rows[client].copy())
        assert len(mean.claimed) - len(mean.weights) <= 1 / share + 1  # models that wait
    bounded = capped(np.array(weights), share)
    assert mean.result() == pytest.approx(np.average(rows, axis=0, weights=bounded), rel=1e-6, abs=1e-9)
    assert [mean.weights[client] for client in in_order(mean.weights)] == pytest.approx(bounded.tolist(), rel=1e-9)
    assert mean.claimed == dict(enumerate(weights))


def test_without_a_bound_no_weight_changes() -> None:
    assert largest_weight([1.0, 1e12], 1) == math.inf == largest_weight([], 0.1)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, "half"])
def test_a_share_that_is_none_is_refused(share) -> None:
    with pytest.raises(ValueError, match=rf"^max_client_share is {share!r}, allowed: more than 0, at most 1$"):
        FedAvg(max_client_share=share)


# --- Methods --------------------------------------------------------------------------------------------


def claiming(claims, introduced=None) -> ClientApp:
    """Return clients whose models are 1, 2, 3, ...; they claim these samples, and may introduce themselves first."""
    app = ClientApp()

    @app.query("identity")
    def identity(message, context):
        client = context.node_config["partition-id"]
        about = {"client-id": client + 1}
        if introduced:
            about["num-examples"] = introduced(client)
        return Message(RecordDict({"config": ConfigRecord(about)}), reply_to=message)

    @app.train()
    def train(message, context):
        client = context.node_config["partition-id"]
        arrays = to_record({"w": np.full(2, client + 1.0, np.float32)})
        claim = claims(client, message.content["config"]["server-round"])
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": claim})}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"eval_acc": 0.5, "num-examples": 5})}), reply_to=message)

    return app


def start(strategy: PersonalizedStrategy, app: ClientApp, clients: int, rounds: int = 1) -> PersonalizedStrategy:
    strategy.start(InlineGrid(app, clients), to_record({"w": np.zeros(2, np.float32)}), rounds)
    return strategy


def mean_of(strategy: PersonalizedStrategy) -> float:
    return float(read_record(strategy.global_arrays())["w"][0])


def test_a_claim_of_many_samples_has_the_largest_share_and_no_more() -> None:
    app = claiming(lambda client, _: 10**12 if client == 3 else 10)
    assert mean_of(start(FedAvg(), app, 4)) == pytest.approx(4)
    bounded = start(FedAvg(max_client_share=0.4), app, 4)
    assert mean_of(bounded) == pytest.approx(0.2 * (1 + 2 + 3) + 0.4 * 4)
    start(bounded, app, 4, rounds=2)
    assert bounded.collaboration()[1][0] == pytest.approx([0.2, 0.2, 0.2, 0.4])
    assert mean_of(start(FedAvg(max_client_share=0.2), app, 4)) == pytest.approx(2.5)  # all are equal


def test_kindred_s_mean_of_all_has_the_bound_too() -> None:
    app = claiming(lambda client, _: 60 if client == 3 else 10)
    assert mean_of(start(Kindred(), app, 4)) == pytest.approx((1 + 2 + 3 + 3 * 4) / 6)  # LARGEST_WEIGHT
    assert mean_of(start(Kindred(max_client_share=0.4), app, 4)) == pytest.approx(0.2 * 6 + 0.4 * 4)


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "ditto", "hypcluster", "fedem", "clustered-fl", "feddf", "kindred"]
)
def test_with_a_bound_the_bits_do_not_depend_on_the_order_of_replies(name) -> None:
    def model(grid) -> dict[str, bytes]:
        strategy = make(name, max_client_share=0.3)
        strategy.start(grid, initial_of(name), 3)
        return {key: array.tobytes() for key, array in read_record(strategy.global_arrays()).items()}

    assert model(InlineGrid(app_of(name), 5)) == model(ShuffledGrid(app_of(name), 5, seed=1))


def test_scaffold_bounds_a_client_s_part_in_the_control_variate() -> None:
    sizes = {1001: 10, 1002: 10, 1003: 100}
    for share, weights in ((1.0, sizes), (0.5, sizes | {1003: 20})):
        strategy = make("scaffold", max_client_share=share)
        strategy.begin(initial_of("scaffold"))
        strategy.roster.nodes = {client: client for client in sizes}
        strategy.roster.sizes = lambda clients: [sizes[client] for client in clients]
        list(strategy.outgoing(1, list(sizes)))
        for client, size in sizes.items():
            strategy._add_change(client, (size, np.ones_like(strategy._total)))
        assert strategy._weights == pytest.approx(weights)
        assert strategy._total[0] == pytest.approx(sum(weights.values()))


# --- Samples are a claim ----------------------------------------------------------------------------------


def test_a_client_s_samples_are_those_that_it_introduced_itself_with() -> None:
    app = claiming(lambda client, _: 10**12 if client == 3 else 10, introduced=lambda client: 10)
    strategy = start(FedAvg(), app, 4, rounds=2)
    assert mean_of(strategy) == pytest.approx(2.5)
    assert [row["num-examples"] for row in strategy.history.rows if row["round"] == 2] == [10] * 4
    assert {row["status"] for row in strategy.history.rows} == {"ok"}
    assert strategy.history.remarks == [
        {
            "round": 1,
            "client": 4,
            "about": "samples",
            "remark": "reports 1000000000000 training samples and introduced itself with 10, which count; it is asked "
            "to introduce itself anew",
        }
    ]


def test_a_client_whose_data_grow_introduces_itself_anew(caplog) -> None:
    caplog.set_level("INFO")
    size = {"now": 10}

    def claim(client: int, server_round: int) -> int:
        size["now"] = 30 if server_round >= 2 else 10
        return size["now"] if client == 1 else 10

    app = claiming(claim, introduced=lambda client: size["now"] if client == 1 else 10)
    strategy = start(FedAvg(), app, 2, rounds=4)
    counted = [row["num-examples"] for row in strategy.history.rows if row["client"] == 2 and row["round"] <= 4]
    assert counted == [10, 10, 30, 30]
    assert "kindred: client 2 now has 30 training samples, before 10" in caplog.messages
    assert sum("introduce itself anew" in line for line in caplog.messages) == 1
    assert mean_of(strategy) == pytest.approx((10 * 1 + 30 * 2) / 40)


def test_a_client_that_introduces_itself_without_a_number_keeps_its_claim() -> None:
    strategy = start(FedAvg(), claiming(lambda client, _: 10 * (client + 1)), 2)
    assert mean_of(strategy) == pytest.approx((10 * 1 + 20 * 2) / 30)
    assert strategy.history.remarks == []


def test_large_shares_and_numbers_are_named_once_each() -> None:
    app = claiming(lambda client, _: 1000 if client == 3 else 10)
    for strategy in (FedAvg(), FedAvg(max_client_share=0.3), Kindred()):
        start(strategy, app, 4, rounds=3)
        assert [(each["round"], each["client"], each["remark"]) for each in strategy.history.remarks] == [
            (1, 4, "has 1000 samples, the median of 4 clients is 10"),
            (1, 4, "has 97% of the samples in a mean of 4 clients' models"),
        ]


def test_who_is_named_for_samples_by_hand() -> None:
    def named(numbers, means) -> list[tuple[object, str]]:
        return [(remark.client, remark.about) for remark in on_samples(numbers, means)]

    assert named({1: 200, 2: 10, 3: 10}, []) == []  # 20 times the median, not above
    assert named({1: 201, 2: 10, 3: 10}, []) == [(1, "number")]
    assert named({1: 201, 2: 10}, [{1: 201, 2: 10}]) == []  # of two, one is always large
    assert named({}, [{1: 20, 2: 10, 3: 10}]) == []  # half
    assert named({}, [{1: 1, 2: 1}, {3: 21, "b": 10, "a": 10}]) == [(3, "share")]


# --- Evaluations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["num-examples", "num-test-examples"])
def test_evaluations_count_test_samples_under_either_key(key) -> None:
    app = claiming(lambda client, _: 10, introduced=lambda client: 10)
    del app._registered_funcs["evaluate.default"]

    @app.evaluate()
    def evaluate(message, context):
        client = context.node_config["partition-id"]
        metrics = MetricRecord({"eval_acc": 0.5 + client / 4, key: 1 + 2 * client})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    strategy = FedAvg()
    result = strategy.start(InlineGrid(app, 2), to_record({"w": np.zeros(2, np.float32)}), 1)
    (line,) = [line for line in strategy.history.rounds if line["round"] == 1]
    assert line["accuracy-weighted"] == pytest.approx((0.5 + 3 * 0.75) / 4)
    assert [row["num-test-examples"] for row in strategy.history.rows if row["round"] == 1] == [1, 3]
    assert [row["num-examples"] for row in strategy.history.rows if row["round"] == 1] == [10, 10]
    assert dict(result.evaluate_metrics_clientapp[1]) == {"eval_acc": pytest.approx((0.5 + 3 * 0.75) / 4)}


def test_kindred_s_means_of_neighbours_have_the_bound_too() -> None:
    app = claiming(lambda client, _: 30 if client == 3 else 10)
    strategy = start(Kindred(max_client_share=0.4), app, 4)
    _, (_, (neighbours,), _) = strategy._parts([1])  # models 1, 2, 3, 4: cosines with client 1 are 1, 1, -1, -1
    assert neighbours[3] / neighbours[2] == pytest.approx(20 / 10)  # 20 of 50, not the 30 that it claims
