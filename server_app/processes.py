"""Mark the processes that a command starts, and find and kill them with all that they started.

A signal becomes an exception, so that the command ends its processes before it ends itself.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

MARK = "KINDRED_RUN"  # an environment variable that every process of a run inherits
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

# First part of the code of a process that we start. If our process, whose id is its first argument, is killed, it kills
# all that it started, and ends itself.
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


class Signalled(BaseException):
    """A signal that asks this process to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number


class _Signals:
    heeded = True


@contextmanager
def signals_as_exceptions() -> Iterator[_Signals]:
    """Raise `Signalled` at a signal while `heeded` is true; ignored signals (as under nohup) stay ignored."""
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

    Older ones end first, so that none is started again by its parent. All are remembered: one that is slow to end, or
    whose parent has ended, is not found in any other way.
    """
    deadline = time.monotonic() + 15
    known: set[psutil.Process] = set()
    while (processes := marked_processes(mark, known)) and time.monotonic() < deadline:
        for process in sorted(processes, key=psutil.Process.create_time):
            known |= {process, *kill(process)}
        time.sleep(0.05)


def kill(process: psutil.Process) -> list[psutil.Process]:
    """Kill a process and return its children.

    It is stopped while they are listed, so that it cannot start another one unseen. No more than one is stopped at a
    time, because it stays so for ever if this process is killed in between.
    """
    try:
        with suppress(psutil.Error):
            process.suspend()
            return process.children()
        return []
    finally:
        with suppress(psutil.Error):
            process.kill()


def marked_processes(mark: str, known: Collection[psutil.Process] = ()) -> set[psutil.Process]:
    """Return the running processes among `known` and those with the mark, and all that they started.

    Processes are also found by their parents, because Ray's actors overwrite their environment, and so the mark.
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
