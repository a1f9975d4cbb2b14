"""Every method beside attackers: the run ends, honest results are finite, and refused replies are named."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict

from benchmarks import attacks
from benchmarks.attackers import ATTACKS, Attack, attacked, attacked_app, with_shuffled_labels
from benchmarks.attacks import Case, Runs, attackers_of, table
from kindred import REGISTRY, InlineGrid, PersonalizedStrategy, Site
from kindred.client.training import get_arrays
from kindred.engine.admission import REFUSED, norm
from kindred.messages import to_record, with_prefix
from kindred.parts.aggregation import AGGREGATION

from .client_apps import LITTLE_TRAINING, small, small_site
from .test_conformance import make

CLIENTS, ROUNDS, ATTACKERS = 5, 2, [1, 3]
HONEST = [0, 2, 4]
PUBLIC = torch.rand(6, 2, generator=torch.Generator().manual_seed(0))
SETTINGS = ConfigRecord({**LITTLE_TRAINING, "local-steps": 2, "device": "cpu"})


def load(context: Context) -> Site:
    return replace(small_site(int(context.node_config["partition-id"])), public=PUBLIC)


def run(name: str, attack: Attack, **settings) -> PersonalizedStrategy:
    strategy = make(name, network=small, images=PUBLIC, **settings)
    initial = to_record(get_arrays(small())) if REGISTRY[name].models_travel else to_record({})
    grid = InlineGrid(attacked_app(load, attack, ATTACKERS), CLIENTS, {"of": name})
    strategy.start(grid, initial, ROUNDS, train_config=SETTINGS, evaluate_config=SETTINGS)
    return strategy


def statuses(strategy: PersonalizedStrategy, clients: list[int]) -> set[str]:
    return {row["status"] for row in strategy.history.rows if row["client"] in clients}


def check_results(strategy: PersonalizedStrategy) -> None:
    """Check that the run has all its rounds, and finite results of every honest client."""
    assert {line["round"] for line in strategy.history.rounds} >= {1, ROUNDS}
    for client in HONEST:
        rows = [row for row in strategy.history.rows if row["client"] == client]
        found = [row["personal-accuracy"] for row in rows if "personal-accuracy" in row]
        assert found and np.isfinite(found).all()
        if client in strategy.client_models():
            arrays = strategy.client_models()[client]
            assert all(np.isfinite(array.numpy()).all() for array in arrays.values())
    _, weights = strategy.collaboration()
    assert np.isfinite(weights).all()


# --- Every method -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["noise", "labels", "free rider", "flip and claim"])
@pytest.mark.parametrize("name", REGISTRY)
def test_a_run_with_attackers_ends_with_finite_results_and_no_honest_client_is_refused(name, attack) -> None:
    strategy = run(name, ATTACKS[attack])
    check_results(strategy)
    assert statuses(strategy, HONEST) == {"ok"}
    assert all(status == "ok" or status.startswith(REFUSED) for status in statuses(strategy, ATTACKERS))
    claimed = {row.get("num-examples") for row in strategy.history.rows if row["client"] in ATTACKERS}
    assert not ATTACKS[attack].claims or ATTACKS[attack].claims in claimed  # it is in the history


@pytest.mark.parametrize("name", REGISTRY)
def test_a_run_with_huge_updates_ends_and_names_what_it_refuses(name) -> None:
    """Huge models spoil those that honest clients train. A median prevents this unless attackers have the majority.

    With HypCluster they may have the majority of those that train one of the models.
    """
    strategy = run(name, ATTACKS["huge"])
    check_results(strategy)
    found = statuses(strategy, range(CLIENTS))
    assert all(status == "ok" or status.startswith(f"{REFUSED}array ") for status in found)
    if AGGREGATION.name in REGISTRY[name] and name != "hypcluster":
        strategy = run(name, ATTACKS["huge"], aggregation="median")
        check_results(strategy)
        assert statuses(strategy, HONEST) == {"ok"}


# --- The attacks --------------------------------------------------------------------------------------


def altered(attack: str, method: str, received: dict, sent: dict) -> dict:
    """Return what an attacker sends, rounded, as lists."""
    found = attacked(ATTACKS[attack], method, received, sent, np.random.default_rng(0))
    assert {name: array.dtype for name, array in found.items()} == {name: array.dtype for name, array in sent.items()}
    return {name: array.round(3).tolist() for name, array in found.items()}


def model(*numbers: float) -> dict[str, np.ndarray]:
    return {"w": np.array(numbers, np.float32), "count": np.array(7)}


def test_attacks_by_hand() -> None:
    received, sent = model(1, 1), model(2, 0)
    assert altered("flip x10", "fedavg", received, sent) == {"w": [-9, 11], "count": 7}
    assert altered("free rider", "fedavg", received, sent) == {"w": [1, 1], "count": 7}
    assert altered("huge", "fedavg", received, sent)["w"] == pytest.approx([1e14, 1e14])
    noise = attacked(ATTACKS["noise"], "fedavg", received, sent, np.random.default_rng(0))
    assert norm([noise["w"] - received["w"]]) == pytest.approx(2**0.5) and noise["w"].tolist() != sent["w"].tolist()
    for attack in ("claim", "labels"):
        assert attacked(ATTACKS[attack], "fedavg", received, sent, np.random.default_rng(0)) is sent


def test_of_several_received_models_the_nearest_is_the_one_that_was_trained() -> None:
    received = {**with_prefix("everybody", model(9, 9)), **with_prefix("neighbours", model(1, 1))}
    assert altered("flip x10", "kindred", received, model(2, 0)) == {"w": [-9, 11], "count": 7}


def test_updates_that_are_changes_already_are_multiplied() -> None:
    received = {"0/w": np.ones(1, np.float32), "1/w": np.ones(1, np.float32)}
    sent = {"1/w": np.full(1, 2, np.float32), "model/w": np.full(1, 5, np.float32)}
    assert altered("flip x10", "federico", received, sent) == {"1/w": [-20], "model/w": [5]}
    received = {"w": np.ones(1, np.float32), "control/w": np.ones(1, np.float32)}
    sent = {"w": np.full(1, 2, np.float32), "control/w": np.full(1, 2, np.float32)}
    assert altered("flip x10", "scaffold", received, sent) == {"w": [-9], "control/w": [-20]}


def test_altered_probabilities_remain_probabilities() -> None:
    sent = {"logits": np.array([[0.9, 0.1]], np.float32)}
    assert altered("flip x10", "perfed-ckt", {}, sent) == {"logits": [[0, 1]]}  # 1/2 - 10 * 0.4, 1/2 + 10 * 0.4
    centroids = {"centroids": np.array([[[0.75, 0.25]], [[0.125, 0.875]]], np.float32)}
    assert altered("free rider", "perfed-ckt", centroids, sent) == {"logits": [[0.75, 0.25]]}


def test_labels_are_shuffled_at_attackers_alone_and_claims_are_made_from_the_introduction_on() -> None:
    def site(shuffled: bool, client: int) -> Site:
        context = Context(1, 1, {"partition-id": client}, RecordDict(), {})
        return (with_shuffled_labels(load, ATTACKERS) if shuffled else load)(context)

    (x, y), (x_before, y_before) = site(True, 1).train, site(False, 1).train
    assert torch.equal(x, x_before) and not torch.equal(y, y_before) and torch.equal(y.sort()[0], y_before.sort()[0])
    assert torch.equal(site(True, 0).train[1], site(False, 0).train[1])

    strategy = run("fedavg", ATTACKS["free rider"], sampling="by-size")
    assert list(strategy.roster.sizes([0, 1, 2, 3, 4])) == [10, 10**6, 30, 10**6, 50]


# --- The benchmark ------------------------------------------------------------------------------------


def test_attackers_are_evenly_spaced() -> None:
    assert [attackers_of(count) for count in (0, 1, 3)] == [[], [0], [0, 3, 6]]


def test_the_table_has_costs_of_defences_and_of_attacks_for_honest_clients(tmp_path) -> None:
    runs = Runs(tmp_path)

    def found(defence: str, attack: str, honest: float, attacker: float = 0.0) -> None:
        accuracies = {str(i): attacker if i == 0 else honest for i in range(10)}
        runs.found[Case("fedavg", defence, attack, 1 if attack else 0, 3).key] = accuracies

    found("none", "", 0.8)
    found("none", "noise", 0.5, attacker=1.0)
    found("median", "", 0.75)
    runs.found[Case("fedavg", "median", "noise", 1, 3).key] = "TooFewClients: nobody"
    lines = table(runs, ["fedavg", "kindred"], ["noise"], ["none", "median"], 1, [3]).splitlines()
    assert lines[0] == "| 1 of 10 attack | defence | nobody attacks | costs | noise |"
    assert lines[2:] == [
        "| fedavg | none | 80.0 |  | 30.0 |",
        "| fedavg | median | 75.0 | 5.0 | - |",
        "| kindred | none | - |  | - |",  # which has no median
    ]


def test_a_finished_run_is_not_repeated(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(attacks, "ROUNDS", 1)
    monkeypatch.setattr(attacks, "CLIENTS", 4)
    words = ["--methods=fedavg", "--attacks=huge", "--attackers=1", "--seeds=0", f"--output-dir={tmp_path}"]

    def printed(*more: str) -> str:
        monkeypatch.setattr("sys.argv", ["attacks", *words, *more])
        attacks.main()
        return capsys.readouterr().out

    first = printed("--defences=none")
    assert "1/2 fedavg, none, nobody x 0, seed 0: " in first and "2/2 fedavg, none, huge x 1, seed 0: " in first
    kept = json.loads((tmp_path / "attacks.json").read_text())
    assert len(kept) == 2 and all(list(found) == ["0", "1", "2", "3"] for found in kept.values())
    printed_table = first.partition("\n\n")[2]
    assert printed("--defences=none") == f"\n{printed_table}"
    other = printed("--defences=none", "--set=partition=iid")
    assert other.startswith("1/2 fedavg, none, nobody x 0, seed 0, partition iid: ") and printed_table not in other
    both = printed("--defences=none,median")
    assert both.startswith("1/2 fedavg, median, nobody x 0") and printed_table.splitlines()[2] in both


def test_settings_that_this_version_lacks_and_wrong_names_are_named(monkeypatch, capsys) -> None:
    monkeypatch.setattr(attacks, "DEFENCES", {"new": {"odd": 1}, "wrong": {"max-strikes": -1}, "none": {}})
    assert list(attacks.usable_defences(["new", "wrong", "none"])) == ["none"]
    assert capsys.readouterr().out.splitlines() == [
        "defence new is left out: this version has no setting odd",
        "defence wrong is left out: max-strikes is -1, allowed: 0 to 1,000,000 (int)",
    ]
    for words, named in [
        ("--attacks=kick", "'kick' is unknown, allowed: all, flip x10, flip x2, noise"),
        ("--methods=odd", "'odd' is unknown, allowed: all, fedamp"),
        ("--attackers=10", "'10' is no whole number, allowed: 1 to 9"),
        ("--set=seed=1", "--set has seed, allowed: any setting but strategy, seed, num-clients, num-rounds"),
        ("--set=partition=odd", "partition is 'odd', allowed"),
    ]:
        monkeypatch.setattr("sys.argv", ["attacks", words])
        with pytest.raises(SystemExit) as ended:
            attacks.main()
        assert ended.value.code == 2 and named in capsys.readouterr().err
