"""Use of a model file: predictions, an evaluation, and messages about files that do not fit."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from matplotlib.image import imread
from PIL import Image
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors
from typer.testing import CliRunner

from kindred import Mixture, make_model
from kindred.client.evaluation import predict as predicted_by
from kindred.client.training import get_arrays, set_arrays
from kindred.data import DataError, Task, load_federation
from kindred.data.inputs import ImageInputs, TableInputs
from kindred.data.schema import Column, Schema
from kindred.objectives import Classes, Labels, Number, Objective
from kindred.server_app.app import run_inline
from kindred.server_app.cli import predict
from kindred.server_app.cli.run import app
from kindred.server_app.config import Config
from kindred.server_app.prediction.evaluation import confusion_figure, evaluation
from kindred.server_app.tables import read_table

from .background_commands import PATIENCE

pytestmark = pytest.mark.usefixtures("no_pictures")

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("cat", "dog", "owl")


def kindred(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)))


def refused(*arguments: object) -> str:
    """Return the error message of a command, which must be one line and the only output."""
    done = kindred(*arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == "" and done.stderr.startswith("kindred: ") and done.stderr.count("\n") == 1, done.output
    return done.stderr


def table_of(text: str) -> tuple[list[str], list[list[str]]]:
    header, *rows = csv.reader(io.StringIO(text))
    return header, rows


def known_arrays() -> dict[str, np.ndarray]:
    """An office-mlp of 2 features and 3 outputs that are for (a, b), none negative, (0, a ln 2, b ln 2)."""
    arrays = {name: np.zeros_like(array) for name, array in get_arrays(make_model("office-mlp", (2, 1, 1), 3)).items()}
    for layer in ("fc1", "fc2"):
        arrays[f"{layer}.weight"][[0, 1], [0, 1]] = 1
    arrays["fc3.weight"][[1, 2], [0, 1]] = np.log(2)
    return arrays


def known_task(**changes) -> Task:
    # Features are doubled, and 1 is taken off.
    return Task(ImageInputs(**{"shape": (2, 1, 1), "mean": (0.5,), "deviation": (0.5,), **changes}), Classes(3, NAMES))


def known_table(objective: Objective) -> Task:
    columns = (Column("width", (), False, 0.5, 0.5), Column("height", (), False, 0.5, 0.5))
    return Task(TableInputs(Schema(columns, "label")), objective)


@pytest.fixture
def known(tmp_path) -> Path:
    """A model of a table."""
    save_file(known_arrays(), tmp_path / "known.safetensors", known_table(Classes(3, NAMES)).to_metadata("office-mlp"))
    return tmp_path / "known.safetensors"


def random_model(path: Path, shape=(1, 8, 8), names=()) -> tuple[Path, Task, torch.nn.Module]:
    task = Task(ImageInputs(shape, (0.5,), (0.25,), 255), Classes(3, names))
    model = make_model("digits-cnn", shape, 3, seed=1)
    save_file(get_arrays(model), path, task.to_metadata("digits-cnn"))
    return path, task, model


def mixture(path: Path, task: Task, shares=(0.25, 0.75), kind="probabilities", places=(0, 1)) -> Path:
    arrays = {"shares": np.array(shares)}
    for place in places:
        model = get_arrays(make_model("digits-cnn", task.inputs.shape, 3, seed=place))
        arrays |= {f"{place}/{name}": array for name, array in model.items()}
    save_file(arrays, path, {"clients": '[7, "b"]', "kind": kind, **task.to_metadata("digits-cnn")})
    return path


def images(n: int = 5, shape=(8, 8)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, *shape)).astype(np.uint8)


# --- kindred predict ------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["", "label,"])  # a column that the schema does not have is ignored
def test_probabilities_by_hand(known, tmp_path, label) -> None:
    # (0.5, 0.5) becomes (0, 0), (1, 0.5) (1, 0), (1, 1.5) (1, 2): logits 0 0 0, 0 ln2 0, 0 ln2 2ln2
    rows = "{}0.5,0.5\n{}1,0.5\n\n{}1,1.5\n".replace("{}", "no class," if label else "")
    (tmp_path / "in.csv").write_text(f"\ufeff{label}width,height\n{rows}", encoding="utf-8")  # as spreadsheets write it
    done = kindred("predict", "--model", known, "--input", tmp_path / "in.csv")
    assert done.exit_code == 0 and done.stderr == ""
    header, rows = table_of(done.stdout)
    assert header == ["input", "label", "probability-cat", "probability-dog", "probability-owl"]
    assert [row[:2] for row in rows] == [["0", "cat"], ["1", "dog"], ["2", "owl"]]
    due = np.array([[1 / 3, 1 / 3, 1 / 3], [1 / 4, 1 / 2, 1 / 4], [1 / 7, 2 / 7, 4 / 7]])
    assert np.allclose(np.array([row[2:] for row in rows], float), due, atol=1e-7)


def test_a_json_file_has_the_numbers_of_the_csv(known, tmp_path) -> None:
    (tmp_path / "in.csv").write_text("width,height\n0.5,0.5\n1,0.5\n")
    said = kindred("predict", "--model", known, "--input", tmp_path / "in.csv").stdout
    kindred("predict", "--model", known, "--input", tmp_path / "in.csv", "--output", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    header, rows = table_of(said)
    names = [title.removeprefix("probability-") for title in header[2:]]
    assert found == [
        {"input": row[0], "label": row[1], "probability": dict(zip(names, map(float, row[2:])))} for row in rows
    ]


def test_missing_cells_are_counted_and_take_the_mean(known, tmp_path) -> None:
    (tmp_path / "in.csv").write_text("height,width\n0.5,1\n?,1\n0.5,NA\n")
    done = kindred("predict", "--model", known, "--input", tmp_path / "in.csv")
    assert done.stderr == "kindred: 2 of 6 cells are missing (width 1, height 1)\n"
    assert [row[1:3] for row in table_of(done.stdout)[1]] == [["dog", "0.25"], ["dog", "0.25"], ["cat", "0.33333334"]]


def test_categories_that_were_never_seen_are_counted_and_count_for_nothing(tmp_path) -> None:
    # The logit of "yes" is ln 3 for a, -ln 3 for b; of an unknown category 0.
    task = Task(TableInputs(Schema((Column("kind", ("a", "b")),), "t")), Classes(2, ("no", "yes")))
    arrays = {name: np.zeros_like(array) for name, array in get_arrays(make_model("office-mlp", (2,), 2)).items()}
    for layer in ("fc1", "fc2"):
        arrays[f"{layer}.weight"][[0, 1], [0, 1]] = 1
    arrays["fc3.weight"][1, [0, 1]] = np.log(3) * np.array([1, -1])
    save_file(arrays, tmp_path / "m.safetensors", task.to_metadata("office-mlp"))
    (tmp_path / "in.csv").write_text("kind\na\nb\nz\n")
    done = kindred("predict", "--model", tmp_path / "m.safetensors", "--input", tmp_path / "in.csv")
    assert done.stderr.count("\n") == 1 and "column 'kind': 1 of 3 cells" in done.stderr
    assert np.allclose([float(row[3]) for row in table_of(done.stdout)[1]], [0.75, 0.25, 0.5])
    task = replace(task, objective=Classes(2, ("-1", "1")))  # a negative number is no formula
    save_file(arrays, tmp_path / "m.safetensors", task.to_metadata("office-mlp"))
    done = kindred("predict", "--model", tmp_path / "m.safetensors", "--input", tmp_path / "in.csv")
    assert [row[1] for row in table_of(done.stdout)[1]] == ["1", "-1", "-1"]


def test_numbers_and_labels_are_predicted_in_their_own_form(tmp_path) -> None:
    # (1, 1.5) becomes (1, 2): outputs 0, ln 2, 2 ln 2, probabilities of labels 1/2, 2/3, 4/5.
    (tmp_path / "in.csv").write_text("width,height\n1,1.5\n")
    file = tmp_path / "m.safetensors"
    save_file(known_arrays(), file, known_table(Labels(3, NAMES)).to_metadata("office-mlp"))
    header, (row,) = table_of(kindred("predict", "--model", file, "--input", tmp_path / "in.csv").stdout)
    assert header == ["input", "probability-cat", "probability-dog", "probability-owl"]
    assert np.allclose([float(cell) for cell in row[1:]], [1 / 2, 2 / 3, 4 / 5])
    arrays = known_arrays()  # the last output alone, 2 ln 2, in a unit with mean 10 and deviation 100
    arrays |= {f"fc3.{name}": arrays[f"fc3.{name}"][2:] for name in ("weight", "bias")}
    save_file(arrays, file, known_table(Number(1, ("cost",), 10.0, 100.0)).to_metadata("office-mlp"))
    header, (row,) = table_of(kindred("predict", "--model", file, "--input", tmp_path / "in.csv").stdout)
    assert header == ["input", "prediction-cost"] and float(row[1]) == pytest.approx(10 + 200 * np.log(2))


def test_a_model_file_and_a_table_give_the_bits_of_training(tmp_path) -> None:
    file, task, model = random_model(tmp_path / "a.safetensors")
    np.savez(tmp_path / "in.npz", x_test=images())
    done = kindred("predict", "--model", file, "--input", tmp_path / "in.npz", "--output", tmp_path / "out.csv")
    assert (done.exit_code, done.output) == (0, "")
    header, rows = table_of((tmp_path / "out.csv").read_text())
    due = predicted_by(model, torch.from_numpy(task.prepared(images()[:, None])))
    assert header[2:] == ["probability-0", "probability-1", "probability-2"]
    assert np.array_equal(np.array([row[2:] for row in rows], np.float32), due)
    assert [row[:2] for row in rows] == [[str(i), str(label)] for i, label in enumerate(due.argmax(axis=1))]
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "in.npz", "out.csv"}


@pytest.mark.parametrize("kind", ["probabilities", "logits"])
def test_a_mixture_combines_the_outputs_of_its_models(tmp_path, kind) -> None:
    task = random_model(tmp_path / "a.safetensors")[1]
    file = mixture(tmp_path / "mixture.safetensors", task, kind=kind)
    np.savez(tmp_path / "in.npz", x=images(), x_test=images()[:1])
    done = kindred("predict", "--model", file, "--input", tmp_path / "in.npz")
    found = np.array([row[2:] for row in table_of(done.stdout)[1]], float)
    x = torch.from_numpy(task.prepared(images()[:, None]))
    parts = [predicted_by(make_model("digits-cnn", (1, 8, 8), 3, seed=place), x).astype(float) for place in (0, 1)]
    due = 0.25 * parts[0] + 0.75 * parts[1] if kind == "probabilities" else parts[0] ** 0.25 * parts[1] ** 0.75
    assert np.allclose(found, due / due.sum(axis=1, keepdims=True), atol=1e-6)
    assert not np.allclose(found, parts[1], atol=1e-3)
    module = make_model("digits-cnn", (1, 8, 8), 3)
    assert np.array_equal(found.astype(np.float32), Mixture.load(file).predict(module, x).astype(np.float32))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_a_folder_are_in_the_order_of_their_paths(tmp_path, channels) -> None:
    file, task, model = random_model(tmp_path / "a.safetensors", (channels, 8, 8))
    colours = images(4, (8, 8, 3))
    places = ("b.png", "a/z.bmp", "a/b/c.PNG", "a.png")
    for place, image in zip(places, colours, strict=True):
        (tmp_path / "in" / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "in" / place)
    (tmp_path / "in" / "notes.txt").write_text("no image")
    (tmp_path / "in" / "a" / "._z.png").write_text("hidden")
    given = [Image.fromarray(image) if channels == 3 else Image.fromarray(image).convert("L") for image in colours]
    x = np.stack([np.asarray(image).reshape(8, 8, channels) for image in given]).transpose(0, 3, 1, 2)
    due = dict(zip(places, predicted_by(model, torch.from_numpy(task.prepared(x))), strict=True))

    rows = table_of(kindred("predict", "--model", file, "--input", tmp_path / "in").stdout)[1]
    assert [row[0] for row in rows] == ["a/b/c.PNG", "a/z.bmp", "a.png", "b.png"]
    for name, label, *probabilities in rows:
        assert np.allclose(np.array(probabilities, np.float32), due[name], atol=1e-6)
        assert label == str(due[name].argmax())
    (alone,) = table_of(kindred("predict", "--model", file, "--input", tmp_path / "in" / "a" / "z.bmp").stdout)[1]
    assert alone[0] == "z.bmp" and np.allclose(np.array(alone[2:], np.float32), due["a/z.bmp"], atol=1e-6)


def test_names_of_files_and_classes_may_be_any_text(tmp_path) -> None:
    file, task, _ = random_model(tmp_path / "a.safetensors", names=('a,"b"', "[red]", "π"))
    (tmp_path / "in").mkdir()
    for name in (b"caf\xe9.png", b'1,"2"\n3.png'):
        with open(os.fsencode(tmp_path / "in") + b"/" + name, "wb") as written:
            Image.fromarray(images(1)[0]).save(written, "PNG")
    done = kindred("predict", "--model", file, "--input", tmp_path / "in", "--output", tmp_path / "out.csv")
    assert done.exit_code == 0, done.output
    with open(tmp_path / "out.csv", encoding="utf-8", newline="") as written:
        header, *rows = csv.reader(written)
    assert header[2:] == ['probability-a,"b"', "probability-[red]", "probability-π"]
    assert [row[0] for row in rows] == ['1,"2"\n3.png', "caf\\udce9.png"]
    shown = kindred("evaluate", "--model", file, "--data-dir", site(tmp_path / "site.npz", task)).stdout
    assert all(f" {name} " in shown for name in task.objective.names)


def test_no_name_of_a_file_or_class_is_a_formula_to_a_spreadsheet(tmp_path) -> None:
    file, _, _ = random_model(tmp_path / "a.safetensors", names=("=1+1", "-2", "@a"))
    (tmp_path / "in").mkdir()
    names = ["'a.png", "+1.png", "-1.png", "=1.png"]
    for name in names:
        Image.fromarray(images(1)[0]).save(tmp_path / "in" / name)
    done = kindred("predict", "--model", file, "--input", tmp_path / "in", "--output", tmp_path / "out.csv")
    assert done.exit_code == 0, done.output
    rows = table_of((tmp_path / "out.csv").read_text())[1]
    assert [row[0] for row in rows] == [f"'{name}" for name in names]
    assert {row[1] for row in rows} <= {"'=1+1", "'-2", "'@a"}
    assert [row["input"] for row in read_table(tmp_path / "out.csv")] == names


def test_an_output_is_replaced_only_when_it_is_complete(tmp_path, monkeypatch) -> None:
    file, _, _ = random_model(tmp_path / "a.safetensors")
    np.savez(tmp_path / "in.npz", x=images())
    (tmp_path / "out.csv").write_text("the last one")
    arguments = ("predict", "--model", file, "--input", tmp_path / "in.npz", "--output", tmp_path / "out.csv")

    def full(path: Path, content: bytes) -> None:
        with open(path, "wb") as written:
            written.write(content[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert "No space left" in refused(*arguments)
    assert (tmp_path / "out.csv").read_text() == "the last one" and len(list(tmp_path.iterdir())) == 3
    assert kindred(*arguments).exit_code == 0
    assert (tmp_path / "out.csv").read_text().startswith("input,label,")


def test_an_output_that_cannot_be_written_is_named(tmp_path) -> None:
    file, task, _ = random_model(tmp_path / "a.safetensors")
    np.savez(tmp_path / "in.npz", x=images())
    os.mkfifo(tmp_path / "pipe")
    arguments = ("predict", "--model", file, "--input", tmp_path / "in.npz", "--output")
    for where in (tmp_path / "nowhere" / "out.csv", tmp_path, tmp_path / "pipe", tmp_path / "in.npz" / "out.csv", ""):
        assert "--output is " in refused(*arguments, where)
    assert (tmp_path / "pipe").is_fifo()
    data = site(tmp_path / "site.npz", task)
    done = kindred("evaluate", "--model", file, "--data-dir", data, "--output-dir", tmp_path / "in.npz")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "--output-dir is " in done.stderr


class Full(io.BytesIO):
    def write(self, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_standard_output_that_cannot_be_written_is_reported(tmp_path, monkeypatch, capsys) -> None:
    file, _, _ = random_model(tmp_path / "a.safetensors")
    np.savez(tmp_path / "in.npz", x=images())
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Full()))
    with pytest.raises(typer.Exit) as ended:
        predict.predict(file, tmp_path / "in.npz")
    line = capsys.readouterr().err
    assert ended.value.exit_code == 2 and line.count("\n") == 1 and "No space left" in line


# --- Refused files --------------------------------------------------------------------------------------


def without(arrays: dict, name: str) -> dict:
    return {key: array for key, array in arrays.items() if key != name}


def saved(path: Path, arrays=None, network="office-mlp", task=None, **texts) -> Path:
    about = known_task().to_metadata(network) | ({"task": json.dumps(task)} if task is not None else {}) | texts
    save_file(known_arrays() if arrays is None else arrays, path, about)
    return path


def task_with(**changes) -> dict:
    """The entries of a task, some of them changed."""
    return {part: {**entries, **{k: v for k, v in changes.items() if k in entries}} for part, entries in TASK.items()}


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def plain(path: Path, about: dict | None) -> Path:
    save_file(known_arrays(), path, about)
    return path


def of_bfloat16(path: Path) -> Path:
    tensors = {name: torch.from_numpy(array).bfloat16() for name, array in known_arrays().items()}
    save_tensors(tensors, path, known_task().to_metadata("office-mlp"))
    return path


def cut(path: Path) -> Path:
    return written(path, saved(path).read_bytes()[:-100])


TASK = json.loads(known_task().to_metadata("")["task"])
GREY = Task(ImageInputs((1, 8, 8), (0.5,), (0.25,), 255), Classes(3))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path, ["no file"]),
        (lambda path: path.parent, ["no file"]),
        (lambda path: written(path, b""), ["cannot be read"]),
        (lambda path: written(path, b"PK and no model"), ["cannot be read"]),
        (cut, ["cannot be read"]),
        (of_bfloat16, ["cannot be read", "bfloat16"]),
        (lambda path: plain(path, None), ["no model of kindred's"]),
        (lambda path: plain(path, {"client": "0"}), ["no model of kindred's"]),
        (lambda path: plain(path, {"model": "office-mlp"}), ["no model of kindred's"]),
        (lambda path: saved(path, network="gpt"), ["cannot be used", "'gpt'", "digits-cnn"]),
        (lambda path: saved(path, network="digits-cnn"), ["cannot be used", "4x4", "1x1"]),
        (lambda path: saved(path, without(known_arrays(), "fc3.bias")), ["fc3.bias", "missing"]),
        (lambda path: saved(path, {**known_arrays(), "fc4": np.ones(1)}), ["fc4"]),
        (lambda path: saved(path, {**known_arrays(), "fc3.bias": np.ones(4)}), ["fc3.bias", "(4,)", "(3,)"]),
        (lambda path: saved(path, {**known_arrays(), "fc3.bias": np.full(3, np.nan)}), ["not finite"]),
        (lambda path: saved(path, model="office-mlp", task=[]), ["cannot be used"]),
        (lambda path: saved(path, task={}), ["cannot be used", "inputs"]),
        (lambda path: plain(path, {"model": "office-mlp", "task": "{"}), ["cannot be used"]),
        (lambda path: saved(path, task=task_with(shape="2x1x1")), ["cannot be used"]),
        (lambda path: saved(path, task=task_with(shape=[-2, 1, 1])), ["cannot be used"]),
        (lambda path: saved(path, task=task_with(num_outputs=1)), ["cannot be used"]),
        (lambda path: saved(path, task=task_with(names=["cat", "dog"])), ["3 outputs", "2 names"]),
        (lambda path: saved(path, task=task_with(names=["cat", "dog", "o\nwl"])), [r"'o\nwl'"]),
        (lambda path: saved(path, task=task_with(names=["cat", "dog", "\ud800"])), [r"'\ud800'"]),
        (lambda path: saved(path, task=task_with(names=["cat", "dog", 7])), ["cannot be used"]),
        (lambda path: saved(path, task=task_with(mean=[1, 2, 3])), ["cannot be used"]),
        (lambda path: saved(path, task=task_with(deviation=["x"])), ["cannot be used"]),
        (
            lambda path: saved(path, task=TASK | {"inputs": {**TASK["inputs"], "pickle": 1}}),
            ["cannot be used", "pickle"],
        ),
        (
            lambda path: saved(path, task=TASK | {"inputs": {**TASK["inputs"], "kind": "sound"}}),
            ["cannot be used", "sound"],
        ),
        (lambda path: saved(path, network="lstm"), ["cannot be used", "lstm", "these are image"]),
        (lambda path: mixture(path, GREY, shares=(0.5, 0.75)), ["shares", "0.75"]),
        (lambda path: mixture(path, GREY, shares=(1.5, -0.5)), ["shares", "-0.5"]),
        (lambda path: mixture(path, GREY, shares=(np.nan, 1)), ["shares", "nan"]),
        (lambda path: mixture(path, GREY, shares=(1.0,)), ["shares", "[1.0]"]),
        (lambda path: mixture(path, GREY, kind="votes"), ["'votes'", "logits"]),
        (lambda path: mixture(path, GREY, places=(0,)), ["no mixture"]),
    ],
)
def test_a_file_without_a_model_is_refused_in_one_line(tmp_path, make, says) -> None:
    (tmp_path / "in").mkdir()
    file = make(tmp_path / "a.safetensors")
    line = refused("predict", "--model", file, "--input", tmp_path / "in")
    assert all(word in line for word in [str(file), *says]), line
    assert refused("evaluate", "--model", file, "--data-dir", tmp_path / "in") == line


def npz(path: Path, **arrays) -> Path:
    np.savez(path / "in.npz", **arrays)
    return path / "in.npz"


def picture(path: Path, size=(8, 8), name="a.png") -> Path:
    (path / "in").mkdir(exist_ok=True)
    Image.new("L", size).save(path / "in" / name)
    return path / "in"


def of_two_sizes(path: Path) -> Path:
    picture(path, (8, 8), "a.png")
    return picture(path, (8, 7), "b.png")


INPUTS = [
    (lambda path: path / "nothing.npz", ["--input", "nothing.npz", "image", ".npz", ".csv"]),
    (lambda path: written(path / "in.dat", b"1"), ["--input", "in.dat", ".csv"]),
    (lambda path: npz(path, y=images()), ["in.npz", "neither x nor x_test"]),
    (lambda path: npz(path, x=images()[:0]), ["in.npz: x", "empty"]),
    (lambda path: npz(path, x=images().astype(int)), ["in.npz: x", "int64"]),
    (lambda path: npz(path, x=images().reshape(5, 64)), ["in.npz: x", "(5, 64)"]),
    (lambda path: npz(path, x=np.array([{}])), ["in.npz", "plain arrays"]),
    (lambda path: npz(path, x=images(5, (8, 7))), ["in.npz", "images are 1x8x7, expected 1x8x8"]),
    (lambda path: npz(path, x=images(5, (8, 8, 3))), ["in.npz", "images are 3x8x8, expected 1x8x8"]),
    (lambda path: written(path / "in.npz", b"no archive"), ["in.npz", "plain arrays"]),
    (lambda path: path, ["no images", ".png"]),
    (of_two_sizes, ["b.png", "images are 1x7x8, expected 1x8x8"]),
    (lambda path: written(picture(path) / "two\nlines.png", b"no image").parent, ["two lines.png", "read as an image"]),
    (lambda path: written(path / "in.png", b"no image"), ["in.png", "read as an image"]),
    (lambda path: written(path / "in.csv", b"a,b\n1,2\n"), ["in.csv", "a table", "image inputs"]),
]


@pytest.mark.parametrize(("make", "says"), INPUTS)
def test_an_input_that_does_not_fit_is_refused_in_one_line(tmp_path, make, says) -> None:
    (tmp_path / "data").mkdir()
    file = random_model(tmp_path / "a.safetensors")[0]
    output = tmp_path / "out.csv"
    given = make(tmp_path / "data")
    line = refused("predict", "--model", file, "--input", given, "--output", output)
    assert all(word in line for word in says), line
    assert not output.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ["in.csv", "header"]),
        (b"label\n1\n", ["in.csv", "no column 'width'", "schema"]),
        (b"width,height\n", ["in.csv", "no rows"]),
        (b"0.5,3\n1,2\n", ["in.csv", "header"]),
        (b"-1e5,3\n1,2\n", ["in.csv", "header"]),
        (b"width,width\n1,2\n", ["in.csv", "header", "'width'"]),
        (b"width,height\n1,2\n3\n", ["in.csv", "row 3 has 1 cells, the header 2"]),
        (b"width,height\n1,many\n", ["in.csv: row 2, column height: 'many'", "a number"]),
        (b"width,height\n1,1e999\n", ["in.csv: row 2, column height", "a number"]),
        (b"width,height\n1,\xff\n", ["in.csv", "cannot be read"]),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_one_line(known, tmp_path, content, says) -> None:
    line = refused("predict", "--model", known, "--input", written(tmp_path / "in.csv", content))
    assert all(word in line for word in says), line


def test_an_unreadable_folder_is_an_error(tmp_path, monkeypatch) -> None:
    file = random_model(tmp_path / "a.safetensors")[0]
    (picture(tmp_path) / "closed").mkdir()
    scandir = os.scandir

    def guarded(place):  # root may read everything
        if Path(place).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", guarded)
    line = refused("predict", "--model", file, "--input", tmp_path / "in")
    assert "closed" in line and "cannot be read" in line


def test_a_model_of_features_refuses_images(known, tmp_path) -> None:
    arrays = get_arrays(make_model("office-mlp", (5, 1, 1), 3))
    save_file(arrays, known, known_task(shape=(5, 1, 1)).to_metadata("office-mlp"))
    line = refused("predict", "--model", known, "--input", picture(tmp_path))
    assert "5 channels" in line
    save_file(known_arrays(), known, known_table(Classes(3)).to_metadata("office-mlp"))
    line = refused("predict", "--model", known, "--input", picture(tmp_path))
    assert "--input" in line and "table" in line


def test_numbers_too_large_for_a_table_are_refused(known, tmp_path) -> None:
    line = refused("predict", "--model", known, "--input", written(tmp_path / "in.csv", b"width,height\n3e38,3e38\n"))
    assert "in.csv: row 2, column width: '3e38', allowed: a number" in line


def test_a_missing_argument_is_code_2() -> None:
    assert kindred("predict").exit_code == kindred("evaluate").exit_code == 2


# --- kindred evaluate -----------------------------------------------------------------------------------


def site(path: Path, task: Task, labels=(0, 1, 2)) -> Path:
    """A site's file with the images as training and as test images."""
    x, y = images(6, task.inputs.shape[1:]), np.resize(labels, 6)
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    return path


def test_an_evaluation_by_hand() -> None:
    probabilities = np.array([[0.5, 0.25, 0.25, 0], [0.25, 0.5, 0.25, 0], [0.5, 0.25, 0.25, 0], [0, 0, 1, 0]])
    found = evaluation(probabilities, np.array([0, 0, 1, 2]), Classes(4), ["a", "b", "c", "d"])
    assert found == {
        "samples": 4, "accuracy": 0.5, "loss": pytest.approx(np.log([2, 4, 4, 1]).mean()),
        "classes": [
            {"class": "a", "samples": 2, "accuracy": 0.5, "precision": 0.5},
            {"class": "b", "samples": 1, "accuracy": 0.0, "precision": 0.0},
            {"class": "c", "samples": 1, "accuracy": 1.0, "precision": 1.0},
            {"class": "d", "samples": 0, "accuracy": None, "precision": None},
        ],
        "confusion": [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]],
    }  # fmt: skip


def test_an_evaluation_prints_its_results_and_writes_its_files(known, tmp_path) -> None:
    # By hand, as above: the model predicts cat, dog, owl, owl; true are cat, dog, dog, owl.
    (tmp_path / "site").mkdir()
    rows = "0.5,0.5,cat\n1,0.5,dog\n1,1.5,dog\n0.5,1,owl\n"
    for part, lines in (("train", "0.5,0.5,owl\n"), ("test", rows)):
        (tmp_path / "site" / f"{part}.csv").write_text(f"width,height,label\n{lines}")
    out = tmp_path / "new" / "out"
    done = kindred("evaluate", "--model", known, "--data-dir", tmp_path / "site", "--output-dir", out)
    assert done.exit_code == 0 and done.stderr == ""
    loss = np.log([3, 2, 7 / 2, 2]).mean()
    first, _, _, *lines = done.stdout.splitlines()
    assert first == f"accuracy 75.0%, loss {loss:.4g}, 4 samples"
    table = [line.split() for line in lines if line.strip()]
    assert table[-3:] == [["cat", "1", "100.0", "100.0"], ["dog", "2", "50.0", "100.0"], ["owl", "1", "100.0", "50.0"]]

    found = json.loads((out / "evaluation.json").read_text())
    assert found["accuracy"] == 0.75 and found["loss"] == pytest.approx(loss)
    assert found["model"] == str(known) and found["confusion"] == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert (out / "confusion.png").read_bytes().startswith(b"\x89PNG") and imread(out / "confusion.png").shape[0] > 600
    assert {path.name for path in out.iterdir()} == {"evaluation.json", "confusion.png"}


def test_evaluations_of_labels_and_of_numbers_by_hand() -> None:
    probabilities, truth = np.array([[0.9, 0.2], [0.6, 0.8]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    found = evaluation(probabilities, truth, Labels(2), ["a", "b"])
    assert found.pop("loss") == pytest.approx(-np.log([[0.9, 0.8], [0.4, 0.8]]).mean())
    assert found == {
        "samples": 2,
        "accuracy": 0.75,
        "labels": [{"label": "a", "samples": 1, "accuracy": 0.5}, {"label": "b", "samples": 1, "accuracy": 1.0}],
    }
    # Standardised 0 and 2 are 10 and 210; the truth is 10 and 10: errors of 0 and 200.
    found = evaluation(np.array([[0.0], [2.0]]), np.array([10.0, 10.0]), Number(1, ("cost",), 10.0, 100.0), ["cost"])
    assert found == {"samples": 2, "rmse": pytest.approx(np.sqrt(20_000)), "mae": pytest.approx(100), "loss": 1.0}


def test_a_table_without_a_test_part_is_evaluated_as_a_whole(known, tmp_path) -> None:
    (tmp_path / "site.csv").write_text("width,height,label\n0.5,0.5,cat\n1,,dog\n1,1.5,\n0.5,1,cat\n")
    done = kindred("evaluate", "--model", known, "--data-dir", tmp_path / "site.csv")
    assert done.stdout.startswith("accuracy 66.7%, ") and "3 samples" in done.stdout.splitlines()[0]
    assert done.stderr.splitlines() == [
        "kindred: 1 of 6 cells are missing (height 1)",
        "kindred: rows without a target, which are not used: 1",
        "kindred: the data have no test part: all samples are evaluated, also those that a model was trained on",
    ]


def test_arrays_for_a_model_of_tables_are_checked_like_tables(known, tmp_path) -> None:
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 14)), y=np.array([0, 1]))
    np.savez(tmp_path / "codes.npz", x=np.array([[0.5, np.nan], [1, 1]]), y=np.array([0, 1]))
    for command in ("evaluate", "predict"):
        where = ("--data-dir",) if command == "evaluate" else ("--input",)
        said = refused(command, "--model", known, *where, tmp_path / "wide.npz")
        assert "wide.npz: rows have the shape (14,), expected 2 columns" in said
        done = kindred(command, "--model", known, *where, tmp_path / "codes.npz")
        assert done.exit_code == 0 and "1 of 4 cells are missing (height 1)" in done.stderr


def test_images_of_another_scale_than_before_are_refused() -> None:
    of_bytes, of_shares = ImageInputs((1, 2, 2), (33.0,), (70.0,)), ImageInputs((1, 2, 2), (0.2,), (0.3,))
    shares = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 1, 2, 2)
    whole = (255 * shares).astype(np.uint8)
    with pytest.raises(DataError, match="images have values from 0 to 1, allowed: the scale .* whose mean is 33"):
        of_bytes.prepared(shares)
    with pytest.raises(DataError, match="images have values up to 255, allowed: the scale .* whose mean is 0.2"):
        of_shares.prepared(whole)
    assert of_bytes.prepared(whole).max() < 5 and of_shares.prepared(shares).max() < 5
    assert of_bytes.prepared(0 * shares).shape == (2, 1, 2, 2)  # black


def texts_of(figure) -> dict[tuple[float, float], str]:
    return {text.get_position(): text.get_text() for text in figure.axes[0].texts}


def test_a_confusion_picture_has_the_count_of_each_pair_of_true_and_predicted_class() -> None:
    figure = confusion_figure(np.array([[90, 10, 0], [0, 5, 0], [0, 0, 0]]), ["cat", "cost $5 $", "owl"], "title")
    figure.canvas.draw()  # whatever the names are
    assert texts_of(figure) == {(0, 0): "90", (1, 0): "10", (1, 1): "5"}  # (predicted, true)
    axes = figure.axes[0]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("true class", "predicted class")
    assert [text.get_text() for text in axes.get_yticklabels()] == ["cat", r"cost \$5 \$", "owl"]
    shares = axes.images[0].get_array()
    assert np.allclose(shares[:2], [[0.9, 0.1, 0], [0, 1, 0]]) and np.isnan(np.array(shares[2])).all()
    assert "no samples" in axes.get_title()
    colours = {text.get_text(): text.get_color() for text in axes.texts}
    assert colours["90"] == "white" and colours["10"] == "black"


def test_counts_are_omitted_where_there_is_no_room() -> None:
    many = confusion_figure(np.full((100, 100), 7), [f"class {i}" for i in range(100)], "title")
    assert texts_of(many) == {} and len(many.axes[0].get_yticks()) <= 40
    assert len(texts_of(confusion_figure(np.full((10, 10), 1234), list("abcdefghij"), "title"))) == 100


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path / "nothing", ["data-dir", "nothing"]),
        (lambda path: written(path / "a.npz", b"no archive"), ["a.npz"]),
        (lambda path: site(path / "a.npz", GREY, labels=(0, 3)), ["a.npz", "labels go from 0 to 3", "3 classes"]),
        (
            lambda path: site(path / "a.npz", Task(ImageInputs((1, 7, 8)), Classes(3))),
            ["a.npz", "1x7x8, expected 1x8x8"],
        ),
    ],
)
def test_data_that_do_not_fit_are_refused_in_one_line(tmp_path, make, says) -> None:
    file = random_model(tmp_path / "a.safetensors")[0]
    line = refused("evaluate", "--model", file, "--data-dir", make(tmp_path))
    assert all(word in line for word in says), line


# --- After a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "rounds", "folder", "stage"),
    [("heurfedamp", 1, "models", "trained"), ("federico", 2, "mixtures", "personal")],  # round 1: own models only
)
def test_a_client_s_model_file_has_the_accuracy_that_its_run_reports(tmp_path, strategy, rounds, folder, stage) -> None:
    config = Config(
        strategy=strategy,
        partition="iid",
        num_clients=2,
        num_rounds=rounds,
        samples_per_client=400,
        output_dir=str(tmp_path / "results"),
    )
    results = run_inline(config).path
    federation = load_federation(config.run_config())
    task = federation.task
    accuracies = []
    for client in (0, 1):
        data = federation.site_data(client)
        arrays = {}
        for part, (x, y) in (("train", data.train), ("test", data.test)):
            (mean,), (deviation,) = task.inputs.mean, task.inputs.deviation
            raw = np.rint(x.numpy() * deviation + mean).astype(np.uint8)
            assert np.array_equal(task.prepared(raw), x.numpy())
            arrays |= {f"x_{part}": raw[:, 0], f"y_{part}": y.numpy()}
        np.savez(tmp_path / "site.npz", **arrays)

        file = results / folder / f"client-{client}.safetensors"
        out = tmp_path / f"out-{client}"
        done = kindred("evaluate", "--model", file, "--data-dir", tmp_path / "site.npz", "--output-dir", out)
        assert done.exit_code == 0, done.output
        found = json.loads((out / "evaluation.json").read_text())
        *_, last = (row for row in read_table(results / "history.csv") if row["client"] == client)
        assert found["accuracy"] == last[f"{stage}-accuracy"] and found["samples"] == len(data.test[1])
        assert found["loss"] == pytest.approx(last[f"{stage}-loss"], rel=1e-5)
        accuracies.append(found["accuracy"])

        rows = table_of(kindred("predict", "--model", file, "--input", tmp_path / "site.npz").stdout)[1]
        probabilities = np.array([row[2:] for row in rows], float)
        assert np.mean(probabilities.argmax(axis=1) == data.test[1].numpy()) == found["accuracy"]
        if folder == "models":
            model = make_model("digits-cnn", (1, 8, 8), 10)
            set_arrays(model, load_file(file))
            assert np.array_equal(probabilities.astype(np.float32), predicted_by(model, data.test[0]))
        else:
            together = Mixture.load(file)
            mixed = together.predict(make_model("digits-cnn", (1, 8, 8), 10), data.test[0])
            assert len(together.models) == 2
            assert np.array_equal(probabilities.astype(np.float32), mixed.astype(np.float32))
    assert 0.2 < min(accuracies) < max(accuracies) < 1


def test_the_installed_command_predicts(known, tmp_path) -> None:
    table = written(tmp_path / "in.csv", b"width,height\n1,0.5\n")
    command = [sys.executable, "-m", "kindred", "predict", f"--model={known}", f"--input={table}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith("0,dog,0.25,0.5,0.25")


def test_the_commands_import_heavy_packages_only_when_they_start() -> None:
    script = "import sys, kindred.server_app.cli.predict; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "ray", "flwr", "sklearn", "matplotlib"} & set(done.stdout.split())
    assert callable(predict.predict)
