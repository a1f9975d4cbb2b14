"""`kindred compare --jobs`: several runs at once give the same bits, and none is left behind."""

from __future__ import annotations

import json
import multiprocessing
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

import kindred
from kindred.server_app import checks, engines, jobs, machine
from kindred.server_app.comparison import runs as comparison_runs
from kindred.server_app.comparison.plan import make_plan
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.engines import Engine
from kindred.server_app.jobs import execute_runs
from kindred.server_app.run_log import Outcome

from .background_commands import HEEDING, KINDRED, PATIENCE
from .test_display import in_a_terminal

SMALL = ["--clients=4", "--rounds=2", "--set=samples-per-client=20", "--set=local-epochs=1"]
TIMES = ("started", "finished", "folder", "platform")  # these and seconds differ from run to run


def command(*arguments: str) -> list[str]:
    return [KINDRED, "compare", "--strategies=local,heurfedamp", *arguments]


def without_times(content):
    """Return JSON without the values that differ from run to run."""
    if isinstance(content, dict):
        return {key: without_times(each) for key, each in content.items() if key not in TIMES and "seconds" not in key}
    return [without_times(each) for each in content] if isinstance(content, list) else content


def results_in(place: Path) -> tuple[dict, dict[str, dict[str, bytes]]]:
    """Return the content of the comparison, and by run the bytes of its models and the names of its files."""
    (path,) = place.glob("compare-*/comparison.json")
    content = json.loads(path.read_text())
    files = {}
    for name, each in content["strategies"].items():
        for run in each["runs"]:
            folder = path.parent / run["folder"]
            found = {str(file.relative_to(folder)): b"" for file in folder.rglob("*") if file.is_file()}
            for file in (folder / "models").iterdir():
                arrays = load_file(file)
                found[f"models/{file.name}"] = b"".join(arrays[key].tobytes() for key in sorted(arrays))
            files[f"{name} {run['seed']}"] = found
    content.pop("command")
    return without_times(content), files


@pytest.mark.parametrize("engine", [pytest.param("inline", marks=pytest.mark.deployment), "local"])
def test_runs_at_once_give_the_same_bits_and_files_as_one_after_another(engine, tmp_path) -> None:
    found = []
    for number in (1, 2):
        place = tmp_path / str(number)
        more = ["--seeds=0,1", f"--engine={engine}", f"--output-dir={place}"]
        subprocess.run([*command(f"--jobs={number}"), *more, *SMALL], check=True, capture_output=True)
        found.append(results_in(place))
    (content, files), (content_at_once, files_at_once) = found
    content["settings"].pop("output-dir"), content_at_once["settings"].pop("output-dir")
    assert content == content_at_once and files == files_at_once and len(files) == 4


def test_python_runs_at_once_too(tmp_path, capsys) -> None:
    small = {"clients": 4, "rounds": 1, "samples_per_client": 20, "local_epochs": 1}
    done = kindred.compare(["local", "heurfedamp"], output=tmp_path, jobs=2, **small)
    assert not done.failed and len(done.runs) == 2
    said = capsys.readouterr().out
    assert "run 1: finished\n" in said and "run 2: finished\n" in said
    with pytest.raises(ConfigError, match="jobs is 0, allowed"):
        kindred.compare(["local"], output=tmp_path, jobs=0, **small)


@pytest.mark.deployment
def test_no_run_outlives_the_command_which_then_continues(tmp_path) -> None:
    arguments = command("--jobs=2", "--clients=4", "--rounds=60", "--set=samples-per-client=20", "--output-dir=out")
    for number in (signal.SIGINT, signal.SIGKILL):
        lines, writing = [], set()
        with subprocess.Popen(
            [sys.executable, "-c", HEEDING, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        ) as process:  # fmt: skip
            for line in process.stdout:
                lines.append(line)
                if found := re.match(r"run (\d): round +(?!1/)\d+/60 ", line):
                    writing.add(found[1])
                if writing == {"1", "2"}:
                    break
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            said, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        assert psutil.wait_procs(children, timeout=60)[1] == []
        if number == signal.SIGKILL:
            assert all(": resumed, " in line for line in lines[1:3])
        else:
            assert lines[1:3] == ["run 1/2  local, seed 0\n", "run 2/2  heurfedamp, seed 0\n"]
            assert said.count("ended by SIGINT; the same command continues") == 2 and errors == ""
        folders = {path.name for path in (tmp_path / "out").glob("*/checkpoints")}
        assert folders == {"checkpoints"} and len(list((tmp_path / "out").glob("*/config.json"))) == 2
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert done.count(": resumed, ") == 2 and done.count(": finished\n") == 2
    assert len(list((tmp_path / "out").glob("*/config.json"))) == 2


def test_a_run_whose_process_is_killed_has_failed_and_the_others_run(tmp_path) -> None:
    given = {"num_clients": 4, "samples_per_client": 20, "output_dir": str(tmp_path)}
    configs = [Config(strategy="local", num_rounds=10000, **given), Config(strategy="local", num_rounds=1, **given)]
    lines = []

    def on_line(line: str) -> None:
        lines.append(line)
        if re.match(r"run 1: round +1/", line):
            min(multiprocessing.active_children(), key=lambda process: process.pid).kill()

    outcomes = dict(execute_runs(iter(enumerate(configs, 1)), Engine("inline", jobs=2), on_line))
    assert outcomes[1] == Outcome(1, "the process of the run was killed by signal 9, most often for lack of memory")
    assert outcomes[2].code == 0 and (outcomes[2].results / "summary.json").exists()
    assert lines[-1] == "run 2: finished" and not multiprocessing.active_children()


def test_equal_runs_are_run_once(tmp_path) -> None:
    own = {name: {"strategy": "fedavg"} for name in ("one", "two")}
    plan = make_plan(["one", "two", "local"], {"output-dir": str(tmp_path)}, own)
    given, said = [], []

    def execute(runs):
        given.extend(runs)  # all at once
        for number, _ in reversed(given):
            yield number, Outcome(1, "it broke")

    content, code = comparison_runs.carry_out(plan, execute, said.append, {}, ["kindred"])
    assert [number for number, _ in given] == [1, 3] and code == 1
    assert said[2:] == [f"run {at}, seed 0: failed, it broke" for at in ("3/3  local", "1/3  one", "2/3  two")]
    assert list(content["strategies"]) == ["one", "two", "local"]


def test_there_are_not_more_runs_at_once_than_fit_into_memory(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(machine, "CONTAINER", tmp_path)  # none

    class Memory:
        available = 0

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    monkeypatch.setattr(jobs, "_start", lambda *_: pytest.fail("a process has been started"))
    started = []

    def runs():
        for number in (1, 2):
            started.append(number)
            yield number, Config()

    with pytest.raises(pytest.fail.Exception):
        list(execute_runs(runs(), Engine("inline", jobs=2), print))
    assert started == [1]
    config = Config(num_clients=20)
    Memory.available = int(6.5 * psutil.Process().memory_info().rss)
    monkeypatch.setattr(engines, "cpus", lambda: 16)
    assert [engines.workers_of(Engine("local", jobs=each), config) for each in (1, 2, 4, 8)] == [6, 3, 1, 1]
    Memory.available *= 100
    assert [engines.workers_of(Engine("local", jobs=each), config) for each in (1, 2, 4)] == [16, 8, 4]
    assert engines.workers_of(Engine("local", workers=6, jobs=3), config) == 2


@pytest.mark.parametrize(("cpus_each", "most"), [(1, 8), (2, 4)])
def test_runs_at_once_are_bounded_by_the_cpus(cpus_each, most, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(checks, "cpus", lambda: 8)
    config = Config(output_dir=str(tmp_path))
    checks.check_machine(config, Engine("local", cpus_each, jobs=most))
    for number in (0, -1, most + 1):
        with pytest.raises(ConfigError) as refused:
            checks.check_machine(config, Engine("local", cpus_each, jobs=number))
        assert str(refused.value) == (
            f"--jobs is {number}, allowed: 1 to {most}, with 8 CPUs and --cpus-per-client {cpus_each}"
        )


@pytest.mark.deployment
def test_in_a_terminal_the_bar_is_of_runs(tmp_path) -> None:
    small = ["--clients=4", "--rounds=2", "--set=samples-per-client=20", "--set=local-epochs=1", "--output-dir=out"]
    names = "--strategies=local,fedavg,heurfedamp"  # the third runs alone, or beside one that began before it
    shown, silence = in_a_terminal("compare", names, "--jobs=2", *small, folder=tmp_path)
    assert re.search(r"comparing \S+ 0/3 runs +0:0\d", shown)
    assert re.search(r"comparing \S+ [12]/3 runs, \d+:\d\d left", shown)
    assert "run 1: round 2/2  accuracy" in shown and not re.search(r"run \d: .*: \d of 4 clients", shown)
    assert silence < 10
