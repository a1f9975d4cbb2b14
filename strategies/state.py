"""What a client keeps between messages: files in a folder of its own, written whole or not at all.

    ROOT/run-RUN/client-ID/NAME.safetensors

ROOT is the node config's `state-dir`, else `$XDG_STATE_HOME/kindred`, else `~/.local/state/kindred`; only its
user can read it. Flower's Context would do for small things, but a SuperNode forgets it when it restarts, and in
a simulation it travels with every message.

At a site the folders stay: the personal model in them is what the site took part for. In a simulation the
clients share a disk with the server, which marks the run's folder as simulated (`begin_simulation`) and removes
those of simulations that are over, unless `end_simulation` did.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from logging import WARNING
from pathlib import Path
from typing import IO
from urllib.parse import quote

import numpy as np
from flwr.serverapp import Grid
from flwr.supercore import log

from .messages import ClientId

# Names under which a client keeps
MODEL = "model"  # its personal model
BEST = "best"  # the best of these so far
MIXTURE = "mixture"  # models that it predicts with together
_SIMULATED = ".simulated"


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

    Attributes
    ----------
    folder : Path
    """

    def __init__(self, run_id: int, client: ClientId, root: str | os.PathLike[str] | None = None) -> None:
        self.client = client
        self._run = _run_folder(run_id, Path(root).expanduser() if root else default_root())
        self.folder = self._run / _folder_name(client)

    def load(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays saved last under a name; None if there are none.

        Raises
        ------
        ValueError
            The file is damaged.
        """
        from safetensors.numpy import load_file

        path = self._path(name)
        try:
            with _reading(path):
                return load_file(path)
        except FileNotFoundError:
            return None

    def save(self, name: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, str] | None = None) -> None:
        """Keep arrays under a name, with texts about them, in place of the last ones."""
        from safetensors.numpy import save_file

        self._make_folder()
        for partial in self.folder.glob(".*.partial.safetensors"):
            if not _is_running(int(partial.name.split(".")[-3])):  # it was killed while it saved
                partial.unlink(missing_ok=True)
        whole = {key: np.asarray(array, order="C") for key, array in arrays.items()}  # save_file writes memory as it is
        with replacing(self._path(name)) as temporary:
            save_file(whole, temporary, {"client": json.dumps(self.client), **(about or {})})

    def about(self, name: str) -> dict[str, str]:
        """The texts saved with the arrays of a name; none if there are none, or the file is damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path(name), "numpy") as file:
                return file.metadata() or {}
        except (FileNotFoundError, SafetensorError):
            return {}

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


def saved_files(run_id: int, name: str) -> dict[ClientId, Path]:
    """The files that the clients of a run keep under a name on this machine; a damaged one is left out, with a warning.

    Returns
    -------
    dict
        client -> path
    """
    from safetensors import safe_open

    files: dict[ClientId, Path] = {}
    for path in _run_folder(run_id, default_root()).glob(f"client-*/{name}.safetensors"):
        try:
            with _reading(path), safe_open(path, "numpy") as file:
                files[json.loads(file.metadata()["client"])] = path
        except ValueError as error:
            log(WARNING, "kindred: %s", error)
    return files


def simulated(grid: Grid) -> bool:
    """Whether the clients behind a grid are on this machine, as in Flower's simulation engine and `InlineGrid`."""
    from .inline import InlineGrid

    if isinstance(grid, InlineGrid):
        return True
    from flwr.superlink.grid import InMemoryGrid  # takes a second to import where Flower has not done so

    return isinstance(grid, InMemoryGrid)


def begin_simulation(run_id: int) -> None:
    """Mark a run as simulated, and remove the folders of simulated runs that are over.

    The mark is a lock that this process holds until it ends, however it ends, or begins another simulation: a process
    has one at a time.
    """
    while _marks:
        _marks.pop().close()
    root = default_root()
    root.mkdir(parents=True, mode=0o700, exist_ok=True)
    with open(root / ".lock", "w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        for mark in root.glob(f"run-*/{_SIMULATED}"):
            with suppress(OSError), open(mark) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(mark.parent)
        folder = _run_folder(run_id, root)
        folder.mkdir(mode=0o700, exist_ok=True)
        mark = open(folder / _SIMULATED, "w")  # stays open, and so locked
        fcntl.flock(mark, fcntl.LOCK_EX)
        _marks.append(mark)


def end_simulation(run_id: int) -> None:
    """Remove what the clients of a simulated run kept."""
    _remove(_run_folder(run_id, default_root()))


_marks: list[IO[str]] = []


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
    from safetensors import SafetensorError

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
