"""The part of a run's page that is about this moment: what the run waits for, and the sites.

It is made from the run's status file, which the ServerApp replaces (`kindred.engine.status`), and from the SuperNodes
that the SuperLink knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import psutil

from kindred.engine.status import (
    BETWEEN_ROUNDS,
    EVALUATES,
    EXCHANGES,
    FAILED,
    FINISHED,
    MEETS,
    PREPARES,
    STARTS,
    STOPPED,
    TRAINS,
    WAITS,
)

MOST_NAMED = 6  # sites in a sentence
ONLINE, OFFLINE, NEVER, WITHDRAWN = "online", "offline", "never connected", "withdrawn"


class Node(NamedTuple):
    """A SuperNode that the SuperLink knows: its id, the name of its key ("" without keys), its connection."""

    id: str
    name: str
    connection: str


def live_content(
    status: Mapping[str, Any],
    nodes: Sequence[Node],
    names: Iterable[str] = (),
    left: float | None = None,
    problems: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what a run does now, and a row for each site: its name, connection, last message and part in the run.

    Parameters
    ----------
    status : mapping
        The content of the run's status file; empty where there is no run.
    nodes : sequence of Node
    names : iterable of str
        Names of all registered keys.
    left : float, optional
        Seconds that the rest of the run is likely to take.
    problems : sequence of str
        What the server cannot do now, and why.
    """
    ended = has_ended(status)
    return {
        "doing": doing(status),
        "problems": list(problems),
        "ended": ended,
        "left": None if ended else left,
        "sites": _sites(status, nodes, names, ended),
    }


def has_ended(status: Mapping[str, Any]) -> bool:
    """Return whether a run has ended, also by the end of its process; True where there is no run."""
    if not status or status["state"] in (FINISHED, FAILED, STOPPED):
        return True
    try:
        number, began = status["process"]
        process = psutil.Process(number)
        return process.create_time() != began or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def outcome(status: Mapping[str, Any]) -> str:
    """Return in a word how a run ended, or that it is in progress."""
    if not has_ended(status):
        return "in progress"
    return str(status["state"]) if status["state"] in (FINISHED, FAILED, STOPPED) else "ended early"


def doing(status: Mapping[str, Any]) -> str:
    """Return a sentence that says what a run does or waits for."""
    if not status:
        return "no run has been started yet"
    state, text = status["state"], " ".join(status.get("text", "").split())  # rounds are padded with blanks
    if state == FINISHED:
        return "the run is finished"
    if state == FAILED:
        return f"the run has failed: {text}"
    if state == STOPPED:
        return "the run was stopped"
    if has_ended(status):
        return "the run has ended before its last round: it was stopped, or its process was killed"
    sentences = {
        STARTS: "starts: reads its settings",
        MEETS: f"waits for {text}",
        WAITS: f"waits for sites: {text}",
        PREPARES: "the server prepares the next round",
        BETWEEN_ROUNDS: f"{text} is over; the server computes and writes its results",
    }
    return sentences[state] if state != EXCHANGES else f"{text}: {_replies(status.get('asked', {}))}"


def _replies(asked: Mapping[str, Mapping[str, Any]]) -> str:
    """Return which sites work on a message, and which have answered."""
    found: dict[str, list[str]] = {TRAINS: [], EVALUATES: []}
    for site, about in asked.items():
        if "seconds" not in about:
            outcome = about["kind"]
        elif about.get("status", "") in ("", "ok"):
            outcome = "answered"
        else:
            outcome = "gave no usable answer"
        found.setdefault(outcome, []).append(site)
    return ", ".join(f"{_named(sites)} {_verb(outcome, sites)}" for outcome, sites in found.items() if sites)


def _verb(outcome: str, sites: Sequence[str]) -> str:
    return outcome.removesuffix("s") if len(sites) > 1 else outcome


def _named(sites: Sequence[str]) -> str:
    shown, more = list(sites[:MOST_NAMED]), len(sites) - MOST_NAMED
    if more > 0:
        shown.append(f"{more} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _sites(status: Mapping[str, Any], nodes: Sequence[Node], names: Iterable[str], ended: bool) -> list[list[str]]:
    clients = {node: client for client, node in status.get("nodes", {}).items()}
    refused: Mapping[str, str] = status.get("refused", {})
    rows: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda each: each.connection != WITHDRAWN):  # a name may have a new key since
        name = node.name or clients.get(node.id) or f"SuperNode {node.id}"
        part = f"refused: {refused[node.id]}" if node.id in refused and not ended else _part(status, name, ended)
        rows[name] = [name, node.connection, _last(status, name), part]
    for name in (*names, *status.get("nodes", {}), *status.get("left-out", {})):
        rows.setdefault(name, [name, NEVER, _last(status, name), _part(status, name, ended)])
    return [rows[name] for name in sorted(rows)]


def _part(status: Mapping[str, Any], site: str, ended: bool) -> str:
    """Return whether a site takes part in a run, and if not, why."""
    if site in status.get("left-out", {}):
        return f"excluded: {status['left-out'][site]}"
    if site in status.get("validators", ()):
        return "only validates"
    if site in status.get("excluded", {}):
        return f"excluded up to round {status['excluded'][site]}: no usable reply in several rounds"
    if site in status.get("taking-part", ()):
        return "took part" if ended else "takes part"
    return "" if ended or not status else "does not take part now"


def _last(status: Mapping[str, Any], site: str) -> str:
    """Return what a site was last asked in a run, and what it answered."""
    about = status.get("asked", {}).get(site)
    if about is None:
        return ""
    if "seconds" not in about:
        return f"{about['kind']} since {datetime.fromtimestamp(about['at'], UTC):%H:%M:%S} UTC"
    seconds, outcome = f"{about['seconds']:.1f} s", about.get("status", "")
    return f"answered after {seconds}" if outcome in ("", "ok") else f"{outcome} (after {seconds})"
