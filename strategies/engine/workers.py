"""The engine of worker processes: a Flower Grid whose clients work in processes of this machine.

Each process has one connection to this one and answers the messages that come through it. A client's messages go to the
process that answered its last one, which has its data; a process that has nothing else to do takes over another's
client. channel.py copies the models.

On Linux the processes are forked, so that they share the data that this process has loaded; elsewhere, and with a GPU,
which a forked process cannot use, they are started anew. They end with the grid, and with this process, in whatever way
it ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore import log
from flwr.supercore.object_ref import load_app

from kindred.lazy import lazy

from .channel import AHEAD, Channel, NoSharedMemory
from .inline import InlineGrid, answer, identify

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

PATIENCE = 0.5  # seconds to wait for a reply before the caller looks at its deadline


class WorkerGrid(InlineGrid):
    """A Grid of `num_clients` nodes whose ClientApp runs in worker processes.

    Parameters
    ----------
    client_app : str
        "package.module:attribute" of the ClientApp, as in Flower; each process imports it.
    num_clients : int
    run_config
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
        *,
        workers: int,
        threads: int = 1,
        gpus: int = 0,
    ) -> None:
        super().__init__(load_app(client_app, RuntimeError), num_clients, run_config)
        self._reference = client_app
        self._threads, self._gpus = threads, gpus
        # A forked process could use no GPU, nor several threads of PyTorch.
        self._method = "fork" if sys.platform == "linux" and not gpus and threads == 1 else "spawn"
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
            worker = busy[ready]
            self._receive(worker)
            while worker.given and worker.channel and worker.channel.connection.poll():
                self._receive(worker)
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

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop messages that have not been answered, and end the processes that are at work on them.

        A process that is still being started is not ended: otherwise it could never finish that.
        """
        ids = set(message_ids)
        for worker in self._workers:
            if worker.has_started and any(message.metadata.message_id in ids for message in worker.given):
                worker.end()
                worker.waiting.extendleft(reversed(worker.given))
                worker.given.clear()
        for messages in (self._new, *(worker.waiting for worker in self._workers)):
            kept = [message for message in messages if message.metadata.message_id not in ids]
            messages.clear()
            messages.extend(kept)

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
                if len(worker.given) < ahead and waiting >= least and (message := self._next(worker)):
                    self._give(worker, message)
                    waiting -= 1

    def _next(self, worker: _Worker) -> Message | None:
        """Take the next message for a process, to a client of which none has a message: it changes the Context."""
        at_work = {message.metadata.dst_node_id for each in self._workers for message in each.given}
        fullest = max(self._workers, key=lambda each: len(each.waiting))
        for messages in (worker.waiting, self._new, fullest.waiting):
            for place, message in enumerate(messages):
                if message.metadata.dst_node_id not in at_work:
                    del messages[place]
                    return message
        return None

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
        worker.channel = Channel(ours, f"{name}-server", f"{name}-client")
        # A forked process inherits all channels: it would keep connections open when this process has ended, and memory
        # that others have freed.
        inherited = [each.channel for each in self._workers if each.channel and self._method == "fork"]
        gpu = worker.number % self._gpus if self._gpus else None
        process = processes.Process(
            target=_work,
            args=(theirs, name, inherited, self._reference, self._contexts, self._threads, gpu),
            daemon=True,
        )
        worker.has_started = False
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
        worker.has_started = True
        if isinstance(received[0], int):
            log(received[0], "%s", received[1])
            return
        reply, state = received
        message = worker.given.popleft()
        if state is not None:
            self._contexts[message.metadata.dst_node_id].state = state
        self._answers[message.metadata.message_id] = reply

    def _bury(self, worker: _Worker) -> None:
        """Answer the message at which a process ended with an error, and let its next ones be given out again."""
        code = worker.end()
        failed, *others = worker.given
        worker.given.clear()
        error = Error(ErrorCode.CLIENT_APP_CRASHED, f"the process that worked for it {how_ended(code)}")
        self._answers[failed.metadata.message_id] = Message(error, reply_to=failed)
        worker.waiting.extendleft(reversed(others))


@dataclass(eq=False)
class _Worker:
    """A process, the messages that wait for it, and those that it has: at most AHEAD."""

    number: int
    process: Any = None
    channel: Any = None
    has_started: bool = False  # something has come from the process
    waiting: deque[Message] = field(default_factory=deque)
    given: deque[Message] = field(default_factory=deque)

    def end(self) -> int:
        """End the process, if there is one, and return its exit code."""
        if self.process is None:
            return 0
        self.channel.connection.close()
        self.process.kill()
        self.process.join()
        self.channel.free()
        code, self.process, self.channel = self.process.exitcode, None, None
        return code


def _work(
    connection: Connection,
    name: str,
    inherited: Iterable[Channel],
    reference: str,
    contexts: Mapping[int, Context],
    threads: int,
    gpu: int | None,
) -> None:
    """Answer messages until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the first one decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.leave()
    threading.Thread(target=end_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    torch.set_num_threads(threads)
    logging.getLogger("flwr").handlers = [_ToServer(connection)]
    for run_id in {context.run_id for context in contexts.values()}:
        identify(run_id)
    client_app = load_app(reference, RuntimeError)
    channel = Channel(connection, f"{name}-client", f"{name}-server")
    with suppress(EOFError, OSError):
        while True:
            message, state = channel.receive()
            context = contexts[message.metadata.dst_node_id]
            context.state = state
            reply = answer(client_app, message, context)
            try:
                channel.send(reply, context.state)
            except NoSharedMemory as error:
                channel.send(Message(Error(ErrorCode.UNKNOWN, str(error)), reply_to=message), None)


def how_ended(code: int) -> str:
    """Return how a process with this exit code ended, as a phrase."""
    return f"was killed by signal {-code}, most often for lack of memory" if code < 0 else f"ended with code {code}"


def end_with_parent() -> None:
    """Wait until the process that started this one has ended, and end this one, which may hold its locks."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # this process is a child
    parent.join()
    os._exit(1)


class _ToServer(logging.Handler):
    """Sends the lines of a process's log to the process of the server."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.INFO)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._connection.send((record.levelno, record.getMessage()))
