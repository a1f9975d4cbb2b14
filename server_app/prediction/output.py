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


def predictions(model: Path, given: Path) -> bytes:
    """Return a CSV file of the class and the probabilities that a model predicts for each input.

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
    inputs, x = read_inputs(given, predictor.task)
    probabilities, classes = predictor.probabilities(x), predictor.classes
    header = ["input", "label", *(f"probability-{name}" for name in classes)]
    labels = probabilities.argmax(axis=1)
    rows = zip(inputs, labels, probabilities.astype(np.float32), strict=True)  # in as few digits as identify the number
    return csv_lines([header, *([name, classes[label], *row] for name, label, row in rows)])


def save_predictions(content: bytes, path: Path) -> None:
    """Write the result of `predictions` to a file, completely or not at all; ConfigError where that fails."""
    with writing(f"--output is {str(path)!r}, which cannot be written"):
        path = path.expanduser()
        if path.exists() and not path.is_file():  # such as a folder or a pipe, which a file must not replace
            raise ValueError("it exists and is not a file")
        with replacing(path) as temporary:
            temporary.write_bytes(content)


def save_evaluation(found: Mapping[str, Any], folder: Path) -> None:
    """Write `evaluation.json` and `confusion.png` into a folder; ConfigError where they cannot be written."""
    title = f"{Path(found['model']).name}: {found['images']} test images, accuracy {100 * found['accuracy']:.1f} %"
    classes = [line["class"] for line in found["classes"]]
    with writing(f"--output-dir is {str(folder)!r}, where nothing can be written"):
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
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
