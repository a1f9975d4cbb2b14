"""Reasons why a site cannot connect: clocks, keys, certificates, and the messages about them."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from hypothesis import HealthCheck, given, settings, strategies as st

from kindred.server_app.deployment import (
    keys as keys_command,
    supernode,
)
from kindred.server_app.deployment.connection import Link, clock_fault, faults

from .background_commands import free_port, wait_until
from .deployment_commands import keys_fixture, kindred, made_keys_fixture  # noqa: F401

IN_ANY_TIME = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@contextmanager
def answering(
    keys: Path | None, behind: float = 0.0, health: int = 200, refusal: tuple[int, object] = (500, {})
) -> Iterator[int]:
    """Serve with a clock `behind` seconds late and refuse to activate SuperNodes; yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def date_time_string(self, timestamp=None):
            return formatdate(time.time() - behind, usegmt=True)

        def answer(self, status, content):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self):
            self.answer(health if self.path == "/health" else 404, {})

        def do_POST(self):
            self.answer(*refusal)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        if keys:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(keys / "server.crt", keys / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()


def link(keys: Path, port: int) -> Link:
    return Link("localhost", port, keys / "ca.crt", keys / "lyon.key")


@pytest.mark.parametrize(
    ("behind", "says"),
    [
        (0, None), (4, None), (-300, None),
        (12, r"about 1[123] s ahead of the server's"), (4000, r"about (3999|400[01]) s ahead of the server's"),
        (-315, r"about 31[456] s behind the server's"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("secure", [True, False])
def test_a_clock_outside_flowers_tolerance_is_named(behind, says, secure, made_keys) -> None:
    with answering(made_keys if secure else None, behind) as port:
        found = list(faults(link(made_keys, port) if secure else Link("localhost", port)))
    assert len(found) == (says is not None)
    for line in found:
        assert re.match(f"this machine's clock is {says}, allowed: up to 5 s ahead or 305 s behind; set it, ", line)


@IN_ANY_TIME
@given(st.floats(-1000, 1000), st.floats(0, 30), st.floats(0, 1), st.floats(0, 1))
def test_a_clock_is_called_wrong_or_right_only_if_this_is_certain(ahead, travel, share, late) -> None:
    now, resolution = 1.7e9, 2.0
    sent, received = now + ahead - share * travel, now + ahead + (1 - share) * travel
    date = formatdate(now - late, usegmt=True)  # renewed once a second, without fractions
    if -305 <= ahead <= 5:
        assert clock_fault(date, sent, received) is None
    elif not -305 - resolution - travel - 0.01 <= ahead <= 5 + resolution + travel + 0.01:
        assert f"s {'ahead of' if ahead > 0 else 'behind'} the server's" in clock_fault(date, sent, received)
    assert "allowed: up to 5 s ahead" in clock_fault(date, sent, received, refused=True)


def test_without_a_date_a_clock_is_wrong_if_the_server_refuses_a_fresh_signature() -> None:
    assert clock_fault("", 0, 1) is None
    assert "clock is unlike the server's" in clock_fault("", 0, 1, refused=True)


IN_USE = b"Exit Code: 305\nFailed to initialize the connection to the SuperLink.\n[code: 2004] Failed to activate Supe"


@pytest.mark.parametrize(
    ("refusal", "output", "says"),
    [
        ((412, {"code": 2004, "detail": "no"}), IN_USE, "the server does not know the key KEYS/lyon.key, or has w"),
        ((412, {"code": 2003, "detail": "no"}), IN_USE, "the key KEYS/lyon.key is in use by another SuperNode, or w"),
        ((412, {"code": 2003, "detail": "no"}), b"ERROR :      Exit Code: 604", None),  # the server names the fault
        ((401, {"detail": "Invalid SuperNode authentication"}), b"", "this machine's clock is about "),
        ((404, {}), IN_USE, None),
        ((412, {"code": 2004, "detail": "no"}), None, None),  # no certificate has ended yet
    ],
)
def test_the_server_s_refusal_of_a_key_is_explained(refusal, output, says, made_keys) -> None:
    with answering(made_keys, refusal=refusal) as port:
        found = list(faults(link(made_keys, port), output))
    assert len(found) == (says is not None)
    for line in found:
        assert line.startswith(says.replace("KEYS", str(made_keys)))


def test_an_untrusted_certificate_is_named_with_the_reason(made_keys, keys, tmp_path) -> None:
    other = tmp_path / "other"
    kindred("keys", other, "--server", "localhost")
    with answering(other) as port:
        (line,) = faults(link(keys, port))
        assert f"localhost:{port} is not signed by the CA of {keys}/ca.crt (" in line
        (line,) = faults(Link("localhost", port))
        assert "does not answer without TLS" in line
        assert "give --ca and --key" in line
    with answering(keys) as port:
        (line,) = faults(link(keys, port)._replace(host=ip_address("127.0.0.2")))
        assert f"127.0.0.2:{port} is not for this name (IP address mismatch" in line
        (keys / "ca.crt").write_text("half of")
        with pytest.raises(typer.Exit):
            list(faults(link(keys, port)))
    with answering(None) as port:
        (line,) = faults(link(made_keys, port))
        assert f"localhost:{port} does not speak TLS" in line
    with answering(made_keys, health=404) as port:
        (line,) = faults(link(made_keys, port))
        assert "answers with status 404" in line
    (line,) = faults(link(made_keys, free_port()))
    assert "cannot be reached (Connection refused), and is tried again" in line


@pytest.mark.parametrize(
    ("ca_days", "server_days", "says"),
    [
        (3650, 61, []),
        (3650, 30, [r"the certificate of localhost:\d+ is valid until \S+, for 29 more days: .*`kindred keys renew`"]),
        (59, 30, [r"\S+/ca.crt is valid until \S+, for 58 more days: run `kindred", r"the certificate of localhost"]),
        (3650, 0, [r"the certificate of localhost:\d+ is not valid on \S+, the date .* \(certificate has expired\)"]),
        (0, 30, [r"\S+/ca.crt is valid from .*: copy the ca.crt that the server has now"]),
    ],
)
def test_a_site_warns_of_expiring_and_expired_certificates(ca_days, server_days, says, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(keys_command, "CA_DAYS", ca_days)
    monkeypatch.setattr(keys_command, "SERVER_DAYS", server_days)
    kindred("keys", tmp_path / "keys", "--server", "fl.example.org", "--sites", "lyon")
    with answering(tmp_path / "keys") as port:
        found = list(faults(link(tmp_path / "keys", port)))
    assert len(found) == len(says)
    for line, pattern in zip(found, says):
        assert re.match(pattern, line)


def test_the_output_of_a_supernode_is_passed_on_immediately_and_its_end_kept(capfdbinary, monkeypatch) -> None:
    monkeypatch.setattr(supernode, "KEPT", 6)
    code = (
        "from sys import stderr, stdin; stderr.write('first, no'); stderr.flush(); stdin.read(); "
        "stderr.write(' line\\nlast\\n')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    output = supernode.Output(process.stderr)
    passed_on = []
    wait_until(lambda: passed_on.append(capfdbinary.readouterr().err) or b"".join(passed_on) == b"first, no")
    process.stdin.close()
    output.join()
    process.wait()
    assert capfdbinary.readouterr().err == b" line\nlast\n"
    assert output.end == b"\nlast\n"


def test_what_keeps_a_supernode_from_working_is_reported_once_and_a_silent_one_is_ended(monkeypatch) -> None:
    said: list[tuple[str, bool]] = []
    reasons, space = iter([["no TLS"], ["no TLS"], []]), iter(["", "full", "full"])
    monkeypatch.setattr(supernode, "faults", lambda *_: next(reasons))
    monkeypatch.setattr(supernode, "lack_of_space", lambda _: next(space, ""))
    monkeypatch.setattr(supernode, "SILENCE", 0.2)
    monkeypatch.setattr(supernode, "LOOK", 0.05)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    reading, writing = os.pipe()
    with open(reading, "rb", 0) as contact, open(writing, "wb", 0) as child:
        threads = [threading.Timer(delay, child.write, [line]) for delay, line in enumerate(
            [b"an error\n", b"\nan error\n", b"status 500\n", b"error\n\n"]
        )]  # fmt: skip
        for i, thread in enumerate(threads):
            thread.interval = 0.1 * i
            thread.start()
        began = time.monotonic()
        accepted = supernode._watch(
            process, contact, Path("/home"), Link("fl", 8000), lambda line, over=False: said.append((line, over)), set()
        )
    assert process.wait(0) == -signal.SIGTERM
    assert began < accepted < time.monotonic() - 0.2
    reported = [line for line in said if "disk" not in line[0] and line[0] != "full"]
    assert reported == [
        ("no TLS", False),
        ("fl:8000 does not answer the SuperNode: status 500", False),
        ("fl:8000 answers the SuperNode", True),
        ("flower-supernode runs, but has sent nothing for 0.2 s, and is ended", False),
    ]
    assert [line for line in said if line not in reported] == [
        ("full", False),
        ("the disk of /home has room again", True),
    ]


def test_a_killed_supernode_is_started_at_once_until_the_server_releases_its_key(tmp_path, monkeypatch, capfd) -> None:
    """Later the pauses grow: a key may have been withdrawn."""

    class Over(BaseException):
        pass

    clock, slept = [1000.0], []

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds + 10  # that a start takes
        if len(slept) == 10:
            raise Over

    heard = iter([1000.0])
    monkeypatch.setattr(supernode, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(supernode, "faults", lambda *_: [])

    def start(*_, **__):
        return SimpleNamespace(stderr=io.BufferedReader(io.BytesIO(supernode.NOT_ACTIVATED)), wait=lambda: 1)

    monkeypatch.setattr(supernode, "start_process", start)
    monkeypatch.setattr(supernode, "_watch", lambda *_: next(heard, -math.inf))
    with pytest.raises(Over):
        supernode.keep_running(list, {}, tmp_path, Link("fl", 8000), lambda *_: None)
    assert slept == [1, 1, 1, 1, 1, 1, 1, 2, 4, 8]
