"""Nesterov's momentum of the mean of all models, which moves Kindred's starts ahead of that mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kindred.engine.model_store import Layout

MOMENTUM = 0.5


class Momentum:
    """Mean g of all models, its last change, and the step ahead G - g = MOMENTUM (g - g').

    Parameters
    ----------
    layout : Layout
        Layout of the models. Only their p parameters have momentum.

    Attributes
    ----------
    moved : ndarray, shape (p,), or None
        g - g', times the share in g of the clients that trained in both rounds; None while there is no momentum.
    """

    def __init__(self, layout: Layout) -> None:
        self.moved: np.ndarray | None = None
        self._mean: np.ndarray | None = None  # (p,)
        self._size = layout.num_parameters
        # For example float16: a mean of models never exceeds its largest number, but a model with momentum may.
        self._narrow = [
            (layout.slices[name], np.finfo(layout.dtypes[name]).max)
            for name in layout.parameters
            if layout.dtypes[name] != layout.dtype
        ]

    def update(self, mean: np.ndarray, share: float) -> None:
        """Set the new g, shape (d,), and the share in it of the clients that also trained in the round before.

        The share reduces momentum where clients are sampled: g then changes merely because it is over other clients.
        """
        before, self._mean = self._mean, mean[: self._size].copy()  # (p,)
        if before is not None:
            self.moved = share * (self._mean - before)

    def stop(self) -> None:
        """Remove the momentum from now on."""
        self.moved = None

    def advance(self, model: np.ndarray, share: float) -> None:
        """Add the step ahead, times the share of g, to a combination of models, shape (d,), in place."""
        if self.moved is not None:
            model[: self._size] += share * (MOMENTUM * self.moved)
            for place, largest in self._narrow:
                np.clip(model[place], -largest, largest, out=model[place])

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"mean": self._mean, "moved": self.moved}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._mean, self.moved = state["mean"], state["moved"]
