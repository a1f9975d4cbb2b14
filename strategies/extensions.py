"""What goes by a name: methods, models, datasets and partitions, our own and those that installed packages add."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, cast

Entry = TypeVar("Entry")


class ExtensionError(ValueError):
    """What an installed package adds cannot be used; its text is one line that says what and why."""


class Registry(Mapping[str, Entry]):
    """Entries by name: our own, and entry points of installed packages, a line each in their pyproject.toml.

    Every process that runs in the same environment finds the same names. An installed package is imported when its
    entry is first asked for, not for its name.

    Parameters
    ----------
    group : str
        The group of entry points: "kindred.methods".
    kind : type
        What an entry must be.
    own : mapping
        Our own entries, or where those are that are imported late, as entry points say it: "package.module:NAME".
    """

    def __init__(self, group: str, kind: type[Any], own: Mapping[str, Entry] | Mapping[str, str]) -> None:
        self.group, self.kind, self.own = group, kind, own

    def _added(self) -> Mapping[str, list[EntryPoint]]:
        return entry_points_by_group().get(self.group, {})

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.own, *sorted(self._added()))))

    def __len__(self) -> int:
        return len(self.own.keys() | self._added())

    def __contains__(self, name: object) -> bool:  # Mapping's would import it
        return name in self.own or name in self._added()

    def __getitem__(self, name: str) -> Entry:
        """Our own entry, or an installed package's.

        Raises
        ------
        KeyError
            No such name.
        ExtensionError
            A name that is there twice, or an entry that cannot be imported or is something else.
        """
        points = self._added().get(name)
        if not points:
            own = self.own[name]
            return EntryPoint(name, own, self.group).load() if isinstance(own, str) else own
        whose = ["kindred"] * (name in self.own) + [f"{_package(point)} ({point.value})" for point in points]
        what = f"{name!r} of {self.group}"
        if len(whose) > 1:
            raise ExtensionError(
                f"{what} is registered more than once, by {' and by '.join(whose)}: give it another "
                "name, or remove a package"
            )
        try:
            entry = points[0].load()
        except Exception as error:  # whatever a module does when it is imported
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ExtensionError(f"{what} cannot be imported from {whose[0]}: {why}") from error
        if not isinstance(entry, self.kind):
            raise ExtensionError(f"{what}, from {whose[0]}, is {entry!r}, allowed: a {self.kind.__name__}")
        return cast(Entry, entry)


@functools.cache  # one look at what is installed, which takes some hundredths of a second
def entry_points_by_group() -> dict[str, dict[str, list[EntryPoint]]]:
    """By group and name: an entry is asked for with every message, and a list of all would be gone through."""
    installed = entry_points()
    found: dict[str, dict[str, list[EntryPoint]]] = {group: {} for group in installed.groups}
    for group, points in found.items():
        for point in installed.select(group=group):
            points.setdefault(point.name, []).append(point)
    return found


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an installed package"
