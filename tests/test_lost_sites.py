"""A real server and its sites, which train again soon after the connection or a disk has been repaired."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import sqlite3
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from kindred.server_app.deployment.files import LEAST_FREE

from .background_commands import KINDRED, PATIENCE, Machines, free_port, wait_until
from .deployment_commands import kindred, write_digits
from .test_report import data_of

pytestmark = pytest.mark.deployment

SETTINGS = (
    'dataset="sites" image-shape="1x8x8" num-classes=10 strategy="local" local-epochs=1 num-rounds=1 '
    'min-available-clients=1 device="cpu"'
)
BACK = 60.0  # s after the repair in which a site has trained a round


class Front:
    """A port before a server's: it passes connections on, or spoils them as a proxy in a hospital does."""

    def __init__(self, server: int, keys: Path) -> None:
        self._server, self._keys = server, keys
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._spoil: Callable[[socket.socket], None] | None = None
        self._open: list[socket.socket] = []
        self.refused: set[bytes] = set()  # paths that were answered with status 500
        threading.Thread(target=self._accept, daemon=True).start()

    def spoil(self, how: Callable[[socket.socket], None] | None) -> None:
        """From now on answer each connection like this; None: pass it on."""
        self._spoil = how
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            self._open.append(client)
            if self._spoil:
                return self._spoil(client)
            with socket.create_connection(("127.0.0.1", self._server)) as server:
                self._open.append(server)
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()

    def in_the_clear(self, client: socket.socket) -> None:
        """Answer with status 503, without TLS."""
        client.recv(65536)
        client.sendall(b"HTTP/1.0 503 Service Unavailable\r\n\r\n")

    def with_500(self, client: socket.socket) -> None:
        """Answer with status 500, over TLS, as a SuperLink on a full disk does."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._keys / "server.crt", self._keys / "server.key")
        with context.wrap_socket(client, server_side=True) as safe:
            self.refused.add(safe.recv(65536).split()[1])
            safe.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(65536):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


class Disk:
    """A small disk in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.filler = folder, folder / "filler"
        folder.mkdir(mode=0o700)
        self.mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={2 * LEAST_FREE:.0f},mode=700", "tmpfs", folder], check=False
        ).returncode == 0  # fmt: skip

    def fill(self) -> None:
        if not self.mounted:
            pytest.skip("this user cannot mount a small disk")
        with contextlib.suppress(OSError), open(self.filler, "wb", 0) as file:
            while file.write(bytes(2**20)) or file.write(bytes(1)):
                pass

    def end(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", self.folder], check=True)


class Hospital(Machines):
    """A server with keys, and the site lyon, which reaches it through a `Front`; each has a disk of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.disk, self.server_disk = Disk(folder / "state-lyon"), Disk(folder / "server")
        kindred("keys", folder / "keys", "--server", "localhost", "--sites", "lyon")
        write_digits(folder / "digits.npz")
        self.port, self.state = free_port(), folder / "server"
        self.front = Front(self.port, folder / "keys")
        self.start("server", KINDRED, "server", "--keys", "keys", "--port", self.port, "--state", self.state)
        self.wait_for("server", "the server is ready")
        self.start(
            "lyon", KINDRED, "site", "lyon", "--server", f"localhost:{self.front.port}", "--ca", "keys/ca.crt",
            "--key", "keys/lyon.key", "--data-dir", "digits.npz", "--state-dir", "state-lyon", "--threads", 1,
        )  # fmt: skip
        self.wait_for("lyon", "SuperNode ID: ")

    def start_run(self) -> None:
        command = re.search(r"^\$ (FLWR_HOME=\S+ flwr run .*)$", self.said("server"), re.MULTILINE)[1]
        (self.folder / "run.log").unlink(missing_ok=True)
        self.start("run", "env", *shlex.split(command), "--run-config", SETTINGS)

    def trains(self, seconds: float = PATIENCE) -> None:
        """Wait until the site has trained a round of the run."""
        trained = self.rounds_trained
        wait_until(lambda: self.rounds_trained > trained, lambda: self.said("run") + self.said("lyon"), seconds)
        self.running.pop("run").wait(PATIENCE)

    @property
    def rounds_trained(self) -> int:
        return sum(entry["kind"] == "training" and "problem" not in entry for entry in self.journal())

    def server_page(self) -> dict:
        (address,) = re.findall(r"watch the runs at (http://127\.0\.0\.1:\d+/)", self.said("server"))
        return httpx.get(f"{address}data.json").json()["now"]

    def page(self) -> dict:
        return data_of((self.folder / "state-lyon" / "site-lyon.html").read_text())

    def apps(self) -> list[Path]:
        return list(self.disk.folder.glob("flower-lyon/apps/*"))

    def journal(self) -> list[dict]:
        journal = self.folder / "state-lyon" / "site-lyon.jsonl"
        return [json.loads(line) for line in journal.read_bytes().splitlines()] if journal.exists() else []


@pytest.fixture(scope="module")
def hospital(tmp_path_factory):
    hospital = Hospital(tmp_path_factory.mktemp("hospital"))
    try:
        yield hospital
    finally:
        hospital.end()
        hospital.disk.end()
        hospital.server_disk.end()


def test_a_moment_without_tls_and_the_site_trains_again(hospital) -> None:
    hospital.front.spoil(hospital.front.in_the_clear)
    reason = f"localhost:{hospital.front.port} does not speak TLS"
    hospital.wait_for("lyon", f"kindred: {reason}")
    hospital.start_run()
    time.sleep(20)
    assert reason in hospital.page()["doing"]
    hospital.front.spoil(None)
    hospital.trains(BACK)
    assert any(reason in entry.get("problem", "") for entry in hospital.journal())
    wait_until(lambda: reason not in hospital.page()["doing"], seconds=10)
    assert any(reason in text for _, _, text, _ in hospital.page()["faults"])


def test_a_moment_of_status_500_and_the_site_trains_again(hospital) -> None:
    hospital.front.spoil(hospital.front.with_500)
    hospital.start_run()
    heartbeat = b"/v1/fleet/send-node-heartbeat"
    wait_until(lambda: heartbeat in hospital.front.refused, seconds=90)
    hospital.front.spoil(None)
    hospital.trains(BACK)
    assert any("status 500" in entry.get("problem", "") for entry in hospital.journal())


def test_a_full_disk_of_a_site_is_named_and_the_site_trains_again(hospital) -> None:
    """It is full at the first message of the site's SuperNode, when the run's app is unpacked."""
    supernode = hospital.supernode("lyon")
    supernode.terminate()  # what it has unpacked is cleared
    wait_until(lambda: hospital.supernode("lyon") not in (None, supernode) and not hospital.apps())
    hospital.disk.fill()
    hospital.start_run()
    lack = f"the disk of {hospital.disk.folder}/flower-lyon has less than 100 MB left"
    hospital.wait_for("lyon", f"kindred: {lack}")

    def excluded() -> bool:
        return any(
            site[0] == "lyon" and "No space left on device" in site[3] for site in hospital.server_page()["sites"]
        )

    wait_until(excluded, lambda: f"{hospital.server_page()} {hospital.said('lyon')}", seconds=120)
    assert not hospital.apps()  # nothing that a later message would take for the app
    hospital.disk.filler.unlink()
    hospital.trains(BACK)
    wait_until(lambda: any(lack in text for _, _, text, _ in hospital.page()["faults"]), seconds=10)


def test_a_full_disk_of_the_server_is_named_and_the_run_that_waited_for_it_trains(hospital) -> None:
    (superlink,) = psutil.Process(hospital.running["server"].pid).children()
    (superexec,) = [child for child in superlink.children() if "flower-superexec" in " ".join(child.cmdline())]
    superexec.suspend()
    hospital.start_run()
    hospital.wait_for("run", "Successfully started run")
    with contextlib.closing(sqlite3.connect(hospital.state / "superlink.db", timeout=PATIENCE)) as database:
        wait_until(lambda: not database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])  # it has no room
    hospital.server_disk.fill()
    superexec.resume()
    hospital.wait_for("server", "kindred: flower-superexec has ended, and is started again")
    problems = wait_until(lambda: hospital.server_page()["problems"])
    assert problems[0] == f"the disk of {hospital.state} has less than 100 MB left, make room there"
    hospital.server_disk.filler.unlink()
    hospital.trains(BACK)
    wait_until(lambda: not hospital.server_page()["problems"], seconds=30)
