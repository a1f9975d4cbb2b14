"""Models as rows of one matrix: the form in which the server stores and combines them.

The matrix is in memory, or in a file that is mapped into memory. Pages of a mapped file that are read or written count
as the process's memory until they are released (`release_pages`). Nothing is lost by that: the operating system has the
data and writes it to disk.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
from flwr.app import ArrayRecord

from kindred.client.state import default_root
from kindred.files import make_private
from kindred.messages import ClientId, in_order

from .layout import Layout

# One step of a blocked computation, which may be a copy, takes at most BLOCK columns and at most this share of all
# stored numbers, but at least AT_LEAST numbers: smaller steps would not be efficient.
BLOCK = 1 << 16
SHARE = 1 / 256
AT_LEAST = 1 << 16

# Rows of a mapped file that are read before they are released.
MAPPED_AT_ONCE = 64

# Sums computed at a time: enough for an efficient matrix product. If the stored models are fewer numbers than NOT_MANY,
# only FEW_SUMS, so that the sums take little memory beside the models; several passes over these are then quick.
SUMS_AT_ONCE, FEW_SUMS = 64, 8
NOT_MANY = 1 << 24


class ClientModels(Mapping[ClientId, ArrayRecord]):
    """The last model of each client, stored once, as the rows of one (m, d) matrix.

    As a mapping it goes from client ids, in order, to records; a record is packed at each access.

    Parameters
    ----------
    layout : Layout
        Layout of all clients' models.
    store : {"memory", "disk"}
        Where the matrix is. On disk it is a file without a name in `state.default_root()`, which disappears when the
        process ends, in whatever way.
    """

    def __init__(self, layout: Layout, store: str = "memory") -> None:
        self.layout = layout
        self._file = _file_without_name() if store == "disk" else None
        self._rows = np.empty((0, layout.size), layout.dtype)
        self._sums = self._rows  # reused in each round: allocating it costs as much as the matrix product
        self._index: dict[ClientId, int] = {}
        self._integers: dict[ClientId, dict[str, np.ndarray]] = {}
        self._medians: dict[str, np.ndarray] | None = None

    def __getitem__(self, client: ClientId) -> ArrayRecord:
        return self.layout.record(self.row(client), self._integers[client])

    def __iter__(self) -> Iterator[ClientId]:
        return iter(in_order(self._index))

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, client: object) -> bool:
        return client in self._index

    def reserve(self, count: int) -> None:
        """Make room for `count` models in total. Memory is used only as models arrive; a file's space at once."""
        if count > len(self._rows):
            shape, used = (count, self.layout.size), len(self._index)
            if self._file is None:
                rows = np.empty(shape, self.layout.dtype)
                rows[:used] = self._rows[:used]
                self._rows = rows
            else:  # the file's content is kept
                self._rows = _mapped(self._file.fileno(), shape, self.layout.dtype)

    def put(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> None:
        """Store a client's model in place of its last one."""
        if client not in self._index:
            self.reserve(len(self._index) + 1)
            self._index[client] = len(self._index)
        self.layout.flatten(arrays, self.row(client))
        self._integers[client] = self.layout.integer_arrays(arrays)
        self._medians = None

    def row(self, client: ClientId) -> np.ndarray:
        """Return the floats of a client's model, shape (d,): a view that may be changed in place."""
        release_pages(self._rows)  # releases the rows used before
        row: np.ndarray = self._rows[self._index[client]]
        return row

    def blocks(self, clients: Sequence[ClientId], stop: int | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Iterate over the models of these clients, in blocks of columns.

        Yields
        ------
        columns : slice
            At most BLOCK columns, up to `stop` (default: all).
        block : ndarray, shape (len(clients), columns)
            A view if the clients' rows are in memory and consecutive, else a copy.
        """
        index = [self._index[client] for client in clients]
        stop = self.layout.size if stop is None else stop
        numbers = max(AT_LEAST, int(SHARE * len(self) * self.layout.size))
        step = min(BLOCK, max(numbers // len(index), 1))
        for start in range(0, stop, step):
            columns = slice(start, min(start + step, stop))
            if self._file is not None:
                block = np.empty((len(index), columns.stop - start), self.layout.dtype)
                for first in range(0, len(index), MAPPED_AT_ONCE):
                    some = slice(first, first + MAPPED_AT_ONCE)
                    block[some] = self._rows[index[some], columns]
                    release_pages(self._rows)
                yield columns, block
            elif index == list(range(index[0], index[0] + len(index))):
                yield columns, self._rows[index[0] : index[0] + len(index), columns]
            else:
                yield columns, self._rows[index, columns]

    def combinations(self, weights: np.ndarray, senders: Sequence[ClientId]) -> Iterator[np.ndarray]:
        """Yield weighted sums of clients' models, one after the other.

        Parameters
        ----------
        weights : ndarray, shape (r, m)
            A row for each sum.
        senders : sequence of m client ids

        Yields
        ------
        ndarray, shape (d,)
            Valid only until the next one is requested: the memory is reused.
        """
        weights = weights.astype(self.layout.dtype)  # (r, m)
        at_once = FEW_SUMS if len(self) * self.layout.size < NOT_MANY else SUMS_AT_ONCE
        groups = np.array_split(weights, -(-len(weights) // at_once)) if len(weights) else []
        if groups and len(groups[0]) > len(self._sums):
            self._sums = np.empty((len(groups[0]), self.layout.size), self.layout.dtype)
        for group in groups:  # (g, m)
            sums = self._sums[: len(group)]  # (g, d)
            for columns, block in self.blocks(senders):  # (m, b)
                np.matmul(group, block, out=sums[:, columns])
            yield from sums

    def combined_record(self, row: np.ndarray, client: ClientId) -> ArrayRecord:
        """Return a combined model for a client: floats from `row`, integer buffers from the client's own model."""
        return self.layout.record(row, self._integers[client])

    def shared_integers(self) -> dict[str, np.ndarray]:
        """Return the integer buffers of models that others receive: the medians over all clients."""
        if self._medians is None:
            self._medians = self.layout.integer_medians([*self._integers.values()], self.layout.integers)
        return self._medians

    def shared_record(self, row: np.ndarray) -> ArrayRecord:
        """Return a combined model for all clients: floats from `row`, and `shared_integers`."""
        return self.layout.record(row, self.shared_integers())

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs: clients in the order of their rows, a view of these, and integer buffers."""
        release_pages(self._rows)
        # All clients' buffers are stacked: a checkpoint with an entry for each client takes longer.
        integers = {
            name: np.stack([self._integers[client][name] for client in self._index])
            for name in self.layout.integers
            if self._index
        }
        return {"clients": list(self._index), "rows": self._rows[: len(self._index)], "integers": integers}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned; this object takes over its arrays."""
        rows = state["rows"]
        if self._file is None:
            self._rows = np.require(rows, requirements="W")
        else:
            self.reserve(len(rows))
            for i, row in enumerate(rows):
                self._rows[i] = row
                release_pages(self._rows)
                release_pages(rows)
        self._index = {client: place for place, client in enumerate(state["clients"])}
        self._integers = {
            client: {name: np.array(array[i]) for name, array in state["integers"].items()}
            for client, i in self._index.items()
        }
        self._medians = None


def release_pages(array: np.ndarray) -> None:
    """Release the memory of the mapped file in which an array lies; do nothing for other arrays.

    The array stays valid: pages are read again when they are used.
    """
    if (mapping := mapping_of(array)) is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """Return the mapped file in which an array lies; None if it lies in none."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _file_without_name() -> IO[bytes]:
    root = default_root()
    make_private(root)
    return tempfile.TemporaryFile(dir=root)


def _mapped(file: int, shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
    """Map a file from its start as a matrix; a shorter file is extended."""
    size = max(math.prod(shape) * dtype.itemsize, 1)
    if hasattr(os, "posix_fallocate"):  # on a full disk, writing to the mapping would kill the process
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            raise OSError(
                error.errno,
                f"store is 'disk', where {shape[0]} models take {size} bytes, but "
                f"{default_root()} has no room for them ({error.strerror})",
            ) from None
    else:
        os.truncate(file, size)
    return np.ndarray(shape, dtype, mmap.mmap(file, size))
