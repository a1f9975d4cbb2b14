"""The live pages of a real server and its sites: one site is refused, one is killed and returns."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .background_commands import KINDRED, PATIENCE, Machines, free_port, wait_until
from .test_report import browser, data_of, opened  # noqa: F401

MAKE_DATA = Path(__file__).parent.parent / "examples" / "three-sites" / "make_data.py"
SETTINGS = {
    "dataset": "sites", "image-shape": "1x8x8", "num-classes": 10, "num-rounds": 6, "min-available-clients": 3,
    "local-epochs": 40, "shadow-local": True, "strategy": "heurfedamp", "device": "cpu",
}  # fmt: skip

pytestmark = pytest.mark.deployment


@pytest.fixture
def machines(tmp_path):
    """A server with a page, and the data and keys of four sites; those of bergen do not fit the run."""
    subprocess.run([sys.executable, MAKE_DATA, tmp_path], check=True)
    data = np.load(tmp_path / "oslo" / "data.npz")
    wider = {name: np.pad(x, ((0, 0), (1, 1), (1, 1))) if name[0] == "x" else x for name, x in data.items()}
    (tmp_path / "bergen").mkdir()
    np.savez(tmp_path / "bergen" / "data.npz", **wider)
    sites = "lyon,oslo,porto,bergen"
    subprocess.run([KINDRED, "keys", "keys", "--server", "localhost", "--sites", sites], cwd=tmp_path, check=True)
    machines = Machines(tmp_path)
    try:
        yield machines
    finally:
        machines.end()


def test_the_pages_follow_a_run_in_which_a_site_is_refused_and_another_is_killed_and_returns(
    machines, browser  # noqa: F811
) -> None:  # fmt: skip
    port, folder = free_port(), machines.folder
    machines.start("server", KINDRED, "server", "--keys", "keys", "--port", port, "--state", "server")
    machines.wait_for("server", "watch the runs at ")
    (address,) = re.findall(r"watch the runs at (http://127\.0\.0\.1:\d+/)", machines.said("server"))

    def start(site: str) -> None:
        machines.start(site, KINDRED, "site", site, "--server", f"localhost:{port}", "--ca", "keys/ca.crt", "--key",
                       f"keys/{site}.key", "--data-dir", f"{site}/data.npz", "--state-dir", f"{site}/state",
                       "--threads", 1)  # fmt: skip

    def row(site: str) -> list[str]:
        return tab.locator(f"tr:has(th:text-is('{site}'))").first.locator("td").all_text_contents()

    def shows(site: str, *texts: str) -> None:
        wait_until(lambda: all(text in " ".join(row(site)) for text in texts), lambda: tab.inner_text("main"))

    for site in ("lyon", "oslo", "porto", "bergen"):
        start(site)
    with opened(browser, address) as tab:
        for site in ("lyon", "oslo", "porto", "bergen"):
            shows(site, "online")
        assert tab.text_content("#doing") == "No run has been started yet."
        config = " ".join(f"{name}={json.dumps(value)}" for name, value in SETTINGS.items())
        command = re.search(r"^\$ (FLWR_HOME=\S+ flwr run .*)$", machines.said("server"), re.MULTILINE)[1]
        machines.start("run", "env", *shlex.split(command), "--run-config", config)
        shows("bergen", "excluded", "1x10x10, expected 1x8x8")
        shows("porto", "trains since")
        tab.wait_for_selector("text=In progress: 1 of 6 rounds", timeout=PATIENCE * 1000)
        machines.supernode("porto").kill()
        machines.running["porto"].kill()
        machines.running.pop("porto").wait()
        shows("porto", "offline")
        tab.wait_for_selector("td:has-text('error')", timeout=PATIENCE * 1000)  # among the replies that were not used
        tab.wait_for_selector("text=2 of 3 can take part", timeout=PATIENCE * 1000)  # it has rounds left for the site
        start("porto")
        shows("porto", "online", "takes part")
        tab.wait_for_selector("text=The run is finished.", timeout=PATIENCE * 1000)
        assert tab.text_content("#state") == "Finished: 6 rounds"
        tab.set_viewport_size({"width": 390, "height": 800})
        wait_until(lambda: tab.evaluate("document.documentElement.scrollWidth") <= 390)
    pages = {
        site: data_of((folder / site / "state" / f"site-{site}.html").read_text())
        for site in ("oslo", "porto", "bergen")
    }
    (run,) = pages["oslo"]["runs"]
    assert run["rounds"] == [1, 2, 3, 4, 5, 6]
    assert None not in run["federated"] + run["alone"]
    (returned,) = pages["porto"]["runs"]
    assert 1 in returned["rounds"] and len(returned["rounds"]) < 6
    assert any("1x10x10, expected 1x8x8" in text for _, _, text, _ in pages["bergen"]["faults"])
    assert pages["bergen"]["runs"] == []
