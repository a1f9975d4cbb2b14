"""Datasets by name: scikit-learn's digits, datasets of torchvision, .npz files, folders of images."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kindred import torchvision_import
from kindred.extensions import Registry

from .arrays import checked_images, dataset_of, read_arrays
from .csv_files import SETTINGS as CSV_SETTINGS, read_csv
from .dataset import Dataset, Images
from .features import folder_features
from .files import DEFAULT_FOLDER, SUFFIXES, DataError, existing_path, one_line, read_image, read_npz
from .text import read_texts

# The names with which extensions add datasets, some of them from other files.
__all__ = [
    "DATASETS", "SUFFIXES", "DataError", "Dataset", "Images", "Source",
    "checked_images", "load_dataset", "one_line", "read_image", "read_npz",
]  # fmt: skip

# The superclass, 0 to 19, of each of CIFAR-100's classes (the published table, superclasses in alphabetical order).
CIFAR100_SUPERCLASSES = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
    6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
    16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
    12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A dataset that can be chosen by name.

    Attributes
    ----------
    description : str
        One line: images, classes, size, origin.
    read : callable
        Takes data-dir ("" where it is not set), and the `settings` as keyword arguments in snake_case; returns a
        `Dataset`, raises DataError where there is none.
    num_classes : int or None
        None where it depends on the data.
    settings : tuple of str
        Settings of the run that say how the data are read, in kebab-case.
    """

    description: str
    read: Callable[..., Dataset]
    num_classes: int | None = None
    settings: tuple[str, ...] = ()


def load_dataset(dataset: str, data_dir: str = "", **settings: Any) -> Dataset:
    """Read a dataset.

    Parameters
    ----------
    dataset : str
        A name of `DATASETS`.
    data_dir : str
        An .npz file; or a folder with `<dataset>.npz` or with torchvision's files, which are downloaded into it
        where they are missing. "" is `DEFAULT_FOLDER`. For office-home the folder of the domains (see
        `kindred.data.features.folder_features`). Not used for digits.
    **settings
        The source's `settings`, in snake_case; by default the reader's.

    Raises
    ------
    DataError
        The name is unknown, the data are missing, a download fails, or a file cannot be read or holds something
        else.
    """
    if dataset not in DATASETS:
        raise DataError(f"dataset is {dataset!r}, allowed: {', '.join(DATASETS)}")
    return DATASETS[dataset].read(data_dir, **settings)


def _names_for(data_dir: str) -> str:
    """Return names of datasets for a file or folder of the user's own, as a text."""
    own = {".npz": "npz", ".csv": "csv"}.get(Path(data_dir).suffix.lower())
    return f"dataset {own}" if own else "another dataset, such as npz, csv or text"


def _digits(data_dir: str) -> Dataset:
    """Return scikit-learn's digits, always in the same halves, with each class divided as equally as possible.

    They are read from scikit-learn's file, because importing its datasets takes longer than all else before a round.
    """
    if data_dir:
        raise DataError(f"data-dir is {data_dir!r}, and dataset digits has no files, allowed: {_names_for(data_dir)}")
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None  # a requirement of this package
    table = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.int64)
    x, y = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8), table[:, -1]  # x: whole numbers, 0 to 16
    order = np.lexsort((np.random.default_rng(0).random(len(y)), y))
    train, test = np.sort(order[0::2]), np.sort(order[1::2])
    return Images(x[train], y[train], x[test], y[test], 10)


def _office_home(data_dir: str) -> Dataset:
    needs = "office-home needs a folder with a folder for each domain, and in it one with images for each class"
    path = existing_path(data_dir, needs)
    if not path.is_dir():
        raise DataError(f"data-dir {path} is a file: {needs}")
    return folder_features(path)


def _sites(data_dir: str) -> Dataset:
    raise DataError("dataset is 'sites', whose data are on machines of their own and cannot be divided here")


@dataclass(frozen=True)
class _Published:
    """Reader of a dataset of torchvision: from an .npz file or torchvision's files, downloaded if they are missing.

    Attributes
    ----------
    name : str
        The dataset's name.
    num_classes : int
    image_shape : tuple of int
        (channels, height, width).
    torchvision : str
        Name of the class in `torchvision.datasets`.
    folder : str
        The folder in which that class keeps its files.
    options : dict
        Further arguments of that class.
    """

    name: str
    num_classes: int
    image_shape: tuple[int, int, int]
    torchvision: str
    folder: str
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, data_dir: str) -> Dataset:
        files = f"{self.name}.npz (x_train, y_train, x_test, y_test) or {self.folder}/ as torchvision writes it"
        if data_dir:
            path = existing_path(data_dir, f"{self.name} needs a folder with {files}, or an empty one to download into")
        else:
            path = Path(os.path.abspath(os.path.expanduser(DEFAULT_FOLDER)))
        if (path / f"{self.name}.npz").is_file():
            path = path / f"{self.name}.npz"
        if path.is_file():
            return self._checked(read_npz(path), path)
        if not (path / self.folder).exists():
            self._download(path, files)
        return self._checked(self._read(path), path / self.folder)

    def _checked(self, arrays: dict[str, np.ndarray], where: Path) -> Dataset:
        images = dataset_of(arrays, where, "image", "classes")
        if (shape := images.x_train.shape[1:]) != self.image_shape:
            raise DataError(
                f"{where}: x_train has images of (c, h, w) = {shape} where {self.image_shape} is due; "
                "dataset=npz takes any images"
            )
        if (found := images.objective.num_outputs) != self.num_classes:
            raise DataError(
                f"{where}: labels are of {found} classes where {self.num_classes} are due; dataset=npz takes any"
            )
        return images

    def _class(self) -> type:
        try:
            return getattr(torchvision_import.import_torchvision().datasets, self.torchvision)
        except ImportError as error:
            text = f"{self.torchvision} is read by torchvision, an .npz file needs none: {one_line(error)}"
            raise DataError(text) from error

    def _read(self, root: Path) -> dict[str, np.ndarray]:
        reader = self._class()
        arrays: dict[str, np.ndarray] = {}
        try:
            for part, train in (("train", True), ("test", False)):
                images = reader(root, train=train, **self.options)
                arrays[f"x_{part}"], arrays[f"y_{part}"] = np.asarray(images.data), np.asarray(images.targets)
        except Exception as error:  # torchvision's assertions, unpacking and decoding raise different exceptions
            where = root / self.folder
            text = f"{where} is incomplete or damaged, remove it to have it downloaded anew: {one_line(error)}"
            raise DataError(text) from error
        if self.torchvision == "EMNIST":  # its files hold each image transposed
            arrays |= {name: x.transpose(0, 2, 1) for name, x in arrays.items() if name.startswith("x_")}
        return arrays

    def _download(self, root: Path, files: str) -> None:
        """Let torchvision download into a temporary folder first, so that no incomplete files remain."""
        reader = self._class()
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as partial:
                reader(partial, train=True, download=True, **self.options)
                if not (root / self.folder).exists():  # another process may have finished first
                    os.replace(Path(partial, self.folder), root / self.folder)
        except Exception as error:  # no network, disk full, no permission to write
            raise DataError(f"data-dir {root} has no {files}, and the download failed: {one_line(error)}") from error


def _published(description: str, name: str, num_classes: int, *details: Any) -> Source:
    return Source(f"{description}, torchvision or npz", _Published(name, num_classes, *details), num_classes)


OWN_FILES = ("csv", "npz", "sites", "text")
"""Datasets that are a user's own: only data-dir says which they are."""

DATASETS: Registry[Source] = Registry("kindred.datasets", Source, {
    "digits": Source("8x8 grey digits, 10 classes, 899 + 898 images, part of scikit-learn", _digits, 10),
    "mnist": _published(
        "28x28 grey digits, 10 classes, 60,000 + 10,000 images", "mnist", 10, (1, 28, 28), "MNIST", "MNIST"
    ),
    "fashion-mnist": _published(
        "28x28 grey clothes, 10 classes, 60,000 + 10,000 images",
        "fashion-mnist", 10, (1, 28, 28), "FashionMNIST", "FashionMNIST",
    ),
    "emnist": _published(
        "28x28 grey digits and letters (byclass), 62 classes, 697,932 + 116,323 images",
        "emnist", 62, (1, 28, 28), "EMNIST", "EMNIST", {"split": "byclass"},
    ),
    "cifar10": _published(
        "32x32 colour photographs, 10 classes, 50,000 + 10,000 images",
        "cifar10", 10, (3, 32, 32), "CIFAR10", "cifar-10-batches-py",
    ),
    "cifar100": _published(
        "32x32 colour photographs, 100 classes in 20 superclasses, 50,000 + 10,000 images",
        "cifar100", 100, (3, 32, 32), "CIFAR100", "cifar-100-python",
    ),
    "office-home": Source(
        "features of photographs and drawings in folders DIR/domain/class, by ResNet-18, 512 numbers an image",
        _office_home,
    ),
    "csv": Source(
        "tables of clients: a .csv file, train.csv and test.csv, or a .csv file for each client",
        read_csv, settings=CSV_SETTINGS,
    ),
    "sites": Source("each client's own, on machines of their own", _sites),
    "npz": Source(
        "your own .npz file with x_train, y_train, x_test and y_test, or x and y: images, signals (n, channels, time), "
        "tables (n, features) or tokens (n, length); optionally whose the samples are",
        read_arrays, settings=("inputs", "task"),
    ),
    "text": Source(
        "the next character of texts, 80 before it, a .txt file in a folder for each client", read_texts,
        settings=("test-share",),
    ),
})  # fmt: skip
