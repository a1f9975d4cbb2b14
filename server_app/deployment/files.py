"""Files and folders of keys and state: absolute paths, permissions, locks, and writes that are whole or not at all."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kindred.client.state import partial_files, replacing
from kindred.server_app.cli.common import end


def absolute_path(path: Path, option: str) -> Path:
    """Return a path as an absolute one; ends the command if it has characters that are not allowed."""
    text = os.path.abspath(os.path.expanduser(path))
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text):
        end(2, f"{option} is {text!r}, allowed: a path in UTF-8 without control characters")
    return Path(text)


@contextmanager
def own_folder(folder: Path, alone: bool = True) -> Iterator[None]:
    """Make a folder that its user alone can enter, and have it for this process alone unless told otherwise."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            end(
                2,
                f"{folder} is open to others on this machine, allowed: a folder of yours alone; "
                f"chmod 700 {shlex.quote(str(folder))}",
            )
        lock = open(folder / ".lock", "w") if alone else None
    except OSError as error:
        end(2, f"{folder} cannot be used as a folder: {error.strerror}")
    if lock is None:
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            end(2, f"{folder} is in use by another `kindred` that runs")
        for partial, _ in partial_files(folder):  # of one that was killed as it wrote
            partial.unlink()
        yield


def open_to_others(path: Path) -> str | None:
    """Say why a file or a folder of keys is not safe from others on this machine, and what to do.

    Nobody else may be able to change it, or to read it if it is a private key.
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
    private = path.suffix == ".key"
    if mode & (0o077 if private else 0o022):
        others, letters = ("read it", "go=") if private else ("write to it", "go-w")
        return (
            f"{path} has permissions {mode:04o}, allowed: such that nobody else can {others}; chmod {letters} {quoted}"
        )
    return None


def write_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.touch(mode=mode)
        temporary.write_bytes(content)
