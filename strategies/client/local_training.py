"""The client half of the methods whose clients train the model they receive."""

from __future__ import annotations

import numpy as np
from flwr.app import MetricRecord, RecordDict

from kindred.messages import (
    ARRAYS,
    FINETUNE_EPOCHS,
    METRICS,
    NUM_EXAMPLES,
    PROBE,
    PROXIMAL_MU,
    RECEIVED,
    SERVER_MOMENTUM,
    TRAIN_LOSS,
    TRAINED,
    TUNED,
    to_record,
)

from .training import get_arrays, set_arrays
from .visit import Visit


class LocalTraining:
    """The client half of the methods whose clients train the model they receive.

    These are FedAMP and HeurFedAMP (Eq. 6), Local, FedAvg, FedProx and their fine-tuned forms. The message holds the
    weight of the proximal term and the epochs of fine-tuning.
    """

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train the received model; the reply holds the trained model and the evaluations of both."""
        arrays, metrics = LocalTraining.trained(visit)
        return RecordDict({ARRAYS: to_record(arrays), METRICS: MetricRecord({**metrics})})

    @staticmethod
    def trained(visit: Visit) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Return the arrays and metrics of `train`'s reply, for a method that processes them further."""
        model = visit.model()
        metrics: dict[str, float] = {}
        if SERVER_MOMENTUM not in visit.config:  # else the global model is evaluated in a message to evaluate
            metrics |= visit.evaluation(RECEIVED, model)
            if FINETUNE_EPOCHS in visit.config:
                visit.tune(model)
                metrics |= visit.evaluation(TUNED, model)
                set_arrays(model, visit.arrays)
        metrics[TRAIN_LOSS] = visit.train(model, proximal_mu=float(visit.config.get(PROXIMAL_MU, 0.0)))
        return get_arrays(model), metrics | visit.evaluation(TRAINED, model) | visit.counts()

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the received model; with fine-tuning, the fine-tuned model, which the reply then holds.

        The model of a side evaluation is evaluated on the training data.
        """
        model = visit.model()
        if PROBE in visit.config:
            examples = len(visit.site.train[1])
            return RecordDict({METRICS: MetricRecord({"loss": visit.loss(model), NUM_EXAMPLES: examples})})
        content = RecordDict()
        if FINETUNE_EPOCHS in visit.config:
            visit.tune(model)
            content[ARRAYS] = to_record(get_arrays(model))
        metrics = visit.separate_evaluation(model)
        if visit.is_site:
            visit.keep(model, metrics)
        content[METRICS] = MetricRecord({**metrics})
        return content
