"""A round of three sites with almost no training: time of this project's commands and strategy over Flower's.

    python -m benchmarks.latency

Each deployment is a SuperLink and three SuperNodes on this machine, in separate processes. Flower's:
`flower-superlink`, `flower-supernode` and its FedAvg; ours: `kindred server`, `kindred site` and HeurFedAMP. Both run
the same ClientApp, a linear model on 40 images of noise. The first round of each run is not counted: in it the app is
sent to the sites.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.background_commands import KINDRED, Machines, free_port

SITES = 3
ROUNDS = 5
REPEATS = 2
MARK = "kindred-latency: "

PYPROJECT = """
[project]
name = "latency"
version = "1.0.0"
description = "Almost no training"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "kindred"
fab-include = ["latency/*.py"]
[tool.flwr.app.components]
serverapp = "latency.server:app"
clientapp = "latency.client:app"
[tool.flwr.app.config]
strategy = "flower"
rounds = 2
"""

CLIENT = """
import torch
from kindred import Site, make_client_app

def network():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

def load_site(context):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 1, 8, 8, generator=generator), torch.arange(60) % 10
    return Site(network, train=(x[:40], y[:40]), test=(x[40:], y[40:]))

app = make_client_app(load_site)
"""

SERVER = f"""
import json, time
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from kindred import HeurFedAMP

app = ServerApp()

@app.main()
def main(grid, context):
    strategy = FedAvg() if context.run_config["strategy"] == "flower" else HeurFedAMP(sigma=100, self_weight=0.2)
    begun, configure_train = [], strategy.configure_train

    def configure(*args):
        begun.append(time.monotonic())
        return configure_train(*args)

    strategy.configure_train = configure
    zeros = {{"1.weight": np.zeros((10, 64), np.float32), "1.bias": np.zeros(10, np.float32)}}
    initial = ArrayRecord({{name: Array(array) for name, array in zeros.items()}})
    strategy.start(grid, initial, num_rounds=context.run_config["rounds"],
                   train_config=ConfigRecord({{"local-epochs": 1, "batch-size": 10, "learning-rate": 0.01}}))
    begun.append(time.monotonic())
    print({MARK!r} + json.dumps(list(np.diff(begun))), flush=True)
"""


def main() -> None:
    seconds: dict[str, list[float]] = {"flower": [], "kindred": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_app(folder / "app")
        x, y = np.zeros((10, 8, 8), np.uint8), np.arange(10)  # `kindred site` requires data
        np.savez(folder / "site.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        for _ in range(REPEATS):
            for which, start in (("kindred", start_kindred), ("flower", start_flower)):
                (folder / which).mkdir()
                machines = Machines(folder / which)
                try:
                    seconds[which] += start(machines, folder)[1:]
                    for name in reversed(list(machines.running)):  # sites end first: they sign off from the server
                        machines.end(name)
                finally:
                    machines.kill()
                shutil.rmtree(folder / which)
    for which, values in seconds.items():
        print(f"{which}: {statistics.median(values):.1f} s a round ({min(values):.1f} to {max(values):.1f})")
    print(f"kindred over flower: {statistics.median(seconds['kindred']) / statistics.median(seconds['flower']):.2f}")


def write_app(folder: Path) -> None:
    (folder / "latency").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "latency" / "__init__.py").touch()
    (folder / "latency" / "client.py").write_text(CLIENT)
    (folder / "latency" / "server.py").write_text(SERVER)


def start_flower(machines: Machines, shared: Path) -> list[float]:
    address, home = f"127.0.0.1:{free_port()}", machines.folder / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "kindred"\n[superlink.kindred]\naddress = "{address}"\ninsecure = true\n'
    )
    host, port = address.split(":")
    machines.start(
        "server",
        *flower(home),
        "flower-superlink",
        "--insecure",
        "--host",
        host,
        "--port",
        port,
        "--database",
        machines.folder / "superlink.db",
    )
    machines.wait_for("server", "Uvicorn running")
    for site in range(SITES):
        machines.start(
            f"site-{site}",
            *flower(machines.folder / f"home-{site}"),
            "flower-supernode",
            "--insecure",
            "--superlink",
            address,
            "--host",
            host,
            "--port",
            free_port(),
            "--node-config",
            f"client-id={site}",
        )
    return measure("flower", home, machines, shared)


def start_kindred(machines: Machines, shared: Path) -> list[float]:
    port = free_port()
    machines.start("server", KINDRED, "server", "--port", port, "--insecure", "--state", "home")
    machines.wait_for("server", "the server is ready")
    for site in range(SITES):
        machines.start(
            f"site-{site}",
            KINDRED,
            "site",
            site,
            "--server",
            f"127.0.0.1:{port}",
            "--insecure",
            "--data-dir",
            shared / "site.npz",
            "--threads",
            1,
            "--state-dir",
            f"state-{site}",
        )
    return measure("kindred", machines.folder / "home", machines, shared)


def flower(home: Path) -> list[str]:
    """Return the start of a Flower command; its settings keep uv from installing dependencies for every run."""
    return [
        "env",
        f"FLWR_HOME={home}",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1",
        "FLWR_TELEMETRY_ENABLED=0",
        "FLWR_DISABLE_UPDATE_CHECK=1",
        "OMP_NUM_THREADS=1",
    ]


def measure(strategy: str, home: Path, machines: Machines, shared: Path) -> list[float]:
    """Run the app when all sites have connected; return the seconds of each round."""
    for site in range(SITES):
        machines.wait_for(f"site-{site}", "SuperNode ID")
    run = machines.start(
        "run",
        *flower(home),
        "flwr",
        "run",
        shared / "app",
        "kindred",
        "--stream",
        "--run-config",
        f'strategy="{strategy}" rounds={ROUNDS}',
    )
    run.wait()
    found = [line for line in machines.said("run").splitlines() if MARK in line]
    if not found:
        sys.exit(f"the run of {strategy} did not end well:\n{machines.said('run')}")
    return json.loads(found[0].partition(MARK)[2])


if __name__ == "__main__":
    main()
