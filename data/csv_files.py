"""The dataset `csv`: tables whose rows belong to clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from kindred.objectives import Objective

from .dataset import Dataset
from .files import DataError, existing_path
from .inference import check_parts, infer_schema
from .inputs import TableInputs
from .rows import Rows, read_samples
from .schema import Schema
from .tables import Misfit, Table
from .targets import Target
from .task import Task

NEEDS = "csv needs a CSV file, a folder with train.csv and test.csv, or a folder with a CSV file for each client"
SETTINGS = ("target", "client", "time", "task", "schema")

Parts = tuple[list[Table], list[Table]]
"""Tables for training, and tables for test; there may be none of the latter."""


def read_csv(
    data_dir: str, target: str = "", client: str = "", time: str = "", task: str = "auto", schema: str = ""
) -> Dataset:
    """Read tables.

    Parameters
    ----------
    data_dir : str
        A CSV file; a folder with `train.csv` and `test.csv`; or a folder with a CSV file for each client, whose name is
        the client's.
    target : str
        What is predicted: a column, columns of labels separated by commas, or a comparison such as `num>0`.
    client, time : str
        Columns that say whose a row is, and when it was (a number); "" for none.
    task : str
        Name of an objective; "auto": the one that fits the target.
    schema : str
        A schema.json file, which decides columns, categories, target, means and deviations; "": they are inferred
        from the rows.

    Raises
    ------
    DataError
        The files cannot be read, or a cell or a setting does not fit; it names file, row, column and value.
    """
    path = existing_path(data_dir, NEEDS)
    parts = csv_parts(path)
    remarks: list[str] = []
    if schema:
        known, objective = table_task(Path(schema))
        check_schema(known, objective, target, client, time, task)
        known = replace(known, target=target or known.target, client=client or known.client, time=time or known.time)
        check_parts(Target.parse(known.target, [*parts[0], *parts[1]][0]), known.client, known.time)
    else:
        known, objective, remarks = infer_schema([*parts[0], *parts[1]], target, client, time, task)
    dataset = read_parts(parts, known, objective)
    if objective.has_classes:
        _check_classes(dataset.y_train, objective.names, known, path)
    return replace(dataset, is_fitted=bool(schema), remarks=(*remarks, *dataset.remarks))


def check_schema(known: Schema | None, objective: Objective, target: str, client: str, time: str, task: str) -> None:
    """Check that settings fit a schema, which is None if it is of no tables; DataError where one does not."""
    own = known.target if known else ""
    if target and "".join(target.split()) != "".join(own.split()):
        raise DataError(f"target is {target!r}, allowed with this schema: {own or 'none'}")
    if task not in ("auto", objective.name):
        raise DataError(f"task is {task!r}, allowed with this schema: 'auto' or {objective.name!r}")
    for key, name in (("client", client), ("time", time)):
        if known and name in [column.name for column in known.columns]:
            raise DataError(f"{key} is {name!r}, which is an input in this schema, allowed: another column")


def schema_of_sample(data_dir: str, target: str, client: str, time: str, task: str) -> tuple[Task, tuple[str, ...]]:
    """Return the task of tables like those of a sample, and lines about what of the sample is not used.

    The parameters are those of `read_csv`. In any column cells may be missing, as other tables may lack other cells.
    """
    sample = read_csv(data_dir, target, client, time, task)
    assert sample.schema is not None
    columns = tuple(replace(column, missing=True) for column in sample.schema.columns)
    sample = replace(sample, schema=replace(sample.schema, columns=columns))
    return Task.fitted(sample, sample.x_train, sample.y_train), sample.remarks


def table_task(path: Path) -> tuple[Schema, Objective]:
    """Return schema and objective in a schema.json file; DataError where it is not one of tables."""
    task = Task.load(path)
    if not isinstance(task.inputs, TableInputs):
        raise DataError(f"schema is {str(path)!r}, of {task.inputs.kind} inputs, allowed: of tables")
    return task.inputs.schema, task.objective


def read_tables(path: Path, schema: Schema, objective: Objective) -> Dataset:
    """Return the tables of one client, coded by a schema, whose client plays no part.

    Parameters
    ----------
    path : Path
        A CSV file; or a folder with `train.csv` and `test.csv`, or with others, which are read together.
    schema : Schema
    objective : Objective

    Raises
    ------
    DataError
        The tables cannot be read, have no row with a target, or have a cell that does not fit.
    """
    parts = csv_parts(path)
    time = "" if parts[1] else schema.time  # it only says which rows are for test
    return replace(read_parts(parts, replace(schema, client="", time=time), objective), clients_train=None)


def read_parts(parts: Parts, schema: Schema, objective: Objective) -> Dataset:
    """Return the rows of tables for training and for test, coded by a schema; DataError where a cell does not fit."""
    found = [[read_samples(table, schema, objective) for table in tables] for tables in parts]
    x_train, y_train, clients_train, times = _joined(parts[0], found[0], schema)
    x_test, y_test, clients_test = x_train[:0], y_train[:0], None
    if parts[1]:
        x_test, y_test, clients_test, times = (*_joined(parts[1], found[1], schema)[:3], None)
    without = sum(rows.without_target for part in found for rows in part)
    remarks = [f"rows without a target, which are not used: {without:,}"] if without else []
    remarks += unknown_remarks(schema, np.concatenate([x_train, x_test]))
    return Dataset(
        x_train, y_train, x_test, y_test, objective, "table", clients_train, clients_test, times, schema,
        remarks=tuple(remarks),
    )  # fmt: skip


def misfits(path: Path, schema: Schema, objective: Objective, most: int = 10) -> list[Misfit]:
    """Return the first cells of one client's tables that do not fit a schema; DataError as in `read_tables`."""
    schema = replace(schema, client="", time="")
    found: list[Misfit] = []
    for table in chain(*csv_parts(path)):
        if len(found) < most:
            found += read_samples(table, schema, objective, most - len(found)).misfits
    return found


def unknown_remarks(schema: Schema, x: np.ndarray) -> list[str]:
    """Return a line about each column of rows x that has categories which the schema does not have."""
    return [
        f"column {name!r}: {count:,} of {len(x):,} cells have a category that the schema does not have"
        for name, count in schema.unknown(x).items()
    ]


def missing_remarks(schema: Schema, x: np.ndarray) -> list[str]:
    """Return a line about the missing cells of rows x; none where there are none."""
    counts = np.isnan(x).sum(axis=0).tolist()
    columns = [f"{column.name} {count:,}" for column, count in zip(schema.columns, counts, strict=True) if count]
    return [f"{sum(counts):,} of {x.size:,} cells are missing ({', '.join(columns)})"] if columns else []


def csv_parts(path: Path) -> Parts:
    """Return the tables at a path, for training and for test: a file, train.csv and test.csv, or all of a folder."""
    if path.is_file():
        return [Table.open(path)], []
    files = sorted((each for each in path.iterdir() if re.fullmatch(r"[^.].*\.csv", each.name, re.IGNORECASE)), key=str)
    if not files:
        raise DataError(f"data-dir {path} has no CSV files: {NEEDS}")
    train, test = path / "train.csv", path / "test.csv"
    if train in files and test in files:
        return [Table.open(train)], [Table.open(test)]
    return [Table.open(each) for each in files], []


def _joined(
    tables: Sequence[Table], parts: Sequence[Rows], schema: Schema
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return inputs, targets, clients and times of several tables together."""
    if not sum(len(part.x) for part in parts):
        raise DataError(f"{tables[0].path} has no row with a target, {schema.target!r}")
    clients = [part.clients for part in parts if part.clients is not None]
    if not schema.client and len(tables) > 1:
        clients = [np.repeat(table.path.stem, len(part.x)) for table, part in zip(tables, parts, strict=True)]
    return (
        np.concatenate([part.x for part in parts]),
        np.concatenate([part.y for part in parts]),
        np.concatenate(clients) if clients else None,
        np.concatenate([part.times for part in parts if part.times is not None]) if schema.time else None,
    )


def _check_classes(y: np.ndarray, names: Sequence[str], schema: Schema, path: Path) -> None:
    """Check that there are training rows of each class; DataError where there are none."""
    counts = np.bincount(y, minlength=len(names))
    if (counts > 0).sum() < 2:
        only = names[int(counts.argmax())]
        raise DataError(f"{path}: the target {schema.target!r} has one class, {only!r}, allowed: 2 or more")
    if absent := [name for name, count in zip(names, counts, strict=True) if not count]:
        raise DataError(f"{path}: the target {schema.target!r} has no training row of the class {absent[0]!r}")
