"""The round engine: what every method shares on the server's side.

A round is one exchange: a message to each client that takes part, and replies that are checked and taken
in one by one as they come. A method is a subclass that says what goes to a client (`outgoing`), what is
done with an admitted reply (`take`), and what its models are (`client_models`, `collaboration`).
"""

from __future__ import annotations

import math
import reprlib
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from logging import DEBUG, ERROR, INFO, WARNING
from typing import Any, NoReturn, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from flwr.supercore import log

from kindred.client.state import NotResumable, begin_simulation, simulated
from kindred.messages import (
    AFTER_TRAINING,
    ATTEMPT,
    KEEP_FROM,
    METHOD,
    METHODS,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    ORDINARY_NAMES,
    PERSONAL,
    PROBE,
    RUN,
    SERVER_ROUND,
    SHARE_MODEL,
    TRAINED,
    VERSION_KEY,
    ClientId,
    check,
    first_line,
    in_order,
    read_record,
    records_of,
    seed_for,
)
from kindred.registry import REGISTRY
from kindred.settings import (
    GRACE,
    MAX_EMPTY_ROUNDS,
    MAX_STRIKES,
    MAX_UPDATE_NORM,
    QUORUM,
    SEED,
    STORE,
    TRAINING,
    WAIT_TIMEOUT,
    meant_by,
)
from kindred.versions import mismatch

from .admission import MAX_EXAMPLES, REFUSED, SERVERS_OWN, Refused, Reply, admit, norm
from .arguments import Shared
from .checkpoint import Checkpoints
from .exchange import content_of, is_from, pull, push
from .history import COMPUTE, History
from .model_store import ClientModels, Layout
from .roster import CLOCKS, Roster, TooFewClients

ENGINES_OWN = ("round", "client", "status", "seconds", "bytes-down", "bytes-up")  # columns of every row


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
        Clients that must be connected and able to take part before a round starts. Those that rest for their strikes
        count.
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
    quorum : float (default: 0.5)
        Clients that have answered, as a share of those asked (up to 1) or as a number (2 or more), after which the
        others have `grace` seconds more; with 1 they have until the timeout. Not used in a simulation, whose results
        would depend on the speed of the machine.
    grace : float (default: 600.0)
        Seconds, 0 or more, see `quorum`.
    max_strikes : int (default: 3)
        A client whose training reply was refused, or that did not answer, in this many rounds in a row is left out for
        as many rounds, and for one more each time that the next one is a failure too. 0 leaves nobody out.
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

    STATE: tuple[str, ...] = ("history", "run_id", "roster", "_answered", "_evaluated_apart")
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
        seed: int = SEED.default,
        wait_timeout: float = WAIT_TIMEOUT.default,
        quorum: float = QUORUM.default,
        grace: float = GRACE.default,
        max_strikes: int = MAX_STRIKES.default,
        max_update_norm: float = MAX_UPDATE_NORM.default,
        max_empty_rounds: int = MAX_EMPTY_ROUNDS.default,
        buffers: Collection[str] | None = None,
    ) -> None:
        check("fraction_train", fraction_train, 0 <= fraction_train <= 1, "0 to 1")
        check("fraction_evaluate", fraction_evaluate, 0 <= fraction_evaluate <= 1, "0 to 1")
        check("min_train_nodes", min_train_nodes, min_train_nodes >= 0, "0 or more")
        check("min_evaluate_nodes", min_evaluate_nodes, min_evaluate_nodes >= 0, "0 or more")
        check("min_available_nodes", min_available_nodes, min_available_nodes >= 1, "1 or more")
        self.fraction_train = fraction_train
        self.fraction_evaluate = fraction_evaluate
        self.min_train_nodes = min_train_nodes if fraction_train else 0
        self.min_evaluate_nodes = min_evaluate_nodes if fraction_evaluate else 0
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or mean_metrics
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or mean_metrics
        self.seed = SEED.check(seed)
        self.quorum = QUORUM.check(quorum)
        self.grace = GRACE.check(grace)
        self.max_update_norm = MAX_UPDATE_NORM.check(max_update_norm)
        self.max_empty_rounds = MAX_EMPTY_ROUNDS.check(max_empty_rounds)
        self.buffers = buffers
        self.history = History()
        self.min_available_nodes = min_available_nodes
        self.wait_timeout = WAIT_TIMEOUT.check(wait_timeout)
        self.max_strikes = MAX_STRIKES.check(max_strikes)
        self.roster = Roster(min_available_nodes, wait_timeout, max_strikes)
        self._silent: set[ClientId] | None = None  # who may be asked for an evaluation in this round; None: all
        self._evaluated_apart: set[ClientId] = set()  # whose personal model was evaluated by itself in this round
        self._closing: list[ClientId] = []  # who is to be asked after the last round
        self.last_round = 0  # of the run that was started
        self._empty_rounds = 0  # in a row
        self._failure = ""  # of the last round, where it could not be ended
        self._raised: set[str] = set()  # where exceptions that nobody foresaw were raised
        self._simulated = True
        self._asked: dict[str, _Asked] = {}  # messages of the exchange in progress,
        self._until = 0.0  # its end, on time.monotonic's clock,
        self._graced = False  # whether that follows from its quorum,
        self._refusals: dict[int, str] = {}  # and nodes whose replies were refused in it, with the reasons
        self._replied: set[ClientId] = set()  # clients that have answered in this round,
        self._not_replied: set[ClientId] = set()  # and those that have not, and are asked nothing more in it
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
            elif METHODS in about and (differs := mismatch(about.get(VERSION_KEY), "the client", "this server")):
                reasons[client] = differs
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
        log(
            INFO,
            "\t├──> Minimum nodes: train (%d) | evaluate (%d) | available (%d)",
            self.min_train_nodes,
            self.min_evaluate_nodes,
            self.roster.min_available,
        )
        log(
            INFO,
            "\t└──> Keys: '%s', '%s', weighted by '%s'",
            self.arrayrecord_key,
            self.configrecord_key,
            self.weighted_by_key,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the training messages of a round, one at a time."""
        self.roster.begin_round(server_round)
        clients = self.sample(server_round, self.fraction_train, self.min_train_nodes)
        for client, record in self.outgoing(server_round, clients):
            yield self._message(client, record, config, server_round, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take in the training replies of a round as they come. The models stay here: no arrays are returned."""
        contents: dict[ClientId, RecordDict] = {}
        self._evaluated_apart = set()
        evaluated: set[ClientId] = set()  # clients that reported their accuracy in their replies
        for message in replies:
            if (found := self._admitted(message, server_round, self.take, evaluation=False)) is not None:
                client, reply = found
                if f"{self.personal}-accuracy" in reply.metrics:
                    evaluated.add(client)
                contents[client] = RecordDict({"metrics": reply.metrics})
        answered = in_order(contents)
        # Clients that evaluate while they train have said all there is to say; who sits out keeps its last.
        self._silent = set(answered) - evaluated if evaluated else None
        self._failure = self._end_round(server_round, answered)
        if not answered or self._failure:
            self._empty_rounds += 1
            return None, None
        self._empty_rounds = 0
        self._answered = self._answered or server_round > 0
        return None, self._mean_of_metrics(self.train_metrics_aggr_fn, contents, server_round)

    def _end_round(self, server_round: int, answered: Sequence[ClientId]) -> str:
        """Have the method end a round; why it could not, or nothing."""
        try:
            self.end_round(server_round, answered)
        except SERVERS_OWN:
            raise
        except Exception as error:
            failure = first_line(f"round {server_round} could not be ended ({type(error).__name__}: {error})")
            log(
                ERROR,
                "kindred: %s: what its replies changed before stays, and it counts as one without answers\n%s",
                failure,
                "".join(traceback.format_tb(error.__traceback__)),
            )
            return failure
        return ""

    def _mean_of_metrics(
        self,
        aggregate: Callable[[list[RecordDict], str], MetricRecord],
        contents: Mapping[ClientId, RecordDict],
        server_round: int,
    ) -> MetricRecord | None:
        """The mean of clients' metrics, in order of client; None where the caller's function raises an exception."""
        try:
            return aggregate([contents[client] for client in in_order(contents)], self.weighted_by_key)
        except SERVERS_OWN:
            raise
        except Exception as error:
            log(
                WARNING,
                "kindred: the metrics of round %d have no mean: %s raised %s",
                server_round,
                getattr(aggregate, "__name__", aggregate),
                first_line(f"{type(error).__name__}: {error}"),
            )
            log(DEBUG, "%s", traceback.format_exc())
            return None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the messages by which clients evaluate their personal models, one at a time."""
        clients = self._closing or self.sample(
            server_round, self.fraction_evaluate, self.min_evaluate_nodes, "evaluate"
        )
        asked = [
            client
            for client in clients
            if client not in self._not_replied and (self._silent is None or client in self._silent)
        ]
        for client, record in zip(asked, self.personal_models(asked)):
            yield self._message(client, record, config, server_round, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Take in the evaluation replies of a round."""
        contents: dict[ClientId, RecordDict] = {}
        for message in replies:
            if (found := self._admitted(message, server_round, self.take_evaluation, evaluation=True)) is not None:
                client, reply = found
                self._evaluated_apart.add(client)
                contents[client] = RecordDict({"metrics": reply.metrics})
        if not contents:
            return None
        return self._mean_of_metrics(self.evaluate_metrics_aggr_fn, contents, server_round)

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
            Fewer than `min_available_nodes` clients can take part after `wait_timeout` seconds; no usable answer of any
            client in any round, or in `max_empty_rounds` rounds in a row; the state was saved before that.
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
        self._warn_of_unread_settings(train_config)
        result = Result(arrays=initial_arrays)
        self.history = History()
        self._answered = False
        self._closing = []
        self.last_round = num_rounds
        self._empty_rounds, self._failure = 0, ""
        self._simulated = simulated(grid)
        self.roster.begin(self.history, simulated=self._simulated)
        self.run_id = grid.run.run_id
        self._attempt = time.time_ns()
        self._checkpoints = checkpoints
        self._evaluated_apart = set()
        self.begin(initial_arrays)
        first = self.first_round
        if checkpoints and (found := checkpoints.load()):
            last, state = found
            if differing := state["strategy"].keys() ^ self.state().keys():
                raise NotResumable(
                    f"round {last} in {checkpoints.folder} was saved by another method or version: "
                    f"{', '.join(sorted(differing))} is in one of the two alone"
                )
            self.restore(state["strategy"])
            for kind, metrics in state["result"].items():
                vars(result)[kind] = {server_round: MetricRecord(m) for server_round, m in metrics.items()}
            self._attempt = max(self._attempt, state["attempt"] + 1)  # whatever the clock of this machine says
            self._empty_rounds = state["empty-rounds"] % self.max_empty_rounds  # those that ended it are forgiven
            log(INFO, "kindred: goes on after round %d, from %s", last, checkpoints.folder)
            first = last + 1
            del found, state  # arrays of it would stay in memory
        if self.clients_keep_state and self._simulated:
            begin_simulation(self.run_id, checkpoints and checkpoints.folder, goes_on=first > self.first_round)
        started = time.monotonic()
        if evaluate_fn and first == self.first_round > 0 and (metrics := evaluate_fn(0, initial_arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = metrics

        for server_round in range(first, num_rounds + 1):
            round_started = time.monotonic()
            self._replied, self._not_replied = set(), set()
            self.roster.meet(grid, self.introduce, timeout)
            _, metrics = self.aggregate_train(
                server_round,
                self._exchange(
                    grid, self.configure_train(server_round, result.arrays, train_config, grid), timeout, server_round
                ),
            )
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            if self.fraction_evaluate:
                self._evaluate(grid, result, evaluate_config, timeout, server_round)
            self._close_round(grid, server_round, time.monotonic() - round_started, on_round)
            if evaluate_fn and (metrics := evaluate_fn(server_round, self.global_arrays())) is not None:
                result.evaluate_metrics_serverapp[server_round] = metrics
            given_up = self._empty_rounds >= self.max_empty_rounds
            if checkpoints and (checkpoints.due(server_round) or server_round == num_rounds or given_up):
                kinds = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")
                checkpoints.save(
                    server_round,
                    {
                        "strategy": self,
                        "result": {kind: dict(getattr(result, kind)) for kind in kinds},
                        "attempt": self._attempt,
                        "empty-rounds": self._empty_rounds,
                    },
                )
            if given_up:
                self._give_up()

        if not self._answered:
            raise TooFewClients(f"no client gave a usable answer in any of the {num_rounds} rounds; {self._trouble()}")
        if first > num_rounds:  # nobody has been met since it was cut short
            self.roster.meet(grid, self.introduce, timeout)
        # Replies of a round may speak of the model that it started from: the last one still needs a word. And who was
        # never drawn has said nothing yet.
        told = (
            {row["client"] for row in self.history.rows} if self.personal in AFTER_TRAINING else self._evaluated_apart
        )
        self._closing = [client for client in self.roster.active() if client not in told]
        if self.fraction_evaluate and self._closing:
            closing_started = time.monotonic()
            self._silent, self._not_replied = None, set()
            self._evaluate(grid, result, evaluate_config, timeout, num_rounds + 1)
            self._close_round(grid, num_rounds + 1, time.monotonic() - closing_started, on_round)
        result.arrays = self.global_arrays()
        log(INFO, "%s finished %d rounds in %.1f s", self.name, num_rounds, time.monotonic() - started)
        return result

    # --- Clients --------------------------------------------------------------------------------------

    def _warn_of_unread_settings(self, config: ConfigRecord) -> None:
        """Warn of settings that look like misspelt ones of local training. Others may be for a client of the user's."""
        method = REGISTRY.get(self.name)
        own = [each.key for each in method.settings] if method else []
        for key in config.keys() - own:
            meant = meant_by(key, [each.key for each in TRAINING])
            if meant and meant not in config:
                log(
                    WARNING,
                    "kindred: train_config has %s, which no client of kindred reads; did you mean %s?",
                    key,
                    meant,
                )

    def clients(self) -> list[ClientId]:
        """The clients that are connected and can take part, in order."""
        return self.roster.clients()

    def sample(self, server_round: int, fraction: float, at_least: int, purpose: str = "train") -> list[ClientId]:
        """Draw clients for a round, without replacement; the draw depends on seed, round and client ids alone."""
        clients = self.roster.active()
        count = min(max(int(len(clients) * fraction), at_least), len(clients))
        if count == len(clients):
            return clients
        rng = np.random.default_rng(seed_for(self.seed, purpose, server_round))
        drawn = rng.choice(len(clients), count, replace=False, p=self.chances(clients))
        return [clients[i] for i in sorted(drawn)]

    # --- An exchange ----------------------------------------------------------------------------------

    def _message(
        self,
        client: ClientId,
        arrays: ArrayRecord,
        config: ConfigRecord,
        server_round: int,
        message_type: str,
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
        return Message(content, self.roster.nodes[client], message_type, group_id=str(server_round))

    def _exchange(
        self, grid: Grid, messages: Iterable[Message], timeout: float, server_round: int
    ) -> Iterator[Message]:
        """Send messages and give out the replies as they come, until all are in or time is up.

        A reply is known by the message it answers, whoever signs it: replies of an earlier exchange are
        never asked for, and an error that the SuperLink reports for a dead node is its client's.
        """
        self._until, self._graced = time.monotonic() + timeout, False
        client_of = {node_id: client for client, node_id in self.roster.nodes.items()}
        self._asked = {}
        for message in messages:
            client = client_of[message.metadata.dst_node_id]
            notes = self.notes(client)
            if message.metadata.message_type == MessageType.EVALUATE:  # it may join a row of training
                notes = {f"evaluate-{key}": value for key, value in notes.items()}
            asked = _Asked(
                client,
                message.metadata.dst_node_id,
                time.monotonic(),
                payload_bytes(message.content),
                notes,
                message.metadata.message_type == MessageType.TRAIN,
                str(message.content[self.configrecord_key].get(PROBE, "")),
            )
            message.metadata.ttl = timeout + CLOCKS
            message_id = push(grid, message)
            if message_id is None:
                self._add_row(replace(asked, notes={}), server_round, "its message could not be sent", 0)
            else:
                self._asked[message_id] = asked
        waiting = dict(self._asked)
        clients = {asked.client for asked in waiting.values()}
        count = len(clients | self._replied)  # clients that have answered before and are not asked now have answered
        self._replied -= clients
        quorum = math.ceil(self.quorum * count) if self.quorum <= 1 else min(int(self.quorum), count)
        self._look_for_quorum(quorum)
        for message_id, reply in pull(grid, self._asked, lambda: self._until, simulated=self._simulated):
            asked = waiting.pop(message_id)
            self._replied.add(asked.client)
            self._look_for_quorum(quorum)
            if isinstance(reply, Refused):
                self._refuse(asked, server_round, reply, 0)
            else:
                yield reply
            while self._refusals:
                self.roster.tell(grid, *self._refusals.popitem())
        for asked in waiting.values():
            reason = f"no answer within {timeout:g} s"
            if self._graced:
                reason = f"no answer within {self.grace:g} s after {quorum} of {count} clients (quorum, grace)"
            self._add_row(asked, server_round, reason, 0)
            self._not_replied.add(asked.client)
            self.roster.failed(asked.client)

    def _look_for_quorum(self, quorum: int) -> None:
        """End the exchange some time after so many clients have answered."""
        until = time.monotonic() + self.grace
        if not self._graced and not self._simulated and len(self._replied) >= quorum and until < self._until:
            self._until, self._graced = until, True

    def _admitted(
        self, message: Message, server_round: int, take: Callable[[ClientId, Reply], None], *, evaluation: bool
    ) -> tuple[ClientId, Reply] | None:
        """Check a reply, have the method take it in, and note it in the history; None if nothing of it is used."""
        asked = self._asked[message.metadata.reply_to_message_id]
        if not is_from(asked.node_id, message):  # no strike: whose fault it is, nobody knows
            sender = message.metadata.src_node_id
            self._add_row(asked, server_round, f"{REFUSED}it came from node {sender}, expected {asked.node_id}", 0)
            return None
        if message.has_error():
            # Flower's word for a reply that was announced and never uploaded; or one that came when others had waited.
            if message.error.code == ErrorCode.MESSAGE_UNAVAILABLE or self._graced:
                self.roster.failed(asked.client)
            reason = f"error {message.error.code}: {first_line(message.error.reason)}"
            self._add_row(asked, server_round, reason, 0)
            return None
        content = content_of(message)
        bytes_up = payload_bytes(content)
        due = None if evaluation and not records_of(content, ArrayRecord) else partial(self.mismatch, asked.client)
        try:
            with self._at_the_senders_cost():
                reply = admit(content, self.weighted_by_key, due)
                if asked.probe:
                    loss = _loss_in(reply.metrics)
                    self.take_probe(asked.client, asked.probe, loss)
                else:
                    if not evaluation:
                        self.inspect(asked.client, reply)
                        self._bound(asked.client, reply)
                    take(asked.client, reply)
        except Refused as refusal:
            self._refuse(asked, server_round, refusal, bytes_up)
            return None
        self.roster.succeeded(asked.client)
        if asked.probe:
            worked = {key: reply.metrics[key] for key in COMPUTE if key in reply.metrics}
            self._add_row(asked, server_round, "ok", bytes_up, {f"{asked.probe}-loss": loss, **worked})
            return None
        # Numbers alone go into rows, and the engine's own columns are not the client's to name.
        metrics = {
            key: value
            for key, value in reply.metrics.items()
            if isinstance(value, int | float) and not key.startswith((f"{PERSONAL}-", "evaluate-"))
        }
        if evaluation:
            metrics[NUM_TEST_EXAMPLES] = metrics.pop(self.weighted_by_key)
        self._add_row(asked, server_round, "ok", bytes_up, metrics, evaluation=evaluation)
        return asked.client, reply

    @contextmanager
    def _at_the_senders_cost(self) -> Iterator[None]:
        """Turn an exception that nobody foresaw into a refusal: one reply is lost, not the run.

        It may be a fault of the method, so the log says where it was raised, once for each place.
        """
        try:
            yield
        except (Refused, *SERVERS_OWN):
            raise
        except Exception as error:
            places = "".join(traceback.format_tb(error.__traceback__))
            if places not in self._raised:
                self._raised.add(places)
                log(ERROR, "kindred: an exception that nobody foresaw, %s\n%s", type(error).__name__, places)
            raise Refused(f"it cannot be used ({type(error).__name__}: {error})") from error

    def _bound(self, client: ClientId, reply: Reply) -> None:
        """Refuse an update that is larger than `max_update_norm`."""
        if self.max_update_norm and (size := self.update_norm(client, reply.arrays)) > self.max_update_norm:
            raise Refused(f"its update has norm {size:g}, allowed: up to {self.max_update_norm:g}")

    def _refuse(self, asked: _Asked, server_round: int, refusal: Refused, bytes_up: int) -> None:
        """Note a refused reply; one to a training message is a strike."""
        self._add_row(asked, server_round, f"{REFUSED}{refusal}", bytes_up)
        self._refusals[asked.node_id] = f"its reply in round {server_round} is not used: {refusal}"
        if asked.to_train:
            self.roster.failed(asked.client)

    def _give_up(self) -> NoReturn:
        """End a run that has been going on without anybody for too long."""
        raise TooFewClients(
            f"no client gave a usable answer in {self._empty_rounds} rounds in a row "
            f"(max_empty_rounds), so the run ends; {self._trouble()}"
        )

    def _trouble(self) -> str:
        """The last thing that went wrong."""
        if self._failure:
            return self._failure
        last = next((row for row in reversed(self.history.rows) if row["status"] != "ok"), None)
        return f"client {last['client']}: {last['status']}" if last else "no client was asked"

    def _add_row(
        self,
        asked: _Asked,
        server_round: int,
        status: str,
        bytes_up: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        evaluation: bool = False,
    ) -> None:
        if status != "ok":
            status = first_line(status)
            log(WARNING, "kindred: round %d goes on without client %s: %s", server_round, asked.client, status)
            if asked.probe:  # replies of an exchange come in any order: each has a column of its own
                metrics, status = {f"{asked.probe}-status": status}, "ok"
        row = {
            **(metrics or {}),  # whatever a client calls its metrics, the columns below are not its own
            **asked.notes,
            **dict(
                zip(
                    ENGINES_OWN,
                    (server_round, asked.client, status, time.monotonic() - asked.sent_at, asked.bytes_down, bytes_up),
                    strict=True,
                )
            ),
        }
        # An evaluation by itself is of the personal model, under the name that an ordinary evaluate function uses.
        for measure, names in ORDINARY_NAMES.items():
            for key in names if evaluation else (f"{self.personal}-{measure}",):
                if key in row:
                    if measure == "loss" or 0 <= row[key] <= 1:
                        row[f"{PERSONAL}-{measure}"] = float(row[key])
                    break
        reported = () if asked.probe else (metrics or {}).keys() - asked.notes.keys() - set(ENGINES_OWN)
        self.history.add(row, reported)

    def _evaluate(self, grid: Grid, result: Result, config: ConfigRecord, timeout: float, server_round: int) -> None:
        messages = self.configure_evaluate(server_round, result.arrays, config, grid)
        metrics = self.aggregate_evaluate(server_round, self._exchange(grid, messages, timeout, server_round))
        if metrics is not None:
            result.evaluate_metrics_clientapp[server_round] = metrics

    def _close_round(
        self, grid: Grid, server_round: int, seconds: float, on_round: Callable[[int], None] | None
    ) -> None:
        self.roster.end_round(grid, server_round)
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
    **shared
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

    def __init__(self, *, store: str = STORE.default, **shared: Unpack[Shared]) -> None:
        super().__init__(**shared)
        self.store = STORE.check(store)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        self.initial = initial_arrays
        self.layout = Layout(initial_arrays, self.buffers)
        self.models = ClientModels(self.layout, self.store)
        self.online: list[ClientId] = []

    def welcome(self, clients: Sequence[ClientId]) -> None:
        """Give the initial model to those of these clients that have none yet."""
        self.models.reserve(len(self.roster.nodes))
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
    **shared
        Those of `StoredModels`.
    """

    STATE = (*StoredModels.STATE, "_weights")

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self._weights = NOBODYS

    def cloud_weights(self, server_round: int, clients: Sequence[ClientId]) -> tuple[list[ClientId], np.ndarray]:
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


def progress(line: dict[str, Any], num_rounds: int) -> str:
    """A round in one line."""
    width = len(str(num_rounds))
    title = "closing evaluation" if line["round"] > num_rounds else f"round {line['round']:{width}}/{num_rounds}"
    parts = [title]
    if "accuracy" in line:
        parts += [
            f"accuracy {line['accuracy']:.1%}",
            f"bottom decile {line['accuracy-p10']:.1%}",
            f"best {line['accuracy-best']:.1%}",
        ]
    parts += [
        f"{line['seconds']:.1f} s",
        f"up {line['bytes-up'] / 1e6:.2f} MB",
        f"down {line['bytes-down'] / 1e6:.2f} MB",
        f"{line['answered']}/{line['asked']} clients",
    ]
    return "  ".join(parts)
