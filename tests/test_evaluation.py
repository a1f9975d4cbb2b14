"""The evaluation plan: which clients evaluate which models, and how long a run continues without replies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from kindred import History, Local, TooFewClients
from kindred.engine.admission import Refused, Reply, admit
from kindred.engine.empty_rounds import EmptyRounds
from kindred.engine.evaluation import EvaluationPlan
from kindred.engine.hooks import SideEvaluation
from kindred.messages import RECEIVED, TRAINED, ClientId

from .client_apps import initial, plain_app
from .grids import FaultyGrid

CLIENTS = [1, 2, 3, 4]


def test_only_clients_whose_training_replies_lack_the_result_are_asked_for_it() -> None:
    plan = EvaluationPlan(TRAINED)
    assert plan.has_result({"trained-accuracy": 0.5}) and not plan.has_result({"received-accuracy": 0.5})
    plan.trained(answered=[1, 2, 3], with_result=[])
    assert plan.after_round([1, 2, 4], not_replied={2}) == [1, 4]  # no client reported it: all sampled clients
    plan.trained(answered=[1, 2, 3], with_result=[1])
    assert plan.after_round(CLIENTS, not_replied=set()) == [2, 3]  # 4 did not train and keeps its last result
    plan.trained(answered=[1, 2, 3], with_result=[1, 2, 3])
    assert plan.after_round(CLIENTS, not_replied=set()) == []


def test_the_closing_evaluation_covers_models_without_a_report() -> None:
    history = History()
    history.rows = [{"client": 1}, {"client": 3}]
    trained, received = EvaluationPlan(TRAINED), EvaluationPlan(RECEIVED)
    for plan in (trained, received):
        plan.evaluated(4)
        plan.trained(answered=[1, 3], with_result=[1])
        plan.evaluated(3)
    assert trained.after_last_round(CLIENTS, history) == [2, 4]  # never sampled
    assert received.after_last_round(CLIENTS, history) == [1, 2, 4]  # not evaluated since the last training
    resumed = EvaluationPlan(RECEIVED)
    resumed.restore(received.state())
    assert resumed.after_last_round(CLIENTS, history) == [1, 2, 4]


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
