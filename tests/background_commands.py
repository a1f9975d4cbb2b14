"""Commands that run in the background of a test, their output, and every process related to them."""

from __future__ import annotations

import os
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

PATIENCE = 900.0  # s to wait for what must happen; far more than it takes on a slow machine

SCRIPTS = sysconfig.get_path("scripts")
KINDRED = os.path.join(SCRIPTS, "kindred")

# Code of a process that becomes the command in its arguments, which heeds SIGINT even if the tests ignore it.
HEEDING = "import os, signal as s, sys; s.signal(s.SIGINT, s.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(
    condition: Callable[[], T], otherwise: Callable[[], str] = lambda: "in vain", seconds: float = PATIENCE
) -> T:
    """Return the condition's value once it is true; after `seconds`, fail with the text of `otherwise`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)
    return found


class Machines:
    """Commands in a folder, each with a name; the folder is the home of everything that Flower starts for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([SCRIPTS, os.environ["PATH"]])
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                list(map(str, command)), cwd=self.folder, env=os.environ | {"PATH": path}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return self.running[name]

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_for(self, name: str, text: str) -> None:
        def says_or_has_ended() -> bool:
            return text in self.said(name) or self.running[name].poll() is not None

        wait_until(says_or_has_ended, lambda: f"{name} does not say {text!r}:\n{self.said(name)}")
        assert text in self.said(name), f"{name} ended:\n{self.said(name)}"

    def supernode(self, name: str) -> psutil.Process | None:
        children = psutil.Process(self.running[name].pid).children()
        return next((child for child in children if child.status() != psutil.STATUS_ZOMBIE), None)

    def processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter(["environ", "status", "cmdline"]):
            home = (process.info["environ"] or {}).get("FLWR_HOME", "")
            if home.startswith(str(self.folder)) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.info["cmdline"] or []))
        return found

    def end(self, *names: str) -> dict[str, int]:
        """Ask commands to end, by default all; return their exit codes."""
        ended = {name: self.running.pop(name) for name in names or list(self.running)}
        for process in ended.values():
            process.terminate()
        return {name: process.wait(30) for name, process in ended.items()}

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
