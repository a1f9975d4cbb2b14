"""`kindred check-app`, and what a strategy says of results that its user may misread."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from typer.testing import CliRunner

from kindred import REGISTRY, FedAvg, HeurFedAMP, InlineGrid, Local
from kindred.engine import introductions
from kindred.server_app.app_check import OURS, Finding, check_app
from kindred.server_app.cli import commands
from kindred.server_app.config import ConfigError

from .client_apps import initial, plain_app

ROOT = Path(__file__).parent.parent
PYPROJECT = """
[tool.flwr.app.components]
serverapp = "{name}.server:app"
clientapp = "{name}.client:app"

[tool.flwr.app.config]
num-rounds = 2
"""
SERVER = """
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    FedAvg(min_available_nodes=7).start(grid, ArrayRecord([np.zeros(3)]), num_rounds=context.run_config["num-rounds"])
"""
CLIENT = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    {training}
    metrics = MetricRecord({{"num-examples": 3, "train_loss": 1.0}})
    return Message(RecordDict({{"arrays": message.content["arrays"], "metrics": metrics}}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    metrics = MetricRecord({{"num-examples": 3, "eval_mse": 1.0}})
    return Message(RecordDict({{"metrics": metrics}}), reply_to=message)
"""


def write_app(folder: Path, name: str, server: str = SERVER, training: str = "pass") -> Path:
    (folder / name).mkdir()
    for file, text in (("__init__", ""), ("server", server), ("client", CLIENT.format(training=training))):
        (folder / name / f"{file}.py").write_text(text)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name))
    return folder


@pytest.fixture(autouse=True)
def path(monkeypatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])  # check_app adds the app's folder


def test_an_app_for_fedprox_can_take_part_in_the_methods_whose_clients_only_train() -> None:
    found = {each.method: each for each in check_app(ROOT / "examples" / "plug-in")}
    assert list(found) == list(REGISTRY)
    for name, method in REGISTRY.items():
        ours = method.needs_our_client
        assert found[name].takes_part == (not ours and method.models_travel) and (found[name].text == OURS) == ours
    assert found["perfed-ckt"].text == "it has no public set"
    assert {found[name].text for name in ("heurfedamp", "local", "fedavg", "clustered-fl", "kindred")} == {""}


def test_a_client_app_of_ours_takes_part_in_all_but_those_that_need_public_samples(tmp_path) -> None:
    found = findings_of_ours(tmp_path, (ROOT / "examples" / "plug-in" / "plug_in" / "server_app.py").read_text())
    assert {name for name, each in found.items() if not each.takes_part} == {"perfed-ckt"}
    assert "public" in found["perfed-ckt"].text


@pytest.mark.parametrize("strategy", ["HypCluster", "FedeRiCo"])
def test_the_model_of_a_strategy_of_ours_is_the_one_that_it_starts_from(tmp_path, strategy) -> None:
    """Its messages hold several models, or in the first round none."""
    server = SERVER.replace("from flwr.serverapp.strategy import FedAvg", f"from kindred import {strategy} as FedAvg")
    server = server.replace("import numpy", "from plug_in.task import make_net\nimport numpy")
    server = server.replace("ArrayRecord([np.zeros(3)])", "ArrayRecord(make_net().state_dict())")
    found = findings_of_ours(tmp_path, server)
    assert {name for name, each in found.items() if not each.takes_part} == {"perfed-ckt"}


def findings_of_ours(tmp_path: Path, server: str) -> dict[str, Finding]:
    example = ROOT / "examples" / "plug-in"
    text = (ROOT / "docs" / "plugging-in.md").read_text()
    (client,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.S)
        if "make_client_app(load_site)\n" in block and "torch" not in block
    ]
    app = write_app(tmp_path, "ours")
    (app / "ours" / "client.py").write_text(client)
    (app / "ours" / "server.py").write_text(server)
    sys.path.insert(0, str(example))
    with open(app / "pyproject.toml", "a") as file:
        file.write("lr = 0.002\nmodels-dir = 'models'\nlocal-epochs = 1\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ours"]:
        del sys.modules[name]  # of an app before
    return {each.method: each for each in check_app(app)}


def test_a_client_app_of_another_kind_that_reports_a_public_set_takes_part_in_perfed_ckt(tmp_path) -> None:
    app = write_app(tmp_path, "logits")
    (app / "logits" / "client.py").write_text("from tests.client_apps import logits_app\n\napp = logits_app()\n")
    found = {each.method: each for each in check_app(app)}
    assert found["perfed-ckt"].takes_part and found["perfed-ckt"].text == ""


def test_the_records_of_a_message_may_have_other_names(tmp_path) -> None:
    server = SERVER.replace("FedAvg(min", 'FedAvg(arrayrecord_key="model", configrecord_key="settings", min')
    training = 'message.content["arrays"] = message.content["model"]; assert message.content["settings"]'
    found = {each.method: each for each in check_app(write_app(tmp_path, "renamed", server, training))}
    assert found["heurfedamp"].takes_part and found["fedavg"].takes_part


def test_the_reasons_are_those_of_the_client(tmp_path) -> None:
    (tmp_path / "sends").mkdir(), (tmp_path / "fails").mkdir()
    sends = {each.method: each for each in check_app(write_app(tmp_path / "sends", "app_sends"))}
    assert sends["local"].takes_part and sends["local"].text == "no client reported accuracy: it sent eval_mse"
    fails = check_app(write_app(tmp_path / "fails", "app_fails", training='raise ValueError("no such file: x.csv")'))
    (local,) = (each for each in fails if each.method == "local")
    assert not local.takes_part and "no such file: x.csv" in local.text


@pytest.mark.parametrize(
    ("training", "says"),
    [("return None", "its ClientApp returned NoneType, allowed: a Message"), ("raise SystemExit(3)", "SystemExit: 3")],
)
def test_a_client_that_does_not_answer_can_take_part_in_no_method(tmp_path, training, says) -> None:
    found = check_app(write_app(tmp_path, f"app_{abs(hash(says))}", training=training))
    assert not any(each.takes_part for each in found)
    assert says in {each.method: each for each in found}["feddf"].text


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("raise RuntimeError('its import')", "cannot be loaded (RuntimeError: its import)"),
        (SERVER.replace("FedAvg(", "NoSuch("), "fails before it asks a client to train (NameError"),
        (SERVER.replace("    FedAvg(min_available_nodes=7)", "    return\n    FedAvg()"), "without asking a client"),
    ],
)
def test_an_app_that_cannot_be_checked_is_refused_with_the_reason(tmp_path, server, says) -> None:
    name = f"app_{abs(hash(says))}"
    with pytest.raises(ConfigError) as refused:
        check_app(write_app(tmp_path, name, server))
    assert says in str(refused.value)


def test_the_command_prints_the_table_or_one_line(tmp_path) -> None:
    refused = CliRunner().invoke(commands.app, ["check-app", str(tmp_path)])
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1 and "pyproject.toml" in refused.stderr
    said = CliRunner().invoke(commands.app, ["check-app", str(ROOT / "examples" / "plug-in")])
    assert said.exit_code == 0
    assert re.search(r"^ heurfedamp +yes *$", said.stdout, re.M) and re.search(
        f"^ ditto +no +{OURS} *$", said.stdout, re.M
    )


# --- What a strategy says at the end --------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "personal"), [(HeurFedAMP(), True), (Local(), True), (FedAvg(), False)])
def test_a_warning_says_where_the_personal_models_are(strategy, personal, caplog) -> None:
    strategy.start(InlineGrid(plain_app(), 3), initial(), 1)
    named = [record for record in caplog.records if "client_models()" in record.getMessage()]
    assert [record.levelno for record in named] == [logging.WARNING] * personal


@pytest.mark.parametrize("sent", ["eval_mse", "rmse"])
def test_a_metric_that_nobody_reported_is_named_with_what_was_sent(sent, caplog) -> None:
    app = reporting(sent, 2.0)
    Local().start(InlineGrid(app, 2), initial(), 1)
    assert f"kindred: no client reported accuracy: it sent {sent}; the strategy's argument metric" in caplog.text
    caplog.clear()
    Local().start(InlineGrid(plain_app(), 2), initial(), 1)
    assert "no client reported" not in caplog.text


@pytest.mark.parametrize(
    ("value", "says", "warned"),
    [
        (87.0, "client 1001 sent accuracy 87.0, allowed: a number from 0 to 1", True),
        (float("nan"), "all that sent it sent nan", False),
    ],
)
def test_a_value_that_the_metric_cannot_have_is_named_once(caplog, value, says, warned) -> None:
    (strategy := Local()).start(InlineGrid(reporting("eval_acc", value), 2), initial(), 2)
    assert strategy.history.last_values() == {}
    assert caplog.text.count(f"{says}; such values do not count") == warned
    assert caplog.text.count(f"no client reported accuracy: {says}") == 1


def reporting(name: str, value: object) -> ClientApp:
    """Return clients that train nothing and report this metric of each evaluation."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context) -> Message:
        content = {"arrays": ArrayRecord(dict(message.content["arrays"])), "m": MetricRecord({"num-examples": 3})}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context) -> Message:
        return Message(RecordDict({"m": MetricRecord({"num-examples": 3, name: value})}), reply_to=message)

    return app


def test_flowers_traceback_of_the_unknown_query_is_not_logged(caplog) -> None:
    logger = logging.getLogger("flwr")
    with introductions._no_traceback_of_the_query():
        logger.error("Traceback ...\nValueError: No query function registered with name 'identity'")
        logger.error("An exception was raised when processing a message by %s", "RayBackend")
        logger.error("another error")
    logger.error("No query function registered with name 'identity'")
    assert caplog.messages == ["another error", "No query function registered with name 'identity'"]
