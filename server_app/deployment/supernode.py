"""Keep a SuperNode running until `kindred site` ends: start it again each time it ends."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from kindred.server_app.cli.common import warn
from kindred.server_app.processes import kill_processes

from . import hooks
from .addresses import LOOPBACK, check_port_is_free
from .connection import Link, faults
from .processes import FIRST_PAUSE, GRACE, LONGEST_PAUSE, processes_that_end, start_process

if TYPE_CHECKING:
    from io import BufferedReader

STEADY = 60.0  # s; after a longer run of the SuperNode the pause before its next start is the shortest again
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
    on_fault: Callable[[str], None],
) -> None:
    """Run a SuperNode, and start it again each time it ends, until this process is asked to end.

    `on_fault` is called with each line that says why the SuperNode cannot take part, or has ended.
    """

    def report(line: str) -> None:
        warn(line)
        on_fault(line)

    with processes_that_end() as mark:
        pause = FIRST_PAUSE
        _report_faults(link, report)
        while True:
            began = time.monotonic()
            supernode = start_process(command(), settings, home, mark, hooks.quicken_supernode, stderr=subprocess.PIPE)
            output = Output(cast("BufferedReader", supernode.stderr))  # a pipe
            code = supernode.wait()
            kill_processes(mark)  # the processes that it started, such as a client that works on a message
            output.join(GRACE)
            if time.monotonic() - began > STEADY:
                pause = FIRST_PAUSE
            report(f"flower-supernode ended with code {code}, and is started again in {pause:g} s")
            _report_faults(link, report, output.end if code >= 0 else None)  # below 0: a signal killed it
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


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


def _report_faults(link: Link, report: Callable[[str], None], output: bytes | None = None) -> None:
    with contextlib.suppress(typer.Exit, OSError):  # a line has said which file cannot be used; it may be just copied
        for fault in faults(link, output):
            report(fault)
