"""Checkpoints: the state of a run on disk, written atomically and checked before it is used.

    FOLDER/round-0007-SHA256.npz

The name holds the round and the checksum of the content; the content holds the round too. A truncated or changed file
has another checksum, and a renamed one another round; the checkpoint before it is then used. An .npz file holds plain
arrays and no code that could run; the rest of the state is JSON in its entry `state`. Arrays in a mapped file are
written and read in pieces, so that they are never in memory as a whole. A run writes a checkpoint in a thread, while
the clients of its next round train.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from logging import WARNING
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.supercore import log

from kindred.files import make_private, partial_files, private
from kindred.messages import check, in_order, read_record, to_record

from .model_store import mapping_of, release_pages

STATE = "state"
FORMAT = 5  # version of the format that `save` writes
READABLE_FORMATS = (3, 4, FORMAT)  # formats that `load` reads
MAPPED = "mapped"  # prefix of entries for arrays that lie in a mapped file

# Types that JSON represents unchanged.
PLAIN = frozenset({type(None), bool, int, float, str})


class NotResumable(RuntimeError):
    """A run cannot be resumed from its saved state. No message has been sent, and the saved state is unchanged."""


class HistoryRows(list[dict[str, Any]]):
    """A list to which rows are only appended, and which are encoded once, not once for each checkpoint.

    Rows hold no arrays, and must not change after the first checkpoint that they are in.
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(rows)
        self._lines: list[bytes] = []  # JSON of each row that is in a checkpoint

    def encoded(self) -> np.ndarray:
        """Return all rows as a JSON array, in the bytes of UTF-8."""
        arrays: dict[str, np.ndarray] = {}
        lines = [json.dumps(pack(row, arrays)).encode() for row in self[len(self._lines) :]]
        if arrays:
            raise TypeError("a row of the history has an array, which cannot be part of a checkpoint")
        self._lines += lines
        return np.frombuffer(b"[%s]" % b",".join(self._lines), np.uint8)


class Checkpoints:
    """The checkpoints of one run. As a context manager, it ends with all of them written.

    Parameters
    ----------
    folder : path
        It is created with the first checkpoint.
    every : int (default: 1)
        Number of rounds, 1 or more, from one checkpoint to the next.
    keep : int (default: 2)
        Number of last checkpoints, 1 or more, to keep.

    Attributes
    ----------
    flushes : dict of str to callable
        What else a resumed run needs -> a function that waits until that is on the disk. Each is called before a
        checkpoint has its name, in the same thread. After an OSError there is no new checkpoint.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 1, keep: int = 2) -> None:
        check("every", every, every >= 1, "1 or more")
        check("keep", keep, keep >= 1, "1 or more")
        self.folder = Path(folder).absolute()
        self.every = every
        self.keep = keep
        self.flushes: dict[str, Callable[[], None]] = {}
        self._overdue = False  # the last one could not be written
        self._writing: tuple[int, Thread] | None = None  # `oldest` until a checkpoint is written, and who writes it
        self._copied = Event()  # the state of that checkpoint is in its file, which may not be on the disk yet
        self._failure: BaseException | None = None  # an error of such a thread that is not the disk's

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def due(self, server_round: int) -> bool:
        """Return whether a checkpoint is due at the end of a round."""
        return self._overdue or server_round % self.every == 0

    def save(self, server_round: int, state: Any) -> None:
        """Write the state at the end of a round. If that fails, a checkpoint is due again after the next round."""
        self.begin(server_round, state)
        self.finish()

    def begin(self, server_round: int, state: Any) -> None:
        """Begin to write the state at the end of a round. Its arrays must not change before `release`."""
        self.finish()
        self._copied.clear()
        arrays: dict[str, np.ndarray] = {}
        text = json.dumps({"format": FORMAT, "round": server_round, "state": pack(state, arrays)})
        arrays[STATE] = np.frombuffer(text.encode(), np.uint8)
        oldest = min([server_round, *(number for number, _ in self._files())])
        # A new thread for each checkpoint. One that stayed for the next would keep the process from ending if Ctrl-C
        # came while it was started, before anybody knew of it.
        thread = Thread(target=self._write_in_thread, args=(server_round, arrays))
        thread.start()
        self._writing = oldest, thread
        # With one checkpoint, the run may have to resume from the one that this replaces until it is written. On
        # Windows, a client cannot replace a file that this thread flushes.
        if self.keep == 1 or os.name == "nt":
            self.finish()

    def release(self) -> None:
        """Wait until the state that was given to `begin` may change."""
        if self._writing:
            self._copied.wait()

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is written, if there is one.

        An error that is not the disk's is raised, and again by each later call: the caller may have handled it as
        another's.
        """
        if self._writing:
            self._writing[1].join()
            self._writing = None
        if self._failure:
            raise self._failure

    def _write_in_thread(self, server_round: int, arrays: Mapping[str, np.ndarray]) -> None:
        try:
            self._write_or_warn(server_round, arrays)
        except BaseException as error:
            self._failure = error
        finally:
            self._copied.set()

    def _write_or_warn(self, server_round: int, arrays: Mapping[str, np.ndarray]) -> None:
        try:
            self._write(server_round, arrays)
            self._overdue = False
        except OSError as error:
            self._overdue = True
            last = self.newest
            log(
                WARNING,
                "kindred: round %d could not be saved in %s (%s): make room there; the run continues, and tries "
                "again after the next round; if interrupted before that, it %s",
                server_round,
                self.folder,
                error.strerror or error,
                "cannot be resumed" if last is None else f"can be resumed from round {last + 1}",
            )

    def _write(self, server_round: int, arrays: Mapping[str, np.ndarray]) -> None:
        make_private(self.folder)
        for partial, _ in partial_files(self.folder):  # left by a process that was killed during a write
            partial.unlink()
        temporary = self.folder / f".{os.getpid()}.partial"
        try:
            with open(temporary, "wb", opener=private) as file:
                checksum = _write_arrays(file, arrays)
                file.flush()
                self._copied.set()
                os.fsync(file.fileno())
            for what, flush in self.flushes.items():
                try:
                    flush()
                except OSError as error:
                    raise OSError(error.errno, f"{what}: {error.strerror or error}") from None
            path = self.folder / f"round-{server_round:04d}-{checksum}.npz"
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync(self.folder)
        # Other files of this round or of later ones are damaged: the run resumed from an earlier round.
        earlier = [each for each in self._files() if each[0] < server_round][: self.keep - 1]
        for number, old in self._files():
            if old != path and (number, old) not in earlier:
                with suppress(OSError):
                    old.unlink()

    def remove(self) -> None:
        """Remove all checkpoints, and the folder if it is then empty."""
        for path in [path for _, path in self._files()] + [path for path, _ in partial_files(self.folder)]:
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    @property
    def oldest(self) -> int | None:
        """Round of the oldest checkpoint, the earliest from which a run may have to resume; None if there is none.

        While one is being written, those that it will replace count: it may never be complete.
        """
        if self._writing and self._writing[1].is_alive():
            return self._writing[0]
        files = self._files()
        return files[-1][0] if files else None

    @property
    def newest(self) -> int | None:
        """Round of the newest checkpoint; None if there is none."""
        return next((number for number, _ in self._files()), None)

    def load(self) -> tuple[int, Any] | None:
        """Return the round and the state of the last intact checkpoint; None if there is no checkpoint at all.

        Arrays that lay in a mapped file are read-only views of the checkpoint.

        Raises
        ------
        NotResumable
            There are checkpoints but none is intact; or the last one is of another version of kindred.
        """
        files = self._files()
        for server_round, path in files:
            try:
                reason = "its content does not fit its name"
                if _checksum(path) == path.stem.rpartition("-")[2]:
                    found, state = _read(path)
                    if found == server_round:
                        return server_round, state
                    reason = f"it is of round {found}, not of round {server_round}"
            except (MemoryError, NotResumable):
                raise
            except Exception as error:  # the file can hold anything
                reason = f"{type(error).__name__}: {error}"
            log(WARNING, "kindred: %s is damaged, and not used (%s)", path, reason)
        if files:
            raise NotResumable(f"none of the checkpoints in {self.folder} can be used; begin a new run")
        return None

    def _files(self) -> list[tuple[int, Path]]:
        """Return all checkpoints, the last round first."""
        names = [(re.fullmatch(r"round-(\d+)-[0-9a-f]{64}\.npz", path.name), path) for path in self.folder.glob("*")]
        return sorted(((int(name[1]), path) for name, path in names if name), reverse=True)


def pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Convert a value to what JSON can represent, and collect its arrays in `arrays`.

    Parameters
    ----------
    value
        None, bool, int, float, str, ndarray, a NumPy scalar, ArrayRecord, `HistoryRows`, an object with `state` and
        `restore`, and dicts, lists, tuples and sets of these. Other subclasses of these types are refused: they could
        not be restored.
    arrays : dict
        Receives the arrays.

    Returns
    -------
    object
        A value that JSON can represent; `unpack` converts it back.
    """
    match value:
        case _ if type(value) in PLAIN:
            return value
        case dict() if type(value) is dict and all(type(k) is str and type(each) in PLAIN for k, each in value.items()):
            return value  # a short cut for rows of a history
        case HistoryRows():
            name = f"rows-{len(arrays)}"
            arrays[name] = value.encoded()
            return ["rows", name]
        case np.ndarray():
            name = f"{MAPPED if value.size and mapping_of(value) else 'array'}-{len(arrays)}"
            arrays[name] = value
            return ["array", name]
        case np.number() | np.bool():
            return ["scalar", [value.dtype.str, value.tobytes().hex()]]
        case ArrayRecord():
            return ["record", pack(read_record(value), arrays)]
        case _ if hasattr(value, "state"):
            return pack(value.state(), arrays)
        case dict() if type(value) is dict and all(type(key) is str for key in value):
            return {key: pack(each, arrays) for key, each in value.items()}
        case dict() if type(value) is dict:
            return ["mapping", [[pack(key, arrays), pack(each, arrays)] for key, each in value.items()]]
        case set() if type(value) is set:
            return ["set", [pack(each, arrays) for each in in_order(value)]]
        case list() | tuple() if type(value) in (list, tuple):  # no named tuples, which could not be restored
            return [type(value).__name__, [pack(each, arrays) for each in value]]
    raise TypeError(f"{type(value).__name__} cannot be part of a checkpoint")


def unpack(packed: Any, arrays: Mapping[str, np.ndarray] | _Arrays) -> Any:
    """Return the value that `pack` was given; in place of an object with `state`, what that returned."""
    if isinstance(packed, dict):
        return {key: unpack(each, arrays) for key, each in packed.items()}
    if not isinstance(packed, list):
        return packed
    kind, content = packed
    match kind:
        case "array":
            return arrays[content]
        case "scalar":
            dtype, number = content
            return np.frombuffer(bytes.fromhex(number), dtype)[0]
        case "rows":
            return HistoryRows(unpack(row, {}) for row in json.loads(arrays[content].tobytes()))
        case "record":
            return to_record(unpack(content, arrays))
        case "mapping":
            return {unpack(key, arrays): unpack(each, arrays) for key, each in content}
        case _:
            return {"set": set, "list": list, "tuple": tuple}[kind](unpack(each, arrays) for each in content)


class _HashedFile:
    """A file that is only appended to, and the hash of what has been written: nothing is read again for it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


class _ReleasingFile:
    """A file to write an array to; only the part that is being written stays in memory."""

    def __init__(self, file: IO[bytes], array: np.ndarray) -> None:
        self._file = file
        self._array = array

    def write(self, data: Any) -> None:
        self._file.write(data)
        release_pages(self._array)


def _write_arrays(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> str:
    """Write an .npz file, as `np.savez` does, and return its checksum."""
    hashed: Any = _HashedFile(file)
    with zipfile.ZipFile(hashed, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(_ReleasingFile(entry, array), array, allow_pickle=False)
    return hashed.hash.hexdigest()


class _Arrays:
    """The arrays of an open .npz file by name: read into memory, or mapped if they were mapped when saved."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._archive = archive

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._archive.getinfo(f"{name}.npy")
        if not name.startswith(MAPPED):
            with self._archive.open(entry) as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        with open(self._path, "rb") as file:  # entries are not compressed, so the array can be mapped
            file.seek(entry.header_offset + 26)
            file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)  # lengths of the entry's name and extras
            np.lib.format.read_magic(file)
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
            return np.memmap(file, dtype, "r", file.tell(), shape, "F" if fortran_order else "C")


def _read(path: Path) -> tuple[int, Any]:
    """Return the round and the state in a checkpoint."""
    with zipfile.ZipFile(path) as archive:
        arrays = _Arrays(path, archive)
        content = json.loads(arrays[STATE].tobytes())
        if content.get("format") not in READABLE_FORMATS:
            raise NotResumable(
                f"{path} was saved by another version of kindred, in format {content.get('format', 1)}; "
                f"this one reads formats {', '.join(map(str, READABLE_FORMATS))}"
            )
        return content["round"], unpack(content["state"], arrays)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Flush a folder's file names to disk."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
