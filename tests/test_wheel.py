"""The wheel alone provides every command, in a fresh environment and a folder outside the clone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from .background_commands import PATIENCE
from .packages import build, pip

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = "run compare report watch predict evaluate keys server site strategies datasets presets".split()
SMALL = ["--clients=4", "--rounds=2", "--set=num-groups=2", "--set=samples-per-client=10", "--set=local-epochs=1"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A fresh environment with the wheel and the example extension; other packages come from the tests' environment."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", symlinks=True)
    scripts, python = folder / "venv" / "bin", folder / "venv" / "bin" / "python"
    for name, source in {"kindred": ROOT, "example": ROOT / "examples" / "extending"}.items():
        pip("install", build(source, folder / name), python=python)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "requirements.pth").write_text(
        f"{sysconfig.get_path('purelib')}\n"
    )  # editable installs are not visible this way
    for script in Path(sysconfig.get_path("scripts")).glob("fl*"):  # Flower's, with this environment's interpreter
        text = re.sub(r"\A#!.*", f"#!{python}", script.read_text())
        (scripts / script.name).write_text(text)
        (scripts / script.name).chmod(0o755)
    return folder / "venv"


@pytest.fixture
def kindred(environment, tmp_path):
    """The installed command, run in an empty folder."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONDONTWRITEBYTECODE": "1"}
    (tmp_path / "empty").mkdir()

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [environment / "bin" / "kindred", *arguments], cwd=tmp_path / "empty", env=variables, capture_output=True,
            text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def values(model: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(model).items()}


def files(environment: Path) -> set[Path]:
    return {path for path in environment.rglob("*") if "__pycache__" not in path.parts}


def test_every_command_is_available(kindred) -> None:
    said = kindred("--help")
    assert all(re.search(rf"^ +{command}\b", said, re.M) for command in COMMANDS)
    assert "fedamp-table1-mnist" in kindred("presets")  # data files of the package


def test_the_wheel_runs_in_this_process(kindred, tmp_path) -> None:
    assert "local" in kindred("run", "--engine=inline", "--strategy=local", *SMALL)
    (folder,) = (tmp_path / "empty" / "results").iterdir()
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 2
    assert json.loads((folder / "config.json").read_text())["versions"]["kindred"]


def test_a_site_checks_its_data(kindred, tmp_path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((20, 8, 8), dtype=np.float32), np.arange(20) % 10
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=1 - x, y_test=y)
    said = kindred("site", "lyon", "--server=127.0.0.1:9", "--data-dir", tmp_path / "data.npz", "--insecure", "--check")
    assert "20 images of 1x8x8 to train on, 20 to test on, labels up to 9" in said


@pytest.mark.engine
@pytest.mark.deployment
def test_a_simulation_with_an_extension_matches_one_process_and_leaves_the_environment_unchanged(
    kindred, environment, tmp_path
) -> None:
    before = files(environment)
    models = []
    for engine in ("flower", "inline"):
        said = kindred("run", "--strategy=blend", f"--engine={engine}", f"--output-dir={tmp_path / engine}", *SMALL)
        assert "results in" in said and "round 2/2" in said
        (folder,) = (tmp_path / engine).iterdir()
        models.append({path.name: values(path) for path in (folder / "models").iterdir()})
    assert models[0] == models[1] and len(models[0]) == 4
    assert files(environment) == before
    assert list((tmp_path / "state" / "kindred" / "simulations").iterdir()) == []
