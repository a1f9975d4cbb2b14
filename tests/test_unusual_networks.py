"""Unusual networks and sites: frozen parts, constants, names that a method uses, no test samples, two samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context

from kindred import REGISTRY, FedRep, HeurFedAMP, InlineGrid, PerFedAvg, Site, make_client_app
from kindred.client.training import get_arrays
from kindred.engine.layout import Layout, drawn_anew
from kindred.messages import read_record, to_record

from .test_conformance import make

CLIENTS, CLASSES = 4, 3
SETTINGS = {"local-epochs": 1, "batch-size": 8, "optimizer": "adam", "learning-rate": 0.01, "device": "cpu"}
PUBLIC = torch.randn(12, 6, generator=torch.Generator().manual_seed(99))


class FrozenBody(torch.nn.Sequential):
    def __init__(self) -> None:
        body = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)
        super().__init__(*body, torch.nn.ReLU(), torch.nn.Linear(5, CLASSES))
        for layer in body:
            layer.requires_grad_(False)


class FrozenHead(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, CLASSES).requires_grad_(False))


class EndsWithoutParameters(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(6, CLASSES), torch.nn.BatchNorm1d(CLASSES, affine=False))


class Constants(torch.nn.Module):
    """Buffers that must stay as they are, and parameters named like what Kindred keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.fold = torch.nn.Parameter(torch.randn(6, 5))
        self.losses, self.rounds, self.credit = (torch.nn.Parameter(torch.randn(5)) for _ in range(3))
        self.head = torch.nn.Linear(5, CLASSES)
        self.register_buffer("order", torch.arange(6))
        self.register_buffer("mask", torch.tensor([True, False, True, True, False]))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("num_batches_tracked", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(((x[:, self.order] @ self.fold + self.losses) * self.rounds + self.credit) * self.mask)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.between = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6)
        self.out = torch.nn.Linear(6, 6)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.between(self.embedding(x)))


def drawn(network: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return network()

    return build


def load_site(network: Callable[[], torch.nn.Module], context: Context) -> Site:
    """Client 0 has no test samples, client 1 two samples for training."""
    client = context.node_config["partition-id"]
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(client))
    y = x[:, :CLASSES].argmax(dim=1)
    train, test = (2 if client == 1 else 30), (0 if client == 0 else 10)
    return Site(drawn(network), (x[:train], y[:train]), (x[30 : 30 + test], y[30 : 30 + test]), public=PUBLIC)


def run(strategy, network: Callable[[], torch.nn.Module], rounds: int = 2, **settings):
    app = make_client_app(lambda context: load_site(network, context))
    config = ConfigRecord(SETTINGS | settings)
    strategy.start(InlineGrid(app, CLIENTS), to_record(get_arrays(drawn(network)())), rounds, 60, config, config)
    return strategy


@pytest.mark.parametrize("network", [FrozenBody, FrozenHead, EndsWithoutParameters, Constants])
@pytest.mark.parametrize("name", REGISTRY)
def test_every_client_takes_part_and_constants_stay(name, network) -> None:
    strategy = run(make(name, drawn(network), PUBLIC), network)
    rows = strategy.history.rows
    assert {(row["client"], row["status"]) for row in rows} == {(client, "ok") for client in range(CLIENTS)}
    assert not [row for row in rows if row.get("evaluate-status", "ok") != "ok"]
    assert set(strategy.history.last_values()) == set(range(1, CLIENTS))  # client 0 has no test samples
    initial = get_arrays(drawn(network)())
    for record in strategy.client_models().values():
        for key, array in read_record(record).items():
            if array.dtype.kind in "ib" and "num_batches" not in key:
                assert array.tobytes() == initial[key].tobytes()


@pytest.mark.parametrize("name", ["fedavg-ft", "fedprox-ft", "per-fedavg"])
def test_the_tuned_model_of_a_client_without_test_samples_is_its_result(name) -> None:
    strategy = run(make(name), FrozenBody)
    tuned, common = strategy.client_models(), strategy.global_arrays()
    assert all(tuned[client]["3.weight"].data != common["3.weight"].data for client in range(CLIENTS))


@pytest.mark.parametrize("name", ["fedavg-ft", "per-fedavg"])
def test_without_evaluations_a_line_says_that_there_are_no_tuned_models(name, caplog) -> None:
    caplog.set_level("WARNING", logger="flwr")
    run(make(name, fraction_evaluate=0), FrozenBody)
    assert "fraction_evaluate is 0, so that no client is asked for its tuned model" in caplog.text


def test_only_parameters_are_drawn_anew() -> None:
    arrays = get_arrays(drawn(Constants)())
    found = drawn_anew(arrays, 1, Layout(arrays).parameters)
    for name, array in arrays.items():
        same = found[name].tobytes() == array.tobytes()
        assert same == (name in ("order", "mask", "empty", "num_batches_tracked"))
        assert sorted(found[name].reshape(-1).tolist()) == sorted(array.reshape(-1).tolist())
    strategy = run(HeurFedAMP(common_start=False), Constants)
    assert all(strategy.client_models()[i]["order"].numpy().tolist() == [*range(6)] for i in range(CLIENTS))


def test_fedrep_refuses_a_parameter_in_body_and_head() -> None:
    with pytest.raises(Exception, match="embedding.weight of the network is out.weight too"):
        run(FedRep(), Tied)


def test_a_network_without_a_parameter_to_train_is_named() -> None:
    def frozen() -> torch.nn.Module:
        return FrozenBody().requires_grad_(False)

    with pytest.raises(Exception, match="the network has no parameter to train: all are frozen"):
        run(make("fedavg"), frozen)


def test_a_network_of_complex_numbers_is_refused() -> None:
    complex_numbers = ArrayRecord({"w": to_record({"w": np.zeros(2, np.complex64)})["w"]})
    with pytest.raises(ValueError, match="array 'w' of the model is of type complex64, allowed: real numbers"):
        make("fedavg").start(InlineGrid(make_client_app(lambda context: None), 2), complex_numbers, 1)


def test_weight_decay_is_no_part_of_the_adaptation() -> None:
    with_decay, without = (
        run(PerFedAvg(adapt_epochs=1), FrozenHead, **{"weight-decay": decay}).client_models() for decay in (5.0, 0.0)
    )
    assert with_decay[2]["0.weight"].data == without[2]["0.weight"].data
