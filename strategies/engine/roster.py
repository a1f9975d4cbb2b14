"""The clients of a run: which node each is, and which can take part in a round."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from logging import INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from kindred.messages import (
    CONFIG,
    METHODS,
    NUM_EXAMPLES,
    PROBLEM,
    REFUSAL_QUERY,
    ClientId,
    first_line,
    in_order,
    scripts_of,
    spelling,
)

from .admission import raise_own
from .history import History
from .introductions import NOT_ADMITTED, Introductions, UntilRestart, only_validates
from .remarks import SAMPLES
from .status import MEETS, PREPARES, WAITS, Status
from .strikes import Strikes
from .transport import CLOCKS, push

NODES_PAUSE = 0.1  # s between two queries for the connected nodes
SECOND_WAIT = 1.0  # s to wait for the ids of nodes that were asked before
MOST_NAMED = 20  # missing clients listed in one line of the log
ASK_AGAIN = 10.0  # s between two queries to nodes that cannot take part, while a round waits for clients

# In the environment of a run at `kindred server`: the file that lists the names of all registered keys, as JSON.
REGISTERED = "KINDRED_REGISTERED"

Introduce = Callable[[Mapping[ClientId, Mapping[str, Any]]], dict[ClientId, str]]


class TooFewClients(RuntimeError):
    """After the waiting time fewer clients can take part than a round needs, or no client gave a usable answer."""


class Roster:
    """The clients of a run and their nodes.

    Parameters
    ----------
    min_available : int
        Clients that must be able to take part before a round starts.
    wait_timeout : float
        Seconds to wait for these clients, and for the ids of new clients.
    max_strikes : int
        Rounds in a row without a usable reply after which a client is excluded for as many rounds; 0: never.

    Attributes
    ----------
    nodes : dict
        client -> its node, for clients that are connected and can take part.
    validators : dict
        client -> its node, for connected sites that only validate. They count in nothing else here.
    unfit_validators : dict
        client -> the reason why such a site cannot evaluate.
    introductions : Introductions
        What each node says of itself.
    strikes : Strikes
        Strikes of each client, and excluded clients.
    """

    def __init__(self, min_available: int, wait_timeout: float, max_strikes: int) -> None:
        self.min_available = min_available
        self.wait_timeout = wait_timeout
        self.max_strikes = max_strikes
        self.begin(History(), simulated=True)

    def begin(self, history: History, *, simulated: bool, status: Status | None = None) -> None:
        """Reset everything for a new run; clients that take no part will be listed in `history.left_out`."""
        self._status = status or Status()
        self.nodes: dict[ClientId, int] = {}
        self.validators: dict[ClientId, int] = {}
        self.unfit_validators: dict[ClientId, str] = {}
        self._history = history
        self._simulated = simulated
        self.introductions = Introductions(simulated=simulated)
        self._introduced: dict[ClientId, int] = {}  # client -> node, as last introduced to the method
        self._registered: dict[int, str] = {}  # node -> name under which its key is registered
        self._reserved_names: set[str] = set()  # names of registered keys, connected or not
        self._lasting: dict[int, str] = {}  # node that is excluded `UntilRestart` -> when it connected
        self._known: dict[str, ClientId] = {}  # spelling -> id, of the clients that have taken part
        self._refused: dict[int, str] = {}  # node -> why it cannot have the client id that it reports
        self._round = 0  # in progress
        self.strikes = Strikes(self.max_strikes)

    def state(self) -> dict[str, Any]:
        """Return all that `restore` needs, between two rounds."""
        return {**self.strikes.state(), "kept-names": self._reserved_names}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, after the history."""
        self.strikes.restore(state)
        self._reserved_names = state["kept-names"]
        self._known = {spelling(row["client"]): row["client"] for row in self._history.rows}

    def clients(self) -> list[ClientId]:
        """Return the clients that are connected and can take part, in order, including those excluded for strikes."""
        return in_order(self.nodes)

    def active(self) -> list[ClientId]:
        """Return the clients that a round can ask, in order: not those excluded for strikes, unless all of them are."""
        return [client for client in self.clients() if client not in self.strikes.excluded] or self.clients()

    def num_known(self) -> int:
        """Return the number of clients that the run knows: those of `clients`, and those that cannot take part."""
        return len(self.nodes.keys() | self._history.left_out.keys())

    def sizes(self, clients: Sequence[ClientId]) -> list[int]:
        """Return the clients' numbers of training samples by their introductions; 1 if a client does not report it."""
        return [self.introductions.of(self.nodes[client]).get(NUM_EXAMPLES, 1) for client in clients]

    def introduced_samples(self, client: ClientId) -> int | None:
        """Return the number of training samples that a client introduced itself with; None if it gave none."""
        about = self.introductions.of(self.nodes[client]) if client in self.nodes else {}
        return int(about[NUM_EXAMPLES]) if NUM_EXAMPLES in about else None

    def ask_again(self, client: ClientId, claimed: float) -> None:
        """Ask a client before the next round to introduce itself anew: its data may have changed.

        Until then the number of samples of its last introduction counts, not the one that it now claims.
        """
        self.introductions.ask_again(self.nodes[client])
        text = (
            f"reports {claimed:.0f} training samples and introduced itself with {self.introduced_samples(client)}, "
            "which count; it is asked to introduce itself anew"
        )
        self._history.remark(self._round, client, SAMPLES, text)

    def validator(self, client: ClientId) -> Mapping[str, Any]:
        """Return the introduction of a site that only validates."""
        return self.introductions.of(self.validators[client])

    # --- Meeting clients --------------------------------------------------------------------------------

    def meet(self, grid: Grid, introduce: Introduce, timeout: float) -> None:
        """Wait until enough clients can take part, and ask new nodes for their client ids.

        Parameters
        ----------
        grid : Grid
        introduce : callable
            See `PersonalizedStrategy.introduce`.
        timeout : float
            Seconds to wait for the client ids of new nodes, at most `wait_timeout`.

        Raises
        ------
        TooFewClients
            Fewer than `min_available` clients can take part after `wait_timeout` seconds. In a simulation, which no
            further clients can join, it is raised at once.
        """
        deadline = time.monotonic() + self.wait_timeout
        seen: list[int] | None = None  # nodes connected at the last query
        met: list[int] | None = None  # nodes connected when they were last asked for their ids
        asked_at, logged, shown, waits = 0.0, "", "", ""
        self._reserved_names |= set(_registered_names())
        while True:
            nodes, now = sorted(grid.get_node_ids()), time.monotonic()
            # At the start nodes connect one after the other.
            settled = bool(self.introductions.clients) or (nodes == seen and len(nodes) >= self.min_available)
            if settled and (nodes != met or now - asked_at >= ASK_AGAIN):
                self._ask_and_admit(grid, nodes, introduce, timeout)
                asked_at = time.monotonic()
                deadline = asked_at + self.wait_timeout if met is None else deadline  # asking them took time too
                met, seen, shown = nodes, None, ""  # the log line must be updated
            if settled and len(self.nodes) >= self.min_available:
                self.show(PREPARES)
                return
            count, what = (
                (len(nodes), "are connected") if len(nodes) < self.min_available else (len(self.nodes), "can take part")
            )
            if nodes != seen:
                missing = self._missing_clients(grid, nodes)
                waits = f"{count} of {self.min_available} {what} (min_available_nodes){missing}"
            if time.monotonic() > deadline:
                raise TooFewClients(f"too few clients after {self.wait_timeout:g} s: {waits}")
            if self._simulated and settled and self.introductions.clients.keys() >= set(nodes):
                raise TooFewClients(f"too few clients: {waits}")
            if settled or len(nodes) < self.min_available:
                if waits != logged:
                    log(INFO, "kindred: waiting for clients: %s", waits)
                    logged = waits
                if waits != shown:
                    self.show(WAITS, waits)
                    shown = waits
            seen = nodes
            time.sleep(NODES_PAUSE)

    def _missing_clients(self, grid: Grid, nodes: Sequence[int]) -> str:
        """Return the clients that cannot take part, each with the reason, as a text to append to a message."""
        known = {*self._reserved_names, *(str(row["client"]) for row in self._history.rows)}
        here = {str(client) for client in (*self.introductions.clients.values(), *self._history.left_out)}
        here |= {node.name for node in grid.get_nodes()} if known - here else set()
        missing = [f"client {client}: {self._history.left_out[client]}" for client in in_order(self._history.left_out)]
        missing += [f"node {node}: {self._refused[node]}" for node in nodes if node in self._refused]
        missing += [
            f"node {node} has not reported its client id"
            for node in self._silent(nodes)
            if node in self.introductions.awaited.values()
        ]
        missing += [f"client {client} only validates" for client in in_order(self.validators)]
        missing += [f"client {client} is not connected" for client in sorted(known - here)]
        more = [f"and {len(missing) - MOST_NAMED} more"] if len(missing) > MOST_NAMED else []
        return "".join(f"; {reason}" for reason in (*missing[:MOST_NAMED], *more))

    def _ask_and_admit(self, grid: Grid, nodes: Sequence[int], introduce: Introduce, timeout: float) -> None:
        """Ask new nodes for their client ids, and introduce new clients to the method.

        The wait is short if there are already enough clients, or if these nodes have been asked before.
        """
        if self._lasting:
            self._lasting = dict(self._lasting.items() & _connected(grid).items())
        self._forget_outdated(set(nodes))
        new = self.introductions.new(nodes)
        if new:
            self._registered |= {node.node_id: node.name for node in grid.get_nodes() if node.name}
            self._reserved_names |= set(self._registered.values())
            timeout = min(timeout, self.wait_timeout)
            asked_before = self.introductions.clients and self.introductions.were_asked(new)
            hurries = len(self.nodes) >= self.min_available or asked_before
            patience = min(timeout, SECOND_WAIT) if hurries else timeout
            self.introductions.ask(grid, new, timeout, patience, lambda: self._show_silent(new))
        self._assign_nodes(grid)
        self._introduce_newcomers(grid, introduce)

    def _forget_outdated(self, nodes: Set[int]) -> None:
        """Forget nodes that are no longer connected, and nodes that cannot take part: their fault may be fixed by now.

        Nodes that must be started again to take part are not forgotten before.

        In a simulation nobody fixes a fault, so only those nodes of the second kind are forgotten that failed to
        introduce themselves.
        """
        taking_part = {*self.nodes.values(), *self.validators.values(), *self._lasting}
        outside = {
            node
            for node in self.introductions.clients
            if node not in taking_part and (not self._simulated or PROBLEM in self.introductions.of(node))
        }
        for node in outside | (self.introductions.clients.keys() - nodes):
            client = self.introductions.clients.pop(node)
            if self._introduced.get(client) == node:
                del self._introduced[client]
        self.nodes = {client: node for client, node in self.nodes.items() if node in nodes}
        self.validators = {client: node for client, node in self.validators.items() if node in nodes}
        self._refused = {node: reason for node, reason in self._refused.items() if node in nodes}
        self.introductions.keep(nodes)

    def _silent(self, nodes: Collection[int]) -> list[int]:
        """Return those of these nodes that have reported no client id, not even one that was refused."""
        return [node for node in nodes if node not in self.introductions.clients and node not in self._refused]

    def _show_silent(self, nodes: Collection[int]) -> None:
        """Add to the run's status how many of these nodes have not introduced themselves."""
        if not self._status.is_kept:
            return
        silent = len(self._silent(nodes))
        if silent:  # otherwise they are asked again
            self.show(MEETS, f"{silent} of {len(nodes)} sites to introduce themselves")

    def show(self, state: str, text: str = "") -> None:
        """Record in the run's status what the run does, which clients take part, and why others do not."""
        if self._status.is_kept:
            self._status.update(state=state, text=text, **self._overview())

    def _overview(self) -> dict[str, Any]:
        nodes = {**self._introduced, **self.nodes, **self.validators}
        left_out = {**self._history.left_out, **self.unfit_validators}
        return {
            "nodes": {str(client): str(node) for client, node in nodes.items()},
            "taking-part": [str(client) for client in self.clients()],
            "validators": [str(client) for client in in_order(self.validators)],
            "left-out": {str(client): reason for client, reason in left_out.items()},
            "excluded": {str(client): last for client, last in self.strikes.excluded.items()},
            "refused": {str(node): reason for node, reason in self._refused.items()},
        }

    def _assign_nodes(self, grid: Grid) -> None:
        """Assign each client id to one of the nodes that report it.

        A node whose key is registered at the server may only have the registered name, which it also has if it reports
        none or its own number, and only that node may have this name. A node without a name has its number. Any other
        id stays with the node that had it first, as long as that node is connected. Ids with the same `spelling` are
        the same; a client keeps the one under which it first took part.
        """
        clients = self.introductions.clients
        for node, client in clients.items():
            registered = self._registered.get(node)
            if client == node:
                clients[node] = registered or node
            elif registered and spelling(registered) == spelling(client):
                clients[node] = client if registered == str(client) else registered
            else:
                clients[node] = self._known.get(spelling(client), client)
        owners = {spelling(client): node for client, node in self._introduced.items() if clients.get(node) == client}
        owners |= {str(node): node for node, client in clients.items() if client == node}
        reserved = {spelling(name) for name in self._reserved_names}
        self.nodes = {}
        for node, client in sorted(clients.items()):
            reason = self._name_conflict(node, client, reserved)
            if reason is None and (owner := owners.setdefault(spelling(client), node)) != node:
                reason = f"its client id is {client}, which node {owner} already has"
            if reason is None:
                self.nodes[client] = node
                self._known[spelling(client)] = client
                self._refused.pop(node, None)
            else:
                if self._refused.get(node) != reason:
                    log(WARNING, "kindred: node %d takes no part: %s", node, reason)
                self._refused[node] = reason
                self.inform(grid, node, reason)

    def _name_conflict(self, node: int, client: ClientId, reserved: Set[str]) -> str | None:
        """Say why a node cannot have the client id that it reports; None if it can, or reports none.

        `reserved` are the spellings of registered names.
        """
        if client == node:
            return None
        registered = self._registered.get(node)
        if registered and registered != str(client):
            return f"its client id is {client}, but its key is registered as {registered}"
        if not registered and spelling(client) in reserved:
            return f"its client id is {client}, a name reserved for the key registered under it"
        if len(mixed := scripts_of(client)) > 1:
            return f"its client id {client} has letters of {' and '.join(mixed)} script, allowed: of one of them"
        return None

    def _introduce_newcomers(self, grid: Grid, introduce: Introduce) -> None:
        for node, client in self.introductions.clients.items():
            if client != node:  # it had no name before, see `Introductions`
                self._history.left_out.pop(node, None)
        renewed = self.introductions.renewed()
        newcomers = {
            client: self.introductions.of(self.nodes[client])
            for client in self.clients()
            if self._introduced.get(client) != self.nodes[client] or self.nodes[client] in renewed
        }
        self._introduced |= {client: self.nodes[client] for client in newcomers}
        validate = {client for client, node in self.nodes.items() if only_validates(self.introductions.of(node))}
        left_out, unfit = self._history.left_out, self.unfit_validators
        before = {client: each.pop(client) for each in (left_out, unfit) for client in newcomers if client in each}
        reasons = {
            client: f"it cannot introduce itself: {about[PROBLEM]}"
            for client, about in newcomers.items()
            if PROBLEM in about
        }
        reasons |= {client: about[NOT_ADMITTED] for client, about in newcomers.items() if NOT_ADMITTED in about}
        reasons |= _reasons(introduce, {client: about for client, about in newcomers.items() if client not in reasons})
        if lasting := {self.nodes[client] for client, reason in reasons.items() if isinstance(reason, UntilRestart)}:
            self._lasting |= {node: at for node, at in _connected(grid).items() if node in lasting}
        for client in newcomers:
            if client in reasons:
                reason = first_line(str(reasons[client]))
                (unfit if client in validate else left_out)[client] = reason
                if before.get(client) != reason:
                    log(WARNING, "kindred: client %s takes no part: %s", client, reason)
                if PROBLEM not in newcomers[client]:  # a client knows its own problem
                    self.inform(grid, self.nodes[client], reason)
            elif client in before:
                log(INFO, "kindred: client %s takes part now; excluded before: %s", client, before[client])
        for client in left_out:
            self.nodes.pop(client, None)
        self.unfit_validators = {client: reason for client, reason in unfit.items() if client in validate}
        nodes = {client: self.nodes.pop(client) for client in validate}
        self.validators = {client: node for client, node in nodes.items() if client not in unfit}

    def is_our_site(self, node: int) -> bool:
        """Return whether a node is on another machine and `make_client_app` made its ClientApp.

        Such a ClientApp unpacks messages, and prints the reasons that `inform` sends.
        """
        return not self._simulated and isinstance(self.introductions.of(node).get(METHODS), list)

    def inform(self, grid: Grid, node: int, reason: str) -> None:
        """Make a site print why it takes no part, or why its reply is not used, so that its operator can act on it.

        The server does not wait for the answer. Nothing is sent in a simulation, where server and clients share a log.
        Nothing is sent to a foreign ClientApp either, because it does not know this message.
        """
        if not self.is_our_site(node):
            return
        content = RecordDict({CONFIG: ConfigRecord({PROBLEM: first_line(reason)})})
        push(grid, Message(content, node, REFUSAL_QUERY, ttl=CLOCKS))

    # --- Rounds -----------------------------------------------------------------------------------------

    def begin_round(self, server_round: int) -> None:
        """Readmit clients whose exclusion for strikes is over."""
        self._round = server_round
        self.strikes.begin_round(server_round)

    def end_round(self, grid: Grid, server_round: int) -> None:
        """Exclude clients with too many strikes for a while, and inform them."""
        for client, reason in self.strikes.end_round(server_round).items():
            if client in self.nodes:
                self.inform(grid, self.nodes[client], reason)


def _reasons(introduce: Introduce, newcomers: Mapping[ClientId, Mapping[str, Any]]) -> dict[ClientId, str]:
    """Return why newcomers cannot take part; a newcomer whose introduction raises an exception cannot."""
    try:
        return introduce(newcomers) if newcomers else {}
    except Exception as error:
        raise_own(error)
        if len(newcomers) == 1:
            return dict.fromkeys(newcomers, f"its introduction cannot be used ({type(error).__name__}: {error})")
        reasons: dict[ClientId, str] = {}
        for client, about in newcomers.items():
            reasons |= _reasons(introduce, {client: about})
        return reasons


def _connected(grid: Grid) -> dict[int, str]:
    """Return when each node has connected."""
    return {node.node_id: node.last_activated_at for node in grid.get_nodes()}


def _registered_names() -> list[str]:
    """Return the names of all keys registered by `kindred server`; none in runs without it."""
    path = os.environ.get(REGISTERED)
    if not path:
        return []
    with open(path, encoding="utf-8") as file:
        return [str(name) for name in json.load(file)]
