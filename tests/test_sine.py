"""The lines along a sine curve: the example's claims, over several draws, and the output of its command.

It imports `kindred`, which cannot be in one process with `strategies`: everything runs in separate processes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .examples import calculated, python

EXAMPLE = Path(__file__).parent.parent / "examples" / "sine"
DRAWS = 4
CALCULATIONS = f"""
import json
import numpy as np
import sine

drawn = [sine.compare(seed, sine.NOISE) for seed in range({DRAWS})]
lines, weights = np.arange(20.0).reshape(10, 2) ** 2, drawn[0][1]
sine.ROUNDS, few = 30, sine.draw(0, sine.NOISE)
print(json.dumps({{
    "lines": {{way: [ways[way].tolist() for ways, _ in drawn] for way in drawn[0][0]}},
    "weights": [weights.tolist() for _, weights in drawn],
    "errors": {{way: [sine.errors(ways[way]).tolist() for ways, _ in drawn] for way in drawn[0][0]}},
    "data": [[array.tolist() for array in sine.draw(seed, sine.NOISE)] for seed in range({DRAWS})],
    "by-distance": sine.by_distance(weights).tolist(),
    "some-lines": lines.tolist(),
    "their-mixtures": sine.mixtures(lines, weights).tolist(),
    "flat": sine.collaborate(*few, sine.NOISE, 3, temperature=1e9)[1].tolist(),
    "again": [sine.collaborate(*few, sine.NOISE, 3)[0].tolist() for _ in range(2)],
}}))
"""


@pytest.fixture(scope="module")
def outcome() -> dict:
    return calculated(EXAMPLE, CALCULATIONS)


@pytest.fixture(scope="module")
def errors(outcome) -> dict[str, np.ndarray]:
    return {way: np.array(each) for way, each in outcome["errors"].items()}  # (draws, K) each


def test_federico_is_nearer_the_curve_than_local_training_and_far_nearer_than_fedavg(errors) -> None:
    mean = {way: each.mean() for way, each in errors.items()}
    assert 1.2 * mean["FedeRiCo"] < mean["alone"]
    assert 4 * mean["FedeRiCo"] < mean["FedAvg"]
    assert (errors["FedeRiCo"].mean(axis=1) < errors["FedAvg"].mean(axis=1)).all()


def test_weights_are_distributions_near_the_diagonal(outcome) -> None:
    weights = np.array(outcome["weights"])  # (draws, K, K)
    assert (weights >= 0).all() and np.allclose(weights.sum(axis=2), 1)
    apart = np.abs(np.subtract.outer(np.arange(10), np.arange(10)))
    at = [weights[:, apart == distance].mean() for distance in range(4)]  # of one line
    assert at[0] > at[1] > at[2] > at[3]
    assert (weights * (apart <= 1)).sum(axis=2).mean() > 2 * (apart <= 1).mean()
    assert 0.05 < weights[:, apart > 0].sum() / (10 * DRAWS) < 0.9  # neither all at oneself nor all at others
    assert outcome["by-distance"] == pytest.approx([weights[0][apart == k].sum() / 10 for k in range(10)])


def test_weights_of_a_high_temperature_are_equal(outcome) -> None:
    assert np.allclose(outcome["flat"], 0.1)


def test_without_neighbours_lines_end_at_the_least_squares_fits(outcome) -> None:
    for (inputs, labels), lines in zip(outcome["data"], outcome["lines"]["alone"]):
        for client, (x, y) in enumerate(zip(inputs, labels)):
            assert lines[client] == pytest.approx(np.polyfit(np.array(x) - client - 0.5, y, 1), abs=0.02)


def test_fedavg_is_one_line_through_all_points(outcome) -> None:
    for (inputs, labels), lines in zip(outcome["data"], outcome["lines"]["FedAvg"]):
        slope, height = np.polyfit(np.ravel(inputs), np.ravel(labels), 1)
        assert np.allclose(lines, [(slope, slope * (client + 0.5) + height) for client in range(10)])


def test_points_are_in_each_client_s_interval_and_near_the_curve(outcome) -> None:
    inputs, labels = np.moveaxis(np.array(outcome["data"]), 1, 0)  # (draws, K, n) each
    assert (np.floor(inputs) == np.arange(10)[:, None]).all()
    assert np.std(labels - np.sin(2 * np.pi * inputs / 10)) == pytest.approx(0.3, rel=0.15)


def test_a_mixture_predicts_the_weighted_mean_of_its_lines(outcome) -> None:
    lines, weights = np.array(outcome["some-lines"]), np.array(outcome["weights"][0])
    for client, (slope, height) in enumerate(outcome["their-mixtures"]):
        for x in (client, client + 0.8):
            predicted = [a * (x - owner - 0.5) + b for owner, (a, b) in enumerate(lines)]
            assert slope * (x - client - 0.5) + height == pytest.approx(weights[client] @ predicted)


def test_errors_are_squared_distances_from_the_curve(outcome, errors) -> None:
    for client, (slope, height) in enumerate(outcome["lines"]["FedAvg"][0]):
        x = client + (np.arange(5000) + 0.5) / 5000
        off = slope * (x - client - 0.5) + height - np.sin(2 * np.pi * x / 10)
        assert errors["FedAvg"][0][client] == pytest.approx((off**2).mean(), rel=1e-3)


def test_the_same_draw_gives_the_same_lines(outcome) -> None:
    first, second = outcome["again"]
    assert first == second


def test_the_command_prints_and_draws_what_the_readme_says(tmp_path) -> None:
    picture = tmp_path / "sine.png"
    done = python(EXAMPLE, "sine.py", "--draws", "1", "--output", str(picture))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("\n\n")
    assert first in (EXAMPLE / "README.md").read_text().replace("\n    ", "\n")
    assert second.startswith("mean over 1 draws") and "better than alone in 1 of 1 draws, for 90% of clients" in second
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_out_of_range_options_are_named() -> None:
    wrong = {"seed": "-1", "draws": "0", "noise": "0.0", "temperature": "nan", "output": "no-such-folder/sine.png"}
    script = "import sys, sine\nfor sys.argv in {}:\n    try:\n        sine.main()\n    except SystemExit as end:\n"
    done = python(
        EXAMPLE,
        "-c",
        script.format([["sine.py", f"--{name}", value] for name, value in wrong.items()]) + "        print(end.code)",
    )
    assert done.stdout.split() == ["2"] * len(wrong), done.stderr
    for name, value in wrong.items():
        assert f"--{name} is {value}, allowed: " in done.stderr
