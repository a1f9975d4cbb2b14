"""Inputs of predictions, read from folders of images, arrays, tables and texts, as the model's network takes them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from kindred.data import DataError, Task, read_site
from kindred.data.arrays import checked_inputs
from kindred.data.csv_files import missing_remarks, unknown_remarks
from kindred.data.files import check_folder, image_size, open_npz
from kindred.data.inputs import ImageInputs, TableInputs, TokenInputs
from kindred.data.rows import read_rows
from kindred.data.sources import SUFFIXES, checked_images, one_line, read_image
from kindred.data.tables import Table
from kindred.data.text import STRIDE, read_text, windows_of

from . import INPUTS

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's modes, by number of channels


def read_inputs(path: Path, task: Task) -> tuple[list[str], np.ndarray, list[str]]:
    """Read the inputs of predictions.

    Parameters
    ----------
    path : Path
        See `INPUTS`. Images in a folder may be at any depth, and are sorted by path; hidden ones are skipped. A table
        needs the columns of the model's schema; others are ignored. Of a text, each tenth character is predicted.
    task : Task

    Returns
    -------
    inputs : list of n str
        The name of each image, the number of each sample, or the place of the predicted character in a text, from 0.
    x : ndarray, (n, ...)
        As the network takes them.
    remarks : list of str
        Lines about missing cells of tables, and about categories that the schema does not have.

    Raises
    ------
    DataError
        The inputs cannot be read, or have another shape than the task.
    """
    path = path.expanduser()
    suffix, places = path.suffix.lower(), None
    remarks: list[str] = []
    if path.is_dir():
        return (*_image_files(path, _images_in(path), task), [])
    if path.is_file() and suffix in SUFFIXES:
        return (*_image_files(path.parent, [path], task), [])
    if path.is_file() and suffix == ".npz":
        raw = _npz(path, task.inputs.kind)
    elif path.is_file() and suffix == ".csv":
        raw = _table(path, task)
    elif path.is_file() and suffix == ".txt":
        raw, places = _text(path, task)
    else:
        raise DataError(f"--input is {str(path)!r}, allowed: {INPUTS}")
    x = _prepared(task, raw, path)
    if isinstance(task.inputs, TableInputs):
        remarks = [*missing_remarks(task.inputs.schema, raw), *unknown_remarks(task.inputs.schema, raw)]
    return list(map(str, range(len(x)) if places is None else places)), x, remarks


def _images_in(folder: Path) -> list[Path]:

    def refuse(error: OSError) -> None:  # otherwise an unreadable folder would be skipped silently
        raise DataError(f"{folder} cannot be read: {one_line(error)}")

    paths = [Path(place, name) for place, folders, names in os.walk(folder, onerror=refuse) for name in names]
    paths = [
        path
        for path in paths
        if path.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not paths:
        raise DataError(f"{folder} has no images: their names must end in {', '.join(sorted(SUFFIXES))}")
    return sorted(paths, key=lambda path: path.parts)


def _image_files(folder: Path, paths: Sequence[Path], task: Task) -> tuple[list[str], np.ndarray]:

    if not isinstance(task.inputs, ImageInputs):
        raise DataError(f"--input has images, and the model takes {task.inputs.kind} inputs")
    if task.inputs.shape[0] not in MODES:
        raise DataError(f"--input has images, and the model takes {task.inputs.shape[0]} channels: give an .npz file")
    for path in paths:
        width, height = image_size(path)
        with _named(path):
            task.inputs.check_shape((task.inputs.shape[0], height, width))
    check_folder(folder, paths, 4 * math.prod(task.inputs.shape))
    images = []
    for path in paths:
        image = np.asarray(read_image(path, MODES[task.inputs.shape[0]]))  # (h, w) or (h, w, c)
        images.append(_prepared(task, checked_images(image[None], str(path)), path))
    return [path.relative_to(folder).as_posix() for path in paths], np.concatenate(images)


def _npz(path: Path, kind: str) -> np.ndarray:

    with open_npz(path) as arrays:
        if (name := next((name for name in ("x", "x_test") if name in arrays), None)) is None:
            raise DataError(f"{path} has neither x nor x_test")
        return checked_inputs(arrays[name], kind, f"{path}: {name}")


def _table(path: Path, task: Task) -> np.ndarray:
    """Return the rows of a table as its schema codes them."""
    if not isinstance(task.inputs, TableInputs):
        raise DataError(f"--input is {str(path)!r}, a table, and the model takes {task.inputs.kind} inputs")
    return read_rows(Table.open(path), task.inputs.schema)


def _text(path: Path, task: Task) -> tuple[np.ndarray, Sequence[int]]:
    """Return the tokens before each tenth character of a text, (n, length), and the places of these characters."""
    if not (isinstance(task.inputs, TokenInputs) and task.inputs.characters):
        raise DataError(f"--input is {str(path)!r}, a text, and the model takes no characters")
    length = task.inputs.shape[1]
    windows = windows_of(read_text(path), task.inputs.characters, length)
    if not len(windows):
        raise DataError(f"{path} is too short, allowed: texts of {length} characters or more")
    return windows, range(length, length + STRIDE * len(windows), STRIDE)


def read_test_part(data_dir: Path, task: Task) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return a site's test samples for the network, their targets in the data's units, and lines about the data.

    Where the data have no test part, these are all samples.
    """
    if isinstance(task.inputs, TableInputs):  # the time only says which samples are for test
        task = replace(task, inputs=TableInputs(replace(task.inputs.schema, time="")))
    site = read_site(data_dir, task=task)
    x, y = (site.x_test, site.y_test) if len(site.x_test) else (site.x_train, site.y_train)
    prepared, remarks = _prepared(task, x, data_dir), list(site.remarks)
    if not len(site.x_test):
        remarks.append("the data have no test part: all samples are evaluated, also those that a model was trained on")
    if isinstance(task.inputs, TableInputs):
        unknown = unknown_remarks(task.inputs.schema, x) if data_dir.suffix.lower() == ".npz" else []
        remarks = [*missing_remarks(task.inputs.schema, x), *unknown, *remarks]
    return prepared, y, remarks


def _prepared(task: Task, x: np.ndarray, where: Path) -> np.ndarray:
    """Return inputs as the network takes them; a DataError names the file."""
    with _named(where), np.errstate(over="ignore"):  # the model's output is checked
        return task.prepared(x)


@contextmanager
def _named(where: Path) -> Iterator[None]:
    """Put the file's name in front of a DataError's text."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
