"""Changes in Flower's processes: pauses, and clients that are forks of a process with all imports done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.supernode import start_client_internal

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
