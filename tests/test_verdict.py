"""The verdict: which clients federating helped or hurt, against training alone, by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

import kindred
from kindred.client.gain import gain_of, p_value
from kindred.server_app.verdict import HELPED, HURT, UNDECIDED, Verdict, holm, pooled_gain, verdict_of

from .background_commands import PATIENCE


def kindred_command(*arguments: str) -> str:
    """Return what a command of the application prints."""
    return subprocess.run(
        [sys.executable, "-m", "kindred", *arguments], capture_output=True, text=True, check=True, timeout=PATIENCE
    ).stdout


def right(*counts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return 0-1 scores: numbers of samples that both, only the federation's model, only the other, neither predict."""
    both, ours, theirs, neither = counts
    return (
        np.repeat([1.0, 1.0, 0.0, 0.0], [both, ours, theirs, neither]),
        np.repeat([1.0, 0.0, 1.0, 0.0], [both, ours, theirs, neither]),
    )


def test_mcnemars_test_by_hand() -> None:
    # Of 9 samples that one model alone predicts, 8 are the federation's: 2 (C(9, 0) + C(9, 1)) / 2^9.
    assert p_value(*right(30, 8, 1, 5)) == pytest.approx(20 / 512)
    assert p_value(*right(30, 1, 8, 5)) == pytest.approx(20 / 512)
    assert p_value(*right(30, 0, 0, 5)) == 1.0
    for ours in range(12):  # also halves, where the tails overlap
        assert p_value(*right(3, ours, 11 - ours // 2, 2)) == pytest.approx(
            stats.binomtest(ours, ours + 11 - ours // 2).pvalue
        )


def test_wilcoxons_test_by_hand() -> None:
    # Six differences of one sign: the exact two-sided p value is 2 / 2^6.
    alone = -np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert p_value(alone + np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), alone) == pytest.approx(2 / 64)


def test_ranks_and_a_mean_that_disagree_show_nothing() -> None:
    """96 errors are lower by 1, and four higher by 60: the ranks speak for the federation, the mean against it."""
    alone = -np.full(100, 70.0)
    federated = alone + np.repeat([1.0, -60.0], [96, 4])
    assert federated.mean() < alone.mean() and p_value(federated, alone) == 1.0
    assert p_value(alone + 1, alone) < 1e-10


def test_holms_correction_by_hand() -> None:
    assert holm(np.array([0.04, 0.01, 0.03])) == pytest.approx([0.06, 0.03, 0.06])
    assert holm(np.array([0.9, 0.5])) == pytest.approx([1.0, 1.0])


def verdict(scores: dict) -> Verdict:
    return verdict_of({client: gain_of(*pair, seed=0) for client, pair in scores.items()})


def test_clients_that_gain_and_lose_are_named() -> None:
    found = verdict({2: right(40, 20, 1, 9), 0: right(40, 1, 20, 9), "b": right(40, 3, 2, 5)})
    assert [(each.client, each.verdict) for each in found.clients] == [(0, HURT), (2, HELPED), ("b", UNDECIDED)]
    assert found.sentence.startswith(
        "Federating helped 1 of 3 clients, hurt 1, no difference shown for 1; over all test samples the gain is +0.5 "
        "points (-"
    )
    helped = found.clients[1].gain
    assert (helped.samples, helped.federated, helped.alone) == (70, pytest.approx(60 / 70), pytest.approx(41 / 70))
    assert helped.gain == pytest.approx(19 / 70) and helped.low < helped.gain < helped.high
    assert found.gain == pytest.approx(1 / 190)  # (19 - 19 + 1) of 70 + 70 + 50 samples
    assert found.low < 0 < found.high
    entries = found.to_dict()
    assert (entries["helped"], entries["clients"][1]["gain"]) == (1, helped.gain)


def test_many_clients_with_a_small_gain_show_it_together_alone() -> None:
    found = verdict({client: right(35, 6, 1, 8) for client in range(20)})
    assert found.count(UNDECIDED) == 20 and 0 < found.low < 0.1 == pytest.approx(found.gain)


def test_the_same_scores_give_the_same_verdict_in_any_order() -> None:
    scores = {client: right(30 + client, 4, 2, 3) for client in range(5)}
    assert verdict(scores) == verdict(dict(reversed(scores.items())))
    assert verdict_of({}) is None


def test_intervals_by_hand() -> None:
    # Of 100 differences 50 are 1 and 50 are 0: the mean is 0.5 with a standard error of 0.05.
    gain = gain_of(np.repeat([1.0, 0.0], 50), np.zeros(100), seed=0)
    assert gain.deviation == 0.5
    assert (gain.low, gain.high) == (pytest.approx(0.402, abs=0.015), pytest.approx(0.598, abs=0.015))
    found = verdict_of({client: gain for client in range(25)})
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.05 / 5, rel=0.1)


RUN = {"clients": 6, "rounds": 3, "partition": "practical", "samples_per_client": 30, "local_epochs": 3}


def test_a_run_beside_local_and_one_with_models_alone_have_a_verdict(tmp_path) -> None:
    done = kindred_command(
        "run", "--engine=inline", "--strategy=heurfedamp", "--against=local", "--clients=6", "--rounds=3",
        "--partition=practical", f"--output-dir={tmp_path}",
    )  # fmt: skip
    line = next(line for line in done.splitlines() if line.startswith("heurfedamp: Federating helped"))
    (folder,) = tmp_path.glob("*heurfedamp*")
    verdict = json.loads((folder / "summary.json").read_text())["verdict"]
    assert line == f"heurfedamp: {verdict['sentence']}"
    assert sum(verdict[which] for which in (HELPED, HURT, UNDECIDED)) == len(verdict["clients"]) == 6
    (alone,) = tmp_path.glob("*local*")
    accuracies = [
        {each["client"]: each["accuracy"] for each in json.loads((run / "summary.json").read_text())["clients"]}
        for run in (folder, alone)
    ]
    for each in verdict["clients"]:
        of_each = [accuracy[each["client"]] for accuracy in accuracies]
        assert [each["federated"], each["alone"]] == pytest.approx(of_each)
    assert json.dumps(verdict["sentence"]) in (folder / "report.html").read_text()


def test_training_alone_beside_training_alone_has_no_verdict(tmp_path) -> None:
    run = kindred.run("local", output=tmp_path, **RUN, shadow_local=True)
    assert run.summary["verdict"] is None


def test_a_comparison_counts_clients_over_seeds(tmp_path) -> None:
    found = kindred.compare(["heurfedamp", "local"], seeds=[0, 1], output=tmp_path, **RUN)
    verdict = found.content["strategies"]["heurfedamp"]["verdict"]
    assert sum(verdict[which] for which in (HELPED, HURT, UNDECIDED)) == 12
    means = [found.content["strategies"][name]["mean"]["accuracy"] for name in ("heurfedamp", "local")]
    assert verdict["gain"] == pytest.approx(means[0] - means[1])  # clients have equally many test samples
    assert found.content["strategies"]["local"]["verdict"] is None
    table = (found.folder / "comparison.md").read_text()
    assert "helped : hurt : not shown" in table and "gain over local" in table
    every = found.content["strategies"]["heurfedamp"]["all-metrics"]
    of_seeds = [found.runs["heurfedamp", seed].summary["metrics"]["last"]["auroc"] for seed in (0, 1)]
    assert every["auroc"]["mean"] == pytest.approx(np.mean(of_seeds))
    assert every["auroc"]["std"] == pytest.approx(np.std(of_seeds, ddof=1))
    assert "| strategy | accuracy (%) | balanced accuracy (%) | AUROC |" in table


def test_the_same_clients_in_more_runs_show_no_more() -> None:
    """Two clients gain 1/2 and 0 in each run; a third is in one run alone, with twice the samples."""
    first, second, third = (gain_of(*right(*counts), seed=0) for counts in ((0, 2, 0, 2), (1, 1, 1, 1), (0, 8, 0, 0)))
    assert pooled_gain([[first], [second]]) == pooled_gain([[first] * 5, [second] * 5])
    gain, low, high = pooled_gain([[first, second], [third]])
    assert gain == pytest.approx((4 * 0.5 + 4 * 0 + 8 * 1) / 16) and low < gain < high


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_corrected_p_values_are_never_smaller_and_keep_their_order(values) -> None:
    p = np.array(values)
    corrected = holm(p)
    assert (corrected >= p).all() and (corrected <= 1).all()
    assert (np.diff(corrected[np.argsort(p, kind="stable")]) >= 0).all()
