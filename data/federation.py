"""A federation: the clients of a run, and the samples of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from kindred.lazy import lazy
from kindred.objectives import Classes, Labels

from .dataset import Dataset
from .files import DataError
from .inputs import ImageInputs
from .partitions import Partition
from .task import Task
from .weights import weighted

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
        Inputs (n, ...), prepared as the task says, and targets (n,) or (n, labels) on the scale of the loss. n may be
        0.
    """

    train: Samples
    validation: Samples
    test: Samples


class Federation:
    """Clients and their samples.

    Inputs are prepared by statistics of the dataset's training samples; where it has no test samples, of those that
    clients train on. So have numbers that are predicted.

    Parameters
    ----------
    dataset : Dataset
    partition : Partition
    title : str
        Title of figures.
    public : callable, optional
        Returns the inputs of the public set, (P, ...), as the clients' are in the dataset.
    class_weights : str
        Weights of the classes in the loss, see `kindred.data.weights.weighted`.

    Attributes
    ----------
    num_clients : int
    names : tuple of str
        The clients' names, where the data name them; otherwise empty.
    groups : ndarray, (m,), int
        The true group of each client; all 0 where there are no groups.
    quarter_turns : ndarray, (m,), int
        Number of counter-clockwise 90-degree turns of each client's images.
    train_sizes : ndarray, (m,), int
        Number of training samples of each client; may be 0.
    sizes : ndarray, (m,), int
        Number of samples of each client, for training, validation and test together.
    title : str
    task : Task
        Inputs and objective of the federation's models.
    remarks : tuple of str
        Lines to print about the data.
    """

    def __init__(
        self,
        dataset: Dataset,
        partition: Partition,
        title: str = "",
        public: Callable[[], np.ndarray] | None = None,
        class_weights: str = "",
    ) -> None:
        shape = dataset.x_train.shape[1:]
        if partition.quarter_turns.any():
            if dataset.kind != "image":
                raise DataError(f"rotated needs images, these are {dataset.kind} data of shape {shape}")
            if shape[1] != shape[2] or shape[1] == 1:
                raise DataError(f"rotated needs square images of more than one pixel, these are (c, h, w) = {shape}")
        self.num_clients = len(partition.groups)
        self.names = partition.names
        self.groups = partition.groups
        self.quarter_turns = partition.quarter_turns
        self.train_sizes = np.array([len(indices) for indices in partition.train])
        self.sizes = np.array(
            [sum(map(len, parts)) for parts in zip(partition.train, partition.validation, partition.test, strict=True)]
        )
        self.title = title
        self.remarks = dataset.remarks
        self._label_maps = partition.label_maps
        known = (dataset.x_train, dataset.y_train)
        if not len(dataset.x_test):  # then clients' test samples are among these
            known = dataset.pick(np.unique(np.concatenate(partition.train)))
        self.task = Task.fitted(dataset, *known)
        # Each sample that some client has is kept, once; of a large dataset that is often a small part.
        parts = (partition.train, partition.validation, partition.test)
        used = np.unique(np.concatenate([indices for part in parts for indices in part]))
        self._x, self._y = dataset.pick(used)
        self._train, self._validation, self._test = (
            [np.searchsorted(used, indices) for indices in part] for part in parts
        )
        if class_weights:
            counts = self.class_counts().sum(axis=0)
            objective = weighted(self.task.objective, class_weights, counts, int(self.train_sizes.sum()))
            self.task = replace(self.task, objective=objective)
        self._read_public = public
        self._public: torch.Tensor | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all clients' samples; it depends on these alone, not on the files they were read from."""
        digest = sha256(_identity(self.task).encode())
        arrays = (self._x, self._y, self.quarter_turns, self._label_maps, *self._train, *self._validation, *self._test)
        for array in arrays:
            digest.update(f"{array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def class_counts(self) -> np.ndarray:
        """Return the number of training samples of each client by class, as the client has them: (m, C), int.

        Where a sample has several labels, those that are true are counted, so that a sample may count several times.
        Without classes and labels C is 1, and all samples count.
        """
        objective = self.task.objective
        if isinstance(objective, Labels):
            return np.stack([self._y[members].sum(axis=0, dtype=int) for members in self._train])
        if not objective.has_classes:
            return self.train_sizes[:, None]
        counted = [self._targets(client, members) for client, members in enumerate(self._train)]
        return np.stack([np.bincount(y, minlength=objective.num_outputs) for y in counted])

    @property
    def typical_size(self) -> float:
        """Mean number of training samples of a client."""
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
            x = self._x[members[client]]
            if turns := self.quarter_turns[client]:
                x = np.rot90(x, turns, axes=(2, 3))
            return self.task.samples(x, self._targets(client, members[client]))

        return SiteData(samples(self._train), samples(self._validation), samples(self._test))

    def _targets(self, client: int, members: np.ndarray) -> np.ndarray:
        """Return the targets of a client's samples, as the client has them."""
        y = self._y[members]
        return self._label_maps[client][y] if self.task.objective.has_classes else y

    def public_set(self) -> torch.Tensor:
        """Return the unlabelled inputs that all clients share, upright and in one order; read at the first call.

        Returns
        -------
        Tensor, (P, ...)
            Prepared as the clients' inputs are. All callers share the tensor: do not write to it.

        Raises
        ------
        DataError
            There is no public set, or its inputs differ from the clients' in shape or type.
        """
        if self._public is None:
            if self._read_public is None:
                raise DataError("this federation has no public set")
            x = self._read_public()
            if x.shape[1:] != self._x.shape[1:]:
                raise DataError(f"the samples of public-data are {x.shape[1:]}, the clients' are {self._x.shape[1:]}")
            if x.dtype != self._x.dtype:
                raise DataError(
                    f"the samples of public-data hold {x.dtype}, the clients' {self._x.dtype}: their scales may differ"
                )
            self._public = self.task.tensor(x)
        return self._public


def _identity(task: Task) -> str:
    """Return a text that identifies a task.

    For images with plain classes it is the text of earlier versions, so that their runs can be continued and compared.
    """
    inputs, objective = task.inputs, task.objective
    if isinstance(inputs, ImageInputs) and objective == Classes(objective.num_outputs, objective.names):
        return (
            f"Task(image_shape={inputs.shape}, num_classes={objective.num_outputs}, mean={inputs.mean}, "
            f"deviation={inputs.deviation}, full={inputs.full}, class_names={objective.names})"
        )
    return repr(task)
