"""What every registered method promises, whatever it computes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from strategies import REGISTRY, InlineGrid, PersonalizedStrategy

from .plain import FaultyGrid, ShuffledGrid, initial, plain_app

CLIENTS = 6
ROUNDS = 4
OWN_SETTINGS = {
    "sigma": 2.0, "self_weight": 0.3, "alpha": 10.0, "alpha_decay": 0.5, "alpha_decay_every": 2, "lam": 1.0,
    "proximal_mu": 0.5, "finetune_epochs": 1,
}

every_method = pytest.mark.parametrize("name", REGISTRY)


def make(name: str, **settings) -> PersonalizedStrategy:
    method = REGISTRY[name]
    return method.strategy()(**{key: OWN_SETTINGS[key] for key in method.settings}, **settings)


def run(name: str, grid: InlineGrid | None = None, timeout: float = 60, **settings) -> PersonalizedStrategy:
    strategy = make(name, **settings)
    strategy.start(grid or InlineGrid(plain_app(), CLIENTS), initial(), ROUNDS, timeout)
    return strategy


def values(record: ArrayRecord) -> dict[str, bytes]:
    return {key: array.data for key, array in record.items()}


def everything(strategy: PersonalizedStrategy) -> tuple:
    """All that a run comes to, but for the seconds it took."""
    models = {client: values(record) for client, record in strategy.client_models().items()}
    clients, weights = strategy.collaboration()
    rows = [{key: row[key] for key in row if key != "seconds"} for row in strategy.history.rows]
    return models, clients, weights.tobytes(), rows


@every_method
def test_a_run_gives_every_client_a_model_like_the_initial_one(name) -> None:
    strategy = run(name)
    models = strategy.client_models()
    clients, weights = strategy.collaboration()
    assert len(models) == CLIENTS and list(models) == clients == sorted(clients)
    for record in models.values():
        assert {k: (a.dtype, tuple(a.shape)) for k, a in record.items()} == {
            k: (a.dtype, tuple(a.shape)) for k, a in initial().items()}
        assert all(np.isfinite(array.numpy()).all() for array in record.values())
    assert weights.shape == (CLIENTS, CLIENTS) and (weights >= 0).all()
    assert weights.sum(axis=1) == pytest.approx(1)


@every_method
def test_the_same_seed_gives_the_same_bits_and_another_draws_other_clients(name) -> None:
    half = {"fraction_train": 0.5}
    assert everything(run(name, seed=3, **half)) == everything(run(name, seed=3, **half))
    asked = [[row["client"] for row in run(name, seed=s, **half).history.rows if "train_loss" in row] for s in (3, 4)]
    assert asked[0] != asked[1]


@every_method
def test_the_order_of_replies_changes_no_bit(name) -> None:
    reference = everything(run(name))
    for seed in range(3):
        assert everything(run(name, ShuffledGrid(plain_app(), CLIENTS, seed))) == reference


@every_method
def test_an_ordinary_client_app_is_evaluated_by_flowers_own_exchange(name) -> None:
    strategy = run(name)
    last = [row for row in strategy.history.rows if row["round"] == ROUNDS]
    assert len(last) == CLIENTS  # one row per round and client, both exchanges together
    for row in last:
        assert row["status"] == "ok"
        assert {"train_loss", "eval_loss", "eval_acc", "personal-accuracy"} <= row.keys()
        assert row["num-test-examples"] == 5 and row["num-examples"] % 10 == 0
    line = strategy.history.rounds[-1]
    assert line["accuracy"] == pytest.approx(np.mean([row["eval_acc"] for row in last]))


@every_method
def test_clients_that_evaluate_while_they_train_are_not_asked_again(name) -> None:
    strategy = run(name, InlineGrid(plain_app(evaluates_in_training=True), CLIENTS))
    rounds = strategy.history.rounds
    closing = strategy.personal != "trained"  # the last global model is still to be evaluated
    assert [line["round"] for line in rounds] == list(range(1, ROUNDS + 1 + closing))
    assert all("eval_acc" not in row for row in strategy.history.rows if row["round"] <= ROUNDS)


@every_method
def test_clients_that_fail_do_not_hold_up_or_change_the_others(name) -> None:
    def fate(server_round: int, client: int) -> str:
        return {0: "error", 1: "silent"}.get(client, "ok") if server_round == 2 else "ok"

    strategy = run(name, FaultyGrid(plain_app(), CLIENTS, fate), timeout=0.2)
    rows = {(row["round"], row["client"] - 1001): row for row in strategy.history.rows}
    assert rows[2, 0]["status"] == "error 0: the worker"
    assert rows[2, 1]["status"] == "no answer within 0.2 s"
    assert all(row["status"] == "ok" for (r, c), row in rows.items() if r != 2 or c > 1)
    assert [line["answered"] for line in strategy.history.rounds[:ROUNDS]] == [6, 4, 6, 6]
    assert strategy.history.rounds[1]["asked"] == 6


@every_method
def test_a_round_without_any_answer_changes_nothing(name) -> None:
    def without_round_3(server_round: int, client: int) -> str:
        return "error" if server_round == 3 else "ok"

    seen = []
    strategy = make(name)
    strategy.start(
        FaultyGrid(plain_app(), CLIENTS, without_round_3), initial(), ROUNDS,
        on_round=lambda r: seen.append({c: values(m) for c, m in strategy.client_models().items()}))
    assert seen[1] == seen[2] != seen[3]
    assert strategy.history.rounds[2]["answered"] == 0


def _nothing(content) -> None:
    content.clear()


def _nan(content) -> None:
    content["arrays"]["layer.weight"] = Array(np.array([[1, np.nan], [0, 0]], np.float32))


def _shape(content) -> None:
    content["arrays"]["layer.weight"] = Array(np.zeros((2, 3), np.float32))


def _double(content) -> None:
    content["arrays"]["layer.weight"] = Array(np.zeros((2, 2)))


def _missing(content) -> None:
    del content["arrays"]["layer.weight"]


def _extra(content) -> None:
    content["arrays"]["backdoor"] = Array(np.zeros(1))


def _giant(content) -> None:
    small = np.lib.format.header_data_from_array_1_0(np.zeros((2, 2), np.float32)) | {"shape": (2**40, 2**20)}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, small)
    content["arrays"]["layer.weight"] = Array("float32", (2**40, 2**20), "numpy.ndarray", header.getvalue() + b"1234")


def _no_examples(content) -> None:
    content["metrics"]["num-examples"] = 0


@every_method
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_nothing, "refused: it has 0 metric records, expected 1"),
        (_nan, "refused: array 'layer.weight' has values that are not finite"),
        (_shape, "refused: array 'layer.weight' is float32 (2, 3), expected float32 (2, 2)"),
        (_double, "refused: array 'layer.weight' is float64 (2, 2), expected float32 (2, 2)"),
        (_missing, "refused: array 'layer.weight' is missing"),
        (_extra, "refused: array 'backdoor' is not part of the model"),
        (_giant, f"refused: array 'layer.weight' declares {2**62} bytes but carries 4"),
        (_no_examples, "refused: num-examples is 0, allowed: 1 to 1000000000000"),
    ],
)
def test_a_bad_reply_counts_like_no_reply_and_says_why(name, damage, reason) -> None:
    def damaged(server_round: int, client: int) -> object:
        return damage if (server_round, client) == (2, 3) else "ok"

    def lost(server_round: int, client: int) -> object:
        return "error" if (server_round, client) == (2, 3) else "ok"

    bad = run(name, FaultyGrid(plain_app(), CLIENTS, damaged))
    absent = run(name, FaultyGrid(plain_app(), CLIENTS, lost))
    assert everything(bad)[:3] == everything(absent)[:3]
    (row,) = [row for row in bad.history.rows if row["status"] != "ok"]
    assert (row["round"], row["client"], row["status"]) == (2, 1004, reason)


@every_method
def test_messages_share_nothing_that_one_client_could_change_for_another(name) -> None:
    app = plain_app()
    train = app._registered_funcs["train.default"]

    def greedy(message, context):
        reply = train(message, context)
        message.content["arrays"].clear()
        message.content["config"].clear()
        return reply

    app._registered_funcs["train.default"] = greedy
    assert everything(run(name, InlineGrid(app, CLIENTS))) == everything(run(name))
