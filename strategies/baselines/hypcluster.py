"""HypCluster, also called IFCA: several global models, of which each client takes the one that suits it best.

Y. Mansour, M. Mohri, J. Ro, A. T. Suresh: Three Approaches for Personalization with Applications to Federated
Learning. arXiv:2002.10619 (HypCluster).
A. Ghosh, J. Chung, D. Yin, K. Ramchandran: An Efficient Framework for Clustered Federated Learning. NeurIPS 2020,
arXiv:2006.04088 (IFCA, Algorithm 1, whose model averaging is the same method).

There are c models w_1 to w_c at the server, and the clients' losses F_i. A round:

| paper | here |
|---|---|
| each client receives all models | `SeveralModels.outgoing` |
| it takes j = argmin_j F_i(w_j) on its training data | `nearest_model` |
| trains that one, and sends it with its number | `HypClusterClient.train` |
| w_j = sum n_i w_i / sum n_i over the clients that took it | `SeveralModels.end_round` |

The result for a client is the model that it takes, as it came; of the last models in a closing exchange, in which it
chooses once more.

Where we depart from the papers or they differ:
- Means are weighted by samples, as in FedAvg and in Mansour et al.; IFCA's are over clients that have equally many.
- A model that nobody takes stays as it is; the papers do not say.
- The first model is the initial one, so that one cluster is FedAvg. The others have its numbers in another order, each
  array by itself, as another random start would have; `other_models` gives them instead, which a network with frozen or
  pretrained parts needs. Starts decide which clusters are found: IFCA's experiments begin several times.
- All layers are the clusters' own. IFCA's experiments on FEMNIST share the first ones.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.engine.admission import Refused, Reply
from kindred.engine.arguments import Shared
from kindred.engine.multi_model import SeveralModels
from kindred.messages import (
    ARRAYS,
    METRICS,
    RECEIVED,
    TRAIN_LOSS,
    TRAINED,
    ClientId,
    in_a_row,
    read_record,
    to_record,
)
from kindred.registry import Method
from kindred.settings import Setting, at_least

if TYPE_CHECKING:
    import torch

CLUSTER = "cluster"  # the metric in which a client says which model it took

NUM_CLUSTERS = Setting("num_clusters", 3, at_least(1), "models, of which each client takes the best", trial=2)

# --- The mathematics ----------------------------------------------------------------------------------


def nearest_model(losses: Sequence[float]) -> int:
    """argmin_j F_i(w_j); of equally good ones the first. A loss that is not finite is worse than any other."""
    values = np.asarray(losses, dtype=np.float64)  # (c,)
    return int(np.where(np.isfinite(values), values, np.inf).argmin())


# --- The client ---------------------------------------------------------------------------------------


class HypClusterClient:
    """The client half: takes the model with the lowest training loss, and trains it."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """The reply holds the trained model, its number, and the evaluations of it as it came and trained."""
        cluster, model = _chosen(visit)
        metrics = visit.evaluation(RECEIVED, model) | {CLUSTER: cluster}
        metrics[TRAIN_LOSS] = visit.train(model)
        metrics |= visit.evaluation(TRAINED, model) | visit.counts()
        return RecordDict({ARRAYS: to_record(get_arrays(model)), METRICS: MetricRecord({**metrics})})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the model with the lowest training loss."""
        cluster, model = _chosen(visit)
        metrics = visit.separate_evaluation(model)
        if visit.is_site:
            visit.keep(model, metrics["accuracy"])
        return RecordDict({METRICS: MetricRecord({**metrics, CLUSTER: cluster})})


def _chosen(visit: Visit) -> tuple[int, torch.nn.Module]:
    models = in_a_row(visit.arrays)
    cluster = nearest_model([visit.loss(visit.model(arrays)) for arrays in models])
    return cluster, visit.model(models[cluster])


# --- The server ---------------------------------------------------------------------------------------


class HypCluster(SeveralModels):
    """HypCluster as a Flower strategy.

    Parameters
    ----------
    num_clusters : int (default: 3)
        Models c, 1 or more; 1 is FedAvg.
    other_models : sequence of ArrayRecord, optional
        What the models after the first start from.
    **shared
        Arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "hypcluster"
    personal = RECEIVED
    STATE = (*SeveralModels.STATE, "_cluster_of")

    def __init__(
        self,
        *,
        num_clusters: int = NUM_CLUSTERS.default,
        other_models: Sequence[ArrayRecord] | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        self.num_clusters = NUM_CLUSTERS.check(num_clusters)
        super().__init__(count=self.num_clusters, other_models=other_models, **shared)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._cluster_of: dict[ClientId, int] = {}  # which model each client took last
        self._told: dict[ClientId, int] = {}  # the same of the reply that is being looked at

    def inspect(self, client: ClientId, reply: Reply) -> None:
        cluster = _cluster_in(reply, self.num_clusters)
        if cluster is None:
            raise Refused(
                f"its cluster is {reprlib.repr(reply.metrics.get(CLUSTER))}, allowed: 0 to {self.num_clusters - 1}"
            )
        self._told[client] = cluster

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float:
        """Of the change since the model that the client took."""
        return self.layout.distance(arrays, read_record(self.models[self._told[client]]))

    def take(self, client: ClientId, reply: Reply) -> None:
        self._cluster_of[client] = cluster = self._told.pop(client)
        self.take_models(client, reply.number(self.weighted_by_key), {cluster: reply.arrays})

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        super().end_round(server_round, answered)
        self.history.count(clusters=len({self._cluster_of[client] for client in answered}))

    def take_evaluation(self, client: ClientId, reply: Reply) -> None:
        if (cluster := _cluster_in(reply, self.num_clusters)) is not None:
            self._cluster_of[client] = cluster

    def client_models(self) -> dict[ClientId, ArrayRecord]:
        """The model that each client took last; the first, where it has not said."""
        return {client: self.models[self._cluster_of.get(client, 0)] for client in self.clients()}

    def collaboration(self) -> tuple[list[ClientId], np.ndarray]:
        """Row i: the shares of the clients in the model that client i took last, of those that were sent last.

        A client that took a model that nobody has trained yet, or none, has itself alone.
        """
        clients, shares = self.shares()  # (c, m)
        rows = np.eye(len(clients))
        for i, client in enumerate(clients):
            cluster = self._cluster_of.get(client)
            if cluster is not None and shares[cluster].any():
                rows[i] = shares[cluster]
        return clients, rows


def _cluster_in(reply: Reply, count: int) -> int | None:
    """The number of a model in a reply; None if it is none."""
    cluster = reply.metrics.get(CLUSTER)
    return cluster if isinstance(cluster, int) and 0 <= cluster < count else None


METHOD = Method(
    title="HypCluster (IFCA)",
    paper="Mansour et al., 2020, arXiv:2002.10619; Ghosh et al., NeurIPS 2020, arXiv:2006.04088",
    travels="all clusters' models, down; the trained one, up",
    strategy=HypCluster,
    client=HypClusterClient,
    settings=(NUM_CLUSTERS,),
)
