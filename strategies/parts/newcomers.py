"""Prediction of a client that comes after the run: a mixture of several models, weighted for this client.

The prior of the weights is pi_k ~ exp(D_k - ENTROPY_WEIGHT H_k), where for model k

- H_k is the mean entropy of its predictions for the samples that are to be predicted, in nats, which is high where the
  model is uncertain;
- D_k is the entropy of the mean of these predictions, which is high where it predicts all classes.

A model that suits samples without labels is certain of each and predicts different classes: D_k - H_k is the mutual
information of samples and predictions. By it Bridle, Heading and MacKay (NIPS 1991) train classifiers without labels,
and Ahmed et al. (CVPR 2021, arXiv:2104.01845) weigh the models of several sources. Not every client has all classes in
equal numbers, so D_k has a quarter of H_k's weight.

Without labelled samples the prior decides. With n of them, the weights w are the likeliest,

    argmax_w  sum_i log sum_k w_k exp(-l_ik) + PRIOR_SAMPLES sum_k pi_k log w_k,

with model k's loss l_ik for sample i: stacking (Wolpert, 1992; of densities: Smyth and Wolpert, 1999), in which the
prior counts as PRIOR_SAMPLES samples. One of the models is then the newcomer's own (`newcomer_reply`); its losses are
those of cross-validation.
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

from .held_out import LARGEST_LOSS
from .mixture import mixture_of

if TYPE_CHECKING:
    import torch
    from scipy import special
else:
    special = lazy("scipy.special")

ENTROPY_WEIGHT = 4.0
PRIOR_SAMPLES = 10.0
STEPS = 100  # of expectation and maximisation
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
    """Return the weights w of k models, (k,), by expectation and maximisation.

    Parameters
    ----------
    losses : ndarray, shape (n, k)
        Each model's loss for each of n labelled samples, in nats, finite; n may be 0.
    scores : ndarray, shape (k,)
        `unlabelled_scores`.
    """
    w = prior = special.softmax(scores)  # (k,)
    with np.errstate(divide="ignore"):  # a weight may be 0
        for _ in range(STEPS):
            q = special.softmax(np.log(w) - losses, axis=1)  # (n, k)
            w = (PRIOR_SAMPLES * prior + q.sum(axis=0)) / (PRIOR_SAMPLES + len(q))
    return w


def newcomer_reply(visit: Visit, models: Sequence[Mapping[str, np.ndarray]], rounds: int) -> RecordDict:
    """Return a newcomer's reply: its own model, which it trains, and the metrics of the mixture of all.

    Its own model is trained from the last of the models, which is the mean of all, or from the one with the least loss
    on its samples, whichever cross-validation prefers.

    Parameters
    ----------
    visit : Visit
        Its training data are all labelled samples, n.
    models : sequence of k mappings
        From the server.
    rounds : int
        Each training is as long as this number of rounds.
    """
    losses = np.column_stack([_losses(visit, visit.model(arrays), visit.site.train) for arrays in models])  # (n, k)
    starts = [models[k] for k in dict.fromkeys((len(models) - 1, int(losses.sum(axis=0).argmin())))]
    start_losses = [cross_validation_losses(visit, start, rounds) for start in starts]  # each (n,)
    best = int(np.argmin([each.sum() for each in start_losses]))
    module, train_loss = _trained(visit, starts[best], rounds, visit.site.train)
    metrics = {TRAIN_LOSS: train_loss, **visit.evaluation(TRAINED, module), **visit.counts()}
    own = get_arrays(module)
    mixed = mixture_metrics(visit, [*models, own], np.column_stack([losses, start_losses[best]]))
    metrics |= {f"{MIXTURE}-{name}": value for name, value in mixed.items()}
    return RecordDict({ARRAYS: to_record(own), METRICS: MetricRecord({**metrics})})


def cross_validation_losses(visit: Visit, start: Mapping[str, np.ndarray], rounds: int) -> np.ndarray:
    """Return the loss of training from a start for each of n labelled samples, (n,).

    Each is predicted by a model that was trained on the other FOLDS - 1 parts of the samples. With fewer than three
    samples all are LARGEST_LOSS, because batch normalisation needs two for training.
    """
    n = len(visit.site.train[1])
    losses = np.full(n, LARGEST_LOSS)
    if n < 3:
        return losses
    places = np.random.default_rng(visit.seed("folds")).permutation(n)
    for held_out in np.array_split(places, min(FOLDS, n)):
        model, _ = _trained(visit, start, rounds, visit.samples_at(np.setdiff1d(places, held_out)))
        losses[held_out] = _losses(visit, model, visit.samples_at(held_out))
    return losses


def _losses(visit: Visit, model: torch.nn.Module, samples: Samples) -> np.ndarray:
    """Return a model's loss for each of n samples, (n,), LARGEST_LOSS at most."""
    x, targets = samples
    losses = visit.objective.losses(visit.predict(model, x), targets.cpu().numpy())
    return np.nan_to_num(losses, nan=LARGEST_LOSS).clip(max=LARGEST_LOSS)


def _trained(
    visit: Visit, start: Mapping[str, np.ndarray], rounds: int, samples: Samples
) -> tuple[torch.nn.Module, float]:
    model = visit.model(start)
    loss = visit.train(model, epochs=rounds * visit.epochs, steps=rounds * visit.steps, samples=samples)
    return model, loss


def mixture_metrics(visit: Visit, models: Sequence[Mapping[str, np.ndarray]], losses: np.ndarray) -> dict[str, float]:
    """Return the metrics, on test data, of the mixture of k models.

    Models have a score without labels only where they predict probabilities of classes.

    Parameters
    ----------
    visit : Visit
    models : sequence of k mappings
    losses : ndarray, shape (n, k)
        Of each model for each labelled sample. A model with LARGEST_LOSS for all of them does not count.
    """
    x, targets = visit.site.test
    predictions = np.stack([visit.predict(visit.model(arrays), x) for arrays in models])  # (k, m, K)
    counts = np.isfinite(predictions).all(axis=(1, 2))  # (k,)
    scores = np.zeros(len(models))  # (k,)
    if visit.objective.has_classes and len(targets):
        scores[counts] = unlabelled_scores(predictions[counts])
    if len(losses):
        counts &= (losses < LARGEST_LOSS).any(axis=0)
    w = mixing_weights(losses, np.where(counts, scores, LOWEST_SCORE))
    mixed = mixture_of(predictions, w, objective=visit.objective)  # (m, K)
    return visit.objective.evaluated(mixed, targets.cpu().numpy(), visit.further())
