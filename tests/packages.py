"""Packages built and installed in tests, from copies of their folders and without the network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

IGNORED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "results", "site", "*.egg-info")


def pip(command: str, *arguments: str | Path, python: str | Path = sys.executable) -> None:
    """Run a command of pip for the environment of an interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, command, "--quiet", "--no-deps", "--no-index", *arguments],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def build(source: Path, folder: Path) -> Path:
    """Build a package's wheel from a copy of its folder."""
    shutil.copytree(source, folder / "source", ignore=IGNORED)
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder / "wheel", folder / "source")
    (wheel,) = (folder / "wheel").iterdir()
    return wheel


def install(source: Path, folder: Path) -> Path:
    """Install a package, from a copy of its folder, into a folder of its own."""
    pip("install", "--target", folder / "installed", build(source, folder))
    return folder / "installed"
