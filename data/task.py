"""The input and the classes of a run's models. With its arrays and these a model can be used anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.lazy import lazy

from .files import MOST_PIXELS
from .sources import DataError

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

MOST = 1_000_000
"""Largest number of channels, and of classes; a file with more is refused before its network is built."""


@dataclass(frozen=True)
class Task:
    """Shape and scale of the images that a model takes, and its classes.

    Attributes
    ----------
    image_shape : tuple of int
        (channels, height, width).
    num_classes : int
    mean, deviation : tuple of float
        For each channel, or one for all. The mean is subtracted from the pixel values; the result is divided by
        the deviation.
    full : float
        Divisor of uint8 pixels before that: 255 maps them to 0 to 1, 1 leaves them unchanged.
    class_names : tuple of str
        Empty where classes have only numbers.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    full: float = 1.0
    class_names: tuple[str, ...] = ()

    def normalised(self, x: np.ndarray) -> np.ndarray:
        """Return images (n, c, h, w), uint8 or float32, on the models' scale, as float32.

        Raises
        ------
        DataError
            The images have another shape.
        """
        self.check_shape(x.shape[1:])
        mean, deviation = (np.asarray(values, np.float32)[:, None, None] for values in (self.mean, self.deviation))
        if x.dtype == np.uint8 and self.full != 1:
            x = x / np.float32(self.full)
        return np.ascontiguousarray((x - mean) / deviation)

    def tensor(self, x: np.ndarray) -> torch.Tensor:
        """Return `normalised` images as a tensor."""
        return torch.from_numpy(self.normalised(x))

    def check_shape(self, image_shape: tuple[int, ...]) -> None:
        """Check that images have the shape `image_shape`; DataError where they do not."""
        if image_shape != self.image_shape:
            given, due = ("x".join(map(str, shape)) for shape in (image_shape, self.image_shape))
            raise DataError(f"images are {given}, expected {due} (channels x height x width)")

    def to_metadata(self, model: str) -> dict[str, str]:
        """Return texts to store beside the arrays of a model; `model` is the name of its network."""
        return {"model": model, "task": json.dumps(asdict(self))}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> tuple[str, Task]:
        """Return the name of the network and the task from the texts of `to_metadata`.

        Raises
        ------
        KeyError, ValueError, TypeError
            The texts are missing, or a field is out of range.
        """
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in json.loads(metadata["task"]).items()
        }
        task = cls(**fields)
        task._check_ranges()
        return metadata["model"], task

    def _check_ranges(self) -> None:
        shape, numbers = self.image_shape, (*self.mean, *self.deviation, self.full)
        if not (
            len(shape) == 3
            and all(type(side) is int and side > 0 for side in shape)
            and shape[0] <= MOST
            and shape[1] * shape[2] <= MOST_PIXELS
        ):
            raise ValueError(
                f"image_shape is {shape}, allowed: 1 to {MOST:,} channels, height and width with at most "
                f"{MOST_PIXELS:,} pixels"
            )
        if type(self.num_classes) is not int or not 2 <= self.num_classes <= MOST:
            raise ValueError(f"num_classes is {self.num_classes}, allowed: 2 to {MOST:,}")
        if not {len(self.mean), len(self.deviation)} <= {1, shape[0]}:
            raise ValueError(
                f"there are {len(self.mean)} means and {len(self.deviation)} deviations, allowed: one, or "
                f"one for each of {shape[0]} channels"
            )
        if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise ValueError("mean, deviation and full are not all finite numbers")
