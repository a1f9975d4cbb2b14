"""One thread for all tests and the processes they start: threads that wait for a busy core make everything many times
slower. With one thread, results have the same bits everywhere."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from kindred.engine import roster
from kindred.server_app import results

settings.register_profile("without deadlines", deadline=None)  # deadlines would measure the machine, and imports
settings.load_profile("without deadlines")
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("COLUMNS", None)  # of the terminal in which the tests are run: tables have their whole width
roster.NODES_PAUSE = 0.005  # s; hundreds of runs each wait this long for nodes, which are all connected


@pytest.fixture(scope="session", autouse=True)
def _clients_keep_their_state_here(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def no_pictures():
    """Runs in this process draw nothing and write no report: for files whose tests look at neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "run_figures", lambda *_, **__: {})
        patch.setattr(results, "write_report", lambda *_, **__: None)
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Hide a GPU from all tests but those of it: results with the same bits are results of the CPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with runs in Flower's engine first, which take longest, so that no worker gets one at the end."""
    longest = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: item.path not in longest)
