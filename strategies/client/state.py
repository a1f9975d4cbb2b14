"""The state that a client keeps between messages: files in the client's own folder, written atomically.

    ROOT/run-RUN/client-ID/NAME.safetensors
    ROOT/run-RUN/client-ID/.NAME.round-0007.safetensors

ROOT is the node config's `state-dir`, else `$XDG_STATE_HOME/kindred`, else `~/.local/state/kindred`; only its
user can read it. Flower's Context could hold a small state, but a SuperNode loses it when it restarts, and in a
simulation it travels with every message.

The files hold the state after the last round. A server that was killed may resume from an earlier round. While that is
possible, the states after earlier rounds are kept too, under names with a dot, for all names that rounds load. A
repeated round starts from the state before it.

At a site the folders stay, because the personal model in them is the result for the site. In a simulation the
clients share a disk with the server. The server marks the run's folder as simulated (`begin_simulation`) and removes
the folders of simulations that have ended, unless `end_simulation` already did. It also waits for the disk in place of
the clients: files reach it before the checkpoint of their round does (`SimulatedFiles`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from logging import WARNING
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import numpy as np
import psutil
from flwr.serverapp import Grid
from flwr.supercore import log
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kindred.engine.inline import InlineGrid
from kindred.lazy import lazy
from kindred.messages import ClientId

from .locks import is_ours, lock

if TYPE_CHECKING:
    from flwr.superlink import grid as superlink_grid
else:
    superlink_grid = lazy("flwr.superlink.grid")  # its import takes a second; in-process runs skip it

# Names under which a client saves
MODEL = "model"  # its personal model
BEST = "best"  # its best personal model so far, or mixture, by its validation data
MIXTURE = "mixture"  # the models that it combines for its predictions
PREDICTIONS = "predictions"  # what its selected model predicts for its test data, or its last one
_SIMULATED = ".simulated"


class NotResumable(RuntimeError):
    """A run cannot be resumed from its saved state. No message has been sent, and the saved state is unchanged."""


def default_root() -> Path:
    """Return the folder in which clients save their state unless their node config names another."""
    home = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(home):  # the XDG specification ignores relative paths
        home = os.path.expanduser("~/.local/state")
    return Path(home, "kindred")


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, and its missing parents alike; existing ones stay unchanged."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


class ClientState:
    """The saved state of one client in one run. The folder is created at the first save.

    Parameters
    ----------
    run_id : int
    client : int or str
    root : path, optional
        By default `default_root()`.
    server_round : int (default: 0)
        The current round, recorded with every save.
    before : int, optional
        Load only states that were saved in a round before this one; by default the last state.
    keep_from : int, optional
        The round after which the server may have to resume; by default it never has to.
    attempt : int (default: 0)
        Increases each time that the server resumes the run. A save of an earlier round than the saved one, or of an
        earlier attempt, comes from a late message.

    Attributes
    ----------
    folder : Path
    """

    def __init__(
        self,
        run_id: int,
        client: ClientId,
        root: str | os.PathLike[str] | None = None,
        *,
        server_round: int = 0,
        before: int | None = None,
        keep_from: int | None = None,
        attempt: int = 0,
    ) -> None:
        self.client = client
        self._round = server_round
        self._before = before
        self._keep_from = server_round if keep_from is None else keep_from
        self._attempt = attempt
        self._loaded: set[str] = set()  # names that rounds start from; for all others the last state is enough
        self._known: dict[str, list[_Version]] = {}  # name -> its versions after earlier rounds, newest first
        self._run = _run_folder(run_id, Path(root).expanduser() if root else default_root())
        self.folder = self._run / file_name(client)

    def load(self, name: str, prefix: str = "") -> dict[str, np.ndarray] | None:
        """Return the arrays last saved under a name, before the round `before`; None if there are none.

        Parameters
        ----------
        name : str
        prefix : str
            Read only the arrays whose names begin with it.

        Raises
        ------
        ValueError
            The file is damaged.
        """
        self._loaded.add(name)
        with _reading(self._path(name)):
            last = _version(self._path(name))
        for version in self._needed(name, last, self._earlier(name)):
            if self._counts(version):
                with _reading(version.path), safe_open(version.path, "numpy") as file:
                    return {key: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}
        return None

    def save(
        self,
        name: str,
        arrays: Mapping[str, np.ndarray],
        about: Mapping[str, str] | None = None,
        *,
        rounds_load_it: bool = False,
    ) -> None:
        """Save arrays under a name, with texts about them, in place of the last ones.

        Parameters
        ----------
        name : str
        arrays : dict of str to ndarray
        about : dict of str to str, optional
        rounds_load_it : bool
            Whether other rounds load this name; if this one has, it need not be said.

        Raises
        ------
        ValueError
            A later round or attempt has already saved: the message of this round came late.
        """
        make_private(self.folder)
        path, last = self._path(name), self._last(name)
        if last and (last.attempt, last.round) > (self._attempt, self._round):
            resumed = " of the resumed run" if last.attempt > self._attempt else ""
            raise ValueError(f"round {self._round} is over: {path} is of round {last.round}{resumed}")
        # Versions of this round or of later ones are of an interrupted attempt.
        earlier = [version for version in self._earlier(name) if version.round < self._round]
        interrupted = [version for version in self._earlier(name) if version.round >= self._round]
        if last and last.round < self._round and (rounds_load_it or name in self._loaded):
            kept = self.folder / f".{name}.round-{last.round:04d}.safetensors"
            _link(path, kept)
            earlier = [last._replace(path=kept), *(version for version in earlier if version.path != kept)]
        for partial, process in partial_files(self.folder):
            if not psutil.pid_exists(process):  # the process was killed during a save
                partial.unlink(missing_ok=True)
        texts = {"client": json.dumps(self.client), "round": str(self._round), "attempt": str(self._attempt)}
        try:
            with replacing(path, flush=not (self._run / _SIMULATED).exists()) as temporary:
                write_arrays(temporary, arrays, {**texts, **(about or {})})
        except OSError as error:
            place, reason = self.folder.parent, error.strerror or error
            raise OSError(f"clients' state cannot be written to {place} ({reason}); make room there") from None
        for version in interrupted:
            version.path.unlink(missing_ok=True)
        self._needed(name, _Version(path, self._round, self._attempt), earlier)

    def about(self, name: str) -> dict[str, str]:
        """Return the texts last saved with a name's arrays, before the round `before`; empty without such a file."""
        for version in filter(None, (self._last(name), *self._earlier(name))):
            if self._counts(version):
                with suppress(ValueError), _reading(version.path):
                    return _texts(version.path) or {}
        return {}

    def _counts(self, version: _Version) -> bool:
        """Return whether a version may be loaded: not of a later round, or of an interrupted attempt at this."""
        if self._before is None:
            return True
        return version.round < self._before and (version.round < self._round or version.attempt == self._attempt)

    def _needed(self, name: str, last: _Version | None, earlier: Sequence[_Version]) -> list[_Version]:
        """Return the versions of a name from which a round can start, and remove the others."""
        versions = [version for version in (last, *earlier) if version]
        oldest = next((version.round for version in versions if version.round <= self._keep_from), 0)
        self._known[name] = [version for version in earlier if version.round >= oldest]
        for version in {*earlier} - {*self._known[name]}:
            version.path.unlink(missing_ok=True)
        return [version for version in versions if version is last or version in self._known[name]]

    def _last(self, name: str) -> _Version | None:
        """Return the last version of a name, unless it is damaged."""
        with suppress(ValueError), _reading(self._path(name)):
            return _version(self._path(name))
        return None

    def _earlier(self, name: str) -> list[_Version]:
        """Return the undamaged versions after earlier rounds, newest first; they are looked for once a message."""
        if name not in self._known:
            found, prefix = [], f".{name}.round-"
            for file in os.listdir(self.folder) if self.folder.is_dir() else ():
                if file.startswith(prefix) and file.endswith(".safetensors"):
                    with suppress(ValueError), _reading(self.folder / file):
                        found.append(_version(self.folder / file))
            self._known[name] = sorted(filter(None, found), key=lambda version: -version.round)
        return self._known[name]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes; first wait until a process that uses it has finished."""
        make_private(self.folder)
        with open(self.folder / ".lock", "w") as file:
            lock(file, wait=True)
            yield

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


class _Version(NamedTuple):
    path: Path
    round: int
    attempt: int


def _texts(path: Path) -> dict[str, str] | None:
    """Return the texts in a file; None if there is no file."""
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata() or {}
    except FileNotFoundError:
        return None


def _version(path: Path) -> _Version | None:
    """Return the version in a file; None if there is no file."""
    about = _texts(path)
    return None if about is None else _Version(path, int(about.get("round", 0)), int(about.get("attempt", 0)))


def _link(path: Path, other: Path) -> None:
    """Give a file a second name; make a copy if the file system does not support links."""
    other.unlink(missing_ok=True)
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def saved_files(run_id: int, name: str) -> dict[ClientId, Path]:
    """Return the files that a run's clients saved under a name on this machine; skip damaged ones with a warning.

    Returns
    -------
    dict
        client -> path
    """
    files: dict[ClientId, Path] = {}
    for path in _run_folder(run_id, default_root()).glob(f"client-*/{name}.safetensors"):
        try:
            with _reading(path), safe_open(path, "numpy") as file:
                files[json.loads(file.metadata()["client"])] = path
        except ValueError as error:
            log(WARNING, "kindred: %s", error)
        except (KeyError, TypeError):
            log(WARNING, "kindred: %s does not name its client and is skipped", path)
    return files


def simulated(grid: Grid) -> bool:
    """Return whether a grid's clients are on this machine, as in Flower's simulation engine and `InlineGrid`."""
    return isinstance(grid, InlineGrid) or isinstance(grid, superlink_grid.InMemoryGrid)  # noqa: SIM101


def begin_simulation(run_id: int, checkpoints: Path | None = None, *, goes_on: bool = False) -> None:
    """Mark a run as simulated, and remove the folders of simulated runs that have ended.

    An unfinished run with checkpoints, in the folder given here, can be resumed: the state of its clients stays as long
    as its checkpoints exist.

    The mark is a lock. This process holds it until the process ends, in whatever way, or begins another simulation: a
    process runs one simulation at a time.

    Raises
    ------
    NotResumable
        The run is to be resumed (`goes_on`), and the state of its clients is missing; or another process uses it.
    """
    while _marks:
        _marks.pop().close()
    root = default_root()
    folder = _run_folder(run_id, root)
    if goes_on and not folder.is_dir():
        raise NotResumable(
            f"the saved state of its clients is not in {folder} (any more), and the run cannot be resumed without it"
        )
    make_private(root)
    with open(root / ".lock", "w") as one_at_a_time:
        lock(one_at_a_time, wait=True)
        for mark in root.glob(f"run-*/{_SIMULATED}"):
            if not (_is_own(mark.parent) and _is_own(mark)):
                continue
            with suppress(OSError), open(mark, encoding="utf-8") as file:
                lock(file, wait=False)
                is_this_run = mark.parent == folder
                if not _holds_checkpoints(str(checkpoints or "") if is_this_run else file.read()):
                    _remove(mark.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        held = open(folder / _SIMULATED, "a+", encoding="utf-8")  # it stays open, and therefore locked
        try:
            lock(held, wait=False)
        except BlockingIOError:
            held.close()
            raise NotResumable("another process is running it") from None
        held.seek(0)
        if held.read() != (content := str(checkpoints or "")):  # a correct mark is never removed, not even for a moment
            held.truncate(0)
            print(content, file=held, end="", flush=True)
        _marks.append(held)


def end_simulation(run_id: int) -> None:
    """Remove the saved state of a simulated run's clients."""
    _remove(_run_folder(run_id, default_root()))


_marks: list[IO[str]] = []


class SimulatedFiles:
    """The files that a simulated run's clients save: they leave it to the server to wait for the disk."""

    def __init__(self, run_id: int) -> None:
        self._folder = _run_folder(run_id, default_root())
        self._flushed: set[tuple[int, int]] = set()  # inode and time of change of a file

    def flush(self) -> None:
        """Wait until all files are on the disk, also if clients replace them meanwhile; OSError if that fails."""
        while waiting := {file: path for file, path in self._files().items() if file not in self._flushed}:
            for path in waiting.values():
                with suppress(FileNotFoundError), open(path, "rb+") as file:
                    os.fsync(file.fileno())
                    self._flushed.add(_identity(os.fstat(file.fileno())))

    def _files(self) -> dict[tuple[int, int], Path]:
        """Return all files, and forget those that were flushed and exist no more."""
        found = {}
        for path in self._folder.glob("client-*/*.safetensors"):  # those after earlier rounds too
            with suppress(FileNotFoundError):
                found[_identity(path.stat())] = path
        self._flushed &= found.keys()
        return found


def _identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_ino, about.st_mtime_ns


def _holds_checkpoints(folder: str) -> bool:
    return bool(folder) and any(Path(folder).glob("round-*.npz"))


def _remove(folder: Path) -> None:
    """Remove a simulated run's folder, the mark last: an interrupted removal is then completed the next time."""
    for path in folder.glob("client-*"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], texts: Mapping[str, str]) -> None:
    """Write arrays and texts as a safetensors file; OSError if that fails, for example because the disk is full."""
    whole = {key: np.asarray(array, order="C") for key, array in arrays.items()}  # save_file ignores strides
    try:
        save_file(whole, path, dict(texts))
    except SafetensorError as error:
        if code := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
        raise OSError(str(error)) from None


@contextmanager
def replacing(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`, with its suffix, which replaces `path` if the block ends without error.

    After an error `path` is unchanged and the temporary file is removed. Without `flush` the file may not be on the
    disk yet.
    """
    # The name holds the process id: a client that answers late may be at work in another process at the same time.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield temporary
        if flush:
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def partial_files(folder: Path) -> list[tuple[Path, int]]:
    """Return this user's files that `replacing` left behind in a folder, each with the id of its process."""
    files = os.listdir(folder) if folder.is_dir() else []
    names = [re.fullmatch(r"\.(?:.+\.)?(\d{1,9})\.partial(?:\.\w+)?", file) for file in files]
    found = [(folder / name[0], int(name[1])) for name in names if name]
    return [(path, process) for path, process in found if path.is_file() and _is_own(path)]


def _is_own(path: Path) -> bool:
    """Return whether a path belongs to this user and is no symbolic link, which could lead elsewhere."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return is_ours(about) and not stat.S_ISLNK(about.st_mode)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn the error of a damaged file into a ValueError that names the file."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to start from a new model") from None


def _run_folder(run_id: int, root: Path) -> Path:
    return root / f"run-{run_id}"


def file_name(client: ClientId) -> str:
    """Return a name for a client's files that every file system accepts; ids that differ only in case get a hash."""
    if isinstance(client, int):
        return f"client-{client}"
    return f"client-{quote(client, safe='')[:80]}-{sha256(client.encode()).hexdigest()[:16]}"
