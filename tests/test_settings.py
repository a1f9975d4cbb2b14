"""A setting is defined once: constructors, run config, command line, tables and tests use that definition."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import ConfigRecord

from kindred import REGISTRY, InlineGrid, Local, PersonalizedStrategy
from kindred.data import load_federation
from kindred.engine import strategy as engine
from kindred.engine.arguments import Shared, StoredShared
from kindred.engine.stored import StoredModels
from kindred.server_app.app import make_strategy, needed_by
from kindred.server_app.config import OWN_DEFAULT, SETTINGS, Config, shared
from kindred.settings import ROUNDS, SEED, Range, Setting, above, at_least, meant_by, one_of, within

from .client_apps import initial, plain_app

ROOT = Path(__file__).parent.parent
MINE = """
from kindred.baselines.fedavg import FedAvg
from kindred.registry import Method
from kindred.settings import Setting, one_of, within

SHADE = Setting("own_shade", 0.25, within(0, 1), "how dark it is", trial=0.5)
KIND = Setting("own_kind", "oak", one_of("oak", "ash"), "which tree it is")

class Mine(FedAvg):
    name = "mine"

    def __init__(self, *, own_shade=SHADE.default, own_kind=KIND.default, **shared):
        super().__init__(**shared)
        self.own_shade, self.own_kind = SHADE.check(own_shade), KIND.check(own_kind)

METHOD = Method(title="Mine", paper="nowhere", travels="the model", strategy=Mine, settings=(SHADE, KIND))
"""
LOOK = """
from kindred.registry import REGISTRY
REGISTRY.own["mine"] = "mine:METHOD"  # the line that registry.py has for each method

from typer.testing import CliRunner
from kindred.server_app.app import make_strategy
from kindred.server_app.cli.run import app, given_settings
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.settings_tables import defaults, method_settings_table, methods_table, table
from tests.test_conformance import make

given = given_settings({"strategy": "mine"}, ["own-shade=0.75"])
config = Config.from_run_config(given)
assert given == {"strategy": "mine", "own-shade": 0.75}
assert (config.own_shade, config.run_config()["own-kind"]) == (0.75, "oak")
assert make_strategy(config).own_shade == 0.75
try:
    Config.from_run_config({"own-kind": "elm"})
except ConfigError as error:
    assert str(error) == "own-kind is 'elm', allowed: oak, ash (str)"
assert '\\nown-shade = 0.25\\nown-kind = "oak"\\n' in defaults()
assert "| `own-shade` | float | 0.25 | 0 to 1 | Mine: how dark it is |" in table()
assert "| `mine` | Mine | nowhere |" in methods_table()
assert "| `mine` | `own-shade`, `own-kind` |" in method_settings_table()
assert " mine " in CliRunner().invoke(app, ["strategies"], env={"COLUMNS": "200"}).output
assert (make("mine").own_shade, make("mine").own_kind) == (0.5, "oak")
"""


def test_a_method_in_one_file_is_available_everywhere(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", REGISTRY)
def test_a_constructor_has_the_command_lines_defaults(name) -> None:
    config, method = Config(strategy=name), REGISTRY[name]
    given = needed_by(config, load_federation(config.run_config()))
    plain, from_the_command = method.strategy(), make_strategy(config, **given)
    for setting in (*method.settings, *ROUNDS):
        default = None if setting.default == "none" else setting.default
        assert getattr(plain, setting.name) == getattr(from_the_command, setting.name) == default


def test_type_checkers_know_the_engine_s_arguments() -> None:
    arguments = set(inspect.signature(PersonalizedStrategy).parameters)
    assert Shared.__annotations__.keys() == arguments
    assert StoredShared.__annotations__.keys() - arguments == {
        name for name in inspect.signature(StoredModels).parameters if name != "shared"
    }


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (Setting("a_b", 1, at_least(1), ""), 0, "a_b is 0, allowed: 1 or more"),
        (Setting("a_b", 1, at_least(1), ""), 1.5, "a_b is 1.5, allowed: 1 or more"),
        (Setting("a_b", 1, at_least(1), ""), True, "a_b is True, allowed: 1 or more"),
        (Setting("a_b", 1.0, above(0), ""), float("inf"), "a_b is inf, allowed: more than 0"),
        (Setting("a_b", "x", one_of("x", "y"), ""), "z", "a_b is 'z', allowed: x, y"),
        (Setting("a_b", 1.0, above(0), ""), "2", "a_b is '2', allowed: more than 0"),
    ],
)
def test_an_out_of_range_value_is_named(setting, value, message) -> None:
    with pytest.raises(ValueError) as refused:
        setting.check(value)
    assert str(refused.value) == message


def test_a_whole_number_is_accepted_as_a_float() -> None:
    assert type(Setting("a", 1.0, above(0), "").check(2)) is float
    assert type(Setting("a", 1, above(0), "").check(2)) is int


def test_methods_with_a_setting_of_the_same_name_keep_their_defaults_and_ranges() -> None:
    first = Setting("width", 2.0, within(0, 4), "of one")
    other = Setting("width", "auto", Range("auto, or 9", lambda value: value in ("auto", 9.0)), "", "float | str")
    both = shared({first: ["One"], other: ["Two", "Three"]})
    assert both.default == OWN_DEFAULT and both.parse("9") == 9.0 and both.parse("auto") == "auto"
    for value in (OWN_DEFAULT, 3.0, 9, "auto"):
        both.check(value)
    with pytest.raises(
        ValueError,
        match=r"width is 5.0, allowed: 0 to 4 \(One\); auto, or 9 \(Two, Three\); default, which is the method's",
    ):
        both.check(5)
    assert shared({first: ["One"], Setting("width", 2.0, within(0, 8), ""): ["Two"]}).default == 2.0


@pytest.mark.parametrize(
    ("key", "meant"),
    [("lr", "learning-rate"), ("learning_rate", "learning-rate"), ("batchsize", "batch-size"), ("colour", None)],
)
def test_a_misspelt_setting_gets_a_suggestion(key, meant) -> None:
    assert meant_by(key, ["learning-rate", "batch-size"]) == meant


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        (
            {"lr": 0.1},
            [
                "train_config has lr, not learning-rate, which clients of make_client_app read; "
                "a ClientApp of your own may read lr"
            ],
        ),
        ({"lr": 0.1, "learning-rate": 0.1}, []),  # for clients of two kinds
        ({"local-epochs": 1, "palette": "warm"}, []),
    ],
)
def test_an_unused_setting_of_local_training_gets_a_warning(config, warned, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(engine, "log", lambda level, text, *values: said.append(text % values))
    Local().start(InlineGrid(plain_app(), 2), initial(), 1, train_config=ConfigRecord(config))
    assert [line.removeprefix("kindred: ") for line in said if "train_config" in line] == warned


def test_no_number_of_a_setting_is_without_a_bound() -> None:
    """Apart from the seed, whose bound is what a message can carry."""
    settings = {*SETTINGS.values(), *(each for name in REGISTRY.own for each in REGISTRY[name].settings)}
    for setting in (each for each in settings if each.name != SEED.name):
        for huge in (2**40, 1e300):
            if type(huge).__name__ in setting.kind.split(" | "):
                with pytest.raises(ValueError, match=r"^it is .*, allowed: "):
                    setting.check(huge, "it")
