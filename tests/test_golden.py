"""Every method gives its recorded bits: see golden/runs.py."""

from __future__ import annotations

import pytest

from .golden.runs import IN_FLOWER, KEYS, bits, bits_in_flower, bits_in_process, check_bits, recorded

pytestmark = pytest.mark.usefixtures("no_pictures")

RECORDED = recorded()


def test_every_method_has_recorded_bits() -> None:
    assert set(RECORDED["runs"]) == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_an_interrupted_and_resumed_run_gives_the_recorded_bits(key) -> None:
    check_bits(bits(key), RECORDED, "runs", key)


@pytest.mark.engine
@pytest.mark.parametrize(
    "key", [IN_FLOWER[0], *(pytest.param(key, marks=pytest.mark.deployment) for key in IN_FLOWER[1:])]
)
def test_a_run_resumed_in_flowers_engine_matches_the_recorded_bits_and_one_process(key, tmp_path) -> None:
    found = bits_in_flower(key, tmp_path / "flower")
    check_bits(found, RECORDED, "in-flower", key)
    assert found == bits_in_process(key, tmp_path / "process")
