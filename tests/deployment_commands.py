"""Calls of `kindred` in this process, and the keys and data that its deployment commands need."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from kindred.server_app.cli.commands import app


def kindred(*arguments: object, code: int = 0) -> str:
    """Run a command in this process; return its output, with errors last."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.stdout + result.stderr


def write_digits(path: Path, first: int = 0) -> Path:
    digits = load_digits()
    x, y = digits.images[first : first + 60].astype(np.float32) / 16, digits.target[first : first + 60]
    np.savez(path, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    return path


@pytest.fixture(name="data")
def data_fixture(tmp_path) -> Path:
    return write_digits(tmp_path / "digits.npz")


@pytest.fixture(name="made_keys", scope="module")
def made_keys_fixture(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    kindred("keys", folder, "--server", "fl.example.org", "--sites", "lyon")
    return folder


@pytest.fixture(name="keys")
def keys_fixture(tmp_path, made_keys) -> Path:
    """A copy of the keys that a test may change."""
    return shutil.copytree(made_keys, tmp_path / "keys")  # with the permissions
