"""The form into which every dataset is read: checked samples, and whose they are where the data say so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kindred.objectives import Classes, Objective

from .splits import split

if TYPE_CHECKING:
    from .schema import Schema


@dataclass(frozen=True)
class Dataset:
    """Labelled samples that have been checked.

    Attributes
    ----------
    x_train, x_test : ndarray, (n, ...)
        Inputs, as the table in `data.inputs` has them for each kind; all finite but in tables, where NaN is a missing
        value. Without a division into training and test data all samples are in x_train, and x_test has none: a
        partition divides them.
    y_train, y_test : ndarray
        Targets in the units of the data: classes (n,), int64, each of which occurs in y_train; labels (n, L), of 0 and
        1; numbers (n,), float64.
    objective : Objective
        Names and number of the outputs. A number's mean and deviation are set later, from training data, if not
        `is_fitted`.
    kind : str
        A key of `data.inputs.KINDS`.
    clients_train, clients_test : ndarray of str (n,), optional
        Whose the samples are, where the data say so.
    times : ndarray (n,), optional
        When the samples were, the training samples first: a client's later ones are for test, where x_test has none,
        and for validation.
    schema : Schema, optional
        Of tables: columns, types and categories.
    is_fitted : bool
        Whether the schema and the objective come from a file, with their means and deviations.
    vocabulary : int
        Of tokens: their number.
    characters : str
        Of tokens that are characters: these, in order of token.
    remarks : tuple of str
        Lines to print about what of the data is not used, or not known.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    objective: Objective
    kind: str = "image"
    clients_train: np.ndarray | None = None
    clients_test: np.ndarray | None = None
    times: np.ndarray | None = None
    schema: Schema | None = None
    is_fitted: bool = False
    vocabulary: int = 0
    characters: str = ""
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of training and test samples together."""
        return len(self.x_train) + len(self.x_test)

    def divided(self, test_share: float, rng: np.random.Generator) -> Dataset:
        """Return the dataset with a share of its training samples for test, see `kindred.data.splits.split`."""
        classes = self.y_train if self.objective.has_classes else None
        train, test = split(len(self.x_train), test_share, rng, classes, self.times)
        return replace(
            self,
            x_train=self.x_train[train],
            y_train=self.y_train[train],
            x_test=self.x_train[test],
            y_test=self.y_train[test],
            clients_train=None if self.clients_train is None else self.clients_train[train],
            clients_test=None if self.clients_train is None else self.clients_train[test],
            times=None if self.times is None else self.times[np.r_[train, test]],
        )

    def pick(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of samples (k, ...) and their targets; the numbers of test samples start at n_train."""
        n_train = len(self.x_train)
        late = indices >= n_train
        x = np.empty((len(indices), *self.x_train.shape[1:]), np.result_type(self.x_train, self.x_test))
        y = np.empty((len(indices), *self.y_train.shape[1:]), self.y_train.dtype)
        x[~late], y[~late] = self.x_train[indices[~late]], self.y_train[indices[~late]]
        x[late], y[late] = self.x_test[indices[late] - n_train], self.y_test[indices[late] - n_train]
        return x, y


def Images(  # noqa: N802  # a kind of `Dataset`, under the name that extensions use
    x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, num_classes: int
) -> Dataset:
    """Return a dataset of images (n, c, h, w), uint8 or float32, with classes from 0 to num_classes - 1."""
    return Dataset(x_train, y_train, x_test, y_test, Classes(num_classes))
