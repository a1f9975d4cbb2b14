"""The CPUs, the GPUs and the memory of this machine that a run can use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from kindred.lazy import lazy

if TYPE_CHECKING:
    import joblib
    import torch
else:
    joblib, torch = lazy("joblib"), lazy("torch")


def cpus() -> int:
    """Return the number of CPUs that this process may use.

    Its affinity, its container's quota and the environment variable `LOKY_MAX_CPU_COUNT` bound it.
    """
    return int(joblib.cpu_count())


def processes_that_fit() -> int:
    """Return the number of processes that fit into the free memory if each becomes as large as this one is now."""
    return int(psutil.virtual_memory().available // psutil.Process().memory_info().rss)


def gpus() -> int:
    """Return the number of GPUs that PyTorch finds on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
