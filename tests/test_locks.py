"""Locks of files; and runs on a system that has only what Windows has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kindred import locks

from .background_commands import PATIENCE

# What a run uses is imported first; then the modules, functions and signals that Windows has not are gone, and
# msvcrt, of which locks need one function, notes its calls.
WITHOUT_POSIX = """
import os, shutil, signal, sys, types
import flwr.app, flwr.clientapp, flwr.serverapp, matplotlib.pyplot, psutil, sklearn.metrics, torch
import multiprocessing.resource_tracker, multiprocessing.shared_memory, typer.testing
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"):
    sys.modules[name] = None
for name in ("getuid", "geteuid", "fork", "killpg", "statvfs", "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
del signal.SIGHUP
shutil._use_fd_functions = False  # chosen at its import; it opens folders with a flag that is gone now
locked = []
sys.modules["msvcrt"] = types.SimpleNamespace(LK_LOCK=1, LK_NBLCK=2, locking=lambda *call: locked.append(call))

import kindred
from kindred.server_app.cli.commands import app

small = {"clients": 3, "rounds": 1, "samples_per_client": 10, "partition": "iid", "progress": False}
result = kindred.run("fedavg", "digits", **small)
kindred.compare(["local", "fedavg"], "digits", **small)
model = result.models.files[0]
done = typer.testing.CliRunner().invoke(app, ["predict", "--model", str(model), "--input", "inputs.npz"])
assert done.exit_code == 0, done.output
print(len(done.stdout.splitlines()), len(locked) > 0)
"""


def test_runs_comparisons_and_predictions_need_nothing_that_windows_has_not(tmp_path) -> None:
    np.savez(tmp_path / "inputs.npz", x=np.zeros((4, 8, 8), np.uint8))
    variables = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_POSIX], cwd=tmp_path, env=variables, capture_output=True,
        text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "True"]  # a head and four samples


def test_a_lock_is_free_again_when_its_file_is_closed(tmp_path) -> None:
    path = tmp_path / "lock"
    with open(path, "w") as first, open(path, "a") as second:
        locks.lock(first, wait=False)
        with pytest.raises(BlockingIOError):
            locks.lock(second, wait=False)
        first.close()
        locks.lock(second, wait=True)


def test_on_windows_a_byte_beyond_the_content_is_locked_and_the_place_in_the_file_stays(tmp_path, monkeypatch) -> None:
    places: list[tuple[int, int]] = []

    def locking(descriptor: int, mode: int, count: int) -> None:
        places.append((mode, os.lseek(descriptor, 0, os.SEEK_CUR)))
        if len(places) < 3:
            raise PermissionError(13, "locked by another process")

    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "msvcrt", SimpleNamespace(LK_LOCK=1, LK_NBLCK=2, locking=locking))
    path: Path = tmp_path / "lock"
    path.write_text("content")
    with open(path, "rb+", buffering=0) as file:
        file.seek(3)
        with pytest.raises(BlockingIOError):
            locks.lock(file, wait=False)
        locks.lock(file, wait=True)  # in the second attempt
        assert file.tell() == 3 and file.read() == b"tent"
    assert places == [(2, locks.FAR), (1, locks.FAR), (1, locks.FAR)]
