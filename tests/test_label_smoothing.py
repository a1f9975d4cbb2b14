"""The setting label-smoothing: the same for all training and a method's own steps, and none in evaluations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from kindred import APFL, FedAvg, FedAvgFT, InlineGrid, PersonalizedStrategy, Site
from kindred.client.state import ClientState
from kindred.client.visit import Visit
from kindred.objectives import Labels, Number
from kindred.server_app.config import Config, ConfigError
from kindred.settings import LABEL_SMOOTHING, TRAINING

from .two_weights import RATE, SETTINGS, Client, TwoWeights, app_of, model, probabilities, weights_of

SMOOTHING = 0.2
W = np.array([0.3, -0.1])
ONE = Client(2.0, 0, smoothing=SMOOTHING)  # its class has target 0.9, the other one 0.1
GRADIENT = 2.0 * (probabilities(W, 2.0) - [0.9, 0.1])


def visit_of(folder, site: Site | None = None, smoothing: float = SMOOTHING) -> Visit:
    config = SETTINGS | {"label-smoothing": smoothing}
    return Visit(0, site or ONE.site(), config, {}, torch.device("cpu"), ClientState(1, 0, folder), {})


def at(w: np.ndarray) -> TwoWeights:
    found = TwoWeights()
    found.weight.data = torch.tensor(w, dtype=torch.float32)
    return found


def run(strategy: PersonalizedStrategy, clients: list[Client], rounds: int = 1) -> PersonalizedStrategy:
    settings = ConfigRecord(SETTINGS | {"label-smoothing": SMOOTHING})
    strategy.start(InlineGrid(app_of(clients), len(clients)), model(W), rounds, 60, settings, settings)
    return strategy


def test_it_is_a_setting_of_local_training_that_is_sent_to_clients() -> None:
    assert LABEL_SMOOTHING in TRAINING and LABEL_SMOOTHING.key == "label-smoothing"
    assert Config().label_smoothing == 0.0


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
def test_a_value_out_of_range_is_refused_with_its_name(value, tmp_path) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_run_config({"label-smoothing": value})
    assert str(caught.value) == f"label-smoothing is {value}, allowed: 0 to 1 (float)"
    visit = visit_of(tmp_path, smoothing=value)
    for work in (visit.train, visit.gradient, lambda network: visit.differentiating(network).__enter__()):
        with pytest.raises(ValueError, match=f"^label-smoothing is {value}, allowed: 0 to 1$"):
            work(at(W))


def test_a_step_of_training_by_hand(tmp_path) -> None:
    network = at(W)
    loss = visit_of(tmp_path).train(network)
    assert network.weight.detach().numpy() == pytest.approx(W - RATE * GRADIENT, abs=1e-6)
    assert loss == pytest.approx(-0.9 * np.log(probabilities(W, 2.0)[0]) - 0.1 * np.log(probabilities(W, 2.0)[1]))


def test_an_argument_replaces_the_setting(tmp_path) -> None:
    network = at(W)
    visit_of(tmp_path).train(network, label_smoothing=0.0)
    assert network.weight.detach().numpy() == pytest.approx(Client(2.0, 0).step(W), abs=1e-6)


def test_the_gradients_of_a_methods_own_steps_by_hand(tmp_path) -> None:
    visit, network = visit_of(tmp_path), at(W)
    with visit.differentiating(network) as gradients_of:
        _, (gradient,) = gradients_of(*visit.site.train)
    assert gradient.numpy() == pytest.approx(GRADIENT, abs=1e-6)
    assert visit.gradient(network)["weight"] == pytest.approx(GRADIENT, abs=1e-6)


def test_losses_that_clients_report_have_no_smoothed_labels(tmp_path) -> None:
    visit, network = visit_of(tmp_path), at(W)
    assert visit.loss(network) == pytest.approx(ONE.loss(W))
    assert visit.evaluation("received", network)["received-loss"] == pytest.approx(ONE.loss(W))
    assert visit.separate_evaluation(network)["loss"] == pytest.approx(ONE.loss(W))


def test_it_has_no_effect_on_numbers(tmp_path) -> None:
    def trained(smoothing: float) -> tuple:
        objective = Number(1, mean=0.0, deviation=1.0)
        samples = torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, -1.0])
        visit = visit_of(
            tmp_path, Site(lambda: torch.nn.Linear(1, 1), samples, samples, objective=objective), smoothing
        )
        network = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(network.weight), torch.nn.init.zeros_(network.bias)
        return visit.train(network), *(float(weight.detach()) for weight in network.parameters())

    assert trained(0.7) == trained(0.0)


def test_a_round_of_fedavg_by_hand() -> None:
    clients = [ONE, Client(-1.0, 1, 3, smoothing=SMOOTHING)]
    strategy = run(FedAvg(), clients)
    expected = (clients[0].step(W) + 3 * clients[1].step(W)) / 4
    assert weights_of(strategy.global_arrays()) == pytest.approx(expected, abs=1e-6)
    losses = {row["client"]: row["received-loss"] for row in strategy.history.rows if row["round"] == 1}
    assert list(losses.values()) == pytest.approx([client.loss(W) for client in clients])
    closing = [row["loss"] for row in strategy.history.rows if row["round"] == 2]
    assert closing == pytest.approx([client.loss(expected) for client in clients])


def test_fine_tuning_and_steps_of_a_method_train_on_smoothed_labels() -> None:
    clients = [ONE, ONE]
    tuned = run(FedAvgFT(finetune_epochs=1), clients)
    twice = ONE.step(ONE.step(W))
    assert [weights_of(each) for each in tuned.client_models().values()] == [pytest.approx(twice, abs=1e-6)] * 2
    shared = run(APFL(sgd_learning_rate=RATE), clients)
    assert weights_of(shared.global_arrays()) == pytest.approx(ONE.step(W), abs=1e-6)


def test_labels_are_smoothed_to_true_and_false_by_hand() -> None:
    outputs, targets = torch.tensor([[np.log(3.0)]]), torch.tensor([[1.0]])  # probability 3/4
    loss = Labels(1).loss(outputs, targets, label_smoothing=0.2)
    assert float(loss) == pytest.approx(-0.9 * np.log(3 / 4) - 0.1 * np.log(1 / 4))
