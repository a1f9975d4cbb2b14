"""Files of predictions and of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kindred.client.state import replacing
from kindred.server_app.config import ConfigError
from kindred.server_app.run_files import save_figure, write_json
from kindred.server_app.tables import csv_lines

from .evaluation import confusion_figure
from .inputs import read_inputs
from .predictor import Predictor


def predictions(model: Path, given: Path) -> tuple[bytes, list[str]]:
    """Return a CSV file of what a model predicts for each input, and lines about the inputs.

    The file has a column for each probability, and the class of the highest where the objective has classes; without
    probabilities it has a column for each value, in the data's unit.

    Parameters
    ----------
    model : Path
        A file of `Predictor.load`.
    given : Path
        See `INPUTS`.

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
    header = ["input", *(f"{what}-{name}" for name in names)]
    # Probabilities in as few digits as identify the number.
    values = found.astype(np.float32) if objective.probabilities else objective.readable(found)
    rows = [[name, *row] for name, row in zip(inputs, values, strict=True)]
    if objective.has_classes:
        header.insert(1, "label")
        for row, label in zip(rows, found.argmax(axis=1), strict=True):
            row.insert(1, names[label])
    return csv_lines([header, *rows]), remarks


def save_predictions(content: bytes, path: Path) -> None:
    """Write the result of `predictions` to a file, completely or not at all; ConfigError where that fails."""
    with writing(f"--output is {str(path)!r}, which cannot be written"):
        path = path.expanduser()
        if path.exists() and not path.is_file():  # such as a folder or a pipe, which a file must not replace
            raise ValueError("it exists and is not a file")
        with replacing(path) as temporary:
            temporary.write_bytes(content)


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
