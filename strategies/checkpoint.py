"""The state of a run on disk: written whole or not at all, and checked before it is used.

    FOLDER/round-0007-SHA256.npz

The name says of which round it is the end, and the checksum of the content: what is cut short or changed does not fit
its name, and the one before it is used. An .npz file holds arrays as they are and nothing that could run; the rest of
the state is JSON in its entry `state`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord
from flwr.supercore import log

from .messages import in_order, read_record, to_record

STATE = "state"


class Stateful(Protocol):
    """What holds state of its own that a checkpoint is to have."""

    def state(self) -> Any:
        """All that `restore` needs, of types that `pack` takes."""

    def restore(self, state: Any) -> None:
        """Go on from what `state` gave."""


class Checkpoints:
    """The checkpoints of one run.

    Parameters
    ----------
    folder : path
        Made when the first checkpoint is.
    every : int (default: 1)
        Rounds, 1 or more, from one checkpoint to the next.
    keep : int (default: 2)
        How many of the last ones, 1 or more, are kept.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 1, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.every = every
        self.keep = keep

    def save(self, server_round: int, state: Any) -> None:
        """Write the state at the end of a round."""
        arrays: dict[str, np.ndarray] = {}
        text = json.dumps(pack(state, arrays))
        arrays[STATE] = np.frombuffer(text.encode(), np.uint8)
        self.folder.mkdir(parents=True, exist_ok=True)
        for partial in self.folder.glob(".*.partial"):  # of a process that was killed as it wrote
            partial.unlink()
        temporary = self.folder / f".{os.getpid()}.partial"
        with open(temporary, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / f"round-{server_round:04d}-{_checksum(temporary)}.npz")
        _sync(self.folder)
        for _, old in self._files()[self.keep :]:
            old.unlink()

    @property
    def oldest(self) -> int | None:
        """The round of the first checkpoint that is kept: from there a run may have to go on."""
        files = self._files()
        return files[-1][0] if files else None

    def load(self) -> tuple[int, Any] | None:
        """The last checkpoint that is whole: its round and the state; None if there is none."""
        for server_round, path in self._files():
            if _checksum(path) != path.stem.rpartition("-")[2]:
                log(WARNING, "kindred: %s is damaged, and not used", path)
                continue
            with np.load(path, allow_pickle=False) as arrays:
                return server_round, unpack(json.loads(arrays[STATE].tobytes()), arrays)
        return None

    def _files(self) -> list[tuple[int, Path]]:
        """All checkpoints, the last round first."""
        names = [(re.fullmatch(r"round-(\d+)-[0-9a-f]{64}\.npz", path.name), path) for path in self.folder.glob("*")]
        return sorted(((int(name[1]), path) for name, path in names if name), reverse=True)


def pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Write a value as JSON has it, and put the arrays in it aside.

    Parameters
    ----------
    value
        None, bool, int, float, str, ndarray, ArrayRecord, `Stateful`, and lists, tuples, sets and mappings of these.
    arrays : dict
        Gets the arrays.

    Returns
    -------
    object
        What JSON can write; `unpack` makes a value of it again.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.ndarray():
            name = f"array-{len(arrays)}"
            arrays[name] = value
            return ["array", name]
        case np.generic():
            return pack(value.item(), arrays)
        case ArrayRecord():
            return ["record", pack(read_record(value), arrays)]
        case _ if hasattr(value, "state"):
            return pack(value.state(), arrays)
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: pack(each, arrays) for key, each in value.items()}
        case Mapping():
            return ["mapping", [[pack(key, arrays), pack(each, arrays)] for key, each in value.items()]]
        case set():
            return ["set", [pack(each, arrays) for each in in_order(value)]]
        case list() | tuple():
            return [type(value).__name__, [pack(each, arrays) for each in value]]
    raise TypeError(f"{type(value).__name__} cannot be part of a checkpoint")


def unpack(packed: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value that `pack` was given; what is `Stateful` is the state that it gave."""
    if isinstance(packed, dict):
        return {key: unpack(each, arrays) for key, each in packed.items()}
    if not isinstance(packed, list):
        return packed
    kind, content = packed
    match kind:
        case "array":
            return arrays[content]
        case "record":
            return to_record(unpack(content, arrays))
        case "mapping":
            return {unpack(key, arrays): unpack(each, arrays) for key, each in content}
        case _:
            return {"set": set, "list": list, "tuple": tuple}[kind](unpack(each, arrays) for each in content)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk too."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
