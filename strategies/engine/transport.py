"""Transport of messages: send them, ask for the replies until a deadline, and attribute these to their senders."""

from __future__ import annotations

import copy
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, KeysView
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.serverapp import Grid

from kindred.messages import STATE_NOT_WRITTEN, first_line
from kindred.packing import packed, unpacked

from .admission import Refused

# Replies are asked for at once, then after growing pauses, so that a simulation is not slowed down and a remote
# SuperLink is not queried all the time.
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.01, 1.3, 1.0  # s
PATIENCE, LEAST_PATIENCE = 2.0, 0.05  # s to wait for the delivery of a reply before asking for the next in parallel
SETTLING = 0.5  # s to wait for the last deliveries, once all replies have been asked for
# A message expires with its exchange: a client that was absent or is slow must not work on messages of earlier rounds.
CLOCKS = 600.0  # s by which the clocks of a site and of the server may differ

# Ray's errors for a process that has died.
DEAD_WORKER = re.compile(r"ray\.exceptions\.(ActorDied|RayActor|OutOfMemory|WorkerCrashed)Error")


class WorkerDied(RuntimeError):
    """A worker process of the simulation has died, and Flower keeps sending it messages, which then fail."""


class StateNotWritten(RuntimeError):
    """Simulated clients cannot save their state: without it the run would be another one."""


def push(grid: Grid, message: Message, *, packs: bool = False) -> str | None:
    """Send one message, packed if `packs`, and return its id; None if the grid did not accept it."""
    if packs:
        message.content = packed(message.content)
    ids = list(grid.push_messages([message]))
    return (ids[0] or None) if ids else None


def pull(
    grid: Grid,
    message_ids: Collection[str],
    deadline: Callable[[], float],
    *,
    simulated: bool,
    source: Source | None = None,
) -> Iterator[tuple[str, Message | Refused]]:
    """Yield the first reply to each of these messages as the replies arrive, until the deadline.

    After the deadline every reply is asked for once more: all that have arrived by then are used, however many.

    Parameters
    ----------
    grid : Grid
    message_ids : collection of str
    deadline : callable
        Returns the deadline on `time.monotonic`'s clock; it may become earlier while replies arrive.
    simulated : bool
        Whether the clients are on this machine. Otherwise replies are asked for one by one, see `_Network`.
    source : Source, optional
        That of earlier calls, for messages that are asked for again after the deadline: the SuperLink delivers a reply
        once, and one that was on its way at an earlier deadline still counts. Its `over` is the caller's to set.

    Yields
    ------
    tuple of str and (Message or Refused)
        The message's id, and the reply or the reason why it cannot be read.
    """
    waiting = dict.fromkeys(message_ids)
    ends = source is None  # with this call
    source = source or source_of(grid, simulated=simulated)
    pause = FIRST_PAUSE
    try:
        while waiting:
            arrived = False
            started = time.monotonic()
            for message_id, reply in source.replies(waiting.keys()):
                if message_id in waiting:
                    del waiting[message_id]
                    arrived = True
                    yield message_id, reply
            now = time.monotonic()
            if not waiting or started >= deadline():
                return
            pause = FIRST_PAUSE if arrived else min(pause * PAUSE_GROWTH, LONGEST_PAUSE)
            if not arrived:
                # A simulation may have waited already; a SuperLink is left time for other work.
                rest = pause - (now - started) if simulated else max(pause, now - started)
                time.sleep(max(min(rest, deadline() - now), 0))
    finally:
        if ends:
            source.over.set()


def source_of(grid: Grid, *, simulated: bool) -> Source:
    """Return the object that requests replies from a grid."""
    return _Simulation(grid) if simulated else _Network(grid)


class _Simulation:
    """Asks for all replies at once, which in a simulation takes no time and unpacks nothing."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.over = threading.Event()

    def replies(self, message_ids: KeysView[str]) -> Iterator[tuple[str, Message | Refused]]:
        """Yield those of these replies that have arrived."""
        for reply in self._grid.pull_messages(message_ids):
            _check_simulation(reply)
            yield reply.metadata.reply_to_message_id, reply


class _Network:
    """Asks for replies over a network, one by one, each in its own thread.

    There are two reasons to ask one by one. First, Flower unpacks a reply when it is requested. A reply that cannot be
    unpacked would make the others requested with it fail too. Its sender could also declare it the answer to any other.
    Second, Flower blocks for minutes if a client has announced a reply and does not upload it. After a while such a
    thread is no longer waited for, and the other replies are asked for in parallel. Its reply still counts if it comes
    in time. An answer takes some 20 ms.

    Attributes
    ----------
    over : Event
        Once set, it ends the waiting of such threads within seconds.
    """

    def __init__(self, grid: Grid) -> None:
        self.over = threading.Event()
        self._grid = _ending_with(grid, self.over)
        self._answers: queue.SimpleQueue[tuple[str, list[Message] | Exception]] = queue.SimpleQueue()
        self._asked: dict[str, float] = {}  # messages whose reply a thread waits for -> start of the wait

    def replies(self, message_ids: KeysView[str]) -> Iterator[tuple[str, Message | Refused]]:
        """Yield those of these replies that have arrived."""
        for message_id in list(message_ids):
            if message_id in self._asked:
                continue
            # Each blocking reply halves the wait for the next one: all of them together cost about twice PATIENCE.
            patience = max(PATIENCE / 2 ** min(len(self._asked), 9), LEAST_PATIENCE)
            self._asked[message_id] = now = time.monotonic()
            threading.Thread(target=self._ask, args=(message_id,), daemon=True).start()
            while message_id in self._asked and (answer := self._next(now + patience)) is not None:
                yield from self._read(*answer)
        while self._asked and (answer := self._next(max(self._asked.values()) + SETTLING)) is not None:
            yield from self._read(*answer)

    def _ask(self, message_id: str) -> None:
        try:
            replies = list(self._grid.pull_messages([message_id]))
            for reply in replies:
                if reply.has_content():
                    reply.content = unpacked(reply.content)
            self._answers.put((message_id, replies))
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
            # The reply is lost: the SuperLink does not deliver it again.
            yield message_id, Refused(f"it cannot be unpacked ({type(found).__name__}: {found})")
            return
        for reply in found:
            if reply.metadata.reply_to_message_id == message_id:
                yield message_id, reply


Source = _Simulation | _Network


def _is_of_transport(error: Exception) -> bool:
    """Return whether the connection to the SuperLink failed; other exceptions come from unpacking a client's bytes."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "httpx"  # Flower's HTTP client


def _ending_with(grid: Grid, over: threading.Event) -> Grid:
    """Return the grid, or a copy that stops waiting for announced but missing replies once `over` is set."""
    flower = sys.modules.get("flwr.superlink.grid.http_grid")  # importing it takes a second, if Flower has not done so
    if flower is None or not isinstance(grid, flower.HttpGrid):
        return grid
    http: Any = grid
    copied: Grid = copy.copy(grid)
    vars(copied)["_client"] = _EndingClient(http._runtime_client, over)
    return copied


class _EndingClient:
    """Flower's client of the SuperLink, which finds no object any more once `over` is set."""

    def __init__(self, client: Any, over: threading.Event) -> None:
        self._client = client
        self._over = over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # Flower's name
        return PullObjectResponse(object_found=False) if self._over.is_set() else self._client.PullObject(request)


def is_from(node_id: int, reply: Message) -> bool:
    """Return whether a reply is from this node, or is the SuperLink's report that the node is gone."""
    sender = reply.metadata.src_node_id
    return sender == node_id or (sender == SUPERLINK_NODE_ID and reply.has_error())


def content_of(message: Message) -> RecordDict:
    """Return the records of a reply; an empty RecordDict if it has no content or content of another type."""
    content = message.content if message.has_content() else None
    return content if isinstance(content, RecordDict) else RecordDict()


def _check_simulation(reply: Message) -> None:
    """End the run if a reply holds an error of the simulation, not of the client.

    Flower keeps sending messages to a dead process, and to it first, because it is never busy. From then on messages
    fail at once. Simulated clients share the disk for their state.

    Raises
    ------
    WorkerDied
        The reply holds Ray's error for a dead worker process.
    StateNotWritten
        The client could not save its state.
    """
    if not reply.has_error():
        return
    reason = reply.error.reason or ""
    said, found, rest = reason.partition(STATE_NOT_WRITTEN)
    if found and said.endswith("OSError: "):
        raise StateNotWritten(first_line(found + rest))
    if reply.error.code == ErrorCode.UNKNOWN and DEAD_WORKER.search(reason):
        raise WorkerDied(
            "a worker process of the simulation died, most often for lack of memory; Flower keeps sending it "
            "messages, so the run ends; give each client more CPUs, so that fewer clients work at a time "
            f"({first_line(reason)})"
        )
