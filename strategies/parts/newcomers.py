"""Prediction of a client that comes after the run: a mixture of several models, weighted for this client.

w_k ~ exp(D_k - ENTROPY_WEIGHT H_k - LOSS_WEIGHT L_k), where for model k

- L_k is its loss on the newcomer's labelled samples together, in nats, 0 without any;
- H_k is the mean entropy of its predictions for the samples that are to be predicted, in nats, which is high where the
  model is uncertain;
- D_k is the entropy of the mean of these predictions, which is high where it predicts all classes.

Weights by losses are FedeRiCo's, arXiv:2210.06597. A model that suits samples without labels is certain of each and
predicts different classes: D_k - H_k is the mutual information of samples and predictions. By it Bridle, Heading and
MacKay (NIPS 1991) train classifiers without labels, and Ahmed et al. (CVPR 2021, arXiv:2104.01845) weigh the models of
several sources. Not every client has all classes in equal numbers, so D_k has a quarter of H_k's weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kindred.client.visit import Visit
from kindred.lazy import lazy

from .mixture import mixture_of

if TYPE_CHECKING:
    from scipy import special
else:
    special = lazy("scipy.special")

ENTROPY_WEIGHT = 4.0
LOSS_WEIGHT = 0.1
LOWEST_SCORE = -1e9  # of a model whose predictions are not finite


def unlabelled_scores(predictions: np.ndarray) -> np.ndarray:
    """Return D_k - ENTROPY_WEIGHT H_k, (k,): high for a model that is certain and predicts different classes.

    Parameters
    ----------
    predictions : ndarray, shape (k, n, K)
        Probabilities, finite, for n samples, 1 or more.
    """
    entropies = special.entr(predictions).sum(axis=2).mean(axis=1)  # H, (k,)
    of_means = special.entr(predictions.mean(axis=1)).sum(axis=1)  # D, (k,)
    return of_means - ENTROPY_WEIGHT * entropies


def mixing_weights(losses: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return w_k, (k,), from the models' losses L_k and their `unlabelled_scores`, each (k,)."""
    return special.softmax(scores - LOSS_WEIGHT * losses)


def mixture_metrics(
    visit: Visit, models: Sequence[Mapping[str, np.ndarray]], losses: Sequence[float]
) -> dict[str, float]:
    """Return the metrics, on test data, of the mixture of k models, whose losses on labelled samples are given.

    Models have a score without labels only where they predict probabilities of classes.
    """
    x, targets = visit.site.test
    predictions = np.stack([visit.predict(visit.model(arrays), x) for arrays in models])  # (k, n, K)
    finite = np.isfinite(predictions).all(axis=(1, 2))  # (k,)
    scores = np.where(finite, 0.0, LOWEST_SCORE)  # (k,)
    if visit.objective.has_classes and len(targets):
        scores[finite] = unlabelled_scores(predictions[finite])
    mixed = mixture_of(predictions, mixing_weights(np.array(losses), scores), objective=visit.objective)  # (n, K)
    return visit.objective.evaluated(mixed, targets.cpu().numpy(), visit.further())
