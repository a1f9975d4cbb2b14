"""Models as rows of one matrix: the form in which the server keeps and combines them.

The matrix is in memory, or in a file that is mapped into it. What is read or written of a mapped file counts as the
process's memory until it is let go (`let_go`). That loses nothing: the system has it, and writes it to the disk in its
own time.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord

from kindred.client.state import default_root
from kindred.messages import ClientId, check, in_order, read_record, to_record

from .admission import norm

# Columns that one step of a blocked computation takes at the most, and its share of the numbers kept, for it may be a
# copy; fewer numbers than the least would not be worth a step.
BLOCK = 1 << 16
SHARE = 1 / 256
AT_LEAST = 1 << 16

# Rows of a mapped file that are read before they are let go.
MAPPED_AT_ONCE = 64

# Sums that are made at a time: many enough for an efficient matrix product, and few beside the models kept where these
# are not many numbers, which are quickly gone through again.
SUMS_AT_ONCE, FEW_SUMS = 64, 8
NOT_MANY = 1 << 24

# What PyTorch calls the buffers of its normalisation layers.
NORMALISATION_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Layout:
    """Where each array of a model lies in a flat vector of floats: parameters first, then floating buffers.

    Integer buffers (counters) are not part of the vector: nobody averages them.

    Parameters
    ----------
    record : ArrayRecord or mapping of str to ndarray
        A model, as from `ArrayRecord(module.state_dict())`, or anything else that clients send.
    buffers : collection of str, optional
        Names of the entries that the optimiser does not train. By default those that end like the
        buffers of PyTorch's normalisation layers.
    """

    def __init__(self, record: ArrayRecord | Mapping[str, np.ndarray], buffers: Collection[str] | None = None) -> None:
        arrays = read_record(record) if isinstance(record, ArrayRecord) else record
        if not arrays:
            raise ValueError("initial_arrays is empty: it must hold a model, e.g. ArrayRecord(module.state_dict())")
        if buffers is None:
            buffers = [name for name in arrays if name.rsplit(".", 1)[-1] in NORMALISATION_BUFFERS]
        self.shapes = {name: array.shape for name, array in arrays.items()}
        self.dtypes = {name: array.dtype for name, array in arrays.items()}
        floats = [name for name, array in arrays.items() if np.issubdtype(array.dtype, np.floating)]
        self.integers = [name for name in arrays if name not in floats]
        self.slices: dict[str, slice] = {}
        self.parameters = parameters = [name for name in floats if name not in buffers]
        end = 0
        for name in (*parameters, *(name for name in floats if name in buffers)):
            start, end = end, end + arrays[name].size
            self.slices[name] = slice(start, end)
        self.num_parameters = self.slices[parameters[-1]].stop if parameters else 0
        self.size = end
        wide = any(self.dtypes[name] == np.float64 for name in floats)
        self.dtype = np.dtype(np.float64 if wide else np.float32)

    def mismatch(self, arrays: Mapping[str, np.ndarray], whole: bool = True) -> str | None:
        """Say in a few words how arrays differ from this model's; None if they do not.

        With `whole` false they may be some of the floats alone.
        """
        due = self.shapes if whole else self.slices
        for name in self.shapes if whole else ():
            if name not in arrays:
                return f"array {name!r} is missing"
        for name, array in arrays.items():
            if name not in due:
                return f"array {name!r} is not part of the model"
            if array.shape != self.shapes[name] or array.dtype != self.dtypes[name]:
                return (
                    f"array {name!r} is {array.dtype} {array.shape}, expected {self.dtypes[name]} {self.shapes[name]}"
                )
        return None

    def distance(self, arrays: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> float:
        """The L2 norm, over the parameters, of the difference between two models."""
        return norm(arrays[name] - others[name] for name in self.parameters)

    def flatten(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """Write the floats of a model into `out`, shape (size,)."""
        for name, place in self.slices.items():
            out[place] = arrays[name].reshape(-1)

    def integer_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Copies of the integer buffers (a view would keep the whole message alive)."""
        return {name: arrays[name].copy() for name in self.integers}

    def record(self, row: np.ndarray, integers: Mapping[str, np.ndarray]) -> ArrayRecord:
        """The model whose floats are `row`, shape (size,), in the order and types it came in."""
        return to_record(
            {
                name: row[self.slices[name]].reshape(shape).astype(self.dtypes[name], copy=False)
                if name in self.slices
                else integers[name]
                for name, shape in self.shapes.items()
            }
        )


def last_layers(names: Iterable[str], count: int) -> list[str]:
    """The entries of a model's last layers, in its order.

    Parameters
    ----------
    names : iterable of str
        Of a model's parameters and buffers, in the order of its state dict: those of a layer differ after the last dot
        alone, as in "head.weight" and "head.bias".
    count : int
        Layers, 1 or more.

    Raises
    ------
    ValueError
        The model has no more layers than that: nothing would be left.
    """
    names = list(names)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    check(
        "head_layers",
        count,
        1 <= count < len(layers),
        f"1 to {len(layers) - 1}, for the model has {len(layers)} layers",
    )
    return [name for name in names if name.rpartition(".")[0] in layers[-count:]]


def drawn_anew(arrays: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """A model with the numbers of another, each array's in a random order: what another first draw would have been."""
    rng = np.random.default_rng(seed)
    return {name: rng.permutation(array.reshape(-1)).reshape(array.shape) for name, array in arrays.items()}


Item = TypeVar("Item")


class InTurn(Generic[Item]):
    """Hands on what clients send in a given order, however it comes: sums then have the same bits.

    What comes before its turn waits; the rest is handed on at once and not kept.

    Parameters
    ----------
    order : sequence of client ids
        Of those who may send something.
    hand_on : callable
        Given a client and what it sent.
    """

    def __init__(self, order: Sequence[ClientId], hand_on: Callable[[ClientId, Item], None]) -> None:
        self._turns = list(reversed(order))
        self._waiting: dict[ClientId, Item] = {}
        self._hand_on = hand_on

    def add(self, client: ClientId, item: Item) -> None:
        """Take what a client sent."""
        self._waiting[client] = item
        while self._turns and self._turns[-1] in self._waiting:
            self._next()

    def finish(self) -> None:
        """Hand on what still waits: for clients that sent nothing."""
        while self._waiting:
            if self._turns[-1] in self._waiting:
                self._next()
            else:
                self._turns.pop()

    def _next(self) -> None:
        client = self._turns.pop()
        self._hand_on(client, self._waiting.pop(client))


class ClientModels(Mapping[ClientId, ArrayRecord]):
    """The last model of each client, held once, as the rows of one (m, d) matrix.

    As a mapping it goes from client ids, in order, to records, each packed when it is asked for.

    Parameters
    ----------
    layout : Layout
        Of all clients' models.
    store : {"memory", "disk"}
        Where the matrix is. On disk it is a file without a name in `state.default_root()`, which is gone when the
        process ends, however it ends.
    """

    def __init__(self, layout: Layout, store: str = "memory") -> None:
        self.layout = layout
        self._file = _file_without_name() if store == "disk" else None
        self._rows = np.empty((0, layout.size), layout.dtype)
        self._sums = self._rows  # kept from round to round: new memory costs as much as the product
        self._index: dict[ClientId, int] = {}
        self._integers: dict[ClientId, dict[str, np.ndarray]] = {}

    def __getitem__(self, client: ClientId) -> ArrayRecord:
        return self.layout.record(self.row(client), self._integers[client])

    def __iter__(self) -> Iterator[ClientId]:
        return iter(in_order(self._index))

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, client: object) -> bool:
        return client in self._index

    def reserve(self, count: int) -> None:
        """Make room for `count` models in all. Memory is taken as models come, not before; a file, at once."""
        if count > len(self._rows):
            shape, used = (count, self.layout.size), len(self._index)
            if self._file is None:
                rows = np.empty(shape, self.layout.dtype)
                rows[:used] = self._rows[:used]
                self._rows = rows
            else:  # what it holds stays where it is
                self._rows = _mapped(self._file.fileno(), shape, self.layout.dtype)

    def put(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep a client's model in place of its last one."""
        if client not in self._index:
            self.reserve(len(self._index) + 1)
            self._index[client] = len(self._index)
        self.layout.flatten(arrays, self.row(client))
        self._integers[client] = self.layout.integer_arrays(arrays)

    def row(self, client: ClientId) -> np.ndarray:
        """The floats of a client's model, shape (d,): a view, to be changed in place."""
        let_go(self._rows)  # those asked for before
        row: np.ndarray = self._rows[self._index[client]]
        return row

    def blocks(self, clients: Sequence[ClientId], stop: int | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Go through the models of these clients, some columns at a time.

        Yields
        ------
        columns : slice
            At most BLOCK columns, up to `stop` (default all).
        block : ndarray, shape (len(clients), columns)
            A view where the clients' rows are in memory and follow each other, else a copy.
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
                    let_go(self._rows)
                yield columns, block
            elif index == list(range(index[0], index[0] + len(index))):
                yield columns, self._rows[index[0] : index[0] + len(index), columns]
            else:
                yield columns, self._rows[index, columns]

    def combinations(self, weights: np.ndarray, senders: Sequence[ClientId]) -> Iterator[np.ndarray]:
        """Weighted sums of clients' models, one after the other.

        Parameters
        ----------
        weights : ndarray, shape (r, m)
            A row for each sum.
        senders : sequence of m client ids

        Yields
        ------
        ndarray, shape (d,)
            To be used before the next is asked for: the memory is used again.
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
        """A combined model for a client: floats from `row`, integer buffers the client's own."""
        return self.layout.record(row, self._integers[client])

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs: clients in the order of their rows, a view of these, and integer buffers."""
        let_go(self._rows)
        # Of all clients together: a checkpoint with an entry for each takes longer.
        integers = {
            name: np.stack([self._integers[client][name] for client in self._index])
            for name in self.layout.integers
            if self._index
        }
        return {"clients": list(self._index), "rows": self._rows[: len(self._index)], "integers": integers}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, whose arrays are this object's own from now on."""
        rows = state["rows"]
        if self._file is None:
            self._rows = np.require(rows, requirements="W")
        else:
            self.reserve(len(rows))
            for i, row in enumerate(rows):
                self._rows[i] = row
                let_go(self._rows)
                let_go(rows)
        self._index = {client: place for place, client in enumerate(state["clients"])}
        self._integers = {
            client: {name: np.array(array[i]) for name, array in state["integers"].items()}
            for client, i in self._index.items()
        }


def let_go(array: np.ndarray) -> None:
    """Have the pages of a mapped file that an array lies in count as the process's memory no more; else do nothing.

    The array stays as it is: pages come back as they are used.
    """
    if (mapping := mapping_of(array)) is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file that an array lies in, if it does."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _file_without_name() -> IO[bytes]:
    root = default_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=root)


def _mapped(file: int, shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
    """The matrix that a file holds from its start; the file becomes as long as that if it is shorter."""
    size = max(math.prod(shape) * dtype.itemsize, 1)
    if hasattr(os, "posix_fallocate"):  # without room on the disk, to write into the mapping would end the process
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
