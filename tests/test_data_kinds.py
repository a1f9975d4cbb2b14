"""Inputs and objectives of every kind, from a file to a federation, a site, a run and a prediction."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from kindred import make_model
from kindred.client.training import get_arrays
from kindred.data import Sites, Task, load_federation, partition_figure, read_site
from kindred.data.inputs import SignalInputs, TokenInputs
from kindred.data.text import LENGTH, STRIDE
from kindred.data.weights import weighted
from kindred.objectives import Classes, Labels, NextToken, Number
from kindred.server_app.app import run_inline
from kindred.server_app.cli.commands import app
from kindred.server_app.config import Config

from .refusals import refusal

CLIENTS = np.array(["b", "a"] * 6)
TIMES = np.arange(12)
Y = np.arange(12) // 2 % 2


def settings_of(path, arrays, **changes) -> dict:
    np.savez(path / "a.npz", **arrays)
    given = {"dataset": "npz", "data_dir": str(path / "a.npz"), "partition": "by-client", "num_clients": 2,
             "min_samples": 2, "test_share": 1 / 3, "validation_share": 0}  # fmt: skip
    return given | changes


def federation(path, arrays, **changes):
    return load_federation(Config(**settings_of(path, arrays, **changes)).run_config())


# --- Federations ----------------------------------------------------------------------------------------------


def test_natural_clients_hold_out_a_fifth_and_only_the_others_are_measured(tmp_path):
    """Two of each client's six samples are for test, and of the other four the last one is for validation."""
    x = np.where(np.arange(12) < 6, np.arange(12) % 2, 100.0)[:, None, None] * np.ones((1, 1, 3))
    y = np.where(np.arange(12) < 6, 10.0 + 4 * (np.arange(12) % 2), 1000.0)
    found = federation(
        tmp_path, {"x": x, "y": y, "client": CLIENTS, "time": TIMES}, validation_share="auto", class_weights=""
    )
    assert found.task == Task(SignalInputs((1, 3), (0.5,), (0.5,)), Number(1, mean=12.0, deviation=2.0))
    assert found.has_validation and found.train_sizes.tolist() == [3, 3] and found.sizes.tolist() == [6, 6]
    data = found.site_data(0)
    assert data.train[1].tolist() == [1.0] * 3
    assert data.validation[1].tolist() == [494.0] and data.test[1].tolist() == [494.0] * 2
    assert not federation(tmp_path, {"x": x, "y": Y}, validation_share="auto", partition="iid").has_validation


def test_only_samples_that_clients_train_on_are_measured(tmp_path):
    """Client a has the odd samples; of each six, the first four are for training: 0 to 7 of both clients."""
    x = np.where(np.arange(12) < 8, np.arange(12) % 2, 100.0)[:, None, None] * np.ones((1, 1, 3))
    y = np.where(np.arange(12) < 8, 10.0 + 4 * (np.arange(12) % 2), 1000.0)
    found = federation(tmp_path, {"x": x, "y": y, "client": CLIENTS, "time": TIMES})
    assert found.task == Task(SignalInputs((1, 3), (0.5,), (0.5,)), Number(1, mean=12.0, deviation=2.0))
    assert found.names == ("a", "b") and found.train_sizes.tolist() == [4, 4] and found.sizes.tolist() == [6, 6]
    data = found.site_data(0)
    assert data.train[0].tolist() == [[[1.0] * 3]] * 4 and data.train[1].tolist() == [1.0] * 4
    assert data.test[0].tolist() == [[[199.0] * 3]] * 2 and data.test[1].tolist() == [494.0] * 2
    assert data.train[0].dtype == data.train[1].dtype == torch.float32 and len(data.validation[1]) == 0
    assert found.class_counts().tolist() == [[4], [4]]


def test_where_the_data_bring_a_test_part_all_training_samples_are_measured(tmp_path):
    x = np.arange(4.0)[:, None, None] * np.ones((1, 1, 2))
    arrays = {"x_train": x, "y_train": [0, 1, 0, 1], "x_test": x + 9, "y_test": [0, 1, 0, 1]}
    clients = {f"client_{part}": ["a", "a", "b", "b"] for part in ("train", "test")}
    found = federation(tmp_path, arrays | clients, samples_per_client=1)
    assert found.task.inputs == SignalInputs((1, 2), (1.5,), (1.25**0.5,)) and found.train_sizes.tolist() == [1, 1]


def test_labels_and_tokens_reach_the_clients(tmp_path):
    labels = np.stack([Y, 1 - Y, 0 * Y], axis=1)
    tokens = np.arange(48).reshape(12, 4) % 7
    found = federation(tmp_path, {"x": tokens, "y": labels, "client": CLIENTS, "time": TIMES})
    assert found.task == Task(TokenInputs((7, 4)), Labels(3))
    x, y = found.site_data(1).train
    assert x.dtype == torch.int64 and x.tolist() == tokens[[0, 2, 4, 6]].tolist()
    assert y.dtype == torch.float32 and y.tolist() == labels[[0, 2, 4, 6]].tolist()
    assert found.class_counts().tolist() == [[2, 2, 0], [2, 2, 0]]
    assert partition_figure(found).axes[0].get_xlabel() == "label that is true"
    assert [text.get_text() for text in partition_figure(found).axes[0].get_yticklabels()] == ["a", "b"]


def test_clients_of_tables_in_arrays_have_standardised_columns(tmp_path):
    table = np.stack([np.arange(12.0), np.where(np.arange(12) == 3, np.nan, 5.0)], axis=1)
    found = federation(tmp_path, {"x": table, "y": Y, "client": CLIENTS, "time": TIMES}, partition="iid")
    assert found.task.inputs.kind == "table" and found.task.inputs.shape == (3,)  # the second column may be missing
    assert found.names == ()
    x = torch.cat([found.site_data(client).train[0] for client in (0, 1)])
    assert x.shape[1:] == (3,) and abs(x[:, 0].mean()) < 1e-6 and x[:, 2].sum() <= 1


def test_the_fingerprint_of_images_is_that_of_earlier_versions():
    """A finished run is not repeated, and another one is continued, only where the fingerprint is the same."""
    assert load_federation(Config().run_config()).fingerprint == "7ab03b2ea632056d"


def test_a_public_set_is_of_the_clients_kind(tmp_path):
    x = np.random.default_rng(0).normal(size=(12, 2, 5))
    np.savez(tmp_path / "public.npz", x=x[:3] + 1)
    arrays = {"x": x, "y": Y, "client": CLIENTS, "time": TIMES}
    found = federation(tmp_path, arrays, public_data=str(tmp_path / "public.npz"))
    assert torch.equal(found.public_set(), found.task.tensor((x[:3] + 1).astype(np.float32)))
    np.savez(tmp_path / "public.npz", x=x[:3, :1])
    text = refusal(federation(tmp_path, arrays, public_data=str(tmp_path / "public.npz"), seed=1).public_set)
    assert "(1, 5)" in text and "(2, 5)" in text


# --- Weights of classes ---------------------------------------------------------------------------------------


def test_balanced_weights_give_classes_and_labels_the_same_sum():
    classes = weighted(Classes(2), "balanced", np.array([6, 2]), 8)
    assert classes == Classes(2, weights=(8 / 12, 2.0))  # 6 and 2 samples: 4 and 4
    assert weighted(Labels(2), "balanced", np.array([2, 4]), 8) == Labels(2, weights=(3.0, 1.0))
    assert weighted(Classes(2), "1, 2.5", None) == Classes(2, weights=(1.0, 2.5))
    assert weighted(Number(1), "", None) == Number(1)


@pytest.mark.parametrize(
    ("objective", "text", "counts", "words"),
    [
        (Number(1), "balanced", None, ["number has no classes"]),
        (Classes(2, ("cat", "dog")), "balanced", np.array([8, 0]), ["0 of 8", "dog"]),
        (Labels(2), "balanced", np.array([8, 4]), ["8 of 8", "0"]),
        (Classes(2), "balanced", None, ["all sites"]),
        (Classes(2), "1,two", None, ["'1,two'", "balanced, or numbers"]),
        (Classes(2), "1,2,3", None, ["1.0, 2.0, 3.0", "2 numbers"]),
        (Classes(2), "1,-2", None, ["more than 0"]),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(objective, text, counts, words):
    line = refusal(lambda: weighted(objective, text, counts, 8))
    assert "class-weights is" in line and [word for word in words if word not in line] == []


def test_a_federation_balances_its_clients_training_samples(tmp_path):
    y = np.where(np.arange(12) < 4, 0, 1)  # 4 and 4 of the 8 training samples, 6 and 2 where y is 0 before 6
    arrays = {"x": np.ones((12, 3)) * TIMES[:, None], "y": y, "client": CLIENTS, "time": TIMES}
    assert federation(tmp_path, arrays, class_weights="balanced").task.objective.weights == (1.0, 1.0)
    arrays["y"] = np.where(np.arange(12) < 6, 0, 1)
    assert federation(tmp_path, arrays, class_weights="balanced", seed=1).task.objective.weights == (8 / 12, 2.0)


# --- Sites ----------------------------------------------------------------------------------------------------


def sites(tmp_path, task, data_dir, **run) -> Sites:
    """The sites of a run with a schema, as seen from one with data in `data_dir`."""
    (tmp_path / "schema.json").write_text(json.dumps(task.to_dict()))
    config = Config(dataset="sites", schema="/the/server's/own.json", **run).run_config()
    return Sites.of(config, {"data-dir": str(data_dir), "schema": str(tmp_path / "schema.json")})


SIGNALS = Task(SignalInputs((2, 5), (1.0,), (2.0,)), Classes(3, ("up", "down", "still")))


def test_a_site_with_a_schema_may_have_signals(tmp_path):
    x = np.random.default_rng(0).normal(size=(10, 2, 5)).astype(np.float32)
    names = np.array(["up", "still"])[Y[:10]]
    np.savez(tmp_path / "parts.npz", x_train=x[:6], y_train=names[:6], x_test=x[6:], y_test=names[6:])
    data = sites(tmp_path, SIGNALS, tmp_path / "parts.npz").site_data("lyon")
    assert torch.equal(data.train[0], torch.from_numpy((x[:6] - 1) / 2)) and data.train[1].tolist() == [
        0,
        0,
        2,
        2,
        0,
        0,
    ]
    assert len(data.test[1]) == 4 and len(data.validation[1]) == 0
    np.savez(tmp_path / "whole.npz", x=x, y=names)
    data = sites(tmp_path, SIGNALS, tmp_path / "whole.npz", test_share=0.4).site_data("lyon")
    assert np.bincount(data.train[1]).tolist() == [4, 0, 2] and np.bincount(data.test[1]).tolist() == [2, 0, 2]
    weights = sites(tmp_path, SIGNALS, tmp_path / "whole.npz", class_weights="1,2,3").task.objective.weights
    assert weights == (1.0, 2.0, 3.0)


TEXT = Task(TokenInputs((3, LENGTH), "ab\ufffd"), NextToken(3))


def test_a_site_with_a_schema_may_have_a_text(tmp_path):
    (tmp_path / "lyon.txt").write_text("ab" * 100 + "cd" * 100)
    data = sites(tmp_path, TEXT, tmp_path / "lyon.txt", test_share=0.5).site_data("lyon")
    assert data.train[0].dtype == torch.int64 and set(data.train[0].unique().tolist()) == {0, 1}
    assert data.train[1].tolist() == [0] * ((200 - LENGTH - 1) // STRIDE + 1) and set(data.test[1].tolist()) == {2}
    assert len(read_site(tmp_path / "lyon.txt", task=TEXT).x_test) == 0


def test_sites_whose_data_do_not_fit_the_schema_are_refused_in_one_line(tmp_path):
    x = np.zeros((4, 2, 5), np.float32)
    arrays = {"x": x, "y": np.array(["up", "down"] * 2)}

    def read(name="a.npz", task=SIGNALS, **changes) -> str:
        if name == "a.npz":
            np.savez(tmp_path / name, **(arrays | changes))
        return refusal(lambda: sites(tmp_path, task, tmp_path / name).site_data("lyon"))

    assert "signals are 2x4, expected 2x5" in read(x=x[..., :4])
    assert "'left' in sample 1" in read(y=np.array(["up", "left"] * 2))
    assert "from 0 to 3" in read(y=np.array([0, 3, 0, 3]))
    assert "(n, channels, time)" in read(x=x[:, 0])
    (tmp_path / "short.txt").write_text("abab" * 30)
    assert "120 characters" in read("short.txt", TEXT) and "81" in read("short.txt", TEXT)
    assert "no characters" in read("short.txt", Task(TokenInputs((3, LENGTH)), NextToken(3)))
    assert "data-dir" in read("short.txt", SIGNALS)
    run_config = Config(dataset="sites", schema="x.json").run_config()
    assert "schema is not in the node config" in refusal(lambda: Sites.of(run_config, {"data-dir": "a.npz"}))


def test_a_sample_of_arrays_or_texts_makes_a_schema(tmp_path):
    x = np.arange(12.0).reshape(6, 2, 1) * np.ones((1, 1, 5))  # channels: 0, 2, ... 10 and 1, 3, ... 11
    np.savez(tmp_path / "a.npz", x=x, y=np.array(["up", "still"])[Y[:6]])
    (tmp_path / "a.txt").write_text("ab" * 200)
    deviation = float(np.sqrt(35 / 3))
    for given, said, task in (
        ("a.npz", ["signal: 2x5 (channels x time)", "target: classes, still, up"],
         Task(SignalInputs((2, 5), (5.0, 6.0), (deviation, deviation)), Classes(2, ("still", "up")))),
        (".", ["tokens: 3x80 (vocabulary x length)", "target: next-token, 3 outputs"], TEXT),
    ):  # fmt: skip
        out = tmp_path / "schema.json"
        done = CliRunner().invoke(app, ["schema", "--data-dir", str(tmp_path / given), "--out", str(out)])
        assert done.exit_code == 0 and done.stdout.splitlines() == [*said, f"schema in {out}"], done.output
        assert Task.load(out) == task


# --- Runs and predictions ---------------------------------------------------------------------------------------


def predicted(model, given) -> tuple[list[str], list[list[str]]]:
    done = CliRunner().invoke(app, ["predict", "--model", str(model), "--input", str(given)])
    assert done.exit_code == 0, done.output
    header, *rows = csv.reader(io.StringIO(done.stdout))
    return header, rows


def trained(tmp_path, **settings):
    """The folder of a run of a few rounds of local training."""
    few = {"strategy": "local", "num_rounds": 2, "local_epochs": 2, "batch_size": 4, "device": "cpu",
           "output_dir": str(tmp_path / "results")}  # fmt: skip
    return run_inline(Config(**few | settings)).path


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("x", "y", "network", "header"),
    [
        ("signals", "number", "cnn1d", ["input", "prediction-0"]),
        ("table", "labels", "mlp", ["input", "probability-0", "probability-1"]),
        ("tokens", "names", "lstm", ["input", "label", "probability-no", "probability-yes"]),
    ],
)
def test_a_run_on_arrays_ends_with_models_that_predict(tmp_path, x, y, network, header):
    rng = np.random.default_rng(0)
    inputs = {"signals": rng.normal(size=(12, 2, 8)), "table": rng.normal(size=(12, 3)),
              "tokens": rng.integers(0, 5, (12, 6))}[x]  # fmt: skip
    targets = {"number": 100 + rng.normal(size=12), "labels": np.stack([Y, 1 - Y], 1),
               "names": np.array(["no", "yes"])[Y]}[y]  # fmt: skip
    arrays = {"x": inputs, "y": targets, "client": CLIENTS, "time": TIMES}
    folder = trained(tmp_path, **settings_of(tmp_path, arrays))
    model = folder / "models" / "client-0.safetensors"
    assert network in str(model.read_bytes()[:5000])
    found, rows = predicted(model, tmp_path / "a.npz")
    assert found == header and len(rows) == 12
    values = np.array([row[header.index(header[-1])] for row in rows], float)
    assert ((values > 90) & (values < 110)).all() if y == "number" else ((values > 0) & (values < 1)).all()
    done = CliRunner().invoke(app, ["evaluate", "--model", str(model), "--data-dir", str(tmp_path / "a.npz")])
    assert done.exit_code == 0 and "12 samples" in done.stdout, done.output
    assert ("RMSE" in done.stdout.upper()) == (y == "number")


@pytest.mark.usefixtures("no_pictures")
def test_a_run_on_texts_ends_with_models_that_predict_characters(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("ab\n" * 140)
    folder = trained(
        tmp_path, dataset="text", data_dir=str(tmp_path), partition="by-client", num_clients=2, min_samples=2,
        local_epochs=20, learning_rate=0.02,
    )  # fmt: skip
    (tmp_path / "new.txt").write_text("b\na" * 30)
    header, rows = predicted(folder / "models" / "client-0.safetensors", tmp_path / "new.txt")
    assert header[:2] == ["input", "label"] and set(header[2:]) == {f"probability-{c}" for c in ("a", "b", "\\n", "�")}
    assert [row[0] for row in rows] == ["80", "90"]
    assert [row[1] for row in rows] == ["a", "b"]  # the characters 80 and 90, which is after the end
    arrays = load_file(folder / "models" / "client-0.safetensors")
    assert arrays["embedding.weight"].shape == (4, 8)


def test_inputs_that_a_model_does_not_take_are_refused_in_one_line(tmp_path):
    model = tmp_path / "model.safetensors"
    save_file(get_arrays(make_model("cnn1d", (2, 5), 3)), model, SIGNALS.to_metadata("cnn1d"))
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2, 4)))
    np.savez(tmp_path / "b.npz", x=np.zeros((3, 5)))
    for name, words in (
        ("a.txt", "a text, and the model takes no characters"),
        ("a.csv", "a table, and the model takes signal inputs"),
        ("a.png", "images, and the model takes signal inputs"),
        ("a.npz", "signals are 2x4, expected 2x5"),
        ("b.npz", "(3, 5), allowed: (n, channels, time)"),
    ):
        done = CliRunner().invoke(app, ["predict", "--model", str(model), "--input", str(tmp_path / name)])
        assert done.exit_code == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.output
        assert words in done.stderr
