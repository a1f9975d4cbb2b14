"""Clients that do not reply, or not completely: they delay the others for a bounded time, and are then excluded."""

from __future__ import annotations

import re
import threading
import time

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo

from kindred import InlineGrid, Local, TooFewClients
from kindred.engine.admission import Refused
from kindred.engine.roster import Roster
from kindred.engine.transport import PATIENCE, pull, source_of
from kindred.messages import IDENTITY_QUERY, REFUSAL_QUERY
from kindred.packing import packed, unpacked, unpacking
from kindred.versions import VERSION

from .client_apps import initial, plain_app
from .grids import FaultyGrid
from .test_conformance import app_of, every_method, initial_of, make

FAR_AWAY = "kindred.engine.strategy.simulated"


class Blocking(InlineGrid):
    """Clients announce replies to messages of these kinds and do not upload them, so that Flower blocks."""

    def __init__(self, app, num_clients: int, clients: tuple[int, ...], kinds: tuple[str, ...] = ("train",)) -> None:
        super().__init__(app, num_clients)
        self._clients, self._kinds, self.released = clients, kinds, threading.Event()
        self._lock = threading.Lock()

    def pull_messages(self, message_ids):
        for message_id in message_ids:
            message = self._waiting.get(message_id)
            if (
                message
                and message.metadata.message_type in self._kinds
                and (message.metadata.dst_node_id - 1001 in self._clients)
            ):
                self.released.wait(60)
                return []
        with self._lock:
            return super().pull_messages(message_ids)


@every_method
def test_an_announced_reply_that_is_not_uploaded_loses_no_other_reply(name, monkeypatch) -> None:
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)
    monkeypatch.setattr("kindred.engine.transport.PATIENCE", 0.2)
    grid = Blocking(app_of(name), 4, (0, 2))
    strategy = make(name)
    started = time.monotonic()
    strategy.start(grid, initial_of(name), 1, timeout=2)
    assert time.monotonic() - started < 50  # Flower would block for 60 s with each of two clients
    statuses = {row["client"] - 1001: row["status"] for row in strategy.history.rows if row["round"] == 1}
    assert statuses == {0: "no answer within 2 s", 1: "ok", 2: "no answer within 2 s", 3: "ok"}
    grid.released.set()


def reply_to(message_id: str) -> Message:
    InlineGrid(plain_app(), 1)  # without a grid, this process has no identity to send messages with
    reply = Message(RecordDict(), 7, "train")
    vars(reply.metadata)["_reply_to_message_id"] = message_id
    return reply


def test_many_blocked_replies_delay_the_others_little() -> None:
    """30 of 40 replies block: the server waits 2 s for the first, 1 s for the next, and so on."""
    released = threading.Event()

    class Grid:
        def pull_messages(self, message_ids):
            (message_id,) = message_ids
            if int(message_id) < 30:
                released.wait(60)
                return []
            return [reply_to(message_id)]

    started = time.monotonic()
    found = {
        message_id for message_id, _ in pull(Grid(), [str(i) for i in range(40)], lambda: started + 5, simulated=False)
    }
    assert found == {str(i) for i in range(30, 40)}
    assert 5 <= time.monotonic() - started < 5 + 2
    released.set()


def test_a_slow_upload_within_the_timeout_counts() -> None:
    """An upload takes longer than the server waits: the others are fetched at the same time."""

    class Grid:
        def __init__(self) -> None:
            self.order: list[str] = []

        def pull_messages(self, message_ids):
            (message_id,) = message_ids
            if message_id == "slow":
                time.sleep(PATIENCE + 0.5)
            return [reply_to(message_id)]

    deadline = time.monotonic() + 20
    assert [message_id for message_id, _ in pull(Grid(), ["slow", "quick"], lambda: deadline, simulated=False)] == [
        "quick",
        "slow",
    ]
    assert time.monotonic() < deadline - 10


def test_a_reply_that_is_on_its_way_at_a_deadline_counts_in_the_next_call(monkeypatch) -> None:
    """As for sites that only validate: the SuperLink delivers a reply once, and then says that there is none."""
    monkeypatch.setattr("kindred.engine.transport.PATIENCE", 0.05)
    monkeypatch.setattr("kindred.engine.transport.SETTLING", 0.05)

    class Grid:
        asked = 0

        def pull_messages(self, message_ids):
            self.asked += 1
            time.sleep(0.5)
            return [reply_to(*message_ids)] if self.asked == 1 else []

    grid = Grid()
    source = source_of(grid, simulated=False)
    start = time.monotonic()
    assert list(pull(grid, ["1"], lambda: start, simulated=False, source=source)) == []
    (found,) = pull(grid, ["1"], lambda: start + 10, simulated=False, source=source)
    assert (found[0], grid.asked, source.over.is_set()) == ("1", 1, False)


def test_replies_that_have_arrived_at_the_deadline_count_however_many_they_are() -> None:
    class Grid:
        def pull_messages(self, message_ids):
            time.sleep(0.005)
            return [reply_to(*message_ids)]

    deadline = time.monotonic() + 0.2
    assert len(list(pull(Grid(), [str(i) for i in range(300)], lambda: deadline, simulated=False))) == 300


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (NotImplementedError("that kind"), False),
        (AssertionError(), False),
        (KeyError("ArrayRecord"), False),
        (ConnectionError("refused"), True),
        (httpx.ReadTimeout("slow"), True),
    ],
)
def test_an_exception_in_unpacking_loses_one_reply_and_a_transport_failure_ends_the_run(error, ends) -> None:
    class Grid:
        def pull_messages(self, message_ids):
            raise error

    replies = pull(Grid(), ["1"], time.monotonic, simulated=False)
    if ends:
        with pytest.raises(type(error)):
            list(replies)
    else:
        ((_, refused),) = replies
        assert isinstance(refused, Refused) and str(refused).startswith("it cannot be unpacked (")


def test_a_reply_that_flower_discards_is_a_strike() -> None:
    """As after Flower's time limit for an upload; a client's own error is no strike."""

    def run(code: int) -> list[int]:
        class GivenUp(FaultyGrid):
            def pull_messages(self, message_ids):
                replies = list(super().pull_messages(message_ids))
                for reply in replies:
                    if reply.has_error() and reply.metadata.message_type == "train":
                        reply.error._code = code
                return replies

        strategy = Local(max_strikes=1)
        strategy.start(GivenUp(plain_app(True), 3, lambda r, c: "error" if (r, c) == (1, 1) else "ok"), initial(), 3)
        return [line["asked"] for line in strategy.history.rounds]

    assert run(ErrorCode.MESSAGE_UNAVAILABLE) == [3, 2, 3]
    assert run(ErrorCode.CLIENT_APP_RAISED_EXCEPTION) == [3, 3, 3]


def test_silence_is_a_strike() -> None:
    """Two strikes exclude for two rounds, a third for three; a reply resets the count."""
    strategy = Local(max_strikes=2)
    grid = FaultyGrid(plain_app(True), 3, lambda r, c: "silent" if c == 1 and r < 9 else "ok")
    strategy.start(grid, initial(), 11, timeout=0.1)
    assert [row["round"] for row in strategy.history.rows if row["client"] == 1002] == [1, 2, 5, 9, 10, 11]
    assert strategy.roster.state()["strikes"] == {}


@every_method
@pytest.mark.parametrize("fate", ["silent", "refused"])
def test_a_client_without_usable_replies_is_excluded_for_some_rounds(name, fate) -> None:
    def refused(content: RecordDict) -> None:
        content["metrics"]["num-examples"] = 0

    bad = {"silent": "silent", "refused": refused}[fate]
    strategy = make(name, max_strikes=2)
    grid = FaultyGrid(app_of(name), 3, lambda r, c: bad if c == 1 and r in (1, 2) else "ok")
    strategy.start(grid, initial_of(name), 5, timeout=0.1 if fate == "silent" else 60)
    trained = [
        row["round"]
        for row in strategy.history.rows
        if row["client"] == 1002
        and 1 <= row["round"] <= 5
        and row.keys() & {"train_loss", "train-loss"}
        or row["client"] == 1002
        and row["status"] != "ok"
    ]
    assert trained == [1, 2, 5]


def test_a_client_silent_in_training_is_not_awaited_again_in_the_same_round() -> None:
    strategy = Local(max_strikes=0)
    grid = FaultyGrid(plain_app(), 3, lambda r, c: "silent" if c == 1 else "ok")
    strategy.start(grid, initial(), 2, timeout=0.1)
    rows = [row for row in strategy.history.rows if row["round"] <= 2]
    assert {(row["client"], "eval_acc" in row) for row in rows} == {(1001, True), (1002, False), (1003, True)}


class Frozen(InlineGrid):
    """The last client is connected and never answers a message of this kind."""

    kind = "train"

    def pull_messages(self, message_ids):
        last = max(self._contexts)
        return super().pull_messages(
            [
                i
                for i in message_ids
                if i in self._waiting
                and not (
                    self._waiting[i].metadata.dst_node_id == last
                    and self._waiting[i].metadata.message_type == self.kind
                )
            ]
        )


@pytest.mark.parametrize(
    ("quorum", "reason"),
    [
        (0.5, "no answer within 0.3 s after 2 of 4 clients (quorum, grace)"),
        (3.0, "no answer within 0.3 s after 3 of 4 clients (quorum, grace)"),
        (1.0, "no answer within 3 s"),
        (4.0, "no answer within 3 s"),
        (10.0, "no answer within 3 s"),
    ],
)
def test_a_round_ends_the_grace_period_after_its_quorum(quorum, reason, monkeypatch) -> None:
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)
    strategy = Local(quorum=quorum, grace=0.3, fraction_evaluate=0)
    started = time.monotonic()
    strategy.start(Frozen(plain_app(True), 4), initial(), 1, timeout=3)
    assert (time.monotonic() - started < 2.5) == ("quorum" in reason)
    assert [row["status"] for row in strategy.history.rows] == ["ok", "ok", "ok", reason]


@pytest.mark.parametrize("failing", range(4))
def test_a_client_s_own_error_is_a_strike_only_after_the_quorum(failing, monkeypatch) -> None:
    """Clients answer in their order: with four the second one completes the quorum."""
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)
    strategy = Local(max_strikes=1, fraction_evaluate=0)
    grid = FaultyGrid(plain_app(True), 4, lambda r, c: "error" if (r, c) == (1, failing) else "ok")
    strategy.start(grid, initial(), 2)
    assert [line["asked"] for line in strategy.history.rounds] == [4, 4 if failing < 2 else 3]


def test_a_client_evaluated_alone_is_awaited_no_longer_than_the_grace_period(monkeypatch) -> None:
    """The last client trains without evaluating, unlike the others, and is silent when asked to evaluate."""
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)
    app = plain_app(True)
    train = app._registered_funcs["train.default"]

    def silent_about_itself(message, context):
        reply = train(message, context)
        if context.node_config["partition-id"] == 3:
            del reply.content["metrics"]["trained-accuracy"]
        return reply

    app._registered_funcs["train.default"] = silent_about_itself
    grid, strategy = Frozen(app, 4), Local(grace=0.3, max_strikes=0)
    grid.kind = "evaluate"
    started = time.monotonic()
    strategy.start(grid, initial(), 2, timeout=30)
    assert time.monotonic() - started < 15
    statuses = [row["evaluate-status"] for row in strategy.history.rows if "evaluate-status" in row]
    assert statuses == ["no answer within 0.3 s after 2 of 4 clients (quorum, grace)"] * 2


def test_a_simulation_has_no_quorum_so_results_do_not_depend_on_the_clock() -> None:
    strategy = Local(quorum=0.25, grace=0, fraction_evaluate=0)
    strategy.start(InlineGrid(plain_app(True), 4), initial(), 2)
    assert {row["status"] for row in strategy.history.rows} == {"ok"} and len(strategy.history.rows) == 8


@pytest.mark.parametrize("quorum", [0, -1, 1.5, float("nan"), float("inf")])
def test_a_quorum_is_a_fraction_or_a_number(quorum) -> None:
    with pytest.raises(ValueError, match="quorum is .*, allowed: a share, more than 0 and up to 1, or a whole number"):
        Local(quorum=quorum)


def test_a_node_that_reconnects_under_new_ids_without_a_name_delays_one_round_only() -> None:
    class Mute(InlineGrid):
        """Two clients, and in each round another node that never replies."""

        round = 1

        def get_node_ids(self):
            return [*list(super().get_node_ids())[:2], 1002 + self.round]

        def pull_messages(self, message_ids):
            return super().pull_messages(
                [i for i in message_ids if i in self._waiting and self._waiting[i].metadata.dst_node_id <= 1002]
            )

    grid, strategy, went_on = Mute(introduced_app({}), 6), Local(wait_timeout=3), [time.monotonic()]

    def on_round(server_round: int) -> None:
        went_on.append(time.monotonic())
        grid.round = server_round + 1

    strategy.start(grid, initial(), 4, on_round=on_round)
    first, *others = [after - before for before, after in zip(went_on, went_on[1:])]
    assert first >= 3 > 2 > max(others)
    assert strategy.clients() == [0, 1]


# --- Who can take part --------------------------------------------------------------------------------


def introduced_app(about: dict[int, dict[str, object]]):
    """Clients 0, 1, ... introduce themselves with `about`, which may change during the run, as clients of ours."""
    app = plain_app(True)
    for kind in ("train.default", "evaluate.default"):
        app._registered_funcs[kind] = unpacking(app._registered_funcs[kind])

    @app.query("identity")
    def identity(message, context):
        client = context.node_config["partition-id"]
        known = {"client-id": client, "num-examples": 10, "methods": ["local"], "kindred-version": VERSION}
        return Message(RecordDict({"config": ConfigRecord(known | about.get(client, {}))}), reply_to=message)

    return app


class Network(InlineGrid):
    """Like a grid over a network; records the messages in which the server gives reasons."""

    def __init__(self, app, num_clients: int) -> None:
        super().__init__(app, num_clients)
        self.refusals: list[tuple[int, str]] = []

    def push_messages(self, messages):
        messages = list(messages)
        self.refusals += [
            (m.metadata.dst_node_id, m.content["config"]["problem"])
            for m in messages
            if m.metadata.message_type == REFUSAL_QUERY
        ]
        return super().push_messages(messages)


@every_method
def test_a_run_that_needs_three_clients_waits_with_two_and_names_the_missing(name) -> None:
    app = app_of(name)
    known = app._registered_funcs.pop("query.identity", None)

    @app.query("identity")
    def identity(message, context):
        about = RecordDict({"config": ConfigRecord({"client-id": context.node_id})})
        reply = known(message, context) if known else Message(about, reply_to=message)
        reply.content["config"]["num-examples"] = 0 if context.node_config["partition-id"] == 1 else 10
        return reply

    with pytest.raises(
        TooFewClients,
        match=r"2 of 3 can take part \(min_available_nodes\); client 1002: it has no "
        "training sample$",
    ):
        make(name, min_available_nodes=3).start(InlineGrid(app, 3), initial_of(name), 1)


def test_a_client_that_is_corrected_while_a_run_waits_is_accepted(monkeypatch, caplog) -> None:
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)
    monkeypatch.setattr("kindred.engine.roster.ASK_AGAIN", 0.3)
    caplog.set_level("INFO")
    about = {1: {"num-examples": 0}}
    grid = Network(introduced_app(about), 3)
    threading.Timer(1.0, about.clear).start()
    strategy = Local(min_available_nodes=3, wait_timeout=30)
    strategy.start(grid, initial(), 1)
    assert strategy.clients() == [0, 1, 2] and strategy.history.left_out == {}
    assert (
        "kindred: waiting for clients: 2 of 3 can take part (min_available_nodes); client 1: it has no training sample"
    ) in caplog.messages
    assert "kindred: client 1 takes part now; excluded before: it has no training sample" in caplog.messages
    assert caplog.messages.count("kindred: client 1 takes no part: it has no training sample") == 1
    assert (
        set(grid.refusals) == {(1002, "it has no training sample")} and len(grid.refusals) >= 2
    )  # once for each query


def test_too_few_usable_clients_end_the_run_after_the_wait(monkeypatch) -> None:
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)
    with pytest.raises(
        TooFewClients,
        match=r"^too few clients after 0.5 s: 1 of 2 can take part "
        r"\(min_available_nodes\); client 0: it has no training sample$",
    ):
        Local(wait_timeout=0.5).start(Network(introduced_app({0: {"num-examples": 0}}), 2), initial(), 1)


def test_a_client_excluded_for_some_rounds_counts_as_usable() -> None:
    """Otherwise a run with just enough clients would wait for ever, as an exclusion ends only with rounds."""
    strategy = Local(max_strikes=1, min_available_nodes=3)
    strategy.start(
        FaultyGrid(plain_app(True), 3, lambda r, c: "silent" if (r, c) == (1, 1) else "ok"), initial(), 4, timeout=0.1
    )
    assert [line["asked"] for line in strategy.history.rounds] == [3, 2, 3, 3]


# --- Reasons sent to the clients ----------------------------------------------------------------------


def test_a_client_receives_the_reason_why_its_reply_is_unused(monkeypatch) -> None:
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)

    class Damaged(Network):
        def pull_messages(self, message_ids):
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                if reply.metadata.message_type == "train" and reply.metadata.src_node_id == 1002:
                    content = unpacked(reply.content)
                    content["arrays"].pop("layer.weight")
                    reply.content = packed(content)
            return replies

    grid = Damaged(introduced_app({}), 3)
    Local(max_strikes=2).start(grid, initial(), 3)
    reason = "is not used: array 'layer.weight' is missing"
    assert grid.refusals == [
        (1002, f"its reply in round 1 {reason}"),
        (1002, f"its reply in round 2 {reason}"),
        (1002, "excluded from the next 2 rounds: no usable reply in 2 rounds in a row"),
    ]


def test_a_client_receives_the_reason_why_its_introduction_is_unused(monkeypatch) -> None:
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)
    grid = Network(introduced_app({1: {"network": "x" * 20_000}}), 3)
    strategy = Local()
    strategy.start(grid, initial(), 1)
    reason = "its introduction has 20000 characters under 'network', allowed: up to 10000"
    assert strategy.history.left_out == {1: reason} and grid.refusals == [(1002, reason)]


def test_an_app_without_that_query_receives_no_reasons(monkeypatch) -> None:
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)
    grid = Network(introduced_app({1: {"num-examples": 0, "methods": "all"}}), 3)
    strategy = Local()
    strategy.start(grid, initial(), 1)
    assert strategy.history.left_out == {1: "it has no training sample"} and grid.refusals == []


def test_a_site_logs_the_reasons_it_receives_and_its_own_errors(caplog) -> None:
    from kindred import make_client_app

    def load(context):
        raise ValueError("labels go from 0 to 12,\nits network has 10 classes")

    grid = InlineGrid(make_client_app(load), 1)
    (context,) = grid._contexts.values()
    for node_config, printed in (({"partition-id": 0}, False), ({"client-id": "lyon", "state-dir": "/nowhere"}, True)):
        context.node_config, before = node_config, len(caplog.messages)
        question = RecordDict({"config": ConfigRecord({"kindred-version": VERSION})})
        ids = grid.push_messages([Message(question, context.node_id, "query.identity")])
        (reply,) = grid.pull_messages(ids)
        told, said = reply.content["config"]["problem"], "\n".join(caplog.messages[before:])
        if printed:  # at a real site, whose text may quote data
            number = re.fullmatch(r"ValueError; its text is fault (\d+) in the site's log", told)[1]
            assert f"kindred: fault {number}: ValueError: labels go from 0 to 12," in said
            assert f"kindred: this site takes no part: {told}" in said
        else:
            assert told.startswith("ValueError: labels go from 0 to 12") and not said
    content = RecordDict({"config": ConfigRecord({"problem": "its share-model is false\x1b[2J"})})
    list(grid.pull_messages(grid.push_messages([Message(content, context.node_id, REFUSAL_QUERY)])))
    assert caplog.messages[-1] == "kindred: the server says of this site: its share-model is false?[2J"


def test_an_unreadable_registry_of_names_ends_the_run(monkeypatch, tmp_path) -> None:
    """Otherwise names would go to the first nodes that claim them."""
    monkeypatch.setenv("KINDRED_REGISTERED", str(tmp_path / "gone.json"))
    with pytest.raises(FileNotFoundError):
        Local().start(InlineGrid(plain_app(), 2), initial(), 1)


def test_a_run_names_the_missing_before_there_are_enough_nodes(monkeypatch, tmp_path) -> None:
    (tmp_path / "names.json").write_text('["lyon", "oslo"]')
    monkeypatch.setenv("KINDRED_REGISTERED", str(tmp_path / "names.json"))
    said = r"1 of 2 are connected \(min_available_nodes\); client lyon is not connected; client oslo is not connected$"
    with pytest.raises(TooFewClients, match=said):
        Local(wait_timeout=0.3).start(InlineGrid(plain_app(), 1), initial(), 1)


def test_a_roster_names_the_missing_among_known_clients() -> None:
    roster = Roster(2, 1.0, 3)
    roster.restore({"strikes": {}, "resting": {}, "kept-names": {"oslo", "lyon"}})
    missing = roster._missing_clients(InlineGrid(plain_app(), 0), [])
    assert missing == "; client lyon is not connected; client oslo is not connected"


class Sharing(Local):
    """A method in which all clients share their models."""

    name = "local"
    needs_shared_models = True


class Reconnecting(Network):
    """Counts the introductions that are asked of each node, and says when each has connected."""

    def __init__(self, app, num_clients: int) -> None:
        super().__init__(app, num_clients)
        self.asked: list[int] = []
        self.connected = "12:00"

    def push_messages(self, messages):
        messages = list(messages)
        self.asked += [m.metadata.dst_node_id for m in messages if m.metadata.message_type == IDENTITY_QUERY]
        return super().push_messages(messages)

    def get_nodes(self):
        return [NodeInfo(node_id=node, last_activated_at=self.connected) for node in self.get_node_ids()]


def test_a_site_with_an_option_that_excludes_it_is_asked_again_only_when_it_has_been_started_again(monkeypatch) -> None:
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)
    about = {1: {"share-model": False}, 2: {"num-examples": 0}}
    grid, strategy = Reconnecting(introduced_app(about), 4), Sharing()

    def on_round(server_round: int) -> None:
        if server_round == 3:
            assert grid.asked.count(1002) == 1 and grid.asked.count(1003) == 3  # its data may have been corrected
            assert [node for node, _ in grid.refusals].count(1002) == 1
            assert 1 in strategy.history.left_out
            grid.connected = "12:01"
            about.clear()

    strategy.start(grid, initial(), 4, on_round=on_round)
    assert strategy.clients() == [0, 1, 2, 3] and strategy.history.left_out == {}


def test_a_site_that_cannot_unpack_or_load_the_app_is_excluded_with_the_reason(monkeypatch) -> None:
    monkeypatch.setattr(FAR_AWAY, lambda grid: False)
    full = "the run's app cannot be unpacked (No space left on device)"

    class Full(Network):
        faults = {1002: (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, full), 1003: (ErrorCode.INVALID_FAB, "it holds code")}

        def _answer(self, message):
            fault = self.faults.get(message.metadata.dst_node_id)
            return Message(Error(*fault), reply_to=message) if fault else super()._answer(message)

    grid, strategy, seen = Full(introduced_app({}), 4), Local(), []

    def on_round(server_round: int) -> None:
        seen.append(dict(strategy.history.left_out))
        grid.faults = {}

    strategy.start(grid, initial(), 2, on_round=on_round)
    assert seen[0] == {1002: f"it cannot introduce itself: {full}", 1003: "it cannot introduce itself: it holds code"}
    assert seen[1] == {} and strategy.clients() == [0, 1, 2, 3]
