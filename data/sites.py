"""A site's own data, on its own machine: an .npz file, folders of images, or tables."""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.lazy import lazy

from .federation import SiteData
from .files import check_folder, image_size
from .public import read_public
from .sources import SUFFIXES, DataError, Images, Parts, checked_parts, one_line, read_image, read_npz
from .task import Task

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

LABEL = "label"
"""The column of a table that holds the labels."""

KINDS = (
    "an .npz file with x_train, y_train, x_test and y_test; a folder with train/ and test/, each with a folder of "
    "images for each class; or a folder with train.csv and test.csv, numbers with a column `label`"
)


class Sites:
    """A federation whose sites have their own data, as seen from one machine.

    Parameters
    ----------
    task : Task
        Image shape, scale and classes, the same at all sites.
    files : mapping
        The machine's `data-dir` and `public-data`.
    typical_size : float
        Training images of a typical site; 0 where it is unknown.

    Attributes
    ----------
    task : Task
    image_shape : tuple of int
        (channels, height, width).
    num_classes : int
    typical_size : float
    """

    def __init__(self, task: Task, files: Mapping[str, Any], typical_size: float = 0) -> None:
        self.task = task
        self.typical_size = typical_size
        self._files = files
        self.image_shape = task.image_shape
        self.num_classes = task.num_classes

    @classmethod
    def of(cls, run_config: Mapping[str, Any], node_config: Mapping[str, Any] | None = None) -> Sites:
        """Return the sites of a run.

        Parameters
        ----------
        run_config : mapping
            With the keys image-shape, num-classes, class-names, input-mean, input-deviation and samples-per-client.
        node_config : mapping, optional
            A site's own settings; by default the run's, as at the server.

        Raises
        ------
        DataError
            A value is missing or out of range.
        """
        shape = str(run_config["image-shape"])
        if not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,4}x[1-9]\d{0,4}", shape):
            raise DataError(f"image-shape is {shape!r}, allowed: channels x height x width, such as 1x28x28")
        names = tuple(name.strip() for name in str(run_config["class-names"]).split(",") if name.strip())
        num_classes = int(run_config["num-classes"]) or len(names)
        if num_classes < 2:
            raise DataError(f"num-classes is {run_config['num-classes']}, allowed: 2 or more, or class-names")
        if len(set(names)) != len(names) or (names and len(names) != num_classes):
            raise DataError(
                f"class-names has {len(names)} names, {len(set(names))} different ones, where num-classes "
                f"is {num_classes}"
            )
        channels, height, width = map(int, shape.split("x"))
        mean, deviation = (float(run_config["input-mean"]),), (float(run_config["input-deviation"]),)
        task = Task((channels, height, width), num_classes, mean, deviation, 255, names)
        return cls(task, run_config if node_config is None else node_config, int(run_config["samples-per-client"]))

    def site_data(self, client: int | str) -> SiteData:
        """Return the data in this machine's `data-dir`; the client's name plays no part.

        Raises
        ------
        DataError
            The data cannot be read, or have another shape or other classes.
        """
        if "data-dir" not in self._files:
            raise DataError(f"data-dir is not in the node config, allowed: {KINDS}")
        images = read_site(self._files["data-dir"], self.task.class_names)
        if images.num_classes > self.num_classes:
            raise DataError(f"labels go up to {images.num_classes - 1}, expected {self.num_classes} classes")
        x_train, x_test = self.task.tensor(images.x_train), self.task.tensor(images.x_test)
        nothing = x_train[:0], torch.empty(0, dtype=torch.int64)
        return SiteData((x_train, torch.from_numpy(images.y_train)), nothing, (x_test, torch.from_numpy(images.y_test)))

    def public_set(self) -> torch.Tensor:
        """Return the unlabelled images in this machine's `public-data`, an .npz file with an array `x`.

        Raises
        ------
        DataError
            The images cannot be read, or have another shape.
        """
        if "public-data" not in self._files:
            raise DataError("public-data is not in the node config, allowed: an .npz file with x, the same everywhere")
        return self.task.tensor(read_public(self._files["public-data"]))


def read_site(data_dir: str | os.PathLike[str], class_names: Sequence[str] = ()) -> Images:
    """Read the data of one site.

    Parameters
    ----------
    data_dir : path
        An .npz file with `x_train`, `y_train`, `x_test` and `y_test`. Or a folder with `train` and `test`, each with
        a folder of images for each class; all images have one size, and are read as grey if all of them are grey. Or a
        folder with `train.csv` and `test.csv`: a header, numbers, and the column `label`. A row is an image of one
        pixel, with a channel for each other column.
    class_names : sequence of str
        Names of class 0, 1, and so on, as folders or texts in the column `label` have them. Without them, names
        must be whole numbers, which are the classes. Other names are refused: their order may differ between sites.

    Returns
    -------
    Images
        num_classes is the number of names, or else the largest label plus 1. A site may lack images of some classes.

    Raises
    ------
    DataError
        The data are missing, or not in one of these forms.
    """
    path = Path(os.path.abspath(os.path.expanduser(data_dir)))
    if path.is_file() and path.suffix == ".npz":
        arrays = checked_parts(read_npz(path), path)
    elif path.is_dir() and (path / "train.csv").is_file():
        arrays = _tables(path, class_names)
    elif path.is_dir() and (path / "train").is_dir():
        arrays = _image_folders(path, class_names)
    else:
        raise DataError(f"data-dir is {str(path)!r}, allowed: {KINDS}")
    x_train, y_train, x_test, y_test = arrays
    largest = int(max(y_train.max(), y_test.max()))
    if class_names and largest >= len(class_names):
        raise DataError(f"{path} has a label {largest}, and class-names has {len(class_names)} names")
    return Images(x_train, y_train, x_test, y_test, len(class_names) or largest + 1)


def class_labels(names: Sequence[str], class_names: Sequence[str], where: Path) -> list[int]:
    """Return the class of each name."""
    if class_names:
        for name in names:
            if name not in class_names:
                raise DataError(f"{where} has a class {name!r}, and class-names are {', '.join(class_names)}")
        return [class_names.index(name) for name in names]
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise DataError(
                f"{where} has a class {name!r}: classes that are not numbers from 0 to 999999999 need "
                "class-names, in one order for all sites"
            )
    return [int(name) for name in names]


def _image_folders(folder: Path, class_names: Sequence[str]) -> Parts:
    files: dict[str, list[Path]] = {}
    labels: dict[str, list[int]] = {}
    for part in ("train", "test"):
        try:
            paths = sorted(path for path in (folder / part).glob("*/*") if path.suffix.lower() in SUFFIXES)
        except OSError as error:
            raise DataError(f"{folder / part} cannot be read: {one_line(error)}") from error
        if not paths:
            raise DataError(
                f"{folder / part} has no images: they must be CLASS/NAME, with a suffix of "
                f"{', '.join(sorted(SUFFIXES))}"
            )
        files[part] = paths
        labels[part] = class_labels([path.parent.name for path in paths], class_names, folder / part)
    together = files["train"] + files["test"]
    width, height = image_size(together[0])
    for path in together:
        if (found := image_size(path)) != (width, height):
            raise DataError(
                f"{path} has {found[0]}x{found[1]} pixels, {together[0]} has {width}x{height}: they must be of one size"
            )
    check_folder(folder, together, 3 * width * height)
    x = {part: np.empty((len(paths), height, width, 3), np.uint8) for part, paths in files.items()}
    for part, paths in files.items():
        for image, path in zip(x[part], paths, strict=True):
            image[:] = np.asarray(read_image(path))
    if all((each == each[..., :1]).all() for each in x.values()):
        x = {part: each[..., :1] for part, each in x.items()}
    arrays = {f"x_{part}": each for part, each in x.items()}
    return checked_parts(arrays | {f"y_{part}": np.array(each) for part, each in labels.items()}, folder)


def _tables(folder: Path, class_names: Sequence[str]) -> Parts:
    x_train, y_train, columns = _table(folder / "train.csv", class_names)
    x_test, y_test, others = _table(folder / "test.csv", class_names)
    if columns != others:
        raise DataError(
            f"{folder / 'test.csv'} has the columns {', '.join(others)}, train.csv {', '.join(columns)}: "
            "they must be the same, in one order"
        )
    return x_train, y_train, x_test, y_test


def _table(path: Path, class_names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images of one pixel (n, c, 1, 1), labels (n,), and the names of the channels."""
    header, rows = read_rows(path)
    if header.count(LABEL) != 1 or len(header) < 2:
        raise DataError(f"{path} has the columns {', '.join(header) or 'none'}, it needs one called {LABEL} and others")
    at = header.index(LABEL)
    names: list[str] = []

    def cells() -> Iterator[list[str]]:
        for number, row in enumerate(rows, start=2):
            if len(row) != len(header):
                raise DataError(f"{path}: line {number} has {len(row)} cells, the header {len(header)}")
            names.append(sys.intern(row.pop(at).strip()))
            yield row

    x = pixels(cells(), path)
    return x, np.array(class_labels(names, class_names, path), dtype=np.int64), header[:at] + header[at + 1 :]


def read_rows(path: Path) -> tuple[list[str], Iterator[list[str]]]:
    """Return the header of a table and its rows, as texts, without empty lines; DataError where it cannot be read.

    Rows are read one at a time, when they are needed: a list of texts takes many times the memory of the file.
    """

    def read() -> Iterator[list[str]]:
        try:
            with open(path, encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark first
                yield from filter(None, csv.reader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} cannot be read: {one_line(error)}") from error

    rows = read()
    return next(rows, []), rows


def pixels(rows: Iterator[Sequence[str]], path: Path) -> np.ndarray:
    """Return rows of c numbers as float32 images of one pixel (n, c, 1, 1); DataError for no rows, or no number."""
    parts = []
    try:
        with np.errstate(over="ignore"):  # refused below
            while some := list(islice(rows, 1000)):
                parts.append(np.array(some, dtype=np.float32))  # (1000, c)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path} has a cell that is no number: {one_line(error)}") from error
    if not parts:
        raise DataError(f"{path} has no rows")
    x = np.concatenate(parts)  # (n, c)
    if not np.isfinite(x).all():
        raise DataError(f"{path} has values that are not finite in float32")
    return x[:, :, None, None]
