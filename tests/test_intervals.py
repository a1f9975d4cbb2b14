"""Intervals of metrics over clients, and metrics of all clients' predictions pooled, by hand."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import load_file, save_file

import kindred
from kindred.objectives import Classes, Number
from kindred.server_app import intervals
from kindred.server_app.intervals import mean_intervals, means, pooled_metrics, resampled_rows
from kindred.server_app.report.content import run_content


def saved(folder, *clients: tuple[np.ndarray, np.ndarray]) -> dict:
    """Write clients' predictions and targets, and return the files."""
    files = {client: folder / f"client-{client}.safetensors" for client in range(len(clients))}
    for file, (predictions, targets) in zip(files.values(), clients, strict=True):
        save_file({"predictions": predictions, "targets": targets}, file)
    return files


def of_two(*second: float) -> np.ndarray:
    """Return probabilities of two classes, from those of the second."""
    return np.array([[1 - p, p] for p in second], np.float32)


def test_the_mean_over_clients_and_its_interval_by_hand() -> None:
    clients = [{"accuracy": 1.0, "auroc": 0.5}, {"accuracy": 0.0}]
    assert means(clients) == {"accuracy": 0.5, "auroc": 0.5} and means([]) == {}
    # Means of two draws are 0, 1/2, 1/2 or 1: more than 2.5 % of them at either end. One client alone has one mean.
    assert mean_intervals(clients, seed=0) == {"accuracy": [0.0, 1.0], "auroc": [0.5, 0.5]}
    same = mean_intervals([{"accuracy": 0.75}] * 8, seed=1)
    assert same == {"accuracy": [0.75, 0.75]}
    # 50 of 100 clients have 1 and 50 have 0: the mean is 0.5 with a standard error of 0.05.
    low, high = mean_intervals([{"accuracy": float(n % 2)} for n in range(100)], seed=0)["accuracy"]
    assert (low, high) == (pytest.approx(0.402, abs=0.015), pytest.approx(0.598, abs=0.015))


def test_pooled_metrics_count_samples_not_clients(tmp_path) -> None:
    """The first client has one sample, predicted wrongly; the second has three, predicted rightly."""
    files = saved(tmp_path, (of_two(0.9), np.array([0])), (of_two(0.2, 0.8, 0.7), np.array([0, 1, 1])))
    found = pooled_metrics(files, Classes(2), "accuracy", seed=0)
    assert found["samples"] == 4 and found["metrics"]["accuracy"] == 0.75  # the mean over clients is 0.5
    assert found["metrics"]["auroc"] == 0.5  # of 4 pairs 0.8 > 0.2 and 0.7 > 0.2; the first client alone has none
    assert found["metrics"]["sensitivity"] == 1.0 and found["metrics"]["specificity"] == 0.5
    assert found["intervals"]["accuracy"] == [0.0, 1.0]  # both draws are of one client in half of the resamples
    assert found["intervals"].keys() == {"accuracy", "loss"}
    assert "auroc" in pooled_metrics(files, Classes(2), "auroc", seed=0)["intervals"]


def test_clients_that_are_right_everywhere_have_intervals_without_width(tmp_path) -> None:
    one = of_two(0.25, 0.75), np.array([0, 1])
    found = pooled_metrics(saved(tmp_path, one, one, one), Classes(2), "accuracy", seed=0)
    assert found["intervals"]["accuracy"] == [1.0, 1.0]
    assert found["intervals"]["loss"] == pytest.approx([-np.log(0.75)] * 2)


def test_pooled_numbers_are_in_their_unit(tmp_path) -> None:
    one, three = np.zeros((1, 1), np.float32), np.zeros((3, 1), np.float32)
    files = saved(tmp_path, (one, np.array([2.0], np.float32)), (three, np.zeros(3, np.float32)))
    found = pooled_metrics(files, Number(1, mean=5, deviation=2), "rmse", seed=0)
    assert found["metrics"]["mae"] == 1.0 and found["metrics"]["rmse"] == 2.0  # errors of 4, 0, 0 and 0
    assert found["intervals"]["rmse"] == [0.0, 4.0]


def test_without_usable_predictions_nothing_is_pooled(tmp_path, monkeypatch) -> None:
    assert pooled_metrics({}, Classes(2), "accuracy", 0) is None
    assert pooled_metrics(saved(tmp_path, (of_two(np.nan), np.array([0]))), Classes(2), "accuracy", 0) is None
    files = saved(tmp_path, (of_two(0.5), np.array([0])), (np.zeros((0, 2), np.float32), np.zeros(0, int)))
    assert pooled_metrics(files, Classes(2), "accuracy", 0)["samples"] == 1
    monkeypatch.setattr(intervals, "MOST", 1)
    assert pooled_metrics(files, Classes(2), "accuracy", 0) is None


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 99))
def test_a_resample_has_as_many_clients_each_with_its_own_number_of_samples(sizes, seed) -> None:
    rows, ends = resampled_rows(np.array(sizes), np.random.default_rng(seed)), np.cumsum(sizes)
    owner = np.searchsorted(ends, rows, side="right")
    assert owner.max() < len(sizes)
    drawn = [int(np.sum(owner == client)) / size for client, size in enumerate(sizes)]
    assert all(times == int(times) for times in drawn) and sum(drawn) == len(sizes)


def test_many_samples_take_little_time(tmp_path) -> None:
    rng = np.random.default_rng(0)
    clients = [(of_two(*rng.random(500)), rng.integers(0, 2, 500)) for _ in range(20)]
    files, start = saved(tmp_path, *clients), time.perf_counter()
    found = pooled_metrics(files, Classes(2), "auroc", seed=0)
    assert time.perf_counter() - start < 20  # 2 s on a machine that does nothing else
    low, high = found["intervals"]["auroc"]
    assert low < found["metrics"]["auroc"] < high < low + 0.05


def test_a_run_has_the_metrics_of_all_its_predictions(tmp_path) -> None:
    result = kindred.run(
        "local", clients=4, rounds=2, output=tmp_path, validation_share=0.25, metric="balanced-accuracy"
    )
    found = json.loads((result.folder / "summary.json").read_text())
    files = sorted((result.folder / "predictions").iterdir())
    parts = [load_file(file) for file in files]
    right = [(each["predictions"].argmax(axis=1) == each["targets"]).mean() for each in parts]
    assert found["metrics"]["selected"]["accuracy"] == pytest.approx(np.mean(right))
    sizes = [len(each["targets"]) for each in parts]
    assert found["pooled"]["samples"] == sum(sizes)
    assert found["pooled"]["metrics"]["accuracy"] == pytest.approx(np.average(right, weights=sizes))
    low, high = found["pooled"]["intervals"]["balanced-accuracy"]
    assert low < found["pooled"]["metrics"]["balanced-accuracy"] < high
    shown = run_content(result.folder)["metrics"]
    assert shown["selected"] and shown["samples"] == sum(sizes)
    first = shown["rows"][0]
    value, ends = found["metrics"]["selected"]["accuracy"], found["intervals"]["selected"]["accuracy"]
    assert first[:3] == ["accuracy", "4", f"{100 * value:.1f} % ({100 * ends[0]:.1f} to {100 * ends[1]:.1f})"]
    assert [row[0] for row in shown["rows"]][:3] == ["accuracy", "balanced accuracy", "AUROC"]
