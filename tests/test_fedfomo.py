"""FedFomo: rounds by hand, its equality with local training, and checks of what clients report."""

from __future__ import annotations

import json
import reprlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from hypothesis import given, strategies as st

from kindred import FedFomo, InlineGrid, Local, make_client_app
from kindred.baselines.fedfomo import model_weights, split, weigh_models
from kindred.client.state import ClientState
from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.messages import to_record
from kindred.parts.combination import combined

from . import test_client, two_weights
from .grids import FaultyGrid, ShuffledGrid
from .test_conformance import check_that_it_counts_as_a_missing_reply, everything, values
from .two_weights import Client, weights_of

# --- The mathematics ----------------------------------------------------------------------------------


def test_weights_are_loss_decreases_over_distances() -> None:
    # (1.0 - 0.8) / 2 = 0.1, (1.0 - 0.5) / 1 = 0.5, and 1.2 is an increase
    assert model_weights(1.0, [0.8, 0.5, 1.2], [2.0, 1.0, 1.0]) == pytest.approx([1 / 6, 5 / 6, 0])


@pytest.mark.parametrize(
    ("before", "losses", "distances", "weights"),
    [
        (1.0, [1.0, 1.0], [2.0, 3.0], [0, 0]),  # equal losses
        (1.0, [1.5, 2.0], [2.0, 3.0], [0, 0]),
        (1.0, [0.5, 0.5], [0.0, 3.0], [0, 1]),  # the first model equals the previous one
        (1.0, [np.nan, 0.5, 0.9], [1.0, np.inf, 1.0], [0, 0, 1]),
        # Every finite loss is better than NaN; nearer models have more weight.
        (np.nan, [2.0, 3.0, np.inf], [1.0, 3.0, 1.0], [0.75, 0.25, 0]),
    ],
)
def test_weights_are_defined_where_losses_cannot_be_compared(before, losses, distances, weights) -> None:
    assert model_weights(before, losses, distances) == pytest.approx(weights)


def test_a_combination_averages_floats_only() -> None:
    own = {"w": np.array([1.0, 2.0], np.float32), "steps": np.array(3)}
    other = {"w": np.array([5.0, 4.0], np.float32), "steps": np.array(9)}
    found = combined([own, other], np.array([0.25, 0.75]))
    assert found["w"].tolist() == [4.0, 3.5] and found["w"].dtype == np.float32
    assert found["steps"] == 3
    # b + sum w (theta - b) is the same from any b
    b = np.array([7.0, -1.0])
    assert b + 0.25 * (own["w"] - b) + 0.75 * (other["w"] - b) == pytest.approx(found["w"])


def test_a_model_with_weight_one_keeps_its_bits() -> None:
    own = {"w": np.array([0.1, -0.0, 1e-40], np.float32)}
    found = combined([own, {"w": np.full(3, np.nan, np.float32)}], np.array([1.0, 0.0]))
    assert found["w"].tobytes() == own["w"].tobytes()


@given(st.integers(1, 60), st.floats(0.01, 0.99), st.integers(0, 9))
def test_a_sample_is_for_training_or_for_validation(size, share, seed) -> None:
    training, validation = split(size, share, seed)
    if size < 3:
        assert sorted(training.tolist()) == sorted(validation.tolist()) == list(range(size))
        return
    assert sorted([*training, *validation]) == list(range(size))
    assert len(training) >= 2 and len(validation) >= 1
    assert len(validation) == min(max(round(share * size), 1), size - 2)


def test_the_split_depends_on_the_seed_alone() -> None:
    first, again, other = (split(20, 0.2, seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again != other


# --- Rounds by hand -----------------------------------------------------------------------------------

# Clients 0 and 1 agree on the class of a positive number, and client 1 learns faster. Client 2 swaps the labels.
CLIENTS = [
    Client(1.0, 0, 2, validation=(1.0, 0)),
    Client(2.0, 0, 1, validation=(1.0, 0)),
    Client(1.0, 1, 1, validation=(1.0, 1)),
]
START = np.array([0.2, -0.2])


def three(rounds: int, **more) -> FedFomo:
    strategy = FedFomo(num_neighbours=2, **more)
    return two_weights.start(strategy, CLIENTS, START, rounds)


def test_two_rounds_match_the_paper() -> None:
    first = [client.step(START) for client in CLIENTS]
    found = [weights_of(record) for record in three(1).client_models().values()]
    assert [w.tolist() for w in found] == [pytest.approx(w.tolist()) for w in first]  # no other client has a model yet
    # 1 / (1 + e^0.4) = 0.40131 for client 0, 1 / (1 + e^0.8) = 0.31003 for client 1, twice as fast
    assert found[0] == pytest.approx([0.2 + 0.5 * 0.40131, -0.2 - 0.5 * 0.40131], abs=1e-5)
    assert found[1] == pytest.approx([0.2 + 0.31003, -0.2 - 0.31003], abs=1e-5)

    strategy = three(2)
    # Losses of client 0: log(1 + e^-0.4) = 0.51302 before, log(1 + e^-0.80131) = 0.37069 of its own model and
    # log(1 + e^-1.02005) = 0.30791 of client 1's, which are sqrt(2) times 0.20066 and 0.31003 away.
    # 0.14232 / 0.28377 = 0.50154 and 0.20511 / 0.43844 = 0.46781; client 2's is worse.
    own, other = 0.50154 / (0.50154 + 0.46781), 0.46781 / (0.50154 + 0.46781)
    assert strategy._weights[0] == pytest.approx({0: own, 1: other, 2: 0}, abs=1e-5)
    expected = CLIENTS[0].step(own * first[0] + other * first[1])
    assert weights_of(strategy.client_models()[0]) == pytest.approx(expected, abs=1e-5)
    # For client 2 the others are worse than its previous model: it trains alone.
    assert strategy._weights[2] == {0: 0.0, 1: 0.0, 2: 1.0}
    assert weights_of(strategy.client_models()[2]) == pytest.approx(CLIENTS[2].step(first[2]))


def test_losses_are_compared_with_the_model_that_the_last_round_trained_from() -> None:
    two = three(2)
    first = [client.step(START) for client in CLIENTS]
    before = sum(two._weights[0][n] * first[n] for n in range(3))  # the combination, not client 0's model of round 1
    models = [weights_of(record) for record in two.client_models().values()]
    gains = [max((CLIENTS[0].loss(before) - CLIENTS[0].loss(w)) / np.linalg.norm(w - before), 0) for w in models]
    assert min(gains[:2]) > 0 == gains[2]
    assert three(3)._weights[0] == pytest.approx({n: gain / sum(gains) for n, gain in enumerate(gains)}, abs=1e-5)


def test_collaboration_weights_are_those_of_the_last_round() -> None:
    strategy = three(2)
    clients, weights = strategy.collaboration()
    assert clients == [0, 1, 2]
    assert weights[0].tolist() == pytest.approx([strategy._weights[0][j] for j in clients])
    assert weights[2].tolist() == [0, 0, 1]
    assert three(1).collaboration()[1].tolist() == np.eye(3).tolist()


def test_affinities_are_sums_of_weights() -> None:
    recorded = []
    strategy = FedFomo(num_neighbours=2)
    two_weights.start(
        strategy,
        CLIENTS,
        START,
        4,
        on_round=lambda r: recorded.append({client: dict(w) for client, w in strategy._weights.items()}),
    )
    for client, affinities in strategy._affinities.items():
        assert client not in affinities
        for other, affinity in affinities.items():
            assert affinity == pytest.approx(sum(weights[client].get(other, 0) for weights in recorded))
    assert strategy._affinities[0][1] > 0 == strategy._affinities[0][2]


def test_the_combination_is_evaluated_as_received_and_the_trained_model_is_the_result() -> None:
    strategy = three(2)
    row = next(row for row in strategy.history.rows if (row["round"], row["client"]) == (2, 0))
    first = [client.step(START) for client in CLIENTS]
    mixed = strategy._weights[0][0] * first[0] + strategy._weights[0][1] * first[1]
    assert row["received-loss"] == pytest.approx(CLIENTS[0].loss(mixed), abs=1e-5)
    assert (
        row["trained-loss"]
        == row["personal-loss"]
        == pytest.approx(CLIENTS[0].loss(weights_of(strategy.client_models()[0])), abs=1e-5)
    )
    assert [line["round"] for line in strategy.history.rounds] == [1, 2]  # no model is left to evaluate


# --- Rounds with a network ----------------------------------------------------------------------------


def run(strategy, rounds: int = 3, app=test_client.app, grid: InlineGrid | None = None, on_round=None, **settings):
    initial = to_record(get_arrays(test_client.network()))
    config = ConfigRecord(test_client.SETTINGS | settings)
    grid = grid or InlineGrid(app, test_client.CLIENTS, {"run": "fedfomo"})
    strategy.start(grid, initial, rounds, 60, config, config, on_round=on_round)
    return strategy


def held_out(x: torch.Tensor):
    """The sites of test_client with validation data, which FedFomo then uses."""
    return make_client_app(
        lambda context: replace(test_client.load_site(context), validation=(x, torch.zeros(len(x), dtype=torch.int64)))
    )


def test_with_equal_losses_it_equals_local_training_bit_for_bit() -> None:
    """If all samples are zeros, a network without biases has equal logits, whatever its weights."""

    def load(context):
        site = test_client.load_site(context)
        return replace(site, model=network, validation=(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)))

    def network() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return torch.nn.Sequential(
                torch.nn.Linear(3, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 2, bias=False)
            )

    def models(strategy) -> list[dict[str, bytes]]:
        config = ConfigRecord(test_client.SETTINGS)
        grid = InlineGrid(make_client_app(load), test_client.CLIENTS)
        strategy.start(grid, to_record(get_arrays(network())), 3, 60, config, config)
        return [values(record) for record in strategy.client_models().values()]

    strategy = FedFomo(num_neighbours=3)
    assert models(strategy) == models(Local())
    assert all(not any(recorded.values()) for recorded in strategy._weights.values())
    assert len(strategy._weights[0]) == 4


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adam", "local-epochs": 4}])
def test_without_neighbours_it_equals_local_training_bit_for_bit(settings) -> None:
    app = held_out(torch.randn(9, 3, generator=torch.Generator().manual_seed(5)))
    alone = run(FedFomo(num_neighbours=0, fraction_train=0.5), rounds=5, app=app, **settings)
    assert everything(alone)[0] == everything(run(Local(fraction_train=0.5), rounds=5, app=app, **settings))[0]
    assert 1.0 in [recorded[client] for client, recorded in alone._weights.items()]  # its own model has had weight


def test_a_site_with_validation_data_trains_on_all_samples_and_others_on_a_part() -> None:
    def rows(app) -> list[dict]:
        return [row for row in run(FedFomo(num_neighbours=2), app=app).history.rows]

    for row, mine in zip(rows(test_client.app), rows(held_out(torch.randn(9, 3))), strict=True):
        # 20 samples, 2 epochs; the model before, the client's own and, from the second round on, two others
        tried = 2 if row["round"] == 1 else 4
        assert (row["samples-trained"], row["samples-predicted"]) == (2 * 16, tried * 4)
        assert (mine["samples-trained"], mine["samples-predicted"]) == (2 * 20, tried * 9)
        assert row["num-examples"] == mine["num-examples"] == 20  # as the clients have introduced themselves
        assert ("validation-accuracy" in mine, "validation-accuracy" in row) == (True, False)


def test_every_setting_changes_the_result() -> None:
    def models(**changes) -> list[dict[str, bytes]]:
        settings = {"num_neighbours": 1, "epsilon": 0.0} | changes
        return [values(record) for record in run(FedFomo(**settings), rounds=6).client_models().values()]

    results = [models(), models(num_neighbours=0), models(epsilon=1.0), models(seed=1)]
    assert all(one != other for i, one in enumerate(results) for other in results[:i])


def test_neighbours_have_the_highest_affinity_or_are_random() -> None:
    def last(epsilon: float) -> tuple[dict[int, dict[int, float]], dict[int, list[int]]]:
        strategy, before = FedFomo(num_neighbours=1, epsilon=epsilon), {}

        def note(server_round: int) -> None:
            if server_round == 7:
                before.update({client: dict(worth) for client, worth in strategy._affinities.items()})

        run(strategy, rounds=8, on_round=note)
        rows = [row for row in strategy.history.rows if row["round"] == 8]
        return before, {row["client"]: json.loads(row["neighbours"]) for row in rows}

    affinities, chosen = last(0.0)
    liked = [client for client, worth in affinities.items() if any(worth.values())]
    assert liked
    for client in liked:
        assert chosen[client] == [max(affinities[client], key=affinities[client].get)]
    affinities, chosen = last(1.0)
    assert any(affinities[client].get(chosen[client][0], 0.0) < max(affinities[client].values()) for client in chosen)


def test_distances_are_over_parameters_only(tmp_path) -> None:
    site = test_client.load_site(type("Context", (), {"node_config": {"partition-id": 0}}))
    visit = Visit(0, site, dict(test_client.SETTINGS), {}, torch.device("cpu"), ClientState(1, 0, tmp_path), {})
    module = test_client.network()
    visit.state.save("before", get_arrays(module))
    models = []
    for _ in range(2):
        visit.train(module)
        models.append(get_arrays(module))
    weights = weigh_models(visit, models, site.train)
    assert weights.min() > 0
    counter = {"1.num_batches_tracked": np.array(1000)}  # no loss depends on it
    assert weigh_models(visit, [models[0] | counter, models[1]], site.train).tolist() == weights.tolist()


def test_clients_with_the_same_labels_find_each_other() -> None:
    """Odd clients swap the labels."""
    clients, weights = run(FedFomo(num_neighbours=3, epsilon=0.0), rounds=6).collaboration()
    group = np.array(clients) % 2
    others = weights * (1 - np.eye(len(clients)))
    assert others[group[:, None] == group[None, :]].sum() > 10 * others[group[:, None] != group[None, :]].sum()


@pytest.mark.parametrize("rounds", [3, 5])
def test_models_on_disk_give_the_same_bits(rounds) -> None:
    assert everything(run(FedFomo(store="disk"), rounds)) == everything(run(FedFomo(), rounds))


def test_the_rows_of_weights_do_not_depend_on_the_order_of_replies() -> None:
    def rows(grid: InlineGrid) -> list:
        found = run(FedFomo(num_neighbours=3), grid=grid).shared_rows()
        return [found.rows.tolist(), found.which.tolist()]

    in_order = rows(InlineGrid(test_client.app, test_client.CLIENTS))
    assert len(in_order[0]) == test_client.CLIENTS
    assert all(rows(ShuffledGrid(test_client.app, test_client.CLIENTS, seed)) == in_order for seed in range(3))


def test_an_excluded_client_s_model_is_no_longer_sent() -> None:
    strategy = FedFomo(num_neighbours=3, epsilon=0.0)

    def leave_out(server_round: int) -> None:
        if server_round == 2:
            strategy.history.left_out[3] = "its share-model is false, and fedfomo mixes all models"

    run(strategy, on_round=leave_out)
    got = {(row["round"], row["client"]): json.loads(row["neighbours"]) for row in strategy.history.rows}
    assert sorted(got[2, 0]) == [1, 2, 3] and sorted(got[3, 0]) == [1, 2] and (3, 3) not in got


def test_a_model_that_was_never_received_is_sent_to_nobody() -> None:
    grid = FaultyGrid(test_client.app, test_client.CLIENTS, lambda r, c: "error" if c == 3 else "ok")
    strategy = run(FedFomo(num_neighbours=3), grid=grid)
    for row in strategy.history.rows:
        assert row["status"].startswith("error") == (row["client"] == 3)
        assert 3 not in json.loads(row.get("neighbours", "[]"))


# --- What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights",
    [
        None,
        [1.0],
        [0.5, 0.5],
        [0.5, 0.2, 0.2],
        [1.5, -0.5, 0.0],
        [float("nan"), 0.0, 1.0],
        [1, 0, 0],
        "1, 0, 0",
        [0.5, 0.25, 0.25, 0.0],
    ],
    ids=repr,
)
def test_invalid_weights_count_as_a_missing_reply(weights) -> None:
    def damage(content) -> None:
        content.config_records.clear()
        if weights is not None:
            content["config"] = ConfigRecord({"weights": weights})

    check_that_it_counts_as_a_missing_reply(
        "fedfomo",
        damage,
        f"refused: its weights are {reprlib.repr(weights)}, expected 3 numbers, 0 to 1, that sum to 1 or are all 0",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_neighbours": -1}, "num_neighbours is -1, allowed: 0 to 1,000,000"),
        ({"epsilon": 1.1}, "epsilon is 1.1, allowed: 0 to 1"),
    ],
)
def test_out_of_range_arguments_are_named(arguments, said) -> None:
    with pytest.raises(ValueError) as refused:
        FedFomo(**arguments)
    assert str(refused.value) == said
