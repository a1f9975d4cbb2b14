"""What a run leaves behind: one folder, complete once it holds summary.json and no checkpoint any more.

    config.json                      settings, seed, true groups, images, versions, platform, start (UTC); written first
    history.csv                      a line per round and client; grows every round
    rounds.csv                       a line per round; grows every round
    collaboration/round-0003.npz     clients (m,), weights (m, m) float32: whose model counts how much for whom
    models/client-ID.safetensors     each client's personal model, after the last round
    mixtures/client-ID.safetensors   FedeRiCo, FedEM: the models that a client predicts with, and their shares
    checkpoints/round-0003-SHA256.npz  the state after a round, as long as the run has not been finished
    clusters.json, clusters.png      Clustered FL: the tree of clusters, and who is in which
    accuracy.png, collaboration.png, partition.png
    report.html                      all that there is to see, in one page
    summary.json                     the figures of the whole run; written first when its rounds are over

Pictures and the report show what other files hold: one that cannot be made is a warning and ends nothing.
A file is written under another name and takes its place only when it is whole, so that whoever reads it,
or a run that ends in the middle, finds the old or the new one. The two CSV files of a long run are too large
to be written anew every round: lines are appended, all of a round at once, and taken back if that fails.
Should the machine itself stop in that moment, the last line may be cut short, without a line end; `read_table`
leaves such a line out. Accuracies are in [0, 1], an empty cell or null means that nothing was reported.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib import metadata
from itertools import chain
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import quote

import numpy as np
from flwr.supercore import log

from kindred.client.state import partial_files, replacing
from kindred.engine.checkpoint import Checkpoints
from kindred.engine.history import COMPUTE
from kindred.messages import ClientId, in_order, read_record

from .config import ConfigError
from .tables import csv_lines, read_table

if TYPE_CHECKING:
    from flwr.app import ArrayRecord
    from matplotlib.figure import Figure
    from rich.table import Table

    from kindred.data import Federation
    from kindred.engine.history import History
    from kindred.engine.strategy import PersonalizedStrategy

HISTORY_COLUMNS = ("round", "client", "status", "seconds", "bytes-down", "bytes-up")
ROUNDS_COLUMNS = (
    "round",
    "asked",
    "answered",
    "seconds",
    "bytes-down",
    "bytes-up",
    "evaluated",
    "personal",
    "accuracy",
    "accuracy-weighted",
    "accuracy-p10",
    "accuracy-best",
)
SUMMED = (*COMPUTE, "floats", "bytes-fedavg")
PACKAGES = ("kindred", "flwr", "torch", "numpy", "scikit-learn")


class RunFolder:
    """The folder of one run: make it before the run, then `record_round` after each round, `finish` at the end.

    Parameters
    ----------
    run_config : mapping
        All settings, kebab-case, as from `Config.run_config()`. The folder is the one that `resume` names, or it is
        made in `output-dir` and named by the time (UTC), strategy, dataset, partition and seed; it never takes the
        place of another.
    groups : sequence of int, optional
        The true group of each client of the federation, where there are groups.
    images : str, optional
        What says which images the run has; see `app.images_of`.

    Attributes
    ----------
    path : Path
        Absolute.

    Raises
    ------
    ConfigError
        Nothing can be written in `output-dir`; nothing is left behind then. Or `resume` is not the folder of a run
        with these settings and images that has not been finished.
    """

    def __init__(
        self, run_config: Mapping[str, Any], groups: Sequence[int] | None = None, images: str | None = None
    ) -> None:
        self.settings = dict(run_config)
        if self.settings["resume"]:
            self.path = Path(self.settings["resume"]).expanduser().absolute()
            check_resumable(self.settings)
            config = _read_config(self.path)
            if None not in (images, config.get("images")) and images != config["images"]:
                raise ConfigError(
                    f"resume is {self.settings['resume']!r}, a run with other images: the files of its "
                    "data have been changed since"
                )
            before = config.get("versions")
            if changed := [name for name, now in _versions().items() if before and before.get(name) != now]:
                log(
                    WARNING,
                    "kindred: the run goes on with other versions than it began with, and may not come to "
                    "the same bits: %s",
                    ", ".join(f"{name} was {before.get(name)} and is {_versions()[name]}" for name in changed),
                )
        else:
            self._make(groups, images)
        self._history = _GrowingTable(self.path / "history.csv", HISTORY_COLUMNS)
        self._rounds = _GrowingTable(self.path / "rounds.csv", ROUNDS_COLUMNS)

    def _make(self, groups: Sequence[int] | None, images: str | None) -> None:
        started = datetime.now(UTC)
        data = what_data(self.settings).replace(", ", "-")
        name = f"{started:%Y%m%d-%H%M%S}-{self.settings['strategy']}-{data}-seed{self.settings['seed']}"
        config = {
            "settings": self.settings,
            "seed": self.settings["seed"],
            "groups": groups,
            "images": images,
            "started": f"{started:%Y-%m-%dT%H:%M:%SZ}",
            "versions": _versions(),
            "platform": platform.platform(),
        }
        made: list[Path] = []
        try:
            self.path = _new_folder(Path(self.settings["output-dir"]), name, made)
            write_json(self.path / "config.json", config)
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            for folder in reversed(made):
                with suppress(OSError):
                    folder.rmdir()
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"output-dir is {self.settings['output-dir']!r}, where nothing can be written ({reason}); "
                "name a folder that can be made and written"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the one process that is at work on the run.

        Raises
        ------
        ConfigError
            Another one is, or nothing can be written here.
        """
        what = f"resume is {str(self.path)!r}"
        try:
            file = open(self.path / "config.json", "rb+")
        except OSError as error:
            raise ConfigError(f"{what}, where nothing can be written ({error.strerror})") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{what}, a run that another process is at work on") from None
            except OSError:  # the file system has no locks
                pass
            with suppress(OSError):
                for folder in (self.path, *(each for each in self.path.iterdir() if not each.is_symlink())):
                    for partial, _ in partial_files(folder):  # of a process that was killed as it wrote
                        partial.unlink()
            yield

    def checkpoints(self) -> Checkpoints | None:
        """Where the run's state is kept, if it is (`checkpoint-every`, `keep-checkpoints`)."""
        every, keep = self.settings["checkpoint-every"], self.settings["keep-checkpoints"]
        return Checkpoints(self.path / "checkpoints", every, keep) if every else None

    def record_round(self, strategy: PersonalizedStrategy) -> None:
        """Write what the strategy's last round added: lines of the two tables, and the collaboration matrix."""
        self._extend_tables(strategy.history)
        clients, weights = strategy.collaboration()
        if clients and strategy.history.rounds:
            folder = self.path / "collaboration"
            folder.mkdir(exist_ok=True)
            with replacing(folder / f"round-{strategy.history.rounds[-1]['round']:04d}.npz") as temporary:
                np.savez_compressed(temporary, clients=client_array(clients), weights=np.asarray(weights, np.float32))

    def _extend_tables(self, history: History) -> None:
        self._history.extend(history.rows)
        self._rounds.extend(history.rounds)

    def finish(
        self,
        strategy: PersonalizedStrategy,
        federation: Federation | None,
        about: Callable[[ClientId], Mapping[str, str]] | None = None,
        kept: Mapping[str, Mapping[ClientId, Path]] | None = None,
    ) -> dict[str, Any]:
        """Write the summary, then the models, then the pictures and the report.

        Parameters
        ----------
        strategy : PersonalizedStrategy
            After its run.
        federation : Federation, optional
            Who has what, for the picture of the partition and the true groups in that of the collaboration; None
            where sites have data of their own.
        about : callable, optional
            Given a client, what to write beside its model, such as which network it is.
        kept : mapping, optional
            folder of the results -> client -> file that the client has kept, to be copied. Without any in "models"
            these are the models that reached the strategy.

        Returns
        -------
        dict
            The content of summary.json.

        Raises
        ------
        OSError
            The tables, the summary or a model cannot be written. A picture or the report that cannot is a warning.
        """
        from .report.content import REPORT, write_report

        history = strategy.history
        self._extend_tables(history)  # should that have failed after the last round
        last = len(_training(self.settings, history))
        kept = {name: files for name, files in (kept or {}).items() if files}
        records = {} if "models" in kept else strategy.client_models()
        models = _places("models", kept.get("models", records))
        summary = summarise(self.settings, history, models)
        write_json(self.path / "summary.json", summary)

        for name, files in kept.items():
            self._copy_files(files, _places(name, files))
        self._save_models(records, models, last, about)
        tree = getattr(strategy, "tree", None)  # of a method that divides its clients
        if tree:
            write_json(self.path / "clusters.json", tree)

        self._draw_pictures(strategy, tree, last, federation)
        with failing_is_a_warning(self.path / REPORT):
            write_report(self.path, summary)
        if checkpoints := self.checkpoints():
            checkpoints.remove()  # there is nothing left to go on with
        return summary

    def _save_models(
        self,
        records: Mapping[ClientId, ArrayRecord],
        places: Mapping[ClientId, str],
        last: int,
        about: Callable[[ClientId], Mapping[str, str]] | None,
    ) -> None:
        """Write each client's model to its place inside the run's folder."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        for client in in_order(records):
            texts = {
                "strategy": str(self.settings["strategy"]),
                "round": str(last),
                "client": str(client),
                **(about(client) if about else {}),
            }
            # save_file writes an array's memory as it lies there.
            arrays = {key: np.asarray(array, order="C") for key, array in read_record(records[client]).items()}
            with self._new_file(places[client]) as temporary:
                try:
                    save_file(arrays, temporary, texts)
                except SafetensorError as error:  # as of a full disk
                    raise OSError(str(error)) from None

    def _copy_files(self, files: Mapping[ClientId, Path], places: Mapping[ClientId, str]) -> None:
        """Copy a file of each client to its place inside the run's folder."""
        for client, place in places.items():
            with self._new_file(place) as temporary:
                shutil.copyfile(files[client], temporary)

    @contextmanager
    def _new_file(self, place: str) -> Iterator[Path]:
        path = self.path / place
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as temporary:
            yield temporary

    def _draw_pictures(
        self,
        strategy: PersonalizedStrategy,
        tree: Sequence[Mapping[str, Any]] | None,
        last: int,
        federation: Federation | None,
    ) -> None:
        from kindred.data import partition_figure

        from .report.figures import accuracy_figure, collaboration_figure, tree_figure

        name = self.settings["strategy"]
        setting = f"{what_data(self.settings)}, seed {self.settings['seed']}"

        def groups_of(clients: Sequence[ClientId]) -> np.ndarray | None:
            return true_groups(clients, federation) if federation else None

        def draw(file: str, make: Callable[[], Figure | None]) -> None:
            with failing_is_a_warning(self.path / file):
                if figure := make():
                    save_figure(figure, self.path / file)

        def collaborations() -> Figure | None:
            clients, weights = strategy.collaboration()
            if not clients:
                return None
            title = f"Who learns from whom: {name}, round {last}, {setting}"
            return collaboration_figure(clients, weights, groups_of(clients), title)

        def clusters() -> Figure:
            members = [client for cluster in tree for client in cluster["clients"]]
            groups = groups_of(members)
            known = None if groups is None else dict(zip(members, groups.tolist()))
            return tree_figure(tree, last, known, f"Clusters: {name} on {setting}")

        draw("accuracy.png", lambda: accuracy_figure(strategy.history.rows, f"{name} on {setting}"))
        draw("collaboration.png", collaborations)
        if tree:
            draw("clusters.png", clusters)
        if federation:
            draw("partition.png", lambda: partition_figure(federation))


class _GrowingTable:
    """A CSV file of a list of rows that only grows.

    Parameters
    ----------
    path : Path
    columns : sequence of str
        The first ones; others follow in the order in which rows bring them.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = dict.fromkeys(columns)  # an ordered set
        self.written = 0

    def extend(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows that are not in the file yet. A new column has the file written anew, once."""
        added = rows[self.written :]
        columns = dict(self.columns)
        for row in added:
            columns.update(dict.fromkeys(row))
        if not self.written or len(columns) > len(self.columns):
            with replacing(self.path) as temporary:
                temporary.write_bytes(table_lines(columns, rows, header=True))
        elif added:
            size = self.path.stat().st_size
            try:
                with open(self.path, "ab") as file:
                    file.write(table_lines(columns, added))
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                os.truncate(self.path, size)
                raise
        self.columns, self.written = columns, len(rows)


def read_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of the run in a folder of results; ConfigError where there is none that can be gone on with."""
    path = Path(folder).expanduser()
    settings = _read_config(path)["settings"]
    if is_finished(path):
        raise ConfigError(f"resume is {str(folder)!r}, whose run has been finished")
    return settings


def is_finished(folder: Path) -> bool:
    """Whether all results of a run are there: while they are written there is a summary, and a checkpoint still."""
    return (folder / "summary.json").exists() and Checkpoints(folder / "checkpoints").oldest is None


def _read_config(folder: Path) -> dict[str, Any]:
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


def _places(folder: str, clients: Iterable[ClientId]) -> dict[ClientId, str]:
    """Where each client's model is to lie inside the run's folder."""
    taken: set[str] = set()
    return {client: f"{folder}/{model_file(client, taken)}" for client in in_order(clients)}


def true_groups(clients: Sequence[ClientId], federation: Federation) -> np.ndarray | None:
    """The true group of each client; None unless every one is a partition of the federation."""
    if all(isinstance(client, int) and 0 <= client < federation.num_clients for client in clients):
        return federation.groups[list(clients)]
    return None


def summarise(settings: Mapping[str, Any], history: History, models: Mapping[ClientId, str]) -> dict[str, Any]:
    """The figures of a whole run.

    Parameters
    ----------
    settings : mapping
        The run's settings, kebab-case.
    history : History
    models : mapping
        client -> file of its model.

    Returns
    -------
    dict
        `rounds` of training; as in the last line of rounds.csv `accuracy` (mean over clients),
        `accuracy-weighted`, `accuracy-p10`, `accuracy-best` (BMTA); `seconds`, `bytes-down` and `bytes-up` of the
        whole run, a closing evaluation included; `seconds-per-round` of training; `samples-trained` and
        `samples-predicted` by all clients; `personal`, which evaluation accuracies are of; of PerFed-CKT `floats`
        (numbers sent, as its paper counts them) and `bytes-fedavg` (what FedAvg would have sent with the same models,
        both ways); `left-out`: a list of `client` and `reason`; `refused`: a list of
        `client` and `reasons`, of replies, with how many there were of each; `clients`: a list of `client`,
        its last known `accuracy` and its `model` file. What nobody reported is None.
    """
    training = _training(settings, history)
    last = history.rounds[-1] if history.rounds else {}
    accuracies = history.last_accuracies()
    return {
        **{key: settings[key] for key in ("strategy", "dataset", "partition", "seed")},
        "rounds": len(training),
        **{
            key: last.get(key) for key in ("personal", "accuracy", "accuracy-weighted", "accuracy-p10", "accuracy-best")
        },
        "seconds": float(sum(line["seconds"] for line in history.rounds)),
        "seconds-per-round": float(sum(line["seconds"] for line in training)) / len(training) if training else None,
        "bytes-down": int(sum(line["bytes-down"] for line in history.rounds)),
        "bytes-up": int(sum(line["bytes-up"] for line in history.rounds)),
        **{
            key: sum(line.get(key, 0) for line in history.rounds)
            for key in SUMMED
            if any(key in line for line in history.rounds)
        },
        "left-out": [{"client": client, "reason": history.left_out[client]} for client in in_order(history.left_out)],
        "refused": [{"client": client, "reasons": reasons} for client, reasons in history.refused().items()],
        "clients": [
            {"client": client, "accuracy": accuracies.get(client), "model": models.get(client)}
            for client in in_order({row["client"] for row in history.rows} | models.keys())
        ],
    }


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


def comparison_table(summaries: Sequence[Mapping[str, Any]], terminal: bool = True) -> Table:
    """Runs side by side: accuracies in percent, seconds, megabytes (10^6 bytes).

    Parameters
    ----------
    summaries : sequence of mapping
        As from `RunFolder.finish` or `read_summary`, in the order of the lines.
    terminal : bool
        False leaves out the rules and the emphasis on the best of each column of accuracies.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if terminal else None, show_edge=terminal, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    columns = {"mean %": "accuracy", "best %": "accuracy-best", "bottom decile %": "accuracy-p10"}
    for name in (*columns, "seconds", "MB down", "MB up"):
        table.add_column(name, justify="right", no_wrap=True)
    most = {key: max((s[key] for s in summaries if s[key] is not None), default=None) for key in columns.values()}
    for summary in summaries:
        cells = []
        for key in columns.values():
            text = _digit(summary[key], 100)
            cells.append(f"[bold]{text}[/bold]" if terminal and summary[key] == most[key] is not None else text)
        cells += [_digit(summary["seconds"]), *(_digit(summary[key], 1e-6) for key in ("bytes-down", "bytes-up"))]
        table.add_row(summary["strategy"], *cells)
    return table


def _digit(value: float | None, factor: float = 1) -> str:
    """A number with a digit after the point; "-" where it is not known."""
    return "-" if value is None else f"{factor * value:.1f}"


def compare_runs(folders: Sequence[Path], picture: Path, file: TextIO | None = None) -> None:
    """Put finished runs side by side: print the table, and draw their accuracies over rounds in one picture.

    Parameters
    ----------
    folders : sequence of Path
        Of finished runs.
    picture : Path
        The PNG to write.
    file : text stream, optional
        Where to print, by default standard output; plain text unless it is a terminal.

    Raises
    ------
    ValueError
        One of the runs did not finish.
    """
    from rich.console import Console

    from .report.figures import comparison_figure

    summaries = [read_summary(folder) for folder in folders]
    console = Console(file=file or sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = 200  # never cut: whoever reads a file or a pipe has room
    console.print(comparison_table(summaries, console.is_terminal))
    runs = [
        (summary["strategy"], [read_table(folder / "rounds.csv")])
        for summary, folder in zip(summaries, folders, strict=True)
    ]
    settings = {f"{what_data(summary)}, seed {summary['seed']}" for summary in summaries}
    with failing_is_a_warning(picture):
        save_figure(comparison_figure(runs, settings.pop() if len(settings) == 1 else "Runs compared"), picture)


def _training(settings: Mapping[str, Any], history: History) -> list[dict[str, Any]]:
    """The rounds without what some methods add: an exchange before the first, an evaluation after the last."""
    return [line for line in history.rounds if 1 <= line["round"] <= settings["num-rounds"]]


def _new_folder(parent: Path, name: str, made: list[Path]) -> Path:
    """Make a new folder `name`, or name-2, name-3 and so on; lists in `made` each folder that had to be made."""
    parent = parent.absolute()
    for folder in reversed([folder for folder in (parent, *parent.parents) if not folder.exists()]):
        folder.mkdir(exist_ok=True)
        made.append(folder)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            made.append(folder)
            return folder


def table_lines(columns: Collection[str], rows: Iterable[Mapping[str, Any]], header: bool = False) -> bytes:
    """Rows as lines of a table: exactly one each, so line breaks inside texts become spaces."""

    def one_line(value: Any) -> Any:
        return re.sub(r"[\r\n]+", " ", value) if isinstance(value, str) else value

    lines = ([row.get(column) for column in columns] for row in rows)
    return csv_lines(map(one_line, line) for line in chain([columns] if header else [], lines))


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


def _versions() -> dict[str, str | None]:
    return {"python": platform.python_version()} | {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    """The installed version; None where it is used without being installed, as from a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
