"""What clients keep: files that are whole or not there, folders that nobody mixes up, and models that live on."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kindred import InlineGrid, PerFedCKT, Site, make_client_app
from kindred.client import state as state_module
from kindred.client.site import forget_sites
from kindred.client.state import ClientState, NotResumable, begin_simulation, default_root, end_simulation, saved_files
from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.messages import in_order, read_record

from .client_apps import saved_models
from .test_conformance import everything, values

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    """Where clients keep their folders; not there yet."""
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
def test_what_was_saved_is_loaded_bit_by_bit(tmp_path_factory, kept) -> None:
    state = ClientState(1, 0, tmp_path_factory.getbasetemp() / "any arrays")
    state.save("model", kept)
    assert same(state.load("model"), kept)


def test_arrays_that_are_not_in_order_in_memory_are_saved_as_they_read() -> None:
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


def test_nothing_saved_is_none_and_makes_no_folder(root) -> None:
    state = ClientState(1, 0)
    assert state.load("model") is None
    assert not root.exists()
    state.save("model", {"w": np.ones(1)})
    assert state.load("other") is None


def test_what_is_saved_later_takes_the_place_of_what_was_there_under_that_name_alone() -> None:
    state = ClientState(1, 0)
    state.save("model", {"w": np.zeros(5), "b": np.ones(2)})
    state.save("other", {"w": np.full(1, 3.0)})
    loaded = state.load("model")
    state.save("model", {"w": np.ones(2, np.float32)})
    assert same(state.load("model"), {"w": np.ones(2, np.float32)})
    assert same(state.load("other"), {"w": np.full(1, 3.0)})
    assert same(loaded, {"w": np.zeros(5), "b": np.ones(2)})  # what is in use does not change


@pytest.mark.parametrize("failure", [OSError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_save_that_fails_leaves_the_last_file_and_no_other(monkeypatch, moment, failure) -> None:
    def fail(*args):
        raise failure

    def write_half(tensors, path, metadata):
        Path(path).write_bytes(safetensors.numpy.save(tensors, metadata)[:-4])
        fail()

    state = ClientState(1, 0)
    state.save("model", {"w": np.zeros(3)})
    before = files_in(state.folder)
    monkeypatch.setattr(*(state_module, "save_file", write_half) if moment == "write" else (os, moment, fail))
    with pytest.raises(type(failure)):
        state.save("model", {"w": np.ones(3)})
    assert same(state.load("model"), {"w": np.zeros(3)})
    assert files_in(state.folder) == before == {"model.safetensors"}


class Touch:
    """A pickle of it makes a file when it is loaded."""

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


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(tmp_path) -> None:
    state = ClientState(1, 7, tmp_path)
    state.save("model", {"a": np.zeros(3)})
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, os.getppid()):
        (state.folder / f".model.{pid}.partial.safetensors").write_bytes(b"half")
    state.save("model", {"a": np.ones(3)})
    assert files_in(state.folder) == {"model.safetensors", f".model.{os.getppid()}.partial.safetensors"}


def test_only_what_was_left_half_written_here_is_removed(tmp_path) -> None:
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
def test_a_file_that_does_not_say_whose_it_is_counts_for_nobody(root, caplog, about) -> None:
    ClientState(1, 7).save("model", {"a": np.zeros(3)})
    (other := root / "run-1" / "client-8" / "model.safetensors").parent.mkdir()
    safetensors.numpy.save_file({"a": np.zeros(3)}, other, about)
    assert list(saved_files(1, "model")) == [7]
    assert caplog.messages == [f"kindred: {other} does not name its client and is skipped"]


def test_a_simulation_that_is_over_can_be_removed_at_once(root) -> None:
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
    """What a client starts from in a round, in which it saves the number of the round."""
    state = state_in(server_round, keep_from, attempt)
    before = number(state.load("model"))
    state.save("model", {"w": np.array([server_round])})
    return before


def test_a_round_that_is_repeated_starts_from_the_state_before_it() -> None:
    assert [train(r, keep_from=r - 1) for r in (1, 2, 3)] == [None, 1, 2]
    assert train(3, keep_from=2, attempt=2) == 2  # the server was killed in round 3
    assert train(4, keep_from=3, attempt=2) == 3
    assert files_in(state_in(5, 4).folder) == {"model.safetensors", ".model.round-0003.safetensors"}


def test_as_many_states_are_kept_as_the_server_may_go_back() -> None:
    for r in range(1, 7):
        train(r, keep_from=max(r - 3, -1))
    earlier = {f".model.round-000{r}.safetensors" for r in (3, 4, 5)}
    assert files_in(state_in(7, 0).folder) == {"model.safetensors", *earlier}
    assert train(4, keep_from=3, attempt=2) == 3  # two checkpoints were damaged
    assert files_in(state_in(5, 0).folder) == {"model.safetensors", ".model.round-0003.safetensors"}
    assert train(7, keep_from=3, attempt=2) == 4  # the client was not asked in rounds 5 and 6
    assert number(state_in(6, 3).load("model")) == 4


def test_what_comes_late_changes_nothing() -> None:
    train(1, keep_from=0)
    train(2, keep_from=1)
    late = state_in(1, 0)
    with pytest.raises(ValueError, match=r"round 1 is over: .*model.safetensors is of round 2"):
        late.save("model", {"w": np.array([9])})
    assert number(state_in(3, 2).load("model")) == 2


def test_what_was_asked_before_the_server_went_back_comes_late_too() -> None:
    for r in (1, 2, 3):
        train(r, keep_from=1)
    assert train(2, keep_from=1, attempt=2) == 1
    for r in (2, 3):
        late = state_in(r, 1, attempt=1)
        with pytest.raises(ValueError, match=f"round {r} is over: .* is of round 2 of the resumed run"):
            late.save("model", {"w": np.array([9])})
    assert train(3, keep_from=1, attempt=2) == 2


def test_an_evaluation_sees_what_its_own_round_has_left() -> None:
    train(1, keep_from=0)
    train(2, keep_from=1)
    assert number(ClientState(1, 0, server_round=2, before=3).load("model")) == 2
    assert number(ClientState(1, 0).load("model")) == 2  # who asks for no round gets the last


def test_where_files_cannot_have_two_names_a_copy_is_kept(monkeypatch) -> None:
    def refuse(*paths):
        raise OSError("not on this file system")

    monkeypatch.setattr(os, "link", refuse)
    assert [train(r, keep_from=r - 1) for r in (1, 2)] == [None, 1]
    assert number(state_in(2, 1).load("model")) == 1


def test_objects_are_not_saved() -> None:
    state = ClientState(1, 0)
    with pytest.raises(Exception, match="object"):
        state.save("model", {"w": np.array([{}])})
    assert files_in(state.folder) == set()


def test_a_client_that_saves_in_two_processes_at_once_has_a_whole_file(monkeypatch) -> None:
    state = ClientState(1, 0)

    def overtaken(tensors, path, metadata):
        whole = safetensors.numpy.save(tensors, metadata)
        with open(path, "wb") as file:
            file.write(whole[:20])
            file.flush()
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "import numpy as np; from kindred.client.state import ClientState\n"
                    "ClientState(1, 0).save('model', {'w': np.zeros(3)})",
                ],
                cwd=ROOT,
                check=True,
                timeout=60,
            )
            assert same(state.load("model"), {"w": np.zeros(3)})
            file.write(whole[20:])

    monkeypatch.setattr(state_module, "save_file", overtaken)
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
def test_each_client_has_a_folder_of_its_own_inside_its_run(clients, upper) -> None:
    if upper:  # names that differ in case alone
        clients = list({*clients, *(client.upper() for client in clients if isinstance(client, str))})
    folders = [ClientState(12, client, "/state").folder for client in clients]
    assert {folder.parent for folder in folders} == {Path("/state/run-12")}
    names = {folder.name.lower() for folder in folders}  # as a file system that knows no case sees them
    assert len(names) == len(clients)
    for name in names:
        assert name.isascii() and name.startswith("client-") and len(name) < 200 and not set(name) & set("/\\:\0")


def test_runs_do_not_mix() -> None:
    one, other = ClientState(1, 0), ClientState(2, 0)
    one.save("model", {"w": np.zeros(1)})
    assert other.load("model") is None
    other.save("model", {"w": np.ones(1)})
    assert same(one.load("model"), {"w": np.zeros(1)})


def test_only_the_user_can_read_what_is_kept(tmp_path, root) -> None:
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
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755  # not ours to close


def test_where_folders_are_when_nobody_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_STATE_HOME", unusable)
        assert default_root() == tmp_path / ".local" / "state" / "kindred"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_root() == tmp_path / ".local" / "state" / "kindred"
    assert ClientState(1, 0).folder.is_relative_to(default_root())
    assert ClientState(1, 0, "~/kept").folder.is_relative_to(tmp_path / "kept")


# --- Simulated runs -------------------------------------------------------------------------------------


class Simulation:
    """A process that begins the simulations it is told of, and whose client 0 keeps a model in each."""

    CODE = (
        "import sys, numpy as np; from kindred.client.state import ClientState, begin_simulation\n"
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


def test_a_simulation_removes_those_whose_process_is_gone_and_no_other(root) -> None:
    ClientState(5, "site").save("model", {"w": np.ones(1)})  # a site's: it bears no mark
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
        assert [len(saved_models(number)) for number in (1, 2, 3)] == [1, 1, 1]  # until the next begins
        before = files_in(root)
        begin_simulation(4)
        assert before - files_in(root) == {
            f"run-{n}/{f}" for n in (1, 2) for f in (".simulated", "client-0/model.safetensors")
        }
        assert files_in(root) - before == {"run-4/.simulated"}
        assert not (root / "run-1").exists() and not (root / "run-2").exists()
        lives.begin(6)  # its last one is over
        assert not (root / "run-3").exists() and (root / "run-4").exists()


def test_no_simulation_removes_what_a_link_leads_to(root, tmp_path) -> None:
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
        if file.name.endswith("run-1/.simulated"):  # its own, not locked yet
            other.tell(2)
            time.sleep(0.5)
        flock(file, operation)

    with Simulation() as other:
        other.begin(3)  # all is imported
        monkeypatch.setattr(fcntl, "flock", slow)
        begin_simulation(1)
        other.wait()
        assert {path.name for path in root.glob("run-*")} == {"run-1", "run-2"}
        assert files_in(root / "run-1") == {".simulated"} and len(saved_models(2)) == 1


def test_a_simulation_that_begins_again_begins_with_nothing(root) -> None:
    with Simulation() as simulation:
        simulation.begin(1)
        ClientState(1, "of the first time").save("model", {"w": np.ones(1)})
        simulation.begin(1)
        assert list(saved_models(1)) == [0]


def test_a_simulation_goes_on_with_what_its_clients_kept_or_not_at_all(root, tmp_path, monkeypatch) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "round-0001-abc.npz").touch()
    with pytest.raises(NotResumable, match=f"the saved state of its clients is not in {root}/run-1"):
        begin_simulation(1, checkpoints, goes_on=True)
    assert not root.exists()
    begin_simulation(1, checkpoints)
    mark = root / "run-1" / ".simulated"
    inode, changed = mark.stat().st_ino, mark.stat().st_mtime_ns
    begin_simulation(1, checkpoints, goes_on=True)  # at no moment does it seem to be without checkpoints
    assert (mark.read_text(), mark.stat().st_ino, mark.stat().st_mtime_ns) == (str(checkpoints), inode, changed)
    moved = checkpoints.rename(tmp_path / "moved")
    begin_simulation(1, moved, goes_on=True)
    assert mark.read_text() == str(moved)
    begin_simulation(2)
    with open(mark) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(NotResumable, match="another process is running it"):
            begin_simulation(1, moved, goes_on=True)


def test_saved_models_are_those_of_one_run_by_the_ids_that_clients_have() -> None:
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


# --- Clients that keep their model ----------------------------------------------------------------------

CLIENTS = 4
LOCAL = {"batch-size": 6, "learning-rate": 0.1, "device": "cpu"}


def app():
    """Sites of 4 features and 2 classes, which even and odd clients name the other way round, and 12 public samples.

    Dropout and new weights come from PyTorch's own random numbers.
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
    """Have the clients lose all that is in memory, as when their machines start again."""
    forget_sites()
    grid._client_app = app()
    for context in grid._contexts.values():
        context.state = RecordDict()


def run(grid: InlineGrid | None = None, *, seed: int = 0, fraction_train: float = 0.5, on_round=None):
    """A short run; all that it comes to, the models on disk included, and the strategy."""
    grid = grid or InlineGrid(app(), CLIENTS)
    strategy = PerFedCKT(num_clusters=2, local_steps=4, public_batch_size=5, fraction_train=fraction_train, seed=seed)
    config = ConfigRecord(LOCAL | {"seed": seed})
    strategy.start(grid, ArrayRecord(), 6, 60, config, config, on_round=on_round)
    return (everything(strategy), kept_by(grid)), strategy


def kept_by(grid: InlineGrid) -> dict:
    return {client: values(model) for client, model in saved_models(grid.run.run_id).items()}


def test_a_client_starts_from_the_model_that_it_saved_when_it_last_took_part(monkeypatch) -> None:
    grid = InlineGrid(app(), CLIENTS)
    starts, after = [], []  # (round, client, arrays); by round what is on disk
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
            assert start == before[client] != after[r][client]
            again += 1
    assert again > CLIENTS and len(starts) == 2 * len(after) == 14
    for r in range(1, len(after)):
        asked = {client for number, client, _ in starts if number == r}
        assert all(after[r][client] == after[r - 1][client] for client in after[r - 1].keys() - asked)


def test_restarts_change_no_bit() -> None:
    without, strategy = run()
    restarted = []
    grid = InlineGrid(app(), CLIENTS)
    with_restarts, _ = run(grid, on_round=lambda r: restarted.append(restart(grid)))
    assert with_restarts == without and len(restarted) == 7
    assert len({row["train-loss"] for row in strategy.history.rows if row["round"] > 0}) == 12


def test_without_what_clients_keep_the_run_is_another() -> None:
    def forget(server_round: int) -> None:
        for context in grid._contexts.values():
            state = ClientState(grid.run.run_id, context.node_config["partition-id"])
            (state.folder / "model.safetensors").unlink(missing_ok=True)

    reference, _ = run()
    grid = InlineGrid(app(), CLIENTS)
    assert run(grid, on_round=forget)[0][0] != reference[0]


def test_a_run_knows_nothing_of_the_one_before() -> None:
    first, _ = run()
    assert run()[0] == first
    assert run(seed=1)[0] != first
    grid = InlineGrid(app(), CLIENTS)
    assert run(grid)[0] == run(grid)[0] == first  # a simulation that begins again, too


def test_a_damaged_model_is_an_error_of_its_client_and_the_round_goes_on_without_it(caplog) -> None:
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
    assert list(saved_models(grid.run.run_id)) == [0, 1, 3]  # the others' are not lost with it
    assert [message.startswith(f"kindred: {path} is damaged (") for message in caplog.messages] == [True]


def test_the_node_config_says_where_a_client_keeps_its_folder(tmp_path, root) -> None:
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
            for name in ("model", "best")
        }

    assert kept.keys() == paths(grids[0]) and both.keys() == paths(grids[0]) | paths(grids[1])
    models = {content for path, content in both.items() if path.stem == "model"}
    assert both | kept == both and len(models) == 2 * CLIENTS  # none took another's place
    assert not list(root.rglob("*.safetensors")) and first[1] == {}
