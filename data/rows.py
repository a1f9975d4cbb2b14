"""Rows of tables, coded by a schema."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from kindred.objectives import Objective

from .files import DataError
from .schema import A_NUMBER, Schema, cell_number, cell_text
from .tables import Misfit, Table
from .targets import Target


@dataclass(frozen=True)
class Rows:
    """Rows of a table with their targets, coded by a schema.

    Attributes
    ----------
    x : ndarray, (n, columns), float64
        See `data.schema`.
    y : ndarray
        Targets in the units of the data: classes (n,), int64; labels (n, L), or numbers (n,), float64.
    clients : ndarray of str, (n,), or None
    times : ndarray, (n,), float64, or None
        These two are None where the schema has no such column.
    without_target : int
        Number of rows whose target is missing. They are not in the arrays.
    misfits : tuple of Misfit
        Cells that do not fit; they are NaN in the arrays.
    """

    x: np.ndarray
    y: np.ndarray
    clients: np.ndarray | None
    times: np.ndarray | None
    without_target: int = 0
    misfits: tuple[Misfit, ...] = ()


def read_rows(table: Table, schema: Schema) -> np.ndarray:
    """Return the rows of a table, coded by a schema: (n, columns), float64.

    The table needs the columns of the schema, in any order; others are ignored. Categories that the schema does not
    have, and missing cells, are allowed.

    Raises
    ------
    DataError
        The table cannot be read, lacks a column, has no rows, or has a text in a column of numbers.
    """
    return _values(table, _inputs(table, schema))[0]


def read_samples(table: Table, schema: Schema, objective: Objective, most_misfits: int = 0) -> Rows:
    """Return the rows of a table with their targets, coded by a schema.

    Parameters
    ----------
    table : Table
        With the columns of the schema, and those that its target, client and time name.
    schema : Schema
    objective : Objective
        Of the targets.
    most_misfits : int
        Number of misfits that are returned. 0: the first is an error.

    Raises
    ------
    DataError
        As in `read_rows`; or a target, a client or a time is not one.
    """
    target = Target.parse(schema.target, table)
    readers = _inputs(table, schema)
    readers += [
        (table.place(name, "the target"), partial(target.value, objective=objective), target.allowed(objective))
        for name in target.columns
    ]
    ends = len(schema.columns), len(readers)
    names: dict[str, int] = {}
    if schema.client:
        readers.append((table.place(schema.client, "the client"), partial(_client, names), "the name of a client"))
    if schema.time:
        readers.append((table.place(schema.time, "the time"), _time, A_NUMBER))
    values, misfits = _values(table, readers, most_misfits)
    there = ~np.isnan(values[:, slice(*ends)]).any(axis=1)
    x, y, others = np.split(values[there], ends, axis=1)
    if not target.of_labels(objective):
        y = y[:, 0].astype(np.int64 if objective.has_classes else np.float64)
    clients = np.array(list(names))[np.nan_to_num(others[:, 0]).astype(int)] if names else None
    return Rows(x, y, clients, others[:, -1] if schema.time else None, int((~there).sum()), misfits)


Reader = tuple[int, Callable[[str], float], str]
"""Place of a column, a function that returns a cell's value or raises ValueError, and the cells that are allowed."""


def _inputs(table: Table, schema: Schema) -> list[Reader]:
    return [(table.place(each.name, "which the schema has"), each.value, each.allowed) for each in schema.columns]


def _values(table: Table, readers: Sequence[Reader], most_misfits: int = 0) -> tuple[np.ndarray, tuple[Misfit, ...]]:
    """Return the values of a table's cells, (n, readers), float64, and the first cells that do not fit."""
    misfits: list[Misfit] = []

    def rows() -> Iterator[list[float]]:
        for number, cells in table.rows():
            values = []
            for place, read, allowed in readers:
                try:
                    values.append(read(cells[place]))
                except ValueError:
                    values.append(math.nan)
                    misfit = Misfit(table.path, number, table.header[place], cells[place], allowed)
                    if not most_misfits:
                        raise DataError(str(misfit)) from None
                    if len(misfits) < most_misfits:
                        misfits.append(misfit)
            yield values

    found, blocks = rows(), []
    while some := list(islice(found, 1000)):
        blocks.append(np.array(some))
    if not blocks:
        raise DataError(f"{table.path} has no rows")
    return np.concatenate(blocks), tuple(misfits)


def _client(names: dict[str, int], cell: str) -> float:
    """Return the number of a client; a new one is added to `names`."""
    if not (name := cell_text(cell)):
        raise ValueError("no name")
    return names.setdefault(name, len(names))


def _time(cell: str) -> float:
    if (number := cell_number(cell)) is None:
        raise ValueError("no number")
    return number
