"""SCAFFOLD: control variates correct clients' local steps, so that their models do not drift apart.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning. ICML 2020, arXiv:1910.06378.

The server has the model x and the control variate c, client i a control variate c_i; these start at 0. A round of
Algorithm 1, with the clients S of all N, K local steps, and step sizes eta_l of the clients and eta_g of the server:

| paper | here |
|---|---|
| on client i, from y = x, K times: y = y - eta_l (g_i(y) - c_i + c) | `correction`, `training.train` |
| option II: c_i+ = c_i - c + (x - y) / (K eta_l) | `control_variate` |
| client i sends y - x and c_i+ - c_i | `SCAFFOLDClient.train` sends y and c_i+ - c_i |
| x = x + eta_g mean_S (y - x) | `server_step` |
| c = c + |S| / N mean_S (c_i+ - c_i) | `server_control` |

The result for every client is the model x. Decisions, and where we depart from the paper:

- Both means are weighted by the clients' numbers of samples, as in this library's FedAvg; the paper has
  f = 1/N sum_i f_i and unweighted means. For clients of equal size both are the same. Otherwise, an unweighted c
  would make SCAFFOLD minimise another sum than FedAvg: once the control variates have converged, all clients move by c
  alone, so the weights in c determine what is minimised. With the same weights, SCAFFOLD differs from FedAvg by its
  control variates only.
- The server keeps sum_i n_i c_i. Thus c is the mean of all c_i even when N grows; c_i is 0 for clients that have not
  replied yet. N is the number of clients that the server knows so far. In the mean, a client that has not replied has
  the mean weight of the others; a client that has replied has the number of samples of its first reply.
- A client whose reply was not used, has no weight by `aggregation`, or whose update was scaled down
  (`max_update_norm` "auto"), continues from the control variate that the server has counted, as if it had not been
  sampled. It keeps its last two, and the message says which one was counted. Otherwise c would no longer be the mean
  of all c_i. A client that has lost its control variate starts again from 0; the part of c that stems from the lost
  one remains.
- Each client has its own number of steps K: with epochs, K depends on its number of samples.
- Control variates are of parameters. Buffers have no gradient; they are averaged, and eta_g does not apply to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from kindred.client.local_training import LocalTraining
from kindred.client.training import get_arrays, num_batches
from kindred.client.visit import Visit
from kindred.engine.admission import Reply, norm
from kindred.engine.arguments import AveragedShared
from kindred.engine.in_turn import InTurn
from kindred.engine.layout import Layout
from kindred.engine.means import largest_weight
from kindred.lazy import lazy
from kindred.messages import (
    ARRAYS,
    METRICS,
    RECEIVED,
    SERVER_ROUND,
    TRAIN_LOSS,
    TRAINED,
    ClientId,
    by_prefix,
    check,
    read_record,
    to_record,
    with_prefix,
)
from kindred.parts.aggregation import AGGREGATION, MEAN, RobustCentre
from kindred.registry import Method
from kindred.settings import OPTIMISER_SETTINGS, Setting, above

from .fedavg import Averaging

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

SGD_LEARNING_RATE = Setting(
    "sgd_learning_rate",
    0.05,
    above(0, 1000),
    "step size of clients' plain SGD (eta_l), which ignores optimizer and learning-rate",
    trial=0.1,
)
SERVER_LEARNING_RATE = Setting("server_learning_rate", 1.0, above(0, 1000), "step size of the server (eta_g)")

Arrays = dict[str, np.ndarray]

CONTROL = "control"  # prefix of c in messages and of c_i+ - c_i in replies; name under which a client keeps its c_i
COUNTED = "counted-round"  # the last round whose reply of the client is counted in c; 0: none

# --- The mathematics ----------------------------------------------------------------------------------


def correction(own: np.ndarray, control: np.ndarray) -> np.ndarray:
    """Return c - c_i, which is added to every gradient of a client; of any shape, as in the functions below."""
    return control - own


def control_variate(
    own: np.ndarray, control: np.ndarray, received: np.ndarray, trained: np.ndarray, num_steps: int, step_size: float
) -> np.ndarray:
    """Return c_i+ = c_i - c + (x - y) / (K eta_l), option II: the mean of the gradients at the client's steps."""
    return own - control + (received - trained) / (num_steps * step_size)


def server_step(sent: np.ndarray, mean: np.ndarray, step_size: float) -> np.ndarray:
    """Return x + eta_g (mean of y - x), in a form that for eta_g = 1 is the mean of y, to the bit."""
    return (1 - step_size) * sent + step_size * mean


def server_control(total: np.ndarray, weights: Sequence[float], num_clients: int) -> np.ndarray:
    """Return c, the mean of all c_i.

    Parameters
    ----------
    total : ndarray, shape (d,)
        sum_i n_i c_i.
    weights : sequence of float
        n_i of the clients in that sum.
    num_clients : int
        N: the other clients have the mean weight of these, and c_i = 0.
    """
    return total * (len(weights) / (num_clients * sum(weights)) if weights else 0.0)


# --- The client ---------------------------------------------------------------------------------------


class SCAFFOLDClient(LocalTraining):
    """The client half: local training with corrected gradients; the client keeps its control variate."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train with corrected gradients (Algorithm 1, on the client); the reply holds y and c_i+ - c_i."""
        step_size = float(visit.config[SGD_LEARNING_RATE.key])
        num_steps = num_batches(len(visit.site.train[1]), visit.epochs, visit.steps, visit.batch_size)
        check("local-steps", num_steps, num_steps >= 1, "1 or more with SCAFFOLD")
        received, control = _model_and_control(visit.arrays)
        own = _own_control(visit, control)
        model = visit.model(received)
        metrics = visit.evaluation(RECEIVED, model)
        corrections = [
            torch.from_numpy(np.asarray(correction(own[name], control[name]))).to(visit.device)
            if name in control
            else torch.zeros_like(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        metrics[TRAIN_LOSS] = visit.train(
            model, optimizer="sgd", learning_rate=step_size, momentum=0.0, weight_decay=0.0, correction=corrections
        )
        trained = get_arrays(model)
        new = {
            name: control_variate(own[name], control[name], received[name], trained[name], num_steps, step_size)
            for name in control
        }
        visit.state.save(
            CONTROL,
            {
                **with_prefix("now", new),
                **with_prefix("before", own),
                SERVER_ROUND: np.array(int(visit.config[SERVER_ROUND])),
            },
        )
        metrics |= visit.evaluation(TRAINED, model) | visit.counts()
        changes = {name: new[name] - own[name] for name in new}
        return RecordDict(
            {ARRAYS: to_record({**trained, **with_prefix(CONTROL, changes)}), METRICS: MetricRecord({**metrics})}
        )


def _model_and_control(arrays: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
    """Return the model and the control variate in a message."""
    prefix = f"{CONTROL}/"
    control = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    return {name: array for name, array in arrays.items() if not name.startswith(prefix)}, control


def _own_control(visit: Visit, control: Arrays) -> Arrays:
    """Return c_i as the server has counted it; 0 if the server has not yet, or if the client has lost it."""
    kept, counted = visit.state.load(CONTROL), int(visit.config[COUNTED])
    if kept is None or not counted:
        return {name: np.zeros_like(array) for name, array in control.items()}
    is_last = int(kept.pop(SERVER_ROUND)) == counted
    return by_prefix(kept)["now" if is_last else "before"]


# --- The server ---------------------------------------------------------------------------------------


class SCAFFOLD(Averaging):
    """SCAFFOLD as a Flower strategy.

    Parameters
    ----------
    sgd_learning_rate : float (default: 0.05)
        eta_l, above 0.
    server_learning_rate : float (default: 1.0)
        eta_g, above 0. The paper's experiments have 1.
    **shared
        `aggregation` of `Averaging`, and arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "scaffold"
    clients_keep_state = True
    STATE = (*Averaging.STATE, "_total", "_weights", "_known", "_counted")

    def __init__(
        self,
        *,
        sgd_learning_rate: float = SGD_LEARNING_RATE.default,
        server_learning_rate: float = SERVER_LEARNING_RATE.default,
        **shared: Unpack[AveragedShared],
    ) -> None:
        super().__init__(**shared)
        self.sgd_learning_rate = SGD_LEARNING_RATE.check(sgd_learning_rate)
        self.server_learning_rate = SERVER_LEARNING_RATE.check(server_learning_rate)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        layout, model = self.layout, read_record(initial_arrays)
        self._due = Layout({**model, **with_prefix(CONTROL, {name: model[name] for name in layout.parameters})})
        self._total = np.zeros(layout.num_parameters, layout.dtype)  # sum_i n_i c_i
        self._weights: dict[ClientId, float] = {}  # n_i of the clients in that sum
        self._known: set[ClientId] = set()
        self._counted: dict[ClientId, int] = {}  # client -> the last round whose c_i is in the sum
        self._uncounted: set[ClientId] = set()  # clients whose c_i of the round in progress is not

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {
            **super().round_config(server_round, client),
            SGD_LEARNING_RATE.key: self.sgd_learning_rate,
            COUNTED: self._counted.get(client, 0),
        }

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._known.update(self.clients())
        self._uncounted = set()
        self._largest = largest_weight(self.roster.sizes(self.clients()), self.max_client_share)  # n_i in c
        self._centre = None if self.aggregation == MEAN else RobustCentre(self.aggregation, self.norms.lengths)
        self._changes: InTurn[tuple[float, np.ndarray]] = InTurn(clients, self._add_change)
        control = server_control(self._total, list(self._weights.values()), len(self._known))  # (d,)
        self._control = {
            name: control[self.layout.slices[name]]
            .reshape(self.layout.shapes[name])
            .astype(self.layout.dtypes[name], copy=False)
            for name in self.layout.parameters
        }
        record = ArrayRecord()
        record.update(self.global_model)
        record.update(to_record(with_prefix(CONTROL, self._control)))
        return ((client, record) for client, _ in super().outgoing(server_round, clients))

    def mismatch(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> str | None:
        return self._due.mismatch(arrays)

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float:
        """Return the larger of the norms of y - x and of one step according to the control variate's change.

        That step is eta_l (c_i+ - c_i + c) = (x - y) / K. From an honest client it is never larger than y - x.
        """
        with np.errstate(over="ignore"):
            steps = (arrays[f"{CONTROL}/{name}"] + control for name, control in self._control.items())
            return max(super().update_norm(client, arrays), self.sgd_learning_rate * norm(steps))

    def scaled_update(self, client: ClientId, arrays: Mapping[str, np.ndarray], factor: float) -> Arrays:
        """Return y nearer to x, and c_i+ - c_i = 0: the client will continue from the c_i that is counted."""
        self._uncounted.add(client)
        model, changes = _model_and_control(arrays)
        unchanged = {name: np.zeros_like(change) for name, change in changes.items()}
        return super().scaled_update(client, model, factor) | with_prefix(CONTROL, unchanged)

    def take(self, client: ClientId, reply: Reply) -> None:
        super().take(client, reply)
        _, changes = _model_and_control(reply.arrays)
        row = np.empty_like(self._total)  # (d,)
        for name, change in changes.items():
            row[self.layout.slices[name]] = change.reshape(-1)
        self._changes.add(client, (reply.number(self.weighted_by_key), row))

    def _add_change(self, client: ClientId, term: tuple[float, np.ndarray]) -> None:
        weight, row = term
        if self._centre:
            self._centre.add(client, self._weights.setdefault(client, 1.0), row)
        else:
            row *= self._weights.setdefault(client, min(weight, self._largest))
            self._total += row

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        sent = read_record(self.global_model)
        super().end_round(server_round, answered)
        self._changes.finish()
        if self._centre:
            if (centre := self._centre.result()) is not None:
                self._total += len(self._centre.claimed) * centre
            self._uncounted |= {client for client, weight in self._centre.weights.items() if weight == 0}
        if answered:
            counted = (client for client in answered if client not in self._uncounted)
            self._counted |= dict.fromkeys(counted, server_round)
            means = read_record(self.global_model)
            self.global_model = to_record(
                means
                | {
                    name: server_step(sent[name], means[name], self.server_learning_rate)
                    for name in self.layout.parameters
                }
            )


METHOD = Method(
    title="SCAFFOLD",
    paper="Karimireddy et al., ICML 2020, arXiv:1910.06378",
    travels="the model and the control variate, both ways",
    stays="its control variate",
    strategy=SCAFFOLD,
    client=SCAFFOLDClient,
    settings=(SGD_LEARNING_RATE, SERVER_LEARNING_RATE, AGGREGATION),
    ignores=OPTIMISER_SETTINGS,
)
