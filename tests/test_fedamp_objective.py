"""The objective G(W) of FedAMP's Eq. 1 in the history: against a plain computation, and falling over rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn

from kindred import FedAMP, InlineGrid, Site, TooFewClients, make_client_app
from kindred.client.training import get_arrays
from kindred.messages import to_record

from .client_apps import initial, plain_app
from .grids import FaultyGrid

CLIENTS = 5
SMALL_STEPS = {"sigma": 20.0, "alpha": 0.5, "lam": 0.2, "self_weight": None, "alpha_decay": 1.0}


def linear() -> nn.Module:
    """Logits of three classes, linear in two inputs: the mean loss is a convex function of the weights."""
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -1.0], [1.5, 0.25], [-0.75, 2.0]]))
        model.bias.copy_(torch.tensor([0.1, -0.2, 0.3]))
    return model


def points(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training data of a client: overlapping classes, so that no loss has its minimum at infinity."""
    generator = torch.Generator().manual_seed(client)
    y = torch.arange(6 * (client + 2)) % 3
    centres = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]).roll(client // 2, 0)
    return centres[y] + torch.randn(len(y), 2, generator=generator), y


def site(client: int) -> Site:
    x, y = points(client)
    return Site(model=linear, train=(x, y), test=(x[:3] + 5, y[:3]))  # other losses than on training data


def objective_of(strategy: FedAMP) -> float:
    """G(W), by loops over clients and pairs, from the models that the strategy has."""
    models = [{name: a.numpy().astype(float) for name, a in m.items()} for m in strategy.client_models().values()]
    losses, distances = 0.0, []
    for i, model in enumerate(models):
        x, y = (part.numpy() for part in points(i))
        logits = x @ model["weight"].T + model["bias"]
        losses += np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y])
        for other in models[:i]:
            distances.append(sum(((model[name] - other[name]) ** 2).sum() for name in model))
    sigma = np.median(distances) if strategy.sigma == "auto" else strategy.sigma
    return losses + strategy.lam * sum(1 - np.exp(-distance / sigma) for distance in distances)


def run(strategy: FedAMP, rounds: int, fate=lambda server_round, client: "ok", epochs: int = 10) -> list[float | None]:
    """Run with full gradient steps; check every round's objective, and return them all."""
    app = make_client_app(lambda context: site(context.node_config["partition-id"]))
    settings = ConfigRecord(
        {"optimizer": "sgd", "learning-rate": 0.2, "batch-size": 1000, "local-epochs": epochs, "momentum": 0.0}
    )
    found: list[float | None] = []

    def on_round(server_round: int) -> None:
        found.append(strategy.history.rounds[-1].get("objective"))
        if found[-1] is not None:
            assert found[-1] == pytest.approx(objective_of(strategy), rel=1e-5)

    strategy.start(
        FaultyGrid(app, CLIENTS, fate),
        to_record(get_arrays(linear())),
        rounds,
        train_config=settings,
        evaluate_config=settings,
        on_round=on_round,
    )
    return found


@pytest.mark.parametrize("common_start", [True, False])
def test_the_objective_falls_with_nearly_exact_local_solutions_and_a_small_step(common_start) -> None:
    strategy = FedAMP(**SMALL_STEPS, common_start=common_start, objective=True)
    found = run(strategy, 12, epochs=50)
    assert len(found) == 12 and None not in found
    assert (np.diff(found[:6]) < 0).all() and found[-1] < 0.75 * found[0]
    # Rounds minimise Eq. 1 with half of lambda: the mean of the objective and its losses.
    halves = [(line["objective"] + line["objective-losses"]) / 2 for line in strategy.history.rounds]
    assert (np.diff(halves) < 0).all()


def test_clients_that_are_absent_count_with_the_model_that_they_have() -> None:
    """Client 1 never trains, client 3 joins in round 3; in round 5 nobody answers."""

    def fate(server_round: int, client: int) -> str:
        return "error" if client == 1 or (client == 3 and server_round < 3) or server_round == 5 else "ok"

    found = run(FedAMP(**SMALL_STEPS, fraction_train=0.8, min_train_nodes=1, objective=True, max_strikes=0), 6, fate)
    assert found[4] is None and None not in found[2:4]


def test_the_objective_changes_no_model() -> None:
    runs = [FedAMP(self_weight=0.3, fraction_train=0.6, objective=objective) for objective in (True, False)]
    for strategy in runs:
        run(strategy, 4, epochs=3)
    with_it, without = ({client: dict(model) for client, model in s.client_models().items()} for s in runs)
    assert {c: {k: a.data for k, a in m.items()} for c, m in with_it.items()} == {
        c: {k: a.data for k, a in m.items()} for c, m in without.items()
    }
    assert not any("objective" in line for line in runs[1].history.rounds)
    assert any("training-data-loss" in row for row in runs[0].history.rows)


def test_an_ordinary_client_which_evaluates_on_other_data_is_excluded() -> None:
    app = plain_app()
    with pytest.raises(TooFewClients, match="its ClientApp reports no loss on training data; use that of"):
        FedAMP(objective=True).start(InlineGrid(app, CLIENTS), initial(), 2)
