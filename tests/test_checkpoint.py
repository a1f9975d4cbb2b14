"""An interrupted run resumes to the same bits; and the properties of checkpoints."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors import safe_open
from safetensors.numpy import save_file

from kindred import REGISTRY, FedAMP, FedAvg, HeurFedAMP, InlineGrid, Local, NotResumable, TooFewClients
from kindred.client.state import ClientState, default_root
from kindred.client_app.app import app as client_app
from kindred.engine import checkpoint, simulated_state
from kindred.engine.checkpoint import Checkpoints, HistoryRows, pack, unpack
from kindred.engine.history import History
from kindred.engine.layout import Layout
from kindred.engine.model_store import ClientModels
from kindred.engine.simulated_state import StateFlusher, begin_simulation, end_simulation
from kindred.messages import read_record, records_of, to_record
from kindred.server_app import results
from kindred.server_app.app import run
from kindred.server_app.checks import check
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.engines import Engine
from kindred.server_app.results import RunFolder
from kindred.server_app.run_files import is_finished, run_settings
from kindred.server_app.tables import read_table

from .client_apps import initial, plain_app
from .grids import FaultyGrid

pytestmark = pytest.mark.usefixtures("no_pictures")

ROOT = Path(__file__).resolve().parent.parent
CLIENTS, ROUNDS = 3, 4
FINISHED = {"summary.json", "config.json", "log.txt"}
# Settings with which a method keeps as much state as possible from round to round.
MOST = {
    "perfed-ckt": {"num_clusters": 2, "local_steps": 3},
    # With this seed a client receives another client's model in rounds 2 and 4, and predicts with it in round 3.
    "federico": {"selection": "relay", "num_neighbours": 1, "epsilon": 1.0, "mixture_threshold": 0.0, "seed": 10},
    "clustered-fl": {"eps1": 100.0, "eps2": 0.001},
    "fedem": {"keep_optimizer": True},
    "feddf": {"model": "digits-cnn,office-mlp", "distill_steps": 3},
}
VARIANTS = [*((name, {}) for name in REGISTRY), ("federico", {"selection": "server", "m_step": "gradient"}),
            ("federico", {"mixture_size": 1, "accumulate": True}),
            ("fedamp", {"self_weight": "none", "sigma": 1.0}),
            ("fedamp", {"self_weight": "groups", "common_start": False, "objective": True}),
            *((name, {"validation_share": 0.5}) for name in ("kindred", "fedavg", "federico"))]  # fmt: skip


def config_of(folder: Path, name: str, **more) -> Config:
    settings = {
        "num_clients": CLIENTS,
        "num_groups": CLIENTS,
        "num_rounds": ROUNDS,
        "local_epochs": 1,
        "batch_size": 20,
        "samples_per_client": 20,
        "device": "cpu",
        "output_dir": str(folder),
    }
    return Config(**{**settings, "strategy": name, **MOST.get(name, {}), **more})


class Killed(BaseException):
    """Represents the end of the server's process."""


class Ending(InlineGrid):
    """Ends the run after this many replies; the server does not receive the last of them."""

    def __init__(self, config: Config, answers: int) -> None:
        super().__init__(client_app, config.num_clients, config.run_config())
        self._left = answers

    def _answer(self, message):
        reply = super()._answer(message)
        self._left -= 1
        if self._left == 0:
            raise Killed
        return reply


def kept(folder: Path) -> dict[str, object]:
    """Return all results of a run except times, paths and pictures."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            with safe_open(path, "numpy") as file:
                tensors = {key: (file.get_tensor(key).dtype, file.get_tensor(key).tobytes()) for key in file.keys()}
                found[name] = tensors, {key: text for key, text in file.metadata().items() if key != "attempt"}
        elif path.suffix == ".npz":
            with np.load(path) as content:
                found[name] = {key: content[key].tobytes() for key in content.files}
        elif path.suffix == ".csv":
            found[name] = [{key: value for key, value in row.items() if key != "seconds"} for row in read_table(path)]
    return found


def interrupted(config: Config, answers: int) -> Path | None:
    """Begin or resume a run that is interrupted after `answers` replies; return its folder, or None if it finished."""
    grid = Ending(config, answers)
    try:
        run(grid, config)
    except Killed:
        (folder,) = Path(config.output_dir).iterdir()
        return folder
    return None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Results of uninterrupted runs."""
    runs: dict[str, dict[str, object]] = {}

    def result(name: str, more: dict[str, object]) -> dict[str, object]:
        key = json.dumps([name, more])
        if key not in runs:
            config = config_of(tmp_path_factory.mktemp("whole"), name, **more)
            runs[key] = kept(run(InlineGrid(client_app, CLIENTS, config.run_config()), config).path)
        return runs[key]

    return result


@pytest.mark.parametrize(("name", "more"), VARIANTS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(VARIANTS)])
def test_a_run_interrupted_anywhere_resumes_to_the_same_bits(name, more, whole, tmp_path) -> None:
    config = config_of(tmp_path, name, **more)
    expected, folder, times = whole(name, more), None, 0
    # The introductions of 3 clients, and 5 replies: each interruption is in the middle of another round. A round of
    # FedAMP with its objective has more replies.
    replies = 8 if "objective" in more else 5
    while True:
        folder = interrupted(config, answers=CLIENTS + replies)
        if folder is None:
            break
        times += 1
        assert not (folder / "summary.json").exists()
        config = config_of(tmp_path, name, **more, resume=str(folder))
    assert times >= 2
    (folder,) = tmp_path.iterdir()
    assert kept(folder) == expected
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize("name", ["heurfedamp", "kindred", "fedavg-ft", "fedala", "fedem", "federico", "perfed-ckt"])
def test_a_resumed_run_with_sampled_clients_does_not_evaluate_all_of_them_again(name, whole, tmp_path, monkeypatch):
    asked = []
    push = Ending.push_messages

    def noting(self, messages):
        messages = list(messages)
        asked.extend(message.metadata for message in messages if message.metadata.message_type != "query.identity")
        return push(self, messages)

    monkeypatch.setattr(Ending, "push_messages", noting)
    sampled = {"fraction_train": 0.5}  # 2 of 3 clients in a round
    config = config_of(tmp_path, name, **sampled)
    folder = interrupted(config, answers=2 * CLIENTS + 1)  # introductions, evaluations, and a reply of round 1
    assert rounds_in(Checkpoints(folder / "checkpoints")) == [0]
    times = 0
    while folder is not None:
        times += 1
        config = config_of(tmp_path, name, **sampled, resume=str(folder))
        folder = interrupted(config, answers=CLIENTS + 5)
    assert times >= 2
    before = [about.dst_node_id for about in asked if about.group_id == "0"]  # round 0 of PerFed-CKT too
    assert sorted(before) == [1001 + i for i in range(CLIENTS)]
    (folder,) = tmp_path.iterdir()
    assert kept(folder) == whole(name, sampled)
    first, *others = read_table(folder / "rounds.csv")
    assert (first["round"], first["asked"], first["evaluated"]) == (0, CLIENTS, CLIENTS)
    assert {line["evaluated"] for line in others} == {CLIENTS}


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-100],
        lambda whole: b"",
        lambda whole: whole[:200] + bytes([whole[200] ^ 4]) + whole[201:],
    ],
    ids=["cut", "empty", "changed"],
)
@pytest.mark.parametrize("name", ["perfed-ckt", "heurfedamp", "federico"])
def test_a_damaged_checkpoint_is_detected_and_the_one_before_it_used(name, damage, whole, tmp_path, caplog) -> None:
    config = config_of(tmp_path, name)
    evaluations = CLIENTS if name == "perfed-ckt" else 0  # of the round before the first
    folder = interrupted(config, answers=CLIENTS + evaluations + 4 * CLIENTS)
    last, before = sorted((folder / "checkpoints").iterdir(), reverse=True)
    assert (last.name[:10], before.name[:10]) == ("round-0003", "round-0002")
    last.write_bytes(damage(last.read_bytes()))
    config = config_of(tmp_path, name, resume=str(folder))
    run(InlineGrid(client_app, CLIENTS, config.run_config()), config)
    assert f"{last} is damaged" in caplog.text
    assert "resumes after round 2" in caplog.text
    assert kept(folder) == whole(name, {})


def test_an_interrupted_write_leaves_the_earlier_checkpoints(tmp_path, monkeypatch) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(1, {"model": np.arange(3)})
    for moment in ("fsync", "replace"):

        def fail(*args):
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(os, moment, fail)
            with pytest.raises(Killed):
                checkpoints.save(2, {"model": np.arange(4)})
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)  # of the next process
        assert checkpoints.load()[0] == 1
    checkpoints.save(2, {"model": np.arange(4)})
    checkpoints.save(3, {"model": np.arange(5)})
    assert [path.name[:10] for path in sorted((tmp_path / "checkpoints").iterdir())] == ["round-0002", "round-0003"]
    server_round, state = checkpoints.load()
    assert (server_round, state["model"].tolist()) == (3, [0, 1, 2, 3, 4])
    assert checkpoints.oldest == 2
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "checkpoints").iterdir()}
    assert modes == {0o600} and stat.S_IMODE((tmp_path / "checkpoints").stat().st_mode) == 0o700


@pytest.mark.parametrize(("keep", "waits"), [(1, False), (2, True)])
def test_a_checkpoint_is_written_while_the_run_goes_on_unless_it_is_the_only_one(
    keep, waits, tmp_path, monkeypatch
) -> None:
    checkpoints, may_go_on = Checkpoints(tmp_path, keep=keep), threading.Event()
    for r in (1, 2):
        checkpoints.save(r, {"round": r})
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (may_go_on.wait(60), fsync(file)))
    if not waits:
        may_go_on.set()
    with checkpoints:
        checkpoints.begin(3, {"round": 3})
        assert rounds_in(checkpoints) == ([1, 2] if waits else [3])
        assert checkpoints.oldest == (1 if waits else 3)  # round 3 may never be complete
        may_go_on.set()
    assert rounds_in(checkpoints) == ([2, 3] if waits else [3]) and checkpoints.load() == (3, {"round": 3})
    assert checkpoints.oldest == (2 if waits else 3)


def test_the_next_round_is_sent_before_a_checkpoint_is_written(tmp_path) -> None:
    sent, in_time = threading.Event(), []

    class Noting(InlineGrid):
        def push_messages(self, messages):
            sent.set()
            return super().push_messages(messages)

    class Slow(Checkpoints):
        def begin(self, server_round, state) -> None:
            sent.clear()
            super().begin(server_round, state)

        def _write(self, server_round, arrays) -> None:
            in_time.append(server_round == ROUNDS or sent.wait(30))
            super()._write(server_round, arrays)

    FedAvg().start(Noting(plain_app(), CLIENTS), initial(), ROUNDS, checkpoints=Slow(tmp_path))
    assert in_time == [True] * ROUNDS


def test_replies_are_processed_while_a_checkpoint_waits_for_the_disk(tmp_path) -> None:
    taken, in_time = threading.Event(), []

    class Noting(FedAvg):
        def take(self, client, reply) -> None:
            taken.set()
            super().take(client, reply)

    class Slow(Checkpoints):
        def begin(self, server_round, state) -> None:
            self.finish()
            taken.clear()
            self.flushes["it"] = lambda: in_time.append(server_round == ROUNDS or taken.wait(30))
            super().begin(server_round, state)

    Noting().start(InlineGrid(plain_app(), CLIENTS), initial(), ROUNDS, checkpoints=Slow(tmp_path))
    assert in_time == [True] * ROUNDS


def version_of(file) -> tuple[int, int]:
    """Identify the content of a file; numbers of files are used again."""
    found = os.stat(file)
    return found.st_ino, found.st_mtime_ns


def test_what_a_checkpoint_needs_is_on_the_disk_before_it_and_only_the_server_waits_for_that(
    tmp_path, monkeypatch
) -> None:
    saved, flushed, counting, replace, fsync = {}, set(), [], os.replace, os.fsync

    def noting_replace(source, target) -> None:
        replace(source, target)
        is_new = Path(target).name in ("model.safetensors", "predictions.safetensors")
        of_client = is_new and default_root() in Path(target).parents
        if of_client or Path(target).parent.name == "collaboration":
            saved[target] = version_of(target)
            assert not of_client or saved[target] not in flushed
        elif Path(target).name.startswith("round-"):
            assert saved and flushed.issuperset(saved.values())
            counting.append(len(saved))

    def noting_fsync(file) -> None:
        fsync(file)
        flushed.add(version_of(file))

    class Waiting(Checkpoints):
        def begin(self, server_round, state) -> None:
            super().begin(server_round, state)
            self.finish()

    monkeypatch.setattr(os, "replace", noting_replace)
    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(results, "Checkpoints", Waiting)
    config = config_of(tmp_path, "ditto")
    run(InlineGrid(client_app, CLIENTS, config.run_config()), config)
    # A file for each round, a model of each client, and in the end its predictions.
    assert counting == [CLIENTS + 1, CLIENTS + 2, CLIENTS + 3, 2 * CLIENTS + 4]


@pytest.fixture
def simulated_run(monkeypatch, tmp_path):
    """A simulated run, by its id, with a state folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    begin_simulation(1)
    yield 1
    end_simulation(1)


def test_a_state_that_a_client_replaces_while_it_is_flushed_is_flushed_under_its_other_name(
    simulated_run, monkeypatch
) -> None:
    states = [ClientState(simulated_run, 0, server_round=r, before=r, keep_from=1) for r in (1, 2)]
    states[0].save("model", {"w": np.zeros(2)})
    before, flushed, fsync = version_of(states[0].folder / "model.safetensors"), set(), os.fsync

    def saving(path, *args, **named):
        if not states[1]._loaded:  # the client's next round comes after the file was found
            states[1].load("model")
            states[1].save("model", {"w": np.ones(2)})
        return open(path, *args, **named)

    monkeypatch.setattr(simulated_state, "open", saving, raising=False)
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), flushed.add(version_of(file))))
    StateFlusher(simulated_run).flush()
    assert before in flushed


def test_a_state_is_flushed_once(simulated_run, monkeypatch) -> None:
    flusher, flushed = StateFlusher(simulated_run), []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(file))
    for client in range(5):
        ClientState(simulated_run, client).save("model", {"w": np.zeros(2)})
    flusher.flush()
    flusher.flush()
    assert len(flushed) == 5
    ClientState(simulated_run, 3).save("model", {"w": np.ones(2)})
    flusher.flush()
    assert len(flushed) == 6


def test_a_file_that_a_client_writes_over_is_flushed_again_and_not_before_it_is_whole(
    simulated_run, monkeypatch
) -> None:
    flusher, flushed, fsync = StateFlusher(simulated_run), [], os.fsync

    def save(server_round: int) -> Path:
        of_round = {"server_round": server_round, "before": server_round, "keep_from": server_round - 1}
        state = ClientState(simulated_run, 0, **of_round)
        state.load("model")
        state.save("model", {"w": np.zeros(2)})
        return state.folder

    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), flushed.append(os.fstat(file).st_ino)))
    for r in (1, 2):
        folder = save(r)
        flusher.flush()
    file = (folder / ".model.round-0001.safetensors").stat().st_ino
    assert flushed.count(file) == 1
    save(3)
    assert (folder / "model.safetensors").stat().st_ino == file
    (folder / "model.safetensors").rename(written := folder / f".model.{os.getpid()}.partial.safetensors")
    flusher.flush()
    assert flushed.count(file) == 1  # a process may be at work on it
    written.rename(folder / "model.safetensors")
    flusher.flush()
    assert flushed.count(file) == 2


def test_a_file_that_was_written_over_since_it_was_found_is_not_taken_for_flushed(simulated_run, monkeypatch) -> None:
    state, flushed, fsync, written = ClientState(simulated_run, 0), [], os.fsync, []
    state.save("model", {"w": np.zeros(2)})

    def opened(path, *args, **named):
        file = open(path, *args, **named)
        if not written:  # at once after it was found
            written.append(os.utime(path, ns=(1, 1)))
        return file

    monkeypatch.setattr(simulated_state, "open", opened, raising=False)
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), flushed.append(version_of(file))))
    StateFlusher(simulated_run).flush()
    assert flushed == [version_of(state.folder / "model.safetensors")]  # once, when it was found again


@pytest.mark.parametrize("left", ["nothing", "a part", "an older state"])
def test_a_state_that_a_power_failure_damaged_after_the_checkpoint_is_not_needed(
    left, whole, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    expected = whole("ditto", {})
    results_dir = tmp_path / "results"
    folder = interrupted(config_of(results_dir, "ditto"), answers=3 * CLIENTS - 1)  # two of the third round have saved
    (state,) = default_root().glob("run-*/client-0")
    content = (state / "model.safetensors").read_bytes()
    if left == "an older state":
        old = {"client": "0", "round": "0", "attempt": "1"}  # from before every checkpoint
        save_file({"w": np.zeros(2)}, state / "model.safetensors", old)
    else:
        (state / "model.safetensors").write_bytes(content[: 1000 if left == "a part" else 0])
    config = config_of(results_dir, "ditto", resume=str(folder))
    run(InlineGrid(client_app, CLIENTS, config.run_config()), config)
    assert ("model.safetensors is damaged" in caplog.text) == (left != "an older state")
    assert kept(folder) == expected


def test_no_checkpoint_is_written_without_what_a_resumed_run_needs(tmp_path, caplog) -> None:
    checkpoints, full = Checkpoints(tmp_path / "checkpoints"), [False]
    checkpoints.flushes["clients' state"] = lambda: raise_no_space() if full[0] else None
    for r in (1, 2):
        checkpoints.save(r, {"round": r})
        full[0] = True
    assert rounds_in(checkpoints) == [1] and checkpoints.due(3)
    assert "round 2 could not be saved in" in caplog.text
    assert "(clients' state: No space left on device): make room there" in caplog.text
    full[0] = False
    checkpoints.save(3, {"round": 3})
    assert rounds_in(checkpoints) == [1, 3]


@pytest.mark.parametrize("error", [MemoryError, ValueError("it cannot be written")])
def test_an_error_while_a_checkpoint_is_written_ends_the_run_at_the_latest_with_it(error, tmp_path) -> None:
    class Failing(Checkpoints):
        def _write(self, server_round, arrays) -> None:
            raise error

    with pytest.raises(error if isinstance(error, type) else ValueError):
        Local().start(InlineGrid(plain_app(), 3), initial(), 1, checkpoints=Failing(tmp_path))


def test_such_an_error_ends_the_run_too_where_a_client_joins_before_anybody_answers(tmp_path) -> None:
    class Joined(InlineGrid):
        most = CLIENTS

        def get_node_ids(self):
            return list(super().get_node_ids())[: self.most]

        def push_messages(self, messages):
            messages = list(messages)
            if messages[0].metadata.group_id == "1" and messages[0].metadata.message_type == "train":
                self.most = CLIENTS + 1
            return super().push_messages(messages)

    class Failing(Checkpoints):
        def _write(self, server_round, arrays) -> None:
            if server_round == 1:
                raise ValueError("it cannot be written")

    grid = Joined(plain_app(), CLIENTS + 1)
    with pytest.raises(ValueError, match="it cannot be written"):
        FedAvg().start(grid, initial(), ROUNDS, checkpoints=Failing(tmp_path))
    assert grid.most == CLIENTS + 1


def test_an_error_that_follows_the_disk_s_ends_the_run(tmp_path) -> None:
    class Gone(Checkpoints):
        def _write(self, server_round, arrays) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def _files(self):
            if threading.current_thread() is not threading.main_thread():
                raise OSError(errno.ESTALE, "Stale file handle")
            return []

    with pytest.raises(OSError, match="Stale file handle"):
        FedAvg().start(InlineGrid(plain_app(), CLIENTS), initial(), ROUNDS, checkpoints=Gone(tmp_path))


@pytest.mark.parametrize(("failing", "left"), [((2, 3), [1, 4]), ((3,), [2, 4])])
def test_a_run_goes_on_while_checkpoints_fail_beside_its_rounds(failing, left, tmp_path, caplog) -> None:
    class Full(Checkpoints):
        def _write(self, server_round, arrays) -> None:
            if server_round in failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super()._write(server_round, arrays)

    class Noting(InlineGrid):
        def push_messages(self, messages):
            messages = list(messages)
            for config in (config for each in messages for config in records_of(each.content, ConfigRecord)):
                # The state for a checkpoint is kept as long as there is the checkpoint.
                assert config.get("keep-from", -1) <= min(rounds_in(checkpoints), default=ROUNDS)
            return super().push_messages(messages)

    checkpoints = Full(tmp_path)
    whole, run = FedAvg(), FedAvg()
    whole.start(InlineGrid(plain_app(), CLIENTS), initial(), ROUNDS)
    run.start(Noting(plain_app(), CLIENTS), initial(), ROUNDS, checkpoints=checkpoints)
    assert rounds_in(checkpoints) == left
    said = [record.message for record in caplog.records if "could not be saved" in record.message]
    assert [line.split(" in ")[0] for line in said] == [f"kindred: round {r} could not be saved" for r in failing]
    assert all(f"can be resumed from round {left[0] + 1}" in line for line in said)
    models = [{name: array.data for name, array in strategy.global_arrays().items()} for strategy in (whole, run)]
    assert models[0] == models[1]


def rounds_in(checkpoints: Checkpoints) -> list[int]:
    return sorted(int(path.name[6:10]) for path in checkpoints.folder.glob("round-*"))


@pytest.mark.parametrize("bad", [{"every": 0}, {"keep": 0}, {"keep": -1}])
def test_checkpoints_are_written_and_the_newest_kept(bad, tmp_path) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} is .*, allowed: 1 or more"):
        Checkpoints(tmp_path, **bad)


def test_the_folder_is_independent_of_the_working_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints("here")
    monkeypatch.chdir("/")
    checkpoints.save(1, {})
    assert len(list((tmp_path / "here").iterdir())) == 1


def test_checkpoints_after_a_resumed_round_replace_no_intact_one(tmp_path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for r in (1, 2, 3):
        checkpoints.save(r, {"round": r, "of": "the first time"})
    damaged = [path for path in tmp_path.iterdir() if path.name[:10] != "round-0001"]
    for path in damaged:
        path.write_bytes(b"")
    assert checkpoints.load()[0] == 1
    checkpoints.keep = 1
    for r in (2, 3):
        checkpoints.save(r, {"round": r, "of": "the second time"})
        assert checkpoints.load() == (r, {"round": r, "of": "the second time"})
        assert rounds_in(checkpoints) == [r]


@pytest.mark.parametrize(
    "entries",
    [None, {}, {"state.npy": b""}, {"state.npy": b"\x93NUMPY\x01\x00"}, {"other": b"{}"}],
    ids=["no zip", "no state", "empty state", "cut state", "other"],
)
def test_a_file_with_the_right_name_and_other_content_is_not_used(entries, tmp_path, caplog) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"round": 1})
    path = tmp_path / "new"
    if entries is None:
        path.write_bytes(b"")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
    named = path.rename(tmp_path / f"round-0002-{hashlib.sha256(path.read_bytes()).hexdigest()}.npz")
    assert checkpoints.load() == (1, {"round": 1})
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert f"{named} is damaged, and not used (" in caplog.text
    next(tmp_path.glob("round-0001-*")).unlink()
    with pytest.raises(NotResumable, match="none of the checkpoints in .* can be used; begin a new run"):
        checkpoints.load()


def raise_no_space(*args, **more) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def no_files_above(size: int):
    """Have the system refuse larger files, which simulates a disk that becomes full within a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("moment", ["in the middle", "fsync", "replace", "mkdir"])
def test_a_checkpoint_that_cannot_be_written_is_tried_again_after_the_next_round(
    moment, tmp_path, monkeypatch, caplog
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=3, keep=2)
    assert [checkpoints.due(r) for r in range(7)] == [True, False, False, True, False, False, True]
    state = {"model": np.zeros(10**5)}
    if moment != "mkdir":
        checkpoints.save(3, state)
    if moment == "in the middle":
        with no_files_above(10**5):
            checkpoints.save(6, state)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(*(Path, moment) if moment == "mkdir" else (os, moment), raise_no_space)
            checkpoints.save(6, state)
    (said,) = (record.message for record in caplog.records)
    reason = "File too large" if moment == "in the middle" else "No space left on device"
    before = "cannot be resumed" if moment == "mkdir" else "can be resumed from round 4"
    assert said == (
        f"kindred: round 6 could not be saved in {checkpoints.folder} ({reason}): make room there; the run "
        f"continues, and tries again after the next round; if interrupted before that, it {before}"
    )
    if moment != "mkdir":
        assert rounds_in(checkpoints) == [3]  # and no other file
    assert checkpoints.due(7)
    checkpoints.save(7, state)
    assert not checkpoints.due(8) and checkpoints.load()[0] == 7


def test_a_run_that_cannot_write_files_for_a_while_gives_the_same_bits(whole, tmp_path, monkeypatch, caplog) -> None:
    replace = os.replace
    config = config_of(tmp_path, "heurfedamp", keep_checkpoints=1)  # a round waits for its checkpoint

    class Full(InlineGrid):
        def push_messages(self, messages):
            messages = list(messages)
            full = messages[0].metadata.group_id in ("2", "3")
            monkeypatch.setattr(os, "replace", raise_no_space if full else replace)
            return super().push_messages(messages)

    folder = run(Full(client_app, CLIENTS, config.run_config()), config).path
    missing = {f"collaboration/round-000{r}.npz" for r in (2, 3)}
    expected = whole("heurfedamp", {})
    assert kept(folder) == {name: content for name, content in expected.items() if name not in missing}
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(" (No space")[0] for line in warnings] == [
        text
        for r in (2, 3)
        for text in (
            f"kindred: the results of round {r} cannot be written to {folder}",
            f"kindred: round {r} could not be saved in {folder / 'checkpoints'}",
        )
    ]


@pytest.mark.parametrize("name", ["perfed-ckt", "heurfedamp"])
def test_a_resume_writes_results_that_could_not_be_written(name, whole, tmp_path, monkeypatch) -> None:
    config = config_of(tmp_path, name)
    finish = RunFolder.finish

    def full(folder, *args):
        with no_files_above(10**4):  # a model is larger
            finish(folder, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", full)
        with pytest.raises(ConfigError) as refused:
            run(InlineGrid(client_app, CLIENTS, config.run_config()), config)
    (folder,) = tmp_path.iterdir()
    assert str(refused.value) == (
        f"the results cannot be written to {folder} (File too large); make room there, then continue with "
        f"--resume {folder}"
    )
    assert not list((folder / "models").rglob("*"))
    assert not (folder / "summary.json").exists() and not is_finished(folder)
    config = config_of(tmp_path, name, resume=str(folder))
    run(InlineGrid(client_app, CLIENTS, config.run_config()), config)
    assert kept(folder) == whole(name, {}) and is_finished(folder)


def test_only_one_process_at_a_time_works_on_a_run(tmp_path) -> None:
    folder = interrupted(config_of(tmp_path, "perfed-ckt"), answers=4 * CLIENTS)
    config = config_of(tmp_path, "perfed-ckt", resume=str(folder))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with RunFolder(config.run_config()).locked(), pytest.raises(ConfigError, match="another process is at work on"):
        run(InlineGrid(client_app, CLIENTS, config.run_config()), config)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("name", "settings"),
    [("perfed-ckt", {}), ("fedavg", {"validation_share": 0.2}), ("fedavg", {"shadow_local": True})],
    ids=["perfed-ckt", "selected models", "models trained alone"],
)
def test_a_run_whose_clients_lost_their_models_does_not_resume(name, settings, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = interrupted(config_of(tmp_path / "results", name, **settings), answers=4 * CLIENTS)
    config = config_of(tmp_path, name, resume=str(folder), **settings)
    moved = default_root().rename(tmp_path / "moved")
    with pytest.raises(
        ConfigError, match=f"^resume is '{folder}': the saved state of its clients is not in {default_root()}"
    ):
        run(InlineGrid(client_app, CLIENTS, config.run_config()), config)
    moved.rename(default_root())
    run(InlineGrid(client_app, CLIENTS, config.run_config()), config)
    assert (folder / "summary.json").exists()


def test_a_moved_folder_of_results_resumes_and_loses_only_files_of_killed_processes(whole, tmp_path, caplog) -> None:
    folder = interrupted(config_of(tmp_path / "old" / "results", "heurfedamp"), answers=4 * CLIENTS)
    for partial in (".history.123.partial.csv", "models/.client-0.123.partial.safetensors", "checkpoints/.123.partial"):
        (folder / partial).parent.mkdir(exist_ok=True)
        (folder / partial).write_text("half")
    ours = (".notes.partial", "models/.x.partial.txt", "checkpoints/notes")
    for name in ours:
        (folder / name).write_text("a user's")
    settings = json.loads((folder / "config.json").read_text())
    settings["versions"]["numpy"] = "1.0"
    (folder / "config.json").write_text(json.dumps(settings))
    folder = folder.rename(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "old")
    (tmp_path / "old").write_text("a file, in which no folder can be made")
    config = run_settings({}, folder)
    check([config], Engine("inline"))
    run(InlineGrid(client_app, CLIENTS, config.run_config()), config)
    for name in ours:
        assert (folder / name).read_text() == "a user's"
        (folder / name).unlink()
    (folder / "checkpoints").rmdir()  # only the user's file was left in it
    assert kept(folder) == whole("heurfedamp", {})
    assert not list(folder.rglob(".*"))
    assert f"its results may differ in their last bits: numpy was 1.0 and is {np.__version__}" in caplog.text


def test_a_run_interrupted_before_its_first_checkpoint_starts_again(whole, tmp_path, caplog) -> None:
    class Unnoticed(Ending):  # a killed process also leaves the folder
        def _answer(self, message):
            folder.extend(tmp_path.iterdir())
            shutil.copytree(folder[0], tmp_path.with_name("copy"), dirs_exist_ok=True)
            return super()._answer(message)

    folder: list[Path] = []
    config = config_of(tmp_path, "local")
    with pytest.raises(Killed):
        run(Unnoticed(config, CLIENTS + 1), config)
    config = config_of(tmp_path, "local", resume=str(tmp_path.with_name("copy")))
    results = run(InlineGrid(client_app, CLIENTS, config.run_config()), config).path
    assert "nothing was saved before the run was interrupted: it starts again with its first round" in caplog.text
    assert kept(results) == whole("local", {})


def test_a_checkpoint_of_another_method_is_refused(tmp_path) -> None:
    FedAMP().start(InlineGrid(plain_app(), 3), initial(), 2, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(NotResumable, match="round 2 in .* another run: its method is fedamp, here heurfedamp"):
        HeurFedAMP().start(InlineGrid(plain_app(), 3), initial(), 4, checkpoints=Checkpoints(tmp_path))


def test_a_checkpoint_of_another_network_is_refused(tmp_path) -> None:
    HeurFedAMP().start(InlineGrid(plain_app(), 3), initial(), 2, checkpoints=Checkpoints(tmp_path))
    name, array = next(iter(read_record(initial()).items()))
    more = read_record(initial()) | {"more": np.zeros(2, np.float32)}
    longer = read_record(initial()) | {name: np.zeros((*array.shape, 2), array.dtype)}
    for model, said in (
        (more, f"its number of arrays is {len(more) - 1}, here {len(more)}"),
        (longer, f"its array '{name}' is float32 {array.shape}, here float32 {(*array.shape, 2)}"),
    ):
        with pytest.raises(NotResumable, match=re.escape(said)):
            HeurFedAMP().start(InlineGrid(plain_app(), 3), to_record(model), 4, checkpoints=Checkpoints(tmp_path))


def test_a_checkpoint_of_a_strategy_with_other_state_is_refused(tmp_path) -> None:
    class Other(Local):
        STATE = (*Local.STATE, "_other")
        _other = 0

    Local().start(InlineGrid(plain_app(), 3), initial(), 2, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(NotResumable, match="round 2 in .* was saved by another method or version: .*_other"):
        Other().start(InlineGrid(plain_app(), 3), initial(), 4, checkpoints=Checkpoints(tmp_path))


def test_a_renamed_checkpoint_is_detected(tmp_path, caplog) -> None:
    """The file of round 2 is named as round 9: its checksum is right, its round is not."""
    checkpoints = Checkpoints(tmp_path)
    for server_round in (1, 2):
        checkpoints.save(server_round, {"rounds": server_round})
    (path,) = tmp_path.glob("round-0002-*")
    renamed = path.rename(tmp_path / path.name.replace("0002", "0009"))
    assert checkpoints.load() == (1, {"rounds": 1})
    assert f"{renamed} is damaged, and not used (it is of round 2, not of round 9)" in caplog.text


def test_a_checkpoint_of_another_version_is_refused_by_name(tmp_path) -> None:
    content = io.BytesIO()
    np.savez(content, state=np.frombuffer(b'{"strategy": {}}', np.uint8))  # as version 0.1.0 wrote it
    path = tmp_path / f"round-0003-{hashlib.sha256(content.getvalue()).hexdigest()}.npz"
    path.write_bytes(content.getvalue())
    with pytest.raises(
        NotResumable,
        match=r"round-0003-\w+.npz was saved by another version of kindred, in format 1; "
        "this one reads formats 3, 4, 5",
    ):
        Checkpoints(tmp_path).load()


def test_empty_rounds_count_across_a_resume_until_they_have_ended_the_run(tmp_path) -> None:
    def start(last_answer: int, killed_after: int = 99) -> list[int]:
        def on_round(server_round: int) -> None:
            if server_round == killed_after:
                raise Killed

        grid = FaultyGrid(plain_app(), 3, lambda server_round, client: "ok" if server_round <= last_answer else "error")
        strategy = Local(max_empty_rounds=3, fraction_evaluate=0)
        with suppress(TooFewClients, Killed):
            strategy.start(grid, initial(), 9, on_round=on_round, checkpoints=Checkpoints(tmp_path))
        return [line["round"] for line in strategy.history.rounds]

    assert start(last_answer=1, killed_after=4) == [1, 2, 3, 4]  # two are empty; a third one is not saved
    assert start(last_answer=1) == [1, 2, 3, 4]
    assert start(last_answer=1) == [1, 2, 3, 4, 5, 6, 7]


def peak_above(before: float | None = None) -> float:
    """Peak memory of this process in MB, above `before` if given; without it, the peak is reset first."""
    if before is None:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1e3 - (before or 0)


def memory_of_a_checkpoint(folder: Path, clients: int, millions: int) -> tuple[float, float]:
    """Memory in MB needed to save models that are on disk, and to resume from them."""
    layout = Layout({"w": np.zeros(millions * 10**6, np.float32), "n": np.zeros((), np.int64)})

    def filled(count: int) -> ClientModels:
        models = ClientModels(layout, "disk")
        for client in range(count):
            models.put(client, {"w": np.full(millions * 10**6, client, np.float32), "n": np.array(client)})
        return models

    for count in (2, clients):  # first a warm-up: some memory is allocated only once
        models, checkpoints = filled(count), Checkpoints(folder, keep=1)
        models.row(0)
        before = peak_above()
        checkpoints.save(count, {"models": models})
        saving = peak_above(before)
        before = peak_above()
        again = ClientModels(layout, "disk")
        _, state = checkpoints.load()
        again.restore(state["models"])
        loading = peak_above(before)
    assert list(again) == list(models)
    for client in models:
        assert again.row(client).tobytes() == models.row(client).tobytes()
        assert again[client]["n"].numpy() == client
    again.row(0)[0] = 7  # the result is in its own array
    return saving, loading


def test_a_checkpoint_of_models_on_disk_is_never_in_memory_as_a_whole(tmp_path) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        saving, loading = process.submit(memory_of_a_checkpoint, tmp_path, clients=40, millions=1).result()  # 160 MB
    assert saving < 50 and loading < 40


def test_a_resume_names_changed_settings_and_starts_nothing(tmp_path) -> None:
    folder = interrupted(config_of(tmp_path, "local"), answers=CLIENTS + 4)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    config = config_of(tmp_path, "local", resume=str(folder), learning_rate=0.5, num_rounds=9)
    with pytest.raises(ConfigError) as refused:
        run(InlineGrid(client_app, CLIENTS, config.run_config()), config)
    assert str(refused.value).endswith(
        "a run with other settings: num-rounds was 4 and is 9, learning-rate was 0.002 and is 0.5"
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


keys = st.text(max_size=5) | st.integers(-9, 9)
typed = st.sampled_from([np.float16(0.1), np.float32(0.1), np.float64(-0.0), np.int8(-1), np.uint64(7), np.True_])
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
numbers = arrays(st.sampled_from(["<f4", "<f8", "<f2", "<i8", "|u1", "|b1"]), array_shapes(min_dims=0, min_side=0))
values = st.recursive(
    scalars | typed | numbers,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(keys, max_size=3)
    ),
    max_leaves=8,
)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set):
        return type(one) is type(other) and one == other
    return type(one) is type(other) and repr(one) == repr(other)  # this distinguishes -0.0 from 0.0, and equates NaN


@given(values)
def test_a_state_is_read_back(value) -> None:
    put_aside: dict[str, np.ndarray] = {}
    packed = json.loads(json.dumps(pack(value, put_aside)))
    assert same(unpack(packed, put_aside), value)


@pytest.mark.parametrize("kind", [list, HistoryRows])
def test_a_history_with_numpy_numbers_is_read_back_to_the_same_bits(tmp_path, kind) -> None:
    row = {
        "f8": np.float64(0.1),
        "f4": np.float32(0.1),
        "i": np.int64(7),
        "b": np.True_,
        "nan": float("nan"),
        "inf": -float("inf"),
        "large": 2**64 - 1,
        "ü\n": "é\ud800",
    }
    Checkpoints(tmp_path).save(1, {"rows": kind([row]), "by client": {7: 1, "7": 2, 2**64 - 1: 3}})
    _, state = Checkpoints(tmp_path).load()
    assert type(state["rows"]) is kind
    (again,) = state["rows"]
    assert state["by client"] == {7: 1, "7": 2, 2**64 - 1: 3}
    assert list(again) == list(row)
    for key, value in row.items():
        assert repr(again[key]) == repr(value), key


def test_rows_are_encoded_once_however_many_checkpoints_they_are_in(tmp_path, monkeypatch) -> None:
    encoded = []
    monkeypatch.setattr(checkpoint, "pack", lambda value, arrays: encoded.append(value) or pack(value, arrays))
    rows, checkpoints = HistoryRows(), Checkpoints(tmp_path)
    for server_round in range(1, 5):
        rows += [{"round": server_round, "client": client} for client in ("a", "b")]
        checkpoints.save(server_round, {"rows": rows})
    assert [row for row in encoded if "round" in row] == rows
    _, state = Checkpoints(tmp_path).load()
    assert state["rows"] == rows
    state["rows"].append({"round": 5, "client": "a"})
    Checkpoints(tmp_path).save(5, state)
    assert Checkpoints(tmp_path).load()[1]["rows"] == state["rows"]


def test_a_checkpoint_of_format_3_in_which_the_history_is_a_list_is_still_read(tmp_path, monkeypatch) -> None:
    before = {**History().state(), "rows": [{"round": 1}], "updates": [{"round": 1, "norm": 2.0}]}
    before |= {"rounds": [{"round": 1, "asked": 3}], "validations": []}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 3)
        Checkpoints(tmp_path).save(1, {"history": before})
    history = History()
    history.restore(Checkpoints(tmp_path).load()[1]["history"])
    history.rows.append({"round": 2})
    Checkpoints(tmp_path).save(2, {"history": history})
    again = Checkpoints(tmp_path).load()[1]["history"]
    assert again["rows"] == [{"round": 1}, {"round": 2}] and again["updates"] == before["updates"]
    assert again["rounds"] == before["rounds"]
    assert all(type(again[name]) is HistoryRows for name in ("rows", "updates", "rounds", "validations"))


def test_a_checkpoint_of_format_4_is_still_read(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 4)
        Checkpoints(tmp_path).save(1, {"rows": HistoryRows([{"round": 1}]), "by client": {7: 0.5}})
    assert Checkpoints(tmp_path).load() == (1, {"rows": [{"round": 1}], "by client": {7: 0.5}})


def test_an_array_in_a_row_of_the_history_is_refused(tmp_path) -> None:
    with pytest.raises(TypeError, match="a row of the history has an array"):
        Checkpoints(tmp_path).save(1, {"rows": HistoryRows([{"round": 1, "weights": np.ones(2)}])})


def test_a_record_is_read_back_and_an_unknown_type_refused() -> None:
    put_aside: dict[str, np.ndarray] = {}
    record = to_record({"b": np.ones((2, 3), np.float32), "a": np.arange(2)})
    again = unpack(pack({"global": record}, put_aside), put_aside)["global"]
    assert isinstance(again, ArrayRecord)
    assert {name: array.data for name, array in again.items()} == {name: array.data for name, array in record.items()}
    refused = (
        object(),
        namedtuple("Pair", "a b")(1, 2),
        1j,
        defaultdict(list),
        Counter("a"),
        OrderedDict(a=1),
        np.str_("a"),
    )
    for value in refused:
        name = type(value).__name__
        with pytest.raises(TypeError, match=f"{name} cannot be part of a checkpoint"):
            pack([value], {})


def kill_at(seconds: Sequence[float], folder: Path, name: str, rounds: int = 8) -> Path:
    """Run the command line, kill it once after each of `seconds`, let it finish; return the folder of the results."""
    settings = [f"{key.replace('_', '-')}={value}" for key, value in MOST.get(name, {}).items()]
    command = [sys.executable, "-m", "kindred", "run", "--engine", "inline"]
    new = [
        "--strategy",
        name,
        "--clients",
        str(CLIENTS),
        "--rounds",
        str(rounds),
        "--output-dir",
        str(folder),
        *(
            word
            for text in ("num-groups=3", "samples-per-client=20", "local-epochs=2", "device=cpu", *settings)
            for word in ("--set", text)
        ),
    ]
    for pause in (*seconds, None):
        started = list(folder.iterdir()) if folder.exists() else []
        process = subprocess.Popen(
            [*command, *(["--resume", str(started[0])] if started else new)],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if pause is None:
            said, _ = process.communicate(timeout=600)
            assert process.returncode == 0, said
        else:
            deadline = time.monotonic() + 60
            while not list(folder.glob("*/checkpoints/round-*")):  # there is a checkpoint to resume from
                assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
                time.sleep(0.01)
            time.sleep(pause)
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    (results,) = folder.iterdir()
    return results


@pytest.mark.parametrize("name", ["perfed-ckt", pytest.param("federico", marks=pytest.mark.faults)])
def test_a_killed_run_resumes_to_the_same_bits(name, tmp_path) -> None:
    found, expected = (kept(kill_at(pauses, tmp_path / str(len(pauses)), name)) for pauses in ([0.3, 0.9], []))
    assert found == expected


@pytest.mark.faults
@pytest.mark.parametrize("name", ["perfed-ckt", "federico", "heurfedamp"])
def test_a_run_killed_twenty_times_resumes_to_the_same_bits(name, tmp_path) -> None:
    pauses = np.random.default_rng(len(name)).uniform(2, 5, 20)  # s; the first two or so are for the start
    found, expected = (
        kept(kill_at(each, tmp_path / str(len(each)), name, rounds=1500)) for each in (pauses, pauses[:0])
    )
    assert found == expected
