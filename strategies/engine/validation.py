"""Sites that only validate: after each round they evaluate the global model, and no round waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from kindred.messages import (
    ARRAYS,
    CONFIG,
    NETWORK,
    NUM_TEST_EXAMPLES,
    ClientId,
    first_line,
    in_order,
    ordinary_names,
    payload_bytes,
    records_of,
)
from kindred.metrics import METRICS

from .admission import REFUSED, Refused, admit_evaluation, raise_own
from .history import History
from .roster import Roster
from .transport import CLOCKS, content_of, is_from, pull, push, source_of

NO_MODEL = "no global model"  # status of a site in a run whose method has none


@dataclass(frozen=True)
class _Asked:
    client: ClientId
    node: int
    server_round: int
    at: float  # on time.monotonic's clock
    num_bytes: int


class Validation:
    """The evaluations of a run at sites that only validate.

    A site that has not replied yet is not asked again, until the end of the run. In a simulation its reply is awaited.

    Parameters
    ----------
    grid : Grid
    roster : Roster
        Knows these sites.
    history : History
        Receives a row for each site and round, in `validations`.
    model_of : callable
        See `Hooks.general_model`.
    weighted_by_key : str
        The metric that counts a site's samples.
    timeout : float
        Seconds after which a reply is no longer expected.
    patience : float
        Seconds to wait for the last replies at the end of a run, at most `timeout`.
    simulated : bool
    """

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        history: History,
        model_of: Callable[[str], ArrayRecord | None],
        *,
        weighted_by_key: str,
        timeout: float,
        patience: float,
        simulated: bool,
    ) -> None:
        self._grid = grid
        self._roster = roster
        self._history = history
        self._model_of = model_of
        self._weighted_by_key = weighted_by_key
        self._timeout = timeout
        self._patience = min(patience, timeout)
        self._simulated = simulated
        self._waiting: dict[str, _Asked] = {}
        self._source = source_of(grid, simulated=simulated)

    def after_round(self, server_round: int, config: ConfigRecord) -> None:
        """Record the replies that have arrived, and send the model of this round to the sites.

        Parameters
        ----------
        server_round : int
        config : ConfigRecord
            The settings to send with the model.
        """
        self._collect(time.monotonic())
        busy = {asked.client for asked in self._waiting.values()}
        done = {row["client"] for row in self._history.validations if row["round"] >= server_round}
        for client in in_order(self._roster.unfit_validators.keys() - done):
            self._add(client, server_round, f"excluded: {self._roster.unfit_validators[client]}")
        models: dict[str, ArrayRecord | None] = {}
        for client in in_order(self._roster.validators.keys() - busy - done):
            about = self._roster.validator(client)
            network = str(about.get(NETWORK, ""))
            if network not in models:
                models[network] = self._model(network)
            if (model := models[network]) is None:
                self._add(client, server_round, NO_MODEL, numbers={NUM_TEST_EXAMPLES: about.get(NUM_TEST_EXAMPLES)})
            else:
                self._ask(client, server_round, RecordDict({ARRAYS: model, CONFIG: config}))
        self._collect(time.monotonic() + (self._timeout if self._simulated else 0))

    def finish(self, server_round: int, config: ConfigRecord) -> None:
        """Wait for the replies that are due, and have every site evaluate the model of the last round."""
        until = time.monotonic() + self._patience
        self._collect(until)
        self.after_round(server_round, config)
        self._collect(until)
        for asked in self._waiting.values():
            self._add(asked.client, asked.server_round, "no answer by the end of the run", asked.num_bytes)
        self._waiting = {}

    def close(self) -> None:
        """End requests for replies that sites have announced and not uploaded."""
        self._source.over.set()

    def _model(self, network: str) -> ArrayRecord | None:
        try:
            return self._model_of(network)
        except Exception as error:  # sites that only validate never end a run
            raise_own(error)
            log(WARNING, "kindred: there is no model to validate (%s: %s)", type(error).__name__, error)
            return None

    def _ask(self, client: ClientId, server_round: int, content: RecordDict) -> None:
        node = self._roster.validators[client]
        message = Message(content, node, MessageType.EVALUATE, group_id=str(server_round), ttl=self._timeout + CLOCKS)
        size = payload_bytes(content)
        if (message_id := push(self._grid, message, packs=self._roster.is_our_site(node))) is None:
            self._add(client, server_round, "its message could not be sent", size)
        else:
            self._waiting[message_id] = _Asked(client, node, server_round, time.monotonic(), size)

    def _collect(self, until: float) -> None:
        """Record the replies that have arrived or arrive by this time, and those no longer expected."""
        replies = pull(self._grid, list(self._waiting), lambda: until, simulated=self._simulated, source=self._source)
        for message_id, reply in replies:
            self._record(self._waiting.pop(message_id), reply)
        connected = set(self._roster.validators.values())
        for message_id, asked in list(self._waiting.items()):
            late = time.monotonic() - asked.at >= self._timeout
            if late or asked.node not in connected:
                del self._waiting[message_id]
                reason = f"no answer within {self._timeout:g} s" if late else "it has disconnected"
                self._add(asked.client, asked.server_round, reason, asked.num_bytes)

    def _record(self, asked: _Asked, reply: Message | Refused) -> None:
        """Check a reply, and add its row."""
        size, numbers = 0, {}
        try:
            if isinstance(reply, Refused):
                raise reply
            if not is_from(asked.node, reply):
                raise Refused(f"it came from node {reply.metadata.src_node_id}, expected {asked.node}")
            if reply.has_error():
                status = f"error {reply.error.code}: {first_line(reply.error.reason or '')}"
                self._add(asked.client, asked.server_round, status, asked.num_bytes)
                return
            content = content_of(reply)
            size = payload_bytes(content)
            numbers = self._numbers(content)
            status = "ok"
        except Exception as error:  # sites that only validate never end a run
            raise_own(error)
            why = error if isinstance(error, Refused) else f"it cannot be used ({type(error).__name__}: {error})"
            status = f"{REFUSED}{why}"
            self._roster.inform(self._grid, asked.node, f"its reply in round {asked.server_round} is not used: {why}")
        self._add(asked.client, asked.server_round, status, asked.num_bytes, size, numbers)

    def _numbers(self, content: RecordDict) -> dict[str, Any]:
        """Return a reply's number of samples and its metrics, by their names in `METRICS`."""
        if records_of(content, ArrayRecord):
            raise Refused("it has arrays, allowed from a site that only validates: numbers")
        found = admit_evaluation(content, self._weighted_by_key).numbers()
        if not found[NUM_TEST_EXAMPLES]:
            raise Refused(f"{NUM_TEST_EXAMPLES} is 0, allowed: 1 or more")
        values = {name: next((found[key] for key in ordinary_names(name) if key in found), None) for name in METRICS}
        return {NUM_TEST_EXAMPLES: int(found[NUM_TEST_EXAMPLES])} | {
            name: float(value) for name, value in values.items() if METRICS[name].holds(value)
        }

    def _add(
        self,
        client: ClientId,
        server_round: int,
        status: str,
        bytes_down: int = 0,
        bytes_up: int = 0,
        numbers: dict[str, Any] | None = None,
    ) -> None:
        status = first_line(status)
        before = next((row for row in reversed(self._history.validations) if row["client"] == client), None)
        if status != "ok" and not (before and before["status"] == status):
            log(WARNING, "kindred: site %s, which only validates, in round %d: %s", client, server_round, status)
        self._history.validations.append(
            {
                "round": server_round,
                "client": client,
                "status": status,
                "bytes-down": bytes_down,
                "bytes-up": bytes_up,
                **(numbers or {}),
            }
        )
