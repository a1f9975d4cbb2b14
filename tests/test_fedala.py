"""FedALA: its steps on small numbers that can be checked by hand, a client's state, and rounds with real ClientApps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from safetensors.numpy import load_file

from kindred import FedALA, FedAvg, InlineGrid, Site, make_client_app
from kindred.baselines.fedala import aggregated, has_converged, improved_weights
from kindred.client.training import NOT_FINITE, get_arrays, set_arrays
from kindred.engine.simulated_state import saved_files
from kindred.messages import by_prefix, read_record, to_record

from .client_apps import DIVERGING, saved_models
from .grids import FaultyGrid
from .scores import evaluate
from .test_client import CLIENTS, SETTINGS, app, load_site, network
from .test_conformance import values

HEAD = ["3.weight", "3.bias"]


def run(strategy, rounds=3, grid=None, initial=network, on_round=None, **settings):
    config = ConfigRecord(SETTINGS | settings)
    strategy.start(
        grid or InlineGrid(app, CLIENTS),
        to_record(get_arrays(initial())),
        rounds,
        60,
        config,
        config,
        on_round=on_round,
    )
    return strategy


def kept_by(strategy) -> dict[int, dict[str, dict[str, np.ndarray]]]:
    """State of the clients' aggregation: client -> local, weights -> arrays by name."""
    return {client: by_prefix(load_file(path)) for client, path in saved_files(strategy.run_id, "ala").items()}


# --- The mathematics ----------------------------------------------------------------------------------


def test_aggregation_by_hand() -> None:
    local, received = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([3.0, 0.0, 0.1])
    mixed = aggregated(local, received, torch.tensor([0.25, 0.5, 1.0]))
    assert mixed.tolist() == [1.5, 1.0, received[2].item()]
    assert torch.equal(aggregated(local, received, torch.zeros(3)), local)


def test_a_step_of_the_weights_by_hand() -> None:
    # The gradient in W is the one in the model times the difference: 0.5 x 2, -1 x -2, 3 x 1, and -2 x 1.
    weights = improved_weights(
        torch.tensor([0.9, 0.5, 0.2, 0.7]),
        torch.tensor([0.5, -1.0, 3.0, -2.0]),
        local=torch.tensor([1.0, 2.0, 0.0, 0.0]),
        received=torch.tensor([3.0, 0.0, 1.0, 1.0]),
        learning_rate=0.2,
    )
    assert weights.tolist() == pytest.approx([0.7, 0.1, 0.0, 1.0])


def test_weights_have_converged_when_losses_are_steady() -> None:
    steady = [1.0, *[0.5, 0.51] * 5]
    assert has_converged(steady) and not has_converged(steady[1:])  # 10 epochs are too few to decide
    assert not has_converged([1.0, *[0.5, 0.53] * 5])
    assert has_converged([0.0, 1.0] * 50) and not has_converged([0.0, 1.0] * 49)


def three_weights() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 2, bias=False))
    torch.nn.init.ones_(model[0].weight)
    torch.nn.init.zeros_(model[1].weight)
    return model


def test_three_rounds_of_one_sample_each_by_the_formulas() -> None:
    labels = (0, 1, 1)  # the clients' labels disagree

    def load(context) -> Site:
        one = torch.ones(1, 1), torch.tensor([labels[context.node_config["partition-id"]]])
        return Site(three_weights, one, one)

    sent, local, learned, own = {0: to_record(get_arrays(three_weights()))}, {}, {}, {}

    def note(server_round: int) -> None:
        sent[server_round] = strategy.global_arrays()
        kept = kept_by(strategy)[0]
        local[server_round] = kept["local"]["1.weight"].ravel()
        learned[server_round] = kept.get("weights", {}).get("1.weight")
        own[server_round] = read_record(saved_models(strategy.run_id)[0])

    strategy = FedALA(ala_learning_rate=20.0)
    run(
        strategy,
        3,
        InlineGrid(make_client_app(load), 3),
        three_weights,
        note,
        **{"local-epochs": 1, "batch-size": 1, "learning-rate": 0.5},
    )
    assert learned[1] is None

    weights = np.ones(2)
    for server_round in (2, 3, 4):  # the last is the closing evaluation, of the last global and the last local model
        body = sent[server_round - 1]["0.weight"].numpy().item()
        received = sent[server_round - 1]["1.weight"].numpy().ravel()
        before, losses = local[server_round - 1], []
        while not losses or (server_round == 2 and not has_converged(losses)):
            logits = (before + (received - before) * weights) * body
            probabilities = np.exp(logits) / np.exp(logits).sum()
            losses.append(-np.log(probabilities[0]))
            gradient = (probabilities - [1, 0]) * body * (received - before)
            weights = np.clip(weights - 20 * gradient, 0, 1)
        rows = [row for row in strategy.history.rows if row["round"] == server_round]
        assert own[server_round]["1.weight"].ravel() == pytest.approx(before + (received - before) * weights, abs=1e-5)
        assert own[server_round]["0.weight"].item() == body
        if server_round == 4:
            logits = own[4]["1.weight"].ravel() * body
            assert rows[0]["personal-loss"] == pytest.approx(np.log(np.exp(logits).sum()) - logits[0], abs=1e-5)
            assert rows[0]["samples-trained"] == len(losses) == 1
            assert (learned[4] == learned[3]).all() and (local[4] == local[3]).all()
            continue
        assert learned[server_round].ravel() == pytest.approx(weights, abs=1e-5)
        assert rows[0]["ala-weight"] == pytest.approx(weights.mean(), abs=1e-5)
        assert rows[0]["samples-trained"] == 1 + len(losses)
    assert 0 <= weights.min() < 0.9


# --- The rounds ---------------------------------------------------------------------------------------


def test_with_weights_of_1_it_equals_fedavg() -> None:
    half = {"fraction_train": 0.5, "seed": 2}
    fedala = run(FedALA(ala_learning_rate=1e-30, **half), 4)
    learned = [kept["weights"] for kept in kept_by(fedala).values() if "weights" in kept]
    assert learned and all((array == 1).all() for weights in learned for array in weights.values())
    fedavg = run(FedAvg(**half), 4)
    assert values(fedala.global_arrays()) == values(fedavg.global_arrays())
    columns = ("client", "received-loss", "trained-loss", "train-loss")
    rows = [
        [[row.get(key) for key in columns] for row in strategy.history.rows if row["round"] <= 4]
        for strategy in (fedala, fedavg)
    ]
    assert rows[0] == rows[1]


def test_every_setting_changes_the_result() -> None:
    found = {
        str(values(run(FedALA(**settings)).global_arrays()))
        for settings in ({}, {"head_layers": 2}, {"ala_share": 0.4}, {"ala_learning_rate": 5.0})
    }
    assert len(found) == 4


@pytest.mark.parametrize("head_layers", [1, 2])
def test_the_aggregated_model_lies_between_the_local_and_the_received_one(head_layers) -> None:
    sent, kept, own = {}, {}, {}

    def note(server_round: int) -> None:
        sent[server_round] = read_record(strategy.global_arrays())
        kept[server_round] = kept_by(strategy)
        own[server_round] = {client: read_record(model) for client, model in saved_models(strategy.run_id).items()}

    strategy = FedALA(head_layers=head_layers, ala_learning_rate=50.0)
    run(strategy, on_round=note)
    mixed = HEAD if head_layers == 1 else ["1.weight", "1.bias", *HEAD]
    for client in range(CLIENTS):
        weights, local = kept[3][client]["weights"], kept[2][client]["local"]
        assert sorted(weights) == sorted(mixed)
        assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
        for name, array in own[3][client].items():
            if name in mixed:  # parameters alone: statistics are the received model's
                expected = local[name] + (sent[2][name] - local[name]) * weights[name]
                assert array == pytest.approx(expected, abs=1e-6)
                assert ((weights[name] >= 0) & (weights[name] <= 1)).all()
            else:
                assert array.tobytes() == sent[2][name].tobytes()
        assert any((array < 0.99).any() for array in weights.values())
        # The weights continue from those of the last round.
        assert any((weights[name] != kept[2][client]["weights"][name]).any() for name in mixed)


def test_the_evaluated_and_stored_model_is_the_one_before_local_training() -> None:
    stored = {}
    strategy = FedALA(ala_learning_rate=50.0)
    run(strategy, on_round=lambda r: stored.update({r: saved_models(strategy.run_id)}))
    assert strategy.client_models() == {}
    assert [line["personal"] for line in strategy.history.rounds] == ["between"] * 4
    rows = {(row["round"], row["client"]): row for row in strategy.history.rows}
    for client, model in stored[3].items():
        loaded = network()
        set_arrays(loaded, read_record(model))
        test = load_site(SimpleNamespace(node_config={"partition-id": client})).test
        row = rows[3, client]
        assert evaluate(loaded, *test) == (row["between-accuracy"], row["between-loss"])
        assert row["personal-loss"] == row["between-loss"]
        assert len({row["received-loss"], row["between-loss"], row["trained-loss"]}) == 3
        first = rows[1, client]  # there is no local model yet to mix with the received one
        assert first["between-loss"] == first["received-loss"] and "ala-weight" not in first
        set_arrays(loaded, read_record(stored[4][client]))
        assert evaluate(loaded, *test) == (rows[4, client]["personal-accuracy"], rows[4, client]["personal-loss"])


def test_the_last_result_is_the_start_of_a_further_round() -> None:
    sent = {}
    three, four = FedALA(ala_learning_rate=50.0), FedALA(ala_learning_rate=50.0)
    run(three, 3)
    run(four, 4, on_round=lambda r: sent.update({r: values(four.global_arrays())}))
    assert values(three.global_arrays()) == sent[3] != sent[2]
    closing = {row["client"]: row["personal-loss"] for row in three.history.rows if row["round"] == 4}
    before = {row["client"]: row["between-loss"] for row in three.history.rows if row["round"] == 3}
    further = {row["client"]: row["between-loss"] for row in four.history.rows if row["round"] == 4}
    assert closing == further and all(closing[client] != before[client] for client in range(CLIENTS))
    assert three.history.rounds[-1]["accuracy"] == four.history.rounds[-2]["accuracy"]


def test_an_absent_client_mixes_with_its_last_model_when_it_returns() -> None:
    kept, sent, stored = {}, {}, {}
    grid = FaultyGrid(app, CLIENTS, lambda r, c: "error" if (r, c) == (2, 0) else "ok")
    strategy = FedALA(ala_learning_rate=50.0)

    def note(server_round: int) -> None:
        kept[server_round], sent[server_round] = kept_by(strategy)[0], read_record(strategy.global_arrays())
        stored[server_round] = read_record(saved_models(strategy.run_id)[0])

    run(strategy, grid=grid, on_round=note)
    assert "weights" not in kept[2] and kept[1]["local"]["3.bias"].tobytes() == kept[2]["local"]["3.bias"].tobytes()
    for name in HEAD:
        local, weights = kept[1]["local"][name], kept[3]["weights"][name]
        assert stored[3][name] == pytest.approx(local + (sent[2][name] - local) * weights, abs=1e-6)


def test_weights_are_learned_until_convergence_and_then_for_one_epoch_a_round() -> None:
    rows = run(FedALA(ala_share=0.4), 4, **{"local-epochs": 3}).history.rows
    worked = {r: {row["samples-trained"] for row in rows if row["round"] == r} for r in (1, 2, 3, 4, 5)}
    assert worked[5] == {8}  # the closing evaluation
    assert worked[1] == {60} and worked[3] == worked[4] == {60 + 8}
    assert all(60 + 11 * 8 <= samples <= 60 + 100 * 8 and (samples - 60) % 8 == 0 for samples in worked[2])
    assert {row["samples-predicted"] for row in rows} == {0}


def test_an_unsampled_client_is_evaluated_with_the_global_model() -> None:
    half = {"fraction_train": 0.5, "min_train_nodes": 1}
    fedala, fedavg = run(FedALA(**half), 1), run(FedAvg(**half), 1)
    drawn = {row["client"] for row in fedala.history.rows if row["round"] == 1}
    closing, expected = (
        {row["client"]: row["personal-loss"] for row in strategy.history.rows if row["round"] == 2}
        for strategy in (fedala, fedavg)
    )
    assert len(drawn) == 2 and set(closing) == set(expected) == set(range(CLIENTS))
    assert {client for client in closing if closing[client] == expected[client]} == set(range(CLIENTS)) - drawn


def test_a_separate_evaluation_uses_the_aggregated_model() -> None:
    grid = FaultyGrid(app, CLIENTS, lambda r, c: "error" if r == 3 else "ok")
    kept = {}
    strategy = FedALA(ala_learning_rate=50.0)
    run(strategy, 3, grid, on_round=lambda r: kept.update({r: str(kept_by(strategy))}))
    assert kept[2] == kept[3]
    evaluated = {row["client"]: row["personal-loss"] for row in strategy.history.rows if row["round"] == 3}
    whole = run(FedALA(ala_learning_rate=50.0))
    assert evaluated == {row["client"]: row["between-loss"] for row in whole.history.rows if row["round"] == 3}


class Exploding(FedALA):
    changed: dict[str, float]

    def round_config(self, server_round, client):
        return super().round_config(server_round, client) | (self.changed if server_round == 2 else {})


@pytest.mark.parametrize("changed", [DIVERGING, {"ala-learning-rate": float("nan")}])
def test_a_model_that_becomes_infinite_does_not_replace_the_last_finite_one(changed) -> None:
    kept = {}
    strategy = Exploding()
    strategy.changed = changed

    def note(server_round: int) -> None:
        kept[server_round] = {client: each["local"]["3.weight"].tobytes() for client, each in kept_by(strategy).items()}
        for model in saved_models(strategy.run_id).values():
            assert all(np.isfinite(array).all() for array in read_record(model).values())

    run(strategy, on_round=note)
    status = {r: {row["status"] for row in strategy.history.rows if row["round"] == r} for r in (1, 2, 3)}
    assert status == {
        1: {"ok"},
        3: {"ok"},
        2: {f"error 2: ValueError: {NOT_FINITE}"},
    }
    assert kept[1] == kept[2] != kept[3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_layers": 0}, "head_layers is 0, allowed: 1 to 1,000"),
        ({"ala_share": 0.0}, "ala_share is 0.0, allowed: more than 0, at most 1"),
        ({"ala_share": 1.1}, "ala_share is 1.1, allowed: more than 0, at most 1"),
        ({"ala_learning_rate": 0.0}, "ala_learning_rate is 0.0, allowed: more than 0"),
    ],
)
def test_an_invalid_setting_is_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedALA(**settings)


def test_a_network_with_mixed_layers_only_is_refused() -> None:
    with pytest.raises(ValueError, match="head_layers is 3, allowed: 1 to 2, because the model has 3 layers"):
        run(FedALA(head_layers=3))
