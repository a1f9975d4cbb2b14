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
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.supercore import log
from safetensors import SafetensorError
from safetensors.numpy import save_file

from kindred.client.state import partial_files, replacing
from kindred.engine.checkpoint import Checkpoints
from kindred.messages import ClientId, in_order, read_record

from .config import ConfigError
from .report.content import REPORT, write_report
from .report.run_figures import run_figures
from .run_files import (
    check_resumable,
    client_array,
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
    from flwr.app import ArrayRecord

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
            config = read_config(self.path)
            if None not in (images, config.get("images")) and images != config["images"]:
                raise ConfigError(
                    f"resume is {self.settings['resume']!r}, a run with other images: the files of its "
                    "data have been changed since"
                )
            before = config.get("versions") or versions()
            if changed := [name for name, now in versions().items() if before.get(name) != now]:
                log(
                    WARNING,
                    "kindred: the run goes on with other versions than it began with, and may not come to "
                    "the same bits: %s",
                    ", ".join(f"{name} was {before.get(name)} and is {versions()[name]}" for name in changed),
                )
        else:
            self._make(groups, images)
        self._history = GrowingTable(self.path / "history.csv", HISTORY_COLUMNS)
        self._rounds = GrowingTable(self.path / "rounds.csv", ROUNDS_COLUMNS)

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
        history = strategy.history
        self._extend_tables(history)  # should that have failed after the last round
        last = len(training_rounds(self.settings, history))
        kept = {name: files for name, files in (kept or {}).items() if files}
        records = {} if "models" in kept else strategy.client_models()
        models = client_files("models", kept.get("models", records))
        summary = summarise(self.settings, history, models)
        write_json(self.path / "summary.json", summary)

        for name, files in kept.items():
            self._copy_files(files, client_files(name, files))
        self._save_models(records, models, last, about)
        tree = getattr(strategy, "tree", None)  # of a method that divides its clients
        if tree:
            write_json(self.path / "clusters.json", tree)

        pictures = run_figures(self.settings, history.rows, last, strategy.collaboration, tree, federation)
        for name, draw in pictures.items():
            with failing_is_a_warning(self.path / f"{name}.png"):
                if figure := draw():
                    save_figure(figure, self.path / f"{name}.png")
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
