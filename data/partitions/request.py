"""The request for a partition, its result, and the checks that several partitions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..files import DataError
from ..splits import hold_out, split


@dataclass(frozen=True)
class Partition:
    """The samples of each client, and how the client sees them.

    Attributes
    ----------
    train, validation, test : list of ndarray
        The indices of each client's samples: 0 to n_train - 1 are the dataset's training samples, n_train and above its
        test samples. Without validation_share only dirichlet and dirichlet-clients have samples for validation.
    spare : ndarray
        The samples that no client has; a public set can be drawn from them.
    groups : ndarray, (m,)
        The group of each client, 0 to G - 1; all 0 where there are no groups.
    quarter_turns : ndarray, (m,)
        Number of counter-clockwise 90-degree turns of each client's images.
    label_maps : ndarray, (m, C)
        The label that client i gives to images of class c. Without effect where the objective has no classes.
    names : tuple of str
        The clients' names, where the data name them; otherwise empty.
    newcomers : int
        Number of the clients, the last ones, that take no part in the run.
    """

    train: list[np.ndarray]
    validation: list[np.ndarray]
    test: list[np.ndarray]
    spare: np.ndarray
    groups: np.ndarray
    quarter_turns: np.ndarray
    label_maps: np.ndarray
    names: tuple[str, ...] = ()
    newcomers: int = 0


@dataclass(frozen=True)
class Request:
    """A dataset to be divided, and the settings for it.

    Attributes
    ----------
    partition : str
        A name of `PARTITIONS`.
    y_train, y_test : ndarray, (n,) or (n, labels)
        Targets; where there are classes, these, 0 to num_classes - 1. A dataset without test samples is divided before,
        by test_share, except for schemes with `splits`.
    num_classes : int
        0 where the targets are no classes; only schemes without `needs_classes` are asked then.
    dataset : str
        A name of `DATASETS`; decides the meaning of 0 samples per client.
    num_clients, num_groups : int
    samples_per_client : int
        Training images per client. 0: the largest number for which no class runs out without replacement, at most 40
        for digits and 500 otherwise, unless the partition has its own rule. The number of test images is the same,
        but at most an equal share of all test images. In partitions marked `total`: all images of a client together.
    with_replacement : bool
        Whether a class that is used up starts again. For test images, which only measure, it always does. No client
        gets an image twice unless it needs more images of a class than there are.
    dirichlet_alpha : float
        Above 0.
    held_out : int
        Number of images that dirichlet and dirichlet-clients leave unassigned where samples_per_client is 0.
    seed : int
        0 or more.
    clients_train, clients_test : ndarray of str, (n,), optional
        Whose the samples are, where the data say so.
    times : ndarray, (n,), optional
        When the samples were, where the data say so, the training samples first.
    min_samples : int
        Least number of samples of a client, where the data say whose samples are.
    test_share : float
        Fraction of the samples that is for test, where the data have no test samples: above 0, below 1.
    validation_share : float
        Fraction of each client's training samples that is for validation, 0 or more and below 1, where the partition
        has no validation samples.
    held_out_clients : int
        Number of clients that take no part in the run, at least two fewer than all.
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
    clients_train: np.ndarray | None = None
    clients_test: np.ndarray | None = None
    times: np.ndarray | None = None
    min_samples: int = 10
    test_share: float = 0.3
    validation_share: float = 0.0
    held_out_clients: int = 0

    def rng(self, *part: int) -> np.random.Generator:
        """Return a generator for one part of the work: 0 classes or clients, 1 and 2 draws, 3 labels, 4 dealing.

        5 is the public set's, 6 divides training from test samples, 7 training from validation samples, 8 draws the
        clients held out. A second number makes one for each client.
        """
        return np.random.default_rng([self.seed, *part])

    @cached_property
    def have_train(self) -> np.ndarray:
        """Number of training images of each class, (C,)."""
        return np.bincount(self.y_train, minlength=self.num_classes)

    @cached_property
    def have_test(self) -> np.ndarray:
        """Number of test images of each class, (C,)."""
        return np.bincount(self.y_test, minlength=self.num_classes)

    def classes_of(self, samples: np.ndarray) -> np.ndarray | None:
        """Return the classes of training samples; None where there are no classes."""
        return self.y_train[samples] if self.num_classes else None

    def split(self, samples: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Divide training samples into those that stay, and test_share of them for test: see `kindred.data.splits`."""
        times = None if self.times is None else self.times[samples]
        places = split(len(samples), self.test_share, rng, self.classes_of(samples), times)
        return samples[places[0]], samples[places[1]]

    def hold_out(self, samples: np.ndarray, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Divide a client's training samples likewise into those that stay, and validation_share of them.

        Each class keeps a training sample, so that none may be left to hold out: see `kindred.data.splits.hold_out`.
        """
        classes = np.concatenate([self.y_train, self.y_test])[samples] if self.num_classes else None
        times = None if self.times is None else self.times[samples]
        train, validation = hold_out(len(samples), self.validation_share, self.rng(7, client), classes, times)
        return samples[train], samples[validation]


@dataclass(frozen=True)
class Scheme:
    """A way to divide a dataset.

    Attributes
    ----------
    description : str
        One line: which images each client has.
    divide : callable
        Takes a `Request`, returns a `Partition`; raises DataError where the request cannot be met.
    settings : tuple of str
        The settings that the partition uses in addition to num-clients and samples-per-client.
    total : bool
        Whether samples-per-client counts all images of a client, not its training images alone.
    needs_classes : bool
        Whether it divides by class.
    splits : bool
        Whether it divides training from test samples itself, where the data do not.
    """

    description: str
    divide: Callable[[Request], Partition]
    settings: tuple[str, ...] = ()
    total: bool = False
    needs_classes: bool = True
    splits: bool = False


def check_size(ask: Request, least: int = 1) -> None:
    """Check samples_per_client; DataError where it is below `least` or there are too few images."""
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
    """Return the bound "at most as many groups as clients", with its name, for `in_groups`."""
    return {f"num-clients, {ask.num_clients}": ask.num_clients}


def as_classes(ask: Request) -> dict[str, int]:
    """Return the bound "at most as many groups as classes", with its name, for `in_groups`."""
    return {f"the number of classes, {ask.num_classes}": ask.num_classes}


def check_groups(ask: Request, at_most: Mapping[str, int], least: int = 1) -> None:
    """Check num_groups against the smallest of the named bounds; DataError where it is out of range."""
    reason, high = min(at_most.items(), key=lambda item: item[1])
    if not least <= ask.num_groups <= high:
        raise DataError(
            f"num-groups is {ask.num_groups}, allowed with {ask.partition}: {least} to {high} (at most {reason})"
        )


def in_groups(ask: Request, at_most: Mapping[str, int], least: int = 1) -> np.ndarray:
    """Check num_groups and return the group of each client, (m,)."""
    check_groups(ask, at_most, least)
    return np.arange(ask.num_clients) * ask.num_groups // ask.num_clients


def make_partition(ask: Request, *samples: Any, **seen: Any) -> Partition:
    """Return a partition without groups, of upright images with unchanged labels, except where `seen` differs."""
    m = ask.num_clients
    plain: dict[str, Any] = {
        "groups": np.zeros(m, int),
        "quarter_turns": np.zeros(m, int),
        "label_maps": np.tile(np.arange(ask.num_classes), (m, 1)),
    }
    return Partition(*samples, **(plain | seen))
