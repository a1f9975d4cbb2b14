"""HypCluster, also called IFCA: of several global models, each client chooses and trains the one that suits it best.

Y. Mansour, M. Mohri, J. Ro, A. T. Suresh: Three Approaches for Personalization with Applications to Federated
Learning. arXiv:2002.10619 (HypCluster).
A. Ghosh, J. Chung, D. Yin, K. Ramchandran: An Efficient Framework for Clustered Federated Learning. NeurIPS 2020,
arXiv:2006.04088 (IFCA, Algorithm 1, whose model averaging is the same method).

The server has c models w_1 to w_c; F_i is client i's loss. A round:

| paper | here |
|---|---|
| each client receives all models | `SeveralModels.outgoing` |
| it chooses j = argmin_j F_i(w_j) on its training data | `nearest_model` |
| it trains that model, and sends it with its number | `HypClusterClient.train` |
| w_j = sum n_i w_i / sum n_i over the clients that chose it | `SeveralModels.end_round` |

The result for a client is the model that it chooses, as received. For the last models this is in a closing exchange, in
which the client chooses once more.

Where we depart from the papers or they differ:
- Means are weighted by samples, as in FedAvg and in Mansour et al.; in IFCA all clients have equally many samples.
- A model that no client chooses stays unchanged; the papers do not specify this.
- The first model is the initial one, so that with one cluster this is FedAvg. The others have its numbers in another
  order, shuffled within each array, like another random initialisation. `other_models` gives them instead, which a
  network with frozen or pretrained parts needs. The initial models decide which clusters are found: IFCA's experiments
  start several times.
- Each cluster has all layers of its own. In IFCA's experiments on FEMNIST clusters share the first layers.
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
from kindred.engine.arguments import AveragedShared
from kindred.engine.collaboration import Collaboration
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
from kindred.parts.aggregation import AGGREGATION
from kindred.registry import Method
from kindred.settings import Setting, within

if TYPE_CHECKING:
    import torch

CLUSTER = "cluster"  # the metric in which a client reports the number of the model that it chose

NUM_CLUSTERS = Setting(
    "num_clusters", 3, within(1, 1000), "number of models (c), of which each client uses the best", trial=2
)

# --- The mathematics ----------------------------------------------------------------------------------


def nearest_model(losses: Sequence[float]) -> int:
    """Return argmin_j F_i(w_j), of equally good models the first. A loss that is not finite is worse than any other."""
    values = np.asarray(losses, dtype=np.float64)  # (c,)
    return int(np.where(np.isfinite(values), values, np.inf).argmin())


# --- The client ---------------------------------------------------------------------------------------


class HypClusterClient:
    """The client half: chooses the model with the lowest training loss, and trains it."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train the chosen model; the reply holds it, its number, and its evaluations before and after training."""
        cluster, model = _choose(visit)
        metrics = visit.evaluation(RECEIVED, model) | {CLUSTER: cluster}
        metrics[TRAIN_LOSS] = visit.train(model)
        metrics |= visit.evaluation(TRAINED, model) | visit.counts()
        return RecordDict({ARRAYS: to_record(get_arrays(model)), METRICS: MetricRecord({**metrics})})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the model with the lowest training loss."""
        cluster, model = _choose(visit)
        metrics = visit.separate_evaluation(model)
        if visit.is_site:
            visit.keep(model, metrics)
        return RecordDict({METRICS: MetricRecord({**metrics, CLUSTER: cluster})})


def _choose(visit: Visit) -> tuple[int, torch.nn.Module]:
    models = in_a_row(visit.arrays)
    cluster = nearest_model([visit.loss(visit.model(arrays)) for arrays in models])
    return cluster, visit.model(models[cluster])


# --- The server ---------------------------------------------------------------------------------------


class HypCluster(SeveralModels):
    """HypCluster as a Flower strategy.

    Parameters
    ----------
    num_clusters : int (default: 3)
        Number c of models, 1 or more; 1 is FedAvg.
    other_models : sequence of ArrayRecord, optional
        The initial models after the first.
    **shared
        `aggregation` of `SeveralModels`, and arguments of `PersonalizedStrategy`.

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
        **shared: Unpack[AveragedShared],
    ) -> None:
        self.num_clusters = NUM_CLUSTERS.check(num_clusters)
        super().__init__(count=self.num_clusters, other_models=other_models, **shared)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._cluster_of: dict[ClientId, int] = {}  # client -> the number of the model that it chose last
        self._reported: dict[ClientId, int] = {}  # the same, from the reply that is being checked

    def inspect(self, client: ClientId, reply: Reply) -> None:
        cluster = _cluster_in(reply, self.num_clusters)
        if cluster is None:
            raise Refused(
                f"its cluster is {reprlib.repr(reply.metrics.get(CLUSTER))}, allowed: 0 to {self.num_clusters - 1}"
            )
        self._reported[client] = cluster

    def update_origin(self, client: ClientId) -> Mapping[str, np.ndarray]:
        """Return the model that the client chose."""
        return read_record(self.models[self._reported[client]])

    def take(self, client: ClientId, reply: Reply) -> None:
        self._cluster_of[client] = cluster = self._reported.pop(client)
        self.take_models(client, reply.number(self.weighted_by_key), {cluster: reply.arrays})

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        super().end_round(server_round, answered)
        self.history.count(clusters=len({self._cluster_of[client] for client in answered}))

    def take_evaluation(self, client: ClientId, reply: Reply) -> None:
        if (cluster := _cluster_in(reply, self.num_clusters)) is not None:
            self._cluster_of[client] = cluster

    def client_models(self) -> dict[ClientId, ArrayRecord]:
        """Return the model that each client chose last; the first model, if it has reported no choice."""
        return {client: self.models[self._cluster_of.get(client, 0)] for client in self.participants()}

    def shared_rows(self) -> Collaboration:
        """Return, for each client, the clients' shares in the model that it chose last, as models were sent last.

        A client has weight 1 on itself if it has chosen no model, or one that no client has trained yet.
        """
        return Collaboration.by_row(self.clients(), dict(enumerate(self._sent)), self._cluster_of)


def _cluster_in(reply: Reply, count: int) -> int | None:
    """Return the number of a model in a reply; None if it is not the number of a model."""
    cluster = reply.metrics.get(CLUSTER)
    return cluster if isinstance(cluster, int) and 0 <= cluster < count else None


METHOD = Method(
    title="HypCluster (IFCA)",
    paper="Mansour et al., 2020, arXiv:2002.10619; Ghosh et al., NeurIPS 2020, arXiv:2006.04088",
    travels="all clusters' models, down; the trained one, up",
    strategy=HypCluster,
    client=HypClusterClient,
    settings=(NUM_CLUSTERS, AGGREGATION),
)
