"""Sources of images: scikit-learn's digits, datasets of torchvision, .npz files, folders of images."""

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

from .features import folder_features
from .files import DEFAULT_FOLDER, SUFFIXES, DataError, one_line, read_image, read_npz
from .images import Images

# The names with which extensions add datasets, some of them from other files.
__all__ = [
    "DATASETS", "SUFFIXES", "DataError", "Images", "Parts", "Source",
    "checked_images", "checked_parts", "load_images", "one_line", "read_image", "read_npz",
]  # fmt: skip

# The superclass, 0 to 19, of each of CIFAR-100's classes (the published table, superclasses in alphabetical order).
CIFAR100_SUPERCLASSES = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
    6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
    16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
    12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip


Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""x_train, y_train, x_test, y_test, as `Images` describes them."""


@dataclass(frozen=True)
class Source:
    """A dataset that can be chosen by name.

    Attributes
    ----------
    description : str
        One line: images, classes, size, origin.
    read : callable
        Takes data-dir ("" where it is not set) and returns `Images`; raises DataError where there are none.
    num_classes : int or None
        None where it depends on the data.
    """

    description: str
    read: Callable[[str], Images]
    num_classes: int | None = None


def load_images(dataset: str, data_dir: str = "") -> Images:
    """Read a dataset.

    Parameters
    ----------
    dataset : str
        A name of `DATASETS`.
    data_dir : str
        An .npz file; or a folder with `<dataset>.npz` or with torchvision's files, which are downloaded into it
        where they are missing. "" is `DEFAULT_FOLDER`. For office-home the folder of the domains (see
        `kindred.data.features.folder_features`). Not used for digits.

    Raises
    ------
    DataError
        The name is unknown, the data are missing, a download fails, or a file cannot be read or holds something
        else.
    """
    if dataset not in DATASETS:
        raise DataError(f"dataset is {dataset!r}, allowed: {', '.join(DATASETS)}")
    return DATASETS[dataset].read(data_dir)


def existing_path(data_dir: str, needs: str) -> Path:
    """Return data-dir as a path; DataError with the text `needs` where it is not set or does not exist."""
    if not data_dir:
        raise DataError(f"data-dir is not set: {needs}")
    path = Path(os.path.abspath(os.path.expanduser(data_dir)))
    if not os.path.exists(path):
        raise DataError(f"data-dir {path} does not exist: {needs}")
    return path


def _digits(data_dir: str) -> Images:
    """Return scikit-learn's digits, always in the same halves, with each class divided as equally as possible.

    They are read from scikit-learn's file, because importing its datasets takes longer than all else before a round.
    """
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None  # a requirement of this package
    table = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.int64)
    x, y = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8), table[:, -1]  # x: whole numbers, 0 to 16
    order = np.lexsort((np.random.default_rng(0).random(len(y)), y))
    train, test = np.sort(order[0::2]), np.sort(order[1::2])
    return Images(x[train], y[train], x[test], y[test], 10)


def _npz(data_dir: str) -> Images:
    needs = "npz needs an .npz file with x_train, y_train, x_test and y_test"
    path = existing_path(data_dir, needs)
    if not path.is_file():
        raise DataError(f"data-dir {path} is a folder: {needs}")
    return _checked(read_npz(path), path)


def _office_home(data_dir: str) -> Images:
    needs = "office-home needs a folder with a folder for each domain, and in it one with images for each class"
    path = existing_path(data_dir, needs)
    if not path.is_dir():
        raise DataError(f"data-dir {path} is a file: {needs}")
    return folder_features(path)


def _sites(data_dir: str) -> Images:
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

    def __call__(self, data_dir: str) -> Images:
        files = f"{self.name}.npz (x_train, y_train, x_test, y_test) or {self.folder}/ as torchvision writes it"
        if data_dir:
            path = existing_path(data_dir, f"{self.name} needs a folder with {files}, or an empty one to download into")
        else:
            path = Path(os.path.abspath(os.path.expanduser(DEFAULT_FOLDER)))
        if (path / f"{self.name}.npz").is_file():
            path = path / f"{self.name}.npz"
        if path.is_file():
            return _checked(read_npz(path), path, self.num_classes, self.image_shape)
        if not (path / self.folder).exists():
            self._download(path, files)
        return _checked(self._read(path), path / self.folder, self.num_classes, self.image_shape)

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


def checked_parts(arrays: dict[str, np.ndarray], where: Path) -> Parts:
    """Check images and labels, for training and for test, against each other; DataError where they do not fit."""
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        arrays[f"x_{part}"] = checked_images(x, f"{where}: x_{part}")
        arrays[f"y_{part}"] = _checked_labels(y, f"{where}: y_{part}")
        if len(x) != len(y):
            raise DataError(f"{where}: x_{part} has {len(x)} images and y_{part} {len(y)} labels, they must be as many")
    x_train, y_train, x_test, y_test = (arrays[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(f"{where}: x_train has images of (c, h, w) = {x_train.shape[1:]}, x_test of {x_test.shape[1:]}")
    return x_train, y_train, x_test, y_test


def _checked(
    arrays: dict[str, np.ndarray], where: Path, num_classes: int = 0, image_shape: tuple[int, int, int] | None = None
) -> Images:
    """Check the four arrays against each other, and against the dataset's classes and image shape where known."""
    x_train, y_train, x_test, y_test = checked_parts(arrays, where)
    shape = x_train.shape[1:]
    if image_shape not in (None, shape):
        raise DataError(
            f"{where}: x_train has images of (c, h, w) = {shape} where {image_shape} is due; "
            "dataset=npz takes any images"
        )
    num_classes = num_classes or int(max(y_train.max(), y_test.max())) + 1
    for name, y in (("y_train", y_train), ("y_test", y_test)):
        if y.max() >= num_classes:
            raise DataError(f"{where}: {name} has a label {y.max()}, allowed: 0 to {num_classes - 1}")
    classes = np.unique(y_train)
    if len(classes) < num_classes:
        gap = np.setdiff1d(np.arange(len(classes) + 1), classes)[0]
        raise DataError(
            f"{where}: y_train has no image of class {gap}, labels must be 0 to C - 1 with images of every class "
            f"(C is {num_classes} here)"
        )
    if num_classes < 2:
        raise DataError(f"{where}: y_train has one class only, 2 or more are needed")
    return Images(x_train, y_train, x_test, y_test, num_classes)


def checked_images(x: np.ndarray, name: str) -> np.ndarray:
    """Return images (n, h, w) or (n, h, w, c) as (n, c, h, w), uint8 or float32; DataError where they are none."""
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim != 4 or x.shape[-1] not in (1, 2, 3, 4):
        raise DataError(f"{name} has the shape {x.shape}, allowed: (n, h, w) or (n, h, w, c) with 1 to 4 channels c")
    if 0 in x.shape:
        raise DataError(f"{name} is empty, its shape is {x.shape}")
    if x.dtype != np.uint8:
        if x.dtype.kind != "f":
            raise DataError(f"{name} holds {x.dtype}, allowed: uint8 or floating-point numbers")
        with np.errstate(over="ignore"):  # values beyond float32 become infinite, and are refused below
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise DataError(f"{name} has values that are not finite in float32")
    return x.transpose(0, 3, 1, 2)


def _checked_labels(y: np.ndarray, name: str) -> np.ndarray:
    if y.ndim != 1:
        raise DataError(f"{name} has the shape {y.shape}, allowed: (n,)")
    if y.dtype.kind not in "iu":
        raise DataError(f"{name} holds {y.dtype}, allowed: integers")
    if len(y) == 0:
        raise DataError(f"{name} is empty")
    if y.min() < 0 or y.max() > np.iinfo(np.int64).max:
        raise DataError(f"{name} has a label {y.min() if y.min() < 0 else y.max()}, allowed: 0 to C - 1")
    return y.astype(np.int64)


def _published(description: str, name: str, num_classes: int, *details: Any) -> Source:
    return Source(f"{description}, torchvision or npz", _Published(name, num_classes, *details), num_classes)


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
    "sites": Source("each client's own, on machines of their own", _sites),
    "npz": Source("any images, your own .npz file with x_train, y_train, x_test and y_test", _npz),
})  # fmt: skip
