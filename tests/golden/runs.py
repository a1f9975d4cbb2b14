"""Small runs of every method whose bits are recorded, and the command that records them.

    python -m tests.golden.runs

writes a new tests/golden/bits.json. This is allowed when a change is meant to alter what a method computes and
CHANGELOG.md says so, or when a new version of torch gives other bits for unchanged code. It is never allowed to make a
refactoring pass.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from safetensors.numpy import load_file
from threadpoolctl import threadpool_info

from kindred import REGISTRY, Checkpoints, InlineGrid, PersonalizedStrategy
from kindred.client_app.app import app as client_app
from kindred.data import load_federation
from kindred.engine.simulated_state import saved_files
from kindred.messages import SERVER_ROUND, in_order, read_record, records_of
from kindred.server_app.app import prepare, run, run_inline
from kindred.server_app.config import Config
from kindred.server_app.report.collaboration import read_collaboration
from kindred.server_app.tables import read_table

FOLDER = Path(__file__).parent
KINDRED = Path(sysconfig.get_path("scripts")) / "kindred"
BITS = FOLDER / "bits.json"
SETTINGS: dict[str, Any] = json.loads((FOLDER / "settings.json").read_text())  # every one, with its value
ROUNDS = SETTINGS["num-rounds"]
CUT_AFTER = 2  # rounds, after which the run is interrupted and resumed
IN_FLOWER = ["heurfedamp rotated half", "federico dirichlet half"]  # runs also resumed in Flower's engine

PARTITIONS: dict[str, dict[str, Any]] = {
    "rotated": {},
    "dirichlet": {
        "samples-per-client": 0,
        "store": "disk",
        "selection": "relay",
        "optimizer": "sgd",
        "learning-rate": 0.05,
        "momentum": 0.5,
        "epsilon": 0.0,
    },
}
PARTICIPATION = {"all": 1.0, "half": 0.5}
KEYS = [f"{name} {partition} {share}" for name in REGISTRY.own for partition in PARTITIONS for share in PARTICIPATION]

# Settings that go with every message to a client.
LOCAL = (
    "seed",
    "local-epochs",
    "local-steps",
    "batch-size",
    "optimizer",
    "learning-rate",
    "momentum",
    "precision",
    "device",
)


class CutShort(Exception):
    """Ends a run as if its process had been killed."""


class Ending(InlineGrid):
    """A Grid that interrupts a run in the middle of a round."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            for config in records_of(message.content, ConfigRecord):
                if config.get(SERVER_ROUND, 0) > CUT_AFTER:
                    raise CutShort
        return super().push_messages(messages)


def settings_of(key: str) -> dict[str, Any]:
    """Return all settings of a run by its key: method, partition, participation."""
    name, partition, share = key.split()
    return (
        SETTINGS
        | PARTITIONS[partition]
        | {"strategy": name, "partition": partition, "fraction-train": PARTICIPATION[share]}
    )


def bits(key: str) -> dict[str, Any]:
    """Run a method, interrupt it, resume it, and return the hashes of all its results, and its accuracy."""
    settings = settings_of(key)
    config = Config.from_run_config(settings)
    federation = load_federation(config.run_config())
    local = ConfigRecord({name: settings[name] for name in LOCAL})
    torch.set_num_threads(1)
    matrices: list[tuple[Any, bytes]] = []

    def start(grid: InlineGrid, checkpoints: Checkpoints) -> PersonalizedStrategy:
        strategy, initial = prepare(config, federation)

        def on_round(server_round: int) -> None:
            clients, weights = strategy.collaboration()
            matrices.append((clients, np.asarray(weights).tobytes()))

        strategy.start(
            grid, initial, ROUNDS, train_config=local, evaluate_config=local, on_round=on_round, checkpoints=checkpoints
        )
        return strategy

    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        try:
            start(Ending(client_app, config.num_clients, config.run_config()), checkpoints)
        except CutShort:
            assert matrices, f"{key} was cut short before its first round was over"
        else:
            raise AssertionError(f"{key} was not cut short")
        strategy = start(InlineGrid(client_app, config.num_clients, config.run_config()), checkpoints)
    models: dict[Any, Mapping[str, np.ndarray]] = {
        client: read_record(record) for client, record in strategy.client_models().items()
    }
    if strategy.clients_keep_state:
        for file in ("model", "mixture"):
            models |= {
                f"{file} {client}": load_file(path) for client, path in saved_files(strategy.run_id, file).items()
            }
    global_arrays: ArrayRecord = strategy.global_arrays()
    return {
        "models": digest((client, *arrays_of(models[client])) for client in in_order(models)),
        "global": digest(arrays_of(read_record(global_arrays))),
        "matrices": digest(matrices),
        "history": digest(
            sorted((key, value) for key, value in row.items() if key != "seconds")
            for row in [*strategy.history.rows, *strategy.history.rounds]
        ),
        "accuracy": round(float(strategy.history.rounds[-1]["accuracy"]), 2),
    }


def begin(key: str, output_dir: str) -> None:
    """Begin a run in this process and interrupt it; its folder stays."""
    config = replace(Config.from_run_config(settings_of(key)), output_dir=output_dir)
    torch.set_num_threads(1)
    with suppress(CutShort):
        run(Ending(client_app, config.num_clients, config.run_config()), config)


def bits_in_flower(key: str, output_dir: Path) -> dict[str, Any]:
    """Begin a run in a process, cut it short, resume it in Flower's engine; return the hashes of its results."""
    begin = f"from tests.golden.runs import begin; begin({key!r}, {str(output_dir)!r})"
    subprocess.run([sys.executable, "-c", begin], check=True, cwd=FOLDER.parent.parent, capture_output=True)
    (folder,) = output_dir.iterdir()
    assert not (folder / "summary.json").exists(), f"{key} was not cut short"
    done = subprocess.run([KINDRED, "run", "--resume", folder], cwd=output_dir, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return bits_of_folder(folder)


def bits_in_process(key: str, output_dir: Path) -> dict[str, Any]:
    """Return the hashes of the same run's results without interruption, in this process."""
    config = replace(Config.from_run_config(settings_of(key)), output_dir=str(output_dir))
    return bits_of_folder(run_inline(config).path)


def bits_of_folder(folder: Path) -> dict[str, Any]:
    """Return the hashes of the results in a run's folder, and its accuracy."""
    read = [read_collaboration(file) for file in sorted(folder.glob("collaboration/*.npz"))]
    matrices = [(each.clients, np.asarray(each.matrix(), np.float32).tobytes()) for each in read if each]
    files = sorted([*folder.glob("models/*.safetensors"), *folder.glob("mixtures/*.safetensors")])
    history = read_table(folder / "history.csv")
    return {
        "models": digest((file.name, *arrays_of(load_file(file))) for file in files),
        "matrices": digest(matrices),
        "history": digest(sorted((name, value) for name, value in row.items() if name != "seconds") for row in history),
        "accuracy": round(json.loads((folder / "summary.json").read_text())["accuracy"], 2),
    }


def arrays_of(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the type and the hash of each array, in the order of names."""
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        yield name, f"{array.dtype} {array.shape}", sha256(array.tobytes()).hexdigest()


def digest(parts: Iterable[Any]) -> str:
    """Return a short hash of the written forms of the parts, one after the other."""
    found = sha256()
    for part in parts:
        found.update(repr(part).encode())
    return found.hexdigest()[:16]


def machine() -> dict[str, str]:
    """Return what the bits depend on apart from the code: the kind of processor, and the libraries for it.

    Processors of one name and with the same instructions can differ in the kind for which NumPy's BLAS takes them.
    """
    try:
        name = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        name = None
    return {
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "blas": "/".join(sorted({each["architecture"] for each in threadpool_info() if each["user_api"] == "blas"})),
        "torch": torch.__version__,
    }


def record() -> None:
    """Write the bits of all runs, with the machine for which they hold."""
    found = {}
    for key in KEYS:
        found[key] = bits(key)
        print(key, found[key]["accuracy"], flush=True)
    in_flower = {}
    for key in IN_FLOWER:
        with TemporaryDirectory() as folder:
            in_flower[key] = bits_in_flower(key, Path(folder))
    text = json.dumps({"machine": machine(), "runs": found, "in-flower": in_flower}, indent=1)
    BITS.write_text(text + "\n")


if __name__ == "__main__":
    record()
