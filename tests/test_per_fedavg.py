"""First-order Per-FedAvg: its steps on small numbers that can be checked by hand, and rounds with real ClientApps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from kindred import FedAvg, FedAvgFT, InlineGrid, PerFedAvg, Site, make_client_app
from kindred.baselines.per_fedavg import meta_step
from kindred.client.training import Gradients, get_arrays, mean_gradient, set_arrays
from kindred.messages import read_record, seed_for, to_record

from .scores import evaluate
from .test_client import CLIENTS, SETTINGS, app, load_site, network
from .test_conformance import everything, values

# --- The mathematics ----------------------------------------------------------------------------------
# Weights u and -u of two classes: on a sample x = 1 the gradient in u is p - 1 for class 0 and p for class 1,
# p = 1 / (1 + e^(-2u)).


def two_weights() -> torch.nn.Module:
    model = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def probability(u: float) -> float:
    return 1 / (1 + math.exp(-2 * u))


def sample(label: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(1, 1), torch.tensor([label])


def test_a_step_by_hand() -> None:
    model = two_weights()
    weights = [model.weight.detach()]
    loss = meta_step(weights, Gradients(model), sample(0), sample(1), alpha=0.2, beta=0.1)
    # D has class 0: from u = 0 up by 0.2 * 0.5 to 0.1; there D', of class 1, has gradient p(0.1), taken from u = 0
    p = probability(0.1)
    assert weights[0].ravel().tolist() == pytest.approx([-0.1 * p, 0.1 * p])
    assert float(loss) == pytest.approx(-math.log(1 - p))


@pytest.mark.parametrize(
    ("epochs", "batch_size", "steps"), [(0, 8, (1, 1)), (0, 1, (1, 1)), (2, 8, (2, 2)), (2, 1, (2, 6))]
)
def test_two_rounds_by_hand(epochs, batch_size, steps) -> None:
    """`steps`: of each client's adaptation; an epoch of client 1, which has 3 equal samples, is 1 batch or 3."""

    def load(context) -> Site:
        client = context.node_config["partition-id"]
        samples = torch.ones(1 + 2 * client, 1), torch.full((1 + 2 * client,), client)  # 1 and 3 samples
        return Site(two_weights, samples, samples)

    strategy = PerFedAvg(sgd_learning_rate=0.4, adapt_learning_rate=0.2, adapt_epochs=epochs)
    config = ConfigRecord({"local-epochs": 2, "batch-size": batch_size, "optimizer": "adam", "learning-rate": 7.0})
    strategy.start(InlineGrid(make_client_app(load), 2), to_record(get_arrays(two_weights())), 2, 60, config, config)

    def slope(client: int, u: float) -> float:
        return probability(u) - (1 - client)

    w = 0.0
    for _ in range(2):
        trained = []
        for client in range(2):
            y = w
            for _ in range(2 * (3 if client and batch_size == 1 else 1)):
                y -= 0.4 * slope(client, y - 0.2 * slope(client, y))
            trained.append(y)
        w = (trained[0] + 3 * trained[1]) / 4
    assert strategy.global_arrays()["weight"].numpy().ravel() == pytest.approx([w, -w])
    for client, model in strategy.client_models().items():
        adapted = w
        for _ in range(steps[client]):
            adapted -= 0.2 * slope(client, adapted)
        assert model["weight"].numpy().ravel() == pytest.approx([adapted, -adapted])


# --- Rounds -------------------------------------------------------------------------------------------


def run(strategy, rounds: int = 3, **settings):
    config = ConfigRecord(SETTINGS | settings)
    strategy.start(InlineGrid(app, CLIENTS), to_record(get_arrays(network())), rounds, 60, config, config)
    return strategy


def per_fedavg(sgd_learning_rate: float = 0.1, adapt_learning_rate: float = 0.05, **settings) -> PerFedAvg:
    return PerFedAvg(sgd_learning_rate=sgd_learning_rate, adapt_learning_rate=adapt_learning_rate, **settings)


@pytest.mark.parametrize("how", [{}, {"local-epochs": 0, "local-steps": 5}])
def test_it_converges_to_fedavg_as_alpha_goes_to_0(how) -> None:
    mine, fedavg = run(per_fedavg(adapt_learning_rate=1e-300), **how), run(FedAvg(), **how)
    parameters = [name for name, _ in network().named_parameters()]
    for name in parameters:
        assert mine.global_arrays()[name].data == fedavg.global_arrays()[name].data
    columns = [
        [(row["client"], row["train-loss"]) for row in strategy.history.rows if row["round"] <= 3]
        for strategy in (mine, fedavg)
    ]
    assert columns[0] == columns[1]


def test_every_hyperparameter_changes_the_result() -> None:
    found = [values(run(per_fedavg(*both)).global_arrays()) for both in ((0.1, 0.05), (0.11, 0.05), (0.1, 0.06))]
    assert all(a != b for a, b in zip(found, found[1:] + found[:1]))


def test_the_epochs_of_adaptation_change_the_adapted_models_and_not_the_global_one() -> None:
    runs = [run(per_fedavg(adapt_epochs=epochs)) for epochs in (0, 1, 2)]
    assert len({tuple(values(each.global_arrays()).items()) for each in runs}) == 1
    for client in runs[0].clients():
        assert len({tuple(values(each.client_models()[client]).items()) for each in runs}) == 3


@pytest.mark.parametrize("name", ["sgd_learning_rate", "adapt_learning_rate"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_out_of_range_arguments_are_named(name, value) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*more than 0"):
        per_fedavg(**{name: value})


@pytest.mark.parametrize("value", [-1, 0.5])
def test_out_of_range_epochs_of_adaptation_are_named(value) -> None:
    with pytest.raises(ValueError, match=f"adapt_epochs is {value}, allowed: 0 to 10,000"):
        per_fedavg(adapt_epochs=value)


def test_the_global_model_is_evaluated_after_one_adaptation_step_over_all_data() -> None:
    strategy = run(per_fedavg(adapt_epochs=0))
    assert [line["personal"] for line in strategy.history.rounds] == ["tuned"] * 4  # the last one in a closing exchange
    model, grid = network(), InlineGrid(app, CLIENTS)
    closing = {row["client"]: row for row in strategy.history.rows if row["round"] == 4}
    for client, record in strategy.client_models().items():
        site = load_site(grid._contexts[1001 + client])
        set_arrays(model, read_record(strategy.global_arrays()))
        gradient, received = mean_gradient(model, *site.train), read_record(strategy.global_arrays())
        for name in gradient:
            assert record[name].numpy() == pytest.approx(received[name] - 0.05 * gradient[name], abs=1e-7)
        set_arrays(model, read_record(record))
        accuracy, loss = evaluate(model, *site.test)
        assert (closing[client]["personal-accuracy"], closing[client]["loss"]) == (accuracy, loss)
    for row in strategy.history.rows:
        if row["round"] <= 3:
            assert row["personal-accuracy"] == row["tuned-accuracy"]
            assert row["tuned-loss"] not in (row["received-loss"], row["trained-loss"])


def test_epochs_of_adaptation_are_those_of_plain_sgd_on_the_clients_own_batches() -> None:
    strategy = run(per_fedavg(adapt_epochs=2))
    grid, batch_size = InlineGrid(app, CLIENTS), SETTINGS["batch-size"]
    closing = {row["client"]: row for row in strategy.history.rows if row["round"] == 4}
    for client, record in strategy.client_models().items():
        site = load_site(grid._contexts[1001 + client])
        model, (x, y) = network(), site.train
        set_arrays(model, read_record(strategy.global_arrays()))
        model.train()
        drawn = torch.Generator().manual_seed(seed_for(SETTINGS["seed"], client, 4, "tune"))
        for _ in range(2):
            for batch in torch.randperm(len(y), generator=drawn).split(batch_size):
                gradients = torch.autograd.grad(
                    torch.nn.functional.cross_entropy(model(x[batch]), y[batch]), list(model.parameters())
                )
                with torch.no_grad():
                    for weight, gradient in zip(model.parameters(), gradients):
                        weight -= 0.05 * gradient
        for name, weight in model.named_parameters():
            assert record[name].numpy() == pytest.approx(weight.detach().numpy(), abs=1e-6)
        set_arrays(model, read_record(record))
        assert (closing[client]["personal-accuracy"], closing[client]["loss"]) == evaluate(model, *site.test)


def test_from_the_same_model_epochs_of_adaptation_equal_fedavgs_fine_tuning_with_plain_sgd() -> None:
    mine = run(per_fedavg(adapt_epochs=3), 1, **{"optimizer": "adam", "learning-rate": 3.0})
    tuned = run(FedAvgFT(finetune_epochs=3), 1, **{"optimizer": "sgd", "learning-rate": 0.05, "momentum": 0.0})
    first, second = (
        [(row["client"], row["tuned-accuracy"], row["tuned-loss"]) for row in each.history.rows if row["round"] == 1]
        for each in (mine, tuned)
    )
    assert first == second and len(first) == CLIENTS


def test_evaluation_does_not_change_the_trained_model() -> None:
    from kindred.baselines import per_fedavg as module

    def globals_of() -> dict[str, bytes]:
        return values(run(per_fedavg()).global_arrays())

    expected = globals_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "adapt", lambda visit, model: None)
        assert globals_of() == expected


@pytest.mark.parametrize(("epochs", "adaptation"), [(0, 20), (3, 3 * 20)])
@pytest.mark.parametrize(
    ("how", "samples"),
    [
        ({"local-epochs": 2}, 2 * 20),
        ({"local-epochs": 0, "local-steps": 5}, 5 * 4),
    ],
)
def test_the_work_of_two_batches_a_step_and_of_the_adaptation_is_counted(how, samples, epochs, adaptation) -> None:
    for row in run(per_fedavg(adapt_epochs=epochs), 1, **how).history.rows:
        if row["round"] == 1:
            assert (row["samples-trained"], row["samples-predicted"]) == (2 * samples + adaptation, 0)


def test_the_two_batches_of_a_step_are_drawn_independently() -> None:
    strategy = per_fedavg()
    pairs = []
    from kindred.baselines import per_fedavg as module

    def note(weights, gradients_of, first, second, alpha, beta):
        pairs.append((first, second))
        return meta_step(weights, gradients_of, first, second, alpha, beta)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "meta_step", note)
        run(strategy, 1)
    assert len(pairs) == CLIENTS * 2 * 5  # epochs of 20 samples in batches of 4
    assert all(len(first[1]) == len(second[1]) == 4 for first, second in pairs)
    assert not any(torch.equal(first[0], second[0]) for first, second in pairs)
    epochs = [
        torch.cat([batch[0] for batch in batches]).sort(dim=0).values for batches in zip(*pairs[:5])
    ]  # both use all samples of the first client
    assert torch.equal(*epochs)


def test_client_models_are_those_last_evaluated_or_the_global_one() -> None:
    evaluated, silent = run(per_fedavg()), run(per_fedavg(fraction_evaluate=0.0))
    own = [values(model) for model in evaluated.client_models().values()]
    assert len({tuple(model.items()) for model in own}) == CLIENTS
    assert all(values(model) == values(silent.global_arrays()) for model in silent.client_models().values())
    assert values(evaluated.global_arrays()) == values(silent.global_arrays())
    assert np.isfinite(everything(evaluated)[3][0]["train-loss"])
