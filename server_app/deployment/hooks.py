"""Changes to Flower's processes that `kindred server` and `kindred site` start.

A hook is a function of this module. Such a process calls it before Flower's command begins:

- `guard_superlink`: the SuperLink takes orders only from its own user, refuses apps with code of their own, strangers
  cannot exhaust its memory, and a busy disk does not end its runs;
- `quicken_supernode`: after a message the SuperNode asks for the next one sooner than after Flower's 3 s; it refuses
  apps with code of their own, and has `warm_up` called in the flower-superexec that it starts;
- `warm_up`: the process that works on a message is a fork of one that has imported PyTorch and Flower. A new process
  would spend seconds on these imports.

Each hook replaces a name in one of Flower's modules. So the hooks depend on the version of Flower that pyproject.toml
names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kindred.lazy import lazy
from kindred.server_app.processes import END_WITH_PARENT

# Each of Flower's processes imports only the modules that its own hook changes.
if TYPE_CHECKING:
    import fastapi
    import uvicorn
    from flwr import app as flower
    from flwr.common import constant
    from flwr.supercore import sql_mixin
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.superlink import main as superlink
    from flwr.superlink.servicer.control import control_handlers
    from flwr.supernode import start_client_internal

    from kindred.client import journal

    from . import bundle, guard
else:
    fastapi, flower, constant = lazy("fastapi"), lazy("flwr.app"), lazy("flwr.common.constant")
    control_handlers = lazy("flwr.superlink.servicer.control.control_handlers")
    journal, bundle = lazy("kindred.client.journal"), lazy("kindred.server_app.deployment.bundle")
    uvicorn, superlink, sql_mixin = lazy("uvicorn"), lazy("flwr.superlink.main"), lazy("flwr.supercore.sql_mixin")
    start_client_internal = lazy("flwr.supernode.start_client_internal")
    subprocess_executor = lazy("flwr.supercore.superexec.executor.subprocess_executor")
    guard = lazy("kindred.server_app.deployment.guard")

# How long in ms a request waits for the SuperLink's database; Flower's clients wait 30 s for the answer.
DATABASE_PATIENCE = "25000"

# Runs a command of Flower's. It ends, with all that it started, when the process whose id is its first argument ends,
# even by SIGKILL.
START = f"""{END_WITH_PARENT}
import runpy
hook = sys.argv.pop(1)
if hook:
    from kindred.server_app.deployment import hooks
    getattr(hooks, hook)()
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
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


def quicken_supernode() -> None:
    """Shorten the pauses of the SuperNode that this process will start, and the start of its clients."""
    pauses = Pauses()

    def start_superexec(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        script = os.path.join(os.path.dirname(sys.argv[0]), arguments[0])  # beside flower-supernode
        pauses.superexec = subprocess.Popen(command(script, arguments[1:], warm_up))
        return pauses.superexec

    vars(start_client_internal).update(time=pauses, subprocess=SimpleNamespace(Popen=start_superexec))
    _refuse_apps()


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
        return subprocess.Popen([sys.executable, "-P", "-c", FORKS], stdin=subprocess.PIPE)

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
    vars(superlink).update(create_app=create_guarded_app)
    uvicorn.run = partial(serve, http=guard.Connection, ws="none")
