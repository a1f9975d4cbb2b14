"""FedDF: the server fuses the clients' models by distilling their ensemble on unlabelled images.

T. Lin, L. Kong, S. U. Stich, M. Jaggi: Ensemble Distillation for Robust Model Fusion in Federated Learning. NeurIPS
2020, arXiv:2006.07242.

This is Algorithm 1, and Algorithm 3 for clients whose networks differ. A round, with x_k the models of the clients S
that replied, f(x, d) a model's logits on images d, and s the softmax:

    clients                  train the model of their network, on n_k samples each
    `WeightedMean`           the student of each network begins as sum_k n_k x_k / sum_k n_k over its own clients
    `logits_of`, `teacher`   s(1/|S| sum_k f(x_k, d)) on all public images: the ensemble of all models of all networks
    `distil`                 N steps of Adam on KL(teacher || s(f(x, d))), on batches of public images

The student is the network's next model. With N = 0 and one network this is FedAvg.

What the paper leaves open, and where we or others depart from it:
- The teacher does not change within a round. Each client's logits are therefore computed once, on the whole public set,
  when its reply arrives, and summed in order of client. The ensemble's models need not be kept.
- The gradient of the KL divergence is that of the cross-entropy with the teacher's probabilities as labels; the two
  losses differ by the teacher's entropy.
- The step size falls to 0 along half a cosine over the N steps, as in the paper. The paper makes up to 10,000 steps and
  stops when accuracy on a validation set has not risen for 1,000. The server has no labels here, so N is a setting. Its
  default is much smaller, to save time.
- The authors' code by default averages the divergences from the single models, and clips gradients. The paper's teacher
  is the softmax of the mean logits (AVGLOGITS), with equal weights and without clipping. This implementation follows
  the paper.
- Normalisation: teachers use the buffers that their clients sent. A student is in training mode. It starts with the
  mean of the buffers and normalises by the batch. Its running statistics become those of the public images, on which
  its weights are trained. Its integer buffers continue from the median of its network's clients.
- A network none of whose clients replied in a round is distilled from its last model.
- A client's model whose logits overflow is refused, because a single one would spoil the teacher. If a student's
  weights overflow, for example because the step size is too large, the round's mean is used instead.
- `aggregation` can replace both means, that of a network's models and that of all models' logits, by a rule that bounds
  the part of a minority of attackers (`parts/aggregation.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import WARNING
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from flwr.app import ArrayRecord
from flwr.supercore import log

from kindred.client.evaluation import evaluation_mode
from kindred.client.training import (
    CLASSES,
    batches,
    channels_last,
    differentiating,
    get_arrays,
    pick_device,
    seeded,
    set_arrays,
)
from kindred.engine.admission import Refused, Reply
from kindred.engine.arguments import Shared
from kindred.engine.collaboration import Collaboration
from kindred.engine.in_turn import InTurn
from kindred.engine.layout import Layout, check_buffers
from kindred.engine.strategy import PersonalizedStrategy
from kindred.lazy import lazy
from kindred.messages import (
    NETWORK,
    RECEIVED,
    ClientId,
    by_prefix,
    check,
    read_record,
    seed_for,
    to_record,
    with_prefix,
)
from kindred.objectives import Objective
from kindred.parts.aggregation import AGGREGATION, aggregate
from kindred.registry import MODEL_BOTH_WAYS, Method
from kindred.settings import DEVICE, Setting, above, within

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

DISTILL_STEPS = Setting(
    "distill_steps",
    200,
    within(0, 10**6),
    "steps per round by which the server distils the clients' models into one; 0 is FedAvg",
    trial=3,
)
DISTILL_LEARNING_RATE = Setting(
    "distill_learning_rate", 0.001, above(0, 1000), "initial step size of Adam in distillation", trial=0.01
)
PUBLIC_BATCH_SIZE = Setting("public_batch_size", 128, within(1, 10**6), "public images per step", trial=2)

# --- The mathematics ----------------------------------------------------------------------------------


def logits_of(model: torch.nn.Module, images: torch.Tensor, batch_size: int = 128) -> torch.Tensor:
    """Return a model's logits in evaluation mode, f(x, d), shape (P, N), and restore its own mode."""
    images = channels_last(model, images)
    with evaluation_mode(model), torch.inference_mode():
        return torch.cat([model(batch).float() for batch in images.split(batch_size)])  # (P, N)


def teacher(mean_logits: np.ndarray, objective: Objective = CLASSES) -> torch.Tensor:
    """Return the ensemble's predictions s(1/|S| sum_k f(x_k, d)), (P, N), from its mean logits, (P, N)."""
    return objective.predictions(torch.from_numpy(mean_logits))


def distil(
    student: torch.nn.Module,
    images: torch.Tensor,
    predictions: torch.Tensor,
    *,
    steps: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
    objective: Objective = CLASSES,
) -> None:
    """Train a model towards a teacher, in place: Adam on the loss of its outputs, with the teacher's predictions.

    Parameters
    ----------
    student : torch.nn.Module
        Left in training mode.
    images : tensor (P, ...)
        On the model's device, as are the predictions.
    predictions : tensor (P, N)
        The teacher's.
    steps : int
        N, 1 or more.
    learning_rate : float
        Step size of the first step; that of step j, from 0, is (1 + cos(pi j / N)) / 2 times this.
    batch_size : int
        Images per step, drawn independently.
    seed : int
        Seed of these draws, and of the network's own random numbers, such as dropout.
    objective : Objective
        Its loss, with the teacher's predictions as targets, is minimised. For classes its gradient is that of the KL
        divergence.
    """
    images = channels_last(student, images)
    weights = [parameter for parameter in student.parameters() if parameter.requires_grad]
    adam = torch.optim.Adam(weights, learning_rate)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    generator = torch.Generator().manual_seed(seed)
    with (
        seeded(seed, images.device),
        differentiating(student, images, batch_size, objective) as gradients_of,
    ):
        for batch, wanted in batches((images, predictions), 0, steps, batch_size, generator):
            _, gradients = gradients_of(batch, wanted)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            adam.step()
            adam.zero_grad()
            falling.step()


# --- The client ---------------------------------------------------------------------------------------
# Local training from the received model: `LocalTraining` in client/local_training.py. Where networks differ, a
# client reports the name of its network when it connects (`network`), and receives and returns models of that network.


# --- The server ---------------------------------------------------------------------------------------


class FedDF(PersonalizedStrategy):
    """FedDF as a Flower strategy.

    `start` takes the model that clients start from. For several networks it takes all models in one record, each under
    its network's name: `with_prefix(name, arrays)`, "name/layer.weight".

    Parameters
    ----------
    models : mapping of str to callable
        The networks that clients may have: name -> callable that returns a new module, from images to logits. `start`
        needs them.
    public : tensor (P, ...)
        Unlabelled images, scaled like the models' training images. `start` needs them.
    distill_steps : int (default: 200)
        N, the steps of distillation per round, 0 or more.
    distill_learning_rate : float (default: 0.001)
        Initial step size of Adam, more than 0.
    public_batch_size : int (default: 128)
        Public images per step, 1 or more.
    device : {"auto", "cpu", "cuda"}
        Where the server computes logits and distils.
    aggregation : {"mean", "median", "trimmed-mean", "krum", "multi-krum", "biweight"}
        Rule for the models of a network and for the logits of all models; see `parts.aggregation`.
    objective : Objective
        What the networks' outputs mean; by default a logit for each class.
    **shared
        Arguments of `PersonalizedStrategy`. `buffers` are by default those of each network's modules.

    Attributes
    ----------
    networks : dict
        client -> the name of its network, for the clients that reported it when they connected.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "feddf"
    personal = RECEIVED
    STATE = (*PersonalizedStrategy.STATE, "_globals", "_shares", "_sent", "networks")

    def __init__(
        self,
        *,
        models: Mapping[str, Callable[[], torch.nn.Module]] | None = None,
        public: torch.Tensor | None = None,
        distill_steps: int = DISTILL_STEPS.default,
        distill_learning_rate: float = DISTILL_LEARNING_RATE.default,
        public_batch_size: int = PUBLIC_BATCH_SIZE.default,
        device: str = DEVICE.default,
        aggregation: str = AGGREGATION.default,
        objective: Objective = CLASSES,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(**shared)
        if models is not None:
            check("models", sorted(models), len(models) >= 1, "one network or more")
        if public is not None:
            check("public", tuple(public.shape), len(public) >= 1, "one image or more")
        self.models = dict(models or {})
        self.public = public
        self.distill_steps = DISTILL_STEPS.check(distill_steps)
        self.distill_learning_rate = DISTILL_LEARNING_RATE.check(distill_learning_rate)
        self.public_batch_size = PUBLIC_BATCH_SIZE.check(public_batch_size)
        self.device = DEVICE.check(device)
        self.aggregation = AGGREGATION.check(aggregation)
        self.objective = objective.unweighted

    def begin(self, initial_arrays: ArrayRecord) -> None:
        if not self.models or self.public is None:
            missing = "public" if self.models else "models"
            raise ValueError(f"{missing} is None, but FedDF needs the clients' networks (models) and public images")
        device = pick_device(self.device)
        parts = {next(iter(self.models)): initial_arrays} if len(self.models) == 1 else by_prefix(initial_arrays)
        if parts.keys() != self.models.keys():
            raise ValueError(f"initial_arrays holds models of {', '.join(parts)}, expected {', '.join(self.models)}")
        self._images = self.public.to(device)
        self._modules = {name: make().to(device) for name, make in self.models.items()}
        self._globals = {name: ArrayRecord(dict(parts[name])) for name in self.models}
        self._layouts: dict[str, Layout] = {}
        classes = {}
        if self.buffers is not None:
            check_buffers(self.buffers, [key for record in self._globals.values() for key in record])
        for name, module in self._modules.items():
            set_arrays(module, arrays := read_record(self._globals[name]))
            buffers = [key for key, _ in module.named_buffers()] if self.buffers is None else self.buffers
            self._layouts[name] = Layout(arrays, [key for key in buffers if key in arrays])
            classes[name] = logits_of(module, self._images[:1]).shape[1]
        check("models", classes, len(set(classes.values())) == 1, "networks for one number of classes")
        self._logits_shape = (len(self._images), next(iter(classes.values())))  # (P, N)
        self.networks: dict[ClientId, str] = {}
        # network -> client -> the client's weight in the network's model; the same for the model that was sent last.
        self._shares: dict[str, dict[ClientId, float]] = {name: {} for name in self.models}
        self._sent = self._shares

    def introduce(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        reasons = super().introduce(newcomers)
        for client, about in newcomers.items():
            name = about.get(NETWORK)
            if len(self.models) == 1:  # the client may give it another name: models are checked by their arrays
                self.networks[client] = next(iter(self.models))
            elif isinstance(name, str) and name in self.models:
                self.networks[client] = name
            else:
                found = "it does not report its network" if name is None else f"its network is {name!r}"
                reasons.setdefault(client, f"{found}, expected one of {', '.join(self.models)}")
        return reasons

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._means = {name: self.aggregate_of(layout) for name, layout in self._layouts.items()}
        self._counters: dict[ClientId, Mapping[str, np.ndarray]] = {}
        self._logits: dict[ClientId, torch.Tensor] = {}  # (P, N), of replies that are being checked
        self._ensemble = aggregate(
            self.aggregation, math.prod(self._logits_shape), np.dtype(np.float32), self.norms.lengths
        )
        self._terms: InTurn[tuple[float, np.ndarray, torch.Tensor | None]] = InTurn(clients, self._add)
        self._sent = dict(self._shares)
        return ((client, self.personal_arrays(client)) for client in clients)

    def mismatch(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> str | None:
        return self._layouts[self.networks[client]].mismatch(arrays)

    def inspect(self, client: ClientId, reply: Reply) -> None:
        """Compute the logits that the client's model adds to the teacher; refuse them if they are not finite."""
        if self.distill_steps:
            module = self._modules[self.networks[client]]
            set_arrays(module, reply.arrays)
            logits = self._logits[client] = logits_of(module, self._images)
            if not logits.isfinite().all():
                raise Refused("its model gives logits that are not finite")

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float:
        return self._layouts[self.networks[client]].distance(arrays, self.update_origin(client))

    def network_of(self, client: ClientId) -> str:
        return self.networks[client]

    def update_origin(self, client: ClientId) -> Mapping[str, np.ndarray]:
        """Return the model of the client's network, which the client was sent."""
        return read_record(self.personal_arrays(client))

    def take(self, client: ClientId, reply: Reply) -> None:
        layout = self._layouts[self.networks[client]]
        row = np.empty(layout.size, layout.dtype)  # (d,)
        layout.flatten(reply.arrays, row)
        self._counters[client] = layout.integer_arrays(reply.arrays)
        examples = reply.number(self.weighted_by_key)
        self._terms.add(client, (examples, row, self._logits.pop(client, None)))

    def _add(self, client: ClientId, term: tuple[float, np.ndarray, torch.Tensor | None]) -> None:
        examples, row, logits = term
        self._means[self.networks[client]].add(client, examples, row)
        if logits is not None:  # only where there are steps of distillation
            self._ensemble.add(client, 1.0, logits.cpu().numpy().ravel())

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        self._terms.finish()
        mean_logits = self._ensemble.result()  # (P N,)
        wanted = None if mean_logits is None else teacher(mean_logits.reshape(self._logits_shape), self.objective)
        for name, layout in self._layouts.items():
            mean = self._means[name].result()
            if mean is not None:
                counters = [self._counters[client] for client in self._means[name].claimed]
                integers = layout.integer_medians(counters, read_record(self._globals[name]))
                self._globals[name] = layout.record(mean, integers)
                self._shares[name] = self._means[name].weights
            if wanted is not None:
                self._distil(name, wanted.to(self._images.device), server_round)
                self._shares[name] = self._ensemble.weights

    def _distil(self, name: str, predictions: torch.Tensor, server_round: int) -> None:
        student = self._modules[name]
        set_arrays(student, read_record(self._globals[name]))
        distil(
            student,
            self._images,
            predictions,
            steps=self.distill_steps,
            learning_rate=self.distill_learning_rate,
            batch_size=self.public_batch_size,
            seed=seed_for(self.seed, "distillation", name, server_round),
            objective=self.objective,
        )
        arrays = get_arrays(student)
        if all(np.isfinite(array).all() for array in arrays.values()):
            self._globals[name] = to_record(arrays)
        else:
            log(
                WARNING,
                "kindred: round %d: distilling %s gave weights that are not finite, so the mean of its clients' "
                "models is used",
                server_round,
                name,
            )

    def global_arrays(self) -> ArrayRecord:
        """Return the model of the only network; of several networks all models, in the form that `start` takes."""
        if len(self._globals) == 1:
            return next(iter(self._globals.values()))
        return ArrayRecord(
            {key: array for name, record in self._globals.items() for key, array in with_prefix(name, record).items()}
        )

    def general_model(self, network: str = "") -> ArrayRecord | None:
        """Return the model of this network; of the only network, whatever the site calls it."""
        return self.global_arrays() if len(self._globals) == 1 else self._globals.get(network)

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        return self._globals[self.networks[client]]

    def client_models(self) -> dict[ClientId, ArrayRecord]:
        """Return the model of each client's network."""
        return {client: self.personal_arrays(client) for client in self.participants()}

    def shared_rows(self) -> Collaboration:
        """Return the clients' shares in the model of each one's network that was sent last.

        With distillation it is the share in the teacher, equal for all clients that replied, or for those that
        `aggregation` keeps; without, the share in the mean.
        """
        return Collaboration.by_row(self.clients(), self._sent, self.networks)


METHOD = Method(
    title="FedDF",
    paper="Lin et al., NeurIPS 2020, arXiv:2006.07242",
    travels=MODEL_BOTH_WAYS,
    strategy=FedDF,
    settings=(DISTILL_STEPS, DISTILL_LEARNING_RATE, PUBLIC_BATCH_SIZE, AGGREGATION),
    mixed_networks=True,
    needs_public_set=True,
    distils=True,
)
