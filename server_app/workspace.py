"""The folders of a run in Flower's simulation engine, and the environment of its processes.

A folder is removed when its run is over; the next run removes a folder that a killed process has left behind.
"""

from __future__ import annotations

import os
import shutil
import stat
import sysconfig
import tempfile
import tomllib
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from kindred.files import make_private
from kindred.locks import is_ours, lock

from .flower_app import toml
from .processes import MARK

HOST = "127.0.0.1"
SHORT_FOLDER = Path("/tmp")  # for Ray's files: the paths of its sockets must be short
MARKER = ".kindred-run"  # a file in every folder that is made here, locked while the run lasts
MARKER_TEXT = "This folder was made by `kindred run`, and is removed when its process has ended."


class EngineError(RuntimeError):
    """Flower cannot be started; the text is one line that says why."""


class Workspace:
    """The folders of a run and the environment of its processes.

    FLWR_HOME lies in the user's state folder, Ray's files in `SHORT_FOLDER`.
    """

    def __init__(self, parent: Path) -> None:
        self.mark = uuid.uuid4().hex
        try:
            make_private(parent)
            self._folders = [OwnFolder(parent), OwnFolder(SHORT_FOLDER)]
            self.home, self.ray = (folder.path for folder in self._folders)
        except OSError as error:
            raise EngineError(f"{error.filename} cannot be made: {error.strerror}") from None
        self.log = self.home / "log.txt"
        self.superlink_log = self.home / "superlink.log"
        self.directory = self.home / "empty"
        self.directory.mkdir()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self._folders:
            folder.remove()

    @property
    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment.pop("RAY_ADDRESS", None)  # a Ray cluster of the user is not ours to use
        proxied = [environment[name] for name in ("no_proxy", "NO_PROXY") if environment.get(name)]
        return environment | {
            MARK: self.mark,
            "PATH": os.pathsep.join([sysconfig.get_path("scripts"), environment.get("PATH", os.defpath)]),
            "no_proxy": ",".join([HOST, "localhost", *proxied[:1]]),
            "FLWR_HOME": str(self.home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # s; each poll costs some ms during the whole run
            "RAY_TMPDIR": str(self.ray),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",  # actors get their own workers, with other environments
        }

    def copy_app(self, app_dir: Path) -> Path:
        """Copy the app's files that are sent: in its own folder Flower takes seconds to search a `.venv`."""
        pyproject = tomllib.loads((app_dir / "pyproject.toml").read_text(encoding="utf-8"))
        for pattern in ("pyproject.toml", *pyproject["tool"]["flwr"]["app"]["fab-include"]):
            for source in app_dir.glob(pattern):
                target = self.home / "app" / source.relative_to(app_dir)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        return self.home / "app"

    def write_run_config(self, run_config: Mapping[str, Any]) -> Path:
        path = self.home / "run-config.toml"
        path.write_text(toml(run_config), encoding="utf-8")
        return path


class OwnFolder:
    """A new folder of this process in `parent`; folders of ended processes there are removed first.

    The marker in a folder shows that it was made here. Its lock ends with the process that holds it, however that ends.
    A process number would not be enough, because another process may have it later. A folder without a marker is never
    removed.
    """

    def __init__(self, parent: Path) -> None:
        for path in parent.glob("kindred-*-*"):
            with suppress(OSError):
                _remove_abandoned(path)
        self.path = Path(tempfile.mkdtemp(prefix=f"kindred-{os.getpid()}-", dir=parent))
        unlocked = self.path / f"{MARKER}.new"  # the marker gets its name only when it is locked
        self._marker = open(unlocked, "w", encoding="utf-8")
        print(f"{MARKER_TEXT}\nprocess {os.getpid()}", file=self._marker, flush=True)
        with suppress(OSError):  # a file system without locks: then no process can lock it to remove the folder either
            lock(self._marker, wait=False)
        unlocked.rename(self.path / MARKER)

    def remove(self) -> None:
        _remove_marked(self.path)
        self._marker.close()


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder that a process of this user made here and did not remove before it ended."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or not is_ours(about):
        return
    with _opened_marker(folder / MARKER) as marker:
        about = os.fstat(marker.fileno())
        if not stat.S_ISREG(about.st_mode) or not is_ours(about):
            return
        if marker.readline(200).rstrip("\n") == MARKER_TEXT:
            lock(marker, wait=False)  # OSError: its process still runs
            _remove_marked(folder)


def _opened_marker(path: Path) -> IO[str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # O_NONBLOCK: do not wait if it is a pipe
    return open(descriptor, encoding="utf-8", errors="replace")


def _remove_marked(folder: Path) -> None:
    """Remove a folder, its marker last, so that the next run continues an interrupted removal."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != MARKER:
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [MARKER]:  # else a process that is ending still writes into it
            shutil.rmtree(folder)
