"""PerFed-CKT: each client distils from class probabilities that similar clients predict on public images.

Y. J. Cho, J. Wang, T. Chiruvolu, G. Joshi: Personalized Federated Learning for Heterogeneous Clients with
Clustered Knowledge Transfer. arXiv:2109.08119.

This is clustered co-distillation: models may differ between clients, and never leave them. Every client has a
private labelled set B_k and the same unlabelled public set P, in the same order. Clients and server exchange
"logits". In the paper, and here, these are softmax outputs: s_k, a row of N class probabilities for each of the
|P| public images. Client k minimises (Eq. 1)

    F_k(w) + lambda / |P| sum_{x in P} || sbar_k(x) - s(w, x) ||^2

| paper | here |
|---|---|
| Algorithm 1, lines 6 and 7: c-means on the logits received | `cluster_logits` |
| line 8: clients sampled without replacement, with probabilities in proportion to n_k | `PerFedCKT.default_sampling` |
| line 11, Eq. 4: the nearest centroid for the current model | `nearest_centroid` |
| lines 12 to 14, Eq. 2: tau steps on private and public mini-batches | `PerFedCKTClient.train`, `distillation_term` |
| line 3: the first logits, of models that have not been trained | round 0 |

Where the paper is silent or has two answers:
- Of m = C K clients a round, K counts those without data too, which take no part.
- Algorithm 1 samples clients by p_k, section 5 "a fraction of clients" at random for all methods compared. The first is
  the default here; with `sampling` "uniform" a round has the same clients as with the other methods.
- Samples of a mini-batch are drawn independently, so that a client with fewer than b samples takes part like any
  other.
- Private and public batches go through the model one after the other; batch normalisation sees both.
- With fewer distinct logits than clusters there are as many clusters as distinct logits.
- The logits of untrained models carry no information about the data. `warmup_rounds` replaces round 0 by rounds
  of training without the second term.
- The centroid of a cluster with one client is that client's logits; `min_cluster_size` avoids such centroids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any, TypeGuard, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore import log

from .client.training import channels_last
from .client.visit import Visit
from .engine.admission import Refused, Reply
from .engine.arguments import Shared
from .engine.collaboration import Collaboration
from .engine.introductions import UntilRestart
from .engine.layout import Layout
from .engine.strategy import PersonalizedStrategy
from .errors import Reportable
from .lazy import lazy
from .messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    MODEL_BYTES,
    NUM_CLASSES,
    NUM_PUBLIC,
    OBJECTIVE,
    PUBLIC_SET,
    SAMPLES_TRAINED,
    TRAIN_LOSS,
    TRAINED,
    ClientId,
    check,
    is_name,
    seed_for,
    to_record,
)
from .objectives import OBJECTIVES, Classes
from .registry import Method
from .settings import BY_SIZE, LOCAL_EPOCHS, LOCAL_STEPS, Setting, one_of, within

if TYPE_CHECKING:
    import sklearn.cluster as clustering
    import threadpoolctl
    import torch
else:
    clustering, threadpoolctl, torch = lazy("sklearn.cluster"), lazy("threadpoolctl"), lazy("torch")

LOGITS = "logits"
CENTROIDS = "centroids"

NUM_CLUSTERS = Setting(
    "num_clusters", 3, within(1, 1000), "clusters of clients (c); 1: all learn from the mean of all", trial=2
)
DISTILL_WEIGHT = Setting(
    "distill_weight",
    2.0,
    within(0, 10**6),
    "weight of the squared distance from the centroid's probabilities (lambda)",
    trial=0.5,
)
PUBLIC_BATCH_SIZE = Setting("public_batch_size", 128, within(1, 10**6), "public images per step (b')", trial=2)
WARMUP_ROUNDS = Setting(
    "warmup_rounds",
    0,
    within(0, 10**6),
    "rounds at the start without distillation; 0: a round first in which untrained models predict",
)
MIN_CLUSTER_SIZE = Setting(
    "min_cluster_size",
    1,
    within(1, 10**6),
    "clients that a cluster must have; smaller ones are merged into the nearest",
)
LOGITS_DTYPE = Setting("logits_dtype", "float32", one_of("float32", "float16"), "type in which probabilities are sent")

# Limits on numbers that clients report, which cannot be trusted.
MOST_PUBLIC = 10**6  # images, and classes
MOST_BYTES = 10**15

# Largest difference from 1 of the sum of an image's probabilities: rounding to float16 gives at most 5e-4.
SUM_TOLERANCE = 1e-3

# --- The mathematics ----------------------------------------------------------------------------------


def cluster_logits(logits: np.ndarray, num_clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Cluster clients by their logits with c-means (k-means); Algorithm 1, lines 6 and 7.

    Parameters
    ----------
    logits : ndarray, shape (m, P, N)
        A matrix for each client, in order of client.
    num_clusters : int
        c, 1 or more.
    seed : int
        Of k-means++; the best of its 10 starts is taken.

    Returns
    -------
    centroids : ndarray, shape (c', P, N), of the logits' type
        The mean of each cluster; c' is the smaller of c and the number of distinct matrices.
    assignment : ndarray of int, shape (m,)
        The cluster of each client, 0 to c' - 1, numbered in the order of their first clients.
    """
    check("num_clusters", num_clusters, num_clusters >= 1, "1 or more")
    points = logits.reshape(len(logits), -1)  # (m, P N)
    distinct = len({point.tobytes() for point in points})
    labels = np.zeros(len(points), dtype=np.int64)  # (m,)
    if min(num_clusters, distinct) > 1:
        # k-means depends on distances alone, and these are the same in the subspace that the points span.
        coordinates = np.linalg.qr(points.T.astype(np.float32, copy=False), mode="r").T  # type: ignore[attr-defined]  # (m, min(m, P N))
        means = clustering.KMeans(min(num_clusters, distinct), n_init=10, random_state=seed % 2**32)
        with threadpoolctl.threadpool_limits(1, user_api="openmp"):  # several threads add in no fixed order
            labels = means.fit_predict(coordinates)  # (m,)
    return centroids_of(logits, labels)


def centroids_of(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each cluster, with clusters numbered in the order of their first clients.

    Parameters
    ----------
    logits : ndarray, shape (m, P, N)
    labels : ndarray of int, shape (m,)
        Any number for each cluster.

    Returns
    -------
    As for `cluster_logits`.
    """
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    assignment = np.argsort(np.argsort(first))[inverse]  # (m,)
    means = [logits[assignment == k].mean(axis=0, dtype=np.float64) for k in range(len(first))]  # c' of (P, N)
    return np.stack(means).astype(logits.dtype), assignment


def merge_small_clusters(
    logits: np.ndarray, centroids: np.ndarray, assignment: np.ndarray, min_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Merge each cluster of fewer than `min_size` clients into the nearest one, the smallest first.

    Parameters
    ----------
    logits : ndarray, shape (m, P, N)
    centroids, assignment
        As from `cluster_logits`.
    min_size : int
        Clients that a cluster must have, 1 or more. A single cluster of all clients remains unchanged.

    Returns
    -------
    As for `cluster_logits`.
    """
    while len(centroids) > 1:
        sizes = np.bincount(assignment)  # (c',)
        smallest = int(sizes.argmin())
        if sizes[smallest] >= min_size:
            break
        others = np.delete(np.arange(len(centroids)), smallest)
        nearest = others[nearest_centroid(centroids[smallest], centroids[others])]
        centroids, assignment = centroids_of(logits, np.where(assignment == smallest, nearest, assignment))
    return centroids, assignment


def nearest_centroid(logits: np.ndarray, centroids: np.ndarray) -> int:
    """Return the index of the centroid nearest in squared l2 distance (Eq. 4); of equally near ones the first.

    Parameters
    ----------
    logits : ndarray, shape (P, N)
        The client's.
    centroids : ndarray, shape (c', P, N)
    """
    return int(np.square(centroids - logits).sum(axis=(1, 2), dtype=np.float64).argmin())  # of (c',)


def distillation_term(probabilities: torch.Tensor, centroid: torch.Tensor, distill_weight: float) -> torch.Tensor:
    """lambda / |P'| sum_{x in P'} || sbar(x) - s(w, x) ||^2 on a mini-batch P' (Eq. 1); its gradient is in Eq. 2.

    Parameters
    ----------
    probabilities, centroid : tensor, shape (b', N)
        s(w, x) and sbar(x).
    distill_weight : float
        lambda.

    Returns
    -------
    tensor, shape ()
    """
    return distill_weight * (centroid - probabilities).square().sum(dim=1).mean()


def floats_communicated(num_public: int, num_outputs: int, uploads: int, num_centroids: int) -> int:
    """Return |P| N (m + c), the floats of a round. As in the paper, centroids count once, as a broadcast."""
    return num_public * num_outputs * (uploads + num_centroids)


# --- The client ---------------------------------------------------------------------------------------


class PerFedCKTClient:
    """The client half: trains the model that the client keeps, and sends its predictions for the public set."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Algorithm 1, lines 11 to 15."""
        site, config = visit.site, visit.config
        if site.public is None:
            raise ValueError(
                Reportable(f"client {visit.client} has no public set (Site.public), which PerFed-CKT needs")
            )
        model = visit.own_model()
        public = channels_last(model, site.public)
        metrics: dict[str, float] = {}

        distill_weight, term = float(config.get(DISTILL_WEIGHT.key, 0.0)), None
        if CENTROIDS in visit.arrays:
            centroids = visit.arrays[CENTROIDS].astype("float32")  # (c', P, N)
            nearest = nearest_centroid(visit.predict(model, public), centroids)
            metrics["nearest-centroid"] = nearest
            target = torch.from_numpy(centroids[nearest]).to(visit.device)  # (P, N)
            draws = torch.Generator().manual_seed(visit.seed("public"))
            size = int(PUBLIC_BATCH_SIZE.read(config))
            visit.check_work(batch_size=size)

            def term() -> torch.Tensor:
                visit.compute[SAMPLES_TRAINED] += size
                batch = torch.randint(len(public), (size,), generator=draws).to(visit.device)
                return distillation_term(
                    visit.objective.predictions(model(public[batch]).float()), target[batch], distill_weight
                )

        if steps := int(config[LOCAL_STEPS.key]):  # none in round 0
            metrics[TRAIN_LOSS] = visit.train(model, epochs=0, steps=steps, term=term if distill_weight else None)
        logits = visit.predict(model, public).astype(str(LOGITS_DTYPE.read(config)))  # (P, N)
        if not np.isfinite(logits).all():
            raise ValueError(
                Reportable("the trained model's predictions are not finite; the client keeps its previous model")
            )
        metrics |= {**visit.evaluation(TRAINED, model), **visit.counts(), MODEL_BYTES: _bytes(model)}
        return RecordDict(
            {
                ARRAYS: to_record({LOGITS: logits}),
                METRICS: MetricRecord({**metrics}),
                CONFIG: ConfigRecord({PUBLIC_SET: site.fingerprint}),
            }
        )

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the model that the client keeps."""
        return RecordDict({METRICS: MetricRecord({**visit.separate_evaluation(visit.own_model())})})


def _bytes(model: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


# --- The server ---------------------------------------------------------------------------------------


PublicSet = tuple[str, int, int, str]
"""A client's public set and its predictions for it: fingerprint, |P|, N, and the name of the objective."""


class PerFedCKT(PersonalizedStrategy):
    """PerFed-CKT as a Flower strategy.

    `start` needs no model: give it an empty ArrayRecord. A client reports its public set when it first connects;
    clients with another one are excluded, and named in the log. Clients continue with the models that they keep:
    except in a simulation, a second `start` in the same Flower run does not begin with untrained models.

    Parameters
    ----------
    num_clusters : int (default: 3)
        c, 1 or more; 1 is plain co-distillation. The paper's best is 3.
    distill_weight : float (default: 2.0)
        lambda, 0 or more; 0 is local training.
    local_steps : int (default: 50)
        tau, 1 or more.
    public_batch_size : int (default: 128)
        b', 1 or more.
    warmup_rounds : int (default: 0)
        Rounds, 0 or more, that train without distillation first. With 0, as in the paper, a round 0 comes first, in
        which clients send the logits of their untrained models.
    min_cluster_size : int (default: 1)
        Least number of clients, 1 or more, whose logits a centroid averages. Smaller clusters are merged into the
        nearest one. Where fewer clients replied, no centroid is sent.
    logits_dtype : {"float32", "float16"}
        Type in which logits and centroids are sent.
    public_set : str, optional
        The fingerprint (`Site.fingerprint`) of the public set that clients must have. By default it is the most
        frequent set among the clients that connect first; at a tie, that of the first in order of client.
    **shared
        Arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "perfed-ckt"
    needs_shared_models = False
    mixes_updates = False
    clients_keep_state = True
    model_stays = True
    default_sampling = BY_SIZE
    STATE = (*PersonalizedStrategy.STATE, "public_set", "_centroids", "_cluster_of")

    def __init__(
        self,
        *,
        num_clusters: int = NUM_CLUSTERS.default,
        distill_weight: float = DISTILL_WEIGHT.default,
        local_steps: int = LOCAL_STEPS.default,
        public_batch_size: int = PUBLIC_BATCH_SIZE.default,
        warmup_rounds: int = WARMUP_ROUNDS.default,
        min_cluster_size: int = MIN_CLUSTER_SIZE.default,
        logits_dtype: str = LOGITS_DTYPE.default,
        public_set: str | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(**shared)
        self.num_clusters = NUM_CLUSTERS.check(num_clusters)
        self.distill_weight = DISTILL_WEIGHT.check(distill_weight)
        self.local_steps = LOCAL_STEPS.check(local_steps)
        self.public_batch_size = PUBLIC_BATCH_SIZE.check(public_batch_size)
        self.warmup_rounds = WARMUP_ROUNDS.check(warmup_rounds)
        self.min_cluster_size = MIN_CLUSTER_SIZE.check(min_cluster_size)
        self.logits_dtype = LOGITS_DTYPE.check(logits_dtype)
        self._expected = public_set

    @property
    def first_round(self) -> int:
        return 0 if self.warmup_rounds == 0 else 1

    def begin(self, initial_arrays: ArrayRecord) -> None:
        """Reset the state; `initial_arrays` is not used, because clients initialise their own models."""
        self.public_set: PublicSet | None = None
        self._received: dict[ClientId, np.ndarray] = {}  # (P, N) each, of the round in progress
        self._centroids: np.ndarray | None = None  # (c', P, N), of the last round with replies
        self._sent: int = 0  # number of centroids sent in the round in progress
        self._cluster_of: dict[ClientId, int] = {}

    def introduce(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        reasons = super().introduce(newcomers)
        stated = {client: _stated_set(about) for client, about in newcomers.items() if client not in reasons}
        if self.public_set is None:
            sets = [each for each in stated.values() if each is not None and self._expected in (None, each[0])]
            if not sets:
                wanted = f", expected {self._expected}" if self._expected else ""
                return reasons | {client: _lacking(each, wanted) for client, each in stated.items()}
            self.public_set = max(sets, key=sets.count)  # at a tie the first, which is that of the first client
            log(INFO, "kindred: clients must have %s", _described(self.public_set))
        for client, public_set in stated.items():
            if public_set != self.public_set:
                reasons[client] = _lacking(public_set, f", expected {_described(self.public_set)}")
        return reasons

    def newcomer_visits(self, rounds: int) -> int:
        """Return 2: the centroid nearest to a newcomer's predictions means little before its model is trained."""
        return 2

    @property
    def layout(self) -> Layout:  # type: ignore[override]  # known when the first client has reported its public set
        """Layout of the logits that clients send."""
        assert self.public_set is not None
        _, *shape, _ = self.public_set  # |P|, N
        return Layout({LOGITS: np.broadcast_to(np.zeros((), self.logits_dtype), shape)})

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {
            LOCAL_STEPS.key: self.local_steps if server_round > 0 else 0,
            DISTILL_WEIGHT.key: self.distill_weight,
            PUBLIC_BATCH_SIZE.key: self.public_batch_size,
            LOGITS_DTYPE.key: self.logits_dtype,
        }

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._received = {}
        withheld = server_round <= self.warmup_rounds
        record = ArrayRecord() if withheld else self.global_arrays()
        self._sent = 0 if withheld or self._centroids is None else len(self._centroids)
        return ((client, record) for client in clients)

    def inspect(self, client: ClientId, reply: Reply) -> None:
        assert self.public_set is not None  # the client has reported its own
        fingerprint, _, _, objective = self.public_set
        kind = OBJECTIVES.get(objective)
        if (theirs := reply.config.get(PUBLIC_SET)) != fingerprint:
            raise Refused(f"its public set is {theirs}, expected {fingerprint}")
        if kind is None or not kind.probabilities:
            return
        logits = reply.arrays[LOGITS]  # (P, N)
        if (lowest := logits.min()) < 0:
            raise Refused(f"logits of image {int(logits.min(axis=1).argmin())} hold {lowest:g}, allowed: 0 to 1")
        if not kind.has_classes:  # labels have probabilities of their own
            if (highest := logits.max()) > 1:
                raise Refused(f"logits of image {int(logits.max(axis=1).argmax())} hold {highest:g}, allowed: 0 to 1")
            return
        off = np.abs(logits.sum(axis=1, dtype=np.float64) - 1)  # (P,)
        if off.max() > SUM_TOLERANCE:
            image = int(off.argmax())
            raise Refused(
                f"logits of image {image} sum to {logits[image].sum(dtype=np.float64):g}, "
                f"allowed: 1 within {SUM_TOLERANCE:g}"
            )

    def take(self, client: ClientId, reply: Reply) -> None:
        self._received[client] = reply.arrays[LOGITS].astype(np.float32)

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        if self.public_set is None:  # no client has reported its public set yet
            return
        self.history.count(clusters=0)
        if answered:
            self._cluster(server_round, answered)
        _, num_public, num_outputs, _ = self.public_set
        floats = floats_communicated(num_public, num_outputs, len(answered), self._sent)
        sizes = [row.get(MODEL_BYTES) for row in self.history.open_rows()]
        known = [size for size in sizes if isinstance(size, int) and 0 <= size <= MOST_BYTES]
        fedavg = 2 * sum(known) if server_round > 0 else 0
        self.history.count(floats=floats, bytes_fedavg=fedavg)

    def _cluster(self, server_round: int, answered: Sequence[ClientId]) -> None:
        if len(answered) < self.min_cluster_size:
            log(
                WARNING,
                "kindred: round %d: no centroids, because %d clients replied and min_cluster_size is %d",
                server_round,
                len(answered),
                self.min_cluster_size,
            )
            self._centroids, self._cluster_of = None, {}
            return
        logits = np.stack([self._received.pop(client) for client in answered])  # (m, P, N)
        found = cluster_logits(logits, self.num_clusters, seed_for(self.seed, "clusters", server_round))
        self._centroids, assignment = merge_small_clusters(logits, *found, self.min_cluster_size)
        self._cluster_of = dict(zip(answered, assignment.tolist(), strict=True))
        self.history.count(clusters=len(self._centroids))
        for client, cluster in self._cluster_of.items():
            self.history.count(client, cluster=cluster)

    def global_arrays(self) -> ArrayRecord:
        """Return the centroids, which are all that the server has; empty while there are none."""
        if self._centroids is None:
            return ArrayRecord()
        return to_record({CENTROIDS: self._centroids.astype(self.logits_dtype)})

    def general_model(self, network: str = "") -> None:
        """Return None: no model reaches the server."""

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        """Return an empty record: a client evaluates the model that it keeps."""
        return ArrayRecord()

    def client_models(self) -> dict[ClientId, ArrayRecord]:
        """Return no models: they stay with the clients."""
        return {}

    def shared_rows(self) -> Collaboration:
        """Return, for each client, the clients' shares in the centroid of its cluster in the last round.

        A client whose logits are in no cluster of that round has weight 1 on itself.
        """
        clients = self.participants()
        members: dict[int, dict[ClientId, float]] = {}
        for client, k in self._cluster_of.items():
            members.setdefault(k, {})[client] = 1.0
        return Collaboration.by_row(clients, members, self._cluster_of)


def _stated_set(about: Mapping[str, Any]) -> PublicSet | None:
    """Return the public set that a client reports; None if it reports none or a malformed one."""
    fingerprint, size, num_outputs = (about.get(key) for key in (PUBLIC_SET, NUM_PUBLIC, NUM_CLASSES))
    objective = about.get(OBJECTIVE, Classes.name)
    if not (isinstance(fingerprint, str) and is_name(fingerprint) and isinstance(objective, str)):
        return None
    return (fingerprint, size, num_outputs, objective) if _is_size(size) and _is_size(num_outputs) else None


def _is_size(number: object) -> TypeGuard[int]:
    return isinstance(number, int) and 1 <= number <= MOST_PUBLIC


def _lacking(public_set: PublicSet | None, wanted: str) -> str:
    """Return why a client with another public set, or with none, cannot take part."""
    reason = f"it has {_described(public_set)}{wanted}"
    return UntilRestart(reason) if public_set is None else reason


def _described(public_set: PublicSet | None) -> str:
    if public_set is None:
        return "no public set"
    fingerprint, size, num_outputs, objective = public_set
    outputs = "classes" if objective == Classes.name else f"outputs ({objective})"
    return f"the public set {fingerprint} ({size} images) with {num_outputs} {outputs}"


METHOD = Method(
    title="PerFed-CKT",
    paper="Cho et al., 2021, arXiv:2109.08119",
    travels="class probabilities on public images, both ways",
    stays="its model",
    strategy=PerFedCKT,
    client=PerFedCKTClient,
    settings=(
        NUM_CLUSTERS,
        DISTILL_WEIGHT,
        LOCAL_STEPS,
        PUBLIC_BATCH_SIZE,
        WARMUP_ROUNDS,
        MIN_CLUSTER_SIZE,
        LOGITS_DTYPE,
    ),
    ignores=(LOCAL_EPOCHS,),
    models_travel=False,
    mixed_networks=True,
    needs_public_set=True,
)
