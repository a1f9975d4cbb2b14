"""Grids that simulate failures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from flwr.app import ConfigRecord, Error, Message
from flwr.clientapp import ClientApp

from kindred import InlineGrid
from kindred.messages import SERVER_ROUND, records_of


class Interrupted(Exception):
    """Ends a run as if its process had been killed."""


def interrupted(grid: InlineGrid, after: float) -> InlineGrid:
    """Let a grid raise `Interrupted` when the round after this one begins."""
    push = grid.push_messages

    def push_messages(messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        rounds = [config.get(SERVER_ROUND, 0) for each in messages for config in records_of(each.content, ConfigRecord)]
        if max(rounds, default=0) > after:
            raise Interrupted
        return push(messages)

    grid.push_messages = push_messages
    return grid


class ShuffledGrid(InlineGrid):
    """Replies arrive in a random order."""

    def __init__(self, app: ClientApp, num_clients: int, seed: int) -> None:
        super().__init__(app, num_clients)
        self._random = random.Random(seed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        waiting = [message_id for message_id in message_ids if message_id in self._waiting]
        return super().pull_messages([self._random.choice(waiting)]) if waiting else []


class FaultyGrid(InlineGrid):
    """`fate(round, client)` decides how a training message is handled: "ok", "error", "silent", "lost" (the client
    trains, its reply is an error), or a function that changes the reply's content."""

    def __init__(self, app: ClientApp, num_clients: int, fate: Callable[[int, int], object]) -> None:
        super().__init__(app, num_clients)
        self._fate = fate

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            message = self._waiting.get(message_id)
            if message is None:
                continue
            if message.metadata.message_type != "train":
                replies += super().pull_messages([message_id])
                continue
            fate = self._fate(int(message.metadata.group_id), message.metadata.dst_node_id - 1001)
            if fate == "silent":
                continue
            if fate in ("error", "lost"):
                if fate == "lost":
                    self._answer(message)
                reply = Message(Error(0, "the worker\nwas lost"), reply_to=self._waiting.pop(message_id))
                # As Flower reports a dead node: the sender is the SuperLink, not the node.
                reply.metadata.__dict__["_src_node_id"] = 1
                replies.append(reply)
                continue
            (reply,) = super().pull_messages([message_id])
            if callable(fate):
                fate(reply.content)
            replies.append(reply)
        return replies
