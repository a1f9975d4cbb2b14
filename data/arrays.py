"""Samples in arrays, as .npz files hold them: images, signals, tables or sequences of tokens, targets and clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kindred.objectives import OBJECTIVES, NextToken, Objective

from .dataset import Dataset
from .files import DataError, existing_path, open_npz
from .inputs import MOST
from .schema import MOST_NUMBER, printable

LOST = 0.01  # of a channel's deviation: more must not be lost by rounding to float32
NOISE = 1e-12  # of a channel's largest value: it is constant if it deviates by less
PARTS = ("x_train", "y_train", "x_test", "y_test")
NEEDS = f"an .npz file with {', '.join(PARTS)}, or with x and y"
FORMS = (
    "bytes or floats (n, h, w, c), or bytes (n, h, w), are images; other numbers (n, channels, time) signals; integers "
    "(n, length) tokens; floats (n, features) a table"
)


def read_arrays(data_dir: str, inputs: str = "auto", task: str = "auto") -> Dataset:
    """Read a dataset from an .npz file.

    Parameters
    ----------
    data_dir : str
        The file, with `x_train`, `y_train`, `x_test` and `y_test`, and optionally `client_train` and `client_test`,
        texts or whole numbers that say whose the samples are. Or with `x` and `y`, and optionally `client`, and `time`,
        numbers: then a client's later samples are for test.
    inputs : str
        Kind of the inputs: a key of `kindred.data.inputs.KINDS`; "auto": see `kind_of`.
    task : str
        Name of an objective; "auto": "number" for floats, "labels" for rows of 0 and 1, otherwise "classes".

    Raises
    ------
    DataError
        The file cannot be read or lacks an array, or arrays do not fit each other or the settings.
    """
    path = existing_path(data_dir, f"npz needs {NEEDS}")
    if not path.is_file():
        raise DataError(f"data-dir {path} is a folder: npz needs {NEEDS}")
    return dataset_of(stored_arrays(path), path, inputs, task)


def stored_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a dataset in an .npz file, see `read_arrays`; DataError where one is missing."""
    with open_npz(path) as stored:
        whole = {"x", "y"} <= set(stored) and not set(PARTS) & set(stored)
        names = ("x", "y") if whole else PARTS
        if missing := [name for name in names if name not in stored]:
            raise DataError(f"{path} has no {', '.join(missing)}: it needs {', '.join(PARTS)}, or x and y")
        optional = ("client", "time") if whole else ("client_train", "client_test")
        return {name: stored[name] for name in (*names, *optional) if name in stored}


def labelled_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a dataset of which one part may be missing; a part alone as x and y.

    Raises
    ------
    DataError
        The file cannot be read, or has no labelled sample.
    """
    with open_npz(path) as stored:
        parts = [end for end in ("", "_train", "_test") if {f"x{end}", f"y{end}"} <= set(stored)]
        arrays = {end: (stored[f"x{end}"], stored[f"y{end}"]) for end in parts}
    found = {end: pair for end, pair in arrays.items() if all(each.size for each in pair)}
    if not found:
        raise DataError(f"{path} has no labelled sample, allowed: x_test and y_test, x_train and y_train, or x and y")
    if len(found) == 1 or "" in found:
        x, y = next(iter(found.values()))
        return {"x": x, "y": y}
    return {f"{name}{end}": array for end, pair in found.items() for name, array in zip("xy", pair, strict=True)}


def dataset_of(
    arrays: Mapping[str, np.ndarray], where: Path, inputs: str = "auto", task: str | Objective = "auto"
) -> Dataset:
    """Check arrays against each other, and return the dataset that they are.

    Parameters
    ----------
    arrays : mapping
        As in `read_arrays`.
    where : Path
        The file, for messages.
    inputs : str
        As in `read_arrays`.
    task : str or Objective
        As in `read_arrays`; or the objective, of which each target must be.

    Raises
    ------
    DataError
        As in `read_arrays`.
    """
    _check_lengths(arrays, where)
    ends = ("",) if "x" in arrays else ("_train", "_test")
    kind = kind_of(arrays[f"x{ends[0]}"], f"{where}: x{ends[0]}") if inputs == "auto" else inputs
    x = [checked_inputs(arrays[f"x{end}"], kind, f"{where}: x{end}") for end in ends]
    y = [arrays[f"y{end}"] for end in ends]
    for end, targets in zip(ends, y, strict=True):
        _check_finite(targets, f"{where}: y{end}")
    clients = [_texts(arrays[f"client{end}"], f"{where}: client{end}") for end in ends if f"client{end}" in arrays]
    if len({each.shape[1:] for each in x}) > 1:
        raise DataError(f"{where}: x_train has samples of shape {x[0].shape[1:]}, x_test of {x[1].shape[1:]}")
    if kind == "image" and len({each.dtype for each in x}) > 1:
        raise DataError(
            f"{where}: x_train holds {x[0].dtype}, x_test {x[1].dtype}, allowed: one type, as their scales may differ"
        )
    if len(ends) > len(clients) > 0:
        raise DataError(f"{where} has one of client_train and client_test, allowed: both, or none")
    vocabulary = max(int(each.max()) for each in x) + 1 if kind == "tokens" else 0
    names = [f"{where}: y{end}" for end in ends]
    objective = task if isinstance(task, Objective) else _objective_of(y, names, task, vocabulary)
    y = [checked_targets(each, objective, name) for each, name in zip(y, names, strict=True)]
    times = _times(arrays["time"], f"{where}: time") if "time" in arrays else None
    if len(ends) == 1:
        x, y = [x[0], x[0][:0]], [y[0], y[0][:0]]
        clients = [clients[0], clients[0][:0]] if clients else []
    elif clients:
        check_overlap(x, kind, clients, where)
    return Dataset(
        x[0],
        y[0],
        x[1],
        y[1],
        objective,
        kind,
        clients_train=clients[0] if clients else None,
        clients_test=clients[1] if clients else None,
        times=times,
        vocabulary=vocabulary,
    )


def _check_lengths(arrays: Mapping[str, np.ndarray], where: Path) -> None:
    """Check that the arrays of a part have as many samples each; DataError where they have not."""
    for name, array in arrays.items():
        inputs = "x" + name[name.index("_") :] if "_" in name else "x"
        if not array.ndim:
            raise DataError(f"{where}: {name} is a single value, allowed: an array with an entry for each sample")
        if len(array) != len(arrays[inputs]):
            raise DataError(
                f"{where}: {inputs} has {len(arrays[inputs])} samples and {name} {len(array)}, they must be as many"
            )


# --- Inputs -------------------------------------------------------------------------------------------------


def kind_of(x: np.ndarray, name: str) -> str:
    """Return the kind of inputs that an array holds.

    Bytes (n, h, w), and any numbers (n, h, w, c), are images, other numbers (n, channels, time) signals, integers
    (n, length) tokens, and floats (n, features) a table.

    Raises
    ------
    DataError
        The array has another shape.
    """
    if x.ndim == 4 or (x.ndim == 3 and x.dtype == np.uint8):
        return "image"
    if x.ndim == 3:
        return "signal"
    if x.ndim == 2:
        return "tokens" if x.dtype.kind in "iu" else "table"
    raise DataError(f"{name} has the shape {x.shape}, allowed: {FORMS}")


def checked_inputs(x: np.ndarray, kind: str, name: str) -> np.ndarray:
    """Return inputs as a dataset has them, see `kindred.data.inputs`.

    Parameters
    ----------
    x : ndarray
        Images (n, h, w) or (n, h, w, c), uint8 or floats; signals (n, c, t), any numbers; tables (n, features), any
        numbers, NaN where a value is missing; tokens (n, length), integers.
    kind : str
        A key of `kindred.data.inputs.KINDS`.
    name : str
        The array's, for messages.

    Raises
    ------
    DataError
        The array has another shape or type, is empty, or has values that are not finite.
    """
    return _CHECKS[kind](x, name)


def checked_images(x: np.ndarray, name: str) -> np.ndarray:
    """Return images (n, h, w) or (n, h, w, c) as (n, c, h, w), uint8 or float32; DataError where they are none."""
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim != 4 or x.shape[-1] not in (1, 2, 3, 4):
        raise DataError(f"{name} has the shape {x.shape}, allowed: (n, h, w) or (n, h, w, c) with 1 to 4 channels c")
    _check_shape(x, 4, "(n, h, w, c)", name)
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise DataError(f"{name} holds {x.dtype}, allowed: uint8 or floating-point numbers")
    return (x if x.dtype == np.uint8 else _finite(x, name, channels=3)).transpose(0, 3, 1, 2)


def _signals(x: np.ndarray, name: str) -> np.ndarray:
    _check_shape(x, 3, "(n, channels, time)", name)
    return _finite(x, name, channels=1)


def _table(x: np.ndarray, name: str) -> np.ndarray:
    _check_shape(x, 2, "(n, features)", name)
    x = _checked_numbers(x, name).astype(np.float64)
    if (np.abs(x) > MOST_NUMBER).any():
        raise DataError(
            f"{name} has numbers beyond {MOST_NUMBER:g}, allowed: smaller ones, or NaN where one is missing"
        )
    return x


def _tokens(x: np.ndarray, name: str) -> np.ndarray:
    _check_shape(x, 2, "(n, length)", name)
    if x.dtype.kind not in "iu":
        raise DataError(f"{name} holds {x.dtype}, allowed for tokens: integers")
    if not 0 <= x.min() <= x.max() < MOST:
        raise DataError(f"{name} has tokens from {x.min()} to {x.max()}, allowed: 0 to {MOST - 1:,}")
    return x.astype(np.int64)


_CHECKS: dict[str, Callable[[np.ndarray, str], np.ndarray]] = {
    "image": checked_images,
    "signal": _signals,
    "table": _table,
    "tokens": _tokens,
}


def _check_shape(x: np.ndarray, dimensions: int, form: str, name: str) -> None:
    if x.ndim != dimensions:
        raise DataError(f"{name} has the shape {x.shape}, allowed: {form}")
    if 0 in x.shape:
        raise DataError(f"{name} is empty, its shape is {x.shape}")


def _checked_numbers(x: np.ndarray, name: str) -> np.ndarray:
    if x.dtype.kind not in "buif":
        raise DataError(f"{name} holds {x.dtype}, allowed: numbers")
    return x


def _finite(x: np.ndarray, name: str, channels: int) -> np.ndarray:
    """Return numbers as float32; DataError where one is not finite, or a channel's differences are lost.

    `channels` is the axis of the channels.
    """
    given = _checked_numbers(x, name)
    with np.errstate(over="ignore"):  # values beyond float32 become infinite
        x = given.astype(np.float32)
    _check_finite(x, name, " in float32")
    for channel in () if np.can_cast(given.dtype, x.dtype) else range(x.shape[channels]):
        one = given.take(channel, channels).astype(np.float64)
        rounding, deviation = np.abs(x.take(channel, channels) - one).max(initial=0), one.std()
        if rounding > LOST * deviation and deviation > NOISE * np.abs(one).max(initial=0):
            raise DataError(
                f"{name}: channel {channel} has values near {one.flat[0]:g} that differ by {deviation:.2g}, too little "
                "for float32, allowed: numbers without such an offset"
            )
    return x


def _check_finite(values: np.ndarray, name: str, form: str = "") -> None:
    """Check that floats are finite; DataError with the first sample of which one is not."""
    if values.dtype.kind == "f" and len(wrong := np.argwhere(~np.isfinite(values))):
        sample, *place = wrong[0].tolist()
        where = f"sample {sample}" + (f", place {', '.join(map(str, place))}" if place else "")
        raise DataError(f"{name} has values that are not finite{form}: the first is in {where}")


# --- Targets ------------------------------------------------------------------------------------------------


def checked_targets(y: np.ndarray, objective: Objective, name: str) -> np.ndarray:
    """Return targets as a dataset has them: of classes int64, by name or number; of other objectives float64.

    Raises
    ------
    DataError
        A target is not one of the objective's.
    """
    if len(y) == 0:
        raise DataError(f"{name} is empty")
    if not objective.has_classes:
        if y.dtype.kind not in "buif":
            raise DataError(f"{name} holds {y.dtype}, allowed for {objective.name}: numbers")
        y = y.astype(np.float64)
        if (np.abs(y) > MOST_NUMBER).any():
            raise DataError(f"{name} has numbers beyond {MOST_NUMBER:g}, allowed: smaller ones")
    elif y.dtype.kind in "US":
        y = _numbered(y, objective.names, name)
    else:
        y = _whole(y, name)
    try:
        objective.check(y, objective.num_outputs)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    return y


def _objective_of(y: list[np.ndarray], names: list[str], task: str, vocabulary: int) -> Objective:
    """Return the objective of targets for training, and for test if there are some."""
    first = y[0]
    if len(first) == 0:
        raise DataError(f"{names[0]} is empty")
    if task == "auto":
        task = "labels" if first.ndim == 2 else "number" if first.dtype.kind == "f" else "classes"
    kind = OBJECTIVES[task]
    if not kind.has_classes:
        return kind(1 if first.ndim == 1 else int(np.prod(first.shape[1:])))
    if first.dtype.kind in "US":
        return kind(*_classes_by_name(first, names[0]))
    if issubclass(kind, NextToken):
        return kind(max(2, vocabulary))
    return kind(_num_classes([_whole(each, name) for each, name in zip(y, names, strict=True)], names[0]))


def _classes_by_name(y: np.ndarray, name: str) -> tuple[int, tuple[str, ...]]:
    found = tuple(np.unique(_names(y, name)).tolist())
    if len(found) < 2:
        raise DataError(f"{name} has one class only, {found[0]!r}, 2 or more are needed")
    return len(found), found


def _num_classes(y: list[np.ndarray], name: str) -> int:
    """Return the number of classes; DataError where one of them is in no training sample."""
    num_classes = max(int(each.max()) for each in y) + 1
    classes = np.unique(y[0])
    if len(classes) < num_classes:
        gap = np.setdiff1d(np.arange(len(classes) + 1), classes)[0]
        raise DataError(
            f"{name} has no sample of class {gap}, labels must be 0 to C - 1 with samples of every class (C is "
            f"{num_classes} here)"
        )
    if num_classes < 2:
        raise DataError(f"{name} has one class only, 2 or more are needed")
    return num_classes


def _whole(y: np.ndarray, name: str) -> np.ndarray:
    """Return classes (n,) as int64; DataError where they are none."""
    if y.ndim != 1:
        raise DataError(f"{name} has the shape {y.shape}, allowed for classes: (n,)")
    if len(y) == 0:
        raise DataError(f"{name} is empty")
    if y.dtype.kind not in "biuf" or (y.dtype.kind == "f" and not (y == np.floor(y)).all()):
        raise DataError(f"{name} holds {y.dtype}, allowed for classes: integers, or texts")
    if y.min() < 0 or y.max() > np.iinfo(np.int64).max:
        raise DataError(f"{name} has a label {y.min() if y.min() < 0 else y.max()}, allowed: 0 to C - 1")
    return y.astype(np.int64)


def _numbered(y: np.ndarray, names: tuple[str, ...], name: str) -> np.ndarray:
    """Return classes, given by name, as numbers (n,), int64."""
    numbers = {printable(each): number for number, each in enumerate(names)}
    texts = _names(y, name)
    if y.ndim != 1:
        raise DataError(f"{name} has the shape {y.shape}, allowed for classes: (n,)")
    for place, text in enumerate(texts.tolist()):
        if text not in numbers:
            raise DataError(
                f"{name} has the class {text!r} in sample {place}, allowed: {', '.join(names) or 'numbers'}"
            )
    return np.array([numbers[text] for text in texts.tolist()], np.int64)


def _names(texts: np.ndarray, name: str) -> np.ndarray:
    """Return names (n,) of classes or clients without control characters and superfluous blanks.

    Raises
    ------
    DataError
        A name is empty, or holds bytes that are not UTF-8.
    """
    if texts.dtype.kind == "S":
        try:
            texts = np.char.decode(texts, "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{name} has the name {error.object!r}, allowed: texts, or bytes in UTF-8") from None
    found, places = np.unique(texts.astype(str), return_inverse=True)
    names = np.array([printable(each) for each in found.tolist()], dtype=str)[places].reshape(texts.shape)
    if (names == "").any():
        raise DataError(f"{name} is empty in sample {np.flatnonzero(names == '')[0]}, allowed: a name")
    return names


# --- Clients and times ----------------------------------------------------------------------------------------


def _texts(clients: np.ndarray, name: str) -> np.ndarray:
    """Return the names of clients (n,) as texts; DataError where there are none."""
    if clients.ndim != 1 or clients.dtype.kind not in "iuUS":
        raise DataError(
            f"{name} has the shape {clients.shape} and holds {clients.dtype}, allowed: texts or integers (n,)"
        )
    return _names(clients, name)


def _times(times: np.ndarray, name: str) -> np.ndarray:
    if times.ndim != 1 or times.dtype.kind not in "iuf" or not np.isfinite(times).all():
        raise DataError(f"{name} has the shape {times.shape} and holds {times.dtype}, allowed: finite numbers (n,)")
    return times.astype(np.float64)


def check_overlap(x: list[np.ndarray], kind: str, clients: list[np.ndarray], where: Path) -> None:
    """Check that no client has an image or signal both for training and for test; DataError where one has.

    Equal rows of a table, and equal texts, may be of different samples. Without `clients` all samples are of one.
    """
    if kind not in ("image", "signal"):
        return

    def keys(part: int) -> list[tuple[str, bytes]]:
        samples = np.ascontiguousarray(x[part])
        names = clients[part].tolist() if clients else [""] * len(samples)
        return [
            (name, blake2b(sample.tobytes(), digest_size=16).digest())
            for name, sample in zip(names, samples, strict=True)
        ]

    first = {key: place for place, key in reversed(list(enumerate(keys(0))))}
    for place, key in enumerate(keys(1)):
        if key in first:
            whose = f", both of client {key[0]!r}" if clients else ""
            raise DataError(
                f"{where}: sample {place} of x_test is sample {first[key]} of x_train{whose}: "
                "clients' samples for training and for test must differ"
            )
