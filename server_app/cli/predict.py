"""The commands `kindred predict`, `kindred export` and `kindred evaluate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kindred.lazy import lazy
from kindred.metrics import METRICS
from kindred.server_app.prediction import INPUTS
from kindred.server_app.terminal import Column, number, print_table

from .common import app, end, option, warn
from .display import displayed

if TYPE_CHECKING:  # imported on first use, so that `kindred --help` is quick
    from kindred import data
    from kindred.server_app import config
    from kindred.server_app.prediction import evaluation, export as exporting, output as prediction
else:
    data, config = lazy("kindred.data"), lazy("kindred.server_app.config")
    evaluation = lazy("kindred.server_app.prediction.evaluation")
    exporting = lazy("kindred.server_app.prediction.export")
    prediction = lazy("kindred.server_app.prediction.output")

ModelFile = Annotated[
    Path, option("model", "FILE", "Personal model or mixture: model.safetensors, mixture.safetensors.")
]


@app.command()
def predict(
    model: ModelFile,
    given: Annotated[Path, option("input", "PATH", f"Inputs to predict for: {INPUTS}.")],
    output: Annotated[
        Path | None, option("output", "FILE", "File to write, NAME.csv or NAME.json (default: print CSV).")
    ] = None,
) -> None:
    """Print what a model predicts for each input, as CSV or JSON.

    That is the class and all probabilities, the labels' probabilities, or a number. The column `input` is the file's
    name, or the sample's number, from 0.
    """
    with _refusals():
        if output is not None and output.suffix.lower() not in (".csv", ".json"):
            raise config.ConfigError(f"--output is {str(output)!r}, allowed: NAME.csv or NAME.json")
        as_json = output is not None and output.suffix.lower() == ".json"
        with displayed("predicting", sys.stderr):
            table, remarks = prediction.predictions(model, given, as_json)
        if output is not None:
            prediction.save_predictions(table, output)
        else:
            with prediction.writing("standard output cannot be written to"):
                sys.stdout.buffer.write(table)
                sys.stdout.buffer.flush()
        for remark in remarks:
            warn(remark)


@app.command()
def export(
    model: ModelFile,
    output: Annotated[
        Path, option("output", "FILE", "File to write: NAME.onnx, or NAME.pt2 for torch.export; NAME.md is its card.")
    ],
) -> None:
    """Write a model as an ONNX or torch.export program, with the preparation of its inputs, and a model card.

    The program is checked against `kindred predict` on random inputs.
    """
    with _refusals():
        card, difference = exporting.export(model, output)
    print(f"{output}: at most {difference:.1e} from `kindred predict`; its card is {card}")


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
    """Print the metrics of a model on a site's test data, or on all data if they have no test part."""
    with _refusals():
        with displayed("evaluating", sys.stderr):
            found, remarks = evaluation.evaluate_model(model, data_dir)
        _show_evaluation(found)
        if output_dir is not None:
            prediction.save_evaluation(found, output_dir)
        for remark in remarks:
            warn(remark)


def _show_evaluation(found: Mapping[str, Any]) -> None:
    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.1f}"

    metrics = [f"{METRICS[name].title} {METRICS[name].text(each)}" for name, each in found.items() if name in METRICS]
    print(f"{', '.join(metrics)}, {found['samples']} samples")
    for kind, lines in (("class", found.get("classes")), ("label", found.get("labels"))):
        if lines:
            shares = [name for name in ("accuracy", "precision") if name in lines[0]]
            numbers = (number(name) for name in ("samples", *(f"{name} %" for name in shares)))
            print_table(
                (Column(kind), *numbers),
                ((line[kind], str(line["samples"]), *(percent(line[name]) for name in shares)) for line in lines),
            )


@contextmanager
def _refusals() -> Iterator[None]:
    """End the command with one line and code 2 at a ConfigError or DataError."""
    try:
        yield
    except (config.ConfigError, data.DataError) as error:
        end(2, " ".join(str(error).splitlines()))  # a file's name may contain line breaks
