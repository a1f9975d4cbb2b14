"""Report, while replies arrive, how many have: lines of the log, in every engine and on real machines alike."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from logging import INFO
from typing import TypeVar

from flwr.supercore import log

Item = TypeVar("Item")

# In the environment: seconds between two such lines, less than 1 where a terminal shows the last one as a bar.
INTERVAL = "KINDRED_PROGRESS_SECONDS"
USUAL = 10.0

LINE = re.compile(r"(?P<what>.+): (?P<done>\d+) of (?P<total>\d+) clients")


def counted(what: str, items: Iterable[Item], total: int) -> Iterator[Item]:
    """Yield replies, and report how many of `total` clients have answered.

    Parameters
    ----------
    what : str
        What the clients are asked for, such as "round 3/40".
    items : iterable
    total : int
    """
    interval = float(os.environ.get(INTERVAL, USUAL))
    last = time.monotonic() if interval >= 1 else 0.0
    for done, item in enumerate(items):
        if time.monotonic() - last >= interval:
            log(INFO, "kindred: %s: %d of %d clients", what, done, total)
            last = time.monotonic()
        yield item
