"""FedRep: all clients train the same body of a network, and each trains its own head.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai: Exploiting Shared Representations for Personalized Federated
Learning. ICML 2021, arXiv:2102.07078.

The model of client i is h_i(phi(x)). The body phi, the representation of the data, is the same for all clients; the
head h_i is for client i's own labels. Together the clients minimise

    min over phi of 1/n sum_i min over h_i of f_i(h_i, phi)

| Algorithm 1 | here |
|---|---|
| tau updates of the head h_i, with the body fixed | `FedRepClient.train`, `head_epochs` |
| then updates of the body, with that head fixed | `FedRepClient.train`, the message's local epochs |
| phi = 1/(rn) sum_i phi_i, over the sampled clients | `FedRep.take`: an unweighted mean, whatever the clients' sizes |

The head is the network's last `head_layers` layers. It never leaves the client; only the body is sent. The result for a
client is its model after both steps: its head on the body that it trained.

Where we depart from the paper or it is silent:
- A client's first head is that of the initial model. The server sends it with the body until the client has replied. It
  sends it again after a missing reply, because the client may have lost its head. A client that has a head keeps it.
- The paper makes many updates of the head for each update of the body. Here both numbers of epochs are settings, and
  each step starts the message's optimiser anew.
- The running statistics of normalisation layers are not weights of either step: they follow the data in both.
- After the last round the authors' program trains the heads once more. Here, as in Algorithm 1, nothing follows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from kindred.client.state import MODEL
from kindred.client.training import get_arrays, trained_weights
from kindred.client.visit import Visit
from kindred.engine.admission import Reply
from kindred.engine.arguments import AveragedShared
from kindred.engine.layout import last_layers
from kindred.errors import Reportable
from kindred.messages import ARRAYS, METRICS, OWN, RECEIVED, TRAIN_LOSS, ClientId, to_record
from kindred.parts.aggregation import AGGREGATION
from kindred.registry import Method
from kindred.settings import Setting, within

from .fedavg import Averaging

if TYPE_CHECKING:
    import numpy as np
    import torch

HEAD = "head"  # in a message: the names of the head's arrays
HEAD_LAYERS = Setting("head_layers", 1, within(1, 1000), "number of last layers of the network that stay at the client")
HEAD_EPOCHS = Setting(
    "head_epochs", 5, within(0, 10_000), "epochs on the last layers, before local-epochs on the others", trial=1
)

# --- The mathematics ----------------------------------------------------------------------------------
# Both steps are local training with some of the weights fixed.


@contextlib.contextmanager
def training_only(model: torch.nn.Module, names: Collection[str]) -> Iterator[None]:
    """Within this context, only those of the trainable parameters that have these names are trained."""
    fixed = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and name not in names]
    for parameter in fixed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in fixed:
            parameter.requires_grad_(True)


# --- The client ---------------------------------------------------------------------------------------


class FedRepClient:
    """The client half: trains the client's head on the received body, then that body with the head fixed."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train the head, then the body (Algorithm 1, at a client); the reply holds the trained body."""
        head = visit.config[HEAD]
        model = _composed(visit, visit.state.load(MODEL))
        body = [name for name, _ in model.named_parameters() if name not in head]
        metrics = visit.evaluation(RECEIVED, model)
        with training_only(model, head):
            if trained_weights(model):  # neither frozen nor without parameters
                visit.train(model, epochs=int(visit.config[HEAD_EPOCHS.key]), purpose=HEAD)
        with training_only(model, body):
            metrics[TRAIN_LOSS] = visit.train(model) if trained_weights(model) else math.nan
        metrics |= visit.evaluation(OWN, model) | visit.counts()
        arrays = {name: array for name, array in get_arrays(model).items() if name not in head}
        return RecordDict({ARRAYS: to_record(arrays), METRICS: MetricRecord({**metrics})})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the client's own model; if it has none yet, the initial head on the received body."""
        own = visit.state.load(MODEL)
        model = visit.model(own) if own else _composed(visit, own)
        return RecordDict({METRICS: MetricRecord({**visit.separate_evaluation(model)})})


def _composed(visit: Visit, own: Mapping[str, np.ndarray] | None) -> torch.nn.Module:
    """Return the client's head on the received body.

    Raises
    ------
    ValueError
        The client has no head, and the message has none; the next message will have one. Or head and body share a
        parameter.
    """
    heads = own or visit.arrays
    for name in visit.config[HEAD]:
        if name not in heads:
            raise ValueError(
                Reportable(f"client {visit.client} has lost its head: {name!r} is missing; the server sends it again")
            )
    model = visit.model({**visit.arrays, **{name: heads[name] for name in visit.config[HEAD]}})
    parameters: dict[torch.nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = parameters.setdefault(parameter, name)
        if (name in visit.config[HEAD]) != (other in visit.config[HEAD]):
            raise ValueError(
                Reportable(f"{other} of the network is {name} too: FedRep cannot train a parameter in body and head")
            )
    return model


# --- The server ---------------------------------------------------------------------------------------


class FedRep(Averaging):
    """FedRep as a Flower strategy. Its global model is the body alone.

    Parameters
    ----------
    head_layers : int (default: 1)
        Number of last layers of the network that form the head, 1 or more, and fewer than it has.
    head_epochs : int (default: 5)
        Epochs of training the head per round, 0 or more. With 0 all clients keep the head of the initial model.
    **shared
        `aggregation` of `Averaging`, and arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range, or, in `start`, the network has too few layers; the message names the argument.
    """

    name = "fedrep"
    personal = OWN
    clients_keep_state = True
    model_stays = True
    STATE = (*Averaging.STATE, "_have_heads")

    def __init__(
        self,
        *,
        head_layers: int = HEAD_LAYERS.default,
        head_epochs: int = HEAD_EPOCHS.default,
        **shared: Unpack[AveragedShared],
    ) -> None:
        super().__init__(**shared)
        self.head_layers = HEAD_LAYERS.check(head_layers)
        self.head_epochs = HEAD_EPOCHS.check(head_epochs)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        names = last_layers(initial_arrays, self.head_layers)
        self._head = {name: initial_arrays[name] for name in names}
        self._have_heads: set[ClientId] = set()  # clients that replied to the last message to train that they were sent
        super().begin(ArrayRecord({name: array for name, array in initial_arrays.items() if name not in names}))

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {**super().round_config(server_round, client), HEAD: list(self._head), HEAD_EPOCHS.key: self.head_epochs}

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._asked_to_train = set(clients)
        return ((client, self.personal_arrays(client)) for client, _ in super().outgoing(server_round, clients))

    def take(self, client: ClientId, reply: Reply) -> None:
        super().take(client, replace(reply, metrics=MetricRecord({self.weighted_by_key: 1})))

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        self._have_heads = self._have_heads - self._asked_to_train | set(answered)
        super().end_round(server_round, answered)

    def general_model(self, network: str = "") -> None:
        """Return no model: the server has a body without a trained head."""

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        """Return the body, with the initial head for a client that may have no head."""
        body = self.global_arrays()
        return body if client in self._have_heads else ArrayRecord({**body, **self._head})


METHOD = Method(
    title="FedRep",
    paper="Collins et al., ICML 2021, arXiv:2102.07078",
    travels="the body of the model, both ways",
    stays="the head of its model",
    strategy=FedRep,
    client=FedRepClient,
    settings=(HEAD_LAYERS, HEAD_EPOCHS, AGGREGATION),
)
