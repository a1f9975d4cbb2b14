"""FedALA: each client learns, for each weight of the last layers, how much of the global model to use.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan: FedALA: Adaptive Local Aggregation for Personalized
Federated Learning. AAAI 2023, arXiv:2212.01197.

Client i receives the global model Theta and has its local model Theta_i of the last round that it took part in. It
starts the round's training from

    Theta_hat_i = Theta_i + (Theta - Theta_i) * W_i    element by element, W_i in [0, 1]

in the last `head_layers` layers. In the layers before them it starts from Theta: W_i is 1 there.

| the paper | here |
|---|---|
| adaptive local aggregation, as above | `aggregated` |
| Eq. 5: W_i = W_i - eta grad_W L(Theta_hat_i), then clipped to 0 to 1 | `improved_weights` |
| Eq. 5 on s% of the local data, drawn anew: the first time until W_i has converged, later for one epoch | `adapt` |
| training from Theta_hat_i; the client sends the result | `FedALAClient.train` |
| the mean, weighted by the clients' numbers of samples | `Averaging` |

By the chain rule the gradient of Eq. 5 is the gradient of the loss in Theta_hat_i, times Theta - Theta_i.

The paper's algorithm returns, and its authors' program evaluates, Theta_hat_i, before the local training that starts
from it. Here too, Theta_hat_i is the result for a client ("between"), and the client keeps it as its model. A training
reply evaluates the one from which the round's training starts. The last one, of the last global model and the client's
last local model, is made and evaluated in a closing exchange. The history also has the evaluation after training
("trained").

Of the newer methods, FedALA is included and pFedGraph is not. No other method here learns, element by element, how much
of the global model to use. pFedGraph weights the other clients' whole models by similarity, as FedAMP does.

Where we depart from the paper or it is silent:
- A client that takes part for the first time has no local model, and uses the global one unchanged. In the paper it has
  the initial model, which is the same in the first round.
- W_i has converged when the mean losses of the last 10 epochs have a standard deviation below 0.01, at the latest after
  100 epochs. The authors' program uses the last batch's loss of each epoch and, by default, 0.1; it has no limit.
- W_i is for parameters. The statistics of normalisation layers are the global model's, as for FedAvg's clients.
- In the paper all layers may be mixed; here at least one layer is not. The paper's choice is the last layer alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from kindred.client.training import batches, check_finite, get_arrays, trained_weights
from kindred.client.visit import Visit
from kindred.engine.arguments import AveragedShared
from kindred.engine.layout import last_layers
from kindred.lazy import lazy
from kindred.messages import (
    ARRAYS,
    BETWEEN,
    METRICS,
    RECEIVED,
    SAMPLES_TRAINED,
    TRAIN_LOSS,
    TRAINED,
    ClientId,
    by_prefix,
    to_record,
    with_prefix,
)
from kindred.parts.aggregation import AGGREGATION
from kindred.registry import MODEL_BOTH_WAYS, Method
from kindred.settings import A_SHARE, Setting, above, within

from .fedavg import Averaging
from .fedrep import HEAD, training_only

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

ALA = "ala"  # name under which a client keeps the last layers of its local model, and W_i
LOCAL, WEIGHTS = "local", "weights"
HEAD_LAYERS = Setting("head_layers", 1, within(1, 1000), "number of last layers of the network that are mixed")
ALA_SHARE = Setting("ala_share", 0.8, A_SHARE, "share of the training images on which mixing weights are learned (s)")
ALA_LEARNING_RATE = Setting("ala_learning_rate", 1.0, above(0, 1000), "step size of the mixing weights (eta)")
ALA_WEIGHT = "ala-weight"  # the mean of W_i, in the history

LOOK_BACK, STEADY, MOST_EPOCHS = 10, 0.01, 100

# --- The mathematics ----------------------------------------------------------------------------------


def aggregated(local: Tensor, received: Tensor, weights: Tensor) -> Tensor:
    """Return Theta_i + (Theta - Theta_i) * W_i, all of one shape; for weights 0 and 1 it is exact, to the bit."""
    return local.lerp(received, weights)


def improved_weights(
    weights: Tensor, gradient: Tensor, local: Tensor, received: Tensor, learning_rate: float
) -> Tensor:
    """Return W_i after a step of Eq. 5, given the gradient of the loss in Theta_hat_i; all of one shape."""
    return (weights - learning_rate * gradient * (received - local)).clamp(0, 1)


def has_converged(losses: Sequence[float]) -> bool:
    """Return whether the epochs' mean losses have become steady, or MOST_EPOCHS epochs are done."""
    steady = len(losses) > LOOK_BACK and float(np.std(losses[-LOOK_BACK:])) < STEADY
    return steady or len(losses) >= MOST_EPOCHS


# --- The client ---------------------------------------------------------------------------------------


class FedALAClient:
    """The client half: mixes the received model with the client's last one, and trains the result."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train from Theta_hat_i; the reply holds the trained model."""
        kept = by_prefix(visit.state.load(ALA) or {})
        model = visit.model()
        metrics = visit.evaluation(RECEIVED, model)
        weights = adapt(visit, model, kept)
        check_finite(model)
        if weights:
            metrics[ALA_WEIGHT] = float(np.mean(np.concatenate([array.reshape(-1) for array in weights.values()])))
        metrics |= visit.evaluation(BETWEEN, model)
        metrics[TRAIN_LOSS] = visit.train(model)
        check_finite(model)
        metrics |= visit.evaluation(TRAINED, model) | visit.counts()
        arrays = get_arrays(model)
        head = {name: arrays[name] for name in visit.config[HEAD]}
        visit.state.save(ALA, {**with_prefix(LOCAL, head), **with_prefix(WEIGHTS, weights)})
        return RecordDict({ARRAYS: to_record(arrays), METRICS: MetricRecord({**metrics})})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate Theta_hat_i for the received model and keep it; Theta_i and W_i do not change."""
        model = visit.model()
        adapt(visit, model, by_prefix(visit.state.load(ALA) or {}))
        metrics = visit.separate_evaluation(model)
        visit.keep(model, metrics)
        return RecordDict({METRICS: MetricRecord({**metrics})})


def adapt(visit: Visit, model: torch.nn.Module, kept: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Learn W_i, and turn the received model, which `model` holds, into Theta_hat_i.

    Parameters
    ----------
    visit : Visit
    model : torch.nn.Module
    kept : mapping
        What the client keeps: its last layers by name, and W_i if it has learned W_i before. If this is empty, `model`
        does not change.

    Returns
    -------
    dict of str to ndarray
        W_i by the names of the parameters.
    """
    if LOCAL not in kept:
        return {}
    config, first = visit.config, WEIGHTS not in kept
    generator = torch.Generator().manual_seed(visit.seed(ALA))
    count = len(visit.site.train[1])
    drawn = torch.randperm(count, generator=generator)[: max(2, round(float(config[ALA_SHARE.key]) * count))]
    samples = tuple(part[drawn.to(part.device)] for part in visit.site.train)
    statistics = [buffer.clone() for buffer in model.buffers()]
    losses: list[float] = []
    with training_only(model, config[HEAD]), visit.differentiating(model, ALA) as gradients_of:
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not names:  # the last layers are frozen, or have no parameters
            return {}
        mixed = trained_weights(model)  # Theta_hat_i; writing to these tensors changes the model
        received = [weight.clone() for weight in mixed]
        local = [torch.from_numpy(kept[LOCAL][name]).to(visit.device) for name in names]
        weights = (
            [torch.ones_like(weight) for weight in mixed]
            if first
            else [torch.from_numpy(kept[WEIGHTS][name]).to(visit.device) for name in names]
        )
        _write(mixed, local, received, weights)
        while not losses or (first and not has_converged(losses)):
            total = torch.zeros((), dtype=torch.float64, device=visit.device)
            for images, labels in batches(samples, 1, 0, visit.batch_size, generator):
                visit.compute[SAMPLES_TRAINED] += len(labels)
                loss, gradients = gradients_of(images, labels)
                total += loss.double() * len(labels)
                weights = [
                    improved_weights(*each, float(config[ALA_LEARNING_RATE.key]))
                    for each in zip(weights, gradients, local, received, strict=True)
                ]
                _write(mixed, local, received, weights)
            losses.append(float(total) / len(samples[1]))
    for buffer, before in zip(model.buffers(), statistics, strict=True):
        buffer.copy_(before)
    return {name: weight.cpu().numpy() for name, weight in zip(names, weights, strict=True)}


def _write(mixed: list[Tensor], local: list[Tensor], received: list[Tensor], weights: list[Tensor]) -> None:
    for into, *each in zip(mixed, local, received, weights, strict=True):
        into.copy_(aggregated(*each))


# --- The server ---------------------------------------------------------------------------------------


class FedALA(Averaging):
    """FedALA as a Flower strategy.

    Parameters
    ----------
    head_layers : int (default: 1)
        p, the number of last layers of the network that are mixed, 1 or more, and fewer than it has.
    ala_share : float (default: 0.8)
        s, the share of the training data on which mixing weights are learned, more than 0, at most 1. At least two
        samples are used.
    ala_learning_rate : float (default: 1.0)
        eta, the step size of the mixing weights, more than 0.
    **shared
        `aggregation` of `Averaging`, and arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range, or, in `start`, the network has too few layers; the message names the argument.
    """

    name = "fedala"
    personal = BETWEEN
    newcomer_result = TRAINED
    clients_keep_state = True
    model_stays = True

    def __init__(
        self,
        *,
        head_layers: int = HEAD_LAYERS.default,
        ala_share: float = ALA_SHARE.default,
        ala_learning_rate: float = ALA_LEARNING_RATE.default,
        **shared: Unpack[AveragedShared],
    ) -> None:
        super().__init__(**shared)
        self.head_layers = HEAD_LAYERS.check(head_layers)
        self.ala_share = ALA_SHARE.check(ala_share)
        self.ala_learning_rate = ALA_LEARNING_RATE.check(ala_learning_rate)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._head = last_layers(initial_arrays, self.head_layers)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {
            **super().round_config(server_round, client),
            HEAD: self._head,
            ALA_SHARE.key: self.ala_share,
            ALA_LEARNING_RATE.key: self.ala_learning_rate,
        }


METHOD = Method(
    title="FedALA",
    paper="Zhang et al., AAAI 2023, arXiv:2212.01197",
    travels=MODEL_BOTH_WAYS,
    stays="its model, the weights of its last layers",
    strategy=FedALA,
    client=FedALAClient,
    settings=(HEAD_LAYERS, ALA_SHARE, ALA_LEARNING_RATE, AGGREGATION),
)
