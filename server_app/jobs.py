"""Carry out runs: one after another in this process, or several at once, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from kindred.engine.workers import end_with_parent, how_ended

from .config import Config
from .engines import Engine, execute
from .machine import processes_that_fit
from .run_log import Outcome

FINISHED = "finished"  # the last line of one of several runs at once
PATIENCE = 10.0  # seconds that an interrupted run has to end
INTERRUPTED = Outcome(130, "ended by SIGINT")


def execute_runs(
    runs: Iterator[tuple[int, Config]], engine: Engine, on_line: Callable[[str], None]
) -> Generator[tuple[int, Outcome], None, None]:
    """Start or resume runs, `engine.jobs` of them at once, and yield the number and the outcome of each that ends.

    Call it in the main thread if there are several at once.

    Parameters
    ----------
    runs : iterator of (int, Config)
        A run is taken from it when it can start.
    engine : Engine
    on_line : callable
        Called with each line to show; a line of one of several runs at once begins with "run NUMBER: ".
    """
    if engine.jobs > 1:
        yield from _at_once(runs, engine, on_line)
    else:
        for number, config in runs:
            yield number, execute(config, engine, on_line)


def _at_once(
    runs: Iterator[tuple[int, Config]], engine: Engine, on_line: Callable[[str], None]
) -> Generator[tuple[int, Outcome], None, None]:
    engine = replace(engine, jobs=min(engine.jobs, max(processes_that_fit(), 1)))
    running: dict[Any, tuple[int, Any]] = {}  # number and process, by the connection to it
    ended = False  # whether all runs have been started
    try:
        while running or not ended:
            while len(running) < engine.jobs and not ended:
                if run := next(runs, None):
                    connection, process = _start(run[1], engine)
                    running[connection] = run[0], process
                else:
                    ended = True
            for ready in wait(list(running)):
                number, process = running[ready]
                received = _received(ready, process)
                if isinstance(received, Outcome):
                    del running[ready]
                    if received.code == 0:
                        on_line(f"run {number}: {FINISHED}")
                    yield number, received
                else:
                    on_line(f"run {number}: {received}")
    except KeyboardInterrupt:
        _end([process for _, process in running.values()])
        yield from ((number, INTERRUPTED) for number, _ in running.values())
    finally:
        _end([process for _, process in running.values()])


def _start(config: Config, engine: Engine) -> tuple[Connection, Any]:
    """Start the process of a run; return the connection from which its lines and its outcome come, and the process."""
    processes = multiprocessing.get_context("spawn")  # a forked one could use no GPU, nor several threads of PyTorch
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=_run, args=(theirs, config, engine))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C reaches all, and this process decides
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    theirs.close()
    return ours, process


def _run(connection: Connection, config: Config, engine: Engine) -> None:
    """Carry out a run, and send its lines and its outcome."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run then ends as by Ctrl-C
    threading.Thread(target=end_with_parent, daemon=True).start()
    outcome = INTERRUPTED
    with suppress(KeyboardInterrupt):
        outcome = execute(config, engine, connection.send)
    connection.send(outcome._replace(error=None))


def _received(connection: Any, process: Any) -> str | Outcome:
    """Return a line or the outcome that a process has sent; if it has ended without one, that is the outcome."""
    try:
        received: str | Outcome = connection.recv()
    except (EOFError, OSError):
        process.join()
        return Outcome(1, f"the process of the run {how_ended(process.exitcode)}")
    if isinstance(received, Outcome):
        process.join()
    return received


def _end(processes: list[Any]) -> None:
    """End processes; each run closes its own worker processes."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
        process.join()
