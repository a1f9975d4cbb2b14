"""The update of the weights in a training step, by torch's fused kernels.

The kernels are called directly. Importing `torch.optim` costs a new process about a second, and a deployed client
starts a new process for each message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kindred.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

Descent = Callable[[list["Tensor"]], None]


class Update:
    """Update of the weights from their gradients: the proximal term, the correction and the optimiser.

    Parameters
    ----------
    weights : list of tensors
        As returned by `trained_weights`.
    optimizer, learning_rate, momentum, weight_decay, proximal_mu
        As for `train`.
    corrected : bool
        Whether there is a correction.

    Attributes
    ----------
    memory : list of tensors
        The state from one step to the next. These tensors, and all that the update reads, keep their memory addresses.
    """

    def __init__(
        self,
        weights: list[Tensor],
        optimizer: str,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
        proximal_mu: float,
        corrected: bool,
    ) -> None:
        self._weights = weights
        self._mu = proximal_mu
        self._towards = [torch.empty_like(weight) for weight in weights] if proximal_mu else []
        self._correction = [torch.empty_like(weight) for weight in weights] if corrected else []
        if optimizer == "adam":
            self._descend, self.memory = _adam(weights, learning_rate, weight_decay)
        else:
            self._descend, self.memory = _sgd(weights, learning_rate, momentum, weight_decay)

    def start(
        self,
        towards: Sequence[Tensor] | None,
        correction: Sequence[Tensor] | None,
        memory: Sequence[Tensor] | None = None,
    ) -> None:
        """Set the state to `memory`, by default to zero.

        The proximal term pulls towards `towards`, by default the current weights.
        """
        if memory:
            torch._foreach_copy_(self.memory, list(memory))
        else:
            for tensor in self.memory:
                tensor.zero_()
        if self._towards:
            torch._foreach_copy_(self._towards, self._weights if towards is None else list(towards))
        if self._correction and correction is not None:
            torch._foreach_copy_(self._correction, list(correction))

    def __call__(self, gradients: list[Tensor]) -> None:
        """Take a step; it may overwrite the gradients."""
        if self._towards:
            torch._foreach_add_(gradients, torch._foreach_sub(self._weights, self._towards), alpha=self._mu)
        if self._correction:
            torch._foreach_add_(gradients, self._correction)
        self._descend(gradients)


def _adam(weights: list[Tensor], learning_rate: float, weight_decay: float) -> tuple[Descent, list[Tensor]]:
    """Return a step of Adam (Kingma and Ba, arXiv:1412.6980) with the paper's defaults, and its state.

    The weights times `weight_decay` are added to the gradient, as in torch.optim.Adam.
    """
    first = [torch.empty_like(weight) for weight in weights]
    second = [torch.empty_like(weight) for weight in weights]
    step = torch.empty((), dtype=torch.float32, device=weights[0].device)
    steps = [step] * len(weights)

    def descend(gradients: list[Tensor]) -> None:
        step.add_(1)
        torch._fused_adam_(
            weights,
            gradients,
            first,
            second,
            [],
            steps,
            lr=learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return descend, [*first, *second, step]


def _sgd(
    weights: list[Tensor], learning_rate: float, momentum: float, weight_decay: float
) -> tuple[Descent, list[Tensor]]:
    """Return a step of SGD and its state, as in torch: v = momentum v + g + weight_decay w, w = w - learning_rate v."""
    velocity = [torch.empty_like(weight) for weight in weights] if momentum else []

    def descend(gradients: list[Tensor]) -> None:
        torch._fused_sgd_(
            weights,
            gradients,
            velocity,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    return descend, velocity
