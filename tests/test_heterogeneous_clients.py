"""Epochs drawn for each client and round, and dropped clients: the same for every method and after a resume."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
from flwr.app import ConfigRecord

from kindred import REGISTRY, Checkpoints, FedAvg, InlineGrid, Local
from kindred.client_app.app import app as client_app
from kindred.data import load_federation
from kindred.messages import records_of, seed_for
from kindred.server_app.app import prepare
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.presets import load_preset

from .client_apps import initial, plain_app
from .grids import Interrupted, interrupted
from .test_conformance import CLIENTS, app_of, initial_of, make

Epochs = dict[tuple[str, int, int], int]  # of a message: (its type, its round, the node) -> local-epochs


class Listening(InlineGrid):
    """Notes the epochs in every message, and the nodes that train in each round."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.epochs: Epochs = {}
        self.trained: dict[int, list[int]] = {}

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            for config in records_of(message.content, ConfigRecord):
                about = message.metadata
                if about.message_type == "train":
                    self.trained.setdefault(config["server-round"], []).append(about.dst_node_id)
                if "local-epochs" in config:
                    self.epochs[about.message_type, config["server-round"], about.dst_node_id] = config["local-epochs"]
        return super().push_messages(messages)


def drawn(seed: int, client: object, server_round: int, most: int) -> int:
    """The draw, independently of the strategy."""
    return int(np.random.default_rng(seed_for(seed, "local-epochs", client, server_round)).integers(1, most + 1))


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_sends_the_numbers_that_belong_to_seed_client_and_round(name) -> None:
    grid = Listening(app_of(name), CLIENTS)
    strategy = make(name, max_local_epochs=5, seed=3, fraction_train=0.5)
    config = ConfigRecord({"local-epochs": 7})
    strategy.start(grid, initial_of(name), 3, 60, config, config)
    client_of = {node: client for client, node in strategy.roster.nodes.items()}
    assert {server_round for kind, server_round, _ in grid.epochs if kind == "train"} >= {1, 2, 3}
    for (_, server_round, node), epochs in grid.epochs.items():
        assert epochs == drawn(3, client_of[node], server_round, 5)
    assert len(set(grid.epochs.values())) > 1


def test_the_same_clients_are_dropped_with_every_method_of_fedamps_figures() -> None:
    preset = load_preset("fedamp-fig6-mnist")
    for fraction, count in zip(preset.vary["fraction-train"], (9, 7, 5), strict=True):
        trained = {}
        for name in preset.strategies:
            grid = Listening(plain_app(), 10)
            make(name, fraction_train=fraction, seed=3).start(grid, initial(), 4)
            trained[name] = grid.trained
        first = trained["local"]
        assert all(each == first for each in trained.values())
        assert [len(set(nodes)) for nodes in first.values()] == [count] * 4
        assert len({tuple(nodes) for nodes in first.values()}) > 1


def test_draws_are_uniform_from_one_to_the_largest_number() -> None:
    grid = Listening(plain_app(), 200)
    FedAvg(max_local_epochs=19, fraction_evaluate=0).start(grid, initial(), 10)
    counts = Counter(grid.epochs.values())
    assert sorted(counts) == list(range(1, 20)) and sum(counts.values()) == 2000
    # 2000 / 19 is 105.3, with a standard deviation of 10.0; the mean of all draws is 10, with one of 0.12.
    assert all(60 < count < 150 for count in counts.values())
    assert np.mean(list(grid.epochs.values())) == pytest.approx(10, abs=0.5)


def test_without_a_largest_number_all_have_the_epochs_that_are_set() -> None:
    grid = Listening(plain_app(), 3)
    Local().start(grid, initial(), 2, train_config=ConfigRecord({"local-epochs": 7}))
    assert {epochs for (kind, *_), epochs in grid.epochs.items() if kind == "train"} == {7}


SETTINGS = {
    "num_clients": 3,
    "num_groups": 3,
    "num_rounds": 3,
    "local_epochs": 7,
    "max_local_epochs": 4,
    "batch_size": 20,
    "samples_per_client": 20,
    "device": "cpu",
}


def run(name: str, *cuts: int, checkpoints: Checkpoints | None = None, **more) -> list[dict]:
    """Rows of the history after a run whose process ended after each of the rounds in `cuts`."""
    config = Config(strategy=name, **SETTINGS, **more)
    federation = load_federation(config.run_config())
    for after in (*cuts, config.num_rounds):
        strategy, arrays = prepare(config, federation)
        local = ConfigRecord({"local-epochs": 7, "batch-size": 20, "device": "cpu"})
        grid = interrupted(InlineGrid(client_app, 3, config.run_config()), after if after in cuts else math.inf)
        with pytest.raises(Interrupted) if after in cuts else nullcontext():
            strategy.start(grid, arrays, config.num_rounds, 60, local, local, checkpoints=checkpoints)
    return [{key: value for key, value in row.items() if key != "seconds"} for row in strategy.history.rows]


@pytest.mark.parametrize("name", ["local", "scaffold", "apfl", "federico"])
def test_clients_train_for_the_epochs_that_are_drawn(name) -> None:
    rows = [row for row in run(name, num_neighbours=0) if row["round"] <= 3]
    models = 2 if name == "apfl" else 1  # models that a client trains
    assert len(rows) == 9
    for row in rows:
        assert row["samples-trained"] == models * 20 * drawn(0, row["client"], row["round"], 4)


def test_a_resumed_run_draws_the_same_numbers(tmp_path) -> None:
    whole = run("heurfedamp")
    assert run("heurfedamp", 1, 2, checkpoints=Checkpoints(tmp_path)) == whole
    assert len({row["samples-trained"] for row in whole}) > 1


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="max_local_epochs is -1, allowed: 0 to 10,000"):
        FedAvg(max_local_epochs=-1)
    with pytest.raises(ConfigError, match="max-local-epochs is -1, allowed: 0 to 10,000"):
        Config.from_run_config({"max-local-epochs": -1})
