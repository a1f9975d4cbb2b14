"""Logit adjustment by the proportions of a client's own classes.

Menon et al., Long-tail learning via logit adjustment, ICLR 2021, arXiv:2007.07314; with clients' own proportions Chen
and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022, arXiv:2107.00778.

The adjustment is added to the bias of the network's output, so that a client's model contains it. The client subtracts
it from the model that it sends.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from kindred.engine.admission import Refused, check_numbers
from kindred.engine.model_store import Layout
from kindred.lazy import lazy

if TYPE_CHECKING:
    import torch
    from scipy import special

    from kindred.client.visit import Visit
else:
    special, torch = lazy("scipy.special"), lazy("torch")

CONCENTRATIONS = np.geomspace(0.02, 200, 41)
"""Concentrations of the Dirichlet prior of class proportions; small where most samples are of one class."""

OUTPUT_BIAS = "output-bias"  # in a client's reply: the name of the bias
REPORTED_LOGITS = "logit-adjustment"  # in a client's reply: the logits that the client adds to that bias
LARGEST_ADJUSTMENT = 100.0


def log_proportions(counts: np.ndarray) -> np.ndarray:
    """Return the logarithms of class proportions, o_i = log(K pi_i), pi_i the posterior mean of the proportions.

    Their prior is Dirichlet with one concentration alpha for all K classes, uniform over CONCENTRATIONS:
    pi_i = sum_alpha p(alpha | counts) (counts + alpha) / (n_i + K alpha).

    Parameters
    ----------
    counts : ndarray of int, shape (K,)
        A client's number of samples of each class.

    Returns
    -------
    ndarray, shape (K,)
        0 for a client without samples.
    """
    alpha, classes, n = CONCENTRATIONS[:, None], len(counts), counts.sum()
    evidence = (special.gammaln(counts + alpha) - special.gammaln(alpha)).sum(axis=1) + (
        special.gammaln(classes * alpha) - special.gammaln(n + classes * alpha)
    )[:, 0]  # (alphas,)
    return np.log(classes * special.softmax(evidence) @ ((counts + alpha) / (n + classes * alpha)))


@dataclass(frozen=True)
class Adjustment:
    """An addition to a model's logits.

    Attributes
    ----------
    name : str or None
        The bias that it is added to; None for a network without such a bias, to which nothing is added.
    logits : ndarray, shape (K,)
    """

    name: str | None = None
    logits: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, visit: Visit, share: float) -> Adjustment:
        """Return the adjustment `share` times o_i, with o_i from the labels of the client's training data.

        Without classes there is none.
        """
        name = _output_bias(visit) if visit.objective.has_classes else None
        if name is None:
            return cls()
        labels = visit.site.train[1].cpu().numpy()
        return cls(name, share * log_proportions(np.bincount(labels, minlength=len(visit.arrays[name]))))

    def added(self, arrays: Mapping[str, np.ndarray], sign: int = 1) -> dict[str, np.ndarray]:
        """Return the model with the adjustment."""
        if self.name is None:
            return dict(arrays)
        return {**arrays, self.name: (arrays[self.name] + sign * self.logits).astype(arrays[self.name].dtype)}

    def removed(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the model without the adjustment that it has."""
        return self.added(arrays, -1)

    def report(self) -> dict[str, Any]:
        """Return the entries of a reply's settings that report the adjustment; `read` is the inverse."""
        return {} if self.name is None else {OUTPUT_BIAS: self.name, REPORTED_LOGITS: self.logits.tolist()}

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Adjustment:
        """Return the adjustment that a reply's settings report, after `check_report`."""
        return cls(config[OUTPUT_BIAS], np.array(config[REPORTED_LOGITS])) if OUTPUT_BIAS in config else cls()


def output_bias(model: torch.nn.Module, images: torch.Tensor) -> str | None:
    """Return the name of the parameter that is added to the logits.

    It is the one to which the gradient of r . logits is r.

    Parameters
    ----------
    model : torch.nn.Module
        Maps images to logits (n, K); it keeps its mode.
    images : tensor (n, ...)
        Only their shape is used. The gradient is taken at noise: at an image of ones a factor looks like an addend.

    Returns
    -------
    str or None
        None if there is no such parameter.
    """
    was_training = model.training
    model.eval()
    noise = torch.randn(images[:1].shape, generator=torch.Generator().manual_seed(0))
    tokens = not images.is_floating_point()  # noise cannot replace them
    logits = model(images[:1] if tokens else noise.to(images))[0]  # (K,)
    model.train(was_training)
    r = torch.arange(1, len(logits) + 1).to(logits)  # (K,)
    candidates = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.shape == logits.shape
    }
    if not candidates:
        return None
    gradients = torch.autograd.grad(r @ logits, list(candidates.values()), allow_unused=True)
    return next(
        (
            name
            for name, gradient in zip(candidates, gradients, strict=True)
            if gradient is not None and torch.equal(gradient, r)
        ),
        None,
    )


_output_biases: WeakKeyDictionary[torch.nn.Module, str | None] = WeakKeyDictionary()


def _output_bias(visit: Visit) -> str | None:
    if visit.module not in _output_biases:
        _output_biases[visit.module] = output_bias(visit.model(), visit.site.train[0])
    return _output_biases[visit.module]


def check_report(config: Mapping[str, Any], layout: Layout) -> None:
    """Raise `Refused` where a reply's settings report an adjustment that a model of this layout cannot have."""
    name, logits = config.get(OUTPUT_BIAS), config.get(REPORTED_LOGITS)
    if name is None and logits is None:
        return
    if not isinstance(name, str) or name not in layout.parameters or len(layout.shapes[name]) != 1:
        raise Refused(f"its {OUTPUT_BIAS} is {reprlib.repr(name)}, expected the name of a vector of the model")
    check_numbers(REPORTED_LOGITS, logits, layout.shapes[name][0], -LARGEST_ADJUSTMENT, LARGEST_ADJUSTMENT)
