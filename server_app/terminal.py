"""Print tables that fit the terminal: heads and texts are wrapped, numbers never; what still does not fit is a record.

The width is that of the terminal, or the environment variable COLUMNS, also in a pipe. A pipe or file without it has
no width, and tables are as wide as their longest lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NARROWEST = 16  # characters to which a column of texts is wrapped
UNLIMITED = 10_000  # characters of a line in a file or pipe
INDENT, GAP = 2, 2  # characters before, and between, the titles and the cells of a record


@dataclass(frozen=True)
class Column:
    """A column of a printed table.

    Attributes
    ----------
    title : str
        Wrapped at blanks where the table is too wide.
    whole : bool (default: True)
        Whether its cells, such as numbers and names, are never wrapped.
    right : bool (default: False)
        Whether its cells are aligned at the right.
    """

    title: str
    whole: bool = True
    right: bool = False


def number(title: str) -> Column:
    """Return a column of numbers, aligned at the right."""
    return Column(title, right=True)


def texts(*titles: str) -> tuple[Column, ...]:
    """Return columns of texts, which are wrapped at blanks, after a first one of names."""
    first, *others = titles
    return (Column(first), *(Column(title, whole=False) for title in others))


def print_table(
    columns: Sequence[Column], lines: Iterable[Sequence[str | Text]], file: TextIO | None = None, ruled: bool = True
) -> None:
    """Print a table.

    Parameters
    ----------
    columns : sequence of n Column
        The cells of the first one are the titles of records.
    lines : iterable of sequences of n str or Text
        A str is printed unchanged, without markup.
    file : text stream, optional
        By default standard output.
    ruled : bool (default: True)
        Whether there are a rule below the heads and blank lines around the table.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        console.width = UNLIMITED
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in line] for line in lines]
    console.print(_fitted(columns, cells, console.width, ruled))


def _fitted(columns: Sequence[Column], lines: Sequence[Sequence[Text]], width: int, ruled: bool) -> RenderableType:
    """Return the table with its columns in `width` characters, or its lines as records where that is impossible."""
    cells = [max((line[i].cell_len for line in lines), default=0) for i in range(len(columns))]
    widest = [max(cell_len(column.title), cell) for column, cell in zip(columns, cells, strict=True)]
    least = [
        max(_longest_word(column.title), cell if column.whole else min(cell, NARROWEST))
        for column, cell in zip(columns, cells, strict=True)
    ]
    spare = width - (3 * len(columns) - 1 if ruled else 2 * (len(columns) - 1)) - sum(least)
    if spare < 0:
        return _records(columns, lines, cells, width)
    widths = list(least)
    for _ in range(min(spare, sum(widest) - sum(least))):  # the most shortened column gets the next character
        short = max(range(len(columns)), key=lambda i: widest[i] - widths[i])
        widths[short] += 1
    table = Table(box=box.SIMPLE_HEAD if ruled else None, show_edge=ruled, pad_edge=False)
    for column, size in zip(columns, widths, strict=True):
        table.add_column(column.title, width=size, justify="right" if column.right else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def _records(
    columns: Sequence[Column], lines: Sequence[Sequence[Text]], cells: Sequence[int], width: int
) -> RenderableType:
    """Return for each line its first cell, and below it a line for each other one: title and cell."""
    first, *others = columns
    room = max(width - INDENT - GAP, 2)
    least = [cell if column.whole else min(cell, NARROWEST) for column, cell in zip(others, cells[1:], strict=True)]
    titles = min(max(cell_len(column.title) for column in others), max(room - max(least), 1))
    parts: list[RenderableType] = [first.title]
    for name, *line in lines:
        record = Table.grid(padding=(0, GAP, 0, 0))
        record.add_column(width=titles)
        record.add_column(width=min(room - titles, max(*cells[1:], 1)), overflow="fold")
        for column, cell in zip(others, line, strict=True):
            record.add_row(column.title, cell)
        parts += ["", name, Padding(record, (0, 0, 0, INDENT))]
    return Group(*parts, "")


def _longest_word(title: str) -> int:
    return max(map(cell_len, title.split()), default=0)
