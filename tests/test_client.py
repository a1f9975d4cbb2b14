"""The client half: a complete ClientApp from a function that loads a site."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict

from kindred import REGISTRY, InlineGrid, Site, make_client_app
from kindred.client import cuda_graphs
from kindred.client.app import introduction_of
from kindred.client.state import ClientState
from kindred.client.training import get_arrays
from kindred.client.visit import Visit
from kindred.messages import BETWEEN, RECEIVED, to_record
from kindred.objectives import Number

from .scores import evaluate
from .test_conformance import everything, make

CLIENTS = 4
SETTINGS = {"local-epochs": 2, "batch-size": 4, "optimizer": "sgd", "learning-rate": 0.1, "seed": 7, "device": "cpu"}


def network() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        )


PUBLIC = torch.randn(12, 3, generator=torch.Generator().manual_seed(99))
loaded: list[int] = []


def load_site(context) -> Site:
    """Two classes by the sign of the first number; odd clients swap the labels."""
    client = context.node_config["partition-id"]
    loaded.append(client)
    rng = torch.Generator().manual_seed(client)
    x = torch.randn(60, 3, generator=rng)
    y = ((x[:, 0] > 0).long() + client) % 2
    return Site(model=network, train=(x[:20], y[:20]), test=(x[20:], y[20:]), public=PUBLIC)


app = make_client_app(load_site)


def run(name: str, rounds: int = 3, **settings):
    config = ConfigRecord(SETTINGS | settings)
    server = {"device": config["device"]} if REGISTRY[name].distils else {}
    strategy = make(name, network, PUBLIC, **server)
    initial = to_record(get_arrays(network()))
    strategy.start(InlineGrid(app, CLIENTS, {"run": name}), initial, rounds, 60, config, config)
    return strategy


X, Y = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"model": torch.nn.Linear(4, 2)}, "model is 'Linear', allowed: a function that returns a new torch.nn.Module"),
        ({"train": (X, Y[:5])}, "train has inputs (6, 4) and targets (5,), allowed: as many of both"),
        ({"train": [(X, Y)]}, "train is 'list', allowed: a pair of tensors: inputs (n, ...) and targets (n, ...)"),
        ({"train": (X.numpy(), Y)}, "train is ['ndarray', 'Tensor'], allowed: a pair of tensors"),
        ({"test": (X, Y.int())}, "test has classes of torch.int32, allowed: torch.int64"),
        ({"test": (X[:, :3], Y)}, "test has inputs of shape (3,), allowed: (4,), as train has"),
        ({"validation": (X, Y[0])}, "validation has inputs (6, 4) and targets (), allowed: as many of both"),
    ],
)
def test_a_site_s_data_are_checked_when_it_is_made(parts, says) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Site(**{"model": lambda: torch.nn.Linear(4, 2), "train": (X, Y), "test": (X, Y), **parts})


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (None, "ValueError: what load_site returned is None, allowed: a Site"),
        ({"test": (X, Y + 2)}, "ValueError: test: labels go from 2 to 2, its network has 2 classes"),
        ({"validation": (X, Y - 1)}, "ValueError: validation: labels go from -1 to -1, its network has 2 classes"),
        (
            {"test": (X.clone().index_fill_(0, torch.tensor(3), torch.nan), Y)},
            "ValueError: test has inputs that are not finite: the first is in sample 3",
        ),
        (
            {"train": (X, torch.tensor([1.0, 2, torch.inf, 0, 0, 0])), "test": (X, X[:, 0]), "objective": Number()},
            "ValueError: train has targets that are not finite: the first is in sample 2",
        ),
    ],
)
def test_what_is_wrong_with_a_site_is_in_its_introduction(parts, problem) -> None:
    def load_site(context: Context) -> Site | None:
        given = {"model": lambda: torch.nn.Linear(4, 2), "train": (X, Y), "test": (X, Y)}
        return None if parts is None else Site(**(given | parts))

    context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={"about": problem})
    assert introduction_of(load_site, context)["problem"] == problem


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_trains_with_the_same_client_app(name) -> None:
    strategy = run(name)
    assert strategy.clients() == list(range(CLIENTS))  # partition-ids, received by the query
    assert len(strategy.client_models()) == (0 if strategy.model_stays else CLIENTS)
    rows = [row for row in strategy.history.rows if 1 <= row["round"] <= 3]
    assert len(rows) == 3 * CLIENTS and all(row["status"] == "ok" for row in rows)
    for row in rows:
        assert row["num-examples"] == 20 and row["num-test-examples"] == 40
        assert row["personal-accuracy"] == row[f"{strategy.personal}-accuracy"]
        assert np.isfinite(row["train-loss"])
    if REGISTRY[name].models_travel:
        assert all(0 <= row["received-accuracy"] <= 1 for row in rows)


@pytest.mark.parametrize("name", REGISTRY)
def test_one_seed_gives_the_same_bits_twice_and_another_seed_differs(name) -> None:
    first, again, other = (everything(run(name, seed=seed)) for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.gpu
@pytest.mark.parametrize("pays", [1, float("inf")], ids=["with graphs", "without graphs"])
@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_computes_nearly_the_same_on_a_gpu(name, pays, monkeypatch) -> None:
    monkeypatch.setattr(cuda_graphs, "PAYS", pays)
    models, clients, weights, rows = everything(run(name))
    models_there, clients_there, weights_there, rows_there = everything(run(name, device="cuda"))
    assert models_there.keys() == models.keys() and clients_there == clients
    for client, arrays in models.items():
        for key, data in arrays.items():
            near(*(np.load(io.BytesIO(each)) for each in (models_there[client][key], data)), f"{client} {key}")
    near(*(np.frombuffer(each) for each in (weights_there, weights)), "collaboration")
    assert [row["status"] for row in rows_there] == [row["status"] for row in rows]
    for key in ("train-loss", "personal-loss"):
        near(*([row.get(key) for row in each] for each in (rows_there, rows)), key)


def near(found, expected, what: str) -> None:
    np.testing.assert_allclose(np.asarray(found, float), np.asarray(expected, float), 1e-2, 2e-2, err_msg=what)


# Before a client has trained it predicts with the initial model, except with these methods: the client tunes
# that, or uses several models.
OTHER_STARTS = ("fedavg-ft", "fedprox-ft", "per-fedavg", "hypcluster", "fedem")


@pytest.mark.parametrize("name", REGISTRY)
def test_a_client_that_has_not_trained_is_evaluated_with_the_model_that_it_starts_from(name) -> None:
    strategy = make(name, network, PUBLIC, fraction_train=0.5, seed=1)
    config = ConfigRecord(SETTINGS)
    strategy.start(InlineGrid(app, CLIENTS), to_record(get_arrays(network())), 1, 60, config, config)
    rows = {(row["round"], row["client"]): row for row in strategy.history.rows}
    assert all(row["status"] == "ok" for row in rows.values())
    drawn = {client for number, client in rows if number == 1}
    assert len(drawn) == 2
    differs = []
    for client in range(CLIENTS):
        loss = evaluate(network(), *load_site(SimpleNamespace(node_config={"partition-id": client})).test)[1]
        row = rows[0, client]
        assert 0 <= row["personal-accuracy"] <= 1 and np.isfinite(row["personal-loss"])
        differs.append(row["personal-loss"] != pytest.approx(loss, rel=1e-5))
        if client in drawn and strategy.personal in (RECEIVED, BETWEEN):
            assert rows[1, client]["personal-loss"] == row["personal-loss"]  # the first model that it receives
        if client not in drawn:
            assert 0 <= rows[2, client]["personal-accuracy"] <= 1  # it is evaluated again after the last round
    assert any(differs) == (name in OTHER_STARTS)


def test_a_site_is_loaded_once_in_each_run() -> None:
    for _ in range(2):
        loaded.clear()
        run("local", rounds=4, seed=99)
        assert loaded == list(range(CLIENTS))


def test_clients_with_equal_node_configs_have_their_own_data() -> None:
    def load(context) -> Site:
        samples = torch.zeros(context.node_id - 1000, 3), torch.zeros(context.node_id - 1000, dtype=torch.int64)
        return Site(plain, samples, samples)

    def plain() -> torch.nn.Module:
        return torch.nn.Linear(3, 2)

    strategy = make("local")
    grid = InlineGrid(make_client_app(load), 3, node_configs=[{}, {}, {}])
    strategy.start(grid, to_record(get_arrays(plain())), 1, 60)
    assert [row["num-examples"] for row in strategy.history.rows if row["round"] == 1] == [1, 2, 3]


def test_a_new_run_loads_the_sites_and_makes_their_network_anew() -> None:
    width = 3

    def resized() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, width), torch.nn.Linear(width, 2))

    def load(context) -> Site:
        x = torch.ones(width, 2, 4)
        return Site(resized, (x, torch.zeros(width, dtype=torch.int64)), (x, torch.zeros(width, dtype=torch.int64)))

    client_app = make_client_app(load)
    for width in (3, 5):
        strategy = make("local")
        strategy.start(InlineGrid(client_app, 2), to_record(get_arrays(resized())), 1, 60)
        assert {row["num-examples"] for row in strategy.history.rows if row["round"] == 1} == {width}
        assert {row["status"] for row in strategy.history.rows} == {"ok"}


@pytest.mark.parametrize(
    ("arguments", "samples"),
    [
        ({}, 2 * 20),  # the message's epochs
        ({"steps": 1}, 4),
        ({"steps": 3, "batch_size": 5}, 15),
        ({"epochs": 3}, 3 * 20),
    ],
)
def test_a_method_s_epochs_and_steps_replace_the_message_s(arguments, samples, tmp_path) -> None:
    trained = []
    site = load_site(SimpleNamespace(node_config={"partition-id": 0}))
    visit = Visit(0, site, SETTINGS, {}, torch.device("cpu"), ClientState(1, 0, tmp_path), {})
    module = network()
    module.register_forward_hook(lambda _, inputs, __: trained.append(len(inputs[0])))
    visit.train(module, **arguments)
    assert sum(trained) == samples == visit.compute["samples-trained"]


def test_the_received_model_is_the_one_trained_in_the_last_round() -> None:
    rows = {(row["round"], row["client"]): row for row in run("local").history.rows}
    for client in range(CLIENTS):
        assert rows[2, client]["received-accuracy"] == rows[1, client]["trained-accuracy"]
        assert rows[3, client]["received-loss"] == pytest.approx(rows[2, client]["trained-loss"])


def test_fine_tuned_models_reach_the_server_and_differ_between_clients() -> None:
    strategy = run("fedavg-ft")
    models = [model["3.weight"].numpy() for model in strategy.client_models().values()]
    assert not np.array_equal(models[0], models[1])
    closing = [row for row in strategy.history.rows if row["round"] == 4]
    plain = {row["client"]: row["personal-accuracy"] for row in run("fedavg").history.rows if row["round"] == 4}
    tuned = {row["client"]: row["personal-accuracy"] for row in closing}
    # Clients disagree on the labels: tuning must help where one global model cannot.
    assert np.mean(list(tuned.values())) > np.mean(list(plain.values())) + 0.1


def test_dropout_is_seeded() -> None:
    def with_dropout() -> torch.nn.Module:
        return torch.nn.Sequential(network(), torch.nn.Dropout(0.5))

    def load(context) -> Site:
        site = load_site(context)
        return Site(with_dropout, site.train, site.test)

    def models() -> list[bytes]:
        strategy = make("local")
        grid = InlineGrid(make_client_app(load), CLIENTS)
        strategy.start(grid, to_record(get_arrays(with_dropout())), 2, 60)
        return [array.data for record in strategy.client_models().values() for array in record.values()]

    before = torch.random.get_rng_state()
    assert models() == models()
    assert torch.equal(before, torch.random.get_rng_state())


def test_zero_epochs_of_fine_tuning_give_the_global_model() -> None:
    from kindred import FedAvgFT

    strategy = FedAvgFT(finetune_epochs=0)
    result = strategy.start(InlineGrid(app, CLIENTS), to_record(get_arrays(network())), 2, 60)
    for model in strategy.client_models().values():
        assert {k: v.data for k, v in model.items()} == {k: v.data for k, v in result.arrays.items()}


def test_a_site_that_cannot_be_loaded_is_reported_by_name_and_delays_nobody() -> None:
    def broken(context) -> Site:
        if context.node_config["partition-id"] == 2:
            raise FileNotFoundError("no folder /data/site")
        return load_site(context)

    strategy = make("heurfedamp")
    strategy.start(InlineGrid(make_client_app(broken), CLIENTS), to_record(get_arrays(network())), 1, 60)
    assert strategy.history.left_out == {2: "it cannot introduce itself: FileNotFoundError: no folder /data/site"}
    assert {row["client"]: row["status"] for row in strategy.history.rows} == {
        client: "ok" for client in range(CLIENTS) if client != 2
    }


def test_a_site_that_can_be_loaded_later_takes_part_from_then_on() -> None:
    attempts = []

    def slow(context) -> Site:
        if context.node_config["partition-id"] == 2 and len(attempts) < 2:
            attempts.append(context)
            raise FileNotFoundError("no folder /data/site")
        return load_site(context)

    strategy = make("heurfedamp")
    strategy.start(InlineGrid(make_client_app(slow), CLIENTS), to_record(get_arrays(network())), 4, 60)
    assert strategy.history.left_out == {}
    assert [row["round"] for row in strategy.history.rows if row["client"] == 2] == [3, 4]
