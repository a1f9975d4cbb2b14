"""Inputs of predictions, read from folders of images, arrays and tables, on the model's scale."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kindred.data import DataError, Task, read_site
from kindred.data.files import check_folder, image_size, open_npz
from kindred.data.sites import LABEL, pixels, read_rows
from kindred.data.sources import SUFFIXES, checked_images, one_line, read_image

from . import INPUTS

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's modes, by number of channels


def read_inputs(path: Path, task: Task) -> tuple[list[str], np.ndarray]:
    """Read the inputs of predictions.

    Parameters
    ----------
    path : Path
        See `INPUTS`. Images in a folder may be at any depth, and are sorted by path; hidden ones are skipped. A
        table's column `label` is ignored; a row is an image of one pixel, with a channel for each other column.
    task : Task

    Returns
    -------
    inputs : list of n str
        The name of each image.
    x : ndarray, (n, c, h, w), float32
        On the model's scale.

    Raises
    ------
    DataError
        The inputs cannot be read, or have another shape than the task.
    """
    path = path.expanduser()
    if path.is_dir():
        return _image_files(path, _images_in(path), task)
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return _image_files(path.parent, [path], task)
    if not path.is_file() or path.suffix.lower() not in (".npz", ".csv"):
        raise DataError(f"--input is {str(path)!r}, allowed: {INPUTS}")
    x = _normalised(task, _table(path) if path.suffix.lower() == ".csv" else _npz(path), path)
    return list(map(str, range(len(x)))), x


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

    if task.image_shape[0] not in MODES:
        raise DataError(f"--input has images, and the model takes {task.image_shape[0]} channels: give a .csv file")
    for path in paths:
        width, height = image_size(path)
        with _named(path):
            task.check_shape((task.image_shape[0], height, width))
    check_folder(folder, paths, 4 * math.prod(task.image_shape))
    images = []
    for path in paths:
        image = np.asarray(read_image(path, MODES[task.image_shape[0]]))  # (h, w) or (h, w, c)
        images.append(_normalised(task, checked_images(image[None], str(path)), path))
    return [path.relative_to(folder).as_posix() for path in paths], np.concatenate(images)


def _npz(path: Path) -> np.ndarray:

    with open_npz(path) as arrays:
        if (name := next((name for name in ("x", "x_test") if name in arrays), None)) is None:
            raise DataError(f"{path} has neither x nor x_test")
        return checked_images(arrays[name], f"{path}: {name}")


def _table(path: Path) -> np.ndarray:
    """Read a table as images of one pixel (n, c, 1, 1), float32."""
    header, rows = read_rows(path)
    columns = [place for place, name in enumerate(header) if name != LABEL]
    # Whole numbers are allowed as names. A row of measurements, taken for a header, would be lost silently.
    measured = [name for name in header if re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", name.strip(), re.IGNORECASE)]
    if len(set(header)) < len(header) or not all(map(str.isdecimal, measured)):
        raise DataError(f"{path} has no header: its first line must name the columns, each differently")
    if not columns:
        raise DataError(f"{path} has no columns except {LABEL}")

    def cells() -> Iterator[list[str]]:
        for number, row in enumerate(rows):
            if len(row) != len(header):
                raise DataError(f"{path}: row {number} has {len(row)} cells, the header {len(header)}")
            yield [row[place] for place in columns]

    return pixels(cells(), path)


def read_test_part(data_dir: Path, task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return a site's test images, on the model's scale, and their labels."""
    images = read_site(data_dir, task.class_names)
    if images.num_classes > task.num_classes:
        raise DataError(f"{data_dir} has labels up to {images.num_classes - 1}, expected {task.num_classes} classes")
    return _normalised(task, images.x_test, data_dir), images.y_test


def _normalised(task: Task, x: np.ndarray, where: Path) -> np.ndarray:
    """Return images on the model's scale; a DataError names the file."""
    with _named(where), np.errstate(over="ignore"):  # the model's output is checked
        return task.normalised(x)


@contextmanager
def _named(where: Path) -> Iterator[None]:
    """Put the file's name in front of a DataError's text."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
