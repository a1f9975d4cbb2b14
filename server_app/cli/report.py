"""The commands `kindred report` and `kindred watch`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .common import app, end, option, show

LOOK_SECONDS = 0.5  # between two looks at the folder

Folder = typer.Argument(metavar="DIR", show_default=False)


@app.command()
def report(folder: Annotated[Path, Folder]) -> None:
    """Write report.html into the folder of a run, or of a comparison."""
    from kindred.server_app.config import ConfigError
    from kindred.server_app.report.content import write_report

    try:
        path = write_report(_existing(folder))
    except (ConfigError, OSError) as error:
        end(2, str(error))
    print(path)


@app.command()
def watch(
    folder: Annotated[Path, Folder],
    port: Annotated[int, option("port", "N", "Port on 127.0.0.1 (default 0: any that is free).")] = 0,
) -> None:
    """Serve the report of a run while it goes on, on this machine alone; Ctrl-C ends it."""
    from kindred.server_app.config import ConfigError
    from kindred.server_app.report.watch import POLL_SECONDS, Watcher

    try:
        with Watcher(_existing(folder), port).serving() as watcher:
            show(f"{watcher.address} shows {watcher.folder}; Ctrl-C ends it")
            while not watcher.finished:
                time.sleep(LOOK_SECONDS)
            time.sleep(2 * POLL_SECONDS)  # open pages ask for the end
    except ConfigError as error:
        end(2, str(error))
    except KeyboardInterrupt:
        show("ended; the run goes on without it")
    else:
        show(f"the run is finished; its report is {watcher.folder / 'report.html'}")


def _existing(folder: Path) -> Path:
    from kindred.server_app.config import ConfigError

    folder = folder.expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder; name that of a run, or of a comparison")
    return folder
