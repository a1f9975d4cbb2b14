"""Runs in Flower's simulation engine: how they end, what they report, and that they leave nothing behind."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
from hypothesis import given, strategies as st

from kindred.server_app import processes, simulation as flower, workspace
from kindred.server_app.flower_app import toml
from kindred.server_app.run_log import Log

from .background_commands import PATIENCE

ROOT = Path(__file__).resolve().parent.parent

PYPROJECT = """
[project]
name = "small"
version = "0.1.0"
description = "For these tests"
license = "Apache-2.0"
dependencies = ["a-package-that-does-not-exist"]
[tool.flwr.app]
publisher = "kindred"
fab-include = ["small/*.py"]
[tool.flwr.app.components]
serverapp = "small.server:app"
clientapp = "small.client:app"
[tool.flwr.app.config]
ending = "well"
results = ""
seconds = 0.0
rate = 0.1
flag = true
number = 0
"""

CLIENT = """
import time
from logging import INFO
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore import log
app = ClientApp()

@app.query()
def query(message, context):
    if context.run_config["seconds"]:
        log(INFO, "kindred: at work")
        time.sleep(context.run_config["seconds"])
    return Message(RecordDict(), reply_to=message)
"""

SERVER = """
import os, time
from logging import INFO, WARNING
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.supercore import log
app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    log(INFO, "kindred: settings %r %r %r %r", config["results"], config["rate"], config["flag"], config["number"])
    log(INFO, "not worth showing")
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.05)
    for number in (1, 2):
        asked = {*grid.push_messages([Message(RecordDict(), dst_node_id=n, message_type="query") for n in nodes])}
        log(INFO, "round  %d/2", number) if number == 1 else None
        answered = []
        while len(answered) < len(asked):
            time.sleep(0.02)
            answered += grid.pull_messages(asked - {reply.metadata.reply_to_message_id for reply in answered})
    log(WARNING, "a client was slow")
    log(WARNING, "a client was slow")
    if config["ending"] == "badly":
        raise KeyError("the server fell over")
    os.mkdir(config["results"])
    log(INFO, "kindred: results in %s", config["results"])
"""

DRIVER = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
from pathlib import Path
from kindred.server_app.simulation import run_simulation
outcome = run_simulation(json.loads(sys.argv[2]), app_dir=Path(sys.argv[1]), num_clients=2,
                         on_line=lambda line: print(line, flush=True))
print(json.dumps([outcome.code, outcome.reason, str(outcome.results)]))
"""


@pytest.fixture(scope="module")
def app_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("an app")
    (folder / "small").mkdir()
    for name, text in {
        "pyproject.toml": PYPROJECT, "small/__init__.py": "", "small/client.py": CLIENT, "small/server.py": SERVER,
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    return folder


def start(app_dir: Path, **run_config) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", DRIVER, str(app_dir), json.dumps(run_config)],
        env=os.environ | {"XDG_STATE_HOME": str(app_dir)}, cwd=app_dir,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def of_app(app_dir: Path) -> list[psutil.Process]:
    """All processes related to the app, whatever their parent."""
    found = []
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("FLWR_HOME", "").startswith(str(app_dir)):
            found.append(process)
    return running(found)


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("kindred-*")]


@pytest.fixture(scope="module")
def two_runs(app_dir):
    """A run that succeeds and one that fails, at the same time."""
    results = app_dir / 'a "folder" \\ with [characters] é'
    well = start(app_dir, results=str(results), rate=1e-05, flag=False, number=-7)
    badly = start(app_dir, ending="badly")
    try:
        ends = [process.communicate(timeout=PATIENCE) for process in (well, badly)]
    finally:
        for process in (well, badly):
            process.kill()
    pids = {f"kindred-{process.pid}-" for process in (well, badly)}
    temporary = [name for name in left_in(Path("/tmp")) if any(name.startswith(prefix) for prefix in pids)]
    yield results, [(out.splitlines(), err) for out, err in ends], temporary


@pytest.mark.engine
def test_a_run_succeeds_with_the_settings_given(two_runs) -> None:
    results, ((lines, errors), _), _ = two_runs
    assert errors == ""
    assert lines[:-1] == [
        "starting Flower's simulation engine, which takes some seconds",
        f"settings {str(results)!r} 1e-05 False -7",
        "round  1/2",
        "warning: a client was slow",
        f"results in {results}",
    ]
    assert json.loads(lines[-1]) == [0, "", str(results)]
    log = (results / "log.txt").read_text()
    assert "not worth showing" in log and "\x1b" not in log


@pytest.mark.engine
def test_a_failed_run_states_its_reason_in_one_line(two_runs, app_dir) -> None:
    _, (_, (lines, errors)), _ = two_runs
    assert errors == ""
    assert lines[2:-1] == ["round  1/2", "warning: a client was slow"]
    code, reason, _ = json.loads(lines[-1])
    (kept,) = (app_dir / "kindred" / "logs").iterdir()
    assert (code, reason) == (1, f"KeyError: 'the server fell over' (log: {kept})")
    assert "Traceback" in kept.read_text()


@pytest.mark.engine
def test_runs_leave_no_process_and_no_file(two_runs, app_dir) -> None:
    _, _, temporary = two_runs
    assert of_app(app_dir) == []
    assert left_in(app_dir / "kindred" / "simulations") == []
    assert temporary == []


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return running(psutil.Process(process.pid).children(recursive=True))


@pytest.mark.deployment
@pytest.mark.engine
def test_interrupted_runs_leave_no_process(app_dir) -> None:
    """One run ends by Ctrl-C, one by SIGKILL, which it cannot handle."""
    interrupted, killed = runs = [start(app_dir, seconds=4 * PATIENCE) for _ in range(2)]
    try:
        for process in runs:
            assert "at work\n" in process.stdout
        families = [family(process) for process in runs]
        assert all(len(processes) > 5 for processes in families)
        interrupted.send_signal(signal.SIGINT)
        out, errors = interrupted.communicate(timeout=PATIENCE)
        assert json.loads(out.splitlines()[-1]) == [130, "ended by SIGINT", "None"]
        assert errors == ""
        assert running(families[0]) == []
        assert len(running(families[1])) > 5
        killed.kill()
        killed.communicate(timeout=PATIENCE)
        deadline = time.monotonic() + 60
        while running(families[1]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert running(families[1]) == []
        assert of_app(app_dir) == []
        assert all(str(interrupted.pid) not in name for name in left_in(app_dir / "kindred" / "simulations"))
    finally:
        for process in runs:
            process.kill()
            process.communicate()


def test_a_process_that_ends_slowly_is_awaited(monkeypatch) -> None:
    """Its parent has ended by then, and the process itself has no mark."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    start_it = f"import subprocess; print(subprocess.Popen({sleep}, env={{}}).pid, flush=True); {sleep[-1]}"
    parent = subprocess.Popen(
        [sys.executable, "-c", start_it], stdout=subprocess.PIPE, text=True, env={**os.environ, processes.MARK: "a-run"}
    )
    child = psutil.Process(int(parent.stdout.readline()))
    kill, killed = psutil.Process.kill, []

    def slow(process: psutil.Process) -> None:
        killed.append(process)
        if process != child or killed.count(child) > 2:
            kill(process)

    try:
        monkeypatch.setattr(psutil.Process, "kill", slow)
        processes.kill_processes("a-run")
        assert running([psutil.Process(parent.pid), child]) == []
        assert killed.count(child) == 3
    finally:
        for process in running([child]):
            kill(process)
        parent.kill()
        parent.communicate()


def test_only_one_process_is_stopped_at_a_time(monkeypatch) -> None:
    """One that is stopped when its killer is killed would stay so for ever."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    marked = os.environ | {processes.MARK: "a-run"}
    started = [subprocess.Popen(sleep, env=marked) for _ in range(3)]
    kill, asked = psutil.Process.kill, []
    try:
        monkeypatch.setattr(psutil.Process, "suspend", lambda each: asked.append(("stop", each.pid)))
        monkeypatch.setattr(psutil.Process, "kill", lambda each: asked.append(("kill", each.pid)) or kill(each))
        processes.kill_processes("a-run")
        assert asked == [(what, pid) for _, pid in asked[::2] for what in ("stop", "kill")]
        assert {pid for _, pid in asked} == {process.pid for process in started}
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.engine
def test_ports_in_use_give_one_line_and_code_2_and_leave_no_process(app_dir, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(app_dir))
    (app_dir / "kindred" / "simulations").mkdir(parents=True, exist_ok=True)
    folder_of_a_killed_process(app_dir / "kindred" / "simulations")
    (mine := app_dir / "kindred" / "simulations" / "kindred-99999-mine").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(flower, "_free_port", lambda: port)
        monkeypatch.setattr(flower, "ATTEMPTS", 2)
        code, reason, results, _ = flower.run_simulation({}, app_dir=app_dir, num_clients=2)
    assert (code, results) == (2, None)
    assert str(port) in reason and "\n" not in reason
    assert of_app(app_dir) == []
    assert left_in(app_dir / "kindred" / "simulations") == [mine.name]
    mine.rmdir()


def folder_of_a_killed_process(parent: Path) -> Path:
    """A working folder with a marker, of a process that was killed."""
    script = (
        "import sys; from pathlib import Path; from kindred.server_app.workspace import OwnFolder\n"
        "folder = OwnFolder(Path(sys.argv[1])); print(folder.path, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", script, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    path = Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()
    assert path.is_dir()
    return path


def test_only_marked_folders_of_processes_that_have_ended_are_removed(tmp_path) -> None:
    parent, elsewhere = tmp_path / "tmp", tmp_path / "elsewhere"
    parent.mkdir()
    dead = folder_of_a_killed_process(parent)
    (dead / "app").mkdir()
    (dead / "app" / "log.txt").write_text("of the run")
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("ours alone")
    (dead / "link").symlink_to(elsewhere)

    marker = (dead / workspace.MARKER).read_text()
    kept = [parent / f"kindred-99999-{name}" for name in ("unmarked", "other", "elsewhere", "linked", "pipe")]
    unmarked, other, linked_folder, linked_marker, pipe = kept
    for folder in (unmarked, other, linked_marker, pipe):
        folder.mkdir()
        (folder / "thesis.txt").write_text("a user's")
    (other / workspace.MARKER).write_text("a user's too")
    (elsewhere / workspace.MARKER).write_text(marker)  # a folder of ours, but in another place
    linked_folder.symlink_to(elsewhere)
    (linked_marker / workspace.MARKER).symlink_to(elsewhere / workspace.MARKER)
    os.mkfifo(pipe / workspace.MARKER)
    live = workspace.OwnFolder(parent)
    renamed = live.path.rename(parent / "kindred-99999-alive")  # the lock decides, not the process number

    new = workspace.OwnFolder(parent)
    assert sorted(parent.iterdir()) == sorted([*kept, renamed, new.path])
    assert (unmarked / "thesis.txt").read_text() == "a user's"
    assert (elsewhere / "thesis.txt").read_text() == "ours alone"
    new.remove()
    assert not new.path.exists()


def test_a_folder_that_cannot_be_removed_keeps_its_marker(tmp_path, monkeypatch) -> None:
    folder = folder_of_a_killed_process(tmp_path)
    (folder / "log.txt").write_text("of the run")

    def fail(path: Path) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        workspace.OwnFolder(tmp_path)
    assert (folder / workspace.MARKER).exists()
    workspace.OwnFolder(tmp_path)
    assert not folder.exists()


def logged(text: str) -> tuple[Log, list[str]]:
    lines: list[str] = []
    log = Log(io.StringIO(), lines.append)
    for line in text.splitlines(keepends=True):
        log.add(line)
    return log, lines


def test_bad_input_found_by_the_app_gives_code_2_and_the_app_s_message() -> None:
    log, lines = logged(
        "\x1b[91mERROR \x1b[0m:     Simulation raised an exception\n"
        "Traceback (most recent call last):\n"
        '  File "app.py", line 1, in main\n'
        "    run(config)\n"
        "kindred.server_app.config.ConfigError: num-rounds is 0, allowed: 1 to 1,000,000 (int)\n"
        "\x1b[91mERROR \x1b[0m:     Exit Code: 700\n"
    )
    assert lines == []
    assert log.failure("whatever")[:2] == (2, "num-rounds is 0, allowed: 1 to 1,000,000 (int)")


def test_the_reason_of_a_failure_is_the_last_exception_not_raised_by_flower() -> None:
    log, _ = logged(
        "Traceback (most recent call last):\n"
        '  File "client.py", line 1, in <module>\n'
        "OSError: a first one\n"
        "\n"
        "During handling of the above exception, another exception occurred:\n"
        "\n"
        "Traceback (most recent call last):\n"
        '  File "client.py", line 2, in <module>\n'
        "ray.exceptions.RaySystemError: no memory\n"
        "\n"
        "The above exception was the direct cause of the following exception:\n"
        "\n"
        "Traceback (most recent call last):\n"
        '  File "run_simulation.py", line 3, in _main_loop\n'
        "RuntimeError: An error was encountered. Ending simulation.\n"
    )
    assert log.failure("")[:2] == (1, "RaySystemError: no memory")


@pytest.mark.parametrize(
    ("details", "says"),
    [
        ("", "the app cannot be loaded"),
        ("The federation is not there\nand more", "The federation is not there"),
        ("No heartbeat received from the task", "memory"),
    ],
)
def test_a_failure_without_exception_has_a_reason_of_one_line(details, says) -> None:
    log, _ = logged("INFO :      Starting\nError: the app cannot be loaded\n\n")
    code, reason, *_ = log.failure(details)
    assert code == 1
    assert says in reason and "\n" not in reason


def test_a_warning_of_many_clients_is_shown_once() -> None:
    _, lines = logged(
        "(ClientAppActor pid=1, ip=192.0.2.1) WARNING :   no data\n"
        "(ClientAppActor pid=2) WARNING :   no data\n"
        "INFO :  round 1/2\n"
        "ERROR :     another\nERROR :     another\nINFO :  round 1/2\n"
    )
    assert lines == ["warning: no data", "round 1/2", "error: another", "round 1/2"]


def test_the_lines_of_rounds_and_of_the_evaluations_around_them_are_shown() -> None:
    evaluations = [f"{title} evaluation  accuracy 9.4%" for title in ("opening", "closing")]
    _, lines = logged("".join(f"INFO :  {text}\n" for text in [*evaluations, "round 1/2", "Starting fedamp strategy"]))
    assert lines == [*evaluations, "round 1/2"]


@given(st.dictionaries(
    st.from_regex(r"[a-z][a-z-]{0,8}", fullmatch=True),
    st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False),
              st.text(st.characters(exclude_categories=["Cs"]))),
))  # fmt: skip
def test_settings_are_unchanged_after_writing_and_reading(values) -> None:
    read = tomllib.loads(toml(values))
    assert read == values
    assert {key: type(value) for key, value in read.items()} == {key: type(value) for key, value in values.items()}
