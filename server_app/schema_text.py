"""A schema as lines of text, for `kindred run` and `kindred schema`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from kindred.data import Task
from kindred.data.inputs import TableInputs
from kindred.data.schema import Column

HEAD = ("column", "type", "missing", "values")


def schema_lines(task: Task) -> list[str]:
    """Return lines about a task: a table of the columns, or of other inputs their shape, and the targets."""
    objective = task.objective
    if not isinstance(task.inputs, TableInputs):
        inputs = task.inputs
        shape = f"{inputs.kind}: {'x'.join(map(str, inputs.shape))} ({inputs.sides})"
        names = textwrap.shorten(", ".join(objective.names), 80) or f"{objective.num_outputs} outputs"
        return [shape, f"target: {objective.name}, {names}"]
    schema = task.inputs.schema
    rows = [(each.name, each.type, "yes" if each.missing else "no", _values(each)) for each in schema.columns]
    names = textwrap.shorten(", ".join(objective.names), 80)
    target = f"target {schema.target}: {objective.name}" if schema.target else f"target: {objective.name}"
    return [
        *_aligned([HEAD, *rows]),
        target + (f", {names}" if objective.has_classes and names else ""),
        f"{len(rows)} columns become {schema.num_features} features",
    ]


def _values(column: Column) -> str:
    if column.categories:
        return f"{len(column.categories)}: {textwrap.shorten(', '.join(column.categories), 60)}"
    return f"mean {column.mean:.4g}, deviation {column.deviation:.4g}"


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return rows as lines in which each column starts at one place."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
