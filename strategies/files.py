"""Files that are written whole or not at all, and folders that only their user can enter."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from .locks import is_ours

TEXTS = "__metadata__"  # entry of a safetensors header


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, and its missing parents alike; existing ones stay unchanged."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def private(name: str, flags: int) -> int:
    """Open a file, as an argument of `open`: if it is new, only this user can read it."""
    return os.open(name, flags, 0o600)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], texts: Mapping[str, str]) -> None:
    """Write arrays and texts as a safetensors file that only this user can read, over the file that is there."""

    def opener(name: str, flags: int) -> int:
        return private(name, flags & ~os.O_TRUNC)  # the blocks that the file has are used again

    content = save({key: np.asarray(array, order="C") for key, array in arrays.items()}, dict(texts))
    end = 8 + int.from_bytes(content[:8], "little")
    with open(path, "wb", opener=opener) as file:
        file.write(_header(json.loads(content[8:end])))
        file.write(memoryview(content)[end:])
        file.truncate()


def copy_arrays(source: Path, target: Path, *, without: str) -> None:
    """Copy a file of `write_arrays` without one of its texts, as a file with this user's default permissions."""
    with open(source, "rb") as file, open(target, "wb") as copy:
        entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        entries[TEXTS].pop(without, None)
        copy.write(_header(entries))
        shutil.copyfileobj(file, copy)


def _header(entries: dict[str, Any]) -> bytes:
    """Return a safetensors header with its texts in order, so that equal content gives the same bytes.

    safetensors itself writes texts in random order.
    """
    texts = dict(sorted(entries.pop(TEXTS, {}).items()))
    encoded = json.dumps({TEXTS: texts, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)  # arrays begin at a multiple of 8 bytes
    return len(encoded).to_bytes(8, "little") + encoded


@contextmanager
def replacing(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`, with its suffix, which replaces `path` if the block ends without error.

    After an error `path` is unchanged and the temporary file is removed. Without `flush` this holds if the process is
    killed, but not after a power failure; where that matters, the caller calls `flush_files`.
    """
    # The name holds the process id: a client that answers late may be at work in another process at the same time.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield temporary
        if flush:
            flush_files([temporary])
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes, *, flush: bool = True) -> None:
    """Write a file atomically: whole or not at all. See `replacing`."""
    with replacing(path, flush=flush) as temporary:
        temporary.write_bytes(content)


def flush_files(paths: Iterable[Path]) -> None:
    """Wait until the content of these files is on the disk, some milliseconds for each; skip missing files."""
    for path in paths:
        with suppress(FileNotFoundError), open(path, "rb+") as file:
            os.fsync(file.fileno())


PARTIAL = re.compile(r"\.(?:.+\.)?(\d{1,9})\.partial(?:\.\w+)?")  # names of temporary files, with the process's id


def is_partial(name: str) -> bool:
    """Return whether this is the name of a file that `replacing` writes."""
    return PARTIAL.fullmatch(name) is not None


def partial_files(folder: Path) -> list[tuple[Path, int]]:
    """Return this user's files that `replacing` left behind in a folder, each with the id of its process."""
    files = os.listdir(folder) if folder.is_dir() else []
    names = [PARTIAL.fullmatch(file) for file in files]
    found = [(folder / name[0], int(name[1])) for name in names if name]
    return [(path, process) for path, process in found if path.is_file() and is_own(path)]


def is_own(path: Path) -> bool:
    """Return whether a path belongs to this user and is no symbolic link, which could lead elsewhere."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return is_ours(about) and not stat.S_ISLNK(about.st_mode)
