"""Rules of aggregation that a minority cannot move far: by hand, against Flower's, and in every method with a mean."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from flwr.server.strategy.aggregate import aggregate_krum, aggregate_median, aggregate_trimmed_avg

from benchmarks.attackers import ATTACKS, AttackedApp
from kindred import REGISTRY, FedAvg, InlineGrid
from kindred.baselines.scaffold import SCAFFOLD
from kindred.engine.arguments import AveragedShared, Shared
from kindred.engine.strategy import PersonalizedStrategy
from kindred.messages import read_record, to_record
from kindred.parts import aggregation
from kindred.parts.aggregation import (
    AGGREGATION,
    BIWEIGHT,
    KRUM,
    MEAN,
    MEDIAN,
    MULTI_KRUM,
    TRIMMED_MEAN,
    aggregate,
    biweights,
    krum_scores,
)
from kindred.server_app.config import Config, ConfigError

from .client_apps import plain_app
from .grids import FaultyGrid, ShuffledGrid
from .test_conformance import app_of, everything, initial_of, make, run as run_method, values

RULES = (MEDIAN, TRIMMED_MEAN, KRUM, MULTI_KRUM, BIWEIGHT)
ABLE = [name for name in REGISTRY if AGGREGATION.name in REGISTRY[name]]


def filled(rule: str, rows, weights=None, lengths=()):
    """Return an aggregate of these rows, of clients 0, 1, 2, ..."""
    rows = [np.array(row, np.float32) for row in rows]
    found = aggregate(rule, len(rows[0]), np.dtype(np.float32), lambda: dict(enumerate(lengths)))
    for client, row in enumerate(rows):
        found.add(client, 1.0 if weights is None else weights[client], row.copy())
    return found


def test_the_rules_by_hand() -> None:
    models = [[1, 50], [2, -3], [3, 1], [4, 2], [100, 3]]
    assert filled(MEDIAN, models).result().tolist() == [3, 2]
    assert filled(TRIMMED_MEAN, models).result().tolist() == [3, 2]  # without the lowest and highest of five
    # Of five models one may be an attacker's: 5 - 1 - 2 = 2 neighbours count.
    chosen = filled(KRUM, [[1], [2], [3], [4], [100]])
    assert chosen.result().tolist() == [2]  # 1 + 1, as for 3, which comes later
    assert chosen.weights == {0: 0, 1: 1, 2: 0, 3: 0, 4: 0}
    assert krum_scores(np.array([9.0, 1.0, 4.0])).tolist() == [1, 4, 1]  # pairs (0, 1), (0, 2), (1, 2): one counts
    # Multi-Krum keeps all but the one that may be an attacker's.
    kept = filled(MULTI_KRUM, [[1], [2], [100], [4], [5]])
    assert kept.result().tolist() == [3]
    assert kept.weights == {0: 1, 1: 1, 2: 0, 3: 1, 4: 1}


def test_the_biweight_by_hand() -> None:
    assert biweights(np.array([0, 1, 2, 4, np.inf])).tolist() == [1, (15 / 16) ** 2, (3 / 4) ** 2, 0, 0]
    mean = filled(BIWEIGHT, [[10], [26], [1e14]], lengths=[0, 2, 4])
    assert mean.result() == pytest.approx([(10 + 9 / 16 * 26) / (25 / 16)])
    assert mean.weights == {0: 1, 1: 9 / 16, 2: 0}
    assert filled(BIWEIGHT, [[1e14], [5]], lengths=[9, 4]).result() is None
    assert filled(BIWEIGHT, [[1], [2]]).result().tolist() == [1.5]  # no median is known


@pytest.mark.parametrize("rule", [MEAN, *RULES])
def test_few_models_and_none(rule) -> None:
    assert aggregate(rule, 2, np.dtype(np.float32), dict).result() is None
    assert filled(rule, [[1, 2]]).result().tolist() == [1, 2]
    assert filled(rule, [[1, 2], [3, 4]]).result().tolist() == ([1, 2] if rule == KRUM else [2, 3])


@pytest.mark.parametrize("count", [3, 5, 10, 11])
@pytest.mark.parametrize("block", [1 << 16, 5])
def test_the_rules_are_flowers_in_blocks_of_any_size(count, block, monkeypatch) -> None:
    monkeypatch.setattr(aggregation, "BLOCK", block)
    rows = list(np.random.default_rng(count).normal(size=(count, 17)).astype(np.float32))
    models = [([row], 1) for row in rows]
    expected = {
        MEDIAN: aggregate_median(models),
        TRIMMED_MEAN: aggregate_trimmed_avg(models, 0.3),
        KRUM: aggregate_krum(models, int(0.3 * count), 0),
        MULTI_KRUM: aggregate_krum(models, int(0.3 * count), count - int(0.3 * count)),
    }
    for rule, (row,) in expected.items():
        found = filled(rule, rows, weights=np.arange(1, count + 1)).result()
        assert found.dtype == np.float32
        if rule == MULTI_KRUM:  # Flower adds the models up in the order of their scores
            np.testing.assert_allclose(found, row, rtol=1e-5, atol=1e-6)
        else:
            assert found.tobytes() == row.tobytes()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [1e14, -1e15, 5.0])
def test_three_of_ten_clients_cannot_move_the_result_out_of_the_others_range(rule, bad) -> None:
    honest = np.random.default_rng(0).normal(size=(7, 9)).astype(np.float32)
    rows = np.array([*honest[:4], *np.full((3, 9), bad), *honest[4:]])
    lengths = np.linalg.norm(rows, axis=1)
    found = filled(rule, rows, lengths=lengths / np.median(lengths)).result()
    assert (honest.min(axis=0) <= found).all() and (found <= honest.max(axis=0)).all()


@cache  # two tests compare with it
def usual(name: str, rule: str) -> tuple:
    return everything(run_method(name, aggregation=rule))


@pytest.mark.parametrize("rule", [MEDIAN, KRUM, MULTI_KRUM, BIWEIGHT])
@pytest.mark.parametrize("name", ABLE)
def test_the_order_of_replies_and_claims_of_samples_change_no_bit(name, rule) -> None:
    expected = usual(name, rule)
    assert everything(run_method(name, ShuffledGrid(app_of(name), 6, 1), aggregation=rule)) == expected
    claiming = AttackedApp(app_of(name), ATTACKS["claim"], [1, 4])
    models, *_ = everything(run_method(name, InlineGrid(claiming, 6), aggregation=rule))
    assert models == expected[0]


@pytest.mark.parametrize("name", ABLE)
def test_each_rule_gives_another_model(name) -> None:
    found = {rule: usual(name, rule)[0]["global"] for rule in (MEAN, *RULES)}
    assert all(found[rule] != found[MEAN] for rule in RULES) and found[MEDIAN] != found[KRUM]


def sending(**values):
    """Return a change of a reply: `sending(layer_weight=5)` fills its array layer.weight with 5."""

    def change(content) -> None:
        arrays = {name: array.copy() for name, array in read_record(content["arrays"]).items()}
        for name, value in values.items():
            arrays[name.replace("_", ".", 1)][...] = value
        content["arrays"] = to_record(arrays)

    return change


def test_a_missing_client_has_no_part_and_integer_buffers_are_the_median() -> None:
    def fate(server_round: int, client: int) -> object:
        if client == 2:
            return "error"
        return sending(layer_weight=(5, 1, 0, 3)[client], norm_num_batches_tracked=7 + client)

    strategy = FedAvg(aggregation=MEDIAN)
    strategy.start(FaultyGrid(plain_app(), 4, fate), initial_of("fedavg"), 1)
    arrays = read_record(strategy.global_arrays())
    assert (arrays["layer.weight"] == 3).all() and arrays["norm.num_batches_tracked"] == 8


@pytest.mark.parametrize("rule", [MEDIAN, TRIMMED_MEAN])
def test_clients_have_equal_shares_in_the_collaboration_matrix(rule) -> None:
    _, weights = run_method("fedavg", aggregation=rule).collaboration()
    assert weights == pytest.approx(np.full((6, 6), 1 / 6))


def test_the_collaboration_matrix_names_the_clients_that_krum_chose() -> None:
    _, weights = run_method("fedavg", aggregation=KRUM).collaboration()
    assert sorted(weights[0].tolist()) == [0, 0, 0, 0, 0, 1] and (weights == weights[0]).all()
    _, weights = run_method("fedavg", aggregation=MULTI_KRUM).collaboration()
    assert sorted(weights[0].tolist()) == pytest.approx([0, *5 * [1 / 5]]) and (weights == weights[0]).all()


@pytest.mark.parametrize("name", ABLE)
def test_an_update_of_ten_times_the_length_has_no_weight_by_the_biweight(name) -> None:
    flipping = AttackedApp(app_of(name), ATTACKS["flip x10"], [1])
    _, weights = run_method(name, InlineGrid(flipping, 6), aggregation=BIWEIGHT).collaboration()
    assert (weights[[0, 2, 3, 4, 5], 1] == 0).all() and (weights[0] > 0).any()


@pytest.mark.parametrize("name", ABLE)
def test_models_stay_where_no_update_has_a_weight(name, monkeypatch) -> None:
    monkeypatch.setattr(aggregation, "biweights", np.zeros_like)
    failures, end_round = [], PersonalizedStrategy._end_round

    def ended(*of_round) -> str:
        failures.append(end_round(*of_round))
        return failures[-1]

    monkeypatch.setattr(PersonalizedStrategy, "_end_round", ended)
    strategy = run_method(name, aggregation=BIWEIGHT)
    assert failures and not any(failures)
    unused = make(name, aggregation=BIWEIGHT)
    unused.begin(initial_of(name))
    assert values(strategy.global_arrays()) == values(unused.global_arrays())


def test_a_client_gains_no_weight_by_absence_with_the_biweight() -> None:
    """The only update after an absence has no comparable ones: its length is over the largest median so far."""
    fates = {(2, 3): "error", (3, 3): sending(layer_weight=1e14)}  # by round and client
    strategy = FedAvg(aggregation=BIWEIGHT)
    grid = FaultyGrid(plain_app(), 5, lambda server_round, client: fates.get((server_round, client)))
    strategy.start(grid, initial_of("fedavg"), 3)
    absent = strategy.clients()[3]
    assert [row["visit"] for row in strategy.history.updates if row["client"] == absent] == ["first", "return"]
    assert np.abs(read_record(strategy.global_arrays())["layer.weight"]).max() < 100


def test_floating_point_buffers_are_the_median_with_the_biweight() -> None:
    strategy = FedAvg(aggregation=BIWEIGHT)
    lying = sending(norm_running_mean=1e14)
    grid = FaultyGrid(plain_app(), 5, lambda server_round, client: lying if client == 2 else None)
    strategy.start(grid, initial_of("fedavg"), 1)
    assert np.abs(read_record(strategy.global_arrays())["norm.running_mean"]).max() < 100


def test_scaffold_weights_all_control_variates_equally_with_a_robust_rule() -> None:
    strategy = make("scaffold", aggregation=MEDIAN)
    strategy.start(InlineGrid(app_of("scaffold"), 6), initial_of("scaffold"), 2)
    assert isinstance(strategy, SCAFFOLD) and set(strategy._weights.values()) == {1.0}


def test_a_client_of_scaffold_without_a_weight_continues_from_the_control_variate_that_is_counted() -> None:
    strategy = make("scaffold", aggregation=MULTI_KRUM)
    strategy.start(InlineGrid(app_of("scaffold"), 6), initial_of("scaffold"), 1)
    (without,) = {*strategy.clients()} - {*strategy._counted}  # Multi-Krum leaves out one of six
    assert strategy.round_config(2, without)["counted-round"] == 0


def test_the_setting_is_refused_in_one_line_where_it_has_no_effect() -> None:
    for name in REGISTRY.own:
        config = Config(strategy=name, aggregation=KRUM)
        if name in ABLE:
            assert config.own_settings()["aggregation"] == KRUM
            continue
        with pytest.raises(ConfigError, match=f"aggregation is 'krum', allowed with {name}: mean; methods with others"):
            config.own_settings()
    with pytest.raises(
        ValueError, match=r"aggregation is 'mode', allowed: mean, median, trimmed-mean, krum, multi-krum, biweight"
    ):
        FedAvg(aggregation="mode")
    assert AveragedShared.__annotations__.keys() - Shared.__annotations__.keys() == {"aggregation"}


def test_methods_beside_one_with_a_robust_rule_run_as_they_do() -> None:
    config = Config(strategy="fedavg", aggregation=MEDIAN)
    assert config.for_method("ditto").aggregation == MEDIAN
    assert config.for_method("local") == Config(strategy="local")
