"""FedAvg and FedProx: all clients train one global model, which each may fine-tune for itself (FT).

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas: Communication-Efficient Learning of Deep
Networks from Decentralized Data. AISTATS 2017, arXiv:1602.05629 (FedAvg, Algorithm 1).
T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith: Federated Optimization in Heterogeneous
Networks. MLSys 2020, arXiv:1812.06127 (FedProx, Algorithm 2: local loss + mu/2 ||w - w_global||^2).
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
- The proximal term is for parameters. Floating-point buffers are averaged like parameters; integer buffers are the
  first client's. Fine-tuning has no proximal term.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord

from kindred.engine.admission import Reply
from kindred.engine.arguments import Shared
from kindred.engine.model_store import InTurn, Layout
from kindred.engine.strategy import PersonalizedStrategy
from kindred.messages import FINETUNE_EPOCHS, PROXIMAL_MU, RECEIVED, TUNED, ClientId, read_record, to_record
from kindred.registry import MODEL_BOTH_WAYS, Method
from kindred.settings import Setting, at_least

MU = Setting(
    "proximal_mu",
    0.01,
    at_least(0),
    "weight mu of the proximal term, mu/2 times the squared distance from the global model",
    trial=0.5,
)
TUNING_EPOCHS = Setting("finetune_epochs", 1, at_least(0), "epochs for which each client fine-tunes the global model")

# --- The mathematics ----------------------------------------------------------------------------------


class WeightedMean:
    """Weighted mean sum_k n_k w_k / sum_k n_k.

    Attributes
    ----------
    weights : dict
        client -> n_k of the terms in the sum, in the order in which they were added.
    """

    def __init__(self, size: int, dtype: np.dtype) -> None:
        self._sum = np.zeros(size, dtype)  # (d,)
        self.weights: dict[ClientId, float] = {}

    def add(self, client: ClientId, weight: float, row: np.ndarray) -> None:
        """Add a client's term; `row`, of shape (d,), is changed in place."""
        row *= weight
        self._sum += row
        self.weights[client] = weight

    def result(self) -> np.ndarray | None:
        """Return the mean, shape (d,), of the terms added; None if there are none."""
        return self._sum / sum(self.weights.values()) if self.weights else None


# --- The client ---------------------------------------------------------------------------------------
# Local training from the received model: `LocalTraining` in client/local_training.py. It first fine-tunes a copy of
# the received model where the message has "finetune-epochs".


# --- The server ---------------------------------------------------------------------------------------


class FedAvg(PersonalizedStrategy):
    """FedAvg as a strategy of this library: Algorithm 1 of McMahan et al.

    Parameters
    ----------
    **shared
        Arguments of `PersonalizedStrategy`.
    """

    name = "fedavg"
    personal = RECEIVED
    STATE = (*PersonalizedStrategy.STATE, "global_model", "_examples", "_sent")

    def begin(self, initial_arrays: ArrayRecord) -> None:
        self.layout = Layout(initial_arrays, self.buffers)
        self.global_model = initial_arrays
        self._examples: dict[ClientId, float] = {}  # n_k of the clients whose models are in the global one
        self._sent: dict[ClientId, float] = {}  # the same for the global model that was sent last

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._mean = WeightedMean(self.layout.size, self.layout.dtype)
        self._terms: InTurn[tuple[float, np.ndarray]] = InTurn(
            clients, lambda client, term: self._mean.add(client, *term)
        )
        self._sent = self._examples
        self._counters: dict[ClientId, Mapping[str, np.ndarray]] = {}
        return ((client, self.global_model) for client in clients)

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float:
        """Return the norm of the change since the global model, which the client was sent."""
        return self.layout.distance(arrays, read_record(self.global_model))

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
            self.global_model = self.layout.record(mean, self._counters[answered[0]])

    def global_arrays(self) -> ArrayRecord:
        return self.global_model

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        return self.global_model

    def client_models(self) -> dict[ClientId, ArrayRecord]:
        """Return the global model for every client; no models where personal models stay with the clients."""
        return {} if self.model_stays else {client: self.global_model for client in self.clients()}

    def collaboration(self) -> tuple[list[ClientId], np.ndarray]:
        """Return the clients' shares in the global model that was sent last; every row is the same."""
        clients = self.clients()
        shares = np.array([self._sent.get(client, 0.0) for client in clients])
        if not shares.any():
            return clients, np.eye(len(clients))
        return clients, np.tile(shares / shares.sum(), (len(clients), 1))


class FedProx(FedAvg):
    """FedProx as a strategy of this library: FedAvg with a proximal term at the clients.

    Parameters
    ----------
    proximal_mu : float (default: 0.01)
        Weight mu of mu/2 ||w - w_global||^2, 0 or more; 0 is FedAvg.
    **shared
        Arguments of `PersonalizedStrategy`.
    """

    name = "fedprox"

    def __init__(self, *, proximal_mu: float = MU.default, **shared: Unpack[Shared]) -> None:
        super().__init__(**shared)
        self.proximal_mu = MU.check(proximal_mu)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {**super().round_config(server_round, client), PROXIMAL_MU: self.proximal_mu}


class Tuned(FedAvg):
    """FedAvg whose clients fine-tune the global model, and send the tuned model when they evaluate it.

    Parameters
    ----------
    **shared
        Arguments of `FedAvg`.
    """

    personal = TUNED
    STATE = (*FedAvg.STATE, "_tuned")

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._tuned: dict[ClientId, ArrayRecord] = {}

    def take_evaluation(self, client: ClientId, reply: Reply) -> None:
        if reply.arrays:
            self._tuned[client] = to_record(reply.arrays)

    def client_models(self) -> dict[ClientId, ArrayRecord]:
        """Return each client's tuned model from its last evaluation; the global model if it has sent none."""
        return super().client_models() | self._tuned


class FineTuned(Tuned):
    """Base class of the fine-tuned methods; it stands before the class that is fine-tuned in the list of bases.

    Parameters
    ----------
    finetune_epochs : int (default: 1)
        Epochs, 0 or more, for which each client fine-tunes the global model.
    **arguments
        Arguments of the class that is fine-tuned.
    """

    def __init__(self, *, finetune_epochs: int = TUNING_EPOCHS.default, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.finetune_epochs = TUNING_EPOCHS.check(finetune_epochs)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {**super().round_config(server_round, client), FINETUNE_EPOCHS: self.finetune_epochs}


class FedAvgFT(FineTuned):
    """FedAvg with fine-tuning at each client; parameters as for `FineTuned`."""

    name = "fedavg-ft"

    def __init__(self, *, finetune_epochs: int = TUNING_EPOCHS.default, **shared: Unpack[Shared]) -> None:
        super().__init__(finetune_epochs=finetune_epochs, **shared)


class FedProxFT(FineTuned, FedProx):
    """FedProx with fine-tuning at each client; parameters as for `FineTuned` and `FedProx`."""

    name = "fedprox-ft"

    def __init__(
        self,
        *,
        finetune_epochs: int = TUNING_EPOCHS.default,
        proximal_mu: float = MU.default,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(finetune_epochs=finetune_epochs, proximal_mu=proximal_mu, **shared)


FEDAVG = Method(
    title="FedAvg",
    paper="McMahan et al., AISTATS 2017, arXiv:1602.05629",
    travels=MODEL_BOTH_WAYS,
    strategy=FedAvg,
)
FEDPROX = Method(
    title="FedProx",
    paper="Li et al., MLSys 2020, arXiv:1812.06127",
    travels=MODEL_BOTH_WAYS,
    strategy=FedProx,
    settings=(MU,),
)
FEDAVG_FT = Method(
    title="FedAvg-FT",
    paper="Wang et al., 2019, arXiv:1910.10252",
    travels=MODEL_BOTH_WAYS,
    strategy=FedAvgFT,
    settings=(TUNING_EPOCHS,),
)
FEDPROX_FT = Method(
    title="FedProx-FT",
    paper="Wang et al., 2019, arXiv:1910.10252",
    travels=MODEL_BOTH_WAYS,
    strategy=FedProxFT,
    settings=(MU, TUNING_EPOCHS),
)
