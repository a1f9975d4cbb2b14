"""Benchmarks; each prints ratios measured in one run: python -m benchmarks.NAME."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence


def methods_named(text: str) -> list[str]:
    """Return the methods in the text of an option: names separated by commas, or `all`."""
    from kindred import REGISTRY

    return names_of(REGISTRY)(text)


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of names separated by commas, or `all`."""

    def parse(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown, allowed: all, {', '.join(known)}")
        return names

    return parse


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: the first column aligned left; the others, which are numbers, right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
