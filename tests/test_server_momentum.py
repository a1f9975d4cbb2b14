"""Nesterov momentum at the server: where clients start, what is evaluated and returned, and resumed runs."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from kindred import REGISTRY, Checkpoints, FedAvg, FedAvgFT, FedProx, FedProxFT, InlineGrid
from kindred.baselines.fedavg import BETA, ahead
from kindred.messages import read_record, to_record
from kindred.server_app.config import Config, ConfigError

from .test_conformance import everything, make
from .test_newcomers import served
from .two_weights import SETTINGS, Client, app_of, model, weights_of

METHODS = ("fedavg", "fedprox", "fedavg-ft", "fedprox-ft")
W = np.array([0.3, -0.1])
TWO = [Client(2.0, 0), Client(-1.0, 1, 3)]


def test_the_point_ahead_by_hand() -> None:
    assert ahead(np.array([1.0, 2.0]), np.array([0.0, 4.0]), 0.5).tolist() == [1.5, 1.0]


def test_it_is_a_setting_of_fedavg_fedprox_and_their_fine_tuned_forms() -> None:
    assert tuple(name for name in REGISTRY.own if BETA in REGISTRY[name].settings) == METHODS


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_value_out_of_range_is_refused_with_its_name(value) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_run_config({"server-momentum": value})
    assert str(caught.value) == f"server-momentum is {value}, allowed: 0 or more, less than 1 (float)"
    for strategy in (FedAvg, FedProx, FedAvgFT, FedProxFT):
        with pytest.raises(ValueError, match=f"^server_momentum is {value}, allowed: 0 or more, less than 1$"):
            strategy(server_momentum=value)


class Recording:
    """Clients of a weight and running statistics, which send fixed numbers; the models to train are recorded."""

    def __init__(self, replies: list[float]) -> None:
        self.received: list[dict[str, float]] = []
        self.settings: list[dict] = []
        self.app = app = ClientApp()

        @app.train()
        def train(message, context):
            self.settings.append(dict(message.content["config"]))
            arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
            self.received.append({name: float(array.ravel()[0]) for name, array in arrays.items()})
            number = replies[message.content["config"]["server-round"] - 1]
            content = {"arrays": numbers(number, number), "metrics": MetricRecord({"num-examples": 1})}
            return Message(RecordDict(content), reply_to=message)


def numbers(weight: float, statistic: float):
    return to_record({"w": np.full(1, weight, np.float32), "bn.running_mean": np.full(1, statistic, np.float32)})


def recorded(strategy: FedAvg, replies: list[float]) -> Recording:
    clients = Recording(replies)
    strategy.start(InlineGrid(clients.app, 2), numbers(0.0, 0.0), len(replies))
    return clients


def test_clients_start_ahead_in_parameters_alone_and_the_global_model_stays_the_mean() -> None:
    strategy = FedAvg(server_momentum=0.5, fraction_evaluate=0)
    received = recorded(strategy, [4.0, 6.0, 5.0, 7.0]).received[::2]
    # The means are 0, 4, 6, 5, 7: starts are 0, 4 + 4 / 2, 6 + 2 / 2, 5 - 1 / 2.
    assert [each["w"] for each in received] == [0.0, 6.0, 7.0, 4.5]
    assert [each["bn.running_mean"] for each in received] == [0.0, 4.0, 6.0, 5.0]
    assert float(strategy.global_arrays()["w"].numpy()[0]) == 7.0
    assert {float(each["w"].numpy()[0]) for each in strategy.client_models().values()} == {7.0}


def test_without_momentum_messages_and_starts_are_those_of_fedavg() -> None:
    clients = recorded(FedAvg(server_momentum=0.0, fraction_evaluate=0), [4.0, 6.0, 5.0])
    assert [each["w"] for each in clients.received[::2]] == [0.0, 4.0, 6.0]
    assert all(BETA.key not in each for each in clients.settings)


def test_an_update_is_measured_from_where_the_client_started() -> None:
    strategy = FedAvg(server_momentum=0.5, fraction_evaluate=0)
    recorded(strategy, [4.0, 6.0])
    list(strategy.outgoing(3, strategy.clients()))  # from 7
    assert strategy.update_norm(strategy.clients()[0], read_record(numbers(9.0, 0.0))) == 2.0


def by_hand(rounds: int, beta: float) -> list[np.ndarray]:
    """Return the global models after each round of FedAvg, with a step of each client in a round."""
    means, start = [W], W
    for _ in range(rounds):
        means.append((TWO[0].step(start) + 3 * TWO[1].step(start)) / 4)
        start = means[-1] + beta * (means[-1] - means[-2])
    return means[1:]


@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_rounds_by_hand_evaluate_the_global_model_and_not_the_start(beta) -> None:
    strategy, settings = FedAvg(server_momentum=beta), ConfigRecord(SETTINGS)
    result = strategy.start(InlineGrid(app_of(TWO), 2), model(W), 3, 60, settings, settings)
    means = by_hand(3, beta)
    assert weights_of(result.arrays) == pytest.approx(means[-1], abs=1e-6)
    assert [line["round"] for line in strategy.history.rounds] == [1, 2, 3]  # the last model is evaluated in its round
    for server_round, mean in enumerate(means, 1):
        rows = [row for row in strategy.history.rows if row["round"] == server_round]
        assert [row["loss"] for row in rows] == pytest.approx([client.loss(mean) for client in TWO], abs=1e-6)
        assert all("received-loss" not in row and "trained-loss" in row for row in rows)


def test_clients_tune_the_global_model_and_not_the_start() -> None:
    strategy, settings = FedAvgFT(server_momentum=0.5, finetune_epochs=1), ConfigRecord(SETTINGS)
    strategy.start(InlineGrid(app_of(TWO), 2), model(W), 3, 60, settings, settings)
    mean = by_hand(3, 0.5)[-1]
    assert weights_of(strategy.global_arrays()) == pytest.approx(mean, abs=1e-6)
    for client, record in zip(TWO, strategy.client_models().values(), strict=True):
        assert weights_of(record) == pytest.approx(client.step(mean), abs=1e-6)


class Interrupted(Exception):
    """Ends a run in its third round."""


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_gives_the_same_bits(name, tmp_path) -> None:
    def run(folder, interrupt: bool = False):
        def on_round(server_round: int) -> None:
            if interrupt and server_round == 3:
                raise Interrupted

        strategy, settings = make(name, server_momentum=0.5), ConfigRecord(SETTINGS)
        grid, checkpoints = InlineGrid(app_of(TWO), 2), Checkpoints(tmp_path / folder)
        strategy.start(grid, model(W), 5, 60, settings, settings, on_round=on_round, checkpoints=checkpoints)
        return everything(strategy)

    with pytest.raises(Interrupted):
        run("cut", interrupt=True)
    assert run("cut") == run("whole")


def test_a_newcomer_receives_the_global_model(tmp_path) -> None:
    assert served(tmp_path, "fedavg", [2.0, 4.0, 9.0], rounds=2, server_momentum=0.5) == [3.0]
