"""Share t of its last training that a Kindred client keeps, estimated from the losses of held-out samples.

A client's personal model lies between the start u_i (place 0) and its last model w_i (place 1). In some rounds a client
holds samples out. When it next receives a start, it reports their losses at PLACES. The server filters these reports
to estimate the best place.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.engine.admission import Refused, check_numbers, is_count
from kindred.lazy import lazy
from kindred.messages import PROBE, SERVER_ROUND, ClientId, in_order, seed_for

if TYPE_CHECKING:
    from scipy import special

    from kindred.client.site import Samples
    from kindred.client.visit import Visit
    from kindred.objectives import Objective
else:
    special = lazy("scipy.special")

PLACES = np.linspace(0, 1, 5)  # from u_i to w_i, where u_i is newer than w_i
JUDGED_SMOOTHING = 0.3  # share of a label that is spread over all classes when places are evaluated
JUMP = 0.01  # probability, from one report to the next, that the best place is drawn anew
LEAST_PROBABILITY = 1e-8  # smaller predicted probabilities of held-out samples are replaced by this
LARGEST_FOLD_LOSS = 20.0  # per sample; above -log(LEAST_PROBABILITY) = 18.4, which bounds the divergence

FOLDS = 10  # parts into which a client divides its samples, to hold them out in turn
PREDICTED_SHARE = 0.2
"""Upper limit of predictions to evaluate probes, or to evaluate places, per sample that a client trains on.

Each is at most a fifteenth of the work of training: a prediction takes a third of a training step.
"""

HOLDS_OUT = "leaves-out"  # setting: whether the client holds samples out in this round
FOLD_LOSSES = "fold-losses"  # in the reply: the summed losses of the held-out samples at PLACES
FOLD_SAMPLES = "fold-samples"  # in the reply: the number of held-out samples

# --- The mathematics ----------------------------------------------------------------------------------


def smoothed_divergence(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return sum KL(q, p) of predictions p from labels q, which are smoothed by JUDGED_SMOOTHING.

    Parameters
    ----------
    probabilities : ndarray, shape (n, K)
        p; values below LEAST_PROBABILITY are replaced by it.
    labels : ndarray of int, shape (n,)

    Returns
    -------
    float
        In nats, 0 or more.
    """
    n, classes = probabilities.shape
    smoothed = np.full((n, classes), JUDGED_SMOOTHING / classes)  # q, (n, K)
    smoothed[np.arange(n), labels] += 1 - JUDGED_SMOOTHING
    predicted = np.maximum(probabilities.astype(float), LEAST_PROBABILITY)  # p, (n, K)
    return max(float(special.rel_entr(smoothed, predicted).sum()), 0.0)


def place_probabilities(before: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return the probability that each of PLACES is the best: p_k ~ ((1 - JUMP) before_k + JUMP / 5) exp(-losses_k).

    This is the filter of a hidden Markov model, in which the best place jumps to any place with probability JUMP.

    Parameters
    ----------
    before : ndarray, shape (5,)
        The previous probabilities; uniform at first.
    losses : ndarray, shape (5,)
        `smoothed_divergence` of the held-out samples at each of PLACES between u_i (0) and w_i (1), summed over
        clients.

    Returns
    -------
    ndarray, shape (5,)
        Sums to 1. t = sum_k PLACES_k p_k is the mean.
    """
    return special.softmax(np.log((1 - JUMP) * before + JUMP / len(PLACES)) - losses)


def between(start: Mapping[str, np.ndarray], last: Mapping[str, np.ndarray], kept: float) -> dict[str, np.ndarray]:
    """Return (1 - t) u_i + t w_i, with the integer buffers of w_i."""
    return {
        name: ((1 - kept) * array + kept * last[name]).astype(array.dtype)
        if np.issubdtype(array.dtype, np.floating)
        else last[name]
        for name, array in start.items()
    }


# --- The client ---------------------------------------------------------------------------------------


def fold_losses(visit: Visit, last: Mapping[str, np.ndarray], held_out: np.ndarray) -> dict[str, Any]:
    """Return the losses at PLACES of samples that the client's last model was not trained on.

    Parameters
    ----------
    visit : Visit
    last : mapping
        w_i.
    held_out : ndarray of int, shape (n,)
        Indices of the samples.

    Returns
    -------
    dict
        Entries of the reply's settings; empty if there are no samples.
    """
    held_out = held_out[held_out < len(visit.site.train[1])]  # a site may have restarted with fewer samples
    if not len(held_out):
        return {}
    x, targets = visit.samples_at(held_out)
    true = targets.cpu().numpy()
    predicted = [visit.predict(visit.model(between(visit.arrays, last, place)), x) for place in PLACES]
    return {
        FOLD_LOSSES: [held_out_loss(visit.objective, predictions, true) for predictions in predicted],
        FOLD_SAMPLES: len(targets),
    }


def held_out_loss(objective: Objective, predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the summed loss of held-out samples: `smoothed_divergence` of classes, else the objective's, bounded."""
    if objective.has_classes:
        return smoothed_divergence(predictions, targets)
    return float(np.minimum(objective.losses(predictions, targets), LARGEST_FOLD_LOSS).sum(dtype=np.float64))


def held_out_samples(visit: Visit) -> np.ndarray:
    """Return the indices of the training samples held out in this round: none, or so few that two or more remain."""
    if not visit.config[HOLDS_OUT]:
        return np.zeros(0, int)
    order = shuffled_samples(visit, "fold")
    fold = np.array_split(order, FOLDS)[(visit.config[SERVER_ROUND] // 2 - 1) % FOLDS]
    fold = fold[: max(affordable_samples(visit) // len(PLACES), 1)]
    return np.sort(fold) if len(order) - len(fold) >= 2 else fold[:0]  # batch normalisation needs two


def affordable_samples(visit: Visit) -> int:
    """Return the number of samples that a client can predict for in a fifteenth of the work of its training."""
    return int(PREDICTED_SHARE * (visit.epochs * len(visit.site.train[1]) + visit.steps * visit.batch_size))


def probe_samples(visit: Visit) -> Samples:
    """Return the training data, or `affordable_samples` of them; the same in all rounds."""
    count = max(affordable_samples(visit), 1)
    if count >= len(visit.site.train[1]):
        return visit.site.train
    return visit.samples_at(np.sort(shuffled_samples(visit, PROBE)[:count]))


def shuffled_samples(visit: Visit, purpose: str) -> np.ndarray:
    """Return the indices of the training samples, in a random order that is the same in all rounds."""
    seed = seed_for(visit.config.get("seed", 0), visit.client, purpose)
    return np.random.default_rng(seed).permutation(len(visit.site.train[1]))


# --- The server ---------------------------------------------------------------------------------------


def check_fold_losses(config: Mapping[str, Any]) -> None:
    """Raise `Refused` where a reply's settings report impossible losses of held-out samples."""
    if (losses := config.get(FOLD_LOSSES)) is not None:
        samples = config.get(FOLD_SAMPLES)
        if not is_count(samples):
            raise Refused(f"its {FOLD_SAMPLES} is {reprlib.repr(samples)}, expected a number from 1")
        check_numbers(FOLD_LOSSES, losses, len(PLACES), 0, LARGEST_FOLD_LOSS * samples)


class PlaceFilter:
    """Filter that estimates the best place from the losses that clients report.

    Attributes
    ----------
    probabilities : ndarray, shape (5,), or None
        Probability of each of PLACES to be the best one; None before the first report.
    """

    def __init__(self) -> None:
        self.probabilities: np.ndarray | None = None
        self._losses: dict[ClientId, np.ndarray] = {}  # reported since the last update, (5,)

    @property
    def mean(self) -> float:
        """Mean place, t; one half before the first report."""
        return 0.5 if self.probabilities is None else float(self.probabilities @ PLACES)

    def add(self, client: ClientId, losses: np.ndarray) -> None:
        """Add a client's losses at PLACES, shape (5,)."""
        self._losses[client] = losses

    def update(self) -> None:
        """Update the probabilities with the losses reported since the last update."""
        if self._losses:
            before = np.full(len(PLACES), 1 / len(PLACES)) if self.probabilities is None else self.probabilities
            losses = [self._losses[client] for client in in_order(self._losses)]
            self.probabilities = place_probabilities(before, sum(losses[1:], losses[0]))
        self._losses = {}

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"probabilities": self.probabilities, "losses": self._losses}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.probabilities, self._losses = state["probabilities"], state["losses"]
