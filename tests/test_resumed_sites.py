"""Real sites on loopback resume a run whose SuperLink was killed, and keep its bits."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from kindred.server_app.config import kebab
from kindred.server_app.tables import read_table

from .background_commands import KINDRED, PATIENCE, Machines, free_port, wait_until
from .test_silent_sites import SETTINGS, write_data

pytestmark = pytest.mark.deployment

ROUNDS = 3
NAMES = ("lyon", "oslo")


class Federation(Machines):
    """A server without keys and two sites."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port, self.state = free_port(), folder / "server"
        self.seen: set[Path] = set()
        write_data(folder / "good.npz")
        self.start_server()
        for name in NAMES:
            site = (KINDRED, "site", name, "--server", f"127.0.0.1:{self.port}", "--data-dir", "good.npz")
            self.start(name, *site, "--threads", 1, "--state-dir", f"state-{name}")
            self.wait_for(name, "SuperNode ID: ")

    def start_server(self) -> None:
        self.start("server", KINDRED, "server", "--port", self.port, "--state", self.state)
        self.wait_for("server", "the server is ready")

    def begin(self, **settings: Any) -> Path:
        """Start a run; return the folder of its results."""
        printed = re.search(r"^\$ (FLWR_HOME=\S+ flwr run .*)$", self.said("server"), re.MULTILINE)[1]
        settings = {**SETTINGS, "num_rounds": ROUNDS, "min_available_clients": 2, "validation_share": 0.0, **settings}
        config = " ".join(f"{kebab(name)}={json.dumps(value)}" for name, value in settings.items())
        before = set(self.state.glob("results/*"))
        self.start("run", "env", *shlex.split(printed), "--run-config", config)
        if "resume" in settings:
            return Path(settings["resume"])
        return wait_until(lambda: set(self.state.glob("results/*")) - before, lambda: self.said("run")).pop()

    def kill_server(self) -> None:
        """Kill the server with its SuperLink and the process of the run."""
        server = self.running.pop("server")
        below = psutil.Process(server.pid).children(recursive=True)
        server.kill()
        server.wait()
        for process in below:
            process.kill()
        psutil.wait_procs(below)
        self.running.pop("run").kill()
        (self.folder / "server.log").unlink()

    def kept(self) -> dict[str, bytes]:
        """Return the arrays that the sites have of their only new run."""
        found = {}
        for name in NAMES:
            runs = [run for run in (self.folder / f"state-{name}").glob("run-*") if run not in self.seen]
            assert len(runs) == 1
            for path in runs[0].glob("client-*/[!.]*.safetensors"):
                found |= {f"{name}/{path.name}/{key}": array.tobytes() for key, array in load_file(path).items()}
        return found

    def forget(self) -> None:
        """Let `kept` leave out the runs so far."""
        self.seen = set(self.folder.glob("state-*/run-*"))


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    federation = Federation(tmp_path_factory.mktemp("federation"))
    try:
        yield federation
    finally:
        federation.kill()


@pytest.mark.parametrize(("strategy", "kills"), [("fedavg", [ROUNDS - 1, ROUNDS]), ("heurfedamp", [ROUNDS - 1])])
def test_sites_resume_a_run_before_and_after_its_last_round(federation, strategy, kills) -> None:
    kept, rows = {}, {}
    for killed_after in (None, *kills):
        federation.forget()
        results = federation.begin(strategy=strategy)
        if killed_after is not None:
            written = lambda: list(results.glob(f"checkpoints/round-{killed_after:04d}-*"))  # noqa: B023, E731
            wait_until(written, lambda: federation.said("run"))
            federation.kill_server()
            federation.start_server()
            federation.begin(strategy=strategy, resume=str(results))
        assert federation.running.pop("run").wait(PATIENCE) == 0
        wait_until((results / "summary.json").exists, lambda: federation.said("run"), 60)
        table = [
            {key: value for key, value in row.items() if key != "seconds"}
            for row in read_table(results / "history.csv")
        ]
        assert {row["status"] for row in table} == {"ok"}, table
        kept[killed_after] = federation.kept()
        rows[killed_after] = sorted(table, key=lambda row: (row["round"], row["client"]))
    assert all(each == kept[None] for each in kept.values()) and all(each == rows[None] for each in rows.values())
