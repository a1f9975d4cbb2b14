"""Reading files from untrusted sources within bounds.

A small file can declare a large size: an image of 22 kB may declare 10^9 pixels, an archive of 9 MB arrays of 2 GB.
A declared size is compared with the stored size, or with a bound, before memory is allocated.
"""

from __future__ import annotations

import io
import math
import os
import textwrap
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np
from PIL import Image
from safetensors import safe_open

DEFAULT_FOLDER = "~/.cache/kindred"
"""Folder of the datasets that torchvision downloads, where data-dir is not set."""

SUFFIXES = frozenset((".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"))
"""Suffixes of image files."""

ARRAY_BYTES = 64 * 2**20
"""Bytes that an array may take in memory, however small it is in the file."""

FOLDER_BYTES = 2**30
"""Bytes that all images of a folder may take in memory, however small their files are."""

MOST_TIMES = 100
"""Larger arrays and folders may take at most this many times their stored bytes."""

MOST_PIXELS = 50_000_000
"""Largest number of pixels of an image."""

HEADER_BYTES = 16 * 2**20
"""Largest size of a safetensors file's header (names, shapes and texts), in bytes."""

FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_STEP = 2**20  # bytes per read
# Bytes per read, by compression. zipfile unpacks all that it reads of LZMA at once, to up to 7,000 times the size. With
# bzip2 it would be up to a million times, so bzip2 is not read.
_STEPS = {zipfile.ZIP_STORED: _STEP, zipfile.ZIP_DEFLATED: _STEP, zipfile.ZIP_LZMA: 2**12}
_TILE_PIXELS = 2**22  # largest tile of a small TIFF file


class DataError(ValueError):
    """Data that cannot be used as requested; the text is one line that says what to change.

    It may quote a cell or a file's first line, so it stays where the data are, unless it is `reportable`.
    """

    reportable = False


class ShapeError(DataError):
    """Samples of another shape than expected: the text has these shapes alone."""

    reportable = True


def one_line(error: Exception) -> str:
    """Return an error's text as one line of at most 240 characters; the error's type where it has no text."""
    return textwrap.shorten(str(error), 240) or type(error).__name__


def _check_size(what: str, taken: int, stored: int, free: int, most_times: int = MOST_TIMES) -> None:
    if taken > (allowed := max(free, most_times * stored)):
        raise ValueError(f"{what}: {taken:,} bytes are declared and {stored:,} stored, allowed: {allowed:,}")


def existing_path(data_dir: str, needs: str) -> Path:
    """Return data-dir as a path; DataError with the text `needs` where it is not set or does not exist."""
    if not data_dir:
        raise DataError(f"data-dir is not set: {needs}")
    path = Path(os.path.abspath(os.path.expanduser(data_dir)))
    if not os.path.exists(path):
        raise DataError(f"data-dir {path} does not exist: {needs}")
    return path


# --- .npz -----------------------------------------------------------------------------------------------


def read_npz(path: Path, names: Sequence[str] = ("x_train", "y_train", "x_test", "y_test")) -> dict[str, np.ndarray]:
    """Return the arrays of these names in an .npz file; DataError where one is missing or the file cannot be read."""
    with open_npz(path) as arrays:
        if missing := [name for name in names if name not in arrays]:
            raise DataError(f"{path} has no {', '.join(missing)}: it needs {', '.join(names)}")
        return {name: arrays[name] for name in names}


@contextmanager
def open_npz(path: Path, most_times: int = MOST_TIMES) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the arrays in an .npz file by name; each is read when it is looked up.

    Parameters
    ----------
    path : Path
    most_times : int (default: MOST_TIMES)
        An array above `ARRAY_BYTES` may take at most this many times its stored bytes.

    Raises
    ------
    DataError
        The file cannot be read, or an array in it is not plain, declares a size that it does not have, or is too
        large.
    """
    try:
        with _InSteps(path) as file, zipfile.ZipFile(file) as archive:
            yield _Arrays(archive, os.fstat(file.fileno()).st_size, most_times)
    except DataError:
        raise
    except Exception as error:  # a damaged archive raises many kinds of exceptions: zip, headers, memory
        raise DataError(f"{path} cannot be read as an .npz file of plain arrays: {one_line(error)}") from error


class _InSteps(io.FileIO):
    """A file that limits a read: `zipfile` reads an archive's table of contents at once, whatever its declared size."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _STEP:
            raise ValueError(f"its table of contents declares {size:,} bytes, allowed: {_STEP:,}")
        return super().read(size)


class _Arrays(Mapping[str, np.ndarray]):
    def __init__(self, archive: zipfile.ZipFile, size: int, most_times: int) -> None:
        self._archive = archive
        self._size = size  # of the file, in bytes
        self._most_times = most_times

    def __iter__(self) -> Iterator[str]:
        return (name.removesuffix(".npy") for name in self._archive.namelist() if name.endswith(".npy"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._archive.getinfo(f"{name}.npy")
        if (step := _STEPS.get(entry.compress_type)) is None:
            raise ValueError(f"{name} is compressed by method {entry.compress_type} of zip, allowed: as NumPy does")
        _check_size(name, entry.file_size, min(entry.compress_size, self._size), ARRAY_BYTES, self._most_times)
        with self._archive.open(entry) as file:
            shape, fortran_order, dtype = _npy_header(file)
            if dtype.kind == "O":
                raise ValueError(
                    f"{name} holds Python objects, such as texts of a table, which are not read, as they could execute "
                    f"code; allowed: numbers and texts; save texts as NumPy's, {name}.astype(str)"
                )
            if dtype.kind not in "biufcSU":
                raise ValueError(f"{name} holds {dtype}, allowed: numbers and texts")
            size, carried = math.prod(shape) * dtype.itemsize, entry.file_size - file.tell()
            if min(shape, default=0) < 0 or size != carried:
                raise ValueError(f"{name} declares {size:,} bytes, its shape is {shape}, and carries {carried:,}")
            content = np.empty(size, np.uint8)
            for start in range(0, size, step):
                _fill(file, content.data[start : start + step])
        return content.view(dtype).reshape(shape, order="F" if fortran_order else "C")


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version != (1, 0):  # other versions are for records; their headers may have any length
        raise ValueError(f"an array is of format {version[0]}.{version[1]}, allowed: 1.0")
    return np.lib.format.read_array_header_1_0(file)


def _fill(file: IO[bytes], part: memoryview) -> None:
    while part:
        if not (count := cast(zipfile.ZipExtFile, file).readinto(part)):
            raise EOFError("the file ends before an array does")
        part = part[count:]


# --- Images ---------------------------------------------------------------------------------------------


def read_image(path: Path, mode: str = "RGB") -> Image.Image:
    """Return the image in a file, in one of Pillow's modes ("RGB", "L" for grey); DataError where it cannot be read."""
    with _opened_image(path) as image:
        return image.convert(mode)


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height of the image in a file, without decoding it; DataError where there is none."""
    with _opened_image(path) as image:
        return image.size


def check_folder(folder: Path, paths: Sequence[Path], image_bytes: int) -> None:
    """Check that images of `image_bytes` bytes each may be read from these files; DataError where they may not."""
    try:
        stored = sum(path.stat().st_size for path in paths)
        _check_size(f"{len(paths)} images", len(paths) * image_bytes, stored, FOLDER_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: {one_line(error)}") from error


@contextmanager
def _opened_image(path: Path) -> Iterator[Image.Image]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other contents of the file, and about sizes, which are checked here
            with Image.open(path, formats=FORMATS) as image:
                _check_pixels(image)
                yield image
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{path} cannot be read as an image: it declares too many pixels, allowed: {MOST_PIXELS:,}"
        ) from error
    except Exception as error:  # Pillow's readers raise many kinds of exceptions
        raise DataError(f"{path} cannot be read as an image: {one_line(error)}") from error


def _check_pixels(image: Image.Image) -> None:
    if (pixels := image.width * image.height) > MOST_PIXELS:
        raise ValueError(f"it declares {image.width}x{image.height} = {pixels:,} pixels, allowed: {MOST_PIXELS:,}")
    if image.mode[0] in "IF":  # Pillow would cut what is above 255
        raise ValueError(
            f"its pixels are of 16 bits or more (mode {image.mode}), allowed: 8 bits a channel; scale it, or "
            "give an .npz file"
        )
    if image.format == "TIFF":  # whole tiles are unpacked, and a tile may be larger than the image
        width, height = (image.tag_v2.get(tag, 0) for tag in (322, 323))  # type: ignore[attr-defined]  # of a TIFF
        if not (isinstance(width, int) and isinstance(height, int)) or width * height > max(pixels, _TILE_PIXELS):
            raise ValueError(f"it declares tiles of {width}x{height} pixels, allowed: {max(pixels, _TILE_PIXELS):,}")


# --- Models ---------------------------------------------------------------------------------------------


def safetensors_header(path: Path) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Return the texts in a safetensors file and the shape of each array, without reading the arrays.

    Raises
    ------
    Exception
        The file cannot be read, declares arrays that it does not have, or has a header that is too long.
    """
    with open(path, "rb") as file:
        if (size := int.from_bytes(file.read(8), "little")) > HEADER_BYTES:
            raise ValueError(f"it declares a header of {size:,} bytes, allowed: {HEADER_BYTES:,}")
    with safe_open(path, "numpy") as file:  # compares the declared arrays with the bytes in the file
        return file.metadata() or {}, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
