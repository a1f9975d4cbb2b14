"""The page of a site: a file in its state folder, written again after each message."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from kindred.client.journal import CONNECTION, append
from kindred.server_app.report.render import page
from kindred.server_app.report.site import site_content

from .files import write_file

LOOK_SECONDS = 1.0  # between two looks at the journal
MOST_ENTRIES = 20_000  # that a journal keeps when `kindred site` starts


class SitePage:
    """The page of a site, and the journal that it is made from.

    Parameters
    ----------
    name : str
        Of the site.
    state : Path
        The site's state folder.
    about : mapping
        The site's data: see `site_content`.

    Attributes
    ----------
    path, journal : Path
        The page, and the journal.
    """

    def __init__(self, name: str, state: Path, about: Mapping[str, Any]) -> None:
        self._name, self._about = name, about
        self.path, self.journal = state / f"site-{name}.html", state / f"site-{name}.jsonl"
        self._written: Any = None
        self._due: list[dict[str, Any]] = []  # entries that are not in the journal yet
        self._lock = Lock()

    def fault(self, line: str, over: bool = False) -> None:
        """Record why the SuperNode cannot take part, or that such a fault is over; on a full disk once it has room."""
        self._due.append({"at": time.time(), "kind": CONNECTION, "over" if over else "problem": line})
        self._record()

    def _record(self) -> None:
        with self._lock:
            while self._due and append(self.journal, self._due[0]):
                del self._due[0]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the page up to date until the block ends."""
        with suppress(OSError):
            if len(lines := self.journal.read_bytes().splitlines(keepends=True)) > MOST_ENTRIES:
                write_file(self.journal, b"".join(lines[-MOST_ENTRIES:]))
        self.write()
        ended = Event()

        def follow() -> None:
            while not ended.wait(LOOK_SECONDS):
                self.write()

        thread = Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.write(running=False)

    def write(self, *, running: bool = True) -> None:
        """Write the page if something has changed; a page that cannot be written does not concern the site."""
        self._record()
        with suppress(OSError, LookupError, TypeError, ValueError):  # also where an entry of the journal is malformed
            state = self.journal.stat().st_size if self.journal.exists() else 0, running
            if state != self._written:
                content = site_content(self._name, self._about, self._entries(), running=running)
                write_file(self.path, page(content).encode())
                self._written = state

    def _entries(self) -> list[dict[str, Any]]:
        """Return the journal's complete entries."""
        found = []
        for line in self.journal.read_bytes().splitlines() if self.journal.exists() else ():
            with suppress(ValueError):  # incomplete, if the machine itself stopped
                found.append(json.loads(line))
        return found
