"""FedAvg and FedProx: all clients train one global model, which each may fine-tune for itself (FT).

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data. AISTATS 2017, arXiv:1602.05629 (FedAvg, Algorithm 1).
T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith: Federated Optimization in Heterogeneous
Networks. MLSys 2020, arXiv:1812.06127 (FedProx, Algorithm 2: local loss + mu/2 ||w - w_global||^2).
T.-M. H. Hsu, H. Qi, M. Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. arXiv:1909.06335 (FedAvgM: momentum at the server, here `ahead`, in Nesterov's form).
K. Wang, R. Mathews, C. Kiddon, H. Eichner, F. Beaufays, D. Ramage: Federated Evaluation of On-device
Personalization. arXiv:1910.10252 (fine-tuning: FedAvg-FT, FedProx-FT; also called FedAvg+).

The result for a client is the global model or, with fine-tuning, that model after `finetune_epochs` epochs of plain
local training, which no other client receives. A training reply evaluates the global model from which the round
started. The last global model is evaluated in a closing exchange, in which clients also send their tuned models to
the server.

Where we depart from the papers:
- The local optimiser, epochs and steps are the run's, for all clients alike; FedAvg's paper has SGD. In FedProx's each
  client solves its problem to an accuracy of its own, and slow clients can send partial work.
- FedProx's Algorithm 2 samples clients with probabilities p_k and takes the unweighted mean of their models. Here, as
  in FedAvg, all clients are by default equally likely to be sampled (`sampling`), and the mean is weighted by n_k.
- A mu above 1 / learning rate acts as 1 / learning rate: with a larger one, steps would end beyond the global model.
- With `server_momentum` clients start ahead of the global model, which is evaluated in a second exchange of each round.
  FedAvgM's clients start from the global model, which the momentum moves.
- `aggregation` can replace the weighted mean by a rule that bounds the part of a minority of attackers
  (`parts/aggregation.py`).
- Momentum and the proximal term are for parameters. Floating-point buffers are averaged like parameters; integer
  buffers are the clients' median. Fine-tuning has no proximal term.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from logging import WARNING
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord
from flwr.supercore import log

from kindred.engine.admission import Reply
from kindred.engine.arguments import AveragedShared, Shared
from kindred.engine.collaboration import Collaboration
from kindred.engine.in_turn import InTurn
from kindred.engine.layout import Layout
from kindred.engine.strategy import PersonalizedStrategy
from kindred.messages import (
    FINETUNE_EPOCHS,
    PROXIMAL_MU,
    RECEIVED,
    SERVER_MOMENTUM,
    TUNED,
    ClientId,
    read_record,
    to_record,
)
from kindred.parts.aggregation import AGGREGATION
from kindred.registry import MODEL_BOTH_WAYS, Method
from kindred.settings import Range, Setting, within

BETA = Setting(
    "server_momentum",
    0.0,
    Range("0 or more, less than 1", lambda value: 0 <= value < 1),
    "Nesterov momentum beta at the server: clients start from g + beta (g - g'), where g' is the global model g before "
    "its last change; if not 0, g is evaluated in a second exchange of each round",
)
MU = Setting(
    "proximal_mu",
    0.01,
    within(0, 10**6),
    "weight mu of the proximal term, mu/2 times the squared distance from the global model",
    trial=0.5,
)
TUNING_EPOCHS = Setting(
    "finetune_epochs", 1, within(0, 10_000), "epochs for which each client fine-tunes the global model"
)

# --- The mathematics ----------------------------------------------------------------------------------


def ahead(mean: np.ndarray, before: np.ndarray, beta: float) -> np.ndarray:
    """Return g + beta (g - g'), Nesterov's point ahead of g, given the mean g and the one before; of any shape."""
    return mean + beta * (mean - before)


# --- The client ---------------------------------------------------------------------------------------
# Local training from the received model: `LocalTraining` in client/local_training.py. It first fine-tunes a copy of
# the received model where the message has "finetune-epochs". It does not evaluate the received model where the message
# has "server-momentum".


# --- The server ---------------------------------------------------------------------------------------


class Averaging(PersonalizedStrategy):
    """Base class of the methods with one global model, the mean of the clients' models.

    Parameters
    ----------
    aggregation : {"mean", "median", "trimmed-mean", "krum", "multi-krum", "biweight"}
        How the clients' models are aggregated. All but the mean, which is FedAvg's, bound what a minority of attackers
        can change; see `parts.aggregation`.
    **shared
        Arguments of `PersonalizedStrategy`.
    """

    personal = RECEIVED
    STATE = (*PersonalizedStrategy.STATE, "global_model", "_examples", "_sent")

    def __init__(self, *, aggregation: str = AGGREGATION.default, **shared: Unpack[Shared]) -> None:
        super().__init__(**shared)
        self.aggregation = AGGREGATION.check(aggregation)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        self.layout = Layout(initial_arrays, self.buffers)
        self.global_model = initial_arrays
        self._examples: dict[ClientId, float] = {}  # n_k of the clients whose models are in the global one
        self._sent: dict[ClientId, float] = {}  # the same for the global model that was sent last

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._mean = self.aggregate_of(self.layout)
        self._terms: InTurn[tuple[float, np.ndarray]] = InTurn(
            clients, lambda client, term: self._mean.add(client, *term)
        )
        self._sent = self._examples
        self._counters: dict[ClientId, Mapping[str, np.ndarray]] = {}
        start = self.start_model()
        self._start = read_record(start)
        return ((client, start) for client in clients)

    def start_model(self) -> ArrayRecord:
        """Return the model from which clients start: the global one."""
        return self.global_model

    def update_origin(self, client: ClientId) -> Mapping[str, np.ndarray]:
        """Return the model from which the client started."""
        return self._start

    def take(self, client: ClientId, reply: Reply) -> None:
        row = np.empty(self.layout.size, self.layout.dtype)  # (d,)
        self.layout.flatten(reply.arrays, row)
        self._counters[client] = self.layout.integer_arrays(reply.arrays)
        self._terms.add(client, (reply.number(self.weighted_by_key), row))

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        self._terms.finish()
        mean = self._mean.result()
        if mean is not None:
            self._examples = self._mean.weights
            integers = self.layout.integer_medians([*self._counters.values()], read_record(self.global_model))
            self.global_model = self.layout.record(mean, integers)

    def global_arrays(self) -> ArrayRecord:
        return self.global_model

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        return self.global_model

    def client_models(self) -> dict[ClientId, ArrayRecord]:
        """Return the global model for every client; no models where personal models stay with the clients."""
        return {} if self.model_stays else {client: self.global_model for client in self.participants()}

    def shared_rows(self) -> Collaboration:
        """Return the clients' shares in the global model that was sent last; every client has the same row."""
        return Collaboration.of_all(self.clients(), self._sent)


class FedAvg(Averaging):
    """FedAvg as a strategy of this library: Algorithm 1 of McMahan et al.

    Parameters
    ----------
    server_momentum : float (default: 0.0)
        beta, 0 or more, less than 1. Clients start from g + beta (g - g'), g' being the global model before the last
        change. The global model g is evaluated and returned as without momentum.
    **shared
        `aggregation` of `Averaging`, and arguments of `PersonalizedStrategy`.
    """

    name = "fedavg"
    STATE = (*Averaging.STATE, "_before")

    def __init__(self, *, server_momentum: float = BETA.default, **shared: Unpack[AveragedShared]) -> None:
        super().__init__(**shared)
        self.server_momentum = BETA.check(server_momentum)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._before = initial_arrays if self.server_momentum else None  # g'

    def start_model(self) -> ArrayRecord:
        """Return the model from which clients start: the global one, or with momentum one ahead of it."""
        if self._before is None:
            return self.global_model
        mean, before = read_record(self.global_model), read_record(self._before)
        moved = {name: ahead(mean[name], before[name], self.server_momentum) for name in self.layout.parameters}
        return to_record({**mean, **moved})

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        momentum = {} if self._before is None else {SERVER_MOMENTUM: self.server_momentum}
        return {**super().round_config(server_round, client), **momentum}

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        before = self.global_model
        super().end_round(server_round, answered)
        if self._before is not None and self.global_model is not before:
            self._before = before

    def begin_visits(self) -> None:
        self._before = None  # newcomers receive the global model


class FedProx(FedAvg):
    """FedProx as a strategy of this library: FedAvg with a proximal term at the clients.

    Parameters
    ----------
    proximal_mu : float (default: 0.01)
        Weight mu of mu/2 ||w - w_global||^2, 0 or more; 0 is FedAvg. With momentum w_global is where clients start.
    server_momentum : float (default: 0.0)
        As for `FedAvg`.
    **shared
        `aggregation` of `Averaging`, and arguments of `PersonalizedStrategy`.
    """

    name = "fedprox"

    def __init__(
        self,
        *,
        proximal_mu: float = MU.default,
        server_momentum: float = BETA.default,
        **shared: Unpack[AveragedShared],
    ) -> None:
        super().__init__(server_momentum=server_momentum, **shared)
        self.proximal_mu = MU.check(proximal_mu)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {**super().round_config(server_round, client), PROXIMAL_MU: self.proximal_mu}


class Tuned(Averaging):
    """Base class of methods whose clients fine-tune the global model, and send the tuned model with its evaluation.

    Parameters
    ----------
    **shared
        Arguments of `Averaging`.
    """

    personal = TUNED
    evaluations_have_models = True
    STATE = (*Averaging.STATE, "_tuned")

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        if not self.fraction_evaluate:
            log(WARNING, "kindred: fraction_evaluate is 0, so that no client is asked for its tuned model")
        self._tuned: dict[ClientId, ArrayRecord] = {}

    def take_evaluation(self, client: ClientId, reply: Reply) -> None:
        if reply.arrays:
            self._tuned[client] = to_record(reply.arrays)

    def client_models(self) -> dict[ClientId, ArrayRecord]:
        """Return each client's tuned model from its last evaluation; the global model if it has sent none."""
        return super().client_models() | self._tuned


class FineTuned(Tuned, FedAvg):
    """Base class of the fine-tuned methods; it stands before the class that is fine-tuned in the list of bases.

    Parameters
    ----------
    finetune_epochs : int (default: 1)
        Epochs, 0 or more, for which each client fine-tunes the global model.
    **arguments
        Arguments of the class that is fine-tuned.
    """

    STATE = (*FedAvg.STATE, "_tuned")

    def __init__(self, *, finetune_epochs: int = TUNING_EPOCHS.default, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.finetune_epochs = TUNING_EPOCHS.check(finetune_epochs)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {**super().round_config(server_round, client), FINETUNE_EPOCHS: self.finetune_epochs}


class FedAvgFT(FineTuned):
    """FedAvg with fine-tuning at each client; parameters as for `FineTuned`."""

    name = "fedavg-ft"

    def __init__(
        self,
        *,
        finetune_epochs: int = TUNING_EPOCHS.default,
        server_momentum: float = BETA.default,
        **shared: Unpack[AveragedShared],
    ) -> None:
        super().__init__(finetune_epochs=finetune_epochs, server_momentum=server_momentum, **shared)


class FedProxFT(FineTuned, FedProx):
    """FedProx with fine-tuning at each client; parameters as for `FineTuned` and `FedProx`."""

    name = "fedprox-ft"

    def __init__(
        self,
        *,
        finetune_epochs: int = TUNING_EPOCHS.default,
        proximal_mu: float = MU.default,
        server_momentum: float = BETA.default,
        **shared: Unpack[AveragedShared],
    ) -> None:
        super().__init__(
            finetune_epochs=finetune_epochs, proximal_mu=proximal_mu, server_momentum=server_momentum, **shared
        )


FEDAVG = Method(
    title="FedAvg",
    paper="McMahan et al., AISTATS 2017, arXiv:1602.05629",
    travels=MODEL_BOTH_WAYS,
    strategy=FedAvg,
    settings=(BETA, AGGREGATION),
)
FEDPROX = Method(
    title="FedProx",
    paper="Li et al., MLSys 2020, arXiv:1812.06127",
    travels=MODEL_BOTH_WAYS,
    strategy=FedProx,
    settings=(MU, BETA, AGGREGATION),
)
FEDAVG_FT = Method(
    title="FedAvg-FT",
    paper="Wang et al., 2019, arXiv:1910.10252",
    travels=MODEL_BOTH_WAYS,
    strategy=FedAvgFT,
    settings=(TUNING_EPOCHS, BETA, AGGREGATION),
)
FEDPROX_FT = Method(
    title="FedProx-FT",
    paper="Wang et al., 2019, arXiv:1910.10252",
    travels=MODEL_BOTH_WAYS,
    strategy=FedProxFT,
    settings=(MU, TUNING_EPOCHS, BETA, AGGREGATION),
)
