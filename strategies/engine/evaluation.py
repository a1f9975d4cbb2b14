"""The choice of clients that are asked to evaluate: before the first round, after each round, after the last one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kindred.messages import AFTER_TRAINING, LOSS, ClientId

from .history import History


class EvaluationPlan:
    """The plan of a run's separate evaluations, for results that training replies do not hold.

    | when | asked | why |
    | --- | --- | --- |
    | before the first round, if rounds sample some of the clients | all clients; where the method has an exchange before the training rounds, those whose replies in it lack the result | every round's mean is then over the same clients |
    | after a round in which no training reply has the method's result | clients sampled for evaluation | there is no other result |
    | after any other round | of these, the clients that trained and did not report the result | the others have reported it, or keep their last result |
    | after the last round, if training gives the result (`AFTER_TRAINING`) | clients that were not asked in that round; all, if nobody knew that it was the last | they report all metrics only at the end, and predictions are kept only then |
    | after the last round, otherwise | clients not evaluated separately in that round | a training reply reports on the model that the round started from |

    A client that did not answer a message of a round is not asked again in that round.

    Parameters
    ----------
    personal : str
        The evaluation that is the method's result for a client.
    metric : str
        The headline metric.
    """  # noqa: E501  # lines of a table

    def __init__(self, personal: str, metric: str) -> None:
        self._personal, self._metric = personal, metric
        self._evaluated: set[ClientId] = set()  # clients evaluated separately since the last training
        self._with_result: set[ClientId] = set()  # clients whose last training replies held the result
        self._without_result: set[ClientId] | None = None  # clients that may be asked in this round; None: all

    def state(self) -> set[ClientId]:
        """Return what `restore` needs, between two rounds."""
        return self._evaluated

    def restore(self, state: set[ClientId]) -> None:
        """Resume from what `state` returned."""
        self._evaluated = state

    def has_result(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the metrics of a training reply hold the method's result.

        The loss alone is a result of test samples that do not define the headline metric.
        """
        return any(f"{self._personal}-{name}" in metrics for name in (self._metric, LOSS))

    def trained(self, answered: Collection[ClientId], with_result: Collection[ClientId]) -> None:
        """Record which clients answered a round's training, and which of them reported the method's result."""
        self._evaluated = set()
        self._with_result = set(with_result)
        self._without_result = set(answered) - self._with_result if with_result else None

    def evaluated(self, client: ClientId) -> None:
        """Record that a client's personal model was evaluated separately."""
        self._evaluated.add(client)

    def before_first_round(self, active: Sequence[ClientId], not_replied: Collection[ClientId]) -> list[ClientId]:
        """Return the clients to ask before the first training round, among those that a round can ask."""
        return [client for client in active if client not in not_replied and client not in self._with_result]

    def after_round(self, sampled: Sequence[ClientId], not_replied: Collection[ClientId]) -> list[ClientId]:
        """Return the clients to ask after a round, among those that were sampled for evaluation."""
        may_be_asked = self._without_result
        return [
            client
            for client in sampled
            if client not in not_replied and (may_be_asked is None or client in may_be_asked)
        ]

    def after_last_round(self, active: Sequence[ClientId], history: History, *, stopped: bool) -> list[ClientId]:
        """Return the clients to ask in the closing evaluation, among those that a round can ask.

        `stopped` says that the run ended early, so that no message of the last round said that it was the last.
        """
        if self._personal in AFTER_TRAINING and stopped:
            known = set()
        elif self._personal in AFTER_TRAINING:
            last = history.rounds[-1]["round"] if history.rounds else 0
            known = {row["client"] for row in history.rows if row["round"] == max(last, 1)}
        else:
            known = self._evaluated
        return [client for client in active if client not in known]
