"""Schemas from codebooks: a CSV file that describes the columns of tables, in a row for each.

| column of the codebook | needed | meaning |
| --- | --- | --- |
| `name` | yes | name of the column |
| `type` | yes | `number` or `category` |
| `categories` | of categories | their names, separated by semicolons |
| `mean`, `deviation` | of numbers | with which numbers are standardised |
| `missing` | no | `yes` (the default) or `no`: whether cells may be empty |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kindred.objectives import OBJECTIVES, Classes, Labels, Number, Objective

from .files import DataError
from .inputs import TableInputs
from .schema import A_NUMBER, Column, Schema, cell_number, cell_text, printable
from .tables import Misfit, Table
from .targets import Target
from .task import Task

YES, NO = ("yes", "TRUE", "1"), ("no", "FALSE", "0")


@dataclass(frozen=True)
class Entry:
    """A row of a codebook.

    Attributes
    ----------
    path : Path
    row : int
    cells : mapping of str to str
    """

    path: Path
    row: int
    cells: Mapping[str, str]

    def column(self) -> Column:
        """Return the column that the row describes; DataError where a cell is not one of those that are allowed."""
        name, kind = printable(self.cells["name"]), printable(self.cells["type"])
        missing = cell_text(self.cells.get("missing", "")) or YES[0]
        if missing not in YES + NO:
            raise self._misfit("missing", "yes or no")
        if kind == "category":
            categories = tuple(filter(None, map(cell_text, self.cells.get("categories", "").split(";"))))
            if not categories or len(set(categories)) < len(categories):
                raise self._misfit("categories", "different names, separated by semicolons")
            return Column(name, categories, missing in YES)
        if kind != "number":
            raise self._misfit("type", "number or category")
        mean, deviation = (cell_number(self.cells.get(key, "")) for key in ("mean", "deviation"))
        if mean is None:
            raise self._misfit("mean", A_NUMBER)
        if deviation is None or deviation <= 0:
            raise self._misfit("deviation", "a number above 0")
        return Column(name, (), missing in YES, mean, deviation)

    def _misfit(self, column: str, allowed: str) -> DataError:
        return DataError(str(Misfit(self.path, self.row, column, self.cells.get(column, ""), allowed)))


def read_codebook(path: Path, target: str, client: str = "", time: str = "", task: str = "auto") -> Task:
    """Return the task of the tables that a codebook describes.

    Parameters
    ----------
    path : Path
        See above.
    target, client, time, task : str
        As in `kindred.data.csv_files.read_csv`. Client and time need no row in the codebook.

    Raises
    ------
    DataError
        The codebook cannot be read or lacks a column; a row is not one; or the target is not in it.
    """
    table = Table.open(path.expanduser())
    for needed in ("name", "type"):
        table.place(needed, "which a codebook needs")
    entries: dict[str, Entry] = {}
    for row, cells in table.rows():
        entry = Entry(path, row, dict(zip(table.header, cells, strict=True)))
        name = printable(entry.cells["name"])
        if not name or name in entries:
            raise DataError(str(Misfit(path, row, "name", name, "a name, different from the others")))
        entries[name] = entry
    described = Table(path, tuple(entries), table.delimiter)
    aim = Target.parse(target, described)
    columns = [each.column() for name, each in entries.items() if name not in (*aim.columns, client, time)]
    if not columns:
        raise DataError(f"{path} has no column for input")
    return Task(TableInputs(Schema(tuple(columns), target, client, time)), _objective(aim, entries, target, task))


def _objective(target: Target, entries: Mapping[str, Entry], text: str, task: str) -> Objective:
    if task not in ("auto", *OBJECTIVES):
        raise DataError(f"task is {task!r}, allowed: auto, {', '.join(OBJECTIVES)}")
    column = None if target.comparison or len(target.columns) > 1 else entries[target.columns[0]].column()
    kind: type[Objective] = (
        Labels if len(target.columns) > 1 else Number if column and not column.categories else Classes
    )
    kind = OBJECTIVES[task] if task != "auto" else kind
    names: tuple[str, ...] = target.columns
    if kind.has_classes:
        names = target.classes if target.comparison else column.categories if column else ()
        if len(names) < 2:
            raise DataError(f"the codebook has {len(names)} categories of the target {text!r}, allowed: 2 or more")
    try:
        objective = kind(len(names), names)
    except ValueError as error:
        raise DataError(f"target is {text!r}, which does not fit task {task}: {error}") from None
    if isinstance(objective, Number) and column and not column.categories:
        return Number(1, names, column.mean, column.deviation)
    return objective
