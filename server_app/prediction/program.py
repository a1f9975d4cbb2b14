"""A model with the preparation of its inputs and the meaning of its outputs, as one PyTorch module to export.

| kind of inputs | x, raw | prepared inside |
| --- | --- | --- |
| `image` | (n, c, h, w), uint8 where the data were bytes scaled to 0 to 1, else float32 | standardised by channel |
| `signal` | (n, c, t), float32 | standardised by channel |
| `table` | (n, columns), float64: numbers, places of categories among the schema's, NaN where missing | features |
| `tokens` | (n, length), int64 | unchanged |

The result is (n, outputs): float32 probabilities, or float64 numbers in the data's unit.
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn

from kindred.client.training import set_arrays
from kindred.data.inputs import Standardised, TableInputs, TokenInputs
from kindred.data.schema import Schema
from kindred.objectives import SMALLEST, Classes, Labels, Number, Objective
from kindred.server_app.config import ConfigError

from .predictor import Predictor


class Program(nn.Module):
    """A model, or a mixture of models, from raw inputs to probabilities or numbers.

    Parameters
    ----------
    predictor : Predictor

    Raises
    ------
    ConfigError
        Its objective prepares inputs, mixes models or reads outputs in a way of its own, which is no PyTorch.
    """

    shares: Tensor

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        inputs, objective, mixture = predictor.task.inputs, predictor.task.objective, predictor.mixture
        _check_objective(objective, several=len(mixture.models) > 1)
        self._objective, self._kind = objective, mixture.kind
        if isinstance(inputs, TableInputs):
            self.prepare: nn.Module = Features(inputs.schema)
        else:
            self.prepare = Scale(inputs) if isinstance(inputs, Standardised) else nn.Identity()
        self.models = nn.ModuleList()
        for model, share in zip(mixture.models, mixture.shares.tolist(), strict=True):
            if share:  # a diverged model may predict NaN, and 0 times NaN is not 0
                network = deepcopy(predictor.module)
                set_arrays(network, model)
                self.models.append(network)
        self.register_buffer("shares", torch.tensor(mixture.shares[mixture.shares > 0], dtype=torch.float64))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions of raw inputs."""
        x = self.prepare(x)
        each = [self._objective.predictions(model(x).float()) for model in self.models]
        found = each[0] if len(each) == 1 else self._mixed(torch.stack(each).double())
        if isinstance(self._objective, Number):
            return found.double() * self._objective.deviation + self._objective.mean
        return found.float()

    def _mixed(self, predictions: Tensor) -> Tensor:
        """Return what `Objective.mix` does, of predictions (k, n, N)."""
        shares = self.shares[:, None, None]  # (k, 1, 1)
        if self._kind == "probabilities" or not self._objective.probabilities:
            return (shares * predictions).sum(0)
        if isinstance(self._objective, Labels):
            true, false = (
                (shares * each.clamp(min=SMALLEST).log()).sum(0).exp() for each in (predictions, 1 - predictions)
            )
            return true / (true + false)
        return (shares * predictions.clamp(min=SMALLEST).log()).sum(0).softmax(1)


class Scale(nn.Module):
    """`Standardised.prepared`."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, inputs: Standardised) -> None:
        super().__init__()
        sides = (-1, *(1,) * (inputs.dimensions - 1))
        self.register_buffer("mean", torch.tensor(inputs.mean, dtype=torch.float32).reshape(sides))
        self.register_buffer("deviation", torch.tensor(inputs.deviation, dtype=torch.float32).reshape(sides))
        self._full = inputs.full

    def forward(self, x: Tensor) -> Tensor:
        """Return the standardised inputs."""
        return (x.float() / self._full - self.mean) / self.deviation


class Features(nn.Module):
    """`Schema.features`."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        columns = list(enumerate(schema.columns))
        numbers = [(place, column) for place, column in columns if not column.categories]
        self._numbers = [place for place, _ in numbers]
        self._categories = [(place, len(column.categories)) for place, column in columns if column.categories]
        self._missing = [place for place, column in columns if column.missing]
        means, deviations = ([getattr(column, key) for _, column in numbers] for key in ("mean", "deviation"))
        self.register_buffer("mean", torch.tensor(means, dtype=torch.float64))
        self.register_buffer("deviation", torch.tensor(deviations, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of rows."""
        parts = []
        if self._numbers:
            numbers = x[:, self._numbers]
            parts.append(torch.where(numbers.isnan(), 0.0, (numbers - self.mean) / self.deviation))
        for place, count in self._categories:
            parts.append((x[:, place, None] == torch.arange(count, dtype=x.dtype)).to(x.dtype))
        if self._missing:
            parts.append(x[:, self._missing].isnan().to(x.dtype))
        return torch.cat(parts, 1).float()


def example(predictor: Predictor, count: int, seed: int = 0) -> np.ndarray:
    """Return random raw inputs of `count` samples, in the type that a `Program` takes."""
    rng, inputs = np.random.default_rng(seed), predictor.task.inputs
    if isinstance(inputs, Standardised):
        if inputs.full != 1:
            return rng.integers(0, 256, (count, *inputs.shape)).astype(np.uint8)
        sides = (-1, *(1,) * (inputs.dimensions - 1))
        mean, deviation = (np.reshape(each, sides) for each in (inputs.mean, inputs.deviation))
        return (mean + deviation * rng.normal(size=(count, *inputs.shape))).astype(np.float32)
    if isinstance(inputs, TokenInputs):
        return rng.integers(0, inputs.shape[0], (count, inputs.shape[1]))
    columns = []
    assert isinstance(inputs, TableInputs)
    for column in inputs.schema.columns:
        if column.categories:  # the last place is that of a category that the schema does not have
            cells = rng.integers(0, len(column.categories) + 1, count).astype(np.float64)
        else:
            cells = column.mean + column.deviation * rng.normal(size=count)
        columns.append(np.where(rng.random(count) < 0.2, np.nan, cells) if column.missing else cells)
    return np.stack(columns, axis=1)


def expected(predictor: Predictor, x: np.ndarray) -> np.ndarray:
    """Return what `kindred predict` says of raw inputs."""
    objective = predictor.task.objective
    found = predictor.predictions(predictor.task.prepared(x))
    return found if objective.probabilities else objective.readable(found)


def _check_objective(objective: Objective, several: bool) -> None:
    kind = type(objective)
    own = [
        name
        for name, known in (
            ("prepare", (Objective.prepare,)),
            ("readable", (Objective.readable, Number.readable)),
            ("mix", (Objective.mix, Classes.mix, Labels.mix)),
        )
        if getattr(kind, name) not in known and (several or name != "mix")
    ]
    if own:
        raise ConfigError(
            f"the model's objective {objective.name!r} has a {own[0]} of its own, which cannot be exported"
        )
