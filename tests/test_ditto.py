"""Ditto: the personal step on small numbers that can be checked by hand, and rounds with real ClientApps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from kindred import Ditto, FedAvg, InlineGrid, Local, Site, make_client_app
from kindred.client.training import NOT_FINITE, get_arrays, set_arrays
from kindred.messages import read_record, to_record

from .client_apps import DIVERGING, saved_models
from .grids import FaultyGrid
from .scores import evaluate
from .test_client import CLIENTS, SETTINGS, app, load_site, network
from .test_conformance import values


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


def distance(strategy) -> float:
    """Distance of the personal models from the global one."""
    sent = strategy.global_arrays()["0.weight"].numpy()
    kept = [model["0.weight"].numpy() for model in saved_models(strategy.run_id).values()]
    return float(np.abs(np.stack(kept) - sent).mean())


def two_weights() -> torch.nn.Module:
    model = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def test_two_rounds_of_two_steps_by_hand() -> None:
    one = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
    same = make_client_app(lambda context: Site(two_weights, one, one))
    settings = {"local-epochs": 2, "batch-size": 1, "learning-rate": 0.1}
    found = {}

    def note(server_round: int) -> None:
        sent = strategy.global_arrays()["weight"].numpy()[0, 0]
        found[server_round] = sent, [model["weight"].numpy()[0, 0] for model in saved_models(strategy.run_id).values()]

    strategy = Ditto(ditto_lambda=2.0)
    run(strategy, 2, InlineGrid(same, 2), two_weights, note, **settings)
    # The weights of the two classes are w and -w, so the gradient of the loss in w is 1 / (1 + e^(-2w)) - 1: -0.5 at 0,
    # -0.475021 at 0.05. From there v alone is pulled back to 0, by 2 x 0.05.
    assert found[1][0] == pytest.approx(0.05 + 0.1 * 0.475021)
    assert found[1][1] == pytest.approx([0.05 + 0.1 * (0.475021 - 0.1)] * 2)
    # v from 0.087502, and w where it was, at 0.097502: first -0.456360 and a pull up of 2 x 0.01, to 0.135138; then
    # -0.432839 and a pull down of 2 x 0.037636.
    assert found[2][1] == pytest.approx([0.135138 + 0.1 * (0.432839 - 2 * 0.037636)] * 2, abs=1e-6)


def test_the_global_model_equals_fedavgs() -> None:
    half = {"fraction_train": 0.5, "seed": 2}
    ditto, fedavg = run(Ditto(ditto_lambda=3.0, **half), 4), run(FedAvg(**half), 4)
    assert values(ditto.global_arrays()) == values(fedavg.global_arrays())
    columns = ("client", "received-loss", "trained-loss", "train-loss")
    rows = [
        [[row.get(key) for key in columns] for row in strategy.history.rows if row["round"] <= 4]
        for strategy in (ditto, fedavg)
    ]
    assert rows[0] == rows[1]


def test_with_lambda_0_the_personal_models_equal_those_of_local_training() -> None:
    kept = {client: values(model) for client, model in saved_models(run(Ditto(ditto_lambda=0.0)).run_id).items()}
    local = run(Local())
    assert kept == {client: values(model) for client, model in local.client_models().items()}


def test_lambda_changes_the_personal_models_and_keeps_them_near_the_global_one() -> None:
    far, near, nearest = (distance(run(Ditto(ditto_lambda=each))) for each in (0.0, 0.3, 3.0))
    assert far > 1.1 * near and near > 1.1 * nearest > 0


def test_the_personal_model_is_evaluated_and_stored_and_not_sent() -> None:
    strategy = run(Ditto())
    assert strategy.client_models() == {}
    kept = saved_models(strategy.run_id)
    last = {row["client"]: row for row in strategy.history.rows if row["round"] == 3}
    assert len(strategy.history.rounds) == 3 and strategy.history.rounds[-1]["personal"] == "own"
    for client, model in kept.items():
        loaded = network()
        set_arrays(loaded, read_record(model))
        site = load_site(SimpleNamespace(node_config={"partition-id": client}))
        assert evaluate(loaded, *site.test) == (last[client]["own-accuracy"], last[client]["own-loss"])
        assert last[client]["personal-accuracy"] == last[client]["own-accuracy"]
        assert values(model) != values(strategy.global_arrays())
    assert any(row["own-loss"] != row["trained-loss"] for row in last.values())


def test_an_absent_client_keeps_its_model_and_a_late_one_begins_with_the_global_model() -> None:
    kept = {}
    grid = FaultyGrid(app, CLIENTS, lambda r, c: "error" if (r, c) in ((1, 3), (2, 0)) else "ok")
    strategy = Ditto(ditto_lambda=0.0)  # so that the models differ only by their start
    run(strategy, 3, grid, on_round=lambda r: kept.update({r: saved_models(strategy.run_id)}))
    assert list(kept[1]) == [0, 1, 2] and list(kept[2]) == [0, 1, 2, 3]
    assert values(kept[1][0]) == values(kept[2][0]) != values(kept[3][0])
    second = {row["client"]: row for row in strategy.history.rows if row["round"] == 2}
    assert second[3]["own-loss"] == second[3]["trained-loss"]
    assert second[1]["own-loss"] != second[1]["trained-loss"]


def test_an_unsampled_client_is_evaluated_with_the_global_model() -> None:
    strategy = run(Ditto(fraction_train=0.5, min_train_nodes=1), 1)
    drawn = {row["client"] for row in strategy.history.rows if row["round"] == 1}
    closing = {row["client"]: row for row in strategy.history.rows if row["round"] == 2}
    assert len(drawn) == 2 and set(closing) == set(range(CLIENTS)) - drawn == set(range(CLIENTS)) - set(
        saved_models(strategy.run_id)
    )
    fedavg = run(FedAvg(fraction_train=0.5, min_train_nodes=1), 1)
    expected = {row["client"]: row["loss"] for row in fedavg.history.rows if row["round"] == 2}
    assert all(row["personal-loss"] == expected[client] for client, row in closing.items())


@pytest.mark.parametrize(
    ("settings", "samples"), [({"local-epochs": 3}, 2 * 3 * 20), ({"local-epochs": 0, "local-steps": 7}, 2 * 7 * 4)]
)
def test_the_work_on_both_models_is_counted(settings, samples) -> None:
    rows = run(Ditto(), 2, **settings).history.rows
    assert {row["samples-trained"] for row in rows} == {samples}
    assert {row["samples-predicted"] for row in rows} == {0}


class Exploding(Ditto):
    def round_config(self, server_round, client):
        return super().round_config(server_round, client) | (DIVERGING if server_round == 2 else {})


def test_a_personal_model_that_becomes_infinite_does_not_replace_the_last_finite_one() -> None:
    kept = {}
    strategy = Exploding()
    run(strategy, 3, on_round=lambda r: kept.update({r: [values(m) for m in saved_models(strategy.run_id).values()]}))
    status = {r: {row["status"] for row in strategy.history.rows if row["round"] == r} for r in (1, 2, 3)}
    assert status == {
        1: {"ok"},
        3: {"ok"},
        2: {f"error 2: ValueError: {NOT_FINITE}"},
    }
    assert kept[1] == kept[2] != kept[3]


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_an_invalid_lambda_is_named(value) -> None:
    with pytest.raises(ValueError, match="ditto_lambda is .*, allowed: 0 to 1,000,000"):
        Ditto(ditto_lambda=value)
