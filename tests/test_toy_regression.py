"""The toy of three linear regressions: its claims, over many draws, and the output of its command.

It imports `kindred`, which cannot be in one process with `strategies`: everything runs in separate processes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .examples import calculated, python

TOY = Path(__file__).parent.parent / "examples" / "toy-regression"
DRAWS = 20
CALCULATIONS = f"""
import json
import numpy as np
import toy

drawn = [toy.compare(seed, toy.NOISE) for seed in range({DRAWS})]
_, *data = toy.draw(0, toy.NOISE)
alone = drawn[0][1]["alone"]
toy.ROUNDS = 1
print(json.dumps({{
    "true": [true.tolist() for true, _, _ in drawn],
    "models": {{way: [models[way].tolist() for _, models, _ in drawn] for way in drawn[0][1]}},
    "clusters": [clusters.tolist() for _, _, clusters in drawn],
    "data": [array.tolist() for array in data],
    "one-round": toy.distil(alone, *data, num_clusters=1)[0].tolist(),
}}))
"""


@pytest.fixture(scope="module")
def outcome() -> dict:
    return calculated(TOY, CALCULATIONS)


@pytest.fixture(scope="module")
def models(outcome) -> dict[str, np.ndarray]:
    return {way: np.array(models) for way, models in outcome["models"].items()}  # (draws, 3, 2) each


def test_clustered_models_are_nearer_each_true_model_than_the_plain_average(outcome, models) -> None:
    mean = {way: np.linalg.norm(each - outcome["true"], axis=2).mean(axis=0) for way, each in models.items()}  # (3,)
    assert (1.5 * mean["clustered, c = 2"] < mean["averaged, c = 1"]).all()
    assert (1.5 * mean["clustered, c = 2"] < mean["FedAvg"]).all()


def test_clients_0_and_1_are_usually_clustered_together(outcome) -> None:
    assert outcome["clusters"].count([0, 0, 1]) >= 0.75 * DRAWS


def test_a_client_alone_in_its_cluster_equals_local_training(outcome, models) -> None:
    clusters = np.array(outcome["clusters"])  # (draws, 3)
    alone_in_cluster = (clusters[:, :, None] == clusters[:, None, :]).sum(axis=2) == 1  # (draws, 3)
    moved = np.linalg.norm(models["clustered, c = 2"] - models["alone"], axis=2)  # (draws, 3)
    assert alone_in_cluster.sum() == DRAWS
    assert moved[alone_in_cluster].max() < 1e-9 and moved[~alone_in_cluster].min() > 1e-3


def test_the_local_steps_reach_the_minimum_of_a_round(outcome, models) -> None:
    """The paper's Eq. 14, with means over samples for sums, and every alpha 1/3."""
    inputs, labels, public = map(np.array, outcome["data"])
    alone = models["alone"][0]  # (3, 2)
    teacher = public.T @ public / len(public)  # (2, 2)
    for x, y, own, moved in zip(inputs, labels, alone, outcome["one-round"]):
        private = x.T @ x / len(y)  # (2, 2)
        expected = np.linalg.solve(private + 50 * teacher, x.T @ y / len(y) + 50 * teacher @ alone.mean(axis=0))
        assert np.linalg.norm(moved - expected) < 1e-3 * np.linalg.norm(own - expected)


def test_the_command_prints_and_draws_what_the_readme_says(tmp_path) -> None:
    picture = tmp_path / "toy.png"
    done = python(TOY, "toy.py", "--draws", "1", "--output", str(picture))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("\n\n")
    assert first in (TOY / "README.md").read_text().replace("\n    ", "\n")
    assert second.startswith("mean over 1 draws") and second.endswith(": 1 of 1 draws\n")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.parametrize("name, value", [("seed", "-1"), ("draws", "0"), ("noise", "nan")])
def test_an_out_of_range_option_is_named(name, value) -> None:
    done = python(TOY, "toy.py", f"--{name}", value)
    assert done.returncode == 2
    assert f"--{name} is {value}, allowed: " in done.stderr
