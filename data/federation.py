"""A federation: the clients of a run, and each one's images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .partitions import Partition, divide
from .sources import DataError, Images, load_images

if TYPE_CHECKING:
    import torch


class Federation:
    """Clients and their images.

    Parameters
    ----------
    images : Images
    partition : Partition
    title : str
        What the federation is, for pictures.

    Attributes
    ----------
    num_clients, num_classes : int
    image_shape : tuple of int
        (channels, height, width).
    groups : ndarray, (m,), int
        The true group of each client; all 0 where there are none.
    quarter_turns : ndarray, (m,), int
        How often each client's images are turned by 90 degrees, counter-clockwise.
    title : str
    """

    def __init__(self, images: Images, partition: Partition, title: str = "") -> None:
        if partition.quarter_turns.any() and images.x_train.shape[2] != images.x_train.shape[3]:
            raise DataError(f"rotated needs square images, these are (c, h, w) = {images.x_train.shape[1:]}")
        self.num_clients = len(partition.groups)
        self.num_classes = images.num_classes
        self.image_shape: tuple[int, int, int] = images.x_train.shape[1:]
        self.groups = partition.groups
        self.quarter_turns = partition.quarter_turns
        self.title = title
        self._label_maps = partition.label_maps
        mean, deviation = _channel_statistics(images.x_train)
        self._mean, self._deviation = (a.astype(np.float32)[:, None, None] for a in (mean, deviation))
        self._train = _Pool(images.x_train, images.y_train, partition.train)
        self._test = _Pool(images.x_test, images.y_test, partition.test)

    def class_counts(self) -> np.ndarray:
        """Training images of each client by label, as the client sees the labels: (m, C), int."""
        labels = (self._labels(self._train, client) for client in range(self.num_clients))
        return np.stack([np.bincount(y, minlength=self.num_classes) for y in labels])

    def site_data(self, client: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The data of one client, made anew at each call.

        Parameters
        ----------
        client : int
            0 to num_clients - 1.

        Returns
        -------
        x_train, y_train, x_test, y_test : Tensor
            Images (n, c, h, w), float32, with mean 0 and deviation 1 in each channel over all training images
            of the dataset; labels (n,), int64.

        Raises
        ------
        DataError
            No such client.
        """
        import torch

        if not 0 <= client < self.num_clients:
            raise DataError(f"client {client} has no data: num-clients is {self.num_clients}, clients count from 0")
        arrays = []
        for pool in (self._train, self._test):
            turned = np.rot90(pool.x[pool.members[client]], self.quarter_turns[client], axes=(2, 3))
            arrays.append(np.ascontiguousarray((turned - self._mean) / self._deviation))
            arrays.append(self._labels(pool, client))
        return tuple(torch.from_numpy(array) for array in arrays)

    def _labels(self, pool: _Pool, client: int) -> np.ndarray:
        return self._label_maps[client][pool.y[pool.members[client]]]


class _Pool:
    """The images that some client has, each once; of a large set that is often a small part."""

    def __init__(self, x: np.ndarray, y: np.ndarray, members: list[np.ndarray]) -> None:
        used = np.unique(np.concatenate(members))
        self.x, self.y = x[used], y[used]
        self.members = [np.searchsorted(used, indices) for indices in members]


def _channel_statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel of (n, c, h, w) images; the latter 1 where nothing varies."""
    channels = []
    for c in range(x.shape[1]):
        blocks = [x[start : start + 2000, c].ravel() for start in range(0, len(x), 2000)]
        if x.dtype == np.uint8:  # a histogram says it all, several times faster
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


def load_federation(run_config: Mapping[str, Any]) -> Federation:
    """The federation that a run config describes; the last ones asked for are kept.

    Parameters
    ----------
    run_config : mapping
        With the keys dataset, data-dir, partition, num-clients, num-groups, samples-per-client,
        with-replacement and seed.

    Returns
    -------
    Federation
        The same for the same settings, in every process.

    Raises
    ------
    DataError
        Settings that do not fit each other or the data, or data that cannot be read.
    """
    keys = ("dataset", "data-dir", "partition", "num-clients", "num-groups", "samples-per-client")
    return _load(*(run_config[key] for key in keys), run_config["with-replacement"], run_config["seed"])


@lru_cache(maxsize=2)
def _load(
    dataset: str,
    data_dir: str,
    partition: str,
    num_clients: int,
    num_groups: int,
    samples_per_client: int,
    with_replacement: bool,
    seed: int,
) -> Federation:
    images = load_images(dataset, data_dir)
    parts = divide(
        partition,
        images.y_train,
        images.y_test,
        images.num_classes,
        dataset=dataset,
        num_clients=num_clients,
        num_groups=num_groups,
        samples_per_client=samples_per_client,
        with_replacement=with_replacement,
        seed=seed,
    )
    return Federation(images, parts, f"{dataset}, {partition}, {num_clients} clients")
