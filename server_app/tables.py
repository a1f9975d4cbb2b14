"""Write CSV files of which a spreadsheet executes no cell, and read them back exactly.

A spreadsheet executes a cell as a formula if it begins with one of `= + - @`, a tab or a line break, even after blanks.
Names, metrics and reasons come from clients; class and file names come from other people's data. A text that begins
like this gets an apostrophe in front, and so does a text that begins with an apostrophe; `read_table` removes it.
Numbers are written unchanged.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from kindred.files import write_bytes

MARK = "'"
# The wide forms begin a formula too where an East Asian language is set.
RUN = re.compile(rf"\s*[=+\-@＝＋－＠]|[\t\r\n]|{MARK}")


def csv_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    """Return rows of texts, numbers and None (an empty cell), including a row of column names, as CSV."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(map(_marked, row) for row in rows)
    return text.getvalue().encode("utf-8", "backslashreplace")  # a file's name may have any bytes


def _marked(cell: Any) -> Any:
    return MARK + cell if isinstance(cell, str) and RUN.match(cell) else cell


def table_lines(columns: Collection[str], rows: Iterable[Mapping[str, Any]], header: bool = False) -> bytes:
    """Return rows as lines of a table, exactly one each: line breaks inside texts become spaces."""

    def one_line(value: Any) -> Any:
        return re.sub(r"[\r\n]+", " ", value) if isinstance(value, str) else value

    lines = ([row.get(column) for column in columns] for row in rows)
    return csv_lines(map(one_line, line) for line in chain([columns] if header else [], lines))


def read_table(path: Path) -> list[dict[str, Any]]:
    """Read history.csv or rounds.csv as rows of numbers and texts, without the empty cells.

    A client id that is written as a whole number is read as one. A last line without a line end is ignored.
    """
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    whole = io.StringIO(text[: text.rfind("\n") + 1], newline="")
    limit = csv.field_size_limit(max(len(text), 1))  # a cell may be long, for example a metric that is a list
    try:
        header, *rows = list(csv.reader(whole)) or [[]]
    finally:
        csv.field_size_limit(limit)
    columns = [column.removeprefix(MARK) for column in header]
    return [{key: _value(key, cell) for key, cell in zip(columns, row, strict=False) if cell} for row in rows if row]


def _value(key: str, cell: str) -> int | float | str:
    if cell.startswith(MARK):
        return cell.removeprefix(MARK)
    if key == "status":
        return cell
    if len(cell) <= 20 and cell.removeprefix("-").isdecimal() and str(int(cell)) == cell:  # 20 digits: any node id
        return int(cell)
    if key != "client":
        with suppress(ValueError):
            return float(cell)
    return cell


class GrowingTable:
    """A CSV file for a list of rows that only grows. The caller flushes it with `flush_files`.

    Parameters
    ----------
    path : Path
    columns : sequence of str
        The first columns; others follow in the order in which they first appear in rows.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = dict.fromkeys(columns)  # an ordered set
        self.written = 0

    def extend(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the rows that are not in the file yet; if there is a new column, rewrite the file."""
        added = rows[self.written :]
        columns = dict(self.columns)
        for row in added:
            columns.update(dict.fromkeys(row))
        if not self.written or len(columns) > len(self.columns):
            write_bytes(self.path, table_lines(columns, rows, header=True), flush=False)
        elif added:
            size = self.path.stat().st_size
            try:
                with open(self.path, "ab") as file:
                    file.write(table_lines(columns, added))
            except BaseException:
                os.truncate(self.path, size)
                raise
        self.columns, self.written = columns, len(rows)
