"""Malformed replies, missing clients and dead workers end no run and change no other client's results."""

from __future__ import annotations

import io
import itertools
import math
import random
import re
import subprocess
import sys
import sysconfig
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as npst

from kindred import REGISTRY, FedAMP, FedAvg, FedeRiCo, HeurFedAMP, InlineGrid, Local, TooFewClients, WorkerDied
from kindred.engine.admission import (
    LARGEST,
    LEAST_WEIGHT,
    MAX_EXAMPLES,
    MAX_METRICS,
    MAX_NAME,
    MAX_NUMBERS,
    Refused,
    admit,
    check_initial,
)
from kindred.engine.checkpoint import Checkpoints
from kindred.messages import MOST, read_array, read_record, to_record
from kindred.server_app.processes import MARK, marked_processes
from kindred.server_app.summary import summarise

from .client_apps import collaboration_app, initial, plain_app, target
from .grids import FaultyGrid, Interrupted, interrupted
from .test_conformance import (
    APPS,
    app_of,
    every_method,
    everything,
    initial_of,
    make,
    values,
    where_models_travel,
)

CLIENTS, ATTACKERS, ROUNDS = 6, (1, 3, 4), 4

# --- Malformed replies --------------------------------------------------------------------------------

Damage = Callable[[Message], None]
names = st.text(max_size=8) | st.sampled_from(["arrays", "metrics", "config", "../../x", "a\nb", "\x1b[2J", "x" * 300])
not_counts = (
    st.integers(max_value=0)
    | st.integers(min_value=MAX_EXAMPLES + 1)
    | st.floats().filter(lambda x: not (x.is_integer() and 1 <= x <= MAX_EXAMPLES))
    | st.lists(st.integers(1, 9))
)


def with_content(change: Callable[[RecordDict], None]) -> Damage:
    return lambda message: change(message.content)


def first_array(content: RecordDict) -> tuple[ArrayRecord, str]:
    (record,) = content.array_records.values()
    return record, sorted(record)[0]


def array_of(dtype: str, shape: object, data: bytes) -> Array:
    """An array as a message may contain it, although `Array` itself would not create it."""
    array = Array("float32", (1,), "numpy.ndarray", data)
    vars(array).update(dtype=dtype, shape=shape)
    return array


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1", "replace")


# Damage that any reply can have.
def records(draw) -> Damage:
    which = draw(st.sampled_from(["none", "metrics", "twice", "configs", "nothing", "another kind"]))

    def change(message: Message) -> None:
        content = message.content
        if which == "none":
            content.clear()
        elif which == "metrics":
            content.metric_records.clear()
        elif which == "twice":
            content["again"] = MetricRecord(dict(content["metrics"]))
        elif which == "configs":
            content["one"], content["two"] = ConfigRecord({"a": 1}), ConfigRecord({"a": 2})
        else:
            vars(message)["_content"] = None if which == "nothing" else MetricRecord({"num-examples": 1})

    return change


def count(draw) -> Damage:
    examples = draw(st.none() | not_counts)

    def change(content: RecordDict) -> None:
        metrics = content["metrics"]
        for key in {"num-examples", "num-test-examples"} & set(metrics):
            if examples is None:
                del metrics[key]
            else:
                metrics[key] = examples

    return with_content(change)


def metric(draw) -> Damage:
    found = draw(
        st.sampled_from(
            [
                {"": 1.0},
                {"a\nb": 1.0},
                {"x" * (MAX_NAME + 1): 1.0},
                {"big": 2**64},
                {"big": [1, 10**5000]},
                {f"m{i}": 1.0 for i in range(MAX_METRICS)},
                {"train-loss": []},
                {"loss": []},
                {"many": [0.5] * (MAX_NUMBERS + 1)},
                {"big": MOST + 1},
                {"big": [-MOST - 1]},
                {"samples-trained": 2**64 - 1},
                {"samples-predicted": 0.5},
                {"num-test-examples": -1},
                {"num-test-examples": [5]},
                {"model-bytes": float("nan")},
            ]
        )
    )
    return with_content(lambda content: content["metrics"].update(found))


def sender(draw) -> Damage:
    node_id = draw(st.sampled_from([1, 1001, 1003]) | st.integers(10**6, 2**63))
    return lambda message: message.metadata.__dict__.update(_src_node_id=node_id)


# Damage to the content of a training reply.
def array_bytes(draw) -> Damage:
    data = draw(
        st.binary(max_size=60)
        | st.binary(max_size=60).map(lambda tail: b"\x93NUMPY\x01\x00" + tail)
        | st.text(max_size=40).map(header)
        | st.sampled_from(["(" * 9000, "{" * 90, "{[]: 1}", "{'descr': 'O'}", "1" * 5000]).map(header)
    )
    dtype, shape = draw(st.sampled_from(["float32", "object", "x" * 999])), draw(npst.array_shapes(min_dims=0))

    def change(content: RecordDict) -> None:
        record, name = first_array(content)
        record[name] = array_of(dtype, shape, data)

    return with_content(change)


def array_sizes(draw) -> Damage:
    shape = draw(
        st.sampled_from(
            [(2**40, 2**20), (2**70, 0), (0, 2**62), (-1, -4), (-2, 2), (1,) * 99, (3, 3), (True, 1), (2**62, 2**62, 2)]
        )
    )
    dtype = draw(st.sampled_from(["<f4", "<f8", "|O", "|V0", "<U0", "|b1", ">f4"]))
    data = header(repr({"descr": dtype, "fortran_order": draw(st.booleans()), "shape": shape}))
    data += draw(st.sampled_from([b"", b"1234", bytes(16)]))
    declared = draw(st.sampled_from(["float32", "float64", "object", "|V0", str(np.dtype(dtype))]))

    def change(content: RecordDict) -> None:
        record, name = first_array(content)
        record[name] = array_of(declared, shape, data)

    return with_content(change)


def array_cut(draw) -> Damage:
    cut, longer = draw(st.integers(1, 500)), draw(st.binary(max_size=9))

    def change(content: RecordDict) -> None:
        record, name = first_array(content)
        whole = record[name]
        data = whole.data + longer if longer else whole.data[:-cut]
        record[name] = array_of(whole.dtype, whole.shape, data)

    return with_content(change)


def array_declared(draw) -> Damage:
    changes = draw(
        st.sampled_from(
            [
                {"dtype": "float64"},
                {"dtype": ""},
                {"shape": (4,)},
                {"shape": (2**40, 2**20)},
                {"stype": "torch"},
                {"stype": "pickle"},
            ]
        )
    )

    def change(content: RecordDict) -> None:
        record, name = first_array(content)
        whole = record[name]
        record[name] = array_of(whole.dtype, whole.shape, whole.data)
        vars(record[name]).update(changes)

    return with_content(change)


def array_of_another_kind(draw) -> Damage:
    dtype = draw(st.sampled_from(["float16", "float64", "int32", "bool", "complex64", "<U3", ">f4", "M8[s]"]))
    other = np.zeros(draw(npst.array_shapes(min_dims=0, max_dims=3, max_side=3)), dtype)

    def change(content: RecordDict) -> None:
        record, name = first_array(content)
        record[name] = Array(other)

    return with_content(change)


def array_not_finite(draw) -> Damage:
    value, place = draw(st.sampled_from([np.nan, np.inf, -np.inf, 3e38, -2e15])), draw(st.integers(0, 99))

    def change(content: RecordDict) -> None:
        record, name = next((r, n) for r in content.array_records.values() for n in r if r[n].dtype == "float32")
        changed = record[name].numpy().copy()
        changed.reshape(-1)[place % changed.size] = value
        record[name] = Array(changed)

    return with_content(change)


def array_names(draw) -> Damage:
    added, arrays = draw(names), draw(st.sampled_from(["rename", "add", "records", "no record"]))

    def change(content: RecordDict) -> None:
        record, name = first_array(content)
        if arrays == "records":
            content["more"] = ArrayRecord({"x": Array(np.zeros(1))})
        elif arrays == "no record":
            content.array_records.clear()
        else:
            record[f"?{added}"] = record.pop(name) if arrays == "rename" else Array(np.zeros(1))

    return with_content(change)


def method_config(draw) -> Damage:
    """Damage to the config entries that two methods send with their arrays."""
    key = draw(st.sampled_from(["public-set", "losses"]))
    value = draw(st.sampled_from(["", "x" * 10**5, 1, [1e13], [], [float("nan")], b"3-cafe", ["3-cafe"], 2**63 - 1]))

    def change(content: RecordDict) -> None:
        content["config"].clear()
        content["config"][key] = value

    return with_content(change)


ANY = (records, count, metric, sender)
ARRAYS = (array_bytes, array_sizes, array_cut, array_declared, array_of_another_kind, array_not_finite, array_names)


def a_damage(*kinds) -> st.SearchStrategy[Damage]:
    return st.composite(lambda draw: draw(st.sampled_from(kinds))(draw))()


class Attacked(InlineGrid):
    """Damages the replies of some clients; where no damage is given, it loses all of them."""

    def __init__(self, name: str, training: list[Damage], evaluation: list[Damage]) -> None:
        super().__init__(app_of(name), CLIENTS)
        self._damages = {"train": itertools.cycle(training), "evaluate": itertools.cycle(evaluation)}
        self.damaged = 0

    def pull_messages(self, message_ids):
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            kind = reply.metadata.message_type
            if kind in self._damages and reply.metadata.src_node_id - 1001 in ATTACKERS:
                self.damaged += 1
                if (damage := next(self._damages[kind], None)) is None:
                    vars(reply).update(_content=None, _error=Error(0, "lost"))
                else:
                    damage(reply)
        return replies


def attack(name: str, training: list[Damage], evaluation: list[Damage]) -> tuple[tuple, int, set[str]]:
    """Run a method; return the honest clients' results, the number of damaged replies, and their statuses."""
    grid = Attacked(name, training, evaluation)
    strategy = make(name, max_strikes=0)
    strategy.start(grid, initial_of(name), ROUNDS)
    models, clients, weights, rows = everything(strategy)
    theirs = [row for row in rows if row["client"] - 1001 in ATTACKERS]
    trained = [row for row in theirs if row["round"] <= ROUNDS]  # and evaluation, some of it twice
    assert len(trained) == len(ATTACKERS) * (ROUNDS + 1 - strategy.first_round)
    noted = {row[key].split(":")[0] for row in theirs for key in ("status", "evaluate-status") if key in row}
    return (models, clients, weights, [row for row in rows if row not in theirs]), grid.damaged, noted


@every_method
@pytest.mark.parametrize("runs", [2, pytest.param(40, marks=pytest.mark.faults)])
def test_malformed_replies_do_not_change_honest_clients_results(name, runs) -> None:
    """Every one is refused, and honest results have the bits of a run in which those replies never arrive."""
    reference, _, noted = attack(name, [], [])
    assert noted == {"error 0"}
    most = len(ATTACKERS) * (ROUNDS + 1)
    kinds = (*ANY, *ARRAYS, *([method_config] if name in APPS else []))
    damaged = 0

    @settings(
        max_examples=runs,
        deadline=None,
        database=None,
        derandomize=True,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(*(st.lists(a_damage(*some), min_size=most, max_size=most) for some in (kinds, ANY)))
    def attacked(training, evaluation) -> None:
        nonlocal damaged
        honest, count, noted = attack(name, training, evaluation)
        assert honest == reference
        assert noted == {"refused"}
        damaged += count

    attacked()
    assert damaged >= len(ATTACKERS) * ROUNDS * runs  # 10,080 in the long form of all methods


@settings(max_examples=300, deadline=None)
@given(a_damage(*ARRAYS))
def test_admission_raises_one_kind_of_exception(damage) -> None:
    InlineGrid(plain_app(), 1)  # gives this process the identity that messages need
    weights = np.ones((2, 2), np.float32)
    content = RecordDict({"arrays": to_record({"w": weights}), "metrics": MetricRecord({"num-examples": 1})})
    message = Message(content, 7, "train")
    damage(message)

    def mismatch(arrays) -> str | None:
        (array,) = arrays.values() if list(arrays) == ["w"] else [None]
        return None if array is not None and (array.shape, array.dtype) == (weights.shape, weights.dtype) else "differs"

    with pytest.raises(Refused) as refusal:
        admit(message.content, "num-examples", mismatch)
    assert str(refusal.value)


def test_an_array_that_declares_more_than_it_carries_uses_no_memory() -> None:
    shape = (2**20, 2**10)  # 4 GiB
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": "<f4", "fortran_order": False, "shape": shape})
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="declares 4294967296 bytes but carries 4"):
            read_array(Array("float32", shape, "numpy.ndarray", text.getvalue() + b"1234"))
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("examples", [1, 10.0, MAX_EXAMPLES])
def test_a_whole_number_of_examples_is_accepted(examples) -> None:
    metrics = {"num-examples": examples}
    assert admit(RecordDict({"m": MetricRecord(metrics)}), "num-examples").metrics["num-examples"] == examples


@pytest.mark.parametrize("examples", [0, -1, 0.5, 1.5, float("nan"), float("inf"), MAX_EXAMPLES + 1, [1], [], True])
def test_any_other_number_of_examples_is_refused(examples) -> None:
    metrics = MetricRecord()
    vars(metrics)["_data"]["num-examples"] = examples  # Flower itself takes no bool
    with pytest.raises(Refused, match="num-examples is .*, allowed: 1 to 1000000000000"):
        admit(RecordDict({"m": metrics}), "num-examples")


@pytest.mark.parametrize("weight", [1, 0.5, LEAST_WEIGHT, MAX_EXAMPLES])
def test_a_weight_of_another_name_is_any_number_in_range(weight) -> None:
    assert admit(RecordDict({"m": MetricRecord({"w": weight})}), "w").metrics["w"] == weight


@pytest.mark.parametrize("weight", [0, 1e-42, -0.5, float("nan"), float("inf"), 2 * MAX_EXAMPLES, [1.0]])
def test_any_other_weight_is_refused(weight) -> None:
    with pytest.raises(Refused, match="w is .*, allowed: 1e-12 to 1000000000000"):
        admit(RecordDict({"m": MetricRecord({"w": weight})}), "w")


def test_an_evaluation_may_have_no_test_samples_and_an_array_of_another_kind() -> None:
    app = plain_app()
    evaluate = app._registered_funcs["evaluate.default"]

    def evaluating(message, context):
        reply = evaluate(message, context)
        if context.node_config["partition-id"] == 0:
            reply.content["metrics"].update({"num-examples": 0, "eval_loss": float("nan"), "eval_acc": 0.0})
        reply.content["confusion"] = to_record({"matrix": np.ones((2, 2), np.float32)})
        return reply

    app._registered_funcs["evaluate.default"] = evaluating
    strategy = FedAvg()
    result = strategy.start(InlineGrid(app, CLIENTS), initial(), 1)
    assert not any("evaluate-status" in row for row in strategy.history.rows)
    assert list(strategy.history.last_values()) == [1001 + i for i in range(1, CLIENTS)]
    assert not any("personal-accuracy" in row for row in strategy.history.rows if row["client"] == 1001)
    assert np.isfinite(result.evaluate_metrics_clientapp[1]["eval_loss"])


def test_a_client_s_reason_is_logged_as_one_short_printable_line(caplog) -> None:
    def grid_of(reason: str):
        def add_named_array(content: RecordDict) -> None:
            content["arrays"][reason] = Array(np.zeros(1))

        return FaultyGrid(plain_app(), 2, lambda r, c: add_named_array if c == 1 else "ok")

    strategy = Local()
    strategy.start(grid_of("\x1b[31mred\nalert\u2028" + "!" * 10**5), initial(), 1)
    status = strategy.history.rows[1]["status"]
    assert status.startswith("refused: array '\\x1b[31mred\\nalert") and len(status) < 320 and status.isprintable()
    assert all(len(line) < 500 and line.isprintable() for line in caplog.messages if line.startswith("kindred: "))


# --- Senders of replies -------------------------------------------------------------------------------


def named_app(names: list[object]):
    app = plain_app(True)

    @app.query("identity")
    def identity(message, context):
        client = names[context.node_config["partition-id"]]
        return Message(RecordDict({"config": ConfigRecord({"client-id": client})}), reply_to=message)

    return app


class Present(InlineGrid):
    """Node i is connected while `there(round, i)`."""

    def __init__(self, app, num_clients: int, there: Callable[[int, int], bool]) -> None:
        super().__init__(app, num_clients)
        self._there, self.round = there, 1

    def get_node_ids(self):
        return [node for node in super().get_node_ids() if self._there(self.round, node - 1001)]

    def next(self, server_round: int) -> None:
        self.round = server_round + 1


def test_a_name_belongs_to_the_node_that_claimed_it_first(caplog) -> None:
    """In round 2 a node with a lower number claims the name lyon too; in round 4 the first node has gone."""
    grid = Present(named_app(["lyon", "oslo", "lyon"]), 3, lambda r, i: r >= 2 if i == 0 else i == 1 or r < 4)
    strategy, seen = Local(), {}

    def on_round(server_round: int) -> None:
        seen[server_round] = strategy.roster.nodes["lyon"]
        grid.next(server_round)

    strategy.start(grid, initial(), 5, on_round=on_round)
    assert seen == {1: 1003, 2: 1003, 3: 1003, 4: 1001, 5: 1001}
    said = [line for line in caplog.messages if "takes no part" in line]
    assert said == ["kindred: node 1001 takes no part: its client id is lyon, which node 1003 already has"]


class Registered(Present):
    """Nodes whose keys were registered at the server, each with or without a name."""

    def __init__(self, names: list[object], registered: list[str], there: Callable[[int, int], bool]) -> None:
        super().__init__(named_app(names), len(names), there)
        self._registered_as = registered

    def get_nodes(self):
        return [NodeInfo(node_id=node, name=self._registered_as[node - 1001]) for node in self.get_node_ids()]


def test_a_registered_node_has_its_name_if_it_reports_its_number_or_none() -> None:
    """Else a key could take part under a second name, whose strikes nobody has counted."""
    strategy = Local(min_available_nodes=1)
    strategy.start(Registered(["lyon", 1002, "eve"], ["lyon", "oslo", ""], lambda r, i: True), initial(), 1)
    assert strategy.roster.nodes == {"eve": 1003, "lyon": 1001, "oslo": 1002}
    grid = InlineGrid(plain_app(), 2)
    grid.get_nodes = lambda: [NodeInfo(node_id=1001, name="lyon"), NodeInfo(node_id=1002, name="")]
    strategy.start(grid, initial(), 1)
    assert strategy.roster.nodes == {"lyon": 1001, 1002: 1002}


@pytest.mark.parametrize(
    ("registered", "owner_in_round_3", "said"),
    [
        (["lyon", "oslo", "eve"], None, "but its key is registered as eve"),
        (["lyon", "oslo", ""], None, "a name reserved for the key registered under it"),
        (["", "oslo", ""], 1003, None),  # nobody knows who comes back
    ],
)
def test_a_registered_name_is_reserved_for_its_node(registered, owner_in_round_3, said, caplog) -> None:
    """Lyon is absent in round 3, when a third node claims its name; lyon is back in round 4."""
    grid = Registered(["lyon", "oslo", "lyon"], registered, lambda r, i: r != 3 if i == 0 else i == 1 or r == 3)
    strategy, seen = Local(min_available_nodes=1), {}

    def on_round(server_round: int) -> None:
        seen[server_round] = strategy.roster.nodes.get("lyon")
        grid.next(server_round)

    strategy.start(grid, initial(), 4, on_round=on_round)
    assert seen == {1: 1001, 2: 1001, 3: owner_in_round_3, 4: 1001}
    warnings = {line for line in caplog.messages if "takes no part" in line}
    assert warnings == ({f"kindred: node 1003 takes no part: its client id is lyon, {said}"} if said else set())


def test_a_node_with_another_s_name_that_is_asked_again_is_listed_once() -> None:
    grid = Registered(["lyon", "oslo", "lyon"], ["lyon", "oslo", "eve"], lambda r, i: True)
    strategy = Local()
    strategy.start(grid, initial(), 1)
    nodes = [1001, 1002, 1003]
    expected = "; node 1003: its client id is lyon, but its key is registered as eve"
    assert strategy.roster._missing_clients(grid, nodes) == expected
    strategy.roster.introductions.clients.pop(1003)
    strategy.roster.introductions.awaited["a message"] = 1003
    assert strategy.roster._missing_clients(grid, nodes) == expected


def test_a_registered_key_has_only_its_own_name(caplog) -> None:
    """Eve connects first and claims the name lyon; in round 3 lyon has a new key and is another node."""
    grid = Registered(
        ["lyon", "lyon", "oslo", "lyon"],
        ["eve", "lyon", "oslo", "lyon"],
        lambda r, i: {1: r == 2, 3: r > 2}.get(i, True),
    )
    strategy, seen = Local(min_available_nodes=1), {}

    def on_round(server_round: int) -> None:
        seen[server_round] = strategy.roster.nodes.get("lyon")
        grid.next(server_round)

    strategy.start(grid, initial(), 3, on_round=on_round)
    assert seen == {1: None, 2: 1002, 3: 1004}
    assert [line for line in caplog.messages if "takes no part" in line] == [
        "kindred: node 1001 takes no part: its client id is lyon, but its key is registered as eve"
    ]


@pytest.mark.parametrize(("claimed", "given"), [("lyon", None), ("zurich-2", "zurich-2")])
def test_a_registered_name_is_reserved_from_the_start_of_a_run(claimed, given, tmp_path, monkeypatch) -> None:
    """The key of lyon is registered and has never connected; the other node's key has no name."""
    (tmp_path / "names.json").write_text('["lyon", "zurich"]')
    monkeypatch.setenv("KINDRED_REGISTERED", str(tmp_path / "names.json"))
    strategy = Local(min_available_nodes=1)
    strategy.start(Registered(["oslo", claimed], ["", ""], lambda r, i: True), initial(), 1)
    assert strategy.roster.nodes == {"oslo": 1001} | ({given: 1002} if given else {})


@pytest.mark.parametrize("name", ["", "a\nb", "x" * (MAX_NAME + 1), 2**64, 1.5, True, b"lyon", ["lyon"]], ids=repr)
def test_an_invalid_name_is_not_accepted(name, caplog) -> None:
    strategy = Local()
    strategy.start(InlineGrid(named_app([name, "oslo"]), 2), initial(), 1)
    assert strategy.clients() == [1001, "oslo"]
    assert any(line.startswith("kindred: the client id of node 1001 is") for line in caplog.messages)


CYRILLIC, COMBINED = "l\u0443on", "orle\u0301ans"  # as lyon and orléans look


@pytest.mark.parametrize(
    ("first", "twin"),
    [
        (7, "7"),
        ("7", 7),
        ("lyon", "Lyon "),
        ("orl\u00e9ans", COMBINED),
        ("stra\u00dfe", "STRASSE"),
        ("\uff4cyon", "lyon"),
    ],
)
def test_ids_that_look_the_same_are_one_client_s(first, twin, caplog) -> None:
    """The twin connects in round 2 and is refused; from round 4 on, the first node is gone, and it is that client."""
    grid = Present(named_app([twin, "oslo", first]), 3, lambda r, i: r >= 2 if i == 0 else i == 1 or r < 4)
    strategy, seen = Local(), {}

    def on_round(server_round: int) -> None:
        seen[server_round] = dict(strategy.roster.nodes)
        grid.next(server_round)

    strategy.start(grid, initial(), 5, on_round=on_round)
    assert seen[3] == {"oslo": 1002, first: 1003} and seen[5] == {"oslo": 1002, first: 1001}
    assert {row["client"] for row in strategy.history.rows} == {"oslo", first}
    assert [line for line in caplog.messages if "takes no part" in line] == [
        f"kindred: node 1001 takes no part: its client id is {first}, which node 1003 already has"
    ]
    together = Local()
    together.start(InlineGrid(named_app([first, "oslo", twin]), 3), initial(), 1)
    assert together.roster.nodes == {first: 1001, "oslo": 1002}


@pytest.mark.parametrize("name", [CYRILLIC, "lyon-\u0430", "\u03bfslo-2", "\u0430\u03b1"])
def test_an_id_of_several_scripts_is_refused(name, caplog) -> None:
    strategy = Local(min_available_nodes=1)
    strategy.start(InlineGrid(named_app([name, "\u043c\u0438\u0440-1", "\u6771\u4eac A"]), 3), initial(), 1)
    assert set(strategy.roster.nodes.values()) == {1002, 1003}
    (said,) = [line for line in caplog.messages if "takes no part" in line]
    assert re.search(rf"its client id {name} has letters of [A-Z]+ and [A-Z]+ script, allowed: of one of them$", said)


def test_a_run_that_is_resumed_knows_its_clients_by_any_spelling(tmp_path) -> None:
    for rounds, name in ((1, 7), (2, "7")):
        strategy = FedAvg()
        strategy.start(InlineGrid(named_app([name, "oslo"]), 2), initial(), rounds, checkpoints=Checkpoints(tmp_path))
        assert strategy.roster.nodes == {7: 1001, "oslo": 1002}


@pytest.mark.parametrize("claimed", [1003, "1003"])
@pytest.mark.parametrize("later", [False, True])
def test_a_node_without_a_name_keeps_its_number(claimed, later, caplog) -> None:
    """A node with a lower number reports the number of another one, which is there already or comes later."""
    grid = Present(named_app([claimed, "oslo", 1003]), 3, lambda r, i: i < 2 or not later or r >= 2)
    strategy = Local()
    strategy.start(grid, initial(), 3, on_round=grid.next)
    assert strategy.roster.nodes == {1003: 1003, "oslo": 1002}
    said = [line for line in caplog.messages if "takes no part" in line]
    assert said == ["kindred: node 1001 takes no part: its client id is 1003, which node 1003 already has"]


def test_a_reply_from_another_node_is_refused_without_a_strike() -> None:
    """Otherwise a node that replies in another client's name could get that client excluded."""

    def spoofed(server_round: int, client: int) -> object:
        return "ok"

    class Spoofing(FaultyGrid):
        def pull_messages(self, message_ids):
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if reply.metadata.message_type == "train" and reply.metadata.src_node_id == 1002:
                    reply.metadata.__dict__["_src_node_id"] = 1003
            return replies

    strategy = Local(max_strikes=1)
    strategy.start(Spoofing(plain_app(True), 3, spoofed), initial(), 3)
    rows = [row["status"] for row in strategy.history.rows if row["client"] == 1002]
    assert rows == ["refused: it came from node 1003, expected 1002"] * 3
    assert values(strategy.client_models()[1002]) == values(initial())


def test_a_name_reported_by_another_node_is_not_accepted(caplog) -> None:
    class Spoofing(InlineGrid):
        def pull_messages(self, message_ids):
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if reply.metadata.message_type.startswith("query") and reply.metadata.src_node_id == 1002:
                    reply.metadata.__dict__["_src_node_id"] = 1003
            return replies

    strategy = Local()
    strategy.start(Spoofing(named_app(["a", "b", "c"]), 3), initial(), 1)
    assert strategy.clients() == ["a", "c"]
    assert "kindred: a reply that node 1002 was asked for came from node 1003; it is not used" in caplog.messages


class FarAway(FaultyGrid):
    """Returns replies as Flower's grid over a network does: it rebuilds them from the bytes that a client sent, returns
    all requested replies or none, and has deleted them at the next request. `forge` may change the bytes."""

    def __init__(self, app, num_clients: int, forge: Callable[[Message, dict[str, bytes]], None]) -> None:
        super().__init__(app, num_clients, lambda r, c: "ok")
        self._forge, self._gone = forge, {}

    def push_messages(self, messages):
        messages = list(messages)
        ids = list(super().push_messages(messages))
        self._gone |= {
            message_id: Message(Error(1, "it is gone"), reply_to=message) for message_id, message in zip(ids, messages)
        }
        return ids

    def pull_messages(self, message_ids):
        replies = []
        for message_id in message_ids:
            if message_id not in self._waiting:
                replies.append(self._gone[message_id])
                continue
            (reply,) = super().pull_messages([message_id])
            contents = {key: each.deflate() for key, each in get_all_nested_objects(reply).items()}
            key = reply.object_id
            self._forge(reply, contents)
            replies.append((key, contents))
        return [each if isinstance(each, Message) else inflate_object_from_contents(*each) for each in replies]


def of_the_attackers(reply: Message) -> bool:
    return reply.metadata.message_type == "train" and reply.metadata.src_node_id - 1001 in ATTACKERS


@pytest.mark.parametrize(
    "forged",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"Message  0\x00",
        lambda data: b"X" + data,
        lambda data: data.replace(b"Array ", b"MetricRecord "),
        lambda data: data.replace(b"float32", b"float\xff2"),
        lambda data: data[: data.index(b"\x00") + 1] + b"[" * 90_000,
    ],
    ids=range(7),
)
def test_a_reply_that_flower_cannot_unpack_loses_no_other_reply(forged, monkeypatch, caplog) -> None:
    monkeypatch.setattr("kindred.engine.strategy.simulated", lambda grid: False)

    def forge(reply: Message, contents: dict[str, bytes]) -> None:
        if of_the_attackers(reply):
            contents.update({key: forged(data) for key, data in contents.items()})

    def run(grid: InlineGrid) -> Local:
        strategy = Local(max_strikes=0)
        strategy.start(grid, initial(), 3)
        return strategy

    strategy = run(FarAway(plain_app(True), CLIENTS, forge))
    lost = run(FaultyGrid(plain_app(True), CLIENTS, lambda r, c: "lost" if c in ATTACKERS else "ok"))
    assert everything(strategy)[:3] == everything(lost)[:3]
    statuses = {row["client"] - 1001: row["status"] for row in strategy.history.rows}
    assert all(statuses[c].startswith("refused: it cannot be unpacked (") == (c in ATTACKERS) for c in range(CLIENTS))
    assert set(strategy.history.refused()) == {1001 + c for c in ATTACKERS}
    assert "round 1 goes on without client 1002: refused: it cannot be unpacked" in caplog.text


def test_a_client_whose_replies_cannot_be_unpacked_is_excluded_for_some_rounds(monkeypatch) -> None:
    monkeypatch.setattr("kindred.engine.strategy.simulated", lambda grid: False)
    strategy = Local(max_strikes=2)
    strategy.start(
        FarAway(plain_app(True), CLIENTS, lambda reply, contents: of_the_attackers(reply) and contents.clear()),
        initial(),
        4,
    )
    assert [line["asked"] for line in strategy.history.rounds] == [6, 6, 3, 3]


def test_a_reply_to_another_client_s_message_is_ignored(monkeypatch) -> None:
    """The client writes the sender and the message replied to; here it claims both of client 1006."""
    monkeypatch.setattr("kindred.engine.strategy.simulated", lambda grid: False)

    def forge(reply: Message, contents: dict[str, bytes]) -> None:
        if of_the_attackers(reply):
            (victims,) = (i for i, message in grid._waiting.items() if message.metadata.dst_node_id == 1006)
            key = reply.object_id
            vars(reply.metadata).update(_reply_to_message_id=victims, _src_node_id=1006)
            contents[key] = reply.deflate()

    grid, strategy = FarAway(plain_app(True), CLIENTS, forge), Local()
    strategy.start(grid, initial(), 2)
    lost = Local()
    lost.start(FaultyGrid(plain_app(True), CLIENTS, lambda r, c: "lost" if c in ATTACKERS else "ok"), initial(), 2)
    assert everything(strategy)[:3] == everything(lost)[:3]
    assert {row["client"] - 1001 for row in strategy.history.rows if row["status"] != "ok"} == set(ATTACKERS)


@pytest.mark.parametrize("fault", ["none", "dict", "exit"])
def test_a_client_app_that_returns_no_message_or_ends_python_loses_its_client_alone(fault) -> None:
    app = plain_app()

    def answered(message: Message, context: Context) -> object:
        if context.node_config["partition-id"] != 0 or message.metadata.message_type != MessageType.TRAIN:
            return app(message, context)
        return {"none": None, "dict": {}}[fault] if fault != "exit" else sys.exit(3)

    (strategy := HeurFedAMP()).start(InlineGrid(answered, 3), initial(), 1)
    statuses = {row["client"]: row["status"] for row in strategy.history.rows}
    reason = {
        "none": "TypeError: its ClientApp returned NoneType, allowed: a Message",
        "dict": "TypeError: its ClientApp returned dict, allowed: a Message",
        "exit": "SystemExit: 3",
    }[fault]
    assert statuses[1001].endswith(reason) and (statuses[1002], statuses[1003]) == ("ok", "ok")


@pytest.mark.filterwarnings("error:.*overflow:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e16, np.float16(np.inf), np.float32(1e16), -np.float32(1e16)])
def test_a_model_whose_replies_would_be_refused_is_refused_at_the_start(value) -> None:
    arrays = read_record(initial()) | {"mask": np.array([0, value], np.asarray(value).dtype)}
    with pytest.raises(ValueError, match="initial_arrays: array 'mask' has numbers that are not finite or above 1e.15"):
        HeurFedAMP().start(InlineGrid(plain_app(), 3), to_record(arrays), 1)


def test_buffers_that_name_no_array_are_refused() -> None:
    with pytest.raises(ValueError, match="buffers is 'layer.weight', allowed: a list of names"):
        HeurFedAMP(buffers="layer.weight")
    strategy = HeurFedAMP(buffers=["norm.running_mean", "bias"])
    with pytest.raises(ValueError, match="buffers is 'bias', allowed: names of arrays .*, such as 'layer.weight'"):
        strategy.start(InlineGrid(plain_app(), 3), initial(), 1)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("values", [[65504, -65504], []])
def test_a_model_of_finite_half_precision_is_accepted(values) -> None:
    check_initial(to_record({"w": np.array(values, np.float16)}))


def test_one_node_without_the_query_does_not_keep_others_from_being_asked(monkeypatch) -> None:
    """Machines may have different apps, and one may lie."""
    monkeypatch.setattr("kindred.engine.strategy.simulated", lambda grid: False)
    app = named_app(["", "lyon", "oslo"])
    known = app._registered_funcs["query.identity"]

    def identity(message, context):
        if context.node_config["partition-id"] == 0:
            raise ValueError("No query function registered with name 'identity'")
        return known(message, context)

    app._registered_funcs["query.identity"] = identity
    strategy = Local()
    strategy.start(InlineGrid(app, 3), initial(), 1)
    assert strategy.clients() == [1001, "lyon", "oslo"]


def test_a_node_that_never_reports_its_name_delays_one_round_only() -> None:
    class Mute(FaultyGrid):
        def pull_messages(self, message_ids):
            return super().pull_messages(
                [
                    i
                    for i in message_ids
                    if i not in self._waiting
                    or self._waiting[i].metadata.message_type != "query.identity"
                    or self._waiting[i].metadata.dst_node_id != 1002
                ]
            )

    strategy, went_on = Local(wait_timeout=3), [time.monotonic()]
    grid = Mute(named_app(["a", "b", "c"]), 3, lambda r, c: "ok")
    strategy.start(grid, initial(), 4, on_round=lambda r: went_on.append(time.monotonic()))
    first, *others = np.diff(went_on)
    assert first >= 3 > 2 > max(others)
    assert strategy.clients() == ["a", "c"]


def test_each_client_whose_message_is_not_accepted_is_in_the_history() -> None:
    """As when nodes disconnect after they were listed: Flower then returns an empty id."""

    class Full(InlineGrid):
        def push_messages(self, messages):
            messages = list(messages)
            ids = super().push_messages(messages)
            return [
                "" if m.metadata.message_type == "train" and m.metadata.dst_node_id < 1003 else i
                for m, i in zip(messages, ids)
            ]

    strategy = Local()
    strategy.start(Full(plain_app(True), 4), initial(), 1)
    assert [row["status"] for row in strategy.history.rows] == ["its message could not be sent"] * 2 + ["ok"] * 2


@pytest.mark.parametrize("name", ["fedavg", "heurfedamp", "local"])
def test_a_finite_model_cannot_make_another_client_s_model_infinite(name) -> None:
    def huge(content: RecordDict) -> None:
        content["arrays"]["layer.weight"] = Array(np.full((2, 2), 3e38, np.float32))
        content["metrics"]["num-examples"] = MAX_EXAMPLES

    strategy = make(name, max_strikes=0)
    strategy.start(FaultyGrid(plain_app(), 4, lambda r, c: huge if c == 2 else "ok"), initial(), 4)
    assert {row["status"] for row in strategy.history.rows if row["client"] != 1003} == {"ok"}
    assert strategy.history.refused() == {1003: {"array 'layer.weight' holds 3e+38, allowed: up to 1e+15": 4}}
    assert np.isfinite(flat(strategy.global_arrays())).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_largest_finite_values_of_a_type_are_accepted_and_infinite_ones_refused(dtype) -> None:
    def admitted(value: float) -> None:
        content = RecordDict({"a": to_record({"w": np.full(9, value, dtype)}), "m": MetricRecord({"n": 1})})
        admit(content, "n", lambda arrays: None)

    for value in (0, -1, LARGEST if dtype != "float16" else np.finfo(np.float16).max, np.finfo(dtype).tiny):
        admitted(value)
    for value in (np.nan, np.inf, -np.inf):
        with pytest.raises(Refused, match="values that are not finite"):
            admitted(value)
    if dtype != "float16":
        with pytest.raises(Refused, match=r"holds 1.01e\+15, allowed: up to 1e\+15"):
            admitted(-1.01 * LARGEST)


def test_a_lost_superlink_ends_the_run() -> None:
    class Gone(InlineGrid):
        def pull_messages(self, message_ids):
            raise ConnectionError("refused")

    with pytest.raises(ConnectionError):
        Local().start(Gone(plain_app(), 2), initial(), 1)


# --- Refused again and again --------------------------------------------------------------------------


def bad(content: RecordDict) -> None:
    content["metrics"]["num-examples"] = 0


def worse(content: RecordDict) -> None:
    content["arrays"].clear()


def test_a_client_refused_repeatedly_is_excluded_for_some_rounds(caplog) -> None:
    caplog.set_level("INFO")
    strategy = Local(max_strikes=2)
    strategy.start(FaultyGrid(plain_app(True), 3, lambda r, c: bad if c == 1 and r < 9 else "ok"), initial(), 12)
    asked = [row["round"] for row in strategy.history.rows if row["client"] == 1002]
    assert asked == [1, 2, 5, 9, 10, 11, 12]  # two strikes: excluded for two rounds; a third: for three
    assert strategy.roster.state() == {"strikes": {}, "resting": {}, "kept-names": set()}
    said = [line for line in caplog.messages if "1002" in line and "goes on without" not in line]
    assert said == [
        "kindred: client 1002 is excluded from the next 2 rounds: no usable reply in 2 rounds in a row",
        "kindred: client 1002 may take part again, from round 5",
        "kindred: client 1002 is excluded from the next 3 rounds: no usable reply in 3 rounds in a row",
        "kindred: client 1002 may take part again, from round 9",
    ]


def test_an_excluded_client_stays_excluded_after_a_resume(tmp_path) -> None:
    """The run is interrupted after round 2, in which the client got its second strike."""

    def run(folder: Path, after: float = math.inf) -> Local:
        strategy = Local(max_strikes=2)
        grid = FaultyGrid(named_app(["a", "b", "c"]), 3, lambda r, c: bad if c == 1 else "ok")
        strategy.start(interrupted(grid, after), initial(), 7, checkpoints=Checkpoints(folder))
        return strategy

    with pytest.raises(Interrupted):
        run(tmp_path / "one", after=2)
    resumed, whole = run(tmp_path / "one"), run(tmp_path / "other")
    assert [row["round"] for row in whole.history.rows if row["client"] == "b"] == [1, 2, 5]
    assert everything(resumed) == everything(whole)


@pytest.mark.parametrize(
    "fates",
    [
        (bad, "ok", bad, bad, "ok", bad),  # not in a row
        ("error",) * 6,
        ("lost", "silent", "error") * 2,
    ],
)
def test_a_client_with_errors_or_few_strikes_in_a_row_is_not_excluded(fates) -> None:
    strategy = Local(max_strikes=3)
    grid = FaultyGrid(plain_app(True), 2, lambda r, c: fates[r - 1] if c == 1 else "ok")
    strategy.start(grid, initial(), len(fates), timeout=0.1)
    assert [line["asked"] for line in strategy.history.rounds] == [2] * len(fates)


def test_refusals_are_counted_by_client_and_reason() -> None:
    fates = {(1, 0): bad, (2, 0): worse, (3, 0): bad, (2, 2): worse, (3, 2): "error"}
    strategy = Local()
    strategy.start(FaultyGrid(plain_app(True), 3, lambda r, c: fates.get((r, c), "ok")), initial(), 3)
    examples, arrays = "num-examples is 0, allowed: 1 to 1000000000000", "array 'layer.weight' is missing"
    assert strategy.history.refused() == {1001: {examples: 2, arrays: 1}, 1003: {arrays: 1}}
    settings_of = {"strategy": "local", "dataset": "digits", "partition": "iid", "seed": 0, "num-rounds": 3}
    assert summarise(settings_of, strategy.history, {})["refused"] == [
        {"client": 1001, "reasons": {examples: 2, arrays: 1}},
        {"client": 1003, "reasons": {arrays: 1}},
    ]


# --- Outliers -----------------------------------------------------------------------------------------


def further(by: float) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        for name, array in content["arrays"].items():
            if name in ("layer.weight", "0/layer.weight"):  # FedeRiCo: the update of its own model
                content["arrays"][name] = Array(array.numpy() + np.float32(by))

    return change


@pytest.mark.parametrize(
    ("strategy", "app"),
    [
        (FedAvg, plain_app),
        (Local, plain_app),
        (lambda **more: FedAMP(sigma=1.0, **more), plain_app),
        (FedeRiCo, collaboration_app),
    ],
    ids=["fedavg", "local", "fedamp", "federico"],
)
def test_an_update_with_a_norm_above_the_bound_is_refused(strategy, app) -> None:
    def run(bound: float, by: float):
        one = strategy(max_update_norm=bound)
        one.start(FaultyGrid(app(True), 4, lambda r, c: further(by) if (r, c) == (2, 1) else "ok"), initial(), 3)
        return [row["status"] for row in one.history.rows if row["status"] != "ok"]

    assert run(0, 50) == run(30, 5) == []
    for by in (50, 1e6, 1e14):
        (status,) = run(30, by)
        assert status.endswith(", allowed: up to 30")
        assert float(status.split()[5].rstrip(",")) == pytest.approx(2 * by, rel=0.1)


@where_models_travel
def test_every_method_bounds_the_norm_of_updates(name) -> None:
    """Whatever names the arrays of a client's reply have."""

    def huge(content: RecordDict) -> None:
        (record,) = content.array_records.values()
        for key, array in record.items():
            if array.dtype == "float32" and not key.startswith("model/"):  # from FedeRiCo's new clients
                record[key] = Array(array.numpy() + np.float32(1e6))

    strategy = make(name, max_update_norm=1e5)
    strategy.start(FaultyGrid(app_of(name), 4, lambda r, c: huge if (r, c) == (2, 1) else "ok"), initial_of(name), 3)
    (row,) = [row for row in strategy.history.rows if row["status"] != "ok"]
    assert (row["round"], row["client"]) == (2, 1002)
    assert re.fullmatch(r"refused: its update has norm \S+, allowed: up to 100000", row["status"])


def test_the_norm_of_an_update_is_over_parameters_only() -> None:
    strategy = FedAvg(max_update_norm=1e9)
    strategy.start(InlineGrid(plain_app(), 2), initial(), 1)
    sent = read_record(initial())
    moved = {name: array + 3 for name, array in sent.items()}
    assert strategy.update_norm(1001, moved) == pytest.approx(6)  # four weights; the running mean is not a parameter


# --- Rounds without replies --------------------------------------------------------------------------


def test_empty_rounds_in_a_row_end_the_run() -> None:
    strategy = Local(max_empty_rounds=3)
    fate = {1: "error", 2: "error", 3: "ok"}
    with pytest.raises(TooFewClients) as ended:
        strategy.start(FaultyGrid(plain_app(), 2, lambda r, c: fate.get(r, "error")), initial(), 20)
    assert str(ended.value) == (
        "no client gave a usable answer in 3 rounds in a row (max_empty_rounds), "
        "so the run ends; client 1002: error 0: the worker"
    )
    assert [line["answered"] for line in strategy.history.rounds] == [0, 0, 2, 0, 0, 0]
    assert len(strategy.client_models()) == 2


def test_clients_lost_for_the_same_reason_are_named_in_one_line(caplog) -> None:
    strategy = Local()
    strategy.start(FaultyGrid(plain_app(), 5, lambda r, c: "error" if r == 2 and c != 2 else "ok"), initial(), 3)
    lost = [line for line in caplog.messages if "goes on without" in line]
    assert lost == [
        "kindred: round 2 goes on without client 1001: error 0: the worker",
        "kindred: round 2 goes on without 3 more clients, for the reason of client 1001: 1002, 1004, 1005",
    ]


@every_method
def test_a_run_in_which_all_are_refused_and_excluded_ends_with_a_reason(name) -> None:
    strategy = make(name, max_strikes=1, max_empty_rounds=4)
    with pytest.raises(TooFewClients, match="4 rounds in a row .*client 1003: refused: num-examples is 0"):
        strategy.start(FaultyGrid(app_of(name), 3, lambda r, c: bad if r > 1 else "ok"), initial_of(name), 20)
    asked = [line["asked"] for line in strategy.history.rounds if line["round"] > 0]
    assert asked == [3] * 5  # where all clients would be excluded, none is


DEAD = (
    "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: ClientAppActor\n\tpid: 4242'>"
)


@pytest.mark.parametrize("when", ["query.identity", "train", "evaluate"])
def test_a_dead_worker_ends_a_simulation_with_that_reason(when) -> None:
    class Dying(InlineGrid):
        def pull_messages(self, message_ids):
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if reply.metadata.message_type == when and reply.metadata.group_id in ("", "2"):
                    vars(reply).update(_content=None, _error=Error(0, DEAD))
            return replies

    strategy = Local()
    with pytest.raises(WorkerDied, match="for lack of memory.*ActorDiedError") as ended:
        strategy.start(Dying(named_app(["a", "b"]) if when.startswith("query") else plain_app(), 2), initial(), 4)
    assert "\n" not in str(ended.value)
    assert [line["round"] for line in strategy.history.rounds] == ([] if when.startswith("query") else [1])


@pytest.mark.deployment
@pytest.mark.engine
def test_a_killed_worker_ends_a_simulation_in_the_engine(tmp_path) -> None:
    command = [
        Path(sysconfig.get_path("scripts")) / "kindred",
        "run",
        "--engine=flower",
        f"--output-dir={tmp_path / 'results'}",
        "--clients=2",
        "--rounds=300",
        *(f"--set={each}=2" for each in ("num-groups", "samples-per-client")),
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        said = [line for line in iter(run.stdout.readline, "") if kill_a_worker(run.pid, line)]
    assert run.returncode == 1
    assert said[-1].startswith("kindred: WorkerDied: a worker process of the simulation died"), said
    (folder,) = (tmp_path / "results").iterdir()
    assert list((folder / "checkpoints").iterdir())


def kill_a_worker(pid: int, line: str) -> bool:
    """Kill one Ray actor of this run when the run has logged the end of the first round."""
    if line.startswith("round   1/"):
        marks = {child.environ().get(MARK) for child in psutil.Process(pid).children()} - {None}
        workers = [
            process for mark in marks for process in marked_processes(mark) if "ClientAppActor" in process.name()
        ]
        workers[0].kill()
    return True


def test_a_remote_client_cannot_end_a_run_by_its_reply(monkeypatch) -> None:
    monkeypatch.setattr("kindred.engine.strategy.simulated", lambda grid: False)

    def say(message: Message) -> None:
        vars(message).update(_content=None, _error=Error(0, DEAD))

    strategy = make("fedavg")
    strategy.start(Attacked("fedavg", [say] * 12, [say] * 12), initial(), ROUNDS)
    assert [line["answered"] for line in strategy.history.rounds[:ROUNDS]] == [3] * ROUNDS


# --- Half of the clients fail in every round ----------------------------------------------------------

MANY, LONG = 20, 30


def fates_of(seed: int) -> dict[tuple[int, int], str]:
    """(round, client) -> how half of the clients fail in each round. A crashed client is absent in the next round."""
    rng = random.Random(seed)
    fates: dict[tuple[int, int], str] = {}
    for r in range(1, LONG + 1):
        away = [c for c in range(MANY) if fates.get((r - 1, c)) == "crash"]
        fates |= {(r, c): "away" for c in away}
        others = [c for c in range(MANY) if c not in away]
        fates |= {(r, c): rng.choice(["error", "silent", "crash"]) for c in rng.sample(others, MANY // 2 - len(away))}
    return fates


class Failing(FaultyGrid):
    """Clients fail as `fates_of` says."""

    def __init__(self, fates: dict[tuple[int, int], str]) -> None:
        super().__init__(plain_app(), MANY, lambda r, c: {"crash": "error"}.get(fate := fates.get((r, c), "ok"), fate))
        self._fates, self._number = fates, 1

    def get_node_ids(self):
        return [node for node in super().get_node_ids() if self._fates.get((self._number, node - 1001)) != "away"]

    def next(self, server_round: int) -> None:
        self._number = server_round + 1


def trained(w: np.ndarray, client: int, mu: float = 0.0) -> np.ndarray:
    """Model that `plain_app` returns: 2 x 2 weights, three running means, one counter in one vector of 8."""
    weights, received = w[:4].copy(), w[:4]
    for _ in range(10):
        weights -= 0.1 * ((weights - target(client).reshape(-1)) + mu * (weights - received))
    return np.concatenate([weights, w[4:] + client + 1])


def fedavg_in_numpy(rounds: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
    """Global model after each round; `rounds` has (asked, answered) of each."""
    model, after = np.zeros(8), []
    for _, answered in rounds:
        if answered:
            counters = [trained(model, c)[7] for c in answered] if len(answered) > 1 else [model[7]]
            counter = sorted(counters)[(len(counters) - 1) // 2]  # counters are not averaged
            model = np.average([trained(model, c) for c in answered], axis=0, weights=[10 * (c + 1) for c in answered])
            model[7] = counter
        after.append(model)
    return after


def fedamp_in_numpy(rounds: list[tuple[list[int], list[int]]], heuristic: bool) -> list[dict[int, np.ndarray]]:
    """All clients' models after each round: Eq. 5 or the cosine form, with self-weight 0.3."""
    models: dict[int, np.ndarray] = {}
    online: list[int] = []
    after = []
    for number, (asked, answered) in enumerate(rounds, start=1):
        mu = 1 / (10 * 0.5 ** ((number - 1) // 10))  # lambda / alpha_k
        for c in asked:
            models.setdefault(c, np.zeros(8))
        cloud = {}
        for i in asked:
            others = [j for j in online if j != i]
            if not others:
                cloud[i] = models[i].copy()
                continue
            scores = []
            for j in others:
                a, b = models[i][:4], models[j][:4]
                if heuristic:
                    length = np.linalg.norm(a) * np.linalg.norm(b)
                    scores.append(2.0 * (a @ b / length if length else 0.0))
                else:
                    scores.append(-((a - b) ** 2).sum() / 2.0)
            shares = np.exp(np.array(scores) - max(scores))
            shares *= 0.7 / shares.sum()
            cloud[i] = 0.3 * models[i] + sum(share * models[j] for share, j in zip(shares, others))
            cloud[i][7] = models[i][7]
        models = {**models, **{c: trained(cloud[c], c, mu) for c in answered}}
        online = answered or online
        after.append(models)
    return after


def alone_in_numpy(rounds: list[tuple[list[int], list[int]]]) -> list[dict[int, np.ndarray]]:
    models: dict[int, np.ndarray] = {}
    after = []
    for asked, answered in rounds:
        models = {**{c: np.zeros(8) for c in asked}, **models}
        models |= {c: trained(models[c], c) for c in answered}
        after.append(models)
    return after


def flat(record: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.reshape(-1).astype(np.float64) for array in read_record(record).values()])


@pytest.mark.parametrize("name", ["fedavg", "fedamp", "heurfedamp", "local"])
def test_a_run_in_which_half_of_the_clients_fail_matches_numpy(name) -> None:
    """20 clients, 30 rounds: errors, silence and crashes. The state equals NumPy's from the clients that replied."""
    fates = fates_of(seed=7)
    assert {fate: sum(f == fate for f in fates.values()) > 40 for fate in ("error", "silent", "crash", "away")} == {
        "error": True,
        "silent": True,
        "crash": True,
        "away": True,
    }
    grid = Failing(fates)
    own = {"sigma": 2.0, "self_weight": 0.3, "alpha": 10.0, "alpha_decay": 0.5, "alpha_decay_every": 10}
    strategy = REGISTRY[name].strategy(fraction_evaluate=0.0, max_strikes=0, **(own if "amp" in name else {}))
    rounds = [
        ([c for c in range(MANY) if fates.get((r, c)) != "away"], [c for c in range(MANY) if (r, c) not in fates])
        for r in range(1, LONG + 1)
    ]
    assert [len(answered) for _, answered in rounds] == [MANY // 2] * LONG
    seen: list[dict[int, dict[str, bytes]]] = [{}]
    after: list[dict[int, np.ndarray]] = []

    def on_round(server_round: int) -> None:
        grid.next(server_round)
        if name == "fedavg":
            after.append({0: flat(strategy.global_arrays())})
            return
        records = {client - 1001: record for client, record in strategy.client_models().items()}
        seen.append({client: values(record) for client, record in records.items()})
        after.append({client: flat(record) for client, record in records.items()})
        for client, before in seen[-2].items():
            if client not in rounds[server_round - 1][1]:
                assert seen[-1][client] == before, (server_round, client)

    strategy.start(grid, initial(), LONG, timeout=0.05, on_round=on_round)
    lines = strategy.history.rounds
    assert [(line["asked"], line["answered"]) for line in lines] == [(len(a), len(b)) for a, b in rounds]
    if name == "fedavg":
        expected = [{0: model} for model in fedavg_in_numpy(rounds)]
    elif name == "local":
        expected = alone_in_numpy(rounds)
    else:
        expected = fedamp_in_numpy(rounds, heuristic=name == "heurfedamp")
    for found, due in zip(after, expected, strict=True):
        assert found.keys() == due.keys()
        for client in due:
            assert found[client] == pytest.approx(due[client], rel=1e-4, abs=1e-5)


@every_method
def test_a_run_in_which_half_of_the_clients_fail_is_reproducible(name) -> None:
    rng = random.Random(name)
    fates = {(r, c): rng.choice(["error", "lost", "silent", bad]) for r in range(10) for c in rng.sample(range(6), 3)}

    def run():
        strategy = make(name, max_strikes=0)
        grid = FaultyGrid(app_of(name), 6, lambda r, c: fates.get((r, c), "ok"))
        strategy.start(grid, initial_of(name), 9, timeout=0.1)
        return strategy, everything(strategy)

    strategy, found = run()
    assert {line["answered"] for line in strategy.history.rounds if 1 <= line["round"] <= 9} == {3}
    assert all(np.isfinite(flat(record)).all() for record in strategy.client_models().values())
    assert run()[1] == found


# --- Stragglers ---------------------------------------------------------------------------------------


class Threads(InlineGrid):
    """Every client works in its own thread and replies when it has finished; `late` has replies of earlier rounds."""

    def __init__(self, app, num_clients: int) -> None:
        super().__init__(app, num_clients)
        self._done: dict[str, Message] = {}
        self.late: list[Message] = []

    def push_messages(self, messages):
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message_id, message in zip(ids, messages, strict=True):
            threading.Thread(target=self._work, args=(message_id, message), daemon=True).start()
        return ids

    def _work(self, message_id: str, message: Message) -> None:
        self._done[message_id] = self._answer(message)

    def pull_messages(self, message_ids):
        asked = set(message_ids)
        self.late += [self._done.pop(i) for i in list(self._done) if i not in asked]
        return [self._done.pop(i) for i in asked if i in self._done] + self.late


def test_a_straggler_delays_no_round_and_its_late_replies_are_ignored() -> None:
    app, timeout = plain_app(True), 0.3
    train = app._registered_funcs["train.default"]

    def slow(message, context):
        if context.node_config["partition-id"] == 1 and message.metadata.group_id == "1":
            time.sleep(10 * timeout)
        return train(message, context)

    app._registered_funcs["train.default"] = slow
    grid, strategy = Threads(app, 3), Local()
    went_on: list[float] = []

    def on_round(server_round: int) -> None:
        if server_round > 1:
            time.sleep(timeout)
        went_on.append(time.monotonic())

    started = time.monotonic()
    strategy.start(grid, initial(), 14, timeout=timeout, on_round=on_round)
    assert went_on[0] - started < timeout + 5
    assert any(reply.metadata.group_id == "1" for reply in grid.late)  # it did arrive, in the middle of a later round
    statuses = [row["status"] for row in strategy.history.rows if row["client"] == 1002]
    assert statuses == [f"no answer within {timeout:g} s", *["ok"] * 13]
    only = Local()  # the straggler's model is that of 13 rounds
    only.start(InlineGrid(plain_app(True), 3), initial(), 13)
    assert values(strategy.client_models()[1002]) == values(only.client_models()[1002])
