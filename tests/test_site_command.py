"""`kindred site`: bad input, and the check of a site. A real run is in test_deployment.py."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import socket
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.common.config import parse_config_args
from hypothesis import HealthCheck, given, settings, strategies as st
from typer.testing import CliRunner

from kindred import FedAvg, InlineGrid
from kindred.client.journal import JOURNAL
from kindred.client_app.app import app as client_app
from kindred.data import DataError, Sites, Task
from kindred.data.inputs import TableInputs
from kindred.data.schema import Column, Schema
from kindred.engine.roster import TooFewClients
from kindred.objectives import Classes
from kindred.server_app.app import prepare
from kindred.server_app.cli.run import app
from kindred.server_app.config import Config
from kindred.server_app.deployment import (
    site as site_command,
)
from kindred.server_app.deployment.site import client_id, node_config
from kindred.server_app.deployment.site_check import fit, read_run_config
from kindred.server_app.deployment.site_page import SitePage
from kindred.server_app.machine import cpus

from .background_commands import free_port
from .deployment_commands import data_fixture, kindred, made_keys_fixture  # noqa: F401

IN_ANY_TIME = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("keys new", ["--server", "not given"]),
        ("keys new --server fl_example", ["--server", "fl_example"]),
        ("keys new --server 300.1.1.1", ["--server", "300.1.1.1"]),
        ("keys new --server 0.0.0.0", ["--server", "0.0.0.0"]),
        ("keys new --server localhost --sites ly/on", ["--sites", "ly/on", "letters"]),
        ("keys new --server localhost --sites .lyon", ["--sites", ".lyon", "letters"]),
        ("keys new --server localhost --sites ca", ["--sites", "ca"]),
        ("keys new --server localhost --sites lyon,Lyon", ["--sites", "lyon", "twice"]),
        ("keys open --server localhost", ["open", "chmod 700"]),
        ("keys renew nowhere", ["nowhere/server.crt", "No such file"]),
        ("keys renew KEYS --sites oslo", ["--sites", "renew DIR"]),
        ("keys KEYS KEYS", ["allowed: DIR, or renew DIR"]),
        ("keys digits.npz --server localhost", ["digits.npz", "folder"]),
        ("server --keys KEYS --insecure", ["--keys", "--insecure"]),
        ("server --host 0.0.0.0", ["--host", "0.0.0.0", "--keys"]),
        ("server --host fl.example.org", ["--host", "fl.example.org", "--keys"]),
        ("server --host a/b", ["--host", "a/b"]),
        ("server --port 0", ["--port", "0", "1 to 65535"]),
        ("server --port 70000", ["--port", "70000", "1 to 65535"]),
        ("server --keys nowhere", ["nowhere/ca.crt", "No such file"]),
        ("server --keys KEYS --host 192.0.2.9", ["server.crt", "192.0.2.9", "fl.example.org"]),
        ("server --port TAKEN --state state", ["--port", "TAKEN", "127.0.0.1"]),
        ("server --port FREE --state state --watch-address 127.0.0.1:TAKEN", ["--watch-address", "TAKEN"]),
        ("server --insecure --host 192.0.2.9 --state state", ["--port", "192.0.2.9"]),
        ("site ly/on --server localhost:1 --data-dir digits.npz", ["NAME", "ly/on", "letters"]),
        ("site lyon --server localhost --data-dir digits.npz", ["--server", "localhost", "HOST:PORT"]),
        ("site lyon --server localhost:70000 --data-dir digits.npz", ["--server", "70000", "65535"]),
        ("site lyon --server http://localhost:1 --data-dir digits.npz", ["--server", "http://localhost:1"]),
        ("site lyon --server fl.example.org:1 --data-dir digits.npz", ["--server", "fl.example.org", "--ca", "--key"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --key KEYS/lyon.key", ["--ca", "not given"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --insecure --ca KEYS/ca.crt", ["--insecure", "--ca"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --ca KEYS/lyon.pub --key KEYS/lyon.key", ["lyon.pub"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --ca KEYS/ca.crt --key KEYS/ca.key", ["ca.key"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --ca KEYS/ca.crt --key lent.key", ["lent.key", "chmod"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --ca KEYS/ca.crt --key lent", ["lent", "chmod go="]),
        ("site lyon --server localhost:1 --data-dir digits.npz --ca ca.crt --key KEYS/lyon.key", ["ca.crt", "go-w"]),
        ("site lyon --server localhost:1 --data-dir nowhere", ["data-dir", "nowhere"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --public-data nowhere", ["public-data", "nowhere"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --public-data large.npz", ["1x9x9", "1x8x8"]),
        ("site lyon --server localhost:1 --data-dir one.npz", ["one.npz", "1 samples", "2 or more"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --threads 0", ["--threads", "0", str(cpus())]),
        ("site lyon --server localhost:1 --data-dir digits.npz --port 0", ["--port", "0", "1 to 65535"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --state-dir digits.npz", ["digits.npz", "folder"]),
        (
            "site lyon --server localhost:1 --data-dir digits.npz --state-dir digits.npz --check",
            ["--state-dir", "folder"],
        ),
        (
            "site lyon --server localhost:1 --data-dir digits.npz --state-dir large.npz/state --check",
            ["large.npz/state", "folder"],
        ),
        ("site lyon --server localhost:1 --data-dir digits.npz --schema pipe", ["pipe", "no file"]),
    ],
)
def test_bad_input_gets_one_line_and_code_2_and_starts_nothing(
    arguments, says, tmp_path, data, made_keys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    for name in ("lent.key", "lent"):
        (tmp_path / name).write_bytes((made_keys / "lyon.key").read_bytes())
        (tmp_path / name).chmod(0o644)
    (tmp_path / "ca.crt").write_bytes((made_keys / "ca.crt").read_bytes())
    (tmp_path / "ca.crt").chmod(0o666)
    np.savez(tmp_path / "large.npz", x=np.zeros((3, 9, 9), np.uint8))
    np.savez(tmp_path / "one.npz", x=np.zeros((1, 9, 9), np.uint8), y=np.zeros(1, int))
    before = {path.name for path in tmp_path.iterdir()}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        put = {"KEYS": str(made_keys), "TAKEN": port, "FREE": str(free_port())}
        result = CliRunner().invoke(app, re.sub("KEYS|TAKEN|FREE", lambda found: put[found[0]], arguments).split())
    assert result.exit_code == 2, result.output
    *warning, error = result.stderr.splitlines()
    assert all("without TLS" in line for line in warning)
    assert error.startswith("kindred: ")
    for word in says:
        assert put.get(word, word) in error
    assert {path.name for path in tmp_path.iterdir()} - before <= {"state"}


def test_check_refuses_a_state_folder_that_cannot_be_written_to(tmp_path, data, monkeypatch) -> None:
    def refuse(dir):
        assert dir == tmp_path  # the nearest folder that exists
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)  # root may write anywhere
    error = site_for(RUN, data, "--state-dir", tmp_path / "state" / "deep", "--check", code=2)
    assert f"{tmp_path} cannot be written to" in error


def test_check_prints_what_the_server_learns_and_starts_nothing(tmp_path, data, made_keys, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    np.savez(tmp_path / "public.npz", x=np.zeros((30, 8, 8), np.float32))
    said = kindred(
        "site", "lyon", "--server", "fl.example.org:8000", "--data-dir", data, "--public-data", tmp_path / "public.npz",
        "--ca", made_keys / "ca.crt", "--key", made_keys / "lyon.key", "--state-dir", tmp_path / "state",
        "--threads", 1, "--port", 9123, "--no-share-model", "--report-weights", "--check",
    )  # fmt: skip
    assert "40 images of 1x8x8 to train on, 20 to test on, labels up to 9" in said
    assert "reported to the server at first: the name lyon, the number of training samples (40, less " in said
    assert "that no other site may receive its model, the version of its kindred and which methods that sup" in said
    assert "supports, with PerFed-CKT " in said
    assert "that it has 30 public samples and their " in said
    command = said.splitlines()[-1]
    assert "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 " in command
    assert "FLWR_TELEMETRY_ENABLED=0 " in command
    assert f"flower-supernode --superlink fl.example.org:8000 --root-certificates {made_keys}/ca.crt " in command
    assert f"--auth-supernode-private-key {made_keys}/lyon.key --host 127.0.0.1 --port 9123 --node-config " in command
    given = re.search("--node-config '(.*)'$", command)[1]
    assert parse_config_args([given]) == {
        "client-id": "lyon", "data-dir": str(data), "public-data": str(tmp_path / "public.npz"),
        "state-dir": str(tmp_path / "state"), "share-model": False, "report-weights": True,
    }  # fmt: skip
    assert not (tmp_path / "state").exists()


def test_the_operator_bounds_the_work_of_a_message(data) -> None:
    site = "site", "lyon", "--server", "localhost:1", "--insecure", "--data-dir", data, "--check"
    given = re.search("--node-config '(.*)'$", kindred(*site, "--max-epochs", 20, "--max-batch-size", 64), re.M)[1]
    node = parse_config_args([given])
    assert (node["max-epochs"], node["max-batch-size"]) == (20, 64) and "max-steps" not in node
    assert "--max-steps is 0, allowed: 1 or more" in kindred(*site, "--max-steps", 0, code=2)


def test_check_says_what_few_samples_do_not_allow(tmp_path) -> None:
    x = np.arange(640, dtype=np.float32).reshape(10, 8, 8) / 640
    site = "site", "lyon", "--server", "localhost:1", "--insecure", "--data-dir"

    def said(y_train: list[int], y_test: list[int], *options: str) -> str:
        arrays = {"x_train": x[: len(y_train)], "y_train": y_train, "x_test": x[-len(y_test) :], "y_test": y_test}
        np.savez(tmp_path / "few.npz", **arrays)
        return kindred(*site, tmp_path / "few.npz", "--check", *options)

    one_class, nothing_held_out = "the test data have one class: AUROC", "no training sample can be held out"
    assert one_class in (text := said([0, 1, 1], [1, 1])) and nothing_held_out not in text
    assert nothing_held_out in (text := said([0, 1], [0, 1])) and one_class not in text
    assert nothing_held_out not in (text := said([0], [1], "--validate-only")) and one_class not in text


HEART = Task(
    TableInputs(Schema((Column("age", (), True, 50.0, 10.0), Column("sex", ("F", "M"), True)), "sick>0", "hospital")),
    Classes(2, ("not sick>0", "sick>0")),
)
ROWS = ["sex,sick,age", "F,0,50", "M,2,", "D,1,61", "F,0,39", "M,1,44", "F,0,71"]  # without a column of the hospital


def heart_site(tmp_path: Path, rows: list[str], *options: object, code: int = 0) -> str:
    (tmp_path / "lyon.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "schema.json").write_text(json.dumps(HEART.to_dict()))
    site = ("site", "lyon", "--server", "localhost:1", "--insecure", "--data-dir", tmp_path / "lyon.csv")
    return kindred(*site, "--check", *options, code=code)


def test_a_table_needs_a_schema_and_is_checked_by_it(tmp_path) -> None:
    said = heart_site(tmp_path, ROWS, code=2)
    assert "lyon.csv" in said and "needs a schema" in said
    said = heart_site(tmp_path, ROWS, "--schema", tmp_path / "schema.json")
    assert "lyon: 6 rows of 2, the run's test-share of them to test on" in said
    assert "column 'sex': 1 of 6 cells have a category that the schema does not have" in said
    (given,) = re.findall("--node-config '(.*)'", said)
    assert parse_config_args([given])["schema"] == str(tmp_path / "schema.json")


def test_a_check_names_the_first_ten_cells_that_do_not_fit(tmp_path) -> None:
    rows = [ROWS[0], *(f"F,{'ill' if k == 3 else 0},{'old' if k > 6 else 50}" for k in range(20))]
    *lines, last = heart_site(tmp_path, rows, "--schema", tmp_path / "schema.json", code=2).splitlines()
    assert lines[0] == f"{tmp_path}/lyon.csv: row 5, column sick: 'ill', allowed: a number from -1e+30 to 1e+30"
    ages = [
        f"{tmp_path}/lyon.csv: row {k}, column age: 'old', allowed: a number from -1e+30 to 1e+30" for k in range(9, 18)
    ]
    assert lines[1:10] == ages and "do not fit the schema" in last
    said = heart_site(tmp_path, ["sex,age", "F,3"], "--schema", tmp_path / "schema.json", code=2)
    assert "lyon.csv has no column 'sick'" in said


def test_a_site_with_a_schema_fits_a_run_with_one(tmp_path) -> None:
    run = 'dataset="sites" schema="/at/the/server.json" test-share=0.5'
    said = heart_site(tmp_path, ROWS, "--schema", tmp_path / "schema.json", "--run-config", run)
    assert "fits the run: heurfedamp with mlp, 2 classes, 2 training samples" in said


RUN = 'dataset="sites" image-shape="1x8x8" num-classes=10'


def site_for(run: str, data: Path, *options: object, code: int = 0) -> str:
    return kindred(
        "site",
        "lyon",
        "--server",
        "localhost:1",
        "--data-dir",
        data,
        "--insecure",
        "--run-config",
        run,
        *options,
        code=code,
    )


@pytest.mark.parametrize(
    ("run", "options", "says"),
    [
        (RUN, [], "heurfedamp with digits-cnn, 10 classes, 32 training samples"),
        (f'{RUN} strategy="fedem"', [], "fedem with digits-cnn, 10 classes, 32 training samples"),
        (f'{RUN} strategy="federico"', ["--no-share-model"], "federico with digits-cnn, 10 classes, 32 training"),
        (f'{RUN} strategy="feddf" public-data="/at/the/server.npz" public-size=500', [], "feddf with digits-cnn, "),
        (
            f'{RUN} strategy="perfed-ckt" model="digits-cnn,mcmahan-cnn"',
            ["--public-data", "public.npz"],
            "10 classes, 32 training samples, 30 public samples",
        ),
    ],
)
def test_a_site_that_fits_a_run_gets_a_confirmation(run, options, says, data, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("public.npz", x=np.zeros((30, 8, 8), np.float32))
    Path("run.toml").write_text(run.replace(" ", "\n"))
    for run_config in (run, "run.toml"):
        said = site_for(run_config, data, *options, "--check")
        assert "fits the run: " in said and says in said


@pytest.mark.parametrize(
    ("run", "options", "says"),
    [
        ('dataset="sites" image-shape="1x8x8" num-classes=5', [], ["does not fit", "from 0 to 9", "5 classes"]),
        ('dataset="sites" image-shape="1x28x28" num-classes=10', [], ["does not fit", "are 1x8x8, expected 1x28x28"]),
        ('dataset="sites" image-shape="1x8x8" class-names="a,b,c"', [], ["labels go from 0 to 9", "3 classes"]),
        (f'{RUN} strategy="fedavg"', ["--no-share-model"], ["does not fit", "share-model is false", "fedavg mixes"]),
        (f'{RUN} strategy="kindred"', ["--no-share-model"], ["does not fit", "share-model is false", "kindred mixes"]),
        (f'{RUN} strategy="perfed-ckt"', [], ["does not fit", "public-data is not in the node config"]),
        (f'{RUN} strategy="perfed-ckt"', ["--public-data", "large.npz"], ["public-data", "1x9x9", "1x8x8"]),
        (f'{RUN} strategy="feddf"', [], ["cannot start", "public-data is 'auto'", "server's machine"]),
        (f'{RUN} model="digits-cnn,mcmahan-cnn"', [], ["cannot start", "model is", "one network"]),
        (f'{RUN} model="digits-cnm"', [], ["model is 'digits-cnm'", "digits-cnn"]),
        (f'{RUN} strategy="fedavgg"', [], ["strategy is 'fedavgg'"]),
        (f"{RUN} num-round=3", [], ["unknown setting num-round"]),
        ('dataset="sites" num-classes=10', [], ["cannot start", "image-shape is ''", "1x28x28"]),
        ('image-shape="1x8x8" num-classes=10', [], ["dataset is 'digits'", "sites"]),
        (f"{RUN} strategy=fedavg", [], ["--run-config", "quotation marks"]),
        ("fedavg", [], ["--run-config is 'fedavg'", ".toml", "key=value"]),
        ("nowhere.toml", [], ["--run-config is 'nowhere.toml'", "No such file"]),
        (RUN, ["--class-names", "a,b"], ["--class-names", "--run-config", "one of them"]),
    ],
)
@pytest.mark.parametrize("check", [["--check"], []], ids=["checked", "started"])
def test_a_site_that_does_not_fit_a_run_gets_the_reason_and_is_not_started(
    run, options, says, check, data, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    np.savez("large.npz", x=np.zeros((3, 9, 9), np.uint8))
    *_, error = site_for(run, data, *options, *check, code=2).splitlines()
    assert error.startswith("kindred: ") and all(word in error for word in says), error


def test_a_site_that_fits_a_run_is_started_without_check(data, tmp_path, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(site_command, "keep_running", lambda command, *_: started.append(command()))
    site_for(RUN, data, "--state-dir", tmp_path / "state")
    assert len(started) == 1


def test_the_check_before_a_run_gives_the_server_s_messages(data, tmp_path, caplog) -> None:
    """A strategy that queries the site gives the same messages."""
    run = read_run_config([f'{RUN} strategy="fedavg"'])
    node = {"client-id": "lyon", "data-dir": str(data), "share-model": False}
    grid = InlineGrid(client_app, 1, run.run_config())
    for context in grid._contexts.values():
        context.node_config = node
    strategy, initial_arrays = prepare(replace(run, min_available_clients=1), Sites.of(run.run_config()))
    with pytest.raises(TooFewClients):
        strategy.start(grid, initial_arrays, 1)
    with pytest.raises(DataError) as refused:
        fit(run, node)
    assert strategy.history.left_out == {"lyon": str(refused.value)}


def test_a_run_names_no_data_of_a_site_and_no_cell_leaves_it(tmp_path, monkeypatch, caplog) -> None:
    """The server learns that there is an error in the data, and the site which."""
    schema, table = tmp_path / "schema.json", tmp_path / "patients.csv"
    schema.write_text(json.dumps(Task(TableInputs(Schema((Column("age"),), "sick")), Classes(2, ("0", "1"))).to_dict()))
    table.write_text("age,sick\n40,0\nAlice Martin,1\n")
    (tmp_path / "other.csv").write_text("name,diagnosis\nAlice Martin,1\n")
    own = f'dataset="sites" schema="{schema}" min-available-clients=1'
    page = SitePage("0", tmp_path, {"lines": [], "classes": []})
    monkeypatch.setenv(JOURNAL, str(page.journal))
    for run, reason in (
        (own, "DataError; its text is fault "),
        (f'dataset="csv" data-dir="{tmp_path / "other.csv"}" target="sick" num-clients=3', "dataset is 'csv', allowed"),
        ('dataset="digits"', "dataset is 'digits', allowed at a site, which has its own data: 'sites'"),
    ):
        caplog.clear()
        node = {"client-id": 0, "data-dir": str(table), "schema": str(schema), "state-dir": str(tmp_path / "state")}
        settings_of_run = parse_config_args([run])
        grid = InlineGrid(
            client_app, 1, Config(**{k.replace("-", "_"): v for k, v in settings_of_run.items()}).run_config()
        )
        for context in grid._contexts.values():
            context.node_config = node
        strategy = FedAvg(min_train_nodes=1, min_available_nodes=1)
        with pytest.raises(TooFewClients) as ended:
            strategy.start(grid, ArrayRecord({"w": Array(np.zeros(1))}), 1, timeout=5)
        (left_out,) = strategy.history.left_out.values()
        assert reason in left_out and "Alice" not in left_out + str(ended.value) and str(tmp_path) not in left_out
        said = [each.getMessage() for each in caplog.records if "kindred: fault " in each.getMessage()]
        assert any("'Alice Martin'" in each for each in said) == (run == own)
        page.write()
        assert "Alice Martin" in page.path.read_text()  # since the first of these runs


@pytest.mark.parametrize(
    ("server", "options", "warned"),
    [
        ("localhost:1", [], "within this machine"),
        ("[::1]:1", ["--insecure"], "within this machine"),
        ("192.0.2.9:1", ["--insecure"], "CAN READ AND CHANGE THEM"),
    ],
)
def test_without_tls_a_line_warns_of_it(server, options, warned, data) -> None:
    result = CliRunner().invoke(app, ["site", "lyon", "--server", server, "--data-dir", str(data), *options, "--check"])
    assert result.exit_code == 0
    assert result.stderr.count("\n") == 1
    assert "without TLS" in result.stderr
    assert warned in result.stderr
    assert f"--superlink {shlex.quote(server)} --insecure" in result.stdout


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


@IN_ANY_TIME
@given(st.dictionaries(st.sampled_from(["a", "b-c", "d"]), TEXTS | st.booleans() | st.integers(0, 2**62)))
def test_a_node_config_is_read_back(values) -> None:
    assert parse_config_args([node_config(values)]) == values


def test_whole_numbers_are_numbers_at_the_server() -> None:
    assert [client_id(name) for name in ("0", "12", "012", "lyon", "1.5", "9" * 30)] == [
        0, 12, "012", "lyon", "1.5", "9" * 30,
    ]  # fmt: skip
