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

With labelled samples one of the models is the newcomer's own (`newcomer_reply`); its loss is that of cross-validation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import MetricRecord, RecordDict

from kindred.client.site import Samples
from kindred.client.state import MIXTURE
from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.lazy import lazy
from kindred.messages import ARRAYS, METRICS, TRAIN_LOSS, TRAINED, to_record

from .held_out import judged, loss_of
from .mixture import mixture_of

if TYPE_CHECKING:
    import torch
    from scipy import special
else:
    special = lazy("scipy.special")

ENTROPY_WEIGHT = 4.0
LOSS_WEIGHT = 0.1
FOLDS = 5  # of cross-validation
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


def newcomer_reply(visit: Visit, models: Sequence[Mapping[str, np.ndarray]], rounds: int) -> RecordDict:
    """Return a newcomer's reply: its own model, which it trains, and the metrics of the mixture of all.

    Its own model is trained from the last of the models, which is the mean of all, or from the one with the least loss
    on its samples, whichever cross-validation prefers.

    Parameters
    ----------
    visit : Visit
        Its training data are all labelled samples.
    models : sequence of k mappings
        From the server.
    rounds : int
        Each training is as long as this number of rounds.
    """
    losses = judged(visit, models, visit.site.train)  # (k,)
    starts = [models[k] for k in dict.fromkeys((len(models) - 1, int(losses.argmin())))]
    start_losses = [cross_validation_loss(visit, start, rounds) for start in starts]
    best = int(np.argmin(start_losses))
    module, train_loss = _trained(visit, starts[best], rounds, visit.site.train)
    metrics = {TRAIN_LOSS: train_loss, **visit.evaluation(TRAINED, module), **visit.counts()}
    own = get_arrays(module)
    mixed = mixture_metrics(visit, [*models, own], [*losses, start_losses[best]])
    metrics |= {f"{MIXTURE}-{name}": value for name, value in mixed.items()}
    return RecordDict({ARRAYS: to_record(own), METRICS: MetricRecord({**metrics})})


def cross_validation_loss(visit: Visit, start: Mapping[str, np.ndarray], rounds: int) -> float:
    """Return the loss of training from a start, on all labelled samples together.

    Each is predicted by a model that was trained on the other FOLDS - 1 parts of the samples. With fewer than three
    samples the loss is infinite, because batch normalisation needs two for training.
    """
    n = len(visit.site.train[1])
    if n < 3:
        return np.inf
    predictions, true = [], []
    places = np.random.default_rng(visit.seed("folds")).permutation(n)
    for held_out in np.array_split(places, min(FOLDS, n)):
        others = np.setdiff1d(places, held_out)
        model, _ = _trained(visit, start, rounds, visit.samples_at(others))
        x, targets = visit.samples_at(held_out)
        predictions.append(visit.predict(model, x))
        true.append(targets.cpu().numpy())
    return loss_of(visit.objective, np.concatenate(predictions), np.concatenate(true))


def _trained(
    visit: Visit, start: Mapping[str, np.ndarray], rounds: int, samples: Samples
) -> tuple[torch.nn.Module, float]:
    model = visit.model(start)
    loss = visit.train(model, epochs=rounds * visit.epochs, steps=rounds * visit.steps, samples=samples)
    return model, loss


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
