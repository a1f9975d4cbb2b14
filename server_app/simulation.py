"""A run in Flower's simulation engine: start what it needs, follow its log, leave nothing behind.

Two processes are started here: a SuperLink of our own, on a free port of this machine, and one in which
`flwr run` and then `flwr list` do their work. The SuperLink starts the rest: a SuperExec, the process of the
simulation, Ray and its actors. Their files lie in folders of this run; their working directory is an empty
one, for Ray's actors look for the app's modules there first. When the run is over, for whatever reason, all of
them are killed: they hold nothing that would have to be saved.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple, TextIO

import psutil

from kindred.client.state import default_root
from kindred.server_app.flower_app import toml, write_flower_app

HOST = "127.0.0.1"
CONNECTION = "kindred"
ATTEMPTS = 3  # to start a SuperLink on a port that nobody takes in the meantime
STARTUP_TIMEOUT = 60.0  # s
MARK = "KINDRED_RUN"  # an environment variable that every process of a run inherits
LOGS_KEPT = 20  # of runs that failed
SHORT_FOLDER = Path("/tmp")  # for Ray's files: the names of its sockets must be short
MARKER = ".kindred-run"  # a file in every folder that is made here, locked as long as the run lasts
MARKER_TEXT = "This folder was made by `kindred run`, and is removed when its process has ended."
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BAD_INPUT = ("ConfigError", "DataError", "ExtensionError")  # exceptions of the app that say: change a setting

# Begins what a process of ours runs: should ours, its first argument, be killed, it sees to the end of what it started,
# and of itself.
END_WITH_PARENT = """
import os, sys, threading, time
import psutil

def end_with(parent):
    while os.getppid() == parent:
        time.sleep(0.5)
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(1)

threading.Thread(target=end_with, args=(int(sys.argv.pop(1)),), daemon=True).start()
"""

SUPERLINK = f"""{END_WITH_PARENT}
from flwr.superlink.cli import flower_superlink
flower_superlink()
"""

# One process for both commands: it imports flwr while the SuperLink starts, and needs to do so only once.
# A line that has only this character stands between the log of the run and the list.
SEPARATOR = "\x1e"
FLWR = f"""
import sys
from flwr.cli.app import app
app.rich_markup_mode = None  # errors in a line, not in a box
if not sys.stdin.readline():
    sys.exit(1)
try:
    app(["run", *sys.argv[1:]])
except SystemExit as ended:
    if ended.code:
        raise
print({SEPARATOR!r}, flush=True)
app(["list", {CONNECTION!r}, "--format", "json"])
"""

# Exceptions in which Flower wraps the one that says what happened.
WRAPPERS = ("Simulation Runtime crashed.", "An error was encountered. Ending simulation.")
# Warnings and errors of every run, or of every failed one, that say nothing about it.
NOISE = re.compile(
    r"Since flwr 1\.32|Manually terminating|Traceback |An exception occur|Stopping Simulation Runtime"
    r"|Simulation raised an exception|Exit Code: |An exception was raised when processing|ray::|\s*$"
)


class Outcome(NamedTuple):
    """How a run ended.

    Attributes
    ----------
    code : int
        0: completed. 1: failed. 2: a setting, the data or the machine must be changed. 128 + n: ended by signal n.
    reason : str
        One line; empty if the run completed.
    results : Path or None
        The folder of the results, if the run said where it is.
    """

    code: int
    reason: str = ""
    results: Path | None = None


class EngineError(RuntimeError):
    """Flower cannot be started; the text is one line that says why."""


def run_simulation(
    run_config: Mapping[str, Any],
    *,
    app_dir: Path | None = None,
    num_clients: int,
    cpus_per_client: int = 1,
    gpus_per_client: float = 0.0,
    on_line: Callable[[str], None] = print,
) -> Outcome:
    """Run a Flower app in the simulation engine and wait for its end.

    To be called in the main thread: it handles SIGINT, SIGTERM and SIGHUP as long as it runs.

    Parameters
    ----------
    run_config : mapping
        Settings of the app, of type bool, int, float or str.
    app_dir : Path, optional
        The app's folder, with a `fab-include` in its pyproject.toml; by default the app of the installed package.
    num_clients : int
        Clients to simulate.
    cpus_per_client, gpus_per_client : int, float
        What a client at work occupies; as many work at a time as fit into the machine.
    on_line : callable
        Called with each line that is worth showing: progress, warnings, errors.

    Returns
    -------
    Outcome
        Every process that was started is gone by then. The whole log lies in `log.txt` in the folder of the
        results or, of a run that failed before there was one, in the folder `logs` of the user's state folder.
    """
    try:
        with (
            _Workspace(default_root() / "simulations") as workspace,
            open(workspace.log, "w", encoding="utf-8") as file,
        ):
            log = Log(file, on_line)
            outcome = _run(
                workspace,
                log,
                [
                    str(workspace.copy_app(app_dir) if app_dir else write_flower_app(workspace.home / "app")),
                    CONNECTION,
                    "--stream",
                    "--federation-config",
                    f"num-supernodes={num_clients} client-resources-num-cpus={cpus_per_client} "
                    f"client-resources-num-gpus={float(gpus_per_client)}",
                    "--run-config",
                    str(workspace.write_run_config(run_config)),
                ],
            )
            file.flush()
            if outcome.results:
                shutil.copyfile(workspace.log, outcome.results / "log.txt")
            elif outcome.code == 1:
                with suppress(OSError):  # the reason matters more
                    kept = keep_log(workspace.log.read_text(encoding="utf-8"))
                    outcome = outcome._replace(reason=f"{outcome.reason} (log: {kept})")
            return outcome
    except EngineError as error:
        return Outcome(2, str(error))


def keep_log(text: str) -> Path:
    """Write the log of a run that failed before it had a folder, and return its path; the newest LOGS_KEPT stay.

    Raises
    ------
    OSError
        The log cannot be written.
    """
    folder = default_root() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(".log", f"failed-{datetime.now(UTC):%Y%m%d-%H%M%S}-", folder)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    for old in sorted(folder.glob("failed-*.log"))[:-LOGS_KEPT]:
        old.unlink(missing_ok=True)
    return Path(path)


def _run(workspace: _Workspace, log: Log, arguments: list[str]) -> Outcome:
    with signals_as_exceptions() as signals:
        try:
            try:
                flwr = _start_flwr(workspace, arguments)
                _start_superlink(workspace)
                with suppress(BrokenPipeError):  # what it said before it ended is read next
                    flwr.stdin.write("go\n")
                    flwr.stdin.flush()
                return _follow(flwr, log)
            finally:
                signals.heeded = False
                kill_processes(workspace.mark)
        except Signalled as signalled:
            return Outcome(128 + signalled.number, f"ended by {signalled.number.name}", log.results)


def _start_flwr(workspace: _Workspace, arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", FLWR, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        env=workspace.environment | {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "TYPER_STANDARD_TRACEBACK": "1"},
        cwd=workspace.directory, start_new_session=True,
    )  # fmt: skip


def _start_superlink(workspace: _Workspace) -> None:
    for _ in range(ATTEMPTS):
        port = _free_port()
        with open(workspace.superlink_log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", SUPERLINK, str(os.getpid()), "--insecure", "--simulation",
                 "--isolation", "subprocess", "--host", HOST, "--port", str(port)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=workspace.environment, cwd=workspace.directory, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + STARTUP_TIMEOUT
        while process.poll() is None and time.monotonic() < deadline:
            if _is_healthy(port):
                (workspace.home / "config.toml").write_text(
                    f'[superlink]\ndefault = "{CONNECTION}"\n'
                    f'[superlink.{CONNECTION}]\naddress = "{HOST}:{port}"\ninsecure = true\n'
                )
                return
            time.sleep(0.05)
        said = [line for line in workspace.superlink_log.read_text(errors="replace").splitlines() if line.strip()]
        if process.poll() is None:
            raise EngineError(f"Flower's SuperLink does not answer on {HOST}:{port} after {STARTUP_TIMEOUT:.0f} s")
        if not any("address already in use" in line.lower() for line in said):
            raise EngineError(f"Flower's SuperLink ended with code {process.returncode}: {said[-1] if said else ''}")
    raise EngineError(f"{ATTEMPTS} ports were free and then taken by another program, {port} the last; try again")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _follow(flwr: subprocess.Popen[str], log: Log) -> Outcome:
    """Read what the process says to its end."""
    for line in flwr.stdout:
        if line.rstrip("\n") == SEPARATOR:
            break
        log.add(line)
    listed = flwr.stdout.read()
    if flwr.wait() == 0 and listed:
        run = json.loads(listed[listed.index("{") :])["runs"][0]
        if run["status"] == "finished:completed":
            return Outcome(0, "", log.results)
        return log.failure(run["status-details"])
    return log.failure("")


class Log:
    """The log of a run: written down as a whole, shown in part, understood as far as needed.

    Parameters
    ----------
    file : text stream
        Gets every line, without colours.
    on_line : callable
        Gets what `shown` lets through.

    Attributes
    ----------
    results : Path or None
        Where the app says that its results are.
    """

    def __init__(self, file: TextIO, on_line: Callable[[str], None]) -> None:
        self.file = file
        self.on_line = on_line
        self.results: Path | None = None
        self._errors: list[tuple[str, str]] = []  # (exception, message) of each traceback
        self._in_traceback = False
        self._last = ""
        self._complaints: set[str] = set()

    def add(self, line: str) -> None:
        """Take in a line."""
        line = re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip()
        self.file.write(f"{line}\n")
        self._last = line.strip() or self._last
        level, text = _level_and_text(line)
        if text.startswith("Traceback (most recent call last)"):
            self._in_traceback = True
        elif self._in_traceback and text and not text.startswith(" "):
            self._in_traceback = False
            name, _, message = text.partition(": ")
            if message not in WRAPPERS:
                self._errors.append((name.rpartition(".")[2], message))
        if text.startswith("kindred: results in "):
            self.results = Path(text.removeprefix("kindred: results in "))
        if (show := shown(level, text)) and not (level != "INFO" and show in self._complaints):
            self._complaints.add(show)
            self.on_line(show)

    def failure(self, details: str) -> Outcome:
        """The outcome of a run that has failed; `details` is what Flower says about it."""
        if self._errors:
            name, message = self._errors[-1]
            if name in BAD_INPUT:
                return Outcome(2, message, self.results)
            return Outcome(1, f"{name}: {message}" if message else name, self.results)
        reason = details.strip().partition("\n")[0] or self._last.removeprefix("Error: ") or "Flower says no more"
        if reason.startswith("No heartbeat"):
            reason = "the simulation's process was killed; most often the machine has too little memory"
        return Outcome(1, f"the run failed: {reason}", self.results)


def _level_and_text(line: str) -> tuple[str, str]:
    """Take a line of Flower's logger apart; other lines have the level ""."""
    line = re.sub(r"^\(\w+ pid=[^)]*\) ?", "", line)  # what Ray puts before the lines of an actor
    found = re.match(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) *: +(.*)", line)
    return (found[1], found[2]) if found else ("", line)


def shown(level: str, text: str) -> str | None:
    """What a person sees of a line of the log: progress, our own messages, warnings and errors; else None."""
    if level == "INFO" and text.startswith(("round ", "closing evaluation ")):
        return text
    if level == "INFO" and text.startswith("kindred: "):
        return text.removeprefix("kindred: ")
    if level in ("WARNING", "ERROR", "CRITICAL") and not NOISE.match(text):
        return f"{level.lower()}: {text.removeprefix('kindred: ')}"
    return None


class _Workspace:
    """The folders of a run and the environment of its processes.

    FLWR_HOME lies in the user's state folder, Ray's files in `SHORT_FOLDER`.
    """

    def __init__(self, parent: Path) -> None:
        self.mark = uuid.uuid4().hex
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self._folders = [_OwnFolder(parent), _OwnFolder(SHORT_FOLDER)]
            self.home, self.ray = (folder.path for folder in self._folders)
        except OSError as error:
            raise EngineError(f"{error.filename} cannot be made: {error.strerror}") from None
        self.log = self.home / "log.txt"
        self.superlink_log = self.home / "superlink.log"
        self.directory = self.home / "empty"
        self.directory.mkdir()

    def __enter__(self) -> _Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self._folders:
            folder.remove()

    @property
    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment.pop("RAY_ADDRESS", None)  # a cluster of the user's is not ours to use
        proxied = [environment[name] for name in ("no_proxy", "NO_PROXY") if environment.get(name)]
        return environment | {
            MARK: self.mark,
            "PATH": os.pathsep.join([sysconfig.get_path("scripts"), environment.get("PATH", os.defpath)]),
            "no_proxy": ",".join([HOST, "localhost", *proxied[:1]]),
            "FLWR_HOME": str(self.home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # s; each poll costs some ms, until the end of the run
            "RAY_TMPDIR": str(self.ray),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",  # the actors get workers of their own, with other environments
        }

    def copy_app(self, app_dir: Path) -> Path:
        """Copy what is shipped: in the app's folder itself, Flower takes seconds to look through a `.venv`."""
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


class _OwnFolder:
    """A new folder of this process in `parent`, from which those of processes that have ended are removed.

    The marker in a folder says that it was made here. Its lock ends with the process that holds it, however that ends;
    a process number would not do, for another process may have it by then. What has no marker is never removed.
    """

    def __init__(self, parent: Path) -> None:
        for path in parent.glob("kindred-*-*"):
            with suppress(OSError):
                _remove_abandoned(path)
        self.path = Path(tempfile.mkdtemp(prefix=f"kindred-{os.getpid()}-", dir=parent))
        unlocked = self.path / f"{MARKER}.new"  # the marker has its name when it is locked, and not before
        self._marker = open(unlocked, "w", encoding="utf-8")
        print(f"{MARKER_TEXT}\nprocess {os.getpid()}", file=self._marker, flush=True)
        with suppress(OSError):  # a file system without locks: then nobody can lock it to remove the folder either
            fcntl.flock(self._marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(self.path / MARKER)

    def remove(self) -> None:
        _remove_marked(self.path)
        self._marker.close()


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder that a process of this user made here and has not removed before it ended."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        return
    with _opened_marker(folder / MARKER) as marker:
        about = os.fstat(marker.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            return
        if marker.readline(200).rstrip("\n") == MARKER_TEXT:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its process lives
            _remove_marked(folder)


def _opened_marker(path: Path) -> IO[str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # not to wait, should it be a pipe
    return open(descriptor, encoding="utf-8", errors="replace")


def _remove_marked(folder: Path) -> None:
    """Remove a folder, its marker last: what is interrupted is then taken up the next time."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != MARKER:
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == [MARKER]:  # else a process that is ending writes on in it
            shutil.rmtree(folder)


class Signalled(BaseException):
    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


class _Signals:
    heeded = True


@contextmanager
def signals_as_exceptions() -> Iterator[_Signals]:
    """Raise `Signalled` at a signal, as long as signals are heeded; what is ignored, as by nohup, stays so."""
    signals = _Signals()

    def handle(number: int, frame: FrameType | None) -> None:
        if signals.heeded:
            signals.heeded = False
            raise Signalled(signal.Signals(number))

    before = {
        number: signal.signal(number, handle) for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_processes(mark: str) -> None:
    """Kill every process of the run and wait until there is none.

    All are stopped before: none is to start another unseen. Those killed are remembered: one that takes its
    time to end has lost the parent it was found by.
    """
    deadline = time.monotonic() + 15
    killed: set[psutil.Process] = set()
    while (processes := marked_processes(mark, killed)) and time.monotonic() < deadline:
        stopped: set[psutil.Process] = set()
        while more := processes - stopped:
            for process in more:
                with suppress(psutil.Error):
                    process.suspend()
            stopped |= more
            processes = marked_processes(mark, killed)
        for process in stopped:
            with suppress(psutil.Error):
                process.kill()
        killed |= stopped
        time.sleep(0.05)


def marked_processes(mark: str, known: Collection[psutil.Process] = ()) -> set[psutil.Process]:
    """Those that run of the known processes and of all that have the mark, and what they started.

    Ray's actors write over their environment.
    """
    alive: dict[int, psutil.Process] = {}
    parents: dict[int, int] = {}
    found: set[int] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            parents[process.pid] = process.ppid()
            alive[process.pid] = process
            if process in known or process.environ().get(MARK) == mark:
                found.add(process.pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {alive[pid] for pid in found}
