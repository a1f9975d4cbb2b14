"""Blend: a client trains from a blend of the global model and its own.

    w_k <- local training from  (1 - s) w + s w_k,     w <- sum_k n_k w_k / sum_k n_k

where s is the setting own-share. 0 is FedAvg, evaluated after local training; 1 is local training alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import MetricRecord, RecordDict

from kindred.baselines.fedavg import Averaging
from kindred.client.state import MODEL
from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.messages import ARRAYS, METRICS, OWN, TRAIN_LOSS, ClientId, to_record
from kindred.parts.aggregation import AGGREGATION
from kindred.registry import Method
from kindred.settings import Setting, within

OWN_SHARE = Setting("own_share", 0.5, within(0, 1), "share of the client's own model in the start of its training (s)")


def blended(received: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray], s: float) -> dict[str, np.ndarray]:
    """Return (1 - s) w + s w_k, in the types of w; integer arrays, such as counts of batches, are those of w."""
    return {
        name: ((1 - s) * w + s * own[name]).astype(w.dtype) if w.dtype.kind == "f" else w
        for name, w in received.items()
    }


class BlendClient:
    """The client half: how a site answers a message."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        own = visit.state.load(MODEL) or visit.arrays  # in its first round a client has none
        model = visit.model(blended(visit.arrays, own, float(visit.config[OWN_SHARE.key])))
        metrics = {TRAIN_LOSS: visit.train(model)}
        metrics |= visit.evaluation(OWN, model) | visit.counts()  # stores the model: it is the method's result
        return RecordDict({ARRAYS: to_record(get_arrays(model)), METRICS: MetricRecord({**metrics})})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        model = visit.model(visit.state.load(MODEL))
        return RecordDict({METRICS: MetricRecord({**visit.separate_evaluation(model)})})


class Blend(Averaging):
    """The server half: the mean of the clients' models, and s for the clients.

    Parameters
    ----------
    own_share : float (default: 0.5)
        s, 0 to 1.
    **settings
        Those of `Averaging`.
    """

    name = "blend"
    personal = OWN  # the model whose accuracy counts
    clients_keep_state = True
    model_stays = True

    def __init__(self, *, own_share: float = OWN_SHARE.default, **settings: Any) -> None:
        super().__init__(**settings)
        self.own_share = OWN_SHARE.check(own_share)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {**super().round_config(server_round, client), OWN_SHARE.key: self.own_share}


BLEND = Method(
    title="Blend", paper="docs/extending.md", travels="the model, both ways", stays="its own model",
    strategy=Blend, client=BlendClient, settings=(OWN_SHARE, AGGREGATION),
)  # fmt: skip
