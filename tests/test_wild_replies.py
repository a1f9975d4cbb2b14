"""Whatever a client writes into a reply or introduction, the run continues with the others and is summarised."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings, strategies as st

from kindred import FedAvg, InlineGrid, Local, PersonalizedStrategy, TooFewClients
from kindred.engine.admission import MAX_METRICS, MAX_NUMBERS, Refused, admit, admit_introduction
from kindred.engine.checkpoint import Checkpoints
from kindred.engine.history import MAX_COLUMNS, History
from kindred.messages import KNOWN_METRICS, MOST
from kindred.server_app.summary import summarise

from .client_apps import initial, plain_app
from .grids import FaultyGrid
from .test_conformance import app_of, every_method, initial_of, make

CLIENTS, ATTACKERS, ROUNDS = 6, (0, 4), 3
ON_THE_WIRE = st.integers(-(2**63), 2**64 - 1)
few = settings(
    max_examples=3,
    deadline=None,
    database=None,
    derandomize=True,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)

numbers = ON_THE_WIRE | st.floats() | st.sampled_from([0, 1, -1, 0.5, 1e308, 5e-324, MOST, -MOST, 2**64 - 1])
metric_values = numbers | st.lists(ON_THE_WIRE, max_size=3) | st.lists(st.floats(), max_size=3)
metric_names = st.text(max_size=4) | st.sampled_from(
    [
        "num-examples",
        "train-loss",
        "train_loss",
        "loss",
        "accuracy",
        "eval_acc",
        "trained-accuracy",
        "received-accuracy",
        "own-accuracy",
        "mixture-accuracy",
        "personal-accuracy",
        "num-test-examples",
        "samples-trained",
        "samples-predicted",
        "model-bytes",
        "mixing-weight",
        "cluster",
        "status",
        "evaluate-status",
        "round",
        "client",
    ]
)
metrics = st.dictionaries(metric_names, metric_values, max_size=8)

entry_values = (
    numbers
    | st.booleans()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.lists(ON_THE_WIRE, max_size=4)
    | st.lists(st.floats(), max_size=4)
    | st.lists(st.text(max_size=4), max_size=4)
    | st.sampled_from(["x" * 20_000, "[" * 2000, "[1001, 1002]", [1.0] * 2000])
)
entries = st.dictionaries(
    st.text(max_size=4)
    | st.sampled_from(
        [
            "losses",
            "neighbours",
            "mixture",
            "weights",
            "public-set",
            "output-bias",
            "adjustment",
            "fold-losses",
            "fold-samples",
        ]
    ),
    entry_values,
    max_size=5,
)
introductions = st.dictionaries(
    st.text(max_size=4)
    | st.sampled_from(
        [
            "client-id",
            "num-examples",
            "num-classes",
            "methods",
            "network",
            "public-set",
            "num-public",
            "share-model",
            "problem",
        ]
    ),
    entry_values,
    max_size=7,
)


class Wild(InlineGrid):
    """Some clients put the given entries into their replies, which replace or extend the correct ones."""

    def __init__(self, app, wild: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        super().__init__(app, CLIENTS)
        self._wild: Iterator[tuple[dict[str, Any], dict[str, Any]]] = itertools.cycle(wild)

    def pull_messages(self, message_ids):
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            kind = reply.metadata.message_type
            if kind in ("train", "evaluate") and reply.metadata.src_node_id - 1001 in ATTACKERS:
                into_metrics, into_config = next(self._wild)
                reply.content["metrics"].update(into_metrics)
                if "config" not in reply.content:
                    reply.content["config"] = ConfigRecord()
                reply.content["config"].update(into_config)
        return replies


def check_that_the_others_were_not_disturbed(strategy: PersonalizedStrategy) -> None:
    honest = [
        row
        for row in strategy.history.rows
        if row["client"] not in [1001 + i for i in ATTACKERS] and not isinstance(row["client"], str)
    ]
    assert {row["status"] for row in honest} == {"ok"}
    assert {row["round"] for row in honest} >= set(range(1, ROUNDS + 1))
    for record in strategy.client_models().values():
        assert all(np.isfinite(array.numpy()).all() for array in record.values())
    summarise(
        {"strategy": strategy.name, "dataset": "digits", "partition": "iid", "seed": 0, "num-rounds": ROUNDS},
        strategy.history,
        {},
    )


@every_method
def test_no_reply_ends_a_run_or_disturbs_the_others(name) -> None:
    """In training, in separate evaluations, and in evaluations of models that the server requests."""

    @few
    @given(st.lists(st.tuples(metrics, entries), min_size=12, max_size=12))
    def disturbed(wild) -> None:
        strategy = make(name, max_strikes=0)
        strategy.start(Wild(app_of(name), wild), initial_of(name), ROUNDS)
        check_that_the_others_were_not_disturbed(strategy)

    disturbed()


@every_method
def test_no_introduction_ends_a_run_or_disturbs_the_others(name) -> None:
    @few
    @given(st.lists(introductions, min_size=len(ATTACKERS), max_size=len(ATTACKERS)))
    def disturbed(wild) -> None:
        app, said = app_of(name), dict(zip(ATTACKERS, wild))
        known = app._registered_funcs.pop("query.identity", None)

        @app.query("identity")
        def identity(message, context):
            client = context.node_config["partition-id"]
            about = RecordDict({"config": ConfigRecord({"client-id": context.node_id, "num-examples": 10})})
            reply = known(message, context) if known else Message(about, reply_to=message)
            if client in said:
                reply.content["config"].update(said[client])
            return reply

        strategy = make(name, max_strikes=0)
        strategy.start(InlineGrid(app, CLIENTS), initial_of(name), ROUNDS)
        check_that_the_others_were_not_disturbed(strategy)

    disturbed()


@settings(max_examples=200, deadline=None)
@given(metrics, entries)
def test_admitted_metrics_can_be_averaged_and_written(found, config) -> None:
    content = RecordDict({"metrics": MetricRecord(found), "config": ConfigRecord(config)})
    try:
        admitted = admit(content, "num-examples").metrics
    except Refused as refusal:
        assert str(refusal)
        return
    for value in admitted.values():
        numbers = value if isinstance(value, list) else [value]
        assert numbers and all(isinstance(n, float) or -MOST <= n <= MOST for n in numbers)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"train-loss": []}, "metric 'train-loss' is a list of 0 numbers, allowed: 1 or more, and up to 10000 in all"),
        ({"recall": [0.5] * (MAX_NUMBERS + 1)}, "metric 'recall' is a list of 10001 numbers, allowed: 1 or more"),
        (
            {"samples-trained": 2**64 - 1},
            "metric 'samples-trained' holds 18446744073709551615, allowed: whole numbers from "
            "-9007199254740992 to 9007199254740992",
        ),
        ({"samples-trained": 1.5}, "samples-trained is 1.5, allowed: 0 to 1000000000000"),
        ({"num-test-examples": -1}, "num-test-examples is -1, allowed: 0 to 1000000000000"),
        ({f"m{i}": 1 for i in range(MAX_METRICS)}, "it has 1001 metrics, allowed: up to 1000"),
        (
            {f"{i:0199}": 1 for i in range(900)},
            "its 901 metrics take 186320 bytes with their names, allowed: up to 16000",
        ),
        ({f"{i:0100}é": 1 for i in range(146)}, "its 147 metrics take 16080 bytes with their names, allowed: up to"),
    ],
)
def test_an_unusable_metric_is_named(metrics, reason) -> None:
    with pytest.raises(Refused) as refusal:
        admit(RecordDict({"m": MetricRecord({"num-examples": 3, **metrics})}), "num-examples")
    assert str(refusal.value).startswith(reason)


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({f"k{i}": 1 for i in range(101)}, "its introduction has 101 entries, allowed: up to 100"),
        ({"methods": ["local"] * 1001}, "its introduction has 1001 items under 'methods', allowed: up to 1000"),
        ({"network": "x" * 10_001}, "its introduction has 10001 characters under 'network', allowed: up to 10000"),
        (
            {"num-public": 2**60},
            "its introduction has 1152921504606846976 under 'num-public', allowed: whole numbers from "
            "-9007199254740992 to 9007199254740992",
        ),
    ],
)
def test_an_unusable_introduction_is_refused_with_a_reason(about, reason) -> None:
    with pytest.raises(Refused, match=f"^{reason}$"):
        admit_introduction(RecordDict({"config": ConfigRecord(about)}))


# --- Unexpected exceptions ------------------------------------------------------------------------------


class Raising(Local):
    """Raises an exception in the hook that the test names."""

    where = ""

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise KeyError("nobody foresaw this")

    def inspect(self, client, reply) -> None:
        if client == 1002:
            self._maybe("inspect")

    def take(self, client, reply) -> None:
        if client == 1002:
            self._maybe("take")
        super().take(client, reply)

    def take_evaluation(self, client, reply) -> None:
        if client == 1002:
            self._maybe("take_evaluation")

    def introduce(self, newcomers):
        if 1002 in newcomers:
            self._maybe("introduce")
        return super().introduce(newcomers)

    def end_round(self, server_round, answered) -> None:
        if server_round == 2:
            self._maybe("end_round")
        super().end_round(server_round, answered)


@pytest.mark.parametrize(
    ("where", "statuses"),
    [
        ("inspect", {1001: "ok", 1002: "refused: it cannot be used (KeyError: 'nobody foresaw this')", 1003: "ok"}),
        ("take", {1001: "ok", 1002: "refused: it cannot be used (KeyError: 'nobody foresaw this')", 1003: "ok"}),
        ("take_evaluation", {1001: "ok", 1002: "ok", 1003: "ok"}),
        ("introduce", {1001: "ok", 1003: "ok"}),
        ("end_round", {1001: "ok", 1002: "ok", 1003: "ok"}),
    ],
)
def test_an_unexpected_exception_loses_one_reply_or_round_and_not_the_run(where, statuses, caplog) -> None:
    strategy = Raising()
    strategy.where = where
    strategy.start(InlineGrid(plain_app(), 3), initial(), 3)
    rows = [row for row in strategy.history.rows if row["round"] == 2]
    assert {row["client"]: row["status"] for row in rows} == statuses
    if where == "take_evaluation":
        assert rows[1]["evaluate-status"] == "refused: it cannot be used (KeyError: 'nobody foresaw this')"
    elif where == "introduce":
        assert strategy.history.left_out == {1002: "its introduction cannot be used (KeyError: 'nobody foresaw this')"}
    elif where == "end_round":
        said = next(line for line in caplog.messages if "round 2 could not be ended" in line)
        assert said.startswith("kindred: round 2 could not be ended (KeyError: 'nobody foresaw this'): changes ")
        assert "in end_round" in said  # where
    if where in ("inspect", "take", "take_evaluation"):
        said = [line for line in caplog.messages if "unexpected exception KeyError" in line]
        assert len(said) == 1 and f"in {where}" in said[0]  # once, though it is raised in every round


def test_a_method_that_fails_in_every_round_ends_the_run_with_the_reason() -> None:
    class Never(Local):
        def end_round(self, server_round, answered) -> None:
            raise ZeroDivisionError("by design")

    with pytest.raises(TooFewClients, match=r"2 rounds in a row .*round 2 could not be ended \(ZeroDivisionError: by"):
        Never(max_empty_rounds=2).start(InlineGrid(plain_app(), 2), initial(), 5)


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_memory_and_disk_errors_of_the_server_end_the_run(error) -> None:
    class Full(Local):
        def take(self, client, reply) -> None:
            raise error("no space left")

    with pytest.raises(error):
        Full().start(InlineGrid(plain_app(), 2), initial(), 1)


def test_a_mean_that_raises_is_missing_in_that_round_only(caplog) -> None:
    def mean_of_losses(contents, weighted_by_key) -> MetricRecord:
        raise ValueError("no losses\nat all")

    strategy = FedAvg(train_metrics_aggr_fn=mean_of_losses)
    result = strategy.start(InlineGrid(plain_app(), 2), initial(), 2)
    assert result.train_metrics_clientapp == {} and sorted(result.evaluate_metrics_clientapp) == [1, 2]
    assert (
        "kindred: the metrics of round 2 could not be aggregated: mean_of_losses raised ValueError: no losses"
        in caplog.messages
    )


# --- Names of metrics ---------------------------------------------------------------------------------


def test_a_run_keeps_a_bounded_number_of_metric_names_and_prefers_those_of_most_clients(caplog) -> None:
    """One of four clients invents 900 names in each round; its rows come first."""

    def inventive(content: RecordDict) -> None:
        number = int(content["metrics"]["num-examples"])
        content["metrics"].update({f"{inventive.rounds}-{number}-{i}": 1.0 for i in range(900)})
        inventive.rounds += 1

    inventive.rounds = 0
    strategy = Local()
    strategy.start(FaultyGrid(plain_app(True), 4, lambda r, c: inventive if c == 0 else "ok"), initial(), 4)
    names = {name for row in strategy.history.rows for name in row}
    usual = {"round", "client", "status", "seconds", "bytes-down", "bytes-up", "personal-accuracy"}
    assert len(names - usual - KNOWN_METRICS) == MAX_COLUMNS
    assert {"train_loss", "trained-accuracy", "num-examples"} <= set.intersection(*map(set, strategy.history.rows))
    assert [line.get("metrics-dropped", 0) for line in strategy.history.rounds] == [400, 900, 900, 900]
    assert any(f"a run keeps {MAX_COLUMNS} names" in line for line in caplog.messages)


def test_a_client_with_huge_names_of_metrics_cannot_make_checkpoints_large(tmp_path) -> None:
    """The honest run's checkpoint, with a row of metrics that is as large as one may be, bounds the other one."""

    def inventive(content: RecordDict) -> None:
        content["metrics"].update({f"{i:0199}": 1.0 for i in range(900)})

    sizes = {}
    for fate in ("ok", inventive):
        checkpoints = Checkpoints(tmp_path / str(fate))
        grid = FaultyGrid(plain_app(True), 4, lambda r, c, fate=fate: "ok" if c else fate)
        strategy = FedAvg(max_strikes=0)
        strategy.start(grid, initial(), 4, checkpoints=checkpoints)
        sizes[fate] = max(file.stat().st_size for file in checkpoints.folder.iterdir())
    assert sizes[inventive] < 1.5 * sizes["ok"]
    assert {row["status"][:14] for row in strategy.history.rows if row["client"] == 1001} == {"refused: its 9", "ok"}


def test_a_client_alone_in_a_round_cannot_fill_the_table_with_its_names() -> None:
    def inventive(content: RecordDict) -> None:
        content["metrics"].update({f"!{i}": 1.0 for i in range(900)})

    strategy = Local()
    strategy.start(
        FaultyGrid(plain_app(True), 3, lambda r, c: inventive if c == 0 else "error" if r == 1 else "ok"), initial(), 2
    )
    honest = [row for row in strategy.history.rows if row["client"] != 1001 and row["round"] == 2]
    for row in honest:
        assert {"train_loss", "num-examples", "num-test-examples", "trained-accuracy"} <= row.keys()


def test_counts_of_a_method_are_never_dropped() -> None:
    history = History()
    mine = {f"m{i}": 1.0 for i in range(MAX_COLUMNS + 5)}
    fixed = {"round": 1, "client": 1, "status": "ok", "seconds": 0.0, "bytes-down": 0, "bytes-up": 0}
    history.add({**mine, "m0": 2.0, **fixed}, mine)
    history.count(1, m0=3.0, m504=4.0)
    history.close_round(1, 0.0, "trained")
    (row,) = history.rows
    assert (row["m0"], row["m504"]) == (3.0, 4.0)
    assert len(row) == len(fixed) + MAX_COLUMNS + 2
    assert history.rounds[0]["metrics-dropped"] == 3
    again = History()
    again.restore(history.state())
    again.add({"new": 1.0, **fixed, "round": 2}, ["new"])
    again.close_round(2, 0.0, "trained")
    assert "new" not in again.rows[1]


@pytest.mark.parametrize("where", ["inspect", "take", "take_evaluation", "introduce", "end_round"])
def test_an_interrupt_that_compiled_code_turned_into_an_error_ends_the_run(where, monkeypatch) -> None:
    def interrupted(self, method) -> None:
        if self.where == method:
            raise ValueError("not a valid buffer format") from KeyboardInterrupt()

    monkeypatch.setattr(Raising, "_maybe", interrupted)
    strategy = Raising()
    strategy.where = where
    with pytest.raises(KeyboardInterrupt):
        strategy.start(InlineGrid(plain_app(), 3), initial(), 3)
