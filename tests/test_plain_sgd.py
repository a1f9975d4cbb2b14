"""Properties of the methods that use plain SGD, and their common parts."""

from __future__ import annotations

import math

import pytest
import torch
from flwr.app import ConfigRecord

from kindred import REGISTRY, InlineGrid
from kindred.client.sgd import MeanLoss, descend
from kindred.client.training import get_arrays
from kindred.messages import to_record
from kindred.server_app.app import make_strategy
from kindred.server_app.cli.run import given_settings
from kindred.server_app.config import OWN_DEFAULT, SETTINGS as RUN_SETTINGS, Config

from .test_client import CLIENTS, SETTINGS, app, network
from .test_conformance import make, values

METHODS = ("scaffold", "apfl", "per-fedavg")


@pytest.mark.parametrize("name", METHODS)
def test_the_optimiser_in_the_message_has_no_effect(name) -> None:
    def found(**settings) -> dict[str, bytes]:
        strategy, config = make(name), ConfigRecord(SETTINGS | settings)
        strategy.start(InlineGrid(app, CLIENTS), to_record(get_arrays(network())), 2, 60, config, config)
        return values(strategy.global_arrays())

    assert found() == found(**{"optimizer": "adam", "learning-rate": 3.0, "momentum": 0.9, "weight-decay": 0.5})
    assert found() != found(**{"batch-size": 5})


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("given", [[], ["sgd-learning-rate=0.3"], ["sgd-learning-rate=default"]])
def test_each_method_has_its_own_step_size_which_a_setting_replaces(name, given) -> None:
    own = {each.name: each.default for each in REGISTRY[name].settings}["sgd_learning_rate"]
    strategy = make_strategy(Config.from_run_config(given_settings({"strategy": name}, given)))
    expected = 0.3 if given == ["sgd-learning-rate=0.3"] else own
    strategy.begin(to_record(get_arrays(network())))
    assert strategy.sgd_learning_rate == strategy.round_config(1, 0)["sgd-learning-rate"] == expected
    assert RUN_SETTINGS["sgd-learning-rate"].default == OWN_DEFAULT != own


def test_a_step_and_a_mean_by_hand() -> None:
    weights = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    descend(weights, [torch.tensor([0.5, -1.0]), torch.tensor(2.0)], 0.5)
    assert weights[0].tolist() == [0.75, 2.5] and float(weights[1]) == 2.0
    loss = MeanLoss()
    assert math.isnan(loss.result())
    loss.add(torch.tensor(1.0), 3)
    loss.add(torch.tensor(2.0), 1)
    assert loss.result() == 1.25
