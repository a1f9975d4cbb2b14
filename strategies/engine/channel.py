"""The connection between the process of the server and a worker process: models travel in blocks of shared memory."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.app.message.message import make_message

from kindred.messages import ARRAYS, CONFIG, METRICS, records_of

AHEAD = 2  # messages that a process has while many wait, so that it need not wait for the other one
# Bytes; less travels through the pipe, which holds AHEAD such messages each way without a reader. macOS's holds 8 kB.
LEAST_SHARED = 1 << 14 if sys.platform == "linux" else 1 << 11


class NoSharedMemory(RuntimeError):
    """There is no room for a message in the machine's shared memory."""


class Channel:
    """One end of the connection between this process and another.

    Large messages are copied into blocks of shared memory. Each end writes into AHEAD blocks in turn, which are kept. A
    worker process never has more than AHEAD messages, so that the other end has read a block before its next turn. When
    a message does not fit, its block is replaced by a larger one of the same name and the next number.

    Parameters
    ----------
    connection : Connection
    writes, reads : str
        Prefixes of the names of the blocks that this end writes, and of those that it reads; the turn follows.
    """

    def __init__(self, connection: Connection, writes: str, reads: str) -> None:
        self.connection = connection
        self._turns = deque([f"{writes}{turn}" for turn in range(AHEAD)])  # the next one first
        self._names = [f"{end}{turn}" for end in (writes, reads) for turn in range(AHEAD)]
        self._blocks: dict[str, SharedMemory] = {}
        self._numbers = dict.fromkeys(self._names, 0)  # how many blocks of each name there have been

    def send(self, message: Message, state: RecordDict | None) -> None:
        """Send a message and a client's state; without a state the other end keeps the one that it has.

        The bytes of arrays are copied as they are. All else is JSON, which takes less time than Protocol Buffers.

        Raises
        ------
        NoSharedMemory
            Nothing was sent.
        """
        content = message.content if message.has_content() else None
        about = {
            "metadata": {name.removeprefix("_"): value for name, value in vars(message.metadata).items()},
            "error": [message.error.code, message.error.reason] if message.has_error() else None,
            "content": _described(content),
            "state": _described(state),
        }
        text = json.dumps(about, default=lambda value: {"hex": value.hex()}).encode()
        parts = [memoryview(part) for part in (text, *(array.data for array in _arrays_of(content, state)))]
        sizes = [part.nbytes for part in parts]
        if sum(sizes) < LEAST_SHARED:
            self.connection.send((sizes, b"".join(parts)))
            return
        name = self._turns[0]
        block = self._blocks.get(name)
        if block is None or block.size < sum(sizes):
            if block:
                _free(self._blocks.pop(name))
            # A little larger, so that a message that is some bytes longer still fits.
            block = self._blocks[name] = _new_block(name, sum(sizes) + LEAST_SHARED)
            self._numbers[name] += 1
        assert block.buf is not None  # it has one until it is closed
        for part, place in zip(parts, _places(sizes), strict=True):
            block.buf[place] = part
        self._turns.rotate(-1)
        self.connection.send((sizes, (name, self._numbers[name])))

    def receive(self) -> tuple[Any, Any]:
        """Return the next message and state (None: as before), or the level and text of a line of the other's log.

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
        name, number = second
        block = self._blocks.get(name)
        if block is None or self._numbers[name] != number:
            if block:
                block.close()
            block = self._blocks[name] = SharedMemory(name)
            self._numbers[name] = number
        assert block.buf is not None
        return _unpacked(block.buf, first)

    def leave(self) -> None:
        """Close this end in a process that has inherited it and has no part in it."""
        self.connection.close()
        for block in self._blocks.values():
            block.close()

    def free(self) -> None:
        """Free the blocks of both ends after the other process has ended, also that of an answer still on its way."""
        for name in self._names:
            if block := self._blocks.get(name):
                with suppress(OSError):  # Ctrl-C came while it was being closed
                    block.close()
            # Opened anew: this registers it with Python's resource tracker, also if its maker was ended before it did.
            with suppress(FileNotFoundError, ValueError):  # ValueError: it was interrupted before the block had a size
                _free(SharedMemory(name))
            # It may have been freed and still be registered: Ctrl-C, or the other process's end, came between the two.
            resource_tracker.register(f"/{name}", "shared_memory")
            resource_tracker.unregister(f"/{name}", "shared_memory")


def _unpacked(buffer: bytes | memoryview, sizes: Sequence[int]) -> tuple[Message, RecordDict | None]:
    # No part of a block is kept as a view: if Ctrl-C arrives here, the block could not be closed.
    text, *parts = (bytes(buffer[place]) for place in _places(sizes))
    about = json.loads(text)
    content, state = _records(about["content"]), _records(about["state"])
    for array, data in zip(_arrays_of(content, state), parts, strict=True):
        array.data = data
    about["metadata"].pop("delivered_at")
    error = Error(*about["error"]) if about["error"] else None
    return make_message(Metadata(**about["metadata"]), content, error), state


def _described(records: RecordDict | None) -> list[Any] | None:
    """Return the names, kinds and values of records, without the bytes of arrays."""
    if records is None:
        return None
    found: list[Any] = []
    for name, record in records.items():
        match record:
            case ArrayRecord():
                arrays = {key: (array.dtype, array.shape, array.stype) for key, array in record.items()}
                found.append((name, ARRAYS, arrays))
            case MetricRecord():
                found.append((name, METRICS, dict(record)))
            case _:
                found.append((name, CONFIG, dict(record)))
    return found


def _records(described: list[Any] | None) -> RecordDict | None:
    """Undo `_described`; the arrays have no bytes."""
    if described is None:
        return None
    records = RecordDict()
    for name, kind, items in described:
        if kind == ARRAYS:
            records[name] = arrays = ArrayRecord()
            for key, (dtype, shape, stype) in items.items():
                arrays[key] = Array(dtype, tuple(shape), stype, b"")
        elif kind == METRICS:
            records[name] = MetricRecord(items)
        else:
            records[name] = ConfigRecord({key: _value(value) for key, value in items.items()})
    return records


def _value(value: Any) -> Any:
    """Return a value from JSON, which has no bytes: they are a dict with a hexadecimal text."""
    if isinstance(value, list):
        return [_value(item) for item in value]
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


def _arrays_of(*contents: RecordDict | None) -> Iterator[Array]:
    """Yield the arrays in records."""
    for content in contents:
        for record in records_of(content, ArrayRecord) if content else ():
            yield from record.values()


def _places(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield where in a block each part of a message lies."""
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        yield slice(end - size, end)


def _new_block(name: str, size: int) -> SharedMemory:
    """Make a block of shared memory that has its memory: otherwise to write to it could kill the process."""
    block = SharedMemory(name, create=True, size=size)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(vars(block)["_fd"], 0, size)
        except OSError as error:
            _free(block)
            raise NoSharedMemory(
                f"a message of {size / 1e6:.3g} MB does not fit into the machine's shared memory ({error.strerror}): "
                "use fewer --workers, or enlarge /dev/shm (docker run --shm-size)"
            ) from None
    return block


def _free(block: SharedMemory) -> None:
    """Free a block of shared memory, unless the process that made it has, or Ctrl-C came while it was being closed."""
    with suppress(OSError):
        block.close()
    with suppress(OSError):
        block.unlink()
