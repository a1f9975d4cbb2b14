"""An exchange with clients: it sends messages, receives replies, and records every message in the history."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from logging import ERROR, WARNING
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from kindred.messages import (
    LOSS,
    NUM_TEST_EXAMPLES,
    PERSONAL,
    PROBE,
    ClientId,
    config_of,
    first_line,
    in_order,
    ordinary_names,
    payload_bytes,
)
from kindred.metrics import METRICS

from .admission import REFUSED, Refused, Reply, raise_own
from .arrivals import counted
from .history import CLOSING, COMPUTE, OPENING, History
from .inline import InlineGrid
from .roster import Roster
from .status import EVALUATES, TRAINS, Status
from .transport import CLOCKS, content_of, is_from, pull, push

ENGINE_COLUMNS = ("round", "client", "status", "seconds", "bytes-down", "bytes-up")  # columns of every row
MOST_NAMED = 20  # clients that a line about lost ones names


@dataclass(frozen=True)
class Sent:
    """A message that has been sent.

    Attributes
    ----------
    client : client id
    node_id : int
    at : float
        Time of sending, in seconds on `time.monotonic`'s clock.
    num_bytes : int
    fields : dict
        The method's fields for the row of the history.
    trains : bool
        Whether the message asks for training; otherwise it asks for an evaluation.
    side : str
        The model's name if the message is for one of `Hooks.side_evaluations`; else empty.
    """

    client: ClientId
    node_id: int
    at: float
    num_bytes: int
    fields: dict[str, Any]
    trains: bool
    side: str


def share_of(share: float, count: int) -> Fraction:
    """Return a share of a count exactly: 0.29 of 100 is 29, where floating-point numbers give a little less."""
    return Fraction(str(float(share))) * count


class Exchange:
    """The exchanges of one run: in each round one of training messages, and mostly one of evaluation messages.

    Parameters
    ----------
    grid : Grid
    roster : Roster
        Knows the clients' nodes, and is informed of clients that give no usable reply.
    history : History
        Receives the rows.
    row_fields : callable
        See `Hooks.row_fields`.
    title : callable
        Returns the name of a round.
    personal : str
        The evaluation in a training reply that is the method's result for the client.
    timeout : float
        Seconds after which an exchange ends with the replies received so far.
    quorum, grace : float
        See `PersonalizedStrategy`.
    simulated : bool
        Whether the clients are on this machine; the quorum is then not used.
    status : Status
        Is informed of the clients that are asked, and of their replies.

    Attributes
    ----------
    replied, not_replied : set of client ids
        Clients that answered in the round in progress, and clients that did not answer in time.
    """

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        history: History,
        row_fields: Callable[[ClientId], dict[str, Any]],
        title: Callable[[int], str],
        *,
        personal: str,
        timeout: float,
        quorum: float,
        grace: float,
        simulated: bool,
        status: Status,
    ) -> None:
        self._grid = grid
        self._roster = roster
        self._history = history
        self._row_fields = row_fields
        self._title = title
        self._personal = personal
        self._timeout = timeout
        self._quorum = quorum
        self._grace = grace
        self._simulated = simulated
        self._status = status
        self.begin_round()
        self._sent: dict[str, Sent] = {}  # messages of the exchange in progress, by their ids
        self._until = 0.0  # end of the exchange in progress, on time.monotonic's clock
        self._cut_short = False  # whether the quorum has moved that end
        self._late: set[str] = set()  # messages of this exchange that were answered after that
        self._traces: set[str] = set()  # where unexpected exceptions were raised
        self._lost: dict[str, list[ClientId]] = {}  # reason -> clients without a usable reply in this exchange

    def begin_round(self) -> None:
        """Forget which clients replied in the last round."""
        self.replied: set[ClientId] = set()
        self.not_replied: set[ClientId] = set()

    # --- Messages and replies -------------------------------------------------------------------------

    def replies(self, server_round: int, messages: Iterable[Message]) -> Iterator[Message]:
        """Send messages and yield the replies as they arrive, until all have arrived or the time is up.

        A reply is identified by the message that it answers, not by the sender that it names. Replies of an earlier
        exchange are therefore never asked for. An error that the SuperLink reports for a dead node counts as that
        node's reply.
        """
        self._until, self._cut_short, self._late = time.monotonic() + self._timeout, False, set()
        self._send(server_round, messages)
        waiting = dict(self._sent)
        clients = {sent.client for sent in waiting.values()}
        count = len(clients | self.replied)  # clients that answered before and are not asked now count too
        self.replied -= clients
        quorum = math.ceil(share_of(self._quorum, count)) if self._quorum <= 1 else min(int(self._quorum), count)
        self._look_for_quorum(quorum)
        what = self._title(server_round)
        if waiting and not any(sent.trains for sent in waiting.values()) and what not in (OPENING, CLOSING):
            what += ", evaluation"
        if self._status.is_kept and waiting:
            kinds = {each.client: TRAINS if each.trains else EVALUATES for each in waiting.values() if not each.side}
            self._status.sent(what, kinds)
        arriving = pull(self._grid, self._sent, lambda: self._until, simulated=self._simulated)
        for message_id, reply in counted(what, self._history.times.waiting(arriving), len(waiting)):
            sent = waiting.pop(message_id)
            if self._cut_short:
                self._late.add(message_id)
            self.replied.add(sent.client)
            if not sent.side:
                self._status.answered(sent.client)
            self._look_for_quorum(quorum)
            if isinstance(reply, Refused):
                self._refuse(sent, server_round, reply, 0)
            else:
                yield reply
        for sent in waiting.values():
            reason = f"no answer within {self._timeout:g} s"
            if self._cut_short:
                reason = f"no answer within {self._grace:g} s after {quorum} of {count} clients (quorum, grace)"
            self._add_row(sent, server_round, reason, 0)
            self.not_replied.add(sent.client)
            self._roster.strikes.failed(sent.client)
        if isinstance(self._grid, InlineGrid):  # no client is to work on them any more; Flower drops them by their ttl
            self._grid.forget(waiting)

    def _send(self, server_round: int, messages: Iterable[Message]) -> None:
        client_of = {node_id: client for client, node_id in self._roster.nodes.items()}
        self._sent = {}
        for message in messages:
            client = client_of[message.metadata.dst_node_id]
            trains = message.metadata.message_type == MessageType.TRAIN
            fields = self._row_fields(client)
            if not trains:  # the row may have fields of training already
                fields = {f"evaluate-{key}": value for key, value in fields.items()}
            size = payload_bytes(message.content)
            side = str(config_of(message.content).get(PROBE, ""))
            sent = Sent(client, message.metadata.dst_node_id, time.monotonic(), size, fields, trains, side)
            message.metadata.ttl = self._timeout + CLOCKS
            message_id = push(self._grid, message, packs=self._roster.is_our_site(sent.node_id))
            if message_id is None:
                self._add_row(replace(sent, fields={}), server_round, "its message could not be sent", 0)
            else:
                self._sent[message_id] = sent

    def _look_for_quorum(self, quorum: int) -> None:
        """Let the exchange end in `grace` seconds if `quorum` clients have answered."""
        until = time.monotonic() + self._grace
        if not self._cut_short and not self._simulated and len(self.replied) >= quorum and until < self._until:
            self._until, self._cut_short = until, True

    # --- Admission ------------------------------------------------------------------------------------

    def preview(self, replies: Iterable[Message], look: Callable[[Sent, RecordDict], object]) -> list[Message]:
        """Wait for all replies, and return them for `admitted`; first call `look` with each that has content."""
        received = list(replies)
        for message in received:
            sent = self._sent[message.metadata.reply_to_message_id]
            if is_from(sent.node_id, message) and not message.has_error():
                with suppress(Refused), self._as_refusal():
                    look(sent, content_of(message))
        return received

    def admitted(
        self, server_round: int, replies: Iterable[Message], take: Callable[[Sent, RecordDict], Reply]
    ) -> Iterator[tuple[ClientId, Reply]]:
        """Yield the replies of clients that can be used, and add a row of the history for every reply.

        Parameters
        ----------
        server_round : int
        replies : iterable of Message
            From `replies`.
        take : callable
            Checks a reply's content and passes it to the method; raises `Refused` if the reply cannot be used. Any
            other exception counts as a refusal too, so that one reply is lost and not the run.

        Yields
        ------
        tuple of client id and Reply
            Replies for `Hooks.side_evaluations` are not among them.
        """
        for message in replies:
            sent = self._sent[message.metadata.reply_to_message_id]
            reply = self._admit(sent, server_round, message, take)
            if reply is not None and not sent.side:
                yield sent.client, reply
        self._name_further_lost(server_round)

    def _admit(
        self, sent: Sent, server_round: int, message: Message, take: Callable[[Sent, RecordDict], Reply]
    ) -> Reply | None:
        if not is_from(sent.node_id, message):  # no strike: it is unknown whose fault this is
            sender = message.metadata.src_node_id
            self._add_row(sent, server_round, f"{REFUSED}it came from node {sender}, expected {sent.node_id}", 0)
            return None
        if message.has_error():
            # The code is Flower's for a reply that was announced and never uploaded. After the quorum any error counts.
            is_late = message.metadata.reply_to_message_id in self._late
            if message.error.code == ErrorCode.MESSAGE_UNAVAILABLE or is_late:
                self._roster.strikes.failed(sent.client)
            reason = f"error {message.error.code}: {first_line(message.error.reason or '')}"
            self._add_row(sent, server_round, reason, 0)
            return None
        content = content_of(message)
        bytes_up = payload_bytes(content)
        try:
            with self._as_refusal():
                reply = take(sent, content)
        except Refused as refusal:
            self._refuse(sent, server_round, refusal, bytes_up)
            return None
        self._roster.strikes.succeeded(sent.client)
        self._add_row(sent, server_round, "ok", bytes_up, self._reported(sent, reply))
        return reply

    @contextmanager
    def _as_refusal(self) -> Iterator[None]:
        """Turn an unexpected exception into a refusal.

        The cause may be a bug in the method, so the traceback is logged, once for each place.
        """
        try:
            yield
        except Refused:
            raise
        except Exception as error:
            raise_own(error)
            trace = "".join(traceback.format_tb(error.__traceback__))
            if trace not in self._traces:
                self._traces.add(trace)
                log(ERROR, "kindred: unexpected exception %s\n%s", type(error).__name__, trace)
            raise Refused(f"it cannot be used ({type(error).__name__}: {error})") from error

    def _refuse(self, sent: Sent, server_round: int, refusal: Refused, bytes_up: int) -> None:
        """Record a refused reply and inform the client; a refused training reply is a strike."""
        self._add_row(sent, server_round, f"{REFUSED}{refusal}", bytes_up)
        self._roster.inform(self._grid, sent.node_id, f"its reply in round {server_round} is not used: {refusal}")
        if sent.trains:
            self._roster.strikes.failed(sent.client)

    def _name_further_lost(self, server_round: int) -> None:
        """Name the clients that are lost for the same reason as another one in the exchange that ends now."""
        for first, *others in self._lost.values():
            if others:
                names = ", ".join(map(str, in_order(others)[:MOST_NAMED])) + (", ..." if others[MOST_NAMED:] else "")
                log(
                    WARNING,
                    "kindred: round %d goes on without %d more clients, for the reason of client %s: %s",
                    server_round,
                    len(others),
                    first,
                    names,
                )
        self._lost = {}

    # --- Rows of the history --------------------------------------------------------------------------

    def _reported(self, sent: Sent, reply: Reply) -> dict[str, int | float]:
        """Return a reply's numbers for its row; for a side evaluation the loss and the samples processed."""
        numbers = reply.numbers()
        if sent.side:
            return {f"{sent.side}-loss": reply.loss(), **{key: numbers[key] for key in COMPUTE if key in numbers}}
        numbers = {key: value for key, value in numbers.items() if not key.startswith((f"{PERSONAL}-", "evaluate-"))}
        return numbers

    def _add_row(
        self, sent: Sent, server_round: int, status: str, bytes_up: int, numbers: Mapping[str, Any] | None = None
    ) -> None:
        numbers = numbers or {}
        reported = set() if sent.side else numbers.keys() - sent.fields.keys() - set(ENGINE_COLUMNS)
        if status != "ok":
            status = first_line(status)
        if not sent.side:
            self._status.answered(sent.client, status)
        if status != "ok":
            lost = self._lost.setdefault(status, [])
            lost.append(sent.client)
            if len(lost) == 1:  # others with the same reason follow in one line
                log(WARNING, "kindred: round %d goes on without client %s: %s", server_round, sent.client, status)
            if sent.side:  # replies of an exchange arrive in any order, so each has its own column
                numbers, status = {f"{sent.side}-status": status}, "ok"
        own = (server_round, sent.client, status, time.monotonic() - sent.at, sent.num_bytes, bytes_up)
        # Whatever names a client gives its metrics, it cannot overwrite the columns that follow.
        row = {**numbers, **sent.fields, **dict(zip(ENGINE_COLUMNS, own, strict=True))}
        # A separate evaluation is that of the personal model, under the names that ordinary evaluate functions use.
        evaluated = status == "ok" and bool(numbers) and not sent.trains and not sent.side
        results = METRICS if numbers.get(NUM_TEST_EXAMPLES) != 0 else {}  # without test samples there is none
        for name, metric in results.items():
            for key in ordinary_names(name) if evaluated else (f"{self._personal}-{name}",):
                if key in row:
                    if name == LOSS or metric.holds(row[key]):
                        row[f"{PERSONAL}-{name}"] = float(row[key])
                    elif name == self._history.metric:
                        self._history.record_invalid(sent.client, row[key])
                    break
        self._history.add(row, reported)
