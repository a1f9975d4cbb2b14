"""The commands `kindred predict` and `kindred evaluate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Column

from kindred.lazy import lazy
from kindred.server_app.prediction import INPUTS

from .common import app, end, option, print_table

if TYPE_CHECKING:  # imported on first use, so that `kindred --help` is quick
    from kindred import data
    from kindred.server_app import config
    from kindred.server_app.prediction import evaluation, output as prediction
else:
    data, config = lazy("kindred.data"), lazy("kindred.server_app.config")
    evaluation = lazy("kindred.server_app.prediction.evaluation")
    prediction = lazy("kindred.server_app.prediction.output")

ModelFile = Annotated[
    Path, option("model", "FILE", "Personal model or mixture: model.safetensors, mixture.safetensors.")
]


@app.command()
def predict(
    model: ModelFile,
    given: Annotated[Path, option("input", "PATH", f"Images to predict for: {INPUTS}.")],
    output: Annotated[Path | None, option("output", "FILE", "CSV file to write (default: print it).")] = None,
) -> None:
    """Print the predicted class of each image and all probabilities, as CSV.

    The column `input` is the file's name, or the row's number, from 0.
    """
    with _refusals():
        table = prediction.predictions(model, given)
        if output is not None:
            prediction.save_predictions(table, output)
        else:
            with prediction.writing("standard output cannot be written to"):
                sys.stdout.buffer.write(table)
                sys.stdout.buffer.flush()


@app.command()
def evaluate(
    model: ModelFile,
    data_dir: Annotated[
        Path, option("data-dir", "PATH", "A site's data, as `kindred site` takes them; only the test part is used.")
    ],
    output_dir: Annotated[
        Path | None, option("output-dir", "DIR", "Folder for evaluation.json and confusion.png.")
    ] = None,
) -> None:
    """Print the accuracy of a model on a site's test data."""
    with _refusals():
        found = evaluation.evaluate_model(model, data_dir)
        _show_evaluation(found)
        if output_dir is not None:
            prediction.save_evaluation(found, output_dir)


def _show_evaluation(found: Mapping[str, Any]) -> None:
    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.1f}"

    print(f"accuracy {percent(found['accuracy'])} %, mean cross-entropy {found['loss']:.4f}, {found['images']} images")
    numbers = (Column(name, justify="right") for name in ("images", "accuracy %", "precision %"))
    print_table(
        ("class", *numbers),
        (
            (escape(line["class"]), str(line["images"]), percent(line["accuracy"]), percent(line["precision"]))
            for line in found["classes"]
        ),
    )


@contextmanager
def _refusals() -> Iterator[None]:
    """End the command with one line and code 2 at a ConfigError or DataError."""
    try:
        yield
    except (config.ConfigError, data.DataError) as error:
        end(2, " ".join(str(error).splitlines()))  # a file's name may contain line breaks
