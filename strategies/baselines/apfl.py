"""APFL: each client mixes a local model with the global one.

Y. Deng, M. M. Kamani, M. Mahdavi: Adaptive Personalized Federated Learning. arXiv:2003.13461.

Client i has its version w_i of the global model, a local model v_i that never leaves it, and a share alpha_i. Its
result is the personal model vbar_i = alpha_i v_i + (1 - alpha_i) w_i. The table has a local step on a batch xi
(Algorithm 1, "Local Descent APFL"). Right-hand sides are values before the step.

| paper | here |
|---|---|
| vbar_i = alpha_i v_i + (1 - alpha_i) w_i | `mix` |
| w_i = w_i - eta grad f_i(w_i; xi) | `descend` |
| v_i = v_i - eta grad_v f_i(vbar_i; xi), grad_v f_i(vbar_i) = alpha_i grad f_i(vbar_i) | `descend_local` |
| if it is learnt: alpha_i = alpha_i - eta < v_i - w_i, grad f_i(vbar_i; xi) > | `adapted_share` |
| w = mean of the w_i, from which the next round's clients start | `Averaging` |

With alpha_i = 0 the personal model is FedAvg's after local training; with alpha_i = 1 it is that of Local. The global
model is FedAvg's for every alpha_i.

Decisions, and where we depart from the paper:

- alpha_i is the same for all clients and fixed by default, as in the experiments of FedAMP's paper. The paper also has
  an adaptive one, which `adapt_mixing` turns on.
- A learnt alpha_i is clipped to 0 to 1, which the paper's update does not ensure. It is updated at every step, as in
  the paper. Public implementations update it once per round, add 0.02 alpha_i to its gradient, or use the gradients of
  v_i and w_i in place of the one at vbar_i; some mix outputs in place of weights. This implementation does none of
  these.
- The mean of the w_i is weighted by the clients' numbers of samples, as in this library's FedAvg.
- v_i starts from the global model that the client receives when it first takes part; in the first round, this is the
  initial model. A client that was absent continues with the v_i and alpha_i that it kept.
- The personal model is evaluated at the end of local training, with the trained w_i.
- Running statistics of v_i's normalisation layers follow the batches at vbar_i. In the personal model floating-point
  buffers are mixed like parameters; integer buffers are those of v_i.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from kindred.client.sgd import MeanLoss, descend
from kindred.client.state import MODEL
from kindred.client.training import channels_last, check_finite, get_arrays, set_arrays, trained_weights
from kindred.client.visit import Visit
from kindred.engine.admission import Refused, Reply
from kindred.engine.arguments import AveragedShared
from kindred.engine.collaboration import Collaboration
from kindred.lazy import lazy
from kindred.messages import (
    ARRAYS,
    METRICS,
    OWN,
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
from kindred.settings import OPTIMISER_SETTINGS, TRUE_OR_FALSE, Setting, above, within

from .fedavg import Averaging

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy("torch")

SGD_LEARNING_RATE = Setting(
    "sgd_learning_rate",
    0.2,
    above(0, 1000),
    "step size of its plain SGD (eta), which ignores optimizer and learning-rate",
    trial=0.1,
)
MIXING_WEIGHT = Setting(
    "mixing_weight", 0.5, within(0, 1), "share of the client's local model in its personal one (alpha)"
)
ADAPT_MIXING = Setting(
    "adapt_mixing",
    False,
    TRUE_OR_FALSE,
    "whether clients learn their share, which then starts at mixing-weight",
    trial=True,
)
LOCAL = "local"  # name under which a client keeps v_i and alpha_i

# --- The mathematics ----------------------------------------------------------------------------------
# Models are iterables of tensors. The share alpha is a tensor of shape (), so that no step waits for the device.


def mix(personal: Iterable[Tensor], shared: Iterable[Tensor], local: Iterable[Tensor], share: Tensor) -> None:
    """Write vbar = alpha v + (1 - alpha) w into `personal`; with alpha 0 or 1 it is exactly w or v, to the bit."""
    for mixed, w, v in zip(personal, shared, local, strict=True):
        mixed.copy_(w.lerp(v, share.to(w.dtype)))


def descend_local(local: Iterable[Tensor], gradients: Iterable[Tensor], share: Tensor, step_size: float) -> None:
    """Update v = v - eta alpha grad f(vbar), in place."""
    descend(local, (share * gradient for gradient in gradients), step_size)


def adapted_share(
    share: Tensor, shared: Iterable[Tensor], local: Iterable[Tensor], gradients: Iterable[Tensor], step_size: float
) -> Tensor:
    """Return alpha - eta < v - w, grad f(vbar) >, clipped to 0 to 1; shape ()."""
    slope = sum(((v - w) * gradient).sum() for w, v, gradient in zip(shared, local, gradients, strict=True))
    return (share - step_size * slope).clamp(0, 1)


# --- The client ---------------------------------------------------------------------------------------


class APFLClient:
    """The client half: trains the global model and its own local one on the same batches."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Train w_i, v_i and alpha_i (Algorithm 1, on the client); the reply holds w_i and alpha_i."""
        config = visit.config
        step_size, adapts = float(config[SGD_LEARNING_RATE.key]), bool(config[ADAPT_MIXING.key])
        shared = visit.model()
        metrics = visit.evaluation(RECEIVED, shared)
        samples = channels_last(shared, visit.site.train[0]), visit.site.train[1]

        personal = deepcopy(shared)
        share = torch.tensor(float(config[MIXING_WEIGHT.key]), device=visit.device)
        if (kept := visit.state.load(LOCAL)) is not None:
            if adapts:
                share.fill_(float(kept[MIXING_WEIGHT.key]))
            set_arrays(personal, by_prefix(kept)[MODEL])
        w, v_bar = trained_weights(shared), trained_weights(personal)
        v = [weight.clone() for weight in v_bar]

        train_loss = MeanLoss()
        with visit.differentiating(shared) as at_w, visit.differentiating(personal) as at_v_bar:
            for images, labels in visit.batches(samples=samples):
                visit.compute[SAMPLES_TRAINED] += len(labels)  # counted twice, because two models are trained
                mix(v_bar, w, v, share)
                loss, of_w = at_w(images, labels)
                _, of_v_bar = at_v_bar(images, labels)
                new = adapted_share(share, w, v, of_v_bar, step_size) if adapts else share
                descend(w, of_w, step_size)
                descend_local(v, of_v_bar, share, step_size)
                share = new
                train_loss.add(loss, len(labels))
        metrics[TRAIN_LOSS] = train_loss.result()
        metrics[MIXING_WEIGHT.key] = float(share)

        for weight, local in zip(v_bar, v, strict=True):
            weight.copy_(local)
        keeps = {**with_prefix(MODEL, get_arrays(personal)), MIXING_WEIGHT.key: share.cpu().numpy()}
        mix(v_bar, w, v, share)
        buffers = [
            (own, global_)
            for own, global_ in zip(personal.buffers(), shared.buffers(), strict=True)
            if own.is_floating_point()
        ]
        mix([own for own, _ in buffers], [global_ for _, global_ in buffers], [own for own, _ in buffers], share)
        check_finite(personal)  # it is not finite if w, v or the share is not
        visit.state.save(LOCAL, keeps)
        metrics |= visit.evaluation(TRAINED, shared) | visit.evaluation(OWN, personal) | visit.counts()
        return RecordDict({ARRAYS: to_record(get_arrays(shared)), METRICS: MetricRecord({**metrics})})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the personal model; the global one, if the client has never trained."""
        has_trained = visit.state.load(LOCAL) is not None
        model = visit.model(visit.state.load(MODEL) if has_trained else None)
        metrics = visit.separate_evaluation(model)
        if not has_trained and visit.is_site:
            visit.keep(model, metrics)
        return RecordDict({METRICS: MetricRecord({**metrics})})


# --- The server ---------------------------------------------------------------------------------------


class APFL(Averaging):
    """APFL as a Flower strategy.

    Parameters
    ----------
    sgd_learning_rate : float (default: 0.2)
        eta, above 0.
    mixing_weight : float (default: 0.5)
        alpha_i, 0 to 1: the share of a client's local model in its personal one.
    adapt_mixing : bool (default: False)
        Whether clients learn alpha_i, which then starts at `mixing_weight`.
    **shared
        `aggregation` of `Averaging`, and arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "apfl"
    personal = OWN
    model_stays = True
    clients_keep_state = True
    STATE = (*Averaging.STATE, "_shares")

    def __init__(
        self,
        *,
        sgd_learning_rate: float = SGD_LEARNING_RATE.default,
        mixing_weight: float = MIXING_WEIGHT.default,
        adapt_mixing: bool = ADAPT_MIXING.default,
        **shared: Unpack[AveragedShared],
    ) -> None:
        super().__init__(**shared)
        self.sgd_learning_rate = SGD_LEARNING_RATE.check(sgd_learning_rate)
        self.mixing_weight = MIXING_WEIGHT.check(mixing_weight)
        self.adapt_mixing = ADAPT_MIXING.check(adapt_mixing)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._shares: dict[ClientId, float] = {}  # alpha_i

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        return {
            **super().round_config(server_round, client),
            SGD_LEARNING_RATE.key: self.sgd_learning_rate,
            MIXING_WEIGHT.key: self.mixing_weight,
            ADAPT_MIXING.key: self.adapt_mixing,
        }

    def inspect(self, client: ClientId, reply: Reply) -> None:
        share = reply.metrics.get(MIXING_WEIGHT.key)
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise Refused(f"its {MIXING_WEIGHT.key} is {reprlib.repr(share)}, allowed: 0 to 1")

    def take(self, client: ClientId, reply: Reply) -> None:
        super().take(client, reply)
        self._shares[client] = reply.number(MIXING_WEIGHT.key)

    def shared_rows(self) -> Collaboration:
        """Return the clients' shares in the global model that was sent last, and alpha_i, that of a client's own."""
        found = super().shared_rows()
        own = np.array([self._shares.get(client, self.mixing_weight) for client in found.clients])  # (m,)
        return replace(found, own=np.where(found.own == 1, 1.0, own))


METHOD = Method(
    title="APFL",
    paper="Deng et al., 2020, arXiv:2003.13461",
    travels=MODEL_BOTH_WAYS,
    stays="its local model, its share",
    strategy=APFL,
    client=APFLClient,
    settings=(SGD_LEARNING_RATE, MIXING_WEIGHT, ADAPT_MIXING, AGGREGATION),
    ignores=OPTIMISER_SETTINGS,
)
