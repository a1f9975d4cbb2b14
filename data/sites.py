"""A site's own data, on its own machine: an .npz file, folders of images, tables, or a text."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kindred.lazy import lazy
from kindred.objectives import MOST_OUTPUTS, Classes

from .arrays import check_overlap, dataset_of, labelled_arrays, read_arrays, stored_arrays
from .csv_files import check_schema, misfits, read_tables
from .dataset import Dataset
from .federation import SiteData
from .files import check_folder, existing_path, image_size
from .inputs import ImageInputs, TableInputs, TokenInputs
from .public import read_public
from .sources import SUFFIXES, DataError, one_line, read_image
from .splits import hold_out
from .tables import Misfit
from .task import Task
from .text import read_text_site, read_texts
from .weights import weighted

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

FORMS = (
    "an .npz file with x_train, y_train, x_test and y_test, or x and y; a folder with train/ and test/, each with a "
    "folder of images for each class; or with a schema a .csv or .txt file, or a folder with train.csv and test.csv"
)

FAR = 3
"""Deviations of the median of a site's column from the schema's mean above which its unit is doubted."""


class Sites:
    """A federation whose sites have their own data, as seen from one machine.

    Parameters
    ----------
    task : Task
        Inputs and objective, the same at all sites.
    files : mapping
        The machine's `data-dir` and `public-data`.
    typical_size : float
        Training samples of a typical site; 0 where it is unknown.
    test_share : float
        Fraction of a site's samples that is for test, where its data bring no test part.
    seed : int
        Seed of the divisions.
    validation_share : float
        Fraction of a site's training samples that is for validation; 0 or more, below 1.

    Attributes
    ----------
    task : Task
    typical_size : float
    has_validation : bool
        Whether sites hold out validation samples.
    """

    def __init__(
        self,
        task: Task,
        files: Mapping[str, Any],
        typical_size: float = 0,
        test_share: float = 0.3,
        seed: int = 0,
        validation_share: float = 0.0,
    ) -> None:
        self.task = task
        self.typical_size = typical_size
        self._files = files
        self._test_share = test_share
        self._seed = seed
        self.has_validation = validation_share > 0
        self._validation_share = validation_share

    @classmethod
    def of(
        cls,
        run_config: Mapping[str, Any],
        node_config: Mapping[str, Any] | None = None,
        validation_share: float = 0.0,
    ) -> Sites:
        """Return the sites of a run.

        Parameters
        ----------
        run_config : mapping
            With the keys schema, image-shape, num-classes, class-names, input-mean, input-deviation, class-weights,
            samples-per-client, test-share and seed. With a schema, which each machine has in a file of its own, inputs
            and objective are the schema's; otherwise images and classes.
        node_config : mapping, optional
            A site's own settings; by default the run's, as at the server.
        validation_share : float
            See above.

        Raises
        ------
        DataError
            A value is missing or out of range, or the schema cannot be read.
        """
        files = run_config if node_config is None else node_config
        task = _schema_of(files, run_config) if run_config["schema"] else _images_of(run_config)
        objective = weighted(task.objective, run_config["class-weights"], None)
        return cls(
            replace(task, objective=objective),
            files,
            int(run_config["samples-per-client"]),
            float(run_config["test-share"]),
            int(run_config["seed"]),
            validation_share,
        )

    def site_data(self, client: int | str) -> SiteData:
        """Return the data in this machine's `data-dir`; the client's name plays no part.

        If the machine's `validate-only` is true, all labelled samples are for test.

        Raises
        ------
        DataError
            The data cannot be read, or have another shape or other classes.
        """
        if "data-dir" not in self._files:
            raise DataError(f"data-dir is not in the node config, allowed: {FORMS}")
        if self._files.get("validate-only") is True:
            site = read_site(self._files["data-dir"], task=self.task, validates=True)
            parts = self.task.samples(site.x_train, site.y_train), self.task.samples(site.x_test, site.y_test)
            (x, y), (x_test, y_test) = parts
            none = x[:0], y[:0]
            return SiteData(none, none, (torch.cat([x, x_test]), torch.cat([y, y_test])))
        site = read_site(self._files["data-dir"], task=self.task, test_share=self._test_share, seed=self._seed)
        train, validation = np.arange(len(site.y_train)), np.zeros(0, int)
        if self._validation_share:
            classes = site.y_train if self.task.objective.has_classes else None
            rng = np.random.default_rng([self._seed, 7])
            times = None if site.times is None else site.times[: len(train)]
            train, validation = hold_out(len(train), self._validation_share, rng, classes, times)
        return SiteData(
            self.task.samples(site.x_train[train], site.y_train[train]),
            self.task.samples(site.x_train[validation], site.y_train[validation]),
            self.task.samples(site.x_test, site.y_test),
        )

    def public_set(self) -> torch.Tensor:
        """Return the unlabelled images in this machine's `public-data`, an .npz file with an array `x`.

        Raises
        ------
        DataError
            The images cannot be read, or have another shape.
        """
        if "public-data" not in self._files:
            raise DataError("public-data is not in the node config, allowed: an .npz file with x, the same everywhere")
        return self.task.tensor(read_public(self._files["public-data"], self.task.inputs.kind))


def _schema_of(files: Mapping[str, Any], run_config: Mapping[str, Any]) -> Task:
    """Return the task in the schema file of this machine; DataError where the run's settings differ from it."""
    if not files.get("schema"):
        raise DataError("schema is not in the node config, and the run has one: name the file of the same schema here")
    task = Task.load(Path(str(files["schema"])))
    if shape := run_config["image-shape"]:
        raise DataError(f"image-shape is {shape!r}, allowed with a schema: ''")
    schema = task.inputs.schema if isinstance(task.inputs, TableInputs) else None
    check_schema(schema, task.objective, str(run_config["target"]), "", "", str(run_config["task"]))
    return task


def _images_of(run_config: Mapping[str, Any]) -> Task:
    """Return the task of images and classes that settings describe."""
    shape = str(run_config["image-shape"])
    if not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,4}x[1-9]\d{0,4}", shape):
        raise DataError(f"image-shape is {shape!r}, allowed: channels x height x width, such as 1x28x28")
    names = tuple(name.strip() for name in str(run_config["class-names"]).split(",") if name.strip())
    num_classes = int(run_config["num-classes"]) or len(names)
    if num_classes < 2:
        raise DataError(f"num-classes is {run_config['num-classes']}, allowed: 2 or more, or class-names")
    if len(set(names)) != len(names) or (names and len(names) != num_classes):
        raise DataError(
            f"class-names has {len(names)} names, {len(set(names))} different ones, where num-classes is {num_classes}"
        )
    channels, height, width = map(int, shape.split("x"))
    mean, deviation = (float(run_config["input-mean"]),), (float(run_config["input-deviation"]),)
    return Task(ImageInputs((channels, height, width), mean, deviation, 255.0), Classes(num_classes, names))


def read_site(
    data_dir: str | os.PathLike[str],
    class_names: Sequence[str] = (),
    task: Task | None = None,
    test_share: float = 0.0,
    seed: int = 0,
    validates: bool = False,
) -> Dataset:
    """Read the data of one site.

    Parameters
    ----------
    data_dir : path
        An .npz file with `x_train`, `y_train`, `x_test` and `y_test`, or without a test part with `x` and `y`. Or a
        folder with `train` and `test`, each with a folder of images for each class; all images have one size, and are
        read as grey if all of them are grey. Or, with a task of tables, a .csv file, or a folder with `train.csv` and
        `test.csv`; the columns are those of the schema. Or, with a task of characters, a .txt file.
    class_names : sequence of str
        Names of class 0, 1, and so on, as folders have them. Without them, names must be whole numbers, which are the
        classes. Other names are refused: their order may differ between sites.
    task : Task, optional
        The run's. By default it is one of images, with as many classes as names, or the largest label plus 1.
    test_share : float
        Fraction of data without a test part that is for test; 0: none of it.
    seed : int
        Seed of that division.
    validates : bool
        Whether the site only validates. Then the training part or the test part may be missing.

    Returns
    -------
    Dataset
        A site may lack samples of some classes.

    Raises
    ------
    DataError
        The data are missing, or not in one of these forms, or do not fit the task.
    """
    if len(class_names) == 1:
        raise DataError(f"class-names is {class_names[0]!r}, allowed: 2 names or more")
    kind = task.inputs.kind if task else "image"
    objective = task.objective if task else Classes(len(class_names) or MOST_OUTPUTS, tuple(class_names))
    channels = task.inputs.shape[0] if task and kind == "image" else 0
    path = Path(os.path.abspath(os.path.expanduser(data_dir)))
    suffix = path.suffix.lower()
    if path.is_file() and suffix == ".npz":
        site = dataset_of((labelled_arrays if validates else stored_arrays)(path), path, kind, objective)
    elif task is not None and isinstance(task.inputs, TableInputs) and path.exists():
        site = read_tables(path, task.inputs.schema, objective)
    elif kind == "image" and any((path / part).is_dir() for part in (("train", "test") if validates else ("train",))):
        site = dataset_of(_image_folders(path, objective.names, validates, channels), path, kind, objective)
    elif task is not None and isinstance(task.inputs, TokenInputs) and path.is_file() and suffix == ".txt":
        site = read_text_site(path, task.inputs, objective, test_share)
    elif any(each.suffix.lower() == ".csv" for each in ([path] if path.is_file() else path.glob("*"))):
        raise DataError(f"data-dir is {str(path)!r}, a table, which needs a schema: `kindred schema` makes one")
    else:
        raise DataError(f"data-dir is {str(path)!r}, allowed: {FORMS}")
    if test_share and len(site.x_test):
        check_test_part(site, path)
    elif test_share:
        site = site.divided(test_share, np.random.default_rng([seed, 2, 0]))
    if not (task or class_names):
        largest = max(int(y.max()) for y in (site.y_train, site.y_test) if len(y))
        site = replace(site, objective=Classes(max(2, largest + 1)))
    return site


def check_test_part(site: Dataset, where: Path) -> None:
    """Check that no sample of a site is both for training and for test, as `check_overlap` does."""
    check_overlap([site.x_train, site.x_test], site.kind, [], where)


def empty_cells(site: Dataset) -> list[str]:
    """Return a line about each column of a site's tables with empty cells, where the schema says that none may be."""
    if site.schema is None:
        return []
    x = np.concatenate([site.x_train, site.x_test])  # (n, columns)
    return [
        f"column {column.name!r}: {count:,} of {len(x):,} cells are empty, and the schema says that none may be"
        for column, count in zip(site.schema.columns, np.isnan(x).sum(axis=0).tolist(), strict=True)
        if count and not column.missing
    ]


def far_numbers(site: Dataset) -> list[str]:
    """Return a line about each column of a site's tables whose numbers are far from those of the schema's sample."""
    if site.schema is None:
        return []
    lines = []
    for column, values in zip(site.schema.columns, np.concatenate([site.x_train, site.x_test]).T, strict=True):
        if column.categories or np.isnan(values).all():
            continue
        median = float(np.nanmedian(values))
        if (distance := abs(median - column.mean) / column.deviation) > FAR:
            lines.append(
                f"column {column.name!r}: the median is {median:.4g}, {distance:.3g} deviations from the schema's mean "
                f"of {column.mean:.4g}; is it in another unit?"
            )
    return lines


def misfits_of(data_dir: str | os.PathLike[str], task: Task) -> list[Misfit]:
    """Return the first ten cells of a site's tables that do not fit the task; none of data that are no tables.

    Raises
    ------
    DataError
        The tables cannot be read, or lack a column.
    """
    path = Path(os.path.abspath(os.path.expanduser(data_dir)))
    if not isinstance(task.inputs, TableInputs) or path.suffix.lower() == ".npz":
        return []
    return misfits(existing_path(str(path), FORMS), task.inputs.schema, task.objective)


def task_of_sample(path: Path, task: str = "auto") -> Task:
    """Return the task of data like those of a sample: an .npz file, or a folder of texts.

    Parameters
    ----------
    path : Path
        As for the datasets npz and text.
    task : str
        Name of an objective; "auto": the one that fits the targets of the file.

    Raises
    ------
    DataError
        The sample cannot be read.
    """
    whole = os.path.abspath(os.path.expanduser(path))
    sample = read_arrays(whole, task=task) if path.suffix.lower() == ".npz" else read_texts(whole)
    return Task.fitted(sample, sample.x_train, sample.y_train)


def class_labels(names: Sequence[str], class_names: Sequence[str], where: Path) -> list[int]:
    """Return the class of each name."""
    if class_names:
        for name in names:
            if name not in class_names:
                raise DataError(f"{where} has a class {name!r}, and class-names are {', '.join(class_names)}")
        return [class_names.index(name) for name in names]
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise DataError(
                f"{where} has a class {name!r}: classes that are not numbers from 0 to 999999999 need "
                "class-names, in one order for all sites"
            )
    return [int(name) for name in names]


def _image_folders(folder: Path, class_names: Sequence[str], either: bool, channels: int) -> dict[str, np.ndarray]:
    """Return the images and classes in `train` and `test`; those in one of them as x and y if `either` is enough.

    Images that are all grey have one channel, unless the task has 3 `channels`.
    """
    files: dict[str, list[Path]] = {}
    labels: dict[str, list[int]] = {}
    for part in ("train", "test"):
        try:
            paths = sorted(path for path in (folder / part).glob("[!.]*/[!.]*") if path.suffix.lower() in SUFFIXES)
        except OSError as error:
            raise DataError(f"{folder / part} cannot be read: {one_line(error)}") from error
        if not paths and either and (files or part == "train"):
            continue
        if not paths:
            raise DataError(
                f"{folder / part} has no images: they must be CLASS/NAME, with a suffix of "
                f"{', '.join(sorted(SUFFIXES))}"
            )
        files[part] = paths
        labels[part] = class_labels([path.parent.name for path in paths], class_names, folder / part)
    together = [path for paths in files.values() for path in paths]
    width, height = image_size(together[0])
    for path in together:
        if (found := image_size(path)) != (width, height):
            raise DataError(
                f"{path} has {found[0]}x{found[1]} pixels, {together[0]} has {width}x{height}: they must be of one size"
            )
    check_folder(folder, together, 3 * width * height)
    x = {part: np.empty((len(paths), height, width, 3), np.uint8) for part, paths in files.items()}
    for part, paths in files.items():
        for image, path in zip(x[part], paths, strict=True):
            image[:] = np.asarray(read_image(path))
    if channels != 3 and all((each == each[..., :1]).all() for each in x.values()):
        x = {part: each[..., :1] for part, each in x.items()}
    if len(x) == 1:
        return {"x": next(iter(x.values())), "y": np.array(next(iter(labels.values())))}
    arrays = {f"x_{part}": each for part, each in x.items()}
    return arrays | {f"y_{part}": np.array(each) for part, each in labels.items()}
