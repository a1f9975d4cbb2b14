"""Kindred: each client starts from, and ends with, the mixture of models that its own held-out samples prefer.

This method is this library's own: docs/kindred.md has its reasons and results, docs/kindred-log.md what was tried. It
has no setting to choose per data set. w_i is client i's model after its last training, n_i its number of samples. The
mixture is of w_i itself; v_i, the mean of similar clients' models; and g, that of all, as in FedAvg. In each round

| step | here |
|---|---|
| S_ij = cos(w_i - wbar, w_j - wbar), wbar the mean model | `centred_cosines` |
| P_ij = softmax_{j != i}(SHARPNESS S_ij + log n_j), the weights of v_i | `neighbour_weights` |
| l_ik: losses of w_i, v_i and g on i's held-out samples, as of COUNTED at most | `parts.held_out.judged`, `train` |
| e_ik: minus the mean of l_ik, in which a round has MEMORY times the weight of the next, the evidence | `train` |
| p: for how many of all clients each of the three is best, by their evidence (empirical Bayes) | `prevalence` |
| s_ik ~ p_k exp(e_ik): the shares of the three in i's mixture | `shares` |
| i uses, and trains from, s_i1 w_i + s_i2 v_i + s_i3 g: the next w_i | `parts.combination.combined` |

v_i and g travel to the client, which has w_i, judges the three and reports e_i. Held-out samples are the client's
validation data; without any, a tenth of its training samples in the first half of the rounds, which changes when a
client starts from others' models: what w_i has learnt by heart cannot judge it. A held-out sample makes its own class
rarer in training. Where samples are few this alone would decide against w_i, so what w_i predicts is corrected
(`parts.held_out.rarity`). A mean of models is less certain than one model, and as often right, so a temperature is
fitted for each model. More than COUNTED samples count as COUNTED: many show which model is best now, but the mean of
all improves from round to round only if clients start from it together.

Empirical Bayes is of Robbins, 1956; weights by held-out samples are those of stacking, Wolpert, 1992, and of FedFomo,
arXiv:2012.08565.

A client that comes after the run mixes predictions (`parts.newcomers`): of up to MOST clients' models, of g and, if it
has labelled samples, of its own model.

Absent clients keep their last model, and it remains in their neighbours' means. As in FedAvg, g is over the clients
that trained in the last round. Only parameters count in cosines. Floating-point buffers are combined like parameters;
integer buffers are the client's own, and the median of all clients' in g.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from .client.local_training import LocalTraining
from .client.state import MIXTURE
from .client.visit import Visit
from .engine.admission import Refused, Reply, check_numbers, norm
from .engine.computed_models import ComputedModels
from .engine.means import capped
from .engine.stored import NO_WEIGHTS, CloudModels
from .lazy import lazy
from .messages import (
    ARRAYS,
    CONFIG,
    METHODS,
    METRICS,
    RECEIVED,
    SERVER_ROUND,
    ClientId,
    by_prefix,
    in_order,
    seed_for,
    to_record,
    with_prefix,
)
from .parts.combination import combined
from .parts.held_out import LARGEST_LOSS, judged
from .parts.newcomers import mixture_metrics, newcomer_reply
from .registry import Method
from .settings import STORE

if TYPE_CHECKING:
    from scipy import special
else:
    special = lazy("scipy.special")

SHARPNESS = 10.0
COUNTED = 8  # largest number of held-out samples that counts; more count as so many
MEMORY = 0.8  # weight of a round's losses, relative to the next round's, in their mean
HUGE = 100.0  # times the median length: a longer model counts for nobody
LARGEST_WEIGHT = 3.0  # of a client in a mean, in numbers of samples of the median client
FOLDS = 10  # parts of the training samples, of which a client without validation data holds one out
HOLDING = 0.5  # of the rounds, the first ones, in which it does
STAYS = 0.1  # share of its own model from which on the fold stays the same
MOST = 20  # models of other clients that it mixes with its own
WORK = 0.1  # of the time of training that judging may take; predicting for a batch takes a third of a step
TOGETHER = 256  # mixtures that are computed at a time
SOURCES = 3  # w_i, v_i and g, in this order
GRID = (np.array([(i, j, 20 - i - j) for i in range(21) for j in range(21 - i)]) + 0.02) / 20.06  # values of p

NEIGHBOURS, EVERYBODY = "neighbours", "everybody"  # prefixes of v_i and g in messages
OTHERS = "others"  # prefix of clients' models in messages to a client that comes after the run
HOLDS_OUT = "holds-out"  # whether a client without validation data holds samples out
RUN_ROUNDS = "run-rounds"  # number of the run's rounds, for such a client
TRAINED_IN = "trained-in"  # round in which the client's model at the server was trained, or 0
PRIOR = "prior"  # p, down
EVIDENCE = "evidence"  # e_i, up, less its largest value
LAST = "last"  # saved at the client: w_i, with TRAINED_IN and
LOSSES, ROUNDS = "kindred/losses", "kindred/rounds"  # the sums for e_i, of losses and of weights
CREDIT = "kindred/credit"  # work since it judged
FOLD = "kindred/fold"  # number of the tenth of the training samples that is held out

# --- The mathematics ----------------------------------------------------------------------------------


def centred_cosines(blocks: Iterable[np.ndarray], rows: Sequence[int], m: int) -> np.ndarray:
    """Return S_ij = cos(w_i - wbar, w_j - wbar) for r of the clients and all m, from products over blocks of columns.

    Parameters
    ----------
    blocks : iterable of ndarray
        The columns of the matrix of models, (m, d), in blocks of shape (m, b).
    rows : sequence of r ints
        Indices i of the clients whose rows are computed.
    m : int

    Returns
    -------
    ndarray, shape (r, m)
        0 where w_i or w_j equals the mean.
    """
    products, squares = np.zeros((len(rows), m)), np.zeros(m)
    for block in blocks:  # (m, b)
        differences = block - block.mean(axis=0, dtype=float)  # (m, b)
        products += differences[rows] @ differences.T  # (r, m)
        squares += np.einsum("mb,mb->m", differences, differences)  # (m,)
    norms = np.where(squares > 0, np.sqrt(squares), np.inf)  # (m,)
    return products / norms[rows, None] / norms[None, :]  # (r, m)


def bounded(samples: np.ndarray) -> np.ndarray:
    """Return numbers of samples, (m,), of which none is above LARGEST_WEIGHT times the median."""
    return np.minimum(samples, LARGEST_WEIGHT * np.median(samples)) if len(samples) else samples


def neighbour_weights(cosines: np.ndarray, samples: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the weights of clients' neighbours, P_ij = softmax_{j != i}(SHARPNESS S_ij + log n_j).

    Parameters
    ----------
    cosines : ndarray, shape (r, m)
    samples : ndarray, shape (m,)
        n_j, above 0.
    own : ndarray of bool, shape (r, m)
        True in the column of the row's client.

    Returns
    -------
    ndarray, shape (r, m)
        Rows sum to 1. A client that is the only one has weight 1 on itself.
    """
    alone = own.all(axis=1, keepdims=True)  # (r, 1)
    scores = np.where(own & ~alone, -np.inf, SHARPNESS * cosines + np.log(samples))  # (r, m)
    return special.softmax(scores, axis=1)


def prevalence(evidence: np.ndarray) -> np.ndarray:
    """Return p, the expected shares of clients for which w_i, v_i or g is the best.

    This is the mean of p's posterior over the points of GRID: the likelihood is prod_i sum_k p_k exp(e_ik), the prior
    prod_k p_k^(-1/2), as Jeffreys'.

    Parameters
    ----------
    evidence : ndarray, shape (m, 3)
        0 or less, with a 0 in each row.

    Returns
    -------
    ndarray, shape (3,)
        Uniform without clients.
    """
    likelihoods = np.log(np.exp(evidence) @ GRID.T).sum(axis=0)  # (g,)
    return special.softmax(likelihoods - np.log(GRID).sum(axis=1) / 2) @ GRID


def shares(prior: np.ndarray, evidence: np.ndarray) -> np.ndarray:
    """Return s_ik ~ p_k exp(e_ik), the shares of w_i, v_i and g.

    Parameters
    ----------
    prior : ndarray, shape (3,)
    evidence : ndarray, shape (..., 3)

    Returns
    -------
    ndarray, shape (..., 3)
        Summing to 1.
    """
    return special.softmax(np.log(prior) + evidence, axis=-1)


# --- The client ---------------------------------------------------------------------------------------


class KindredClient(LocalTraining):
    """The client half. An ordinary ClientApp also works: it receives a mixture by p alone, and trains it."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train from the mixture; evaluate it, as the client's personal model, and the trained model."""
        received = by_prefix(visit.arrays)
        if OTHERS in received:
            models = [*by_prefix(received[OTHERS]).values(), received[EVERYBODY]]
            return newcomer_reply(visit, models, rounds=int(visit.config[RUN_ROUNDS]))
        everybody = received[EVERYBODY]
        last = visit.state.load(LAST) or {}
        known = np.array_equal(last.pop(TRAINED_IN, -1), visit.config[TRAINED_IN])  # else the server has another model
        losses, rounds = last.pop(LOSSES, np.zeros(SOURCES)), float(last.pop(ROUNDS, 0.0))  # (3,)
        credit, fold = float(last.pop(CREDIT, np.inf)), int(last.pop(FOLD, 0))
        held = bool(last.pop(HOLDS_OUT, False))  # whether that model was trained without the fold
        evidence = np.zeros(SOURCES)  # (3,)
        if known and NEIGHBOURS in received:
            parts = [last, received[NEIGHBOURS], everybody]
            held_out_at = fold_at(visit, fold, held)
            size = len(visit.site.validation[1] if visit.site.validation else held_out_at)
            counted = min(size, COUNTED)
            if size and credit >= SOURCES * -(-size // visit.batch_size):
                held_out = visit.site.validation or visit.samples_at(held_out_at)
                trained = visit.site.train[1][others_at(visit, held_out_at)]
                losses = MEMORY * losses + judged(visit, parts, held_out, trained) * (counted / size)
                rounds, credit = MEMORY * rounds + 1, 0.0
            evidence = (losses.min() - losses) / max(rounds, 1.0)
            s = shares(np.array(visit.config[PRIOR]), evidence)  # (3,)
            start = combined(parts, s)
            fold += bool(s[0] < STAYS)
        else:
            start = everybody
        held = bool(visit.config[HOLDS_OUT]) and not visit.is_last
        held_out_at, site = fold_at(visit, fold, held), visit.site
        if len(held_out_at):
            site = replace(site, train=visit.samples_at(others_at(visit, held_out_at)))
        arrays, metrics = LocalTraining.trained(replace(visit, arrays=start, site=site))
        credit += 3 * WORK * (visit.steps + visit.epochs * -(-len(site.train[1]) // visit.batch_size))
        sums = {LOSSES: losses, ROUNDS: np.array(rounds), CREDIT: np.array(credit)}
        state = {FOLD: np.array(fold), HOLDS_OUT: np.array(held), TRAINED_IN: np.array(visit.config[SERVER_ROUND])}
        visit.state.save(LAST, {**arrays, **sums, **state})
        reply = MetricRecord({**metrics, **visit.counts()}), ConfigRecord({EVIDENCE: evidence.tolist()})
        return RecordDict({ARRAYS: to_record(arrays), METRICS: reply[0], CONFIG: reply[1]})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the received model, or the mixture of several, for a client without labelled samples."""
        received = by_prefix(visit.arrays)
        if EVERYBODY not in received:
            return LocalTraining.evaluate(visit)
        models = [*by_prefix(received.get(OTHERS, {})).values(), received[EVERYBODY]]
        return RecordDict({METRICS: MetricRecord({**mixture_metrics(visit, models, np.zeros((0, len(models))))})})


def fold_at(visit: Visit, fold: int, held: bool) -> np.ndarray:
    """Return the indices of the training samples that are held out: a fold of FOLDS, if `held`; else none."""
    n = len(visit.site.train[1])
    if visit.site.validation is not None or not held or n <= 2:  # batch normalisation needs two samples
        return np.arange(0)
    return fold_of(seed_for(visit.config.get("seed", 0), visit.client, "fold"), n, fold, min(FOLDS, n))


@lru_cache(maxsize=1024)  # it is asked for twice a visit, and mostly stays the same
def fold_of(seed: int, n: int, fold: int, folds: int) -> np.ndarray:
    """Return the indices of n samples in one of several folds, drawn at random."""
    return np.sort(np.array_split(np.random.default_rng(seed).permutation(n), folds)[fold % folds])


def others_at(visit: Visit, places: np.ndarray) -> np.ndarray:
    """Return the indices of the training samples that are not at these places."""
    return np.delete(np.arange(len(visit.site.train[1])), places)


# --- The server ---------------------------------------------------------------------------------------


class Kindred(CloudModels):
    """Kindred as a Flower strategy. It has no settings of its own.

    Parameters
    ----------
    **shared
        Arguments of `StoredModels`.
    """

    name = "kindred"
    personal = RECEIVED
    newcomer_result = MIXTURE
    clients_keep_state = True
    STATE = (*CloudModels.STATE, "_samples", "_trained_in", "_ended", "_lengths", "_evidence", "_prior", "_ordinary")

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._samples: dict[ClientId, float] = {}  # n_i of the clients that have trained
        self._lengths: dict[ClientId, float] = {}  # ||w_i||
        self._trained_in: dict[ClientId, int] = {}  # the last round in which each of them trained
        self._ended = 0  # the last round with any answer
        self._evidence: dict[ClientId, np.ndarray] = {}  # e_i, (3,), as reported last
        self._prior = prevalence(self._evidence_of([]))  # p, (3,)
        self._round = 0
        self._serves = False  # clients that come after the run
        self._ordinary: list[ClientId] = []  # clients whose ClientApp does not know this method

    def introduce(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        ordinary = {client for client, about in newcomers.items() if METHODS not in about}
        self._ordinary = in_order({*self._ordinary} - {*newcomers} | ordinary)
        return super().introduce(newcomers)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        trained_in, prior = self._trained_in.get(client, 0), self._prior.tolist()
        holds_out = not trained_in or server_round <= HOLDING * self.last_round
        of_the_run = {RUN_ROUNDS: server_round - 1} if self._serves else {}
        return {TRAINED_IN: trained_in, PRIOR: prior, HOLDS_OUT: holds_out, **of_the_run}

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        """Yield g, and v_i for a client that has a model; for an ordinary ClientApp its mixture."""
        self._round, self._weights = server_round, NO_WEIGHTS
        self.welcome(clients)
        senders, parts = self._parts(clients)
        rows = self._mixed(clients, parts)
        if senders:
            self._weights, self._sent = (list(clients), senders, rows), parts
        everybody = self.ensemble() if self._serves else ArrayRecord(with_prefix(EVERYBODY, self.global_arrays()))
        ordinary = np.array([client in self._ordinary for client in clients], bool)  # (r,)
        models = self.clouds(clients, senders, np.where(ordinary[:, None], rows, parts[1]))
        for client, is_ordinary, model in zip(clients, ordinary, models, strict=False):
            record = everybody.copy()
            record.update(with_prefix(NEIGHBOURS, model) if client in self._samples else {})
            yield client, model if is_ordinary else record

    def _mixed(self, clients: Sequence[ClientId], parts: np.ndarray) -> np.ndarray:
        """Return the weights of these clients' mixtures by the evidence that they reported last, (r, m)."""
        s = shares(self._prior, self._evidence_of(clients))[:, :, None]  # (r, 3, 1)
        return s[:, 0] * parts[0] + s[:, 1] * parts[1] + s[:, 2] * parts[2]  # the same bits for one client and for all

    def _evidence_of(self, clients: Sequence[ClientId]) -> np.ndarray:
        """Return e_i of these clients, (r, 3); 0 where none is known."""
        known = [self._evidence.get(client, np.zeros(SOURCES)) for client in clients]
        return np.array(known).reshape(-1, SOURCES)

    def _parts(self, clients: Sequence[ClientId]) -> tuple[list[ClientId], np.ndarray]:
        """Return the m clients whose models count, in order, and the weights of w_i, v_i and g, (3, r, m).

        For a client that has no model all three are those of g.
        """
        longest = HUGE * float(np.median([*self._lengths.values()] or [0.0]))
        huge = {client for client, length in self._lengths.items() if length > longest > 0}
        senders = in_order({*self._of_the_run()} - {*self.history.left_out} - huge)
        if not senders:
            return senders, np.zeros((3, len(clients), 0))
        samples = bounded(np.array([self._samples[client] for client in senders]))  # (m,)
        samples = capped(samples, self.max_client_share)  # (m,)
        latest = np.array([self._trained_in[client] == self._ended for client in senders])  # (m,)
        counted = capped(np.where(latest, samples, 0.0) if latest.any() else samples, self.max_client_share)  # (m,)
        parts = np.tile(counted / counted.sum(), (3, len(clients), 1))  # (3, r, m)
        place = {client: i for i, client in enumerate(senders)}
        if known := [i for i, client in enumerate(clients) if client in place]:
            rows = [place[clients[i]] for i in known]
            blocks = (block for _, block in self.models.blocks(senders, self.layout.num_parameters))
            own = np.eye(len(senders), dtype=bool)[rows]  # (r, m)
            parts[0, known] = own
            parts[1, known] = neighbour_weights(centred_cosines(blocks, rows, len(senders)), samples, own)
        return senders, parts

    def _of_the_run(self) -> list[ClientId]:
        """Return the clients that have trained in a round, without those that came after the run."""
        return [client for client in in_order(self._samples) if self._trained_in[client] <= self._ended]

    def inspect(self, client: ClientId, reply: Reply) -> None:
        if EVIDENCE in reply.config:
            check_numbers(EVIDENCE, reply.config[EVIDENCE], SOURCES, -LARGEST_LOSS, 0)
            if (largest := max(reply.config[EVIDENCE])) < 0:
                raise Refused(f"its {EVIDENCE} are at most {largest:g}, expected 0 for the best of the models")

    def take(self, client: ClientId, reply: Reply) -> None:
        super().take(client, reply)
        self._samples[client] = reply.number(self.weighted_by_key)
        self._lengths[client] = norm([self.models.row(client)[: self.layout.num_parameters]])
        self._trained_in[client] = self._round
        if EVIDENCE in reply.config:
            self._evidence[client] = np.array(reply.config[EVIDENCE], float)

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        super().end_round(server_round, answered)
        if not answered:
            return
        clients, senders, _ = self._weights
        if senders:  # the shares that clients have used are known now
            self._weights = (clients, senders, self._mixed(clients, self._sent))
        self._ended = server_round
        self.means.append({client: self._samples[client] for client in answered})
        self._prior = prevalence(self._evidence_of(in_order(self._evidence)))
        own, neighbours, everybody = self._prior.tolist()
        self.history.count(own_share=own, neighbours_share=neighbours, everybody_share=everybody)

    def begin_visits(self) -> None:
        self._serves = True

    def ensemble(self) -> ArrayRecord:
        """Return g, and the models of at most MOST clients, drawn at random, under their numbers."""
        senders, _ = self._parts([])
        rng = np.random.default_rng(seed_for(self.seed, "ensemble"))
        drawn = in_order(senders[i] for i in rng.permutation(len(senders))[:MOST])
        models = with_prefix(EVERYBODY, self.global_arrays())
        integers = to_record(self.models.shared_integers())
        for i, model in enumerate(self.personal_models(drawn)):
            models |= with_prefix(f"{OTHERS}/{i}", {**model, **integers})
        return ArrayRecord(models)

    def global_arrays(self) -> ArrayRecord:
        """Return g, the mean of the models of the clients that trained in the last round, weighted by samples."""
        senders, (_, _, everybody) = self._parts([""])  # no client has this name
        if not senders:
            return self.initial
        return self.models.shared_record(next(self.models.combinations(everybody, senders)))

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        return next(self.personal_models([client]))

    def personal_models(self, clients: Sequence[ClientId]) -> Iterator[ArrayRecord]:
        """Yield each client's mixture; for an excluded client, its own model."""
        if self._samples:  # before that, every client has the initial model
            self.welcome(clients)
        for first in range(0, len(clients), TOGETHER):
            some = clients[first : first + TOGETHER]
            senders, parts = self._parts(some)
            for client, record in zip(some, self.clouds(some, senders, self._mixed(some, parts)), strict=False):
                yield self.models[client] if client in self._samples and client not in senders else record

    def client_models(self) -> Mapping[ClientId, ArrayRecord]:
        return ComputedModels(in_order({*self.clients(), *self._of_the_run()}), self.personal_models)


METHOD = Method(
    title="Kindred",
    paper="of this library: docs/kindred.md",
    travels="two models, down; the model, up",
    stays="its last model",
    strategy=Kindred,
    client=KindredClient,
    settings=(STORE,),
    any_client=True,
)
