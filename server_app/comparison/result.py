"""A comparison as Python objects: its content and its runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kindred.server_app.run_result import PersonalModels, RunResult, data_frames

from .files import csv_rows, write
from .pictures import pictures

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Who = tuple[str, int]  # a method's name and a seed


class ComparisonResult:
    """Methods that were run with the same data and seeds.

    Parameters
    ----------
    content : mapping
        The content of comparison.json, which docs/comparing.md describes.
    folder : Path
        The folder of the comparison.

    Attributes
    ----------
    content : mapping
    folder : Path
    runs : dict of RunResult
        (method, seed) -> the run; the method has its name in the comparison.
    failed : dict of str
        (method, seed) -> why the run failed.
    rows : list of dict
        The histories of all runs, a row for each round and client, with "strategy" and "seed".
    summary : list of dict
        A row for each run, and two with the seeds "mean" and "std" for each method, as in comparison.csv.
    tables : dict of pandas.DataFrame
        "summary", "rounds" (of all runs) and "history".
    figures : dict of matplotlib.figure.Figure
        "comparison": the headline metric over rounds, mean and standard deviation over seeds; "varied": over the
        values of the varied setting; "weights": a client's weights over rounds, of variants of one method.
    models : dict of PersonalModels
        (method, seed) -> client -> its personal model.
    """

    def __init__(self, content: Mapping[str, Any], folder: Path) -> None:
        self.content = content
        self.folder = folder

    def __repr__(self) -> str:
        missing = f", {len(self.failed)} failed" if self.failed else ""
        return f"<ComparisonResult: {self.content['title']}; {len(self.runs)} runs{missing}, in {self.folder}>"

    def save(self) -> None:
        """Write the files of the comparison into its folder; OSError if they cannot be written."""
        write(self.content, self.folder)

    @cached_property
    def runs(self) -> dict[Who, RunResult]:
        return {who: RunResult((self.folder / run["folder"]).resolve()) for who, run in self._each() if "folder" in run}

    @cached_property
    def failed(self) -> dict[Who, str]:
        return {who: run["reason"] for who, run in self._each() if "reason" in run}

    def _each(self) -> list[tuple[Who, Mapping[str, Any]]]:
        methods = self.content["strategies"].items()
        return [((name, run["seed"]), run) for name, each in methods for run in each["runs"]]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return [{"strategy": name, "seed": seed, **row} for (name, seed), run in self.runs.items() for row in run.rows]

    @cached_property
    def summary(self) -> list[dict[str, Any]]:
        return csv_rows(self.content)

    @cached_property
    def tables(self) -> dict[str, pandas.DataFrame]:
        rounds = [
            {"strategy": name, "seed": seed, **row} for (name, seed), run in self.runs.items() for row in run.rounds
        ]
        return data_frames({"summary": self.summary, "rounds": rounds, "history": self.rows})

    @cached_property
    def figures(self) -> dict[str, Figure]:
        drawn = {name: draw() for name, draw in pictures(self.content, self.folder).items()}
        return {name: figure for name, figure in drawn.items() if figure}

    @cached_property
    def models(self) -> dict[Who, PersonalModels]:
        return {who: run.models for who, run in self.runs.items()}
