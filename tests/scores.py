"""Accuracy and loss of classifiers, as pairs."""

from __future__ import annotations

import numpy as np
import torch

from kindred.client import evaluation
from kindred.objectives import Classes


def evaluate(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, batch_size: int = 128) -> tuple[float, float]:
    """Return a model's accuracy and loss on samples."""
    found = evaluation.evaluate(model, x, y, batch_size=batch_size)
    return found["accuracy"], found["loss"]


def accuracy_and_loss(probabilities: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return accuracy and loss of probabilities (n, N) for labels (n,)."""
    found = Classes().evaluated(probabilities, labels)
    return found["accuracy"], found["loss"]
