"""Softmax regression."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # listing the models must not import PyTorch
    import torch


def linear(image_shape: tuple[int, int, int], num_classes: int) -> torch.nn.Module:
    """Softmax regression: one linear layer on the numbers of an image."""
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(image_shape), num_classes))
