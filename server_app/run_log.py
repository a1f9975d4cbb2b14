"""The log of a run: choose which of Flower's lines are shown, and find the reason of a failure in them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TextIO

from kindred.client.state import default_root
from kindred.engine.arrivals import LINE
from kindred.engine.history import CLOSING, OPENING
from kindred.files import make_private

LOGS_KEPT = 20  # of failed runs
# Exceptions of the app that ask the user to change a setting.
BAD_INPUT = ("ConfigError", "DataError", "ExtensionError")

# Messages of exceptions that Flower raises around the real one.
WRAPPERS = ("Simulation Runtime crashed.", "An error was encountered. Ending simulation.")
# Warnings and errors of every run, or of every failed run, without information about it.
NOISE = re.compile(
    r"Since flwr 1\.32|result\.arrays is |Manually terminating|Traceback |An exception occur"
    r"|Stopping Simulation Runtime|Simulation raised an exception|Exit Code: "
    r"|An exception was raised when processing|ray::|\s*$"
)


class Outcome(NamedTuple):
    """End of a run: exit code, reason, results.

    Attributes
    ----------
    code : int
        0: completed. 1: failed. 2: a setting, the data or the machine must be changed. 128 + n: ended by signal n.
    reason : str
        One line; empty if the run completed.
    results : Path or None
        The folder of the results, if the log names it.
    error : Exception or None
        The exception of a failed run in this process.
    """

    code: int
    reason: str = ""
    results: Path | None = None
    error: Exception | None = None


class RunFailed(RuntimeError):
    """A run that did not finish.

    Parameters
    ----------
    code : int
        As in `Outcome`.
    reason : str
        One line.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def keep_log(text: str) -> Path:
    """Write the log of a run that failed before it had a folder; return its path and keep the newest LOGS_KEPT.

    Raises
    ------
    OSError
        The log cannot be written.
    """
    folder = default_root() / "logs"
    make_private(folder)
    descriptor, path = tempfile.mkstemp(".log", f"failed-{datetime.now(UTC):%Y%m%d-%H%M%S}-", folder)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    for old in sorted(folder.glob("failed-*.log"))[:-LOGS_KEPT]:
        old.unlink(missing_ok=True)
    return Path(path)


class Log:
    """The log of a run: writes all lines, shows some of them, and finds results and errors in them.

    Parameters
    ----------
    file : text stream
        Receives every line, without colours.
    on_line : callable
        Called with each line that `shown` returns.

    Attributes
    ----------
    results : Path or None
        Folder of the results, from the app's log line.
    """

    def __init__(self, file: TextIO, on_line: Callable[[str], None]) -> None:
        self.file = file
        self.on_line = on_line
        self.results: Path | None = None
        self._errors: list[tuple[str, str]] = []  # (exception, message) of each traceback
        self._in_traceback = False
        self._last = ""
        self._problems: set[str] = set()  # warnings and errors shown so far, each once

    def add(self, line: str) -> None:
        """Process a line."""
        line = re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip()
        level, text = _level_and_text(line)
        show = shown(level, text)
        if not (show and LINE.fullmatch(show)):
            self.file.write(f"{line}\n")
        self._last = line.strip() or self._last
        if text.startswith("Traceback (most recent call last)"):
            self._in_traceback = True
        elif self._in_traceback and text and not text.startswith(" "):
            self._in_traceback = False
            name, _, message = text.partition(": ")
            if message not in WRAPPERS:
                self._errors.append((name.rpartition(".")[2], message))
        if text.startswith("kindred: results in "):
            self.results = Path(text.removeprefix("kindred: results in "))
        if show and not (level != "INFO" and show in self._problems):
            self._problems.add(show)
            self.on_line(show)

    def failure(self, details: str) -> Outcome:
        """Return the outcome of a failed run; `details` is Flower's text about it."""
        if self._errors:
            name, message = self._errors[-1]
            if name in BAD_INPUT:
                return Outcome(2, message, self.results)
            return Outcome(1, f"{name}: {message}" if message else name, self.results)
        reason = details.strip().partition("\n")[0] or self._last.removeprefix("Error: ") or "Flower gives no reason"
        if reason.startswith("No heartbeat"):
            reason = "the simulation's process was killed; most often the machine has too little memory"
        return Outcome(1, f"the run failed: {reason}", self.results)


def _level_and_text(line: str) -> tuple[str, str]:
    """Split a line of Flower's logger into level and text; other lines have the level ""."""
    line = re.sub(r"^\(\w+ pid=[^)]*\) ?", "", line)  # Ray's prefix of an actor's lines
    found = re.match(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) *: +(.*)", line)
    return (found[1], found[2]) if found else ("", line)


def shown(level: str, text: str) -> str | None:
    """Return the text to show of a log line: progress, our own messages, warnings and errors; else None."""
    if level == "INFO" and text.startswith(("round ", OPENING, CLOSING)):
        return text
    if level == "INFO" and text.startswith("kindred: "):
        return text.removeprefix("kindred: ")
    if level in ("WARNING", "ERROR", "CRITICAL") and not NOISE.match(text):
        return f"{level.lower()}: {text.removeprefix('kindred: ')}"
    return None
