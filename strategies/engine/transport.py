"""The way of messages to clients and back: sent, asked for until a deadline, and attributed to their senders."""

from __future__ import annotations

import copy
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.serverapp import Grid

from kindred.messages import first_line

from .admission import Refused

# Replies are asked for at once, then after pauses that grow: a simulation is not slowed down,
# and a SuperLink on the other side of a network is not asked all the time.
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.01, 1.3, 1.0  # s
PATIENCE, LEAST_PATIENCE = 2.0, 0.05  # s that a reply may take to be handed out before others are asked for beside it
SETTLING = 0.5  # s for the last of them, once all have been asked for
# A message is for its exchange alone: a client that was away, or is slow, is not to work on those of earlier rounds.
CLOCKS = 600.0  # s by which the clocks of a site and of the server may differ

# What Ray says of a process that is gone for good.
DEAD_WORKER = re.compile(r"ray\.exceptions\.(ActorDied|RayActor|OutOfMemory|WorkerCrashed)Error")


class WorkerDied(RuntimeError):
    """A process of the simulation in which clients work is gone, and the simulation does without it badly."""


def push(grid: Grid, message: Message) -> str | None:
    """Send one message; its id, or None if the grid did not take it."""
    ids = list(grid.push_messages([message]))
    return (ids[0] or None) if ids else None


def pull(
    grid: Grid, message_ids: Collection[str], deadline: Callable[[], float], *, simulated: bool
) -> Iterator[tuple[str, Message | Refused]]:
    """Yield the first reply to each of these messages as they come, until the deadline.

    Each message is asked for once more after the deadline: what has arrived by then is taken, however many they are.

    Parameters
    ----------
    grid : Grid
    message_ids : collection of str
    deadline : callable
        Returns the time on `time.monotonic`'s clock; it may become earlier while replies come in.
    simulated : bool
        Whether the clients are on this machine. Elsewhere replies are asked for one by one, see `_Network`.

    Yields
    ------
    tuple of str and (Message or Refused)
        The message's id, and the reply, or why it cannot be read.
    """
    waiting = dict.fromkeys(message_ids)
    source = _Simulation(grid) if simulated else _Network(grid)
    pause = FIRST_PAUSE
    try:
        while waiting:
            arrived = False
            started = time.monotonic()
            for message_id, reply in source.replies(list(waiting)):
                if message_id in waiting:
                    del waiting[message_id]
                    arrived = True
                    yield message_id, reply
            now = time.monotonic()
            if not waiting or started >= deadline():
                return
            pause = FIRST_PAUSE if arrived else min(pause * PAUSE_GROWTH, LONGEST_PAUSE)
            if not arrived:  # the SuperLink has other work too
                time.sleep(max(min(max(pause, now - started), deadline() - now), 0))
    finally:
        source.over.set()


class _Simulation:
    """Ask for all replies at once, which in a simulation takes no time and unpacks nothing."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.over = threading.Event()

    def replies(self, message_ids: Sequence[str]) -> Iterator[tuple[str, Message | Refused]]:
        """Yield those of these replies that are there."""
        for reply in self._grid.pull_messages(message_ids):
            _check_worker(reply)
            yield reply.metadata.reply_to_message_id, reply


class _Network:
    """Ask for replies over a network, one by one, each in a thread.

    A reply is unpacked as it is handed out. One that cannot be unpacked would take others along that came with it, and
    its sender could make it out to be an answer to any message. And Flower blocks, for minutes, where a client has
    announced a reply and does not upload it: after a while such a thread is left alone, and the others are asked for
    beside it. What it brings counts if it comes in time. An answer takes some 20 ms.

    Attributes
    ----------
    over : Event
        Ends what such threads wait for, within seconds.
    """

    def __init__(self, grid: Grid) -> None:
        self.over = threading.Event()
        self._grid = _ending_with(grid, self.over)
        self._answers: queue.SimpleQueue[tuple[str, list[Message] | Exception]] = queue.SimpleQueue()
        self._asked: dict[str, float] = {}  # messages with a thread that waits for the reply: since when

    def replies(self, message_ids: Sequence[str]) -> Iterator[tuple[str, Message | Refused]]:
        """Yield those of these replies that are there."""
        for message_id in message_ids:
            if message_id in self._asked:
                continue
            # For each that blocks the next is waited for half as long: a few together cost twice the patience.
            patience = max(PATIENCE / 2 ** min(len(self._asked), 9), LEAST_PATIENCE)
            self._asked[message_id] = now = time.monotonic()
            threading.Thread(target=self._ask, args=(message_id,), daemon=True).start()
            while message_id in self._asked and (answer := self._next(now + patience)) is not None:
                yield from self._read(*answer)
        while self._asked and (answer := self._next(max(self._asked.values()) + SETTLING)) is not None:
            yield from self._read(*answer)

    def _ask(self, message_id: str) -> None:
        try:
            self._answers.put((message_id, list(self._grid.pull_messages([message_id]))))
        except Exception as error:
            self._answers.put((message_id, error))

    def _next(self, until: float) -> tuple[str, list[Message] | Exception] | None:
        try:
            return self._answers.get(timeout=max(until - time.monotonic(), 0))
        except queue.Empty:
            return None

    def _read(self, message_id: str, found: list[Message] | Exception) -> Iterator[tuple[str, Message | Refused]]:
        del self._asked[message_id]
        if isinstance(found, Exception):
            if _is_of_transport(found):
                raise found
            # It is gone: the SuperLink does not hand it out again.
            yield message_id, Refused(f"it cannot be unpacked ({type(found).__name__}: {found})")
            return
        for reply in found:
            if reply.metadata.reply_to_message_id == message_id:
                yield message_id, reply


def _is_of_transport(error: Exception) -> bool:
    """Whether the way to the SuperLink failed; any other exception of a pull comes from unpacking a client's bytes."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "httpx"  # Flower's HTTP client


def _ending_with(grid: Grid, over: threading.Event) -> Grid:
    """Return the grid, or a copy that stops waiting for what is announced and not uploaded once `over` is set."""
    flower = sys.modules.get("flwr.superlink.grid.http_grid")  # takes a second to import where Flower has not done so
    if flower is None or not isinstance(grid, flower.HttpGrid):
        return grid
    http: Any = grid
    copied: Grid = copy.copy(grid)
    vars(copied)["_client"] = _EndingClient(http._runtime_client, over)
    return copied


class _EndingClient:
    """Flower's client of the SuperLink, to which nothing is there any more once `over` is set."""

    def __init__(self, client: Any, over: threading.Event) -> None:
        self._client = client
        self._over = over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # Flower's name
        return PullObjectResponse(object_found=False) if self._over.is_set() else self._client.PullObject(request)


def is_from(node_id: int, reply: Message) -> bool:
    """Whether a reply is this node's, or the SuperLink's report that the node is gone."""
    sender = reply.metadata.src_node_id
    return sender == node_id or (sender == SUPERLINK_NODE_ID and reply.has_error())


def content_of(message: Message) -> RecordDict:
    """The records that a reply carries; none where it has no content, or something else in its place."""
    content = message.content if message.has_content() else None
    return content if isinstance(content, RecordDict) else RecordDict()


def _check_worker(reply: Message) -> None:
    """End the run where a process of the simulation has died, by what Ray says of it.

    Flower hands it messages as before, and to it first, for it is never busy: from then on they fail at once.

    Raises
    ------
    WorkerDied
    """
    if not reply.has_error() or reply.error.code != ErrorCode.UNKNOWN:
        return
    if DEAD_WORKER.search(reason := reply.error.reason or ""):
        raise WorkerDied(
            "a process in which clients of the simulation work died, most often for want of memory, and Flower "
            "goes on giving it messages, so the run ends; with more CPUs for each client fewer work at a time "
            f"({first_line(reason)})"
        )
