"""Tables in CSV files, and cells in them that do not fit."""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .files import DataError, one_line
from .schema import cell_number, printable

DELIMITERS = ",;\t"
"""The delimiters that are recognised: the one that the first line has most often, outside quotes."""


@dataclass(frozen=True)
class Table:
    """A CSV file with a header.

    Attributes
    ----------
    path : Path
    header : tuple of str
        The names of the columns, as `printable` returns them; all different.
    delimiter : str
        Between cells.
    """

    path: Path
    header: tuple[str, ...]
    delimiter: str

    @classmethod
    def open(cls, path: Path) -> Table:
        """Return the table in a file; DataError where it cannot be read, or has no header."""
        with _reading(path):
            with open(path, encoding="utf-8-sig", newline="") as file:  # spreadsheets write a byte order mark first
                first = file.readline(1_000_000)
            delimiter = max(DELIMITERS, key=re.sub('"[^"]*"', "", first).count)
            header = tuple(printable(name) for name in next(_lines(path, delimiter), (1, []))[1])
        # Whole numbers are allowed as names. A row of measurements, taken for a header, would be lost silently.
        wrong = [name for name in header if cell_number(name) is not None and not name.isdecimal()]
        wrong += [name for name in header if header.count(name) > 1]
        if wrong or not header:
            raise DataError(
                f"{path} has no header: its first line must name the columns, each differently"
                + (f", and has {wrong[0]!r}" if wrong else "")
            )
        return cls(path, header, delimiter)

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of each row, as a spreadsheet shows it, and its cells; empty rows are skipped.

        Rows are read one at a time: a list of texts takes many times the memory of the file.

        Raises
        ------
        DataError
            The file cannot be read, or a row has more or fewer cells than the header.
        """
        with _reading(self.path):
            lines = _lines(self.path, self.delimiter)
            next(lines)
            for number, cells in lines:
                if len(cells) != len(self.header):
                    raise DataError(
                        f"{self.path}: row {number:,} has {len(cells)} cells, the header {len(self.header)}"
                    )
                yield number, cells

    def place(self, name: str, what: str) -> int:
        """Return the place of a column; DataError where it is not there, which says `what` it is."""
        if name not in self.header:
            columns = textwrap.shorten(", ".join(self.header), 300)
            raise DataError(f"{self.path} has no column {name!r}, {what}; its columns: {columns}")
        return self.header.index(name)


@dataclass(frozen=True)
class Misfit:
    """A cell that does not fit a schema.

    Attributes
    ----------
    path : Path
    row : int
        As a spreadsheet shows it: the header is row 1.
    column, cell : str
    allowed : str
        What the cell may be, as a phrase.
    """

    path: Path
    row: int
    column: str
    cell: str
    allowed: str

    def __str__(self) -> str:
        return (
            f"{self.path}: row {self.row:,}, column {self.column}: {textwrap.shorten(repr(self.cell), 60)}, "
            f"allowed: {textwrap.shorten(self.allowed, 200)}"
        )


def _lines(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each row that has any."""
    number = 0
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            for number, cells in enumerate(csv.reader(file, delimiter=delimiter, strict=True), start=1):
                if cells:
                    yield number, cells
        except csv.Error as error:  # without `strict` a quote that is not closed would take in the rows that follow
            raise csv.Error(f"row {number + 1:,} has a quote that is not closed, or text after it ({error})") from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}") from error
