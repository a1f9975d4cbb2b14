"""The dataset `text`: characters as tokens, samples of a text, and its two parts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kindred.data import DataError, load_federation
from kindred.data.sites import Sites
from kindred.data.sources import load_dataset
from kindred.data.text import LENGTH, STRIDE, frequent_characters, samples_of, tokens_of
from kindred.objectives import NextToken
from kindred.server_app.config import Config


def write(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def test_the_most_frequent_characters_are_the_tokens():
    assert frequent_characters(["abba", "cab"]) == "abc\ufffd"  # a and b three times, c once
    many = "".join(chr(0x4E00 + i) * (300 - i) for i in range(200))
    found = frequent_characters([many])
    assert len(found) == 100 and found[0] == "\u4e00" and found[98] == chr(0x4E00 + 98)


def test_an_unknown_character_is_the_last_token():
    assert tokens_of("abxé\U0001f600c", "cab\ufffd").tolist() == [1, 2, 3, 3, 3, 0]


def test_samples_are_every_tenth_and_have_the_next_character():
    text = "".join(chr(ord("a") + i % 26) for i in range(LENGTH + 1 + 2 * STRIDE))
    x, y = samples_of(text, "abcdefghijklmnopqrstuvwxyz\ufffd")
    assert x.shape == (3, LENGTH)
    assert x[:, 0].tolist() == [0, 10, 20] and y.tolist() == [(LENGTH + i) % 26 for i in (0, 10, 20)]
    assert len(samples_of(text[:LENGTH], "a\ufffd")[1]) == 0


def test_no_sample_has_characters_of_both_parts(tmp_path):
    """The first 700 characters are a and b, the last 300 c and d."""
    data = load_dataset("text", write(tmp_path, one="ab" * 350 + "cd" * 150, two="ba" * 400), test_share=0.3)
    assert data.kind == "tokens" and data.objective == NextToken(3) and data.vocabulary == 3
    assert data.characters == "ab\ufffd"  # of the parts for training alone
    one = data.clients_test == "one"
    assert set(np.unique(data.x_train)) == {0, 1} and (data.x_test[one] == 2).all() and (data.y_test[one] == 2).all()
    assert one.sum() == (300 - LENGTH - 1) // STRIDE + 1
    assert (data.clients_train == "one").sum() == (700 - LENGTH - 1) // STRIDE + 1
    assert set(data.clients_train.tolist()) == {"one", "two"}


def test_the_end_of_a_texts_training_part_is_for_validation(tmp_path):
    """Two texts of 1,000 characters: 62 samples each for training, of which the last 16 are for validation."""
    folder = write(tmp_path / "texts", one="abcde" * 200, two="edcba" * 200)
    run_config = Config(dataset="text", data_dir=folder, partition="by-client", num_clients=2, validation_share=0.25)
    federation = load_federation(run_config.run_config())
    everything = load_dataset("text", folder)
    for client, name in enumerate(("one", "two")):
        site = federation.site_data(client)
        own = everything.x_train[everything.clients_train == name]
        assert len(own) == 62
        assert np.array_equal(site.train[0], own[:46]) and np.array_equal(site.validation[0], own[46:])
    (tmp_path / "schema.json").write_text(json.dumps(federation.task.to_dict()))
    files = {"data-dir": f"{folder}/one.txt", "schema": str(tmp_path / "schema.json")}
    of_sites = Config(dataset="sites", schema="/of/the/server.json").run_config()
    site, simulated = Sites.of(of_sites, files, validation_share=0.25).site_data("one"), federation.site_data(0)
    assert np.array_equal(site.train[0], simulated.train[0])
    assert np.array_equal(site.validation[0], simulated.validation[0])


def test_the_place_of_a_sample_is_that_in_its_text(tmp_path):
    """Two texts of 200 and 300 characters, of which 100 and 150 are for training: 2 and 7 samples, and as many."""
    data = load_dataset("text", write(tmp_path, one="ab" * 100, two="ba" * 150), test_share=0.5)
    assert data.times.tolist() == [0, 1, *range(7), 2, 3, *range(7, 14)]


def test_a_bad_folder_is_refused_in_one_line(tmp_path):
    for folder, words in (
        (str(tmp_path / "nowhere"), ["does not exist", "UTF-8"]),
        (write(tmp_path / "empty"), ["no .txt files"]),
        (write(tmp_path / "short", a="a" * 150, b="b" * 20), ["up to 150 characters", "81"]),
    ):
        with pytest.raises(DataError) as refused:
            load_dataset("text", folder)
        assert "\n" not in str(refused.value) and all(word in str(refused.value) for word in words)
    (tmp_path / "empty" / "a.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match=r"a\.txt cannot be read as a text in UTF-8"):
        load_dataset("text", str(tmp_path / "empty"))
