"""Read and write files in a run's folder: config.json, summary.json, names of models' files, pictures.

`results.py` lists the files of a run; `tables.py` reads and writes the CSV files.
"""

from __future__ import annotations

import io
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

from kindred.engine.checkpoint import Checkpoints
from kindred.files import write_bytes
from kindred.lazy import lazy
from kindred.messages import ClientId, in_order
from kindred.versions import VERSION

from .config import Config, ConfigError

if TYPE_CHECKING:
    from matplotlib.backends import backend_agg as agg
    from matplotlib.figure import Figure
else:
    agg = lazy("matplotlib.backends.backend_agg")

IN_USE = "a run that another process is at work on"
PACKAGES = ("flwr", "torch", "numpy", "scikit-learn")  # in addition to our own


# --- config.json and summary.json -----------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return name -> version of Python and of the packages that results depend on."""
    others = {package: metadata.version(package) for package in PACKAGES}
    return {"python": platform.python_version(), "kindred": VERSION, **others}


def run_settings(given: Mapping[str, Any], resume: str | os.PathLike[str] | None = None) -> Config:
    """Return the settings of a run.

    Parameters
    ----------
    given : mapping
        Settings, kebab-case; all others have their default.
    resume : path, optional
        The folder of the run to continue; its settings replace the defaults.

    Raises
    ------
    ConfigError
        A setting does not exist, a value is out of its range, or the run cannot be continued.
    """
    before: dict[str, Any] = {}
    if resume:
        before = read_settings(resume)
        given = {**given, "resume": os.path.abspath(os.path.expanduser(resume))}
    config = Config.from_run_config({**before, **given}).absolute()
    if config.resume:
        check_resumable(config.run_config())
    return config


def folder_of_run(folder: Path, run: Mapping[str, Any]) -> Path:
    """Return the folder of a run in a comparison, whose own folder is `folder` and may not exist yet.

    That is `folder` itself if the run has none.
    """
    return Path(os.path.normpath(folder / run.get("folder", "")))


def read_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings of the unfinished run in a folder; ConfigError if there is no such run."""
    path = Path(folder).expanduser()
    settings = read_config(path)["settings"]
    if is_finished(path):
        raise ConfigError(f"resume is {str(folder)!r}, whose run has been finished; `kindred compare` reuses it")
    return settings


def is_finished(folder: Path) -> bool:
    """Return whether all results of a run are written: until then a summary may exist, but also a checkpoint."""
    return (folder / "summary.json").exists() and Checkpoints(folder / "checkpoints").oldest is None


def read_config(folder: Path) -> dict[str, Any]:
    """Read a run's config.json; ConfigError if the folder has none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        dict(**config["settings"])
        config["settings"]["strategy"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"resume is {str(folder)!r}, which has no config.json of a run ({error})") from None
    return config


def check_resumable(run_config: Mapping[str, Any]) -> None:
    """Check that the run in the folder `resume` has these settings, apart from the paths of folders.

    Raises
    ------
    ConfigError
        It has other settings, does not exist, or is finished.
    """
    before = Config().run_config() | read_settings(run_config["resume"])  # an older run did not have all settings
    keys = [key for key in before | dict(run_config) if key not in ("resume", "output-dir")]
    if differing := [key for key in keys if before.get(key) != run_config.get(key)]:
        what = ", ".join(f"{key} was {before.get(key)!r} and is {run_config.get(key)!r}" for key in differing)
        raise ConfigError(f"resume is {run_config['resume']!r}, a run with other settings: {what}")


def what_data(settings: Mapping[str, Any]) -> str:
    """Return the names of dataset and partition; "sites" for sites, whose data are not partitioned."""
    return "sites" if settings["dataset"] == "sites" else f"{settings['dataset']}, {settings['partition']}"


def read_summary(folder: Path) -> dict[str, Any]:
    """Read a finished run's summary.

    Raises
    ------
    ConfigError
        The run did not finish: there is no summary.json. Or this file is damaged.
    """
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        summary["clients"], summary["bytes-down"], summary["bytes-up"]
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no summary.json: the run is not finished; run it again") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}): remove the run's folder, and run it again") from None
    return summary


# --- Names of clients and files, JSON, pictures ----------------------------------------------------------------------


def name_of(client: ClientId, names: Sequence[str]) -> str:
    """Return a client's name, of the names of clients 0, 1, 2 and so on; "" if it has none."""
    return names[client] if isinstance(client, int) and 0 <= client < len(names) else ""


def labels_of(clients: Iterable[ClientId], names: Sequence[str]) -> list[str]:
    """Return clients' ids as texts, each with the client's name if it has one."""
    return [f"{client} {name}" if (name := name_of(client, names)) else str(client) for client in clients]


def client_array(clients: Sequence[ClientId]) -> np.ndarray:
    """Return client ids as an array without objects: integers if all are (int64, else uint64), else text."""
    if all(isinstance(client, int) for client in clients):
        for dtype in (np.int64, np.uint64):
            with suppress(OverflowError):
                return np.array(clients, dtype=dtype)
    return np.array([str(client) for client in clients], dtype=np.str_)


def model_file(client: ClientId, taken: set[str]) -> str:
    """Return a file name for a client's model that every file system accepts, and add it to `taken`.

    Letters, digits and "._-~" stay; other characters become %XX. A name ends in a hash of the id if it is long, or if
    another client has it already, ignoring case (7 and "7", "a" and "A").
    """
    name = f"client-{quote(str(client), safe='')}"
    if len(name) > 100 or name.casefold() in taken:
        name = f"{name[:80]}-{sha256(repr(client).encode()).hexdigest()[:16]}"
    taken.add(name.casefold())
    return f"{name}.safetensors"


def client_files(folder: str, clients: Iterable[ClientId]) -> dict[ClientId, str]:
    """Return client -> path of its model, relative to the run's folder."""
    taken: set[str] = set()
    return {client: f"{folder}/{model_file(client, taken)}" for client in in_order(clients)}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write standard JSON, with null for NaN and the infinities, which JSON does not have."""
    text = json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    write_bytes(path, text.encode("utf-8", "backslashreplace") + b"\n")  # backslashreplace yields JSON escapes


def finite(content: Any) -> Any:
    """Return the same content with None in place of every number that is not finite."""
    if isinstance(content, Mapping):
        return {key: finite(each) for key, each in content.items()}
    if isinstance(content, list | tuple):
        return [finite(each) for each in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture atomically: whole or not at all."""
    write_bytes(path, png_of(figure))


def png_of(figure: Figure) -> bytes:
    """Return the content of a PNG file of a figure."""
    content = io.BytesIO()
    canvas: Any = agg.FigureCanvasAgg(figure)  # matplotlib has no types for it
    canvas.print_png(content)  # `savefig` would draw it once more, for the layout
    return content.getvalue()


@contextmanager
def failing_is_a_warning(path: Path) -> Iterator[None]:
    """Turn the failure to make a picture or page into a warning with its name; other files hold its content."""
    try:
        yield
    except Exception as error:  # a library may fail at a number, a name or the disk
        reason, *_ = f"{type(error).__name__}: {error}".splitlines()
        log(WARNING, "kindred: %s cannot be written (%s); all other results are", path, reason)
