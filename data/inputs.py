"""The inputs of a run's models: their kind and shape, and how they are prepared for the network.

| kind | x of a dataset | shape | the network takes |
| --- | --- | --- | --- |
| `image` | (n, c, h, w), uint8 or float32 | (channels, height, width) | the same, standardised by channel |
| `signal` | (n, c, t), float32 | (channels, time) | the same, standardised by channel |
| `table` | (n, columns), float64, as a `Schema` codes them | (features,) | (n, features) |
| `tokens` | (n, length), integers | (vocabulary, length) | the same, as int64 |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from kindred.lazy import lazy

from .files import MOST_PIXELS, DataError, ShapeError
from .schema import Schema

if TYPE_CHECKING:
    import torch

    from .dataset import Dataset
else:
    torch = lazy("torch")

MOST = 1_000_000
"""Largest number of channels, features and tokens; a file with more is refused before its network is built."""


@dataclass(frozen=True)
class Inputs:
    """Kind and shape of a model's inputs. Each kind is a subclass.

    Attributes
    ----------
    shape : tuple of int
        Shape of the inputs of one sample as the network takes them; for tokens (vocabulary, length).
    """

    shape: tuple[int, ...]

    kind: ClassVar[str]

    @classmethod
    def fitted(cls, dataset: Dataset, x: np.ndarray) -> Self:
        """Return the inputs of a dataset, prepared by the statistics of some of its samples, `x`."""
        raise NotImplementedError

    def prepared(self, x: np.ndarray) -> np.ndarray:
        """Return inputs, as a dataset has them, in the form that the network takes; DataError where they do not fit."""
        raise NotImplementedError

    def zeros(self) -> torch.Tensor:
        """Return one sample of zeros, as the network takes it."""
        return torch.zeros(1, *self.shape)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Check that samples, as a dataset has them, have the shape `shape`; DataError where they do not."""
        if shape != self.shape:
            given, due = ("x".join(map(str, each)) for each in (shape, self.shape))
            raise ShapeError(f"{self.kind}s are {given}, expected {due} ({self.sides})")

    @property
    def sides(self) -> str:
        """Names of the numbers in `shape`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the inputs as entries of a JSON file, with their kind."""
        return {"kind": self.kind} | {each.name: getattr(self, each.name) for each in fields(self)}

    @staticmethod
    def from_dict(entries: Mapping[str, Any]) -> Inputs:
        """Return the inputs that `to_dict` describes; raise KeyError, TypeError or ValueError where they are none."""
        given = dict(entries)
        return KINDS[given.pop("kind")].of_entries(given)

    @classmethod
    def of_entries(cls, entries: Mapping[str, Any]) -> Self:
        """Return the inputs with these entries, without their kind."""
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in entries.items()})


@dataclass(frozen=True)
class Standardised(Inputs):
    """Inputs with channels, each of which is standardised.

    Attributes
    ----------
    mean, deviation : tuple of float
        For each channel, or one for all. The mean is subtracted from the values; the result is divided by the
        deviation.
    full : float
        Divisor of uint8 values before that: 255 maps them to 0 to 1, 1 leaves them unchanged.
    """

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    full: float = 1.0

    dimensions: ClassVar[int]

    def __post_init__(self) -> None:
        shape, numbers = self.shape, (*self.mean, *self.deviation, self.full)
        if not (
            len(shape) == self.dimensions
            and all(type(side) is int and side > 0 for side in shape)
            and shape[0] <= MOST
            and math.prod(shape[1:]) <= MOST_PIXELS
        ):
            raise ValueError(
                f"the shape of a model's {self.kind}s is {shape}, allowed: {self.sides}, with 1 to {MOST:,} channels "
                f"and at most {MOST_PIXELS:,} values in each"
            )
        if not {len(self.mean), len(self.deviation)} <= {1, shape[0]}:
            raise ValueError(
                f"there are {len(self.mean)} means and {len(self.deviation)} deviations, allowed: one, or "
                f"one for each of {shape[0]} channels"
            )
        if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise ValueError("mean, deviation and full are not all finite numbers")

    @classmethod
    def fitted(cls, dataset: Dataset, x: np.ndarray) -> Self:
        """Return inputs that are standardised by the mean and the deviation of each channel of `x`."""
        mean, deviation = channel_statistics(x)
        return cls(x.shape[1:], tuple(mean.tolist()), tuple(deviation.tolist()))

    def prepared(self, x: np.ndarray) -> np.ndarray:
        """Return inputs (n, c, ...), uint8 or float32, on the models' scale, as float32."""
        self.check_shape(x.shape[1:])
        each = (slice(None), *(None,) * (self.dimensions - 1))
        mean, deviation = (np.asarray(values, np.float32)[each] for values in (self.mean, self.deviation))
        if x.dtype == np.uint8 and self.full != 1:
            x = x / np.float32(self.full)
        return np.ascontiguousarray((x - mean) / deviation)


@dataclass(frozen=True)
class ImageInputs(Standardised):
    """Images (channels, height, width)."""

    kind = "image"
    dimensions = 3
    sides = "channels x height x width"

    def prepared(self, x: np.ndarray) -> np.ndarray:
        """Return images as `Standardised.prepared` does; DataError also where their scale is another.

        The scale is that of the training images, whose mean and deviation these are.
        """
        least, largest = (x.min(), x.max()) if x.size else (0, 0)
        if x.dtype != np.uint8 and 0 <= least < largest <= 1 < min(self.mean):
            raise DataError(
                "images have values from 0 to 1, allowed: the scale of the training images, whose mean is "
                f"{self.mean[0]:.3g}"
            )
        if x.dtype == np.uint8 and self.full == 1 and largest > 100 and max(*self.mean, *self.deviation) <= 1:
            raise DataError(
                f"images have values up to {largest}, allowed: the scale of the training images, whose mean is "
                f"{self.mean[0]:.3g}"
            )
        return super().prepared(x)


@dataclass(frozen=True)
class SignalInputs(Standardised):
    """Signals (channels, time)."""

    kind = "signal"
    dimensions = 2
    sides = "channels x time"


@dataclass(frozen=True)
class TokenInputs(Inputs):
    """Sequences of tokens, numbers from 0 to the size of the vocabulary less 1.

    Attributes
    ----------
    shape : tuple of int
        (vocabulary, length).
    characters : str
        The characters that the tokens are, in order of token; empty where tokens are only numbers. Another character is
        the last token, whose character is U+FFFD.
    """

    characters: str = ""

    kind = "tokens"
    sides = "vocabulary x length"

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or not all(type(side) is int and 0 < side <= MOST for side in self.shape):
            raise ValueError(f"the shape of a model's tokens is {self.shape}, allowed: two numbers from 1 to {MOST:,}")
        if not isinstance(self.characters, str) or len(self.characters) not in (0, self.shape[0]):
            raise ValueError(
                f"there are {len(self.characters)} characters for {self.shape[0]} tokens, or no text of them"
            )

    def zeros(self) -> torch.Tensor:
        """Return one sequence of the first token."""
        return torch.zeros(1, self.shape[1], dtype=torch.int64)

    @classmethod
    def fitted(cls, dataset: Dataset, x: np.ndarray) -> Self:
        """Return the vocabulary of a dataset and the length of its sequences."""
        return cls((dataset.vocabulary, x.shape[1]), dataset.characters)

    def prepared(self, x: np.ndarray) -> np.ndarray:
        """Return tokens (n, length) as int64."""
        vocabulary, length = self.shape
        if x.shape[1:] != (length,):
            raise DataError(f"sequences have {'x'.join(map(str, x.shape[1:]))} tokens, expected {length}")
        if len(x) and not 0 <= x.min() <= x.max() < vocabulary:
            raise DataError(f"tokens go from {x.min()} to {x.max()}, expected 0 to {vocabulary - 1}")
        return np.ascontiguousarray(x, np.int64)


@dataclass(frozen=True)
class TableInputs(Inputs):
    """Rows of a table.

    Attributes
    ----------
    shape : tuple of int
        (features,).
    schema : Schema
        The columns, and how they become features.
    """

    shape: tuple[int, ...] = field(init=False)
    schema: Schema

    kind = "table"
    sides = "features"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", (self.schema.num_features,))

    @classmethod
    def fitted(cls, dataset: Dataset, x: np.ndarray) -> Self:
        """Return inputs whose numbers are standardised by the mean and the deviation of each column of `x`.

        Those of a schema that was fitted before stay as they are.
        """
        if dataset.schema and dataset.is_fitted:
            return cls(dataset.schema)
        schema = dataset.schema or Schema.of_numbers(np.concatenate([dataset.x_train, dataset.x_test]))
        return cls(schema.fit(x))

    def prepared(self, x: np.ndarray) -> np.ndarray:
        """Return the features of rows (n, columns), as float32."""
        return self.schema.features(x)

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as entries of a JSON file, with the kind of the inputs."""
        return {"kind": self.kind, **self.schema.to_dict()}

    @classmethod
    def of_entries(cls, entries: Mapping[str, Any]) -> Self:
        """Return the inputs with these entries, without their kind."""
        return cls(Schema.from_dict(entries))


KINDS: dict[str, type[Inputs]] = {each.kind: each for each in (ImageInputs, SignalInputs, TokenInputs, TableInputs)}


def channel_statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each channel's mean and standard deviation in inputs (n, c, ...); the latter is 1 instead of 0."""
    channels = []
    for c in range(x.shape[1]):
        blocks = [x[start : start + 2000, c].ravel() for start in range(0, len(x), 2000)]
        if x.dtype == np.uint8:  # a histogram gives the same statistics several times faster
            weights = sum(np.bincount(block, minlength=256) for block in blocks)
            values = np.arange(256.0)
            mean = np.average(values, weights=weights)
            square = np.average((values - mean) ** 2, weights=weights)
        else:
            size = sum(block.size for block in blocks)
            mean = sum(block.sum(dtype=np.float64) for block in blocks) / size
            square = sum(np.square(block - mean).sum() for block in blocks) / size
        channels.append((mean, np.sqrt(square) or 1.0))
    mean, deviation = np.array(channels).T
    return mean, deviation
