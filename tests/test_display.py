"""Display of commands at work: a bar in a terminal, plain lines in a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kindred.engine.arrivals import INTERVAL, LINE, counted
from kindred.server_app.cli.display import Display, displayed

KINDRED = [sys.executable, "-P", "-m", "kindred"]
SMALL = [
    "--clients=4",
    "--rounds=2",
    "--set=samples-per-client=40",
    "--set=local-epochs=60",
    "--workers=2",
    "--output-dir=out",
]


def in_a_terminal(*arguments: str, folder: Path) -> tuple[str, float]:
    """Run a command in a pseudo-terminal; return what it wrote, and the longest silence in seconds."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "XDG_STATE_HOME": str(folder / "state")}
    process = subprocess.Popen(
        [*KINDRED, *arguments], stdout=theirs, stderr=theirs, stdin=theirs, cwd=folder, env=environment
    )
    os.close(theirs)
    written, longest, last = b"", 0.0, time.monotonic()
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the last process has closed the terminal
            break
        if not part:
            break
        now = time.monotonic()
        written, longest, last = written + part, max(longest, now - last), now
    os.close(ours)
    assert process.wait() == 0, written.decode(errors="replace")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()), longest


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_a_run_in_a_terminal_shows_a_bar_of_its_clients_and_is_never_silent(engine, tmp_path) -> None:
    options = [each for each in SMALL if engine == "local" or "workers" not in each]
    shown, silence = in_a_terminal("run", "--engine", engine, *options, folder=tmp_path)
    assert re.search(r"round 1/2 \S+ [0-4]/4 clients", shown) and "meeting the clients" in shown
    assert re.search(r"round 2/2  accuracy .* 4/4 clients", shown) and "heurfedamp" in shown.split("best %")[-1]
    assert silence < 10  # 2 on a machine without other work
    (log,) = tmp_path.glob("out/*/log.txt")
    assert not any(LINE.search(line) for line in log.read_text().splitlines())


def test_a_comparison_in_a_terminal_shows_which_of_its_runs_it_is_at(tmp_path) -> None:
    shown, silence = in_a_terminal("compare", "--strategies=local,fedavg", "--seeds=0", *SMALL, folder=tmp_path)
    for run in ("run 1/2  local, seed 0", "run 2/2  fedavg, seed 0"):
        assert re.search(rf"{run}  round 1/2 \S+ [0-4]/4 clients", shown)
    assert silence < 10


def test_the_bar_names_what_is_done_now() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown, named = Display(Terminal(), "starting"), []
    lines = [
        "local on digits", "round 1/2: 3 of 4 clients", "warning: full", "round 1/2  accuracy 50.0%",
        "round 2/2  accuracy 50.0%", "closing evaluation  accuracy 50.0%", "results in out", "", "fedavg",
    ]  # fmt: skip
    for line in lines:
        shown.show(line)
        named.append(shown._bar.tasks[0].description)
    assert named == ["starting", *["round 1/2"] * 3, "results", "results", *["starting"] * 3]


def test_in_a_pipe_there_are_plain_lines_and_no_bar(capsys) -> None:
    with displayed("starting") as shown:
        shown.show("round 1/2: 3 of 4 clients")
        shown.show("round 1/2  accuracy 50.0%")
    assert capsys.readouterr().out == "round 1/2: 3 of 4 clients\nround 1/2  accuracy 50.0%\n"


def test_arrived_replies_are_reported_in_intervals(monkeypatch, caplog) -> None:
    monkeypatch.setenv(INTERVAL, "0.0")
    assert list(counted("round 3/9", "abc", 3)) == ["a", "b", "c"]
    assert caplog.messages == [f"kindred: round 3/9: {done} of 3 clients" for done in range(3)]
    caplog.clear()
    monkeypatch.delenv(INTERVAL)
    assert list(counted("round 3/9", "abc", 3)) == ["a", "b", "c"] and not caplog.messages
