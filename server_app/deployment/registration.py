"""Register sites at the SuperLink by the public keys in the folder of keys."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import typer

from kindred.engine.roster import REGISTERED
from kindred.server_app.cli.common import end, warn
from kindred.server_app.flower_app import CONNECTION

from .certificates import check_public_key, check_site_name
from .files import open_to_others, write_file, write_or_end
from .processes import environment, show_command

# One process registers all sites: importing flwr takes longer than the rest. It prints a line of JSON for each site:
# name, exit code, output.
REGISTER = f"""
import contextlib, io, json, sys
from flwr.cli.app import app
app.rich_markup_mode = None  # errors in a line, not in a box
for public_key, name in zip(sys.argv[1::2], sys.argv[2::2]):
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            app(["supernode", "register", public_key, {CONNECTION!r}, "--name", name])
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([name, code or 0, said.getvalue()]), flush=True)
"""


def public_keys_in(folder: Path) -> list[Path]:
    """Return the files of the sites' public keys in a folder."""
    return [path for path in sorted(folder.glob("*.pub")) if not path.name.startswith(".")]  # not a partial one


def key_in(path: Path) -> bytes:
    """Return the content of a file of a public key without its last part, a comment."""
    return b" ".join(path.read_bytes().split()[:2])


def check_public_keys(paths: Iterable[Path]) -> None:
    """End the command if a file is not a public key, its name is not allowed for a site, or two hold the same key."""
    names: dict[bytes, str] = {}
    for path in paths:
        check_public_key(path)
        check_site_name(f"the name of {path}", path.stem)
        if (name := names.setdefault(key_in(path), path.stem)) != path.stem:
            end(2, second_name(path, name))


def second_name(path: Path, name: str) -> str:
    """Return the line for a file with the key that another site's file, of this name, holds too."""
    return f"{path} holds the key of {name}, allowed: one name for each key"


class Registration:
    """Registers the sites whose public keys are put into a folder.

    Parameters
    ----------
    folder : Path
    settings : mapping
        Environment of Flower's processes. It names the file `REGISTERED`, in which runs read the names of the
        registered keys. So from the start of a run nobody else can take such a name, even before its site connects.
    state : Path
        Folder in which the commands run, and their FLWR_HOME.
    mark : str
        Mark of the processes that are started.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str], state: Path, mark: str) -> None:
        self._folder, self._settings, self._state, self._mark = folder, settings, state, mark
        self._known: dict[bytes, str] = {}  # name by key, of files that are registered or that are not keys
        self._doubts: set[str] = set()
        self._names: set[str] = set()
        self._file = Path(settings[REGISTERED])
        with contextlib.suppress(OSError, ValueError):  # names of past runs, whose files may be gone
            self._names.update(json.loads(self._file.read_bytes()))
        self._registered = set(self._names)  # names for which a key has been registered
        self._names.update(path.stem for path in public_keys_in(folder))
        write_or_end(self._file, self._content())

    def look(self) -> bool:
        """Register the new keys; return False if one could not be registered."""
        new: dict[Path, bytes] = {}
        until = "until that is fixed no key in it is registered"
        doubts = {f"{doubt}; {until}" for doubt in [open_to_others(self._folder)] if doubt}
        for path in [] if doubts else public_keys_in(self._folder):
            if doubt := open_to_others(path):
                doubts.add(f"{doubt}; {until}")
                continue
            with contextlib.suppress(OSError, typer.Exit):  # the file is gone, or a line has said what is wrong with it
                if (key := key_in(path)) not in self._known:
                    self._known[key] = path.stem
                    check_public_keys([path])
                    new[path] = key
                elif self._known[key] != path.stem:
                    doubts.add(second_name(path, self._known[key]))
        failed: list[Path] = []
        if new:
            self._names.update(path.stem for path in new)
            try:
                write_file(self._file, self._content())
            except OSError as error:
                doubts.add(f"{self._file} cannot be written ({error.strerror}); until it is no new key is registered")
                failed = list(new)
            else:
                failed = register_sites(list(new), self._settings, self._state, self._mark, self._registered)
                self._registered.update(path.stem for path in new if path not in failed)
        for doubt in doubts - self._doubts:  # once while it lasts
            warn(doubt)
        self._doubts = doubts
        for path in failed:  # they are tried again
            del self._known[new[path]]
        return not failed

    def _content(self) -> bytes:
        return json.dumps(sorted(self._names)).encode()


def register_sites(
    public_keys: Sequence[Path], settings: Mapping[str, str], state: Path, mark: str, before: Collection[str]
) -> list[Path]:
    """Register the sites of these public keys, and return the keys that could not be registered.

    `before` has the names of sites that have been registered: another key of theirs is a second one.
    """
    for path in public_keys:
        show_command(
            ["flwr", "supernode", "register", str(path), CONNECTION, "--name", path.stem], {"FLWR_HOME": str(state)}
        )
    arguments = [text for path in public_keys for text in (str(path), path.stem)]
    flwr = subprocess.run(
        [sys.executable, "-P", "-c", REGISTER, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        env=environment(settings, mark), cwd=state, start_new_session=True, encoding="utf-8",
    )  # fmt: skip
    outcomes = {name: (code, said) for name, code, said in map(json.loads, flwr.stdout.splitlines())}
    failed = []
    for path in public_keys:
        code, said = outcomes.get(path.stem, (flwr.returncode, "flwr ended before it registered this site"))
        node = re.search(r"SuperNode (\d+)", said)
        if code and "already in use" not in said:
            failed.append(path)
            warn(f"{path.stem} cannot be registered: {' '.join(said.split())}")
        elif code:
            print(f"{path.stem} is already known to the server: registered, or withdrawn", flush=True)
        else:
            print(f"{path.stem} is registered{f' as SuperNode {node[1]}' if node else ''}", flush=True)
            if path.stem in before:
                warn(
                    f"{path.stem} was registered with another key before, which stays valid unless it is withdrawn: "
                    f"flwr supernode unregister NUMBER {CONNECTION}"
                )
    return failed
