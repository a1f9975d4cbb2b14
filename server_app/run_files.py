"""Files in a run's folder, read and written: config.json, summary.json, names of models' files, pictures.

`results.py` says which files a run has; `tables.py` reads and writes the CSV files.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib import metadata
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from flwr.supercore import log

from kindred.client.state import replacing
from kindred.engine.checkpoint import Checkpoints
from kindred.messages import ClientId, in_order
from kindred.versions import VERSION

from .config import Config, ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGES = ("flwr", "torch", "numpy", "scikit-learn")  # beside our own


# --- config.json and summary.json -----------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    others = {package: metadata.version(package) for package in PACKAGES}
    return {"python": platform.python_version(), "kindred": VERSION, **others}


def run_settings(given: Mapping[str, Any], resume: str | os.PathLike[str] | None = None) -> Config:
    """Return the settings of a run.

    Parameters
    ----------
    given : mapping
        Settings, kebab-case; others have their default.
    resume : path, optional
        The folder of the run to go on with, whose settings these then are.

    Raises
    ------
    ConfigError
        A setting that there is not, a value out of its range, or a run that cannot be gone on with.
    """
    before: dict[str, Any] = {}
    if resume:
        before = read_settings(resume)
        given = {**given, "resume": os.path.abspath(os.path.expanduser(resume))}
    config = Config.from_run_config({**before, **given}).absolute()
    if config.resume:
        check_resumable(config.run_config())
    return config


def read_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of the run in a folder of results; ConfigError where there is none that can be gone on with."""
    path = Path(folder).expanduser()
    settings = read_config(path)["settings"]
    if is_finished(path):
        raise ConfigError(f"resume is {str(folder)!r}, whose run has been finished")
    return settings


def is_finished(folder: Path) -> bool:
    """Whether all results of a run are there: while they are written there is a summary, and a checkpoint still."""
    return (folder / "summary.json").exists() and Checkpoints(folder / "checkpoints").oldest is None


def read_config(folder: Path) -> dict[str, Any]:
    """Read a run's config.json; ConfigError where there is none of a run."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        dict(**config["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"resume is {str(folder)!r}, which has no config.json of a run ({error})") from None
    return config


def check_resumable(run_config: Mapping[str, Any]) -> None:
    """Find out whether the run in the folder `resume` has these settings, but for where folders lie.

    Raises
    ------
    ConfigError
        It has not, or there is none, or it has been finished.
    """
    before = read_settings(run_config["resume"])
    keys = [key for key in before | dict(run_config) if key not in ("resume", "output-dir")]
    if differing := [key for key in keys if before.get(key) != run_config.get(key)]:
        what = ", ".join(f"{key} was {before.get(key)!r} and is {run_config.get(key)!r}" for key in differing)
        raise ConfigError(f"resume is {run_config['resume']!r}, a run with other settings: {what}")


def what_data(settings: Mapping[str, Any]) -> str:
    """The dataset, and how it was divided; sites have data of their own, which nobody divides."""
    return "sites" if settings["dataset"] == "sites" else f"{settings['dataset']}, {settings['partition']}"


def read_summary(folder: Path) -> dict[str, Any]:
    """Read a finished run's summary.

    Raises
    ------
    ValueError
        The run did not finish: there is no summary.json.
    """
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no summary.json: the run is not finished; run it again") from None


# --- Names of files, JSON, pictures ----------------------------------------------------------------------


def client_array(clients: Sequence[ClientId]) -> np.ndarray:
    """Client ids as an array without objects: integers if all are (int64, else uint64), else text."""
    if all(isinstance(client, int) for client in clients):
        for dtype in (np.int64, np.uint64):
            with suppress(OverflowError):
                return np.array(clients, dtype=dtype)
    return np.array([str(client) for client in clients], dtype=np.str_)


def model_file(client: ClientId, taken: set[str]) -> str:
    """A file name for a client's model that every file system takes, added to `taken`.

    Letters, digits and "._-~" stay, other characters become %XX. A name that another client has already, be it
    but for upper and lower case (7 and "7", "a" and "A"), and a long one, ends in a hash of the id.
    """
    name = f"client-{quote(str(client), safe='')}"
    if len(name) > 100 or name.casefold() in taken:
        name = f"{name[:80]}-{sha256(repr(client).encode()).hexdigest()[:16]}"
    taken.add(name.casefold())
    return f"{name}.safetensors"


def client_files(folder: str, clients: Iterable[ClientId]) -> dict[ClientId, str]:
    """Where each client's model is to lie inside the run's folder."""
    taken: set[str] = set()
    return {client: f"{folder}/{model_file(client, taken)}" for client in in_order(clients)}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON that every program reads, with null for NaN and the infinities, which JSON does not have."""
    with replacing(path) as temporary:
        text = json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_bytes(text.encode("utf-8", "backslashreplace") + b"\n")  # JSON escapes are written so too


def finite(content: Any) -> Any:
    """The same content with None in place of every number that is not finite."""
    if isinstance(content, Mapping):
        return {key: finite(each) for key, each in content.items()}
    if isinstance(content, list | tuple):
        return [finite(each) for each in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture, whole or not at all."""
    with replacing(path) as temporary:
        figure.savefig(temporary)


@contextmanager
def failing_is_a_warning(path: Path) -> Iterator[None]:
    """Have a picture or page that cannot be made be a warning that names it: what it shows is in other files."""
    try:
        yield
    except Exception as error:  # whatever a library has against a number, a name or a disk
        reason, *_ = f"{type(error).__name__}: {error}".splitlines()
        log(WARNING, "kindred: %s cannot be written (%s); all other results are", path, reason)
