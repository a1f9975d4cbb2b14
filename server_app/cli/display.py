"""The display of a command at work: its lines, and in a terminal a bar below them."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from kindred.lazy import lazy

if TYPE_CHECKING:  # imported on first use, so that `kindred --help` is quick
    from kindred.engine import arrivals, history
    from kindred.server_app import jobs
else:
    arrivals, history = lazy("kindred.engine.arrivals"), lazy("kindred.engine.history")
    jobs = lazy("kindred.server_app.jobs")

ROUND = re.compile(r"round +(\d+)/(\d+)")
RUN = re.compile(r"(?P<head>run \d+/(?P<total>\d+)  [^:]*)(?P<over>: reused|: failed)?")
OF_ONE = re.compile(r"run \d+: (?P<line>.*)")  # a line of one of several runs at once
OFTEN = "0.25"  # s between two reports of arrived replies


class Display:
    """The lines of a command, and the bar.

    Parameters
    ----------
    file : text stream
        There is a bar if it is a terminal. Nothing else may be written to it meanwhile.
    doing : str
        What the command does first.
    at_once : bool
        Whether several runs of a comparison work at once; the bar is then of runs.
    """

    def __init__(self, file: TextIO, doing: str, at_once: bool = False) -> None:
        self._console = Console(file=file, highlight=False)
        # Not redirected: a forked process must not wait for the bar of this one.
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(24),
            TextColumn("{task.fields[about]}", markup=False), TimeElapsedColumn(),
            console=self._console, transient=True, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False,
            disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(doing, total=None, about="")
        self._at_once = at_once
        self._over, self._finished = 0, 0  # runs at once: those that are over, and of these those that finished now
        self._started = 0.0  # time at which the first one did
        self._run = ""  # of a comparison
        self._began: tuple[float, float] | None = None  # time of the run's first report, and its share of the rounds

    @property
    def has_bar(self) -> bool:
        """Return whether there is a bar."""
        return not self._bar.disable

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, line: str) -> None:
        """Print a line, or show it as the bar if it reports how many clients have answered."""
        if not self.has_bar:
            print(line, file=self._console.file, flush=True)
        elif self._at_once:
            self._show_at_once(line)
        elif found := arrivals.LINE.fullmatch(line):
            done, total = int(found["done"]), int(found["total"])
            about = f"{done}/{total} clients{self._left(found['what'], done / max(total, 1))}"
            doing = f"{self._run}{found['what']}"
            is_new = doing != self._bar.tasks[0].description  # shown at once, however soon it is over
            self._bar.update(self._task, description=doing, completed=done, total=total, about=about, refresh=is_new)
        else:
            if found := RUN.match(line):
                self._run, self._began = f"{found['head']}  ", None
            self._bar.console.print(Text(line), soft_wrap=True)
            if after := _after(line):
                self._bar.update(self._task, description=f"{self._run}{after}", completed=0, total=None, about="")

    def _show_at_once(self, line: str) -> None:
        """Print a line of several runs, and show how many are over; their clients' answers are not shown."""
        if head := RUN.match(line):
            self._over += bool(head["over"])
            self._started = self._started or time.monotonic()
            self._bar.update(self._task, total=int(head["total"]))
        elif (own := OF_ONE.fullmatch(line)) and own["line"] == jobs.FINISHED:
            self._over, self._finished = self._over + 1, self._finished + 1
        elif own and arrivals.LINE.fullmatch(own["line"]):
            return
        self._bar.console.print(Text(line), soft_wrap=True)
        if total := self._bar.tasks[0].total:
            about = f"{self._over}/{total:.0f} runs"
            if self._finished:
                each = (time.monotonic() - self._started) / self._finished
                about += f", {_minutes(each * (total - self._over))} left"
            self._bar.update(self._task, description="comparing", completed=self._over, about=about)

    def _left(self, what: str, share: float) -> str:
        """Return the time that the rounds of the run still take, if it is known, as a text."""
        if not (found := ROUND.match(what)):
            return ""
        number, count = int(found[1]), int(found[2])
        done, now = (number - 1 + (share if what == found[0] else 1)) / count, time.monotonic()
        if self._began is None or done < self._began[1]:
            self._began = now, done
        began, before = self._began
        if done <= before:
            return ""
        return f", {_minutes((now - began) * (1 - done) / (done - before))} left"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _after(line: str) -> str:
    """Return what is done after a line; empty if what was done before it goes on."""
    if RUN.match(line) or line.startswith("results in "):
        return "starting"
    found = ROUND.match(line)
    if line.startswith(history.CLOSING) or (found and found[1] == found[2]):
        return "results"
    return line.partition("  ")[0] if found else ""


@contextmanager
def displayed(doing: str, file: TextIO | None = None, at_once: bool = False) -> Iterator[Display]:
    """Show a `Display` until the block ends, by default on standard output.

    With a bar, the server reports arrived replies often, in whichever process it is.
    """
    display = Display(file or sys.stdout, doing, at_once)
    before = os.environ.get(arrivals.INTERVAL)
    if display.has_bar:
        os.environ.setdefault(arrivals.INTERVAL, OFTEN)
    try:
        with display:
            yield display
    finally:
        os.environ.pop(arrivals.INTERVAL, None)
        if before is not None:
            os.environ[arrivals.INTERVAL] = before
