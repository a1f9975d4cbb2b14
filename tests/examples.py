"""Run an example's code. It imports `kindred`, which cannot be in one process with `strategies`: it gets its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .background_commands import PATIENCE


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


def calculated(folder: Path, code: str) -> Any:
    """Return what the code prints, parsed as JSON."""
    done = python(folder, "-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
