"""Every method gives its recorded bits: see golden/runs.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .golden.runs import BITS, IN_FLOWER, KEYS, bits, bits_in_flower, bits_in_process, machine

pytestmark = pytest.mark.usefixtures("no_pictures")

RECORDED = json.loads(BITS.read_text())
SAME_MACHINE = machine() == RECORDED["machine"]
TOLERANCE = 0.1  # tolerance of the mean accuracy on another processor or torch: 4 clients have few test images


def check(found: dict[str, Any], recorded: dict[str, Any]) -> None:
    if SAME_MACHINE:
        assert found == recorded
    else:
        assert found["accuracy"] == pytest.approx(recorded["accuracy"], abs=TOLERANCE)


def test_every_method_has_recorded_bits() -> None:
    assert set(RECORDED["runs"]) == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_an_interrupted_and_resumed_run_gives_the_recorded_bits(key) -> None:
    check(bits(key), RECORDED["runs"][key])


@pytest.mark.engine
@pytest.mark.parametrize(
    "key", [IN_FLOWER[0], *(pytest.param(key, marks=pytest.mark.deployment) for key in IN_FLOWER[1:])]
)
def test_a_run_resumed_in_flowers_engine_matches_the_recorded_bits_and_one_process(key, tmp_path) -> None:
    found = bits_in_flower(key, tmp_path / "flower")
    check(found, RECORDED["in-flower"][key])
    assert found == bits_in_process(key, tmp_path / "process")
