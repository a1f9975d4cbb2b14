"""A real SuperLink and three SuperNodes on loopback, with TLS and authentication, and their failures.

All tests use the same server and sites, one after the other; the last one ends them.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import shlex
import sqlite3
import ssl
import stat
import subprocess
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.supernode import node_auth_http_interceptor
from safetensors.numpy import load_file

from kindred import InlineGrid
from kindred.client.state import MIXTURE, MODEL, ClientState
from kindred.client_app.app import app as client_app
from kindred.data import Sites, load_federation
from kindred.server_app.app import run, run_inline
from kindred.server_app.config import Config, kebab
from kindred.server_app.deployment import connection
from kindred.server_app.tables import read_table

from .background_commands import KINDRED, PATIENCE, SCRIPTS, Machines, free_port, wait_until

pytestmark = pytest.mark.deployment

CLIENTS = (0, 1, 2)
SETTINGS = {"seed": 3, "num_rounds": 2, "samples_per_client": 40, "validation_share": 0.0, "device": "cpu"}
DIGITS = {"dataset": "digits", "partition": "rotated", "num_clients": len(CLIENTS), "num_groups": len(CLIENTS)}
PERFED_CKT = {"strategy": "perfed-ckt", "num_clusters": 2}

FEDERATION = load_federation(Config(**SETTINGS, **DIGITS).run_config())
TASK = FEDERATION.task
SITES = {"dataset": "sites", "image_shape": "1x8x8", "num_classes": 10,
         "input_mean": TASK.inputs.mean[0], "input_deviation": TASK.inputs.deviation[0]}  # fmt: skip


def site_file(folder: Path, client: int) -> Path:
    return folder / f"site-{client}.npz"


def write_data(folder: Path) -> None:
    """Write each site's images of the federation, as whole numbers from 0 to 16."""

    def numbers(x: Any) -> np.ndarray:
        return np.rint(x.numpy()[:, 0].astype(np.float64) * TASK.inputs.deviation[0] + TASK.inputs.mean[0])

    for client in CLIENTS:
        data = FEDERATION.site_data(client)
        arrays = {"train": data.train, "test": data.test}
        np.savez(
            site_file(folder, client),
            **{f"x_{part}": numbers(x) for part, (x, _) in arrays.items()},
            **{f"y_{part}": y.numpy() for part, (_, y) in arrays.items()},
        )
    np.savez(folder / "public.npz", x=numbers(FEDERATION.public_set()))


class Deployment(Machines):
    """A server and its sites."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.address = f"localhost:{free_port()}"
        self.state = folder / "server"

    def start_server(self, name: str = "server") -> None:
        port = self.address.partition(":")[2]
        self.start(name, KINDRED, "server", "--keys", "keys", "--port", port, "--state", self.state)
        self.wait_for(name, "the server is ready")

    def site(self, name: object, *proof: object) -> list[object]:
        """Command for a site; a site that is not one of the three has the data of site 0."""
        data = site_file(self.folder, name if name in CLIENTS else 0)
        return [
            KINDRED,
            "site",
            name,
            "--server",
            self.address,
            "--data-dir",
            data,
            "--public-data",
            "public.npz",
            "--threads",
            1,
            "--state-dir",
            f"state-{name}",
            *proof,
        ]

    def flwr(self, *arguments: str) -> dict[str, Any]:
        quiet = {"FLWR_HOME": str(self.state), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        done = subprocess.run(
            [os.path.join(SCRIPTS, "flwr"), *arguments, "kindred", "--format", "json"],
            env=os.environ | quiet,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        return json.loads(done.stdout[done.stdout.index("{") :])

    def start_run(self, **settings: Any) -> None:
        """Start a run with the command that the server prints."""
        printed = re.search(r"^\$ (FLWR_HOME=\S+ flwr run .*)$", self.said("server"), re.MULTILINE)[1]
        config = " ".join(f"{kebab(name)}={json.dumps(value)}" for name, value in {**SITES, **settings}.items())
        self.start("run", "env", *shlex.split(printed), "--run-config", config)

    def results(self) -> set[Path]:
        return set(self.state.glob("results/*"))

    def finish_run(self) -> tuple[int, Path]:
        """Wait for the end of a run; return its id and the folder of its results."""
        self.running.pop("run").wait(PATIENCE)
        last = max(self.flwr("list")["runs"], key=lambda each: each["pending-at"])
        assert last["status"] == "finished:completed", self.said("run")
        return int(last["run-id"]), max(self.results())  # their names begin with the time

    def kept(self, run_id: int, name: str) -> dict[int, dict[str, np.ndarray] | None]:
        """State of each site under a name."""
        return {client: ClientState(run_id, client, self.folder / f"state-{client}").load(name) for client in CLIENTS}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    write_data(folder)
    real = Deployment(folder)
    subprocess.run([KINDRED, "keys", "keys", "--server", "localhost", "--sites", "0,1"], cwd=folder, check=True)
    subprocess.run([KINDRED, "keys", "other", "--server", "localhost", "--sites", "eve"], cwd=folder, check=True)
    try:
        real.start_server()
        part = folder / "keys" / "1-copied-in-part.pub"
        part.write_text("ecdsa-sha2-nistp384 AAAA")
        part.chmod(0o600)
        subprocess.run([KINDRED, "keys", "keys", "--sites", "2"], cwd=folder, check=True)  # the server notices
        real.wait_for("server", "2 is registered as SuperNode ")
        for client in CLIENTS:
            real.start(f"site-{client}", *real.site(client, "--ca", "keys/ca.crt", "--key", f"keys/{client}.key"))
        for client in CLIENTS:
            real.wait_for(f"site-{client}", "SuperNode ID: ")
        yield real
    finally:
        real.kill()


def files_in(folder: Path) -> dict[int, dict[str, np.ndarray]]:
    return {client: load_file(folder / f"client-{client}.safetensors") for client in CLIENTS}


def different(found: Mapping[int, Mapping[str, np.ndarray] | None], expected: Mapping[int, Any]) -> list[str]:
    """Names of the clients' arrays that differ in any bit between both."""

    def bits(models: Mapping[int, Mapping[str, np.ndarray] | None]) -> dict[str, tuple[Any, ...]]:
        return {
            f"client {client}: {name}": (array.dtype, array.shape, array.tobytes())
            for client, arrays in models.items()
            for name, array in (arrays or {}).items()
        }

    ours, theirs = bits(found), bits(expected)
    return sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))


def measured(folder: Path) -> list[dict[str, Any]]:
    """Rows of the history without the seconds."""
    rows = sorted(read_table(folder / "history.csv"), key=lambda row: (row["round"], row["client"]))
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def simulate(folder: Path, **settings: Any) -> Path:
    return run_inline(Config(**settings, **DIGITS, output_dir=str(folder))).path


def test_sites_train_on_the_data_of_a_simulation(tmp_path) -> None:
    write_data(tmp_path)
    config = Config(**SETTINGS, **SITES).run_config()
    for client in CLIENTS:
        ours = Sites.of(config, {"data-dir": str(site_file(tmp_path, client))}).site_data(client)
        theirs = FEDERATION.site_data(client)
        for part in ("train", "validation", "test"):
            for tensor, expected in zip(getattr(ours, part), getattr(theirs, part)):
                assert tensor.dtype == expected.dtype
                assert tensor.numpy().tobytes() == expected.numpy().tobytes(), (client, part)
        assert len(ours.train[0]) == 40
    public = Sites.of(config, {"public-data": str(tmp_path / "public.npz")}).public_set()
    assert public.numpy().tobytes() == FEDERATION.public_set().numpy().tobytes()


def test_only_authenticated_sites_are_admitted(real) -> None:
    said, port = real.said("server"), real.address.partition(":")[2]
    assert re.search(r"^0 is registered as SuperNode \d+\n1 is registered as SuperNode \d+$", said, re.MULTILINE)
    assert f"flower-superlink --host 127.0.0.1 --port {port} --database {real.state}/superlink.db" in said
    assert "1-copied-in-part.pub cannot be used" in said
    (real.folder / "keys" / "1-copied-in-part.pub").unlink()
    registered = [node["node-id"] for node in real.flwr("supernode", "list")["nodes"] if node["status"] == "online"]
    assert len(registered) == len(CLIENTS)
    hints = {
        "eve": f"the server does not know the key {real.folder}/other/eve.key, or has withdrawn it",
        "twin": f"the key {real.folder}/keys/0.key is in use by another SuperNode",
        "stray": f"the certificate of {real.address} is not signed by the CA of {real.folder}/other/ca.crt",
        "mallory": f"{real.address} does not answer without TLS",
    }
    real.start("eve", *real.site("eve", "--ca", "keys/ca.crt", "--key", "other/eve.key"))
    real.start("twin", *real.site("twin", "--ca", "keys/ca.crt", "--key", "keys/0.key"))
    real.start("stray", *real.site("stray", "--ca", "other/ca.crt", "--key", "keys/0.key"))
    real.start("mallory", *real.site("mallory", "--insecure"))
    for name, hint in hints.items():
        real.wait_for(name, f"kindred: {hint}")
    for name in ("eve", "twin", "stray"):
        real.wait_for(name, "is started again in 1 s")
    real.wait_for("stray", f"is started again in 1 s\nkindred: {hints['stray']}")  # as before it was started
    real.wait_for("mallory", "Connection attempt failed")
    nodes = real.flwr("supernode", "list")["nodes"]
    assert [node["node-id"] for node in nodes if node["status"] == "online"] == registered
    assert len(nodes) == len(CLIENTS)
    assert real.end(*hints) == dict.fromkeys(hints, 0)
    for name in hints:
        assert "SuperNode ID" not in real.said(name)
        assert [other for other in hints if hints[other] in real.said(name)] == [name]
    assert not any(hint in real.said(f"site-{client}") for client in CLIENTS for hint in hints.values())

    host, port = real.address.split(":")
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        plaintext = http.client.HTTPConnection(host, int(port), timeout=10)
        plaintext.request("GET", "/health")
        plaintext.getresponse()
    context = ssl.create_default_context(cafile=real.folder / "keys" / "ca.crt")
    for origin, expected in (("192.0.2.9", 403), ("127.0.0.1", 415)):  # 415: it passed, and is no protobuf
        connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=10)
        connection.request("POST", "/v1/control/register-node", headers={"X-Forwarded-For": origin})
        assert connection.getresponse().status == expected
        connection.close()

    second = subprocess.run(
        list(map(str, real.site(0, "--ca", "keys/ca.crt", "--key", "keys/0.key"))),
        cwd=real.folder,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert second.returncode == 2
    assert "flower-0 is in use" in second.stderr


def test_a_key_from_a_folder_that_others_can_write_is_not_registered(real) -> None:
    keys = real.folder / "keys"
    hidden, dropped = keys / ".mallory.pub", keys / "mallory.pub"
    hidden.write_bytes((real.folder / "other" / "eve.pub").read_bytes())
    hidden.chmod(0o666)
    hidden.rename(dropped)
    real.wait_for("server", f"kindred: {dropped} has permissions 0666")
    keys.chmod(0o777)
    dropped.chmod(0o644)
    real.wait_for("server", f"kindred: {keys} has permissions 0777")
    dropped.unlink()
    keys.chmod(0o700)
    assert "mallory is registered" not in real.said("server")
    assert len(real.flwr("supernode", "list")["nodes"]) == len(CLIENTS)
    assert json.loads((real.state / "registered.json").read_text()) == ["0", "1", "2"]


@pytest.mark.parametrize(("ahead", "tolerated"), [(3, True), (-290, True), (6.5, False), (-320, False)])
def test_a_site_reports_that_its_clock_is_off_where_the_server_refuses_it(real, monkeypatch, ahead, tolerated) -> None:
    date, clock = node_auth_http_interceptor.now, SimpleNamespace(time=lambda: time.time() + ahead)
    monkeypatch.setattr(node_auth_http_interceptor, "now", lambda: date() + timedelta(seconds=ahead))
    monkeypatch.setattr(connection, "time", clock)
    host, port = real.address.split(":")
    site = connection.Link(host, int(port), real.folder / "keys/ca.crt", real.folder / "keys/1.key")
    found = list(connection.faults(site, b"it has ended"))
    assert len(found) == (not tolerated)
    assert not found or f"s {'ahead of' if ahead > 0 else 'behind'} the server's" in found[0]


def test_heurfedamp_matches_a_simulation(real, tmp_path) -> None:
    settings = {**SETTINGS, "strategy": "heurfedamp", "local_epochs": 2}
    real.start_run(**settings)
    simulated = simulate(tmp_path, **settings)
    run_id, results = real.finish_run()
    expected = files_in(simulated / "models")
    assert different(files_in(results / "models"), expected) == []
    assert different(real.kept(run_id, MODEL), expected) == []
    assert measured(results) == measured(simulated)


def test_perfed_ckt_matches_a_simulation_and_no_model_leaves_a_site(real, tmp_path) -> None:
    settings = {**SETTINGS, **PERFED_CKT, "model": "digits-cnn,ckt-cnn", "local_steps": 10}
    real.start_run(**settings)
    simulated = simulate(tmp_path, **settings)
    run_id, results = real.finish_run()
    expected = files_in(simulated / "models")
    assert different(real.kept(run_id, MODEL), expected) == []
    assert len({frozenset(arrays) for arrays in expected.values()}) == 2
    assert measured(results) == measured(simulated)
    assert list(results.rglob("*.safetensors")) == []


def test_federico_matches_a_simulation_although_the_database_is_busy(real, tmp_path) -> None:
    settings = {**SETTINGS, "strategy": "federico", "selection": "relay", "num_rounds": 3, "local_epochs": 1}
    others = real.results()
    real.start_run(**settings)
    wait_until(lambda: real.results() - others, lambda: real.said("run"))
    with closing(sqlite3.connect(real.state / "superlink.db", timeout=PATIENCE)) as database:
        database.execute("BEGIN IMMEDIATE")
        time.sleep(8)  # without the server's hook a request fails after 5 s
    simulated = simulate(tmp_path, **settings)
    run_id, results = real.finish_run()
    assert different(files_in(results / "models"), files_in(simulated / "models")) == []
    mixtures = files_in(simulated / "mixtures")
    assert different(real.kept(run_id, MIXTURE), mixtures) == []
    assert max(len(arrays["shares"]) for arrays in mixtures.values()) > 1


class WithoutAnswer(InlineGrid):
    """One client does not reply in one round."""

    def __init__(self, config: Config, client: int, server_round: int) -> None:
        super().__init__(client_app, config.num_clients, config.run_config())
        self._absent = (client, str(server_round))

    def _answer(self, message: Message) -> Message:
        node_config = self._contexts[message.metadata.dst_node_id].node_config
        if (node_config["partition-id"], message.metadata.group_id) == self._absent:
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "it was killed"), reply_to=message)
        return super()._answer(message)


def is_locked(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_round_ends_without_a_killed_site_and_the_site_returns_with_its_model(real, tmp_path) -> None:
    # The server waits for the site to return, after the one round in which it is killed.
    settings = {**SETTINGS, **PERFED_CKT, "num_rounds": 3, "local_steps": 500, "min_available_clients": len(CLIENTS),
                "round_timeout": 120.0}  # fmt: skip
    client, fatal_round = 1, 2
    site, pattern = f"site-{client}", f"state-{client}/run-*/client-{client}/{MODEL}.safetensors"
    others, earlier = real.results(), set(real.folder.glob(pattern))
    real.start_run(**settings)
    (kept,) = wait_until(lambda: set(real.folder.glob(pattern)) - earlier, lambda: real.said("run"))
    (results,) = real.results() - others
    wait_until((results / "collaboration" / f"round-{fatal_round - 1:04d}.npz").exists, lambda: real.said("run"))
    lock = kept.with_name(".lock")
    wait_until(lambda: is_locked(lock), lambda: real.said(site))
    before, supernode = kept.read_bytes(), real.supernode(site)
    supernode.kill()
    real.wait_for(site, "flower-supernode ended with code -9, and is started again in 1 s")
    wait_until(lambda: not is_locked(lock), seconds=60)  # the working client process has been killed too
    assert kept.read_bytes() == before  # otherwise the kill was too late
    assert wait_until(lambda: real.supernode(site)).pid != supernode.pid

    config = Config(**settings, **DIGITS, output_dir=str(tmp_path))
    simulated = run(WithoutAnswer(config, client, fatal_round), config).path
    run_id, _ = real.finish_run()
    assert different(real.kept(run_id, MODEL), files_in(simulated / "models")) == []
    (lost,) = [row for row in measured(results) if row["status"] != "ok"]
    assert (lost["round"], lost["client"]) == (fatal_round, client)
    ours, theirs = ([row for row in measured(folder) if row["status"] == "ok"] for folder in (results, simulated))
    assert ours == theirs
    assert [(row["round"], row["client"]) for row in ours if row["round"] > fatal_round] == [
        (fatal_round + 1, each) for each in CLIENTS
    ]


def test_a_registered_key_has_only_its_own_name_and_runs_know_all_registered_names(real) -> None:
    """The key is registered as eve; its site claims the name zurich, whose own site is not connected."""
    subprocess.run([KINDRED, "keys", "keys", "--sites", "eve,zurich"], cwd=real.folder, check=True)
    for name in ("eve", "zurich"):
        real.wait_for("server", f"{name} is registered as SuperNode ")
    real.start("zurich", *real.site("zurich", "--ca", "keys/ca.crt", "--key", "keys/eve.key"))
    real.wait_for("zurich", "SuperNode ID: ")
    real.start_run(**SETTINGS | {"num_rounds": 1}, strategy="local", local_epochs=1)
    (run,) = wait_until(
        lambda: [
            process
            for process in psutil.process_iter(["cmdline", "environ"])
            if (process.info["environ"] or {}).get("FLWR_HOME") == str(real.state)
            and any("flwr-serverapp" in word for word in process.info["cmdline"] or [])
        ]
    )
    names = Path(run.info["environ"]["KINDRED_REGISTERED"])
    assert json.loads(names.read_text()) == ["0", "1", "2", "eve", "zurich"]
    _, results = real.finish_run()
    assert {row["client"] for row in read_table(results / "history.csv")} == set(CLIENTS)
    reason = "its client id is zurich, but its key is registered as eve"
    assert f" takes no part: {reason}" in real.said("run")
    real.wait_for("zurich", f"kindred: the server says of this site: {reason}")
    assert real.end("zurich") == {"zurich": 0}


def test_every_process_ends_and_a_restarted_server_knows_its_sites(real) -> None:
    assert len(real.processes()) >= 1 + len(CLIENTS)
    assert real.end() == {"server": 0, "site-0": 0, "site-1": 0, "site-2": 0}
    assert real.processes() == []
    assert "kindred: ended by SIGTERM" in real.said("server")
    for folder in (real.state, *(real.folder / f"state-{client}" for client in CLIENTS)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    real.start_server("again")
    for client in CLIENTS:
        real.wait_for("again", f"{client} is already known to the server: registered, or withdrawn\n")
    assert len(real.flwr("supernode", "list")["nodes"]) == len(CLIENTS) + 2  # eve's and zurich's keys
    real.kill()
    wait_until(lambda: not real.processes(), lambda: "\n".join(real.processes()))
