"""The engine of worker processes: a Flower Grid whose clients work in processes of this machine.

Each process has one connection to this one and answers the messages that come through it. A client's messages go to the
process that answered its last one, which has its data; a process that has nothing else to do takes over another's
client. Models are copied into blocks of shared memory, and out of them; the blocks are kept for the next ones.

On Linux the processes are forked, so that they share the data that this process has loaded; elsewhere, and with a GPU,
which a forked process cannot use, they are started anew. They end with the grid, and with this process, in whatever way
it ends.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto, recorddict_from_proto, recorddict_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore import log
from flwr.supercore.object_ref import load_app

from kindred.lazy import lazy

from .inline import InlineGrid, answer, identify

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

AHEAD = 2  # messages that a process has while many wait, so that it need not wait for this process
LEAST_SHARED = 1 << 14  # bytes; less travels through the pipe, which holds AHEAD such messages without a reader
PATIENCE = 0.5  # seconds to wait for a reply before the caller looks at its deadline


class WorkerGrid(InlineGrid):
    """A Grid of `num_clients` nodes whose ClientApp runs in worker processes.

    Parameters
    ----------
    client_app : str
        "package.module:attribute" of the ClientApp, as in Flower; each process imports it.
    num_clients : int
    run_config, node_configs
        As in `InlineGrid`.
    workers : int
        Number of processes, 1 or more. They start with the first message.
    threads : int
        PyTorch's threads in each process.
    gpus : int
        GPUs of this machine among which the processes are distributed; 0: none is used.
    """

    def __init__(
        self,
        client_app: str,
        num_clients: int,
        run_config: Mapping[str, Any] | None = None,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
        *,
        workers: int,
        threads: int = 1,
        gpus: int = 0,
    ) -> None:
        super().__init__(load_app(client_app, RuntimeError), num_clients, run_config, node_configs)
        self._reference = client_app
        self._threads, self._gpus = threads, gpus
        self._method = "fork" if sys.platform == "linux" and not gpus else "spawn"
        self._workers = [_Worker(i) for i in range(workers)]
        self._last: dict[int, _Worker] = {}  # node id -> the process that had its last message
        self._new: deque[Message] = deque()  # messages that wait, to nodes that have had none
        self._answers: dict[str, Message] = {}  # by the id of the message that they answer

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = super().push_messages(messages)
        for message in self._waiting.values():
            worker = self._last.get(message.metadata.dst_node_id)
            (worker.waiting if worker else self._new).append(message)
        self._waiting.clear()
        self._hand_out()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Wait for a reply, at most PATIENCE, and return those to these messages that have arrived."""
        busy = {worker.channel.connection: worker for worker in self._workers if worker.given}
        for ready in wait(list(busy), PATIENCE):
            self._receive(busy[ready])
        self._hand_out()
        wanted = message_ids if isinstance(message_ids, Set) else set(message_ids)
        return [self._answers.pop(message_id) for message_id in list(self._answers) if message_id in wanted]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        waiting = set(self.push_messages(messages))
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        replies: list[Message] = []
        while waiting and time.monotonic() < end:
            replies += (arrived := self.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
        return replies

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()

    def _hand_out(self) -> None:
        """Give each process a waiting message, and a further one while more wait than there are processes."""
        waiting = len(self._new) + sum(len(worker.waiting) for worker in self._workers)
        for ahead in range(1, AHEAD + 1):
            for worker in self._workers:
                least = 1 if ahead == 1 else len(self._workers) + 1
                if len(worker.given) < ahead and waiting >= least:
                    fullest = max(self._workers, key=lambda each: len(each.waiting)).waiting
                    self._give(worker, (worker.waiting or self._new or fullest).popleft())
                    waiting -= 1

    def _give(self, worker: _Worker, message: Message) -> None:
        node = message.metadata.dst_node_id
        self._last[node] = worker
        if worker.process is None or not (worker.given or worker.process.is_alive()):  # else `_receive` finds its end
            worker.end()
            self._start(worker)
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.channel.send(message, self._contexts[node].state)
        worker.given.append(message)

    def _start(self, worker: _Worker) -> None:
        resource_tracker.ensure_running()  # one for all processes, whichever of them frees a block of shared memory
        processes: Any = multiprocessing.get_context(self._method)
        ours, theirs = processes.Pipe()
        name = f"kindred-{secrets.token_hex(4)}"
        worker.channel = _Channel(ours, f"{name}-server", f"{name}-client")
        # A forked process inherits all connections; copies of them would keep them open when this process has ended.
        inherited = [each.channel.connection for each in self._workers if each.channel and self._method == "fork"]
        gpu = worker.number % self._gpus if self._gpus else None
        process = processes.Process(
            target=_work,
            args=(theirs, name, inherited, self._reference, self._contexts, self._threads, gpu),
            daemon=True,
        )
        process.start()
        worker.process = process  # only now can it be ended
        theirs.close()

    def _receive(self, worker: _Worker) -> None:
        """Take what a process has sent: lines of its log, and an answer. If it has ended, that is the answer."""
        try:
            received = worker.channel.receive()
        except (EOFError, OSError):
            self._bury(worker)
            return
        if isinstance(received[0], int):
            log(received[0], "%s", received[1])
            return
        reply, state = received
        message = worker.given.popleft()
        self._contexts[message.metadata.dst_node_id].state = state
        self._answers[message.metadata.message_id] = reply

    def _bury(self, worker: _Worker) -> None:
        """Answer the message at which a process ended with an error, and let its next ones be given out again."""
        code = worker.end()
        failed, *others = worker.given
        worker.given.clear()
        how = f"was killed by signal {-code}, most often for lack of memory" if code < 0 else f"ended with code {code}"
        error = Error(ErrorCode.CLIENT_APP_CRASHED, f"the process that worked for it {how}")
        self._answers[failed.metadata.message_id] = Message(error, reply_to=failed)
        worker.waiting.extendleft(reversed(others))


@dataclass(eq=False)
class _Worker:
    """A process, the messages that wait for it, and those that it has: at most AHEAD."""

    number: int
    process: Any = None
    channel: Any = None
    waiting: deque[Message] = field(default_factory=deque)
    given: deque[Message] = field(default_factory=deque)

    def end(self) -> int:
        """End the process, if there is one, and return its exit code."""
        if self.process is None:
            return 0
        self.channel.connection.close()
        self.process.terminate()
        self.process.join()
        self.channel.free()
        code, self.process, self.channel = self.process.exitcode, None, None
        return code


def _work(
    connection: Connection,
    name: str,
    inherited: Iterable[Connection],
    reference: str,
    contexts: Mapping[int, Context],
    threads: int,
    gpu: int | None,
) -> None:
    """Answer messages until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the first one decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    torch.set_num_threads(threads)
    logging.getLogger("flwr").handlers = [_ToServer(connection)]
    for run_id in {context.run_id for context in contexts.values()}:
        identify(run_id)
    client_app = load_app(reference, RuntimeError)
    channel = _Channel(connection, f"{name}-client", f"{name}-server")
    with suppress(EOFError, OSError):
        while True:
            message, state = channel.receive()
            context = contexts[message.metadata.dst_node_id]
            context.state = state
            channel.send(answer(client_app, message, context), context.state)


class _ToServer(logging.Handler):
    """Sends the lines of a process's log to the process of the server."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.INFO)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._connection.send((record.levelno, record.getMessage()))


# --- Transport ----------------------------------------------------------------------------------------


class _Channel:
    """One end of the connection between this process and another.

    Large messages are copied into blocks of shared memory. Each end writes into AHEAD blocks in turn, which are kept. A
    worker process never has more than AHEAD messages, so that the other end has read a block before its next turn. A
    block is replaced only by a larger one of the same name, when a message does not fit: so the reader notices it.

    Parameters
    ----------
    connection : Connection
    writes, reads : str
        Prefixes of the names of the blocks that this end writes, and of those that it reads; the turn follows.
    """

    def __init__(self, connection: Connection, writes: str, reads: str) -> None:
        self.connection = connection
        self._turns = itertools.cycle([f"{writes}{turn}" for turn in range(AHEAD)])
        self._names = [f"{end}{turn}" for end in (writes, reads) for turn in range(AHEAD)]
        self._blocks: dict[str, SharedMemory] = {}

    def send(self, message: Message, state: RecordDict) -> None:
        """Send a message and a client's state.

        The bytes of arrays are copied as they are, all else is serialized by Flower.
        """
        records = message.content.array_records.values() if message.has_content() else ()
        arrays = [array for record in records for array in record.values()]
        kept = [array.data for array in arrays]
        for array in arrays:
            array.data = b""
        try:
            texts = [message_to_proto(message).SerializeToString(), recorddict_to_proto(state).SerializeToString()]
        finally:
            for array, data in zip(arrays, kept, strict=True):
                array.data = data
        parts = [memoryview(part) for part in (*texts, *kept)]
        sizes = [part.nbytes for part in parts]
        if sum(sizes) < LEAST_SHARED:
            self.connection.send((sizes, b"".join(parts)))
            return
        name = next(self._turns)
        block = self._blocks.get(name)
        if block is None or block.size < sum(sizes):
            if block:
                _free(block)
            # A little larger, so that a message that is some bytes longer still fits.
            block = self._blocks[name] = SharedMemory(name, create=True, size=sum(sizes) + LEAST_SHARED)
        assert block.buf is not None  # it has one until it is closed
        for part, place in zip(parts, _places(sizes), strict=True):
            block.buf[place] = part
        self.connection.send((sizes, name))

    def receive(self) -> tuple[Any, Any]:
        """Return the next message and state, or the level and text of a line of the other's log.

        Raises
        ------
        EOFError, OSError
            The other process has ended.
        """
        first, second = self.connection.recv()
        if isinstance(first, int):
            return first, second
        if isinstance(second, bytes):
            return _unpacked(second, first)
        block = self._blocks.get(second)
        if block is None or block.size < sum(first):  # it is new
            if block:
                block.close()
            block = self._blocks[second] = SharedMemory(second)
        assert block.buf is not None
        return _unpacked(block.buf, first)

    def free(self) -> None:
        """Free the blocks of both ends after the other process has ended, also that of an answer still on its way."""
        for name in self._names:
            if block := self._blocks.get(name):
                with suppress(OSError):  # Ctrl-C came while it was being closed
                    block.close()
            # Opened anew: this registers it with Python's resource tracker, also if its maker was ended before it did.
            with suppress(FileNotFoundError, ValueError):  # ValueError: it was interrupted before the block had a size
                _free(SharedMemory(name))


def _unpacked(buffer: bytes | memoryview, sizes: Sequence[int]) -> tuple[Message, RecordDict]:
    # No part of a block is kept as a view: if Ctrl-C arrives here, the block could not be closed.
    about, state, *data = (bytes(buffer[place]) for place in _places(sizes))
    message = message_from_proto(ProtoMessage.FromString(about))
    if message.has_content():
        arrays = (array for record in message.content.array_records.values() for array in record.values())
        for array, values in zip(arrays, data, strict=True):
            array.data = values
    return message, recorddict_from_proto(ProtoRecordDict.FromString(state))


def _places(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield where in a block each part of a message lies."""
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        yield slice(end - size, end)


def _free(block: SharedMemory) -> None:
    """Free a block of shared memory, unless the process that made it has, or Ctrl-C came while it was being closed."""
    with suppress(OSError):
        block.close()
    with suppress(OSError):
        block.unlink()
