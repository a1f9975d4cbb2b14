"""Collaboration as few rows as there are, and its files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kindred.engine.collaboration import Collaboration
from kindred.server_app.report.collaboration import read_collaboration, write_collaboration

CLIENTS = [0, 1, 2]


def test_a_mean_of_all_is_one_row() -> None:
    found = Collaboration.of_all(CLIENTS, {0: 10, 2: 30, 7: 5})  # client 7 is not connected
    assert found.rows.tolist() == [[0.25, 0, 0.75]]
    assert found.matrix().tolist() == [[0.25, 0, 0.75]] * 3


def test_without_anybody_s_model_each_client_has_its_own() -> None:
    for found in (
        Collaboration.of_all(CLIENTS, {}),
        Collaboration.of_all(CLIENTS, {7: 5}),
        Collaboration.alone(CLIENTS),
    ):
        assert found.matrix().tolist() == np.eye(3).tolist()


def test_clients_of_a_cluster_share_a_row() -> None:
    found = Collaboration.by_row(CLIENTS, {"a": {0: 1, 1: 3}, "b": {}}, {0: "a", 1: "b"})
    assert found.matrix().tolist() == [[0.25, 0.75, 0], [0, 1, 0], [0, 0, 1]]  # b is empty, and client 2 has no row
    assert len(found.rows) == 2


def test_a_share_of_the_own_model_is_added_to_the_row() -> None:
    found = Collaboration(CLIENTS, np.array([[0.5, 0.5, 0]]), np.zeros(3, int), np.array([0, 0.5, 1]))
    assert found.matrix().tolist() == [[0.5, 0.5, 0], [0.25, 0.75, 0], [0, 0, 1]]


@given(st.integers(0, 6), st.integers(0, 3), st.integers(0, 2**16))
def test_rows_sum_to_one(m, k, seed) -> None:
    rng = np.random.default_rng(seed)
    rows = {name: {client: float(rng.integers(0, 3)) for client in range(m + 1)} for name in range(k)}
    row_of = {client: int(rng.integers(-1, k)) if k else -1 for client in range(m)}
    matrix = Collaboration.by_row(range(m), rows, row_of).matrix()
    assert matrix.shape == (m, m) and matrix.sum(axis=1) == pytest.approx(np.ones(m))


def test_a_file_holds_the_rows_alone(tmp_path) -> None:
    m = 10_000
    found = Collaboration.of_all(range(m), dict.fromkeys(range(m), 2.0))
    write_collaboration(tmp_path, 3, found)
    (path,) = tmp_path.iterdir()
    assert path.name == "round-0003.npz" and path.stat().st_size < 21 * m
    read = read_collaboration(path)
    assert read is not None and read.clients == list(range(m))
    assert read.rows.tolist() == [[np.float32(1 / m)] * m]


def test_a_file_of_an_earlier_version_is_read(tmp_path) -> None:
    weights = np.array([[0.5, 0.5], [0.25, 0.75]], np.float32)
    np.savez_compressed(tmp_path / "round-0001.npz", clients=np.arange(2), weights=weights)
    read = read_collaboration(tmp_path / "round-0001.npz")
    assert read is not None and read.matrix().tolist() == weights.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"which": np.array([0, 1])},
        {"which": np.array([-1, 0])},
        {"own": np.zeros(3)},
        {"rows": np.zeros((1, 3))},
        {"rows": np.zeros(2)},
    ],
)
def test_a_file_that_does_not_fit_together_is_damaged(tmp_path, change) -> None:
    content = {"clients": np.arange(2), "rows": np.ones((1, 2)), "which": np.zeros(2, int), "own": np.zeros(2)}
    np.savez(tmp_path / "round-0001.npz", **(content | change))
    assert read_collaboration(tmp_path / "round-0001.npz") is None
