"""Rounds without a usable answer: too many of them in a row end a run."""

from __future__ import annotations

from typing import Any

from .history import History
from .roster import TooFewClients


class EmptyRounds:
    """Count of the rounds in a row without a usable answer.

    Parameters
    ----------
    allowed : int
        Such rounds in a row, 1 or more, after which the run ends.
    history : History
        Has the reason, where it is a client's.
    """

    def __init__(self, allowed: int, history: History) -> None:
        self._allowed = allowed
        self._history = history
        self._in_a_row = 0
        self._any_answer = False  # in any round of training
        self._failure = ""  # of the last round, where its end failed

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, between two rounds."""
        return {"in-a-row": self._in_a_row, "any-answer": self._any_answer}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what `state` returned; empty rounds that ended the run are forgiven."""
        self._in_a_row, self._any_answer = state["in-a-row"] % self._allowed, state["any-answer"]

    def count(self, server_round: int, *, answered: bool, failure: str = "") -> None:
        """Count a round, given whether any client answered, and why the method failed to end it."""
        self._failure = failure
        if not answered or failure:
            self._in_a_row += 1
        else:
            self._in_a_row = 0
            self._any_answer = self._any_answer or server_round > 0

    @property
    def too_many(self) -> bool:
        """Whether the run is to end."""
        return self._in_a_row >= self._allowed

    def check(self) -> None:
        """Raise `TooFewClients` where there are too many."""
        if self.too_many:
            raise TooFewClients(
                f"no client gave a usable answer in {self._in_a_row} rounds in a row "
                f"(max_empty_rounds), so the run ends; {self._last_trouble()}"
            )

    def check_all(self, num_rounds: int) -> None:
        """Raise `TooFewClients` where no round of the run had a usable answer."""
        if not self._any_answer:
            raise TooFewClients(
                f"no client gave a usable answer in any of the {num_rounds} rounds; {self._last_trouble()}"
            )

    def _last_trouble(self) -> str:
        if self._failure:
            return self._failure
        last = next((row for row in reversed(self._history.rows) if row["status"] != "ok"), None)
        return f"client {last['client']}: {last['status']}" if last else "no client was asked"
