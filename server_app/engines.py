"""Engines: a run's clients work in worker processes, in this process, or in Flower's simulation engine."""

from __future__ import annotations

import io
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kindred.data import DataError, load_clients
from kindred.interrupts import is_interrupt
from kindred.lazy import lazy

from .app import run_in_workers
from .config import Config, ConfigError
from .machine import cpus, gpus, processes_that_fit
from .run_log import Log, Outcome, keep_log
from .simulation import run_simulation

if TYPE_CHECKING:
    import threadpoolctl
    import torch
else:
    threadpoolctl, torch = lazy("threadpoolctl"), lazy("torch")

NAMES = ("local", "inline", "flower")


@dataclass(frozen=True)
class Engine:
    """The engine in which the clients of a run work.

    Attributes
    ----------
    name : str
        "local": in worker processes, in parallel. "inline": in this process, one after another. "flower": in Flower's
        simulation engine, in parallel.
    cpus_per_client : int
        CPUs for each client while it works.
    gpus_per_client : float
        Fraction of a GPU for each client while it works; 0 with "inline", where the setting `device` decides.
    workers : int
        Worker processes of "local"; 0: as many as CPUs and memory allow.
    jobs : int
        Runs of a comparison that work at once; they share the workers. 1 with "flower".

    Raises
    ------
    ConfigError
        There is no engine of this name, or it has no workers, or it cannot have several runs at once.
    """

    name: str
    cpus_per_client: int = 1
    gpus_per_client: float = 0.0
    workers: int = 0
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"engine is {self.name!r}, allowed: {', '.join(NAMES)}")
        if self.workers and self.name != "local":
            raise ConfigError(f"--workers is {self.workers!r}, allowed with engine {self.name}: 0")
        if type(self.workers) is not int or self.workers < 0:
            raise ConfigError(f"--workers is {self.workers!r}, allowed: 0 or more")
        if self.jobs > 1 and self.name == "flower":
            raise ConfigError(f"--jobs is {self.jobs}, allowed with engine flower: 1")


def execute(config: Config, engine: Engine, on_line: Callable[[str], None]) -> Outcome:
    """Start or resume the run of these settings; call `on_line` with each line to show."""
    if engine.name != "flower":
        return _run_here(config, engine, on_line)
    return run_simulation(
        config.run_config(),
        num_clients=config.participants,
        cpus_per_client=engine.cpus_per_client,
        gpus_per_client=engine.gpus_per_client,
        on_line=on_line,
    )


def workers_of(engine: Engine, config: Config) -> int:
    """Return the number of processes in which the clients of a run work; 1: this one.

    With "local" there are as many as the CPUs allow, or as asked for, but not more than clients, nor than fit into the
    free memory if each becomes as large as this one, with the data loaded, is now. Runs that work at once share them. A
    GPU of which clients get no share is used by one process.
    """
    if engine.name == "inline":
        return 1
    here = gpus() if config.device != "cpu" else 0
    if here and not engine.gpus_per_client:
        return 1
    load_clients(config.run_config())
    together = [engine.workers or cpus() // engine.cpus_per_client, processes_that_fit()]
    if here:
        together.append(int(here / engine.gpus_per_client))
    return max(min(min(together) // engine.jobs, config.participants), 1)


def _run_here(config: Config, engine: Engine, on_line: Callable[[str], None]) -> Outcome:
    """Run from this process; write `log.txt` into the folder of the results."""
    file = io.StringIO()
    log = Log(file, on_line)
    threads_before = torch.get_num_threads()
    # The server's matrix products compete with the clients for the CPUs: a second thread would mostly wait for one.
    one_client_s = threadpoolctl.threadpool_limits(engine.cpus_per_client, user_api="blas")
    with _flower_logs_to(log.add), one_client_s:
        try:
            shared = gpus() if engine.gpus_per_client else 0
            results = run_in_workers(config, workers_of(engine, config), engine.cpus_per_client, shared).path
        except (ConfigError, DataError) as error:
            return Outcome(2, str(error), log.results)
        except KeyboardInterrupt:
            return Outcome(130, "ended by SIGINT", log.results)
        except Exception as error:  # as in Flower's engine: a line as the reason, the rest in the log
            if is_interrupt(error):
                return Outcome(130, "ended by SIGINT", log.results)
            reason = f"{type(error).__name__}: {error}"
            with suppress(OSError):  # the reason is more important than the log
                reason += f" (log: {keep_log(f'{file.getvalue()}{traceback.format_exc()}')})"
            return Outcome(1, reason, log.results, error)
        finally:
            torch.set_num_threads(threads_before)
    path = results / "log.txt"
    try:
        path.write_text(file.getvalue(), encoding="utf-8")
    except OSError as error:  # nothing depends on the log
        on_line(f"warning: {path} cannot be written ({error.strerror})")
    return Outcome(0, "", results)


@contextmanager
def _flower_logs_to(add: Callable[[str], None]) -> Iterator[None]:
    """Pass the lines of Flower's logger to `add`, in the form in which it prints them, and nowhere else."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            first, *more = self.format(record).splitlines() or [""]
            for line in (f"{record.levelname} : {first}", *more):
                add(line)

    logger = logging.getLogger("flwr")
    before, logger.handlers = logger.handlers, [Handler(logging.INFO)]
    try:
        yield
    finally:
        logger.handlers = before
