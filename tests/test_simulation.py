"""The application in Flower's simulation engine, started by `kindred run` and by `flwr run .`."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from kindred.server_app.app import run_inline
from kindred.server_app.config import Config
from kindred.server_app.tables import read_table

from .golden.runs import bits_of_folder, check_bits, flwr_run, recorded

KINDRED = Path(sysconfig.get_path("scripts")) / "kindred"
SETTINGS = {"num_clients": 6, "num_groups": 2, "num_rounds": 3, "samples_per_client": 20, "local_epochs": 2}

pytestmark = pytest.mark.engine


def models(folder: Path) -> dict[str, bytes]:
    found = {path.name: load_file(path) for path in sorted((folder / "models").iterdir())}
    assert len(found) == SETTINGS["num_clients"]
    return {name: b"".join(arrays[key].tobytes() for key in sorted(arrays)) for name, arrays in found.items()}


def measured(folder: Path) -> list[dict]:
    """Rows of the history without the seconds."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_table(folder / "history.csv")]


def test_the_simulation_and_the_in_process_engine_give_the_same_bits(tmp_path) -> None:
    """Clients with two networks, and a round 0; test_golden.py has other methods."""
    settings = SETTINGS | {"strategy": "perfed-ckt", "model": "digits-cnn,ckt-cnn", "local_steps": 10}
    sets = [f"--set={name.replace('_', '-')}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [KINDRED, "run", f"--output-dir={tmp_path / 'ray'}", *sets], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    progress = [line for line in done.stdout.splitlines() if line.startswith("round ")]
    assert [line.split()[1] for line in progress] == ["0/3", "1/3", "2/3", "3/3"]
    assert all("6/6 clients" in line for line in progress)
    (simulated,) = (tmp_path / "ray").iterdir()

    inline = run_inline(Config(**settings, output_dir=str(tmp_path / "inline"))).path
    assert models(simulated) == models(inline)
    assert measured(simulated) == measured(inline)
    matrices = [sorted((folder / "collaboration").iterdir()) for folder in (simulated, inline)]
    assert [path.read_bytes() for path in matrices[0]] == [path.read_bytes() for path in matrices[1]]
    # Each client has the network for the size of its data.
    architectures = {frozenset(load_file(path)) for path in (simulated / "models").iterdir()}
    assert len(architectures) == 2


@pytest.mark.deployment
def test_flwr_run_works_alone_and_prints_how_to_get_all_clients(tmp_path) -> None:
    folder = flwr_run(tmp_path)
    first, *_, last = (line for line in (tmp_path / "said.txt").read_text().splitlines() if "kindred:" in line)
    for line in (first, last):
        assert "2 of the federation's 20 clients are connected" in line
        assert "num-supernodes=20" in line
    assert "results in" in last
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 2
    check_bits(bits_of_folder(folder), recorded(), "flwr run")
