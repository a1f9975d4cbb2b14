"""What the models of a run take and give: enough, beside its arrays, to use a model anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from .sources import DataError


@dataclass(frozen=True)
class Task:
    """Images of one kind, put on one scale, and classes.

    Attributes
    ----------
    image_shape : tuple of int
        (channels, height, width).
    num_classes : int
    mean, deviation : tuple of float
        For each channel, or one for all: what is taken off the numbers, and what they are then divided by.
    full : float
        What bytes are divided by first: 255 has them count as 0 to 1, 1 leaves them as they are.
    class_names : tuple of str
        Empty where classes have no names but their numbers.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    full: float = 1.0
    class_names: tuple[str, ...] = ()

    def normalised(self, x: np.ndarray) -> np.ndarray:
        """Images (n, c, h, w), uint8 or float32, on the scale that models know: float32.

        Raises
        ------
        DataError
            Images of another shape.
        """
        if x.shape[1:] != self.image_shape:
            given, due = ("x".join(map(str, shape)) for shape in (x.shape[1:], self.image_shape))
            raise DataError(f"images are {given}, expected {due} (channels x height x width)")
        mean, deviation = (np.float32(values)[:, None, None] for values in (self.mean, self.deviation))
        if x.dtype == np.uint8 and self.full != 1:
            x = x / np.float32(self.full)
        return np.ascontiguousarray((x - mean) / deviation)

    def to_metadata(self, model: str) -> dict[str, str]:
        """Texts to keep beside the arrays of a model, which is a network of this name."""
        return {"model": model, "task": json.dumps(asdict(self))}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> tuple[str, Task]:
        """The name of the network and the task that `to_metadata` has put into texts.

        Raises
        ------
        KeyError, ValueError, TypeError
            There are no such texts.
        """
        fields = {key: tuple(value) if isinstance(value, list) else value
                  for key, value in json.loads(metadata["task"]).items()}
        return metadata["model"], cls(**fields)
