"""A finished run as Python objects, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from kindred.data import load_federation, partition_figure
from kindred.engine.collaboration import Collaboration
from kindred.lazy import lazy
from kindred.messages import ClientId

from .headline import Headline
from .prediction.predictor import Predictor
from .report.collaboration import matrix_files, read_collaboration
from .report.reading import REPORT
from .report.run_figures import run_figures
from .report.write import write_report
from .run_files import failing_is_a_warning, read_config, read_summary, what_data, write_json
from .tables import read_table
from .verdict import Verdict

if TYPE_CHECKING:
    import pandas
    import torch
    from matplotlib.figure import Figure
else:
    pandas = lazy("pandas")


class RunResult:
    """A finished run; each part is read from its folder on first use.

    Parameters
    ----------
    folder : Path
        Folder of a finished run.

    Attributes
    ----------
    folder : Path
        Absolute.
    settings : dict
        Every setting by its name in kebab-case.
    summary : dict
        The figures of the whole run, as in summary.json; accuracies are in [0, 1].
    headline : Headline
        The metric by which the run is judged.
    rows : list of dict
        The history, a row for each round and client, as in history.csv. A row lacks what was not reported.
    rounds : list of dict
        A row for each round, as in rounds.csv.
    tables : dict of pandas.DataFrame
        "clients" (name, last value of the headline metric and model file of each), "rounds" and "history".
    figures : dict of matplotlib.figure.Figure
        "accuracy" (or the other headline metric), "collaboration", "partition"; "weights" where weights change over
        rounds, "networks" where there are several, "clusters" of a method that clusters its clients.
    models : PersonalModels
        client -> its personal model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).absolute()

    def __repr__(self) -> str:
        value = self.summary[self.headline.name]
        reached = "" if value is None else f", {self.headline.metric.title} {self.headline.text(value)}"
        what = f"{self.settings['strategy']} on {what_data(self.settings)}, seed {self.settings['seed']}"
        return f"<RunResult: {what}{reached}, in {self.folder}>"

    @cached_property
    def settings(self) -> dict[str, Any]:
        return read_config(self.folder)["settings"]

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read_summary(self.folder)

    def add_verdict(self, verdict: Verdict) -> None:
        """Write the verdict on the run, beside a run of `local`, into its summary and its report."""
        self.summary["verdict"] = verdict.to_dict()
        write_json(self.folder / "summary.json", self.summary)
        with failing_is_a_warning(self.folder / REPORT):
            write_report(self.folder, self.summary)

    @cached_property
    def headline(self) -> Headline:
        return Headline.of([self.summary])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return read_table(self.folder / "history.csv")

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        return read_table(self.folder / "rounds.csv")

    @cached_property
    def tables(self) -> dict[str, pandas.DataFrame]:
        return data_frames({"clients": self.summary["clients"], "rounds": self.rounds, "history": self.rows})

    @cached_property
    def models(self) -> PersonalModels:
        files = {each["client"]: each["model"] for each in self.summary["clients"] if each["model"]}
        return PersonalModels({client: self.folder / file for client, file in files.items()})

    @cached_property
    def figures(self) -> dict[str, Figure]:
        clusters = self.folder / "clusters.json"
        federation = None if self.settings["dataset"] == "sites" else load_federation(self.settings)
        pictures = run_figures(
            self.folder,
            self.settings,
            self.headline.name,
            self.rows,
            self.summary["rounds"],
            self._last_collaboration,
            json.loads(clusters.read_text(encoding="utf-8")) if clusters.exists() else None,
            federation,
        )
        drawn = {name: draw() for name, draw in pictures.items()}
        drawn["partition"] = partition_figure(federation) if federation else None
        return {name: figure for name, figure in drawn.items() if figure}

    def _last_collaboration(self) -> Collaboration:
        files = matrix_files(self.folder / "collaboration")
        return (files and read_collaboration(files[-1])) or Collaboration.alone([])


class PersonalModels(Mapping[ClientId, "dict[str, torch.Tensor]"]):
    """The personal models of a run, by client; each is read from its file when it is requested.

    A model is a state dict, for `load_state_dict` of the network.

    Parameters
    ----------
    files : mapping
        client -> file of its model.
    """

    def __init__(self, files: Mapping[ClientId, Path]) -> None:
        self.files = dict(files)

    def __getitem__(self, client: ClientId) -> dict[str, torch.Tensor]:
        return load_file(self.files[client])

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def module(self, client: ClientId) -> torch.nn.Module:
        """Return a client's network with its personal model; it takes inputs on the scale that the file states."""
        return Predictor.load(self.files[client]).module


def data_frames(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, pandas.DataFrame]:
    """Return rows as pandas tables, by the same names; ImportError of one line if pandas is not installed."""
    try:
        return {name: pandas.DataFrame(list(rows)) for name, rows in tables.items()}
    except ImportError:
        raise ImportError(
            "tables need pandas, which is not installed: pip install pandas; rows and summary hold the same without it"
        ) from None
