"""Inference of a table's schema and objective from its cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kindred.objectives import OBJECTIVES, Classes, Labels, Number, Objective

from .files import DataError
from .schema import A_NUMBER, Column, Schema, cell_number, cell_text, is_too_large
from .tables import Misfit, Table
from .targets import Target

MOST_CATEGORIES = 200
"""A column with more texts is no input: it holds free text or names."""

MOST_WHOLE_CLASSES = 20
"""A target of at most this many different whole numbers is one of classes."""

LEAST_ROWS = 20
"""In fewer rows a column that differs in nearly every row may be of any kind."""

NUMBERS_SHARE = 0.95
"""From this fraction of numbers on, a column is one of numbers, and its texts are errors."""

_DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}([-/.] ?)\d{1,2}\2\d{2,4}( .*)?"
    r"|\d{1,2}:\d{2}(:\d{2}.*)?( ?[AaPp]\.?[Mm]\.?)?"
    r"|\d{1,2}[-/. ]{1,2}[^\W\d]{3,9}[-/., ]{1,2}\d{2,4}|[^\W\d]{3,9}\.? \d{1,2},? \d{4}"
    r"|(19|20)\d{2}[-/.](0[1-9]|1[0-2])|(0?[1-9]|1[0-2])[-/.](19|20)\d{2}"
)
_WITH_COMMAS = re.compile(r"[-+]?\d+(,\d+)+(\.\d*)?")
_IDENTIFIER = re.compile(r"(.*[\W_])?(id|ID|Id)|.*[a-z](ID|Id)")


@dataclass
class Cells:
    """Counts of the cells of a column, by what they are.

    Attributes
    ----------
    name : str
    rows, missing, numbers, whole, dates, commas : int
        Numbers of cells: all, empty ones, numbers, whole numbers, dates and times of day, numbers with commas.
    texts : set of str
        Different cells, at most `MOST_CATEGORIES` + 1 of them.
    counted : bool
        Whether the cells number the rows of each file.
    no_number : Misfit or None
        The first cell that is no number.
    """

    name: str
    rows: int = 0
    missing: int = 0
    numbers: int = 0
    whole: int = 0
    dates: int = 0
    commas: int = 0
    texts: set[str] = field(default_factory=set)
    counted: bool = True
    no_number: Misfit | None = None

    def add(self, path: Path, row: int, cell: str, before: float | None) -> float | None:
        """Count a cell; return its number if it has one. `before` is the one of the row before; None in the first."""
        self.rows += 1
        number = cell_number(cell)
        if number is not None:
            self.numbers += 1
            self.whole += number.is_integer()
            self.counted = self.counted and (before is None or number == before + 1)
        elif not (text := cell_text(cell)):
            self.missing += 1
        else:
            if is_too_large(cell):
                raise DataError(str(Misfit(path, row, self.name, cell, A_NUMBER)))
            self.no_number = self.no_number or Misfit(path, row, self.name, cell, A_NUMBER)
            self.dates += bool(_DATE.fullmatch(text))
            self.commas += bool(_WITH_COMMAS.fullmatch(text))
        if len(self.texts) <= MOST_CATEGORIES and (text := cell_text(cell)):
            self.texts.add(text)
        return number

    @property
    def present(self) -> int:
        """Number of cells that are not missing."""
        return self.rows - self.missing

    def are_numbers(self) -> bool:
        """Return whether the column is one of numbers; DataError for a column of dates, or of numbers and few texts."""
        if self.dates > self.present / 2:
            raise DataError(
                f"column {self.name!r} holds dates or times ({self.no_number.cell if self.no_number else ''!r}), which "
                "are not supported: remove it, or replace it by numbers, such as days"
            )
        if self.no_number is None:
            return True
        if self.commas and self.numbers + self.commas >= NUMBERS_SHARE * self.present:
            raise DataError(
                f"{self.no_number}: the column's numbers have commas, for decimals or thousands; write 1234.5 without"
            )
        if self.numbers < NUMBERS_SHARE * self.present:
            return False
        raise DataError(f"{self.no_number}, as {self.numbers:,} of the column's {self.present:,} cells are")

    def unusable(self) -> str:
        """Return why the column is no input, as a phrase; "" where it is one."""
        if not self.name:
            return "it has no name"
        if not self.present:
            return "all its cells are empty"
        if len(self.texts) == 1 and not self.missing:
            return f"all its cells are {min(self.texts)}"
        if _IDENTIFIER.fullmatch(self.name):
            return "its name says that it identifies rows"
        if self.are_numbers():
            return "it numbers the rows" if self.counted and not self.missing and self.rows >= LEAST_ROWS else ""
        if len(self.texts) > MOST_CATEGORIES:
            return f"it has more than {MOST_CATEGORIES} different texts"
        if self.rows >= LEAST_ROWS and len(self.texts) > self.present / 2:
            return f"it has {len(self.texts)} different texts in {self.present} rows"
        return ""

    def categories(self) -> tuple[str, ...]:
        """Return the different cells: numbers by value, then texts by alphabet."""
        return tuple(sorted(self.texts, key=lambda text: (cell_number(text) is None, cell_number(text) or 0.0, text)))


def infer_schema(
    tables: Sequence[Table], target: str, client: str = "", time: str = "", task: str = "auto"
) -> tuple[Schema, Objective, list[str]]:
    """Return the schema and the objective of tables, and a line about each column that is not used.

    Parameters
    ----------
    tables : sequence of Table
        Files of one kind; each has the columns of the first.
    target : str
        See `Target.parse`.
    client, time : str
        Columns that are no inputs; "" for none.
    task : str
        Name of an objective; "auto": the one that fits the target.

    Returns
    -------
    schema : Schema
        Without means and deviations: `Schema.fit` adds them.
    objective : Objective
    remarks : list of str

    Raises
    ------
    DataError
        A column is missing, has two parts, holds dates, or holds numbers and few texts; no column is left; or the
        target has one value or too many.
    """
    first = tables[0]
    aim = Target.parse(target, first)
    for name, what in ((client, "the client"), (time, "the time")):
        if name:
            first.place(name, what)
    check_parts(aim, client, time)
    cells = {name: Cells(name) for name in first.header}
    for table in tables:
        _count(cells.values(), table)
    if not next(iter(cells.values())).rows:
        raise DataError(f"{first.path} has no rows")
    objective = _objective(aim, target, [cells[name] for name in aim.columns], task)
    columns, remarks = [], []
    for each in cells.values():
        if each.name and each.name in (*aim.columns, client, time):
            continue
        if reason := each.unusable():
            remarks.append(f"column {each.name!r} is not used: {reason}")
        else:
            columns.append(Column(each.name, () if each.are_numbers() else each.categories(), each.missing > 0))
            if columns[-1].categories and each.numbers > each.present / 2:
                remarks.append(
                    f"column {each.name!r} is one of categories, though {each.numbers:,} of its {each.present:,} cells "
                    f"are numbers: {each.no_number}"
                )
    if not columns:
        raise DataError(f"{first.path} has no column for input" + "".join(f"; {remark}" for remark in remarks))
    return Schema(tuple(columns), target, client, time), objective, remarks


def check_parts(target: Target, client: str, time: str) -> None:
    """Check that target, client and time are different columns; DataError where one is two of them."""
    for name, what in ((client, "client"), (time, "time")):
        if name and name in target.columns:
            raise DataError(f"{what} is {name!r}, which is a target, allowed: another column")
    if client and client == time:
        raise DataError(f"client and time are {client!r}, allowed: a column for each")


def _count(cells: Iterable[Cells], table: Table) -> None:
    """Count the cells of a table."""
    columns = [(each, table.place(each.name, "which other files have")) for each in cells]
    before: list[float | None] = [None] * len(columns)
    for row, values in table.rows():
        before = [
            each.add(table.path, row, values[place], last) for (each, place), last in zip(columns, before, strict=True)
        ]


def _objective(target: Target, text: str, cells: Sequence[Cells], task: str) -> Objective:
    """Return the objective that fits the cells of a target, or the one named `task`."""
    if task not in ("auto", *OBJECTIVES):
        raise DataError(f"task is {task!r}, allowed: auto, {', '.join(OBJECTIVES)}")
    kind = _fitting(target, cells) if task == "auto" else OBJECTIVES[task]
    if target.comparison:
        if not kind.has_classes:
            raise DataError(f"target is {text!r}, which makes two classes, and task {task}: not both")
        if target.comparison != "==" or cell_number(target.than) is not None:
            cells[0].are_numbers()
        return kind(2, target.classes)
    for each in cells:
        if not each.present:
            raise DataError(f"the target {each.name!r} has no value: all its cells are empty")
        if len(each.texts) == 1 and len(cells) == 1:
            raise DataError(f"the target {each.name!r} has one value, {min(each.texts)!r}; allowed: 2 or more")
    if not kind.has_classes:
        try:
            return kind(len(cells), target.columns)
        except ValueError as error:
            raise DataError(f"target is {text!r}, which does not fit task {task}: {error}") from None
    if len(cells) > 1:
        raise DataError(f"target is {text!r}, of {len(cells)} columns, and classes need one")
    if len(cells[0].texts) > MOST_CATEGORIES:
        raise DataError(f"the target {text!r} has more than {MOST_CATEGORIES} different values, too many for classes")
    return kind(len(cells[0].texts), cells[0].categories())


def _fitting(target: Target, cells: Sequence[Cells]) -> type[Objective]:
    if target.comparison:
        return Classes
    if len(cells) > 1:
        return Labels
    (each,) = cells
    if not each.are_numbers() or len(each.texts) <= 2:
        return Classes
    return Classes if each.whole == each.numbers and len(each.texts) <= MOST_WHOLE_CLASSES else Number
