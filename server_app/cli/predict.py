"""Using a personal model where it lies: `kindred predict`, `kindred evaluate`.

A file of a model says itself which network it is and what it takes (`data.Task`): no server, no settings and none of
the data that it was trained on are needed. All files are plain arrays and texts; nothing in them is run.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from kindred.server_app.tables import csv_lines

from .common import app, end, option, print_table

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from kindred import Mixture
    from kindred.data import Task

INPUTS = (
    "a folder of image files, one image file, an .npz file with an array x or x_test, or a .csv file of numbers with "
    "a header"
)
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # what Pillow calls images of so many channels
MOST_EVALUATED = 2000  # classes, of which a confusion matrix has the square
SMALLEST_PRINT = 5  # points, in which a count can still be read

ModelFile = Annotated[
    Path, option("model", "FILE", "A personal model or a mixture: model.safetensors, mixture.safetensors.")
]


@app.command()
def predict(
    model: ModelFile,
    given: Annotated[Path, option("input", "PATH", f"What to predict for: {INPUTS}.")],
    output: Annotated[Path | None, option("output", "FILE", "CSV file to write (default: print it).")] = None,
) -> None:
    """Print the class of each image and all probabilities, as CSV.

    The column `input` is a file's name, or a row's number, from 0.
    """
    with _refusals():
        predictor = Predictor.load(model)
        inputs, x = read_inputs(given, predictor.task)
        table = _as_csv(inputs, predictor.probabilities(x), predictor.classes)
        if output is None:
            with _writing("standard output cannot be written to"):
                sys.stdout.buffer.write(table)
                sys.stdout.buffer.flush()
        else:
            _save(table, output)


@app.command()
def evaluate(
    model: ModelFile,
    data_dir: Annotated[
        Path, option("data-dir", "PATH", "A site's data, as `kindred site` takes them; the test part counts.")
    ],
    output_dir: Annotated[
        Path | None, option("output-dir", "DIR", "Folder for evaluation.json and confusion.png.")
    ] = None,
) -> None:
    """Say how well a model does on a site's test data."""
    from kindred.server_app.config import ConfigError

    with _refusals():
        predictor = Predictor.load(model)
        if (count := predictor.task.num_classes) > MOST_EVALUATED:
            raise ConfigError(f"--model is {str(model)!r}, of {count:,} classes, allowed: up to {MOST_EVALUATED:,}")
        x, y = _test_part(data_dir, predictor.task)
        found = evaluation(predictor.probabilities(x), y, predictor.classes)
        _show_evaluation(found)
        if output_dir is not None:
            title = f"{model.name}: {found['images']} test images, accuracy {100 * found['accuracy']:.1f} %"
            figure = confusion_figure(np.array(found["confusion"]), predictor.classes, title)
            _save_evaluation({"model": str(model), "data-dir": str(data_dir), **found}, figure, output_dir)


@dataclass(frozen=True)
class Predictor:
    """A model of this project, ready for use. A personal model is a mixture of one.

    Attributes
    ----------
    task : Task
        What the model takes and gives.
    module : torch.nn.Module
    mixture : Mixture
        Whose models are the module's.
    classes : tuple of str
        What the classes are called: their names, else their numbers.
    """

    task: Task
    module: torch.nn.Module
    mixture: Mixture

    @classmethod
    def load(cls, path: Path) -> Predictor:
        """Read a model's file.

        No memory is taken for a network before the arrays in the file are known to be those of the network.

        Raises
        ------
        ConfigError
            There is no such file, or it is damaged, or no model that can be used.
        """
        from kindred import make_model
        from kindred.client.training import set_arrays
        from kindred.data import Task
        from kindred.data.files import safetensors_header
        from kindred.server_app.config import ConfigError

        path = path.expanduser()
        if not path.is_file():
            raise ConfigError(f"--model is {str(path)!r}, which is no file; allowed: a model's .safetensors file")
        with _unusable(path, "cannot be read as a model"):
            about, shapes = safetensors_header(path)
        if not {"model", "task"} <= about.keys():
            raise ConfigError(
                f"--model is {str(path)!r}, which is no model of kindred's: nothing beside its arrays "
                "says which network they are of"
            )
        with _unusable(path, "cannot be used"):
            name, task = Task.from_metadata(about)
            if len(task.class_names) not in (0, task.num_classes):
                raise ValueError(f"it has {task.num_classes} classes and {len(task.class_names)} names for them")
            for each in task.class_names:
                if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", each):
                    raise ValueError(f"it has a class {each!r}, allowed: names without control characters")
            _check_carried(name, task, shapes, mixed="kind" in about)
        with _unusable(path, "cannot be read as a model"):
            mixture = _read_models(path, about)
        with _unusable(path, "cannot be used"):
            module = make_model(name, task.image_shape, task.num_classes)
            for model in mixture.models:
                set_arrays(module, model)  # which checks them
                if spoilt := [key for key, array in model.items() if not np.isfinite(array).all()]:
                    raise ValueError(f"its array {spoilt[0]!r} has values that are not finite: did training diverge?")
        return cls(task, module, mixture)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.task.class_names or tuple(map(str, range(self.task.num_classes)))

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """Class probabilities (n, N) of images (n, c, h, w) that `Task.normalised` has put on the model's scale.

        Raises
        ------
        ConfigError
            They are not finite.
        ValueError
            The arrays are not those of the network.
        """
        import torch

        from kindred.server_app.config import ConfigError

        rows = self.mixture.predict(self.module, torch.from_numpy(x))
        if not np.isfinite(rows).all():
            raise ConfigError("the model gives probabilities that are not finite: did its training diverge?")
        return rows


@contextmanager
def _unusable(path: Path, how: str) -> Iterator[None]:
    """Have everything that goes wrong said as a ConfigError: a file that somebody gave us may hold anything."""
    from kindred.data.files import one_line
    from kindred.server_app.config import ConfigError

    try:
        yield
    except Exception as error:
        raise ConfigError(f"--model is {str(path)!r}, which {how}: {one_line(error)}") from None


def _check_carried(network: str, task: Task, shapes: Mapping[str, tuple[int, ...]], mixed: bool) -> None:
    """Compare the shapes of the arrays in a file with those of the network that it names; ValueError if they differ."""
    import torch

    from kindred import make_model
    from kindred.client.training import check_shapes
    from kindred.messages import by_prefix

    try:
        with torch.device("meta"):  # shapes, and no memory for values
            state = make_model(network, task.image_shape, task.num_classes).state_dict()
    except RuntimeError:  # an extension's, which cannot be made without values
        return
    for part in by_prefix({n: s for n, s in shapes.items() if n != "shares"}).values() if mixed else [shapes]:
        check_shapes(state, part)


def _read_models(path: Path, about: Mapping[str, str]) -> Mixture:
    from safetensors.numpy import load_file

    from kindred import Mixture

    if "kind" not in about:
        return Mixture([about.get("client", "")], np.ones(1), [load_file(path)])
    mixture = Mixture.load(path)
    shares = mixture.shares
    if shares.shape != (len(mixture.models),) or not ((shares >= 0).all() and abs(shares.sum() - 1) < 1e-6):
        raise ValueError(f"its {len(mixture.models)} models have the shares {shares.tolist()}, they must sum to 1")
    if mixture.kind not in ("probabilities", "logits"):
        raise ValueError(f"it is a mixture of {mixture.kind!r}, allowed: probabilities, logits")
    return mixture


def read_inputs(path: Path, task: Task) -> tuple[list[str], np.ndarray]:
    """Read what to predict for.

    Parameters
    ----------
    path : Path
        See `INPUTS`. Images of a folder may lie at any depth, and come in the order of their paths; hidden ones are
        left out. A table's column `label` does not count; a row is an image of one pixel with as many channels as
        there are other columns.
    task : Task

    Returns
    -------
    inputs : list of n str
        What each image is called.
    x : ndarray, (n, c, h, w), float32
        On the model's scale.

    Raises
    ------
    DataError
        They cannot be read, or are not of the task's shape.
    """
    from kindred.data import DataError
    from kindred.data.sources import SUFFIXES

    path = path.expanduser()
    if path.is_dir():
        return _image_files(path, _images_in(path), task)
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return _image_files(path.parent, [path], task)
    if not path.is_file() or path.suffix.lower() not in (".npz", ".csv"):
        raise DataError(f"--input is {str(path)!r}, allowed: {INPUTS}")
    x = _normalised(task, _table(path) if path.suffix.lower() == ".csv" else _npz(path), path)
    return list(map(str, range(len(x)))), x


def _images_in(folder: Path) -> list[Path]:
    from kindred.data import DataError
    from kindred.data.sources import SUFFIXES, one_line

    def refuse(error: OSError) -> None:  # else what cannot be read would be left out without a word
        raise DataError(f"{folder} cannot be read: {one_line(error)}")

    paths = [Path(place, name) for place, folders, names in os.walk(folder, onerror=refuse) for name in names]
    paths = [
        path
        for path in paths
        if path.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not paths:
        raise DataError(f"{folder} has no images: their names must end in {', '.join(sorted(SUFFIXES))}")
    return sorted(paths, key=lambda path: path.parts)


def _image_files(folder: Path, paths: Sequence[Path], task: Task) -> tuple[list[str], np.ndarray]:
    from kindred.data import DataError
    from kindred.data.files import check_folder, image_size
    from kindred.data.sources import checked_images, read_image

    if task.image_shape[0] not in MODES:
        raise DataError(f"--input has images, and the model takes {task.image_shape[0]} channels: give a .csv file")
    for path in paths:
        width, height = image_size(path)
        with _named(path):
            task.check_shape((task.image_shape[0], height, width))
    check_folder(folder, paths, 4 * math.prod(task.image_shape))
    images = []
    for path in paths:
        image = np.asarray(read_image(path, MODES[task.image_shape[0]]))  # (h, w) or (h, w, c)
        images.append(_normalised(task, checked_images(image[None], str(path)), path))
    return [path.relative_to(folder).as_posix() for path in paths], np.concatenate(images)


def _npz(path: Path) -> np.ndarray:
    from kindred.data import DataError
    from kindred.data.files import open_npz
    from kindred.data.sources import checked_images

    with open_npz(path) as arrays:
        if (name := next((name for name in ("x", "x_test") if name in arrays), None)) is None:
            raise DataError(f"{path} has neither x nor x_test")
        return checked_images(arrays[name], f"{path}: {name}")


def _table(path: Path) -> np.ndarray:
    """Images of one pixel (n, c, 1, 1), float32."""
    from kindred.data import DataError
    from kindred.data.sites import LABEL, pixels, read_rows

    header, rows = read_rows(path)
    columns = [place for place, name in enumerate(header) if name != LABEL]
    # Whole numbers are fine as names; a row of measurements that was taken for a header would be lost without a word.
    measured = [name for name in header if re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", name.strip(), re.IGNORECASE)]
    if len(set(header)) < len(header) or not all(map(str.isdecimal, measured)):
        raise DataError(f"{path} has no header: its first line must name the columns, each differently")
    if not columns:
        raise DataError(f"{path} has no columns besides {LABEL}")

    def cells() -> Iterator[list[str]]:
        for number, row in enumerate(rows):
            if len(row) != len(header):
                raise DataError(f"{path}: row {number} has {len(row)} cells, the header {len(header)}")
            yield [row[place] for place in columns]

    return pixels(cells(), path)


def _test_part(data_dir: Path, task: Task) -> tuple[np.ndarray, np.ndarray]:
    """A site's test images, on the model's scale, and their labels."""
    from kindred.data import DataError, read_site

    images = read_site(data_dir, task.class_names)
    if images.num_classes > task.num_classes:
        raise DataError(f"{data_dir} has labels up to {images.num_classes - 1}, expected {task.num_classes} classes")
    return _normalised(task, images.x_test, data_dir), images.y_test


def _normalised(task: Task, x: np.ndarray, where: Path) -> np.ndarray:
    """Images on the model's scale; where they do not fit, the DataError says which."""
    with _named(where), np.errstate(over="ignore"):  # what the model makes of that is looked at
        return task.normalised(x)


@contextmanager
def _named(where: Path) -> Iterator[None]:
    """Have a DataError say which file it is about."""
    from kindred.data import DataError

    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def evaluation(probabilities: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """Compare predictions with the truth.

    Parameters
    ----------
    probabilities : ndarray, (n, N)
    labels : ndarray, (n,), int
    classes : sequence of N str
        What the classes are called.

    Returns
    -------
    dict
        `images` n; `accuracy`; `loss`, the mean cross-entropy; `classes`: for each its name `class`, its `images`,
        `accuracy` (how many of these are found; the recall) and `precision` (how many of those that are said to be
        of it are), None where there are none; `confusion` (N, N): images of each class by what they are taken for.
    """
    from sklearn.metrics import confusion_matrix

    from kindred.mixture import accuracy_and_loss

    accuracy, loss = accuracy_and_loss(probabilities, labels)
    confusion = confusion_matrix(labels, probabilities.argmax(axis=1), labels=np.arange(len(classes)))

    def share(hits: int, of: int) -> float | None:
        return hits / of if of else None

    lines = zip(classes, confusion.diagonal().tolist(), confusion.sum(axis=1).tolist(), confusion.sum(axis=0).tolist())
    return {
        "images": len(labels), "accuracy": accuracy, "loss": loss,
        "classes": [{"class": name, "images": there, "accuracy": share(hits, there), "precision": share(hits, said)}
                    for name, hits, there, said in lines],
        "confusion": confusion.tolist(),
    }  # fmt: skip


def confusion_figure(confusion: np.ndarray, classes: Sequence[str], title: str) -> Figure:
    """What images of each class are taken for: the share of the class as shade, the number where there is room.

    Parameters
    ----------
    confusion : ndarray, (N, N), int
        Row: the true class; column: the predicted one.
    classes : sequence of N str
    title : str
    """
    from matplotlib import colormaps

    from kindred.server_app.report.figures import MOST_NAMED, new_figure, short_name

    count = len(classes)
    totals = confusion.sum(axis=1, keepdims=True)  # (N, 1)
    shares = np.where(totals > 0, confusion / np.maximum(totals, 1), np.nan)  # (N, N)

    side = 6.4 if count <= 15 else 8.4
    figure, axes = new_figure(title, (side + 0.9, side))
    # One hue that only darkens, which needs no seeing of colours.
    image = axes.imshow(shares, cmap=colormaps["Blues"].with_extremes(bad="#d0d0d0"), vmin=0.0, vmax=1.0)
    figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02).set_label("share of the true class's images")
    if (totals == 0).any():
        axes.set_title("grey: no images of this class", fontsize=9.5)

    ticks = np.arange(0, count, max(1, -(-count // MOST_NAMED)))
    names = [short_name(classes[i], 24) for i in ticks]
    size = 8.5 if count <= 25 else 6.5
    axes.set_xticks(ticks, names, fontsize=size, rotation=90 if max(map(len, names)) > 3 else 0)
    axes.set_yticks(ticks, names, fontsize=size)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")

    # The axes take up some 0.75 of the figure; a digit is 0.6 as wide as it is high, and a cell needs a margin.
    points = min(10.0, 0.75 * 72 * side / count / (0.6 * len(str(confusion.max())) + 0.6))
    if points >= SMALLEST_PRINT:
        for (true, predicted), number in np.ndenumerate(confusion):
            if number:
                axes.text(
                    predicted,
                    true,
                    str(number),
                    ha="center",
                    va="center",
                    fontsize=points,
                    color="white" if shares[true, predicted] > 0.6 else "black",
                )
    return figure


def _show_evaluation(found: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Column

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


def _as_csv(inputs: Sequence[str], probabilities: np.ndarray, classes: Sequence[str]) -> bytes:
    header = ["input", "label", *(f"probability-{name}" for name in classes)]
    labels = probabilities.argmax(axis=1)
    rows = zip(inputs, labels, probabilities.astype(np.float32), strict=True)  # in as few digits as tell the number
    return csv_lines([header, *([name, classes[label], *row] for name, label, row in rows)])


def _save(content: bytes, path: Path) -> None:
    from kindred.client.state import replacing

    with _writing(f"--output is {str(path)!r}, which cannot be written"):
        path = path.expanduser()
        if path.exists() and not path.is_file():  # such as a folder, or a pipe, whose place a file must not take
            raise ValueError("it is there, and no file")
        with replacing(path) as temporary:
            temporary.write_bytes(content)


def _save_evaluation(found: dict[str, Any], figure: Figure, folder: Path) -> None:
    from kindred.client.state import replacing
    from kindred.server_app.run_files import write_json

    with _writing(f"--output-dir is {str(folder)!r}, where nothing can be written"):
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "confusion.png") as temporary:
            figure.savefig(temporary)
        write_json(folder / "evaluation.json", found)


@contextmanager
def _writing(what: str) -> Iterator[None]:
    """Have what cannot be written said in a line."""
    from kindred.server_app.config import ConfigError

    try:
        yield
    except BrokenPipeError:  # whoever reads has enough: typer ends without a word
        raise
    except (OSError, ValueError) as error:  # ValueError: a path without a name, or with a null character
        raise ConfigError(f"{what} ({getattr(error, 'strerror', None) or error})") from None


@contextmanager
def _refusals() -> Iterator[None]:
    """End with a line and code 2 for what cannot be used."""
    from kindred.data import DataError
    from kindred.server_app.config import ConfigError

    try:
        yield
    except (ConfigError, DataError) as error:
        end(2, " ".join(str(error).splitlines()))  # a file's name may have several lines
