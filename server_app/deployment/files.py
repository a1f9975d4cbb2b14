"""Files and folders of keys and state: absolute paths, permissions, locks and atomic writes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kindred.files import make_private, partial_files, replacing
from kindred.locks import lock
from kindred.server_app.cli.common import end

# In the state folder of `kindred server`: the SuperLink's database, the names of registered keys, the runs' statuses.
DATABASE, REGISTERED_FILE, RUNS_FOLDER = "superlink.db", "registered.json", "runs"

LEAST_FREE = 100e6  # bytes; with less on its disk, a server or site says so


def absolute_path(path: Path, option: str) -> Path:
    """Return an absolute path; end the command if it has characters that are not allowed."""
    text = os.path.abspath(os.path.expanduser(path))
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text):
        end(2, f"{option} is {text!r}, allowed: a path in UTF-8 without control characters")
    return Path(text)


def refuse_open(folder: Path) -> None:
    """End with one line if other users of this machine can enter a folder."""
    if folder.stat().st_mode & 0o077:
        end(
            2,
            f"{folder} is open to other users of this machine, allowed: a folder that only you can enter; "
            f"chmod 700 {shlex.quote(str(folder))}",
        )


@contextmanager
def own_folder(folder: Path, alone: bool = True) -> Iterator[None]:
    """Make a folder that only this user can enter; with `alone`, lock it against other processes."""
    try:
        make_private(folder)
        refuse_open(folder)
        file = open(folder / ".lock", "w") if alone else None
    except OSError as error:
        end(2, f"{folder} cannot be used as a folder: {error.strerror}")
    if file is None:
        yield
        return
    with file:
        try:
            lock(file, wait=False)
        except OSError:
            end(2, f"{folder} is in use by another running `kindred`")
        for partial, _ in partial_files(folder):  # of a process that was killed while it wrote
            partial.unlink()
        yield


def open_to_others(path: Path, *, private: bool = False) -> str | None:
    """Return why other users of this machine could misuse a file or folder of keys, and what to do; else None.

    Nobody else may be able to change it, nor to read it if it is `private`.
    """
    try:
        about = path.stat()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    mode, quoted = stat.S_IMODE(about.st_mode), shlex.quote(str(path))
    if about.st_uid not in (os.geteuid(), 0):
        return (
            f"{path} belongs to user {about.st_uid}, allowed: {os.geteuid()}, who runs this, or root; "
            f"chown {os.geteuid()} {quoted}"
        )
    if mode & (0o077 if private else 0o022):
        others, letters = ("read it", "go=") if private else ("write to it", "go-w")
        return (
            f"{path} has permissions {mode:04o}, allowed: such that nobody else can {others}; chmod {letters} {quoted}"
        )
    return None


def lack_of_space(folder: Path) -> str:
    """Return a line if the disk of a folder is nearly full, else ""."""
    with suppress(OSError):  # the folder is gone
        if shutil.disk_usage(folder).free < LEAST_FREE:
            return f"the disk of {folder} has less than {LEAST_FREE / 1e6:.0f} MB left, make room there"
    return ""


def write_or_end(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file as `write_file` does; end the command if it cannot be written."""
    with written_or_end(path):
        write_file(path, content, mode)


@contextmanager
def written_or_end(path: Path) -> Iterator[None]:
    """End the command if this file or folder cannot be written in the block."""
    try:
        yield
    except OSError as error:
        end(2, f"{path} cannot be written ({error.strerror})")


def write_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file atomically: whole or not at all."""
    with replacing(path) as temporary:
        temporary.touch(mode=mode)
        temporary.write_bytes(content)
