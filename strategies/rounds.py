"""The round engine: what every method shares on the server's side.

A round is one exchange: a message to each client that takes part, and replies that are checked and taken
in one by one as they come. A method is a subclass that says what goes to a client (`outgoing`), what is
done with an admitted reply (`take`), and what its models are (`client_models`, `collaboration`).
"""

from __future__ import annotations

import re
import reprlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO, WARNING
from typing import Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from flwr.supercore import log

from .admission import MAX_EXAMPLES, REFUSED, Refused, Reply, admit, norm
from .checkpoint import Checkpoints
from .history import COMPUTE, History
from .messages import (
    AFTER_TRAINING,
    ATTEMPT,
    CLIENT_ID,
    IDENTITY_QUERY,
    KEEP_FROM,
    MAX_NAME,
    METHOD,
    METHODS,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    PERSONAL,
    PROBE,
    PROBLEM,
    RUN,
    SERVER_ROUND,
    SHARE_MODEL,
    TRAINED,
    ClientId,
    check,
    in_order,
    is_name,
    read_record,
    records_of,
    seed_for,
)
from .registry import REGISTRY
from .state import NotResumable, begin_simulation, simulated
from .store import ClientModels, Layout

# Replies are asked for at once, then after pauses that grow: a simulation is not slowed down,
# and a SuperLink on the other side of a network is not asked all the time.
NODES_PAUSE = 0.1
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.01, 1.3, 1.0
OVERTIME = 3.0  # s, for a last look at who has answered
SECOND_WAIT = 1.0  # s, for the names of nodes that have not told them in time before
# A message is for its exchange alone: who was away, or is slow, is not to work on those of rounds that are over.
CLOCKS = 600.0  # s by which the clocks of a site and of the server may differ


# What comes of unpacking a reply that somebody made up, rather than of the way to the SuperLink.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)

# What Ray says of a process that is gone for good.
DEAD_WORKER = re.compile(r"ray\.exceptions\.(ActorDied|RayActor|OutOfMemory|WorkerCrashed)Error")

LONGEST_LINE = 300  # characters of what a client has to say

# What ordinary evaluate functions call what they found.
ORDINARY_NAMES = {"accuracy": ("accuracy", "eval_accuracy", "eval_acc"), "loss": ("loss", "eval_loss")}


class TooFewClients(RuntimeError):
    """Fewer clients than a round needs were there when the wait was over, or none gave a usable answer."""


class WorkerDied(RuntimeError):
    """A process of the simulation in which clients work is gone, and the simulation does without it badly."""


@dataclass(frozen=True)
class _Asked:
    """A message that is out, and what the history is to say of it."""

    client: ClientId
    node_id: int
    sent_at: float
    bytes_down: int
    notes: dict[str, Any]
    to_train: bool
    probe: str  # what the model is called, if it is for a probe


class PersonalizedStrategy(Strategy):
    """Base of all methods: a Flower strategy whose clients each have a model of their own.

    Parameters
    ----------
    fraction_train : float (default: 1.0)
        Share of the clients, 0 to 1, that train in a round.
    fraction_evaluate : float (default: 1.0)
        Share of the clients, 0 to 1, asked to evaluate after a round, where training replies bring no
        evaluation of their own.
    min_train_nodes, min_evaluate_nodes : int (default: 2)
        Clients that train or evaluate at the least, as far as there are as many.
    min_available_nodes : int (default: 2)
        Clients that must be connected before a round starts.
    weighted_by_key : str (default: "num-examples")
        The metric by which averages over clients are weighted.
    arrayrecord_key, configrecord_key : str (default: "arrays", "config")
        Names of the records in messages to clients.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable, optional
        `(list[RecordDict], weighted_by_key) -> MetricRecord`; by default `mean_metrics`.
    seed : int (default: 0)
        Seed of the server's draws; which clients take part depends on it and the round alone.
    wait_timeout : float (default: 300.0)
        Seconds to wait for `min_available_nodes` before the run ends with `TooFewClients`, and for the names of
        clients that are new.
    max_strikes : int (default: 3)
        A client of which this many training replies in a row were refused is left out for as many rounds, and for one
        more each time that the next one is refused too. 0 leaves nobody out.
    max_update_norm : float (default: 0.0)
        The L2 norm, over the parameters, above which an update is refused; see `update_norm`. 0 sets no bound.
    max_empty_rounds : int (default: 5)
        Rounds in a row without any usable answer, 1 or more, after which the run ends with `TooFewClients`.
    buffers : collection of str, optional
        Names of model entries that are not trained; by default those named like the buffers of PyTorch's
        normalisation layers. They are averaged but take no part in distances and cosines.

    Raises
    ------
    ValueError
        An argument out of range, naming it.
    """

    name: str
    """The method's name in messages, in the registry and in results."""

    personal: str = TRAINED
    """Which evaluation is the method's result for a client, such as RECEIVED, TRAINED or TUNED (messages.py)."""

    clients_keep_state: bool = False
    """Whether clients keep something between rounds, on their own disk (`state.py`)."""

    model_stays: bool = False
    """Whether a client's personal model is one that no server sees, and that the client keeps."""

    STATE: tuple[str, ...] = ("history", "run_id", "_answered", "_evaluated_apart", "_strikes", "_resting", "_owners")
    """The attributes that a run goes on from, besides the arguments of `__init__` and `start`. See `state`."""

    needs_shared_models: bool = True
    """Whether others receive something of each client's model, so that one that does not share it is left out."""

    def __init__(
        self,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None = None,
        evaluate_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None = None,
        seed: int = 0,
        wait_timeout: float = 300.0,
        max_strikes: int = 3,
        max_update_norm: float = 0.0,
        max_empty_rounds: int = 5,
        buffers: Collection[str] | None = None,
    ) -> None:
        check("fraction_train", fraction_train, 0 <= fraction_train <= 1, "0 to 1")
        check("fraction_evaluate", fraction_evaluate, 0 <= fraction_evaluate <= 1, "0 to 1")
        check("min_train_nodes", min_train_nodes, min_train_nodes >= 0, "0 or more")
        check("min_evaluate_nodes", min_evaluate_nodes, min_evaluate_nodes >= 0, "0 or more")
        check("min_available_nodes", min_available_nodes, min_available_nodes >= 1, "1 or more")
        check("seed", seed, seed >= 0, "0 or more")
        check("wait_timeout", wait_timeout, wait_timeout > 0, "more than 0")
        check("max_strikes", max_strikes, max_strikes >= 0, "0 or more")
        check("max_update_norm", max_update_norm, max_update_norm >= 0, "0 or more")
        check("max_empty_rounds", max_empty_rounds, max_empty_rounds >= 1, "1 or more")
        self.fraction_train = fraction_train
        self.fraction_evaluate = fraction_evaluate
        self.min_train_nodes = min_train_nodes if fraction_train else 0
        self.min_evaluate_nodes = min_evaluate_nodes if fraction_evaluate else 0
        self.min_available_nodes = min_available_nodes
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or mean_metrics
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or mean_metrics
        self.seed = seed
        self.wait_timeout = wait_timeout
        self.max_strikes = max_strikes
        self.max_update_norm = max_update_norm
        self.max_empty_rounds = max_empty_rounds
        self.buffers = buffers
        self.history = History()
        self._silent: set[ClientId] | None = None  # who may be asked for an evaluation in this round; None: all
        self._evaluated_apart: set[ClientId] = set()  # whose personal model was evaluated by itself in this round
        self._closing: list[ClientId] = []  # who is to be asked after the last round
        self.last_round = 0  # of the run that was started
        self._nodes: dict[ClientId, int] = {}  # the clients that are connected
        self._identities: dict[int, ClientId] = {}  # the clients of the nodes that were there last
        self._about: dict[int, Mapping[str, Any]] = {}  # what they said of themselves
        self._introduced: dict[ClientId, int] = {}  # as which node a client was last introduced to the method
        self._queries: dict[str, int] = {}  # questions for names that are not answered yet: message -> node
        self._registered: dict[int, str] = {}  # nodes whose keys were registered at the server, and under which names
        self._owners: dict[ClientId, str] = {}  # as what the node is registered that a client's name is kept for
        self._doubles: set[int] = set()  # nodes with a name that is another's
        self._strikes: dict[ClientId, int] = {}  # refused replies in a row
        self._resting: dict[ClientId, int] = {}  # until which round a client is left out for them
        self._empty_rounds = 0  # in a row
        self._asked: dict[str, _Asked] = {}  # messages of the exchange in progress
        self._nodes_know_identity = True
        self._answered = False  # has any client, in any round of training
        self.run_id = 0  # of the run as it began; going on with it is another to Flower
        self._attempt = 0  # when it began, or was last gone on with, in ns since 1970
        self._checkpoints: Checkpoints | None = None

    # --- What a method says ---------------------------------------------------------------------------

    @property
    def first_round(self) -> int:
        """1, or 0 where an exchange comes before the rounds of training."""
        return 1

    def begin(self, initial_arrays: ArrayRecord) -> None:
        """Take the model that clients start from. Called once, before the first round."""
        raise NotImplementedError

    def round_config(self, server_round: int, client: ClientId) -> dict[str, Any]:
        """Settings that go to a client with the arrays made for it just now, besides the caller's own."""
        return {}

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        """The model that goes to each of these clients to train from, one after the other."""
        raise NotImplementedError

    def introduce(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        """Take note of what clients that were met just now say of themselves.

        Parameters
        ----------
        newcomers : mapping
            client -> what it said; nothing where its ClientApp knows no such question.

        Returns
        -------
        dict
            client -> why it cannot take part, of those that cannot.
        """
        reasons = {}
        method = REGISTRY.get(self.name)
        for client, about in newcomers.items():
            examples, known = about.get(NUM_EXAMPLES, 1), about.get(METHODS)
            if examples == 0:
                reasons[client] = "it has no training sample"
            elif not isinstance(examples, int) or not 1 <= examples <= MAX_EXAMPLES:
                reasons[client] = f"its {NUM_EXAMPLES} is {examples!r}, allowed: 1 to {MAX_EXAMPLES}"
            elif self.needs_shared_models and about.get(SHARE_MODEL) is False:
                reasons[client] = f"its {SHARE_MODEL} is false, and {self.name} mixes all models"
            elif method and method.needs_our_client and not (isinstance(known, list) and self.name in known):
                reasons[client] = f"its ClientApp knows no {method.title}; that of kindred.make_client_app does"
        return reasons

    def chances(self, clients: Sequence[ClientId]) -> np.ndarray | None:
        """How likely each client is to be drawn, shape (m,), summing to 1; None if all alike."""
        return None

    def mismatch(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Say in a few words how the arrays of a training reply are not what this client is to send; None if they are.

        By default they are to be the model of `layout`, which `begin` sets.
        """
        return self.layout.mismatch(arrays)

    def inspect(self, client: ClientId, reply: Reply) -> None:
        """Raise `Refused` where a training reply, good otherwise, is not what this method can use."""

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float:
        """The L2 norm, over the parameters, of the update in a training reply; 0 where there is nothing to bound."""
        return 0.0

    def take(self, client: ClientId, reply: Reply) -> None:
        """Take in an admitted training reply. Replies come in any order; the result must not depend on it."""
        raise NotImplementedError

    def take_evaluation(self, client: ClientId, reply: Reply) -> None:
        """Take in an admitted evaluation reply; its arrays, if any, are a personal model."""

    def take_probe(self, client: ClientId, probe: str, loss: float) -> None:
        """Take in the loss that a client found for the model of a message to evaluate whose settings hold PROBE."""

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        """End a round in which these clients (in order) answered. Without any, nothing changes."""
        raise NotImplementedError

    def notes(self, client: ClientId) -> dict[str, Any]:
        """What the history is to say of the last message to a client."""
        return {}

    def global_arrays(self) -> ArrayRecord:
        """The global model; the plain mean of the clients' models where there is none."""
        raise NotImplementedError

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        """The model that an evaluation of this client is of."""
        raise NotImplementedError

    def personal_models(self, clients: Sequence[ClientId]) -> Iterator[ArrayRecord]:
        """The same of each of these clients, one after the other."""
        return (self.personal_arrays(client) for client in clients)

    def client_models(self) -> Mapping[ClientId, ArrayRecord]:
        """Each client's personal model, as far as models reach the server."""
        raise NotImplementedError

    def collaboration(self) -> tuple[list[ClientId], np.ndarray]:
        """Who learns from whom.

        Returns
        -------
        clients : list of m client ids, in order
        weights : ndarray, shape (m, m)
            Row i holds the shares of the clients' models in what client i last received, or predicts with; rows sum
            to 1, or are 0 where the server is not to know.
        """
        raise NotImplementedError

    layout: Layout

    def state(self) -> dict[str, Any]:
        """What a checkpoint at the end of a round holds; see `checkpoint.pack` for what can be in it."""
        return {name: getattr(self, name) for name in self.STATE}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, after `begin`."""
        for name, value in state.items():
            if hasattr(mine := getattr(self, name), "restore"):
                mine.restore(value)
            else:
                setattr(self, name, value)

    # --- Flower's interface ---------------------------------------------------------------------------

    def summary(self) -> None:
        """Log what this strategy is set to."""
        log(INFO, "\t├──> %s, seed %d", self.name, self.seed)
        log(INFO, "\t├──> Fraction: train (%.2f) | evaluate (%.2f)", self.fraction_train, self.fraction_evaluate)
        log(INFO, "\t├──> Minimum nodes: train (%d) | evaluate (%d) | available (%d)",
            self.min_train_nodes, self.min_evaluate_nodes, self.min_available_nodes)
        log(INFO, "\t└──> Keys: '%s', '%s', weighted by '%s'",
            self.arrayrecord_key, self.configrecord_key, self.weighted_by_key)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the training messages of a round, one at a time."""
        self._end_rests(server_round)
        clients = self.sample(server_round, self.fraction_train, self.min_train_nodes)
        for client, record in self.outgoing(server_round, clients):
            yield self._message(client, record, config, server_round, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take in the training replies of a round as they come. The models stay here: no arrays are returned."""
        contents: dict[ClientId, RecordDict] = {}
        self._evaluated_apart = set()
        evaluated: set[ClientId] = set()  # who told its accuracy in its answer
        for message in replies:
            if (found := self._admitted(message, server_round, evaluation=False)) is not None:
                client, reply = found
                self.take(client, reply)
                if f"{self.personal}-accuracy" in reply.metrics:
                    evaluated.add(client)
                contents[client] = RecordDict({"metrics": reply.metrics})
        answered = in_order(contents)
        # Clients that evaluate while they train have said all there is to say; who sits out keeps its last.
        self._silent = set(answered) - evaluated if evaluated else None
        self.end_round(server_round, answered)
        self._empty_rounds = 0 if answered else self._empty_rounds + 1
        if not answered:
            return None, None
        self._answered = self._answered or server_round > 0
        return None, self.train_metrics_aggr_fn([contents[client] for client in answered], self.weighted_by_key)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the messages by which clients evaluate their personal models, one at a time."""
        clients = self._closing or self.sample(
            server_round, self.fraction_evaluate, self.min_evaluate_nodes, "evaluate")
        asked = clients if self._silent is None else in_order(self._silent.intersection(clients))
        for client, record in zip(asked, self.personal_models(asked)):
            yield self._message(client, record, config, server_round, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Take in the evaluation replies of a round."""
        contents: dict[ClientId, RecordDict] = {}
        for message in replies:
            if (found := self._admitted(message, server_round, evaluation=True)) is not None:
                client, reply = found
                self.take_evaluation(client, reply)
                self._evaluated_apart.add(client)
                contents[client] = RecordDict({"metrics": reply.metrics})
        if not contents:
            return None
        return self.evaluate_metrics_aggr_fn([contents[c] for c in in_order(contents)], self.weighted_by_key)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        on_round: Callable[[int], None] | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> Result:
        """Run the method.

        Parameters
        ----------
        grid, initial_arrays, num_rounds, train_config, evaluate_config, evaluate_fn
            As in Flower's `Strategy.start`.
        timeout : float (default: 3600)
            Seconds after which an exchange ends with those who answered.
        on_round : callable, optional
            Called with the round's number when it is over.
        checkpoints : Checkpoints, optional
            Where the state is kept. If there is one already, the run goes on from it, with the same bits as if it had
            never ended, provided that all arguments are those it began with. A state that cannot be written ends
            nothing: a warning says so, and the next round's is written instead.

        Returns
        -------
        Result
            Flower's. `arrays` is `global_arrays()`; the personal models are `client_models()`.

        Raises
        ------
        TooFewClients
            Fewer than `min_available_nodes` clients after `wait_timeout` seconds, no usable answer of any client in
            any round, or in `max_empty_rounds` rounds in a row; the state was saved before that.
        WorkerDied
            In a simulation: a process in which clients work is gone. The last state that was saved is of the round
            before, or an earlier one.
        NotResumable
            There are checkpoints, but none that is whole and of this method and version; or what the clients of a
            simulation kept is gone.
        """
        check("num_rounds", num_rounds, num_rounds >= 1, "1 or more")
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        result = Result(arrays=initial_arrays)
        self.history = History()
        self._answered = False
        self._closing = []
        self.last_round = num_rounds
        self._strikes, self._resting, self._empty_rounds, self._doubles = {}, {}, 0, set()
        self._identities, self._about, self._introduced, self._nodes_know_identity = {}, {}, {}, True
        self._queries, self._registered, self._owners = {}, {}, {}
        self.run_id = grid.run.run_id
        self._attempt = time.time_ns()
        self._checkpoints = checkpoints
        self._evaluated_apart = set()
        self.begin(initial_arrays)
        first = self.first_round
        if checkpoints and (found := checkpoints.load()):
            last, state = found
            if differing := state["strategy"].keys() ^ self.state().keys():
                raise NotResumable(f"round {last} in {checkpoints.folder} was saved by another method or version: "
                                   f"{', '.join(sorted(differing))} is in one of the two alone")
            self.restore(state["strategy"])
            for kind, metrics in state["result"].items():
                vars(result)[kind] = {server_round: MetricRecord(m) for server_round, m in metrics.items()}
            self._attempt = max(self._attempt, state["attempt"] + 1)  # whatever the clock of this machine says
            self._empty_rounds = state["empty-rounds"] % self.max_empty_rounds  # those that ended it are forgiven
            log(INFO, "kindred: goes on after round %d, from %s", last, checkpoints.folder)
            first = last + 1
            del found, state  # arrays of it would stay in memory
        if self.clients_keep_state and simulated(grid):
            begin_simulation(
                self.run_id, checkpoints and checkpoints.folder, goes_on=first > self.first_round)
        started = time.monotonic()
        if evaluate_fn and first == self.first_round > 0 and (metrics := evaluate_fn(0, initial_arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = metrics

        for server_round in range(first, num_rounds + 1):
            round_started = time.monotonic()
            self.meet(grid, timeout)
            _, metrics = self.aggregate_train(server_round, self._exchange(
                grid, self.configure_train(server_round, result.arrays, train_config, grid), timeout, server_round))
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            if self.fraction_evaluate:
                self._evaluate(grid, result, evaluate_config, timeout, server_round)
            self._close_round(server_round, time.monotonic() - round_started, on_round)
            if evaluate_fn and (metrics := evaluate_fn(server_round, self.global_arrays())) is not None:
                result.evaluate_metrics_serverapp[server_round] = metrics
            given_up = self._empty_rounds >= self.max_empty_rounds
            if checkpoints and (checkpoints.due(server_round) or server_round == num_rounds or given_up):
                kinds = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
                checkpoints.save(server_round, {
                    "strategy": self, "result": {kind: dict(getattr(result, kind)) for kind in kinds},
                    "attempt": self._attempt, "empty-rounds": self._empty_rounds})
            if given_up:
                self._give_up()

        if not self._answered:
            raise TooFewClients(f"no client gave a usable answer in any of the {num_rounds} rounds; "
                                f"client {self.history.rows[-1]['client']}: {self.history.rows[-1]['status']}"
                                if self.history.rows else "no client was asked in any round")
        if first > num_rounds:  # nobody has been met since it was cut short
            self.meet(grid, timeout)
        # Replies of a round may speak of the model that it started from: the last one still needs a word. And who was
        # never drawn has said nothing yet.
        told = ({row["client"] for row in self.history.rows} if self.personal in AFTER_TRAINING
                else self._evaluated_apart)
        self._closing = [client for client in self.clients() if client not in told]
        if self.fraction_evaluate and self._closing:
            closing_started = time.monotonic()
            self._silent = None
            self._evaluate(grid, result, evaluate_config, timeout, num_rounds + 1)
            self._close_round(num_rounds + 1, time.monotonic() - closing_started, on_round)
        result.arrays = self.global_arrays()
        log(INFO, "%s finished %d rounds in %.1f s", self.name, num_rounds, time.monotonic() - started)
        return result

    # --- Clients --------------------------------------------------------------------------------------

    def clients(self) -> list[ClientId]:
        """The connected clients, in order."""
        return in_order(self._nodes)

    def sample(self, server_round: int, fraction: float, at_least: int, purpose: str = "train") -> list[ClientId]:
        """Draw clients for a round, without replacement; the draw depends on seed, round and client ids alone."""
        clients = [client for client in self.clients() if client not in self._resting]
        count = min(max(int(len(clients) * fraction), at_least), len(clients))
        if count == len(clients):
            return clients
        rng = np.random.default_rng(seed_for(self.seed, purpose, server_round))
        drawn = rng.choice(len(clients), count, replace=False, p=self.chances(clients))
        return [clients[i] for i in sorted(drawn)]

    def meet(self, grid: Grid, timeout: float) -> None:
        """Wait until enough clients are connected, and learn who the new ones are."""
        node_ids = self._wait_for_nodes(grid)
        for absent in self._identities.keys() - set(node_ids):  # who comes back may say something else
            client = self._identities.pop(absent)
            if self._introduced.get(client) == absent:
                del self._introduced[client]
        self._queries = {message_id: node_id for message_id, node_id in self._queries.items() if node_id in node_ids}
        new = sorted(set(node_ids) - self._identities.keys())
        if new:
            self._registered |= {node.node_id: node.name for node in grid.get_nodes() if node.name}
        if new and self._nodes_know_identity:
            log(INFO, "Asking clients for their names; an app without an answer logs an error, which does no harm")
        # One node first: a ClientApp that knows no such query is not asked once more by each node of a simulation.
        for group in (new[:1], new[1:]):
            if group and self._nodes_know_identity:
                self._identify(grid, group, timeout)
            if not self._nodes_know_identity:
                self._identities |= {node_id: node_id for node_id in group}
        doubles = self._give_names()
        for node_id in sorted(doubles - self._doubles):
            client = self._identities[node_id]
            other = (f"as node {self._nodes[client]} does" if client in self._nodes
                     else f"a name that is kept for the node registered as {self._owners[client]}")
            log(WARNING, "kindred: node %d says it is client %s, %s; it is left out", node_id, client, other)
        self._doubles = doubles
        newcomers = {client: self._about.get(self._nodes[client], {}) for client in self.clients()
                     if self._introduced.get(client) != self._nodes[client]}
        self._introduced |= {client: self._nodes[client] for client in newcomers}
        left_out = self.history.left_out
        for client in newcomers:  # who comes back may have mended what was wrong
            left_out.pop(client, None)
        for client, reason in self.introduce(newcomers).items():
            reason = first_line(reason)
            log(WARNING, "kindred: client %s takes no part: %s", client, reason)
            left_out[client] = reason
        for client in left_out:
            self._nodes.pop(client, None)
        if left_out and not self._nodes and not self.history.rows:
            client = in_order(left_out)[0]
            raise TooFewClients(f"no client can take part; client {client}: {left_out[client]}")

    def _give_names(self) -> set[int]:
        """Say which node each client is, by what nodes call themselves; returns those with a name that is another's.

        A name stays with the node that had it first, as long as that one is connected; where the key of that one was
        registered at the server, for the whole run. Who is registered under a name has it before all others.
        """
        def may_have(node_id: int, client: ClientId) -> bool:
            return self._owners.get(client) in (None, self._registered.get(node_id))

        there = dict(sorted(self._identities.items()))
        self._owners |= {client: self._registered[node_id] for node_id, client in there.items()
                         if self._registered.get(node_id) == str(client)}
        first = {client: node_id for client, node_id in self._introduced.items()
                 if there.get(node_id) == client and may_have(node_id, client)}
        self._nodes, doubles = {}, set()
        for node_id, client in there.items():
            if may_have(node_id, client) and first.setdefault(client, node_id) == node_id:
                self._nodes[client] = node_id
                if node_id in self._registered:
                    self._owners[client] = self._registered[node_id]
            else:
                doubles.add(node_id)
        return doubles

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        """The connected nodes, once there are enough and, at first, once their number stands still."""
        deadline = time.monotonic() + self.wait_timeout
        seen: list[int] | None = None
        told = False
        while True:
            node_ids = sorted(grid.get_node_ids())
            of_use = any(self._identities.get(node_id) not in self.history.left_out for node_id in node_ids)
            if len(node_ids) >= self.min_available_nodes and of_use:
                # At the start nodes come one after the other.
                if self._identities or node_ids == seen:
                    return node_ids
                seen = node_ids
            elif time.monotonic() > deadline:
                raise TooFewClients(
                    f"{len(node_ids)} clients are connected after {self.wait_timeout:g} s, "
                    + (f"{self.min_available_nodes} are needed (min_available_nodes)" if of_use or not node_ids
                       else "and none of them can take part"))
            elif not told:
                log(INFO, "kindred: waiting for clients: %d of %d are here", len(node_ids), self.min_available_nodes)
                told = True
            time.sleep(NODES_PAUSE)

    def _identify(self, grid: Grid, node_ids: Sequence[int], timeout: float) -> None:
        """Ask nodes for their clients' ids. Who has none goes by its node id.

        Who does not answer in time is asked again before the next round, and what it says to either question counts;
        but those who have answered hardly wait for it again.
        """
        timeout = min(timeout, self.wait_timeout)
        silent = set(self._queries.values())
        patience = min(timeout, SECOND_WAIT) if self._identities and silent.issuperset(node_ids) else timeout
        for node_id in node_ids:
            message = Message(RecordDict(), node_id, IDENTITY_QUERY, ttl=timeout + CLOCKS)
            if (message_id := _push(grid, message)) is not None:
                self._queries[message_id] = node_id
        asked = {message_id: node_id for message_id, node_id in self._queries.items() if node_id in node_ids}
        for message_id, reply in _pull(grid, asked, time.monotonic() + patience):
            node_id = self._queries.pop(message_id)
            if isinstance(reply, Refused):
                log(WARNING, "kindred: what node %d is called cannot be made out, so it is asked again: %s",
                    node_id, first_line(str(reply)))
                continue
            if not _is_from(node_id, reply):
                log(WARNING, "kindred: a reply that node %d was asked for came from node %d; it is not used",
                    node_id, reply.metadata.src_node_id)
                continue
            if reply.has_error():
                # In a simulation all nodes run the same app; one that is far away speaks for itself alone.
                if "No query function registered" in reply.error.reason and simulated(grid):
                    self._nodes_know_identity = False
                elif reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
                    self._identities[node_id] = node_id
                continue
            content = content_of(reply)
            about = {key: value for record in content.config_records.values() for key, value in record.items()}
            client = about.get(CLIENT_ID, node_id)
            if not is_name(client):
                log(WARNING, "kindred: node %d calls itself %s, allowed: a whole number, or 1 to %d printable "
                    "characters; it goes by its number", node_id, reprlib.repr(client), MAX_NAME)
                client = node_id
            if PROBLEM in about:  # it may pass: the client is asked again before the next round
                if (client in self._identities.values()
                        or self._owners.get(client) not in (None, self._registered.get(node_id))):
                    continue  # another node is that client
                reason = first_line(str(about[PROBLEM]))
                log(WARNING, "kindred: client %s cannot introduce itself: %s", client, reason)
                self.history.left_out[client] = f"it cannot introduce itself: {reason}"
                continue
            self._identities[node_id] = client
            self._about[node_id] = about

    # --- An exchange ----------------------------------------------------------------------------------

    def _message(
        self, client: ClientId, arrays: ArrayRecord, config: ConfigRecord, server_round: int, message_type: str,
        probe: str = "",
    ) -> Message:
        settings = ConfigRecord({**config, **self.round_config(server_round, client)})
        settings.pop(PROBE, None)  # it is not the caller's to say
        if probe:
            settings[PROBE] = probe
        settings[SERVER_ROUND] = server_round
        oldest = self._checkpoints.oldest if self._checkpoints else server_round - 1
        settings[KEEP_FROM] = -1 if oldest is None else oldest
        settings[RUN], settings[ATTEMPT] = f"{self.run_id:020}", self._attempt  # of one length in every run
        settings[METHOD] = self.name
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: settings})
        return Message(content, self._nodes[client], message_type, group_id=str(server_round))

    def _exchange(
        self, grid: Grid, messages: Iterable[Message], timeout: float, server_round: int
    ) -> Iterator[Message]:
        """Send messages and give out the replies as they come, until all are in or time is up.

        A reply is known by the message it answers, whoever signs it: replies of an earlier exchange are
        never asked for, and an error that the SuperLink reports for a dead node is its client's.
        """
        started = time.monotonic()
        client_of = {node_id: client for client, node_id in self._nodes.items()}
        self._asked = {}
        for message in messages:
            client = client_of[message.metadata.dst_node_id]
            notes = self.notes(client)
            if message.metadata.message_type == MessageType.EVALUATE:  # it may join a row of training
                notes = {f"evaluate-{key}": value for key, value in notes.items()}
            asked = _Asked(
                client, message.metadata.dst_node_id, time.monotonic(), payload_bytes(message.content), notes,
                message.metadata.message_type == MessageType.TRAIN,
                str(message.content[self.configrecord_key].get(PROBE, "")))
            message.metadata.ttl = timeout + CLOCKS
            message_id = _push(grid, message)
            if message_id is None:
                self._add_row(replace(asked, notes={}), server_round, "its message could not be sent", 0)
            else:
                self._asked[message_id] = asked
        waiting = set(self._asked)
        for message_id, reply in _pull(grid, self._asked, started + timeout):
            waiting.discard(message_id)
            if isinstance(reply, Refused):
                self._refuse(self._asked[message_id], server_round, reply, 0)
            else:
                yield reply
        for message_id in waiting:
            self._add_row(self._asked[message_id], server_round, f"no answer within {timeout:g} s", 0)

    def _admitted(self, message: Message, server_round: int, *, evaluation: bool) -> tuple[ClientId, Reply] | None:
        """Check a reply and note it in the history; None if nothing of it is to be used."""
        asked = self._asked[message.metadata.reply_to_message_id]
        if not _is_from(asked.node_id, message):  # no strike: whose fault it is, nobody knows
            sender = message.metadata.src_node_id
            self._add_row(asked, server_round, f"{REFUSED}it came from node {sender}, expected {asked.node_id}", 0)
            return None
        if message.has_error():
            reason = f"error {message.error.code}: {first_line(message.error.reason)}"
            self._add_row(asked, server_round, reason, 0)
            return None
        content = content_of(message)
        bytes_up = payload_bytes(content)
        due = None if evaluation and not records_of(content, ArrayRecord) else partial(self.mismatch, asked.client)
        try:
            reply = admit(content, self.weighted_by_key, due)
            if asked.probe:
                loss = _loss_in(reply.metrics)
                worked = {key: reply.metrics[key] for key in COMPUTE
                          if isinstance(reply.metrics.get(key), int | float)}
                self._add_row(asked, server_round, "ok", bytes_up, {f"{asked.probe}-loss": loss, **worked})
                self.take_probe(asked.client, asked.probe, loss)
                return None
            if not evaluation:
                self.inspect(asked.client, reply)
                self._bound(asked.client, reply)
        except Refused as refusal:
            self._refuse(asked, server_round, refusal, bytes_up)
            return None
        if not evaluation:
            self._strikes.pop(asked.client, None)
        # Numbers alone go into rows, and the engine's own columns are not the client's to name.
        metrics = {key: value for key, value in reply.metrics.items()
                   if isinstance(value, int | float) and not key.startswith((f"{PERSONAL}-", "evaluate-"))}
        if evaluation:
            metrics[NUM_TEST_EXAMPLES] = metrics.pop(self.weighted_by_key)
        self._add_row(asked, server_round, "ok", bytes_up, metrics, evaluation=evaluation)
        return asked.client, reply

    def _bound(self, client: ClientId, reply: Reply) -> None:
        """Refuse an update that is larger than `max_update_norm`."""
        if self.max_update_norm and (size := self.update_norm(client, reply.arrays)) > self.max_update_norm:
            raise Refused(f"its update has norm {size:g}, allowed: up to {self.max_update_norm:g}")

    def _refuse(self, asked: _Asked, server_round: int, refusal: Refused, bytes_up: int) -> None:
        """Note a refused reply, and leave the client out for a while if it is one too many in a row."""
        self._add_row(asked, server_round, f"{REFUSED}{refusal}", bytes_up)
        if not asked.to_train:
            return
        client = asked.client
        strikes = self._strikes[client] = self._strikes.get(client, 0) + 1
        if 0 < self.max_strikes <= strikes:
            self._resting[client] = server_round + strikes
            log(WARNING, "kindred: client %s is left out of the next %d rounds, for %d of its replies in a row were "
                "refused", client, strikes, strikes)

    def _end_rests(self, server_round: int) -> None:
        for client in in_order(client for client, last in self._resting.items() if last < server_round):
            del self._resting[client]
            log(INFO, "kindred: client %s may take part again, from round %d", client, server_round)

    def _give_up(self) -> NoReturn:
        """End a run that has been going on without anybody for too long."""
        last = next((row for row in reversed(self.history.rows) if row["status"] != "ok"), None)
        raise TooFewClients(
            f"no client gave a usable answer in {self._empty_rounds} rounds in a row (max_empty_rounds), so the run "
            "ends; " + (f"client {last['client']}: {last['status']}" if last else "no client was asked"))

    def _add_row(
        self, asked: _Asked, server_round: int, status: str, bytes_up: int, metrics: Mapping[str, Any] | None = None,
        *, evaluation: bool = False,
    ) -> None:
        if status != "ok":
            status = first_line(status)
            log(WARNING, "kindred: round %d goes on without client %s: %s", server_round, asked.client, status)
            if asked.probe:  # replies of an exchange come in any order: each has a column of its own
                metrics, status = {f"{asked.probe}-status": status}, "ok"
        row = {
            **(metrics or {}),  # whatever a client calls its metrics, the columns below are not its own
            **asked.notes,
            "round": server_round, "client": asked.client, "status": status,
            "seconds": time.monotonic() - asked.sent_at, "bytes-down": asked.bytes_down, "bytes-up": bytes_up,
        }
        # An evaluation by itself is of the personal model, under the name that an ordinary evaluate function uses.
        for measure, names in ORDINARY_NAMES.items():
            for key in names if evaluation else (f"{self.personal}-{measure}",):
                if key in row:
                    if measure == "loss" or 0 <= row[key] <= 1:
                        row[f"{PERSONAL}-{measure}"] = float(row[key])
                    break
        self.history.add(row)

    def _evaluate(
        self, grid: Grid, result: Result, config: ConfigRecord, timeout: float, server_round: int
    ) -> None:
        messages = self.configure_evaluate(server_round, result.arrays, config, grid)
        metrics = self.aggregate_evaluate(server_round, self._exchange(grid, messages, timeout, server_round))
        if metrics is not None:
            result.evaluate_metrics_clientapp[server_round] = metrics

    def _close_round(self, server_round: int, seconds: float, on_round: Callable[[int], None] | None) -> None:
        line = self.history.close_round(server_round, seconds, self.personal)
        log(INFO, "%s", progress(line, self.last_round))
        if on_round:
            on_round(server_round)


class StoredModels(PersonalizedStrategy):
    """Base of the methods in which every client's trained model reaches the server and is kept there.

    Parameters
    ----------
    store : {"memory", "disk"}
        Where the models are kept. On disk they are in a file, and memory holds little more than the models of those
        who take part in a round; results are the same, bit for bit. See `ClientModels`.
    **settings
        Those of `PersonalizedStrategy`.

    Attributes
    ----------
    models : ClientModels
        The last model of each client that ever took part.
    online : list of client ids, in order
        Those whose model of the last round is at hand. A round without answers changes nothing.
    """

    STATE = (*PersonalizedStrategy.STATE, "models", "online")
    models: ClientModels

    def __init__(self, *, store: str = "memory", **settings: Any) -> None:
        super().__init__(**settings)
        check("store", store, store in ("memory", "disk"), "memory, disk")
        self.store = store

    def begin(self, initial_arrays: ArrayRecord) -> None:
        self.initial = initial_arrays
        self.layout = Layout(initial_arrays, self.buffers)
        self.models = ClientModels(self.layout, self.store)
        self.online: list[ClientId] = []

    def welcome(self, clients: Sequence[ClientId]) -> None:
        """Give the initial model to those of these clients that have none yet."""
        self.models.reserve(len(self._nodes))
        for client in clients:
            if client not in self.models:
                self.models.put(client, read_record(self.initial))

    def take(self, client: ClientId, reply: Reply) -> None:
        self.models.put(client, reply.arrays)

    def update_norm(self, client: ClientId, arrays: Mapping[str, np.ndarray]) -> float:
        """Of the change since the client's last model, which is at the server; what it was sent is not kept."""
        row = np.empty(self.layout.size, self.layout.dtype)  # (d,)
        self.layout.flatten(arrays, row)
        trained = self.layout.num_parameters
        with np.errstate(over="ignore"):
            return norm([row[:trained] - self.models.row(client)[:trained]])

    def end_round(self, server_round: int, answered: Sequence[ClientId]) -> None:
        if answered:
            self.online = list(answered)

    def global_arrays(self) -> ArrayRecord:
        clients = list(self.models)
        if not clients:
            return self.initial
        mean = next(self.models.combinations(np.full((1, len(clients)), 1 / len(clients)), clients))
        return self.models.combined_record(mean, clients[0])

    def personal_arrays(self, client: ClientId) -> ArrayRecord:
        self.welcome([client])
        return self.models[client]

    def client_models(self) -> Mapping[ClientId, ArrayRecord]:
        return self.models


# Of a round: who received something, of whom, and how much of each, (r, m).
NOBODYS: tuple[list[ClientId], list[ClientId], np.ndarray] = ([], [], np.zeros((0, 0)))


class CloudModels(StoredModels):
    """Base of the methods in which a client trains from a weighted sum of the clients' models, its cloud model.

    Parameters
    ----------
    **settings
        Those of `StoredModels`.
    """

    STATE = (*StoredModels.STATE, "_weights")

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._weights = NOBODYS

    def cloud_weights(
        self, server_round: int, clients: Sequence[ClientId]
    ) -> tuple[list[ClientId], np.ndarray]:
        """What the cloud models of these clients are made of.

        Returns
        -------
        senders : list of m client ids
            Nobody while no client has trained yet, and every model is the initial one.
        weights : ndarray, shape (r, m)
            Rows sum to 1.
        """
        raise NotImplementedError

    def outgoing(self, server_round: int, clients: Sequence[ClientId]) -> Iterator[tuple[ClientId, ArrayRecord]]:
        self._weights = NOBODYS
        self.welcome(clients)
        senders, rows = self.cloud_weights(server_round, clients)
        if senders:
            self._weights = (list(clients), senders, rows)
        yield from zip(clients, self.clouds(clients, senders, rows))

    def clouds(
        self, clients: Sequence[ClientId], senders: Sequence[ClientId], rows: np.ndarray
    ) -> Iterator[ArrayRecord]:
        """The cloud models of these clients, one after the other; the initial one, if there are no senders."""
        if not senders:
            yield from (self.initial for _ in clients)
            return
        for client, cloud_model in zip(clients, self.models.combinations(rows, senders)):
            yield self.models.combined_record(cloud_model, client)

    def collaboration(self) -> tuple[list[ClientId], np.ndarray]:
        """The weights of the last round; a client that received nothing has its own model alone."""
        clients = in_order({*self.models, *self.clients()})
        column = {client: i for i, client in enumerate(clients)}
        weights = np.eye(len(clients))
        receivers, senders, received = self._weights
        if receivers:
            rows = [column[client] for client in receivers]
            weights[rows] = 0
            weights[np.ix_(rows, [column[client] for client in senders])] = received
        return clients, weights


def mean_metrics(contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Flower's weighted mean, of the metrics that all of these clients report in one form (a number, n numbers)."""
    def form(value: Any) -> int | None:
        return None if value is None else len(value) if isinstance(value, list) else 0

    records = [next(iter(content.metric_records.values())) for content in contents]
    shared = [key for key in records[0] if all(form(r.get(key)) == form(records[0][key]) for r in records)]
    alike = [RecordDict({"metrics": MetricRecord({key: record[key] for key in shared})}) for record in records]
    return aggregate_metricrecords(alike, weighted_by_key)


def payload_bytes(content: RecordDict) -> int:
    """Bytes that the records of a message hold: arrays with their headers, metrics and settings."""
    return sum(_count_bytes(record) for record in content.values())


def _count_bytes(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    try:
        return record.count_bytes()
    except (IndexError, ValueError):  # of an empty list or text in a record, which Flower takes and cannot count
        return 0


def _loss_in(metrics: Mapping[str, Any]) -> float:
    """The loss that an evaluation tells, by any of its names; `Refused` where it tells none of use."""
    found = next((metrics[name] for name in ORDINARY_NAMES["loss"] if name in metrics), None)
    if not isinstance(found, int | float) or not np.isfinite(found):
        raise Refused(f"its loss is {reprlib.repr(found)}, expected a finite number")
    return float(found)


def content_of(message: Message) -> RecordDict:
    """What a reply carries; nothing, if it does not even carry that, or something else in its place."""
    content = message.content if message.has_content() else None
    return content if isinstance(content, RecordDict) else RecordDict()


def first_line(text: str) -> str:
    """The first line of a text that says something, fit for a log: printable, and not too long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    line = "".join(character if character.isprintable() else "?" for character in line[: LONGEST_LINE + 1])
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."


def progress(line: dict[str, Any], num_rounds: int) -> str:
    """A round in one line."""
    width = len(str(num_rounds))
    title = "closing evaluation" if line["round"] > num_rounds else f"round {line['round']:{width}}/{num_rounds}"
    parts = [title]
    if "accuracy" in line:
        parts += [f"accuracy {line['accuracy']:.1%}", f"bottom decile {line['accuracy-p10']:.1%}",
                  f"best {line['accuracy-best']:.1%}"]
    parts += [f"{line['seconds']:.1f} s", f"up {line['bytes-up'] / 1e6:.2f} MB",
              f"down {line['bytes-down'] / 1e6:.2f} MB", f"{line['answered']}/{line['asked']} clients"]
    return "  ".join(parts)


def _push(grid: Grid, message: Message) -> str | None:
    """Send one message; its id, or None if the grid did not take it."""
    ids = list(grid.push_messages([message]))
    return (ids[0] or None) if ids else None


def _pull(
    grid: Grid, message_ids: Collection[str], deadline: float
) -> Iterator[tuple[str, Message | Refused]]:
    """Give out the first reply to each of these messages as they come, until the deadline.

    Over a network they are asked for one by one. A reply is unpacked as it is handed out, and one that cannot be would
    take others along that came with it; and who wrote it could make it out to be an answer to any message. It costs
    some 20 ms for each of those who have not answered yet, as often as they are asked for.
    """
    waiting = dict.fromkeys(message_ids)
    apart = not simulated(grid)
    pause = FIRST_PAUSE
    while waiting:
        arrived = False
        started = time.monotonic()
        for group in [[message_id] for message_id in waiting] if apart else [list(waiting)]:
            for message_id, reply in _replies(grid, group):
                if message_id in waiting:
                    del waiting[message_id]
                    arrived = True
                    yield message_id, reply
            if time.monotonic() >= deadline + OVERTIME:
                return
        now = time.monotonic()
        if not waiting or now >= deadline:
            return
        pause = FIRST_PAUSE if arrived else min(pause * PAUSE_GROWTH, LONGEST_PAUSE)
        if not arrived:  # the SuperLink has other work too
            time.sleep(min(max(pause, now - started), deadline - now))


def _replies(grid: Grid, message_ids: Sequence[str]) -> list[tuple[str, Message | Refused]]:
    """The replies that are there to these messages."""
    try:
        replies = list(grid.pull_messages(message_ids))
    except Exception as error:
        unreadable = isinstance(error, UNREADABLE) or type(error).__name__ == "DecodeError"  # protobuf's, within Flower
        if not unreadable or simulated(grid):  # where nothing is unpacked
            raise
        # It is gone: the SuperLink does not hand it out again.
        return [(message_ids[0], Refused(f"it cannot be unpacked ({type(error).__name__}: {error})"))]
    for reply in replies:
        _check_worker(grid, reply)
    asked = set(message_ids)
    return [(reply.metadata.reply_to_message_id, reply) for reply in replies
            if reply.metadata.reply_to_message_id in asked]


def _is_from(node_id: int, reply: Message) -> bool:
    """Whether a reply is this node's, or the SuperLink's word that the node is gone."""
    sender = reply.metadata.src_node_id
    return sender == node_id or (sender == SUPERLINK_NODE_ID and reply.has_error())


def _check_worker(grid: Grid, reply: Message) -> None:
    """End the run where a process of the simulation has died, by what Ray says of it.

    Flower hands it messages as before, and to it first, for it is never busy: from then on they fail at once.

    Raises
    ------
    WorkerDied
    """
    if reply.has_error() and reply.error.code == ErrorCode.UNKNOWN and DEAD_WORKER.search(reply.error.reason):
        if simulated(grid):  # what a client far away says has no such weight
            raise WorkerDied(
                "a process in which clients of the simulation work died, most often for want of memory, and Flower "
                "goes on giving it messages, so the run ends; with more CPUs for each client fewer work at a time "
                f"({first_line(reply.error.reason)})")
