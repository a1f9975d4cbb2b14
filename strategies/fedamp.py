"""FedAMP and HeurFedAMP: each client trains from a weighted sum of all clients' models, most of similar ones.

Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang: Personalized Cross-Silo Federated Learning on
Non-IID Data. AAAI 2021, arXiv:2007.03797.

The objective (Eq. 1): min_W sum_i F_i(w_i) + lam * sum_{i<j} A(||w_i - w_j||^2), A(t) = 1 - exp(-t / sigma).
Round k, with the clients' models w_i of the round before:

    Eq. 1      `objective`           G(W), of the models after a round
    Eq. 5, 7   `attention_weights`   xi_ij = alpha_k A'(||w_i - w_j||^2), xi_ii = 1 - sum_{j != i} xi_ij
    Eq. 8      `cosine_weights`      xi_ij = (1 - xi_ii) softmax_{j != i}(sigma cos(w_i, w_j)), xi_ii given
    Eq. 5      `ClientModels.combinations`  u_i = sum_j xi_ij w_j, client i's personalised cloud model
    Eq. 6      the client            w_i = argmin F_i(w) + lam / (2 alpha_k) ||w - u_i||^2

Where we depart from the paper or it is silent:
- `sigma` "auto", FedAMP's default, is ours: in each round the median squared distance of two clients' models, over
  the clients online whose models are not far from all others (`median_distance`). The paper chooses a number from
  10 to 1e6 for each data set.
- Clients start from one model, in Algorithm 1 each from random numbers of its own. With `common_start` false each
  starts from the numbers of that model in another order, and the first cloud models are combined from these.
- Eq. 5 gives a convex combination for a small alpha_k only. Where the weights of the other clients sum to more
  than 1, they are scaled to sum to 1, and a warning is logged. The paper's experiments fix xi_ii instead, for
  both methods. This is `self_weight`; the others then share 1 - xi_ii in proportion to A'.
- Eq. 5 has A' where the gradient in Eq. 3 has 2 A'. We compute Eq. 5 as printed. With Eq. 6 this is the method
  of Eq. 3 and 4 with the step alpha_k / 2 and lambda / 2. So rounds with a small step minimise Eq. 1 with lambda / 2.
- lam / alpha_k grows without bound as alpha_k decays. It is sent up to `LARGEST_MU`, and in local training at most
  1 / learning rate acts: with a larger weight, a step would end beyond u_i.
- Weights are computed from logarithms: exp(-t / sigma) of every other client may underflow, and their
  proportions still matter.
- Eq. 6 is solved approximately by local epochs that start from u_i. At the paper's alpha_1 = 1e4 the proximal
  term has almost no effect; the collaboration comes from starting at u_i.
- An absent client keeps its last model, which the others do not receive while it is absent. When it returns, its
  cloud model is combined from its own model and those of the clients online.
- Distances and cosines use parameters only. Floating-point buffers are combined like parameters; integer buffers
  are the client's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
from flwr.app import ArrayRecord
from flwr.supercore import log

from .engine.admission import Reply
from .engine.arguments import StoredShared
from .engine.hooks import SideEvaluation
from .engine.layout import drawn_anew
from .engine.model_store import BLOCK
from .engine.stored import CloudModels
from .lazy import lazy
from .messages import METHODS, PROXIMAL_MU, ClientId, check, in_order, read_record, seed_for, to_record
from .registry import MODEL_BOTH_WAYS, Method
from .settings import A_SHARE, AUTO, STORE, TRUE_OR_FALSE, Range, Setting, above, or_auto, within

if TYPE_CHECKING:
    from scipy import special
else:
    special = lazy("scipy.special")

SelfWeight = float | np.ndarray | Literal["uniform"]
GROUPS = "groups"
FAR = 1e4  # in squared distances: a model 100 times as far from the others as the nearest one has no part in sigma
SIGMA = Setting(
    "sigma",
    AUTO,
    or_auto(above(0, 1e12)),
    "scale of the squared distance; auto: in each round its median over pairs of clients online",
    kind="float | str",
    trial=2.0,
)
COSINE_SIGMA = Setting("sigma", 100.0, above(0, 1e12), "scale of the cosine", trial=2.0)
OWN_PART = "0 to 1, uniform (1 / clients online), groups (1 / clients of its group)"
SELF_WEIGHT = Setting(
    "self_weight",
    0.2,
    Range(
        f"{OWN_PART}, or none (Eq. 5 as written)", lambda value: value in ("uniform", GROUPS, "none") or is_part(value)
    ),
    "share of a client's own model in its cloud model",
    kind="float | str",
    trial=0.3,
)
COSINE_SELF_WEIGHT = replace(
    SELF_WEIGHT, allowed=Range(OWN_PART, lambda value: value in ("uniform", GROUPS) or is_part(value))
)
ALPHA = Setting(
    "alpha", 1e4, above(0, 1e12), "step size of the collaboration; the proximal weight is lam / alpha", trial=10.0
)
ALPHA_DECAY = Setting("alpha_decay", 0.1, A_SHARE, "factor on alpha every alpha-decay-every rounds", trial=0.5)
ALPHA_DECAY_EVERY = Setting("alpha_decay_every", 30, within(1, 10**6), "rounds between two decays of alpha", trial=2)
LAM = Setting("lam", 1.0, within(0, 1e12), "weight of the collaboration term (lambda)")
COMMON_START = Setting(
    "common_start",
    True,
    TRUE_OR_FALSE,
    "whether all clients start from one model; false: each from random numbers of its own, as in Algorithm 1",
)
OBJECTIVE = Setting(
    "objective",
    False,
    TRUE_OR_FALSE,
    "whether the line of each round has G(W) of Eq. 1, for which clients evaluate their model on their training data",
)
LARGEST_MU = 1e38  # bound of the proximal weight: finite in float32, with which clients compute
TRAINING_DATA = "training-data"  # name of a client's own model, evaluated for F_i, in messages and in the history

Blocks = Callable[[], Iterator[np.ndarray]]
"""Returns an iterator over the columns of an (m, d) matrix, in blocks of shape (m, b)."""


def is_part(value: float | str) -> bool:
    """Return whether a value is a number from 0 to 1."""
    return not isinstance(value, str) and 0 <= value <= 1


# --- The mathematics ----------------------------------------------------------------------------------


def attention_weights(
    models: np.ndarray,
    alpha: float,
    sigma: float,
    self_weight: SelfWeight | None = None,
    online: np.ndarray | None = None,
) -> np.ndarray:
    """Return FedAMP's weights xi, Eq. 5 and 7.

    Parameters
    ----------
    models : ndarray, shape (m, d)
        The clients' parameters.
    alpha, sigma : float
        Step size alpha_k and scale of the squared distance, both more than 0.
    self_weight : float in [0, 1], ndarray of shape (m,), or "uniform", optional
        xi_ii, of each client if it is an array; "uniform" is 1 / (number of clients whose models i receives, and
        itself). None is Eq. 5 as written.
    online : ndarray of bool, shape (m,), optional
        Mask of the clients whose models the others receive; all by default.

    Returns
    -------
    ndarray, shape (m, m)
        Rows are non-negative and sum to 1.
    """
    return _attention(squared_distances(lambda: _blocks_of(models), len(models)), alpha, sigma, self_weight, online)


def cosine_weights(
    models: np.ndarray, sigma: float, self_weight: SelfWeight, online: np.ndarray | None = None
) -> np.ndarray:
    """Return HeurFedAMP's weights xi, Eq. 8; parameters and result as for `attention_weights`.

    A model of zeros has cosine 0 with every other.
    """
    return _cosine(cosines(lambda: _blocks_of(models), len(models)), sigma, self_weight, online)


def median_distance(distances: np.ndarray, online: np.ndarray | None = None) -> float:
    """Return the median of ||w_i - w_j||^2 over pairs of clients: sigma where it is "auto".

    Pairs of equal models do not count, nor those with a model that has diverged or is far from all others: its median
    distance is above FAR times the smallest one of a client.

    Parameters
    ----------
    distances : ndarray, shape (m, m)
        ||w_i - w_j||^2.
    online : ndarray of bool, shape (m,), optional
        Mask of the clients whose pairs count; all by default.

    Returns
    -------
    float
        Above 0; 1 if no pair counts, because all weights are then equal for every sigma.
    """
    known = distances if online is None else distances[np.ix_(online, online)]
    counts = (known > 0) & np.isfinite(known)  # (m, m)
    usual = np.array(
        [np.median(row[of]) if of.any() else np.inf for row, of in zip(known, counts, strict=True)]
    )  # (m,)
    near = usual <= FAR * usual.min(initial=np.inf)
    pairs = np.triu(counts & near[:, None] & near[None, :])  # i < j
    return float(np.median(known[pairs])) if pairs.any() else 1.0


def group_weights(groups: Mapping[ClientId, int]) -> dict[ClientId, float]:
    """Return xi_ii = 1 / (N_i + 1) of each client, N_i the number of other clients in its group."""
    sizes = Counter(groups.values())
    return {client: 1 / sizes[group] for client, group in groups.items()}


def objective(losses: np.ndarray, distances: np.ndarray, lam: float, sigma: float) -> float:
    """Return G(W) = sum_i F_i(w_i) + lam sum_{i<j} A(||w_i - w_j||^2), Eq. 1.

    Parameters
    ----------
    losses : ndarray, shape (m,)
        F_i(w_i).
    distances : ndarray, shape (m, m)
        ||w_i - w_j||^2.
    lam, sigma : float
        lambda, 0 or more, and the scale of the squared distance in A, above 0.
    """
    pairs = np.triu_indices(len(losses), 1)  # i < j
    return float(losses.sum() + lam * -np.expm1(-distances[pairs] / sigma).sum())


def squared_distances(blocks: Blocks, m: int) -> np.ndarray:
    """Return ||w_i - w_j||^2 of all pairs, shape (m, m), from one matrix product over blocks of columns.

    The first model is subtracted from all: distances stay the same, and cancellation loses little precision.
    It would lose much where two models are far nearer to each other than to the first, an outlier. The product
    is then computed again in double precision, with the model subtracted that is nearest to most others. A model too
    large for that has infinite distance.
    """
    reference = 0
    for dtype in (None, np.float64):
        gram = np.zeros((m, m))
        with np.errstate(over="ignore", invalid="ignore"):
            for block in blocks():  # (m, b)
                shifted = (block - block[reference]).astype(dtype or block.dtype, copy=False)  # (m, b)
                gram += shifted @ shifted.T  # (m, m)
            norms = np.diagonal(gram)  # (m,)
            sums = norms[:, None] + norms[None, :]  # (m, m)
            distances = sums - 2 * gram  # (m, m)
        near = (distances < 1e-4 * sums) & ~np.eye(m, dtype=bool)
        if np.isfinite(gram).all() and not near.any():
            break
        reference = int(np.median(np.where(np.isfinite(distances), distances, np.inf), axis=1).argmin())
    np.fill_diagonal(distances, 0)
    return np.where(np.isfinite(distances), np.maximum(distances, 0), np.inf)


def cosines(blocks: Blocks, m: int) -> np.ndarray:
    """Return cos(w_i, w_j) of all pairs, shape (m, m), from one matrix product over blocks of columns.

    A model of zeros, or one whose norm overflows, has cosine 0 with every other.
    """
    gram = np.zeros((m, m))
    with np.errstate(over="ignore", invalid="ignore"):
        for block in blocks():  # (m, b)
            gram += block @ block.T  # (m, m)
    norms = np.sqrt(np.diagonal(gram))  # (m,)
    norms = np.where(norms > 0, norms, np.inf)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(gram / norms[:, None] / norms[None, :], nan=0, posinf=0, neginf=0)  # (m, m)


def _attention(
    distances: np.ndarray, alpha: float, sigma: float, self_weight: SelfWeight | None, online: np.ndarray | None
) -> np.ndarray:
    # log(alpha A'(t)), A'(t) = exp(-t / sigma) / sigma
    scores = np.log(alpha) - np.log(sigma) - distances / sigma  # (m, m)
    if self_weight is not None:
        return _combination(scores, online, _others_share(self_weight, online, len(scores)))
    return _combination(scores, online, np.exp(np.minimum(_log_sums(scores, online), 0)))


def _cosine(cosine: np.ndarray, sigma: float, self_weight: SelfWeight, online: np.ndarray | None) -> np.ndarray:
    return _combination(sigma * cosine, online, _others_share(self_weight, online, len(cosine)))


def _sender_mask(m: int, online: np.ndarray | None) -> np.ndarray:
    """Mask of (receiver, sender) pairs, shape (m, m): true at [i, j] if i receives j's model and j is not i."""
    others = ~np.eye(m, dtype=bool)
    return others if online is None else others & online[None, :]


def _log_sums(scores: np.ndarray, online: np.ndarray | None) -> np.ndarray:
    """Return log sum_{j != i} exp(scores_ij) over the models that i receives, shape (m,); -inf if there are none."""
    return special.logsumexp(np.where(_sender_mask(len(scores), online), scores, -np.inf), axis=1)


def _others_share(self_weight: SelfWeight, online: np.ndarray | None, m: int) -> np.ndarray:
    """Return 1 - xi_ii, shape (m,)."""
    if isinstance(self_weight, str):  # "uniform"
        return 1 - 1 / (_sender_mask(m, online).sum(axis=1) + 1)
    return np.broadcast_to(1 - np.asarray(self_weight), m)


def _combination(scores: np.ndarray, online: np.ndarray | None, share: np.ndarray) -> np.ndarray:
    """Divide share_i among the clients that i receives models from, in proportion to exp(scores_ij); i has the rest.

    Parameters
    ----------
    scores : ndarray, shape (m, m)
    online : ndarray of bool, shape (m,), or None
        Mask of the clients whose models the others receive; None for all.
    share : ndarray, shape (m,), in [0, 1]

    Returns
    -------
    ndarray, shape (m, m)
    """
    others = _sender_mask(len(scores), online) & (scores > -np.inf)  # (m, m)
    alone = ~others.any(axis=1)  # (m,)
    with np.errstate(invalid="ignore"):  # a row without others is NaN until it is set to 0
        weights = share[:, None] * np.exp(special.log_softmax(np.where(others, scores, -np.inf), axis=1))  # (m, m)
    weights[alone] = 0
    np.fill_diagonal(weights, np.where(alone, 1, 1 - share))
    return weights


def _blocks_of(models: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, models.shape[1], BLOCK):
        yield models[:, start : start + BLOCK]


# --- The client ---------------------------------------------------------------------------------------
# Eq. 6 is local training from the received model with FedProx's proximal term mu/2 ||w - u_i||^2.
# mu = lam / alpha_k is in the message as "proximal-mu". `LocalTraining` in client/local_training.py does
# this, and so does any ClientApp written for FedProx.


# --- The server ---------------------------------------------------------------------------------------


class FedAMP(CloudModels):
    """FedAMP as a Flower strategy.

    Parameters
    ----------
    sigma : float, more than 0, or "auto" (default: "auto")
        Scale of the squared distance in A. A number is the paper's letter: 100 on MNIST, 10 on Fashion-MNIST and
        EMNIST, 1e6 on CIFAR-100. "auto" is ours: in each round, `median_distance` of the models from which the
        weights are computed, of the clients online; the round's line of the history has it as "sigma".
    alpha : float (default: 1e4)
        Step size alpha_1, more than 0.
    alpha_decay : float (default: 0.1)
        Factor, in (0, 1], on alpha every `alpha_decay_every` (default: 30) rounds.
    lam : float (default: 1.0)
        Weight lambda of the collaboration, 0 or more; the proximal weight is lam / alpha_k.
    self_weight : float in [0, 1], "uniform", "groups", or "none" or None (default: 0.2)
        xi_ii, as for `attention_weights`; None is Eq. 5 as written. "groups" is 1 / (N_i + 1) of the paper's
        experiments (`group_weights`).
    common_start : bool (default: True)
        Whether all clients start from the initial model. Otherwise each starts from that model's numbers in a random
        order of its own (`drawn_anew`), and the weights of the first round are computed from these models.
    groups : mapping of client ids to int, optional
        The clients' groups, for `self_weight` "groups". A client without a group is then excluded. N_i counts all
        other clients of a group, whether they take part in a round or not.
    objective : bool (default: False)
        Whether the line of each round in the history has G(W) after it (`objective`), as "objective", and its first
        sum, as "objective-losses". Only FedAMP has this argument. After a round, clients that trained evaluate their
        model on their training data; other clients' losses remain known. All clients that are connected or have taken
        part count; those that have not trained yet count with the model from which they start. A round in which the
        loss of one of them is unknown has no value, and no round has if `fraction_evaluate` is 0. An ordinary
        ClientApp, which evaluates on other data, is excluded. If `sigma` is "auto", each value has a sigma of its own,
        by the same models.
    **shared
        Arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "fedamp"

    def __init__(
        self,
        *,
        sigma: float | Literal["auto"] = SIGMA.default,
        alpha: float = ALPHA.default,
        alpha_decay: float = ALPHA_DECAY.default,
        alpha_decay_every: int = ALPHA_DECAY_EVERY.default,
        lam: float = LAM.default,
        self_weight: float | Literal["uniform", "groups", "none"] | None = SELF_WEIGHT.default,
        common_start: bool = COMMON_START.default,
        groups: Mapping[ClientId, int] | None = None,
        objective: bool = OBJECTIVE.default,
        **shared: Unpack[StoredShared],
    ) -> None:
        super().__init__(**shared)
        self.sigma = SIGMA.check(sigma)
        self.alpha = ALPHA.check(alpha)
        self.alpha_decay = ALPHA_DECAY.check(alpha_decay)
        self.alpha_decay_every = ALPHA_DECAY_EVERY.check(alpha_decay_every)
        self.lam = LAM.check(lam)
        own = SELF_WEIGHT.check("none" if self_weight is None else self_weight)
        self.self_weight = None if own == "none" else own
        check("self_weight", own, own != GROUPS or groups is not None, "groups only with the argument groups")
        self._group_weights = group_weights(groups or {}) if own == GROUPS else None
        self.common_start = COMMON_START.check(common_start)
        self.objective = OBJECTIVE.check(objective)

    STATE = (*CloudModels.STATE, "_scaled", "_losses")

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._scaled = False
        self._losses: dict[ClientId, float] = {}  # F_i(w_i) of the clients whose current model it is known for

    def introduce(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        reasons = {}
        for client, about in newcomers.items():
            if self._group_weights is not None and client not in self._group_weights:
                reasons[client] = "self-weight is groups, and its group is not known"
            elif self.objective and METHODS not in about:
                reasons[client] = "its ClientApp reports no loss on training data; use that of kindred.make_client_app"
        return reasons | super().introduce(newcomers)

    def newcomer_visits(self, rounds: int) -> int:
        """Return 2: a client's cloud model is computed from the model in its first reply."""
        return 2

    def first_model(self, client: ClientId) -> ArrayRecord:
        if self.common_start:
            return self.initial
        seed, parameters = seed_for(self.seed, "start", client), self.layout.parameters
        return to_record(drawn_anew(read_record(self.initial), seed, parameters))

    def alpha_at(self, server_round: int) -> float:
        """Return alpha_k, decayed once every `alpha_decay_every` rounds, until lam / alpha_k is `LARGEST_MU`."""
        alpha = self.alpha * self.alpha_decay ** (max(server_round - 1, 0) // self.alpha_decay_every)
        return max(alpha, max(self.lam, 1.0) / LARGEST_MU)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {PROXIMAL_MU: self.lam / self.alpha_at(server_round)}

    def cloud_weights(self, server_round: int, clients: Sequence[ClientId]) -> tuple[list[ClientId], np.ndarray]:
        # W^0 are the models from which clients start. If they are equal, so are all of their combinations.
        online = {*(self.online or ([] if self.common_start else clients))}
        senders = in_order({*online, *clients}) if online else []
        if not senders:
            return [], np.zeros((len(clients), 0))
        weights = self._xi(senders, np.array([client in online for client in senders]), server_round)  # (m, m)
        row_of = {client: row for row, client in enumerate(senders)}
        return senders, weights[[row_of[client] for client in clients]]

    def _xi(self, senders: Sequence[ClientId], online: np.ndarray, server_round: int) -> np.ndarray:
        """Return the weights of these m clients, (m, m); `online`, (m,), masks those whose models others receive."""
        distances = self._distances(senders)
        sigma, alpha = self._sigma(distances, online), self.alpha_at(server_round)
        if self.sigma == AUTO:
            self.history.count(sigma=sigma)
        weights = _attention(distances, alpha, sigma, self._self_weights(senders), online)
        if self.self_weight is None and not self._scaled and (np.diagonal(weights)[online] == 0).any():
            log(
                WARNING,
                "kindred: with alpha %g and sigma %g the weights of the other clients sum to more than 1 (Eq. 5) "
                "and are scaled to sum to 1; to avoid this, set a smaller alpha or a self_weight",
                alpha,
                sigma,
            )
            self._scaled = True
        return weights

    def _distances(self, clients: Sequence[ClientId]) -> np.ndarray:
        return squared_distances(lambda: self._parameters(clients), len(clients))

    def _sigma(self, distances: np.ndarray, online: np.ndarray | None = None) -> float:
        return median_distance(distances, online) if self.sigma == AUTO else self.sigma

    def _self_weights(self, clients: Sequence[ClientId]) -> SelfWeight | None:
        """Return xi_ii of these clients, in a form that the mathematics takes."""
        if self._group_weights is not None:
            return np.array([self._group_weights[client] for client in clients])
        return self.self_weight

    def _parameters(self, clients: Sequence[ClientId]) -> Iterator[np.ndarray]:
        return (block for _, block in self.models.blocks(clients, self.layout.num_parameters))

    def take(self, client: ClientId, reply: Reply) -> None:
        super().take(client, reply)
        self._losses.pop(client, None)

    def side_evaluations(self, server_round: int) -> Iterator[SideEvaluation]:
        """Yield the models for which the objective needs a loss that is not known."""
        if not self.objective:
            return
        self.welcome(self.clients())
        for client in self.models:
            if client not in self._losses:
                yield SideEvaluation(client, TRAINING_DATA, self.models[client])

    def take_side_loss(self, client: ClientId, name: str, loss: float) -> None:
        self._losses[client] = loss
        clients = list(self.models)
        if len(self._losses) == len(clients):
            distances = self._distances(clients)
            losses = np.array([self._losses[client] for client in clients])  # (m,)
            value = objective(losses, distances, self.lam, self._sigma(distances))
            self.history.count(objective=value, objective_losses=float(losses.sum()))


class FedAMPShared(StoredShared, total=False):
    """Arguments of `FedAMP` that have the same meaning in `HeurFedAMP`."""

    alpha: float
    alpha_decay: float
    alpha_decay_every: int
    lam: float
    common_start: bool
    groups: Mapping[ClientId, int] | None


class HeurFedAMP(FedAMP):
    """HeurFedAMP as a Flower strategy: FedAMP with cosine similarity, for deep networks.

    Parameters
    ----------
    sigma : float (default: 100)
        Scale of the cosine, more than 0. The paper: 25 on MNIST, 100 on Fashion-MNIST, 50 on EMNIST, 10 on
        CIFAR-100.
    self_weight : float in [0, 1], "uniform" or "groups" (default: 0.2)
        xi_ii, as for `FedAMP`.
    **shared
        Arguments of `FedAMP`, except `objective`: Eq. 1 has no A for cosines.
    """

    name = "heurfedamp"

    def __init__(
        self,
        *,
        sigma: float = COSINE_SIGMA.default,
        self_weight: float | Literal["uniform", "groups"] = COSINE_SELF_WEIGHT.default,
        **shared: Unpack[FedAMPShared],
    ) -> None:
        sigma, self_weight = COSINE_SIGMA.check(sigma), COSINE_SELF_WEIGHT.check(self_weight)
        super().__init__(sigma=sigma, self_weight=self_weight, objective=False, **shared)

    def _xi(self, senders: Sequence[ClientId], online: np.ndarray, server_round: int) -> np.ndarray:
        own = self._self_weights(senders)
        assert own is not None  # COSINE_SELF_WEIGHT does not allow "none"
        cosine = cosines(lambda: self._parameters(senders), len(senders))  # (m, m)
        return _cosine(cosine, self.sigma, own, online)


FEDAMP = Method(
    title="FedAMP",
    paper="Huang et al., AAAI 2021, arXiv:2007.03797",
    travels=MODEL_BOTH_WAYS,
    strategy=FedAMP,
    settings=(SIGMA, SELF_WEIGHT, ALPHA, ALPHA_DECAY, ALPHA_DECAY_EVERY, LAM, COMMON_START, OBJECTIVE, STORE),
)
HEURFEDAMP = replace(
    FEDAMP,
    title="HeurFedAMP",
    strategy=HeurFedAMP,
    settings=(COSINE_SIGMA, COSINE_SELF_WEIGHT, ALPHA, ALPHA_DECAY, ALPHA_DECAY_EVERY, LAM, COMMON_START, STORE),
)
