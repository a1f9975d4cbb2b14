"""APFL: its updates on small numbers that can be checked by hand, and rounds with real ClientApps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord
from safetensors.numpy import load_file

from kindred import APFL, FedAvg, InlineGrid, Local, Site, make_client_app
from kindred.baselines.apfl import adapted_share, descend_local, mix
from kindred.client.training import get_arrays, set_arrays
from kindred.messages import read_record, to_record

from .client_apps import saved_models
from .grids import FaultyGrid
from .scores import evaluate
from .test_client import CLIENTS, SETTINGS, app, load_site, network
from .test_conformance import values

# --- The mathematics ----------------------------------------------------------------------------------


def tensors(*numbers: float) -> list[torch.Tensor]:
    return [torch.tensor([number]) for number in numbers]


def test_the_updates_by_hand() -> None:
    w, v, share = tensors(1.0, 2.0), tensors(3.0, -2.0), torch.tensor(0.25)
    personal = tensors(0.0, 0.0)
    mix(personal, w, v, share)
    assert torch.cat(personal).tolist() == [1.5, 1.0]
    # < v - w, g > = 2 * 0.5 - 4 * 1 = -3
    gradients = tensors(0.5, 1.0)
    assert float(adapted_share(share, w, v, gradients, 0.1)) == pytest.approx(0.25 + 0.3)
    assert float(adapted_share(share, w, v, gradients, 1.0)) == 1.0
    assert float(adapted_share(share, w, v, tensors(-0.5, -1.0), 1.0)) == 0.0
    descend_local(v, gradients, share, 0.4)
    assert torch.cat(v).tolist() == pytest.approx([3.0 - 0.4 * 0.25 * 0.5, -2.0 - 0.4 * 0.25 * 1.0])


@pytest.mark.parametrize(("share", "which"), [(0.0, 0), (1.0, 1)])
def test_a_share_of_0_or_1_gives_one_of_the_models_bit_for_bit(share, which) -> None:
    models = [list(torch.randn(2, 1000, generator=torch.Generator().manual_seed(seed))) for seed in (0, 1)]
    personal = [torch.zeros(1000), torch.zeros(1000)]
    mix(personal, *models, torch.tensor(share))
    assert all(torch.equal(a, b) for a, b in zip(personal, models[which]))


# --- Rounds by hand -----------------------------------------------------------------------------------
# Two clients with one sample each, x = 1, of class 0 at client 0 and class 1 at client 1. The weights of the classes
# are u and -u, and the gradients in u are p - 1 and p, p = 1 / (1 + e^(-2u)).


def two_weights() -> torch.nn.Module:
    model = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def hand_site(context) -> Site:
    samples = torch.ones(1, 1), torch.tensor([context.node_config["partition-id"]])
    return Site(two_weights, samples, samples)


def gradient(client: int, u: float) -> float:
    return 1 / (1 + math.exp(-2 * u)) - (1 - client)


def by_hand(rounds: int, share: float, eta: float, adapts: bool) -> tuple[list[float], list[float]]:
    """Return the personal models after `rounds` rounds of 3 steps, and the shares."""
    shared, v, shares, personal = 0.0, [0.0, 0.0], [share, share], [0.0, 0.0]
    for _ in range(rounds):
        w = [shared, shared]
        for i in range(2):
            for _ in range(3):
                v_bar = shares[i] * v[i] + (1 - shares[i]) * w[i]
                at_w, at_v_bar = gradient(i, w[i]), gradient(i, v_bar)
                slope = 2 * (v[i] - w[i]) * at_v_bar  # of two weights, u and -u
                w[i] -= eta * at_w
                v[i] -= eta * shares[i] * at_v_bar
                if adapts:
                    shares[i] = min(max(shares[i] - eta * slope, 0), 1)
            personal[i] = shares[i] * v[i] + (1 - shares[i]) * w[i]
        shared = sum(w) / 2
    return personal, shares


@pytest.mark.parametrize("adapts", [True, False])
def test_rounds_by_hand(adapts) -> None:
    strategy = APFL(sgd_learning_rate=0.5, mixing_weight=0.25, adapt_mixing=adapts)
    config = ConfigRecord({"local-epochs": 3, "batch-size": 1, "optimizer": "adam", "learning-rate": 7.0})
    strategy.start(
        InlineGrid(make_client_app(hand_site), 2), to_record(get_arrays(two_weights())), 3, 60, config, config
    )
    personal, shares = by_hand(3, 0.25, 0.5, adapts)
    found = saved_models(strategy.run_id)
    for client in range(2):
        u = personal[client]
        assert found[client]["weight"].numpy().ravel() == pytest.approx([u, -u], abs=1e-6)
    last = {row["client"]: row["mixing-weight"] for row in strategy.history.rows if row["round"] == 3}
    assert [last[0], last[1]] == pytest.approx(shares, abs=1e-6)
    assert (shares != [0.25, 0.25]) == adapts


# --- Identities ---------------------------------------------------------------------------------------


def run(strategy, rounds: int = 3, grid: InlineGrid | None = None, **settings):
    config = ConfigRecord(SETTINGS | settings)
    strategy.start(grid or InlineGrid(app, CLIENTS), to_record(get_arrays(network())), rounds, 60, config, config)
    return strategy


def apfl(mixing_weight: float = 0.5, adapt_mixing: bool = True, sgd_learning_rate: float = 0.1, **settings) -> APFL:
    return APFL(mixing_weight=mixing_weight, adapt_mixing=adapt_mixing, sgd_learning_rate=sgd_learning_rate, **settings)


def columns(strategy, *names: str) -> list[list]:
    return [[row[name] for name in names] for row in strategy.history.rows if 1 <= row["round"] <= 3]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_global_model_equals_fedavgs_for_every_share(share) -> None:
    half = {"fraction_train": 0.5, "seed": 2}
    mine, fedavg = run(apfl(share, **half)), run(FedAvg(**half))
    assert values(mine.global_arrays()) == values(fedavg.global_arrays())
    names = ("client", "received-loss", "trained-loss", "train-loss")
    assert columns(mine, *names) == columns(fedavg, *names)


@pytest.mark.parametrize("how", [{}, {"local-epochs": 0, "local-steps": 5}])
def test_with_share_0_the_personal_model_equals_fedavgs_trained_one(how) -> None:
    mine, fedavg = run(apfl(0.0, False), **how), run(FedAvg(), **how)
    assert columns(mine, "own-accuracy", "own-loss") == columns(fedavg, "trained-accuracy", "trained-loss")


@pytest.mark.parametrize("how", [{}, {"local-epochs": 0, "local-steps": 5}])
def test_with_share_1_the_personal_model_equals_that_of_local_training(how) -> None:
    mine, local = run(apfl(1.0, False), **how), None
    kept = {client: values(model) for client, model in saved_models(mine.run_id).items()}
    local = run(Local(), **how)
    assert kept == {client: values(model) for client, model in local.client_models().items()}
    assert columns(mine, "own-accuracy", "own-loss") == columns(local, "trained-accuracy", "trained-loss")


# --- Hyperparameters, evaluation, accounting ----------------------------------------------------------


def test_every_hyperparameter_changes_the_personal_models() -> None:
    def personal(*args) -> dict:
        return {client: values(model) for client, model in saved_models(run(apfl(*args)).run_id).items()}

    found = [personal(0.5, False), personal(0.6, False), personal(0.5, True), personal(0.5, False, 0.11)]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("sgd_learning_rate", 0.0, "more than 0"),
        ("mixing_weight", 1.1, "0 to 1"),
        ("mixing_weight", -0.1, "0 to 1"),
        ("adapt_mixing", "no", "true or false"),
    ],
)
def test_out_of_range_arguments_are_named(name, value, allowed) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*{allowed}"):
        apfl(**{name: value})


def test_the_personal_model_is_evaluated_and_stored_and_not_sent() -> None:
    strategy = run(apfl())
    assert strategy.client_models() == {}
    assert len(strategy.history.rounds) == 3 and strategy.history.rounds[-1]["personal"] == "own"
    grid = InlineGrid(app, CLIENTS)
    last = {row["client"]: row for row in strategy.history.rows if row["round"] == 3}
    for client, record in saved_models(strategy.run_id).items():
        model = network()
        set_arrays(model, read_record(record))
        test = load_site(grid._contexts[1001 + client]).test
        assert evaluate(model, *test) == (last[client]["own-accuracy"], last[client]["own-loss"])
        assert last[client]["personal-accuracy"] == last[client]["own-accuracy"]
    assert any(row["own-loss"] != row["trained-loss"] for row in last.values())


@pytest.mark.parametrize(
    ("how", "samples"),
    [
        ({"local-epochs": 2}, 2 * 20),
        ({"local-epochs": 0, "local-steps": 5}, 5 * 4),
    ],
)
def test_the_work_on_both_models_is_counted(how, samples) -> None:
    for row in run(apfl(), 1, **how).history.rows:
        assert (row["samples-trained"], row["samples-predicted"]) == (2 * samples, 0)


def test_collaboration_weights_follow_the_share() -> None:
    strategy = run(apfl(0.3, False), 2)
    clients, weights = strategy.collaboration()
    assert clients == list(range(CLIENTS))
    assert weights == pytest.approx(0.3 * np.eye(CLIENTS) + 0.7 * np.full((CLIENTS, CLIENTS), 1 / CLIENTS))
    adapted = run(apfl(0.3), 2)
    own = {row["client"]: row["mixing-weight"] for row in adapted.history.rows if row["round"] == 2}
    assert adapted.collaboration()[1].diagonal() == pytest.approx(
        [own[client] + (1 - own[client]) / CLIENTS for client in clients]
    )


# --- State of a client --------------------------------------------------------------------------------


def test_an_absent_client_keeps_its_model_and_a_late_one_begins_with_the_global_model() -> None:
    kept = {}
    grid = FaultyGrid(app, CLIENTS, lambda r, c: "error" if (r, c) in ((1, 3), (2, 0)) else "ok")
    strategy = apfl(1.0, False)  # so that personal and trained models differ only by their start
    config = ConfigRecord(SETTINGS)
    strategy.start(
        grid,
        to_record(get_arrays(network())),
        3,
        60,
        config,
        config,
        on_round=lambda r: kept.update({r: saved_models(strategy.run_id)}),
    )
    assert list(kept[1]) == [0, 1, 2] and list(kept[2]) == [0, 1, 2, 3]
    assert values(kept[1][0]) == values(kept[2][0]) != values(kept[3][0])
    rows = {(row["round"], row["client"]): row for row in strategy.history.rows}
    assert rows[2, 3]["own-loss"] == rows[2, 3]["trained-loss"]
    assert rows[3, 0]["own-loss"] != rows[3, 0]["trained-loss"]


def test_an_unsampled_client_is_evaluated_with_the_global_model() -> None:
    strategy = run(apfl(fraction_train=0.5), 1)
    drawn = {row["client"] for row in strategy.history.rows if row["round"] == 1}
    closing = {row["client"]: row for row in strategy.history.rows if row["round"] == 2}
    assert len(drawn) == 2 and set(closing) == set(range(CLIENTS)) - drawn
    model = network()
    set_arrays(model, read_record(strategy.global_arrays()))
    for client, row in closing.items():
        test = load_site(InlineGrid(app, CLIENTS)._contexts[1001 + client]).test
        assert (row["personal-accuracy"], row["personal-loss"]) == evaluate(model, *test)


def test_an_unsampled_site_keeps_the_last_global_model(tmp_path) -> None:
    grid = InlineGrid(app, CLIENTS)
    for node, context in grid._contexts.items():
        context.node_config["state-dir"] = str(tmp_path / str(node))
    config, kept = ConfigRecord(SETTINGS), {}

    def note(server_round: int) -> None:
        files = {client: next(tmp_path.glob(f"{1001 + client}/run-*/*/model.safetensors")) for client in range(CLIENTS)}
        kept[server_round] = {client: values(to_record(load_file(path))) for client, path in files.items()}

    strategy = apfl(fraction_train=0.5)
    strategy.start(grid, to_record(get_arrays(network())), 1, 60, config, config, on_round=note)
    drawn = {row["client"] for row in strategy.history.rows if row["round"] == 1}
    first, last = values(to_record(get_arrays(network()))), values(strategy.global_arrays())
    assert first != last
    for client in range(CLIENTS):
        if client in drawn:
            assert kept[1][client] == kept[2][client] not in (first, last)
        else:
            assert (kept[1][client], kept[2][client]) == (first, last)


def test_a_diverged_local_model_is_not_stored() -> None:
    kept = {}
    strategy = apfl(1.0, False)
    calls = []

    def diverging(message, context):
        calls.append(message)
        if int(message.metadata.group_id) == 2:
            message.content["config"]["sgd-learning-rate"] = 1e38
        return train(message, context)

    own = make_client_app(load_site)
    train = own._registered_funcs["train.default"]
    own._registered_funcs["train.default"] = diverging
    config = ConfigRecord(SETTINGS)
    strategy.start(
        InlineGrid(own, CLIENTS),
        to_record(get_arrays(network())),
        3,
        60,
        config,
        config,
        on_round=lambda r: kept.update({r: saved_models(strategy.run_id)}),
    )
    statuses = {row["status"] for row in strategy.history.rows if row["round"] == 2}
    (status,) = statuses
    assert "no longer finite" in status
    assert [values(model) for model in kept[1].values()] == [values(model) for model in kept[2].values()]
    assert all(np.isfinite(array).all() for model in kept[3].values() for array in read_record(model).values())


# --- Replies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [None, -0.01, 1.01, math.nan, [0.5]])
def test_an_out_of_range_share_is_refused(share) -> None:
    def damage(content) -> None:
        metrics = dict(content["metrics"])
        del metrics["mixing-weight"]
        content["metrics"] = MetricRecord(metrics | ({} if share is None else {"mixing-weight": share}))

    strategy = run(apfl(), 2, FaultyGrid(app, CLIENTS, lambda r, c: damage if (r, c) == (2, 1) else "ok"))
    (row,) = [row for row in strategy.history.rows if row["status"] != "ok"]
    assert (row["client"], row["status"]) == (1, f"refused: its mixing-weight is {share!r}, allowed: 0 to 1")
    lost = run(apfl(), 2, FaultyGrid(app, CLIENTS, lambda r, c: "error" if (r, c) == (2, 1) else "ok"))
    assert values(strategy.global_arrays()) == values(lost.global_arrays())
