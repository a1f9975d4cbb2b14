"""Clustered FL: federated averaging within clusters, which are divided where their clients' updates disagree.

F. Sattler, K.-R. Müller, W. Samek: Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization
Under Privacy Constraints. IEEE Transactions on Neural Networks and Learning Systems 32(8), 2021, arXiv:1910.01991.

All clients start in one cluster. Every cluster has a model, which its clients train. Client i's update dW_i is the
trained model minus the model that it was sent. A round:

    `update_norms`         ||sum_i n_i/n dW_i|| over the clients of a cluster, and ||dW_i||
    `largest_coordinates`  max_k |dW_ik|, which takes the place of ||dW_i|| with the criterion "coordinate"
    `is_to_be_divided`     the first is below eps1 and the largest of the others above eps2: the cluster's model has
                           converged, but does not suit all of its clients
    `fedamp.cosines`       alpha_ij = cos(dW_i, dW_j)
    `optimal_bipartition`  the two parts for which max alpha_ij over pairs across the cut is smallest: Algorithm 1
    `nearest_part`         the part of a client that was absent when its cluster was divided: it trains the model that
                           was divided, and joins the part that has the update nearest in angle to its own

Both parts continue from the mean over the whole cluster, each on its own, and may be divided again. With eps1 = 0 no
cluster is divided, and this is FedAvg. The norms depend on network, data and step size. The history has them
(`mean-update-norm`, `update-norm` and, with the criterion "coordinate", `largest-coordinate`), to help choose eps1 and
eps2.

What the paper leaves open, and where we or others depart from it:
- Algorithm 1 merges the most similar clients until two groups are left. This is exactly single linkage. The authors'
  code divides by complete linkage; this implementation follows the paper.
- Their code also averages each part separately in the round in which the cluster is divided. Here, as in the paper's
  recursion, both parts start from the model of the whole cluster.
- Their code divides only clusters of more than two clients, after round 20. The paper has no such limits.
- With the criterion "coordinate" eps2 bounds the largest absolute coordinate of the clients' updates. This is not the
  paper's criterion, but that of FedEM's public code (github.com/omarfoq/FedEM, `ClusteredAggregator`), which others
  have used as a baseline, with eps1 0.4 and eps2 1.6. There the norm is taken over an axis of length one. Its eps1
  bounds the L2 norm of the mean update, as here, but all clients have the same weight in that mean.
- The paper's recursion has one more condition: sqrt((1 - alpha_cross) / 2) > gamma_max. alpha_cross is the largest
  similarity across the cut; gamma_max bounds how far clients' gradients lie from those of their distribution. Such a
  bound is not known in practice, and there is none here. The results have each cut's alpha_cross, which shows the cuts
  that a given gamma_max would have allowed.
- In the paper all clients reply in every round. Here norms and cosines are over the clients that replied. A member that
  was absent when its cluster was divided is placed like the paper's new clients. It receives the model that was
  divided, and its update chooses the part; each reply moves it one level down the tree. No mean includes such a reply.
- The server therefore keeps, for each division, the model that was sent and all updates, as in the paper. For every
  level of the tree this takes about as much memory as the updates of a round.
- Norms and cosines use parameters only. Floating-point buffers are averaged like parameters; integer buffers are the
  median of all clients' in the round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from logging import INFO
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from flwr.app import ArrayRecord
from flwr.supercore import log

from kindred.engine.admission import Reply
from kindred.engine.arguments import Shared
from kindred.engine.collaboration import Collaboration
from kindred.engine.layout import Layout
from kindred.engine.means import WeightedMean
from kindred.engine.model_store import BLOCK
from kindred.engine.strategy import PersonalizedStrategy
from kindred.fedamp import Blocks, cosines
from kindred.lazy import lazy
from kindred.messages import RECEIVED, ClientId, in_order, read_record
from kindred.parts.aggregation import AGGREGATION
from kindred.registry import MODEL_BOTH_WAYS, Method
from kindred.settings import Setting, one_of, within

if TYPE_CHECKING:
    from scipy.cluster import hierarchy
    from scipy.spatial import distance
else:
    hierarchy, distance = lazy("scipy.cluster.hierarchy"), lazy("scipy.spatial.distance")

EPS1 = Setting(
    "eps1", 0.4, within(0, 1e12), "a cluster is divided only if the norm of its mean update is below this", trial=10.0
)
EPS2 = Setting(
    "eps2",
    0.95,
    within(0, 1e12),
    "a cluster is divided only if the largest of its clients' updates, by criterion, is above this",
    trial=0.001,
)
NORM, COORDINATE = "norm", "coordinate"
CRITERION = Setting(
    "criterion",
    NORM,
    one_of(NORM, COORDINATE),
    "what eps2 bounds: the L2 norm of a client's update, as in the paper, or its largest absolute coordinate, as in "
    "FedEM's public code",
)

# --- The mathematics ----------------------------------------------------------------------------------


def update_norms(blocks: Blocks, examples: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the norms of a cluster's mean update and of each client's update.

    Parameters
    ----------
    blocks : callable
        Returns an iterator over the columns of the updates dW, (m, d), in blocks.
    examples : ndarray, shape (m,)
        n_i.

    Returns
    -------
    mean : float
        ||sum_i n_i/n dW_i||.
    each : ndarray, shape (m,)
        ||dW_i||.
    """
    shares = examples / examples.sum()  # (m,)
    mean, each = 0.0, np.zeros(len(examples))  # squared; (m,)
    for block in blocks():  # (m, b)
        wide = block.astype(np.float64)  # (m, b)
        mean += float(np.square(shares @ wide).sum())
        each += np.square(wide).sum(axis=1)
    return float(np.sqrt(mean)), np.sqrt(each)


def largest_coordinates(blocks: Blocks, num_clients: int) -> np.ndarray:
    """Return the largest absolute coordinate of each client's update.

    Parameters
    ----------
    blocks : callable
        Returns an iterator over the columns of the updates dW, (m, d), in blocks.
    num_clients : int
        m.

    Returns
    -------
    ndarray, shape (m,)
        max_k |dW_ik|.
    """
    largest = np.zeros(num_clients)  # (m,)
    for block in blocks():  # (m, b)
        np.maximum(largest, np.abs(block).max(axis=1), out=largest)
    return largest


def is_to_be_divided(mean: float, each: np.ndarray, eps1: float, eps2: float) -> bool:
    """Return whether a cluster's model has converged but does not suit all clients.

    Parameters
    ----------
    mean : float
        The norm of the mean update, from `update_norms`.
    each : ndarray, shape (m,)
        The norm of each client's update, or its largest coordinate, from `largest_coordinates`.
    eps1, eps2 : float
    """
    return len(each) >= 2 and mean < eps1 and bool(each.max() > eps2)


def optimal_bipartition(similarities: np.ndarray) -> tuple[np.ndarray, float]:
    """Divide clients into two parts so that the largest similarity across the cut is smallest; Algorithm 1.

    Parameters
    ----------
    similarities : ndarray, shape (m, m)
        alpha_ij, symmetric; m is 2 or more.

    Returns
    -------
    first : ndarray of bool, shape (m,)
        True for the clients that are in the same part as client 0.
    cross : float
        alpha_cross, the largest similarity of two clients in different parts.
    """
    apart = distance.squareform(similarities.max() - similarities, checks=False)  # (m (m - 1) / 2,), 0 or more
    # The root is the last merge, before which two groups were left.
    part = hierarchy.to_tree(hierarchy.linkage(apart, "single")).left.pre_order()
    first = np.zeros(len(similarities), dtype=bool)  # (m,)
    first[part] = True
    first = first == first[0]
    return first, float(similarities[np.ix_(first, ~first)].max())


def nearest_part(update: np.ndarray, parts: Sequence[np.ndarray]) -> int:
    """Return the index of the part that has the update nearest in angle to a client's.

    Parameters
    ----------
    update : ndarray, shape (d,)
    parts : sequence of ndarray, shape (m_p, d)
        The updates in each part.

    Returns
    -------
    int
        Of equally near parts the last, as in the paper. An update of zeros has cosine 0 with every other.
    """
    own = np.linalg.norm(update.astype(np.float64)) or 1.0
    nearest = []
    for updates in parts:
        lengths = np.sqrt(np.einsum("md,md->m", updates, updates, dtype=np.float64))  # (m_p,)
        nearest.append(float((updates @ update / np.where(lengths > 0, lengths, 1) / own).max()))
    return max(range(len(parts)), key=lambda part: (nearest[part], part))


# --- The client ---------------------------------------------------------------------------------------
# Local training from the received model: `LocalTraining` in client/local_training.py.


# --- The server ---------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """Cluster of clients, a node of the tree.

    Attributes
    ----------
    model : ArrayRecord
        The cluster's model; for a divided cluster, the model that its clients were sent in the round of the division.
    parent : int or None
        The cluster of which this is a part; None for the first cluster.
    since : int
        The round at the end of which it was created, 0 for the first cluster.
    updates : ndarray, shape (m, parameters)
        Its first members' updates of the parent's model; none for the first cluster.
    examples : dict
        client -> n_i of the clients whose models are in `model`.
    sent : dict
        The same for the model that was sent last.
    parts : list of int
        The two clusters into which it was divided; empty if it was not.
    divided : int
        The round at the end of which it was divided; 0 if it was not.
    cross : float
        The largest similarity across the cut; 0 if it was not divided.
    """

    model: ArrayRecord
    parent: int | None = None
    since: int = 0
    updates: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    examples: dict[ClientId, float] = field(default_factory=dict)
    sent: dict[ClientId, float] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)
    divided: int = 0
    cross: float = 0.0


class Tree:
    """All clusters, in the order in which they were created: the first cluster, its parts, their parts, and so on."""

    def __init__(self, model: ArrayRecord) -> None:
        self.clusters = [Cluster(model)]

    def __getitem__(self, number: int) -> Cluster:
        return self.clusters[number]

    def leaves(self) -> list[int]:
        """Return the numbers of the clusters that have not been divided."""
        return [number for number, cluster in enumerate(self.clusters) if not cluster.parts]

    def divide(self, number: int, server_round: int, cross: float, parts: Sequence[Cluster]) -> None:
        """Divide a cluster into these two parts."""
        cluster = self.clusters[number]
        cluster.parts = [len(self.clusters), len(self.clusters) + 1]
        cluster.divided, cluster.cross = server_round, cross
        self.clusters += parts

    def state(self) -> list[dict[str, Any]]:
        """Return what `restore` needs."""
        return [{each.name: getattr(cluster, each.name) for each in fields(Cluster)} for cluster in self.clusters]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue from what `state` returned."""
        self.clusters = [Cluster(**each) for each in state]


class ClusteredFL(PersonalizedStrategy):
    """Clustered FL as a Flower strategy.

    Parameters
    ----------
    eps1 : float (default: 0.4)
        0 or more. A cluster is divided only if the norm of its mean update is below eps1; 0 is FedAvg.
    eps2 : float (default: 0.95)
        0 or more. A cluster is divided only if the largest norm of its clients' updates is above eps2.
    criterion : {"norm", "coordinate"} (default: "norm")
        With "coordinate" eps2 bounds the largest absolute coordinate of an update in place of its L2 norm.
    aggregation : {"mean", "median", "trimmed-mean", "krum", "multi-krum", "biweight"}
        How a cluster's models are aggregated, as in `FedAvg`. In the norm of the mean update clients have the
        weights of this rule: equal ones with the median and the trimmed mean, 0 for models that the others exclude.
    **shared
        Arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "clustered-fl"
    personal = RECEIVED
    STATE = (*PersonalizedStrategy.STATE, "_tree", "_cluster_of", "_received")

    def __init__(
        self,
        *,
        eps1: float = EPS1.default,
        eps2: float = EPS2.default,
        criterion: str = CRITERION.default,
        aggregation: str = AGGREGATION.default,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(**shared)
        self.eps1 = EPS1.check(eps1)
        self.eps2 = EPS2.check(eps2)
        self.criterion = CRITERION.check(criterion)
        self.aggregation = AGGREGATION.check(aggregation)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        self.layout = Layout(initial_arrays, self.buffers)
        self._tree = Tree(initial_arrays)
        self._cluster_of: dict[ClientId, int] = {}  # of every client that was ever sampled
        self._received: dict[ClientId, int] = {}  # client -> the cluster whose model it was sent last

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        # Rows hold trained models, and later updates, in order of client. Memory is used only as they arrive.
        self._rows = np.empty((len(clients), self.layout.size), self.layout.dtype)  # (m, d)
        self._row_of = {client: row for row, client in enumerate(clients)}
        self._counters: dict[ClientId, Mapping[str, np.ndarray]] = {}
        self._examples: dict[ClientId, float] = {}
        for client in clients:
            self._received[client] = self._cluster_of.setdefault(client, 0)
        for cluster in self._tree.clusters:
            cluster.sent = cluster.examples
        return ((client, self.personal_arrays(client)) for client in clients)

    def update_origin(self, client: ClientId) -> Mapping[str, np.ndarray]:
        """Return the model that the client was sent."""
        return read_record(self._tree[self._received[client]].model)

    def take(self, client: ClientId, reply: Reply) -> None:
        self.layout.flatten(reply.arrays, self._rows[self._row_of[client]])
        self._counters[client] = self.layout.integer_arrays(reply.arrays)
        self._examples[client] = reply.number(self.weighted_by_key)

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        members: dict[int, list[ClientId]] = {}
        for client in answered:
            members.setdefault(self._received[client], []).append(client)
        for number, clients in sorted(members.items()):
            if self._tree[number].parts:
                self._place(number, clients)
            else:
                self._average(number, clients, server_round)
        for client in answered:
            self.history.count(client, cluster=self._cluster_of[client])
        self.history.count(clusters=len(self._tree.leaves()))
        del self._rows

    def _average(self, number: int, clients: Sequence[ClientId], server_round: int) -> None:
        """Average the models of a cluster's clients, for the cluster or for both of its new parts."""
        mean = self.aggregate_of(self.layout)
        for client in clients:
            mean.add(client, self._examples[client], self._rows[self._row_of[client]].copy())
        row = mean.result()
        if row is None:  # no client has a weight
            return
        cluster = self._tree[number]
        integers = self.layout.integer_medians([*self._counters.values()], read_record(cluster.model))
        model = self.layout.record(row, integers)

        rows = self._to_updates(number, clients)
        examples = np.array([mean.weights[client] for client in clients])
        mean_norm, each = update_norms(lambda: self._blocks(rows), examples)
        for client, length in zip(clients, each.tolist(), strict=True):
            self.history.count(client, update_norm=length, mean_update_norm=mean_norm)
        if self.criterion == COORDINATE:
            each = largest_coordinates(lambda: self._blocks(rows), len(rows))
            for client, largest in zip(clients, each.tolist(), strict=True):
                self.history.count(client, largest_coordinate=largest)
        if not is_to_be_divided(mean_norm, each, self.eps1, self.eps2):
            cluster.model, cluster.examples = model, mean.weights
            return
        first, cross = optimal_bipartition(cosines(lambda: self._blocks(rows), len(rows)))
        parts: list[Cluster] = []
        for part in (first, ~first):
            for place in np.flatnonzero(part).tolist():
                self._cluster_of[clients[place]] = len(self._tree.clusters) + len(parts)
            updates = self._rows[np.array(rows)[part], : self.layout.num_parameters]  # (m_p, parameters), a copy
            parts.append(Cluster(model, number, server_round, updates, mean.weights))
        self._tree.divide(number, server_round, cross, parts)
        log(
            INFO,
            "kindred: round %d: cluster %d is divided into %d and %d clients; similarity across the cut: %.2f",
            server_round,
            number,
            first.sum(),
            (~first).sum(),
            cross,
        )

    def newcomer_visits(self, rounds: int) -> int:
        """Return the number of clusters on the longest way to one that is not divided: a visit leads to the next."""
        depth: list[int] = []
        for cluster in self._tree.clusters:  # a cluster's parent is before it
            depth.append(1 if cluster.parent is None else depth[cluster.parent] + 1)
        return max(depth)

    def end_visit(self, client: ClientId) -> None:
        """Move a newcomer that was sent the model of a divided cluster to one of its parts."""
        if self._tree[self._received[client]].parts:
            self._place(self._received[client], [client])

    def _place(self, number: int, clients: Sequence[ClientId]) -> None:
        """Move clients that were sent the model of a divided cluster to one of its parts."""
        parts = self._tree[number].parts
        updates = [self._tree[part].updates for part in parts]
        for client, row in zip(clients, self._to_updates(number, clients), strict=True):
            part = nearest_part(self._rows[row, : self.layout.num_parameters], updates)
            self._cluster_of[client] = parts[part]

    def _to_updates(self, number: int, clients: Sequence[ClientId]) -> list[int]:
        """Subtract from clients' models the model that they were sent, in place; return their rows."""
        sent = np.empty(self.layout.size, self.layout.dtype)  # (d,)
        self.layout.flatten(read_record(self._tree[number].model), sent)
        rows = [self._row_of[client] for client in clients]
        with np.errstate(over="ignore"):  # an infinite update has cosine 0 with others; its cluster is not divided
            for row in rows:
                self._rows[row] -= sent
        return rows

    def _blocks(self, rows: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the parameters' columns of these rows, in blocks."""
        step = max(BLOCK // len(rows), 1)
        for start in range(0, self.layout.num_parameters, step):
            yield self._rows[rows, start : min(start + step, self.layout.num_parameters)]

    def global_arrays(self) -> ArrayRecord:
        """Return the model of the only cluster; if there are several, the mean over all clients of their models."""
        counts = np.bincount(list(self._cluster_of.values()), minlength=len(self._tree.clusters))  # (clusters,)
        if len(counts) == 1:
            return self._tree[0].model
        mean = WeightedMean(self.layout.size, self.layout.dtype)
        for number in np.flatnonzero(counts).tolist():
            row = np.empty(self.layout.size, self.layout.dtype)  # (d,)
            arrays = read_record(self._tree[number].model)
            self.layout.flatten(arrays, row)
            mean.add(number, int(counts[number]), row)
        total = mean.result()
        assert total is not None  # there are two clusters or more
        return self.layout.record(total, self.layout.integer_arrays(read_record(self._tree[0].model)))

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        return self._tree[self._cluster_of.get(client, 0)].model

    def client_models(self) -> dict[ClientId, ArrayRecord]:
        """Return the model of each client's cluster."""
        return {client: self.personal_arrays(client) for client in self.participants()}

    def shared_rows(self) -> Collaboration:
        """Return the clients' shares in the model that each was sent last, which is its cluster's."""
        clients = in_order({*self.clients(), *self._cluster_of})
        received = {client: self._received.get(client, 0) for client in clients}
        return Collaboration.by_row(clients, {k: self._tree[k].sent for k in sorted({*received.values()})}, received)

    @property
    def tree(self) -> list[dict[str, Any]]:
        """Clusters, in the order in which they were created.

        Returns
        -------
        list of dict
            `cluster`: its number.
            `parent`: the parent's number; None for the first cluster.
            `since`: the round after which it was created.
            `parts`: the numbers of its two parts, or an empty list.
            `divided`: the round after which it was divided, or None.
            `cross-similarity`: the largest similarity across the cut, or None.
            `clients`: its members; for a divided cluster, the members that have not been placed in a part yet.
        """
        members: dict[int, list[ClientId]] = {}
        for client in in_order(self._cluster_of):
            members.setdefault(self._cluster_of[client], []).append(client)
        return [
            {
                "cluster": number,
                "parent": cluster.parent,
                "since": cluster.since,
                "parts": cluster.parts,
                "divided": cluster.divided if cluster.parts else None,
                "cross-similarity": cluster.cross if cluster.parts else None,
                "clients": members.get(number, []),
            }
            for number, cluster in enumerate(self._tree.clusters)
        ]


METHOD = Method(
    title="Clustered FL",
    paper="Sattler et al., IEEE TNNLS 2021, arXiv:1910.01991",
    travels=MODEL_BOTH_WAYS,
    strategy=ClusteredFL,
    settings=(EPS1, EPS2, CRITERION, AGGREGATION),
)
