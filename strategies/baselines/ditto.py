"""Ditto: a personal model beside the global one, held near it.

T. Li, S. Hu, A. Beirami, V. Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021,
arXiv:2012.04221.

Client k has two models. The global model w solves min G(F_1, ..., F_K) by any solver; the personal one v_k is for

    min h_k(v_k; w) = F_k(v_k) + lambda/2 ||v_k - w||^2

lambda 0 is local training; the larger it is, the nearer is v_k to the global model.

| Algorithm 1 | here |
|---|---|
| w^t to the clients drawn; they train it and send it back; the server's mean | `FedAvg`, as it is |
| s steps v_k = v_k - eta (grad F_k(v_k) + lambda (v_k - w^t)) | `DittoClient.train`: training towards w^t |

The result for a client is v_k, which never leaves it. The global model is FedAvg's, bit for bit: v_k has no part in it.

Where we depart from the paper or it is silent:
- G is FedAvg's, so that clients weigh as much as they have samples; the mean of Algorithm 1 is plain.
- v_k goes on from where it was, and at first from the first global model that the client receives to train.
- Both models train as long as the message says, with its optimiser, and see the same batches.
- lambda is one for all. The paper also lets each client choose among a few by its validation data.
"""

from __future__ import annotations

from typing import Any, Unpack

from flwr.app import MetricRecord, RecordDict

from kindred.client.state import MODEL
from kindred.client.training import get_arrays, set_arrays, trained_weights
from kindred.client.visit import Visit
from kindred.engine.arguments import Shared
from kindred.messages import ARRAYS, METRICS, OWN, RECEIVED, TRAIN_LOSS, TRAINED, ClientId, to_record
from kindred.registry import MODEL_BOTH_WAYS, Method
from kindred.settings import Setting, at_least

from .fedavg import FedAvg

DITTO_LAMBDA = Setting(
    "ditto_lambda",
    1.0,
    at_least(0),
    "weight of half the squared distance of the personal model from the global one",
    trial=0.5,
)

# --- The mathematics ----------------------------------------------------------------------------------
# The step above is that of `training.train` with proximal_mu lambda and towards w^t.

# --- The client ---------------------------------------------------------------------------------------


class DittoClient:
    """The client half: a client trains the global model for all, and its own for itself."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Algorithm 1 at a client; the reply holds the trained global model."""
        own = visit.state.load(MODEL) or visit.arrays
        model = visit.model()
        received = [weight.clone() for weight in trained_weights(model)]
        metrics = visit.evaluation(RECEIVED, model)
        metrics[TRAIN_LOSS] = visit.train(model)
        metrics |= visit.evaluation(TRAINED, model)
        trained = to_record(get_arrays(model))

        set_arrays(model, own)
        visit.train(model, proximal_mu=float(visit.config[DITTO_LAMBDA.key]), towards=received)
        metrics |= visit.evaluation(OWN, model) | visit.counts()
        return RecordDict({ARRAYS: trained, METRICS: MetricRecord({**metrics})})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the client's own model; the received one if it has none yet."""
        model = visit.model(visit.state.load(MODEL))
        return RecordDict({METRICS: MetricRecord({**visit.separate_evaluation(model)})})


# --- The server ---------------------------------------------------------------------------------------


class Ditto(FedAvg):
    """Ditto as a Flower strategy.

    Parameters
    ----------
    ditto_lambda : float (default: 1.0)
        lambda, 0 or more, the weight of half the squared distance from the global model; 0 is local training.
    **shared
        Those of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument out of range, naming it.
    """

    name = "ditto"
    personal = OWN
    clients_keep_state = True
    model_stays = True

    def __init__(self, *, ditto_lambda: float = DITTO_LAMBDA.default, **shared: Unpack[Shared]) -> None:
        super().__init__(**shared)
        self.ditto_lambda = DITTO_LAMBDA.check(ditto_lambda)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {**super().round_config(server_round, client), DITTO_LAMBDA.key: self.ditto_lambda}


METHOD = Method(
    title="Ditto",
    paper="Li et al., ICML 2021, arXiv:2012.04221",
    travels=MODEL_BOTH_WAYS,
    stays="its personal model",
    strategy=Ditto,
    client=DittoClient,
    settings=(DITTO_LAMBDA,),
)
