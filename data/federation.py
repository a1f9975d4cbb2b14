"""A federation: the clients of a run, and the images of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from kindred.lazy import lazy

from .partitions import Partition
from .sources import DataError, Images
from .task import Task

if TYPE_CHECKING:
    import torch

    Samples = tuple[torch.Tensor, torch.Tensor]
else:
    torch = lazy("torch")


@dataclass(frozen=True)
class SiteData:
    """The data of one client.

    Attributes
    ----------
    train, validation, test : pair of tensors
        Images (n, c, h, w), float32, with mean 0 and deviation 1 in each channel over all training images of the
        dataset; labels (n,), int64. n may be 0.
    """

    train: Samples
    validation: Samples
    test: Samples


class Federation:
    """Clients and their images.

    Parameters
    ----------
    images : Images
    partition : Partition
    title : str
        Title of figures.
    public : callable, optional
        Returns the images of the public set, (P, c, h, w), uint8 or float32 as the clients' images are.

    Attributes
    ----------
    num_clients, num_classes : int
    image_shape : tuple of int
        (channels, height, width).
    groups : ndarray, (m,), int
        The true group of each client; all 0 where there are no groups.
    quarter_turns : ndarray, (m,), int
        Number of counter-clockwise 90-degree turns of each client's images.
    train_sizes : ndarray, (m,), int
        Number of training images of each client; may be 0.
    sizes : ndarray, (m,), int
        Number of images of each client, for training, validation and test together.
    title : str
    task : Task
        Input and classes of the federation's models.
    """

    def __init__(
        self,
        images: Images,
        partition: Partition,
        title: str = "",
        public: Callable[[], np.ndarray] | None = None,
    ) -> None:
        height, width = images.x_train.shape[2:]
        if partition.quarter_turns.any() and (height != width or height == 1):
            raise DataError(
                f"rotated needs square images of more than one pixel, these are (c, h, w) = {images.x_train.shape[1:]}"
            )
        self.num_clients = len(partition.groups)
        self.num_classes = images.num_classes
        self.image_shape: tuple[int, int, int] = images.x_train.shape[1:]
        self.groups = partition.groups
        self.quarter_turns = partition.quarter_turns
        self.train_sizes = np.array([len(indices) for indices in partition.train])
        self.sizes = np.array(
            [sum(map(len, parts)) for parts in zip(partition.train, partition.validation, partition.test, strict=True)]
        )
        self.title = title
        self._label_maps = partition.label_maps
        mean, deviation = _channel_statistics(images.x_train)
        self.task = Task(self.image_shape, self.num_classes, tuple(mean.tolist()), tuple(deviation.tolist()))
        # Each image that some client has is kept, once; of a large dataset that is often a small part.
        parts = (partition.train, partition.validation, partition.test)
        used = np.unique(np.concatenate([indices for part in parts for indices in part]))
        self._x, self._y = images.pick(used)
        self._train, self._validation, self._test = (
            [np.searchsorted(used, indices) for indices in part] for part in parts
        )
        self._read_public = public
        self._public: torch.Tensor | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all clients' images and labels; it depends on these alone, not on the files they were read from."""
        digest = sha256(repr(self.task).encode())
        arrays = (self._x, self._y, self.quarter_turns, self._label_maps, *self._train, *self._validation, *self._test)
        for array in arrays:
            digest.update(f"{array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def class_counts(self) -> np.ndarray:
        """Return the number of training images of each client by label, as the client labels them: (m, C), int."""
        labels = (self._label_maps[client][self._y[members]] for client, members in enumerate(self._train))
        return np.stack([np.bincount(y, minlength=self.num_classes) for y in labels])

    @property
    def typical_size(self) -> float:
        """Mean number of training images of a client."""
        return float(self.train_sizes.mean())

    def site_data(self, client: int | str) -> SiteData:
        """Return the data of one client, in new tensors at each call.

        Parameters
        ----------
        client : int
            0 to num_clients - 1. A client with a name has no data here.

        Raises
        ------
        DataError
            There is no such client.
        """
        if not isinstance(client, int) or client not in range(self.num_clients):
            raise DataError(f"client {client} has no data: num-clients is {self.num_clients}, clients count from 0")

        def samples(members: list[np.ndarray]) -> Samples:
            turned = np.rot90(self._x[members[client]], self.quarter_turns[client], axes=(2, 3))
            return self.task.tensor(turned), torch.from_numpy(self._label_maps[client][self._y[members[client]]])

        return SiteData(samples(self._train), samples(self._validation), samples(self._test))

    def public_set(self) -> torch.Tensor:
        """Return the unlabelled images that all clients share, upright and in one order; read at the first call.

        Returns
        -------
        Tensor, (P, c, h, w), float32
            Normalised by the statistics of the clients' images. All callers share the tensor: do not write to it.

        Raises
        ------
        DataError
            There is no public set, or its images differ from the clients' in shape or type.
        """
        if self._public is None:
            if self._read_public is None:
                raise DataError("this federation has no public set")
            x = self._read_public()
            if x.shape[1:] != self.image_shape:
                raise DataError(
                    f"the images of public-data are (c, h, w) = {x.shape[1:]}, the clients' are {self.image_shape}"
                )
            if x.dtype != self._x.dtype:
                raise DataError(
                    f"the images of public-data hold {x.dtype}, the clients' {self._x.dtype}: their scales may differ"
                )
            self._public = self.task.tensor(x)
        return self._public


def _channel_statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each channel's mean and standard deviation in images (n, c, h, w); the latter is 1 instead of 0."""
    channels = []
    for c in range(x.shape[1]):
        blocks = [x[start : start + 2000, c].ravel() for start in range(0, len(x), 2000)]
        if x.dtype == np.uint8:  # a histogram gives the same statistics several times faster
            weights = sum(np.bincount(block, minlength=256) for block in blocks)
            values = np.arange(256.0)
            mean = np.average(values, weights=weights)
            square = np.average((values - mean) ** 2, weights=weights)
        else:
            size = len(x) * x.shape[2] * x.shape[3]
            mean = sum(block.sum(dtype=np.float64) for block in blocks) / size
            square = sum(np.square(block - mean).sum() for block in blocks) / size
        channels.append((mean, np.sqrt(square) or 1.0))
    mean, deviation = np.array(channels).T
    return mean, deviation
