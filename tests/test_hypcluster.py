"""HypCluster: a round by hand, its equality with FedAvg for one cluster, and checks of what clients report."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord

from kindred import FedAvg, HypCluster, InlineGrid
from kindred.baselines.hypcluster import nearest_model
from kindred.client.training import get_arrays, set_arrays
from kindred.engine.layout import drawn_anew
from kindred.messages import read_record, to_record

from . import test_client, two_weights
from .grids import FaultyGrid
from .scores import evaluate
from .test_conformance import check_that_it_counts_as_a_missing_reply, everything, values
from .two_weights import Client, weights_of

# --- The mathematics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "nearest"),
    [([0.7, 0.3, 0.5], 1), ([0.3, 0.3], 0), ([np.nan, 2.0], 1), ([np.inf, np.nan], 0), ([4.0], 0)],
)
def test_the_model_with_the_lowest_loss_is_chosen(losses, nearest) -> None:
    assert nearest_model(losses) == nearest


# --- A round by hand ----------------------------------------------------------------------------------

CLIENTS = [Client(1.0, 0, 1), Client(2.0, 0, 3), Client(1.0, 1, 2)]
FIRST, SECOND, THIRD = np.array([0.5, -0.5]), np.array([-0.5, 0.5]), np.array([-9.0, -9.0])


def by_three(**more) -> HypCluster:
    strategy = HypCluster(num_clusters=3, other_models=[two_weights.model(SECOND), two_weights.model(THIRD)], **more)
    return two_weights.start(strategy, CLIENTS, FIRST)


def test_a_round_matches_the_paper() -> None:
    """Clients 0 and 1 are nearer to the first model, client 2 to the second, and no client chooses the third."""
    strategy = by_three()
    # p = 1 / (1 + e^-1) = 0.7311 and 1 / (1 + e^-2) = 0.8808; w + 0.5 x (1 - p)
    one, two = 0.5 + 0.5 * 0.26894, 0.5 + 0.5 * 2 * 0.11920
    first, second, third = (weights_of(record) for record in strategy.models)
    assert first == pytest.approx([(1 * one + 3 * two) / 4, -(1 * one + 3 * two) / 4], abs=1e-5)
    assert first == pytest.approx((1 * CLIENTS[0].step(FIRST) + 3 * CLIENTS[1].step(FIRST)) / 4)
    assert second == pytest.approx([-one, one], abs=1e-5)
    assert third.tolist() == THIRD.tolist()
    rows = [row for row in strategy.history.rows if row["round"] == 1]
    assert [row["cluster"] for row in rows] == [0, 0, 1]
    assert strategy.history.rounds[0]["clusters"] == 2
    assert rows[1]["train-loss"] == pytest.approx(CLIENTS[1].loss(FIRST))
    assert rows[0]["received-loss"] == pytest.approx(CLIENTS[0].loss(FIRST))
    assert rows[2]["trained-loss"] == pytest.approx(CLIENTS[2].loss(np.array([-one, one])), abs=1e-5)


def test_clients_of_one_cluster_share_its_model() -> None:
    strategy = by_three()
    models = [weights_of(record).tolist() for record in strategy.client_models().values()]
    assert models[0] == models[1] != models[2]
    assert strategy.collaboration()[1].tolist() == np.eye(3).tolist()  # the models sent last were initial ones
    mean = (2 * weights_of(strategy.models[0]) + weights_of(strategy.models[1])) / 3
    assert weights_of(strategy.global_arrays()) == pytest.approx(mean)


def test_collaboration_weights_are_shares_within_a_cluster() -> None:
    strategy = HypCluster(num_clusters=2, other_models=[two_weights.model(SECOND)])
    clients, weights = two_weights.start(strategy, CLIENTS, FIRST, rounds=2).collaboration()
    assert clients == [0, 1, 2]
    assert weights.tolist() == [[0.25, 0.75, 0], [0.25, 0.75, 0], [0, 0, 1]]


def test_all_models_are_sent_to_a_client_and_one_returns() -> None:
    rows = [two_weights.start(HypCluster(num_clusters=c), CLIENTS, FIRST).history.rows[0] for c in (1, 2, 3)]
    one, two, three = (row["bytes-down"] for row in rows)
    assert two - one == three - two > weights_of(two_weights.model(FIRST)).nbytes
    assert len({row["bytes-up"] for row in rows}) == 1


def test_samples_are_counted_for_every_model_evaluated() -> None:
    rows = by_three().history.rows[:3]
    assert [(row["samples-trained"], row["samples-predicted"]) for row in rows] == [(1, 3), (3, 9), (2, 6)]


# --- Rounds with a network ----------------------------------------------------------------------------


def run(strategy, rounds: int = 3, grid: InlineGrid | None = None, **settings):
    initial = to_record(get_arrays(test_client.network()))
    config = ConfigRecord(test_client.SETTINGS | settings)
    grid = grid or InlineGrid(test_client.app, test_client.CLIENTS, {"run": "hypcluster"})
    strategy.start(grid, initial, rounds, 60, config, config)
    return strategy


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adam"}, {"local-epochs": 0, "local-steps": 3}])
def test_one_cluster_equals_fedavg_bit_for_bit(settings) -> None:
    found = everything(run(HypCluster(num_clusters=1, fraction_train=0.5), **settings))
    expected = everything(run(FedAvg(fraction_train=0.5), **settings))
    assert found[:3] == expected[:3]
    for mine, theirs in zip(found[3], expected[3], strict=True):
        shared = [key for key in theirs if key.startswith(("received-", "train", "personal-"))]
        assert shared and {key: mine[key] for key in shared} == {key: theirs[key] for key in shared}


def test_groups_are_found_and_do_better_than_with_one_model() -> None:
    """Odd clients swap the labels."""
    strategy = run(HypCluster(num_clusters=2), rounds=8)
    clusters = [row["cluster"] for row in strategy.history.rows if row["round"] == 9]  # the closing evaluation
    assert clusters[0] == clusters[2] != clusters[1] == clusters[3]
    assert strategy.history.rounds[-1]["accuracy"] > run(FedAvg(), rounds=8).history.rounds[-1]["accuracy"] + 0.2


def test_the_other_models_have_the_values_of_the_first_in_another_order() -> None:
    def starts(**settings) -> list[dict[str, np.ndarray]]:
        strategy = HypCluster(num_clusters=3, **settings)
        strategy.begin(to_record(first))
        return [read_record(record) for record in strategy.models]

    first = get_arrays(test_client.network())
    models = starts()
    for name, array in first.items():
        assert models[0][name].tobytes() == array.tobytes()
        for other in models[1:]:
            assert sorted(other[name].reshape(-1).tolist()) == sorted(array.reshape(-1).tolist())
    matrices = [model["0.weight"].tobytes() for model in (*models, *starts(seed=1)[1:])]
    assert len(set(matrices)) == 5


def test_equal_parameters_stay_equal_in_another_order() -> None:
    """Tied weights have two names."""
    first, other = np.arange(12.0).reshape(3, 4), np.arange(12.0, 24).reshape(3, 4)
    found = drawn_anew({"a": first, "other": other, "b": first.copy()}, 0, {"a", "other", "b"})
    assert found["a"].tolist() == found["b"].tolist() != first.tolist()
    assert sorted(found["a"].flat) == list(range(12)) and sorted(found["other"].flat) == list(range(12, 24))


def test_the_number_and_initial_values_of_models_change_the_result() -> None:
    def result(count: int, other_models=None) -> list[dict[str, bytes]]:
        strategy = run(HypCluster(num_clusters=count, other_models=other_models))
        return [values(record) for record in strategy.client_models().values()]

    first = get_arrays(test_client.network())
    given = [to_record(drawn_anew(first, 99, first))]
    results = [result(1), result(2), result(3), result(2, given)]
    assert all(one != other for i, one in enumerate(results) for other in results[:i])


def test_the_result_is_the_model_trained_from_the_last_sent_ones() -> None:
    strategy = run(HypCluster(num_clusters=2))
    closing = {row["client"]: row for row in strategy.history.rows if row["round"] == 4}
    module = test_client.network()
    for client, record in strategy.client_models().items():
        site = test_client.load_site(type("Context", (), {"node_config": {"partition-id": client}}))
        losses = []
        for each in strategy.models:
            set_arrays(module, read_record(each))
            losses.append(evaluate(module, *site.train)[1])
        assert closing[client]["cluster"] == int(np.argmin(losses))
        set_arrays(module, read_record(record))
        assert closing[client]["personal-accuracy"] == evaluate(module, *site.test)[0]
    first = [row for row in strategy.history.rows if row["round"] == 1]
    assert all(row["personal-accuracy"] == row["received-accuracy"] for row in first)


def test_an_unsampled_client_chooses_a_model_in_the_closing_exchange() -> None:
    strategy = run(HypCluster(num_clusters=2, fraction_train=0.5), rounds=1)
    trained = {row["client"] for row in strategy.history.rows if row["round"] == 1}
    asked = {row["client"]: row for row in strategy.history.rows if row["round"] == 2}
    assert len(trained) == 2 and list(asked) == strategy.clients()
    for client, record in strategy.client_models().items():
        assert values(record) == values(strategy.models[asked[client]["cluster"]])


# --- What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("cluster", "said"), [(None, "None"), (-1, "-1"), (2, "2"), (0.0, "0.0"), ([0], "[0]")])
def test_an_unknown_cluster_counts_as_a_missing_reply(cluster, said) -> None:
    def damage(content) -> None:
        content["metrics"].pop("cluster")
        if cluster is not None:
            content["metrics"]["cluster"] = cluster

    check_that_it_counts_as_a_missing_reply("hypcluster", damage, f"refused: its cluster is {said}, allowed: 0 to 1")


def test_the_norm_is_that_of_the_change_of_the_chosen_model() -> None:
    """The norms are 0.1902, 0.1686 and 0.1902, see above; the second model has distance 1.4 from the first."""

    def statuses(bound: float) -> list[str]:
        return [row["status"] for row in by_three(max_update_norm=bound).history.rows[:3]]

    assert statuses(0.2) == ["ok"] * 3
    refused = "refused: its update has norm 0.19017, allowed: up to 0.18"
    assert statuses(0.18) == [refused, "ok", refused]


def test_a_model_that_no_client_trained_does_not_change() -> None:
    seen = {}
    strategy = HypCluster(num_clusters=2, other_models=[two_weights.model(SECOND)])
    grid = FaultyGrid(two_weights.app_of(CLIENTS), 3, lambda r, c: "error" if (r, c) == (2, 2) else "ok")
    two_weights.start(
        strategy,
        CLIENTS,
        FIRST,
        3,
        grid,
        on_round=lambda r: seen.update({r: [values(record) for record in strategy.models]}),
    )
    assert seen[1][1] == seen[2][1] != seen[3][1]
    assert seen[1][0] != seen[2][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_clusters": 0}, "num_clusters is 0, allowed: 1 to 1,000"),
        (
            {"num_clusters": 3, "other_models": [two_weights.model(FIRST)]},
            "other_models is '1 models', allowed: 2, all but the first",
        ),
    ],
)
def test_out_of_range_arguments_are_named(arguments, said) -> None:
    with pytest.raises(ValueError) as refused:
        HypCluster(**arguments)
    assert str(refused.value) == said


def test_other_initial_models_must_match_the_first() -> None:
    strategy = HypCluster(num_clusters=2, other_models=[to_record({"weight": np.zeros(3, np.float32)})])
    with pytest.raises(ValueError, match=r"model 1: array 'weight' is float32 \(3,\), expected float32 \(2,\)"):
        two_weights.start(strategy, CLIENTS, FIRST)
