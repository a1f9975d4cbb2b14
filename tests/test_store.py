"""Models as rows of one matrix, in memory or in a mapped file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from functools import partial

import numpy as np
import psutil
import pytest

from kindred import REGISTRY, Local
from kindred.client.state import default_root
from kindred.engine import model_store as store
from kindred.engine.layout import Layout
from kindred.engine.model_store import BLOCK, ClientModels, release_pages
from kindred.fedamp import cosines, squared_distances
from kindred.messages import in_order, read_record

from .grids import FaultyGrid
from .test_conformance import CLIENTS, ROUNDS, app_of, everything, initial_of, trial_settings

STORES = ("memory", "disk")
in_each_store = pytest.mark.parametrize("kept", STORES)


@pytest.fixture(autouse=True)
def own_root(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def model(number: int, size: int) -> dict[str, np.ndarray]:
    """A model with values that depend on the client, and a counter."""
    rng = np.random.default_rng(number)
    return {"w": rng.standard_normal(size).astype(np.float32), "counter": np.array(number)}


def filled(kept: str, clients: list[int], size: int) -> ClientModels:
    models = ClientModels(Layout(model(0, size)), kept)
    for client in clients:
        models.put(client, model(client, size))
    return models


def blocks_of(models: ClientModels, clients: list[int]) -> Iterator[np.ndarray]:
    return (block for _, block in models.blocks(clients))


@in_each_store
def test_stored_models_do_not_change_when_more_are_added(kept) -> None:
    models = filled(kept, [], 5)
    for count, client in enumerate((3, 0, 2, 1)):
        models.reserve(count)
        models.put(client, model(client, 5))
    models.reserve(1000)
    models.put(0, model(9, 5))
    assert list(models) == [0, 1, 2, 3] and len(models) == 4 and 7 not in models
    for client, record in models.items():
        expected = model(9 if client == 0 else client, 5)
        assert {name: array.tobytes() for name, array in read_record(record).items()} == {
            name: array.tobytes() for name, array in expected.items()
        }


@in_each_store
def test_a_row_is_changed_in_place_even_after_the_matrix_has_grown(kept) -> None:
    models = filled(kept, [1, 2], 5)
    models.row(2)[:] += 1
    assert read_record(models[2])["w"] == pytest.approx(model(2, 5)["w"] + 1)
    row = models.row(1)
    models.row(2)  # row 1 is released, and does not change
    assert row.tobytes() == model(1, 5)["w"].tobytes()


@in_each_store
def test_models_of_counters_only_can_be_stored(kept) -> None:
    models = ClientModels(Layout({"counter": np.array(0)}), kept)
    models.put(1, {"counter": np.array(7)})
    assert read_record(models[1])["counter"] == 7


@in_each_store
@pytest.mark.parametrize("clients", [[0, 1, 2], [2, 0, 3], [1]], ids=str)
def test_blocks_are_consecutive_columns_of_the_clients_rows(kept, clients, monkeypatch) -> None:
    monkeypatch.setattr(store, "AT_LEAST", 100)
    monkeypatch.setattr(store, "MAPPED_AT_ONCE", 2)
    models = filled(kept, [0, 1, 2, 3], 250)
    blocks = list(models.blocks(clients, 240))
    assert all(block.size <= 100 for _, block in blocks)
    joined = np.concatenate([block for _, block in blocks], axis=1)
    assert joined.tobytes() == np.stack([model(client, 250)["w"][:240] for client in clients]).tobytes()
    assert [columns.start for columns, _ in blocks] == [0] + [columns.stop for columns, _ in blocks[:-1]]


@pytest.mark.parametrize("size", [1, 37, BLOCK + 7])
def test_sums_and_distances_have_the_same_bits_in_memory_and_in_a_file(size) -> None:
    joined = np.random.default_rng(0).permutation(9).tolist()
    stores = [filled(kept, joined, size) for kept in STORES]
    for asked in (joined, joined[3:7], joined[:1], list(range(9)), [5, 1]):  # in row order, and in other orders
        weights = np.random.default_rng(1).random((4, len(asked)))
        found = [np.stack([row.copy() for row in models.combinations(weights, asked)]) for models in stores]
        assert found[0].tobytes() == found[1].tobytes()
        assert np.allclose(found[0], weights @ np.stack([model(client, size)["w"] for client in asked]), atol=1e-5)
        for measure in (squared_distances, cosines):
            in_memory, on_disk = (measure(partial(blocks_of, models, asked), len(asked)) for models in stores)
            assert in_memory.tobytes() == on_disk.tobytes()


@pytest.mark.parametrize("before", STORES)
@pytest.mark.parametrize("after", STORES)
def test_a_restored_store_continues_as_before(before, after) -> None:
    clients, weights = [3, 1, 2, 0], np.full((1, 4), 0.25)
    models = filled(before, clients, 50)
    state = models.state()
    assert state["clients"] == clients and state["rows"].shape == (4, 50)
    assert np.shares_memory(state["rows"], models.row(3))
    again = filled(after, [8], 50)  # its earlier content is gone
    again.restore({**state, "rows": np.array(state["rows"])})
    for each in (models, again):
        each.put(1, model(7, 50))
        each.put(9, model(9, 50))
        each.row(2)[:] *= 2
    assert list(again) == list(models) == [0, 1, 2, 3, 9]
    for client in models:
        assert {name: array.data for name, array in again[client].items()} == {
            name: array.data for name, array in models[client].items()
        }
    asked = in_order(clients)
    assert next(again.combinations(weights, asked)).tobytes() == next(models.combinations(weights, asked)).tobytes()


def test_the_file_has_no_name_and_is_freed_with_the_models(tmp_path) -> None:
    models = filled("disk", [1], 5)
    assert list(default_root().iterdir()) == [] and stat.S_IMODE(default_root().stat().st_mode) == 0o700
    file = models._file.fileno()
    assert os.fstat(file).st_nlink == 0 and os.fstat(file).st_dev == tmp_path.stat().st_dev
    del models
    with pytest.raises(OSError):
        os.fstat(file)


def test_a_full_disk_is_an_error_and_stored_models_stay(monkeypatch) -> None:
    models = filled("disk", [1, 2], 5)

    def full(*args) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match=r"100 models take 2000 bytes, .* has no room for them \(No space.*\)$"):
        models.reserve(100)
    assert read_record(models[2])["w"].tobytes() == model(2, 5)["w"].tobytes()


def test_a_file_uses_memory_only_for_the_rows_in_use() -> None:
    """64 models of 1 MB are written, read, changed and summed within a few MB."""
    size, resident = 1 << 18, psutil.Process().memory_info
    models = filled("disk", [0], size)
    models.reserve(64)
    arrays, weights, clients = model(0, size), np.full((1, 64), 1 / 64), [*range(32, 64), *range(32)]
    before = after = resident().rss
    for client in range(64):
        models.put(client, arrays)
        models.row(client)[0] += 1
        models[client]
        after = max(after, resident().rss)
    for _ in models.blocks(clients):
        after = max(after, resident().rss)
    next(models.combinations(weights, clients))
    assert max(after, resident().rss) - before < 24e6
    rows = models.state()["rows"]
    rows.sum()
    taken = resident().rss
    release_pages(rows)
    assert taken - resident().rss > 60e6


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in REGISTRY if "store" in REGISTRY[name]), ("federico", {"m_step": "gradient"})],
)
def test_a_run_gives_the_same_bits_from_a_file(name, settings) -> None:
    def fate(server_round: int, client: int) -> str:
        return "error" if (server_round + client) % 3 == 0 else "ok"

    own = trial_settings(name)
    runs = []
    for kept in STORES:
        strategy = REGISTRY[name].strategy(**{**own, **settings, "store": kept}, fraction_train=0.7)
        strategy.start(FaultyGrid(app_of(name), CLIENTS, fate), initial_of(name), ROUNDS, 60)
        runs.append(everything(strategy))
    assert runs[0] == runs[1]


def test_methods_have_the_store_setting_only_if_they_store_models() -> None:
    from kindred.engine.stored import StoredModels

    for name, method in REGISTRY.items():
        assert issubclass(method.strategy, StoredModels) == ("store" in method), name
    with pytest.raises(ValueError, match="store is 'tape', allowed: memory, disk"):
        Local(store="tape")
