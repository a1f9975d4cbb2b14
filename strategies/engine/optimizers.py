"""Optimisers of the server, which update clients' models by gradients that clients sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kindred.messages import ClientId, in_order


class SGDStep:
    """SGD for one model: phi = phi - eta g."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def __call__(self, parameters: np.ndarray, gradient: np.ndarray) -> None:
        """Update parameters, shape (d,), in place."""
        parameters -= self.learning_rate * gradient


class AdamStep:
    """Adam for one model (Kingma and Ba, arXiv:1412.6980), with the paper's defaults."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.steps = 0
        self.first: np.ndarray | float = 0.0  # (d,)
        self.second: np.ndarray | float = 0.0  # (d,)

    def __call__(self, parameters: np.ndarray, gradient: np.ndarray) -> None:
        """Update parameters, shape (d,), in place."""
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * np.square(gradient)
        size = np.sqrt(self.second / (1 - 0.999**self.steps)) + 1e-8
        parameters -= self.learning_rate / (1 - 0.9**self.steps) * self.first / size


STEPS: dict[str, type[AdamStep] | type[SGDStep]] = {"adam": AdamStep, "sgd": SGDStep}


class OptimizerSteps:
    """The optimiser of each client's model, with its state.

    Parameters
    ----------
    optimizer : {"adam", "sgd"}
    learning_rate : float
        Above 0.
    """

    def __init__(self, optimizer: str, learning_rate: float) -> None:
        self._new = STEPS[optimizer]
        self._learning_rate = learning_rate
        self._steps: dict[ClientId, AdamStep | SGDStep] = {}

    def move(self, owner: ClientId, parameters: np.ndarray, gradient: np.ndarray) -> None:
        """Update the parameters of a client's model, shape (d,), in place."""
        if owner not in self._steps:
            self._steps[owner] = self._new(self._learning_rate)
        self._steps[owner](parameters, gradient)

    def state(self) -> dict[ClientId, dict[str, Any]]:
        """Return what `restore` needs: the attributes of each client's optimiser."""
        return {owner: vars(step) for owner, step in self._steps.items()}

    def restore(self, state: Mapping[ClientId, Mapping[str, Any]]) -> None:
        """Resume from what `state` returned."""
        for owner in in_order(state):
            self._steps[owner] = self._new(self._learning_rate)
            vars(self._steps[owner]).update(state[owner])
