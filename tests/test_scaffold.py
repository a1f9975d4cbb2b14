"""SCAFFOLD: its updates on small numbers that can be checked by hand, and rounds with real ClientApps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from kindred import SCAFFOLD, FedAvg, InlineGrid, Site, make_client_app
from kindred.baselines.scaffold import SCAFFOLDClient, control_variate, correction, server_control, server_step
from kindred.client.local_training import LocalTraining
from kindred.client.state import ClientState
from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.messages import read_record, to_record, with_prefix

from .client_apps import small, small_app, small_site
from .grids import FaultyGrid
from .test_client import CLIENTS, SETTINGS, app, load_site, network
from .test_conformance import everything, values

# --- The mathematics ----------------------------------------------------------------------------------


def test_the_update_functions_by_hand() -> None:
    own, control = np.array([0.5, 2.0]), np.array([0.25, 0.0])
    assert correction(own, control).tolist() == [-0.25, -2.0]
    # 3 steps of 0.1 from 1 to 0.4, and from 0 to 0.3: mean steps of gradients 2 and -1, c - c_i in them
    new = control_variate(own, control, np.array([1.0, 0.0]), np.array([0.4, 0.3]), 3, 0.1)
    assert new == pytest.approx([0.5 - 0.25 + 2, 2.0 - 0.0 - 1])
    assert server_step(np.array([1.0, 2.0]), np.array([3.0, 2.5]), 0.5).tolist() == [2.0, 2.25]
    # (1 * 1 + 3 * 2) / 4 = 1.75 over the clients that replied, 2 of 4 clients
    assert server_control(np.array([7.0]), [1, 3], 4).tolist() == [0.875]
    assert server_control(np.array([7.0]), [1, 3], 2).tolist() == [1.75]
    assert server_control(np.array([0.0]), [], 4).tolist() == [0.0]


def test_a_server_step_of_1_is_the_mean_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    sent, mean = rng.standard_normal((2, 1000)).astype(np.float32)
    assert server_step(sent, mean, 1.0).tobytes() == mean.tobytes()
    assert (sent + 1.0 * (mean - sent)).tobytes() != mean.tobytes()


# --- Rounds by hand -----------------------------------------------------------------------------------
# Two clients of 1 and 3 samples, all with x = 1; those of client 0 are of class 0, those of client 1 of class 1. The
# weights of the classes are u and -u, the probability of class 0 is p = 1 / (1 + e^(-2u)), and the gradients in u are
# p - 1 at client 0, and p at client 1.

SIZES = (1, 3)
SGD = {"optimizer": "sgd"}
HAND = {"local-epochs": 2, "batch-size": 10, "optimizer": "adam", "learning-rate": 5.0, "momentum": 0.9}


def two_weights() -> torch.nn.Module:
    model = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def hand_site(context) -> Site:
    client = context.node_config["partition-id"]
    samples = torch.ones(SIZES[client], 1), torch.full((SIZES[client],), client)
    return Site(two_weights, samples, samples)


def gradient(client: int, u: float) -> float:
    return 1 / (1 + math.exp(-2 * u)) - (1 - client)


def by_hand(rounds: int, eta_l: float, eta_g: float) -> tuple[float, list[float]]:
    """Return x after these rounds, and the c of each round's messages."""
    x, own, sent = 0.0, [0.0, 0.0], []
    for _ in range(rounds):
        control = (own[0] + 3 * own[1]) / 4
        sent.append(control)
        trained = []
        for client in range(2):
            y, gradients = x, []
            for _ in range(2):
                gradients.append(gradient(client, y))
                y -= eta_l * (gradients[-1] - own[client] + control)
            trained.append(y)
            own[client] = sum(gradients) / 2  # the result of option II
        x += eta_g * ((trained[0] + 3 * trained[1]) / 4 - x)
    return x, sent


def with_callback(inner, callback: Callable[[Message, Message], Any]):
    """Return a ClientApp that passes each training message and its reply to `callback`."""
    train = inner._registered_funcs["train.default"]

    def shown(message, context):
        reply = train(message, context)
        callback(message, reply)
        return reply

    inner._registered_funcs["train.default"] = shown
    return inner


@pytest.mark.parametrize("eta_g", [1.0, 0.5])
def test_three_rounds_by_hand(eta_g) -> None:
    controls = []

    def record(message: Message, reply: Message) -> None:
        arrays = message.content["arrays"]
        controls.append(arrays["control/weight"].numpy().ravel().tolist())
        change, trained = reply.content["arrays"]["control/weight"].numpy(), reply.content["arrays"]["weight"].numpy()
        moved = (arrays["weight"].numpy() - trained) / (2 * 0.2)  # the mean of two corrected gradients
        assert change == pytest.approx(moved - arrays["control/weight"].numpy(), abs=1e-6)

    strategy = SCAFFOLD(sgd_learning_rate=0.2, server_learning_rate=eta_g)
    config = ConfigRecord(HAND)
    strategy.start(
        InlineGrid(with_callback(make_client_app(hand_site), record), 2),
        to_record(get_arrays(two_weights())),
        3,
        60,
        config,
        config,
    )
    x, sent = by_hand(3, 0.2, eta_g)
    assert strategy.global_arrays()["weight"].numpy().ravel() == pytest.approx([x, -x])
    for server_round, control in enumerate(sent):
        for seen in controls[2 * server_round : 2 * server_round + 2]:
            assert seen == pytest.approx([control, -control], abs=1e-6)


def test_clients_that_have_not_replied_count_with_control_variate_0() -> None:
    sent = {}

    def record(message: Message, _: Message) -> None:
        sent[int(message.metadata.group_id)] = float(message.content["arrays"]["control/weight"].numpy()[0, 0])

    def fate(server_round: int, client: int) -> str:
        return "error" if (server_round, client) in ((1, 1), (2, 0)) else "ok"

    strategy = SCAFFOLD(sgd_learning_rate=0.1)
    config = ConfigRecord({"local-epochs": 1, "batch-size": 10})
    strategy.start(
        FaultyGrid(with_callback(make_client_app(hand_site), record), 2, fate),
        to_record(get_arrays(two_weights())),
        3,
        60,
        config,
        config,
    )
    # Round 1: client 0 alone, c_0 = -0.5, 1 of 2 clients. Its model is the global one: u = 0.05. Round 2: client 1
    # alone, c_1 = p = 1 / (1 + e^-0.1).
    assert sent[1] == 0
    assert sent[2] == pytest.approx(-0.25)
    assert sent[3] == pytest.approx((1 * -0.5 + 3 * 0.5249792) / 4)


# --- Identities ---------------------------------------------------------------------------------------


def run(strategy, rounds: int = 3, grid: InlineGrid | None = None, **settings):
    config = ConfigRecord({**SETTINGS, "learning-rate": 0.05, **settings})
    strategy.start(grid or InlineGrid(app, CLIENTS), to_record(get_arrays(network())), rounds, 60, config, config)
    return strategy


@pytest.mark.parametrize("how", [{"local-epochs": 2}, {"local-epochs": 0, "local-steps": 7}])
def test_the_first_round_with_control_variates_0_equals_fedavg(how) -> None:
    grid = [InlineGrid(small_app(), 4) for _ in range(2)]  # clients of 10 to 40 samples
    initial, config = (
        to_record(get_arrays(small())),
        ConfigRecord({**SGD, "learning-rate": 0.05, "batch-size": 4, **how}),
    )
    scaffold, fedavg = SCAFFOLD(sgd_learning_rate=0.05), FedAvg()
    for strategy, each in zip((scaffold, fedavg), grid):
        strategy.start(each, initial, 1, 60, config, config)
    assert values(scaffold.global_arrays()) == values(fedavg.global_arrays()) != values(initial)


def test_control_variates_reduce_the_drift_in_later_rounds() -> None:
    def drift(strategy) -> float:
        """Distance between the models that clients with conflicting data train from the same model."""
        ends: list[np.ndarray] = []
        inner = with_callback(
            make_client_app(hand_site), lambda _, reply: ends.append(reply.content["arrays"]["weight"].numpy())
        )
        config = ConfigRecord({**SGD, "local-epochs": 5, "learning-rate": 0.2, "batch-size": 32})
        strategy.start(InlineGrid(inner, 2), to_record(get_arrays(two_weights())), 4, 60, config, config)
        return float(np.abs(ends[-1] - ends[-2]).max())

    assert drift(SCAFFOLD(sgd_learning_rate=0.2)) < 0.2 * drift(FedAvg())


def visit_of(folder, arrays, **config) -> Visit:
    site = small_site(2)
    return Visit(
        2,
        site,
        {**SGD, "server-round": 5, "batch-size": 4, "local-epochs": 2, **config},
        arrays,
        torch.device("cpu"),
        ClientState(1, 2, folder, server_round=5, before=5),
        {},
    )


def a_control(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(parameter.shape).astype(np.float32) for name, parameter in small().named_parameters()
    }


def keep(folder, now, before) -> None:
    ClientState(1, 2, folder, server_round=3).save(
        "control", {**with_prefix("now", now), **with_prefix("before", before), "server-round": np.array(3)}
    )


def test_with_equal_control_variates_a_client_trains_as_in_fedavg(tmp_path) -> None:
    model, control = get_arrays(small()), a_control(1)
    keep(tmp_path, control, a_control(2))
    config = {"method": "scaffold", "sgd-learning-rate": 0.05, "counted-round": 3}
    reply = SCAFFOLDClient.train(visit_of(tmp_path, model | with_prefix("control", control), **config))
    plain = LocalTraining.train(visit_of(tmp_path, model, method="fedavg", **{"learning-rate": 0.05}))
    assert {name: reply["arrays"][name].data for name in model} == values(plain["arrays"])
    assert reply["metrics"]["train-loss"] == plain["metrics"]["train-loss"]
    assert reply["metrics"]["trained-loss"] == plain["metrics"]["trained-loss"]


@pytest.mark.parametrize(("counted", "expected"), [(3, "now"), (2, "before"), (0, "nothing")])
def test_a_client_continues_from_the_control_variate_that_the_server_accepted(tmp_path, counted, expected) -> None:
    now, before, control = a_control(1), a_control(2), a_control(3)
    own = {"now": now, "before": before, "nothing": {name: np.zeros_like(now[name]) for name in now}}[expected]
    keep(tmp_path, now, before)
    model, step_size = get_arrays(small()), 0.01
    config = {"method": "scaffold", "sgd-learning-rate": step_size, "counted-round": counted}
    arrays = read_record(
        SCAFFOLDClient.train(visit_of(tmp_path, model | with_prefix("control", control), **config))["arrays"]
    )
    num_steps = 2 * 8  # 30 samples in batches of 4
    for name in control:
        new = own[name] - control[name] + (model[name] - arrays[name]) / (num_steps * step_size)
        assert arrays[f"control/{name}"] == pytest.approx(new - own[name], abs=1e-4)
    kept = ClientState(1, 2, tmp_path).load("control")
    assert all(kept[f"before/{name}"].tobytes() == np.asarray(own[name]).tobytes() for name in own)


def test_a_lost_reply_has_the_effect_of_a_client_not_sampled() -> None:
    def with_fate(what: str) -> tuple:
        fates = {(1, 2): what, (2, 2): what, (3, 0): what}
        return everything(
            run(SCAFFOLD(sgd_learning_rate=0.05), 5, FaultyGrid(app, CLIENTS, lambda r, c: fates.get((r, c), "ok")))
        )

    assert with_fate("lost") == with_fate("error")


# --- Hyperparameters, evaluation, accounting ----------------------------------------------------------


def test_every_hyperparameter_changes_the_result() -> None:
    found = [
        values(run(SCAFFOLD(**settings)).global_arrays())
        for settings in (
            {"sgd_learning_rate": 0.05},
            {"sgd_learning_rate": 0.06},
            {"sgd_learning_rate": 0.05, "server_learning_rate": 0.9},
        )
    ]
    assert all(a != b for a, b in zip(found, found[1:] + found[:1]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sgd_learning_rate", 0),
        ("server_learning_rate", -1.0),
        ("sgd_learning_rate", math.inf),
        ("server_learning_rate", math.nan),
    ],
)
def test_out_of_range_arguments_are_named(name, value) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*more than 0"):
        SCAFFOLD(**{"sgd_learning_rate": 0.1, name: value})


def test_buffers_are_averaged_for_every_server_step_size() -> None:
    far, fedavg = (
        read_record(run(strategy, 1).global_arrays())
        for strategy in (SCAFFOLD(sgd_learning_rate=0.05, server_learning_rate=3.0), FedAvg())
    )
    initial = get_arrays(network())
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert far[name].tobytes() == fedavg[name].tobytes()
    assert far["0.weight"] - initial["0.weight"] == pytest.approx(
        3 * (fedavg["0.weight"] - initial["0.weight"]), abs=1e-6
    )


def test_the_result_is_the_global_model_evaluated_as_received() -> None:
    strategy = run(SCAFFOLD(sgd_learning_rate=0.05))
    assert strategy.history.rounds[-1]["personal"] == "received" and strategy.history.rounds[-1]["round"] == 4
    for row in strategy.history.rows:
        if row["round"] <= 3:
            assert row["personal-accuracy"] == row["received-accuracy"]
            assert (row["samples-trained"], row["samples-predicted"]) == (2 * 20, 0)
    models = strategy.client_models()
    assert all(values(model) == values(strategy.global_arrays()) for model in models.values())
    assert set(strategy.global_arrays()) == set(get_arrays(network()))


def test_the_control_variate_costs_as_many_bytes_as_the_parameters_both_ways() -> None:
    scaffold, fedavg = (run(strategy, 1).history.rounds[0] for strategy in (SCAFFOLD(sgd_learning_rate=0.05), FedAvg()))
    names = [name for name, _ in network().named_parameters()]
    control = sum(len(array.data) for name, array in to_record(get_arrays(network())).items() if name in names)
    for way in ("bytes-down", "bytes-up"):
        assert CLIENTS * control <= scaffold[way] - fedavg[way] <= CLIENTS * (control + 300)  # names and settings


# --- Replies ------------------------------------------------------------------------------------------

CHANGE = "control/0.weight"


def _without(record: ArrayRecord) -> None:
    del record[CHANGE]


def _turned(record: ArrayRecord) -> None:
    record[CHANGE] = Array(np.ascontiguousarray(record[CHANGE].numpy().T))


def _nan(record: ArrayRecord) -> None:
    record[CHANGE] = Array(np.full((8, 3), np.nan, np.float32))


def _of_a_buffer(record: ArrayRecord) -> None:
    record["control/1.running_mean"] = Array(np.zeros(8, np.float32))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_without, f"array '{CHANGE}' is missing"),
        (_turned, f"array '{CHANGE}' is float32 (3, 8), expected float32 (8, 3)"),
        (_nan, f"array '{CHANGE}' has values that are not finite: did training diverge?"),
        (_of_a_buffer, "array 'control/1.running_mean' is not part of the model"),
    ],
)
def test_a_bad_control_variate_counts_as_a_missing_reply(damage, reason) -> None:
    def with_fate(fate: object):
        return run(
            SCAFFOLD(sgd_learning_rate=0.05),
            4,
            FaultyGrid(app, CLIENTS, lambda r, c: fate if (r, c) == (2, 1) else "ok"),
        )

    damaged = with_fate(lambda content: damage(content["arrays"]))
    (status,) = [row["status"] for row in damaged.history.rows if row["status"] != "ok"]
    assert status == f"refused: {reason}"
    models = values(damaged.global_arrays())
    assert models == values(with_fate("error").global_arrays())


def test_the_bound_on_updates_covers_control_variates_and_refuses_no_honest_client() -> None:
    sizes = []

    def record(message: Message, reply: Message) -> None:
        sent, found = message.content["arrays"], reply.content["arrays"]
        sizes.append(
            math.sqrt(
                sum(
                    float(np.square(found[name].numpy() - sent[name].numpy()).sum())
                    for name, _ in network().named_parameters()
                )
            )
        )

    run(SCAFFOLD(sgd_learning_rate=0.05), 3, InlineGrid(with_callback(make_client_app(load_site), record), CLIENTS))
    bound = 1.001 * max(sizes)

    def shift(content) -> None:
        content["arrays"][CHANGE] = Array(content["arrays"][CHANGE].numpy() + np.float32(bound / 0.05))

    strategy = run(
        SCAFFOLD(sgd_learning_rate=0.05, max_update_norm=bound),
        3,
        FaultyGrid(app, CLIENTS, lambda r, c: shift if (r, c) == (3, 1) else "ok"),
    )
    refused = [(row["round"], row["client"]) for row in strategy.history.rows if row["status"] != "ok"]
    assert refused == [(3, 1)]
    assert "allowed: up to" in next(row["status"] for row in strategy.history.rows if row["status"] != "ok")
