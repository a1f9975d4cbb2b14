"""Ditto: each client trains a personal model that a penalty keeps near the global one.

T. Li, S. Hu, A. Beirami, V. Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021,
arXiv:2012.04221.

Client k has two models. The global model w solves min G(F_1, ..., F_K) by any solver; the personal model v_k solves

    min h_k(v_k; w) = F_k(v_k) + lambda/2 ||v_k - w||^2

With lambda 0 this is local training; the larger lambda is, the nearer v_k is to the global model.

| Algorithm 1 | here |
|---|---|
| sampled clients receive w^t, train it and send it back; the server averages | `Averaging` |
| s steps v_k = v_k - eta (grad F_k(v_k) + lambda (v_k - w^t)) | `DittoClient.train`: training towards w^t |

The result for a client is v_k, which never leaves it. The global model is FedAvg's, bit for bit: it does not depend on
v_k.

Where we depart from the paper or it is silent:
- G is FedAvg's, which weights clients by their numbers of samples; the mean of Algorithm 1 is unweighted.
- v_k continues from its last value; at first, from the first global model that the client receives to train.
- Both models train for the epochs or steps in the message, with its optimiser, on the same batches.
- A lambda above 1 / eta acts as 1 / eta: with a larger one, steps would end beyond w.
- lambda is the same for all clients. The paper also lets each client choose among a few values by its validation data.
"""

from __future__ import annotations

from typing import Any, Unpack

from flwr.app import MetricRecord, RecordDict

from kindred.client.state import MODEL
from kindred.client.training import get_arrays, set_arrays, trained_weights
from kindred.client.visit import Visit
from kindred.engine.arguments import AveragedShared
from kindred.messages import ARRAYS, METRICS, OWN, RECEIVED, TRAIN_LOSS, TRAINED, ClientId, to_record
from kindred.parts.aggregation import AGGREGATION
from kindred.registry import MODEL_BOTH_WAYS, Method
from kindred.settings import Setting, within

from .fedavg import Averaging

DITTO_LAMBDA = Setting(
    "ditto_lambda",
    1.0,
    within(0, 10**6),
    "weight of half the squared distance of the personal model from the global one",
    trial=0.5,
)

# --- The mathematics ----------------------------------------------------------------------------------
# The step above is that of `training.train`, with `proximal_mu` lambda and `towards` w^t.

# --- The client ---------------------------------------------------------------------------------------


class DittoClient:
    """The client half: trains the global model, which the client sends, and the personal one, which it keeps."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train both models (Algorithm 1, at a client); the reply holds the trained global model."""
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
        """Evaluate the client's personal model; the received one if it has none yet."""
        model = visit.model(visit.state.load(MODEL))
        return RecordDict({METRICS: MetricRecord({**visit.separate_evaluation(model)})})


# --- The server ---------------------------------------------------------------------------------------


class Ditto(Averaging):
    """Ditto as a Flower strategy.

    Parameters
    ----------
    ditto_lambda : float (default: 1.0)
        lambda, 0 or more, the weight of half the squared distance from the global model; 0 is local training.
    **shared
        `aggregation` of `Averaging`, and arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "ditto"
    personal = OWN
    clients_keep_state = True
    model_stays = True

    def __init__(self, *, ditto_lambda: float = DITTO_LAMBDA.default, **shared: Unpack[AveragedShared]) -> None:
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
    settings=(DITTO_LAMBDA, AGGREGATION),
)
