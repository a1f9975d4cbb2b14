"""A round: the clients that it asks, the messages to them, and what their replies change.

`Rounds` has the steps that Flower names, `configure_train` to `aggregate_evaluate`; strategy.py calls them in order.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import ERROR
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log

from kindred.messages import (
    ATTEMPT,
    KEEP_FROM,
    LAST,
    METHOD,
    METRIC,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    PROBE,
    RUN,
    SERVER_ROUND,
    ClientId,
    first_line,
    in_order,
    records_of,
    seed_for,
)
from kindred.parts.aggregation import MEAN, Aggregate, aggregate
from kindred.settings import AUTO, LOCAL_EPOCHS, MAX_LOCAL_EPOCHS, SAMPLING, UNIFORM

from .admission import Refused, Reply, admit, admit_evaluation, check_integers, integer_ranges, raise_own
from .checkpoint import Checkpoints
from .empty_rounds import EmptyRounds
from .evaluation import EvaluationPlan
from .exchange import Exchange, Sent, share_of
from .history import History
from .hooks import Hooks
from .layout import Layout
from .metrics import aggregated
from .norms import UpdateNorms
from .remarks import on_samples, on_updates
from .roster import Roster


class Rounds(Hooks, Strategy):
    """The steps of a round, for `PersonalizedStrategy`, which describes the arguments."""

    aggregation: str = MEAN  # the rule of `aggregate_of`, for methods that have the setting

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord]
    evaluate_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord]
    seed: int
    sampling: str
    max_local_epochs: int
    max_client_share: float
    max_update_norm: float | Literal["auto"]
    metric: str

    history: History
    roster: Roster
    norms: UpdateNorms
    means: list[Mapping[ClientId, float]]
    """Claimed samples n_k of each client, for each mean of models of the round."""
    last_round: int
    """Last round of the run in progress."""
    run_id: int
    """Id of the run when it began: Flower gives a resumed run another one."""
    _initial_ranges: dict[str, tuple[int, int]]
    """Ranges of the initial model's integer buffers."""
    _sent_ranges: dict[ClientId, dict[str, tuple[int, int]]]
    """The same of what each client was last sent to train."""
    _exchange: Exchange
    _evaluations: EvaluationPlan
    _empty_rounds: EmptyRounds
    _checkpoints: Checkpoints | None = None
    _attempt: int
    """When the run began, or was last resumed, in ns since 1970."""

    # --- Clients of a round ---------------------------------------------------------------------------

    def clients(self) -> list[ClientId]:
        """Return the clients that are connected and can take part, in order."""
        return self.roster.clients()

    def participants(self) -> list[ClientId]:
        """Return the clients of the run so far, in order: those of `clients`, and those asked in an earlier round."""
        return in_order({*self.clients(), *(row["client"] for row in self.history.rows)})

    def sample(self, server_round: int, fraction: float, at_least: int, purpose: str = "train") -> list[ClientId]:
        """Sample clients without replacement.

        The draw depends on the seed, the round, the purpose and the client ids alone, and with `sampling` "by-size" on
        the clients' numbers of samples. `fraction` is one of all clients, including those that cannot take part.
        """
        clients = self.roster.active()
        count = min(max(math.floor(share_of(fraction, self.roster.num_known())), at_least), len(clients))
        if count == len(clients):
            return clients
        rng = np.random.default_rng(seed_for(self.seed, purpose, server_round))
        drawn = rng.choice(len(clients), count, replace=False, p=self.chances(clients))
        return [clients[i] for i in sorted(drawn)]

    @property
    def actual_sampling(self) -> str:
        """Sampling of clients, UNIFORM or BY_SIZE: `sampling`, or the method's own if that is "default"."""
        return self.default_sampling if self.sampling == SAMPLING.default else self.sampling

    def chances(self, clients: Sequence[ClientId]) -> np.ndarray | None:
        """Return the sampling probabilities p_k = n_k / sum n_k, shape (m,); None if all are equal."""
        if self.actual_sampling == UNIFORM:
            return None
        sizes = np.array(self.roster.sizes(clients), dtype=np.float64)  # n_k
        return sizes / sizes.sum()

    def _evaluates_before(self) -> bool:
        """Return whether all clients are evaluated before the training rounds, because each of these samples some."""
        sampled = self.sample(self.first_round, self.fraction_train, self.min_train_nodes)
        return self.fraction_evaluate > 0 and len(sampled) < len(self.roster.active())

    def _drawn_epochs(self, server_round: int, client: ClientId) -> dict[str, int]:
        """Return the epochs of local training that are drawn for a client in a round; empty without draws."""
        if not self.max_local_epochs:
            return {}
        rng = np.random.default_rng(seed_for(self.seed, LOCAL_EPOCHS.key, client, server_round))
        drawn = int(rng.integers(1, self.max_local_epochs, endpoint=True))
        return {LOCAL_EPOCHS.key: drawn, MAX_LOCAL_EPOCHS.key: self.max_local_epochs}

    # --- Training and evaluation ----------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the training messages of a round, one at a time."""
        self.roster.begin_round(server_round)
        self.norms.begin_round()
        self.means = []
        clients = self.sample(server_round, self.fraction_train, self.min_train_nodes)
        for client, record in self.outgoing(server_round, clients):
            self._sent_ranges[client] = integer_ranges(record)
            yield self._message(client, record, config, server_round, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Process the training replies of a round as they arrive; the models stay here, so no arrays are returned."""
        metrics: dict[ClientId, MetricRecord] = {}
        numbers: dict[ClientId, float] = {}  # of samples
        if self.norms.needs_preview:
            replies = self._exchange.preview(replies, self._preview_training)
        for client, reply in self._exchange.admitted(server_round, replies, self._take_training):
            metrics[client], numbers[client] = reply.metrics, reply.number(self.weighted_by_key)
        answered = in_order(metrics)
        self._evaluations.trained(
            answered, [client for client in answered if self._evaluations.has_result(metrics[client])]
        )
        failure = self._end_round(server_round, answered)
        self._name_outliers(server_round, numbers)
        self._empty_rounds.count(server_round, answered=bool(answered), failure=failure)
        if failure:
            return None, None
        return None, aggregated(self.train_metrics_aggr_fn, metrics, self.weighted_by_key, server_round)

    def _take_training(self, sent: Sent, content: RecordDict) -> Reply:
        """Check a training reply and pass it to the method; raise `Refused` if it cannot be used."""
        client = sent.client
        reply, norm = self._admit_training(client, content)
        if norm is not None:
            bound = 0.0 if self.max_update_norm == AUTO else float(self.max_update_norm)
            if 0 < bound < norm:
                raise Refused(f"its update has norm {norm:g}, allowed: up to {bound:g}")
            if (factor := self.norms.add(client, self.network_of(client), norm)) < 1:
                reply = replace(reply, arrays=self.scaled_update(client, reply.arrays, factor))
                self.inspect(client, reply)  # a method may keep what it has computed of the arrays
        self.take(client, reply)
        return reply

    def _admit_training(self, client: ClientId, content: RecordDict) -> tuple[Reply, float | None]:
        """Check a training reply, and return it with the norm of its update; its samples are those introduced."""
        reply = admit(content, self.weighted_by_key, partial(self.mismatch, client))
        introduced, claimed = self.roster.introduced_samples(client), reply.metrics.get(NUM_EXAMPLES)
        if introduced is not None and isinstance(claimed, int | float) and claimed != introduced:
            reply = replace(reply, metrics=MetricRecord({**reply.metrics, NUM_EXAMPLES: introduced}))
            self.roster.ask_again(client, claimed)
        check_integers(reply.arrays, {**self._initial_ranges, **self._sent_ranges[client]})
        self.inspect(client, reply)
        return reply, self.update_norm(client, reply.arrays)

    def _preview_training(self, sent: Sent, content: RecordDict) -> None:
        """Let a training reply's update count in the bound of its own round."""
        reply, norm = self._admit_training(sent.client, content)
        if norm is not None:
            self.norms.preview(sent.client, self.network_of(sent.client), norm)

    def aggregate_of(self, layout: Layout) -> Aggregate:
        """Return an empty mean of clients' models in the round in progress, by the settings' rule and bound."""
        mean = aggregate(
            self.aggregation,
            layout.size,
            layout.dtype,
            self.norms.lengths,
            layout.num_parameters,
            self.max_client_share,
        )
        self.means.append(mean.claimed)
        return mean

    def _name_outliers(self, server_round: int, numbers: Mapping[ClientId, float]) -> None:
        """Record the norms of a round's updates, and name clients whose samples or updates stand out."""
        updates = self.norms.end_round(server_round)
        self.history.updates += updates
        for remark in (*on_samples(numbers, self.means), *(on_updates(updates) if self.mixes_updates else ())):
            self.history.remark(server_round, *remark)

    def _end_round(self, server_round: int, answered: Sequence[ClientId]) -> str:
        """Call the method's `end_round`; return the reason if it failed, else an empty text."""
        try:
            self.end_round(server_round, answered)
        except Exception as error:
            raise_own(error)
            failure = first_line(f"round {server_round} could not be ended ({type(error).__name__}: {error})")
            log(
                ERROR,
                "kindred: %s: changes already made by its replies stay, and it counts as a round without answers\n%s",
                failure,
                "".join(traceback.format_tb(error.__traceback__)),
            )
            return failure
        return ""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make the evaluation messages of a round, one at a time; round 0 is before the training rounds."""
        if server_round == 0 and self._evaluates_before():
            clients = self._evaluations.before_first_round(self.roster.active(), self._exchange.not_replied)
        else:
            sampled = self.sample(server_round, self.fraction_evaluate, self.min_evaluate_nodes, "evaluate")
            clients = self._evaluations.after_round(sampled, self._exchange.not_replied)
        return self._to_evaluate(server_round, clients, config)

    def _to_evaluate(self, server_round: int, clients: Sequence[ClientId], config: ConfigRecord) -> Iterable[Message]:
        """Make the messages of the method's side evaluations, and the evaluation messages to these clients."""
        for side in self.side_evaluations(server_round) if server_round >= self.first_round else ():
            if side.client in self.roster.nodes and side.client not in self._exchange.not_replied:
                settings = ConfigRecord({**config, **side.settings})
                yield self._message(side.client, side.arrays, settings, server_round, MessageType.EVALUATE, side.name)
        for client, record in zip(clients, self.personal_models(clients), strict=False):
            yield self._message(client, record, config, server_round, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Process the evaluation replies of a round. The method does not receive those before its first round.

        `evaluate_metrics_aggr_fn` is called with NUM_TEST_EXAMPLES as the key of the weights.
        """
        take = self._take_evaluation if server_round >= self.first_round else self._admit_evaluation
        metrics: dict[ClientId, MetricRecord] = {}
        for client, reply in self._exchange.admitted(server_round, replies, take):
            self._evaluations.evaluated(client)
            if reply.metrics[NUM_TEST_EXAMPLES]:
                metrics[client] = reply.metrics
        return aggregated(self.evaluate_metrics_aggr_fn, metrics, NUM_TEST_EXAMPLES, server_round)

    def _take_evaluation(self, sent: Sent, content: RecordDict) -> Reply:
        """Check an evaluation reply and pass it to the method; raise `Refused` if it cannot be used."""
        reply = self._admit_evaluation(sent, content)
        if sent.side:
            self.take_side_loss(sent.client, sent.side, reply.loss())
        else:
            self.take_evaluation(sent.client, reply)
        return reply

    def _admit_evaluation(self, sent: Sent, content: RecordDict) -> Reply:
        """Check an evaluation reply; raise `Refused` if it cannot be used."""
        has_model = self.evaluations_have_models and records_of(content, ArrayRecord)
        mismatch = partial(self.mismatch, sent.client) if has_model else None
        return admit_evaluation(content, self.weighted_by_key, mismatch)

    def _message(
        self,
        client: ClientId,
        arrays: ArrayRecord,
        config: ConfigRecord,
        server_round: int,
        message_type: str,
        side: str = "",
    ) -> Message:
        settings = config.copy()
        settings.update({**self._drawn_epochs(server_round, client), **self.round_config(server_round, client)})
        settings.pop(PROBE, None)  # the caller may not set it
        if side:
            settings[PROBE] = side
        oldest = self._checkpoints.oldest if self._checkpoints else server_round - 1
        settings[KEEP_FROM] = -1 if oldest is None else oldest
        settings[ATTEMPT] = self._attempt
        self._add_run(settings, server_round)
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: settings})
        return Message(content, self.roster.nodes[client], message_type, group_id=str(server_round))

    def _to_validate(self, server_round: int, config: ConfigRecord) -> ConfigRecord:
        """Return the settings of the message to a site that only validates."""
        settings = config.copy()
        settings.pop(PROBE, None)
        self._add_run(settings, server_round)
        return settings

    def _add_run(self, settings: ConfigRecord, server_round: int) -> None:
        """Add to a message's settings which run and round it is part of."""
        settings[SERVER_ROUND] = server_round
        settings[RUN] = f"{self.run_id:020}"  # the same length in every run
        settings[METHOD], settings[METRIC] = self.name, self.metric
        if server_round >= self.last_round:
            settings[LAST] = True
