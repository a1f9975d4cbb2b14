"""Norms of updates: what they are compared with, who is named, and how `max_update_norm` "auto" scales them down."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from flwr.app import Array, RecordDict

from kindred import SCAFFOLD, FedAvg, InlineGrid, Local, PersonalizedStrategy
from kindred.engine.checkpoint import Checkpoints
from kindred.engine.norms import BOUND, LATEST, LEAST, OUTLIER, UpdateNorms, scaled
from kindred.engine.remarks import on_updates
from kindred.messages import ClientId, read_record
from kindred.registry import REGISTRY
from kindred.server_app.app import run_inline
from kindred.server_app.config import Config
from kindred.server_app.run_files import read_summary
from kindred.server_app.summary import summarise
from kindred.server_app.tables import read_table

from .client_apps import initial, plain_app, target
from .grids import FaultyGrid, Interrupted, ShuffledGrid, interrupted
from .test_conformance import app_of, everything, initial_of, make, values, where_models_travel

Norms = Mapping[ClientId, float]


def rounds_of(*rounds: Norms, bounds: bool = True) -> tuple[list[dict[ClientId, float]], list[list[dict]]]:
    """Return each round's factors and rows of the history."""
    norms, factors, rows = UpdateNorms(bounds), [], []
    for number, of_round in enumerate(rounds, start=1):
        norms.begin_round()
        if norms.needs_preview:
            for client, norm in of_round.items():
                norms.preview(client, "", norm)
        factors.append({client: norms.add(client, "", norm) for client, norm in of_round.items()})
        rows.append(norms.end_round(number))
    return factors, rows


# --- By hand ------------------------------------------------------------------------------------------


def test_norms_are_relative_to_the_median_of_the_round() -> None:
    _, ((first, second, third), _) = rounds_of({3: 8.0, 1: 1.0, 2: 2.0}, {})
    assert first == {"round": 1, "client": 1, "visit": "first", "norm": 1.0, "relative-norm": 0.5,
                     "relative-to-largest": 0.5}  # fmt: skip
    assert (second["relative-norm"], third["relative-norm"]) == (1.0, 4.0)


def test_first_visits_and_returns_are_compared_with_their_like() -> None:
    """Client 4 comes in round 2; client 3 is absent in it."""
    _, rows = rounds_of({1: 8.0, 2: 9.0, 3: 10.0}, {1: 1.0, 2: 2.0, 4: 9.0}, {}, {1: 1.0, 2: 3.0, 3: 6.0, 4: 2.0})
    assert [row["visit"] for row in rows[1]] == ["further", "further", "first"]
    assert ["relative-norm" in row for row in rows[1]] == [False, False, True]
    assert rows[1][2]["relative-norm"] == pytest.approx(9 / 9)  # the median of 8, 9, 10 and 9: this round has only one
    assert [row["visit"] for row in rows[3]] == ["further", "further", "return", "further"]
    assert [row.get("relative-norm") for row in rows[3]] == [0.5, 1.5, None, 1.0]


def test_an_update_without_comparable_ones_has_a_length_over_the_largest_median() -> None:
    """Client 3 is absent in round 2, and its long update of round 3 is the only one after absence."""
    rounds = [{1: 4.0, 2: 8.0, 3: 9.0}, {1: 1.0, 2: 2.0, 4: 6.0}, {1: 1.0, 2: 2.0, 3: 90.0, 4: 3.0}]
    norms, lengths = UpdateNorms(bounds=False), []
    for number, of_round in enumerate(rounds, start=1):
        for client, norm in of_round.items():
            norms.add(client, "", norm)
        lengths.append(norms.lengths())
        norms.end_round(number)
    assert lengths[0] == {1: 4 / 8, 2: 1, 3: 9 / 8}
    assert lengths[1] == {1: 1 / 8, 2: 2 / 8, 4: 6 / 7}  # two further visits; first ones of both rounds
    assert lengths[2] == {1: 1 / 2, 2: 1, 4: 3 / 2, 3: 90 / 8}
    few = UpdateNorms(bounds=False)
    few.add(1, "", 1.0)
    assert few.lengths() == {}


def test_other_networks_are_not_compared() -> None:
    norms = UpdateNorms(bounds=False)
    for client, network in enumerate(["cnn", "cnn", "cnn", "mlp", "mlp"]):
        norms.add(client, network, 1.0)
    assert norms.lengths() == {0: 1.0, 1: 1.0, 2: 1.0}
    assert ["relative-norm" in row for row in norms.end_round(1)] == [True] * 3 + [False] * 2


def test_the_bound_is_that_of_the_latest_rounds_and_of_the_first_round_itself() -> None:
    factors, rows = rounds_of(
        {1: 1.0, 2: 2.0, 3: 40.0},  # all first: 5 x 2 = 10
        {1: 10.0, 2: 16.0, 3: 1.0},  # no further visits so far: by the median of first ones
        {1: 1.0, 2: 1.0, 3: 100.0},  # 5 x 10: the median of round 2, not of this round
        {4: 20.0},
    )
    assert factors == [{1: 1, 2: 1, 3: 10 / 40}, {1: 1, 2: 10 / 16, 3: 1}, {1: 1, 2: 1, 3: 0.5}, {4: 10 / 20}]
    assert [row.get("scaled-by") for row in rows[0]] == [None, None, 0.25]
    assert BOUND == 5 and LEAST == 3


def test_a_bound_needs_three_updates_that_are_not_zero() -> None:
    assert rounds_of({1: 1.0, 2: 1e6})[0] == [{1: 1, 2: 1}]
    assert rounds_of({1: 0.0, 2: 0.0, 3: 7.0})[0] == [{1: 1, 2: 1, 3: 1}]
    assert rounds_of({1: 1.0, 2: 1.0, 3: 7.0}, bounds=False)[0] == [{1: 1, 2: 1, 3: 1}]


def test_norms_are_also_relative_to_the_largest_median_so_far() -> None:
    """An honest update may be long beside those of clients that have converged; it is not named."""
    _, rows = rounds_of({1: 8.0, 2: 10.0, 3: 12.0}, {1: 0.1, 2: 0.1, 3: 5.0})
    assert [row["relative-to-largest"] for row in rows[0] + rows[1]] == [0.8, 1.0, 1.2, 0.01, 0.01, 0.5]
    assert rows[1][2]["relative-norm"] == pytest.approx(50)


def test_old_rounds_are_forgotten_once_the_latest_have_enough() -> None:
    many = dict.fromkeys(range(LATEST), 1.0)
    small, large = ({client: size for client in many} for size in (1.0, 100.0))
    factors, _ = rounds_of(small, small, large, {**large, 0: 1000.0})
    assert set(factors[2].values()) == {BOUND / 100}
    assert factors[3] == {**dict.fromkeys(many, 1.0), 0: 0.5}  # by round 3, as it was sent


def test_the_state_resumes() -> None:
    one, other = UpdateNorms(bounds=True), UpdateNorms(bounds=True)
    for client in (1, 2, 3):
        one.add(client, "", float(client))
    one.end_round(1)
    other.restore(one.state())
    assert other.add(1, "", 40.0) == one.add(1, "", 40.0) == 10 / 40
    assert other.end_round(2) == one.end_round(2)


def test_scaled_arrays_by_hand() -> None:
    arrays = {"w": np.array([3.0, -1.0], np.float32), "count": np.array([7]), "half": np.array([65504], np.float16)}
    origin = {"w": np.array([1.0, 1.0], np.float32), "count": np.array([2]), "half": np.array([-65504], np.float16)}
    found = scaled(arrays, origin, 0.5)
    assert found["w"].tolist() == [2.0, 0.0] and found["count"].tolist() == [7] and found["half"].tolist() == [0.0]
    assert {name: array.dtype for name, array in found.items()} == {name: a.dtype for name, a in arrays.items()}


def test_outliers_are_named_by_hand() -> None:
    rows = [
        {"client": 1, "norm": 1.0},
        {"client": 2, "norm": 2.0, "relative-norm": 50.0, "relative-to-largest": OUTLIER},
        {"client": 3, "norm": 3.0, "relative-norm": 50.0, "relative-to-largest": OUTLIER + 1},
        {"client": 4, "norm": 8.0, "relative-norm": 8.0, "scaled-by": 0.5},
    ]
    assert [tuple(remark) for remark in on_updates(rows)] == [
        (3, "norm", "sent an update of norm 3, 9 times the largest median of a round so far"),
        (4, "scaled", "sent an update of norm 8, which was scaled by 0.5"),
    ]


@pytest.mark.parametrize("value", [-1.0, "automatic", True])
def test_a_bound_that_is_none_is_refused(value) -> None:
    with pytest.raises(ValueError, match=rf"^max_update_norm is {value!r}, allowed: 0 to 1e\+12, or auto$"):
        FedAvg(max_update_norm=value)


# --- Runs -----------------------------------------------------------------------------------------------


def further(by: float) -> Callable[[RecordDict], None]:
    """Return a fate: all floats of the reply are larger by this."""

    def change(content: RecordDict) -> None:
        (record,) = content.array_records.values()
        for key, array in record.items():
            if array.dtype == "float32" and not key.startswith("model/"):  # from FedeRiCo's new clients
                record[key] = Array(array.numpy() + np.float32(by))

    return change


def attacked(rounds: tuple[int, ...], by: float = 1e6) -> Callable[[int, int], object]:
    return lambda server_round, client: further(by) if server_round in rounds and client == 1 else "ok"


def run(strategy: PersonalizedStrategy, grid, start=None, rounds: int = 3, **arguments) -> PersonalizedStrategy:
    strategy.start(grid, start or initial(), rounds, **arguments)
    return strategy


@pytest.mark.parametrize("when", [1, 2])
def test_fedavg_with_a_scaled_update_by_hand(when) -> None:
    def weight(strategy: FedAvg) -> float:
        return float(read_record(strategy.global_arrays())["layer.weight"][0, 0])

    honest = run(FedAvg(), InlineGrid(plain_app(), 4), rounds=when)
    found = run(FedAvg(max_update_norm="auto"), FaultyGrid(plain_app(), 4, attacked((when,))), rounds=when)
    first = [row["norm"] for row in honest.history.updates[:4]]  # in round 1, client 2 is an outlier of their median
    bound = BOUND * np.median([first[0], 1e9, *first[2:]] if when == 1 else first)
    (row,) = [row for row in found.history.updates if "scaled-by" in row]
    assert (row["round"], row["client"]) == (when, 1002)
    assert row["norm"] * row["scaled-by"] == pytest.approx(bound)
    # Client 2 has 20 of 100 samples, and its update, of four elements, is now of norm `bound`.
    (own,) = [row["norm"] for row in honest.history.updates if (row["round"], row["client"]) == (when, 1002)]
    sign = 1 if when == 1 else np.sign(target(1)[0, 0] - weight(run(FedAvg(), InlineGrid(plain_app(), 4), rounds=1)))
    assert weight(found) - weight(honest) == pytest.approx(0.2 * (bound - sign * own) / 2, rel=1e-3)


def test_a_scaled_update_is_no_strike_and_is_named() -> None:
    grid = FaultyGrid(plain_app(True), 4, attacked((1, 2, 3, 4)))
    strategy = run(FedAvg(max_update_norm="auto", max_strikes=1), grid, rounds=4)
    assert {row["status"] for row in strategy.history.rows} == {"ok"}
    assert [line["answered"] for line in strategy.history.rounds if line["round"] <= 4] == [4] * 4
    remarks = [(each["round"], each["about"]) for each in strategy.history.remarks if each["client"] == 1002]
    assert remarks == [(1, "norm"), (1, "scaled")]
    assert [row["round"] for row in strategy.history.updates if "scaled-by" in row and row["client"] == 1002] == [
        1, 2, 3, 4,
    ]  # fmt: skip


def test_without_auto_an_outlier_is_named_and_counts() -> None:
    strategy = run(FedAvg(), FaultyGrid(plain_app(True), 4, attacked((2,))), rounds=2)
    (remark,) = strategy.history.remarks
    assert (remark["client"], remark["round"], remark["about"]) == (1002, 2, "norm")
    assert re.fullmatch(r"sent an update of norm \S+, \S+ times the largest median of a round so far", remark["remark"])
    assert abs(read_record(strategy.global_arrays())["layer.weight"]).max() > 1e5


def test_nothing_is_bounded_or_named_where_nothing_is_mixed() -> None:
    fates = attacked((1, 2))
    free, auto = (run(Local(max_update_norm=bound), FaultyGrid(plain_app(True), 4, fates)) for bound in (0.0, "auto"))
    assert everything(free) == everything(auto)
    assert auto.history.remarks == [] and not any("scaled-by" in row for row in auto.history.updates)
    assert max(row["relative-norm"] for row in auto.history.updates) > OUTLIER  # the history has it


@where_models_travel
def test_every_method_scales_an_update_down_and_names_its_sender(name) -> None:
    def largest(strategy: PersonalizedStrategy) -> float:
        return max(np.abs(array).max() for array in read_record(strategy.global_arrays()).values() if array.size)

    mixes = REGISTRY[name].strategy.mixes_updates
    grid = FaultyGrid(app_of(name), 4, attacked((2,), 1e8))
    strategy = make(name, max_update_norm="auto")
    run(strategy, grid, initial_of(name))
    assert {row["status"] for row in strategy.history.rows} == {"ok"}
    outliers = {each["client"] for each in strategy.history.remarks if each["about"] in ("norm", "scaled")}
    assert outliers == ({1002} if mixes else set())
    assert (largest(strategy) < 1e5) == mixes


@where_models_travel
def test_for_every_method_the_bits_with_auto_do_not_depend_on_the_order_of_replies(name) -> None:
    def found(grid) -> tuple:
        strategy = make(name, max_update_norm="auto", fraction_train=0.7)
        run(strategy, grid, initial_of(name))
        return values(strategy.global_arrays()), strategy.history.updates

    assert found(InlineGrid(app_of(name), 5)) == found(ShuffledGrid(app_of(name), 5, seed=3))


def test_a_run_with_auto_resumes_to_the_same_bits(tmp_path) -> None:
    def found(folder: str, after: float) -> PersonalizedStrategy:
        strategy = FedAvg(max_update_norm="auto", fraction_train=0.7)
        grid = interrupted(FaultyGrid(plain_app(True), 5, attacked((1, 3, 4), 5.0)), after)
        return run(strategy, grid, rounds=5, checkpoints=Checkpoints(tmp_path / folder))

    with pytest.raises(Interrupted):
        found("one", 2)
    whole, resumed = found("other", 99), found("one", 99)
    assert everything(whole) == everything(resumed)
    assert whole.history.updates == resumed.history.updates
    assert whole.history.remarks == resumed.history.remarks != []


def test_replies_that_cannot_be_used_have_no_part_in_the_bound() -> None:
    def damaged(content: RecordDict) -> None:
        content["metrics"]["num-examples"] = 0

    fates = {0: damaged, 1: "error", 2: further(1e6)}
    grid = FaultyGrid(plain_app(True), 5, lambda r, c: fates.get(c, "ok") if r == 1 else "ok")
    strategy = run(FedAvg(max_update_norm="auto"), grid, rounds=1)
    assert [row["client"] for row in strategy.history.updates] == [1003, 1004, 1005]
    (row,) = [row for row in strategy.history.updates if "scaled-by" in row]
    assert row["client"] == 1003
    (line,) = [line for line in strategy.history.rounds if line["round"] == 1]
    assert line["answered"] == 3


def test_scaffold_counts_no_control_variate_with_a_scaled_update() -> None:
    """The client continues from the one that is counted, so that c stays the mean of all c_i."""
    strategy = make("scaffold", max_update_norm="auto")
    assert isinstance(strategy, SCAFFOLD)
    strategy._uncounted, strategy._control = set(), {}
    strategy.update_origin = lambda client: {"w": np.zeros(2, np.float32)}
    arrays = {"w": np.ones(2, np.float32), "control/w": np.full(2, 9.0, np.float32)}
    found = strategy.scaled_update(1, arrays, 0.5)
    assert found["w"].tolist() == [0.5, 0.5] and found["control/w"].tolist() == [0.0, 0.0]
    assert strategy._uncounted == {1}

    run(strategy := make("scaffold", max_update_norm="auto"), FaultyGrid(app_of("scaffold"), 4, attacked((2,), 1e8)),
        initial_of("scaffold"), 2)  # fmt: skip
    assert strategy._counted == {1001: 2, 1002: 1, 1003: 2, 1004: 2}


def test_a_run_writes_the_norms_of_its_updates_and_the_remarks(tmp_path, no_pictures) -> None:
    config = Config(
        strategy="fedavg",
        partition="iid",
        num_clients=3,
        num_rounds=2,
        samples_per_client=20,
        local_epochs=1,
        max_update_norm="auto",
        max_client_share=0.5,
        output_dir=str(tmp_path),
    )
    folder = run_inline(config)
    rows = read_table(folder.path / "updates.csv")
    assert [(row["round"], row["client"], row["visit"]) for row in rows] == [
        *((1, client, "first") for client in range(3)), *((2, client, "further") for client in range(3)),
    ]  # fmt: skip
    norms = [row["norm"] for row in rows[:3]]
    assert min(norms) > 0
    assert [row["relative-norm"] for row in rows[:3]] == pytest.approx(norms / np.median(norms))
    assert read_summary(folder.path)["remarks"] == []


def test_a_summary_has_what_was_named() -> None:
    strategy = run(FedAvg(), FaultyGrid(plain_app(True), 4, attacked((2,))), rounds=2)
    settings = {"strategy": "fedavg", "dataset": "digits", "partition": "iid", "seed": 0, "num-rounds": 2}
    (remark,) = summarise(settings, strategy.history, {})["remarks"]
    assert (remark["client"], remark["round"]) == (1002, 2) and remark.keys() == {"client", "round", "remark"}


def test_a_round_stays_until_the_later_ones_have_enough() -> None:
    half = range(LATEST // 2 + 5)
    ones, threes = (dict.fromkeys(half, norm) for norm in (1.0, 3.0))
    factors, _ = rounds_of(ones, ones, threes, {0: 100.0})  # further visits: 15 of 1 and 15 of 3, whose median is 2
    assert factors[3] == {0: BOUND * 2 / 100}
