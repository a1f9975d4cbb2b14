"""Copies of a finished run in MLflow or TensorBoard, each written by its own library.

Both get the settings, every metric by round and by client, the pictures, and the names of the models' files; MLflow
also gets the models. Nothing leaves this machine, unless MLFLOW_TRACKING_URI names a server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from kindred.client.state import file_name
from kindred.data.files import one_line
from kindred.lazy import lazy

from .config import ConfigError
from .run_files import what_data
from .run_result import RunResult

if TYPE_CHECKING:
    import mlflow
    from torch.utils import tensorboard
else:
    mlflow, tensorboard = lazy("mlflow"), lazy("torch.utils.tensorboard")

TOOLS = ("mlflow", "tensorboard")
NEEDED = {"mlflow": ("mlflow", "sqlalchemy", "alembic"), "tensorboard": ("tensorboard",)}  # packages of the extras
BATCH = 500  # metrics in one call to MLflow, which takes up to 1000
NO_METRICS = ("round", "client")  # columns of the tables


class Point(NamedTuple):
    """A value of a metric in a round: of the run, or of the client whose file name begins the metric's name."""

    name: str
    value: float
    step: int


def check_tool(tool: str) -> None:
    """Check that there is such a tool and that it is installed; ConfigError otherwise."""
    if tool not in TOOLS:
        raise ConfigError(f"--track is {tool!r}, allowed: {', '.join(TOOLS)}")
    if any(find_spec(name) is None for name in NEEDED[tool]):
        raise ConfigError(f"--track is {tool!r}, which is not installed: pip install 'kindred-fl[{tool}]'")


def track(result: RunResult, tool: str) -> str:
    """Copy a finished run into a tool's files; return a line that says where they are, or why there are none."""
    try:
        return f"{tool}: {_to_mlflow(result) if tool == 'mlflow' else _to_tensorboard(result)}"
    except Exception as error:  # the run itself is complete: a full disk or a server's answer must not hide that
        return f"warning: the run could not be copied into {tool} ({one_line(error)}); its results are complete"


def points(result: RunResult) -> Iterator[Point]:
    """Yield every number in rounds.csv and history.csv."""
    for row in (*result.rounds, *result.rows):
        prefix = f"{file_name(row['client'])}/" if "client" in row else "run/"
        for key, value in row.items():
            if key not in NO_METRICS and isinstance(value, int | float) and np.isfinite(value):
                yield Point(f"{prefix}{key}", float(value), row["round"])


def _to_mlflow(result: RunResult) -> str:
    """Copy into MLflow: by default into mlflow.db and the folder mlartifacts beside the run's folder."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    beside = result.folder.parent
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{beside / 'mlflow.db'}"
    place = None if "MLFLOW_TRACKING_URI" in os.environ else (beside / "mlartifacts").as_uri()
    client = mlflow.MlflowClient(tracking_uri=uri)
    title = f"kindred: {what_data(result.settings)}"
    known = client.get_experiment_by_name(title)
    experiment = known.experiment_id if known else client.create_experiment(title, place)
    run = client.create_run(experiment, run_name=result.folder.name).info.run_id
    entities = mlflow.entities
    settings = [entities.Param(key, str(value)) for key, value in result.settings.items()]
    client.log_batch(run, params=settings)
    found = [entities.Metric(each.name, each.value, 0, each.step) for each in points(result)]
    for start in range(0, len(found), BATCH):
        client.log_batch(run, metrics=found[start : start + BATCH])
    for path in sorted(result.folder.iterdir()):
        if path.suffix in (".png", ".json", ".csv", ".html"):
            client.log_artifact(run, str(path))
    if (result.folder / "models").is_dir():
        client.log_artifacts(run, str(result.folder / "models"), "models")
    client.set_terminated(run)
    return f"{uri}, experiment {title!r}, run {result.folder.name}"


def _to_tensorboard(result: RunResult) -> str:
    """Copy into TensorBoard's files, in the folder tensorboard of the run's folder."""
    folder = result.folder / "tensorboard"
    with tensorboard.SummaryWriter(str(folder)) as writer:
        for each in points(result):
            writer.add_scalar(each.name, each.value, each.step)
        for path in sorted(result.folder.glob("*.png")):
            with Image.open(path) as image:
                writer.add_image(path.stem, np.asarray(image.convert("RGB")), dataformats="HWC")
        writer.add_text("settings", _as_code(result.settings))
        writer.add_text("models", _as_code({str(each["client"]): each["model"] for each in result.summary["clients"]}))
    return str(folder)


def _as_code(content: dict[str, Any]) -> str:
    """Return JSON as a block of code in Markdown."""
    return "\n".join(f"    {line}" for line in json.dumps(content, indent=1, ensure_ascii=False).splitlines())
