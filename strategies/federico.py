"""FedeRiCo: every client finds its collaborators.

A. Sui, J. Wen, Y. Lau, B. L. Ross, J. C. Cresswell: Find Your Friends: Personalized Federated Learning with the
Right Collaborators. arXiv:2210.06597.

Client i has a model phi_i and weights w_i., the posterior of an assignment of its data to the clients' models. EM
maximises the likelihood of all data under the mixtures; what is exchanged is a few models and their updates.

| paper | here |
|---|---|
| Algorithm 1, line 7: M neighbours by epsilon-greedy choice | `choose_neighbours` |
| lines 11 to 14: losses of the drawn models, the others' as they were | `Losses.update` |
| line 15: moving average of the losses | `smooth` |
| line 16, Eq. 3: weights | `collaborator_weights` |
| lines 18 to 21: weighted updates of the models at hand | `Collaboration.train` |
| line 25, Eq. 6: each model moved by the sum of what comes for it | `FedeRiCo.take`, `AdamStep`, `SGDStep` |
| prediction by h_i = sum_j w_ij h_phi_j | `mixture_of` |

Decisions where the paper is silent, or where its letter fails:

- The loss l_ib is the mean over the samples (`likelihood`), the paper's is the sum. The sum makes the weights one-hot
  within a few rounds, and often on another client's model; the mean spreads them over the clients of a distribution.
- Losses start from 0, so that a model that has not been seen looks best: this is right for the choice of neighbours,
  which thereby explores, and wrong for weights. Those are over the models seen so far. One that has been seen once
  counts with beta times its loss, as the paper's average has it, and so at first for more than its worth.
- A client works on its own model every round, besides the M neighbours'. Neighbours are drawn one after the other,
  each among those that are left. M = 0 is local training.
- Models start from weights of their own. A client sends its model when it first takes part, having trained it alone;
  until then nobody can draw it, and who would have done so takes the next choice.
- An update is what local training changes, times the weight (`m_step` "epochs" or "steps"), or the weighted gradient
  over all training data, with which the server makes a step of Adam, of which each model has a state, or of SGD
  ("gradient").
- What normalisation layers count follows the owner's data: it is neither weighted nor changed by others.
- The mixture is of probabilities; in a round, of the models at hand. The closing evaluation is of the whole mixture.

There is no channel between clients: the server passes models on, adds updates up, and knows who has whose model.
It also keeps the losses and draws the neighbours (`selection` "server"), or leaves both to the clients ("relay"). The
functions are the same, and so are the results, unless a reply gets lost: its client then knows losses that the server
does not.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from .client.app import Visit, true_or_false
from .client.state import MIXTURE
from .client.training import get_arrays, predict
from .engine.admission import Refused, Reply, are_numbers, norm
from .engine.arguments import StoredShared
from .engine.model_store import InTurn
from .engine.strategy import StoredModels
from .messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    NUM_EXAMPLES,
    RECEIVED,
    REPORT_WEIGHTS,
    SHARE_MODEL,
    TRAIN_LOSS,
    ClientId,
    by_prefix,
    decode,
    encode,
    in_order,
    seed_for,
    to_record,
    with_prefix,
)
from .mixture import SMALLEST, accuracy_and_loss, keep_mixture, mixture_of
from .registry import Method
from .settings import (
    A_SHARE,
    LEARNING_RATE,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    OPTIMIZER,
    STORE,
    TRUE_OR_FALSE,
    Setting,
    at_least,
    one_of,
    within,
)

NUM_NEIGHBOURS = Setting(
    "num_neighbours",
    3,
    at_least(0),
    "models of others that a client gets in a round (M); 0 is local training",
    trial=2,
)
EPSILON = Setting("epsilon", 0.3, within(0, 1), "probability of a random neighbour instead of the best")
BETA = Setting("beta", 0.6, A_SHARE, "momentum of the moving average of losses; 1: the last alone")
LIKELIHOOD = Setting(
    "likelihood",
    "mean",
    one_of("mean", "sum"),
    "the loss, over a client's samples, that weights go by; the paper's is the sum",
)
TEMPERATURE = Setting(
    "temperature", 1.0, at_least(1e-9), "weights are a softmax of the losses divided by it", trial=0.5
)
M_STEP = Setting(
    "m_step",
    "epochs",
    one_of("epochs", "steps", "gradient"),
    "work on each model in a round: local-epochs epochs (where that is 0, local-steps steps), local-steps steps, or "
    "one gradient over all data, by which the server moves the model with optimizer",
)
MIN_WEIGHT = Setting("min_weight", 0.001, within(0, 1), "updates with a smaller weight are neither computed nor sent")
MIXING = Setting("mixture", "probabilities", one_of("probabilities", "logits"), "what a client's prediction mixes")
MIXTURE_THRESHOLD = Setting(
    "mixture_threshold", 0.01, within(0, 1), "models with a smaller weight have no part in the prediction"
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

Arrays = dict[str, np.ndarray]

NEW_MODEL = "model"  # prefix of a model that the server has not got; updates are prefixed by their place, 0 the own

# Keys of the settings in messages, and of what replies say.
MODELS = "models"
CLIENTS = "clients"
SMOOTHED = "smoothed-losses"
LOG_REST = "log-rest"
LOSSES = "losses"
NEIGHBOURS = "neighbours"
CHOICE_SEED = "choice-seed"
WEIGHTS = "weights"
WEIGHTS_OF = "weights-of"

WISHES = 2
"""How many clients a client wants the models of, over those it gets: the others stand in for who cannot be had."""

USELESS = 1e12
"""The loss of a model whose loss is not finite, or larger."""

# --- The mathematics ----------------------------------------------------------------------------------


def smooth(smoothed: np.ndarray, losses: np.ndarray, beta: float) -> np.ndarray:
    """The moving average (1 - beta) Lhat + beta l; Algorithm 1, line 15. All of shape (k,)."""
    return (1 - beta) * smoothed + beta * losses


def collaborator_weights(smoothed: np.ndarray, temperature: float = 1.0, log_rest: float = -np.inf) -> np.ndarray:
    """w_ib = exp(-Lhat_ib / temperature) / sum_j exp(-Lhat_ij / temperature); line 16, Eq. 3.

    Parameters
    ----------
    smoothed : ndarray, shape (k,)
        Lhat_ib of the models at hand.
    temperature : float
        Above 0.
    log_rest : float
        The logarithm of that sum over the other models; -inf if there are none.

    Returns
    -------
    ndarray, shape (k,)
        Summing to 1 together with the weights of the others.
    """
    scores = -np.asarray(smoothed, dtype=np.float64) / temperature  # (k,)
    highest = max(scores.max(), log_rest)  # taken off first: beside scores of 1e12 the logarithm of a sum is lost
    return np.exp(scores - highest - np.logaddexp(log_sum_exp(scores - highest), log_rest - highest))


def log_sum_exp(scores: np.ndarray) -> float:
    """log sum_j exp(scores_j), -inf of nothing; scores (k,) finite."""
    if not len(scores):
        return -np.inf
    highest = scores.max()
    return float(highest + np.log(np.exp(scores - highest).sum()))


def choose_neighbours(smoothed: np.ndarray, epsilon: float, seed: int, most: int | None = None) -> np.ndarray:
    """Epsilon-greedy choice; Algorithm 1, line 7.

    Each draw is uniform over those that are left with probability epsilon, and otherwise the one with the highest
    weight, which is that of the lowest loss. Of equally good ones, such as all that have not been seen, any.

    Parameters
    ----------
    smoothed : ndarray, shape (k,)
        Lhat_ij of the others, 0 of those not seen.
    epsilon : float
        0 to 1.
    seed : int
    most : int, optional
        How many are drawn; all by default. With fewer the first ones are the same.

    Returns
    -------
    ndarray of int, shape (k,)
        In the order drawn: the first M are the neighbours, the next stand in for who cannot be had.
    """
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(smoothed))
    left = shuffled[np.argsort(np.asarray(smoothed)[shuffled], kind="stable")].tolist()  # best first
    explores = (rng.random(len(left)) < epsilon)[:most]
    anywhere = rng.random(len(left))[:most]
    return np.array([left.pop(int(at * len(left)) if explore else 0) for explore, at in zip(explores, anywhere)], int)


def mixture_shares(weights: np.ndarray, threshold: float) -> np.ndarray:
    """The weights of `threshold` or more, divided by their sum, 0 for the others; of all, if none is so large.

    Parameters
    ----------
    weights : ndarray, shape (k,)
    threshold : float
        0 to 1.

    Returns
    -------
    ndarray, shape (k,)
        Summing to 1.
    """
    counted = np.where(weights >= threshold, weights, 0.0)
    if not counted.any():
        counted = weights if weights.any() else np.ones_like(weights)
    return counted / counted.sum()


class Losses:
    """What one client knows of the models it has seen: l_ij and Lhat_ij.

    Attributes
    ----------
    latest, smoothed : dict
        client -> loss.
    """

    def __init__(
        self, latest: Mapping[ClientId, float] | None = None, smoothed: Mapping[ClientId, float] | None = None
    ) -> None:
        self.latest = dict(latest or {})
        self.smoothed = dict(smoothed or {})

    def of(self, clients: Sequence[ClientId]) -> np.ndarray:
        """Lhat_ij, shape (k,): 0 of who has not been seen."""
        return np.fromiter(map(self.smoothed.get, clients, repeat(0.0)), np.float64, len(clients))

    def update(self, clients: Sequence[ClientId], losses: Sequence[float], beta: float) -> None:
        """Take in the losses of the models at hand; those of the others stay, and enter the average again."""
        self.latest |= dict(zip(clients, losses))
        seen = in_order(self.latest)
        latest = np.array([self.latest[client] for client in seen], dtype=np.float64)
        self.smoothed = dict(zip(seen, smooth(self.of(seen), latest, beta).tolist()))

    def log_rest(self, clients: Sequence[ClientId], beta: float, temperature: float) -> float:
        """What `collaborator_weights` needs of the models that are not at hand, after the next `update`."""
        rest = in_order(self.latest.keys() - set(clients))
        latest = np.array([self.latest[client] for client in rest], dtype=np.float64)
        return log_sum_exp(-smooth(self.of(rest), latest, beta) / temperature)

    def weights(self, temperature: float) -> tuple[list[ClientId], np.ndarray]:
        """All that have been seen, in order, and their weights, shape (k,)."""
        seen = in_order(self.smoothed)
        return seen, collaborator_weights(self.of(seen), temperature)

    def choose(self, others: Sequence[ClientId], epsilon: float, seed: int, most: int) -> list[ClientId]:
        """The first of the others in the order in which `choose_neighbours` draws them, `most` at most."""
        return [others[i] for i in choose_neighbours(self.of(others), epsilon, seed, most)]

    def mixture(self, own: ClientId, temperature: float, threshold: float, most: int) -> list[ClientId]:
        """Whose models the client predicts with: its own, and the others with a weight of the threshold or more.

        Of the others the `most` with the highest weights, these first.
        """
        seen, weights = self.weights(temperature)
        best_first = [seen[place] for place in np.argsort(-weights, kind="stable") if weights[place] >= threshold]
        return [own, *(client for client in best_first if client != own)][: 1 + most]


class SGDStep:
    """phi = phi - eta g; Eq. 6, g the sum of the gradients that came for the model."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def __call__(self, parameters: np.ndarray, gradient: np.ndarray) -> None:
        """Change parameters, shape (d,), in place."""
        parameters -= self.learning_rate * gradient


class AdamStep:
    """Adam of Kingma and Ba, arXiv:1412.6980, with the paper's defaults; one for each model."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.steps = 0
        self.first: np.ndarray | float = 0.0  # (d,)
        self.second: np.ndarray | float = 0.0  # (d,)

    def __call__(self, parameters: np.ndarray, gradient: np.ndarray) -> None:
        """Change parameters, shape (d,), in place."""
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * np.square(gradient)
        size = np.sqrt(self.second / (1 - 0.999**self.steps)) + 1e-8
        parameters -= self.learning_rate / (1 - 0.9**self.steps) * self.first / size


# --- The client ---------------------------------------------------------------------------------------


class Collaboration:
    """The client half: works on the client's own model and on its neighbours'."""

    @staticmethod
    def train(visit: Visit) -> RecordDict:
        """Algorithm 1, lines 9 to 21."""
        config, site = visit.config, visit.site
        if config[SHARE_MODEL] and not true_or_false(visit.node_config, SHARE_MODEL, True):
            raise ValueError(f"{SHARE_MODEL} is false at this site, and the server has not heard of it")
        clients, models, is_new = _at_hand(visit)
        scale = len(site.train[1]) if config["likelihood"] == "sum" else 1
        table = _load_losses(visit) if config["selection"] == "relay" else None
        beta, temperature = float(config["beta"]), float(config["temperature"])

        # E-step
        losses, probabilities = [], []
        for arrays in models:
            model = visit.model(arrays)
            loss = scale * visit.loss(model)
            losses.append(min(loss, USELESS) if np.isfinite(loss) else USELESS)
            probabilities.append(predict(model, site.test[0]))
        if table is None:
            before, log_rest = np.array(config[SMOOTHED]), float(config[LOG_REST])
        else:
            before, log_rest = table.of(clients), table.log_rest(clients, beta, temperature)
        weights = collaborator_weights(smooth(before, np.array(losses), beta), temperature, log_rest)  # (k,)

        # M-step
        sent = with_prefix(NEW_MODEL, models[0]) if is_new else {}
        for place, (arrays, weight) in enumerate(zip(models, weights.tolist())):
            if weight >= max(float(config["min-weight"]), SMALLEST):
                update = _update(visit, arrays, weight, scale, own=place == 0)
                if all(np.isfinite(array).all() for array in update.values()):
                    sent |= with_prefix(place, update)

        metrics: dict[str, Any] = {}
        if table is None:
            told: dict[str, Any] = {LOSSES: losses}
            metrics[TRAIN_LOSS] = losses[0] / scale
        else:
            table.update(clients, losses, beta)
            _save_losses(visit, table)
            told = _wishes(visit, table)
        shares = mixture_shares(weights, float(config["mixture-threshold"]))
        if visit.is_site:  # should the run end before its closing evaluation
            keep_mixture(visit, clients, models, shares, str(config["mixture"]))
        metrics |= {**visit.counts(), **_scores(visit, np.stack(probabilities), shares, f"{MIXTURE}-")}
        return RecordDict({ARRAYS: to_record(sent), METRICS: MetricRecord(metrics), CONFIG: ConfigRecord(told)})

    @staticmethod
    def evaluate(visit: Visit) -> RecordDict:
        """Evaluate the mixture of the models in the message, and keep it."""
        config = visit.config
        clients, models, _ = _at_hand(visit)
        smoothed = np.array(config[SMOOTHED]) if SMOOTHED in config else _load_losses(visit).of(clients)  # (k,)
        weights = collaborator_weights(smoothed, float(config["temperature"]))
        shares = mixture_shares(weights, float(config["mixture-threshold"]))  # (k,)
        probabilities = np.stack([predict(visit.model(arrays), visit.site.test[0]) for arrays in models])  # (k, n, N)
        keep_mixture(visit, clients, models, shares, str(config["mixture"]))
        metrics = _scores(visit, probabilities, shares) | {NUM_EXAMPLES: len(visit.site.test[1])}
        return RecordDict({METRICS: MetricRecord(metrics)})


def _at_hand(visit: Visit) -> tuple[list[ClientId], list[Arrays], bool]:
    """The models in the message and whose they are, the client's own first; whether that had to be made."""
    clients = decode(visit.config[MODELS])
    parts = by_prefix(visit.arrays)
    is_new = "0" not in parts
    if is_new:
        parts["0"] = get_arrays(visit.own_model())
    return clients, [parts[str(place)] for place in range(len(clients))], is_new


def _update(visit: Visit, arrays: Arrays, weight: float, scale: float, *, own: bool) -> Arrays:
    """g_bi, or w_ib times what local training changes; of the client's own model buffers too, without the weight."""
    config = visit.config
    model = visit.model(arrays)
    if config["m-step"] == "gradient":
        update = {name: weight * scale * array for name, array in visit.gradient(model).items()}
    else:
        epochs = int(LOCAL_EPOCHS.read(config)) if config["m-step"] == "epochs" else 0
        visit.train(model, epochs=epochs, steps=0 if epochs else int(LOCAL_STEPS.read(config)))
        trained, parameters = get_arrays(model), {name for name, _ in model.named_parameters(remove_duplicate=False)}
        update = {name: weight * (trained[name] - arrays[name]) for name in arrays if name in parameters}
    if own:
        now = get_arrays(model)
        update |= {
            name: now[name] - arrays[name]
            for name in arrays
            if name not in update and np.issubdtype(now[name].dtype, np.floating)
        }
    return update


def _scores(visit: Visit, probabilities: np.ndarray, shares: np.ndarray, prefix: str = "") -> dict[str, float]:
    """Accuracy and loss of the mixture and of the client's own model, as metrics; probabilities (k, n, N)."""
    labels = visit.site.test[1].cpu().numpy()
    metrics = {}
    mixed = mixture_of(probabilities, shares, str(visit.config["mixture"]))
    for which, rows in ((prefix, mixed), (f"{RECEIVED}-", probabilities[0])):
        metrics[f"{which}accuracy"], metrics[f"{which}loss"] = accuracy_and_loss(rows, labels)
    return metrics


def _wishes(visit: Visit, table: Losses) -> dict[str, Any]:
    """What a client that decides for itself asks of the server, and what it agrees to tell."""
    config = visit.config
    temperature = float(config["temperature"])
    own, most = decode(config[MODELS])[0], int(config["num-neighbours"])
    others = [client for client in decode(config[CLIENTS]) if client != own]
    told = {
        NEIGHBOURS: encode(table.choose(others, float(config["epsilon"]), config[CHOICE_SEED], WISHES * most)),
        MIXTURE: encode(table.mixture(own, temperature, float(config["mixture-threshold"]), most)),
    }
    # A client that has nothing but a number in its node config is one of a simulation.
    is_simulated = "partition-id" in visit.node_config and "client-id" not in visit.node_config and not visit.is_site
    if true_or_false(visit.node_config, REPORT_WEIGHTS, is_simulated):
        seen, weights = table.weights(temperature)
        told |= {WEIGHTS_OF: encode(seen), WEIGHTS: weights.tolist()}
    return told


def _load_losses(visit: Visit) -> Losses:
    kept = visit.state.load(LOSSES) or {}
    pairs = {json.loads(name): losses.tolist() for name, losses in kept.items()}
    return Losses(
        {client: latest for client, (latest, _) in pairs.items()},
        {client: smoothed for client, (_, smoothed) in pairs.items()},
    )


def _save_losses(visit: Visit, table: Losses) -> None:
    visit.state.save(
        LOSSES,
        {json.dumps(client): np.array([table.latest[client], table.smoothed[client]]) for client in table.latest},
    )


# --- The server ---------------------------------------------------------------------------------------


class FedeRiCo(StoredModels):
    """FedeRiCo as a Flower strategy.

    `initial_arrays` of `start` says what the arrays of a model are; a client starts from weights of its own.

    Parameters
    ----------
    num_neighbours : int (default: 3)
        M, 0 or more; 0 is local training.
    epsilon : float (default: 0.3)
        Probability, 0 to 1, that a neighbour is drawn at random instead of by weight.
    beta : float (default: 0.6)
        Momentum of the moving average of losses, more than 0, at most 1.
    likelihood : {"mean", "sum"}
        Whether a client's loss is the mean over its samples or, as in the paper, their sum.
    temperature : float (default: 1.0)
        1e-9 or more; weights are a softmax of the losses divided by it.
    m_step : {"epochs", "steps", "gradient"}
        What a client does with the models at hand: train them for `local-epochs` epochs (where that is 0, for
        `local-steps` steps) or `local-steps` steps, or compute one gradient over all its data.
    optimizer : {"adam", "sgd"}
        With m_step "gradient": how the server moves a model by the sum of the gradients.
    learning_rate : float (default: 0.002)
        Of that, above 0.
    min_weight : float (default: 0.001)
        0 to 1; an update with a smaller weight is neither computed nor sent.
    mixture : {"probabilities", "logits"}
        What a client's prediction mixes.
    mixture_threshold : float (default: 0.01)
        0 to 1; models with a smaller weight have no part in the prediction.
        Of the others at most num_neighbours have part in it.
    share_absent : bool (default: True)
        Whether models of clients that are not connected remain available to others.
    selection : {"server", "relay"}
        Who holds the losses and chooses the neighbours: the server, or each client, for which the server is a relay.
    **shared
        Those of `PersonalizedStrategy`.

    Raises
    ------
    ValueError
        An argument out of range, naming it.
    """

    name = "federico"
    needs_shared_models = False
    personal = MIXTURE
    clients_keep_state = True
    STATE = (*StoredModels.STATE, "_private", "_choices", "_mixtures", "_weights", "_directory", "_round")

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
        share_absent: bool = SHARE_ABSENT.default,
        selection: str = SELECTION.default,
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
        self.share_absent = SHARE_ABSENT.check(share_absent)
        self.selection = SELECTION.check(selection)
        self.optimizer = OPTIMIZER.check(optimizer)
        self.learning_rate = LEARNING_RATE.check(learning_rate)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._private: set[ClientId] = set()  # who does not share its model
        self._losses: dict[ClientId, Losses] = {}  # with selection "server"
        self._choices: dict[ClientId, list[ClientId]] = {}  # others in the order in which a client wants them
        self._mixtures: dict[ClientId, list[ClientId]] = {}  # whose models a client predicts with
        self._weights: dict[ClientId, dict[ClientId, float]] = {}  # w_ij, as far as the server knows
        self._at_hand: dict[ClientId, list[ClientId]] = {}  # whose models the last message to a client holds
        self._steps: dict[ClientId, AdamStep | SGDStep] = {}
        self._packed: dict[ClientId, ArrayRecord] = {}  # models as they are now, each packed once
        self._models_sent = 0
        self._directory: list[ClientId] = []  # whose models could be had in the last round
        self._round = 0

    def state(self) -> dict[str, Any]:
        losses = {client: (table.latest, table.smoothed) for client, table in self._losses.items()}
        return {**super().state(), "losses": losses, "steps": {owner: vars(s) for owner, s in self._steps.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        own = dict(state)
        self._losses = {client: Losses(*table) for client, table in own.pop("losses").items()}
        for owner, attributes in own.pop("steps").items():
            vars(self._step_of(owner)).update(attributes)
        super().restore(own)

    def introduce(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        # Once said it stays: a node that takes over a name must not give away what the site has kept to itself.
        self._private |= {client for client, about in newcomers.items() if not about.get(SHARE_MODEL, True)}
        return super().introduce(newcomers)

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        at_hand = self._at_hand[client]
        config = {
            MODELS: encode(at_hand),
            SHARE_MODEL: client not in self._private,
            "selection": self.selection,
            "beta": self.beta,
            "likelihood": self.likelihood,
            "temperature": self.temperature,
            "m-step": self.m_step,
            "min-weight": self.min_weight,
            "mixture": self.mixture,
            "mixture-threshold": self.mixture_threshold,
        }
        if self.selection == "relay":
            return config | {
                "num-neighbours": self.num_neighbours,
                "epsilon": self.epsilon,
                CLIENTS: encode(self._directory),
                CHOICE_SEED: self._choice_seed(client),
            }
        losses = self._losses.get(client, Losses())
        return config | {
            SMOOTHED: losses.of(at_hand).tolist(),
            LOG_REST: losses.log_rest(at_hand, self.beta, self.temperature),
        }

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._round = server_round
        self._directory = self._sharing()
        self._at_hand = {}
        self._models_sent = 0
        self.models.reserve(len(self.roster.nodes))
        self._updates: InTurn[Arrays] = InTurn(clients, self._add_updates)
        self._gradients: dict[ClientId, np.ndarray] = {}  # of shape (d,): sums
        self._packed = {}
        for client in clients:
            yield client, self._models_for(client, self._neighbours(client))

    def _sharing(self) -> list[ClientId]:
        """Whose models others may have, in order."""
        return in_order(filter(self._shares, {*self.roster.nodes, *self.models}))

    def _shares(self, client: ClientId) -> bool:
        return client not in self._private and (self.share_absent or client in self.roster.nodes)

    def _neighbours(self, client: ClientId) -> list[ClientId]:
        if client in self._private:
            return []
        if client not in self._choices:  # it has not taken part yet
            self._choose(client)
        return self._available(client, self._choices[client])[: self.num_neighbours]

    def _available(self, client: ClientId, wanted: Sequence[ClientId]) -> list[ClientId]:
        """Those of the wanted clients, without the client itself, whose models can be had."""
        return [
            other for other in dict.fromkeys(wanted) if other != client and other in self.models and self._shares(other)
        ]

    def _known(self, wanted: Sequence[ClientId]) -> list[ClientId]:
        """Those of the wanted clients that there are, each once: what a client wishes is kept from round to round."""
        return [other for other in dict.fromkeys(wanted) if other in self.models or other in self.roster.nodes]

    def _choose(self, client: ClientId) -> None:
        """Draw others for the client's next round."""
        others = [other for other in self._directory if other != client]
        losses = self._losses.get(client, Losses())
        self._choices[client] = losses.choose(
            others, self.epsilon, self._choice_seed(client), WISHES * self.num_neighbours
        )

    def _choice_seed(self, client: ClientId) -> int:
        return seed_for(self.seed, client, self._round, NEIGHBOURS)

    def _models_for(self, client: ClientId, others: Sequence[ClientId]) -> ArrayRecord:
        """The client's own model, as far as there is one, and those of others."""
        self._at_hand[client] = [client, *others]
        record = ArrayRecord()
        for place, owner in enumerate(self._at_hand[client]):
            if owner in self.models:
                if owner not in self._packed:
                    self._packed[owner] = self.models[owner]
                record.update(with_prefix(place, self._packed[owner]))
                self._models_sent += 1
        return record

    def mismatch(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> str | None:
        parts = by_prefix(arrays)
        new = parts.pop(NEW_MODEL, None)
        if (new is None) != (client in self.models):
            return "it holds a model where an update is due" if new else "its model is missing"
        if new is not None and (difference := self.layout.mismatch(new)) is not None:
            return difference
        places = {str(place) for place in range(len(self._at_hand[client]))}
        for prefix, update in parts.items():
            if prefix not in places:
                return f"arrays {prefix!r} are of no model that was sent"
            if (difference := self.layout.mismatch(update, whole=False)) is not None:
                return difference
            for name in update:
                if prefix != "0" and self.layout.slices[name].start >= self.layout.num_parameters:
                    return f"array {name!r} is the owner's alone to change"
        return None

    def inspect(self, client: ClientId, reply: Reply) -> None:
        if self.selection == "server":
            losses, due = reply.config.get(LOSSES), len(self._at_hand[client])
            if not are_numbers(losses, due, -USELESS, USELESS):
                raise Refused(f"its losses are {reprlib.repr(losses)}, expected {due} numbers up to {USELESS:g}")

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float:
        """Of the largest among the updates of models; the model that a client starts with is none."""
        updates = (update for prefix, update in by_prefix(arrays).items() if prefix != NEW_MODEL)
        return max(
            (norm(update[name] for name in self.layout.parameters if name in update) for update in updates), default=0.0
        )

    def take(self, client: ClientId, reply: Reply) -> None:
        at_hand = self._at_hand[client]
        if self.selection == "server":
            losses = self._losses.setdefault(client, Losses())
            losses.update(at_hand, reply.config[LOSSES], self.beta)
            self._choose(client)
            self._mixtures[client] = losses.mixture(
                client, self.temperature, self.mixture_threshold, self.num_neighbours
            )
            self._weights[client] = dict(zip(*losses.weights(self.temperature)))
        else:
            self._choices[client] = self._known(decode(reply.config.get(NEIGHBOURS)))
            self._mixtures[client] = self._known(decode(reply.config.get(MIXTURE)))
            self._weights[client] = _reported(reply.config)
        places = {key.partition("/")[0] for key in reply.arrays} - {NEW_MODEL}
        self.history.count(client, updates_withheld=len(at_hand) - len(places))
        self._updates.add(client, reply.arrays)

    def _add_updates(self, client: ClientId, arrays: Arrays) -> None:
        """Add what a client sent to the models that it worked on, or to the sums of their gradients."""
        parts = by_prefix(arrays)
        if (new := parts.pop(NEW_MODEL, None)) is not None:
            self.models.put(client, new)
        for prefix, update in parts.items():
            owner = self._at_hand[client][int(prefix)]
            row = self.models.row(owner)  # (d,)
            if self.m_step == "gradient":
                row = self._gradients.setdefault(owner, np.zeros_like(row))
            for name, array in update.items():
                row[self.layout.slices[name]] += array.reshape(-1)

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        self._packed = {}
        self._updates.finish()
        trained = self.layout.num_parameters
        for owner in in_order(self._gradients):
            row, gradient = self.models.row(owner), self._gradients.pop(owner)
            self._step_of(owner)(row[:trained], gradient[:trained])
            row[trained:] += gradient[trained:]  # what normalisation layers count
        rows = self.history.open_rows()
        self.history.count(
            models_sent=self._models_sent,
            updates_withheld=sum(row.get("updates-withheld", 0) for row in rows if row["client"] in answered),
        )
        super().end_round(server_round, answered)

    def _step_of(self, owner: ClientId) -> AdamStep | SGDStep:
        """How a model moves by the sum of its gradients; it remembers the last ones."""
        if owner not in self._steps:
            self._steps[owner] = (AdamStep if self.optimizer == "adam" else SGDStep)(self.learning_rate)
        return self._steps[owner]

    def notes(self, client: ClientId) -> dict[str, Any]:
        """Whose models the client received besides its own."""
        return {NEIGHBOURS: encode(self._at_hand[client][1:])}

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        """All models of the client's mixture, its own first."""
        others = [] if client in self._private else self._available(client, self._mixtures.get(client, []))
        return self._models_for(client, others[: self.num_neighbours])

    def collaboration(self) -> tuple[list[ClientId], np.ndarray]:
        """The weights w_ij, as far as the server knows them: the row of a client that keeps them to itself is 0."""
        known = {client: weights for client, weights in self._weights.items() if weights}
        clients = in_order({*known, *self.models}) if known else []
        weights = np.array([[known.get(i, {}).get(j, 0.0) for j in clients] for i in clients])
        return clients, weights.reshape(len(clients), len(clients))


def _reported(config: Mapping[str, Any]) -> dict[ClientId, float]:
    """The weights that a client agreed to tell; nothing if they are not weights."""
    clients, weights = decode(config.get(WEIGHTS_OF)), config.get(WEIGHTS)
    if (
        not isinstance(weights, list)
        or len(weights) != len(clients)
        or len(set(clients)) != len(clients)
        or not all(isinstance(weight, float) and 0 <= weight <= 1 for weight in weights)
        or not abs(sum(weights) - 1) < 1e-6
    ):
        return {}
    return dict(zip(clients, weights))


METHOD = Method(
    title="FedeRiCo",
    paper="Sui et al., 2022, arXiv:2210.06597",
    travels="the client's and its neighbours' models, down; their weighted updates, up",
    stays="with relay, its losses",
    strategy=FedeRiCo,
    client=Collaboration,
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
        SHARE_ABSENT,
        SELECTION,
        STORE,
    ),
)
