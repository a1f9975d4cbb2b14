"""A recurrent layer as a step of `torch.nn.Sequential`; in its own file, because its definition needs PyTorch."""

from __future__ import annotations

import torch
from torch import nn


class LastOutput(nn.LSTM):
    """An LSTM of which only the output after the last step is used: (n, t, features) to (n, units)."""

    def __init__(self, features: int, units: int) -> None:
        super().__init__(features, units, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the outputs (n, units) after the last step of sequences (n, t, features)."""
        outputs, _ = super().forward(x)  # (n, t, units)
        return outputs[:, -1]
