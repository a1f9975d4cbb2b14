"""The in-process engine: a Flower Grid that runs the ClientApp in the strategy's process.

It exchanges the same messages in one process, with no worker and no copy between processes. It suits debugging with
breakpoints, tests, and one fast GPU that holds all clients' data. A client works when its reply is asked for.
"""

from __future__ import annotations

import itertools
import secrets
import traceback
from collections.abc import Iterable, Mapping, Sequence, Set
from logging import DEBUG, ERROR
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from kindred.interrupts import raise_interrupt

FIRST_NODE_ID = 1001  # Flower keeps 1 for the SuperLink


class InlineGrid(Grid):
    """A Grid of `num_clients` nodes in this process.

    Parameters
    ----------
    client_app : ClientApp
        The ClientApp that each node runs.
    num_clients : int
        Number of nodes; node i has the node config `partition-id` = i, `num-partitions` = num_clients.
    run_config : mapping, optional
        The run config that the ClientApp sees.
    node_configs : sequence of mapping, optional
        The node config of each node, in place of that above.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: Mapping[str, Any] | None = None,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._client_app = client_app
        if node_configs is None:
            node_configs = [{"partition-id": i, "num-partitions": num_clients} for i in range(num_clients)]
        run_id = secrets.randbits(63)  # random, as Flower's: clients save their state under the run's id
        self._contexts = {
            FIRST_NODE_ID + i: Context(
                run_id=run_id,
                node_id=FIRST_NODE_ID + i,
                state=RecordDict(),
                run_config=dict(run_config or {}),
                node_config=dict(node_config),
            )
            for i, node_config in enumerate(node_configs)
        }
        self._waiting: dict[str, Message] = {}
        self._numbers = itertools.count(1)
        self._run = Run.create_empty(run_id=run_id)
        identify(run_id)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message_id = str(next(self._numbers))
            message.metadata.__dict__["_message_id"] = message_id
            self._waiting[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the first of these nodes that has not answered yet, and return only its reply."""
        wanted = message_ids if isinstance(message_ids, Set) else set(message_ids)
        message_id = next((waiting for waiting in self._waiting if waiting in wanted), None)
        return [] if message_id is None else [self._answer(self._waiting.pop(message_id))]

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop messages that have not been answered: nobody waits for their replies any more."""
        for message_id in message_ids:
            self._waiting.pop(message_id, None)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        ids = list(self.push_messages(messages))
        return [reply for message_id in ids for reply in self.pull_messages([message_id])]

    def _answer(self, message: Message) -> Message:
        # Messages may share records: a client's changes to its records must not affect the others.
        message.content = RecordDict({name: _copy(record) for name, record in message.content.items()})
        return answer(self._client_app, message, self._contexts[message.metadata.dst_node_id])


def identify(run_id: int) -> None:
    """Set TaskIdentity, from which messages take their sender; outside Flower's engine nobody else does."""
    for name, value in (("task_id", 1), ("run_id", run_id), ("node_id", 1)):
        if getattr(TaskIdentity, f"_{name}") is None:
            setattr(TaskIdentity, name, value)


def answer(client_app: ClientApp, message: Message, context: Context) -> Message:
    """Return a ClientApp's reply to a message, or an error if it raised one, ended Python or returned anything else."""
    try:
        reply: object = client_app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"its ClientApp returned {type(reply).__name__}, allowed: a Message")
        return reply
    except (Exception, SystemExit) as error:  # a client's failure must not end the round
        raise_interrupt(error)
        # A ClientApp need not know a query, so its failure is logged as debug.
        asked = message.metadata.message_type.startswith(MessageType.QUERY)
        log(DEBUG if asked else ERROR, "%s", traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _copy(record: ArrayRecord | MetricRecord | ConfigRecord) -> ArrayRecord | MetricRecord | ConfigRecord:
    match record:
        case ArrayRecord():
            return ArrayRecord(dict(record))
        case MetricRecord():
            return MetricRecord(dict(record))
        case _:
            return ConfigRecord(dict(record))
