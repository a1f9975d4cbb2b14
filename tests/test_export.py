"""Exported programs say what `kindred predict` says, by ONNX Runtime and by torch.export; and the model card."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from typer.testing import CliRunner

from kindred import make_model
from kindred.client.training import get_arrays
from kindred.data import Task
from kindred.data.inputs import ImageInputs, SignalInputs, TableInputs, TokenInputs
from kindred.data.schema import Column, Schema
from kindred.objectives import Classes, Labels, NextToken, Number
from kindred.server_app.cli import predict as _predict  # noqa: F401  adds commands
from kindred.server_app.cli.run import app
from kindred.server_app.config import ConfigError
from kindred.server_app.prediction import export as exporting
from kindred.server_app.prediction.export import export, run
from kindred.server_app.prediction.predictor import Predictor
from kindred.server_app.prediction.program import example, expected

HAS_EXTRA = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript"))
with_extra = pytest.mark.skipif(not HAS_EXTRA, reason="the extra export is not installed")
every_format = pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=with_extra)])

COLUMNS = (
    Column("age", mean=50.0, deviation=12.0, missing=True),
    Column("kind", ("a", "b", "c"), missing=True),
    Column("dose", mean=-1.0, deviation=0.5),
    Column("sex", ("f", "m")),
)
TABLE = TableInputs(Schema(COLUMNS, "y"))
TASKS = {
    "bytes": (Task(ImageInputs((1, 8, 8), (0.5,), (0.25,), 255), Classes(3, ("cat", "dog", "owl"))), "digits-cnn"),
    "images": (Task(ImageInputs((3, 32, 32), (0.4, 0.5, 0.6), (0.2, 0.3, 0.2)), Classes(10)), "ckt-cnn"),
    "signal": (Task(SignalInputs((6, 50), (0.0,) * 6, (2.0,) * 6), Classes(7)), "cnn1d"),
    "classes of a table": (Task(TABLE, Classes(2, ("no", "yes"))), "mlp"),
    "labels": (Task(TABLE, Labels(3, ("x", "y", "z"))), "mlp"),
    "number": (Task(TABLE, Number(1, ("weight",), 70.0, 9.0)), "mlp"),
    "text": (Task(TokenInputs((5, 20), "abcd\ufffd"), NextToken(5)), "lstm"),
}  # fmt: skip


def arrays_of(task: Task, network: str, seed: int = 0) -> dict[str, np.ndarray]:
    """A network that has been trained a little: its batch norms have statistics of their own."""
    model = make_model(network, task.inputs.shape, task.objective.num_outputs, seed=seed)
    rng = np.random.default_rng(seed)
    return {
        name: (array * rng.uniform(0.8, 1.2, array.shape)).astype(array.dtype) if array.dtype.kind == "f" else array
        for name, array in get_arrays(model).items()
    }


def saved(path: Path, task: Task, network: str, **texts: str) -> Path:
    save_file(arrays_of(task, network), path, {**task.to_metadata(network), **texts})
    return path


def mixture(path: Path, task: Task, network: str, kind: str) -> Path:
    shares, parts = np.array([0.3, 0.0, 0.7]), {}
    for place in range(3):
        parts |= {f"{place}/{name}": array for name, array in arrays_of(task, network, place).items()}
    save_file({"shares": shares, **parts}, path, {"clients": "[0, 1, 2]", "kind": kind, **task.to_metadata(network)})
    return path


@every_format
@pytest.mark.parametrize("name", TASKS)
def test_a_program_takes_raw_inputs_and_gives_the_predictions(name, suffix, tmp_path) -> None:
    task, network = TASKS[name]
    model = saved(tmp_path / "m.safetensors", task, network)
    _, difference = export(model, tmp_path / f"m{suffix}")
    assert difference < 1e-5
    predictor = Predictor.load(model)
    for count in (1, 4):
        x = example(predictor, count, seed=9)
        found, due = run(tmp_path / f"m{suffix}", x), expected(predictor, x)
        assert found.shape == due.shape and np.allclose(found, due, rtol=1e-5, atol=1e-5)
        if task.objective.has_classes:
            assert np.allclose(found.sum(axis=1), 1, atol=1e-5)


@every_format
@pytest.mark.parametrize(
    ("name", "kind"),
    [("bytes", "probabilities"), ("bytes", "logits"), ("labels", "logits"), ("number", "logits")],
)
def test_a_mixture_is_one_program(name, kind, suffix, tmp_path) -> None:
    task, network = TASKS[name]
    model = mixture(tmp_path / "m.safetensors", task, network, kind)
    export(model, tmp_path / f"m{suffix}")
    predictor = Predictor.load(model)
    x = example(predictor, 3, seed=5)
    assert np.allclose(run(tmp_path / f"m{suffix}", x), expected(predictor, x), rtol=1e-5, atol=1e-5)
    alone = predictor.mixture.models[2]  # of share 0.7
    assert not np.allclose(run(tmp_path / f"m{suffix}", x), _of(predictor, alone, x), atol=1e-3)


def _of(predictor: Predictor, model, x: np.ndarray) -> np.ndarray:
    one = type(predictor.mixture)([0], np.ones(1), [model])
    return expected(Predictor(predictor.task, predictor.module, one), x)


@with_extra
def test_onnx_runtime_says_of_image_files_what_the_command_says(tmp_path) -> None:
    import onnxruntime

    model = saved(tmp_path / "m.safetensors", *TASKS["bytes"])
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8)).astype(np.uint8)
    (tmp_path / "in").mkdir()
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "in" / f"{i}.png")
    said = CliRunner().invoke(app, ["predict", "--model", str(model), "--input", str(tmp_path / "in")])
    _, *rows = csv.reader(io.StringIO(said.stdout))
    done = CliRunner().invoke(app, ["export", "--model", str(model), "--output", str(tmp_path / "m.onnx")])
    assert done.exit_code == 0 and "its card is" in done.stdout
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (found,) = session.run(None, {"x": pixels[:, None]})
    assert np.allclose(found, np.array([row[2:] for row in rows], float), atol=1e-6)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["output"])["names"] == ["cat", "dog", "owl"]
    assert json.loads(about["input"]) == {"name": "x", "type": "uint8", "shape": ["n", 1, 8, 8], "kind": "image"}


def test_a_program_that_says_something_else_is_not_written(tmp_path, monkeypatch) -> None:
    model = saved(tmp_path / "m.safetensors", *TASKS["number"])
    monkeypatch.setattr(exporting, "expected", lambda predictor, x: expected(predictor, x) + 1)
    with pytest.raises(ConfigError, match="differs from `kindred predict`"):
        export(model, tmp_path / "m.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.parametrize(
    ("name", "says"), [("m.txt", "allowed: a name that ends in .onnx or .pt2"), ("no/m.pt2", "no/m.pt2")]
)
def test_an_output_that_cannot_be_written_is_one_line(name, says, tmp_path) -> None:
    model = saved(tmp_path / "m.safetensors", *TASKS["number"])
    done = CliRunner().invoke(app, ["export", "--model", str(model), "--output", str(tmp_path / name)])
    assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_a_missing_extra_is_named_with_its_command(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"onnxscript, and it is not installed: pip install 'kindred-fl\[export\]'"):
        export(saved(tmp_path / "m.safetensors", *TASKS["number"]), tmp_path / "m.onnx")


def fedavg_against_local(place: Path, *arguments: str) -> Path:
    """Return the folder of FedAvg's run, which was compared with training alone."""
    few = ["--clients=4", "--set=num-groups=2", "--engine=inline", f"--output-dir={place}"]
    done = CliRunner().invoke(app, ["run", "--strategy=fedavg", "--against=local", *few, *arguments])
    assert done.exit_code == 0, done.output
    (folder,) = place.glob("*-fedavg-*")
    return folder


def test_the_card_names_data_method_metrics_with_intervals_verdict_and_privacy(tmp_path) -> None:
    folder = fedavg_against_local(tmp_path, "--rounds=1", "--set=samples-per-client=10")
    card, _ = export(folder / "models" / "client-2.safetensors", tmp_path / "m.pt2")
    text, summary = card.read_text(), json.loads((folder / "summary.json").read_text())
    assert text.startswith("# Model of client 2: m.pt2")
    assert "Data: digits, rotated" in text and "Strategy: fedavg, after round 1" in text and "local-epochs 5" in text
    own = next(each for each in summary["clients"] if each["client"] == 2)["last"]["accuracy"]
    mean, (low, high) = summary["metrics"]["last"]["accuracy"], summary["intervals"]["last"]["accuracy"]
    row = next(line for line in text.splitlines() if line.startswith("| accuracy "))
    assert row == f"| accuracy | {100 * own:.1f}% | {100 * mean:.1f}% | {100 * low:.1f}% to {100 * high:.1f}% |"
    assert f"{summary['verdict']['sentence']}. This client: " in text and "differential privacy" in text


def test_the_card_has_the_metrics_of_its_file_and_says_which_models_the_verdict_compares(tmp_path) -> None:
    folder = fedavg_against_local(tmp_path, "--rounds=3", "--set=validation-share=0.2")
    summary = json.loads((folder / "summary.json").read_text())
    # Each value of a kind of models is another one, so that no row fits both.
    for which, shift in (("selected", 0.0), ("last", 0.125)):
        summary["metrics"][which]["accuracy"] = 0.5 + shift
        summary["clients"][2][which]["accuracy"] = 0.25 + shift
    (folder / "summary.json").write_text(json.dumps(summary))
    for place, which, row in (("selected", "selected", "| 25.0% | 50.0% |"), ("models", "last", "| 37.5% | 62.5% |")):
        card, _ = export(folder / place / "client-2.safetensors", tmp_path / "m.pt2")
        text = card.read_text()
        assert f"On test data, of the {which} models." in text
        assert next(line for line in text.splitlines() if line.startswith("| accuracy ")).startswith(
            f"| accuracy {row}"
        )
        assert "The verdict compares the selected models." in text


def test_the_card_of_a_table_names_columns_and_codes(tmp_path) -> None:
    card, _ = export(saved(tmp_path / "m.safetensors", *TASKS["number"]), tmp_path / "m.pt2")
    text = card.read_text()
    assert "  - `age`: a number" in text and "  - `kind`: 0 = a, 1 = b, 2 = c, 3 = another" in text
    assert "lies in no folder of a run" in text


def test_torch_export_carries_its_description(tmp_path) -> None:
    export(saved(tmp_path / "m.safetensors", *TASKS["labels"]), tmp_path / "m.pt2")
    held = {"input": "", "output": ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=held)
    assert json.loads(held["output"])["names"] == ["x", "y", "z"] and json.loads(held["input"])["kind"] == "table"
