"""The request for a partition, its result, and the checks that several partitions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..sources import DataError


@dataclass(frozen=True)
class Partition:
    """Which images each client has, and how it sees them.

    Attributes
    ----------
    train, validation, test : list of ndarray
        A client's images, in random order. One numbering serves all: 0 to n_train - 1 are the dataset's training
        images, n_train and more its test images. Only dirichlet has images for validation.
    spare : ndarray
        The images that are left over for a public set: no client has them.
    groups : ndarray, (m,)
        The group of each client, 0 to G - 1; all 0 where there are none.
    quarter_turns : ndarray, (m,)
        How often a client's images are turned by 90 degrees, counter-clockwise.
    label_maps : ndarray, (m, C)
        What label client i gives to the images of class c.
    """

    train: list[np.ndarray]
    validation: list[np.ndarray]
    test: list[np.ndarray]
    spare: np.ndarray
    groups: np.ndarray
    quarter_turns: np.ndarray
    label_maps: np.ndarray


@dataclass(frozen=True)
class Request:
    """A dataset to be divided, and the settings.

    Attributes
    ----------
    partition : str
        A name of `PARTITIONS`.
    y_train, y_test : ndarray, (n,), int
        Labels, 0 to num_classes - 1.
    num_classes : int
    dataset : str
        A name of `DATASETS`; sets what 0 samples per client mean.
    num_clients, num_groups : int
    samples_per_client : int
        Training images a client. 0: as many as the classes last for without replacement, at most 40 for
        digits and 500 elsewhere, but for what a partition says. Test images: as many, at most an equal share of those
        there are. In partitions that are marked `total`: training and test images together.
    with_replacement : bool
        Whether a class that is used up starts anew. Test images, on which is only measured, always do; no
        client gets an image twice unless it needs more of a class than there are.
    dirichlet_alpha : float
        Above 0.
    held_out : int
        Images that dirichlet with 0 samples per client leaves over.
    seed : int
        0 or more.
    """

    partition: str
    y_train: np.ndarray
    y_test: np.ndarray
    num_classes: int
    dataset: str
    num_clients: int
    num_groups: int
    samples_per_client: int
    with_replacement: bool
    dirichlet_alpha: float
    held_out: int
    seed: int

    def rng(self, part: int) -> np.random.Generator:
        """Random numbers for a part of the work: 0 for classes, 1 and 2 for draws, 3 for labels, 4 for dealing."""
        return np.random.default_rng([self.seed, part])  # 5 draws the public set

    @cached_property
    def have_train(self) -> np.ndarray:
        """Training images of each class, (C,)."""
        return np.bincount(self.y_train, minlength=self.num_classes)

    @cached_property
    def have_test(self) -> np.ndarray:
        """Test images of each class, (C,)."""
        return np.bincount(self.y_test, minlength=self.num_classes)


@dataclass(frozen=True)
class Scheme:
    """A way to divide a dataset.

    Attributes
    ----------
    description : str
        One line: who has what.
    divide : callable
        Takes a `Request`, returns a `Partition`; DataError where that cannot be.
    settings : tuple of str
        The settings that count in it, besides num-clients and samples-per-client.
    total : bool
        Whether samples-per-client counts all images of a client, not its training images alone.
    """

    description: str
    divide: Callable[[Request], Partition]
    settings: tuple[str, ...] = ()
    total: bool = False


def check_size(ask: Request, least: int = 1) -> None:
    """Check samples_per_client; DataError where it is below `least`, or there are not as many images."""
    n, m, size = len(ask.y_train), ask.num_clients, ask.samples_per_client
    if size != 0 and size < least:
        raise DataError(f"samples-per-client is {size}, allowed with {ask.partition}: 0 or {least} and more")
    if size * (1 if ask.with_replacement else m) > n:
        remedy = f"{m} clients: take less of either, or with-replacement=true"
        raise DataError(
            f"there are {n} training images, too few for samples-per-client {size} with "
            + ("even one client" if ask.with_replacement else remedy)
        )


def as_clients(ask: Request) -> dict[str, int]:
    """Name the bound that there are no more groups than clients, for `in_groups`."""
    return {f"num-clients, {ask.num_clients}": ask.num_clients}


def as_classes(ask: Request) -> dict[str, int]:
    """Name the bound that there are no more groups than classes, for `in_groups`."""
    return {f"the number of classes, {ask.num_classes}": ask.num_classes}


def check_groups(ask: Request, at_most: Mapping[str, int], least: int = 1) -> None:
    """Check num_groups against the least of some numbers, named by what they are; DataError where it is not allowed."""
    reason, high = min(at_most.items(), key=lambda item: item[1])
    if not least <= ask.num_groups <= high:
        raise DataError(
            f"num-groups is {ask.num_groups}, allowed with {ask.partition}: {least} to {high} (at most {reason})"
        )


def in_groups(ask: Request, at_most: Mapping[str, int], least: int = 1) -> np.ndarray:
    """The group of each client, (m,), once num_groups has been checked."""
    check_groups(ask, at_most, least)
    return np.arange(ask.num_clients) * ask.num_groups // ask.num_clients


def make_partition(ask: Request, *images: Any, **seen: np.ndarray) -> Partition:
    """A partition without groups, of upright images with their own labels, but for what `seen` says."""
    m = ask.num_clients
    plain: dict[str, Any] = {
        "groups": np.zeros(m, int),
        "quarter_turns": np.zeros(m, int),
        "label_maps": np.tile(np.arange(ask.num_classes), (m, 1)),
    }
    return Partition(*images, **(plain | seen))
