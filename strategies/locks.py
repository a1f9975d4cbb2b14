"""Locks and owners of files, on Linux, macOS and Windows."""

from __future__ import annotations

import os
from typing import IO, Any

from kindred.lazy import lazy

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]
msvcrt: Any = lazy("msvcrt")  # of Windows alone

FAR = 1 << 30  # the byte that is locked on Windows, where other processes cannot read it: beyond the content


def lock(file: IO[Any], *, wait: bool) -> None:
    """Lock an open file against other processes, until it is closed.

    Raises
    ------
    BlockingIOError
        Another process has the lock, and `wait` is false.
    OSError
        The file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    descriptor = file.fileno()
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        while True:
            os.lseek(descriptor, FAR, os.SEEK_SET)
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            except PermissionError as error:  # another process has it; LK_LOCK waits for ten seconds
                if not wait:
                    raise BlockingIOError(*error.args) from None
            else:
                return
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)


def is_ours(about: os.stat_result) -> bool:
    """Return whether a file belongs to this user. On Windows every file that can be reached counts as this user's."""
    return not hasattr(os, "getuid") or about.st_uid == os.getuid()
