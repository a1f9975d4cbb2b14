"""Start Flower's processes, set their environment, and end them with all that they started."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sysconfig
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from kindred.engine.roster import REGISTERED
from kindred.server_app.cli.common import warn
from kindred.server_app.processes import MARK, Signalled, kill_processes, signals_as_exceptions

from . import hooks
from .addresses import LOOPBACK
from .bundle import ALLOWED

GRACE = 10.0  # s that a process has to end when asked; a SuperNode signs off at the SuperLink
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # s before a SuperNode is started again, or a server looks for new keys
QUIET = {"FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_TELEMETRY_ENABLED": "0"}


@contextmanager
def processes_that_end() -> Iterator[str]:
    """Yield a mark for processes; when the block ends, also by a signal, end every process that has the mark."""
    mark = uuid.uuid4().hex
    with signals_as_exceptions() as signals:
        try:
            try:
                yield mark
            finally:
                signals.heeded = False
                _ask_to_end(mark)
                kill_processes(mark)
        except Signalled as signalled:
            warn(f"ended by {signalled.number.name}")


def _ask_to_end(mark: str) -> None:
    children = [child for child in psutil.Process().children() if _has_mark(child, mark)]
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.terminate()
    psutil.wait_procs(children, GRACE)


def _has_mark(process: Any, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def environment(settings: Mapping[str, str], mark: str) -> dict[str, str]:
    """Return the environment of one of Flower's processes, with the mark that identifies it."""
    proxied = [os.environ[name] for name in ("no_proxy", "NO_PROXY") if os.environ.get(name)]
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    inherited = {name: value for name, value in os.environ.items() if name not in (REGISTERED, ALLOWED)}
    return inherited | {MARK: mark, "PATH": path, "no_proxy": ",".join([*LOOPBACK, *proxied[:1]])} | dict(settings)


def start_process(
    command: Sequence[str],
    settings: Mapping[str, str],
    directory: Path,
    mark: str,
    hook: Callable[[], None],
    stderr: int | None = None,
    contact: int | None = None,
) -> subprocess.Popen[bytes]:
    """Print a command of Flower's and start it; its output goes where this process writes, its errors to `stderr`.

    `contact` is a file descriptor for `hooks.persist`.
    """
    show_command(command, settings)
    script = os.path.join(sysconfig.get_path("scripts"), command[0])
    passed = {} if contact is None else {hooks.CONTACT: str(contact)}
    return subprocess.Popen(
        hooks.command(script, command[1:], hook), stdin=subprocess.DEVNULL, stderr=stderr,
        pass_fds=[] if contact is None else [contact], env=environment(settings, mark) | passed, cwd=directory,
        start_new_session=True,
    )  # fmt: skip


def show_command(command: Sequence[str], settings: Mapping[str, str]) -> None:
    """Print a command as it can be typed in a shell."""
    words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    print(f"$ {' '.join(words)} {shlex.join(command)}", flush=True)
