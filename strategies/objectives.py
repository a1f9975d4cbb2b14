"""Objectives: what a network's outputs mean, the loss that trains it, and the metrics that judge it.

Methods use an objective for everything that depends on labels. So a method that needs no classes works for every one of
them. `OBJECTIVES` has them by name; a package can add its own (docs/extending.md).

| objective | outputs | loss of a sample | headline metric |
| --- | --- | --- | --- |
| `classes` | a logit for each class | cross-entropy | `accuracy` |
| `labels` | a logit for each label, several may be true | mean of the labels' binary cross-entropies | `accuracy` |
| `number` | a number, standardised | half the squared error | `rmse` |
| `next-token` | a logit for each token | cross-entropy | `accuracy`, with `bits` beside it |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .extensions import Registry
from .lazy import lazy
from .scores import OF_CLASSES, OF_LABELS, check_finite, computed

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    F, torch = lazy("torch.nn.functional"), lazy("torch")

SMALLEST = float(np.finfo(np.float32).tiny)
"""Replaces a probability of 0 before its logarithm is taken."""

MOST_OUTPUTS = 1_000_000
"""Largest number of outputs; a model file that declares more is refused before its network is built."""


@dataclass(frozen=True)
class Objective:
    """The meaning of a network's outputs. A subclass defines a kind of them.

    Predictions are what methods mix, send and distil: probabilities, or values on the scale of the outputs. Targets are
    what a client's data hold, on the same scale.

    Attributes
    ----------
    num_outputs : int
        Outputs of the network; 0 where it is not known and not needed, as in `Site`.
    names : tuple of str
        Names of the outputs, or of the classes; empty where they have only numbers.
    """

    num_outputs: int = 0
    names: tuple[str, ...] = ()

    name: ClassVar[str]
    metric: ClassVar[str]
    """Name of the headline metric, one of `reports`."""
    reports: ClassVar[tuple[str, ...]]
    """Names of the metrics that clients report: those of `metrics` and `further_metrics`, and "loss"."""
    has_classes: ClassVar[bool] = False
    """Whether a target is the number of a class."""
    probabilities: ClassVar[bool] = True
    """Whether predictions are probabilities."""

    def __post_init__(self) -> None:
        least = 2 if self.has_classes else 1
        if type(self.num_outputs) is not int or not (
            self.num_outputs == 0 or least <= self.num_outputs <= MOST_OUTPUTS
        ):
            raise ValueError(f"num_outputs is {self.num_outputs}, allowed: {least} to {MOST_OUTPUTS:,}")
        if self.names and len(self.names) != self.num_outputs:
            raise ValueError(f"there are {self.num_outputs} outputs and {len(self.names)} names for them")

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
        """Return the loss that training minimises.

        Parameters
        ----------
        outputs : tensor (n, num_outputs)
        targets : tensor (n, ...)
            Targets, or predictions of another model to be learnt.
        reduction : {"mean", "sum", "none"}
            Over the samples.
        label_smoothing : float
            0 to 1: the fraction of each label that is spread over all alternatives. No effect on numbers.

        Returns
        -------
        tensor, shape () or (n,)
        """
        raise NotImplementedError

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the predictions, shape (n, num_outputs), of outputs of that shape."""
        raise NotImplementedError

    def losses(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return each sample's loss, shape (n,), of predictions (n, num_outputs), which may be those of a mixture."""
        raise NotImplementedError

    def metrics(self, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return the metrics of predictions (n, num_outputs) for at least one sample, by name.

        `kindred.metrics.METRICS` describes them. Those that the samples do not define are omitted.
        """
        raise NotImplementedError

    def further_metrics(self, predictions: np.ndarray, targets: np.ndarray, names: Collection[str]) -> dict[str, float]:
        """Return more metrics, those of `names` that the objective has and the samples define.

        They take longer than `metrics`: clients report the headline metric of these in every evaluation, and all of
        them at the end.
        """
        return {}

    def check(self, targets: np.ndarray, num_outputs: int = 0) -> None:
        """Check targets; raise ValueError where one of them is impossible.

        `num_outputs` is that of a network; by default the objective's.
        """
        raise NotImplementedError

    def scaled(self, targets: np.ndarray) -> np.ndarray:
        """Return targets, as a dataset has them, in the form and on the scale of the loss: int64 or float32."""
        raise NotImplementedError

    @property
    def unweighted(self) -> Objective:
        """The objective without the weights of classes or labels, which are for training alone."""
        return self

    def prepare(self, x: np.ndarray) -> np.ndarray:
        """Return inputs, as a dataset has them, in the form that is standardised; by default they are unchanged."""
        return x

    def likelihoods(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return exp(-loss) of each sample, shape (n,): for classes the probability of the true one."""
        return np.exp(-self.losses(predictions, targets))

    def mix(self, predictions: np.ndarray, shares: np.ndarray, kind: str = "probabilities") -> np.ndarray:
        """Return a mixture's predictions, sum_j w_j h_j(x).

        Parameters
        ----------
        predictions : ndarray, shape (k, n, num_outputs)
            h_j(x) of each model.
        shares : ndarray, shape (k,)
            w_j, above 0 and summing to 1.
        kind : {"probabilities", "logits"}
            What is mixed. A mixture of logits is the normalised geometric mean of the probabilities; of numbers it is
            the same as the other mixture.

        Returns
        -------
        ndarray, shape (n, num_outputs)
        """
        return np.tensordot(shares, predictions, axes=1)

    def evaluated(self, predictions: np.ndarray, targets: np.ndarray, names: Collection[str] = ()) -> dict[str, float]:
        """Return `metrics`, those of `further_metrics` that `names` has, and the mean of `losses` as "loss".

        Without samples there are only the objective's own headline metric and the loss, which are NaN.
        """
        if not len(targets):
            return {self.metric: math.nan, "loss": math.nan}
        return {
            **self.metrics(predictions, targets),
            **self.further_metrics(predictions, targets, names),
            "loss": float(self.losses(predictions, targets).mean()),
        }

    def sample_scores(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return how good each prediction is, shape (n,), higher being better, to compare two models by samples."""
        return -self.losses(predictions, targets)

    def readable(self, predictions: np.ndarray) -> np.ndarray:
        """Return predictions in the units of the data."""
        return predictions

    def to_dict(self) -> dict[str, Any]:
        """Return the objective as entries of a JSON file, with its registered name."""
        return {"objective": self.name} | {each.name: getattr(self, each.name) for each in fields(self)}

    @staticmethod
    def from_dict(entries: Mapping[str, Any]) -> Objective:
        """Return the objective that `to_dict` describes; raise KeyError, TypeError or ValueError where it is none."""
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in entries.items()
        }
        return OBJECTIVES[given.pop("objective")](**given)


@dataclass(frozen=True)
class Weighted(Objective):
    """Classes or labels, whose losses may have weights in training.

    Attributes
    ----------
    weights : tuple of num_outputs floats
        Factors on the losses of each class's samples, or of true labels; empty: 1.
    """

    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weights(self.weights, self.num_outputs)

    @property
    def unweighted(self) -> Objective:
        """The objective without weights."""
        return replace(self, weights=()) if self.weights else self


@dataclass(frozen=True)
class Classes(Weighted):
    """One class of several."""

    name = "classes"
    metric = "accuracy"
    reports: ClassVar[tuple[str, ...]] = ("accuracy", *OF_CLASSES, "loss")
    has_classes = True

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy of logits. Targets are classes (n,), or probabilities (n, num_outputs)."""
        if not self.weights:
            return F.cross_entropy(outputs, targets, reduction=reduction, label_smoothing=label_smoothing)
        # torch's own mean is divided by the sum of the batch's weights: then a sample's weight depends on its batch.
        weight = weight_tensor(self.weights, outputs.dtype, outputs.device)
        each = F.cross_entropy(outputs, targets, weight, reduction="none", label_smoothing=label_smoothing)  # (n,)
        return reduced(each, reduction)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the probabilities of the classes."""
        return F.softmax(outputs, dim=1)

    def losses(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the cross-entropy of each sample."""
        return -np.log(np.maximum(self.likelihoods(predictions, targets), SMALLEST))

    def likelihoods(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the probabilities that are given to the true classes."""
        return predictions[np.arange(len(targets)), targets]

    def metrics(self, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return the accuracy."""
        return {"accuracy": float((predictions.argmax(axis=1) == targets).mean())}

    def scaled(self, targets: np.ndarray) -> np.ndarray:
        """Return classes as int64."""
        return targets.astype(np.int64, copy=False)

    def further_metrics(self, predictions: np.ndarray, targets: np.ndarray, names: Collection[str]) -> dict[str, float]:
        """Return metrics of `OF_CLASSES`."""
        return computed(OF_CLASSES, names, predictions, targets)

    def sample_scores(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return 1 where the class is predicted rightly, else 0."""
        return (predictions.argmax(axis=1) == targets).astype(np.float64)

    def check(self, targets: np.ndarray, num_outputs: int = 0) -> None:
        """Check that classes are from 0 to num_outputs - 1."""
        num_outputs = num_outputs or self.num_outputs
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < num_outputs:
            low, high = int(targets.min()), int(targets.max())
            raise ValueError(f"labels go from {low} to {high}, its network has {num_outputs} classes")

    def mix(self, predictions: np.ndarray, shares: np.ndarray, kind: str = "probabilities") -> np.ndarray:
        """Return the mixture's probabilities; rows sum to 1."""
        if kind == "probabilities":
            return super().mix(predictions, shares, kind)
        logs = np.tensordot(shares, np.log(np.maximum(predictions, SMALLEST)), axes=1)  # (n, N)
        powers = np.exp(logs - logs.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class NextToken(Classes):
    """The token that follows a sequence of tokens."""

    name = "next-token"
    reports: ClassVar[tuple[str, ...]] = ("accuracy", "bits", "loss")

    def further_metrics(self, predictions: np.ndarray, targets: np.ndarray, names: Collection[str]) -> dict[str, float]:
        """Return no more metrics."""
        return {}

    def metrics(self, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return the accuracy, and the mean cross-entropy in bits a token."""
        return {
            **super().metrics(predictions, targets),
            "bits": float(self.losses(predictions, targets).mean() / math.log(2)),
        }


@dataclass(frozen=True)
class Labels(Weighted):
    """Several labels, each of which is true or not."""

    name = "labels"
    metric = "accuracy"
    reports: ClassVar[tuple[str, ...]] = ("accuracy", *OF_LABELS, "loss")

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
        """Return the mean over the labels of the binary cross-entropies; targets (n, num_outputs) are 0 to 1."""
        weight = weight_tensor(self.weights, outputs.dtype, outputs.device) if self.weights else None
        targets = targets * (1 - label_smoothing) + label_smoothing / 2
        each = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none", pos_weight=weight).mean(dim=1)
        return reduced(each, reduction)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the probability of each label."""
        return outputs.sigmoid()

    def losses(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the mean over the labels of the binary cross-entropies of each sample."""
        given = np.where(targets > 0.5, predictions, 1 - predictions)
        return -np.log(np.maximum(given, SMALLEST)).mean(axis=1)

    def metrics(self, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return the share of labels that are predicted correctly, over all samples and labels."""
        return {"accuracy": float(((predictions > 0.5) == (targets > 0.5)).mean())}

    def scaled(self, targets: np.ndarray) -> np.ndarray:
        """Return labels as float32."""
        return targets.astype(np.float32)

    def further_metrics(self, predictions: np.ndarray, targets: np.ndarray, names: Collection[str]) -> dict[str, float]:
        """Return metrics of `OF_LABELS`."""
        return computed(OF_LABELS, names, predictions, targets)

    def sample_scores(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the share of each sample's labels that are predicted rightly."""
        return ((predictions > 0.5) == (targets > 0.5)).mean(axis=1)

    def check(self, targets: np.ndarray, num_outputs: int = 0) -> None:
        """Check that there is a value, 0 or 1, for each label."""
        num_outputs = num_outputs or self.num_outputs
        if targets.ndim != 2 or targets.shape[1] != num_outputs:
            raise ValueError(f"targets have the shape {targets.shape}, its network has {num_outputs} labels")
        if not np.isin(targets, (0, 1)).all():
            raise ValueError("targets of labels have a value other than 0 and 1")

    def mix(self, predictions: np.ndarray, shares: np.ndarray, kind: str = "probabilities") -> np.ndarray:
        """Return the mixture's probability of each label."""
        if kind == "probabilities":
            return super().mix(predictions, shares, kind)
        true, false = (
            np.exp(np.tensordot(shares, np.log(np.maximum(each, SMALLEST)), axes=1))
            for each in (predictions, 1 - predictions)
        )
        return true / (true + false)


@dataclass(frozen=True)
class Number(Objective):
    """A number. The network predicts it standardised; metrics are in its own unit.

    Attributes
    ----------
    mean, deviation : float
        Subtracted from targets, and divisor of the result.
    """

    mean: float = 0.0
    deviation: float = 1.0

    name = "number"
    metric = "rmse"
    reports: ClassVar[tuple[str, ...]] = ("rmse", "mae", "r2", "loss")
    probabilities = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_outputs > 1:
            raise ValueError(f"num_outputs is {self.num_outputs}, allowed for a number: 1")
        if not (math.isfinite(self.mean) and 0 < self.deviation < math.inf):
            raise ValueError(f"mean is {self.mean} and deviation {self.deviation}, allowed: finite, and more than 0")

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
        """Return half the squared error: -log of a normal density of unit variance, up to a constant.

        Targets are standardised, (n,) or (n, 1).
        """
        each = (outputs[:, 0] - targets.reshape(-1)).square() / 2  # (n,)
        return reduced(each, reduction)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the outputs: the standardised number."""
        return outputs

    def losses(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return half the squared error of each sample."""
        return np.square(predictions[:, 0] - targets) / 2

    def metrics(self, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return root mean squared and mean absolute error, in the target's unit, and R2 if the targets differ."""
        check_finite(predictions)
        given, true = self.readable(predictions)[:, 0], self.readable(targets)
        squared = np.square(true - given)
        found = {"rmse": float(np.sqrt(squared.mean())), "mae": float(np.abs(true - given).mean())}
        if len(np.unique(true)) > 1:
            found["r2"] = float(1 - squared.sum() / np.square(true - true.mean()).sum())
        return found

    def scaled(self, targets: np.ndarray) -> np.ndarray:
        """Return standardised numbers as float32."""
        return ((targets - self.mean) / self.deviation).astype(np.float32)

    def sample_scores(self, predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the negative absolute error of each sample, in the target's unit."""
        return -np.abs(self.readable(predictions)[:, 0] - self.readable(targets))

    def check(self, targets: np.ndarray, num_outputs: int = 0) -> None:
        """Check that there is one finite number for each sample, and one output."""
        if num_outputs > 1:
            raise ValueError(f"its network has {num_outputs} outputs, allowed for a number: 1")
        if targets.ndim != 1 or not np.isfinite(targets).all():
            raise ValueError(
                f"targets have the shape {targets.shape}, or are not finite; one number a sample is needed"
            )

    def readable(self, predictions: np.ndarray) -> np.ndarray:
        """Return standardised numbers in the target's unit."""
        return predictions.astype(np.float64) * self.deviation + self.mean


OBJECTIVES: Registry[type[Objective]] = Registry(
    "kindred.objectives",
    type,
    {each.name: each for each in (Classes, Labels, Number, NextToken)},
)
"""The objectives by name."""


@lru_cache(maxsize=16)  # a CUDA graph must not contain a copy from the host
def weight_tensor(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return weights as a tensor on a device."""
    return torch.tensor(weights, dtype=dtype, device=device)


def reduced(each: Tensor, reduction: str) -> Tensor:
    """Return the samples' losses (n,), or their mean or sum."""
    return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()


def check_weights(weights: tuple[float, ...], num_outputs: int) -> None:
    """Check weights of classes or labels; raise ValueError where they do not fit."""
    if weights and (len(weights) != num_outputs or not all(0 < weight < math.inf for weight in weights)):
        raise ValueError(
            f"weights are {', '.join(map(str, weights))}, allowed: {num_outputs} numbers, each more than 0"
        )
