"""The round engine: names of clients, sampling, and timeouts."""

from __future__ import annotations

import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, strategies as st

from kindred import FedAvg, InlineGrid, Local, TooFewClients
from kindred.engine import transport
from kindred.engine.history import History
from kindred.engine.in_turn import InTurn
from kindred.engine.means import WeightedMean
from kindred.messages import in_order, read_array, to_record

from .client_apps import initial, plain_app
from .grids import FaultyGrid


def named_app(names: list[object]):
    app = plain_app()
    asked = []

    @app.query("identity")
    def identity(message, context):
        asked.append(context.node_id)
        client = names[context.node_config["partition-id"]]
        return Message(RecordDict({"config": ConfigRecord({"client-id": client})}), reply_to=message)

    return app, asked


def test_clients_have_the_names_they_report_and_are_asked_once() -> None:
    app, asked = named_app(["lyon", 7, "graz"])
    strategy = Local()
    strategy.start(InlineGrid(app, 3), initial(), 3)
    assert strategy.clients() == list(strategy.client_models()) == [7, "graz", "lyon"]
    assert len(asked) == 3


def test_a_client_app_without_the_query_is_identified_by_its_node() -> None:
    strategy = Local()
    strategy.start(InlineGrid(plain_app(), 3), initial(), 1)
    assert strategy.clients() == [1001, 1002, 1003]


def test_the_second_node_with_a_name_in_use_is_excluded(caplog) -> None:
    app, _ = named_app([1, 1, 2])
    strategy = Local()
    strategy.start(InlineGrid(app, 3), initial(), 1)
    assert [row["client"] for row in strategy.history.rows] == [1, 2]
    assert "kindred: node 1002 takes no part: its client id is 1, which node 1001 already has" in caplog.messages


class Leaving(InlineGrid):
    """The first node disconnects after `rounds` rounds."""

    def __init__(self, app, num_clients: int, rounds: int) -> None:
        super().__init__(app, num_clients)
        self._rounds = rounds

    def push_messages(self, messages):
        messages = list(messages)
        if any(message.metadata.group_id == str(self._rounds + 1) for message in messages):
            self._contexts.pop(1001, None)
        return super().push_messages(messages)


def test_a_node_that_takes_over_a_name_is_asked_again() -> None:
    """An excluded site corrects its data and reconnects while its old node is still listed."""
    app = plain_app()

    @app.query("identity")
    def identity(message, context):
        number = context.node_config["partition-id"]
        about = {"client-id": max(number, 1), "num-examples": number}  # client 1: without data, and with
        return Message(RecordDict({"config": ConfigRecord(about)}), reply_to=message)

    strategy = Local()
    strategy.start(Leaving(app, 4, rounds=2), initial(), 4)
    assert [row["round"] for row in strategy.history.rows if row["client"] == 1] == [4]
    assert strategy.history.left_out == {}


def test_too_few_clients_end_the_run_after_the_wait() -> None:
    strategy = Local(min_available_nodes=4, wait_timeout=0.3)
    started = time.monotonic()
    said = r"too few clients after 0.3 s: 3 of 4 are connected \(min_available_nodes\)$"
    with pytest.raises(TooFewClients, match=said):
        strategy.start(InlineGrid(plain_app(), 3), initial(), 1)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("strategy", [Local(), FedAvg()], ids=["local", "fedavg"])
def test_a_run_without_any_reply_has_failed(strategy) -> None:
    grid = FaultyGrid(plain_app(), 2, lambda server_round, client: "error")
    said = "no client gave a usable answer in any of the 2 rounds; client 1002: error 0"
    with pytest.raises(TooFewClients, match=said):
        strategy.start(grid, initial(), 2)


def test_a_round_ends_at_its_timeout_and_ignores_late_replies() -> None:
    class LateGrid(FaultyGrid):
        """Returns, with every pull, the replies to messages of an earlier round."""

        late: list[Message] = []

        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            now = [reply for reply in replies if reply.metadata.group_id in ("", self._fate.round)]
            self.late += [self._answer(m) for i, m in list(self._waiting.items()) if i not in message_ids]
            return [*self.late, *now]

    def fate(server_round, client):
        fate.round = str(server_round)
        return "silent" if (server_round, client) == (1, 0) else "ok"

    fate.round = ""
    strategy = Local()
    started = time.monotonic()
    strategy.start(LateGrid(plain_app(), 2, fate), initial(), 2, timeout=0.5)
    assert 0.5 <= time.monotonic() - started < 3
    rows = [(row["round"], row["client"], row["status"]) for row in strategy.history.rows]
    assert rows == [(1, 1001, "no answer within 0.5 s"), (1, 1002, "ok"), (2, 1001, "ok"), (2, 1002, "ok")]


def test_a_message_expires_after_its_round() -> None:
    lifetimes = []

    class Noting(InlineGrid):
        def push_messages(self, messages):
            messages = list(messages)
            lifetimes.extend(message.metadata.ttl for message in messages)
            return super().push_messages(messages)

    FedAvg().start(Noting(plain_app(), 2), initial(), 1, timeout=30)
    assert len(lifetimes) >= 4  # an identity query, one training and two evaluations at the least
    assert set(lifetimes) == {30 + transport.CLOCKS}


def test_sampling_depends_on_seed_round_and_clients_alone() -> None:
    strategy = Local(seed=5)
    strategy.roster.nodes = {client: 1000 - client for client in range(100)}
    first = strategy.sample(3, 0.1, 2)
    again = Local(seed=5)
    again.roster.nodes = {client: client for client in reversed(range(100))}
    assert first == again.sample(3, 0.1, 2) == sorted(first) and len(set(first)) == 10
    assert first != strategy.sample(4, 0.1, 2)
    assert len(strategy.sample(1, 0.0, 2)) == 2
    assert len(strategy.sample(1, 0.5, 1000)) == 100
    for fraction, count in ((0.29, 29), (0.57, 57), (0.299, 29)):  # 0.29 * 100 is 28.999...
        assert len(strategy.sample(1, fraction, 2)) == count


def test_the_history_has_the_bytes_and_means_of_a_round() -> None:
    strategy = FedAvg(fraction_evaluate=0)
    result = strategy.start(InlineGrid(plain_app(), 2), initial(), 1)
    (line,) = strategy.history.rounds
    (one, two) = strategy.history.rows
    assert one["bytes-down"] == two["bytes-down"] > initial().count_bytes()
    assert line["bytes-up"] == one["bytes-up"] + two["bytes-up"]
    # Clients have 10 and 20 samples.
    expected = (one["train_loss"] + 2 * two["train_loss"]) / 3
    assert result.train_metrics_clientapp[1]["train_loss"] == pytest.approx(expected)


def test_fedavg_is_the_mean_weighted_by_samples() -> None:
    strategy = FedAvg()
    result = strategy.start(InlineGrid(plain_app(), 2), initial(), 1)
    means = [read_array(result.arrays["norm.running_mean"])[0], read_array(result.arrays["norm.num_batches_tracked"])]
    assert means[0] == pytest.approx((1 * 1 + 2 * 2) / 3)  # each adds its number, n = 10 and 20
    assert means[1] == 1  # of 1 and 2 and the server's own, 0
    assert strategy.collaboration()[1] == pytest.approx(np.eye(2))  # the model sent was no client's
    two = FedAvg()
    two.start(InlineGrid(plain_app(), 2), initial(), 2)
    assert two.collaboration()[1] == pytest.approx(np.array([[1 / 3, 2 / 3]] * 2))


def test_the_global_arrays_of_local_training_are_the_mean() -> None:
    strategy = Local()
    result = strategy.start(InlineGrid(plain_app(), 2), initial(), 2)
    models = [m["layer.weight"].numpy() for m in strategy.client_models().values()]
    assert result.arrays["layer.weight"].numpy() == pytest.approx((models[0] + models[1]) / 2)


def changed_by(client: int, change):
    def fate(server_round: int, asked: int) -> object:
        return (lambda content: change(content["metrics"])) if asked == client else "ok"

    return FaultyGrid(plain_app(True), 3, fate)


def test_means_cover_metrics_that_all_clients_report_in_one_form() -> None:
    def odd(metrics) -> None:
        metrics["train_loss"] = [1.0, 2.0]
        metrics["mine"] = 3.0

    strategy = Local()
    result = strategy.start(changed_by(1, odd), initial(), 1)
    assert [row["status"] for row in strategy.history.rows] == ["ok"] * 3
    assert "train_loss" not in result.train_metrics_clientapp[1] and "mine" not in result.train_metrics_clientapp[1]
    accuracies = [row["trained-accuracy"] for row in strategy.history.rows]
    expected = np.average(accuracies, weights=[10, 20, 30])
    assert result.train_metrics_clientapp[1]["trained-accuracy"] == pytest.approx(expected)


def test_a_client_cannot_write_the_columns_of_the_engine() -> None:
    def forge(metrics) -> None:
        metrics.update({"personal-accuracy": [0.1], "personal-loss": 0.0, "evaluate-status": 2})
        metrics.update({"seconds": [9.0], "bytes-up": 0, "status": 1, "client": 7, "round": 9, "bytes-down": 0})

    strategy = Local()
    strategy.start(changed_by(0, forge), initial(), 2)
    rows = strategy.history.rows
    assert [(row["round"], row["client"], row["status"]) for row in rows] == [
        (r, c, "ok") for r in (1, 2) for c in (1001, 1002, 1003)
    ]
    assert strategy.history.rounds[1]["accuracy"] == pytest.approx(
        np.mean([row["trained-accuracy"] for row in rows[3:]])
    )
    assert all(row["bytes-up"] > 0 and isinstance(row["seconds"], float) for row in rows)


@pytest.mark.parametrize("size", [0, -3, float("nan"), [1]], ids=str)
def test_an_impossible_test_size_or_accuracy_is_harmless(size) -> None:
    def odd(metrics) -> None:
        metrics["num-test-examples"] = size
        metrics["trained-accuracy"] = [0.5]

    strategy = Local()
    strategy.start(changed_by(2, odd), initial(), 1)
    two = [row["trained-accuracy"] for row in strategy.history.rows[:2]]
    assert strategy.history.rounds[0]["accuracy-weighted"] <= max(two)


@pytest.mark.parametrize("accuracy", [1e308, -0.5, float("nan"), float("inf"), 2**63, [0.5]], ids=str)
def test_an_invalid_accuracy_counts_as_missing(accuracy) -> None:
    strategy = Local()
    strategy.start(changed_by(1, lambda metrics: metrics.update({"trained-accuracy": accuracy})), initial(), 1)
    assert ["personal-accuracy" in row for row in strategy.history.rows] == [True, False, True]
    assert strategy.history.rounds[0]["evaluated"] == 2


def test_work_on_samples_is_summed_over_clients_and_exchanges() -> None:
    history = History()
    row = {"round": 1, "status": "ok", "seconds": 1.0, "bytes-down": 1, "bytes-up": 1}
    history.add({**row, "client": 1, "samples-trained": 40, "samples-predicted": 5})
    history.add({**row, "client": 1, "samples-trained": 8, "samples-predicted": 0})  # its separate evaluation
    history.add({**row, "client": 2, "samples-trained": 30.0, "samples-predicted": 0})
    for client, impossible in enumerate((np.nan, np.inf, -5, 1e300, 0.5), start=3):
        history.add({**row, "client": client, "samples-trained": impossible})
    line = history.close_round(1, 1.0, "trained")
    assert history.rows[0]["samples-trained"] == 48
    assert (line["samples-trained"], line["samples-predicted"]) == (78, 5)


def test_only_clients_without_a_reported_accuracy_are_asked_for_one() -> None:
    strategy = Local()
    strategy.start(changed_by(1, lambda metrics: metrics.pop("trained-accuracy")), initial(), 1)
    assert ["eval_acc" in row for row in strategy.history.rows] == [False, True, False]
    assert all("personal-accuracy" in row for row in strategy.history.rows)


def test_a_training_metric_named_accuracy_is_not_the_test_accuracy() -> None:
    grid = FaultyGrid(plain_app(), 2, lambda r, c: lambda content: content["metrics"].update(accuracy=0.99))
    strategy = Local(fraction_evaluate=0)
    strategy.start(grid, initial(), 1)
    assert "accuracy" not in strategy.history.rounds[0]
    assert strategy.history.rows[0]["accuracy"] == 0.99


def test_a_failed_evaluation_does_not_invalidate_the_training() -> None:
    app = plain_app()

    def fails(message, context):
        raise OSError("disk full")

    app._registered_funcs["evaluate.default"] = fails
    strategy = Local()
    strategy.start(InlineGrid(app, 2), initial(), 1)
    for row in strategy.history.rows:
        assert (row["status"], row["evaluate-status"]) == ("ok", "error 2: OSError: disk full")
    assert strategy.history.rounds[0]["answered"] == 2


def test_a_restarted_strategy_starts_from_scratch() -> None:
    strategy = Local()
    for _ in range(2):
        strategy.start(InlineGrid(plain_app(), 2), initial(), 1)
    assert [line["round"] for line in strategy.history.rounds] == [1]


def test_a_node_that_reports_no_name_in_time_is_asked_again() -> None:
    app, asked = named_app(["a", "b"])

    class Slow(InlineGrid):
        silent = True

        def pull_messages(self, message_ids):
            for message_id in list(message_ids):
                message = self._waiting.get(message_id)
                asked = message and message.metadata.message_type.startswith("query")
                if asked and message.metadata.dst_node_id == 1002 and Slow.silent:
                    Slow.silent = False
                    del self._waiting[message_id]
            return super().pull_messages(message_ids)

    strategy = Local(min_available_nodes=1)
    strategy.start(Slow(app, 2), initial(), 2, timeout=0.3)
    assert [(row["round"], row["client"]) for row in strategy.history.rows] == [(1, "a"), (2, "a"), (2, "b")]


@pytest.mark.parametrize("method", [Local, FedAvg])
def test_a_server_side_evaluation_runs_before_and_after_the_rounds(method) -> None:
    seen = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append((server_round, float(arrays["layer.weight"].numpy().sum())))
        return MetricRecord({"sum": seen[-1][1]})

    result = method().start(InlineGrid(plain_app(), 2), initial(), 2, evaluate_fn=evaluate)
    assert [r for r, _ in seen] == [0, 1, 2] and seen[0][1] == 0 < seen[1][1] < seen[2][1]
    assert result.evaluate_metrics_serverapp[2]["sum"] == seen[2][1]


@given(st.permutations(range(5)), st.lists(st.floats(1, 1e6), min_size=5, max_size=5))
def test_a_weighted_mean_has_the_same_bits_in_every_order(order, weights) -> None:
    rows = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)

    def mean(sequence) -> np.ndarray:
        total = WeightedMean(7, np.dtype(np.float32))
        # The first and the last client never reply.
        terms = InTurn(range(-1, 6), lambda client, term: total.add(client, *term))
        for client in sequence:
            terms.add(client, (weights[client], rows[client].copy()))
        terms.finish()
        return total.result()

    assert mean(order).tobytes() == mean(range(5)).tobytes()
    assert mean(order) == pytest.approx(np.average(rows, axis=0, weights=weights), rel=1e-4, abs=1e-4)


def test_client_ids_have_one_order() -> None:
    assert in_order({"b", 10, "a", 9}) == [9, 10, "a", "b"]


@given(st.sampled_from(["float32", "float64", "float16", "int64", "bool"]), st.lists(st.integers(0, 3), max_size=4))
def test_records_have_the_form_of_flowers_arrays(dtype, shape) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(dtype)
    record = to_record({"a": values})
    assert record["a"].data == Array(np.asarray(values)).data
    assert (record["a"].dtype, tuple(record["a"].shape)) == (dtype, values.shape)
    read = read_array(record["a"])
    assert read.dtype == values.dtype and np.array_equal(read, values)
    transposed = values.T  # in Fortran's order
    assert np.array_equal(read_array(Array(transposed)), transposed)


def test_all_seconds_between_two_lines_belong_to_a_round_and_to_one_part() -> None:
    """Files of a round and checkpoints count, in the round after; meeting the clients is no part of the first one."""
    pause = 1.0

    class Slow(InlineGrid):
        def get_node_ids(self):
            if not self.met:
                time.sleep(3 * pause)
                self.met = True
            return super().get_node_ids()

        met = False

    strategy = Local()
    strategy.start(Slow(plain_app(), 2), initial(), 3, on_round=lambda _: time.sleep(pause))
    seconds, parts = [line["seconds"] for line in strategy.history.rounds], strategy.history.times.seconds
    assert seconds[0] < pause <= min(seconds[1:])
    assert parts["results"] >= 3 * pause and parts["start-up"] >= 3 * pause
    rest = strategy.history.times.since_last_round()
    assert sum(seconds) + rest == pytest.approx(parts["clients"] + parts["server"] + parts["results"])
