"""The CPUs, the GPUs and the memory of this machine that a run can use."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from kindred.lazy import lazy

if TYPE_CHECKING:
    import joblib
    import torch
else:
    joblib, torch = lazy("joblib"), lazy("torch")

CONTAINER = Path("/sys/fs/cgroup")  # where Linux shows a container its limits


def cpus() -> int:
    """Return the number of CPUs that this process may use.

    Its affinity, its container's quota and the environment variable `LOKY_MAX_CPU_COUNT` bound it.
    """
    return int(joblib.cpu_count())


def processes_that_fit() -> int:
    """Return the number of processes that fit into the free memory if each becomes as large as this one is now.

    The limit of a container bounds it too.
    """
    return int(min(psutil.virtual_memory().available, _free_in_container()) // psutil.Process().memory_info().rss)


def _free_in_container() -> float:
    """Return the bytes that this process's container (control group, version 2) can still use; infinite elsewhere."""
    try:
        limit, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        return limit - used + int(parts["inactive_file"])  # files in memory make room for processes
    except (OSError, ValueError, KeyError):  # no container, or one without a limit: "max"
        return math.inf


def gpus() -> int:
    """Return the number of GPUs that PyTorch finds on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
