"""Incompatible versions are refused in one line: Flower's at the start, others at the first contact."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

import kindred
from kindred import InlineGrid, Local, TooFewClients, make_client_app
from kindred.server_app import run_log
from kindred.server_app.cli import run as command_line
from kindred.versions import FLOWER, VERSION, check_flower

from .client_apps import initial

ROOT = Path(__file__).parent.parent


@pytest.fixture
def other_flower(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.42.0" if name == "flwr" else real(name))
    check_flower.cache_clear()
    yield
    check_flower.cache_clear()


REFUSED = f"flwr is 1.42.0, allowed with kindred-fl {VERSION}: {FLOWER}; install it with pip install flwr=={FLOWER}"


def test_another_version_of_flower_is_refused_when_a_name_of_the_library_is_used(other_flower) -> None:
    with pytest.raises(ImportError) as refused:
        kindred.__getattr__("HeurFedAMP")
    assert str(refused.value) == REFUSED


def test_another_version_of_flower_ends_the_command_line_with_one_line_and_code_2(other_flower, capsys) -> None:
    with pytest.raises((SystemExit, command_line.typer.Exit)) as ended:
        command_line.main()
    assert getattr(ended.value, "exit_code", getattr(ended.value, "code", None)) == 2
    assert capsys.readouterr().err == f"kindred: {REFUSED}\n"


def test_the_version_of_flower_is_the_one_the_package_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"flwr[simulation]=={FLOWER}" in project["dependencies"]
    assert project["version"] == VERSION == kindred.__version__


def started(app: ClientApp) -> Local:
    strategy = Local(min_available_nodes=1)
    strategy.start(InlineGrid(app, 2), initial(), 1)
    return strategy


def test_a_server_excludes_clients_of_another_version_by_name() -> None:
    def client(about: dict[str, object]) -> ClientApp:
        app = ClientApp()

        @app.query("identity")
        def identity(message, context):
            name = f"site-{context.node_config['partition-id']}"
            record = ConfigRecord({"client-id": name, "num-examples": 3, "methods": ["local"], **about})
            return Message(RecordDict({"config": record}), reply_to=message)

        return app

    same = f", this server kindred-fl {VERSION}: install the same version on both machines"
    for about, theirs in (({}, "a version before 0.2.0"), ({"kindred-version": "0.3.1"}, "kindred-fl 0.3.1")):
        with pytest.raises(TooFewClients, match="site-0") as refused:
            started(client(about))
        assert f"the client has {theirs}{same}" in str(refused.value)


@pytest.mark.parametrize(("sent", "theirs"), [(None, "a version before 0.2.0"), ("0.1.0", "kindred-fl 0.1.0")])
def test_a_client_refuses_a_server_of_another_version_and_its_operator_sees_this(sent, theirs, caplog) -> None:
    grid = InlineGrid(make_client_app(lambda context: pytest.fail("no data are loaded for it")), 1)
    (context,) = grid._contexts.values()
    context.node_config = {"client-id": "lyon", "state-dir": "/nowhere"}
    content = RecordDict() if sent is None else RecordDict({"config": ConfigRecord({"kindred-version": sent})})
    (reply,) = grid.pull_messages(grid.push_messages([Message(content, context.node_id, "query.identity")]))
    line = f"the server has {theirs}, this client kindred-fl {VERSION}: install the same version on both machines"
    assert dict(reply.content["config"]) == {"client-id": "lyon", "problem": line}
    assert f"kindred: this site takes no part: {line}" in caplog.messages


def test_failed_runs_have_their_own_logs_and_the_newest_are_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(run_log, "LOGS_KEPT", 2)
    kept = [run_log.keep_log(f"log {number}") for number in range(3)]
    assert len(set(kept)) == 3
    there = set((tmp_path / "kindred" / "logs").iterdir())
    assert len(there) == 2 and there < set(kept)
