"""Changes to Flower's processes that `kindred server` and `kindred site` start.

A hook is a function of this module. Such a process calls it before Flower's command begins:

- `guard_superlink`: the SuperLink takes orders only from its own user, refuses apps with code of their own, strangers
  cannot exhaust its memory, a busy disk does not end its runs, and it starts its flower-superexec again;
- `quicken_supernode`: after a message the SuperNode asks for the next one sooner than after Flower's 3 s; it refuses
  apps with code of their own, has `warm_up` called in the flower-superexec that it starts, and `persist` keeps it
  working when the connection fails;
- `warm_up`: the process that works on a message is a fork of one that has imported PyTorch and Flower. A new process
  would spend seconds on these imports;
- `unpack_server_apps`: a ServerApp's process starts with `unpack_whole`;
- `unpack_whole`: a run's app is unpacked whole or not at all. On a full disk Flower leaves it in part, and then uses
  that in all later runs.

Each hook replaces a name in one of Flower's modules. So the hooks depend on the version of Flower that pyproject.toml
names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kindred.lazy import lazy
from kindred.server_app.processes import END_WITH_PARENT

# Each of Flower's processes imports only the modules that its own hook changes.
if TYPE_CHECKING:
    import fastapi
    import httpx
    import uvicorn
    from flwr import app as flower
    from flwr.cli import install as flwr_install
    from flwr.common import constant
    from flwr.supercore import sql_mixin, utils
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.superlink import main as superlink
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.control import control_handlers
    from flwr.supernode import cli as supernode_cli, fleet_http_client, start_client_internal

    from kindred.client import journal

    from . import bundle, guard
else:
    fastapi, flower, httpx = lazy("fastapi"), lazy("flwr.app"), lazy("httpx")
    fleet_http_client = lazy("flwr.supernode.fleet_http_client")
    control_handlers = lazy("flwr.superlink.servicer.control.control_handlers")
    bundle = lazy("kindred.server_app.deployment.bundle")
    uvicorn, superlink, sql_mixin = lazy("uvicorn"), lazy("flwr.superlink.main"), lazy("flwr.supercore.sql_mixin")
    start_client_internal, supernode_cli = lazy("flwr.supernode.start_client_internal"), lazy("flwr.supernode.cli")
    subprocess_executor = lazy("flwr.supercore.superexec.executor.subprocess_executor")
    flower_superlink, flwr_install = lazy("flwr.superlink.cli.flower_superlink"), lazy("flwr.cli.install")
    constant, utils = lazy("flwr.common.constant"), lazy("flwr.supercore.utils")
    guard, journal = lazy("kindred.server_app.deployment.guard"), lazy("kindred.client.journal")

# In the environment of a SuperNode: the file descriptor to which `persist` writes.
CONTACT = "KINDRED_CONTACT"
PULL, HEARTBEAT = "/v1/fleet/pull-messages", "/v1/fleet/send-node-heartbeat"
SIGNING_ON, SIGNING_OFF = ("/register-node", "/activate-node"), ("/deactivate-node", "/unregister-node")
LONGEST_LINE = 500  # bytes; a pipe takes a line of this length in one piece

# How long in ms a request waits for the SuperLink's database; Flower's clients wait 30 s for the answer.
DATABASE_PATIENCE = "25000"

# Runs a hook and a command of Flower's.
RUN = """
import runpy, sys
hook = sys.argv.pop(1)
if hook:
    from kindred.server_app.deployment import hooks
    getattr(hooks, hook)()
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# It also ends, with all that it started, when the process whose id is its first argument ends, even by SIGKILL.
START = f"{END_WITH_PARENT}{RUN}"

# Runs before FORKS in the same process.
WHOLE = """
from kindred.server_app.deployment import hooks
hooks.unpack_whole()
"""

# Starts a process for each line of arguments that it reads, until its input ends.
FORKS = """
import gc, json, os, signal, sys
import sklearn.model_selection, torch  # what clients use, and is slow to import
import kindred  # the installed package, before a run's files come first on the path
from flwr.supernode.cli import flwr_clientapp
gc.freeze()  # garbage collections of the processes skip the objects that they share
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
for line in sys.stdin:
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = json.loads(line)
        sys.exit(flwr_clientapp())
"""

SUPEREXEC_PAUSE = 5.0  # s before a SuperLink starts its flower-superexec again

# Pauses of a SuperNode, in s. The longer it has had no message, the longer it waits before it asks again, up to
# Flower's 3 s. So a round takes at most a tenth longer, and many waiting sites do not keep the server busy.
ANSWER_PAUSE, FIRST_PAUSE, GROWTH = 0.1, 0.5, 1 / 10


def command(script: str, arguments: Sequence[str], hook: Callable[[], None] | None = None) -> list[str]:
    """Return the command that runs one of Flower's scripts with a hook, and ends when this process ends.

    Parameters
    ----------
    script : str
        Path of the script.
    arguments : sequence of str
    hook : callable, optional
        A hook of this module.
    """
    return [sys.executable, "-P", "-c", START, str(os.getpid()), hook.__name__ if hook else "", script, *arguments]


def _beside(name: str) -> str:
    """Return the path of another of Flower's scripts."""
    return os.path.join(os.path.dirname(sys.argv[0]), name)


def quicken_supernode() -> None:
    """Shorten the pauses of the SuperNode that this process will start, and the start of its clients."""
    pauses = Pauses()

    def start_superexec(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        pauses.superexec = subprocess.Popen(command(_beside(arguments[0]), arguments[1:], warm_up))
        return pauses.superexec

    vars(start_client_internal).update(time=pauses, subprocess=SimpleNamespace(Popen=start_superexec))
    _refuse_apps()
    if contact := os.environ.pop(CONTACT, ""):
        persist(int(contact))


def _refuse_apps() -> None:
    """Have the SuperNode of this process check each app that it receives, and answer in place of a refused one.

    Flower has no public way to do this before an app is unpacked. With `flower-supernode --isolation process` we would
    start the process that works on a message, and Flower's code in it would still receive, unpack and import the app at
    once. `--trusted-entities` needs signatures that only Flower's own registry of apps issues. So the check is in the
    function that receives an app for all kinds of processes.
    """
    pull, insert = (vars(start_client_internal)[name] for name in ("_pull_and_store_message", "_insert_message"))

    def pull_checked(**given: Any) -> int | None:
        received: dict[str, Any] = {}

        def remember(name: str) -> Callable[..., Any]:
            return lambda *args: received.setdefault(name, given[name](*args))

        def get_fab(*args: Any) -> Any:
            run, fab = received["get_run"], given["get_fab"](*args)
            bundle.check_app(fab.content, (run.fab_id, run.fab_version, run.fab_hash))
            return replace(fab, hash_str=run.fab_hash)

        try:
            return pull(**given | {"receive": remember("receive"), "get_run": remember("get_run"), "get_fab": get_fab})
        except bundle.Refused as refused:
            print(f"kindred: {refused}", file=sys.stderr, flush=True)
            message, _ = received["receive"]
            run_id: int = message.metadata.run_id
            if path := os.environ.get(journal.JOURNAL):
                journal.append(path, {"kind": journal.APP, "run": str(run_id), "problem": str(refused)})
            error = flower.Error(constant.ErrorCode.INVALID_FAB, str(refused))
            insert(flower.Message(error, reply_to=message), given["state"], given["object_store"])
            return run_id

    vars(start_client_internal).update(_pull_and_store_message=pull_checked)


def persist(contact: int) -> None:
    """Let the SuperNode that this process will start try again where Flower gives up, and say that it works.

    At a TLS error, and at a status 500, Flower's main loop or its thread of heartbeats ends, and the process does not.

    Parameters
    ----------
    contact : int
        File descriptor. A heartbeat or a request to take part that the server accepts writes an empty line there,
        unless the last request for a message failed. One of the three that fails writes a line that says why. So a
        working SuperNode writes something at least once in a minute.
    """
    client, main = fleet_http_client.FleetHttpClient, supernode_cli.flower_supernode.__globals__
    request, start, failing = client._unary_unary, main["start_client_internal"], set()

    def tell(line: str) -> None:
        os.write(contact, line.encode()[:LONGEST_LINE] + b"\n")

    def request_or_retry(self: Any, *, path: str, **how: Any) -> Any:
        try:
            reply = request(self, path=path, **how)
        except httpx.HTTPError as error:
            status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
            if path in (PULL, HEARTBEAT) or path.endswith(SIGNING_ON):
                failing.add(path)
                tell(str(error).partition("\n")[0] or type(error).__name__)
            if path.endswith(SIGNING_ON + SIGNING_OFF) or (status and (status < 500 or path not in (PULL, HEARTBEAT))):
                raise
            raise httpx.ReadError("no answer") from error  # which Flower tries again
        known = path in failing
        failing.discard(path)
        if not failing and (known or path == HEARTBEAT or path.endswith(SIGNING_ON)):
            tell("")
        return reply

    def start_and_end(**settings: Any) -> None:
        start(**settings)
        os._exit(1)  # the main loop has ended by an error; another thread would keep the process

    client._unary_unary = request_or_retry  # type: ignore[method-assign]
    main["start_client_internal"] = start_and_end


class Pauses:
    """Replacement for the module `time` in a SuperNode: shortens its pauses (3 s for a message, 0.5 s for a reply).

    Attributes
    ----------
    superexec : Popen or None
        The process that starts clients. Without it the SuperNode would take messages and answer none.
    """

    def __init__(self) -> None:
        self.busy_at = time.monotonic()
        self.superexec: subprocess.Popen[bytes] | None = None

    def sleep(self, seconds: float) -> None:
        """Pause for at most `seconds`; end the process if flower-superexec has ended."""
        if self.superexec is not None and self.superexec.poll() is not None:
            print(f"kindred: flower-superexec ended with code {self.superexec.returncode}", file=sys.stderr, flush=True)
            os._exit(1)  # `kindred site` then starts the whole SuperNode again
        now = time.monotonic()
        if seconds < 1:
            self.busy_at = now
            time.sleep(min(ANSWER_PAUSE, seconds))
        else:
            time.sleep(min(max((now - self.busy_at) * GROWTH, FIRST_PAUSE), seconds))


def warm_up() -> None:
    """Start the processes of clients as forks of a process that has imported PyTorch and Flower."""
    if sys.platform != "linux":  # on macOS a process may fork only before it imports such libraries
        return

    def start_forks() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-P", "-c", WHOLE + FORKS], stdin=subprocess.PIPE)

    forks = start_forks()

    def hand_over(line: bytes) -> None:
        assert forks.stdin is not None  # a pipe
        forks.stdin.write(line)
        forks.stdin.flush()

    def start(arguments: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
        nonlocal forks
        if arguments[0] != "flwr-clientapp":
            return subprocess.Popen(arguments, **settings)
        line = json.dumps(arguments).encode() + b"\n"
        try:
            hand_over(line)
        except OSError:  # the process has ended, for example for lack of memory
            forks = start_forks()
            hand_over(line)
        return forks

    vars(subprocess_executor).update(subprocess=SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))


def guard_superlink() -> None:
    """Let the SuperLink that this process will start take orders only from its own user, and limit its memory.

    It refuses apps with code of their own. `flwr run` shows the reason.

    It also waits longer for its database. After Flower's 5 s a request fails, for example on a slow disk. Then the run
    ends, and `flwr run` ends without a message.
    """
    create_app, serve = superlink.create_app, uvicorn.run
    pragmas = dict(vars(sql_mixin)["SQLITE_PRAGMAS"], busy_timeout=DATABASE_PATIENCE)
    vars(sql_mixin).update(SQLITE_PRAGMAS=tuple(pragmas.items()))
    guard.bound_open_files()

    def create_guarded_app(config: Any, *args: Any) -> Any:
        guarded = create_app(config, *args)
        guarded.add_middleware(guard.Guard, names=guard.server_names(config.host, config.ssl_certfile))
        return guarded

    read_config = vars(control_handlers)["get_fab_config"]  # called with each app before a run of it can begin

    def read_checked_config(app: bytes) -> dict[str, Any]:
        try:
            bundle.check_app(app)
        except bundle.Refused as refused:
            print(f"kindred: {refused}", file=sys.stderr, flush=True)
            raise fastapi.HTTPException(403, f"{refused}; run the app in {os.environ['FLWR_HOME']}/app") from None
        return read_config(app)

    vars(control_handlers).update(get_fab_config=read_checked_config)

    def start_superexec(arguments: Sequence[str], **settings: Any) -> SuperExec:
        run = [sys.executable, "-P", "-c", RUN, unpack_server_apps.__name__, _beside(arguments[0]), *arguments[1:]]
        return SuperExec(lambda: subprocess.Popen(run, **settings))

    names = SimpleNamespace(Popen=start_superexec, TimeoutExpired=subprocess.TimeoutExpired)
    vars(flower_superlink).update(subprocess=names)
    vars(superlink).update(create_app=create_guarded_app)
    uvicorn.run = partial(serve, http=guard.Connection, ws="none")


class SuperExec(threading.Thread):
    """The process of a SuperLink that starts the runs; it is started again when it ends, for example on a full disk."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        super().__init__(daemon=True)
        self._restart, self._process, self._over = start, start(), threading.Event()
        self.start()

    def run(self) -> None:
        """Start the process again until `terminate` is called."""
        while True:
            code = self._process.wait()
            if self._over.wait(SUPEREXEC_PAUSE):
                return
            print(
                f"kindred: flower-superexec ended with code {code}, and is started again", file=sys.stderr, flush=True
            )
            self._process = self._restart()

    def terminate(self) -> None:
        """Ask the process to end."""
        self._over.set()
        self._process.terminate()

    def wait(self, timeout: float) -> int:
        """Return the process's exit code."""
        return self._process.wait(timeout)


def unpack_server_apps() -> None:
    """Start the processes of ServerApps with `unpack_whole`."""

    def start(arguments: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
        if arguments[0] == "flwr-serverapp":
            script = _beside(arguments[0])
            arguments = [sys.executable, "-P", "-c", RUN, unpack_whole.__name__, script, *arguments[1:]]
        return subprocess.Popen(arguments, **settings)

    vars(subprocess_executor).update(subprocess=SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))


def unpack_whole() -> None:
    """Unpack a run's app into a temporary folder first."""
    install = flwr_install.validate_and_install

    def install_whole(app: Path, fab_hash: str, fab_name: str | None, into: Path | None, *more: bool) -> Path:
        apps = (into or utils.get_flwr_home()) / constant.APP_DIR
        if any(apps.glob(f"*.{fab_hash[: constant.FAB_HASH_TRUNCATION]}")):  # it is there, and is only named
            return install(app, fab_hash, fab_name, into, *more)
        try:
            apps.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=apps) as folder:
                made = install(app, fab_hash, fab_name, Path(folder), *more)
                return made.rename(apps / made.name)
        except OSError as error:
            problem = f"the run's app cannot be unpacked ({error.strerror})"
            if path := os.environ.get(journal.JOURNAL):
                journal.append(path, {"kind": journal.CONNECTION, "problem": f"{problem} in {apps}"})
            raise RuntimeError(problem) from None

    vars(flwr_install).update(validate_and_install=install_whole)
