"""Evaluation of a model on samples: class probabilities, accuracy and loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kindred.lazy import lazy

from .training import channels_last

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
else:
    torch, F = lazy("torch"), lazy("torch.nn.functional")


def predict(model: nn.Module, x: Tensor, batch_size: int = 128) -> np.ndarray:
    """Return the class probabilities that a model gives; the model's mode (training or evaluation) is kept.

    Parameters
    ----------
    model : torch.nn.Module
        Maps images to logits (n, classes).
    x : tensor (n, ...)
        Images, on the model's device.
    batch_size : int
        Images per forward pass.

    Returns
    -------
    ndarray (n, classes), float32
        Rows sum to 1.
    """
    x = channels_last(model, x)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        rows = [F.softmax(model(images).float(), dim=1) for images in x.split(batch_size)]
    model.train(was_training)
    return torch.cat(rows).cpu().numpy()


def evaluate(model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 128) -> tuple[float, float]:
    """Return a model's accuracy and loss; the model's mode (training or evaluation) is kept.

    Parameters
    ----------
    model : torch.nn.Module
        Maps images to logits (n, classes).
    x : tensor (n, ...)
        Images, on the model's device.
    y : tensor (n,) of int64
        Labels, on the model's device.
    batch_size : int
        Images per forward pass; it bounds the memory and does not change the result beyond rounding.

    Returns
    -------
    accuracy : float
        0 to 1.
    loss : float
        Mean cross-entropy. Both are NaN if there are no samples.
    """
    if len(y) == 0:
        return math.nan, math.nan
    x = channels_last(model, x)
    correct, losses = [], []
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for images, labels in zip(x.split(batch_size), y.split(batch_size), strict=True):
            logits = model(images)
            correct.append((logits.argmax(1) == labels).sum())
            losses.append(F.cross_entropy(logits, labels, reduction="sum"))
        totals = torch.stack([torch.stack(correct).sum().double(), torch.stack(losses).double().sum()])
        hits, loss = totals.tolist()
    model.train(was_training)
    return hits / len(y), loss / len(y)
