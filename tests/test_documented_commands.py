"""The commands that the documents show: their options, settings and names exist, and each page says where they are run.

A page with commands has a line `<!-- commands: run by tests/test_NAME.py -->` or `<!-- commands: not run: WHY -->`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kindred import REGISTRY, data
from kindred.server_app.cli import run
from kindred.server_app.config import SETTINGS
from kindred.server_app.presets import load_preset

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS}
PROGRAMS = ("kindred", "flwr", "make", "pip", "git", "python", "examples/three-sites/run")
MARKER = re.compile(r"<!-- commands: (?:not run: \S.*|run by (tests/\w+\.py)) -->")
KINDRED = typer.main.get_command(run.commands.app)
# Names of the example extension, which docs/extending.md uses.
EXAMPLES = {"tumours", "amounts", "linear", "blend", "own-share", "diabetes"}


def blocks(text: str) -> Iterator[str]:
    """Yield the fenced and the indented blocks of a page."""
    for number, part in enumerate(re.split(r"^```.*\n", text, flags=re.M)):
        if number % 2:
            yield part
        else:
            yield from (
                re.sub(r"^    ", "", found[0], flags=re.M) for found in re.finditer(r"(?:^ {4}.*\n)+", part, re.M)
            )


def shown_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command on a page, without variables before it and comments."""
    for block in blocks(text):
        lines = iter(block.splitlines())
        for line in lines:
            command = re.sub(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*|\s+#.*$", "", line)
            if not re.match(rf"(?:{'|'.join(PROGRAMS)})(?: \S|$)", command):
                continue
            while command.endswith("\\") or command.count("'") % 2 or command.count('"') % 2:
                command = command.removesuffix("\\") + " " + next(lines).strip()
            yield shlex.split(command, comments=True)


def parsed(command: Any, words: list[str]) -> dict[str, Any]:
    """Options and arguments of a command of `kindred`; files need not exist."""
    if words and hasattr(command, "commands"):
        return parsed(command.commands[words[0]], words[1:])
    for parameter in command.params:
        if hasattr(parameter.type, "exists"):
            parameter.type.exists = False
    return command.make_context("kindred", words).params


def check_settings(assignments: Iterable[str]) -> None:
    for assignment in assignments:
        key, _, value = assignment.rpartition(":")[2].partition("=")
        if key != "strategy" and not {key, value} & EXAMPLES:
            SETTINGS[key].parse(value)


def check_names(options: dict[str, Any]) -> None:
    """Placeholders, such as PARTITION, are in capitals."""
    preset = options.get("preset") or ""
    variants = [each.partition(":")[0] for each in options.get("settings") or [] if ":strategy=" in each]
    variants += load_preset(preset).strategies if preset and not preset.startswith("$") else []
    lists = [options.get(name) or "" for name in ("strategy", "strategies", "against")]
    assert {name for name in ",".join(lists).split(",") if name} <= {*REGISTRY, *variants, *EXAMPLES}
    for name, known in (("dataset", data.DATASETS), ("partition", data.PARTITIONS)):
        given = options.get(name)
        assert not given or given.isupper() or given in {*known, *EXAMPLES}


WITH_COMMANDS = [page for page, text in PAGES.items() if any(shown_commands(text))]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_are_accepted(page) -> None:
    for program, *words in shown_commands(PAGES[page]):
        if program == "kindred" and "..." not in words:
            options = parsed(KINDRED, words)
            check_settings(options.get("settings") or [])
            check_names(options)
        elif program == "flwr" and "--run-config" in words:
            assignments = words[words.index("--run-config") + 1]
            if not assignments.endswith(".toml"):
                check_settings(re.split(r" (?=[\w-]+=)", assignments))
        elif program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M)
        elif program == "python" and words[0] == "-m" and words[1].startswith("benchmarks."):
            assert (ROOT / words[1].replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_a_page_says_whether_its_commands_are_run(page) -> None:
    marker = MARKER.search(PAGES[page])
    assert marker
    if test := marker[1]:
        path = Path(page)
        assert (path.parent if path.name == "README.md" else path).name in (ROOT / test).read_text()
