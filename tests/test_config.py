"""Settings: one definition of name, type, default, range and meaning."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from flwr.app import ConfigRecord

from kindred import REGISTRY, InlineGrid
from kindred.client_app.app import app as client_app
from kindred.data import load_clients, load_federation
from kindred.server_app.app import make_strategy, needed_by, prepare
from kindred.server_app.config import OWN_DEFAULT, Config, ConfigError, kebab
from kindred.server_app.settings_tables import written

ROOT = Path(__file__).parent.parent
ONE_EPOCH = {"local-epochs": 1, "batch-size": 50}


def test_pyproject_lists_every_setting_with_its_default() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert list(listed) == [kebab(field.name) for field in fields(Config)]
    assert listed == Config().run_config()
    assert {key: type(value) for key, value in listed.items()} == {
        key: type(value) for key, value in Config().run_config().items()
    }


def test_documents_and_pyproject_match_the_methods_files() -> None:
    """If not: python -m kindred.server_app.settings_tables --write"""
    for path, text in written(ROOT).items():
        assert path.read_text() == text, path
    listed = (ROOT / "docs" / "configuration.md").read_text()
    for key in Config().run_config():
        assert f"\n| `{key}` |" in listed


def test_every_method_has_a_page_and_the_index_lists_them_in_the_order_of_the_registry() -> None:
    pages = ROOT / "docs" / "methods"
    assert {path.stem for path in pages.glob("*.md")} == {"index", *REGISTRY.own}
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\.md\) (.*)$", (pages / "index.md").read_text(), re.MULTILINE)
    assert [(title, name) for title, name, _ in rows] == [(REGISTRY[name].title, name) for name in REGISTRY.own]
    for _, name, rest in rows:
        assert f"| {REGISTRY[name].travels} |" in rest
        text = (pages / f"{name}.md").read_text()
        assert text.startswith(f"# {REGISTRY[name].title}\n")
        for function, path in re.findall(r"\[`([\w.]+)`\]\((\S+\.py)\)", text):
            code = (pages / path).resolve().read_text()
            assert re.search(rf"\b(def|class) {function.rpartition('.')[2]}\b", code), (name, function, path)


def test_uv_excludes_exactly_the_dependencies_that_pip_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    wanted = [*project["project"]["dependencies"], *(name for extra in extras for name in extra)]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in wanted}
    assert names == set(project["tool"]["uv"]["exclude-dependencies"])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("local-epoch", 1, "unknown setting local-epoch; did you mean local-epochs?"),
        ("sigm", 1, "unknown setting sigm; did you mean sigma?"),
        ("lr", 1, "unknown setting lr; did you mean learning-rate?"),
        ("weather", 1, "unknown setting weather; known: strategy, seed, "),
        ("strategy", "fedamb", "strategy is 'fedamb', allowed: one of fedamp, heurfedamp, "),
        ("dataset", "imagenet", "dataset is 'imagenet', allowed: one of digits, mnist, "),
        ("num-clients", 0, "num-clients is 0, allowed: 2 to 1,000,000 (int)"),
        ("num-clients", 1, "num-clients is 1, allowed: 2 to 1,000,000 (int)"),
        ("num-rounds", "5", "num-rounds is '5', allowed: 1 to 1,000,000 (int)"),
        ("num-rounds", 2.5, "num-rounds is 2.5, allowed: 1 to 1,000,000 (int)"),
        ("num-rounds", True, "num-rounds is True, allowed: 1 to 1,000,000 (int)"),
        ("learning-rate", 0, "learning-rate is 0.0, allowed: more than 0, at most 1,000 (float)"),
        ("learning-rate", float("inf"), "learning-rate is inf, allowed: more than 0, at most 1,000 (float)"),
        (
            "sigma",
            float("nan"),
            "sigma is nan, allowed: more than 0, at most 1e+12, or auto (FedAMP); "
            "more than 0, at most 1e+12 (HeurFedAMP); default, which is ",
        ),
        ("fraction-train", 1.5, "fraction-train is 1.5, allowed: more than 0, at most 1 (float)"),
        ("self-weight", 1.5, "self-weight is 1.5, allowed: 0 to 1, uniform "),
        ("self-weight", "half", "self-weight is 'half', allowed: 0 to 1, uniform "),
        ("with-replacement", "yes", "with-replacement is 'yes', allowed: true or false (bool)"),
        ("data-dir", 3, "data-dir is 3, allowed: any text (str)"),
    ],
)
def test_an_invalid_setting_is_named_with_its_value_and_the_allowed_ones(key, value, message) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_run_config({key: value})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_whole_numbers_are_accepted_as_floats() -> None:
    config = Config.from_run_config({"sigma": 10, "self-weight": 0})
    assert (config.sigma, config.self_weight) == (10.0, 0.0) and type(config.sigma) is float


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_gets_its_own_settings(name) -> None:
    config = Config(strategy=name, sigma=3.0, self_weight=0.4, proximal_mu=0.7, finetune_epochs=2, lam=5.0)
    strategy = make_strategy(config, **needed_by(config, load_federation(config.run_config())))
    assert strategy.name == name
    for setting in REGISTRY[name].settings:
        given = getattr(config, setting.name)
        assert getattr(strategy, setting.name) == (setting.default if given == OWN_DEFAULT else given)


def test_fedamp_without_a_self_weight_uses_equation_5_and_heurfedamp_cannot() -> None:
    assert make_strategy(Config(strategy="fedamp", self_weight="none")).self_weight is None
    with pytest.raises(
        ConfigError,
        match=r"heurfedamp: self-weight is 'none', allowed: 0 to 1, uniform ",
    ):
        make_strategy(Config(strategy="heurfedamp", self_weight="none"))


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_the_groups_of_a_partition_give_each_client_its_self_weight(name) -> None:
    config = Config(strategy=name, self_weight="groups", partition="practical", num_clients=5, num_groups=2)
    federation = load_federation(config.run_config())
    assert federation.groups.tolist() == [0, 0, 0, 1, 1]
    strategy, initial = prepare(config, federation)
    strategy.start(InlineGrid(client_app, 5, config.run_config()), initial, 2, train_config=ConfigRecord(ONE_EPOCH))
    clients, weights = strategy.collaboration()
    assert clients == [0, 1, 2, 3, 4]
    assert weights.diagonal() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2])


def test_without_known_groups_a_self_weight_by_groups_is_refused() -> None:
    for partition in ("iid", "pathological", "dirichlet", "clustered-dirichlet"):
        config = Config(self_weight="groups", partition=partition)
        with pytest.raises(
            ConfigError,
            match=f"^self-weight is 'groups', and partition {partition} has no groups of clients here; "
            "set self-weight to 0 to 1, or uniform$",
        ):
            needed_by(config, load_federation(config.run_config()))
    sites = Config(self_weight="groups", dataset="sites", image_shape="1x8x8", num_classes=10)
    with pytest.raises(ConfigError, match="^self-weight is 'groups', and the groups of real sites are not known; set "):
        prepare(sites, load_clients(sites.run_config()))
    other = Config(strategy="local", self_weight="groups", partition="iid")  # which has no such setting
    assert needed_by(other, load_federation(other.run_config())) == {"metric": "accuracy"}


def test_both_methods_accept_a_number_for_sigma_and_have_their_own_default() -> None:
    assert Config().sigma == "default"
    assert [make_strategy(Config(strategy=name)).sigma for name in ("fedamp", "heurfedamp")] == ["auto", 100.0]
    assert [make_strategy(Config(strategy=name, sigma=10)).sigma for name in ("fedamp", "heurfedamp")] == [10.0, 10.0]
    with pytest.raises(ConfigError, match="^heurfedamp: sigma is 'auto', allowed: more than 0, at most 1e\\+12$"):
        make_strategy(Config(strategy="heurfedamp", sigma="auto"))
