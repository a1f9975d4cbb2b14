"""Runs copied into MLflow and TensorBoard, read back by each tool's own reader."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import kindred
from kindred.server_app import tracking
from kindred.server_app.cli.run import app
from kindred.server_app.run_result import RunResult

SMALL = {"clients": 3, "rounds": 2, "num_groups": 2, "samples_per_client": 10, "local_epochs": 1, "progress": False}


def needs(tool: str) -> pytest.MarkDecorator:
    there = all(importlib.util.find_spec(name) for name in tracking.NEEDED[tool])
    return pytest.mark.skipif(not there, reason=f"the extra {tool} is not installed")


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return lambda tool: kindred.run("local", output=tmp_path, track=tool, **SMALL)


def series(result: RunResult, client: int, key: str) -> list[tuple[int, float]]:
    return [(row["round"], row[key]) for row in result.rows if row["client"] == client]


@needs("mlflow")
def test_mlflow_has_settings_metrics_pictures_and_models(tracked, tmp_path) -> None:
    from mlflow import MlflowClient

    result = tracked("mlflow")
    reader = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = (each for each in reader.search_experiments() if each.name == "kindred: digits, rotated")
    (run,) = reader.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == result.folder.name
    assert run.data.params == {key: str(value) for key, value in result.settings.items()}

    def read(name: str) -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in reader.get_metric_history(run.info.run_id, name)]

    assert read("run/accuracy") == [(line["round"], line["accuracy"]) for line in result.rounds]
    for client in range(3):
        assert read(f"client-{client}/personal-accuracy") == series(result, client, "personal-accuracy")
    held = {each.path for each in reader.list_artifacts(run.info.run_id)}
    assert {"accuracy.png", "collaboration.png", "history.csv", "report.html", "models"} <= held
    model = reader.download_artifacts(run.info.run_id, "models/client-1.safetensors", str(tmp_path))
    assert load_file(model).keys() == load_file(result.folder / "models" / "client-1.safetensors").keys()


@needs("tensorboard")
def test_tensorboard_has_metrics_pictures_and_settings(tracked) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = tracked("tensorboard")
    reader = EventAccumulator(str(result.folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    reader.Reload()

    def read(name: str) -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in reader.Scalars(name)]

    assert read("run/accuracy") == [(line["round"], pytest.approx(line["accuracy"])) for line in result.rounds]
    for client in range(3):
        due = [(number, pytest.approx(value)) for number, value in series(result, client, "personal-accuracy")]
        assert read(f"client-{client}/personal-accuracy") == due
    assert {"accuracy", "collaboration"} <= set(reader.Tags()["images"])
    (settings,) = reader.Tensors("settings/text_summary")
    assert b'"strategy": "local"' in settings.tensor_proto.string_val[0]


@pytest.mark.parametrize("tool", ["wandb", "mlflow"])
def test_a_tool_that_is_unknown_or_not_installed_is_named_before_the_run(tool, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    said = CliRunner().invoke(app, ["run", "--track", tool, f"--output-dir={tmp_path}"])
    assert said.exit_code == 2 and said.stderr.count("\n") == 1 and not list(Path(tmp_path).iterdir())
    assert ("allowed: mlflow, tensorboard" if tool == "wandb" else "pip install 'kindred-fl[mlflow]'") in said.stderr


@needs("tensorboard")
def test_a_copy_that_fails_is_a_warning(tmp_path, monkeypatch) -> None:
    def full(result: RunResult) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracking, "_to_tensorboard", full)
    with pytest.warns(UserWarning, match="could not be copied into tensorboard .*No space left"):
        assert kindred.run("local", output=tmp_path, track="tensorboard", **SMALL).rounds
