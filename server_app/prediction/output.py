"""Files of predictions and of evaluations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kindred.files import write_bytes
from kindred.server_app.config import ConfigError
from kindred.server_app.run_files import save_figure, write_json
from kindred.server_app.tables import csv_lines

from .evaluation import confusion_figure
from .inputs import read_inputs
from .predictor import Predictor


def predictions(model: Path, given: Path, as_json: bool = False) -> tuple[bytes, list[str]]:
    """Return a CSV or JSON file of what a model predicts for each input, and lines about the inputs.

    A CSV file has a column for each probability, and the class of the highest where the objective has classes; without
    probabilities it has a column for each value, in the data's unit. A JSON file has an object for each input, with
    `input`, `label` where there are classes, and `probability` or `prediction`, an object of these numbers by name.

    Parameters
    ----------
    model : Path
        A file of `Predictor.load`.
    given : Path
        See `INPUTS`.
    as_json : bool (default: False)

    Raises
    ------
    ConfigError, DataError
        The model or the inputs cannot be used.
    """
    predictor = Predictor.load(model)
    objective, names = predictor.task.objective, predictor.names
    inputs, x, remarks = read_inputs(given, predictor.task)
    found = predictor.predictions(x)
    what = "probability" if objective.probabilities else "prediction"
    # Probabilities in as few digits as identify the number.
    values = found.astype(np.float32) if objective.probabilities else objective.readable(found)
    about = [{"input": name} for name in inputs]
    if objective.has_classes:
        about = [each | {"label": names[i]} for each, i in zip(about, found.argmax(axis=1).tolist(), strict=True)]
    if as_json:
        numbers = ([float(str(value)) for value in row] for row in values)
        lines = [each | {what: dict(zip(names, row, strict=True))} for each, row in zip(about, numbers, strict=True)]
        return json.dumps(lines, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace"), remarks
    header = ["input", *(["label"] if objective.has_classes else []), *(f"{what}-{name}" for name in names)]
    rows = ([*map(_cell, each.values()), *row] for each, row in zip(about, values, strict=True))
    return csv_lines([header, *rows]), remarks


def _cell(text: str | int) -> str | int:
    """Return a class such as -1 as a number: as a text that begins with a sign it would be marked."""
    return int(text) if isinstance(text, str) and re.fullmatch(r"-\d{1,18}", text) else text


def save_predictions(content: bytes, path: Path) -> None:
    """Write the result of `predictions` to a file, completely or not at all; ConfigError where that fails."""
    with writing(f"--output is {str(path)!r}, which cannot be written"):
        path = path.expanduser()
        if path.exists() and not path.is_file():  # such as a folder or a pipe, which a file must not replace
            raise ValueError("it exists and is not a file")
        write_bytes(path, content)


def save_evaluation(found: Mapping[str, Any], folder: Path) -> None:
    """Write `evaluation.json`, and of classes `confusion.png`, into a folder; ConfigError where that fails."""
    with writing(f"--output-dir is {str(folder)!r}, where nothing can be written"):
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if "confusion" in found:
            accuracy = f"accuracy {100 * found['accuracy']:.1f} %"
            title = f"{Path(found['model']).name}: {found['samples']} test samples, {accuracy}"
            classes = [line["class"] for line in found["classes"]]
            save_figure(confusion_figure(np.array(found["confusion"]), classes, title), folder / "confusion.png")
        write_json(folder / "evaluation.json", found)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise a ConfigError of one line where writing fails."""
    try:
        yield
    except BrokenPipeError:  # the reader of the pipe has stopped: typer ends silently
        raise
    except (OSError, ValueError) as error:  # ValueError: a path without a name, or with a null character
        raise ConfigError(f"{what} ({getattr(error, 'strerror', None) or error})") from None
