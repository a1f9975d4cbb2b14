"""The public set: unlabelled inputs that every client has, the same ones in the same order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import checked_inputs
from .files import DataError, read_npz
from .sources import DATASETS, OWN_FILES, load_dataset

MOST = 2000
"""Number of images of a public set where public-size is 0; the number that PerFed-CKT uses."""


def public_source(public_data: str, dataset: str) -> str:
    """Return the source of the public set; auto: CIFAR-100 for CIFAR-10, as in PerFed-CKT, else the dataset itself."""
    if public_data != "auto":
        return public_data
    return "cifar100" if dataset == "cifar10" else dataset


def hold_out_size(size: int, available: int) -> int:
    """Return how many of a dataset's images are held out for a public set; where size is 0, at most a tenth."""
    return size or max(1, min(MOST, available // 10))


def public_inputs(
    source: str,
    *,
    dataset: str,
    data_dir: str,
    kind: str,
    size: int,
    spare: np.ndarray,
    seed: int,
    settings: Mapping[str, Any],
) -> np.ndarray:
    """Read the inputs of the public set.

    Parameters
    ----------
    source : str
        Where the samples come from. `dataset` itself: samples that no client has, drawn from `spare`. Another name
        of `DATASETS`: samples drawn from its training samples. Otherwise the path of an .npz file with an array `x`,
        inputs of the clients' kind: its first samples.
    dataset, data_dir : str
        The clients' dataset, and its path. Another dataset is looked for in the same folder.
    kind : str
        Kind of the clients' inputs.
    size : int
        The exact number of samples. 0: all samples of a file, 2000 of a dataset; of the clients' own dataset 2000 or
        a tenth, whichever is less.
    spare : ndarray
        Indices of the samples of `dataset` that no client has (see `Partition`).
    seed : int
        Seed of the draw, and so of the order.
    settings : mapping
        Those with which `dataset` is read, in snake_case.

    Returns
    -------
    ndarray, (P, ...)
        As a dataset has them; P is 1 or more.

    Raises
    ------
    DataError
        The source is missing, cannot be read, or has too few samples.
    """
    rng = np.random.default_rng([seed, 5])  # 0 to 4 draw the partition
    own = source == dataset
    if own:
        own_samples = load_dataset(dataset, data_dir, **settings)
        order, most = rng.permutation(spare), hold_out_size(size, len(own_samples))
    elif source in DATASETS and source not in OWN_FILES:
        in_file = os.path.isfile(os.path.expanduser(data_dir))
        x = load_dataset(source, str(Path(data_dir).parent) if in_file else data_dir).x_train
        order, most = rng.permutation(len(x)), MOST
    else:
        x = read_public(source, kind)
        order, most = np.arange(len(x)), len(x)

    available = len(order)
    wanted = size or min(most, available)
    if available == 0:
        raise DataError(
            f"public-data is {source}, the clients' own dataset, and they leave no images of it: take a smaller "
            "samples-per-client, or another public-data"
        )
    if own and not size and available < most:
        raise DataError(
            f"public-data is {source}, the clients' own dataset, of which they leave {available} images, too few for "
            f"a public set, which has {most}: take a smaller samples-per-client, or public-size {available}"
        )
    if wanted > available:
        remedy = "; a smaller samples-per-client leaves more" if own else ""
        raise DataError(f"public-size is {size}, and {source} has {available} images for the public set{remedy}")
    chosen = order[:wanted]
    return own_samples.pick(chosen)[0] if own else x[chosen]


def read_public(source: str | os.PathLike[str], kind: str = "image") -> np.ndarray:
    """Return the array `x` of an .npz file as inputs (P, ...) of a kind; DataError where it has none."""
    path = Path(os.path.abspath(os.path.expanduser(source)))
    if not path.is_file():
        names = ", ".join(name for name in DATASETS if name not in OWN_FILES)
        raise DataError(f"public-data is {str(source)!r}, allowed: auto, {names}, or an existing .npz file")
    return checked_inputs(read_npz(path, ("x",))["x"], kind, f"{path}: x")
