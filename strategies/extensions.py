"""Registries of methods, models, datasets and partitions by name: our own, and those of installed packages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, cast

Entry = TypeVar("Entry")


class ExtensionError(ValueError):
    """An entry of an installed package cannot be used; the message, one line, says which and why."""


class Registry(Mapping[str, Entry]):
    """Entries by name: our own, and those of installed packages, which declare entry points in their pyproject.toml.

    All processes in one environment find the same names. An installed package is imported when its entry is first
    used; listing its name does not import it.

    Parameters
    ----------
    group : str
        The group of entry points, such as "kindred.methods".
    kind : type
        The required type of an entry.
    own : mapping
        Our own entries. An entry that is imported late is given as in entry points: "package.module:NAME".
    """

    def __init__(self, group: str, kind: type[Any], own: Mapping[str, Entry] | Mapping[str, str]) -> None:
        self.group, self.kind, self.own = group, kind, own

    def _added(self) -> Mapping[str, list[EntryPoint]]:
        return entry_points_by_group().get(self.group, {})

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.own, *sorted(self._added()))))

    def __len__(self) -> int:
        return len(self.own.keys() | self._added())

    def __contains__(self, name: object) -> bool:  # Mapping's own would import the entry
        return name in self.own or name in self._added()

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of this name, our own or an installed package's.

        Raises
        ------
        KeyError
            The name is unknown.
        ExtensionError
            The name is registered twice, or the entry cannot be imported or has the wrong type.
        """
        points = self._added().get(name)
        if not points:
            own = self.own[name]
            return _imported(own) if isinstance(own, str) else own
        whose = ["kindred"] * (name in self.own) + [f"{_package(point)} ({point.value})" for point in points]
        what = f"{name!r} of {self.group}"
        if len(whose) > 1:
            raise ExtensionError(
                f"{what} is registered more than once, by {' and by '.join(whose)}: give it another "
                "name, or remove a package"
            )
        try:
            entry = points[0].load()
        except Exception as error:  # importing a module can raise anything
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ExtensionError(f"{what} cannot be imported from {whose[0]}: {why}") from error
        if not isinstance(entry, self.kind):
            raise ExtensionError(f"{what}, from {whose[0]}, is {entry!r}, allowed: a {self.kind.__name__}")
        return cast(Entry, entry)


@functools.cache  # every message looks up entries
def _imported(entry: str) -> Any:
    """Return what "package.module:NAME" names."""
    return EntryPoint("", entry, "").load()


@functools.cache  # looking up the installed packages takes some hundredths of a second
def entry_points_by_group() -> dict[str, dict[str, list[EntryPoint]]]:
    """Return all entry points by group and name: every message looks one up, and searching a list would be slow."""
    installed = entry_points()
    found: dict[str, dict[str, list[EntryPoint]]] = {group: {} for group in installed.groups}
    for group, points in found.items():
        for point in installed.select(group=group):
            points.setdefault(point.name, []).append(point)
    return found


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an installed package"
