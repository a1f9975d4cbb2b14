"""InTurn: items that arrive in any order are processed in a fixed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kindred.messages import ClientId

Item = TypeVar("Item")


class InTurn(Generic[Item]):
    """Passes on clients' items in a given order, whatever the order of arrival: sums then have the same bits.

    An item that arrives before its turn waits; other items are passed on at once and not kept.

    Parameters
    ----------
    order : sequence of client ids
        The clients that may send an item, in the order of their turns.
    pass_on : callable
        Called with a client and its item.
    """

    def __init__(self, order: Sequence[ClientId], pass_on: Callable[[ClientId, Item], None]) -> None:
        self._turns = list(reversed(order))
        self._waiting: dict[ClientId, Item] = {}
        self._pass_on = pass_on

    def add(self, client: ClientId, item: Item) -> None:
        """Add a client's item."""
        self._waiting[client] = item
        while self._turns and self._turns[-1] in self._waiting:
            self._next()

    def finish(self) -> None:
        """Pass on the items that still wait for clients that sent nothing."""
        while self._waiting:
            if self._turns[-1] in self._waiting:
                self._next()
            else:
                self._turns.pop()

    def _next(self) -> None:
        client = self._turns.pop()
        self._pass_on(client, self._waiting.pop(client))
