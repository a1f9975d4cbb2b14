"""FedEM: all clients train the same component models, and each client predicts with its own mixture of these.

O. Marfoq, G. Neglia, A. Bellet, L. Kameni, R. Vidal: Federated Multi-Task Learning under a Mixture of Distributions.
NeurIPS 2021, arXiv:2108.10252 (Algorithm 1).

Each client's data are assumed to be a mixture of the same M unknown distributions. For each of these there is a
component, theta_1 to theta_M, which all clients train. Client t has its own shares pi_t of the components. A round,
with l the loss of a sample, its negative log-likelihood:

| paper | here |
|---|---|
| E-step: q_t(z_s = m) proportional to pi_tm exp(-l(h_theta_m(x_s), y_s)) | `responsibilities` |
| M-step: pi_tm = 1 / n_t sum_s q_t(z_s = m) | `new_shares` |
| M-step: theta_m,t from local steps on sum_s q_t(z_s = m) l(h_theta(x_s), y_s) | `FedEMClient.train` |
| the server: theta_m = sum_t n_t / n theta_m,t | `SeveralModels.end_round` |
| prediction: sum_m pi_tm h_theta_m(x), of probabilities | `mixture_of` |

The shares stay at the client; in a simulation, or at a site with `--report-weights`, it reports the new ones in the
history too, as share-0 to share-(M - 1). The result for a client is the mixture of the components as received, with the
client's current shares. After the last round, a closing exchange evaluates the mixture of the last components. A client
without shares computes them by one E-step and one M-step from equal shares, as in the paper for clients that were
absent when components were trained. `received-accuracy` is that of the single component with the largest share.

Where the paper is silent or we depart from it:
- Components are averaged by n_t, as in Algorithm 1 and in the authors' code, and not by the sum of q. A client thus
  holds back a component that does not fit its data, to the extent that its local steps leave that component unchanged.
  Steps of SGD are as small as q. Steps of Adam are not, because their size does not depend on that of the gradient.
- The local steps are those of the other methods: epochs in batches, with the configured optimiser, on the mean over a
  batch of q times the loss. Each component has its own order of the samples.
- Each round starts a new optimiser. In the authors' code a client has one Adam for each component, whose moments and
  count of steps stay from round to round: with `keep_optimizer` they stay here too, in a file at the client. As in that
  code they stay although the server replaces the components. A client whose file is lost starts a new one.
- With equal models all responsibilities would stay equal for ever. The first component is the initial model, so that
  FedEM with one component is FedAvg. The others have its numbers in another order (`drawn_anew`), or are given as
  `other_models`, which a network with frozen or pretrained parts needs.
- Where components have batch normalisation, the E-step uses their running statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from kindred.client.evaluation import predict
from kindred.client.state import MIXTURE
from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.engine.admission import Reply
from kindred.engine.arguments import AveragedShared
from kindred.engine.collaboration import Collaboration
from kindred.engine.multi_model import SeveralModels
from kindred.lazy import lazy
from kindred.messages import (
    ARRAYS,
    METRICS,
    NUM_TEST_EXAMPLES,
    SHARE,
    TRAIN_LOSS,
    ClientId,
    by_prefix,
    in_a_row,
    read_record,
    to_record,
    with_prefix,
)
from kindred.objectives import SMALLEST
from kindred.parts.aggregation import AGGREGATION
from kindred.parts.mixture import Arrays, evaluation_inputs, keep_mixture, mixture_scores
from kindred.registry import Method
from kindred.settings import TRUE_OR_FALSE, Setting, within

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

SHARES = "shares"  # name under which a client keeps its shares, and name of the array in that file
OPTIMIZERS = "optimizers"  # name under which a client keeps the state of the components' optimisers

NUM_COMPONENTS = Setting("num_components", 3, within(1, 1000), "models that each client mixes (M)", trial=2)
KEEP_OPTIMIZER = Setting(
    "keep_optimizer",
    False,
    TRUE_OR_FALSE,
    "whether each client keeps the state of each component's optimiser, such as Adam's moments, from round to round; "
    "false: each round starts a new one",
    trial=True,
)

# --- The mathematics ----------------------------------------------------------------------------------


def responsibilities(shares: np.ndarray, likelihoods: np.ndarray) -> np.ndarray:
    """Return q(z_s = m) = pi_m p_m(y_s | x_s) / sum_m' pi_m' p_m'(y_s | x_s), where p = exp(-l); the E-step.

    Parameters
    ----------
    shares : ndarray, shape (M,)
        pi, summing to 1.
    likelihoods : ndarray, shape (M, n)
        The likelihood of each sample under each component: the probability of its class, or exp(-loss); NaN counts as
        SMALLEST.

    Returns
    -------
    ndarray, shape (M, n), float64
        Columns sum to 1.
    """
    with np.errstate(divide="ignore"):  # a share of 0 remains 0
        scores = np.log(shares)[:, None] + np.log(np.fmax(likelihoods, SMALLEST, dtype=np.float64))  # (M, n)
    powers = np.exp(scores - scores.max(axis=0))  # (M, n)
    return powers / powers.sum(axis=0)


def new_shares(q: np.ndarray) -> np.ndarray:
    """Return pi_m = mean_s q(z_s = m), shape (M,), from responsibilities (M, n); the M-step."""
    return q.mean(axis=1)


# --- The client ---------------------------------------------------------------------------------------


class FedEMClient:
    """The client half: computes the client's shares of the components, and trains all components."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Update the shares and train all components (Algorithm 1, on the client); the reply holds the components."""
        components, shares = in_a_row(visit.arrays), _shares(visit)
        metrics = _scores(visit, components, shares, f"{MIXTURE}-")
        if visit.is_site:  # in case the run ends before its closing evaluation
            keep_mixture(visit, range(len(components)), components, shares)

        q = responsibilities(shares, _likelihoods(visit, components))  # (M, n)
        shares = new_shares(q)
        visit.state.save(SHARES, {SHARES: shares})
        if visit.reports_weights:
            metrics |= {f"{SHARE}{m}": share for m, share in enumerate(shares.tolist())}

        sent: Arrays = {}
        metrics[TRAIN_LOSS] = 0.0
        optimizers = _optimizers(visit, len(components)) if KEEP_OPTIMIZER.read(visit.config) else None
        for m, arrays in enumerate(components):
            model = visit.model(arrays)
            factors = torch.from_numpy(q[m].astype(np.float32)).to(visit.device)  # (n,)
            metrics[TRAIN_LOSS] += visit.train(
                model,
                sample_weights=factors,
                purpose=f"train-{m}" if m else "train",
                memory=optimizers and optimizers[m],
            )
            sent |= with_prefix(m, get_arrays(model))
        if optimizers:
            _keep_optimizers(visit, optimizers)
        return RecordDict({ARRAYS: to_record(sent), METRICS: MetricRecord({**metrics, **visit.counts()})})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the mixture of the components in the message, and keep it."""
        components = in_a_row(visit.arrays)
        known = visit.state.load(SHARES)
        shares = (
            known[SHARES]
            if known
            else new_shares(responsibilities(_equal(len(components)), _likelihoods(visit, components)))
        )
        keep_mixture(visit, range(len(components)), components, shares)
        metrics = _scores(visit, components, shares) | {NUM_TEST_EXAMPLES: len(visit.site.test[1])}
        return RecordDict({METRICS: MetricRecord({**metrics})})


def _equal(count: int) -> np.ndarray:
    return np.full(count, 1 / count)


def _shares(visit: Visit) -> np.ndarray:
    """Return pi_t as of the client's last round; equal shares before its first."""
    known = visit.state.load(SHARES)
    return known[SHARES] if known else _equal(len(in_a_row(visit.arrays)))


def _optimizers(visit: Visit, count: int) -> list[list[torch.Tensor]]:
    """Return the state of each component's optimiser, as `training.train` leaves it; empty for a new one."""
    kept = by_prefix(visit.state.load(OPTIMIZERS) or {})
    states = [kept.get(str(m), {}) for m in range(count)]
    return [[torch.from_numpy(state[str(k)]).to(visit.device) for k in range(len(state))] for state in states]


def _keep_optimizers(visit: Visit, optimizers: Sequence[Sequence[torch.Tensor]]) -> None:
    """Save the state of the components' optimisers, unless it is not finite, which would spoil all later rounds."""
    arrays: Arrays = {}
    for m, state in enumerate(optimizers):
        arrays |= with_prefix(m, {str(k): tensor.cpu().numpy() for k, tensor in enumerate(state)})
    if all(np.isfinite(array).all() for array in arrays.values()):
        visit.state.save(OPTIMIZERS, arrays)


def _likelihoods(visit: Visit, components: Sequence[Arrays]) -> np.ndarray:
    """Return the likelihood of each training sample under each component, (M, n)."""
    x, y = visit.site.train
    targets = y.cpu().numpy()
    predicted = (visit.predict(visit.model(arrays), x) for arrays in components)
    return np.stack([visit.objective.likelihoods(predictions, targets) for predictions in predicted])


def _scores(visit: Visit, components: Sequence[Arrays], shares: np.ndarray, prefix: str = "") -> dict[str, float]:
    """Return metrics and loss of the mixture, and of the component with the largest share; keep a best mixture."""
    x = evaluation_inputs(visit)
    predictions = np.stack([predict(visit.model(arrays), x, visit.objective) for arrays in components])  # (M, n, N)
    metrics = mixture_scores(visit, predictions, shares, int(shares.argmax()), prefix=prefix)
    if visit.is_best(metrics):
        keep_mixture(visit, range(len(components)), components, shares, metrics=metrics)
    return metrics


# --- The server ---------------------------------------------------------------------------------------


class FedEM(SeveralModels):
    """FedEM as a Flower strategy. Clients keep their shares; the server does not use them.

    Parameters
    ----------
    num_components : int (default: 3)
        M, 1 or more; 1 is FedAvg.
    keep_optimizer : bool (default: False)
        Whether clients keep the state of each component's optimiser from round to round. SGD without momentum has none.
    other_models : sequence of ArrayRecord, optional
        The models from which the components after the first start.
    **shared
        `aggregation` of `SeveralModels`, and arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "fedem"
    personal = MIXTURE
    clients_keep_state = True
    model_stays = True

    def __init__(
        self,
        *,
        num_components: int = NUM_COMPONENTS.default,
        keep_optimizer: bool = KEEP_OPTIMIZER.default,
        other_models: Sequence[ArrayRecord] | None = None,
        **shared: Unpack[AveragedShared],
    ) -> None:
        self.num_components = NUM_COMPONENTS.check(num_components)
        self.keep_optimizer = KEEP_OPTIMIZER.check(keep_optimizer)
        super().__init__(count=self.num_components, other_models=other_models, **shared)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {KEEP_OPTIMIZER.key: True} if self.keep_optimizer else super().round_config(server_round, client)

    def mismatch(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> str | None:
        parts = by_prefix(arrays)
        places = [str(m) for m in range(self.num_components)]
        for prefix in parts:
            if prefix not in places:
                return f"arrays {prefix!r} are of no component"
        for place in places:
            if place not in parts:
                return f"component {place} is missing"
            if (difference := self.layout.mismatch(parts[place])) is not None:
                return difference
        return None

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float:
        """Return the norm of the largest among the components' changes."""
        parts, sent = by_prefix(arrays), by_prefix(self.update_origin(client))
        return max(self.layout.distance(parts[place], sent[place]) for place in sent)

    def update_origin(self, client: ClientId) -> Mapping[str, np.ndarray]:
        """Return all components, as they were sent."""
        return read_record(self.personal_arrays(client))

    def take(self, client: ClientId, reply: Reply) -> None:
        models = {int(place): arrays for place, arrays in by_prefix(reply.arrays).items()}
        self.take_models(client, reply.number(self.weighted_by_key), models)

    def client_models(self) -> dict[ClientId, ArrayRecord]:
        """Return no models: a client's model is its mixture, which the server does not know."""
        return {}

    def shared_rows(self) -> Collaboration:
        """Return the clients' shares in the components that were sent last; they are the same in each component."""
        return Collaboration.of_all(self.clients(), self._sent[0] if self._sent else {})


METHOD = Method(
    title="FedEM",
    paper="Marfoq et al., NeurIPS 2021, arXiv:2108.10252",
    travels="all components, both ways",
    stays="its shares of the components",
    strategy=FedEM,
    client=FedEMClient,
    settings=(NUM_COMPONENTS, KEEP_OPTIMIZER, AGGREGATION),
)
