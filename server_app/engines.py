"""Engines: a run's clients work in this process or in Flower's simulation engine."""

from __future__ import annotations

import io
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from kindred.data import DataError

from .app import run_inline
from .config import Config, ConfigError
from .run_log import Log, Outcome, keep_log
from .simulation import run_simulation

NAMES = ("inline", "flower")


@dataclass(frozen=True)
class Engine:
    """The engine in which the clients of a run work.

    Attributes
    ----------
    name : str
        "inline": in this process, one after another. "flower": in Flower's simulation engine, in parallel.
    cpus_per_client : int
        CPUs for each client while it works.
    gpus_per_client : float
        Fraction of a GPU for each client while it works; 0 with "inline", where the setting `device` decides.

    Raises
    ------
    ConfigError
        There is no engine of this name.
    """

    name: str
    cpus_per_client: int = 1
    gpus_per_client: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"engine is {self.name!r}, allowed: {', '.join(NAMES)}")


def execute(config: Config, engine: Engine, on_line: Callable[[str], None]) -> Outcome:
    """Start or resume the run of these settings; call `on_line` with each line to show."""
    if engine.name == "inline":
        return _run_here(config, engine.cpus_per_client, on_line)
    return run_simulation(
        config.run_config(),
        num_clients=config.participants,
        cpus_per_client=engine.cpus_per_client,
        gpus_per_client=engine.gpus_per_client,
        on_line=on_line,
    )


def _run_here(config: Config, threads: int, on_line: Callable[[str], None]) -> Outcome:
    """Run in this process, with `threads` threads of PyTorch; write `log.txt` into the folder of the results."""
    file = io.StringIO()
    log = Log(file, on_line)
    threads_before = torch.get_num_threads()
    with _flower_logs_to(log.add):
        try:
            results = run_inline(config, threads=threads).path
        except (ConfigError, DataError) as error:
            return Outcome(2, str(error), log.results)
        except KeyboardInterrupt:
            return Outcome(130, "ended by SIGINT", log.results)
        except Exception as error:  # as in Flower's engine: a line as the reason, the rest in the log
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
