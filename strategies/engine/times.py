"""The seconds of a run, by what they are spent on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

START_UP, CLIENTS, SERVER, RESULTS = "start-up", "clients", "server", "results"
NOTHING = object()


class Times:
    """A clock that always runs for one part of a run.

    Attributes
    ----------
    seconds : dict of str to float
        - "start-up": until the first round begins, such as data and meeting the clients.
        - "clients": waiting for replies; the clients' own work in the process of the server included.
        - "server": all other work of the rounds.
        - "results": tables and other files of a round, and checkpoints.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((START_UP, CLIENTS, SERVER, RESULTS), 0.0)
        self._part, self._since = START_UP, time.monotonic()
        self._before = 0.0  # of the rounds that have been counted

    def spend_on(self, part: str) -> str:
        """Let the clock run for another part, and return the one before."""
        before, now = self._part, time.monotonic()
        self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    def waiting(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items; the time until each arrives is that of the clients."""
        iterator = iter(items)
        while True:
            part = self.spend_on(CLIENTS)
            try:
                item = next(iterator, NOTHING)
            finally:
                self.spend_on(part)
            if item is NOTHING:
                return
            yield item  # type: ignore[misc]

    def since_last_round(self) -> float:
        """Return the seconds since the end of the last round, or since the end of the start-up."""
        self.spend_on(self._part)
        return sum(self.seconds.values()) - self.seconds[START_UP] - self._before

    def count_round(self) -> float:
        """End a round, and return its seconds."""
        seconds = self.since_last_round()
        self._before += seconds
        return seconds

    def restore(self, seconds: dict[str, float]) -> None:
        """Continue from the seconds of an interrupted run, without those after its last round."""
        for part, number in seconds.items():
            self.seconds[part] += number
        self._before = sum(self.seconds.values()) - self.seconds[START_UP]
