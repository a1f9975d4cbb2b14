"""Properties that every registered method must have."""

from __future__ import annotations

import io
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from kindred import REGISTRY, InlineGrid, PersonalizedStrategy, TooFewClients
from kindred.client.training import get_arrays
from kindred.engine.checkpoint import Checkpoints, pack
from kindred.messages import AFTER_TRAINING, TRAIN_LOSS, to_record

from .client_apps import (
    POINTS,
    Plain,
    collaboration_app,
    initial,
    introduced,
    logits_app,
    models_in,
    plain_app,
    saved_models,
    small,
    small_app,
)
from .grids import FaultyGrid, ShuffledGrid

CLIENTS = 6
ROUNDS = 4
# Methods whose clients do more than train a model as FedProx's do: clients of another author, or ours.
APPS = {"perfed-ckt": logits_app, "federico": collaboration_app}
OWN_CLIENTS = [name for name, method in REGISTRY.items() if method.needs_our_client and name not in APPS]

every_method = pytest.mark.parametrize("name", REGISTRY)
where_models_travel = pytest.mark.parametrize("name", [name for name in REGISTRY if REGISTRY[name].models_travel])
# Methods whose replies have arrays of other names are covered by their own tests.
OTHER_ARRAYS = ("fedem",)
where_trained_models_travel = pytest.mark.parametrize(
    "name", [name for name in REGISTRY if name not in APPS and name not in OTHER_ARRAYS]
)
with_an_ordinary_client = pytest.mark.parametrize("name", [name for name in REGISTRY if name not in OWN_CLIENTS])
where_logits_travel = pytest.mark.parametrize("name", [name for name in REGISTRY if not REGISTRY[name].models_travel])


def trial_settings(name: str) -> dict[str, Any]:
    """Return values of a method's own settings for small models that train for seconds."""
    return {setting.name: setting.trial for setting in REGISTRY[name].settings}


def app_of(name: str, evaluates_in_training: bool = False) -> ClientApp:
    return APPS.get(name, small_app if name in OWN_CLIENTS else plain_app)(evaluates_in_training)


def initial_of(name: str) -> ArrayRecord:
    return to_record(get_arrays(small())) if name in OWN_CLIENTS else initial()


def make(name: str, network=Plain, images=POINTS, **settings) -> PersonalizedStrategy:
    """Create a method; the network and unlabelled images go to methods whose server uses them."""
    method = REGISTRY[name]
    own = trial_settings(name)
    if method.distils:
        own |= {"models": {"network": network}, "public": images, "device": "cpu"}
    return method.strategy(**(own | settings))


def run(name: str, grid: InlineGrid | None = None, timeout: float = 60, **settings) -> PersonalizedStrategy:
    strategy = make(name, **settings)
    strategy.start(grid or InlineGrid(app_of(name), CLIENTS), initial_of(name), ROUNDS, timeout)
    return strategy


def values(record: ArrayRecord) -> dict[str, bytes]:
    return {key: array.data for key, array in record.items()}


def everything(strategy: PersonalizedStrategy) -> tuple:
    """Return all results of a run except its seconds; call it before the next run begins."""
    kept = saved_models(strategy.run_id) if strategy.model_stays else {}
    models = {client: values(record) for client, record in {**strategy.client_models(), **kept}.items()}
    models["global"] = values(strategy.global_arrays())
    clients, weights = strategy.collaboration()
    rows = [{key: row[key] for key in row if key != "seconds"} for row in strategy.history.rows]
    return models, clients, weights.tobytes(), rows


@cache  # several tests compare with it
def undisturbed(name: str) -> tuple:
    return everything(run(name))


@where_models_travel
def test_a_run_gives_every_client_a_model_like_the_initial_one(name) -> None:
    strategy = run(name)
    models = saved_models(strategy.run_id) if strategy.model_stays else strategy.client_models()
    clients, weights = strategy.collaboration()
    assert clients == [1001 + i for i in range(CLIENTS)]
    assert list(models) == (list(range(CLIENTS)) if strategy.model_stays else clients)
    for record in (model for kept in models.values() for model in models_in(kept)):
        assert {k: (a.dtype, tuple(a.shape)) for k, a in record.items()} == {
            k: (a.dtype, tuple(a.shape)) for k, a in initial_of(name).items()
        }
        assert all(np.isfinite(array.numpy()).all() for array in record.values())
    assert weights.shape == (CLIENTS, CLIENTS) and (weights >= 0).all()
    assert weights.sum(axis=1) == pytest.approx(1)


@where_logits_travel
def test_with_private_models_no_model_reaches_the_server_and_clients_have_names(name) -> None:
    strategy = run(name)
    clients, weights = strategy.collaboration()
    assert strategy.client_models() == {} and clients == [1001 + i for i in range(CLIENTS)]
    assert weights.shape == (CLIENTS, CLIENTS) and (weights >= 0).all()
    assert weights.sum(axis=1) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "samples"), [("fedavg", (0, 0)), ("fedavg-ft", (1, 0)), ("per-fedavg", (1, 0)), ("hypcluster", (0, 2))]
)
def test_the_work_of_the_closing_evaluation_is_counted(name, samples) -> None:
    strategy = make(name)
    strategy.start(InlineGrid(small_app(), CLIENTS), to_record(get_arrays(small())), 1)
    sizes = {row["client"]: row["num-examples"] for row in strategy.history.rows if row["round"] == 1}
    closing = [row for row in strategy.history.rows if row["round"] == 2]
    assert len(closing) == CLIENTS
    for row in closing:  # each training sample once; or once for each of two models, without a gradient
        assert (row["samples-trained"], row["samples-predicted"]) == tuple(sizes[row["client"]] * n for n in samples)


@pytest.mark.parametrize("name", [name for name in REGISTRY if REGISTRY[name].needs_our_client])
@pytest.mark.parametrize("has_name", [False, True])
def test_an_ordinary_client_is_excluded_from_methods_it_does_not_support(name, has_name) -> None:
    app = plain_app()
    if has_name:

        @app.query("identity")
        def identity(message, context):
            return Message(RecordDict({"config": ConfigRecord({"client-id": context.node_id})}), reply_to=message)

    with pytest.raises(
        TooFewClients,
        match=re.escape(
            f"client 1001: its ClientApp does not support {REGISTRY[name].title}; use that of kindred.make_client_app"
        ),
    ):
        run(name, InlineGrid(app, CLIENTS))


@every_method
def test_nothing_of_a_client_that_does_not_share_its_model_reaches_others(name) -> None:
    private = 1001 + CLIENTS // 2
    app = introduced(app_of(name), lambda context: {"share-model": context.node_id != private})

    strategy = run(name, InlineGrid(app, CLIENTS))
    took_part = {row["client"] for row in strategy.history.rows if row["status"] == "ok"}
    if strategy.needs_shared_models:
        assert strategy.history.left_out == {private: f"its share-model is false, and {name} mixes all models"}
        assert took_part == {1001 + i for i in range(CLIENTS)} - {private}
    else:
        assert strategy.history.left_out == {}
        assert private in took_part
    clients, weights = strategy.collaboration()
    if REGISTRY[name].models_travel and private in clients:
        assert np.delete(weights, clients.index(private), axis=0)[:, clients.index(private)].tolist() == [0] * 5


@every_method
def test_settings_of_other_methods_are_refused(name) -> None:
    others = {setting.name: setting.trial for method in REGISTRY.values() for setting in method.settings}
    own = {*trial_settings(name), *(["objective"] if REGISTRY[name].distils else [])}  # there the clients' loss
    for setting in others.keys() - own:
        with pytest.raises(TypeError, match=f"argument '{setting}'"):
            make(name, **{setting: others[setting]})


@every_method
def test_the_same_seed_gives_the_same_bits_and_another_seed_samples_other_clients(name) -> None:
    first, again, other = (everything(run(name, seed=seed, fraction_train=0.5)) for seed in (3, 3, 4))
    assert first == again
    trained = {"train_loss", TRAIN_LOSS}
    asked = [[row["client"] for row in rows if row.keys() & trained] for *_, rows in (first, other)]
    assert asked[0] != asked[1]


class LastNode(InlineGrid):
    """A grid of which the last node alone is connected."""

    def get_node_ids(self) -> list[int]:
        return list(super().get_node_ids())[-1:]


@every_method
def test_a_newcomer_is_served_from_the_last_checkpoint_and_changes_nothing(name, tmp_path) -> None:
    strategy, checkpoints = make(name), Checkpoints(tmp_path)
    strategy.start(InlineGrid(app_of(name, True), CLIENTS), initial_of(name), ROUNDS, checkpoints=checkpoints)
    server, after = make(name), None
    which = strategy.newcomer_result or strategy.personal
    for _ in range(2):  # it is served from the same state again
        found = server.serve(LastNode(app_of(name, True), CLIENTS + 1), initial_of(name), checkpoints, ConfigRecord())
        ((client, numbers),) = found.items()
        assert client in (CLIENTS, 1001 + CLIENTS)
        assert 0 <= numbers.get(f"{which}-accuracy", numbers.get(f"{strategy.personal}-accuracy")) <= 1
        assert after in (None, numbers)
        after = numbers
    models = strategy.client_models()
    others = dict(server.client_models().items())  # computed together, like those of the run, or bits may differ
    # FedeRiCo's clients update each other's models, here those of the copy; the other two learn from the run's closing
    # evaluation, which is after its last checkpoint.
    if name not in ("federico", "per-fedavg", "hypcluster"):
        assert all(values(others[each]) == values(record) for each, record in models.items() if each in others)
    assert [path.name[:10] for path in sorted(tmp_path.iterdir())] == [f"round-{ROUNDS + k:04d}" for k in (-1, 0)]


class Leaving(InlineGrid):
    """A grid whose last node leaves after the first round."""

    round = 1

    def get_node_ids(self) -> list[int]:
        nodes = list(super().get_node_ids())
        return nodes[:-1] if self.round > 1 else nodes


@every_method
def test_a_client_that_has_left_keeps_its_model(name, tmp_path) -> None:
    """Also in a run that is resumed without it."""
    models = []
    for rounds in (ROUNDS, ROUNDS + 1):  # the second one continues the first
        strategy, grid = make(name), Leaving(app_of(name, True), CLIENTS)
        grid.round = 1 if rounds == ROUNDS else 2

        def on_round(server_round: int, grid=grid) -> None:
            grid.round = server_round + 1

        checkpoints = Checkpoints(tmp_path)
        strategy.start(grid, initial_of(name), rounds, on_round=on_round, checkpoints=checkpoints)
        models.append(len(strategy.client_models()))
    assert models == [0 if strategy.model_stays else CLIENTS] * 2


class WatchedCheckpoints(Checkpoints):
    """Checkpoints that compare the arrays being written with copies of them."""

    copied: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    begun = 0

    def begin(self, server_round, state) -> None:
        super().begin(server_round, state)
        self.begun += 1
        arrays: dict[str, np.ndarray] = {}
        pack(state, arrays)
        self.copied = tuple((array, array.copy()) for array in arrays.values())

    def release(self) -> None:
        self.compare()
        super().release()

    def finish(self) -> None:
        self.compare()
        super().finish()

    def compare(self) -> None:
        for array, copy in self.copied:
            np.testing.assert_array_equal(array, copy)
        self.copied = ()


@every_method
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_no_array_changes_while_its_checkpoint_is_written(name, share, tmp_path) -> None:
    for kept in ({}, {"store": "disk"}) if "store" in REGISTRY[name] else ({},):
        checkpoints = WatchedCheckpoints(tmp_path / f"{len(kept)}")
        strategy = make(name, fraction_train=share, **kept)
        strategy.start(InlineGrid(app_of(name), CLIENTS), initial_of(name), ROUNDS, checkpoints=checkpoints)
        assert checkpoints.begun >= ROUNDS and checkpoints.copied == ()


@every_method
def test_the_order_of_replies_changes_no_bit(name) -> None:
    for seed in range(3):
        assert everything(run(name, ShuffledGrid(app_of(name), CLIENTS, seed))) == undisturbed(name)


@with_an_ordinary_client
def test_an_ordinary_client_app_is_evaluated_in_flowers_own_exchange(name) -> None:
    strategy = run(name)
    last = [row for row in strategy.history.rows if row["round"] == ROUNDS]
    assert len(last) == CLIENTS  # one row per round and client, for both exchanges
    for row in last:
        assert row["status"] == "ok"
        assert {"train_loss", "eval_loss", "eval_acc", "personal-accuracy"} <= row.keys()
        assert row["num-test-examples"] == 5 and row["num-examples"] % 10 == 0
    line = strategy.history.rounds[-1]
    assert line["accuracy"] == pytest.approx(np.mean([row["eval_acc"] for row in last]))


@every_method
def test_clients_that_evaluate_while_they_train_are_not_asked_again(name) -> None:
    strategy = run(name, InlineGrid(app_of(name, evaluates_in_training=True), CLIENTS))
    rounds = strategy.history.rounds
    closing = strategy.personal not in AFTER_TRAINING  # the last global model is still to be evaluated
    assert [line["round"] for line in rounds] == list(range(strategy.first_round, ROUNDS + 1 + closing))
    assert all("eval_acc" not in row for row in strategy.history.rows if row["round"] <= ROUNDS)


def sampled(name: str) -> PersonalizedStrategy:
    """Run a method with 2 of its 6 clients in each round."""
    return run(name, InlineGrid(app_of(name, evaluates_in_training=True), CLIENTS), fraction_train=0.34, seed=1)


@every_method
def test_with_sampled_clients_every_mean_is_over_all_clients_from_before_the_first_round_on(name) -> None:
    strategy = sampled(name)
    everybody = [1001 + i for i in range(CLIENTS)]
    rows = {(row["round"], row["client"]): row for row in strategy.history.rows}
    assert all(row["status"] == "ok" and "evaluate-status" not in row for row in rows.values())
    lines = {line["round"]: line for line in strategy.history.rounds}
    assert list(lines)[: ROUNDS + 1] == list(range(ROUNDS + 1))
    last = {client: rows[0, client]["personal-accuracy"] for client in everybody}
    best = 0.0
    for number, line in lines.items():
        here = {client: row for (at, client), row in rows.items() if at == number}
        last |= {client: row["personal-accuracy"] for client, row in here.items()}
        best = max(best, line["accuracy"])
        assert line["evaluated"] == CLIENTS
        assert (line["accuracy"], line["accuracy-best"]) == (pytest.approx(np.mean(list(last.values()))), best)
        assert line["bytes-down"] == sum(row["bytes-down"] for row in here.values())
        assert line["bytes-up"] == sum(row["bytes-up"] for row in here.values())
    assert lines[0]["asked"] == lines[0]["answered"] == CLIENTS
    assert {lines[number]["asked"] for number in range(1, ROUNDS + 1)} == {2}


@every_method
def test_the_evaluation_before_the_first_round_changes_nothing_that_follows(name, monkeypatch) -> None:
    def results(strategy: PersonalizedStrategy) -> tuple:
        *others, rows = everything(strategy)
        return (
            *others,
            [row for row in rows if row["round"] >= 1],
            [line["round"] for line in strategy.history.rounds if line["round"] >= 1],
        )

    found = results(sampled(name))
    monkeypatch.setattr(PersonalizedStrategy, "_evaluates_before", lambda self: False)
    without = sampled(name)
    assert results(without) == found
    before = {row["client"] for row in without.history.rows if row["round"] == 0}
    assert len(before) == (2 if without.first_round == 0 else 0)


@every_method
def test_failed_clients_neither_delay_nor_change_the_others(name) -> None:
    def fate(server_round: int, client: int) -> str:
        return {0: "error", 1: "silent"}.get(client, "ok") if server_round == 2 else "ok"

    strategy = run(name, FaultyGrid(app_of(name), CLIENTS, fate), timeout=0.2)
    rows = {(row["round"], row["client"] - 1001): row for row in strategy.history.rows}
    assert rows[2, 0]["status"] == "error 0: the worker"
    assert rows[2, 1]["status"] == "no answer within 0.2 s"
    assert all(row["status"] == "ok" for (r, c), row in rows.items() if r != 2 or c > 1)
    lines = {line["round"]: line for line in strategy.history.rounds}
    assert [lines[r]["answered"] for r in range(1, ROUNDS + 1)] == [6, 4, 6, 6]
    assert lines[2]["asked"] == 6


@every_method
def test_a_round_without_replies_changes_nothing(name) -> None:
    def without_round_3(server_round: int, client: int) -> str:
        return "error" if server_round == 3 else "ok"

    def whole_state() -> dict[str, object]:
        arrays: dict[str, np.ndarray] = {}
        state = {key: (pack(value, arrays), len(arrays)) for key, value in strategy.state().items()}
        contents = [array.tobytes() for array in arrays.values()]
        starts = [0, *(end for _, end in state.values())]
        return {key: (packed, contents[start:end]) for (key, (packed, end)), start in zip(state.items(), starts)}

    seen, states = {}, {}
    strategy = make(name, fraction_evaluate=0)  # an evaluation may bring models that clients have tuned
    strategy.start(
        FaultyGrid(app_of(name), CLIENTS, without_round_3),
        initial_of(name),
        ROUNDS,
        on_round=lambda r: (seen.update({r: everything(strategy)[0]}), states.update({r: whole_state()})),
    )
    assert seen[2] == seen[3] != seen[4]
    reported = {
        "history",
        "_round",
        "_directory",
        "_sent",
        "_weights",
        "_tree",
        "_received",
        "_have_heads",
    }
    changed = [{key for key in states[r] if states[r][key] != states[r + 1][key]} for r in (2, 3)]
    assert changed[0] <= reported and not changed[1] <= reported
    assert next(line for line in strategy.history.rounds if line["round"] == 3)["answered"] == 0


def _nothing(content) -> None:
    content.clear()


def _array_of(content) -> str:
    return next(iter(content["arrays"]))  # the first


def _nan(content) -> None:
    values = content["arrays"][_array_of(content)].numpy().copy()
    values[0, 1] = np.nan
    content["arrays"][_array_of(content)] = Array(values)


def _shape(content) -> None:
    content["arrays"][_array_of(content)] = Array(np.zeros((2, 3), np.float32))


def _double(content) -> None:
    content["arrays"][_array_of(content)] = Array(content["arrays"][_array_of(content)].numpy().astype(np.float64))


def _missing(content) -> None:
    del content["arrays"][_array_of(content)]


def _extra(content) -> None:
    content["arrays"]["backdoor"] = Array(np.zeros(1))


def _giant(content) -> None:
    small = np.lib.format.header_data_from_array_1_0(np.zeros((2, 2), np.float32)) | {"shape": (2**40, 2**20)}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, small)
    data = header.getvalue() + b"1234"
    content["arrays"][_array_of(content)] = Array("float32", (2**40, 2**20), "numpy.ndarray", data)


def _no_examples(content) -> None:
    content["metrics"]["num-examples"] = 0


def _negative(content) -> None:
    content["arrays"]["logits"] = Array(np.array([[0.5, 0.5], [1.5, -0.5], [1, 0]], np.float32))


def _too_much(content) -> None:
    content["arrays"]["logits"] = Array(np.array([[0.5, 0.5], [0.5, 0.5], [0.5, 0.502]], np.float32))


def _other_public_set(content) -> None:
    content["config"]["public-set"] = "3-beef"


def _no_fingerprint(content) -> None:
    content.config_records.clear()


def _few_losses(content) -> None:
    content["config"]["losses"] = [0.5]


def _again_a_model(content) -> None:
    content["arrays"] = ArrayRecord({f"model/{name}": array for name, array in initial().items()})


@where_trained_models_travel
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_nothing, "refused: it has 0 metric records, expected 1"),
        (_nan, "refused: array 'layer.weight' has values that are not finite: did training diverge?"),
        (_shape, "refused: array 'layer.weight' is float32 (2, 3), expected float32 (2, 2)"),
        (_double, "refused: array 'layer.weight' is float64 (2, 2), expected float32 (2, 2)"),
        (_missing, "refused: array 'layer.weight' is missing"),
        (_extra, "refused: array 'backdoor' is not part of the model"),
        (_giant, f"refused: array 'layer.weight' declares {2**62} bytes but carries 4"),
        (_no_examples, "refused: num-examples is 0, allowed: 1 to 1000000000000"),
    ],
)
def test_a_bad_model_counts_as_a_missing_reply_with_a_reason(name, damage, reason) -> None:
    check_that_it_counts_as_a_missing_reply(name, damage, reason)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_nothing, "refused: it has 0 metric records, expected 1"),
        (_nan, "refused: array '0/layer.weight' has values that are not finite: did training diverge?"),
        (_shape, "refused: array 'layer.weight' is float32 (2, 3), expected float32 (2, 2)"),
        (_double, "refused: array 'layer.weight' is float64 (2, 2), expected float32 (2, 2)"),
        (_extra, "refused: arrays 'backdoor' belong to no model that was sent"),
        (_giant, f"refused: array '0/layer.weight' declares {2**62} bytes but carries 4"),
        (_no_examples, "refused: num-examples is 0, allowed: 1 to 1000000000000"),
        (_few_losses, "refused: its losses are [0.5], expected 3 numbers up to 1e+12"),
        (_again_a_model, "refused: it holds a model where an update is expected"),
    ],
)
def test_bad_updates_count_as_a_missing_reply_with_a_reason(damage, reason) -> None:
    check_that_it_counts_as_a_missing_reply("federico", damage, reason)


@where_logits_travel
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_nothing, "refused: it has 0 metric records, expected 1"),
        (_nan, "refused: array 'logits' has values that are not finite: did training diverge?"),
        (_shape, "refused: array 'logits' is float32 (2, 3), expected float32 (3, 2)"),
        (_double, "refused: array 'logits' is float64 (3, 2), expected float32 (3, 2)"),
        (_missing, "refused: array 'logits' is missing"),
        (_extra, "refused: array 'backdoor' is not part of the model"),
        (_giant, f"refused: array 'logits' declares {2**62} bytes but carries 4"),
        (_no_examples, "refused: num-examples is 0, allowed: 1 to 1000000000000"),
        (_negative, "refused: logits of image 1 hold -0.5, allowed: 0 to 1"),
        (_too_much, "refused: logits of image 2 sum to 1.002, allowed: 1 within 0.001"),
        (_other_public_set, "refused: its public set is 3-beef, expected 3-cafe"),
        (_no_fingerprint, "refused: its public set is None, expected 3-cafe"),
    ],
)
def test_bad_logits_count_as_a_missing_reply_with_a_reason(name, damage, reason) -> None:
    check_that_it_counts_as_a_missing_reply(name, damage, reason)


@cache
def with_a_reply_lost(name: str) -> tuple:
    def lost(server_round: int, client: int) -> object:
        return "lost" if (server_round, client) == (2, 3) else "ok"

    return everything(run(name, FaultyGrid(app_of(name), CLIENTS, lost)))


def check_that_it_counts_as_a_missing_reply(name, damage, reason) -> None:
    """Check that a damaged reply in round 2 has the same effect as a lost one."""

    def damaged(server_round: int, client: int) -> object:
        return damage if (server_round, client) == (2, 3) else "ok"

    bad = run(name, FaultyGrid(app_of(name), CLIENTS, damaged))
    found = everything(bad)
    assert found[:3] == with_a_reply_lost(name)[:3]
    (row,) = [row for row in bad.history.rows if row["status"] != "ok"]
    assert (row["round"], row["client"], row["status"]) == (2, 1004, reason)


@every_method
def test_messages_share_no_memory_between_clients(name) -> None:
    app = app_of(name)
    train = app._registered_funcs["train.default"]

    def greedy(message, context):
        reply = train(message, context)
        message.content["arrays"].clear()
        message.content["config"].clear()
        return reply

    app._registered_funcs["train.default"] = greedy
    assert everything(run(name, InlineGrid(app, CLIENTS))) == undisturbed(name)
