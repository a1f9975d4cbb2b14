"""State of clients: files that are complete or absent, separate folders, and models that survive a restart."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pickle
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kindred import InlineGrid, PerFedCKT, Site, files, make_client_app
from kindred.client.site import forget_sites
from kindred.client.state import ClientState, default_root, file_name
from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.engine.checkpoint import NotResumable
from kindred.engine.simulated_state import begin_simulation, end_simulation, saved_files
from kindred.engine.transport import StateNotWritten
from kindred.messages import in_order, read_record
from kindred.server_app.deployment.files import own_folder
from kindred.server_app.run_log import keep_log
from kindred.server_app.workspace import Workspace

from .background_commands import PATIENCE
from .client_apps import saved_models
from .test_conformance import everything, values

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    """Folder in which clients store their own folders; it does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "kindred"


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == array.dtype and one[name].shape == array.shape and one[name].tobytes() == array.tobytes()
        for name, array in other.items()
    )


# --- Files ----------------------------------------------------------------------------------------------

TYPES = (np.float32, np.float16, np.float64, np.int64, np.bool_)


def test_a_method_does_not_load_what_another_one_has_saved() -> None:
    """A message that names another method would have a model sent that stays by the first one."""
    model = {"w": np.ones(1)}
    ClientState(1, 0, server_round=1, method="ditto").save("model", model)
    assert ClientState(1, 0, server_round=2, before=2, method="federico").load("model") is None
    assert ClientState(1, 0, server_round=2, before=2, method="").about("model") == {}
    for same in ("ditto", None):  # None: those who read results
        assert ClientState(1, 0, server_round=2, before=2, method=same).load("model") == model


@settings(max_examples=40, deadline=None)
@given(
    kept=st.dictionaries(
        st.text(max_size=20),
        st.sampled_from(TYPES).flatmap(
            lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
        ),
        max_size=6,
    )
)
def test_a_saved_state_is_loaded_bit_by_bit(tmp_path_factory, kept) -> None:
    state = ClientState(1, 0, tmp_path_factory.getbasetemp() / "any arrays")
    state.save("model", kept)
    assert same(state.load("model"), kept)


def test_non_contiguous_arrays_are_saved_by_value() -> None:
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    kept = {
        "transposed": whole.T,
        "every other": whole[:, ::2, ::-1],
        "fortran": np.asfortranarray(whole[0]),
        "repeated": np.broadcast_to(np.float16(1.5), (3, 2)),
        "number": np.float64(7),
        "empty": whole[:0],
    }
    state = ClientState(1, 0)
    state.save("model", kept)
    assert same(state.load("model"), kept)


def test_an_unsaved_state_is_none_and_creates_no_folder(root) -> None:
    state = ClientState(1, 0)
    assert state.load("model") is None
    assert not root.exists()
    state.save("model", {"w": np.ones(1)})
    assert state.load("other") is None


def test_a_later_save_replaces_the_state_of_that_name_only() -> None:
    state = ClientState(1, 0)
    state.save("model", {"w": np.zeros(5), "b": np.ones(2)})
    state.save("other", {"w": np.full(1, 3.0)})
    loaded = state.load("model")
    state.save("model", {"w": np.ones(2, np.float32)})
    assert same(state.load("model"), {"w": np.ones(2, np.float32)})
    assert same(state.load("other"), {"w": np.full(1, 3.0)})
    assert same(loaded, {"w": np.zeros(5), "b": np.ones(2)})  # a loaded state does not change


def replace_write(monkeypatch, write: Callable[[Callable[[bytes], int], bytes], object]) -> None:
    """Let arrays be written by a function of the true one and the bytes."""

    class Replaced(io.FileIO):
        def write(self, content):
            write(super().write, content)

    monkeypatch.setattr(files, "open", Replaced, raising=False)


@pytest.mark.parametrize("failure", [OSError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_failed_save_leaves_the_last_file_and_no_other(monkeypatch, moment, failure) -> None:
    def fail(*args):
        raise failure

    def write_half(write, content):
        write(content[:-4])
        fail()

    state = ClientState(1, 0)
    state.save("model", {"w": np.zeros(3)})
    before = files_in(state.folder)
    if moment == "write":
        replace_write(monkeypatch, write_half)
    else:
        monkeypatch.setattr(os, moment, fail)
    with pytest.raises(type(failure)):
        state.save("model", {"w": np.ones(3)})
    assert same(state.load("model"), {"w": np.zeros(3)})
    assert files_in(state.folder) == before == {"model.safetensors"}


class Touch:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole, path: b"",
        lambda whole, path: whole[:5],
        lambda whole, path: whole[:-1],
        lambda whole, path: whole + b"0",
        lambda whole, path: b"\xff" * 8 + whole[8:],  # a header of 2**64 - 1 bytes
        lambda whole, path: whole.replace(b"F64", b"F65"),
        lambda whole, path: pickle.dumps(Touch(path)),
    ],
    ids=["empty", "header", "short", "long", "giant", "type", "pickle"],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, damage) -> None:
    state = ClientState(1, "lyon")
    state.save("model", {"w": np.zeros(3)})
    path = state.folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes(), tmp_path / "touched"))
    with pytest.raises(ValueError) as caught:
        state.load("model")
    text = str(caught.value)
    assert text.startswith(f"{path} is damaged (") and text.endswith("; remove it to start from a new model")
    assert "\n" not in text and not (tmp_path / "touched").exists()
    path.unlink()
    assert state.load("model") is None


def test_files_of_a_killed_process_are_removed_and_those_of_a_live_one_stay(tmp_path) -> None:
    state = ClientState(1, 7, tmp_path)
    state.save("model", {"a": np.zeros(3)})
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, os.getppid()):
        (state.folder / f".model.{pid}.partial.safetensors").write_bytes(b"half")
    state.save("model", {"a": np.ones(3)})
    assert files_in(state.folder) == {"model.safetensors", f".model.{os.getppid()}.partial.safetensors"}


def test_only_incomplete_files_of_this_folder_are_removed(tmp_path) -> None:
    state = ClientState(1, 7, tmp_path / "state")
    state.save("model", {"a": np.zeros(3)})
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "thesis.txt").write_text("a user's")
    (state.folder / f".model.{gone.pid}.partial.safetensors").symlink_to(tmp_path / "thesis.txt")
    (state.folder / f".other.{gone.pid}.partial.safetensors").mkdir()
    for name in (".thesis.partial.safetensors", f"model.{gone.pid}.partial.safetensors", ".partial.safetensors"):
        (state.folder / name).write_text("a user's")
    before = {path.name for path in state.folder.iterdir()}
    state.save("model", {"a": np.ones(3)})
    assert {path.name for path in state.folder.iterdir()} == before and number(state.load("model"), "a") == 1


@pytest.mark.parametrize("about", [None, {}, {"client": "[7]"}])
def test_a_file_without_an_owner_is_ignored(root, caplog, about) -> None:
    ClientState(1, 7).save("model", {"a": np.zeros(3)})
    (other := root / "run-1" / "client-8" / "model.safetensors").parent.mkdir()
    safetensors.numpy.save_file({"a": np.zeros(3)}, other, about)
    assert list(saved_files(1, "model")) == [7]
    assert caplog.messages == [f"kindred: {other} does not name its client and is skipped"]


def test_a_finished_simulation_can_be_removed_at_once(root) -> None:
    begin_simulation(5)
    ClientState(5, 1).save("model", {"a": np.zeros(3)})
    end_simulation(5)
    assert not (root / "run-5").exists()
    begin_simulation(6)


def state_in(server_round: int, keep_from: int, attempt: int = 1) -> ClientState:
    return ClientState(1, 0, server_round=server_round, before=server_round, keep_from=keep_from, attempt=attempt)


def number(arrays: dict[str, np.ndarray] | None, name: str = "w") -> int | None:
    return None if arrays is None else int(arrays[name][0])


def train(server_round: int, keep_from: int, attempt: int = 1) -> int | None:
    """Return the state that a client starts from in a round; the client then saves the round's number."""
    state = state_in(server_round, keep_from, attempt)
    before = number(state.load("model"))
    state.save("model", {"w": np.array([server_round])})
    return before


def test_a_repeated_round_starts_from_the_state_before_it() -> None:
    assert [train(r, keep_from=r - 1) for r in (1, 2, 3)] == [None, 1, 2]
    assert train(3, keep_from=2, attempt=2) == 2  # the server was killed in round 3
    assert train(4, keep_from=3, attempt=2) == 3
    assert files_in(state_in(5, 4).folder) == {"model.safetensors", ".model.round-0003.safetensors"}


def test_a_state_is_kept_for_every_round_that_the_server_may_resume_from() -> None:
    for r in range(1, 7):
        train(r, keep_from=max(r - 3, -1))
    earlier = {f".model.round-000{r}.safetensors" for r in (3, 4, 5)}
    assert files_in(state_in(7, 0).folder) == {"model.safetensors", *earlier}
    assert train(4, keep_from=3, attempt=2) == 3  # two checkpoints were damaged
    assert files_in(state_in(5, 0).folder) == {"model.safetensors", ".model.round-0003.safetensors"}
    assert train(7, keep_from=3, attempt=2) == 4  # the client was not sampled in rounds 5 and 6
    assert number(state_in(6, 3).load("model")) == 4


@pytest.fixture
def simulated(root):
    """A simulated run, number 1."""
    begin_simulation(1)
    yield root / "run-1" / "client-0"
    end_simulation(1)


@pytest.mark.parametrize("kept", [1, 2], ids=["one state before", "two states before"])
def test_in_a_simulation_a_state_takes_the_file_of_one_that_no_round_needs(simulated, kept) -> None:
    used = []
    for r in range(1, 10):
        assert train(r, keep_from=max(r - kept, 0)) == (r - 1 or None)
        used.append((simulated / "model.safetensors").stat().st_ino)
    assert len(set(used)) == 1 + kept and used[1 + kept :] == used[: -1 - kept]  # they take turns
    before = {f".model.round-{r:04d}.safetensors" for r in range(9 - kept, 9)}
    assert files_in(simulated) == {"model.safetensors", *before}


def test_in_a_simulation_a_state_that_is_smaller_than_the_one_before_it_is_whole(simulated) -> None:
    for r, size in enumerate([9, 8, 7, 6, 5], 1):
        state = state_in(r, r - 1)
        state.load("model")
        state.save("model", {"w": np.full(size, r)})
        assert same(state_in(r + 1, r).load("model"), {"w": np.full(size, r)})


def test_in_a_simulation_a_process_may_be_killed_between_a_save_s_renames(simulated) -> None:
    assert [train(r, keep_from=r - 1) for r in (1, 2, 3)] == [None, 1, 2]
    (simulated / "model.safetensors").rename(simulated / ".model.round-0003.safetensors")
    assert [train(r, keep_from=r - 1) for r in (4, 5)] == [3, 4]


def test_a_state_from_before_the_checkpoint_that_a_power_failure_leaves_does_not_count(simulated) -> None:
    assert [train(r, keep_from=r - 1) for r in (1, 2, 3)] == [None, 1, 2]
    old = (simulated / ".model.round-0002.safetensors").read_bytes()
    train(4, keep_from=3)  # writes over that file, which is not flushed
    (simulated / "model.safetensors").write_bytes(old)
    assert train(4, keep_from=3, attempt=2) == 3
    assert [train(r, keep_from=r - 1, attempt=2) for r in (5, 6)] == [4, 5]


def test_in_a_simulation_a_file_whose_state_is_needed_is_never_written_over(simulated) -> None:
    for r in range(1, 9):
        train(r, keep_from=1)  # the server may go back to round 1 all the time
    for r in range(1, 9):
        assert number(ClientState(1, 0, server_round=r + 1, before=r + 1, keep_from=1, attempt=1).load("model")) == r


def test_a_name_that_other_rounds_load_keeps_its_states_though_this_round_does_not() -> None:
    for r in (1, 4):
        state_in(r, keep_from=r - 1).save("copy", {"w": np.array([r])}, rounds_load_it=True)
        state_in(r, keep_from=r - 1).save("result", {"w": np.array([r])})
    assert files_in(state_in(5, 4).folder) == {"copy.safetensors", ".copy.round-0001.safetensors", "result.safetensors"}
    assert number(state_in(3, keep_from=2, attempt=2).load("copy")) == 1  # the server went back behind round 4
    assert number(state_in(6, keep_from=5).load("copy")) == 4  # no round starts from the state before it any more
    assert files_in(state_in(5, 4).folder) == {"copy.safetensors", "result.safetensors"}


def test_a_part_of_a_state_is_loaded_by_its_prefix() -> None:
    state = state_in(1, keep_from=0)
    state.save("copy", {"model/w": np.ones(2), "model/b": np.zeros(1), "seen": np.ones(3)})
    assert same(ClientState(1, 0).load("copy", "model/"), {"model/w": np.ones(2), "model/b": np.zeros(1)})
    assert same(ClientState(1, 0).load("copy", "seen"), {"seen": np.ones(3)})
    assert ClientState(1, 0).load("copy", "other") == {} and ClientState(1, 0).load("none", "model/") is None


@pytest.mark.parametrize("client", ["../../x", "a/b", ".", "Lyon*", "x" * 300, "ü" * 100, 7])
def test_a_client_s_name_for_files_stays_within_its_folder(client, tmp_path) -> None:
    name = file_name(client)
    assert (tmp_path / name).parent == tmp_path and len(name.encode()) < 120
    assert file_name(str(client)) != file_name(7) and file_name("LYON") != file_name("lyon")
    (tmp_path / f".received-{name}.round-0001.partial.safetensors").touch()


def test_a_late_message_changes_nothing() -> None:
    train(1, keep_from=0)
    train(2, keep_from=1)
    late = state_in(1, 0)
    with pytest.raises(ValueError, match=r"round 1 is over: .*model.safetensors is of round 2"):
        late.save("model", {"w": np.array([9])})
    assert number(state_in(3, 2).load("model")) == 2


def test_a_message_from_before_a_resume_counts_as_late() -> None:
    for r in (1, 2, 3):
        train(r, keep_from=1)
    assert train(2, keep_from=1, attempt=2) == 1
    for r in (2, 3):
        late = state_in(r, 1, attempt=1)
        with pytest.raises(ValueError, match=f"round {r} is over: .* is of round 2 of the resumed run"):
            late.save("model", {"w": np.array([9])})
    assert train(3, keep_from=1, attempt=2) == 2


def test_an_evaluation_uses_the_state_of_its_own_round() -> None:
    train(1, keep_from=0)
    train(2, keep_from=1)
    evaluating = lambda attempt: ClientState(1, 0, server_round=2, before=3, keep_from=1, attempt=attempt)  # noqa: E731
    assert number(evaluating(1).load("model")) == 2
    assert number(evaluating(2).load("model")) == 1  # the first attempt at this round was interrupted
    assert number(ClientState(1, 0).load("model")) == 2  # without a round, the last state is loaded


def test_a_copy_is_kept_where_hard_links_are_impossible(monkeypatch) -> None:
    def refuse(*paths):
        raise OSError("not on this file system")

    monkeypatch.setattr(os, "link", refuse)
    assert [train(r, keep_from=r - 1) for r in (1, 2)] == [None, 1]
    assert number(state_in(2, 1).load("model")) == 1


def test_object_arrays_are_not_saved() -> None:
    state = ClientState(1, 0)
    with pytest.raises(Exception, match="object"):
        state.save("model", {"w": np.array([{}])})
    assert files_in(state.folder) == set()


def test_two_processes_that_save_at_once_leave_a_complete_file(monkeypatch) -> None:
    state = ClientState(1, 0)

    def overtaken(write, content):
        write(content[:20])
        subprocess.run(
            [
                sys.executable,
                "-c",
                "import numpy as np; from kindred.client.state import ClientState\n"
                "ClientState(1, 0).save('model', {'w': np.zeros(3)})",
            ],
            cwd=ROOT,
            check=True,
            timeout=PATIENCE,
        )
        assert same(state.load("model"), {"w": np.zeros(3)})
        write(content[20:])

    replace_write(monkeypatch, overtaken)
    state.save("model", {"w": np.ones(5)})
    assert same(state.load("model"), {"w": np.ones(5)})
    assert files_in(state.folder) == {"model.safetensors"}


# --- Folders --------------------------------------------------------------------------------------------

client_ids = st.one_of(
    st.integers(-(2**63), 2**64),
    st.text(),
    st.text("aAbBäÄß./\\:~%-0 \0"),
    st.text("xX/", min_size=250, max_size=400),
    st.sampled_from(["", ".", "..", "../..", "/", "/etc", "7", "nul", "~"]),
)


@settings(max_examples=200, deadline=None)
@given(
    clients=st.lists(client_ids, min_size=1, max_size=8, unique_by=lambda client: (type(client), client)),
    upper=st.booleans(),
)
def test_each_client_has_its_own_folder_inside_its_run(clients, upper) -> None:
    if upper:  # names that differ in case alone
        clients = list({*clients, *(client.upper() for client in clients if isinstance(client, str))})
    folders = [ClientState(12, client, "/state").folder for client in clients]
    assert {folder.parent for folder in folders} == {Path("/state/run-12")}
    names = {folder.name.lower() for folder in folders}  # as a case-insensitive file system sees them
    assert len(names) == len(clients)
    for name in names:
        assert name.isascii() and name.startswith("client-") and len(name) < 200 and not set(name) & set("/\\:\0")


def test_runs_have_separate_states() -> None:
    one, other = ClientState(1, 0), ClientState(2, 0)
    one.save("model", {"w": np.zeros(1)})
    assert other.load("model") is None
    other.save("model", {"w": np.ones(1)})
    assert same(one.load("model"), {"w": np.zeros(1)})


def test_only_the_user_can_read_stored_states(tmp_path, root) -> None:
    old = os.umask(0)
    try:
        ClientState(1, 0).save("model", {"w": np.ones(1)})
        ClientState(1, 0, tmp_path / "new" / "site").save("model", {"w": np.ones(1)})
        (tmp_path / "open").mkdir(mode=0o755)
        ClientState(1, 0, tmp_path / "open").save("model", {"w": np.ones(1)})
        begin_simulation(2)
    finally:
        os.umask(old)
    run = Path("run-1", "client-0")
    private = [
        root,
        root / "run-1",
        root / run,
        root / "run-2",
        tmp_path / "new" / "site",
        tmp_path / "new" / "site" / run,
        tmp_path / "open" / "run-1",
        tmp_path / "open" / run,
    ]
    assert {str(folder): oct(folder.stat().st_mode & 0o777) for folder in private} == {
        str(folder): "0o700" for folder in private
    }
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755  # an existing folder keeps its mode


def test_the_default_folder_follows_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", unusable)
        assert default_root() == tmp_path / ".local" / "state" / "kindred"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_root() == tmp_path / ".local" / "state" / "kindred"
    assert ClientState(1, 0).folder.is_relative_to(default_root())
    assert ClientState(1, 0, "~/kept").folder.is_relative_to(tmp_path / "kept")


def make_workspace() -> None:
    with Workspace(default_root() / "simulations"):
        pass


def make_server_folder() -> None:
    with own_folder(default_root() / "server"):
        pass


@pytest.mark.parametrize("make", [make_workspace, make_server_folder, lambda: keep_log("a line")])
def test_a_site_accepts_the_default_folder_whoever_made_it(make, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    make()
    with own_folder(default_root(), alone=False):  # as `kindred site` does; it ends if others can enter the folder
        assert stat.S_IMODE(default_root().stat().st_mode) == 0o700


# --- Simulated runs -------------------------------------------------------------------------------------


class Simulation:
    """A process that begins simulations on request; client 0 stores a model in each."""

    CODE = (
        "import sys, numpy as np; from kindred.client.state import ClientState\n"
        "from kindred.engine.simulated_state import begin_simulation\n"
        "for line in sys.stdin:\n"
        "    begin_simulation(int(line)); ClientState(int(line), 0).save('model', {'w': np.ones(2)})\n"
        "    print('begun', flush=True)"
    )

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.too_long = threading.Timer(60, self.process.kill)
        self.too_long.start()
        return self

    def __exit__(self, *_) -> None:
        self.too_long.cancel()
        self.process.kill()
        self.process.communicate()

    def tell(self, run_id: int) -> None:
        self.process.stdin.write(f"{run_id}\n")
        self.process.stdin.flush()

    def wait(self) -> None:
        assert self.process.stdout.readline() == "begun\n"

    def begin(self, run_id: int) -> None:
        self.tell(run_id)
        self.wait()


def test_a_simulation_removes_only_those_of_ended_processes(root) -> None:
    ClientState(5, "site").save("model", {"w": np.ones(1)})  # a site's folder: it has no marker
    (root / "notes").mkdir()
    for name in ("run-notes.txt", "notes/run-1.txt", ".simulated"):
        (root / name).write_text("mine")
    with Simulation() as ends, Simulation() as dies, Simulation() as lives:
        for number, simulation in enumerate((ends, dies, lives), start=1):
            simulation.begin(number)
        assert [len(saved_models(number)) for number in (1, 2, 3)] == [1, 1, 1]
        ends.process.communicate()
        assert ends.process.returncode == 0
        dies.process.kill()
        dies.process.wait()
        assert [len(saved_models(number)) for number in (1, 2, 3)] == [1, 1, 1]  # until the next one begins
        before = files_in(root)
        begin_simulation(4)
        assert before - files_in(root) == {
            f"run-{n}/{f}" for n in (1, 2) for f in (".simulated", "client-0/model.safetensors")
        }
        assert files_in(root) - before == {"run-4/.simulated"}
        assert not (root / "run-1").exists() and not (root / "run-2").exists()
        lives.begin(6)  # its last simulation is over
        assert not (root / "run-3").exists() and (root / "run-4").exists()


def test_a_simulation_does_not_follow_links_when_it_removes_files(root, tmp_path) -> None:
    (elsewhere := tmp_path / "elsewhere" / "client-0").mkdir(parents=True)
    (elsewhere / "thesis.txt").write_text("a user's")
    (elsewhere.parent / ".simulated").write_text("")
    (root / "run-5").mkdir(parents=True)
    (root / "run-5" / ".simulated").symlink_to(elsewhere.parent / ".simulated")
    (root / "run-6").symlink_to(elsewhere.parent)
    begin_simulation(7)
    assert (elsewhere / "thesis.txt").exists() and (root / "run-5").exists()


def test_two_simulations_that_begin_at_once_both_live(root, monkeypatch) -> None:
    flock = fcntl.flock

    def slow(file, operation):
        if file.name.endswith("run-1/.simulated"):  # its own marker, not locked yet
            other.tell(2)
            time.sleep(0.5)
        flock(file, operation)

    with Simulation() as other:
        other.begin(3)  # all modules are imported
        monkeypatch.setattr(fcntl, "flock", slow)
        begin_simulation(1)
        other.wait()
        assert {path.name for path in root.glob("run-*")} == {"run-1", "run-2"}
        assert files_in(root / "run-1") == {".simulated"} and len(saved_models(2)) == 1


def test_a_restarted_simulation_begins_without_states(root) -> None:
    with Simulation() as simulation:
        simulation.begin(1)
        ClientState(1, "of the first time").save("model", {"w": np.ones(1)})
        simulation.begin(1)
        assert list(saved_models(1)) == [0]


def test_a_simulation_resumes_with_its_clients_states_or_not_at_all(root, tmp_path, monkeypatch) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "round-0001-abc.npz").touch()
    with pytest.raises(NotResumable, match=f"the saved state of its clients is not in {root}/run-1"):
        begin_simulation(1, checkpoints, goes_on=True)
    assert not root.exists()
    begin_simulation(1, checkpoints)
    mark = root / "run-1" / ".simulated"
    inode, changed = mark.stat().st_ino, mark.stat().st_mtime_ns
    begin_simulation(1, checkpoints, goes_on=True)  # its checkpoints are visible at every moment
    assert (mark.read_text(), mark.stat().st_ino, mark.stat().st_mtime_ns) == (str(checkpoints), inode, changed)
    moved = checkpoints.rename(tmp_path / "moved")
    begin_simulation(1, moved, goes_on=True)
    assert mark.read_text() == str(moved)
    begin_simulation(2)
    with open(mark) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(NotResumable, match="another process is running it"):
            begin_simulation(1, moved, goes_on=True)


def test_the_state_of_a_run_whose_results_were_moved_stays_for_a_week(root, tmp_path) -> None:
    results = tmp_path / "results"
    for run, folder in ((1, results), (2, tmp_path / "begun")):
        (folder / "checkpoints").mkdir(parents=True)
        begin_simulation(run, folder / "checkpoints")
        ClientState(run, 0).save("model", {"w": np.ones(1)})
        if run == 1:
            (folder / "checkpoints" / "round-0001-abc.npz").touch()
    results.rename(tmp_path / "moved")
    begin_simulation(3)  # run 2 has its folder, and no checkpoint: it cannot be resumed
    assert {path.name for path in root.glob("run-*")} == {"run-1", "run-3"}
    week_ago = time.time() - 8 * 24 * 3600
    for path in (root / "run-1" / ".simulated", *root.glob("run-1/client-*")):
        os.utime(path, (week_ago, week_ago))
    begin_simulation(4)
    assert {path.name for path in root.glob("run-*")} == {"run-4"}


def test_saved_models_are_those_of_one_run_by_client_id() -> None:
    rng = np.random.default_rng(0)
    clients = [7, -1, 2**64 - 1, "7", "a/b", "A/B", "a b", "", "..", "Köln", "日本", "x" * 300, 'quote"\\']
    kept = {
        client: {"w": rng.normal(size=(2, 3)).astype(np.float32), "n": np.array(i)} for i, client in enumerate(clients)
    }
    for client, model in kept.items():
        ClientState(1, client).save("model", model)
        ClientState(1, client).save("other", {"w": np.ones(1)})
    ClientState(1, "without a model").save("other", {"w": np.ones(1)})
    ClientState(2, "of another run").save("model", {"w": np.ones(1)})
    models = saved_models(1)
    assert list(models) == in_order(clients) and len(models) == len(clients)
    assert {type(client) for client in models} == {int, str}
    for client, model in kept.items():
        assert isinstance(models[client], ArrayRecord) and same(read_record(models[client]), model)
    assert "of another run" not in models and dict(saved_models(3)) == {}


# --- Clients that store their model ---------------------------------------------------------------------

CLIENTS = 4
LOCAL = {"batch-size": 6, "learning-rate": 0.1, "device": "cpu"}


def app():
    """Sites of 4 features and 2 classes, and 12 public samples. Odd clients swap the labels.

    Dropout and new weights use PyTorch's global random generator.
    """

    def network() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(8, 2),
        )

    def load_site(context) -> Site:
        client = context.node_config["partition-id"]
        rng = torch.Generator().manual_seed(client)
        x = torch.randn(30 + 5 * client, 4, generator=rng)
        y = ((x[:, 0] > 0).long() + client) % 2
        public = torch.randn(12, 4, generator=torch.Generator().manual_seed(99))
        return Site(network, train=(x[:20], y[:20]), test=(x[20:], y[20:]), public=public)

    return make_client_app(load_site)


def restart(grid: InlineGrid) -> None:
    """Delete everything that clients hold in memory, as a restart of their machines does."""
    forget_sites()
    grid._client_app = app()
    for context in grid._contexts.values():
        context.state = RecordDict()


def run(grid: InlineGrid | None = None, *, seed: int = 0, fraction_train: float = 0.5, on_round=None):
    """Do a short run; return all its results, the models on disk included, and the strategy."""
    grid = grid or InlineGrid(app(), CLIENTS)
    strategy = PerFedCKT(num_clusters=2, local_steps=4, public_batch_size=5, fraction_train=fraction_train, seed=seed)
    config = ConfigRecord(LOCAL | {"seed": seed})
    strategy.start(grid, ArrayRecord(), 6, 60, config, config, on_round=on_round)
    return (everything(strategy), kept_by(grid)), strategy


def kept_by(grid: InlineGrid) -> dict:
    return {client: values(model) for client, model in saved_models(grid.run.run_id).items()}


def test_a_client_starts_from_the_model_that_it_last_saved(monkeypatch) -> None:
    grid = InlineGrid(app(), CLIENTS)
    starts, after = [], []  # (round, client, arrays); files on disk by round
    own_model = Visit.own_model

    def watched(visit: Visit):
        model = own_model(visit)
        arrays = {name: array.tobytes() for name, array in get_arrays(model).items()}
        starts.append((visit.config["server-round"], visit.client, arrays))
        return model

    def on_disk() -> dict:
        return {
            client: {name: array.tobytes() for name, array in read_record(model).items()}
            for client, model in saved_models(grid.run.run_id).items()
        }

    monkeypatch.setattr(Visit, "own_model", watched)
    _, strategy = run(grid, on_round=lambda r: after.append(on_disk()))
    assert all(row["status"] == "ok" for row in strategy.history.rows)
    again = 0
    for r, client, start in starts:
        before = after[r - 1] if r else {}
        if client in before:
            assert start == before[client]
            assert (after[r][client] == start) == (r == 7)  # the closing evaluation
            again += r < 7
    # Two clients in each round; in round 0, and at the end, the two others evaluate their models.
    assert again > CLIENTS and len(starts) == 2 * len(after) + 2 == 18
    for r in range(1, len(after)):
        asked = {client for number, client, _ in starts if number == r}
        assert all(after[r][client] == after[r - 1][client] for client in after[r - 1].keys() - asked)


def test_restarts_change_no_bit() -> None:
    without, strategy = run()
    restarted = []
    grid = InlineGrid(app(), CLIENTS)
    with_restarts, _ = run(grid, on_round=lambda r: restarted.append(restart(grid)))
    assert with_restarts == without and len(restarted) == 8
    assert len({row["train-loss"] for row in strategy.history.rows if 0 < row["round"] < 7}) == 12


def test_a_run_without_stored_states_has_other_results() -> None:
    def forget(server_round: int) -> None:
        for context in grid._contexts.values():
            state = ClientState(grid.run.run_id, context.node_config["partition-id"])
            (state.folder / "model.safetensors").unlink(missing_ok=True)

    reference, _ = run()
    grid = InlineGrid(app(), CLIENTS)
    assert run(grid, on_round=forget)[0][0] != reference[0]


def test_a_run_is_independent_of_the_last_run() -> None:
    first, _ = run()
    assert run()[0] == first
    assert run(seed=1)[0] != first
    grid = InlineGrid(app(), CLIENTS)
    assert run(grid)[0] == run(grid)[0] == first  # also for a simulation that begins again


def test_a_damaged_model_is_an_error_of_its_client_and_the_round_continues(caplog) -> None:
    grid = InlineGrid(app(), CLIENTS)
    path = ClientState(grid.run.run_id, 2).folder / "model.safetensors"

    def damage(server_round: int) -> None:
        if server_round == 1:
            path.write_bytes(path.read_bytes()[:-1])

    _, strategy = run(grid, fraction_train=1.0, on_round=damage)
    for row in strategy.history.rows:
        if row["client"] == 2 and row["round"] > 1:
            assert row["status"].startswith(f"error 2: ValueError: {path} is damaged (")
        else:
            assert row["status"] == "ok"
    assert [line["answered"] for line in strategy.history.rounds] == [4, 4, 3, 3, 3, 3, 3]
    caplog.clear()
    assert list(saved_models(grid.run.run_id)) == [0, 1, 3]  # the others' models are still listed
    assert [message.startswith(f"kindred: {path} is damaged (") for message in caplog.messages] == [True]


def test_the_node_config_sets_a_client_s_folder(tmp_path, root) -> None:
    grids = [InlineGrid(app(), CLIENTS) for _ in range(2)]
    for grid in grids:
        for client, context in enumerate(grid._contexts.values()):
            # Clients 0 and 1 share a folder, as on one machine.
            context.node_config["state-dir"] = str(tmp_path / "site" / str(max(client, 1)))
    first, _ = run(grids[0], fraction_train=1.0)
    kept = {path.relative_to(tmp_path): path.read_bytes() for path in (tmp_path / "site").rglob("[!.]*.safetensors")}
    run(grids[1], seed=1, fraction_train=1.0)
    both = {path.relative_to(tmp_path): path.read_bytes() for path in (tmp_path / "site").rglob("[!.]*.safetensors")}

    def paths(grid: InlineGrid) -> set[Path]:
        return {
            Path("site", str(max(client, 1)), f"run-{grid.run.run_id}", f"client-{client}", f"{name}.safetensors")
            for client in range(CLIENTS)
            for name in ("model", "predictions")
        }

    assert kept.keys() == paths(grids[0]) and both.keys() == paths(grids[0]) | paths(grids[1])
    models = {content for path, content in both.items() if path.stem == "model"}
    assert both | kept == both and len(models) == 2 * CLIENTS  # no client replaced another's file
    assert not list(root.rglob("*.safetensors")) and first[1] == {}


def test_a_full_disk_is_named_with_its_folder_and_what_to_do(root, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    replace_write(monkeypatch, full)
    with pytest.raises(OSError, match=r"written to .*/run-1 \(No space left on device\); make room there$") as refused:
        ClientState(1, 0).save("model", {"w": np.zeros(2)})
    assert str(root) in str(refused.value)


def test_a_full_disk_ends_a_simulation_and_no_client_is_left_out(monkeypatch) -> None:
    """Its clients share the disk. Without their states the run would be another one."""
    written = []

    def full(write: Callable[[bytes], int], content: bytes) -> int:
        written.append(content)
        if len(written) > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(content)

    replace_write(monkeypatch, full)
    with pytest.raises(StateNotWritten, match=r"^clients' state cannot be written to .* \(No space left on device\)"):
        run()
    assert len(written) > 6
