"""The command line's application, and what its commands share: options, one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, TypeVar

import typer

from kindred.extensions import ExtensionError

Function = TypeVar("Function", bound=Callable[..., Any])
UsageError: Any = typer.BadParameter.__base__  # click's class; typer contains click


class Command(typer.core.TyperCommand):
    """A command; its help shows `[required]` without the backslash that typer writes for rich."""

    def get_help(self, ctx: Any) -> str:
        """Return the help text."""
        return super().get_help(ctx).replace("\\[", "[")


class Commands(typer.core.TyperGroup):
    """The group of commands; an error in the arguments ends it with one line."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Read the group's own options; without any argument this shows the help text."""
        with errors_in_one_line("kindred") if args else nullcontext():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the context names."""
        with errors_in_one_line(ctx.command_path):
            return super().invoke(ctx)


@contextmanager
def errors_in_one_line(command: str) -> Iterator[None]:
    """End with one line at an error in a command's arguments or an extension, or at a file that cannot be used."""
    try:
        yield
    except ExtensionError as error:
        end(2, str(error))
    except UsageError as error:
        message, command = error.format_message().rstrip("."), error.ctx.command_path if error.ctx else command
        end(
            error.exit_code,
            f"{message[:1].lower()}{message[1:]}{' See' if message.endswith('?') else '; see'} `{command} --help`",
        )
    except OSError as error:
        if error.filename is None:
            raise
        end(2, f"{error.filename} cannot be used ({error.strerror})")  # such as a folder of another user


class App(typer.Typer):
    """The application; all its commands are of the class `Command`."""

    def command(self, name: str | None = None, **more: Any) -> Callable[[Function], Function]:
        """Return a decorator that makes a function a command."""
        return super().command(name, cls=Command, **more)


app = App(
    cls=Commands, suggest_commands=False, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Personalised federated learning: a model for every client, learnt together with similar clients.",
)  # fmt: skip


def option(name: str, metavar: str, meaning: str) -> Any:
    """Return a command's option with its help text."""
    return typer.Option(f"--{name}", metavar=metavar, help=meaning, show_default=False)


def show(line: str) -> None:
    """Print a line and flush it."""
    print(line, flush=True)


def end(code: int, reason: str) -> NoReturn:
    """End the command with an exit code and one line that says why."""
    print(f"kindred: {reason}", file=sys.stderr)
    raise typer.Exit(code)


def warn(line: str) -> None:
    """Print a warning line; the command continues."""
    print(f"kindred: {line}", file=sys.stderr, flush=True)
