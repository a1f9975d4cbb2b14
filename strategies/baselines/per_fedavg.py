"""Per-FedAvg, first-order: clients train a global model that a little plain SGD adapts to each client.

A. Fallah, A. Mokhtari, A. Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach. NeurIPS 2020, arXiv:2002.07948.

The method minimises the mean over the clients of F_i(w) = f_i(w - alpha grad f_i(w)), the loss after a step of
adaptation. A local step of Algorithm 1, on batches D and D' that are drawn independently:

| paper | here |
|---|---|
| w~ = w - alpha grad f_i(w; D) | `descend` by alpha |
| w = w - beta (I - alpha Hessian) grad f_i(w~; D') | `meta_step`, without the Hessian |
| w = mean of the clients' w | `Averaging` |
| each client evaluates an adapted model, w - alpha grad f_i(w) | `adapt` |

The Hessian is omitted: this is the paper's Per-FedAvg (FO). As alpha goes to 0 it becomes FedAvg, with plain SGD of
step size beta.

Decisions, and where we depart from the paper:

- A client adapts the model by an epoch of plain SGD with step size alpha, in the same batches as FedAvg-FT's
  fine-tuning. With `adapt_epochs=0` it makes one step along the gradient over all its training data, as in the
  definition of F_i; in the paper's experiments it makes a step of SGD. Local training is the same for both.
- D and D' are the batches of equally many epochs, or steps, each with its own order: an epoch of local training goes
  over the data twice. D' are the batches that FedAvg's clients draw.
- The mean of the clients' models is weighted by their numbers of samples, as in this library's FedAvg.
- Running statistics of normalisation layers include both batches, and in an adapted model the data to which it was
  adapted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from flwr.app import MetricRecord, RecordDict

from kindred.client.sgd import MeanLoss, descend
from kindred.client.training import Gradients, channels_last, get_arrays, set_arrays, trained_weights
from kindred.client.visit import Visit
from kindred.engine.arguments import AveragedShared
from kindred.lazy import lazy
from kindred.messages import ARRAYS, METRICS, RECEIVED, TRAIN_LOSS, TRAINED, TUNED, ClientId, to_record
from kindred.parts.aggregation import AGGREGATION
from kindred.registry import MODEL_BOTH_WAYS, Method
from kindred.settings import OPTIMISER_SETTINGS, Setting, above, within

from .fedavg import Tuned

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

SGD_LEARNING_RATE = Setting(
    "sgd_learning_rate",
    0.2,
    above(0, 1000),
    "step size of local training by plain SGD (beta), which ignores optimizer and learning-rate",
    trial=0.1,
)
ADAPT_LEARNING_RATE = Setting(
    "adapt_learning_rate",
    0.01,
    above(0, 1000),
    "step size by which a client adapts the global model (alpha)",
    trial=0.1,
)
ADAPT_EPOCHS = Setting(
    "adapt_epochs",
    1,
    within(0, 10_000),
    "epochs of plain SGD, in batches, by which a client adapts the global model; 0: one step along the gradient over "
    "all its training data",
)

Batch = tuple["Tensor", ...]

# --- The mathematics ----------------------------------------------------------------------------------


def meta_step(
    weights: Sequence[Tensor], gradients_of: Gradients, first: Batch, second: Batch, alpha: float, beta: float
) -> Tensor:
    """Update w = w - beta grad f(w - alpha grad f(w; D); D'), in place.

    Parameters
    ----------
    weights : sequence of tensors
        w, the weights of the model whose gradients `gradients_of` computes.
    gradients_of : callable
        Given the images and labels of a batch, returns the mean loss and its gradient.
    first, second : tuple of tensors
        D and D'.
    alpha, beta : float
        The step sizes.

    Returns
    -------
    tensor, shape ()
        The loss on D' of the adapted model.
    """
    before = [weight.clone() for weight in weights]
    descend(weights, gradients_of(*first)[1], alpha)
    loss, gradients = gradients_of(*second)
    descend(before, gradients, beta)
    for weight, new in zip(weights, before, strict=True):
        weight.copy_(new)
    return loss


# --- The client ---------------------------------------------------------------------------------------


class PerFedAvgClient:
    """The client half: trains the received model so that its loss after adaptation decreases."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train by `meta_step` (Algorithm 1, on the client); evaluate the received, adapted and trained model."""
        alpha, beta = float(visit.config[ADAPT_LEARNING_RATE.key]), float(visit.config[SGD_LEARNING_RATE.key])
        model = visit.model()
        metrics = visit.evaluation(RECEIVED, model)
        adapt(visit, model)
        metrics |= visit.evaluation(TUNED, model)
        set_arrays(model, visit.arrays)

        samples = channels_last(model, visit.site.train[0]), visit.site.train[1]
        weights, train_loss = trained_weights(model), MeanLoss()
        with visit.differentiating(model) as gradients_of:
            for first, second in zip(visit.batches("adapt", samples), visit.batches(samples=samples), strict=True):
                train_loss.add(meta_step(weights, gradients_of, first, second, alpha, beta), len(second[1]))
        metrics[TRAIN_LOSS] = train_loss.result()
        metrics |= visit.evaluation(TRAINED, model) | visit.counts()
        return RecordDict({ARRAYS: to_record(get_arrays(model)), METRICS: MetricRecord({**metrics})})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Adapt the received model and evaluate it; the reply holds the adapted model."""
        model = visit.model()
        adapt(visit, model)
        metrics = visit.separate_evaluation(model)
        if visit.is_site:
            visit.keep(model, metrics)
        return RecordDict({ARRAYS: to_record(get_arrays(model)), METRICS: MetricRecord({**metrics})})


def adapt(visit: Visit, model: torch.nn.Module) -> None:
    """Update w = w - alpha grad f_i(w), in place: on the batches of some epochs, or once over all training data."""
    alpha, epochs = float(visit.config[ADAPT_LEARNING_RATE.key]), int(visit.config[ADAPT_EPOCHS.key])
    if epochs:
        plain: dict[str, Any] = {"optimizer": "sgd", "learning_rate": alpha, "momentum": 0.0, "weight_decay": 0.0}
        visit.train(model, epochs=epochs, purpose="tune", **plain)
        return
    gradient = visit.gradient(model)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    descend(
        trained_weights(model),
        (torch.from_numpy(gradient[name]).to(visit.device) for name in names),
        alpha,
    )


# --- The server ---------------------------------------------------------------------------------------


class PerFedAvg(Tuned):
    """First-order Per-FedAvg as a Flower strategy.

    Parameters
    ----------
    sgd_learning_rate : float (default: 0.2)
        beta, above 0: the step size of local training.
    adapt_learning_rate : float (default: 0.01)
        alpha, above 0: the step size of adaptation.
    adapt_epochs : int (default: 1)
        Epochs of adaptation, 0 or more. 0: one step along the gradient over all training data.
    **shared
        `aggregation` of `Averaging`, and arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "per-fedavg"

    def __init__(
        self,
        *,
        sgd_learning_rate: float = SGD_LEARNING_RATE.default,
        adapt_learning_rate: float = ADAPT_LEARNING_RATE.default,
        adapt_epochs: int = ADAPT_EPOCHS.default,
        **shared: Unpack[AveragedShared],
    ) -> None:
        super().__init__(**shared)
        self.sgd_learning_rate = SGD_LEARNING_RATE.check(sgd_learning_rate)
        self.adapt_learning_rate = ADAPT_LEARNING_RATE.check(adapt_learning_rate)
        self.adapt_epochs = ADAPT_EPOCHS.check(adapt_epochs)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {
            **super().round_config(server_round, client),
            SGD_LEARNING_RATE.key: self.sgd_learning_rate,
            ADAPT_LEARNING_RATE.key: self.adapt_learning_rate,
            ADAPT_EPOCHS.key: self.adapt_epochs,
        }


METHOD = Method(
    title="Per-FedAvg",
    paper="Fallah et al., NeurIPS 2020, arXiv:2002.07948",
    travels=MODEL_BOTH_WAYS,
    strategy=PerFedAvg,
    client=PerFedAvgClient,
    settings=(SGD_LEARNING_RATE, ADAPT_LEARNING_RATE, ADAPT_EPOCHS, AGGREGATION),
    ignores=OPTIMISER_SETTINGS,
)
