"""Sites that only validate: they evaluate the global model, train nothing, and change no bit of the run."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.config import parse_config_args

from kindred import REGISTRY, InlineGrid, Site, TooFewClients, make_client_app
from kindred.client.app import introduction_of
from kindred.client.evaluation import evaluate
from kindred.client.journal import JOURNAL
from kindred.client.training import CLASSES, get_arrays, set_arrays
from kindred.data import DataError, Sites
from kindred.engine.checkpoint import Checkpoints
from kindred.messages import PROBLEM, read_record, to_record
from kindred.server_app.report.content import run_content
from kindred.server_app.results import RunFolder
from kindred.server_app.summary import summarise

from . import test_client
from .deployment_commands import data_fixture, kindred, write_digits  # noqa: F401
from .test_conformance import everything, make
from .test_results import settings

CLIENTS, VALIDATORS = 4, 2
NO_MODEL = ("perfed-ckt", "fedrep")
SITES = {"dataset": "sites", "image-shape": "1x8x8", "num-classes": 10}


def load_site(context) -> Site:
    """As in test_client; a site that only validates has 30 samples, those of client 9."""
    if not context.node_config.get("validate-only"):
        return test_client.load_site(context)
    x, y = test_client.load_site(SimpleNamespace(node_config={"partition-id": 9})).test
    return Site(test_client.network, (x[:0], y[:0]), (x[:30], y[:30]))


client_app = make_client_app(load_site)


class GridWithValidators(InlineGrid):
    """Nodes after the first four are sites that only validate; `change` may change their replies.

    It holds back the replies to these messages while `holds_back` is true, and keeps all messages to such sites.
    """

    def __init__(self, validators: int = VALIDATORS, change=None, app=client_app, **node_config) -> None:
        super().__init__(app, CLIENTS + validators)
        self.sent: list[Message] = []
        self.change, self.holds_back = change, False
        for i, context in enumerate(list(self._contexts.values())[CLIENTS:]):
            context.node_config = {"client-id": f"outside-{i}", "validate-only": True, **node_config}

    def _is_validation(self, message: Message) -> bool:
        node_config = self._contexts[message.metadata.dst_node_id].node_config
        return "validate-only" in node_config and not message.metadata.message_type.startswith("query")

    def push_messages(self, messages):
        messages = list(messages)
        self.sent += filter(self._is_validation, messages)
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        ready = [each for each in message_ids if each in self._waiting]
        if self.holds_back:
            ready = [each for each in ready if not self._is_validation(self._waiting[each])]
        return super().pull_messages(ready)

    def _answer(self, message):
        reply = super()._answer(message)
        if self.change and self._is_validation(message):
            self.change(reply)
        return reply


def run(name: str, grid: InlineGrid | None = None, rounds: int = 3, checkpoints=None, **more):
    strategy = make(name, test_client.network, test_client.PUBLIC, **more)
    config = ConfigRecord(test_client.SETTINGS)
    initial = to_record(get_arrays(test_client.network()))
    strategy.start(grid or GridWithValidators(), initial, rounds, 60, config, config, checkpoints=checkpoints)
    return strategy


def without_seconds(lines: list[dict]) -> list[dict]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.parametrize("name", REGISTRY)
def test_a_run_has_the_same_bits_with_and_without_such_sites(name) -> None:
    grid = GridWithValidators()
    strategy = run(name, grid)
    found, lines = everything(strategy), without_seconds(strategy.history.rounds)
    assert [(row["round"], row["client"]) for row in strategy.history.validations] == [
        (number, f"outside-{i}") for number in (1, 2, 3) for i in range(VALIDATORS)
    ]
    statuses = {row["status"] for row in strategy.history.validations}
    assert statuses == {"no global model" if name in NO_MODEL else "ok"}
    assert {message.metadata.message_type for message in grid.sent} <= {MessageType.EVALUATE}
    assert len(grid.sent) == (0 if name in NO_MODEL else 3 * VALIDATORS)
    assert strategy.clients() == list(range(CLIENTS))
    alone = run(name, InlineGrid(client_app, CLIENTS))
    assert found == everything(alone)
    assert lines == without_seconds(alone.history.rounds)


@pytest.mark.parametrize("name", ["fedavg", "heurfedamp", "hypcluster", "federico"])
def test_a_row_holds_all_metrics_of_the_global_model_on_the_sites_samples(name) -> None:
    strategy = run(name)
    model = test_client.network()
    set_arrays(model, read_record(strategy.global_arrays()))
    x, y = load_site(SimpleNamespace(node_config={"validate-only": True})).test
    expected = evaluate(model, x, y, names=CLASSES.reports)
    *_, last = strategy.history.validations
    assert {key: last[key] for key in expected} == pytest.approx(expected)
    assert last["num-test-examples"] == 30 and last["bytes-up"] < 1000 < last["bytes-down"]


def test_sampling_counts_only_clients_that_train() -> None:
    strategy = run("fedavg", fraction_train=0.5)  # half of four clients, not of six
    assert [line["asked"] for line in strategy.history.rounds] == [4, 2, 2, 2, 4]
    unfit = run("fedavg", GridWithValidators(change=None, **{"share-model": "no"}), fraction_train=0.5)
    assert [line["asked"] for line in unfit.history.rounds] == [4, 2, 2, 2, 4]
    assert unfit.history.left_out == {}
    assert unfit.history.validations[0]["status"].startswith("excluded: it cannot introduce itself: ValueError")


def test_such_sites_do_not_count_as_available() -> None:
    with pytest.raises(TooFewClients, match="4 of 5 can take part.*client outside-0 only validates"):
        run("fedavg", min_available_nodes=5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda reply: reply.content.update(arrays=to_record({"a": np.zeros(3)})), "refused: it has arrays, allowed"),
        (
            lambda reply: reply.content["metrics"].update({"num-test-examples": 0}),
            "refused: num-test-examples is 0, allowed",
        ),
        (lambda reply: reply.content["metrics"].update({"x" * 300: 1.0}), "refused: a metric is called"),
        (lambda reply: reply.content.clear(), "refused: it has 0 metric records"),
    ],
)
def test_a_bad_reply_is_refused_with_its_reason_and_ends_nothing(change, says) -> None:
    strategy = run("fedavg", GridWithValidators(change=change))
    assert all(row["status"].startswith(says) for row in strategy.history.validations)
    assert len(strategy.history.rounds) == 4
    (first, _) = summarise(settings("."), strategy.history, {})["validators"]
    assert (first["samples"], first["last"]) == (None, {}) and first["status"].startswith(says)


def test_a_site_with_another_network_gets_an_error_of_its_own() -> None:
    def other(context) -> Site:
        site = load_site(context)
        if context.node_config.get("validate-only"):
            return Site(lambda: torch.nn.Linear(3, 2), site.train, site.test)
        return site

    strategy = run("fedavg", GridWithValidators(app=make_client_app(other)))
    assert all(re.match("error .*ValueError", row["status"]) for row in strategy.history.validations)


def run_on_a_network(monkeypatch, until: int, grace: float):
    """Return a run whose only such site replies after round `until`, and the numbers of rows after each round."""
    monkeypatch.setattr("kindred.engine.strategy.simulated", lambda grid: False)
    monkeypatch.setattr("kindred.engine.strategy.begin_simulation", lambda *_, **__: None)
    grid = GridWithValidators(1)
    grid.holds_back = True
    rows_after: list[int] = []
    strategy = make("fedavg", quorum=1, grace=grace)
    config = ConfigRecord(test_client.SETTINGS)

    def on_round(number: int) -> None:
        rows_after.append(len(strategy.history.validations))
        grid.holds_back = number < until

    initial = to_record(get_arrays(test_client.network()))
    strategy.start(grid, initial, 3, 60, config, config, on_round=on_round)
    return strategy, rows_after


def test_on_a_network_no_round_waits_for_such_a_site_and_the_end_gets_its_last_numbers(monkeypatch) -> None:
    strategy, rows_after = run_on_a_network(monkeypatch, until=3, grace=30.0)
    assert rows_after[:3] == [0, 0, 0]
    assert [(row["round"], row["status"]) for row in strategy.history.validations] == [(1, "ok"), (3, "ok")]


def test_a_site_that_never_replies_does_not_hold_up_the_end(monkeypatch) -> None:
    strategy, _ = run_on_a_network(monkeypatch, until=9, grace=0.2)
    (row,) = strategy.history.validations
    assert (row["round"], row["status"]) == (1, "no answer by the end of the run")


def test_a_resumed_run_keeps_the_rows_and_asks_no_site_twice(tmp_path) -> None:
    run("fedavg", rounds=2, checkpoints=Checkpoints(tmp_path))
    strategy = run("fedavg", rounds=3, checkpoints=Checkpoints(tmp_path))
    assert [row["round"] for row in strategy.history.validations] == [1, 1, 2, 2, 3, 3]


# --- At the site ----------------------------------------------------------------------------------------


def message_to(kind: str, **config) -> Message:
    InlineGrid(client_app, 1)  # messages have a sender from then on
    content = RecordDict({"arrays": to_record(get_arrays(test_client.network())), "config": ConfigRecord(config)})
    message = Message(content, 1, kind)
    message.metadata.__dict__["_message_id"] = "1"
    return message


def context_of(**node_config) -> Context:
    node_config = {"client-id": "eve", "validate-only": True, **node_config}
    return Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config={})


def test_a_site_refuses_to_train_and_its_operator_sees_it(caplog) -> None:
    with pytest.raises(ValueError, match="only validates .* refuses to train"):
        client_app(message_to(MessageType.TRAIN, method="fedavg"), context_of())
    assert "kindred: the server asks this site to train: this site only validates" in caplog.text


@pytest.mark.parametrize("name", REGISTRY)
def test_a_reply_has_numbers_alone_and_nothing_is_saved(name, tmp_path) -> None:
    message = message_to(MessageType.EVALUATE, method=name, **{"last-round": True, "finetune-epochs": 3})
    reply = client_app(message, context_of(**{"state-dir": str(tmp_path)}))
    (record,) = reply.content.values()
    assert not isinstance(record, ArrayRecord) and record["num-test-examples"] == 30
    assert set(CLASSES.reports) <= set(record) | {"loss"}
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("kind", "validates"),
    [(MessageType.TRAIN, False), (MessageType.EVALUATE, False), (MessageType.EVALUATE, True)],
)
def test_a_reason_that_quotes_the_data_stays_at_the_site(kind, validates, tmp_path, monkeypatch, caplog) -> None:
    def fails(context):
        raise DataError("line 3 has the cell 'Alice Martin'")

    monkeypatch.setenv(JOURNAL, str(tmp_path / "journal"))
    node_config = {"validate-only": validates, "state-dir": str(tmp_path)}
    with pytest.raises(ValueError) as ended:
        make_client_app(fails)(message_to(kind, method="fedavg"), context_of(**node_config))
    assert "Alice" not in str(ended.value) and ended.value.__suppress_context__
    assert "Alice Martin" in caplog.text and "Alice Martin" in (tmp_path / "journal").read_text()


def test_the_introduction_says_so_and_counts_the_samples() -> None:
    about = introduction_of(load_site, context_of())
    assert (about["validate-only"], about["num-examples"], about["num-test-examples"]) == (True, 0, 30)
    wrong = introduction_of(load_site, context_of(**{"validate-only": "true"}))
    assert wrong[PROBLEM] == "ValueError: validate-only is 'true', allowed: true, false"


def digits(path, *parts: str, **changed):
    """An .npz file with these parts of 60 digits, 40 of them for training."""
    with np.load(write_digits(path)) as stored:
        arrays = {f"{name}_{part}": stored[f"{name}_{part}"] for part in parts for name in "xy"}
    np.savez(path, **arrays, **changed)
    return path


@pytest.mark.parametrize(("parts", "count"), [(["train", "test"], 60), (["test"], 20), (["train"], 40)])
def test_all_labelled_samples_are_for_evaluation(tmp_path, parts, count) -> None:
    from kindred.server_app.config import Config

    config = Config(dataset="sites", image_shape="1x8x8", num_classes=10, validation_share=0.2).run_config()
    path = digits(tmp_path / "digits.npz", *parts)
    data = Sites.of(config, {"data-dir": str(path), "validate-only": True}, 0.2).site_data("eve")
    assert [len(part[1]) for part in (data.train, data.validation, data.test)] == [0, 0, count]
    expected = np.concatenate([np.load(path)[f"y_{part}"] for part in parts])
    assert np.array_equal(data.test[1].numpy(), expected)


def check(path, *options: object, code: int = 0) -> str:
    site = ("site", "eve", "--server", "localhost:1", "--insecure", "--data-dir", path, "--validate-only", "--check")
    return kindred(*site, *options, code=code)


def test_check_prints_what_is_reported_and_what_is_not(tmp_path) -> None:
    said = check(digits(tmp_path / "digits.npz", "test"))
    assert "eve: 20 images of 1x8x8 to evaluate on, labels up to 8" in said
    assert "that it only validates, its number of samples (20)" in said
    assert "not reported: any model or update" in said and "the site keeps no model" in said
    (given,) = re.findall("--node-config '(.*)'", said)
    assert parse_config_args([given])["validate-only"] is True


@pytest.mark.parametrize(
    ("arrays", "options", "says"),
    [
        ({}, [], ["has no labelled sample", "x_test and y_test"]),
        ({"x": np.zeros((0, 8, 8)), "y": np.zeros(0, int)}, [], ["has no labelled sample"]),
        ({"x_test": np.zeros((3, 8, 8))}, [], ["has no labelled sample"]),
        (None, ["--report-weights"], ["--validate-only", "--report-weights", "one of them"]),
        (None, ["--no-share-model"], ["--validate-only", "--no-share-model", "one of them"]),
        (None, ["--public-data", "p.npz"], ["--validate-only", "--public-data", "one of them"]),
    ],
)
def test_bad_input_gets_one_line(arrays, options, says, tmp_path) -> None:
    path = tmp_path / "digits.npz"
    if arrays is None:
        write_digits(path)
    else:
        np.savez(path, **arrays)
    *_, error = check(path, *options, code=2).splitlines()
    assert error.startswith("kindred: ") and all(word in error for word in says), error


def test_images_and_tables_need_one_part_alone(tmp_path) -> None:
    from PIL import Image

    (tmp_path / "data" / "test" / "3").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "data" / "test" / "3" / "a.png")
    assert "1 images of 1x8x8 to evaluate on" in check(tmp_path / "data")
    (tmp_path / "data" / "test" / "3" / "a.png").unlink()
    assert "has no images" in check(tmp_path / "data", code=2)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [("heurfedamp", "60 samples to evaluate on"), ("perfed-ckt", "perfed-ckt has no global model")],
)
def test_the_check_before_a_run(strategy, says, data) -> None:
    run_config = f'dataset="sites" image-shape="1x8x8" num-classes=10 strategy="{strategy}"'
    code = 2 if strategy == "perfed-ckt" else 0
    assert says in check(data, "--run-config", run_config, code=code)


# --- Results --------------------------------------------------------------------------------------------


def test_the_summary_and_the_page_have_such_sites_apart(tmp_path) -> None:
    strategy = run("fedavg")
    folder = RunFolder(settings(tmp_path, strategy="fedavg", **{"num-clients": 4, "num-rounds": 3}))
    folder.record_round(strategy)
    before = run_content(folder.path)
    summary = folder.finish(strategy, None)
    *_, row = strategy.history.validations
    assert [each["client"] for each in summary["clients"]] == list(range(CLIENTS))
    assert [each["client"] for each in summary["validators"]] == ["outside-0", "outside-1"]
    last = summary["validators"][1]
    assert (last["samples"], last["status"]) == (30, "ok")
    assert last["last"]["accuracy"] == row["accuracy"] and last["last"]["loss"] == row["loss"]
    assert json.loads((folder.path / "summary.json").read_text())["validators"] == summary["validators"]
    for content in (before, run_content(folder.path)):
        assert content["clients"]["names"] == ["0", "1", "2", "3"]
        assert [each["client"] for each in content["validators"]] == ["outside-0", "outside-1"]
    assert not (RunFolder(settings(tmp_path)).path / "validators.csv").exists()
