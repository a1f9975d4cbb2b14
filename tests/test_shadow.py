"""A model trained alone beside the federation, and the comparison that each client reports."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from safetensors.numpy import load_file

from kindred import REGISTRY, InlineGrid
from kindred.client import shadow as model_alone
from kindred.client.gain import gain_of
from kindred.client.shadow import SELECTED_ALONE
from kindred.client.state import PREDICTIONS
from kindred.client.training import CLASSES, get_arrays
from kindred.engine.simulated_state import saved_files
from kindred.messages import PERSONAL, seed_for, to_record

from . import test_client, test_selection
from .test_conformance import everything, make

CLIENTS = 4


def run(name: str, app, shadow: bool = True, rounds: int = 3, fraction: float = 1.0):
    strategy = make(name, test_client.network, test_client.PUBLIC)
    strategy.fraction_train, strategy.min_train_nodes = fraction, 1
    config = ConfigRecord(test_client.SETTINGS | {"shadow-local": shadow})
    strategy.start(InlineGrid(app, CLIENTS), to_record(get_arrays(test_client.network())), rounds, 60, config, config)
    return strategy


def last_gains(strategy) -> dict[int, dict[str, float]]:
    """Return the last comparison that each client reported."""
    found: dict[int, dict[str, float]] = {}
    for row in strategy.history.rows:
        if "gain-samples" in row:
            found[row["client"]] = {key.removeprefix("gain-"): row[key] for key in row if key.startswith("gain-")}
    return found


@pytest.mark.parametrize("with_validation", [True, False])
@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_reports_the_comparison_of_what_its_clients_keep(name, with_validation) -> None:
    strategy = run(name, test_selection.app()[1] if with_validation else test_client.app)
    reported = last_gains(strategy)
    assert sorted(reported) == list(range(CLIENTS))
    ours, alone = (saved_files(strategy.run_id, file) for file in (PREDICTIONS, SELECTED_ALONE))
    for client, gain in reported.items():
        kept = load_file(ours[client])
        scores = [
            CLASSES.sample_scores(predictions, kept["targets"])
            for predictions in (kept[PREDICTIONS], load_file(alone[client])[PREDICTIONS])
        ]
        assert gain == vars(gain_of(*scores, seed_for(7, client, "alone")))
        assert gain["federated"] == pytest.approx(strategy.history.selected_values().get(
            client, strategy.history.last_values()[client]
        ))  # fmt: skip


@pytest.mark.parametrize("name", REGISTRY)
def test_at_the_end_all_clients_report_all_metrics_and_their_comparison_though_few_trained_last(name) -> None:
    strategy = run(name, test_client.app, rounds=4, fraction=0.5)
    trained = {row["client"] for row in strategy.history.rows if row.get("samples-trained")}
    last = {row["client"]: row for row in strategy.history.rows if f"{PERSONAL}-accuracy" in row}
    assert len(trained) > 2 and sorted(last) == list(range(CLIENTS))
    kept = saved_files(strategy.run_id, PREDICTIONS)
    for client, row in last.items():
        content = load_file(kept[client])
        right = CLASSES.sample_scores(content[PREDICTIONS], content["targets"]).mean()
        assert right == pytest.approx(strategy.history.last_values()[client])
        assert any("balanced-accuracy" in key for key in row)
    gains = last_gains(strategy)
    assert trained <= gains.keys()
    for client, gain in gains.items():
        assert gain["federated"] == pytest.approx(strategy.history.last_values()[client])


@pytest.mark.parametrize("name", ["heurfedamp", "ditto", "perfed-ckt", "fedem", "kindred"])
def test_the_federation_is_the_same_with_and_without_it(name) -> None:
    def without_it(results: tuple) -> tuple:
        models, clients, weights, rows = results
        added = ("alone-", "gain-", "bytes-", "samples-")
        return (
            models,
            clients,
            weights,
            [{key: value for key, value in row.items() if not key.startswith(added)} for row in rows],
        )

    with_it, plain = (everything(run(name, test_selection.app()[1], shadow)) for shadow in (True, False))
    assert without_it(with_it) == without_it(plain)


def test_it_costs_as_much_training_again() -> None:
    rows = [run("fedavg", test_client.app, shadow).history.rounds[0]["samples-trained"] for shadow in (True, False)]
    assert rows[0] == 2 * rows[1] > 0


def test_a_client_alone_learns_what_it_would_learn_by_the_method_local() -> None:
    alone = [row["alone-accuracy"] for row in run("fedavg", test_client.app).history.rows if "alone-accuracy" in row]
    local = run("local", test_client.app, shadow=False).history.last_values()
    assert np.mean(alone[-CLIENTS:]) == pytest.approx(np.mean(list(local.values())), abs=0.15)


def test_a_model_alone_that_diverges_leaves_the_federation_unchanged(monkeypatch, caplog) -> None:
    plain = run("fedavg", test_client.app, shadow=False)
    whole = model_alone.check_finite

    def diverged(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        whole(model)

    monkeypatch.setattr(model_alone, "check_finite", diverged)
    found = run("fedavg", test_client.app)
    assert {row["status"] for row in found.history.rows} == {"ok"}
    assert "alone-accuracy" not in found.history.rows[-1] and "trains alone stays as it was" in caplog.text
    for name, array in plain.global_arrays().items():
        assert np.array_equal(array.numpy(), found.global_arrays()[name].numpy())
