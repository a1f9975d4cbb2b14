"""The results of a run: one folder, complete when it holds summary.json and no checkpoint.

    config.json                      settings, seed, headline metric, true groups, names of clients, samples,
                                     versions, platform, start (UTC); written first
    history.csv                      a line per round and client; grows every round
    updates.csv                      a line per update: its norm, also in medians of others; grows every round
    validators.csv                   a line per round and site that only validates, if there are any
    rounds.csv                       a line per round, also for evaluations before and after them; grows every round
    collaboration/round-0003.npz     clients (m,), rows (k, m), which (m,), own (m,), the shares of the clients' models
                                     as in `kindred.engine.collaboration.Collaboration`, in float32
    models/client-ID.safetensors     each client's personal model, after the last round
    selected/client-ID.safetensors   each client's model that is best on its validation data
    predictions/client-ID.safetensors  what that model, or else the last one, predicts for the client's test data
    mixtures/client-ID.safetensors   FedeRiCo, FedEM: the models that a client predicts with, and their shares
    checkpoints/round-0003-SHA256.npz  the state after a round, until the run is finished
    schema.json                      tables: columns, types, categories, and how they are prepared
    clusters.json, clusters.png      Clustered FL: the tree of clusters and the clients in each
    accuracy.png, collaboration.png, partition.png; rmse.png or the like for another headline metric
    weights.png                      weights over rounds, where they change; FedEM: the clients' shares of components
    networks.png                     the clients with each network, where there are several networks
    report.html                      all results in one page
    summary.json                     the figures of the whole run; written after its models

Pictures and the report only show the content of other files: if one cannot be made, there is a warning and the run
continues. A file is written under another name, and renamed only when it is complete. So a reader, or a run that is
interrupted, finds the old or the new file. In a long run the CSV files are too large to be rewritten every round:
all lines of a round are appended at once, and removed if that fails. They are flushed to the disk at the end. If the
machine loses its power before, lines may be missing, which a resumed run writes again; `read_table` ignores a last line
without a line end. Accuracies are in [0, 1]; an empty cell or null means that nothing was reported.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.supercore import log

from kindred.engine.checkpoint import Checkpoints
from kindred.engine.history import HeadlineColumns
from kindred.files import copy_arrays, flush_files, partial_files, replacing, write_arrays, write_bytes
from kindred.locks import lock
from kindred.messages import ATTEMPT, ClientId, in_order, read_record

from .config import ConfigError
from .intervals import pooled_metrics
from .report.collaboration import write_collaboration
from .report.reading import REPORT
from .report.run_figures import partition_picture, run_figures
from .report.write import write_report
from .run_files import (
    IN_USE,
    check_resumable,
    client_files,
    failing_is_a_warning,
    read_config,
    save_figure,
    versions,
    what_data,
    write_json,
)
from .summary import summarise, training_rounds
from .tables import GrowingTable

if TYPE_CHECKING:
    import numpy as np
    from flwr.app import ArrayRecord

    from kindred.data import Federation
    from kindred.engine.history import History
    from kindred.engine.strategy import PersonalizedStrategy

Content = TypeVar("Content")

WRITERS = 8  # files that are written at a time
HISTORY_COLUMNS = ("round", "client", "status", "seconds", "bytes-down", "bytes-up")
VALIDATORS_COLUMNS = ("round", "client", "status", "bytes-down", "bytes-up", "num-test-examples")
UPDATES_COLUMNS = ("round", "client", "visit", "norm", "relative-norm", "relative-to-largest", "scaled-by")
ROUNDS_COLUMNS = ("round", "asked", "answered", "seconds", "bytes-down", "bytes-up", "evaluated", "personal")


class RunFolder:
    """The folder of one run: make it before the run, then `record_round` after each round, `finish` at the end.

    Parameters
    ----------
    run_config : mapping
        All settings, kebab-case, as from `Config.run_config()`. The folder is the one that `resume` names. Otherwise
        it is made in `output-dir`, named by time (UTC), strategy, dataset, partition and seed; it never replaces
        another.
    groups : sequence of int, optional
        The true group of each client of the federation, if there are groups.
    samples : str, optional
        Text that identifies the run's samples; see `app.samples_of`.
    metric : str
        Name of the headline metric.
    names : sequence of str
        The name of each client, if they have names.

    Attributes
    ----------
    path : Path
        Absolute.

    Raises
    ------
    ConfigError
        `output-dir` cannot be written to; then no folder is left behind. Or `resume` is not the folder of an
        unfinished run with these settings and samples.
    """

    def __init__(
        self,
        run_config: Mapping[str, Any],
        groups: Sequence[int] | None = None,
        samples: str | None = None,
        metric: str = "accuracy",
        names: Sequence[str] = (),
    ) -> None:
        self.settings = dict(run_config)
        if self.settings["resume"]:
            self.path = Path(self.settings["resume"]).expanduser().absolute()
            check_resumable(self.settings)
            config = read_config(self.path)
            if None not in (samples, config.get("images")) and samples != config["images"]:
                raise ConfigError(
                    f"resume is {self.settings['resume']!r}, a run with other samples: the files of its "
                    "data have changed since"
                )
            before = config.get("versions") or versions()
            if changed := [name for name, now in versions().items() if before.get(name) != now]:
                log(
                    WARNING,
                    "kindred: the run continues with different versions, and its results may differ in their last "
                    "bits: %s",
                    ", ".join(f"{name} was {before.get(name)} and is {versions()[name]}" for name in changed),
                )
        else:
            self._make({"metric": metric, "groups": groups, "names": list(names) or None, "images": samples})
        self._unflushed: list[Path] = []  # files of collaborations that may not be on the disk yet
        self._history = GrowingTable(self.path / "history.csv", HISTORY_COLUMNS)
        self._validators = GrowingTable(self.path / "validators.csv", VALIDATORS_COLUMNS)
        self._updates = GrowingTable(self.path / "updates.csv", UPDATES_COLUMNS)
        self._rounds = GrowingTable(self.path / "rounds.csv", (*ROUNDS_COLUMNS, *HeadlineColumns.of(metric)))

    def _make(self, about: Mapping[str, Any]) -> None:
        started = datetime.now(UTC)
        data = what_data(self.settings).replace(", ", "-")
        name = f"{started:%Y%m%d-%H%M%S}-{self.settings['strategy']}-{data}-seed{self.settings['seed']}"
        config = {
            "settings": self.settings,
            "seed": self.settings["seed"],
            **about,
            "started": f"{started:%Y-%m-%dT%H:%M:%SZ}",
            "versions": versions(),
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
        """Lock the run, so that only this process works on it.

        Raises
        ------
        ConfigError
            Another process works on the run, or the folder cannot be written to.
        """
        what = f"resume is {str(self.path)!r}"
        try:
            file = open(self.path / "config.json", "rb+")
        except OSError as error:
            raise ConfigError(f"{what}, where nothing can be written ({error.strerror})") from None
        with file:
            try:
                lock(file, wait=False)
            except BlockingIOError:
                raise ConfigError(f"{what}, {IN_USE}") from None
            except OSError:  # the file system has no locks
                pass
            with suppress(OSError):
                for folder in (self.path, *(each for each in self.path.iterdir() if not each.is_symlink())):
                    for partial, _ in partial_files(folder):  # of a process that was killed while it wrote
                        partial.unlink()
            yield

    def checkpoints(self) -> Checkpoints | None:
        """Return the run's checkpoints (`checkpoint-every`, `keep-checkpoints`); None if it has none.

        With clients that come later, which are served from it, there is one after the last round in any case.
        """
        every, keep = self.settings["checkpoint-every"], self.settings["keep-checkpoints"]
        if self.settings["held-out-clients"]:
            every = every or self.settings["num-rounds"]
        if not every:
            return None
        checkpoints = Checkpoints(self.path / "checkpoints", every, keep)
        checkpoints.flushes["results"] = self._flush
        return checkpoints

    def record_round(self, strategy: PersonalizedStrategy) -> None:
        """Write the results of the strategy's last round: lines of the tables, and the collaboration."""
        self._extend_tables(strategy.history)
        found = strategy.shared_rows()
        if found.clients and strategy.history.rounds:
            number = strategy.history.rounds[-1]["round"]
            self._unflushed.append(write_collaboration(self.path / "collaboration", number, found))

    def _flush(self) -> None:
        """Wait until the collaboration of each round so far is on the disk. A resumed run rewrites only the tables."""
        written = [*self._unflushed]  # the next round may add its file meanwhile
        flush_files(written)
        del self._unflushed[: len(written)]

    def _extend_tables(self, history: History) -> None:
        self._history.extend(history.rows)
        if history.validations:
            self._validators.extend(history.validations)
        if history.updates:
            self._updates.extend(history.updates)
        self._rounds.extend(history.rounds)

    def finish(
        self,
        strategy: PersonalizedStrategy,
        federation: Federation | None,
        about: Callable[[ClientId], Mapping[str, str]] | None = None,
        kept: Mapping[str, Mapping[ClientId, Path]] | None = None,
        newcomers: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write the models, then the summary, then the pictures and the report.

        Parameters
        ----------
        strategy : PersonalizedStrategy
            After its run.
        federation : Federation, optional
            The clients' data, for the picture of the partition, and their names and true groups; None if sites have
            their own data.
        about : callable, optional
            Return the metadata to write with a client's model, such as its network.
        kept : mapping, optional
            folder of the results -> client -> file that the client has kept, to be copied. If "models" has none, the
            models that the strategy has received are written.
        newcomers : mapping, optional
            What clients that came later gained, see `newcomers.Service.results`.

        Returns
        -------
        dict
            The content of summary.json: that of `summary.summarise`, and in a simulation `pooled`, the metrics of all
            clients' predictions together, see `intervals.pooled_metrics`.

        Raises
        ------
        OSError
            The tables, the summary or a model cannot be written. For a picture or the report it is a warning.
        """
        history = strategy.history
        self._extend_tables(history)  # again, in case it failed after the last round
        flush_files(each.path for each in (self._history, self._validators, self._updates, self._rounds))
        self._flush()
        last = len(training_rounds(self.settings, history))
        kept = {name: files for name, files in (kept or {}).items() if files}
        records = {} if "models" in kept else strategy.client_models()
        models = client_files("models", kept.get("models", records))
        names = federation.names if federation else ()
        targets = federation.targets() if federation else ()
        summary = summarise(self.settings, history, models, names, targets) | {"newcomers": newcomers}
        if federation and "predictions" in kept:
            objective, seed = federation.task.objective, self.settings["seed"]
            summary["pooled"] = pooled_metrics(kept["predictions"], objective, history.metric, seed)
        if federation and federation.task.inputs.kind == "table":
            write_json(self.path / "schema.json", federation.task.to_dict())

        for name, files in kept.items():
            self._copy_files(files, client_files(name, files))
        self._save_models(records, models, last, about)
        tree = getattr(strategy, "tree", None)  # only of a method that clusters its clients
        if tree:
            write_json(self.path / "clusters.json", tree)
        write_json(self.path / "summary.json", summary)  # the last file without which the run is not finished

        pictures = run_figures(
            self.path, self.settings, history.metric, history.rows, last, strategy.shared_rows, tree, federation
        )
        for name, draw in pictures.items():
            with failing_is_a_warning(self.path / f"{name}.png"):
                if figure := draw():
                    save_figure(figure, self.path / f"{name}.png")
        if federation:
            with failing_is_a_warning(self.path / "partition.png"):
                write_bytes(self.path / "partition.png", partition_picture(federation))
        with failing_is_a_warning(self.path / REPORT):
            write_report(self.path, summary)
        if checkpoints := self.checkpoints():
            checkpoints.remove()  # the run is finished
        return summary

    def _save_models(
        self,
        records: Mapping[ClientId, ArrayRecord],
        places: Mapping[ClientId, str],
        last: int,
        about: Callable[[ClientId], Mapping[str, str]] | None,
    ) -> None:
        """Write each client's model to its place inside the run's folder."""

        def content(client: ClientId) -> tuple[dict[str, np.ndarray], dict[str, str]]:
            texts = {
                "strategy": str(self.settings["strategy"]),
                "round": str(last),
                "client": str(client),
                **(about(client) if about else {}),
            }
            return read_record(records[client]), texts

        def write(model: tuple[dict[str, np.ndarray], dict[str, str]], temporary: Path) -> None:
            write_arrays(temporary, *model)

        self._write_files(content, write, {client: places[client] for client in in_order(records)})

    def _copy_files(self, files: Mapping[ClientId, Path], places: Mapping[ClientId, str]) -> None:
        """Copy a file of each client to its place inside the run's folder, without the time of the run in it."""

        def write(source: Path, temporary: Path) -> None:
            copy_arrays(source, temporary, without=ATTEMPT)

        self._write_files(files.__getitem__, write, places)

    def _write_files(
        self,
        content: Callable[[ClientId], Content],
        write: Callable[[Content, Path], object],
        places: Mapping[ClientId, str],
    ) -> None:
        """Write a file for each client, WRITERS at a time, as each waits for the disk.

        `content` is called in this thread, because it may compute a model from the state of the strategy.
        """

        def each(given: Content, place: str) -> None:
            with self._new_file(place) as temporary:
                write(given, temporary)

        waiting = iter(places.items())
        with ThreadPoolExecutor(WRITERS) as writers:
            while some := list(itertools.islice(waiting, WRITERS)):
                found = [content(client) for client, _ in some]
                list(writers.map(each, found, [place for _, place in some]))

    @contextmanager
    def _new_file(self, place: str) -> Iterator[Path]:
        path = self.path / place
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as temporary:
            yield temporary


def _new_folder(parent: Path, name: str, made: list[Path]) -> Path:
    """Make a new folder `name`, or name-2, name-3 and so on; append to `made` each folder that is made."""
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
