"""A run: the loop over rounds that all methods share, from the start or from a checkpoint.

A round is an exchange of training messages, and mostly also one of evaluation messages. In an exchange the server
sends a message to each selected client, and checks and processes the replies one by one as they arrive: rounds.py. A
method is a subclass that overrides some of the hooks (hooks.py). roster.py knows the connected clients, exchange.py
sends messages and receives replies, checkpoint.py saves the state to disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing, nullcontext
from logging import INFO, WARNING
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore import log

from kindred.messages import RECEIVED, ClientId, check
from kindred.metrics import METRICS
from kindred.registry import REGISTRY
from kindred.settings import (
    AUTO,
    GRACE,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    MAX_CLIENT_SHARE,
    MAX_EMPTY_ROUNDS,
    MAX_LOCAL_EPOCHS,
    MAX_STRIKES,
    MAX_UPDATE_NORM,
    QUORUM,
    SAMPLING,
    SEED,
    SHADOW_LOCAL,
    STOP_AFTER,
    TRAINING,
    WAIT_TIMEOUT,
    meant_by,
)

from .admission import check_initial, integer_ranges
from .checkpoint import Checkpoints, NotResumable
from .empty_rounds import EmptyRounds
from .evaluation import EvaluationPlan
from .exchange import Exchange
from .history import History, progress, title
from .introductions import only_validates
from .metrics import mean_metrics
from .norms import UpdateNorms
from .roster import Roster
from .rounds import Rounds
from .simulated_state import StateFlusher, begin_simulation, end_simulation, simulated
from .status import BETWEEN_ROUNDS, Status
from .times import RESULTS, SERVER
from .validation import Validation

FLOWER_METRICS = (
    "train_metrics_clientapp",
    "evaluate_metrics_clientapp",
    "evaluate_metrics_serverapp",
)  # in Flower's Result


class PersonalizedStrategy(Rounds):
    """Base of all methods: a Flower strategy whose clients each have their own model.

    A method is defined by its hooks: `Hooks` lists them all. Hooks may use the arguments below, and these attributes
    of the run in progress: `roster` (`nodes`: client -> node), `history`, `last_round` and `run_id`.

    Parameters
    ----------
    fraction_train : float (default: 1.0)
        Share of the clients, more than 0, at most 1, that train in a round. Clients that cannot take part, such as
        those without data, count but are not sampled: with 100 clients, a share of 0.1 is 10 clients, or all that can
        take part if these are fewer. If a round trains some of them, all are evaluated once before the first round, so
        that every round's mean accuracy is over the same clients.
    fraction_evaluate : float (default: 1.0)
        Share of the clients, 0 to 1, asked to evaluate after a round, if training replies hold no evaluation.
    min_train_nodes, min_evaluate_nodes : int (default: 2)
        Minimum number of clients that train or evaluate; all clients if there are fewer.
    min_available_nodes : int (default: 2)
        Clients that must be connected and able to take part before a round starts. Clients that are excluded for a
        while (`max_strikes`) count too.
    weighted_by_key : str (default: "num-examples")
        The metric by which averages over clients are weighted. Under another name than the default any number from
        1e-12 to 1e12 is a weight.
    arrayrecord_key, configrecord_key : str (default: "arrays", "config")
        Names of the records in messages to clients.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable, optional
        `(list[RecordDict], weighted_by_key) -> MetricRecord`; by default `mean_metrics`.
    seed : int (default: 0)
        Seed of the server's random draws. The clients sampled in a round depend only on the seed, the round, `sampling`
        and the clients, so that they are the same for all methods.
    sampling : {"default", "uniform", "by-size"}
        How a round's clients are sampled, without replacement: all equally likely; or with probabilities in proportion
        to their numbers of training samples, which they report when they connect. By default as the method's paper
        says: "by-size" in PerFed-CKT, else "uniform". Means over a round's clients are weighted by samples with both.
    max_local_epochs : int (default: 0)
        If not 0, each message's `local-epochs` is drawn uniformly from 1 to this number. The draw depends only on the
        seed, the client and the round, and is thus the same for all methods.
    wait_timeout : float (default: 300.0)
        Seconds to wait for `min_available_nodes` before the run ends with `TooFewClients`, and for the ids of new
        clients.
    quorum : float (default: 0.5)
        Number of clients, as a share of those asked (up to 1) or as a count (2 or more). Once so many have answered,
        the others have `grace` seconds more; with 1 they have until the timeout. Not used in a simulation, because its
        results would depend on the speed of the machine.
    grace : float (default: 600.0)
        Seconds, 0 or more, see `quorum`.
    max_strikes : int (default: 3)
        A client is excluded after so many rounds in a row in which its training reply was refused or did not come. It
        is excluded for as many rounds, and for one round more each time that its next reply fails too. 0 excludes
        nobody.
    max_client_share : float (default: 1.0)
        The largest share of a client, more than 0 and up to 1, in a mean of clients' models that weights them by
        samples. Larger numbers of samples are lowered (`largest_weight`). Up to 1 / share clients have equal weights.
        1 sets no bound: the papers' weights.
    max_update_norm : float or "auto" (default: 0.0)
        The L2 norm, over the parameters, above which an update is refused; see `update_norm`. 0 sets no bound. With
        "auto" no update is refused: those above `norms.BOUND` times the median of comparable updates of the latest
        rounds are scaled down to it. In the first round, all replies are held until the last one has come. "auto" has
        no effect where no update reaches another client's model (`mixes_updates`).
    max_empty_rounds : int (default: 5)
        Rounds in a row without any usable answer, 1 or more, after which the run ends with `TooFewClients`.
    buffers : collection of str, optional
        Names of all entries of the initial model that are not trained; by default those named like the buffers of
        PyTorch's normalisation layers. They are averaged but take no part in distances and cosines.
    metric : str (default: "accuracy")
        The headline metric of the history, one of `kindred.metrics.METRICS` that clients report.
    task : str (default: "")
        Fingerprint of the task that clients must have; "" for any. Clients that report another one take no part.
    stop_after : int (default: 0)
        Rounds in a row, 1 or more, without a better mean of the metric on clients' validation data, after which the run
        ends. 0: never.

    Raises
    ------
    ValueError
        An argument out of range, naming it.
    """

    STATE: tuple[str, ...] = ("history", "run_id", "roster", "norms")

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
        sampling: str = SAMPLING.default,
        max_local_epochs: int = MAX_LOCAL_EPOCHS.default,
        wait_timeout: float = WAIT_TIMEOUT.default,
        quorum: float = QUORUM.default,
        grace: float = GRACE.default,
        max_strikes: int = MAX_STRIKES.default,
        max_client_share: float = MAX_CLIENT_SHARE.default,
        max_update_norm: float | Literal["auto"] = MAX_UPDATE_NORM.default,
        max_empty_rounds: int = MAX_EMPTY_ROUNDS.default,
        buffers: Collection[str] | None = None,
        metric: str = "accuracy",
        task: str = "",
        stop_after: int = STOP_AFTER.default,
    ) -> None:
        check("fraction_train", fraction_train, 0 < fraction_train <= 1, "more than 0, at most 1")
        check("fraction_evaluate", fraction_evaluate, 0 <= fraction_evaluate <= 1, "0 to 1")
        check("min_train_nodes", min_train_nodes, min_train_nodes >= 0, "0 or more")
        check("min_evaluate_nodes", min_evaluate_nodes, min_evaluate_nodes >= 0, "0 or more")
        check("min_available_nodes", min_available_nodes, min_available_nodes >= 1, "1 or more")
        self.fraction_train = fraction_train
        self.fraction_evaluate = fraction_evaluate
        self.min_train_nodes = min_train_nodes
        self.min_evaluate_nodes = min_evaluate_nodes if fraction_evaluate else 0
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or mean_metrics
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or mean_metrics
        self.seed = SEED.check(seed)
        self.sampling = SAMPLING.check(sampling)
        self.max_local_epochs = MAX_LOCAL_EPOCHS.check(max_local_epochs)
        self.quorum = QUORUM.check(quorum)
        self.grace = GRACE.check(grace)
        self.max_client_share = MAX_CLIENT_SHARE.check(max_client_share)
        self.max_update_norm = MAX_UPDATE_NORM.check(max_update_norm)
        self.max_empty_rounds = MAX_EMPTY_ROUNDS.check(max_empty_rounds)
        check("buffers", buffers, not isinstance(buffers, str), "a list of names")
        self.buffers = buffers
        check("metric", metric, metric in METRICS, ", ".join(METRICS))
        self.metric = metric
        self.task = task
        self.stop_after = STOP_AFTER.check(stop_after)
        self.history = History(metric)
        self.min_available_nodes = min_available_nodes
        self.wait_timeout = WAIT_TIMEOUT.check(wait_timeout)
        self.max_strikes = MAX_STRIKES.check(max_strikes)
        self.roster = Roster(min_available_nodes, wait_timeout, max_strikes)
        self.status = Status()  # of the run, for those who look at it
        self.norms = UpdateNorms(bounds=False)
        self.means = []
        self.last_round = 0
        self.run_id = 0

    _validation: Validation

    # --- A run ----------------------------------------------------------------------------------------

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
            Seconds after which an exchange ends with the replies that are in.
        on_round : callable, optional
            Called with the round's number at the end of each round, and of an evaluation after the last one.
        checkpoints : Checkpoints, optional
            Where the state is saved. If a checkpoint exists, the run resumes from it. The results are then the same,
            bit for bit, as without the interruption, provided that all arguments are unchanged. A checkpoint that
            cannot be written does not end the run: a warning is logged, and the state of the next round is written
            instead.

        Returns
        -------
        Result
            Flower's own class. `arrays` is `global_arrays()`; the personal models are in `client_models()`.

        Raises
        ------
        TooFewClients
            Fewer than `min_available_nodes` clients can take part after `wait_timeout` seconds; or no client gave a
            usable answer in any round, or in `max_empty_rounds` rounds in a row. The state is saved before that.
        WorkerDied
            In a simulation: a worker process died. The last saved state is that of the round before, or an earlier
            one.
        NotResumable
            There are checkpoints, but none is intact and of this method and version; or the state of a simulation's
            clients is missing.
        """
        check("num_rounds", num_rounds, num_rounds >= 1, "1 or more")
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        train_config = ConfigRecord({**(train_config or {})})
        evaluate_config = ConfigRecord({**(evaluate_config or {})})
        self._warn_of_unread_settings(train_config)
        result = Result(arrays=initial_arrays)
        trains_alone = bool(SHADOW_LOCAL.read(train_config))
        first = self._begin(grid, result, num_rounds, timeout, checkpoints, trains_alone)
        with checkpoints or nullcontext(), closing(self._validation):
            started = time.monotonic()
            begins = not self.history.rounds and self.first_round > 0  # otherwise round 0 is over, or the method's own
            if evaluate_fn and begins and (metrics := evaluate_fn(0, initial_arrays)) is not None:
                result.evaluate_metrics_serverapp[0] = metrics

            stopped = False
            for server_round in range(first, num_rounds + 1):
                if self.stop_after and self.history.rounds_since_best() >= self.stop_after:
                    num_rounds, stopped = server_round - 1, True
                    log(
                        INFO,
                        "kindred: the run ends after round %d: no better mean on validation data since round %d",
                        num_rounds,
                        num_rounds - self.stop_after,
                    )
                    self.last_round = self.history.stopped_after = num_rounds
                    self._save(num_rounds, result)
                    break
                self._exchange.begin_round()
                self.roster.meet(grid, self.introduce_all, timeout)
                self.history.times.spend_on(SERVER)  # the start-up, if this is the first round, is over
                if begins and server_round == first and self._evaluates_before():
                    self._evaluate(0, self.configure_evaluate(0, result.arrays, evaluate_config, grid), result)
                    self._close_round(grid, 0, None)
                    self._save(0, result)
                    self._exchange.begin_round()
                # Sampled clients get the models to train from; the method processes their replies and ends the round.
                messages = self.configure_train(server_round, result.arrays, train_config, grid)
                replies = self._after_checkpoint(self._exchange.replies(server_round, messages))
                _, metrics = self.aggregate_train(server_round, replies)
                if metrics is not None:
                    result.train_metrics_clientapp[server_round] = metrics
                if self.fraction_evaluate:
                    messages = self.configure_evaluate(server_round, result.arrays, evaluate_config, grid)
                    self._evaluate(server_round, messages, result)
                if server_round >= 1:
                    self._validation.after_round(server_round, self._to_validate(server_round, evaluate_config))
                self._close_round(grid, server_round, on_round)
                if evaluate_fn and (metrics := evaluate_fn(server_round, self.global_arrays())) is not None:
                    result.evaluate_metrics_serverapp[server_round] = metrics
                self._save(server_round, result)
                self._empty_rounds.check()

            self._empty_rounds.check_all(num_rounds)
            if first > num_rounds:  # resumed after its last round: no client has been asked for its id yet
                self.roster.meet(grid, self.introduce_all, timeout)
                self.history.times.spend_on(SERVER)
            clients = self._evaluations.after_last_round(self.roster.active(), self.history, stopped=stopped)
            if self.fraction_evaluate and clients:
                self._evaluate(num_rounds + 1, self._to_evaluate(num_rounds + 1, clients, evaluate_config), result)
                self._close_round(grid, num_rounds + 1, on_round)
            self._validation.finish(num_rounds, self._to_validate(num_rounds, evaluate_config))
            result.arrays = self.global_arrays()
            self._warn_of_results(followed=on_round is not None)
            log(INFO, "%s finished %d rounds in %.1f s", self.name, num_rounds, time.monotonic() - started)
            return result

    def _warn_of_results(self, *, followed: bool) -> None:
        """Warn that the Result has no personal models, and that no client reported the headline metric.

        A caller that has followed the rounds, as this library's own app does, knows where the models are.
        """
        shared = self.shared_rows()
        if not followed and (self.personal != RECEIVED or len(shared.rows) > 1 or 0 < shared.own.mean() < 1):
            log(WARNING, "result.arrays is one model for all; each client's own is in strategy.client_models()")
        if self.fraction_evaluate and (line := self.history.unreported()):
            log(WARNING, "kindred: %s; the strategy's argument metric chooses another one", line)

    def serve(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        checkpoints: Checkpoints,
        train_config: ConfigRecord,
        timeout: float = 3600,
        *,
        after: int | None = None,
    ) -> dict[ClientId, dict[str, float]]:
        """Serve newcomers: clients that took no part in a finished run, whose results do not change.

        Each receives `newcomer_visits` messages to train, as in the rounds after the run's last one. No round is ended,
        so that all other models stay as they are.

        Parameters
        ----------
        grid : Grid
            With the newcomers alone, simulated.
        initial_arrays, train_config, timeout
            As in `start`.
        checkpoints : Checkpoints
            Those of the run, of which the last one is used.
        after : int, optional
            The round that the last one must have.

        Returns
        -------
        dict
            client -> the numbers of its last reply; without clients that gave no usable reply.

        Raises
        ------
        NotResumable
            There is no intact checkpoint of this method and version, or the last one is of another round.
        """
        self._prepare(grid, initial_arrays, timeout)
        self.roster.min_available = 1
        last, _ = self._restore(checkpoints)
        if after not in (None, last):
            raise NotResumable(f"the last checkpoint in {checkpoints.folder} is of round {last}, not of round {after}")
        begin_simulation(grid.run.run_id)
        self.run_id = grid.run.run_id  # newcomers have no state of the run's clients
        self.last_round = last + self.newcomer_visits(last)
        self.begin_visits()
        found: dict[ClientId, dict[str, float]] = {}
        for server_round in range(last + 1, self.last_round + 1):
            self._exchange.begin_round()
            self.roster.meet(grid, self.introduce, timeout)
            messages = self.configure_train(server_round, initial_arrays, train_config, grid)
            replies = self._exchange.replies(server_round, messages)
            for client, reply in self._exchange.admitted(server_round, replies, self._take_training):
                found[client] = reply.numbers()
                self.end_visit(client)
            self.history.close_round(server_round, 0.0, self.personal)
        end_simulation(self.run_id)
        return found

    def _warn_of_unread_settings(self, config: ConfigRecord) -> None:
        """Warn of keys that look like misspelt training settings, and of steps that do not count.

        Other keys may be meant for the user's own client.
        """
        method = REGISTRY.get(self.name)
        own = [each.key for each in method.settings] if method else []
        for key in config.keys() - own:
            meant = meant_by(key, [each.key for each in TRAINING])
            if meant and meant not in config:
                log(
                    WARNING,
                    "kindred: train_config has %s, not %s, which clients of make_client_app read; "
                    "a ClientApp of your own may read %s",
                    key,
                    meant,
                    key,
                )
        if LOCAL_STEPS.key in config.keys() - own and LOCAL_EPOCHS.key not in config:
            log(
                WARNING,
                "kindred: train_config has local-steps, which clients of make_client_app count only if local-epochs "
                "is 0; it is %d by default",
                LOCAL_EPOCHS.default,
            )

    def _begin(
        self,
        grid: Grid,
        result: Result,
        num_rounds: int,
        timeout: float,
        checkpoints: Checkpoints | None,
        trains_alone: bool,
    ) -> int:
        """Begin a run, or resume the one that has checkpoints; return its first round."""
        self._prepare(grid, result.arrays, timeout)
        self.last_round = num_rounds
        self._checkpoints = checkpoints
        first = self.first_round
        if checkpoints and (last := self._resume(checkpoints, result)) is not None:
            first = last + 1
        if simulated(grid):
            folder = checkpoints.folder if checkpoints else None
            # With every method a client keeps its selected model, and one that it trains alone.
            keep_state = self.clients_keep_state or trains_alone or bool(self.history.selected_values())
            begin_simulation(self.run_id, folder, goes_on=first > self.first_round and keep_state)
            if checkpoints:
                checkpoints.flushes["clients' state"] = StateFlusher(self.run_id).flush
        return first

    def _prepare(self, grid: Grid, initial_arrays: ArrayRecord, timeout: float) -> None:
        """Begin with nothing known of earlier rounds."""
        in_simulation = simulated(grid)
        self.history = History(self.metric)
        self.roster.begin(self.history, simulated=in_simulation, status=self.status)
        self.roster.min_available = self.min_available_nodes  # `serve` lowers it
        self.norms = UpdateNorms(bounds=self.max_update_norm == AUTO and self.mixes_updates)
        self.run_id = grid.run.run_id
        self._attempt = time.time_ns()
        self._checkpoints = None
        self._empty_rounds = EmptyRounds(self.max_empty_rounds, self.history)
        self._evaluations = EvaluationPlan(self.personal, self.metric)
        self._exchange = Exchange(
            grid,
            self.roster,
            self.history,
            self.row_fields,
            lambda server_round: title(server_round, self.first_round, self.last_round),
            personal=self.personal,
            timeout=timeout,
            quorum=self.quorum,
            grace=self.grace,
            simulated=in_simulation,
            status=self.status,
        )
        self._validation = Validation(
            grid,
            self.roster,
            self.history,
            self.general_model,
            weighted_by_key=self.weighted_by_key,
            timeout=timeout,
            patience=self.grace,
            simulated=in_simulation,
        )
        check_initial(initial_arrays)
        self._initial_ranges, self._sent_ranges = integer_ranges(initial_arrays), {}
        arrays = {f"array {name!r}": f"{array.dtype} {array.shape}" for name, array in initial_arrays.items()}
        self._identity = {"method": self.name, "number of arrays": len(arrays), **arrays}  # of its checkpoints
        self.begin(initial_arrays)

    def _resume(self, checkpoints: Checkpoints, result: Result) -> int | None:
        """Restore the state of the last checkpoint; return its round, or None if there is none."""
        if checkpoints.oldest is None:
            return None
        last, state = self._restore(checkpoints)
        self._evaluations.restore(state["evaluations"])
        self._empty_rounds.restore(state["empty-rounds"])
        for kind, metrics in state["result"].items():
            vars(result)[kind] = {server_round: MetricRecord(m) for server_round, m in metrics.items()}
        self._attempt = max(self._attempt, state["attempt"] + 1)  # also if this machine's clock is behind
        log(INFO, "kindred: resumes after round %d, from %s", last, checkpoints.folder)
        return last

    def _restore(self, checkpoints: Checkpoints) -> tuple[int, dict[str, Any]]:
        """Restore the method's own state from the last checkpoint; return its round and its whole content."""
        if (found := checkpoints.load()) is None:
            raise NotResumable(f"there is no checkpoint in {checkpoints.folder}")
        last, state = found
        for what, value in state.get("identity", {}).items():
            if value != (own := self._identity.get(what, "none")):
                raise NotResumable(
                    f"round {last} in {checkpoints.folder} was saved by another run: its {what} is {value}, here {own}"
                )
        if differing := state["strategy"].keys() ^ self.state().keys():
            raise NotResumable(
                f"round {last} in {checkpoints.folder} was saved by another method or version: "
                f"only the checkpoint or only this run has {', '.join(sorted(differing))}"
            )
        self.restore(state["strategy"])
        return last, state

    def _save(self, server_round: int, result: Result) -> None:
        """Begin to write a checkpoint if one is due; it always is after the run's last round."""
        last = server_round == self.last_round or self._empty_rounds.too_many
        if self._checkpoints and (last or self._checkpoints.due(server_round)):
            before = self.history.times.spend_on(RESULTS)
            self._checkpoints.begin(
                server_round,
                {
                    "identity": self._identity,
                    "strategy": self,
                    "evaluations": self._evaluations,
                    "empty-rounds": self._empty_rounds,
                    "result": {
                        kind: {number: dict(metrics) for number, metrics in getattr(result, kind).items()}
                        for kind in FLOWER_METRICS
                    },
                    "attempt": self._attempt,
                },
            )
            self.history.times.spend_on(before)

    def _after_checkpoint(self, replies: Iterable[Message]) -> Iterable[Message]:
        """Yield replies, which change the method's state, once that is in the checkpoint that was begun."""
        for reply in replies:
            self._release_state()
            yield reply
        self._release_state()

    def _release_state(self) -> None:
        if self._checkpoints:
            before = self.history.times.spend_on(RESULTS)
            self._checkpoints.release()
            self.history.times.spend_on(before)

    def _evaluate(self, server_round: int, messages: Iterable[Message], result: Result) -> None:
        replies = self._after_checkpoint(self._exchange.replies(server_round, messages))
        metrics = self.aggregate_evaluate(server_round, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[server_round] = metrics

    def _close_round(self, grid: Grid, server_round: int, on_round: Callable[[int], None] | None) -> None:
        self.roster.end_round(grid, server_round)
        line = self.history.close_round(server_round, self.history.times.count_round(), self.personal)
        log(INFO, "%s", progress(line, self.metric, self.first_round, self.last_round))
        self.roster.show(BETWEEN_ROUNDS, title(server_round, self.first_round, self.last_round))
        if on_round:
            before = self.history.times.spend_on(RESULTS)
            on_round(server_round)
            self.history.times.spend_on(before)

    def introduce_all(self, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
        """Check the introductions of new clients, and of new sites that only validate; see `introduce`."""
        self._release_state()
        validators = {client: about for client, about in newcomers.items() if only_validates(about)}
        others = {client: about for client, about in newcomers.items() if client not in validators}
        return self.introduce(others) | self.introduce_validators(validators)

    def summary(self) -> None:
        """Log the settings of this strategy."""
        log(INFO, "\t├──> %s, seed %d", self.name, self.seed)
        log(
            INFO,
            "\t├──> Fraction: train (%.2f) | evaluate (%.2f) | sampling: %s",
            self.fraction_train,
            self.fraction_evaluate,
            self.actual_sampling,
        )
        log(
            INFO,
            "\t├──> Minimum nodes: train (%d) | evaluate (%d) | available (%d)",
            self.min_train_nodes,
            self.min_evaluate_nodes,
            self.min_available_nodes,
        )
        log(
            INFO,
            "\t└──> Keys: '%s', '%s', weighted by '%s'",
            self.arrayrecord_key,
            self.configrecord_key,
            self.weighted_by_key,
        )
