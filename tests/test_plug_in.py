"""Use as a library: the wheel, and a Flower app of another author that imports only `kindred`."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedProx
from safetensors.torch import load_file

import kindred
from kindred import REGISTRY, HeurFedAMP, InlineGrid, Local, Site, TooFewClients, make_client_app
from kindred.engine.simulated_state import saved_files

from .background_commands import PATIENCE
from .packages import build, pip

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "plug-in"
CLIENTS = 8
MARK = "PLUG_IN_TEST"  # an environment variable that every process of a test inherits


@pytest.fixture
def task(monkeypatch):
    """The example's model and data."""
    monkeypatch.syspath_prepend(EXAMPLE)
    from plug_in import task

    return task


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_contains_only_the_package(wheel) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name}
    folders = {"strategies": "kindred", "data": "kindred/data", "client_app": "kindred/client_app",
               "server_app": "kindred/server_app"}  # fmt: skip
    written = {
        f"{package}/{path.relative_to(ROOT / folder)}"
        for folder, package in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".toml", ".typed", ".html", ".css", ".js")
    }
    assert held == written


def test_the_example_improves_only_by_its_strategy(task) -> None:
    from plug_in.client_app import app

    def run(strategy):
        torch.manual_seed(0)
        return strategy.start(
            InlineGrid(app, CLIENTS, {"local-epochs": 5}),
            ArrayRecord(task.make_net().state_dict()),
            4,
            train_config=ConfigRecord({"lr": 0.002}),
        ).evaluate_metrics_clientapp[4]["eval_acc"]

    one_model, alone = run(FedProx(proximal_mu=0.01)), run(Local())
    heurfedamp = HeurFedAMP(sigma=100, self_weight=0.2)
    together = run(heurfedamp)
    assert together > alone + 0.02 and together > one_model + 0.2
    # Each client of a group has learnt from the group's other client, and hardly from the others.
    clients, weights = heurfedamp.collaboration()
    partition = np.array(clients) - min(clients)
    partner = (partition[:, None] - partition[None, :]) % CLIENTS == task.GROUPS
    assert weights[partner] == pytest.approx(np.full(CLIENTS, 0.8), abs=0.01)


# --- Flower's own command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    pip("install", "--target", folder, wheel)
    return folder


def run_the_document(tmp_path, library, server_section: str, client_section: str) -> tuple[dict, list[Path]]:
    """Run a ServerApp and a ClientApp of the document unchanged; return accuracies, and the clients' files."""

    def blocks(section: str) -> list[str]:
        text = (ROOT / "docs" / "plugging-in.md").read_text().split(section)[1].split("\n## ")[0]
        return re.findall(r"```python\n(.*?)```", text, re.S)

    (client,) = [block for block in blocks(client_section) if "make_client_app" in block]
    (tmp_path / "client_side.py").write_text(client)
    script = "from client_side import app\nfrom kindred import InlineGrid\ngrid = InlineGrid(app, 8)\n"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(library), str(EXAMPLE), str(tmp_path)]),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    done = subprocess.run(
        [sys.executable, "-c", script + blocks(server_section)[0]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    accuracies = ast.literal_eval(done.stdout)
    assert list(accuracies) == list(range(8))
    return accuracies, sorted((tmp_path / "state" / "kindred").glob("run-*/client-*/[!.]*.safetensors"))


@pytest.mark.deployment
def test_the_documented_perfed_ckt_works_as_written(library, tmp_path) -> None:
    accuracies, kept = run_the_document(tmp_path, library, "## PerFed-CKT", "## PerFed-CKT")
    assert np.mean(list(accuracies.values())) > 0.6
    models, predictions = (
        [path for path in kept if path.name == f"{name}.safetensors"] for name in ("model", "predictions")
    )
    assert len(models) == len(predictions) == 8 and len(kept) == 16
    assert len({frozenset(load_file(path)) for path in models}) == 2


def test_the_documented_federico_works_as_written(library, tmp_path) -> None:
    accuracies, kept = run_the_document(tmp_path, library, "## FedeRiCo", "## A ClientApp for every method")
    assert np.mean(list(accuracies.values())) > 0.6
    names = Counter(path.name.partition("-")[0] for path in kept)  # received-client-3.safetensors
    assert names["mixture.safetensors"] == names["losses.safetensors"] == 8 < names["received"]


TABLE = (ROOT / "docs" / "plugging-in.md").read_text().split("## The other methods")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| `(\w+\(.*?\))` \|.*?\| (any|`make_client_app`) \| `(\S+)`", TABLE, re.M)


def test_the_table_of_methods_has_every_method_not_documented_elsewhere() -> None:
    named = {expression.partition("(")[0] for expression, _, _ in ROWS}
    assert named == {
        method.strategy.__name__
        for method in REGISTRY.values()
        if method.strategy.__module__.startswith("kindred.baselines.")
        and method.strategy.__name__ not in ("Local", "FedAvg", "FedProx", "FedAvgFT", "FedProxFT")
    }


@pytest.mark.parametrize(("expression", "clients", "result"), ROWS, ids=[row[0].partition("(")[0] for row in ROWS])
def test_a_method_of_the_table_runs_as_written(task, expression, clients, result) -> None:
    from plug_in.client_app import app

    def load_site(context) -> Site:
        x, y, x_test, y_test = task.load_data(context.node_config["partition-id"], CLIENTS)
        return Site(model=task.make_net, train=(x, y), test=(x_test, y_test))

    def start(app):
        name = expression.partition("(")[0]
        images = task.load_data(CLIENTS - 1, CLIENTS)[2]
        strategy = eval(expression, {name: getattr(kindred, name), "make_net": task.make_net, "images": images})
        settings = ConfigRecord({"lr": 0.002, "local-epochs": 1, "batch-size": 10, "learning-rate": 0.05})
        strategy.start(
            InlineGrid(app, 3, {"local-epochs": 1}),
            ArrayRecord(task.make_net().state_dict()),
            1,
            train_config=settings,
            evaluate_config=settings,
        )
        return strategy

    strategy = start(make_client_app(load_site))
    assert list(strategy.history.last_values()) == [0, 1, 2]
    if result == "client_models()":
        assert list(strategy.client_models()) == [0, 1, 2]
    else:
        assert strategy.client_models() == {}
        assert sorted(saved_files(strategy.run_id, result.removesuffix(".safetensors"))) == [0, 1, 2]
    if clients == "any":
        assert len(start(app).history.last_values()) == 3
    else:
        with pytest.raises(TooFewClients, match="use that of kindred.make_client_app"):
            start(app)


@pytest.fixture
def environment(tmp_path, wheel) -> Iterator[dict[str, str]]:
    """Environment for `flwr` with the wheel, without a network, and separate from every other Flower."""
    site = tmp_path / "site"
    pip("install", "--target", site, wheel)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n[superlink.local]\naddress = ":local-in-memory:"\n'
    )
    ports = free_ports(2)
    environment = dict(os.environ)
    for name in ("RAY_ADDRESS", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"):
        environment.pop(name, None)
    ray = tempfile.mkdtemp(prefix="plug-in-", dir="/tmp")  # Ray's sockets need a short path
    mark = uuid.uuid4().hex
    environment |= {
        MARK: mark,
        "PYTHONPATH": str(site),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), environment.get("PATH", os.defpath)]),
        "no_proxy": "127.0.0.1,localhost",
        "UV_OFFLINE": "1",
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(ports[0]),
        "FLWR_LOCAL_CONTROL_API_PORT": str(ports[1]),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_TMPDIR": ray,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        yield environment
    finally:
        # The SuperLink started by `flwr run` would run for ever.
        deadline = time.monotonic() + 15
        while (left := processes(mark)) and time.monotonic() < deadline:
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        shutil.rmtree(ray, ignore_errors=True)
        assert not left


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def processes(mark: str) -> set[psutil.Process]:
    """Processes with the mark, and those they started: Ray's workers overwrite their environment."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found |= {process, *process.children(recursive=True)}
    return found


@pytest.mark.engine
@pytest.mark.deployment
def test_the_example_runs_with_the_wheel_alone(tmp_path, environment, task) -> None:
    app = tmp_path / "app"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__", "models"))

    def do(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=app,
            env=environment,
            timeout=PATIENCE,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    imported = do(sys.executable, "-c", "import kindred; print(kindred.__file__)").strip()
    assert Path(imported).is_relative_to(environment["PYTHONPATH"])

    said = do(
        "flwr",
        "run",
        ".",
        "--stream",
        "--run-config",
        "num-rounds=4",
        "--federation-config",
        f"num-supernodes={CLIENTS} client-resources-num-cpus=1",
    )
    listed = do("flwr", "list", "--format", "json")
    (run,) = json.loads(listed[listed.index("{") :])["runs"]
    assert run["status"] == "finished:completed", said
    assert "Starting HeurFedAMP strategy" in said
    # uv was called, found nothing to install, and so needed no network.
    assert "No additional application dependencies needed installation" in said

    accuracies = {name: float(value) for name, value in re.findall(r"^client (\d+): eval_acc ([\d.]+)$", said, re.M)}
    ((mean, folder),) = re.findall(r"^mean eval_acc ([\d.]+); personal models in (.+)$", said, re.M)
    assert len(accuracies) == CLIENTS
    assert float(mean) == pytest.approx(np.mean(list(accuracies.values())), abs=1e-3)

    assert Path(folder).parent == app / "models"
    models = {path.stem: load_file(path) for path in Path(folder).iterdir()}
    assert models.keys() == accuracies.keys()
    # Nodes have no names, but a model shows its group: each group has two models that fit it.
    best_for = []
    for name, model in models.items():
        scores = np.array([accuracy_at(task, model, partition) for partition in range(CLIENTS)])  # (clients,)
        group = int(np.argmax([scores[g :: task.GROUPS].mean() for g in range(task.GROUPS)]))
        best_for.append(group)
        # The printed value is the personal model's accuracy at a client of that group.
        assert np.abs(scores[group :: task.GROUPS] - accuracies[name]).min() < 1e-3
    assert sorted(best_for) == sorted(partition % task.GROUPS for partition in range(CLIENTS))


def accuracy_at(task, model: dict[str, torch.Tensor], partition: int) -> float:
    net = task.make_net()
    net.load_state_dict(model)
    _, _, x, y = task.load_data(partition, CLIENTS)
    return task.test(net, x, y)[1]
