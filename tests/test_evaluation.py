"""The evaluation plan: which clients evaluate which models, and how long a run continues without replies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from kindred import History, InlineGrid, Local, TooFewClients
from kindred.engine.admission import Refused, Reply, admit
from kindred.engine.empty_rounds import EmptyRounds
from kindred.engine.evaluation import EvaluationPlan
from kindred.engine.history import progress
from kindred.engine.hooks import SideEvaluation
from kindred.messages import RECEIVED, TRAINED, ClientId

from .client_apps import initial, plain_app
from .grids import FaultyGrid

CLIENTS = [1, 2, 3, 4]


def test_only_clients_whose_training_replies_lack_the_result_are_asked_for_it() -> None:
    plan = EvaluationPlan(TRAINED, "accuracy")
    assert plan.has_result({"trained-accuracy": 0.5}) and not plan.has_result({"received-accuracy": 0.5})
    plan.trained(answered=[1, 2, 3], with_result=[])
    assert plan.after_round([1, 2, 4], not_replied={2}) == [1, 4]  # no client reported it: all sampled clients
    plan.trained(answered=[1, 2, 3], with_result=[1])
    assert plan.after_round(CLIENTS, not_replied=set()) == [2, 3]  # 4 did not train and keeps its last result
    plan.trained(answered=[1, 2, 3], with_result=[1, 2, 3])
    assert plan.after_round(CLIENTS, not_replied=set()) == []


def test_the_closing_evaluation_covers_models_without_a_report() -> None:
    history = History()
    history.rows = [{"round": 0, "client": client} for client in CLIENTS]  # of the evaluation before the first round
    history.rows += [{"round": 1, "client": 1, "status": "ok"}, {"round": 1, "client": 3, "status": "ok"}]
    history.rounds = [{"round": 0}, {"round": 1}]
    trained, received = EvaluationPlan(TRAINED, "accuracy"), EvaluationPlan(RECEIVED, "accuracy")
    for plan in (trained, received):
        plan.evaluated(4)
        plan.trained(answered=[1, 3], with_result=[1])
        plan.evaluated(3)
    assert trained.after_last_round(CLIENTS, history, stopped=False) == [2, 4]  # never sampled
    assert trained.after_last_round(CLIENTS, history, stopped=True) == CLIENTS  # nobody knew that it was the last
    for stopped in (False, True):
        assert received.after_last_round(CLIENTS, history, stopped=stopped) == [1, 2, 4]  # since the last training
    resumed = EvaluationPlan(RECEIVED, "accuracy")
    resumed.restore(received.state())
    assert resumed.after_last_round(CLIENTS, history, stopped=False) == [1, 2, 4]
    history.rows += [{"round": 2, "client": 1, "status": "ok"}, {"round": 2, "client": 4, "status": "error 2"}]
    history.rounds.append({"round": 2})
    assert trained.after_last_round(CLIENTS, history, stopped=False) == [2, 3]  # only the last round has all metrics


def test_before_the_first_round_all_clients_without_a_result_are_asked() -> None:
    plan = EvaluationPlan(TRAINED, "accuracy")
    assert plan.before_first_round(CLIENTS, not_replied=set()) == CLIENTS
    plan.trained(answered=[1, 2], with_result=[2])  # in an exchange before the training rounds
    assert plan.before_first_round(CLIENTS, not_replied={3}) == [1, 4]


def reporting_app(before: Sequence[float], after: Mapping[int, float]) -> ClientApp:
    """Return clients that report the accuracy `before[client]`, and in the training of a round `after[round]`."""
    app = ClientApp()

    def reply(message: Message, arrays: ArrayRecord | None, **metrics: float) -> Message:
        records = {"metrics": MetricRecord(metrics)} | ({} if arrays is None else {"arrays": arrays})
        return Message(RecordDict(records), reply_to=message)

    @app.train()
    def train(message, context):
        accuracy = {"trained-accuracy": after[message.content["config"]["server-round"]]}
        return reply(message, message.content["arrays"], **accuracy, **{"num-examples": 1, "num-test-examples": 1})

    @app.evaluate()
    def evaluate(message, context):
        return reply(message, None, **{"accuracy": before[context.node_config["partition-id"]], "num-examples": 1})

    return app


ONE_OF_THREE = {"fraction_train": 0.4, "min_train_nodes": 1}


def test_the_best_of_a_run_with_sampled_clients_stands() -> None:
    before, after = [0.1, 0.2, 0.6], {1: 0.9, 2: 0.0, 3: 0.3, 4: 0.1}
    strategy = Local(**ONE_OF_THREE, seed=4)
    strategy.start(InlineGrid(reporting_app(before, after), 3), initial(), 4)
    drawn = [[row["client"] - 1001 for row in strategy.history.rows if row["round"] == r] for r in range(6)]
    assert drawn == [[0, 1, 2], [1], [1], [0], [1], [0, 2]]  # all but those of the last round are evaluated at the end
    lines = strategy.history.rounds
    assert [line["evaluated"] for line in lines] == [3] * 6
    means = [0.9 / 3, (0.1 + 0.9 + 0.6) / 3, (0.1 + 0 + 0.6) / 3, (0.3 + 0 + 0.6) / 3, (0.3 + 0.1 + 0.6) / 3]
    means.append((0.1 + 0.1 + 0.6) / 3)  # these clients report again what they did before training
    assert [line["accuracy"] for line in lines] == pytest.approx(means)
    assert [line["accuracy-best"] for line in lines] == pytest.approx([means[0], *[means[1]] * 5])
    assert [progress(line, "accuracy", strategy.first_round, 4).split("  ")[0] for line in lines] == [
        "opening evaluation",
        *(f"round {r}/4" for r in (1, 2, 3, 4)),
        "closing evaluation",
    ]


@pytest.mark.parametrize("settings", [{}, {"min_train_nodes": 3, "fraction_train": 0.1}, {"fraction_evaluate": 0}])
def test_nothing_is_evaluated_before_a_run_with_all_clients_or_without_evaluations(settings) -> None:
    strategy = Local(**(ONE_OF_THREE if "fraction_evaluate" in settings else {}) | settings)
    strategy.start(InlineGrid(reporting_app([0.1] * 3, {1: 0.5}), 3), initial(), 1)
    assert [line["round"] for line in strategy.history.rounds] == [1]


class Joining(InlineGrid):
    """The last node connects when the server has sent messages of round 2."""

    joined = False

    def get_node_ids(self):
        return list(super().get_node_ids())[: None if self.joined else -1]

    def push_messages(self, messages):
        messages = list(messages)
        self.joined = self.joined or any(message.metadata.group_id == "2" for message in messages)
        return super().push_messages(messages)


def test_the_best_of_a_run_stands_when_a_client_joins_later() -> None:
    strategy = Local(**ONE_OF_THREE, seed=4)
    after = {1: 0.9, 2: 0.8, 3: 0.7, 4: 0.6, 5: 0.5, 6: 0.4}
    strategy.start(Joining(reporting_app([0.5, 0.5, 0.0], after), 3), initial(), 6)
    lines = strategy.history.rounds
    assert lines[0]["asked"] == 2
    assert [line["evaluated"] for line in lines] == sorted(line["evaluated"] for line in lines)
    assert {line["evaluated"] for line in lines} == {2, 3}
    assert [line["accuracy-best"] for line in lines] == np.maximum.accumulate(
        [line["accuracy"] for line in lines]
    ).tolist()
    assert lines[-1]["accuracy"] < lines[-1]["accuracy-best"]


def test_a_silent_client_delays_the_evaluation_before_the_first_round_only() -> None:
    class Silent(InlineGrid):
        def pull_messages(self, message_ids):
            silent = {
                message_id
                for message_id, message in self._waiting.items()
                if message.metadata.group_id == "0" and message.metadata.dst_node_id == 1002
            }
            return super().pull_messages([message_id for message_id in message_ids if message_id not in silent])

    strategy = Local(fraction_train=0.7, seed=4)
    strategy.start(Silent(reporting_app([0.1, 0.2, 0.6], {1: 0.9}), 3), initial(), 1, timeout=0.3)
    rows = {(row["round"], row["client"]): row["status"] for row in strategy.history.rows}
    assert rows[0, 1002] == "no answer within 0.3 s" and rows[1, 1002] == "ok"
    assert [line["evaluated"] for line in strategy.history.rounds][:2] == [2, 3]


class Recording(Local):
    """Has side evaluations in every round, and records what the engine calls it with."""

    def begin(self, initial_arrays: ArrayRecord) -> None:
        super().begin(initial_arrays)
        self.called: list[tuple[str, int]] = []

    def side_evaluations(self, server_round: int) -> Iterator[SideEvaluation]:
        self.called.append(("side", server_round))
        return iter(())

    def take_evaluation(self, client: ClientId, reply: Reply) -> None:
        self.called.append(("evaluation", client))


def test_a_method_receives_nothing_of_the_evaluation_before_the_first_round() -> None:
    strategy = Recording(**ONE_OF_THREE, seed=4)
    strategy.start(InlineGrid(reporting_app([0.1, 0.2, 0.6], {1: 0.9}), 3), initial(), 1)
    assert strategy.called == [("side", 1), ("side", 2), ("evaluation", 1001), ("evaluation", 1003)]


def test_the_best_mean_does_not_restart_with_the_number_of_clients() -> None:
    history = History()
    row = {"status": "ok", "seconds": 1.0, "bytes-down": 1, "bytes-up": 1}
    for number, reports in enumerate(({1: 0.9, 2: 0.7}, {3: 0.2}, {3: 0.8}, {4: 0.9}), start=1):
        for client, accuracy in reports.items():
            history.add({**row, "round": number, "client": client, "personal-accuracy": accuracy})
        history.close_round(number, 1.0, TRAINED)
    assert [line["accuracy"] for line in history.rounds] == pytest.approx([0.8, 0.6, 0.8, 0.825])
    assert [line["accuracy-best"] for line in history.rounds] == pytest.approx([0.8, 0.8, 0.8, 0.825])


def test_a_round_that_no_client_finished_has_no_best_mean_of_its_own() -> None:
    history = History()
    row = {"client": 1, "seconds": 1.0, "bytes-down": 1, "bytes-up": 1}
    for number, (status, accuracy) in enumerate((("refused: x", 0.9), ("ok", 0.6), ("refused: x", 0.9)), start=1):
        history.add({**row, "round": number, "status": status, "personal-accuracy": accuracy})
        history.close_round(number, 1.0, TRAINED)
    assert [line.get("accuracy-best") for line in history.rounds] == [None, 0.6, 0.6]
    said = [progress(line, "accuracy", 1, 3) for line in history.rounds]
    assert "accuracy" not in said[0] and "best 60.0%" in said[1] and "best 60.0%" in said[2]


class Asking(Local):
    """Has every client evaluate the initial model in round 2, including one that is not connected."""

    def side_evaluations(self, server_round: int) -> Iterator[SideEvaluation]:
        for client in [*self.clients(), 9] if server_round == 2 else []:
            yield SideEvaluation(client, "first", initial(), {"proximal-mu": 7.0})

    def take_side_loss(self, client: ClientId, name: str, loss: float) -> None:
        self.losses = {**getattr(self, "losses", {}), (client, name): loss}


def test_a_method_can_have_clients_evaluate_any_models() -> None:
    asked = []

    class Noting(FaultyGrid):
        def push_messages(self, messages):
            messages = list(messages)
            for message in messages:
                config = message.content.get("config", ConfigRecord())
                if "probed-model" in config:
                    asked.append((message.metadata.dst_node_id, config["probed-model"], config["proximal-mu"]))
            return super().push_messages(messages)

    strategy = Asking()
    fate = {(2, 1): "silent"}
    grid = Noting(plain_app(), 3, lambda server_round, client: fate.get((server_round, client), "ok"))
    strategy.start(grid, initial(), 3, timeout=0.3)
    assert asked == [(1001, "first", 7.0), (1003, "first", 7.0)]  # 1002 did not reply, 9 is not connected
    first = {(1001, "first"): 4 * 1.0**2, (1003, "first"): 4 * 2.02**2}  # 2 x 2 weights of 0, squared to the targets
    assert strategy.losses == pytest.approx(first)
    rows = {(row["round"], row["client"]): row for row in strategy.history.rows}
    assert {key for key, row in rows.items() if "first-loss" in row} == {(2, 1001), (2, 1003)}
    row = rows[2, 1003]
    assert row["first-loss"] == pytest.approx(4 * 2.02**2)
    assert row["personal-loss"] == row["eval_loss"] < row["first-loss"]  # of its own model


def test_a_run_ends_after_too_many_rounds_without_replies() -> None:
    history = History()
    rounds = EmptyRounds(2, history)
    rounds.count(1, answered=True)
    rounds.count(2, answered=True, failure="round 2 could not be ended")
    rounds.check()
    rounds.count(3, answered=False)
    assert rounds.too_many
    with pytest.raises(TooFewClients, match="in 2 rounds in a row .* no client was asked"):
        rounds.check()
    rounds.check_all(3)
    resumed = EmptyRounds(2, history)
    resumed.restore(rounds.state())  # the count that ended the run starts again
    resumed.check()
    resumed.check_all(3)
    resumed.count(4, answered=False)
    resumed.count(5, answered=True)
    assert not resumed.too_many
    with pytest.raises(TooFewClients, match="in any of the 3 rounds"):
        EmptyRounds(2, history).check_all(3)


def reply_of(**metrics: float | list[float]) -> Reply:
    return admit(RecordDict({"m": MetricRecord({"n": 3, **metrics})}), "n")


def test_the_numbers_of_a_reply_are_read() -> None:
    reply = reply_of(share=0.5, each=[1.0, 2.0], eval_loss=2)
    assert (reply.number("n"), reply.number("share"), reply.loss()) == (3.0, 0.5, 2.0)
    assert type(reply.number("n")) is float
    assert reply.numbers() == {"n": 3, "share": 0.5, "eval_loss": 2}
    for name, said in (("each", r"\[1.0, 2.0\]"), ("none", "None")):
        with pytest.raises(Refused, match=f"its {name} is {said}, expected a number"):
            reply.number(name)


@pytest.mark.parametrize("metrics", [{}, {"loss": float("nan")}, {"loss": [1.0]}])
def test_a_loss_is_one_finite_number(metrics) -> None:
    with pytest.raises(Refused, match="its loss is .*, expected a finite number"):
        reply_of(**metrics).loss()


def test_after_an_opening_evaluation_alone_all_clients_are_asked() -> None:
    history = History()
    history.rows, history.rounds = [{"round": 0, "client": 1}, {"round": 0, "client": 2}], [{"round": 0}]
    assert EvaluationPlan(TRAINED, "accuracy").after_last_round([1, 2], history, stopped=False) == [1, 2]
