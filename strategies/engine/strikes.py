"""Clients that give no usable reply for several rounds in a row, and are then excluded for a while."""

from __future__ import annotations

from collections.abc import Mapping
from logging import INFO, WARNING
from typing import Any

from flwr.supercore import log

from kindred.messages import ClientId, in_order


class Strikes:
    """The strikes of each client: rounds in a row without a usable reply.

    Parameters
    ----------
    most : int
        Strikes after which a client is excluded; 0: no client is. The exclusion lasts as many rounds as the client has
        strikes.

    Attributes
    ----------
    excluded : dict
        client -> the last round of its exclusion.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._strikes: dict[ClientId, int] = {}
        self.excluded: dict[ClientId, int] = {}
        self._failed: set[ClientId] = set()  # clients without a usable reply in the round in progress
        self._answered: set[ClientId] = set()  # clients with a usable reply in it

    def state(self) -> dict[str, Any]:
        """Return all that `restore` needs, between two rounds."""
        return {"strikes": self._strikes, "resting": self.excluded}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned."""
        self._strikes, self.excluded = state["strikes"], state["resting"]

    def succeeded(self, client: ClientId) -> None:
        """Record that a client gave a usable reply in the round in progress."""
        self._answered.add(client)

    def failed(self, client: ClientId) -> None:
        """Record that a client's reply was refused, or did not come, in the round in progress."""
        self._failed.add(client)

    def begin_round(self, server_round: int) -> None:
        """Readmit clients whose exclusion is over."""
        for client in in_order(client for client, last in self.excluded.items() if last < server_round):
            del self.excluded[client]
            log(INFO, "kindred: client %s may take part again, from round %d", client, server_round)

    def end_round(self, server_round: int) -> dict[ClientId, str]:
        """Count the strikes of a round; return the clients that are excluded now, with the reason."""
        for client in self._answered - self._failed:
            self._strikes.pop(client, None)
        reasons: dict[ClientId, str] = {}
        for client in in_order(self._failed):
            strikes = self._strikes[client] = self._strikes.get(client, 0) + 1
            if 0 < self._most <= strikes:
                self.excluded[client] = server_round + strikes
                reasons[client] = (
                    f"excluded from the next {strikes} rounds: no usable reply in {strikes} rounds in a row"
                )
                log(WARNING, "kindred: client %s is %s", client, reasons[client])
        self._failed, self._answered = set(), set()
        return reasons
