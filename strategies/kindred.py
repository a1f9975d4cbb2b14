"""Kindred: each client starts from the mean of all models where that suffices, otherwise from similar clients' mean.

This method is this library's own. docs/kindred.md gives the reasons for each step, the results and the alternatives
that were tried. It has no setting to choose per data set. w_i is client i's model after its last training, n_i its
number of samples. A round:

| step | here |
|---|---|
| o_i = log(K pi_i), pi_i the proportions of the client's K classes, by its labels | `log_proportions` |
| a client adds o_i / 2 to its logits to train or predict, and subtracts it from what it sends | `Adjustment` |
| S_ij = cos(w_i - wbar, w_j - wbar), wbar the mean model | `centred_cosines` |
| P_ij = softmax_{j != i}(SHARPNESS S_ij + log n_j): weights of similar clients, i's neighbours | `neighbour_weights` |
| v_i = sum_j P_ij w_j, of the neighbours; g_i = sum_{j != i} n_j w_j / sum_{j != i} n_j, of all | `probe_weights` |
| every second round: trained clients report l(v_i), l(g_i) on their data, with o_i added | `KindredClient.evaluate` |
| other rounds: up to a tenth of the data is held out; later, its losses from u_i to w_i | `KindredClient.train` |
| t: the best place from u_i (0) to w_i (1) by these losses | `smoothed_divergence`, `place_probabilities` |
| q_i: how much more the loss of v_i decreases than that of g_i | `neighbours_ahead` |
| a: near 1 where q, the median of the q_i, or t is near 1, by z = 1 - (1 - q) (1 - t) | `neighbour_share` |
| N_i = sum_j P_ij n_j / sum_j P_ij^2, the number of samples that v_i represents | `samples_behind` |
| c_i = n_i / (n_i + N_i exp(-l(v_i))), the share of a client's own model | `own_share` |
| G = g + MOMENTUM (g - g'), g the mean of all models, g' its value in the round before | `Momentum` |
| u_i = (1 - a) G + a ((1 - c_i) v_i + c_i w_i) | `start_weights` |
| the client trains from u_i, with smoothed labels and FedProx's term: the next w_i | `KindredClient.train` |
| at the end of ten rounds or more: w_i is its mean over the last two rounds, if i trained in both | `take` |
| its personal model is (1 - t) u_i + t w_i, where u_i is newer than w_i | `between` |

The parts are in `kindred.parts`: the adjustment of logits (`logit_adjustment`), t (`kindred_places`), momentum
(`kindred_momentum`) and the record of the reported losses (`kindred_losses`). Smoothed labels are of Szegedy et al.,
CVPR 2016, arXiv:1512.00567; the proximal term of Li et al., MLSys 2020, arXiv:1812.06127; momentum at the server of Hsu
et al., 2019, arXiv:1909.06335, here in Nesterov's form.

Absent clients keep their last model, and it remains in their neighbours' means. As in FedAvg, g is over the clients
that trained in the last round. At the end nothing is probed and no sample is held out, because no later round would use
the reports. With fewer than four rounds a and t remain one half. Losses are cross-entropies in nats, a mean over
samples. Only parameters count in cosines and have momentum. Floating-point buffers are combined like parameters;
integer buffers are the client's own. The adjustment changes the bias that is added to the logits; a network without
such a bias is not adjusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from .client.local_training import LocalTraining
from .client.visit import Visit
from .engine.admission import Reply
from .engine.computed_models import ComputedModels
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
    TRAINED,
    ClientId,
    in_order,
    read_record,
    to_record,
)
from .parts.kindred_losses import ReportedLosses
from .parts.kindred_momentum import Momentum
from .parts.kindred_places import (
    FOLD_LOSSES,
    HOLDS_OUT,
    PlaceFilter,
    between,
    check_fold_losses,
    fold_losses,
    held_out_samples,
    probe_samples,
)
from .parts.logit_adjustment import Adjustment, check_report
from .registry import Method
from .settings import BATCH_SIZE, LOCAL_EPOCHS, LOCAL_STEPS, STORE

if TYPE_CHECKING:
    from scipy import special
else:
    special = lazy("scipy.special")

SHARPNESS = 10.0
PRIOR = 0.5
"""Prior strength, in nats of loss decrease, in favour of a global/neighbour ratio of 1/2."""

TAIL = 10  # a run of this many rounds or more ends with the mean of each client's models of the last two rounds

ADJUSTMENT = 0.5  # share of o_i that is added to the logits of models that clients train or use
PROBE_ADJUSTMENT = 1.0  # share of o_i that is added to the logits of probed models
SMOOTHING = 0.1  # share of each label that is spread over all classes in training
PROXIMAL = 0.01  # weight of the proximal term, mu/2 times the squared distance from u_i

NEIGHBOUR_MEAN, GLOBAL_MEAN = "kin", "all"  # names of the probes v_i and g_i, in messages and in the history
LAST = "last"  # name under which a client keeps its model after training, with the next two:
HELD_OUT = "left-out"  # indices of the samples that were held out
TRAINED_IN = "trained-in"  # round of that training; in a message, the round of the client's model at the server, or 0
KEPT = "kept-share"  # t
WORK = (LOCAL_EPOCHS.key, LOCAL_STEPS.key, BATCH_SIZE.key)  # settings that determine how much a client trains

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
        differences = block - block.mean(axis=0)  # (m, b)
        products += differences[rows] @ differences.T  # (r, m)
        squares += np.einsum("mb,mb->m", differences, differences)  # (m,)
    norms = np.where(squares > 0, np.sqrt(squares), np.inf)  # (m,)
    return products / norms[rows, None] / norms[None, :]  # (r, m)


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
        Rows sum to 1, or are 0 where there is no other client.
    """
    scores = np.where(own, -np.inf, SHARPNESS * cosines + np.log(samples))  # (r, m)
    alone = own.all(axis=1, keepdims=True)  # (r, 1)
    return np.where(alone, 0.0, special.softmax(np.where(alone, 0.0, scores), axis=1))


def probe_weights(neighbours: np.ndarray, latest: np.ndarray, own: np.ndarray) -> dict[str, np.ndarray]:
    """Return the mixing weights of v_i and g_i, each of shape (r, m); client i's own weight is 0 in both.

    Parameters
    ----------
    neighbours, own : ndarray, shape (r, m)
        P and the columns of the rows' clients, as for `neighbour_weights`.
    latest : ndarray, shape (m,)
        n_j of the clients that trained in the last round, 0 for the others. For each row, at least one of these
        clients must be another than the row's.
    """
    others = np.where(own, 0.0, latest)  # (r, m)
    return {NEIGHBOUR_MEAN: neighbours, GLOBAL_MEAN: others / others.sum(axis=1, keepdims=True)}


def neighbours_ahead(first: Mapping[str, float], last: Mapping[str, float]) -> float:
    """Return q_i = 1 - (f(g) + PRIOR / 2) / (max(f(v), f(g)) + PRIOR), f the decrease of log loss, at least 0.

    Parameters
    ----------
    first, last : mapping
        A client's first and last reported losses of both probes, above 0.

    Returns
    -------
    float
        In (0, 1). One half before any decrease, near 0 where both losses decrease alike, near 1 where only v_i's does.
    """
    falls = {probe: max(float(np.log(first[probe] / last[probe])), 0.0) for probe in (NEIGHBOUR_MEAN, GLOBAL_MEAN)}
    return 1 - (falls[GLOBAL_MEAN] + PRIOR / 2) / (max(falls.values()) + PRIOR)


def neighbour_share(ahead: Sequence[float], kept: float) -> float:
    """Return a = z^2 / (z^2 + (1 - z)^2), z = 1 - (1 - q) (1 - t), q the median of the q_i.

    Parameters
    ----------
    ahead : sequence of float
        q_i of the clients whose losses have changed since their first report; without any, q is 1/2.
    kept : float
        t, in [0, 1]; 0 before the first report.

    Returns
    -------
    float
        In [0, 1].
    """
    q = float(np.median(ahead)) if len(ahead) else 0.5
    z = 1 - (1 - q) * (1 - kept)
    return z**2 / (z**2 + (1 - z) ** 2)


def samples_behind(neighbours: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the number of samples that the mean of i's neighbours represents, N_i = sum_j P_ij n_j / sum_j P_ij^2.

    It is the sum of all n_j where P_ij is proportional to n_j, and n_j where P_ij is 1 for a single j.

    Parameters
    ----------
    neighbours : ndarray, shape (r, m)
        Rows sum to 1, or are 0.
    samples : ndarray, shape (m,)

    Returns
    -------
    ndarray, shape (r,)
        0 for a row of zeros.
    """
    squares = np.square(neighbours).sum(axis=1)  # (r,)
    return neighbours @ samples / np.where(squares > 0, squares, np.inf)


def own_share(neighbours: np.ndarray, samples: np.ndarray, own: np.ndarray, likelihoods: np.ndarray) -> np.ndarray:
    """Return the share of a client's own model, c_i = n_i / (n_i + N_i exp(-l(v_i))).

    Parameters
    ----------
    neighbours : ndarray, shape (r, m)
    samples : ndarray, shape (m,)
        n_j, above 0.
    own : ndarray of bool, shape (r, m)
        True in the column of the row's client; nowhere, if the client has no model yet.
    likelihoods : ndarray, shape (r,)
        exp(-l(v_i)), in [0, 1].

    Returns
    -------
    ndarray, shape (r,)
        1 where there is no other client, 0 for a client that has no model yet.
    """
    mine = own @ samples  # (r,)
    others = samples_behind(neighbours, samples) * likelihoods  # (r,)
    return np.where(mine > 0, mine / np.where(mine > 0, mine + others, 1), 0.0)


def start_weights(
    neighbours: np.ndarray, latest: np.ndarray, own: np.ndarray, share: float, own_shares: np.ndarray
) -> np.ndarray:
    """Return the mixing weights of (1 - a) g + a ((1 - c_i) v_i + c_i w_i), given a and c_i.

    The first three arguments are as for `probe_weights`; g has no momentum here.

    Returns
    -------
    ndarray, shape (r, m)
        Rows sum to 1. A client without a model gets g; where there is no other client, a client gets its own model.
    """
    mean_of_all = latest / latest.sum()  # (m,)
    c = own_shares[:, None]  # (r, 1)
    known = own.any(axis=1, keepdims=True)  # (r, 1)
    return np.where(known, (1 - share) * mean_of_all + share * ((1 - c) * neighbours + c * own), mean_of_all)


# --- The client ---------------------------------------------------------------------------------------


class KindredClient:
    """The client half: local training, and the losses from which the server computes a, c_i and t.

    An ordinary ClientApp also works. It evaluates the probes on its evaluation data, holds no samples out, and does not
    adjust its logits. It smooths labels and adds the proximal term if it follows the settings for these.
    """

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train from u_i; evaluate u_i, the trained model and the personal model.

        The personal model lies between u_i and the last w_i. The reply reports the losses of models between these two
        on samples that the last training did not see.
        """
        adjustment = Adjustment.of(visit, ADJUSTMENT)
        visit = replace(visit, arrays=adjustment.added(visit.arrays))
        last = visit.state.load(LAST) or {}
        unseen = last.pop(HELD_OUT, np.zeros(0, int))
        if not np.array_equal(last.pop(TRAINED_IN, -1), visit.config[TRAINED_IN]):
            last, unseen = visit.arrays, unseen[:0]  # the server has a different model, or none
        reported = {**adjustment.report(), **fold_losses(visit, last, unseen)}
        personal = visit.model(between(visit.arrays, last, float(visit.config[KEPT])))
        metrics = visit.evaluation(BETWEEN, personal) | visit.counts()
        held_out = held_out_samples(visit)
        if len(held_out):
            rest = np.setdiff1d(np.arange(len(visit.site.train[1])), held_out)
            visit = replace(visit, site=replace(visit.site, train=visit.samples_at(rest)))
        trained, others = LocalTraining.trained(visit)
        visit.state.save(LAST, {**trained, TRAINED_IN: np.array(visit.config[SERVER_ROUND]), HELD_OUT: held_out})
        sent = to_record(adjustment.removed(trained))
        return RecordDict({ARRAYS: sent, METRICS: MetricRecord({**others, **metrics}), CONFIG: ConfigRecord(reported)})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Report the loss of a probed model on some of the training data; evaluate any other model on the test data."""
        if PROBE not in visit.config:
            if not visit.config[TRAINED_IN]:  # the server adjusts the personal models of clients that have trained
                visit = replace(visit, arrays=Adjustment.of(visit, ADJUSTMENT).added(visit.arrays))
            return LocalTraining.evaluate(visit)
        samples = probe_samples(visit)
        loss = visit.loss(visit.model(Adjustment.of(visit, PROBE_ADJUSTMENT).added(visit.arrays)), samples)
        return RecordDict({METRICS: MetricRecord({"loss": loss, NUM_EXAMPLES: len(samples[1])})})


# --- The server ---------------------------------------------------------------------------------------


class Kindred(CloudModels):
    """Kindred as a Flower strategy. It has no settings of its own.

    Where `fraction_evaluate` is 0, nothing is probed: q is 1/2, so a is one half, or more if t is above 0.

    Parameters
    ----------
    **shared
        Arguments of `StoredModels`.
    """

    name = "kindred"
    personal = BETWEEN
    newcomer_result = TRAINED
    clients_keep_state = True
    STATE = (*CloudModels.STATE, "_samples", "_trained_in", "_share", "_losses", "_adjustments", "_places", "_momentum")

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._samples: dict[ClientId, float] = {}  # n_i of the clients that have trained
        self._trained_in: dict[ClientId, int] = {}  # the last round in which each of them trained
        self._share = 0.5  # a
        self._losses = ReportedLosses((NEIGHBOUR_MEAN, GLOBAL_MEAN))
        self._places = PlaceFilter()  # its mean is t
        self._momentum = Momentum(self.layout)
        self._adjustments: dict[ClientId, dict[str, Any]] = {}  # reports of the clients that adjust their logits

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {**super().round_config(server_round, client), TRAINED_IN: self._trained_in.get(client, 0)}

    def _holds_out(self, server_round: int) -> bool:
        return server_round % 2 == 0 and 0 < server_round < self.last_round - 1

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._work = {key: config[key] for key in WORK if key in config}
        # Reported losses take effect here, not at once: until now, personal models were to stay as evaluated.
        self._losses.update()
        self._places.update()
        ahead = [neighbours_ahead(first, last) for first, last in self._losses.changes(self.roster.nodes)]
        self._share = neighbour_share(ahead, 0.0 if self._places.probabilities is None else self._places.mean)
        training = {
            KEPT: self._places.mean,
            HOLDS_OUT: self._holds_out(server_round),
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
        """Yield combinations of models whose share of g has momentum.

        These are the starts (`kept` is 0), or models between the starts and the clients' own, at t = `kept`.
        """
        if self._momentum.moved is None or not senders:
            yield from super().clouds(clients, senders, rows)
            return
        known = set(senders)
        for client, model in zip(clients, self.models.combinations(rows, senders), strict=False):
            self._momentum.advance(model, (1 - kept) * (1 - self._share) if client in known else 1.0)
            yield self.models.combined_record(model, client)

    def _starts(self, clients: Sequence[ClientId]) -> tuple[list[ClientId], np.ndarray, np.ndarray]:
        """Return the m clients that have trained, in order, and u_i's mixing weights and `own`, (r, m) each."""
        senders, samples, latest = self._trained()
        neighbours, own = self._neighbour_weights(clients, senders, samples)
        if not senders:
            return senders, neighbours, own
        own_shares = own_share(neighbours, samples, own, self._losses.likelihoods(NEIGHBOUR_MEAN, clients))
        return senders, start_weights(neighbours, latest, own, self._share, own_shares), own

    def _trained(self) -> tuple[list[ClientId], np.ndarray, np.ndarray]:
        """Return the m clients that have trained, in order, with n_j, (m,), and `latest`, (m,)."""
        senders = [client for client in in_order(self._samples) if client not in self.history.left_out]
        samples = np.array([self._samples[client] for client in senders])  # (m,)
        rounds = np.array([self._trained_in[client] for client in senders])  # (m,)
        return senders, samples, np.where(rounds == rounds.max(initial=0), samples, 0.0)

    def _neighbour_weights(
        self, clients: Sequence[ClientId], senders: Sequence[ClientId], samples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return P and `own` of these clients, (r, m) each, given the clients that have trained (`senders`)."""
        place = {client: i for i, client in enumerate(senders)}
        known = [i for i, client in enumerate(clients) if client in place]
        rows = [place[clients[i]] for i in known]
        own = np.zeros((len(clients), len(senders)), bool)  # (r, m)
        own[known, rows] = True
        neighbours = np.zeros(own.shape)  # (r, m)
        if known:
            blocks = (block for _, block in self.models.blocks(senders, self.layout.num_parameters))
            neighbours[known] = neighbour_weights(centred_cosines(blocks, rows, len(senders)), samples, own[known])
        return neighbours, own

    def inspect(self, client: ClientId, reply: Reply) -> None:
        check_report(reply.config, self.layout)
        check_fold_losses(reply.config)

    def take(self, client: ClientId, reply: Reply) -> None:
        averaged = self.last_round >= TAIL and self._trained_in.get(client) == self.last_round - 1
        before = self.models.row(client).copy() if averaged else None  # (d,)
        super().take(client, reply)
        if before is not None:
            self.models.row(client)[:] = before / 2 + self.models.row(client) / 2
        self._samples[client] = reply.number(self.weighted_by_key)
        if FOLD_LOSSES in reply.config and self._holds_out(self._trained_in.get(client, 0)):
            self._places.add(client, np.array(reply.config[FOLD_LOSSES], float))
        self._adjustments[client] = Adjustment.read(reply.config).report()

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        super().end_round(server_round, answered)
        last = max(self._trained_in.values(), default=0)
        again = {client for client in answered if self._trained_in.get(client) == last}
        self._trained_in |= dict.fromkeys(answered, server_round)
        senders, _, latest = self._trained()
        if server_round == self.last_round:
            self._momentum.stop()  # no later training would correct what momentum overshoots
        elif answered and senders:
            share = float(latest @ [client in again for client in senders] / latest.sum())
            self._momentum.update(self._mean_of(senders, latest), share)
        self.history.count(kin_share=self._share, kept_share=self._places.mean)

    def _mean_of(self, senders: Sequence[ClientId], latest: np.ndarray) -> np.ndarray:
        """Return g, shape (d,); valid until the next combination is computed."""
        return next(self.models.combinations(latest[None, :] / latest.sum(), senders))

    def side_evaluations(self, server_round: int) -> Iterator[SideEvaluation]:
        """Yield v_i and g_i of the clients that trained in this round, in every second round before the last."""
        clients = [client for client in in_order(self._trained_in) if self._trained_in[client] == server_round]
        # With two clients g_i is the other client's model, as v_i is.
        if server_round % 2 == 0 or server_round >= self.last_round or len(clients) < 3:
            return
        senders, samples, latest = self._trained()
        neighbours, own = self._neighbour_weights(clients, senders, samples)
        for probe, rows in probe_weights(neighbours, latest, own).items():
            for client, record in zip(clients, super().clouds(clients, senders, rows), strict=False):
                yield SideEvaluation(client, probe, record, self._work)

    def take_side_loss(self, client: ClientId, name: str, loss: float) -> None:
        self._losses.add(client, name, loss)

    def global_arrays(self) -> ArrayRecord:
        """Return g, the mean of the models of the clients that trained in the last round, weighted by samples."""
        senders, _, latest = self._trained()
        if not senders:
            return self.initial
        return self.models.combined_record(self._mean_of(senders, latest), senders[0])

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        return next(self.personal_models([client]))

    def personal_models(self, clients: Sequence[ClientId]) -> Iterator[ArrayRecord]:
        """Yield the model between each client's next start and its own model; for an excluded client, its own model."""
        if self._samples:  # before that, every client has the initial model
            self.welcome(clients)
        senders, starts, own = self._starts(clients)
        known = own.any(axis=1, keepdims=True)  # (r, 1)
        kept = self._places.mean
        rows = np.where(known, (1 - kept) * starts + kept * own, starts)  # (r, m)
        for client, record in zip(clients, self.clouds(clients, senders, rows, kept), strict=False):
            mine = self.models[client] if client in self._samples and client not in senders else record
            adjustment = Adjustment.read(self._adjustments.get(client, {}))
            yield mine if adjustment.name is None else to_record(adjustment.added(read_record(mine)))

    def client_models(self) -> Mapping[ClientId, ArrayRecord]:
        return ComputedModels(in_order(self._samples), self.personal_models)


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
