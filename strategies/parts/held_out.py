"""Losses of models on samples that a client holds out, for Kindred, where few samples decide.

A mean of models is less certain than one model, and as often right, so each model is judged at its best temperature, as
in Guo et al., ICML 2017, arXiv:1706.04599. A sample that is held out makes its own class rarer in training, so the
predictions of a model that was trained on the other samples are corrected by `rarity`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kindred.client.site import Samples
from kindred.client.visit import Visit
from kindred.lazy import lazy

if TYPE_CHECKING:
    import torch
    from scipy import special
else:
    special = lazy("scipy.special")

CONCENTRATIONS = np.geomspace(0.02, 200, 41)  # of class proportions; small where most samples are of one class
TEMPERATURES = np.array([1 / 8, 1 / 4, 1 / 2, 1, 2])
LEAST_PROBABILITY = 1e-9  # smaller predicted probabilities are replaced by this
LARGEST_LOSS = 1e6  # of held-out samples together


def rarity(trained: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Return, for each class, its expected share of new samples over its share of the training samples, (K,).

    The expectation is the posterior mean from the training samples, under a Dirichlet prior whose one concentration is
    as likely as all samples make it: nearly 1 / K where classes are equally frequent, else their share in training.

    Parameters
    ----------
    trained, held_out : ndarray of int, shape (K,)
        A client's number of samples of each class, for training and held out.

    Returns
    -------
    ndarray, shape (K,)
        1 for a class without a training sample, whose probability no factor restores.
    """
    alpha, classes, counts = CONCENTRATIONS[:, None], len(trained), trained + held_out  # (a, 1), K, (K,)
    evidence = (special.gammaln(counts + alpha) - special.gammaln(alpha)).sum(axis=1) + (
        special.gammaln(classes * alpha) - special.gammaln(counts.sum() + classes * alpha)
    )[:, 0]  # (a,)
    n = trained.sum()
    expected = special.softmax(evidence) @ ((trained + alpha) / (n + classes * alpha))  # (K,)
    return np.where(trained > 0, expected * n / np.maximum(trained, 1), 1.0)


def calibrated_loss(probabilities: np.ndarray, labels: np.ndarray, factors: np.ndarray) -> float:
    """Return the summed cross-entropy of predictions, in nats, at the best of TEMPERATURES.

    Parameters
    ----------
    probabilities : ndarray, shape (n, K)
        Values below LEAST_PROBABILITY are replaced by it.
    labels : ndarray of int, shape (n,)
    factors : ndarray, shape (K,)
        Factors on the probabilities, which are then scaled to sum to 1.

    Returns
    -------
    float
        0 or more; 0 without samples.
    """
    logs = np.log(np.maximum(probabilities.astype(float), LEAST_PROBABILITY)) + np.log(factors)  # (n, K)
    scaled = logs / TEMPERATURES[:, None, None]  # (t, n, K)
    true = np.take_along_axis(scaled, labels[None, :, None], axis=2)[..., 0]  # (t, n)
    return max(float((special.logsumexp(scaled, axis=2) - true).sum(axis=1).min()), 0.0)


def judged(
    visit: Visit, models: Iterable[Mapping[str, np.ndarray]], held_out: Samples, trained: torch.Tensor
) -> np.ndarray:
    """Return the losses of k models on held-out samples, (k,).

    The first model was trained on samples with the labels `trained`: its predictions are corrected, see `rarity`.
    """
    true, objective = held_out[1].cpu().numpy(), visit.objective
    losses = []
    for k, arrays in enumerate(models):
        predictions = visit.predict(visit.model(arrays), held_out[0])
        if objective.has_classes:
            classes = predictions.shape[1]
            counts = (np.bincount(of, minlength=classes) for of in (trained.cpu().numpy(), true))
            loss = calibrated_loss(predictions, true, np.ones(classes) if k else rarity(*counts))
        else:
            loss = float(objective.losses(predictions, true).sum())
        losses.append(loss if np.isfinite(loss) and loss < LARGEST_LOSS else LARGEST_LOSS)
    return np.array(losses)
