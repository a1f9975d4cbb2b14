"""Keep a SuperNode running until `kindred site` ends: start it again each time it ends."""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer
from flwr.common.constant import APP_DIR

from kindred.server_app.cli.common import warn
from kindred.server_app.processes import kill_processes

from . import hooks
from .addresses import LOOPBACK, check_port_is_free
from .connection import NOT_ACTIVATED, Link, faults
from .files import lack_of_space
from .processes import FIRST_PAUSE, GRACE, LONGEST_PAUSE, processes_that_end, start_process

if TYPE_CHECKING:
    from io import BufferedReader, FileIO

HELD = 70.0  # s after its last heartbeat; until then the server may hold the SuperNode's key in use
STEADY = 60.0  # s; after a longer run of the SuperNode the pause before its next start is the shortest again
SILENCE = 60.0  # s; a SuperNode that writes nothing to `contact` for so long no longer works
LOOK = 5.0  # s between two looks at the disk
KEPT = 4096  # last bytes of a SuperNode's output that are kept, to search them for its error


def port_for_supernode(port: int | None) -> int:
    """Return the given port, after a check that it is free, or any free port if none is given."""
    if port is not None:
        check_port_is_free("--port", LOOPBACK[1], port)
        return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK[1], 0))
        return probe.getsockname()[1]


def keep_running(
    command: Callable[[], list[str]],
    settings: Mapping[str, str],
    home: Path,
    link: Link,
    on_fault: Callable[[str, bool], None],
) -> None:
    """Run a SuperNode, and start it again each time it ends or no longer works, until this process is asked to end.

    `on_fault` is called with each line that says why the SuperNode cannot take part, or has ended, and False; and with
    each line that says that such a fault is over, and True.
    """

    def report(line: str, over: bool = False) -> None:
        warn(line)
        on_fault(line, over)

    with processes_that_end() as mark:
        pause, heard = FIRST_PAUSE, -math.inf
        reported = _report_faults(link, report)
        while True:
            began = time.monotonic()
            shutil.rmtree(home / APP_DIR, ignore_errors=True)  # what is unpacked there may be incomplete
            reading, writing = os.pipe()
            with open(reading, "rb", 0) as contact:
                with open(writing, "wb"):
                    supernode = start_process(
                        command(), settings, home, mark, hooks.quicken_supernode, stderr=subprocess.PIPE,
                        contact=writing,
                    )  # fmt: skip
                output = Output(cast("BufferedReader", supernode.stderr))  # a pipe
                heard = max(heard, _watch(supernode, contact, home, link, report, reported))
            kill_processes(mark)  # also the processes that it started, such as a client that works on a message
            code = supernode.wait()
            output.join(GRACE)
            now = time.monotonic()
            if now - began > STEADY or (NOT_ACTIVATED in output.end and now - heard < HELD):
                pause = FIRST_PAUSE
            report(ended := f"flower-supernode ended with code {code}, and is started again in {pause:g} s")
            # Below 0: a signal killed it.
            reported = {ended, *_report_faults(link, report, output.end if code >= 0 else None)}
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _watch(
    supernode: subprocess.Popen[bytes],
    contact: FileIO,
    home: Path,
    link: Link,
    report: Callable[..., None],
    reported: set[str],
) -> float:
    """Return when a SuperNode has ended, or has been silent for so long that it is asked to end.

    Until then report each reason that keeps it from working, and when that is over.

    Parameters
    ----------
    contact : FileIO
        What `hooks.persist` writes.
    reported : set of str
        The reasons that have been reported and are not over.

    Returns
    -------
    float
        When the server last accepted a heartbeat, by `time.monotonic`.
    """
    accepted, heard, full = -math.inf, time.monotonic() + SILENCE, False  # to start may take long
    while True:
        lack = lack_of_space(home)
        if bool(lack) != full:
            full = not full
            report(lack or f"the disk of {home} has room again", not full)
        if not select.select([contact], [], [], LOOK)[0]:
            if time.monotonic() - heard > SILENCE:
                break
            continue
        if not (lines := contact.read(KEPT)):
            return accepted  # it has ended
        heard, error = time.monotonic(), lines.decode(errors="replace").split("\n")[-2]
        if error:
            for line in _faults(link) or [f"{link.address} does not answer the SuperNode: {error}"]:
                if line not in reported:
                    report(line)
                    reported.add(line)
            continue
        accepted = heard
        if reported:
            report(f"{link.address} answers the SuperNode", True)
            reported.clear()
    report(f"flower-supernode runs, but has sent nothing for {SILENCE:g} s, and is ended")
    supernode.terminate()  # it signs off at the SuperLink
    with contextlib.suppress(subprocess.TimeoutExpired):
        supernode.wait(GRACE)
    return accepted


class Output(threading.Thread):
    """Thread that passes on the output of a process at once, and keeps its last bytes."""

    def __init__(self, source: BufferedReader) -> None:
        super().__init__()
        self._source = source
        self.end = b""
        self.start()

    def run(self) -> None:
        """Read until every process that writes there has ended."""
        with self._source:
            while written := self._source.read1():
                self.end = (self.end + written)[-KEPT:]
                with contextlib.suppress(OSError):  # nobody reads our output; the process must not wait
                    sys.stderr.buffer.write(written)
                    sys.stderr.buffer.flush()


def _report_faults(link: Link, report: Callable[[str], None], output: bytes | None = None) -> set[str]:
    found = _faults(link, output)
    for fault in found:
        report(fault)
    return set(found)


def _faults(link: Link, output: bytes | None = None) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(typer.Exit, OSError):  # a line has said which file cannot be used; it may be just copied
        found.extend(faults(link, output))
    return found
