"""Evaluation of a model on samples: predictions, loss and metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np

from kindred.lazy import lazy
from kindred.objectives import Objective

from .training import CLASSES, channels_last

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    torch = lazy("torch")


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore its own mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def predict(model: nn.Module, x: Tensor, objective: Objective = CLASSES, batch_size: int = 128) -> np.ndarray:
    """Return a model's predictions; the model's mode (training or evaluation) is kept.

    Parameters
    ----------
    model : torch.nn.Module
        Maps inputs to outputs (n, k).
    x : tensor (n, ...)
        Inputs, on the model's device.
    objective : Objective
    batch_size : int
        Inputs per forward pass.

    Returns
    -------
    ndarray (n, k), float32
        With classes, rows are probabilities that sum to 1.
    """
    x = channels_last(model, x)
    with evaluation_mode(model), torch.inference_mode():
        rows = [objective.predictions(model(inputs).float()) for inputs in x.split(batch_size)]
    return torch.cat(rows).cpu().numpy()


def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    objective: Objective = CLASSES,
    batch_size: int = 128,
    names: Collection[str] = (),
) -> dict[str, float]:
    """Return a model's metrics and loss; the model's mode (training or evaluation) is kept.

    Parameters
    ----------
    model : torch.nn.Module
        Maps inputs to outputs (n, k).
    x : tensor (n, ...)
        Inputs, on the model's device.
    y : tensor (n, ...)
        Targets, on the model's device.
    objective : Objective
    batch_size : int
        Inputs per forward pass; it bounds the memory and does not change the result beyond rounding.
    names : collection of str
        Further metrics to compute.

    Returns
    -------
    dict of str to float
        The objective's metrics, and "loss", the mean loss without weights of classes; NaN if there are no samples.
    """
    return predict_and_evaluate(model, x, y, objective, batch_size, names)[1]


def predict_and_evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    objective: Objective = CLASSES,
    batch_size: int = 128,
    names: Collection[str] = (),
) -> tuple[np.ndarray, dict[str, float]]:
    """Return what `predict` and `evaluate` return, with one forward pass."""
    if len(y) == 0:
        return predict(model, x, objective, batch_size), objective.evaluated(np.empty(0), np.empty(0))
    objective = objective.unweighted
    x = channels_last(model, x)
    predictions, losses = [], []
    with evaluation_mode(model), torch.inference_mode():
        for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
            outputs = model(inputs)
            predictions.append(objective.predictions(outputs.float()))
            losses.append(objective.loss(outputs, targets, "sum"))
        loss = float(torch.stack(losses).double().sum()) / len(y)
    found, true = torch.cat(predictions).cpu().numpy(), y.cpu().numpy()
    return found, {**objective.metrics(found, true), **objective.further_metrics(found, true, names), "loss": loss}
