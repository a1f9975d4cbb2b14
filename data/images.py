"""The form into which every dataset is read: labelled images that have been checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Images:
    """Labelled images that have been checked.

    Attributes
    ----------
    x_train, x_test : ndarray, (n, c, h, w), uint8 or float32
        All finite. Features are images of one pixel, with a channel for each feature.
    y_train, y_test : ndarray, (n,), int64
        0 to num_classes - 1; each class occurs in y_train.
    num_classes : int
        2 or more.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int

    def __len__(self) -> int:
        """Number of training and test images together."""
        return len(self.x_train) + len(self.x_test)

    def pick(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of images (k, c, h, w) and their labels (k,); the numbers of test images start at n_train."""
        n_train = len(self.x_train)
        late = indices >= n_train
        x = np.empty((len(indices), *self.x_train.shape[1:]), np.result_type(self.x_train, self.x_test))
        y = np.empty(len(indices), np.int64)
        x[~late], y[~late] = self.x_train[indices[~late]], self.y_train[indices[~late]]
        x[late], y[late] = self.x_test[indices[late] - n_train], self.y_test[indices[late] - n_train]
        return x, y
