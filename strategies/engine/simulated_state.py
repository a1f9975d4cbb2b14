"""The clients' saved state in a simulation, where the server has access to it, on the disk of this machine.

The server marks the run's folder as simulated, and removes the folders of simulations that have ended. The clients of
such a run do not flush what they save: the server does, before it writes a checkpoint that needs it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from logging import WARNING
from pathlib import Path
from typing import IO, TYPE_CHECKING

from flwr.serverapp import Grid
from flwr.supercore import log
from safetensors import safe_open

from kindred.client.state import SIMULATED, Identity, default_root, identity, reading, run_folder
from kindred.files import is_own, is_partial, make_private
from kindred.lazy import lazy
from kindred.locks import lock
from kindred.messages import ClientId

from .checkpoint import NotResumable
from .inline import InlineGrid

if TYPE_CHECKING:
    from flwr.superlink import grid as superlink_grid
else:
    superlink_grid = lazy("flwr.superlink.grid")  # its import takes a second; in-process runs skip it


AT_ONCE = 8  # clients whose files are flushed at the same time: file systems do several in the time of one
STATE_KEPT = 7 * 24 * 3600.0  # s; for so long the state of an interrupted run stays whose results were moved


def saved_files(run_id: int, name: str) -> dict[ClientId, Path]:
    """Return the files that a run's clients saved under a name on this machine; skip damaged ones with a warning.

    Returns
    -------
    dict
        client -> path
    """
    files: dict[ClientId, Path] = {}
    for path in run_folder(run_id, default_root()).glob(f"client-*/{name}.safetensors"):
        try:
            with reading(path), safe_open(path, "numpy") as file:
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
    as its checkpoints exist. If its whole folder of results is gone, it may have been moved, and the state stays for
    `STATE_KEPT`.

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
    folder = run_folder(run_id, root)
    if goes_on and not folder.is_dir():
        raise NotResumable(
            f"the saved state of its clients is not in {folder} (any more), and the run cannot be resumed without it"
        )
    make_private(root)
    with open(root / ".lock", "w") as one_at_a_time:
        lock(one_at_a_time, wait=True)
        for mark in root.glob(f"run-*/{SIMULATED}"):
            if not (is_own(mark.parent) and is_own(mark)):
                continue
            with suppress(OSError), open(mark, encoding="utf-8") as file:
                lock(file, wait=False)
                is_this_run = mark.parent == folder
                if not _may_resume(str(checkpoints or "") if is_this_run else file.read(), mark):
                    _remove(mark.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        held = open(folder / SIMULATED, "a+", encoding="utf-8")  # it stays open, and therefore locked
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


class StateFlusher:
    """Flushes the state that the clients of a simulated run have saved.

    Parameters
    ----------
    run_id : int
    """

    def __init__(self, run_id: int) -> None:
        self._folder = run_folder(run_id, default_root())
        self._flushed: dict[str, set[Identity]] = {}  # client's folder -> its files that are on the disk

    def flush(self) -> None:
        """Wait until everything that the clients have saved so far is on the disk."""
        folders = [entry.path for entry in os.scandir(self._folder) if entry.name.startswith("client-")]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            flushed = pool.map(_flush, folders, [self._flushed.get(folder, set()) for folder in folders])
            self._flushed = dict(zip(folders, flushed, strict=True))


def _flush(folder: str, flushed: Set[Identity]) -> set[Identity]:
    """Wait until what a client has saved is on the disk; given the files that already are, return those that are now.

    The client may save its next state meanwhile. The one before it then has another name, so files are listed twice.
    """
    on_disk, found = {*flushed}, {}
    for _ in range(2):
        for entry in os.scandir(folder):
            place = entry.name, entry.inode()
            if place in found or not entry.name.endswith(".safetensors") or is_partial(entry.name):
                continue
            with suppress(FileNotFoundError):
                if (file := identity(os.stat(entry.path))) not in on_disk:
                    with open(entry.path, "rb+", buffering=0) as opened:
                        if identity(os.fstat(opened.fileno())) != file:  # its client has begun to write over it
                            continue
                        os.fsync(opened.fileno())
                    on_disk.add(file)
                found[place] = file
    return on_disk.intersection(found.values())


def end_simulation(run_id: int) -> None:
    """Remove the saved state of a simulated run's clients."""
    _remove(run_folder(run_id, default_root()))


_marks: list[IO[str]] = []


def _may_resume(checkpoints: str, mark: Path) -> bool:
    """Return whether the run of a mark may be resumed, from checkpoints in this folder; "" if it has none."""
    if not checkpoints:
        return False
    if Path(checkpoints).parent.is_dir():
        return any(Path(checkpoints).glob("round-*.npz"))
    changed = max(path.stat().st_mtime for path in (mark, *mark.parent.glob("client-*")))
    return time.time() - changed < STATE_KEPT


def _remove(folder: Path) -> None:
    """Remove a simulated run's folder, the mark last: an interrupted removal is then completed the next time."""
    for path in folder.glob("client-*"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
