"""Models selected on validation data, never on test data; runs that end when these do not improve."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from safetensors import safe_open

from kindred import REGISTRY, History, InlineGrid, Mixture, Site, make_client_app
from kindred.client.evaluation import evaluate
from kindred.client.state import BEST
from kindred.client.training import CLASSES, get_arrays, set_arrays
from kindred.engine.history import HeadlineColumns
from kindred.engine.simulated_state import saved_files
from kindred.messages import to_record
from kindred.metrics import METRICS

from . import test_client
from .test_conformance import make

CLIENTS = 4


def row(client: int, server_round: int, test: float, validation: float | None, loss: float = 1.0) -> dict:
    reported = {} if validation is None else {"validation-accuracy": validation, "validation-loss": loss}
    return {
        "round": server_round, "client": client, "status": "ok", "seconds": 0.1, "bytes-down": 1, "bytes-up": 1,
        "personal-accuracy": test, **reported,
    }  # fmt: skip


def history(*rounds: list[dict]) -> History:
    found = History()
    for number, rows in enumerate(rounds, 1):
        for each in rows:
            found.add(each)
        found.close_round(number, 1.0, "trained")
    return found


def test_the_selected_model_is_that_of_the_best_validation_value_whatever_its_test_value() -> None:
    found = history(
        [row(0, 1, 0.5, 0.6), row(1, 1, 0.4, 0.2)],
        [row(0, 2, 0.9, 0.5), row(1, 2, 0.6, 0.3)],
        [row(0, 3, 0.3, 0.7), row(1, 3, 0.8, 0.3, loss=1.5)],
    )
    assert found.selected_values() == {0: 0.3, 1: 0.6}
    last = found.rounds[-1]
    assert last["accuracy-selected"] == pytest.approx(0.45) and last["accuracy-validation"] == pytest.approx(0.5)
    assert last["accuracy-best"] == pytest.approx(0.75)  # the mean of round 2, chosen on test data
    assert [line["accuracy-selected"] for line in found.rounds] == pytest.approx([0.45, 0.55, 0.45])


def test_of_equal_values_the_lower_loss_counts_and_then_the_first() -> None:
    found = history([row(0, 1, 0.1, 0.5, 0.9)], [row(0, 2, 0.2, 0.5, 0.8)], [row(0, 3, 0.3, 0.5, 0.8)])
    assert found.selected_values() == {0: 0.2}


def test_a_client_without_validation_data_has_no_selected_model() -> None:
    found = history([row(0, 1, 0.5, None), row(1, 1, 0.25, 0.5)])
    assert found.selected_values() == {1: 0.25} and found.rounds[0]["accuracy-selected"] == 0.25
    assert "accuracy-selected" not in history([row(0, 1, 0.5, None)]).rounds[0]


@pytest.mark.parametrize(("means", "since"), [([0.5], 0), ([0.5, 0.6], 0), ([0.6, 0.5, 0.6], 2), ([0.2, 0.1, 0.3], 0)])
def test_rounds_since_the_best_mean(means, since) -> None:
    assert history(*([row(0, n, 0.5, mean)] for n, mean in enumerate(means, 1))).rounds_since_best() == since


def test_where_lower_is_better_the_lowest_is_selected() -> None:
    found = History("rmse")
    for number, (test, validation) in enumerate([(3.0, 2.0), (1.0, 4.0)], 1):
        found.add({**row(0, number, 0.0, None), "personal-rmse": test, "validation-rmse": validation,
                   "validation-loss": validation})  # fmt: skip
        found.close_round(number, 1.0, "trained")
    assert found.selected_values() == {0: 3.0} and found.rounds[-1]["rmse-best"] == 1.0
    assert HeadlineColumns.of("rmse").worst_decile == "rmse-p90"


@functools.cache
def app():
    def load_site(context) -> Site:
        client = context.node_config["partition-id"]
        rng = torch.Generator().manual_seed(client)
        x = torch.randn(60, 3, generator=rng)
        y = ((x[:, 0] > 0).long() + client) % 2
        return Site(
            test_client.network, (x[:20], y[:20]), (x[20:40], y[20:40]), test_client.PUBLIC, (x[40:], y[40:]),
        )  # fmt: skip

    return load_site, make_client_app(load_site)


def run(name: str, rounds: int = 4, **settings):
    strategy = make(name, test_client.network, test_client.PUBLIC, **settings)
    config = ConfigRecord(test_client.SETTINGS)
    grid = InlineGrid(app()[1], CLIENTS)
    strategy.start(grid, to_record(get_arrays(test_client.network())), rounds, 60, config, config)
    return strategy


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_keeps_the_model_that_is_best_on_validation_data(name) -> None:
    strategy = run(name)
    files, (load_site, _) = saved_files(strategy.run_id, BEST), app()
    selected = strategy.history.selected_values()
    assert sorted(files) == list(selected) == list(range(CLIENTS))
    for client, file in files.items():
        rows = [each for each in strategy.history.rows if each["client"] == client and "validation-accuracy" in each]
        best = max(rows, key=lambda each: (each["validation-accuracy"], -each["validation-loss"], -each["round"]))
        assert selected[client] == best["personal-accuracy"]
        site = load_site(type("Context", (), {"node_config": {"partition-id": client}}))
        for part, prefix in ((site.validation, "validation"), (site.test, "personal")):
            found = scores(file, *part)
            assert found["accuracy"] == best[f"{prefix}-accuracy"]
            assert found["loss"] == pytest.approx(best[f"{prefix}-loss"], rel=1e-4)


def scores(file, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Return the metrics of the model, or the mixture, in a file."""
    model = test_client.network()
    with safe_open(file, "numpy") as content:
        if "kind" in content.metadata():
            return CLASSES.evaluated(Mixture.load(file).predict(model, x), y.numpy())
        set_arrays(model, {key: content.get_tensor(key) for key in content.keys()})
    return evaluate(model, x, y)


def test_a_run_ends_when_the_mean_does_not_improve() -> None:
    whole = run("local", rounds=12).history
    ended = run("local", rounds=12, stop_after=2).history
    column = HeadlineColumns.of("accuracy").validation
    means = [line[column] for line in whole.rounds]
    expected = next(
        (n for n in range(1, 13) if n - 1 - int(np.argmax(means[:n])) >= 2), 12
    )  # the first round that is two after the best one so far
    # No message of the last round said so: a closing evaluation has all metrics of the same models.
    assert expected < 12 and [line["round"] for line in ended.rounds] == list(range(1, expected + 2))
    assert [line[column] for line in ended.rounds] == [*means[:expected], means[expected - 1]]
    assert {row["status"] for row in ended.rows if row["round"] == expected + 1} == {"ok"}
    assert all("personal-log-loss" in row for row in ended.rows if row["round"] == expected + 1)


def test_a_mean_over_fewer_clients_does_not_end_a_run() -> None:
    """Client 1 alone has 0.9 in round 1; with client 2, the means of rounds 2 to 4 are 0.5, 0.6 and 0.55."""
    history = History()
    row = {"status": "ok", "seconds": 1.0, "bytes-down": 1, "bytes-up": 1, "validation-loss": 1.0}
    since = []
    for number, reports in enumerate(({1: 0.9}, {1: 0.9, 2: 0.1}, {2: 0.3}, {2: 0.2}), start=1):
        for client, accuracy in reports.items():
            values = {"personal-accuracy": accuracy, "validation-accuracy": accuracy}
            history.add({**row, "round": number, "client": client, **values})
        history.close_round(number, 1.0, "trained")
        since.append(history.rounds_since_best())
    assert [line["accuracy-validation"] for line in history.rounds] == pytest.approx([0.9, 0.5, 0.6, 0.55])
    assert since == [0, 0, 0, 1]


def test_without_validation_data_no_run_ends_early() -> None:
    assert test_client.run("local", rounds=3).history.rounds_since_best() == 0
    assert METRICS["accuracy"].improves((0.5, 1.0), (float("nan"), float("nan")))
