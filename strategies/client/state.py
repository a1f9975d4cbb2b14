"""What a client keeps between messages: files in a folder of its own, written whole or not at all.

    ROOT/run-RUN/client-ID/NAME.safetensors
    ROOT/run-RUN/client-ID/.NAME.round-0007.safetensors

ROOT is the node config's `state-dir`, else `$XDG_STATE_HOME/kindred`, else `~/.local/state/kindred`; only its
user can read it. Flower's Context would do for small things, but a SuperNode forgets it when it restarts, and in
a simulation it travels with every message.

What is kept is the state after a round. As long as the server may go on from an earlier round, after it was killed,
the states after earlier rounds are kept too of what rounds start from, under names with a dot; a round that is repeated
starts from the state before it.

At a site the folders stay: the personal model in them is what the site took part for. In a simulation the
clients share a disk with the server, which marks the run's folder as simulated (`begin_simulation`) and removes
those of simulations that are over, unless `end_simulation` did.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from logging import WARNING
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import numpy as np
from flwr.serverapp import Grid
from flwr.supercore import log
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from kindred.engine.inline import InlineGrid
from kindred.lazy import lazy
from kindred.messages import ClientId

if TYPE_CHECKING:
    from flwr.superlink import grid as superlink_grid
else:
    superlink_grid = lazy("flwr.superlink.grid")  # a second, which runs in this process do without

# Names under which a client keeps
MODEL = "model"  # its personal model
BEST = "best"  # the best of these so far
MIXTURE = "mixture"  # models that it predicts with together
_SIMULATED = ".simulated"


class NotResumable(RuntimeError):
    """A run cannot go on from what is left of it; nothing has been sent then, and what is left is as it was."""


def default_root() -> Path:
    """Where clients keep their folders unless their node config says otherwise."""
    home = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(home):  # the XDG specification has a relative one ignored
        home = os.path.expanduser("~/.local/state")
    return Path(home, "kindred")


class ClientState:
    """The folder of one client in one run. Nothing is made before something is saved.

    Parameters
    ----------
    run_id : int
    client : int or str
    root : path, optional
        By default `default_root()`.
    server_round : int (default: 0)
        The round in which something is saved.
    before : int, optional
        What is loaded was saved in a round before this one; by default the last.
    keep_from : int, optional
        The round after which the server may have to go on again; by default there is none.
    attempt : int (default: 0)
        Grows each time that the server goes on with the run. What was saved in the same attempt is not older than what
        is saved now, unless a message comes late.

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
        self._loaded: set[str] = set()  # what rounds start from; of all else the last state is enough
        self._run = _run_folder(run_id, Path(root).expanduser() if root else default_root())
        self.folder = self._run / _folder_name(client)

    def load(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays saved last under a name, before the round that `before` says; None if there are none.

        Raises
        ------
        ValueError
            The file is damaged.
        """
        self._loaded.add(name)
        path = self._path(name)
        with _reading(path):
            _texts(path)
        for version in self._versions(name):
            if self._before is None or version.round < self._before:
                with _reading(version.path):
                    return load_file(version.path)
        return None

    def save(self, name: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, str] | None = None) -> None:
        """Keep arrays under a name, with texts about them, in place of the last ones.

        Raises
        ------
        ValueError
            A later round, or attempt, has been at work here: the message for this one comes late.
        """
        self._make_folder()
        last = next(iter(self._versions(name)), None)
        if last and (last.attempt, last.round) > (self._attempt, self._round):
            gone_on = ", of the run as it was gone on with" if last.attempt > self._attempt else ""
            raise ValueError(f"round {self._round} is over: {last.path} is of round {last.round}{gone_on}")
        if last and last.path == self._path(name) and last.round < self._round and name in self._loaded:
            _link(last.path, self.folder / f".{name}.round-{last.round:04d}.safetensors")
        for partial, process in partial_files(self.folder):
            if not _is_running(process):  # it was killed while it saved
                partial.unlink(missing_ok=True)
        whole = {key: np.asarray(array, order="C") for key, array in arrays.items()}  # save_file writes memory as it is
        with replacing(self._path(name)) as temporary:
            save_file(
                whole,
                temporary,
                {
                    "client": json.dumps(self.client),
                    "round": str(self._round),
                    "attempt": str(self._attempt),
                    **(about or {}),
                },
            )
        _, *earlier = versions = self._versions(name)
        needed = next((version.round for version in versions if version.round <= self._keep_from), 0)
        for version in earlier:
            if not needed <= version.round < self._round:
                version.path.unlink(missing_ok=True)

    def about(self, name: str) -> dict[str, str]:
        """The texts saved with the arrays of a name; none if there are none, or the file is damaged."""
        with suppress(ValueError), _reading(self._path(name)):
            return _texts(self._path(name)) or {}
        return {}

    def _versions(self, name: str) -> list[_Version]:
        """What is kept under a name and not damaged: the last, then those of earlier rounds, from the last back."""
        found = []
        for path in (self._path(name), *self.folder.glob(f".{name}.round-*.safetensors")):
            with suppress(ValueError), _reading(path):
                if (about := _texts(path)) is not None:
                    found.append(_Version(path, int(about.get("round", 0)), int(about.get("attempt", 0))))
        return found[:1] + sorted(found[1:], key=lambda version: -version.round)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the folder, or wait until one that works in it is done."""
        self._make_folder()
        with open(self.folder / ".lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _make_folder(self) -> None:
        for folder in (self._run.parent, self._run, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


class _Version(NamedTuple):
    path: Path
    round: int
    attempt: int


def _texts(path: Path) -> dict[str, str] | None:
    """The texts in a file; None if there is no file."""
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata() or {}
    except FileNotFoundError:
        return None


def _link(path: Path, other: Path) -> None:
    """Have a file under another name as well; where the file system cannot, a copy."""
    other.unlink(missing_ok=True)
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def saved_files(run_id: int, name: str) -> dict[ClientId, Path]:
    """The files that the clients of a run keep under a name on this machine; a damaged one is left out, with a warning.

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
            log(WARNING, "kindred: %s does not say whose it is, and is left out", path)
    return files


def simulated(grid: Grid) -> bool:
    """Whether the clients behind a grid are on this machine, as in Flower's simulation engine and `InlineGrid`."""
    return isinstance(grid, InlineGrid) or isinstance(grid, superlink_grid.InMemoryGrid)  # noqa: SIM101


def begin_simulation(run_id: int, checkpoints: Path | None = None, *, goes_on: bool = False) -> None:
    """Mark a run as simulated, and remove the folders of simulated runs that are over.

    A run that was not brought to its end and has checkpoints, in the folder given here, may be gone on with: what its
    clients keep stays as long as these are there.

    The mark is a lock that this process holds until it ends, however it ends, or begins another simulation: a process
    has one at a time.

    Raises
    ------
    NotResumable
        The run goes on, and what its clients kept is gone, or in use by another process.
    """
    while _marks:
        _marks.pop().close()
    root = default_root()
    folder = _run_folder(run_id, root)
    if goes_on and not folder.is_dir():
        raise NotResumable(f"what its clients kept is not in {folder} (any more): without that it is another run")
    root.mkdir(parents=True, mode=0o700, exist_ok=True)
    with open(root / ".lock", "w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        for mark in root.glob(f"run-*/{_SIMULATED}"):
            if not (_is_own(mark.parent) and _is_own(mark)):
                continue
            with suppress(OSError), open(mark, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                again = mark.parent == folder
                if not _holds_checkpoints(str(checkpoints or "") if again else file.read()):
                    _remove(mark.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        held = open(folder / _SIMULATED, "a+", encoding="utf-8")  # stays open, and so locked
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.close()
            raise NotResumable("another process is at work on it") from None
        held.seek(0)
        if held.read() != (content := str(checkpoints or "")):  # what is right is at no moment not there
            held.truncate(0)
            print(content, file=held, end="", flush=True)
        _marks.append(held)


def end_simulation(run_id: int) -> None:
    """Remove what the clients of a simulated run kept."""
    _remove(_run_folder(run_id, default_root()))


_marks: list[IO[str]] = []


def _holds_checkpoints(folder: str) -> bool:
    return bool(folder) and any(Path(folder).glob("round-*.npz"))


def _remove(folder: Path) -> None:
    """Remove a simulated run's folder, the mark last: what is interrupted is then taken up the next time."""
    for path in folder.glob("client-*"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, with its ending, that takes its place if the block ends well.

    If not, `path` is left as it was and the temporary file is gone.
    """
    # Of this process: where a client answers late, its next answer may be under way in another.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def partial_files(folder: Path) -> list[tuple[Path, int]]:
    """Files of this user that `replacing` has left in a folder, and the process that wrote each."""
    names = [(re.fullmatch(r"\.(?:.+\.)?(\d{1,9})\.partial(?:\.\w+)?", path.name), path) for path in folder.glob(".*")]
    return [(path, int(name[1])) for name, path in names if name and path.is_file() and _is_own(path)]


def _is_own(path: Path) -> bool:
    """Whether something belongs to this user, and is no link to what may be elsewhere."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return about.st_uid == os.getuid() and not stat.S_ISLNK(about.st_mode)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Have a damaged file named."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to start from a new model") from None


def _run_folder(run_id: int, root: Path) -> Path:
    return root / f"run-{run_id}"


def _folder_name(client: ClientId) -> str:
    """A name that every file system takes; a hash keeps names apart that differ in upper and lower case alone."""
    if isinstance(client, int):
        return f"client-{client}"
    return f"client-{quote(client, safe='')[:80]}-{sha256(client.encode()).hexdigest()[:16]}"
