"""Settings that a method does not use: they change none of its bits, and a comparison refuses them for it alone."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.numpy import load_file

from kindred import REGISTRY
from kindred.server_app.app import run_inline
from kindred.server_app.comparison.plan import make_plan
from kindred.server_app.config import Config, ConfigError, is_used_by, unused

SMALL: dict[str, Any] = {
    "num_clients": 4, "num_rounds": 2, "samples_per_client": 12, "local_epochs": 1, "local_steps": 2, "num_groups": 2,
    "public_size": 30,
}  # fmt: skip
OTHERS = {"optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.5, "weight_decay": 0.1, "local_epochs": 2}


def models(folder, strategy: str, **changes: Any) -> dict[str, bytes]:
    run_inline(Config(strategy=strategy, output_dir=str(folder), **{**SMALL, **changes}))
    files = sorted(folder.glob("*/models/*.safetensors"))
    return {f"{file.name} {name}": array.tobytes() for file in files for name, array in load_file(file).items()}


@pytest.mark.parametrize("name", [name for name, method in REGISTRY.items() if method.ignores])
def test_what_a_method_ignores_changes_no_bit_and_what_it_uses_does(tmp_path, name) -> None:
    before = models(tmp_path / "before", name)
    ignored = {each.name for each in REGISTRY[name].ignores}
    assert before and ignored <= OTHERS.keys()
    for key, value in OTHERS.items():
        if key != "momentum" or key in ignored:  # it is the optimiser sgd's
            same = models(tmp_path / key, name, **{key: value}) == before
            assert same == (key in ignored), key


def test_a_method_uses_its_own_settings_and_those_of_training_that_it_does_not_ignore() -> None:
    assert is_used_by("sgd-learning-rate", "scaffold") and not is_used_by("sgd-learning-rate", "fedavg")
    assert is_used_by("learning-rate", "fedavg") and not is_used_by("learning-rate", "scaffold")
    assert not is_used_by("local-epochs", "perfed-ckt") and is_used_by("local-steps", "perfed-ckt")
    fedavg, local, fedamp = (Config(strategy=name) for name in ("fedavg", "local", "fedamp"))
    assert unused(["sigma", "seed"], [fedavg]) == ["fedavg does not use sigma"]
    assert unused(["sigma"], [fedavg, local]) == ["none of fedavg, local uses sigma"]
    assert unused(["sigma"], [fedavg, fedamp]) == []


def test_settings_that_neither_dataset_nor_partition_uses_are_named() -> None:
    digits, tables = Config(), Config(dataset="csv", partition="by-client")
    keys = ["target", "dirichlet-alpha", "min-samples", "num-groups", "test-share"]
    assert unused(keys, [digits]) == [
        "digits does not use target", "rotated does not use dirichlet-alpha", "rotated does not use min-samples",
    ]  # fmt: skip
    assert unused(keys, [tables]) == ["by-client does not use dirichlet-alpha", "by-client does not use num-groups"]
    assert unused(["dirichlet-alpha"], [digits, tables]) == ["none of rotated, by-client uses dirichlet-alpha"]
    assert unused(keys[:1], [digits, tables]) == []


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"fedavg": {"sigma": 3.0}}, "--set fedavg:sigma is given, but fedavg does not use sigma"),
        ({"mine": {"strategy": "scaffold", "learning-rate": 0.1}}, "--set mine:learning-rate is given, but scaffold"),
    ],
)
def test_a_setting_for_a_method_that_does_not_use_it_is_refused(own, says) -> None:
    with pytest.raises(ConfigError, match=says):
        make_plan(["fedavg", "mine"] if "mine" in own else ["fedavg", "local"], {}, own)


def test_a_varied_setting_that_a_method_ignores_does_not_vary_it() -> None:
    plan = make_plan(["fedavg", "scaffold"], {}, {}, vary={"learning-rate": [0.1, 0.2]})
    assert list(plan.configs) == ["fedavg-0.1", "fedavg-0.2", "scaffold"]
