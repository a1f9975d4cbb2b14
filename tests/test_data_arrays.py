"""Datasets in .npz files of any kind: inputs, targets, clients, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kindred.data import DataError, load_federation
from kindred.data.arrays import dataset_of, kind_of
from kindred.data.sources import load_dataset
from kindred.objectives import Classes, Labels, NextToken, Number
from kindred.server_app.config import Config

RNG = np.random.default_rng(0)
SIGNALS = RNG.normal(size=(8, 2, 5)).astype(np.float32)
TABLE = RNG.normal(size=(8, 3))
TOKENS = np.arange(32).reshape(8, 4) % 6
CLASSES = np.arange(8) % 2


def parts(x, y, **more) -> dict[str, np.ndarray]:
    """The first six samples for training, the last two for test."""
    found = {"x_train": x[:6], "y_train": y[:6], "x_test": x[6:], "y_test": y[6:]}
    return found | {name: np.asarray(array) for name, array in more.items() if array is not None}


def read(tmp_path, arrays, **settings):
    np.savez(tmp_path / "a.npz", **arrays)
    return load_dataset("npz", str(tmp_path / "a.npz"), **settings)


def refusal(tmp_path, arrays, **settings) -> str:
    with pytest.raises(DataError) as refused:
        read(tmp_path, arrays, **settings)
    text = str(refused.value)
    assert "\n" not in text and str(tmp_path / "a.npz") in text
    return text


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (np.zeros((2, 4, 5), np.uint8), "image"),
        (np.zeros((2, 4, 5, 3), np.uint8), "image"),
        (np.zeros((2, 4, 5, 3)), "image"),
        (np.zeros((2, 4, 5)), "signal"),
        (np.zeros((2, 4, 5), np.int16), "signal"),
        (np.zeros((2, 4)), "table"),
        (np.zeros((2, 4), bool), "table"),
        (np.zeros((2, 4), int), "tokens"),
        (np.zeros((2, 4), np.uint8), "tokens"),
    ],
)
def test_the_kind_of_inputs_follows_from_dimensions_and_type(x, kind):
    assert kind_of(x, "x") == kind


def test_signals_are_channels_by_time_in_float32(tmp_path):
    found = read(tmp_path, parts(SIGNALS.astype(np.float64), CLASSES))
    assert found.kind == "signal" and found.x_train.dtype == np.float32
    assert np.array_equal(found.x_train, SIGNALS[:6]) and np.array_equal(found.x_test, SIGNALS[6:])
    assert found.objective == Classes(2) and found.y_test.tolist() == [0, 1]


def test_a_setting_makes_images_of_what_would_be_signals(tmp_path):
    found = read(tmp_path, parts(SIGNALS, CLASSES), inputs="image")
    assert found.kind == "image" and found.x_train.shape == (6, 1, 2, 5)


def test_tables_may_have_missing_values(tmp_path):
    table = np.where(TABLE > 1, np.nan, TABLE)
    found = read(tmp_path, parts(table, CLASSES))
    assert found.kind == "table" and np.array_equal(found.x_train, table[:6], equal_nan=True)
    assert read(tmp_path, parts(TOKENS, CLASSES), inputs="table").x_train.dtype == np.float64


def test_the_vocabulary_has_the_tokens_of_both_parts(tmp_path):
    tokens = np.where(TOKENS == 5, 0, TOKENS)
    tokens[7, 3] = 9
    found = read(tmp_path, parts(tokens, CLASSES))
    assert found.kind == "tokens" and found.vocabulary == 10 and found.objective == Classes(2)
    assert read(tmp_path, parts(tokens, CLASSES), task="next-token").objective == NextToken(10)


@pytest.mark.parametrize(
    ("y", "task", "objective"),
    [
        (CLASSES, "auto", Classes(2)),
        (CLASSES.astype(bool), "auto", Classes(2)),
        (CLASSES.astype(float), "auto", Number(1)),
        (CLASSES.astype(float), "classes", Classes(2)),
        (CLASSES, "number", Number(1)),
        (np.array(["no", "yes"])[CLASSES], "auto", Classes(2, ("no", "yes"))),
        (np.array(["yes", "no"])[CLASSES], "auto", Classes(2, ("no", "yes"))),
        (np.stack([CLASSES, 1 - CLASSES, 0 * CLASSES], axis=1), "auto", Labels(3)),
    ],
)
def test_the_objective_follows_from_the_targets_or_is_set(tmp_path, y, task, objective):
    found = read(tmp_path, parts(TABLE, y), task=task)
    assert found.objective == objective
    assert found.y_train.dtype == (np.int64 if objective.has_classes else np.float64)
    if objective.names:  # names in alphabetical order
        assert np.array_equal(np.array(objective.names)[found.y_train], y[:6])
    else:
        assert np.array_equal(found.y_train, y[:6])


@pytest.mark.parametrize("y", [np.linspace(0, 1, 9), (np.arange(9) % 2)[:, None] == 1])
def test_images_may_have_numbers_or_one_label_as_targets(tmp_path, y):
    np.savez(tmp_path / "a.npz", **parts(np.arange(9 * 64).reshape(9, 8, 8).astype(np.uint8), y))
    settings = {"dataset": "npz", "data_dir": str(tmp_path / "a.npz"), "partition": "iid", "num_clients": 2}
    found = load_federation(Config(**settings).run_config())
    assert found.task.objective.num_outputs == 1 and len(found.fingerprint) == 16


def test_clients_may_be_texts_or_numbers(tmp_path):
    found = read(tmp_path, parts(SIGNALS, CLASSES, client_train=[3, 3, 10, 10, 3, 3], client_test=[10, 3]))
    assert found.clients_train.tolist() == ["3", "3", "10", "10", "3", "3"] and found.clients_test.tolist() == [
        "10",
        "3",
    ]
    found = read(tmp_path, {"x": TABLE, "y": CLASSES, "client": np.array([" a", "b"] * 4), "time": np.arange(8)})
    assert found.clients_train.tolist() == ["a", "b"] * 4 and found.clients_test.tolist() == []
    assert found.times.tolist() == list(range(8)) and len(found.x_test) == len(found.y_test) == 0


def test_names_lose_control_characters_and_bytes_are_utf_8(tmp_path):
    names = np.array(["rest\n", "walk \x1b ing"] * 4)
    found = read(tmp_path, {"x": TABLE, "y": names, "client": np.array(["m\u00e4rz".encode(), b"b"] * 4)})
    assert found.objective.names == ("rest", "walk ing") and found.y_train.tolist() == [0, 1] * 4
    assert found.clients_train.tolist() == ["m\u00e4rz", "b"] * 4


BEHIND = SIGNALS.copy()
BEHIND[7] = SIGNALS[1]


@pytest.mark.parametrize(
    ("arrays", "settings", "words"),
    [
        ({"x": TABLE}, {}, ["has no x_train, y_train, x_test, y_test", "or x and y"]),
        (parts(TABLE, CLASSES) | {"client_train": np.arange(6)}, {}, ["one of client_train and client_test"]),
        (parts(TABLE, CLASSES, client_train=range(5), client_test=range(2)), {}, ["6 samples", "client_train 5"]),
        (
            parts(TABLE, CLASSES, client_train=[0.5] * 6, client_test=[0.5] * 2),
            {},
            ["client_train", "float64", "texts"],
        ),
        (
            parts(TABLE, CLASSES, client_train=["a"] * 5 + [" "], client_test=["a", "a"]),
            {},
            ["client_train", "sample 5"],
        ),
        ({"x": TABLE, "y": CLASSES, "time": np.full(8, np.nan)}, {}, ["time", "finite"]),
        ({"x": TABLE, "y": CLASSES, "time": np.array(3)}, {}, ["time is a single value"]),
        (parts(SIGNALS, CLASSES) | {"x_test": SIGNALS[6:, :1]}, {}, ["(2, 5)", "(1, 5)"]),
        (parts(SIGNALS[..., None, None], CLASSES), {}, ["(6, 2, 5, 1, 1)", "(n, channels, time)"]),
        (parts(np.where(SIGNALS > 1, np.nan, SIGNALS), CLASSES), {}, ["not finite"]),
        (parts(np.where(TABLE > 1, np.inf, TABLE), CLASSES), {}, ["beyond 1e+30", "NaN"]),
        (parts(np.where(TABLE > 1, 1e200, TABLE), CLASSES), {}, ["beyond 1e+30", "NaN"]),
        (parts(TABLE, TABLE[:, 0] + 1e299), {}, ["y_train has numbers beyond 1e+30"]),
        (parts(TABLE, np.array(["a", ""] * 4)), {}, ["y_train is empty in sample 1", "a name"]),
        (parts(TABLE, np.array([b"a", b"\xff"] * 4)), {}, ["y_train", "UTF-8"]),
        (parts(TABLE.astype(str), CLASSES), {}, ["<U", "numbers"]),
        (parts(TOKENS - 1, CLASSES), {}, ["tokens from -1", "0 to 999,999"]),
        (
            parts(np.zeros((8, 3, 3, 1), np.uint8), CLASSES) | {"x_test": np.zeros((2, 3, 3, 1))},
            {},
            ["x_train holds uint8, x_test float32", "one type"],
        ),
        (parts(SIGNALS * 1.0 + [[0.0], [1.7e9]], CLASSES), {}, ["channel 1", "1.7e+09", "float32", "offset"]),
        (parts(TABLE, CLASSES), {"inputs": "tokens"}, ["float64", "integers"]),
        (parts(TABLE, CLASSES), {"inputs": "signal"}, ["(6, 3)", "(n, channels, time)"]),
        (parts(TABLE, 0 * CLASSES), {}, ["one class"]),
        (parts(TABLE, np.array(["a"] * 8)), {}, ["one class only, 'a'"]),
        (parts(TABLE, np.array(["a", "b", "a", "b", "a", "b", "a", "c"])), {}, ["y_test", "'c' in sample 1", "a, b"]),
        (parts(TABLE, np.where(CLASSES, np.nan, 1.0)), {}, ["y_train", "finite"]),
        (parts(TABLE, CLASSES + 0.5), {"task": "classes"}, ["float64", "integers, or texts"]),
        (parts(TABLE, np.stack([CLASSES, CLASSES + 1], 1)), {}, ["other than 0 and 1"]),
        (
            parts(BEHIND, CLASSES, client_train=["a", "b"] * 3, client_test=["a", "b"]),
            {},
            ["sample 1 of x_test is sample 1 of x_train", "'b'"],
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused_in_one_line(tmp_path, arrays, settings, words):
    text = refusal(tmp_path, arrays, **settings)
    assert [word for word in words if word not in text] == []


def test_a_channel_that_is_constant_up_to_rounding_is_no_loss(tmp_path):
    signals = SIGNALS * 1.0
    signals[:, 1] = [0.1 + 0.2, 0.3, 0.3, 0.3, 0.3]
    assert read(tmp_path, parts(signals, CLASSES)).x_train.dtype == np.float32


def test_equal_samples_of_different_clients_and_equal_rows_of_tables_are_no_overlap(tmp_path):
    read(tmp_path, parts(BEHIND, CLASSES, client_train=["a", "b"] * 3, client_test=["a", "c"]))
    same = np.ones((8, 3))
    read(tmp_path, parts(same, CLASSES, client_train=["a"] * 6, client_test=["a"] * 2))


def test_targets_are_checked_against_a_given_objective(tmp_path):
    arrays = parts(TABLE, np.array(["b", "c"])[CLASSES])
    found = dataset_of(arrays, tmp_path, "table", Classes(3, ("a", "b", "c")))
    assert found.y_train.tolist() == [1, 2, 1, 2, 1, 2]  # a site may lack a class
    with pytest.raises(DataError, match="'b' in sample 0, allowed: x, y"):
        dataset_of(arrays, tmp_path, "table", Classes(2, ("x", "y")))
