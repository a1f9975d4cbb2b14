"""The check of Flower apps: a server and a site carry out those without code, and those that their operators allow.

Flower sends an app as a bundle, a zip file (FAB). Its code would run with the rights of the user who started `kindred
server` or `kindred site`. So a bundle is checked before any of it is unpacked or imported.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tomllib
import zipfile
from collections.abc import Collection, Sequence
from typing import Any

from flwr.common.constant import FAB_MAX_SIZE

from kindred.messages import first_line
from kindred.server_app.cli.common import end, option
from kindred.server_app.flower_app import COMPONENTS

ALLOWED = "KINDRED_ALLOWED_APPS"  # in the environment of Flower's processes: hashes of further apps, by spaces
ALLOW_APP: Any = option(
    "allow-app", "HASH", "Also carry out the app with this SHA-256, whatever code it holds; may be repeated."
)
FILES = ("pyproject.toml", "LICENSE", ".info/CONTENT")  # the last one is Flower's list of the files


class Refused(Exception):
    """An app that is not carried out."""


def allowed_apps(hashes: Sequence[str]) -> dict[str, str]:
    """Return the settings of Flower's processes for the hashes of --allow-app; end the command if one is malformed."""
    for each in hashes:
        if not re.fullmatch(r"[0-9a-f]{64}", each):
            end(2, f"--allow-app is {each!r}, allowed: the SHA-256 that a refusal names, 64 digits of 0-9a-f")
    return {ALLOWED: " ".join(hashes)} if hashes else {}


def check_app(content: bytes, claimed: tuple[str, str, str] | None = None) -> None:
    """Raise `Refused` if an app may not run here: see `fault_of`. Hashes in the environment are allowed."""
    if fault := fault_of(content, os.environ.get(ALLOWED, "").split(), claimed):
        raise Refused(fault)


def fault_of(content: bytes, allowed: Collection[str] = (), claimed: tuple[str, str, str] | None = None) -> str | None:
    """Return the line that refuses an app, with its name and hash; None if it may run.

    Parameters
    ----------
    content : bytes
        The app's bundle.
    allowed : collection of str
        Hashes of apps that may hold any code.
    claimed : tuple of str, optional
        The id, version and hash by which a run names its app. Flower looks for the unpacked app by these.
    """
    sha256, name, fault = hashlib.sha256(content).hexdigest(), "?", None
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            files = bundle.infolist()
            with bundle.open("pyproject.toml") as file:
                project = tomllib.loads(file.read(FAB_MAX_SIZE).decode())
        app, about = project["tool"]["flwr"]["app"], project["project"]
        identity = f"{app['publisher']}/{about['name']}", str(about["version"]), sha256
        name, components = " ".join(identity[:2]), app["components"]
        if claimed not in (None, identity):
            fault = f"its run names another one: {' '.join(claimed or ())}"
        elif sha256 not in allowed:
            fault = _fault_in([file.filename for file in files], sum(file.file_size for file in files), components)
    except Exception as error:  # whatever a damaged file causes
        fault = f"it cannot be read ({type(error).__name__}: {error})"
    return fault and f"the app {first_line(name)[:80]} (SHA-256 {sha256}) is refused: {first_line(fault)}"


def _fault_in(files: Sequence[str], size: int, components: Any) -> str | None:
    others = sorted(name for name in files if name not in FILES and not re.fullmatch(r"[^/]+\.md", name))
    if others or len(set(files)) < len(files):
        which = f"{len(others)} other files, such as {others[0]}" if others else "two files of the same name"
        return f"it holds {which}, allowed: pyproject.toml, LICENSE and *.md"
    if size > FAB_MAX_SIZE:
        return f"its files have {size} bytes, allowed: at most {FAB_MAX_SIZE}"
    if components != COMPONENTS:
        return f"its components are {components}, allowed: {COMPONENTS}"
    return None
