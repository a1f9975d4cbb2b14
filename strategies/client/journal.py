"""The journal of a site: a line of JSON for each message, with what was asked of the site and what left it.

`kindred site` names the file and makes its page from it. It stays at the site. Several processes append to it, each a
whole line at once. Elsewhere, as in a simulation, there is none.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord

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

JOURNAL = "KINDRED_JOURNAL"  # in the environment of a site's processes: the file
TRAINING, EVALUATION, INTRODUCTION, NOTICE = "training", "evaluation", "introduction", "notice"
CONNECTION = "connection"  # kind of an entry of `kindred site`: why the SuperNode cannot take part
DATA = "data"  # kind of an entry about why the site's data cannot be used, which the server does not learn

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


def recorded(kind: str) -> Callable[[Answer], Answer]:
    """Return a decorator of a ClientApp's function: it writes an entry for each message of this kind."""

    def decorate(answer: Answer) -> Answer:
        @functools.wraps(answer)
        def recording(message: Message, context: Context) -> Message:
            if (path := os.environ.get(JOURNAL)) is None:
                return answer(message, context)
            entry, began = _asked(kind, message, context), time.monotonic()
            try:
                reply = answer(message, context)
            except Exception as error:
                seconds = time.monotonic() - began
                problem = first_line(f"{type(error).__name__}: {error}")
                append(path, {**entry, "seconds": seconds, "problem": problem})
                raise
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
