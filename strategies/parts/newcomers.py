"""Prediction of a client that comes after the run: a mixture of several models, with weights of its own.

w_k ~ exp(D_k - SURE H_k - TRUST L_k), where for model k

- L_k is its loss on the newcomer's labelled samples together, in nats, 0 without any;
- H_k is the mean entropy of its predictions for the samples that are to be predicted, in nats, which is high where the
  model is uncertain;
- D_k is the entropy of the mean of these predictions, which is high where it predicts all classes.

Weights by losses are FedeRiCo's, arXiv:2210.06597. A model that suits samples without labels is certain of each and
predicts different classes: D_k - H_k is the mutual information of samples and predictions. By it Bridle, Heading and
MacKay (NIPS 1991) train classifiers without labels, and Ahmed et al. (CVPR 2021, arXiv:2104.01845) weigh the models of
several sources. Not every client has all classes in equal numbers, so D_k counts for half here.
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

SURE = 2.0  # weight of the uncertainty of single predictions
TRUST = 0.1  # of a nat of loss on labelled samples
LOWEST = -1e9  # clarity of a model whose predictions are not finite


def clarity(predictions: np.ndarray) -> np.ndarray:
    """Return D_k - SURE H_k, how certain and how different a model's predictions are, (k,).

    Parameters
    ----------
    predictions : ndarray, shape (k, n, K)
        Probabilities.
    """
    uncertainty = special.entr(predictions).sum(axis=2).mean(axis=1)  # (k,)
    diversity = special.entr(predictions.mean(axis=1)).sum(axis=1)  # (k,)
    return np.nan_to_num(diversity - SURE * uncertainty, nan=LOWEST, neginf=LOWEST)


def mixing_weights(losses: np.ndarray, clear: np.ndarray) -> np.ndarray:
    """Return w_k, (k,), from the models' losses L_k and their `clarity`, each (k,)."""
    return special.softmax(clear - TRUST * losses)


def together(visit: Visit, models: Sequence[Mapping[str, np.ndarray]], losses: Sequence[float]) -> dict[str, float]:
    """Return the metrics, on test data, of the mixture of k models, whose losses on labelled samples are given.

    Only where predictions are probabilities of classes do they have a `clarity`.
    """
    x, targets = visit.site.test
    predictions = np.stack([visit.predict(visit.model(arrays), x) for arrays in models])  # (k, n, K)
    clear = clarity(predictions) if visit.objective.has_classes else np.zeros(len(models))  # (k,)
    mixed = mixture_of(predictions, mixing_weights(np.array(losses), clear), objective=visit.objective)  # (n, K)
    return visit.objective.evaluated(mixed, targets.cpu().numpy(), visit.further())
