"""The state that a client keeps between messages: files in the client's own folder, written atomically.

    ROOT/run-RUN/client-ID/NAME.safetensors
    ROOT/run-RUN/client-ID/.NAME.round-0007.safetensors

ROOT is the node config's `state-dir`, else `$XDG_STATE_HOME/kindred`, else `~/.local/state/kindred`; only its
user can read it. Flower's Context could hold a small state, but a SuperNode loses it when it restarts, and in a
simulation it travels with every message.

The files hold the state after the last round. A server that was killed may resume from an earlier round. While that is
possible, the states after earlier rounds are kept too, under names with a dot, for all names that rounds load. A
repeated round starts from the state before it.

At a site the folders stay, because the personal model in them is the result for the site. `.run.json` there records the
run's method, settings and attempt, and whether it is finished: see `ClientState.admit`. In a simulation the clients
share a disk with the server. It flushes their files before each checkpoint, and removes the folders at the end:
engine/simulated_state.py. A client there writes its next state over a file that no round needs any more, because a file
system takes longer to make, replace and remove files than to write them. After a power failure, files newer than the
last checkpoint can be damaged, or hold the state of a round before all checkpoints. So `load` takes the newest state
that the round may start from, whichever file holds it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import sha256
from logging import WARNING
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
import psutil
from flwr.supercore import log
from safetensors import SafetensorError, safe_open

from kindred.errors import Reportable
from kindred.files import make_private, partial_files, replacing, write_arrays, write_bytes
from kindred.locks import lock
from kindred.messages import STATE_NOT_WRITTEN, ClientId

# Names under which a client saves
MODEL = "model"  # its personal model
BEST = "best"  # its best personal model so far, or mixture, by its validation data
MIXTURE = "mixture"  # the models that it combines for its predictions
PREDICTIONS = "predictions"  # what its selected model predicts for its test data, or its last one

RECORD = ".run.json"
SIMULATED = ".simulated"  # file that marks the folder of a simulated run
SPARE = ".spare"  # suffix of a file of such a run that no round needs any more


def default_root() -> Path:
    """Return the folder in which clients save their state unless their node config names another."""
    home = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(home):  # the XDG specification ignores relative paths
        home = os.path.expanduser("~/.local/state")
    return Path(home, "kindred")


class ClientState:
    """The saved state of one client in one run, for one message. The folder is created at the first save.

    Parameters
    ----------
    run_id : int
    client : int or str
    root : path, optional
        By default `default_root()`.
    server_round : int (default: 0)
        The current round, recorded with every save.
    before : int, optional
        Load only states that were saved in a round before this one; by default the last state.
    keep_from : int, optional
        The round after which the server may have to resume; by default it never has to.
    attempt : int (default: 0)
        When the server began or resumed the run, in ns since 1970; each resume increases it. A save of an earlier round
        than the saved one, or of an earlier attempt, comes from a late message.
    method : str, optional
        The method of the message. What another one has saved is not loaded, so that no message can have a model sent
        that stays at the client by its own method. By default all states are loaded.

    Attributes
    ----------
    folder : Path
    """

    def __init__(
        self,
        run_id: int,
        client: ClientId,
        root: str | os.PathLike[str] | None = None,
        *,
        server_round: int = 0,
        before: int | None = None,
        keep_from: int | None = None,
        attempt: int = 0,
        method: str | None = None,
    ) -> None:
        self.client = client
        self._run = run_id
        self._method = method
        self._round = server_round
        self._before = before
        self._keep_from = server_round if keep_from is None else keep_from
        self._attempt = attempt
        self._is_over = False  # whether nothing is written any more
        self._loaded: set[str] = set()  # names that rounds start from; for all others the last state is enough
        self._read: dict[str, tuple[Identity, _Version | None]] = {}  # name -> its file when it was last read
        self._found: dict[str, list[_Version]] = {}  # name -> versions after earlier rounds, newest first
        self.folder = client_folder(run_id, client, root)

    def load(self, name: str, prefix: str = "") -> dict[str, np.ndarray] | None:
        """Return the arrays last saved under a name, before the round `before`; None if there are none.

        Parameters
        ----------
        name : str
        prefix : str
            Read only the arrays whose names begin with it.

        Raises
        ------
        ValueError
            The file is damaged. In a simulation that was resumed since, this is a warning, and earlier arrays count.
        """
        self._loaded.add(name)
        try:
            last = self._read_last(name)
        except ValueError:
            # Without `flush` a power failure can damage a file, but none that is older than a checkpoint.
            if not (self._is_simulated and self._path(name).stat().st_mtime_ns < self._attempt):
                raise
            last = None
            text = "kindred: %s is damaged, and not used: client %s goes back to its state before, if there is one"
            log(WARNING, text, self._path(name), self.client)
        for version in self._remove_unneeded(name, last, self._earlier(name)):
            if self._counts(version):
                with reading(version.path), safe_open(version.path, "numpy") as file:
                    return {key: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}
        return None

    def save(
        self,
        name: str,
        arrays: Mapping[str, np.ndarray],
        about: Mapping[str, str] | None = None,
        *,
        rounds_load_it: bool = False,
    ) -> None:
        """Save arrays under a name, with texts about them, in place of the last ones.

        Parameters
        ----------
        name : str
        arrays : dict of str to ndarray
        about : dict of str to str, optional
        rounds_load_it : bool
            Whether other rounds load this name; if this one has, it need not be said.

        Raises
        ------
        ValueError
            A later round or attempt has already saved: the message of this round came late.
        """
        if self._is_over:
            return
        make_private(self.folder)
        path, last = self._path(name), self._last(name)
        latest = last or next(iter(self._earlier(name)), None)
        if latest and (latest.attempt, latest.round) > (self._attempt, self._round):
            resumed = " of the resumed run" if latest.attempt > self._attempt else ""
            raise ValueError(f"round {self._round} is over: {latest.path} is of round {latest.round}{resumed}")
        # Versions of this round or of later ones are of an interrupted attempt.
        earlier = [version for version in self._earlier(name) if version.round < self._round]
        interrupted = [version for version in self._earlier(name) if version.round >= self._round]
        kept = None
        if last and last.round < self._round and (rounds_load_it or name in self._loaded):
            kept = self.folder / f".{name}.round-{last.round:04d}.safetensors"
            earlier = [last._replace(path=kept), *(version for version in earlier if version.path != kept)]
        for partial, process in partial_files(self.folder):
            if not psutil.pid_exists(process):  # the process was killed during a save
                partial.unlink(missing_ok=True)
        texts = {"client": json.dumps(self.client), "round": str(self._round), "attempt": str(self._attempt)}
        texts |= {} if self._method is None else {"method": self._method}
        try:
            with replacing(path, flush=not self._is_simulated) as temporary:
                if self._is_simulated:
                    _rename(self._spare(name), temporary)
                write_arrays(temporary, arrays, {**texts, **(about or {})})
                if kept:  # in a simulation `load` finds the last state there if the process is killed now
                    (_rename if self._is_simulated else _link)(path, kept)
        except OSError as error:
            place, reason = self.folder.parent, error.strerror or error
            raise OSError(f"{STATE_NOT_WRITTEN} to {place} ({reason}); make room there") from None
        for version in interrupted:
            self._discard(name, version)
        self._remove_unneeded(name, _Version(path, self._round, self._attempt, self._method), earlier)

    def admit(self, sender: int, kind: str, settings: Mapping[str, str]) -> None:
        """Check that a message may use this state of a site, and record its run.

        A message of another run, which was resumed, must have the same method and settings, and a later attempt. After
        a run's end its state is never written again. Messages that a resumed run may then repeat are answered.

        Parameters
        ----------
        sender : int
            The run of which the message is.
        kind : str
            Its kind: messages of different kinds may have different settings.
        settings : mapping of str to str
            Those in the message. In a run's first rounds it is noticed which of them change from round to round.

        Raises
        ------
        ValueError
        """
        record = self._record()
        known = record.settings.get(kind, {})
        if sender != self._run:
            if record == _Record():
                raise self._refusal("nothing is recorded of it")
            if not known:  # no message of this kind came before
                known = next(iter(record.settings.values()), {})
            if record.method != (self._method or ""):
                raise self._refusal(f"its method is {record.method}, the message has {self._method}")
            for name, now in settings.items():
                if known.get(name) not in (None, "", now):
                    raise self._refusal(f"its {name} is {known[name]}, the message has {now}")
            if (self._attempt, sender) != (record.attempt, record.sender) and self._attempt <= record.attempt:
                raise self._refusal("the message does not resume it")
        if record.finished:
            after, last = record.finished
            if not after < self._round <= last:
                raise self._refusal("it is finished")
            self._is_over = True
        elif self._attempt >= record.attempt:
            found = known | {name: value if known.get(name, value) == value else "" for name, value in settings.items()}
            kinds = record.settings | {kind: found}
            self._write(_Record(self._method or "", kinds, self._attempt, sender), record)

    def finish(self) -> None:
        """Record that the run is finished. Only rounds that a resumed server may repeat are still answered."""
        if not self._is_over:
            record = self._record()
            self._write(record._replace(finished=(self._keep_from, self._round)), record)

    def _refusal(self, why: str) -> ValueError:
        return ValueError(Reportable(f"this site does not continue run {self._run}: {why}"))

    def _record(self) -> _Record:
        """Return what is recorded of the run; an empty record if there is none, or if it is damaged."""
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            method, settings, attempt, sender, finished = json.loads((self.folder / RECORD).read_bytes())
            kinds = {kind: dict(found) for kind, found in settings.items()}
            rounds = tuple(int(number) for number in finished)
            if len(rounds) in (0, 2):
                return _Record(str(method), kinds, int(attempt), int(sender), rounds)
        return _Record()

    def _write(self, record: _Record, before: _Record) -> None:
        if record != before:
            write_bytes(self.folder / RECORD, json.dumps(record).encode())

    def about(self, name: str) -> dict[str, str]:
        """Return the texts last saved with a name's arrays, before the round `before`; empty without such a file."""
        for version in _newest_first([self._last(name), *self._earlier(name)]):
            if self._counts(version):
                with suppress(ValueError), reading(version.path):
                    return _texts(version.path) or {}
        return {}

    @cached_property
    def _is_simulated(self) -> bool:
        return (self.folder.parent / SIMULATED).exists()

    def _counts(self, version: _Version) -> bool:
        """Return whether a version may be loaded: not of a later round, an interrupted attempt, or another method."""
        if None not in (version.method, self._method) and version.method != self._method:
            return False
        if self._before is None:
            return True
        return version.round < self._before and (version.round < self._round or version.attempt == self._attempt)

    def _remove_unneeded(self, name: str, last: _Version | None, earlier: Sequence[_Version]) -> list[_Version]:
        """Remove the versions of a name from which no round can start any more; return the others, newest first."""
        versions = _newest_first([last, *earlier])
        oldest = next((version.round for version in versions if version.round <= self._keep_from), 0)
        for version in earlier:
            if version.round < oldest and not self._is_over:
                self._discard(name, version)
        needed = [version for version in versions if version is last or version.round >= oldest]
        self._found[name] = [version for version in needed if version is not last]
        return needed

    def _discard(self, name: str, version: _Version) -> None:
        """Remove a version, or in a simulation let the next one take its file."""
        if self._is_simulated and not self._spare(name).exists():
            _rename(version.path, self._spare(name))
        else:
            version.path.unlink(missing_ok=True)

    def _last(self, name: str) -> _Version | None:
        """Return the last version of a name, unless it is damaged."""
        with suppress(ValueError):
            return self._read_last(name)
        return None

    def _read_last(self, name: str) -> _Version | None:
        """Return the last version of a name; ValueError if it is damaged. It is read again if the file is another."""
        path = self._path(name)
        try:
            found = identity(path.stat())
        except FileNotFoundError:
            return None
        if name not in self._read or self._read[name][0] != found:
            with reading(path):
                self._read[name] = found, _version(path)
        return self._read[name][1]

    def _earlier(self, name: str) -> list[_Version]:
        """Return the undamaged versions after earlier rounds, newest first; they are looked for once a message."""
        if name not in self._found:
            found: list[_Version | None] = []
            prefix = f".{name}.round-"
            for file in os.listdir(self.folder) if self.folder.is_dir() else ():
                if file.startswith(prefix) and file.endswith(".safetensors"):
                    with suppress(ValueError), reading(self.folder / file):
                        found.append(_version(self.folder / file))
            self._found[name] = _newest_first(found)
        return self._found[name]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes; first wait until a process that uses it has finished."""
        make_private(self.folder)
        with open(self.folder / ".lock", "w") as file:
            lock(file, wait=True)
            yield

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _spare(self, name: str) -> Path:
        return self.folder / f".{name}{SPARE}"


Identity = tuple[int, int]


def identity(about: os.stat_result) -> Identity:
    """Identify a file's content, whatever its name. The file's number stays the same if it is written over."""
    return about.st_ino, about.st_mtime_ns


class _Record(NamedTuple):
    method: str = ""
    settings: dict[str, dict[str, str]] = {}  # by kind of message; "" for those that change from round to round
    attempt: int = 0
    sender: int = 0
    finished: tuple[int, ...] = ()  # the rounds after the first of these, up to the second, may be repeated


class _Version(NamedTuple):
    path: Path
    round: int
    attempt: int
    method: str | None


def _texts(path: Path) -> dict[str, str] | None:
    """Return the texts in a file; None if there is no file."""
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata() or {}
    except FileNotFoundError:
        return None


def _version(path: Path) -> _Version | None:
    """Return the version in a file; None if there is no file."""
    about = _texts(path)
    if about is None:
        return None
    return _Version(path, int(about.get("round", 0)), int(about.get("attempt", 0)), about.get("method"))


def _newest_first(versions: Iterable[_Version | None]) -> list[_Version]:
    """Sort versions by round, without None; those of one round stay in their order."""
    return sorted(filter(None, versions), key=lambda version: -version.round)


def _rename(path: Path, other: Path) -> None:
    """Rename a file, if there is one."""
    with suppress(FileNotFoundError):
        os.replace(path, other)


def _link(path: Path, other: Path) -> None:
    """Give a file a second name; make a copy if the file system does not support links."""
    other.unlink(missing_ok=True)
    try:
        os.link(path, other)
    except OSError:
        with replacing(other) as temporary:
            shutil.copyfile(path, temporary)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the error of a damaged file into a ValueError that names the file."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to start from a new model") from None


def run_folder(run_id: int, root: Path) -> Path:
    """Return the folder of a run, which has a folder for each client."""
    return root / f"run-{run_id}"


def client_folder(run_id: int, client: ClientId, root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of a client in a run; `root` is by default `default_root()`."""
    return run_folder(run_id, Path(root).expanduser() if root else default_root()) / file_name(client)


def file_name(client: ClientId) -> str:
    """Return a name for a client's files that every file system accepts; ids that differ only in case get a hash."""
    if isinstance(client, int):
        return f"client-{client}"
    return f"client-{quote(client, safe='')[:80]}-{sha256(client.encode()).hexdigest()[:16]}"
