"""Kindred: every client starts from the mean of all where that is enough, and from those like it where it is not.

A method of this library; docs/kindred.md has what it is worth, and what else was tried. There is nothing to set for a
data set. w_i is the model of client i after its last training, n_i its number of samples. A round:

| step | here |
|---|---|
| o_i = log(K pi_i), pi_i the proportions of the client's K classes, by its labels | `log_proportions` |
| a client adds o_i / 2 to its logits whenever it trains or predicts, and takes it off what it sends | `Adjustment` |
| S_ij = cos(w_i - wbar, w_j - wbar), wbar the mean model | `centred_cosines` |
| P_ij = softmax_{j != i}(SHARPNESS S_ij + log n_j), who is like i | `kin_weights` |
| v_i = sum_j P_ij w_j, the model of i's kin; g_i = sum_{j != i} n_j w_j / sum_{j != i} n_j, of all | `probe_weights` |
| every second round those who trained report l(v_i), l(g_i) on their data, with o_i added | `KindredClient.evaluate` |
| in the others up to a tenth of the data is held out; next, its losses from u_i to w_i | `KindredClient.train` |
| t: which place on that way, from 0 to 1, these speak for | `smoothed_divergence`, `place_probabilities` |
| q_i: how far the loss of v_i falls ahead of that of g_i | `kin_ahead` |
| a: near 1 where the median q of the q_i or t is, by z = 1 - (1 - q) (1 - t) | `kin_share` |
| N_i = sum_j P_ij n_j / sum_j P_ij^2, how many samples speak in v_i | `samples_behind` |
| c_i = n_i / (n_i + N_i exp(-l(v_i))), how far a client goes on from its own | `own_share` |
| G = g + MOMENTUM (g - g'), g the mean of all models, g' that of the round before | `clouds` |
| u_i = (1 - a) G + a ((1 - c_i) v_i + c_i w_i) | `start_weights` |
| the client trains from u_i, with smoothed labels and FedProx's term: the next w_i | `KindredClient.train` |
| after the last round, of ten or more: w_i is the mean of those of the last two rounds, if i trained in both | `take` |
| its personal model is (1 - t) u_i + t w_i, u_i coming after w_i | `between` |

Why:
- Clients that have few of some class learn from that alone to predict it less often. That says nothing about images, it
  differs from client to client, and the mean of models forgets it. So it is not left to the weights: logits are
  adjusted by the logarithm of the classes' proportions (Menon et al., Long-tail learning via logit adjustment, ICLR
  2021, arXiv:2007.07314; for clients' own proportions Chen and Chao, On Bridging Generic and Personalized Federated
  Learning for Image Classification, ICLR 2022, arXiv:2107.00778). By half: with all of it a client that lacks a class
  would teach nothing about it, and its outputs for that class would drift. Means of others' models are judged with all
  of it: not to know which classes a client has is no conflict of tasks.
- Few samples are soon learnt by heart. What is left to learn then is to be surer of them, and every client goes its own
  way to that. With smoothed labels (Szegedy et al., Rethinking the Inception architecture for computer vision, CVPR
  2016, arXiv:1512.00567) it comes to an end. FedProx's term (Li et al., Federated optimization in heterogeneous
  networks, MLSys 2020, arXiv:1812.06127) keeps models near to where they started from as well.
- What clients have in common says nothing about who is like whom, so it is taken off: cosines of whole models all lie
  within a hundredth of 1, and those of differences from the mean anywhere from -1 to 1, whatever the network. One
  sharpness therefore does for all data.
- Client i has no part in v_i and g_i, so their losses on its training data are honest, but for what others have from
  models that it had a part in. What its own training is worth only samples can tell that this training did not see.
- A model speaks for as many samples as went into it, those of others by exp(-l): the probability, as a geometric mean
  over i's samples, that it gives to the right class. A client that has no kin worth the name goes on from its own.
- Which of two means has the lower loss now says little about which is the better start. Where tasks conflict, one model
  cannot learn them all. What tells is whether the mean of all goes on learning as the kin do. Losses count by their
  logarithm: both then fall by the same amount if the one is always a multiple of the other.
- It is the median client that counts: where tasks conflict they do so for most, and with classes in other proportions a
  few clients that the mean of all serves badly have most of the losses.
- Where clients do best to keep what their own training makes, the mean of all is of less use to them: that they must
  leave it again each time says so as well as its loss does.
- The mean of all moves the same way for many rounds: clients train from where it will be (Nesterov's method; momentum
  at the server is of Hsu et al., Measuring the effects of non-identical data distribution for federated visual
  classification, 2019, arXiv:1909.06335). What that overshoots is to be gone at the end, so the personal models that
  come after the last round have none of it. Kin are few, and learn much by heart, so their mean is left where it is.
- With few samples each training leaves a model somewhere around where it should be: the mean of two is nearer.
- A mean of models is less sure than one model, and as often right. So the labels that models are judged by are smoothed
  more than those that are trained on: to be surer than that counts against a model.
- How much of their training clients are to keep changes while they learn, mostly in the first rounds. So a place that
  was the best is taken to be the best the next time too, but for one time in a hundred, which bounds how much is
  remembered.

At the end nothing is probed and no sample left out any more, for nobody would use what is told; so with fewer than
four rounds a and t remain one half.

Clients that sit out keep their last model, and their kin hear it while they are away; g is of those who trained in the
last round, as FedAvg's. Who has not told its losses lately is given the mean of those who have. Where few train in a
round, models also resemble each other for having been trained as often, and kin are told less well; and g has momentum
only as far as it is of those who trained in the round before as well. Losses are cross-entropies in nats, a mean over
samples. Cosines see parameters only, and parameters alone have momentum; floating buffers are combined like parameters,
integer buffers are the client's own. Logits are adjusted by the bias that is added to them; a network that has none
goes without.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from scipy.special import gammaln, rel_entr, softmax

from .client.local_training import LocalTraining
from .client.site import Samples
from .client.visit import Visit
from .engine.admission import Refused, Reply, are_numbers, is_count
from .engine.hooks import SideEvaluation
from .engine.stored import CloudModels
from .lazy import lazy
from .messages import (
    ARRAYS,
    BETWEEN,
    CONFIG,
    LABEL_SMOOTHING,
    METRICS,
    NUM_EXAMPLES,
    PROBE,
    PROXIMAL_MU,
    SERVER_ROUND,
    ClientId,
    in_order,
    read_record,
    seed_for,
    to_record,
)
from .registry import Method
from .settings import BATCH_SIZE, LOCAL_EPOCHS, LOCAL_STEPS, STORE

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

SHARPNESS = 10.0
PRIOR = 0.5
"""How many natural logarithms of a fall in loss the first guess is worth, that all have half of what the kin have."""

MOMENTUM = 0.5
TAIL = 10  # rounds: a run of so many or more ends with the mean of clients' models of the last two

ADJUSTMENT = 0.5  # how much of o_i is added to the logits of models that clients train or use,
PROBE_ADJUSTMENT = 1.0  # and to those of the two that are judged
SMOOTHING = 0.1  # share of each label that is given to all classes alike, where clients train,
JUDGED_SMOOTHING = 0.3  # and where t is judged by samples left out
PROXIMAL = 0.01  # weight of the proximal term, mu/2 times the squared distance from u_i
CONCENTRATIONS = np.geomspace(0.02, 200, 41)
"""Of the Dirichlet distributions that classes' proportions may come from: small where most samples are of one class."""

FOLDS = 10  # into how many parts a client divides its samples, to leave one out in turn
PLACES = np.linspace(0, 1, 5)  # on the way from u_i to w_i, u_i coming after w_i
JUMP = 0.01  # probability that the best of them is drawn anew, the next time that losses are told
PREDICTED_SHARE = 0.2
"""For how many samples a client predicts to judge models one way, at most, to one that it trains on.

That is a fifteenth of the work: a prediction takes a third of a step.
"""

KIN, ALL = "kin", "all"  # what the two probes are called
LEAST_LOSS, LARGEST_LOSS = 1e-30, 1e30
LAST = "last"  # under which name a client keeps its model after training,
LEFT_OUT = "left-out"  # with the places of the samples that were left out,
TRAINED_IN = "trained-in"  # and the round; in a message that of the model that the server has of it, 0 if it has none
KEPT = "kept-share"  # t
OUTPUT_BIAS = "output-bias"  # what is added to the logits, by its name in the model; in the reply, as are
ADJUSTMENT_TOLD = "logit-adjustment"  # ADJUSTMENT o_i,
FOLD_LOSSES = "fold-losses"  # and of the samples left out the summed losses at PLACES,
FOLD_SAMPLES = "fold-samples"  # and how many there were
LARGEST_ADJUSTMENT = 100.0
LEAST_PROBABILITY = 1e-8  # that counts in a loss of samples left out
LARGEST_FOLD_LOSS = 20.0  # of a sample, more than -log(LEAST_PROBABILITY) = 18.4, which no divergence is above
LEAVES_OUT = "leaves-out"  # whether the client leaves samples out in this round
WORK = (LOCAL_EPOCHS.key, LOCAL_STEPS.key, BATCH_SIZE.key)  # settings that say how much a client trains

# --- The mathematics ----------------------------------------------------------------------------------


def log_proportions(counts: np.ndarray) -> np.ndarray:
    """o_i = log(K pi_i), pi_i the posterior mean of K classes' proportions.

    A priori they are Dirichlet with one concentration alpha for all classes, any of CONCENTRATIONS alike:
    pi_i = sum_alpha p(alpha | counts) (counts + alpha) / (n_i + K alpha).

    Parameters
    ----------
    counts : ndarray of int, shape (K,)
        How many samples of each class a client has.

    Returns
    -------
    ndarray, shape (K,)
        0 where there are no samples.
    """
    alpha, classes, n = CONCENTRATIONS[:, None], len(counts), counts.sum()
    evidence = (gammaln(counts + alpha) - gammaln(alpha)).sum(axis=1) + (
        gammaln(classes * alpha) - gammaln(n + classes * alpha)
    )[:, 0]  # (alphas,)
    return np.log(classes * softmax(evidence) @ ((counts + alpha) / (n + classes * alpha)))


def centred_cosines(blocks: Iterable[np.ndarray], rows: Sequence[int], m: int) -> np.ndarray:
    """S_ij = cos(w_i - wbar, w_j - wbar) for the clients in some rows and all m, from products over blocks of columns.

    Parameters
    ----------
    blocks : iterable of ndarray
        The columns of the matrix of models, (m, d), some at a time: each of shape (m, b).
    rows : sequence of r ints
        Which clients' rows to compute.
    m : int

    Returns
    -------
    ndarray, shape (r, m)
        0 where one of the two does not differ from the mean.
    """
    products, squares = np.zeros((len(rows), m)), np.zeros(m)
    for block in blocks:  # (m, b)
        differences = block - block.mean(axis=0)  # (m, b)
        products += differences[rows] @ differences.T  # (r, m)
        squares += np.einsum("mb,mb->m", differences, differences)  # (m,)
    norms = np.where(squares > 0, np.sqrt(squares), np.inf)  # (m,)
    return products / norms[rows, None] / norms[None, :]  # (r, m)


def kin_weights(cosines: np.ndarray, samples: np.ndarray, own: np.ndarray) -> np.ndarray:
    """P_ij = softmax_{j != i}(SHARPNESS S_ij + log n_j).

    Parameters
    ----------
    cosines : ndarray, shape (r, m)
    samples : ndarray, shape (m,)
        n_j, above 0.
    own : ndarray of bool, shape (r, m)
        Which of the m a row's client is.

    Returns
    -------
    ndarray, shape (r, m)
        Rows sum to 1, or are 0 where there is nobody else.
    """
    scores = np.where(own, -np.inf, SHARPNESS * cosines + np.log(samples))  # (r, m)
    alone = own.all(axis=1)  # (r,)
    return np.where(alone[:, None], 0.0, softmax(np.where(alone[:, None], 0.0, scores), axis=1))


def probe_weights(kin: np.ndarray, latest: np.ndarray, own: np.ndarray) -> dict[str, np.ndarray]:
    """Of what v_i and g_i are made, each of shape (r, m): client i has no part in either.

    Parameters
    ----------
    kin : ndarray, shape (r, m)
    latest : ndarray, shape (m,)
        n_j of those who trained in the last round, 0 of the others; for each row somebody else is among them.
    own : ndarray of bool, shape (r, m)
    """
    others = np.where(own, 0.0, latest)  # (r, m)
    return {KIN: kin, ALL: others / others.sum(axis=1, keepdims=True)}


def kin_ahead(first: Mapping[str, float], last: Mapping[str, float]) -> float:
    """q_i = 1 - (f(g) + PRIOR / 2) / (max(f(v), f(g)) + PRIOR).

    f is by how much the logarithm of a loss has fallen, 0 at least.

    Parameters
    ----------
    first, last : mapping
        A client's losses of "kin" and "all" when it first told them and when last, above 0.

    Returns
    -------
    float
        In (0, 1). One half where nothing has fallen yet, near 0 where both fall alike, near 1 where kin's alone falls.
    """
    falls = {probe: max(float(np.log(first[probe] / last[probe])), 0.0) for probe in (KIN, ALL)}
    return 1 - (falls[ALL] + PRIOR / 2) / (max(falls.values()) + PRIOR)


def kin_share(ahead: Sequence[float], kept: float) -> float:
    """a = z^2 / (z^2 + (1 - z)^2), z = 1 - (1 - q) (1 - t), q the median of the q_i.

    Parameters
    ----------
    ahead : sequence of float
        q_i of the clients whose losses have changed since they first told them; of none the median is 1/2.
    kept : float
        t, in [0, 1]; 0 where nothing was told of it.

    Returns
    -------
    float
        In [0, 1].
    """
    q = float(np.median(ahead)) if len(ahead) else 0.5
    z = 1 - (1 - q) * (1 - kept)
    return z**2 / (z**2 + (1 - z) ** 2)


def smoothed_divergence(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """sum KL(q, p) of predictions p from labels q that are smoothed by JUDGED_SMOOTHING.

    Parameters
    ----------
    probabilities : ndarray, shape (n, K)
        Those below LEAST_PROBABILITY are taken to be that.
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
    return max(float(rel_entr(smoothed, predicted).sum()), 0.0)


def place_probabilities(before: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """p_k ~ ((1 - JUMP) before_k + JUMP / 5) exp(-losses_k): which of PLACES is the best one now.

    That is the filter of a hidden Markov model, in which the best place jumps to any of them with probability JUMP.

    Parameters
    ----------
    before : ndarray, shape (5,)
        These probabilities as of the last time; at first all alike.
    losses : ndarray, shape (5,)
        Of the samples that were left out of training, of all clients, summed: `smoothed_divergence` at each of PLACES
        between u_i (0) and w_i (1).

    Returns
    -------
    ndarray, shape (5,)
        Sums to 1. t = sum_k PLACES_k p_k is the mean.
    """
    return softmax(np.log((1 - JUMP) * before + JUMP / len(PLACES)) - losses)


def samples_behind(kin: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """N_i = sum_j P_ij n_j / sum_j P_ij^2: of m clients' samples, how many the mean of i's kin amounts to.

    That is all n_j where P_ij is in proportion to n_j, and n_j where P_ij is 1 for one j alone.

    Parameters
    ----------
    kin : ndarray, shape (r, m)
        Rows sum to 1, or are 0.
    samples : ndarray, shape (m,)

    Returns
    -------
    ndarray, shape (r,)
        0 for a row of zeros.
    """
    squares = np.square(kin).sum(axis=1)  # (r,)
    return kin @ samples / np.where(squares > 0, squares, np.inf)


def own_share(kin: np.ndarray, samples: np.ndarray, own: np.ndarray, likelihoods: np.ndarray) -> np.ndarray:
    """c_i = n_i / (n_i + N_i exp(-l(v_i))).

    Parameters
    ----------
    kin : ndarray, shape (r, m)
    samples : ndarray, shape (m,)
        n_j, above 0.
    own : ndarray of bool, shape (r, m)
        Which of the m a row's client is; none, where it has no model yet.
    likelihoods : ndarray, shape (r,)
        exp(-l(v_i)), in [0, 1].

    Returns
    -------
    ndarray, shape (r,)
        1 where there is nobody else, 0 for a client that has no model yet.
    """
    mine = own @ samples  # (r,)
    return np.where(mine > 0, mine / np.where(mine > 0, mine + samples_behind(kin, samples) * likelihoods, 1), 0.0)


def start_weights(
    kin: np.ndarray, latest: np.ndarray, own: np.ndarray, share: float, own_shares: np.ndarray
) -> np.ndarray:
    """Of what (1 - a) g + a ((1 - c_i) v_i + c_i w_i) is made, given a and c_i; the others as of `probe_weights`.

    Returns
    -------
    ndarray, shape (r, m)
        Rows sum to 1. A client that has no model yet gets g, and who is alone its own; g has no momentum here.
    """
    everybody = latest / latest.sum()  # (m,)
    c = own_shares[:, None]  # (r, 1)
    known = own.any(axis=1, keepdims=True)  # (r, 1)
    return np.where(known, (1 - share) * everybody + share * ((1 - c) * kin + c * own), everybody)


# --- The client ---------------------------------------------------------------------------------------


class KindredClient:
    """The client half: local training, and besides it the losses that the server asks about.

    An ordinary ClientApp does as well. It finds the losses on the data that its evaluate function takes, leaves no
    samples out, and its logits are not adjusted; it smooths labels and has the proximal term if it heeds the message.
    """

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train from u_i; evaluated are u_i, the trained model, and the personal one, between u_i and the last.

        Told is how good the places between u_i and the last are, by the samples that the last has not seen.
        """
        adjustment = Adjustment.of(visit, ADJUSTMENT)
        visit = replace(visit, arrays=adjustment.added(visit.arrays))
        told = adjustment.told()
        last = visit.state.load(LAST) or {}
        unseen = last.pop(LEFT_OUT, np.zeros(0, int))
        if not np.array_equal(last.pop(TRAINED_IN, -1), visit.config[TRAINED_IN]):
            last, unseen = visit.arrays, unseen[:0]  # the server has not got it, or another
        unseen = unseen[unseen < len(visit.site.train[1])]  # a site may have come back with fewer
        if len(unseen):
            x, labels = visit.samples_at(unseen)
            labels = labels.cpu().numpy()
            predicted = [visit.predict(visit.model(between(visit.arrays, last, place)), x) for place in PLACES]
            told[FOLD_LOSSES] = [smoothed_divergence(probabilities, labels) for probabilities in predicted]
            told[FOLD_SAMPLES] = len(labels)
        personal = visit.model(between(visit.arrays, last, float(visit.config[KEPT])))
        metrics = visit.evaluation(BETWEEN, personal) | visit.counts()
        left_out = _left_out(visit)
        if len(left_out):
            rest = np.setdiff1d(np.arange(len(visit.site.train[1])), left_out)
            visit = replace(visit, site=replace(visit.site, train=visit.samples_at(rest)))
        trained, others = LocalTraining.trained(visit)
        visit.state.save(LAST, {**trained, TRAINED_IN: np.array(visit.config[SERVER_ROUND]), LEFT_OUT: left_out})
        return RecordDict(
            {
                ARRAYS: to_record(adjustment.removed(trained)),
                METRICS: MetricRecord({**others, **metrics}),
                CONFIG: ConfigRecord(told),
            }
        )

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Tell the loss of a model that is probed, on some of the training data; evaluate any other on test data."""
        if PROBE not in visit.config:
            if not visit.config[TRAINED_IN]:  # personal models of those that have trained come adjusted
                visit = replace(visit, arrays=Adjustment.of(visit, ADJUSTMENT).added(visit.arrays))
            return LocalTraining.evaluate(visit)
        samples = _probe_samples(visit)
        loss = visit.loss(visit.model(Adjustment.of(visit, PROBE_ADJUSTMENT).added(visit.arrays)), samples)
        return RecordDict({METRICS: MetricRecord({"loss": loss, NUM_EXAMPLES: len(samples[1])})})


def between(start: Mapping[str, np.ndarray], last: Mapping[str, np.ndarray], kept: float) -> dict[str, np.ndarray]:
    """(1 - t) u_i + t w_i; integer buffers are the client's own."""
    return {
        name: ((1 - kept) * array + kept * last[name]).astype(array.dtype)
        if np.issubdtype(array.dtype, np.floating)
        else last[name]
        for name, array in start.items()
    }


@dataclass(frozen=True)
class Adjustment:
    """What is added to a model's logits, of shape (K,), and the name of the bias in which it lies; None for neither."""

    name: str | None = None
    logits: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, visit: Visit, share: float) -> Adjustment:
        """So much of o_i, by the labels of the client's training data."""
        name = _output_bias(visit)
        if name is None:
            return cls()
        labels = visit.site.train[1].cpu().numpy()
        return cls(name, share * log_proportions(np.bincount(labels, minlength=len(visit.arrays[name]))))

    def added(self, arrays: Mapping[str, np.ndarray], sign: int = 1) -> dict[str, np.ndarray]:
        """A model that has it in it."""
        if self.name is None:
            return dict(arrays)
        return {**arrays, self.name: (arrays[self.name] + sign * self.logits).astype(arrays[self.name].dtype)}

    def removed(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A model that had it in it."""
        return self.added(arrays, -1)

    def told(self) -> dict[str, Any]:
        """As the server is told."""
        return {} if self.name is None else {OUTPUT_BIAS: self.name, ADJUSTMENT_TOLD: self.logits.tolist()}


def output_bias(model: torch.nn.Module, images: torch.Tensor) -> str | None:
    """The parameter that is added to the logits, by its name: that to which the gradient of r.logits is r itself.

    Parameters
    ----------
    model : torch.nn.Module
        Maps images to logits (n, K); it keeps its mode.
    images : tensor (n, ...)
        For their shape: the gradient is taken at noise, for at an image of ones a factor looks like what is added.

    Returns
    -------
    str or None
        None if there is no such parameter.
    """
    was_training = model.training
    model.eval()
    noise = torch.randn(images[:1].shape, generator=torch.Generator().manual_seed(0))
    logits = model(noise.to(images))[0]  # (K,)
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


def _left_out(visit: Visit) -> np.ndarray:
    """The places of the training data that are left out in this round; two or more remain, if there are as many."""
    if not visit.config[LEAVES_OUT]:
        return np.zeros(0, int)
    order = _shuffled(visit, "fold")
    fold = np.array_split(order, FOLDS)[(visit.config[SERVER_ROUND] // 2 - 1) % FOLDS]
    fold = fold[: max(_affordable(visit) // len(PLACES), 1)]
    return np.sort(fold) if len(order) - len(fold) >= 2 else fold[:0]  # batch normalisation needs two


def _affordable(visit: Visit) -> int:
    """How many samples the client can predict for in a fifteenth of the work of its training."""
    return int(PREDICTED_SHARE * (visit.epochs * len(visit.site.train[1]) + visit.steps * visit.batch_size))


def _probe_samples(visit: Visit) -> Samples:
    """The training data, or as many as are in proportion to the training, the same in all rounds."""
    count = max(_affordable(visit), 1)
    if count >= len(visit.site.train[1]):
        return visit.site.train
    return visit.samples_at(np.sort(_shuffled(visit, PROBE)[:count]))


def _shuffled(visit: Visit, purpose: str) -> np.ndarray:
    """The places of the training data, in an order that is the same in all rounds."""
    seed = seed_for(visit.config.get("seed", 0), visit.client, purpose)
    return np.random.default_rng(seed).permutation(len(visit.site.train[1]))


# --- The server ---------------------------------------------------------------------------------------


class Kindred(CloudModels):
    """Kindred as a Flower strategy. It has no settings of its own.

    Where `fraction_evaluate` is 0 nothing is probed; a is then one half, or more by t.

    Parameters
    ----------
    **shared
        Those of `StoredModels`.
    """

    name = "kindred"
    personal = BETWEEN
    clients_keep_state = True
    STATE = (
        *CloudModels.STATE,
        "_samples",
        "_trained_in",
        "_share",
        "_first",
        "_last",
        "_counted",
        "_told",
        "_adjustments",
        "_places",
        "_folds",
        "_mean",
        "_moved",
    )

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._samples: dict[ClientId, float] = {}  # n_i of those that have trained
        self._trained_in: dict[ClientId, int] = {}  # and the round in which they did so last
        self._share = 0.5  # a
        self._first: dict[ClientId, dict[str, float]] = {}  # what a client said of the probes the first time,
        self._last: dict[ClientId, dict[str, float]] = {}  # and the last time
        self._counted: dict[ClientId, dict[str, float]] = {}  # what was said in the last exchange that had any,
        self._told: dict[ClientId, dict[str, float]] = {}  # and in this round's, which counts from the next one on
        self._places: np.ndarray | None = None  # how probably each of PLACES is the best one, once any losses are told
        self._folds: dict[ClientId, np.ndarray] = {}  # this round's losses there, (5,)
        self._mean: np.ndarray | None = None  # g, its parameters alone, (p,),
        self._moved: np.ndarray | None = None  # and g - g', None until there are two of them, and after the last round
        self._adjustments: dict[ClientId, dict[str, Any]] = {}  # what those told that adjust their logits

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {**super().round_config(server_round, client), TRAINED_IN: self._trained_in.get(client, 0)}

    @property
    def _kept(self) -> float:
        """t, one half until something is told."""
        return 0.5 if self._places is None else float(self._places @ PLACES)

    def _leaves_out(self, server_round: int) -> bool:
        return server_round % 2 == 0 and 0 < server_round < self.last_round - 1

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._work = {key: config[key] for key in WORK if key in config}
        # Not as soon as the losses are told: until then personal models are what was evaluated.
        if told := {client: self._told[client] for client in in_order(self._told) if len(self._told[client]) == 2}:
            self._first, self._last, self._counted = told | self._first, self._last | told, told
        if self._folds:
            before = np.full(len(PLACES), 1 / len(PLACES)) if self._places is None else self._places
            self._places = place_probabilities(before, sum(self._folds[client] for client in in_order(self._folds)))
        self._folds = {}
        ahead = [
            kin_ahead(self._first[client], self._last[client])
            for client in in_order(self._last)
            if client in self.roster.nodes and self._last[client] != self._first[client]
        ]
        self._share = kin_share(ahead, 0.0 if self._places is None else self._kept)
        training = {
            KEPT: self._kept,
            LEAVES_OUT: self._leaves_out(server_round),
            LABEL_SMOOTHING: SMOOTHING,
            PROXIMAL_MU: PROXIMAL,
        }
        return super().configure_train(server_round, arrays, ConfigRecord({**config, **training}), grid)

    def cloud_weights(self, server_round: int, clients: Sequence[ClientId]) -> tuple[list[ClientId], np.ndarray]:
        senders, rows, _ = self._starts(clients)
        return senders, rows

    def clouds(
        self, clients: Sequence[ClientId], senders: Sequence[ClientId], rows: np.ndarray, kept: float = 0.0
    ) -> Iterator[ArrayRecord]:
        """What clients start from, or what is between that and their own: g has its momentum in it."""
        if self._moved is None or not senders:
            yield from super().clouds(clients, senders, rows)
            return
        step = MOMENTUM * self._moved  # (p,)
        # Of float16, say: no mean of models is beyond its largest number, but what goes ahead of one may be.
        narrow = [
            (self.layout.slices[name], np.finfo(self.layout.dtypes[name]).max)
            for name in self.layout.parameters
            if self.layout.dtypes[name] != self.layout.dtype
        ]
        known = set(senders)
        for client, model in zip(clients, self.models.combinations(rows, senders)):
            share = (1 - kept) * (1 - self._share) if client in known else 1.0  # of g
            model[: len(step)] += share * step
            for place, largest in narrow:
                np.clip(model[place], -largest, largest, out=model[place])
            yield self.models.combined_record(model, client)

    def _starts(self, clients: Sequence[ClientId]) -> tuple[list[ClientId], np.ndarray, np.ndarray]:
        """Who has trained, m clients in order; of what these clients' u_i are made, (r, m); `own`, (r, m)."""
        senders, samples, latest = self._trained()
        kin, own = self._kin(clients, senders, samples)
        if not senders:
            return senders, kin, own
        own_shares = own_share(kin, samples, own, self._likelihoods(clients))
        return senders, start_weights(kin, latest, own, self._share, own_shares), own

    def _likelihoods(self, clients: Sequence[ClientId]) -> np.ndarray:
        """exp(-l(v_i)), (r,): as told, else the mean of what others told, and 1 where nobody did."""
        told = {client: float(np.exp(-losses[KIN])) for client, losses in self._counted.items()}
        usual = sum(told.values()) / len(told) if told else 1.0
        return np.array([told.get(client, usual) for client in clients])

    def _trained(self) -> tuple[list[ClientId], np.ndarray, np.ndarray]:
        """Who has trained, m clients in order, with n_j, (m,), and `latest`, (m,)."""
        senders = [client for client in in_order(self._samples) if client not in self.history.left_out]
        samples = np.array([self._samples[client] for client in senders])  # (m,)
        rounds = np.array([self._trained_in[client] for client in senders])  # (m,)
        return senders, samples, np.where(rounds == rounds.max(initial=0), samples, 0.0)

    def _kin(
        self, clients: Sequence[ClientId], senders: Sequence[ClientId], samples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of these clients P and `own`, (r, m) each, given who has trained."""
        place = {client: i for i, client in enumerate(senders)}
        known = [i for i, client in enumerate(clients) if client in place]
        rows = [place[clients[i]] for i in known]
        own = np.zeros((len(clients), len(senders)), bool)  # (r, m)
        own[known, rows] = True
        kin = np.zeros(own.shape)  # (r, m)
        if known:
            blocks = (block for _, block in self.models.blocks(senders, self.layout.num_parameters))
            kin[known] = kin_weights(centred_cosines(blocks, rows, len(senders)), samples, own[known])
        return kin, own

    def inspect(self, client: ClientId, reply: Reply) -> None:
        name, adjustment = reply.config.get(OUTPUT_BIAS), reply.config.get(ADJUSTMENT_TOLD)
        if name is not None or adjustment is not None:
            bias = self.initial.get(name) if isinstance(name, str) else None
            if bias is None or len(bias.shape) != 1 or name not in self.layout.parameters:
                raise Refused(f"its {OUTPUT_BIAS} is {reprlib.repr(name)}, expected the name of a vector of the model")
            _check_numbers(ADJUSTMENT_TOLD, adjustment, bias.shape[0], -LARGEST_ADJUSTMENT, LARGEST_ADJUSTMENT)
        if (losses := reply.config.get(FOLD_LOSSES)) is not None:
            samples = reply.config.get(FOLD_SAMPLES)
            if not is_count(samples):
                raise Refused(f"its {FOLD_SAMPLES} is {reprlib.repr(samples)}, expected a number from 1")
            _check_numbers(FOLD_LOSSES, losses, len(PLACES), 0, LARGEST_FOLD_LOSS * samples)

    def take(self, client: ClientId, reply: Reply) -> None:
        averaged = self.last_round >= TAIL and self._trained_in.get(client) == self.last_round - 1
        before = self.models.row(client).copy() if averaged else None  # (d,)
        super().take(client, reply)
        if before is not None:
            self.models.row(client)[:] = before / 2 + self.models.row(client) / 2
        self._samples[client] = reply.number(self.weighted_by_key)
        if FOLD_LOSSES in reply.config and self._leaves_out(self._trained_in.get(client, 0)):
            self._folds[client] = np.array(reply.config[FOLD_LOSSES], float)
        self._adjustments.pop(client, None)
        if OUTPUT_BIAS in reply.config:
            self._adjustments[client] = {key: reply.config[key] for key in (OUTPUT_BIAS, ADJUSTMENT_TOLD)}

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        super().end_round(server_round, answered)
        last = max(self._trained_in.values(), default=0)
        again = {client for client in answered if self._trained_in.get(client) == last}
        self._trained_in |= dict.fromkeys(answered, server_round)
        if server_round == self.last_round:
            self._moved = None  # nobody trains any more, which would take back what goes too far
        elif answered:
            self._move(again)
        self.history.count(kin_share=self._share, kept_share=self._kept)

    def _move(self, again: Collection[ClientId]) -> None:
        """Find how g has moved on: by as much of it as these are, who trained in the last round and the one before.

        The means of a few who are drawn anew differ for that alone.
        """
        senders, _, latest = self._trained()
        if not senders:
            return
        before, self._mean = self._mean, self._mean_of(senders, latest)[: self.layout.num_parameters].copy()  # (p,)
        if before is not None:
            share = float(latest @ [client in again for client in senders] / latest.sum())
            self._moved = share * (self._mean - before)

    def _mean_of(self, senders: Sequence[ClientId], latest: np.ndarray) -> np.ndarray:
        """g, shape (d,), to be used before another sum is asked for."""
        return next(self.models.combinations(latest[None, :] / latest.sum(), senders))

    def side_evaluations(self, server_round: int) -> Iterator[SideEvaluation]:
        """Yield v_i and g_i for the clients that trained in this round, in every second round before the last."""
        self._told = {}
        clients = [client for client in in_order(self._trained_in) if self._trained_in[client] == server_round]
        # With two clients g_i is the other one's model.
        if server_round % 2 == 0 or server_round >= self.last_round or len(clients) < 3:
            return
        senders, samples, latest = self._trained()
        kin, own = self._kin(clients, senders, samples)
        for probe, rows in probe_weights(kin, latest, own).items():
            for client, record in zip(clients, super().clouds(clients, senders, rows)):
                yield SideEvaluation(client, probe, record, self._work)

    def take_side_loss(self, client: ClientId, name: str, loss: float) -> None:
        self._told.setdefault(client, {})[name] = min(max(loss, LEAST_LOSS), LARGEST_LOSS)

    def global_arrays(self) -> ArrayRecord:
        """g, the mean of the models of those who trained in the last round, weighted by samples."""
        senders, _, latest = self._trained()
        if not senders:
            return self.initial
        return self.models.combined_record(self._mean_of(senders, latest), senders[0])

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        return next(self.personal_models([client]))

    def personal_models(self, clients: Sequence[ClientId]) -> Iterator[ArrayRecord]:
        """Between what each would start from next and its own model; who is left out keeps its own."""
        self.welcome(clients)
        senders, starts, own = self._starts(clients)
        known = own.any(axis=1, keepdims=True)  # (r, 1)
        rows = np.where(known, (1 - self._kept) * starts + self._kept * own, starts)  # (r, m)
        for client, record in zip(clients, self.clouds(clients, senders, rows, self._kept)):
            mine = self.models[client] if client in self._samples and client not in senders else record
            if told := self._adjustments.get(client):
                adjustment = Adjustment(told[OUTPUT_BIAS], np.array(told[ADJUSTMENT_TOLD]))
                mine = to_record(adjustment.added(read_record(mine)))
            yield mine

    def client_models(self) -> Mapping[ClientId, ArrayRecord]:
        return _PersonalModels(self, in_order(self._samples))


def _check_numbers(name: str, told: object, count: int, least: float, most: float) -> None:
    if not are_numbers(told, count, least, most):
        raise Refused(f"its {name} are {reprlib.repr(told)}, expected {count} numbers from {least:g} to {most:g}")


class _PersonalModels(Mapping[ClientId, ArrayRecord]):
    """The personal models of clients, made as they are asked for: nobody holds all of them."""

    def __init__(self, strategy: Kindred, clients: Sequence[ClientId]) -> None:
        self._strategy = strategy
        self._clients = clients

    def __getitem__(self, client: ClientId) -> ArrayRecord:
        if client not in self._clients:
            raise KeyError(client)
        return self._strategy.personal_arrays(client)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def items(self) -> Iterator[tuple[ClientId, ArrayRecord]]:  # type: ignore[override]
        """Together, which takes a few products of matrices, and the same bits as an evaluation of all has."""
        return zip(self._clients, self._strategy.personal_models(self._clients))


METHOD = Method(
    title="Kindred",
    paper="of this library: docs/kindred.md",
    travels="the model, both ways; in every second round two more to evaluate, down",
    stays="its last model",
    strategy=Kindred,
    client=KindredClient,
    settings=(STORE,),
    any_client=True,
)
