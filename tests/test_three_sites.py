"""The example of a server and three sites, run as a user would."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .background_commands import PATIENCE
from .golden.runs import THREE_SITES, bits_of_sites, check_bits, recorded

RUN = Path(__file__).parent.parent / "examples" / "three-sites" / "run"
SITES = ("lyon", "oslo", "porto")

pytestmark = pytest.mark.deployment


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        [RUN, *arguments], env=os.environ | quiet | {"PATH": path, "FOLDER": str(folder)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        start_new_session=True,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    yield tmp_path / "three sites"
    for process in processes(tmp_path):
        process.kill()


def processes(folder: Path) -> list[psutil.Process]:
    """Running processes related to a folder."""
    return [
        process
        for process in psutil.process_iter(["environ", "status"])
        if (process.info["environ"] or {}).get("FOLDER", "").startswith(str(folder))
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_the_example_ends_with_a_model_and_labels_at_each_site_and_no_process(folder) -> None:
    process = start(folder, *THREE_SITES[1:])
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert processes(folder) == []
    assert "round 2/2" in said
    assert '"status": "finished:completed"' in said
    for site in SITES:
        assert len(list(folder.glob(f"{site}/state/run-*/client-{site}-*/mixture.safetensors"))) == 1
    (results,) = folder.glob("server/state/results/*")
    assert json.loads((results / "config.json").read_text())["settings"]["optimizer"] == "sgd"
    check_bits(bits_of_sites(folder), recorded(), "three sites")
    assert "rm -r" in said.splitlines()[-1]
    assert str(folder) in said.splitlines()[-1]

    evaluation = json.loads((folder / "porto" / "evaluation" / "evaluation.json").read_text())
    assert evaluation["samples"] == 200
    with open(folder / "porto" / "labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200
    assert {row["label"] for row in rows} <= set("0123456789")
    # Copied commands must give the script's results: the commands at a site name only that site's files.
    for site in SITES:
        *check, command = [line for line in said.splitlines() if line.startswith(f"$ kindred site {site} ")]
        assert len(check) == (site == "lyon") and all("--check" in line for line in check)
        assert f"--key {site}/{site}.key --data-dir {site}/data.npz" in command
        assert not (folder / "keys" / f"{site}.key").exists()


def test_a_failed_run_is_reported_and_leaves_no_process(folder) -> None:
    process = start(folder, "local", "min-available-clients=4", "wait-timeout=2")
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, said
    assert processes(folder) == []
    assert "3 of 4 are connected" in said
    assert "the run has not been completed" in said


def test_wrong_settings_and_a_used_folder_are_refused_before_anything_is_started(folder) -> None:
    for _ in range(2):
        process = start(folder, "nonsense")
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2 and "$ kindred server" not in said, said
        assert processes(folder) == []
        assert ("strategy is 'nonsense'" in said) != (f"FOLDER is {folder}, which has files" in said)


def test_a_signal_ends_every_started_process(folder) -> None:
    process = start(folder)
    deadline = time.monotonic() + PATIENCE
    while not list(folder.glob("*/state/run-*")):  # a site is working
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    assert len(processes(folder)) > 4
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, said
    assert processes(folder) == []
