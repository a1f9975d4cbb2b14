"""Every method comes to the bits that it came to when they were recorded: see golden/runs.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .golden.runs import BITS, IN_FLOWER, KEYS, bits, bits_in_flower, bits_in_process, machine

pytestmark = pytest.mark.usefixtures("no_pictures")

RECORDED = json.loads(BITS.read_text())
SAME_MACHINE = machine() == RECORDED["machine"]
TOLERANCE = 0.1  # of the mean accuracy on another processor, or with another torch: 4 clients with few test images


def check(found: dict[str, Any], recorded: dict[str, Any]) -> None:
    if SAME_MACHINE:
        assert found == recorded
    else:
        assert found["accuracy"] == pytest.approx(recorded["accuracy"], abs=TOLERANCE)


def test_every_method_has_its_bits_recorded() -> None:
    assert set(RECORDED["runs"]) == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_a_run_that_is_cut_short_and_resumed_gives_the_recorded_bits(key) -> None:
    check(bits(key), RECORDED["runs"][key])


@pytest.mark.engine
@pytest.mark.parametrize("key", IN_FLOWER)
def test_a_run_resumed_in_flowers_engine_gives_the_recorded_bits_and_those_of_one_process(key, tmp_path) -> None:
    found = bits_in_flower(key, tmp_path / "flower")
    check(found, RECORDED["in-flower"][key])
    assert found == bits_in_process(key, tmp_path / "process")
