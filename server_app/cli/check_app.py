"""The command `kindred check-app`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kindred.lazy import lazy
from kindred.server_app.terminal import print_table, texts

from .common import app, end

if TYPE_CHECKING:  # imported on first use, so that `kindred --help` is quick
    from kindred.server_app import app_check, config
else:
    app_check, config = lazy("kindred.server_app.app_check"), lazy("kindred.server_app.config")


@app.command()
def check_app(folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False)]) -> None:
    """List the methods that the clients of a Flower app can take part in, and why not in the others.

    One client runs a round of each method in this process.
    """
    try:
        found = app_check.check_app(folder.expanduser().absolute())
    except config.ConfigError as error:
        end(2, " ".join(str(error).splitlines()))
    lines = ((each.method, "yes" if each.takes_part else "no", each.text) for each in found)
    print_table(texts("strategy", "takes part", "why not, or a remark"), lines)
