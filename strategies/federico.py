"""FedeRiCo: each client predicts with a mixture of clients' models, and trains the models that suit its data.

A. Sui, J. Wen, Y. Lau, B. L. Ross, J. C. Cresswell: Find Your Friends: Personalized Federated Learning with the
Right Collaborators. arXiv:2210.06597.

Client i has a model phi_i and weights w_i., the posterior of an assignment of its data to the clients' models. EM
maximises the likelihood of all data under the mixtures. Clients exchange a few models and their updates.

| paper | here |
|---|---|
| Algorithm 1, line 7: M neighbours by epsilon-greedy choice | `choose_neighbours` |
| lines 11 to 14: losses of the received models; those of the others are unchanged | `Losses.update` |
| line 15: moving average of the losses; Eq. 24: their sum | `smooth`, `accumulate` |
| line 16, Eq. 3: weights | `collaborator_weights` |
| lines 18 to 21: weighted updates of the received models | `weighted_update` |
| line 25, Eq. 6: each model moved by the sum of its updates | `Updates`, `OptimizerSteps` |
| prediction by h_i = sum_j w_ij h_phi_j | `mixture_of` |

Decisions where the paper is silent, or where its letter fails:

- The loss l_ib is the mean over the samples (`likelihood`); the paper has the sum. The sum makes the weights one-hot
  within a few rounds, often on another client's model. The mean spreads them over the clients of a distribution.
- Losses start from 0, so that a model not yet received looks best. This is right for the choice of neighbours, which
  thus explores, and wrong for weights. Weights are therefore over the models received so far. A model received once
  enters with beta times its loss, as in the paper's average, so its first weight is too high.
- With `accumulate` weights depend on the sum of all rounds' losses (Eqs. 3 and 4). A model received for the first time
  enters as if it had had the same loss in all earlier rounds: with one loss it would have nearly all weight.
- A client trains its own model every round, in addition to the M neighbours'. Neighbours are drawn one after the other,
  without replacement. M = 0 is local training.
- Each client's model has its own random initialisation. A client sends its model when it first takes part, after
  training it alone. Until then the model is unavailable, and a client that drew it gets its next choice.
- An update is the change by local training, times the weight (`m_step` "epochs" or "steps"), or the weighted gradient
  over all training data ("gradient"). With gradients the server makes a step of SGD, or of Adam with a state for each
  model.
- A client applies its own weights to its updates, and the paper trusts it. `sender_bound` shortens updates that would
  move another client's model farther than its owner does.
- Buffers of normalisation layers follow the owner's data: its updates of them are not weighted, and other clients send
  none.
- The mixture is of probabilities, over the models received so far with a weight of `mixture_threshold` or more, at most
  `mixture_size` others'. In a round, a model that was received earlier is the client's copy of it. The closing
  evaluation sends the last models; copies replace those that their owners no longer share.

Clients have no channel between them. The server forwards models and sums updates, so it knows which client has which
model. Clients keep their losses. With `selection` "server" they also report them, and the server draws the neighbours;
with "relay" the clients draw. The functions are the same, and so are the results unless a reply is lost. The client
then has losses that the server does not have. The parts with a state, and the clients' updates, are in `kindred.parts`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from .client.evaluation import predict
from .client.site import true_or_false
from .client.state import MIXTURE
from .client.visit import Visit
from .engine.admission import Refused, Reply, are_numbers
from .engine.arguments import StoredShared
from .engine.collaboration import Collaboration
from .engine.optimizers import OptimizerSteps
from .engine.sent_models import NEW_MODEL, SentModels, Updates
from .engine.stored import StoredModels
from .errors import Reportable
from .messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    NEIGHBOURS,
    NUM_TEST_EXAMPLES,
    SHARE_MODEL,
    TRAIN_LOSS,
    ClientId,
    by_prefix,
    encode,
    in_order,
    seed_for,
    to_record,
    with_prefix,
)
from .objectives import SMALLEST
from .parts.federico_copies import Copies
from .parts.federico_losses import LARGEST_LOSS, LOSSES, Losses
from .parts.federico_requests import (
    CHOICE_SEED,
    CLIENTS,
    Request,
    Requests,
    choose_request,
    mixture_members,
    request_of,
)
from .parts.federico_updates import MODELS, received_models, weighted_update
from .parts.mixture import Arrays, evaluation_inputs, mixture_shares
from .registry import Method
from .settings import A_SHARE, LEARNING_RATE, OPTIMIZER, STORE, TRUE_OR_FALSE, Setting, one_of, within

NUM_NEIGHBOURS = Setting(
    "num_neighbours",
    3,
    within(0, 10**6),
    "models of other clients that a client receives per round (M); 0 is local training",
    trial=2,
)
EPSILON = Setting("epsilon", 0.3, within(0, 1), "probability of a random neighbour instead of the best")
BETA = Setting("beta", 0.6, A_SHARE, "momentum of the moving average of losses; 1: the latest loss alone")
LIKELIHOOD = Setting(
    "likelihood",
    "mean",
    one_of("mean", "sum"),
    "whether weights depend on the mean or the sum of the loss over a client's samples; the paper has the sum",
)
TEMPERATURE = Setting(
    "temperature", 1.0, within(1e-9, 10**6), "weights are a softmax of the losses divided by it", trial=0.5
)
M_STEP = Setting(
    "m_step",
    "epochs",
    one_of("epochs", "steps", "gradient"),
    "work on each model per round: local-epochs epochs (local-steps steps if that is 0), local-steps steps, or one "
    "gradient over all data, with which the server updates the model by optimizer",
)
MIN_WEIGHT = Setting("min_weight", 0.001, within(0, 1), "updates with a smaller weight are neither computed nor sent")
MIXING = Setting("mixture", "probabilities", one_of("probabilities", "logits"), "what a client's prediction mixes")
MIXTURE_THRESHOLD = Setting(
    "mixture_threshold", 0.01, within(0, 1), "models with a smaller weight are not used in the prediction"
)
MIXTURE_SIZE = Setting(
    "mixture_size", 0, within(0, 10**6), "models of other clients in the prediction, at most; 0: no limit", trial=1
)
ACCUMULATE = Setting(
    "accumulate",
    False,
    TRUE_OR_FALSE,
    "whether weights depend on the sum of the losses of all rounds, instead of their moving average by beta",
)
SHARE_ABSENT = Setting(
    "share_absent",
    True,
    TRUE_OR_FALSE,
    "whether models of clients that are not connected stay available to others",
)
SELECTION = Setting(
    "selection",
    "server",
    one_of("server", "relay"),
    "who holds the losses and chooses neighbours: the server, or each client, with the server as a relay",
)
SENDER_BOUND = Setting(
    "sender_bound",
    0.0,
    within(0, 10**6),
    "an update of another client's model is shortened to at most this times the length of the owner's last update of "
    "it, so that no sender can move a model far; 0: no bound",
    trial=0.5,
)

# Settings in every message to a client, and those that it needs with `selection` "relay".
WEIGHING = (BETA, ACCUMULATE, LIKELIHOOD, TEMPERATURE)
FOR_CLIENTS = (SELECTION, *WEIGHING, M_STEP, MIN_WEIGHT, MIXING, MIXTURE_THRESHOLD, MIXTURE_SIZE)
FOR_RELAYED_CLIENTS = (NUM_NEIGHBOURS, EPSILON)

# --- The mathematics ----------------------------------------------------------------------------------


def collaborator_weights(smoothed: np.ndarray, temperature: float = 1.0, log_rest: float = -np.inf) -> np.ndarray:
    """Return w_ib = exp(-Lhat_ib / temperature) / sum_j exp(-Lhat_ij / temperature); line 16, Eq. 3.

    Parameters
    ----------
    smoothed : ndarray, shape (k,)
        Lhat_ib of the received models.
    temperature : float
        Above 0.
    log_rest : float
        Logarithm of the denominator's sum over all other models; -inf if there are none.

    Returns
    -------
    ndarray, shape (k,)
        Summing to 1 together with the weights of the other models.
    """
    scores = -np.asarray(smoothed, dtype=np.float64) / temperature  # (k,)
    highest = max(scores.max(), log_rest)  # subtracted first: rounding would lose a sum's logarithm beside 1e12
    return np.exp(scores - highest - np.logaddexp(log_sum_exp(scores - highest), log_rest - highest))


def log_sum_exp(scores: np.ndarray) -> float:
    """Return log sum_j exp(scores_j) of finite scores, shape (k,); -inf if there are none."""
    if not len(scores):
        return -np.inf
    highest = scores.max()
    return float(highest + np.log(np.exp(scores - highest).sum()))


def log_rest_of(losses: Losses, clients: Iterable[ClientId], temperature: float) -> float:
    """Return `log_rest` of `collaborator_weights` for these clients' models."""
    return log_sum_exp(-losses.averages(in_order(losses.latest.keys() - set(clients))) / temperature)


def known_weights(losses: Losses, temperature: float) -> dict[ClientId, float]:
    """Return the weights w_ij of the models that a client has received: owner -> weight, in order."""
    known = in_order(losses.smoothed)
    weights = collaborator_weights(losses.averages(known), temperature) if known else np.zeros(0)
    return dict(zip(known, weights.tolist(), strict=True))


# --- The client ---------------------------------------------------------------------------------------


class FedeRiCoClient:
    """The client half: trains the client's own model and its neighbours', and weights the updates."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Algorithm 1, lines 9 to 21."""
        config, site = visit.config, visit.site
        if config[SHARE_MODEL] and not true_or_false(visit.node_config, SHARE_MODEL, True):
            raise ValueError(Reportable(f"{SHARE_MODEL} is false at this site, but the server was not informed"))
        models, is_new = received_models(visit)
        scale = len(site.train[1]) if config["likelihood"] == "sum" else 1
        table, temperature = Losses.load(visit.state), float(config["temperature"])

        # E-step
        losses, predictions, x = [], {}, evaluation_inputs(visit)
        for owner, arrays in models.items():
            model = visit.model(arrays)
            loss = scale * visit.loss(model)
            losses.append(min(loss, LARGEST_LOSS) if np.isfinite(loss) else LARGEST_LOSS)
            predictions[owner] = predict(model, x, visit.objective)
        table.update(list(models), losses, None if config["accumulate"] else float(config["beta"]))
        log_rest = log_rest_of(table, models, temperature)
        weights = collaborator_weights(table.averages(models), temperature, log_rest)  # (k,)

        # M-step
        sent = with_prefix(NEW_MODEL, next(iter(models.values()))) if is_new else {}
        for place, (arrays, weight) in enumerate(zip(models.values(), weights.tolist(), strict=True)):
            if weight >= max(float(config["min-weight"]), SMALLEST):
                update = weighted_update(visit, arrays, weight, scale, own=place == 0)
                if all(np.isfinite(array).all() for array in update.values()):
                    sent |= with_prefix(place, update)

        table.save(visit.state)
        metrics = visit.counts() | evaluate_mixture(visit, table, models, predictions, f"{MIXTURE}-")
        if config["selection"] == "relay":
            reported = request_of(visit, table, known_weights(table, temperature)).pack()
        else:
            reported = {LOSSES: losses}
            metrics[TRAIN_LOSS] = losses[0] / scale
        return RecordDict({ARRAYS: to_record(sent), METRICS: MetricRecord({**metrics}), CONFIG: ConfigRecord(reported)})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the mixture of the models in the message, and of the copies of those that it lacks; keep it."""
        metrics = evaluate_mixture(visit, Losses.load(visit.state), received_models(visit)[0], {}, "")
        return RecordDict({METRICS: MetricRecord({**metrics, NUM_TEST_EXAMPLES: len(visit.site.test[1])})})


def evaluate_mixture(
    visit: Visit, table: Losses, models: dict[ClientId, Arrays], predictions: dict[ClientId, np.ndarray], prefix: str
) -> dict[str, float]:
    """Return metrics and loss of the mixture with which a client predicts, and of its own model.

    Parameters
    ----------
    visit : Visit
    table : Losses
        With those of the received models.
    models : dict of client id to model
        The received models, the client's own first.
    predictions : dict of client id to ndarray (n, N)
        What they predict for `evaluation_inputs`, in training; empty in an evaluation.
    prefix : str
        Prefix of the mixture's metrics.
    """
    config, temperature = visit.config, float(visit.config["temperature"])
    known = known_weights(table, temperature) if config[SHARE_MODEL] else {}  # a client that does not share is alone
    threshold, size = float(config["mixture-threshold"]), int(config["mixture-size"])
    members = mixture_members(next(iter(models)), known, threshold, size)
    copies = Copies(visit, models)
    if predictions:
        copies.update(table.latest, members if size or not known else table.latest, predictions)
    found = copies.predictions(members, predictions)
    weights = collaborator_weights(table.averages(found), temperature)  # (k,)
    return copies.metrics(found, mixture_shares(weights, threshold), keep=not predictions, prefix=prefix)


# --- The server ---------------------------------------------------------------------------------------


class FedeRiCo(StoredModels):
    """FedeRiCo as a Flower strategy.

    `initial_arrays` of `start` gives the names, shapes and types of a model's arrays; each client initialises its own.

    Parameters
    ----------
    num_neighbours : int (default: 3)
        M, 0 or more, the models of other clients that a client receives per round; 0 is local training.
    epsilon : float (default: 0.3)
        Probability, 0 to 1, that a neighbour is drawn at random instead of by weight.
    beta : float (default: 0.6)
        Momentum of the moving average of losses, more than 0, at most 1.
    likelihood : {"mean", "sum"}
        Whether a client's loss is the mean over its samples or, as in the paper, their sum.
    temperature : float (default: 1.0)
        1e-9 or more; weights are a softmax of the losses divided by it.
    m_step : {"epochs", "steps", "gradient"}
        What a client does with its own and the received models: train them for `local-epochs` epochs (`local-steps`
        steps if that is 0) or `local-steps` steps, or compute one gradient over all its data.
    optimizer : {"adam", "sgd"}
        With m_step "gradient": how the server updates a model with the sum of the gradients.
    learning_rate : float (default: 0.002)
        Step size of that update, above 0.
    min_weight : float (default: 0.001)
        0 to 1; an update with a smaller weight is neither computed nor sent.
    mixture : {"probabilities", "logits"}
        What a client's prediction mixes.
    mixture_threshold : float (default: 0.01)
        0 to 1; models with a smaller weight are not used in the prediction.
    mixture_size : int (default: 0)
        The most models of other clients that are used in the prediction; 0: no limit.
    accumulate : bool (default: False)
        Whether weights depend on the sum of the losses of all rounds (Eqs. 3 and 4), instead of their moving average.
    share_absent : bool (default: True)
        Whether models of clients that are not connected remain available to others.
    selection : {"server", "relay"}
        Who holds the losses and chooses the neighbours: the server, or each client, for which the server is a relay.
    sender_bound : float (default: 0.0)
        If not 0, the L2 norm of a client's update of another client's model is at most this times that of the owner's
        last update of it: longer ones are shortened. The server then keeps the updates until the end of the round.
    **shared
        Arguments of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument is out of range; the message names it.
    """

    name = "federico"
    needs_shared_models = False
    personal = MIXTURE
    clients_keep_state = True
    STATE = (*StoredModels.STATE, "losses", "steps", "_requests", "_directory", "_round", "_lengths")

    def __init__(
        self,
        *,
        num_neighbours: int = NUM_NEIGHBOURS.default,
        epsilon: float = EPSILON.default,
        beta: float = BETA.default,
        likelihood: str = LIKELIHOOD.default,
        temperature: float = TEMPERATURE.default,
        m_step: str = M_STEP.default,
        optimizer: str = OPTIMIZER.default,
        learning_rate: float = LEARNING_RATE.default,
        min_weight: float = MIN_WEIGHT.default,
        mixture: str = MIXING.default,
        mixture_threshold: float = MIXTURE_THRESHOLD.default,
        mixture_size: int = MIXTURE_SIZE.default,
        accumulate: bool = ACCUMULATE.default,
        share_absent: bool = SHARE_ABSENT.default,
        selection: str = SELECTION.default,
        sender_bound: float = SENDER_BOUND.default,
        **shared: Unpack[StoredShared],
    ) -> None:
        super().__init__(**shared)
        self.num_neighbours = NUM_NEIGHBOURS.check(num_neighbours)
        self.epsilon = EPSILON.check(epsilon)
        self.beta = BETA.check(beta)
        self.likelihood = LIKELIHOOD.check(likelihood)
        self.temperature = TEMPERATURE.check(temperature)
        self.m_step = M_STEP.check(m_step)
        self.min_weight = MIN_WEIGHT.check(min_weight)
        self.mixture = MIXING.check(mixture)
        self.mixture_threshold = MIXTURE_THRESHOLD.check(mixture_threshold)
        self.mixture_size = MIXTURE_SIZE.check(mixture_size)
        self.accumulate = ACCUMULATE.check(accumulate)
        self.share_absent = SHARE_ABSENT.check(share_absent)
        self.selection = SELECTION.check(selection)
        self.sender_bound = SENDER_BOUND.check(sender_bound)
        self.optimizer = OPTIMIZER.check(optimizer)
        self.learning_rate = LEARNING_RATE.check(learning_rate)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self.losses: dict[ClientId, Losses] = {}  # with selection "server"
        self.steps = OptimizerSteps(self.optimizer, self.learning_rate)
        self._requests = Requests(self.models, self.roster, self.share_absent)
        self._directory: list[ClientId] = []  # clients whose models were shared in the last round
        self._round = 0
        self._lengths: dict[ClientId, float] = {}  # of the clients' last updates of their own models
        self._sent = SentModels(self.models)

    def restore(self, state: Mapping[str, Any]) -> None:
        losses = {client: Losses(*table) for client, table in state["losses"].items()}
        super().restore({**state, "losses": losses})

    def introduce(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        # Never undone: a node that takes over a name must not make the server share a model that its site withholds.
        self._requests.make_private(client for client, about in newcomers.items() if not about.get(SHARE_MODEL, True))
        return super().introduce(newcomers)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        config: dict[str, Any] = {each.key: getattr(self, each.name) for each in FOR_CLIENTS}
        config |= {MODELS: encode(self._sent.owners[client]), SHARE_MODEL: not self._requests.is_private(client)}
        if self.selection == "relay":
            config |= {each.key: getattr(self, each.name) for each in FOR_RELAYED_CLIENTS}
            config |= {CLIENTS: encode(self._directory), CHOICE_SEED: self._choice_seed(client)}
        return config

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._round = server_round
        self._directory = self._requests.shared()
        self.models.reserve(len(self.roster.nodes))
        self._sent = SentModels(self.models)
        steps = self.steps if self.m_step == "gradient" else None
        self._updates = Updates(self._sent, clients, steps, self.sender_bound, self._lengths)
        for client in clients:
            if client not in self._requests:  # its first round
                self._requests.put(client, self._request(client))
            yield client, self._sent.pack(client, self._requests.neighbours(client, self.num_neighbours))

    def _request(self, client: ClientId) -> Request:
        losses = self.losses.get(client, Losses())
        return choose_request(
            client,
            self._directory,
            losses,
            known_weights(losses, self.temperature),
            num_neighbours=self.num_neighbours,
            epsilon=self.epsilon,
            seed=self._choice_seed(client),
            threshold=self.mixture_threshold,
            size=self.mixture_size,
        )

    def _choice_seed(self, client: ClientId) -> int:
        return seed_for(self.seed, client, self._round, NEIGHBOURS)

    def mismatch(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> str | None:
        return self._sent.mismatch(client, arrays)

    def inspect(self, client: ClientId, reply: Reply) -> None:
        if self.selection == "server":
            losses, due = reply.config.get(LOSSES), len(self._sent.owners[client])
            if not are_numbers(losses, due, -LARGEST_LOSS, LARGEST_LOSS):
                raise Refused(f"its losses are {reprlib.repr(losses)}, expected {due} numbers up to {LARGEST_LOSS:g}")

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float | None:
        return self._sent.update_norm(arrays)

    def scaled_update(self, client: ClientId, arrays: Mapping[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
        return self._sent.scaled_updates(arrays, factor)

    def take(self, client: ClientId, reply: Reply) -> None:
        owners = self._sent.owners[client]
        if self.selection == "server":
            beta = None if self.accumulate else self.beta
            self.losses.setdefault(client, Losses()).update(owners, reply.config[LOSSES], beta)
            request = self._request(client)
        else:
            request = self._requests.existing(Request.unpack(reply.config))
        self._requests.put(client, request)
        parts = by_prefix(reply.arrays)
        self.history.count(client, updates_withheld=len(owners) - len(parts.keys() - {NEW_MODEL}))
        self._updates.add(client, parts)

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        self._sent.forget_packed()
        self._updates.finish()
        for client, count in self._updates.shortened.items():
            self.history.count(client, updates_shortened=count)
        rows = self.history.open_rows()
        self.history.count(
            models_sent=self._sent.count,
            updates_withheld=sum(row.get("updates-withheld", 0) for row in rows if row["client"] in answered),
        )
        super().end_round(server_round, answered)

    def row_fields(self, client: ClientId) -> dict[str, Any]:
        """Return the other clients whose models the client received."""
        return {NEIGHBOURS: encode(self._sent.neighbours(client))}

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        """Return the available models of the client's mixture, its own first."""
        mixed = self._requests.mixture(client, self.mixture_size)
        return self._sent.pack(client, mixed, keep=False)  # all clients are evaluated: that is every model

    def shared_rows(self) -> Collaboration:
        """Return the weights w_ij that the server knows; the row of a client that does not report them is 0."""
        return self._requests.shared_rows()


METHOD = Method(
    title="FedeRiCo",
    paper="Sui et al., 2022, arXiv:2210.06597",
    travels="the client's and its neighbours' models, down; their weighted updates, up",
    stays="its losses, and the models that it has received",
    strategy=FedeRiCo,
    client=FedeRiCoClient,
    settings=(
        NUM_NEIGHBOURS,
        EPSILON,
        BETA,
        LIKELIHOOD,
        TEMPERATURE,
        M_STEP,
        OPTIMIZER,
        LEARNING_RATE,
        MIN_WEIGHT,
        MIXING,
        MIXTURE_THRESHOLD,
        MIXTURE_SIZE,
        ACCUMULATE,
        SHARE_ABSENT,
        SELECTION,
        SENDER_BOUND,
        STORE,
    ),
)
