"""A run in Flower's simulation engine: start its processes, follow its log, leave nothing behind.

Two processes are started here: our own SuperLink, on a free port of this machine, and one that executes `flwr run`
and then `flwr list`. The SuperLink starts the rest: a SuperExec, the process of the simulation, Ray and its actors.
Their files lie in folders of this run. Their working directory is empty, because Ray's actors look there first for the
app's modules. When the run is over, for whatever reason, all of them are killed: they hold nothing to be saved.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kindred.client.state import default_root

from .flower_app import CONNECTION, write_flower_app
from .processes import END_WITH_PARENT, Signalled, kill_processes, signals_as_exceptions
from .run_log import Log, Outcome, keep_log
from .workspace import HOST, EngineError, Workspace

ATTEMPTS = 3  # to start a SuperLink, because another program may take its port in the meantime
STARTUP_TIMEOUT = 60.0  # s

SUPERLINK = f"""{END_WITH_PARENT}
from flwr.superlink.cli import flower_superlink
flower_superlink()
"""

# One process for both commands: it imports flwr only once, while the SuperLink starts.
# A line with only this character separates the log of the run from the list.
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

    Call it in the main thread: it handles SIGINT, SIGTERM and SIGHUP while it runs.

    Parameters
    ----------
    run_config : mapping
        Settings of the app, of type bool, int, float or str.
    app_dir : Path, optional
        The app's folder, with a `fab-include` in its pyproject.toml; by default the app of the installed package.
    num_clients : int
        Clients to simulate.
    cpus_per_client, gpus_per_client : int, float
        Resources for each client while it works; as many clients work at a time as the machine has resources for.
    on_line : callable
        Called with each line to show: progress, warnings, errors.

    Returns
    -------
    Outcome
        Every process that was started has ended. The whole log is `log.txt` in the folder of the results. If the run
        failed before it had that folder, the log is in the folder `logs` of the user's state folder.
    """
    try:
        with (
            Workspace(default_root() / "simulations") as workspace,
            open(workspace.log, "w", encoding="utf-8") as file,
        ):
            on_line("starting Flower's simulation engine, which takes some seconds")
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
                with suppress(OSError):  # the reason is more important than the log
                    kept = keep_log(workspace.log.read_text(encoding="utf-8"))
                    outcome = outcome._replace(reason=f"{outcome.reason} (log: {kept})")
            return outcome
    except EngineError as error:
        return Outcome(2, str(error))


def _run(workspace: Workspace, log: Log, arguments: list[str]) -> Outcome:
    with signals_as_exceptions() as signals:
        try:
            try:
                flwr = _start_flwr(workspace, arguments)
                _start_superlink(workspace)
                assert flwr.stdin is not None  # a pipe
                with suppress(BrokenPipeError):  # its output before it ended is read next
                    flwr.stdin.write("go\n")
                    flwr.stdin.flush()
                return _follow(flwr, log)
            finally:
                signals.heeded = False
                kill_processes(workspace.mark)
        except Signalled as signalled:
            return Outcome(128 + signalled.number, f"ended by {signalled.number.name}", log.results)


def _start_flwr(workspace: Workspace, arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", FLWR, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        env=workspace.environment | {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "TYPER_STANDARD_TRACEBACK": "1"},
        cwd=workspace.directory, start_new_session=True,
    )  # fmt: skip


def _start_superlink(workspace: Workspace) -> None:
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
    raise EngineError(
        f"other programs took {ATTEMPTS} free ports before the SuperLink could, {port} the last; try again"
    )


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
    """Read the output of the process to its end, and return the outcome."""
    assert flwr.stdout is not None  # a pipe
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
