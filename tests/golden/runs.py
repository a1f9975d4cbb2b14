"""Small runs of every method whose bits are recorded, and the command that records them.

    python -m tests.golden.runs

records the bits of this machine in tests/golden/bits.json. This is allowed when a change is meant to alter what a
method computes and CHANGELOG.md says so, when a new version of torch gives other bits for unchanged code, or on another
kind of machine before a change. It is never allowed to make a refactoring pass.

Hashed are the arrays of all models with their names, types and shapes, the collaboration matrices, and the columns of
the history that `FIELDS` names.
"""

from __future__ import annotations

import json
import os
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
import psutil
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

from ..background_commands import PATIENCE, SCRIPTS, free_port

FOLDER = Path(__file__).parent
KINDRED = Path(sysconfig.get_path("scripts")) / "kindred"
BITS = FOLDER / "bits.json"
SETTINGS: dict[str, Any] = json.loads((FOLDER / "settings.json").read_text())  # every one, with its value
ROUNDS = SETTINGS["num-rounds"]
TOLERANCE = 0.1  # of the mean accuracy on another processor or torch
CUT_AFTER = 2  # rounds, after which the run is interrupted and resumed
THREE_SITES = [
    str(FOLDER.parent.parent / "examples" / "three-sites" / "run"),
    *("federico", "num-rounds=2", "local-epochs=1", 'optimizer="sgd"'),
]
SITE_FILES = "*/state/run-*/client-*/[!.]*.safetensors"  # without the models before the last, which are hidden
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

# The columns of the history that are hashed, by the name that goes into the hash: a column that gets another name
# changes here, and no recorded hash does. Times are not among them.
STAGES = ("", "selected-", "personal-", "received-", "trained-", "own-", "tuned-", "mixture-", "between-")
MEASURES = (
    "accuracy auroc average-precision balanced-accuracy brier calibration-error f1 log-loss loss"
).split()  # fmt: skip
COUNTS = (
    "round client status asked answered evaluated personal num-examples num-test-examples samples-trained "
    "samples-predicted bytes-up bytes-down bytes-fedavg model-bytes models-sent floats train-loss accuracy-best "
    "accuracy-p10 accuracy-selected accuracy-validation accuracy-weighted validation-accuracy validation-loss "
    "ala-weight cluster clusters nearest-centroid neighbours evaluate-neighbours updates-withheld everybody-share "
    "neighbours-share own-share share-0 share-1 mixing-weight update-norm mean-update-norm"
).split()
FIELDS = {name: name for name in (*COUNTS, *(f"{stage}{measure}" for stage in STAGES for measure in MEASURES))}

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
        "history": digest(map(hashed_fields, [*strategy.history.rows, *strategy.history.rounds])),
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
        "history": digest(map(hashed_fields, history)),
        "accuracy": round(json.loads((folder / "summary.json").read_text())["accuracy"], 2),
    }


def hashed_fields(row: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields of a row of the history that are hashed, under their names in the hash."""
    return [(name, row[column]) for name, column in FIELDS.items() if column in row]


def bits_of_sites(folder: Path) -> dict[str, Any]:
    """Return the hashes of what the example of three sites leaves in its folder, at the server and at the sites."""
    (results,) = folder.glob("server/state/results/*")
    files = sorted((file.relative_to(folder).parts[0], file.name, file) for file in folder.glob(SITE_FILES))
    assert files, f"no model at any site in {folder}"
    models = digest((site, name, *arrays_of(load_file(file))) for site, name, file in files)
    return bits_of_folder(results) | {"models": models}


def flwr_run(folder: Path) -> Path:
    """Simulate as Flower's users do, by the plain `flwr run` of the clone, and return the folder of the results.

    Flower makes 2 clients, its own local SuperLink, and its own installation of dependencies.
    """
    home = folder / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n[superlink.local]\naddress = ":local-in-memory:"\n'
    )
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",  # otherwise Ray sets it, to 2
        "UV_OFFLINE": "1",
        "UV_CACHE_DIR": str(folder / "uv"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
    }
    settings = f'num-rounds=2 device="cpu" output-dir="{folder / "results"}"'
    before = {process.pid for process in psutil.process_iter()}

    def flwr(*words: str) -> str:
        command = [os.path.join(SCRIPTS, "flwr"), *words]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
        ).stdout

    try:
        said = flwr("run", str(FOLDER.parent.parent), "--stream", "--run-config", settings)
        (folder / "said.txt").write_text(said)
        assert json.loads(flwr("list", "--format", "json"))["runs"][0]["status"] == "finished:completed", said
    finally:
        for process in psutil.process_iter(["environ"]):
            if process.pid not in before and (process.info["environ"] or {}).get("FLWR_HOME") == str(home):
                process.kill()
    (results,) = (folder / "results").iterdir()
    return results


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


def recorded() -> dict[str, Any]:
    """Return what is recorded for this kind of machine; for another kind, a record whose accuracies alone count."""
    records = json.loads(BITS.read_text())
    here = machine()
    return next((each for each in records if each["machine"] == here), {"only": "accuracy", **records[0]})


def check_bits(found: Mapping[str, Any], record: Mapping[str, Any], *path: str) -> None:
    """Assert that found hashes are the recorded ones, at a path of keys; on another kind of machine the accuracy."""
    expected: Any = record
    for key in path:
        expected = expected.get(key, {})
    if "only" in record:
        if expected:  # four clients have few test samples
            assert abs(found["accuracy"] - expected["accuracy"]) <= TOLERANCE
    else:
        assert expected and {key: found[key] for key in expected} == expected


def record() -> None:
    """Write the bits of all runs on this kind of machine."""
    found: dict[str, Any] = {"machine": machine(), "runs": {}, "in-flower": {}}
    for key in KEYS:
        found["runs"][key] = bits(key)
        print(key, found["runs"][key]["accuracy"], flush=True)
    for key in IN_FLOWER:
        with TemporaryDirectory() as folder:
            found["in-flower"][key] = bits_in_flower(key, Path(folder))
    with TemporaryDirectory() as folder:
        found["flwr run"] = bits_of_folder(flwr_run(Path(folder)))
    with TemporaryDirectory() as folder:
        subprocess.run(THREE_SITES, check=True, env=os.environ | {"FOLDER": folder}, capture_output=True)
        found["three sites"] = bits_of_sites(Path(folder))
    others = [each for each in json.loads(BITS.read_text()) if each["machine"] != found["machine"]]
    BITS.write_text(json.dumps([found, *others], indent=1) + "\n")


if __name__ == "__main__":
    record()
