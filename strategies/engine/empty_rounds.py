"""Rounds without a usable answer: a run ends after too many of them in a row."""

from __future__ import annotations

from typing import Any

from .history import History
from .roster import TooFewClients


class EmptyRounds:
    """Count of the rounds in a row without a usable answer.

    Parameters
    ----------
    allowed : int
        Number of such rounds in a row, 1 or more, after which the run ends.
    history : History
        Holds the reason, if it comes from a client's reply.
    """

    def __init__(self, allowed: int, history: History) -> None:
        self._allowed = allowed
        self._history = history
        self._in_a_row = 0
        self._any_answer = False  # whether any training round had a usable answer
        self._failure = ""  # why the last round could not be ended; else empty

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, between two rounds."""
        return {"in-a-row": self._in_a_row, "any-answer": self._any_answer}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what `state` returned; empty rounds that ended the run no longer count."""
        self._in_a_row, self._any_answer = state["in-a-row"] % self._allowed, state["any-answer"]

    def count(self, server_round: int, *, answered: bool, failure: str = "") -> None:
        """Count a round, given whether any client answered, and why the method could not end it (if so)."""
        self._failure = failure
        if not answered or failure:
            self._in_a_row += 1
        else:
            self._in_a_row = 0
            self._any_answer = self._any_answer or server_round > 0

    @property
    def too_many(self) -> bool:
        """True if the run must end."""
        return self._in_a_row >= self._allowed

    def check(self) -> None:
        """Raise `TooFewClients` if there are too many such rounds."""
        if self.too_many:
            raise TooFewClients(
                f"no client gave a usable answer in {self._in_a_row} rounds in a row "
                f"(max_empty_rounds), so the run ends; {self._last_reason()}"
            )

    def check_all(self, num_rounds: int) -> None:
        """Raise `TooFewClients` if no round of the run had a usable answer."""
        if not self._any_answer:
            raise TooFewClients(
                f"no client gave a usable answer in any of the {num_rounds} rounds; {self._last_reason()}"
            )

    def _last_reason(self) -> str:
        if self._failure:
            return self._failure
        last = next((row for row in reversed(self._history.rows) if row["status"] != "ok"), None)
        return f"client {last['client']}: {last['status']}" if last else "no client was asked"
