"""The target of a table: the columns that it is computed from, and the value of each row."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kindred.objectives import Labels, Objective

from .files import DataError
from .schema import A_NUMBER, cell_number, cell_text

if TYPE_CHECKING:
    from .tables import Table

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
"""The comparisons that make two classes of a column."""


@dataclass(frozen=True)
class Target:
    """The target of a table, as the setting `target` names it.

    Attributes
    ----------
    columns : tuple of str
        One column, or one for each label.
    comparison : str
        A key of `OPERATORS`; "" for the value of the column itself.
    than : str
        What the column is compared with: a number, or with == a text.
    """

    columns: tuple[str, ...]
    comparison: str = ""
    than: str = ""

    @classmethod
    def parse(cls, text: str, table: Table) -> Target:
        """Return the target of the setting `target`: a column, `a,b,c` for labels, or a comparison such as `num>0`.

        Raises
        ------
        DataError
            A column is not in the table, or a comparison has no number.
        """
        if text in table.header:
            return cls((text,))
        found = re.fullmatch(r"(.+?)\s*(>=|<=|==|>|<)\s*(.+)", text)
        if found:
            column, comparison, than = found.groups()
            table.place(column, f"of the target {text!r}")
            if comparison != "==" and cell_number(than) is None:
                raise DataError(f"target is {text!r}, allowed after {comparison}: a number")
            return cls((column,), comparison, cell_text(than))
        columns = tuple(name.strip() for name in text.split(","))
        for name in columns:
            table.place(name, f"of the target {text!r}" if text else "as target is not set")
        if len(set(columns)) < len(columns):
            raise DataError(f"target is {text!r}, allowed: each column once")
        return cls(columns)

    @property
    def classes(self) -> tuple[str, str]:
        """Names of the two classes of a comparison: that it is false, and that it is true."""
        holds = f"{self.columns[0]}{self.comparison}{self.than}"
        return f"not {holds}", holds

    def allowed(self, objective: Objective) -> str:
        """Cells that the columns may have, as a phrase."""
        if self.comparison == "==" and cell_number(self.than) is None:
            return "a text"
        if objective.has_classes and not self.comparison:
            return f"one of {', '.join(objective.names)}"
        return "0 or 1, FALSE or TRUE" if self.of_labels(objective) else A_NUMBER

    def of_labels(self, objective: Objective) -> bool:
        """Return whether each column is a label, true or not."""
        return len(self.columns) > 1 or isinstance(objective, Labels)

    def value(self, cell: str, objective: Objective) -> float:
        """Return the target's value in a cell: a class, a label or a number; NaN where it is missing.

        Raises
        ------
        ValueError
            The cell is not one of those that are `allowed`.
        """
        if not (text := cell_text(cell)):
            return math.nan
        if self.comparison:
            return self._compared(text)
        if objective.has_classes:
            return float(objective.names.index(text))
        if self.of_labels(objective):
            text = {"FALSE": "0", "TRUE": "1"}.get(text, text)
            return float(("0", "1").index(text))
        if (number := cell_number(text)) is None:
            raise ValueError("no number")
        return number

    def _compared(self, text: str) -> float:
        given, than = cell_number(text), cell_number(self.than)
        if than is None:
            return float(text == self.than)
        if given is None:
            raise ValueError("no number")
        return float(OPERATORS[self.comparison](given, than))
