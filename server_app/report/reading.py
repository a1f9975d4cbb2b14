"""Files of a run or a comparison, read for its page."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kindred.engine.history import is_status
from kindred.messages import MOST, first_line
from kindred.server_app.config import ConfigError
from kindred.server_app.tables import read_table

REPORT = "report.html"
COMPARISON = "comparison.json"
TEXTS = ("client", "personal")  # columns with texts, as is the status of replies; all other columns shown are numbers

_REQUIRED: Any = object()


def read_json(path: Path, otherwise: Any = _REQUIRED) -> Any:
    """Return the content of a JSON file; ConfigError where there is none, unless `otherwise` is given."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if otherwise is not _REQUIRED:
            return otherwise
        raise ConfigError(
            f"{str(path.parent)!r} holds neither the config.json of a run nor the {COMPARISON} of a comparison"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None


@contextmanager
def naming_damage(folder: Path) -> Iterator[None]:
    """Turn an exception at JSON that is not as it was written into a ConfigError that names the folder."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = first_line(f"{type(error).__name__}: {error}")
        raise ConfigError(f"{folder} holds a damaged file, not as `kindred run` wrote it: {reason}") from error


def rows_of(path: Path, *needed: str) -> list[dict[str, Any]]:
    """Return the rows of a table that have been written so far; their numbers up to `MOST`, `TEXTS` and statuses alone.

    The list is empty where the file does not exist. ConfigError where a row lacks one of the `needed` columns.
    """
    try:
        rows = [
            {
                key: value
                for key, value in row.items()
                if key in TEXTS or is_status(key) or (not isinstance(value, str) and abs(value) <= MOST)
            }
            for row in read_table(path)
        ]
        for key in needed:
            if any(key not in row for row in rows):
                raise ValueError(f"a line has no {key}")
    except FileNotFoundError:
        return []
    except (OSError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return rows


def picture(path: Path) -> str | None:
    """Return a PNG file as a data URL; None where it cannot be read."""
    try:
        return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return None
