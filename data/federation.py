"""A federation: the clients of a run, and the samples of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

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
        Number of clients that take part, m.
    newcomers : range
        The further clients, which take no part in the run; all other attributes are of the m clients alone.
    names : tuple of str
        The clients' names, where the data name them; otherwise empty.
    newcomer_names : tuple of str
        The same of the newcomers.
    groups : ndarray, (m,), int
        The true group of each client; all 0 where there are no groups.
    quarter_turns : ndarray, (m,), int
        Number of counter-clockwise 90-degree turns of each client's images.
    train_sizes : ndarray, (m,), int
        Number of training samples of each client; may be 0.
    sizes : ndarray, (m,), int
        Number of samples of each client, for training, validation and test together.
    title : str
    has_validation : bool
        Whether there are validation samples.
    task : Task
        Inputs and objective of the federation's models.
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
        self.num_clients = m = len(partition.groups) - partition.newcomers
        self.newcomers = range(m, len(partition.groups))
        self.names, self.newcomer_names = partition.names[:m], partition.names[m:]
        self.groups = partition.groups[:m]
        self.quarter_turns = partition.quarter_turns[:m]
        self.train_sizes = np.array([len(indices) for indices in partition.train[:m]])
        self.sizes = np.array(
            [
                sum(map(len, parts))
                for parts in zip(partition.train[:m], partition.validation[:m], partition.test[:m], strict=True)
            ]
        )
        self.title = title
        self.has_validation = any(map(len, partition.validation))
        self._remarks = dataset.remarks + _taking_no_part(dataset, partition)
        self._turns, self._label_maps = partition.quarter_turns, partition.label_maps
        known = (dataset.x_train, dataset.y_train)
        if not len(dataset.x_test) or self.newcomers:  # then clients' test samples, or newcomers' ones, are among these
            known = dataset.pick(np.unique(np.concatenate(partition.train[:m])))
        elif self.names and dataset.clients_train is not None:  # not those of clients that take no part
            taking_part = np.isin(dataset.clients_train, self.names)
            known = known if taking_part.all() else dataset.pick(np.flatnonzero(taking_part))
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
    def remarks(self) -> tuple[str, ...]:
        """Lines to print about the data; not every process prints them."""
        return self._remarks + self._in_both_parts() + self._without_validation()

    def _in_both_parts(self) -> tuple[str, ...]:
        """Return a remark on rows of tables for test that are equal to a row for training of the same client.

        They may be of two people, so they are not refused, as images are.
        """
        if self.task.inputs.kind != "table":
            return ()
        rows = np.column_stack([np.nan_to_num(self._x, nan=np.inf), self._y])  # all other values are finite
        of_row = np.unique(rows, axis=0, return_inverse=True)[1].ravel()  # (n,), the same for equal rows
        pairs = zip(self._train, self._test, strict=True)
        equal = sum(int(np.isin(of_row[test], of_row[train]).sum()) for train, test in pairs)
        if not equal:
            return ()
        return (f"{equal:,} of {sum(map(len, self._test)):,} rows for test are equal to a row for training",)

    def _without_validation(self) -> tuple[str, ...]:
        """Return a remark on the clients of which no sample could be held out, if others have validation samples.

        Newcomers have none, as all their samples are for training.
        """
        m = self.num_clients
        clients = [i for i, own in enumerate(self._validation[:m]) if not len(own) and len(self._train[i])]
        if not clients or len(clients) == m:
            return ()
        first = ", ".join(str(self.names[client] if self.names else client) for client in clients[:5])
        return (
            f"{len(clients)} of {m} clients have too few training samples to hold one out, and no "
            f"validation data: {first}{', ...' if len(clients) > 5 else ''}",
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all clients' samples; it depends on these alone, not on the files they were read from."""
        digest = sha256(_identity(self.task).encode())
        arrays = (self._x, self._y, self._turns, self._label_maps, *self._train, *self._validation, *self._test)
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
            return np.stack([self._y[members].sum(axis=0, dtype=int) for members in self._train[: self.num_clients]])
        if not objective.has_classes:
            return self.train_sizes[:, None]
        counted = [self._targets(client, members) for client, members in enumerate(self._train[: self.num_clients])]
        return np.stack([np.bincount(y, minlength=objective.num_outputs) for y in counted])

    def targets(self) -> list[dict[str, Any]]:
        """Return what each client's training targets are: the number of `classes`, or the `range` of a number.

        Where a sample has several labels, those count that are true of some sample. A range is that of the smallest and
        the largest target, in the unit of the data; a client without training samples has none.
        """
        if self.task.objective.has_classes or isinstance(self.task.objective, Labels):
            return [{"classes": int(np.count_nonzero(counts))} for counts in self.class_counts()]
        found = [self._y[members] for members in self._train[: self.num_clients]]
        return [{"range": [float(y.min()), float(y.max())]} if len(y) else {} for y in found]

    def clients_without(self, metric: str) -> dict[int, int]:
        """Return client -> number of different targets, 0 or 1, of its test samples where these do not define a metric.

        With samples of one class there is no AUROC. The objective's own headline metric is always defined.
        """
        objective, defined, found = self.task.objective, {b"": False}, {}
        for client, members in enumerate(self._test[: self.num_clients] if metric != objective.metric else ()):
            targets = np.unique(self._targets(client, members), axis=0)  # how many there are of each does not matter
            if (key := targets.tobytes()) not in defined:
                guess = np.full((len(targets), objective.num_outputs), 1 / objective.num_outputs)
                defined[key] = metric in objective.evaluated(guess, targets, (metric,))
            if not defined[key]:
                found[client] = len(targets)
        return found

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
            raise DataError(f"client {client} has no data: {self.num_clients} clients take part, they count from 0")
        return SiteData(*(self._samples(client, part[client]) for part in (self._train, self._validation, self._test)))

    def newcomer_data(self, client: int | str, labelled: int) -> SiteData:
        """Return the data of a newcomer with a number of labelled training samples, or all if it has fewer.

        More of them include the fewer. None is for validation.

        Raises
        ------
        DataError
            It is no newcomer.
        """
        if not isinstance(client, int) or client not in self.newcomers:
            raise DataError(f"client {client} is no newcomer; these are numbered from {self.num_clients}")
        train = self._train[client][:labelled]
        return SiteData(
            *(self._samples(client, members) for members in (train, self._validation[client], self._test[client]))
        )

    def newcomer_size(self, client: int) -> int:
        """Return the number of training samples of a newcomer."""
        return len(self._train[client])

    def _samples(self, client: int, members: np.ndarray) -> Samples:
        """Return the inputs and targets of these of the samples, as the client has them."""
        x = self._x[members]
        if turns := self._turns[client]:
            x = np.rot90(x, turns, axes=(2, 3))
        return self.task.samples(x, self._targets(client, members))

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
    plain = isinstance(objective, Classes) and objective == Classes(objective.num_outputs, objective.names)
    if isinstance(inputs, ImageInputs) and plain:
        return (
            f"Task(image_shape={inputs.shape}, num_classes={objective.num_outputs}, mean={inputs.mean}, "
            f"deviation={inputs.deviation}, full={inputs.full}, class_names={objective.names})"
        )
    return repr(task)


def _taking_no_part(dataset: Dataset, partition: Partition) -> tuple[str, ...]:
    """Return a remark on the clients in the data that are not among the partition's."""
    if not partition.names or dataset.clients_train is None:
        return ()
    owners = dataset.clients_train
    if dataset.clients_test is not None:
        owners = np.concatenate([owners, dataset.clients_test])
    taking_part, (names, sizes) = {*partition.names}, np.unique(owners, return_counts=True)
    left = [f"{name} ({size:,})" for name, size in zip(names, sizes, strict=True) if name not in taking_part]
    if not left:
        return ()
    return (
        f"{len(left)} of {len(names)} clients in the data take no part, by num-clients or min-samples; with their "
        f"samples: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}",
    )
