"""FedFomo: each client weights other clients' models by the decrease of its loss on held-out data.

M. Zhang, K. Sapra, S. Fidler, S. Yeung, J. M. Alvarez: Personalized Federated Learning with First Order Model
Optimization. ICLR 2021, arXiv:2012.08565.

Client i has a model theta_i, and validation data with the mean loss L_i. A round, with b the model from which the
client trained theta_i in the round before:

| paper | here |
|---|---|
| M models of other clients by epsilon-greedy choice on the affinities P_i | `choose_neighbours`, of FedeRiCo |
| w_n = (L_i(b) - L_i(theta_n)) / abs(theta_n - b), the client's own theta_i among the theta_n | `model_weights` |
| negative weights become 0, and the others are divided by their sum | `model_weights` |
| theta_i = b + sum_n w_n (theta_n - b) = sum_n w_n theta_n | `parts.combination.combined` |
| local training from this theta_i, which gives the model that is sent | `FedFomoClient.train` |
| P_in grows by w_n | `FedFomo.take` |

`received-accuracy` is that of the combination, from which training starts; the result is the trained model.

Where the paper is silent or we depart from it:
- If no model is better than b, the paper's update gives b, and the training of the round before would be lost. Here
  the client continues with its own theta_i. So FedFomo without neighbours, or with equal losses, is local training.
- As weights sum to 1, b cancels. A client's own model has no part in the combination where it is no better than b.
  In implementations that compare with theta_i in place of b, it has none whenever another model is better.
- P is the sum of the weights of the update. The authors' code also adds negative weights, divided by the absolute value
  of their sum, which may be close to 0. Ties, such as models not received yet, are broken at random. The authors' code
  also reduces epsilon over time.
- Validation data are a share of the training data, drawn once for each client, on which it does not train. Where a site
  has its own validation data, these are used and it trains on all training data. One sample or two are used for both.
- A client whose reply was lost uses as b the model from which it then trained, whatever model the server has for it.
- Any model that the server has received can be drawn, in its last version. All clients start from the initial model.
- Distances are of parameters. Floating-point buffers are combined like parameters; integer buffers are the client's
  own.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from kindred.client.local_training import LocalTraining
from kindred.client.site import Samples
from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.engine.admission import Refused, Reply, norm
from kindred.engine.arguments import StoredShared
from kindred.engine.collaboration import Collaboration
from kindred.engine.sent_models import SentModels
from kindred.engine.stored import StoredModels
from kindred.messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    NEIGHBOURS,
    RECEIVED,
    TRAIN_LOSS,
    TRAINED,
    WEIGHTS,
    ClientId,
    encode,
    in_a_row,
    in_order,
    seed_for,
    to_record,
)
from kindred.parts.combination import combined
from kindred.parts.neighbours import choose_neighbours
from kindred.registry import Method
from kindred.settings import STORE, Setting, within

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, np.ndarray]

NUM_NEIGHBOURS = Setting(
    "num_neighbours",
    3,
    within(0, 10**6),
    "models of other clients that a client receives per round (M); 0 is local training",
    trial=2,
)
EPSILON = Setting("epsilon", 0.3, within(0, 1), "probability of a random neighbour instead of the best")
VALIDATION_SHARE = 0.2
"""Share of its training samples that a client without validation data holds out, to weight models by their losses."""

BEFORE = "before"  # name under which a client keeps b, the model from which it trained last

# Largest difference from 1 of the sum of weights.
SUM_TOLERANCE = 1e-6

# --- The mathematics ----------------------------------------------------------------------------------


def model_weights(loss_before: float, losses: Sequence[float], distances: Sequence[float]) -> np.ndarray:
    """Return w_n = max(0, (L(b) - L(theta_n)) / ||theta_n - b||), divided by their sum.

    Parameters
    ----------
    loss_before : float
        L(b).
    losses, distances : sequence of k floats
        L(theta_n) and ||theta_n - b||.

    Returns
    -------
    ndarray, shape (k,)
        Summing to 1; all 0 if no model is better than b. A model has weight 0 if its loss or distance is not finite,
        or if it equals b.
    """
    after, moved = np.asarray(losses, dtype=np.float64), np.asarray(distances, dtype=np.float64)  # (k,)
    usable = np.isfinite(after) & np.isfinite(moved) & (moved > 0)
    # If the loss of b is not finite, every other model is better, all by the same amount.
    gains = loss_before - after if np.isfinite(loss_before) else np.ones_like(after)  # (k,)
    weights = np.divide(np.maximum(gains, 0), moved, out=np.zeros_like(after), where=usable)
    return weights / weights.sum() if weights.any() else weights


def split(size: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide a client's samples into training and validation, with at least two and one.

    Returns
    -------
    training, validation : ndarray of int
        Indices, in order; together 0 to size - 1. One sample or two, of which none can be held out because batch
        normalisation needs two, are in both.
    """
    order = np.random.default_rng(seed).permutation(size)
    if size < 3:
        return order, order
    held_out = min(max(round(share * size), 1), size - 2)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


# --- The client ---------------------------------------------------------------------------------------


class FedFomoClient(LocalTraining):
    """The client half: weights and combines the received models, and trains the combination."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train the combination; the reply holds the trained model and the models' weights, the client's own first."""
        training, validation = _split(visit)
        models = in_a_row(visit.arrays)
        weights = weigh_models(visit, models, validation)
        model = visit.model(combined(models, weights) if weights.any() else models[0])
        visit.state.save(BEFORE, get_arrays(model))

        metrics = visit.evaluation(RECEIVED, model)
        metrics[TRAIN_LOSS] = visit.train(model, samples=training)
        metrics |= visit.evaluation(TRAINED, model) | visit.counts()
        return RecordDict(
            {
                ARRAYS: to_record(get_arrays(model)),
                METRICS: MetricRecord({**metrics}),
                CONFIG: ConfigRecord({WEIGHTS: weights.tolist()}),
            }
        )


def _split(visit: Visit) -> tuple[Samples, Samples]:
    """Return the samples for training, and those for the losses that weight models."""
    site = visit.site
    if site.validation is not None and len(site.validation[1]):
        return site.train, site.validation
    seed = seed_for(visit.config.get("seed", 0), visit.client, "validation")
    training, validation = split(len(site.train[1]), VALIDATION_SHARE, seed)
    return visit.samples_at(training), visit.samples_at(validation)


def weigh_models(visit: Visit, models: Sequence[Arrays], validation: Samples) -> np.ndarray:
    """Return the weights of the models, shape (k,), of which the first is the client's own.

    b is the model from which the client trained last; if it has none yet, b is its own model.
    """
    known = visit.state.load(BEFORE)
    before = models[0] if known is None else known
    module = visit.model(before)
    loss_before = visit.loss(module, validation)
    names = _trainable_names(module)
    losses = [visit.loss(visit.model(arrays), validation) for arrays in models]
    distances = [norm(arrays[name] - before[name] for name in names) for arrays in models]
    return model_weights(loss_before, losses, distances)


def _trainable_names(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that are trained."""
    return [name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter.requires_grad]


# --- The server ---------------------------------------------------------------------------------------


class FedFomo(StoredModels):
    """FedFomo as a Flower strategy.

    Parameters
    ----------
    num_neighbours : int (default: 3)
        M, 0 or more: models of other clients that a client receives per round; 0 is local training.
    epsilon : float (default: 0.3)
        Probability, 0 to 1, that one of them is drawn at random instead of by affinity.
    **shared
        Arguments of `StoredModels`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "fedfomo"
    clients_keep_state = True
    STATE = (*StoredModels.STATE, "_affinities", "_weights")

    def __init__(
        self,
        *,
        num_neighbours: int = NUM_NEIGHBOURS.default,
        epsilon: float = EPSILON.default,
        **shared: Unpack[StoredShared],
    ) -> None:
        super().__init__(**shared)
        self.num_neighbours = NUM_NEIGHBOURS.check(num_neighbours)
        self.epsilon = EPSILON.check(epsilon)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._affinities: dict[ClientId, dict[ClientId, float]] = {}  # P_in of every client that has sent a model
        self._weights: dict[ClientId, dict[ClientId, float]] = {}  # w_n of the last round in which it took part
        self._sent = SentModels(self.models)

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self.welcome(clients)
        available = [other for other in in_order(self._affinities) if other not in self.history.left_out]
        for client in clients:
            yield client, self._sent.pack(client, self._choose(client, available, server_round))
        self._sent.forget_packed()

    def _choose(self, client: ClientId, available: Sequence[ClientId], server_round: int) -> list[ClientId]:
        """Draw a client's neighbours by its affinities."""
        others = [other for other in available if other != client]
        affinities = self._affinities.get(client, {})
        order = choose_neighbours(
            -np.fromiter(map(affinities.get, others, repeat(0.0)), np.float64, len(others)),
            self.epsilon,
            seed_for(self.seed, client, server_round, NEIGHBOURS),
            self.num_neighbours,
        )
        return [others[i] for i in order]

    def inspect(self, client: ClientId, reply: Reply) -> None:
        weights, due = reply.config.get(WEIGHTS), len(self._sent.owners[client])
        if (
            not isinstance(weights, list)
            or len(weights) != due
            or not all(isinstance(weight, float) and 0 <= weight <= 1 for weight in weights)
            or not (sum(weights) == 0 or abs(sum(weights) - 1) <= SUM_TOLERANCE)
        ):
            raise Refused(
                f"its weights are {reprlib.repr(weights)}, expected {due} numbers, 0 to 1, that sum to 1 or are all 0"
            )

    def take(self, client: ClientId, reply: Reply) -> None:
        super().take(client, reply)
        reported = dict(zip(self._sent.owners[client], reply.config[WEIGHTS], strict=True))
        self._weights[client] = reported
        affinities = self._affinities.setdefault(client, {})
        for other, weight in reported.items():
            if other != client:
                affinities[other] = affinities.get(other, 0.0) + weight

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        super().end_round(server_round, answered)
        self._sent = SentModels(self.models)  # a message to evaluate holds the client's own model only

    def row_fields(self, client: ClientId) -> dict[str, Any]:
        """Return the other clients whose models the client received."""
        return {NEIGHBOURS: encode(self._sent.neighbours(client))}

    def shared_rows(self) -> Collaboration:
        """Return the weights that each client reported last.

        A client has weight 1 on its own model where no model was better, or where it has reported no weights.
        """
        clients = list(self.models)
        weights = {client: self._weights[client] for client in clients if client in self._weights}
        return Collaboration.by_row(clients, weights, {client: client for client in clients})


METHOD = Method(
    title="FedFomo",
    paper="Zhang et al., ICLR 2021, arXiv:2012.08565",
    travels="the client's and others' models, down; its model and their weights, up",
    stays="the model that it last trained from",
    strategy=FedFomo,
    client=FedFomoClient,
    settings=(NUM_NEIGHBOURS, EPSILON, STORE),
)
