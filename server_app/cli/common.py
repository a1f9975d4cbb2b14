"""The application of the command line, and what its commands share: options, one-line errors, tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from kindred.extensions import ExtensionError

UsageError: Any = typer.BadParameter.__base__  # click's, which is a part of typer


class Commands(typer.core.TyperGroup):
    """The commands; one that is not given as it should be ends with one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the context names."""
        try:
            return super().invoke(ctx)
        except ExtensionError as error:
            end(2, str(error))
        except UsageError as error:
            command, message = (error.ctx or ctx).command_path, error.format_message().rstrip(".")
            end(error.exit_code, f"{message[:1].lower()}{message[1:]}; see `{command} --help`")


app = typer.Typer(
    cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalised federated learning: a model for every client, learnt with the clients that resemble it.",
)  # fmt: skip


def option(name: str, metavar: str, meaning: str) -> Any:
    """Return an option of a command, as its help shows it."""
    return typer.Option(f"--{name}", metavar=metavar, help=meaning, show_default=False)


def print_table(columns: Iterable[str | Column], lines: Iterable[Iterable[str]]) -> None:
    """Print lines below the titles of their columns."""
    first, *others = (column if isinstance(column, Column) else Column(column, overflow="fold") for column in columns)
    first.no_wrap = True  # what is to be typed
    table = Table(first, *others, box=box.SIMPLE_HEAD, pad_edge=False)
    for line in lines:
        table.add_row(*line)
    print_rich_table(table)


def print_rich_table(table: Table) -> None:
    """Print a table of rich."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # a file or a pipe has room: a table is as wide as its longest lines
    console.print(table)


def show(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def end(code: int, reason: str) -> NoReturn:
    """End with one line that says why."""
    print(f"kindred: {reason}", file=sys.stderr)
    raise typer.Exit(code)


def warn(line: str) -> None:
    """Print a line about something wrong; the command goes on."""
    print(f"kindred: {line}", file=sys.stderr, flush=True)
