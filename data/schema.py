"""The schema of a table: its columns, their types, and the numbers with which rows are prepared for the network.

A row of x, as a dataset has it, holds a float64 for each column: a number; or the place of a category among the
column's, and their number for a category that is not among them; NaN where the cell is empty.

The network takes features, in this order: the numbers, standardised, with 0 for a missing one; for each category a 1
where it is the row's, so that all are 0 for a category that the schema does not have; for each column in which cells
may be missing a 1 where one is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.lazy import lazy

from .files import DataError

if TYPE_CHECKING:
    from sklearn import compose, impute, pipeline, preprocessing
else:
    compose, impute = lazy("sklearn.compose"), lazy("sklearn.impute")
    pipeline, preprocessing = lazy("sklearn.pipeline"), lazy("sklearn.preprocessing")

MOST_NUMBER = 1e30
"""Largest number in a table: sums of squares remain finite."""

A_NUMBER = f"a number from -{MOST_NUMBER:g} to {MOST_NUMBER:g}"

MISSING = frozenset(("", "NA", "N/A", "n/a", "NaN", "nan", "?", ".", "null", "NULL"))
"""Cells without a value."""

MOST_FEATURES = 1_000_000
"""Largest number of features; a file with more is refused before its network is built."""


def printable(text: str) -> str:
    """Return a text without control characters, without blanks around it, and with single blanks in it."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", " ", text).split())


@lru_cache(maxsize=10_000)  # most cells are repeated
def cell_text(cell: str) -> str:
    """Return a cell as categories have it, "" where it is missing.

    TRUE and FALSE are in capitals; 2.0 is 2.
    """
    text = printable(cell)
    if text in MISSING:
        return ""
    if text.upper() in ("TRUE", "FALSE"):
        return text.upper()
    return text.partition(".")[0] if re.fullmatch(r"[-+]?\d+\.0*", text) else text


def cell_number(cell: str) -> float | None:
    """Return the number in a cell; None where there is none, or one beyond `MOST_NUMBER`."""
    value = _float(cell)
    return value if abs(value) <= MOST_NUMBER and "_" not in cell else None


@lru_cache(maxsize=10_000)  # as for `cell_text`
def is_too_large(cell: str) -> bool:
    """Return whether a cell holds a finite number beyond `MOST_NUMBER`."""
    return MOST_NUMBER < abs(_float(cell)) < math.inf


def _float(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


@dataclass(frozen=True)
class Column:
    """A column of numbers, or of categories.

    Attributes
    ----------
    name : str
    categories : tuple of str
        Texts as `cell_text` returns them; empty for a column of numbers.
    missing : bool
        Whether the network gets a feature that says where a cell is missing.
    mean, deviation : float
        Of numbers, those that are missing excepted.
    """

    name: str
    categories: tuple[str, ...] = ()
    missing: bool = False
    mean: float = 0.0
    deviation: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and all(isinstance(each, str) and each for each in self.categories)):
            raise ValueError(f"column {self.name!r} has a name or a category that is no text")
        if len(set(self.categories)) != len(self.categories):
            raise ValueError(f"column {self.name!r} has a category twice")
        if not (_is_finite(self.mean) and _is_finite(self.deviation) and self.deviation > 0):
            raise ValueError(
                f"column {self.name!r} has the mean {self.mean} and the deviation {self.deviation}, "
                "allowed: finite, and more than 0"
            )

    @property
    def type(self) -> str:
        """`category` or `number`."""
        return "category" if self.categories else "number"

    @property
    def allowed(self) -> str:
        """The cells that the column may have, as a phrase."""
        return f"one of {', '.join(self.categories)}" if self.categories else A_NUMBER

    @cached_property
    def _codes(self) -> dict[str, float]:
        return {category: float(code) for code, category in enumerate(self.categories)}

    def value(self, cell: str) -> float:
        """Return the value in x of a cell; ValueError for a text in a column of numbers."""
        if not self.categories and (value := cell_number(cell)) is not None:
            return value
        text = cell_text(cell)
        if not text:
            return math.nan
        if not self.categories:
            raise ValueError("no number")
        return self._codes.get(text, float(len(self.categories)))

    def to_dict(self) -> dict[str, Any]:
        """Return the column as entries of a JSON file."""
        about = {"name": self.name, "type": self.type, "missing": self.missing}
        if self.categories:
            return about | {"categories": list(self.categories)}
        return about | {"mean": self.mean, "deviation": self.deviation}

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Column:
        """Return the column that `to_dict` describes; raise KeyError, TypeError or ValueError where it is none."""
        given = dict(entries)
        kind, categories = given.pop("type"), tuple(given.pop("categories", ()))
        column = cls(categories=categories, **given)
        if column.type != kind:
            raise ValueError(f"column {column.name!r} is of type {kind!r}, and has {len(categories)} categories")
        return column


@dataclass(frozen=True)
class Schema:
    """The columns of a table.

    Attributes
    ----------
    columns : tuple of Column
        The inputs of the models.
    target : str
        The target, as the setting `target` has it; "" where the data are no CSV files.
    client, time : str
        Columns that say whose a row is, and when it was; "" for none.
    """

    columns: tuple[Column, ...]
    target: str = ""
    client: str = ""
    time: str = ""

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"a schema has {len(names)} columns, {len(set(names))} of them different; allowed: 1 or more"
            )
        if not all(isinstance(text, str) for text in (self.target, self.client, self.time)):
            raise ValueError("target, client and time of a schema are not all texts")
        if self.num_features > MOST_FEATURES:
            raise ValueError(f"a schema has {self.num_features:,} features, allowed: up to {MOST_FEATURES:,}")

    @classmethod
    def of_numbers(cls, x: np.ndarray) -> Schema:
        """Return the schema of an array (n, columns) of numbers, whose columns are named by their places."""
        missing = np.isnan(x).any(axis=0)
        return cls(tuple(Column(str(place), missing=bool(there)) for place, there in enumerate(missing)))

    @property
    def num_features(self) -> int:
        """Number of features that the network takes."""
        return sum((len(column.categories) or 1) + column.missing for column in self.columns)

    def fit(self, x: np.ndarray) -> Schema:
        """Return the schema with the means and deviations of the numbers in rows x (n, columns).

        A column without a number has mean 0; one whose numbers are all equal, deviation 1.
        """
        if not (places := self._places(lambda column: not column.categories)):
            return self
        with np.errstate(invalid="ignore"):  # of a column without a number
            scaler = preprocessing.StandardScaler().fit(x[:, places])
        columns = list(self.columns)
        for place, mean, scale in zip(places, scaler.mean_.tolist(), scaler.scale_.tolist(), strict=True):
            known = math.isfinite(mean) and math.isfinite(scale)
            columns[place] = replace(
                columns[place], mean=mean if known else 0.0, deviation=scale if known and scale > 0 else 1.0
            )
        return replace(self, columns=tuple(columns))

    def features(self, x: np.ndarray) -> np.ndarray:
        """Return the features (n, num_features), float32, of rows x (n, columns).

        Raises
        ------
        DataError
            The rows have another number of columns, too large numbers, or numbers of no category.
        """
        if x.shape[1:] != (len(self.columns),):
            raise DataError(f"rows have the shape {x.shape[1:]}, expected {len(self.columns)} columns")
        if (np.abs(x) > MOST_NUMBER).any():
            raise DataError(f"a row has a number beyond {MOST_NUMBER:g}")
        for place, column in enumerate(self.columns):
            if most := len(column.categories):
                codes = x[:, place]
                if (wrong := ~(np.isnan(codes) | np.isin(codes, np.arange(most + 1)))).any():
                    raise DataError(
                        f"column {column.name!r} has {codes[wrong][0]:g}, allowed: the number of a category, 0 to "
                        f"{most - 1}; {most} for an unknown one; or NaN"
                    )
        if not len(x):
            return np.empty((0, self.num_features), np.float32)
        with np.errstate(over="ignore"):  # such features are refused next
            features = np.ascontiguousarray(self.transformer.transform(x.astype(np.float64, copy=False)), np.float32)
        if len(wrong := np.argwhere(~np.isfinite(features))):
            row, feature = wrong[0]
            place = self._places(lambda column: not column.categories)[feature]  # the features of numbers come first
            raise DataError(
                f"column {self.columns[place].name!r} has {x[row, place]:g}, too many deviations "
                f"({self.columns[place].deviation:g}) from its mean"
            )
        return features

    @cached_property
    def transformer(self) -> compose.ColumnTransformer:
        """scikit-learn's transformer of rows x into features.

        It is fitted to two rows that have the schema's means and deviations. So a schema read from a file transforms as
        the one that was written, and no object of scikit-learn is stored.
        """
        numbers = pipeline.make_pipeline(
            preprocessing.StandardScaler(), impute.SimpleImputer(strategy="constant", fill_value=0.0)
        )
        categories = [np.arange(float(len(column.categories))) for column in self.columns if column.categories]
        encoder = preprocessing.OneHotEncoder(categories=categories, handle_unknown="ignore", sparse_output=False)
        parts = [
            ("numbers", numbers, self._places(lambda column: not column.categories)),
            ("categories", encoder, self._places(lambda column: bool(column.categories))),
            ("missing", impute.MissingIndicator(features="all"), self._places(lambda column: column.missing)),
        ]
        rows = np.array([
            [0.0 if each.categories else each.mean + sign * each.deviation for each in self.columns] for sign in (-1, 1)
        ])  # fmt: skip
        return compose.ColumnTransformer(parts, sparse_threshold=0).fit(rows)

    def unknown(self, x: np.ndarray) -> dict[str, int]:
        """Return the number of cells in rows x whose category the schema does not have, by column; none with 0."""
        counts = {
            column.name: int((x[:, place] == len(column.categories)).sum())
            for place, column in enumerate(self.columns)
            if column.categories
        }
        return {name: count for name, count in counts.items() if count}

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as entries of a JSON file."""
        return {
            "target": self.target,
            "client": self.client,
            "time": self.time,
            "columns": [column.to_dict() for column in self.columns],
        }

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Schema:
        """Return the schema that `to_dict` describes; raise KeyError, TypeError or ValueError where it is none."""
        given = dict(entries)
        return cls(tuple(map(Column.from_dict, given.pop("columns"))), **given)

    def _places(self, holds: Any) -> list[int]:
        return [place for place, column in enumerate(self.columns) if holds(column)]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
