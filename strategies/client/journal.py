"""The journal of a site: a line of JSON for each message, with what was asked of the site and what left it.

`kindred site` names the file and makes its page from it. It stays at the site. Several processes append to it, each a
whole line at once. Elsewhere, as in a simulation, there is none.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from logging import ERROR
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.supercore import log

from kindred.errors import Reportable
from kindred.files import private
from kindred.messages import (
    ALONE,
    METHOD,
    METRIC,
    PERSONAL,
    PROBE,
    PROBLEM,
    RUN,
    SERVER_ROUND,
    config_of,
    first_line,
    ordinary_names,
    payload_bytes,
    records_of,
)
from kindred.registry import REGISTRY

from .site import STATE_DIR

JOURNAL = "KINDRED_JOURNAL"  # in the environment of a site's processes: the file
TRAINING, EVALUATION, INTRODUCTION, NOTICE = "training", "evaluation", "introduction", "notice"
CONNECTION = "connection"  # kind of an entry of `kindred site`: why the SuperNode cannot take part
APP = "app"  # kind of an entry of the SuperNode: an app that is refused
FAULT = "fault"  # kind of an entry, and entry, with the number of an error of which the server learns no more

Answer = Callable[[Message, Context], Message]


def append(path: str | os.PathLike[str], entry: Mapping[str, Any]) -> bool:
    """Append an entry to a journal, and return whether it is there; the run goes on without it."""
    with suppress(OSError, TypeError, ValueError), open(path, "ab", 0, opener=private) as file:
        line = (json.dumps({"at": time.time(), **entry}) + "\n").encode()
        written = file.write(line)
        if written == len(line):
            return True
        file.truncate(file.tell() - written)  # the disk is full
    return False


def describe(error: Exception, node_config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what the server learns of an error, and what the journal holds of it.

    The text of an error at a real site stays in its log and journal, under a number, unless it is `Reportable`.
    """
    text = f"{type(error).__name__}: {error}"
    reportable = getattr(error, "reportable", False) or (error.args and isinstance(error.args[0], Reportable))
    if reportable or STATE_DIR not in node_config:
        return text, {"problem": first_line(text)}
    number = secrets.randbelow(900_000) + 100_000
    log(ERROR, "kindred: fault %d: %s", number, text, exc_info=error)
    reason = f"{type(error).__name__}; its text is fault {number} in the site's log"
    return reason, {"problem": first_line(f"fault {number}: {text}"), FAULT: number}


def recorded(kind: str) -> Callable[[Answer], Answer]:
    """Return a decorator of a ClientApp's function: it writes an entry for each message of this kind.

    An error of a real site is replaced by what the server may learn of it: see `describe`.
    """

    def decorate(answer: Answer) -> Answer:
        @functools.wraps(answer)
        def recording(message: Message, context: Context) -> Message:
            path = os.environ.get(JOURNAL)
            entry, began = _asked(kind, message, context) if path else {}, time.monotonic()
            try:
                reply = answer(message, context)
            except Exception as error:
                reason, kept = describe(error, context.node_config)
                if path:
                    append(path, {**entry, "seconds": time.monotonic() - began, **kept})
                if FAULT not in kept:
                    raise
                raise ValueError(reason) from None
            if path:
                append(path, {**entry, "seconds": time.monotonic() - began, **_left(reply, entry)})
            return reply

        return recording

    return decorate


def _asked(kind: str, message: Message, context: Context) -> dict[str, Any]:
    """Return what a message asks, for an entry; without what is not of the type that it should have."""
    config = config_of(message.content)
    run = str(config.get(RUN, context.run_id))
    entry: dict[str, Any] = {"kind": kind, "run": str(int(run)) if run.isdecimal() else str(context.run_id)}
    entry["bytes-in"] = payload_bytes(message.content)
    types = {SERVER_ROUND: ("round", int), METHOD: ("method", str), METRIC: ("metric", str), PROBE: ("probe", str)}
    entry |= {name: config[key] for key, (name, expected) in types.items() if isinstance(config.get(key), expected)}
    if kind == NOTICE and PROBLEM in config:
        entry["problem"] = first_line(f"the server says of this site: {config[PROBLEM]}")
    return entry


def _left(reply: Message, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reply takes out of the site, and the values of the headline metric in it, for an entry."""
    content = reply.content
    numbers = {name: value for record in records_of(content, MetricRecord) for name, value in record.items()}
    texts = config_of(content)
    found: dict[str, Any] = {
        "bytes-out": payload_bytes(content),
        "arrays": sum(len(record) for record in records_of(content, ArrayRecord)),
        "numbers": sorted(numbers),
        "texts": sorted(texts),
    }
    if PROBLEM in texts:
        found["problem"] = first_line(str(texts[PROBLEM]))
    method, metric = REGISTRY.get(str(entry.get("method"))), str(entry.get("metric"))
    stage = method.strategy.personal if method else PERSONAL
    keys = ordinary_names(metric) if entry["kind"] == EVALUATION and "probe" not in entry else (f"{stage}-{metric}",)
    wanted = {"value": keys, ALONE: (f"{ALONE}-{metric}",)}
    return found | {name: numbers[key] for name, keys in wanted.items() for key in keys if key in numbers}
