"""The commands `kindred report` and `kindred watch`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kindred.lazy import lazy

from .common import app, end, option, show
from .display import displayed

if TYPE_CHECKING:  # imported on first use, so that `kindred --help` is quick
    from kindred.server_app import config
    from kindred.server_app.report import reading, watch as watching, write
else:
    config, write = lazy("kindred.server_app.config"), lazy("kindred.server_app.report.write")
    watching, reading = lazy("kindred.server_app.report.watch"), lazy("kindred.server_app.report.reading")

LOOK_SECONDS = 0.5  # s between two checks whether the run is finished

Folder = typer.Argument(metavar="DIR", show_default=False)


@app.command()
def report(folder: Annotated[Path, Folder]) -> None:
    """Write report.html into the folder of a run, or of a comparison."""
    try:
        with displayed("writing the report", sys.stderr), reading.naming_damage(folder):
            path = write.write_report(_existing(folder))
    except (config.ConfigError, OSError) as error:
        end(2, str(error))
    print(path)


@app.command()
def watch(
    folder: Annotated[Path, Folder],
    port: Annotated[int, option("port", "N", "Port on 127.0.0.1 (default 0: any free port).")] = 0,
) -> None:
    """Serve the report of a run in progress, on this machine only; Ctrl-C stops serving."""
    try:
        with watching.Watcher(_existing(folder), port).serving() as watcher:
            show(f"{watcher.address} shows {watcher.folder}; Ctrl-C ends it")
            while not watcher.finished:
                time.sleep(LOOK_SECONDS)
            time.sleep(2 * watching.POLL_SECONDS)  # open pages still fetch the end of the run
    except config.ConfigError as error:
        end(2, str(error))
    except KeyboardInterrupt:
        show("ended; the run itself continues")
    else:
        show(f"the run is finished; its report is {watcher.folder / 'report.html'}")


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    if not folder.is_dir():
        raise config.ConfigError(f"{str(folder)!r} is not a folder; give the folder of a run or of a comparison")
    return folder
