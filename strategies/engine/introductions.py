"""Introductions: the server asks each node for its client id, and keeps the answer."""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from logging import INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from kindred.messages import (
    CLIENT_ID,
    CONFIG,
    IDENTITY_QUERY,
    MAX_NAME,
    METHODS,
    NUM_EXAMPLES,
    PROBLEM,
    VALIDATE_ONLY,
    VERSION_KEY,
    ClientId,
    config_of,
    first_line,
    is_name,
)
from kindred.versions import VERSION

from .admission import Refused, admit_introduction
from .arrivals import counted
from .transport import CLOCKS, content_of, is_from, pull, push

NOT_ADMITTED = "not-admitted"  # entry in a node's recorded introduction: why that was refused
UNKNOWN_QUERY = "No query function registered with name 'identity'"  # in Flower's error about a ClientApp that has none
# Flower's errors of a ClientApp that cannot be unpacked, loaded or called.
NO_APP = (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.INVALID_FAB)


class UntilRestart(str):
    """A reason why a client takes no part that lasts until its site is started again: an option of `kindred site`."""

    __slots__ = ()


class Introductions:
    """The introductions of a run's nodes.

    Parameters
    ----------
    simulated : bool
        Whether the clients are simulated. Then all nodes run the same ClientApp.

    Attributes
    ----------
    clients : dict
        node -> the client id that it reported, or the node's own id, for the nodes last connected.
    about : dict
        node -> its introduction.
    awaited : dict
        Message id -> node, of queries without an answer yet.
    """

    def __init__(self, *, simulated: bool) -> None:
        self.clients: dict[int, ClientId] = {}
        self.about: dict[int, Mapping[str, Any]] = {}
        self.awaited: dict[str, int] = {}
        self._simulated = simulated
        self._nodes_know_identity = True
        self._outdated: set[int] = set()  # nodes that are to introduce themselves anew
        self._renewed: set[int] = set()  # nodes that have, since `renewed` was last asked for

    def of(self, node: int) -> Mapping[str, Any]:
        """Return a node's introduction; empty if there is none."""
        return self.about.get(node, {})

    def ask_again(self, node: int) -> None:
        """Ask a node anew when nodes are next asked: its data may have changed."""
        self._outdated.add(node)

    def renewed(self) -> set[int]:
        """Return the nodes that have introduced themselves anew since the last call."""
        renewed, self._renewed = self._renewed, set()
        return renewed

    def were_asked(self, nodes: Collection[int]) -> bool:
        """Return whether all of these nodes have already been asked for their client ids."""
        return {*self.awaited.values(), *self.about}.issuperset(nodes)

    def keep(self, nodes: Set[int]) -> None:
        """Forget the unanswered queries to all other nodes, which are no longer connected."""
        self.awaited = {message_id: node for message_id, node in self.awaited.items() if node in nodes}
        self._outdated &= nodes

    def new(self, nodes: Collection[int]) -> list[int]:
        """Return those of these nodes that are to be asked."""
        return [node for node in nodes if node not in self.clients or node in self._outdated]

    def ask(
        self, grid: Grid, nodes: Sequence[int], timeout: float, patience: float, received: Callable[[], None]
    ) -> None:
        """Ask nodes for their client ids. A client without one is identified by its node.

        Nodes that do not answer in time are asked again before the next round, and a reply to either query counts.

        Parameters
        ----------
        grid : Grid
        nodes : sequence of int
            Nodes that are `new`.
        timeout : float
            Seconds for which a query counts.
        patience : float
            Seconds to wait for the answers.
        received : callable
            Called before the first answer and after each.
        """
        if self._nodes_know_identity and not self.were_asked(nodes):
            harmless = "" if self._simulated else "; a ClientApp that cannot answer logs an error, which is harmless"
            log(INFO, "Asking clients for their ids%s", harmless)
        # One node first: if a simulation's ClientApp does not know this query, no other node is asked.
        for group in (nodes[:1], nodes[1:]) if self._simulated else (nodes,):
            if group and self._nodes_know_identity:
                with _no_traceback_of_the_query():
                    self._ask(grid, group, timeout, patience, received)
            if not self._nodes_know_identity:
                self.clients |= {node: node for node in group}

    def _ask(
        self, grid: Grid, nodes: Sequence[int], timeout: float, patience: float, received: Callable[[], None]
    ) -> None:
        received()
        last = {node: message_id for message_id, node in self.awaited.items()}  # a node's previous query still counts
        self.awaited = {message_id: node for message_id, node in self.awaited.items() if last[node] == message_id}
        for node in nodes:
            content = RecordDict({CONFIG: ConfigRecord({VERSION_KEY: VERSION})})
            message = Message(content, node, IDENTITY_QUERY, ttl=timeout + CLOCKS)
            if (message_id := push(grid, message)) is not None:
                self.awaited[message_id] = node
        among = set(nodes)
        asked = {message_id: node for message_id, node in self.awaited.items() if node in among}
        deadline = time.monotonic() + patience
        arriving = pull(grid, asked, lambda: deadline, simulated=self._simulated)
        for message_id, reply in counted("meeting the clients", arriving, len(asked)):
            node = self.awaited.pop(message_id)
            if isinstance(reply, Refused):
                log(
                    WARNING,
                    "kindred: the introduction of node %d cannot be read, so it is asked again: %s",
                    node,
                    first_line(str(reply)),
                )
            elif not is_from(node, reply):
                log(
                    WARNING,
                    "kindred: a reply that node %d was asked for came from node %d; it is not used",
                    node,
                    reply.metadata.src_node_id,
                )
            elif not reply.has_error():
                self._record(node, content_of(reply))
                received()
            # In a simulation all nodes run the same app; a remote node's answer says nothing about the others.
            elif UNKNOWN_QUERY in (reply.error.reason or "") and self._simulated:
                self._nodes_know_identity = False
            elif UNKNOWN_QUERY in (reply.error.reason or "") or self._simulated:
                if reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
                    self.clients.setdefault(node, node)
            elif reply.error.code in NO_APP and node not in self.clients:
                self.clients[node], self.about[node] = node, {PROBLEM: reply.error.reason or "it has failed"}

    def _record(self, node: int, content: RecordDict) -> None:
        """Record a node's introduction and its client id."""
        try:
            about = admit_introduction(content)
        except Refused as refusal:  # keep only who it is, and `methods`, without which it cannot be informed
            entries, kept = config_of(content), (CLIENT_ID, METHODS, VALIDATE_ONLY)
            about = {key: entries[key] for key in kept if key in entries} | {NOT_ADMITTED: str(refusal)}
        client = about.get(CLIENT_ID, node)
        if not is_name(client):
            log(
                WARNING,
                "kindred: the client id of node %d is %s, allowed: a whole number, or 1 to %d printable "
                "characters; its node id is used instead",
                node,
                reprlib.repr(client),
                MAX_NAME,
            )
            client = node
        if node in self._outdated:
            self._outdated.discard(node)
            self._renewed.add(node)
            if (before := self.about[node].get(NUM_EXAMPLES)) != (now := about.get(NUM_EXAMPLES)):
                log(INFO, "kindred: client %s now has %r training samples, before %r", client, now, before)
        self.clients[node] = client
        self.about[node] = about


@contextmanager
def _no_traceback_of_the_query() -> Iterator[None]:
    """Drop Flower's log lines, in this process, that a ClientApp does not know the query for its id.

    In a simulation these are the ClientApp's error and traceback, and a line before them, which any exception has.
    """

    def other(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return UNKNOWN_QUERY not in text and not text.startswith("An exception was raised when processing a message by")

    logger = logging.getLogger("flwr")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def only_validates(about: Mapping[str, Any]) -> bool:
    """Return whether an introduction is that of a site that only validates."""
    return about.get(VALIDATE_ONLY) is True
