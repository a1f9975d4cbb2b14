"""Changes in Flower's processes: pauses, and clients that are forks of a process with all imports done."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from flwr.cli import install
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient

from kindred.client import journal
from kindred.server_app.deployment import hooks

from .background_commands import PATIENCE, wait_until

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere clients start as Flower starts them")


def lines_of(path: Path, count: int) -> list[str]:
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) >= count)
    return path.read_text().splitlines()


def test_each_line_of_arguments_starts_a_process_with_everything_imported(tmp_path) -> None:
    cli = tmp_path / "modules" / "flwr" / "supernode" / "cli"
    cli.mkdir(parents=True)
    for package in cli.parents[:2]:
        (package / "__init__.py").touch()
    (tmp_path / "modules" / "torch.py").write_text("import os\nimported_by = os.getpid()\n")
    (cli / "__init__.py").write_text(f"""
import os, sys, torch
def flwr_clientapp():
    with open({str(tmp_path / "said")!r}, "a") as file:
        print(sys.argv, os.getpid(), os.getppid() == torch.imported_by and os.path.samefile(0, os.devnull), file=file)
    return len(sys.argv)
""")
    forks = subprocess.Popen(
        [sys.executable, "-P", "-c", hooks.FORKS],
        stdin=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "modules")},
    )
    for arguments in (["flwr-clientapp", "--token", "a b"], ["flwr-clientapp"]):
        forks.stdin.write(json.dumps(arguments) + "\n")
        forks.stdin.flush()
    first, second = sorted(lines_of(tmp_path / "said", 2), key=len, reverse=True)
    forks.stdin.close()
    assert forks.wait(PATIENCE) == 0
    assert first.startswith("['flwr-clientapp', '--token', 'a b'] ")
    assert second.startswith("['flwr-clientapp'] ")
    assert first.endswith(" True")
    assert second.endswith(" True")
    assert len({first.split()[-2], second.split()[-2], str(forks.pid)}) == 3


@linux
def test_clients_are_started_by_the_warm_process_and_other_tasks_by_flower(tmp_path, monkeypatch) -> None:
    said, started = tmp_path / "said", []
    monkeypatch.setattr(subprocess_executor, "subprocess", subprocess_executor.subprocess)  # restored at the end
    monkeypatch.setattr(
        hooks,
        "FORKS",
        f"""
import os, sys
for line in sys.stdin:
    with open({str(said)!r}, "a") as file:
        print(os.getpid(), line, end="", file=file)
    if "last" in line:
        sys.exit()
""",
    )
    popen = subprocess.Popen

    def recorded(arguments, **settings):
        if "-c" not in arguments:
            return started.append(arguments)
        process = popen(arguments, **settings)
        forks.append(process)
        return process

    forks: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess, "Popen", recorded)
    hooks.warm_up()

    def launch(token: str, task: TaskType = TaskType.CLIENT_APP) -> None:
        subprocess_executor.SubprocessExecutor().launch(ExecutionSpec(
            task_type=task, runtime_api_address="127.0.0.1:9", token=token, insecure=True, root_certificates_path=None,
            runtime_dependency_install=False, parent_pid=7, suppress_output=False, task_id=1, fab_hash=None,
        ))  # fmt: skip

    def expected(token: str) -> list[str]:
        return [
            "flwr-clientapp",
            "--runtime-api-address",
            "127.0.0.1:9",
            "--token",
            token,
            "--insecure",
            "--parent-pid",
            "7",
        ]

    launch("first")
    launch("last")
    assert forks[0].wait(PATIENCE) == 0
    launch("again")
    lines = [line.split(maxsplit=1) for line in lines_of(said, 3)]
    assert [json.loads(arguments) for _, arguments in lines] == [expected(t) for t in ("first", "last", "again")]
    assert [int(pid) for pid, _ in lines] == [forks[0].pid, forks[0].pid, forks[1].pid]
    launch("server", TaskType.SERVER_APP)
    assert [arguments[0] for arguments in started] == ["flwr-serverapp"]
    forks[1].stdin.close()
    assert forks[1].wait(PATIENCE) == 0


def test_a_supernode_waits_longer_the_longer_no_message_has_arrived(monkeypatch) -> None:
    clock, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    pauses = hooks.Pauses()
    pauses.sleep(3)
    clock[0] = 120.0
    pauses.sleep(3)
    clock[0] = 1000.0
    pauses.sleep(3)
    pauses.sleep(0.5)  # a client is working
    pauses.sleep(3)
    assert slept == [0.5, 2.0, 3, 0.1, 0.5]


def test_a_supernode_ends_when_its_client_starter_has_ended(monkeypatch) -> None:
    class Ended(Exception):
        pass

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    pauses = hooks.Pauses()
    pauses.superexec = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pauses.sleep(3)
    pauses.superexec.stdin.close()
    pauses.superexec.wait(PATIENCE)
    with pytest.raises(Ended, match="1"):
        pauses.sleep(3)


def test_a_supernode_has_these_pauses_and_a_warm_process(monkeypatch) -> None:
    started = []
    for name in ("time", "subprocess", "_pull_and_store_message"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))  # restored at the end
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/flower-supernode"])
    hooks.quicken_supernode()
    assert isinstance(start_client_internal.time, hooks.Pauses)
    monkeypatch.setattr(subprocess, "Popen", lambda command: started.append(command) or "the process")
    start_client_internal.subprocess.Popen(["flower-superexec", "--insecure"])
    assert start_client_internal.time.superexec == "the process"
    (command,) = started
    assert command[-4:] == [str(os.getpid()), "warm_up", "/somewhere/bin/flower-superexec", "--insecure"]


@pytest.fixture
def app(tmp_path, monkeypatch) -> Callable[[], Path]:
    """Unpack an app of two files with `unpack_whole`; return its folder."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(install, "validate_and_install", install.validate_and_install)  # restored at the end
    hooks.unpack_whole()
    source = tmp_path / "source"
    source.mkdir()
    (source / "LICENSE").write_text("free")
    (source / "pyproject.toml").write_text(
        '[project]\nname = "app"\nversion = "1.0.0"\nlicense = "MIT"\n[tool.flwr.app]\npublisher = "us"\n'
        '[tool.flwr.app.components]\nserverapp = "a:b"\nclientapp = "a:b"\n'
    )
    return lambda: install.validate_and_install(source, "0123456789", None, None, True)


def test_an_app_that_does_not_fit_on_the_disk_leaves_nothing_and_is_unpacked_later(app, tmp_path, monkeypatch) -> None:
    written = []

    def full(source, target):
        written.append(Path(target).write_bytes(b""))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    monkeypatch.setenv(journal.JOURNAL, str(tmp_path / "journal"))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError) as raised:
        patch.setattr(shutil, "copy2", full)
        app()
    assert str(raised.value) == "the run's app cannot be unpacked (No space left on device)"  # without a path
    apps = tmp_path / "home" / "apps"
    assert written and list(apps.iterdir()) == []
    assert str(apps) in json.loads((tmp_path / "journal").read_text())["problem"]
    folder = app()
    assert folder == app() and list(apps.iterdir()) == [folder]
    assert sorted(path.name for path in folder.iterdir()) == ["LICENSE", "pyproject.toml"]


def test_an_app_that_is_unpacked_is_used_although_the_disk_is_full(app, monkeypatch) -> None:
    folder = app()
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *_: pytest.fail("a write"))
    assert app() == folder


def test_the_process_that_starts_runs_is_started_again_until_it_is_asked_to_end(monkeypatch, capfd) -> None:
    monkeypatch.setattr(hooks, "SUPEREXEC_PAUSE", 0.1)
    started = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    superexec = hooks.SuperExec(start)
    started[0].kill()
    wait_until(lambda: len(started) == 2)
    assert "flower-superexec ended with code -9, and is started again" in capfd.readouterr().err
    superexec.terminate()
    assert superexec.wait(PATIENCE) == -signal.SIGTERM
    superexec.join(PATIENCE)
    assert len(started) == 2 and not superexec.is_alive()


class Fleet(httpx.BaseTransport):
    """Answers each path with a status, or with an error that it raises."""

    def __init__(self, answers: dict[str, int | Exception]) -> None:
        self.answers = answers

    def handle_request(self, request):
        answer = self.answers.get(request.url.path.rpartition("/")[2], 200)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer, request=request)


NO_TLS = httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number")


@pytest.mark.parametrize(
    ("call", "request_", "path", "answer", "raised"),
    [
        ("PullMessages", PullMessagesRequest, "pull-messages", NO_TLS, httpx.ReadError),
        ("PullMessages", PullMessagesRequest, "pull-messages", 500, httpx.ReadError),
        ("SendNodeHeartbeat", SendNodeHeartbeatRequest, "send-node-heartbeat", 500, httpx.ReadError),
        ("SendNodeHeartbeat", SendNodeHeartbeatRequest, "send-node-heartbeat", 401, httpx.HTTPStatusError),
        ("PushObject", PushObjectRequest, "push-object", NO_TLS, httpx.ReadError),
        ("PushObject", PushObjectRequest, "push-object", 500, httpx.HTTPStatusError),
        ("ActivateNode", ActivateNodeRequest, "activate-node", NO_TLS, httpx.ConnectError),
        ("DeactivateNode", DeactivateNodeRequest, "deactivate-node", NO_TLS, httpx.ConnectError),
    ],
)
def test_flower_tries_again_after_errors_that_would_end_a_supernode(
    call, request_, path, answer, raised, monkeypatch
) -> None:
    """Flower tries again after a ReadError, unless its text is about TLS."""
    monkeypatch.setattr(FleetHttpClient, "_unary_unary", FleetHttpClient._unary_unary)  # restored at the end
    main = flower_supernode.__globals__
    monkeypatch.setitem(main, "start_client_internal", main["start_client_internal"])
    reading, writing = os.pipe()
    with open(reading, "rb", 0) as contact, open(writing, "wb"):
        hooks.persist(writing)
        client = FleetHttpClient("https://server")
        client._client = httpx.Client(transport=Fleet({path: answer}))
        with pytest.raises(raised) as error:
            getattr(client, call)(request_())
        assert raised is not httpx.ReadError or "SSL" not in str(error.value)
        client._client = httpx.Client(transport=Fleet({}))
        client.SendNodeHeartbeat(SendNodeHeartbeatRequest())
        said = contact.read(4096).decode().splitlines()
    told = path in ("pull-messages", "send-node-heartbeat", "activate-node")
    assert [bool(line) for line in said] == [True] * told + [False] * (path == "send-node-heartbeat" or not told)
    assert not told or ("SSL" if answer is NO_TLS else str(answer)) in said[0]


def test_a_supernode_whose_main_loop_ends_ends_too(monkeypatch) -> None:
    main, codes = flower_supernode.__globals__, []
    monkeypatch.setattr(FleetHttpClient, "_unary_unary", FleetHttpClient._unary_unary)
    monkeypatch.setitem(main, "start_client_internal", lambda **settings: codes.append(settings))
    monkeypatch.setattr(os, "_exit", codes.append)
    hooks.persist(1)
    main["start_client_internal"](insecure=True)
    assert codes == [{"insecure": True}, 1]
