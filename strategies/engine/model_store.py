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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord

from kindred.client.state import default_root
from kindred.files import make_private
from kindred.messages import ClientId, check, in_order, read_record, to_record

from .admission import norm

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

# PyTorch's names for the buffers of its normalisation layers.
NORMALISATION_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
NEVER_NEGATIVE = ("running_var", "num_batches_tracked")


class Layout:
    """The place of each array of a model in a flat vector of floats: parameters first, then floating buffers.

    Integer buffers (counters) are not part of the vector, because they are never averaged.

    Parameters
    ----------
    record : ArrayRecord or mapping of str to ndarray
        A model, such as `ArrayRecord(module.state_dict())`, or any other arrays that clients send.
    buffers : collection of str, optional
        Names of the entries that the optimiser does not train. By default those named like the buffers of PyTorch's
        normalisation layers.

    Raises
    ------
    ValueError
        There is no array, an array of complex numbers, or a name in `buffers` that no array has.
    """

    def __init__(self, record: ArrayRecord | Mapping[str, np.ndarray], buffers: Collection[str] | None = None) -> None:
        arrays = read_record(record) if isinstance(record, ArrayRecord) else record
        if not arrays:
            raise ValueError("initial_arrays is empty: it must hold a model, e.g. ArrayRecord(module.state_dict())")
        if buffers is None:
            buffers = [name for name in arrays if name.rsplit(".", 1)[-1] in NORMALISATION_BUFFERS]
        check_buffers(buffers, arrays)
        for name, array in arrays.items():
            if np.iscomplexobj(array):
                raise ValueError(f"array {name!r} of the model is of type {array.dtype}, allowed: real numbers")
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

        Variances and counters of normalisation layers are 0 or more. With `whole` false the arrays are an update: a
        subset of the model's float arrays, of any values.
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
            if whole and name.endswith(NEVER_NEGATIVE) and array.size and array.min() < 0:
                return f"array {name!r} holds {array.min():g}, allowed: 0 or more"
        return None

    def distance(self, arrays: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> float:
        """Return the L2 norm, over the parameters, of the difference between two models."""
        return norm(arrays[name] - others[name] for name in self.parameters)

    def flatten(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """Write the floats of a model into `out`, shape (size,)."""
        for name, place in self.slices.items():
            out[place] = arrays[name].reshape(-1)

    def views(self, row: np.ndarray) -> dict[str, np.ndarray]:
        """Return the floats of `row`, shape (size,), as arrays by name: views of it, in its type."""
        return {name: row[place].reshape(self.shapes[name]) for name, place in self.slices.items()}

    def integer_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return copies of the integer buffers (a view would keep the whole message alive)."""
        return {name: arrays[name].copy() for name in self.integers}

    def record(self, row: np.ndarray, integers: Mapping[str, np.ndarray]) -> ArrayRecord:
        """Return the model whose floats are `row`, shape (size,), with the original order and types of its arrays."""
        return to_record(
            {
                name: row[self.slices[name]].reshape(shape).astype(self.dtypes[name], copy=False)
                if name in self.slices
                else integers[name]
                for name, shape in self.shapes.items()
            }
        )


def check_buffers(buffers: Iterable[str], names: Collection[str]) -> None:
    """Raise ValueError if one of these buffers is none of the model's arrays, which have these names."""
    for name in buffers:
        check(
            "buffers", name, name in names, "names of arrays of the initial model, such as " + repr(next(iter(names)))
        )


def last_layers(names: Iterable[str], count: int) -> list[str]:
    """Return the names of the entries of a model's last layers, in the model's order.

    Parameters
    ----------
    names : iterable of str
        Names of a model's parameters and buffers, in the order of its state dict. Those of one layer differ only after
        the last dot, as in "head.weight" and "head.bias".
    count : int
        Number of layers, 1 or more.

    Raises
    ------
    ValueError
        The model has one layer or none, or no more than `count`: none would be left.
    """
    names = list(names)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    check("the number of the model's layers", len(layers), len(layers) > 1, "2 or more, for a head and a body")
    check(
        "head_layers",
        count,
        1 <= count < len(layers),
        f"1 to {len(layers) - 1}, because the model has {len(layers)} layers",
    )
    return [name for name in names if name.rpartition(".")[0] in layers[-count:]]


def drawn_anew(arrays: Mapping[str, np.ndarray], seed: int, parameters: Collection[str]) -> dict[str, np.ndarray]:
    """Return a model with each parameter's numbers in a random order, as another random initialisation would give.

    Other arrays stay. Random draws are made for them too, so that each parameter's order depends on its place alone.
    Equal parameters, such as tied weights, stay equal.
    """
    rng = np.random.default_rng(seed)
    orders: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        order = rng.permutation(array.size)
        equal = (orders[other] for other in orders if other in parameters and np.array_equal(arrays[other], array))
        orders[name] = next(equal, order)
    return {
        name: array.reshape(-1)[orders[name]].reshape(array.shape) if name in parameters else array
        for name, array in arrays.items()
    }


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
