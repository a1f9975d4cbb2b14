"""Benchmarks; each prints ratios measured in one run: python -m benchmarks.NAME."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence


def methods_named(text: str) -> list[str]:
    """Return the methods in the text of an option: names separated by commas, or `all`."""
    from kindred import REGISTRY

    names = list(REGISTRY) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in REGISTRY]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is no method, allowed: all, {', '.join(REGISTRY)}")
    return names


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: the first column aligned left; the others, which are numbers, right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
