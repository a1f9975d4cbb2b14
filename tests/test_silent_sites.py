"""Silent or unusable sites on a real SuperLink: the others continue, and the affected sites receive the reason."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from kindred.server_app.config import kebab
from kindred.server_app.tables import read_table

from .background_commands import KINDRED, PATIENCE, SCRIPTS, Machines, free_port, wait_until

pytestmark = pytest.mark.deployment

TIMEOUT = 40  # s; more than a busy machine takes to start the processes of a round
SETTINGS = {"dataset": "sites", "image_shape": "1x8x8", "num_classes": 10, "strategy": "heurfedamp", "local_epochs": 1,
            "device": "cpu"}  # fmt: skip

# A SuperNode that announces its replies but loses their arrays: the server sees a disconnected site.
CUT_OFF = """
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient

push = FleetHttpClient.PushObject

def cut_off(self, request):
    lost = request.object_content.startswith(b"Array")
    return PushObjectResponse(stored=True) if lost else push(self, request)

FleetHttpClient.PushObject = cut_off
flower_supernode()
"""


def write_data(path: Path, largest_label: int = 9) -> None:
    x, y = load_digits(return_X_y=True)
    y = y[:60] * (largest_label / y[:60].max())
    np.savez(
        path,
        x_train=x[:40].reshape(-1, 8, 8),
        y_train=y[:40].astype(int),
        x_test=x[40:60].reshape(-1, 8, 8),
        y_test=y[40:].astype(int),
    )


class Sites(Machines):
    """A server without keys, on loopback, and its sites."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.address = f"127.0.0.1:{free_port()}"
        self.state = folder / "server"
        write_data(folder / "good.npz")
        write_data(folder / "bad.npz", 12)
        self.start("server", KINDRED, "server", "--port", self.address.partition(":")[2], "--state", self.state)
        self.wait_for("server", "the server is ready")

    def start_site(self, name: str, data: str = "good.npz", *more: object) -> None:
        self.start(
            name,
            KINDRED,
            "site",
            name,
            "--server",
            self.address,
            "--data-dir",
            data,
            "--threads",
            1,
            "--state-dir",
            f"state-{name}",
            *more,
        )

    def start_cut_off(self, name: str) -> None:
        config = f'client-id="{name}" data-dir="{self.folder}/good.npz" state-dir="{self.folder}/state-{name}"'
        self.start(
            name,
            "env",
            f"FLWR_HOME={self.folder}/flower-{name}",
            sys.executable,
            "-P",
            "-c",
            CUT_OFF,
            "--superlink",
            self.address,
            "--insecure",
            "--host",
            "127.0.0.1",
            "--port",
            free_port(),
            "--node-config",
            config,
        )

    def run(self, **settings: Any) -> Path:
        """Start a run with the command that the server prints, wait for its end, and return its folder of results."""
        printed = re.search(r"^\$ (FLWR_HOME=\S+ flwr run .*)$", self.said("server"), re.MULTILINE)[1]
        config = " ".join(f"{kebab(name)}={json.dumps(value)}" for name, value in {**SETTINGS, **settings}.items())
        before = set(self.state.glob("results/*"))
        self.start("run", "env", *shlex.split(printed), "--run-config", config).wait(PATIENCE)
        del self.running["run"]
        (results,) = set(self.state.glob("results/*")) - before or {None}
        return results

    def status(self) -> str:
        done = subprocess.run(
            [os.path.join(SCRIPTS, "flwr"), "list", "kindred", "--format", "json"],
            check=True,
            text=True,
            env=os.environ | {"FLWR_HOME": str(self.state), "FLWR_TELEMETRY_ENABLED": "0"},
            stdout=subprocess.PIPE,
        )
        runs = json.loads(done.stdout[done.stdout.index("{") :])["runs"]
        return max(runs, key=lambda each: each["pending-at"])["status"]


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    sites = Sites(tmp_path_factory.mktemp("sites"))
    try:
        for name in ("lyon", "oslo"):
            sites.start_site(name)
        sites.start_site("graz", "good.npz", "--no-share-model")
        sites.start_site("ada", "good.npz", "--validate-only")
        sites.start_cut_off("eve")
        for name in ("lyon", "oslo", "graz", "ada", "eve"):
            sites.wait_for(name, "SuperNode ID: ")
        yield sites
    finally:
        sites.kill()


def statuses(results: Path) -> dict[tuple[int, str], str]:
    return {(row["round"], row["client"]): row["status"] for row in read_table(results / "history.csv")}


def test_an_announced_reply_that_is_not_uploaded_delays_nobody_beyond_the_timeout(sites) -> None:
    """Such a site is then excluded for a round. A site that only validates evaluates the model of each round."""
    results = sites.run(num_rounds=2, round_timeout=float(TIMEOUT), max_strikes=1, quorum=1.0, min_available_clients=3)
    assert sites.status() == "finished:completed", sites.said("run")
    assert statuses(results) == {(1, "eve"): f"no answer within {TIMEOUT} s", (1, "lyon"): "ok", (1, "oslo"): "ok",
                                 (2, "lyon"): "ok", (2, "oslo"): "ok"}  # fmt: skip
    (silent,) = [row for row in read_table(results / "history.csv") if row["status"] != "ok"]
    first, second = read_table(results / "rounds.csv")
    assert silent["client"] == "eve" and (first["answered"], second["asked"]) == (2, 2)
    assert TIMEOUT - 1 < silent["seconds"] < TIMEOUT + 5  # from sending on; the round's include name queries
    validations = read_table(results / "validators.csv")
    assert [(row["round"], row["client"], row["status"]) for row in validations] == [(1, "ada", "ok"), (2, "ada", "ok")]
    assert all(row["num-test-examples"] == 60 and row["bytes-up"] < 1000 for row in validations)
    # Flower waits minutes for the upload; this does not delay the end of the run's process.
    wait_until(lambda: not any("flwr-serverapp" in command for command in sites.processes()), seconds=30)


def test_a_site_excluded_by_the_server_reports_this(sites) -> None:
    said = "kindred: the server says of this site: its share-model is false, and heurfedamp mixes all models"
    sites.wait_for("graz", said)


def test_a_round_ends_the_grace_period_after_its_quorum(sites) -> None:
    results = sites.run(num_rounds=1, round_timeout=600.0, quorum=2.0, grace=2.0, min_available_clients=3)
    assert sites.status() == "finished:completed", sites.said("run")
    assert statuses(results) == {
        (1, "lyon"): "ok",
        (1, "oslo"): "ok",
        (1, "eve"): "no answer within 2 s after 2 of 3 clients (quorum, grace)",
    }
    (silent,) = [row for row in read_table(results / "history.csv") if row["status"] != "ok"]
    assert silent["seconds"] < 300  # not the round's timeout


def test_a_run_waits_for_usable_sites_and_server_and_site_name_the_reason(sites) -> None:
    sites.start_site("nice", "bad.npz")
    sites.wait_for("nice", "SuperNode ID: ")
    sites.run(num_rounds=1, min_available_clients=4, wait_timeout=float(TIMEOUT))
    assert sites.status() == "finished:failed"
    reason = (
        "client graz: its share-model is false, and heurfedamp mixes all models; client nice: it cannot "
        r"introduce itself: DataError; its text is fault (\d+) in the site's log"
    )
    waits = "kindred: waiting for clients: 3 of 4 can take part \\(min_available_nodes\\); "
    number = re.search(waits + reason, sites.said("run"))[1]
    assert re.search(f"TooFewClients: too few clients after {TIMEOUT} s: 3 of 4 can take part", sites.said("run"))
    assert "label" in re.search(f"kindred: fault {number}: DataError: (.*)", sites.said("nice"))[1]
    assert f"kindred: this site takes no part: DataError; its text is fault {number}" in sites.said("nice")
