"""Results that a real site keeps: finite models, the one before a spoiled one, and none that another run overwrites."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from safetensors.numpy import load_file

from kindred import REGISTRY, InlineGrid, TooFewClients, make_client_app
from kindred.client.journal import JOURNAL
from kindred.client.local_training import LocalTraining
from kindred.client.state import BEST, MIXTURE, MODEL
from kindred.client.training import get_arrays
from kindred.data import DataError
from kindred.engine.checkpoint import Checkpoints
from kindred.messages import AFTER_TRAINING, LAST, read_record, records_of, to_record
from kindred.server_app.report.site import site_content

from .grids import Interrupted, interrupted
from .test_client import CLIENTS, PUBLIC, SETTINGS, app, network
from .test_conformance import everything, make

ROUNDS = 3
RESULTS = (MODEL, MIXTURE, BEST)


class Sites(InlineGrid):
    """Real sites, each with a folder of its own; `change` may change a message, `spoil` the reply to it."""

    def __init__(
        self,
        folder: Path,
        change: Callable[[Message], object] = lambda message: None,
        spoil: Callable[[Message, Message], object] = lambda message, reply: None,
    ) -> None:
        super().__init__(app, CLIENTS)
        self.folder, self._change, self._spoil = folder, change, spoil
        for client, context in enumerate(self._contexts.values()):
            context.node_config["state-dir"] = str(folder / str(client))

    def _answer(self, message: Message) -> Message:
        self._change(message)
        reply = super()._answer(message)
        self._spoil(message, reply)
        return reply


def start(name: str, grid: InlineGrid, *, rounds: int = ROUNDS, checkpoints=None, **settings):
    config = ConfigRecord(SETTINGS | settings)
    server = {"device": "cpu"} if REGISTRY[name].distils else {}
    strategy = make(name, network, PUBLIC, **server)
    initial = to_record(get_arrays(network()))
    strategy.start(grid, initial, rounds, 60, config, config, checkpoints=checkpoints)
    return strategy


def config_in(message: Message) -> ConfigRecord:
    (config,) = records_of(message.content, ConfigRecord)
    return config


def is_last(message: Message) -> bool:
    return any(LAST in config for config in records_of(message.content, ConfigRecord))


def fill(content: RecordDict, value: float) -> None:
    """Set all floats in a message to a value."""
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = read_record(record).items()
            content[name] = to_record({
                key: np.full_like(array, value) if array.dtype.kind == "f" else array for key, array in arrays
            })  # fmt: skip


def results_in(folder: Path, pattern: str = "{}.safetensors") -> dict[str, dict[str, np.ndarray]]:
    return {
        str(path.relative_to(folder)): load_file(path)
        for name in RESULTS
        for path in sorted(folder.glob(f"*/run-*/client-*/{pattern.format(name)}"))
    }


@pytest.mark.parametrize("name", REGISTRY)
def test_no_result_with_values_that_are_not_finite_is_kept(name, tmp_path) -> None:
    """The last messages are full of NaN, those of the closing evaluation too."""
    start(name, Sites(tmp_path, lambda message: is_last(message) and fill(message.content, np.nan)))
    found = results_in(tmp_path)
    assert {path.split("/")[0] for path in found} == {"0", "1", "2", "3"}
    for path, arrays in found.items():
        assert all(np.isfinite(array).all() for array in arrays.values()), path


@pytest.mark.parametrize(("name", "kept"), [("fedavg", MODEL), ("fedem", MIXTURE), ("federico", MIXTURE)])
def test_the_result_before_a_spoiled_one_stays_beside_it(name, kept, tmp_path) -> None:
    before = {}

    def spoil(message: Message, reply: Message) -> None:
        """One client sends huge numbers in the last round of training."""
        if is_last(message) and message.metadata.message_type == MessageType.TRAIN:
            before.update({
                path: arrays for path, arrays in results_in(tmp_path).items() if path.endswith(f"{kept}.safetensors")
            })  # fmt: skip
            if message.metadata.dst_node_id == 1001:
                fill(reply.content, 1e14)

    start(name, Sites(tmp_path, spoil=spoil))
    spoilt = 0
    for path, arrays in results_in(tmp_path).items():
        if max(np.abs(array).max() for array in arrays.values()) > 1e9:
            spoilt += 1
            beside = tmp_path / Path(path).with_name(f".{kept}.round-{ROUNDS:04d}.safetensors")
            assert {key: array.tobytes() for key, array in load_file(beside).items()} == {
                key: array.tobytes() for key, array in before[path].items()
            }
    assert spoilt


# --- What the server learns of an error -----------------------------------------------------------------

SECRETS = ("Alice Martin", "/srv/hospital")


class CellError(Exception):
    pass


def _raising(error: Exception) -> Callable[..., None]:
    def raises(*_: object) -> None:
        raise error

    return raises


@pytest.mark.parametrize("is_site", [True, False], ids=["site", "simulation"])
@pytest.mark.parametrize(
    "error",
    [
        CellError("line 3: Alice Martin"),
        KeyError("Alice Martin"),
        OSError(28, "No space left", "/srv/hospital/data.csv"),
        ValueError("/srv/hospital/model.safetensors is damaged"),
        DataError("line 3 has the cell 'Alice Martin'"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("when", ["introduction", "training", "evaluation"])
def test_the_text_of_an_error_stays_at_a_real_site(when, error, is_site, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv(JOURNAL, str(page := tmp_path / "journal"))
    if when != "introduction":
        monkeypatch.setattr(LocalTraining, "train" if when == "training" else "evaluate", _raising(error))
    grid = Sites(tmp_path / "sites")
    if not is_site:
        for context in grid._contexts.values():
            del context.node_config["state-dir"]
    if when == "introduction":
        grid._client_app = make_client_app(_raising(error))
    strategy = make("fedavg", wait_timeout=0.1, max_empty_rounds=1)
    with suppress(TooFewClients):
        strategy.start(grid, to_record(get_arrays(network())), 1, 60, ConfigRecord(SETTINGS), ConfigRecord(SETTINGS))
    rows = [row["status"] for row in strategy.history.rows if row["status"] != "ok"]
    (told, *_) = rows or [str(reason) for reason in strategy.history.left_out.values()]
    assert type(error).__name__ in told
    hidden = not any(secret in each for secret in SECRETS for each in [told, *rows])
    assert hidden == is_site
    if is_site:
        number = re.search(r"its text is fault (\d+) in the site's log", told)[1]
        assert f"kindred: fault {number}: {type(error).__name__}: {error}" in caplog.text
        (entry,) = [each for each in map(json.loads, page.read_text().splitlines()) if each.get("fault") == int(number)]
        assert str(error)[:20] in entry["problem"]
        faults = site_content("lyon", {"lines": [], "classes": []}, [{**entry, "at": 0.0}, {**entry, "at": 1.0}])[
            "faults"
        ]
        assert [fault[1] for fault in faults] == ["2"] and f"fault {number}: " in faults[0][2]


def test_our_own_errors_without_data_reach_the_server_from_a_real_site(tmp_path) -> None:
    def change(message: Message) -> None:
        if message.metadata.message_type == MessageType.TRAIN:
            config_in(message)["local-epochs"] = 10**6

    strategy = make("fedavg", max_empty_rounds=1)
    with pytest.raises(TooFewClients):
        config = ConfigRecord(SETTINGS)
        strategy.start(Sites(tmp_path, change), to_record(get_arrays(network())), 1, 60, config, config)
    told = "error 2: ValueError: epochs is 1000000, allowed at this site: up to 1000 (its max-epochs)"
    assert {row["status"] for row in strategy.history.rows if row["round"] == 1} == {told}


# --- Messages that name another run ---------------------------------------------------------------------


def files_in(folder: Path) -> dict[str, bytes]:
    """Return all files of a site's runs; a lock has no content."""
    return {str(path): path.read_bytes() for path in folder.glob("*/run-*/*/*") if path.is_file()}


def naming(run_id: int, **changed: object) -> Callable[[Message], None]:
    """Change messages so that they name another run, and have other settings."""

    def change(message: Message) -> None:
        for config in records_of(message.content, ConfigRecord):
            if "run" in config:
                config.update({"run": f"{run_id:020}", **changed})

    return change


def statuses(strategy) -> set[str]:
    return {row["status"] for row in strategy.history.rows}


def forged(name: str, folder: Path, run_id: int, *, rounds: int = 1, **changed: object) -> set[str]:
    """Run a method whose messages name another run; return the sites' answers."""
    answers = set()

    def note(message: Message, reply: Message) -> None:
        if message.metadata.message_type in (MessageType.TRAIN, MessageType.EVALUATE):
            answers.add(reply.error.reason if reply.has_error() else "ok")

    grid = Sites(folder, naming(run_id, **changed), note)
    with suppress(TooFewClients):
        start(name, grid, rounds=rounds)
    return answers


@pytest.mark.parametrize("name", REGISTRY)
def test_a_finished_run_is_never_written_again(name, tmp_path) -> None:
    first = Sites(tmp_path)
    start(name, first)
    run_id, before = first.run.run_id, files_in(tmp_path)
    assert before
    other = "federico" if name != "federico" else "local"
    for forger, rounds, changed in (
        (other, 1, {}),
        (name, ROUNDS + 2, {}),
        (name, ROUNDS + 2, {"keep-from": 99}),
        (name, 1, {"learning-rate": 0.3}),
    ):
        answers = forged(forger, tmp_path, run_id, rounds=rounds, **changed)
        assert files_in(tmp_path) == before
        assert any(f"this site does not continue run {run_id}: " in answer for answer in answers), (forger, answers)


def test_a_message_names_another_run_only_to_resume_it(tmp_path) -> None:
    first = Sites(tmp_path)
    with pytest.raises(Interrupted):
        start("perfed-ckt", interrupted(first, 2))
    run_id, before = first.run.run_id, files_in(tmp_path)
    for name, changed, why in (
        ("fedavg", {}, "its method is perfed-ckt, the message has fedavg"),
        ("perfed-ckt", {"learning-rate": 0.3}, "its learning-rate is 0.1, the message has 0.3"),
        ("perfed-ckt", {"local-steps": 77}, "its local-steps is "),
        ("perfed-ckt", {"attempt": 1}, "the message does not resume it"),
    ):
        answers = forged(name, tmp_path, run_id, **changed)
        assert files_in(tmp_path) == before
        assert len(answers) == 1 and f"this site does not continue run {run_id}: {why}" in answers.pop()


@pytest.mark.parametrize("content", ["", "null", "[]", "{}", '["a", [], 0, 0, []]', "[" * 100_000, None])
def test_without_a_readable_record_a_run_has_no_other_run_s_messages_and_goes_on(content, tmp_path) -> None:
    first = Sites(tmp_path)
    with pytest.raises(Interrupted):
        start("fedavg", interrupted(first, 1))
    for path in tmp_path.glob("*/run-*/*/.run.json"):
        path.unlink() if content is None else path.write_text(content)
    before = files_in(tmp_path)
    assert forged("fedavg", tmp_path, first.run.run_id) == {
        f"ValueError: this site does not continue run {first.run.run_id}: nothing is recorded of it"
    }
    assert files_in(tmp_path) == before
    with pytest.raises(Interrupted):
        start("fedavg", first)
    assert files_in(tmp_path) != before


def test_a_message_that_names_a_run_that_the_site_does_not_have_stays_in_its_own(tmp_path) -> None:
    assert forged("fedavg", tmp_path, 1234567) == {"ok"}
    assert files_in(tmp_path) and not list(tmp_path.glob("*/run-1234567"))


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("after", [ROUNDS - 1, ROUNDS])
def test_sites_resume_before_and_after_the_last_round_to_the_same_bits(name, after, tmp_path) -> None:
    """A server ends before it has the last round, or the closing evaluation, although the sites have answered."""

    class Ending(Sites):
        def _answer(self, message: Message) -> Message:
            reply = super()._answer(message)
            answered.append(config_in(message)["server-round"] > after if message.content.array_records else False)
            if sum(answered) == CLIENTS:
                raise Interrupted
            return reply

    def results(folder: Path) -> dict[str, dict[str, bytes]]:
        found = {}
        for path, arrays in results_in(folder).items():
            found[re.sub(r"run-\d+", "run", path)] = {key: array.tobytes() for key, array in arrays.items()}
        return found

    whole = start(name, Sites(tmp_path / "whole"))
    answered: list[bool] = []
    closes = whole.personal not in AFTER_TRAINING
    with pytest.raises(Interrupted) if closes or after < ROUNDS else nullcontext():
        start(name, Ending(tmp_path / "cut"), checkpoints=Checkpoints(tmp_path / "checkpoints"))
    resumed = start(name, Sites(tmp_path / "cut"), checkpoints=Checkpoints(tmp_path / "checkpoints"))
    assert statuses(resumed) == {"ok"}
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    assert everything(resumed)[1:] == everything(whole)[1:]
