"""The status of a run at `kindred server`: a small file that says what the run does now, and with which clients.

Whoever looks at the run reads this file and those in the run's folder. It is replaced atomically whenever something
changes; elsewhere, as in a simulation, nothing is written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from kindred.files import make_private, write_bytes
from kindred.messages import ClientId, first_line

# In the environment of a run at `kindred server`: the folder with a status file for each run.
RUNS = "KINDRED_RUNS"

STARTS, MEETS, WAITS, PREPARES = "starts", "meets", "waits", "prepares"
EXCHANGES, BETWEEN_ROUNDS = "exchanges", "between rounds"
TRAINS, EVALUATES = "trains", "evaluates"  # kinds of messages
MANY = 100
FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"


class Status:
    """The status of a run.

    Parameters
    ----------
    path : Path, optional
        The file; None where nobody looks at the run.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._content: dict[str, Any] = {}
        self._written = 0.0  # when the file was last replaced

    @property
    def is_kept(self) -> bool:
        """True where somebody may look at the run."""
        return self._path is not None

    @classmethod
    def of_run(cls, run_id: int) -> Status:
        """Return the status of a run at `kindred server`; elsewhere one that is written nowhere."""
        folder = os.environ.get(RUNS)
        return cls(Path(folder) / f"{run_id}.json" if folder else None)

    def update(self, **content: Any) -> None:
        """Replace parts of the content, and the file.

        `state` is one of this module's constants, and `text` says more. A file that cannot be written does not concern
        the run.
        """
        if self._path is None:
            return
        self._content |= content
        self._written = time.monotonic()
        with suppress(OSError):
            write_bytes(self._path, json.dumps(self._content).encode(), flush=False)

    def sent(self, what: str, kinds: dict[ClientId, str]) -> None:
        """Record that an exchange begins: its name, and the kind of message to each client, TRAINS or EVALUATES."""
        at = time.time()
        asked = {str(client): {"kind": kind, "at": at} for client, kind in kinds.items()}
        self.update(state=EXCHANGES, text=what, asked=asked)

    def answered(self, client: ClientId, status: str = "") -> None:
        """Record that a client's reply has arrived, or that it will not be used: `status` is "ok" or the reason.

        Among more than `MANY` clients the file, which names all of them, is replaced once a second at most.
        """
        everybody = self._content.get("asked", {})
        if asked := everybody.get(str(client)):
            asked.setdefault("seconds", time.time() - asked["at"])
            asked["status"] = status
            if len(everybody) <= MANY or time.monotonic() - self._written >= 1:
                self.update()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Record the run's beginning, its end, and the reason if it fails."""
        if self._path is None:
            yield
            return
        with suppress(OSError):
            make_private(self._path.parent)
        process = psutil.Process()
        self.update(state=STARTS, text="", began=time.time(), process=[process.pid, process.create_time()])
        try:
            yield
        except (KeyboardInterrupt, SystemExit):  # the latter by `flwr stop`
            self.update(state=STOPPED, text="", ended=time.time())
            raise
        except BaseException as error:
            self.update(state=FAILED, text=first_line(str(error) or type(error).__name__), ended=time.time())
            raise
        self.update(state=FINISHED, text="", ended=time.time())
