"""Layout: the arrays of a model as one vector, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord

from kindred.messages import check, read_record, to_record

from .admission import norm

# PyTorch's names for the buffers of its normalisation layers.
NORMALISATION_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
NEVER_NEGATIVE = ("running_var", "num_batches_tracked")


class Layout:
    """The place of each array of a model in a flat vector of floats: parameters first, then floating buffers.

    Integer buffers (counters, indices) are not part of the vector: they are never averaged, see `integer_medians`.

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
        self.integers = {name: array.copy() for name, array in arrays.items() if name not in floats}
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

    def integer_medians(
        self, replies: Sequence[Mapping[str, np.ndarray]], own: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the median of each integer buffer, of each element, over clients' models.

        Of an even number of models, the server's own is one more: the median is always a number that one of them has,
        and no single client decides it. Of fewer than two, it is the server's own.
        """
        models = [own] if len(replies) < 2 else [*replies] if len(replies) % 2 else [own, *replies]
        return {name: np.sort([model[name] for model in models], axis=0)[len(models) // 2] for name in self.integers}

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
