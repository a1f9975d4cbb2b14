"""The guard on the SuperLink's port: which requests pass, its replies, and how much memory a stranger can use."""

from __future__ import annotations

import asyncio
import http.client
import math
import os
import resource
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import uvicorn
from flwr.common.constant import FAB_MAX_SIZE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, TIMESTAMP_HEADER
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from kindred.server_app.deployment import addresses, guard
from kindred.server_app.deployment.guard import CHUNK, OWN, SMALL, Connection, Guard, server_names

from .background_commands import KINDRED, Machines, free_port, wait_until
from .deployment_commands import kindred, write_digits

PUSH, START, SENDS = "/v1/fleet/push-object", "/v1/control/start-run", guard.SENDS_MESSAGES
KNOWN, UNKNOWN = b"known", b"unknown"


class Reached:
    """Stand-in for the SuperLink that reads the body of each request and records its size."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.last_body = b""
        self.at_work = self.most_at_work = 0
        self.answers = math.inf  # replies that may still be given

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            assert (await receive())["type"] == "lifespan.startup"
            await send({"type": "lifespan.startup.complete"})
            await receive()
            return
        body, more = bytearray(), True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            body, more = body + message["body"], message["more_body"]
        self.at_work += 1
        self.most_at_work = max(self.at_work, self.most_at_work)
        while self.answers < 1:
            await asyncio.sleep(0.001)
        self.answers -= 1
        self.at_work -= 1
        self.sizes.append(len(body))
        self.last_body = bytes(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


async def ask(
    server: Guard, path: str, client: str | None = "127.0.0.1", body: tuple[bytes, ...] = (b"",), then: str = "",
    host: str = "localhost:8000", sent: list[int] | None = None, user: int | None = os.geteuid(), **headers: str,
) -> int:  # fmt: skip
    """Send a request as a user and return the status of its reply; the bytes read of its body are appended to `sent`.

    The sender may be "silent" or "leave" before the rest of its body.
    """
    parts, statuses = list(body), []

    async def receive():
        if not parts:
            if then == "silent":
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}
        part = parts.pop(0)
        if sent is not None:
            sent.append(len(part))
        return {"type": "http.request", "body": part, "more_body": bool(parts or then)}

    async def send(message):
        statuses.append(message.get("status"))

    named = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    await server({
        "type": "http", "path": path, "client": client and (client, 4711), "server": ("192.0.2.7", 8000),
        "scheme": "http", "headers": [(name.encode(), value.encode()) for name, value in named.items() if value],
        "extensions": {guard.TRUST: lambda: None, guard.USER: lambda: user},
    }, receive, send)  # fmt: skip
    return statuses[0]


@pytest.fixture
def reached() -> Reached:
    return Reached()


@pytest.fixture
def server(reached, monkeypatch) -> Guard:
    """A guard that accepts one word as a signature, in front of the stand-in for the SuperLink."""
    monkeypatch.setattr(guard, "is_signed_by_known_node", lambda scope: (b"signed", KNOWN) in scope["headers"])
    return Guard(reached, ["fl.example.org", "192.0.2.7"])


def status(server: Guard, path: str, *arguments, **settings) -> int:
    return asyncio.run(ask(server, path, *arguments, **settings))


@pytest.mark.parametrize(
    ("path", "client", "passes"),
    [
        (START, "127.0.0.1", True),
        (START, "::1", True),
        (START, "::ffff:127.0.0.1", True),
        (START, "192.0.2.7", True),  # the server's own address
        (START, "192.0.2.9", False),
        ("/v1/control/register-node", "192.0.2.9", False),
        ("/v1/runtime/acquire-task", "192.0.2.9", False),
        ("/v1/fleet/../control/start-run", "192.0.2.9", True),  # Flower does not normalise paths, and has no such path
        ("/v1/fleet/pull-messages", "192.0.2.9", True),
        ("/health", "192.0.2.9", True),
        ("/docs", "192.0.2.9", False),
        (START, None, False),
    ],
)
def test_other_machines_reach_only_what_supernodes_need(server, reached, path, client, passes) -> None:
    assert status(server, path, client) == (200 if passes else 403)
    assert len(reached.sizes) == passes


@pytest.mark.parametrize(
    ("path", "user", "passes"),
    [
        (START, os.geteuid(), True), (START, 0, True), (START, os.geteuid() + 1, False), (START, None, False),
        ("/v1/runtime/acquire-task", os.geteuid() + 1, False), (PUSH, os.geteuid() + 1, True), ("/health", None, True),
    ],
)  # fmt: skip
def test_other_users_of_this_machine_reach_only_what_supernodes_need(
    server, tmp_path, monkeypatch, path, user, passes
) -> None:
    (tmp_path / "tcp").touch()
    monkeypatch.setattr(addresses, "CONNECTIONS_HERE", tmp_path)
    assert status(server, path, user=user) == (200 if passes else 403)
    monkeypatch.setattr(addresses, "CONNECTIONS_HERE", tmp_path / "absent")  # as on macOS
    assert status(server, path, user=user) == 200


@pytest.mark.skipif(not addresses.can_tell_users(), reason="the system does not show users of connections")
@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_the_user_at_the_other_end_is_known_until_that_end_is_closed(host, name) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")) as listening:
        with closing(socket.create_connection((name, listening.getsockname()[1]))) as theirs:
            ours, address = listening.accept()
            with closing(ours):
                ends = address[:2], ours.getsockname()[:2]
                assert addresses.user_of(*ends) == os.geteuid()
                assert addresses.user_of((ends[0][0], 1), ends[1]) is None
                theirs.close()
                assert addresses.user_of(*ends) is None  # the system now shows it as root's


@pytest.mark.parametrize("path", [START, PUSH, "/health", "/v1/runtime/acquire-task"])
@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("localhost:8000", True), ("LOCALHOST", True), ("127.0.0.1:8000", True), ("[::1]:8000", True),
        ("fl.example.org:8000", True), ("192.0.2.7", True),
        ("evil.example", False), ("evil.example:8000", False), ("192.0.2.9:8000", False), ("[2001:db8::7]", False),
        ("localhost.evil.example", False), ("localhost@evil.example", False), ("[localhost", False), ("", False),
    ],
)  # fmt: skip
def test_a_foreign_host_name_is_refused_on_all_paths(server, reached, path, host, passes) -> None:
    assert status(server, path, host=host) == (200 if passes else 421)
    assert len(reached.sizes) == passes


def test_a_server_on_all_addresses_accepts_each_of_them_and_no_other_name(reached, tmp_path) -> None:
    server = Guard(reached, server_names("0.0.0.0", None))
    assert status(server, PUSH, host="192.0.2.9:8000") == status(server, PUSH, host=socket.gethostname()) == 200
    assert status(server, PUSH, host="evil.example") == 421

    kindred("keys", tmp_path / "keys", "--server", "fl.example.org,192.0.2.7")
    names = server_names("192.0.2.8", str(tmp_path / "keys" / "server.crt"))
    assert {"localhost", "127.0.0.1", "::1", "fl.example.org", "192.0.2.7", "192.0.2.8"} <= set(names)


@pytest.mark.parametrize(
    ("origin", "passes"),
    [
        ("http://localhost:8000", True), ("http://evil.example", False), ("null", False),
        ("https://localhost:8000", False), ("http://localhost:8001", False), ("http://127.0.0.1:8000", False),
    ],
)  # fmt: skip
def test_requests_of_foreign_web_pages_are_refused(server, reached, origin, passes) -> None:
    for path in (START, PUSH, "/health"):
        assert status(server, path, origin=origin) == (200 if passes else 403)
    assert len(reached.sizes) == 3 * passes


# --- bodies ---


@pytest.mark.parametrize("client", ["127.0.0.1", "192.0.2.9"])
@pytest.mark.parametrize(
    ("path", "has_run", "signed", "length", "answer"),
    [
        (PUSH, False, UNKNOWN, SMALL, 200),  # such as a node that registers
        (PUSH, False, KNOWN, SMALL + 1, 403),
        (PUSH, True, UNKNOWN, SMALL + 1, 401),
        (PUSH, True, KNOWN, CHUNK, 200),
        (PUSH, True, KNOWN, CHUNK + 1, 413),
        ("/health", True, KNOWN, SMALL + 1, 413),
    ],
)
def test_the_bound_on_a_body_follows_from_the_head_of_its_request(
    server, reached, client, path, has_run, signed, length, answer
) -> None:  # fmt: skip
    if has_run:
        assert status(server, SENDS) == 200
    before, sent = len(reached.sizes), []
    settings = {"client": client, "signed": signed.decode(), "sent": sent}
    assert status(server, path, body=(bytes(length),), content_length=str(length), **settings) == answer
    assert reached.sizes[before:] == sent == ([length] if answer == 200 else [])  # otherwise none of it was read
    assert status(server, path, content_length=str(600 * 10**6), **settings) == 413
    assert len(sent) == (answer == 200)


def test_another_machine_cannot_announce_a_run(server) -> None:
    assert status(server, SENDS, "192.0.2.9") == 403
    assert status(server, PUSH, content_length=str(CHUNK), signed="known") == 403


@pytest.mark.parametrize(("path", "most"), [(PUSH, CHUNK), (START, OWN)])
@pytest.mark.parametrize("length", ["", "5"])
def test_a_body_without_a_length_or_with_a_false_one_is_cut_off_at_the_bound(
    server, reached, path, most, length
) -> None:  # fmt: skip
    assert status(server, SENDS) == 200
    headers = {"content_length": length} if length else {"transfer_encoding": "chunked"}
    limit, sent = SMALL if length else most, []
    parts = (bytes(2**16),) * 10_000
    assert status(server, path, body=parts, sent=sent, signed="known", **headers) == 413
    assert limit < sum(sent) <= limit + 2**16
    assert len(reached.sizes) == 1
    whole = (bytes(limit // 2), b"", bytes(limit - limit // 2))
    assert status(server, path, body=whole, signed="known", **headers) == 200
    assert reached.sizes[1:] == [limit]


def test_a_body_reaches_the_superlink_unchanged(server, reached) -> None:
    parts = (b"a", b"", b"b", b"c" * 2 * SMALL, b"d", b"e" * SMALL, b"f")
    assert status(server, START, body=parts, transfer_encoding="chunked") == 200
    assert reached.last_body == b"".join(parts)


def test_flowers_messages_are_within_the_bounds() -> None:
    chunk = bytes(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
    assert PushObjectRequest(object_id=64 * "0", object_content=chunk).ByteSize() < CHUNK
    assert max(FAB_MAX_SIZE, CHUNK) < OWN / 2


async def wait_for(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("path", "at_once"), [(PUSH, guard.CHUNKS_AT_ONCE), (START, guard.OWN_AT_ONCE)])
def test_a_bounded_number_of_large_bodies_is_held_at_once_and_the_others_wait(server, reached, path, at_once) -> None:
    large = {"content_length": str(CHUNK), "signed": "known", "body": (bytes(CHUNK // 100),)}

    async def run() -> None:
        assert await ask(server, SENDS) == 200
        reached.answers = 0
        sent: list[int] = []
        asked = [asyncio.create_task(ask(server, path, sent=sent, **large)) for _ in range(3 * at_once)]
        await wait_for(lambda: reached.at_work == at_once)
        await asyncio.sleep(0.01)
        assert len(sent) == reached.most_at_work == at_once  # nothing of the others is read
        small = asyncio.create_task(ask(server, PUSH, "192.0.2.9"))
        await wait_for(lambda: reached.at_work == at_once + 1)
        reached.answers = math.inf
        assert await asyncio.gather(small, *asked) == [200] * (1 + 3 * at_once)
        assert reached.most_at_work == at_once + 1

    asyncio.run(run())


@pytest.mark.parametrize(("then", "answer"), [("leave", 400), ("silent", 503)])  # SuperNodes try again after 503
def test_a_sender_that_leaves_or_falls_silent_frees_its_place(
    server, reached, monkeypatch, then, answer
) -> None:  # fmt: skip
    monkeypatch.setattr(guard, "PATIENCE", 0.05)
    large = {"content_length": str(CHUNK), "signed": "known"}

    async def run() -> None:
        assert await ask(server, SENDS) == 200
        others = [ask(server, PUSH, then=then, **large) for _ in range(guard.CHUNKS_AT_ONCE)]
        last = ask(server, PUSH, body=(bytes(CHUNK),), **large)
        async with asyncio.timeout(10):
            assert await asyncio.gather(*others, last) == [answer] * len(others) + [200]

    asyncio.run(run())
    assert reached.sizes == [0, CHUNK]


def test_a_sender_gets_more_time_in_proportion_to_the_bytes_sent(server, reached, monkeypatch) -> None:
    monkeypatch.setattr(guard, "PATIENCE", 0.05)
    monkeypatch.setattr(guard, "PACE", SMALL * 10 // 2)

    async def run(parts: int) -> tuple[int, float]:
        began = time.monotonic()
        answer = await ask(server, START, body=(bytes(SMALL // 10),) * parts, then="silent", content_length="999")
        return answer, time.monotonic() - began

    answers, seconds = zip(*(asyncio.run(run(parts)) for parts in (0, 10)), strict=True)
    assert answers == (503, 503)
    assert 0.04 < seconds[0] < 0.2 < seconds[1] < 5
    assert reached.sizes == []


# --- the signature ---


def test_the_head_of_a_request_shows_whether_a_registered_supernode_signed_it() -> None:
    from flwr.superlink.main import create_app

    superlink = create_app()  # its state is in memory
    registered, stranger = generate_key_pairs(), generate_key_pairs()
    superlink.state.linkstate_factory.state().create_node("", "", public_key_to_bytes(registered[1]), 0)

    def known(public, private, age: float = 0, **changed: str) -> bool:
        timestamp = (now() - timedelta(seconds=age)).isoformat()
        headers = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(public)).decode(), TIMESTAMP_HEADER: timestamp,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(private, timestamp.encode())).decode(),
        } | changed  # fmt: skip
        named = [(name.encode(), value.encode()) for name, value in headers.items() if value]
        return guard.is_signed_by_known_node({"type": "http", "app": superlink, "path": PUSH, "headers": named})

    private, public = registered
    assert known(public, private)
    assert not known(public, private, age=400)
    assert not known(public, stranger[0])
    assert not known(stranger[1], stranger[0])
    for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, FLEET_HTTP_SIGNATURE_HEADER):
        assert not known(public, private, **{name: ""})
        assert not known(public, private, **{name: "no such thing"})


# --- connections ---


class Served(NamedTuple):
    port: int
    reached: Reached

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(sent)
        return connection

    def is_well(self) -> bool:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200


@pytest.fixture
def served(server, reached, monkeypatch) -> Iterator[Served]:
    """The guard behind uvicorn with at most five connections."""
    monkeypatch.setattr(guard, "CONNECTIONS", 5)
    uvicorn_server = uvicorn.Server(uvicorn.Config(server, http=Connection, ws="none", log_level="critical"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            wait_until(lambda: uvicorn_server.started)
            yield Served(listening.getsockname()[1], reached)
        finally:
            reached.answers, uvicorn_server.should_exit = math.inf, True
            thread.join()
    assert Connection.idle == {}


HEAD = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: localhost\r\n"


def answer(connection: socket.socket) -> bytes:
    """Return everything received until the connection is closed or reset."""
    read = b""
    with suppress(ConnectionError):
        while part := connection.recv(2**16):
            read += part
    return read


def flood(connection: socket.socket, part: bytes) -> int:
    """Number of bytes, up to 50 MB, that can be sent until the connection is closed or stays unread."""
    sent = 0
    with suppress(ConnectionError, TimeoutError):
        while sent < 50 * 10**6:
            sent += connection.send(part)
    return sent


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"GET /", b"a" * 10_000),
        (HEAD, b"X: " + b"a" * 10_000 + b"\r\n"),
        (HEAD + b"X: ", b"a" * 10_000),
        (HEAD.replace(PUSH.encode(), START.encode()) + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a" * 10_000),
        (HEAD + b"Content-Length: 0\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n"),
        (HEAD + b"Content-Length: 600000000\r\n\r\n", b"a" * 10_000),
    ],
    ids=["path", "headers", "header", "trailer", "pipelined", "body"],
)
def test_any_part_that_is_too_large_ends_the_connection(served, begin, part) -> None:
    served.reached.answers = 0
    with closing(served.connect(begin)) as connection:
        assert flood(connection, part) < 10 * 10**6  # data in buffers of the system
    assert max(served.reached.sizes, default=0) == 0
    served.reached.answers = math.inf
    assert served.is_well()


def test_one_connection_takes_one_request_after_the_other(served) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)) as connection:
        for length in (0, 3, SMALL, 5):
            connection.request("POST", START, bytes(length))
            assert connection.getresponse().read() == b""
        first = connection.sock
        for _ in range(5):  # together, the heads are larger than one may be
            connection.request("GET", "/health", headers={"X": "a" * (SMALL // 2)})
            assert connection.getresponse().read() == b""
        assert connection.sock is first
    assert served.reached.sizes == [0, 3, SMALL, 5, 0, 0, 0, 0, 0]


def test_the_next_request_may_arrive_before_the_last_reply_is_complete(served, monkeypatch) -> None:
    monkeypatch.setattr(guard, "PATIENCE", 0.2)
    served.reached.answers = 0
    with closing(served.connect(2 * (HEAD + b"Content-Length: 2\r\n\r\nab"))) as connection:
        for _ in range(2):
            wait_until(lambda: served.reached.at_work == 1)
            time.sleep(0.3)  # longer than a head may take
            served.reached.answers = 1
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    assert served.reached.sizes == [2, 2]


@pytest.mark.parametrize("begin", [b"", HEAD, HEAD + b"Content-Length: 100\r\n\r\n"])
def test_idle_connections_keep_nobody_out(served, begin) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(closing(served.connect(begin))) for _ in range(20)]
        assert served.is_well()
        assert [answer(connection) for connection in held[:15]] == [b""] * 15  # closed, the oldest first
        assert served.is_well()


def test_a_connection_is_closed_when_a_head_or_body_does_not_arrive(served, monkeypatch) -> None:
    monkeypatch.setattr(guard, "PATIENCE", 0.1)
    for begin, answered in ((b"", b""), (HEAD, b""), (HEAD + b"Content-Length: 100\r\n\r\n", b"HTTP/1.1 503 ")):
        with closing(served.connect(begin)) as connection:
            assert answer(connection).startswith(answered)
            assert bool(answered) or not answer(connection)


def test_a_complete_request_is_served_whatever_connections_follow(served) -> None:
    served.reached.answers = 0
    with ExitStack() as stack:
        small = stack.enter_context(closing(served.connect(HEAD + b"Content-Length: 1\r\n\r\nx")))
        large = stack.enter_context(
            closing(
                served.connect(
                    HEAD.replace(PUSH.encode(), START.encode()) + b"Content-Length: %d\r\n\r\n" % (2 * SMALL)
                )
            )
        )
        wait_until(lambda: served.reached.at_work == 1)
        held = [stack.enter_context(closing(served.connect())) for _ in range(20)]
        assert answer(held[0]) == b""
        large.sendall(bytes(2 * SMALL))
        wait_until(lambda: served.reached.at_work == 2)
        served.reached.answers = math.inf
        for connection in (small, large):
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    assert sorted(served.reached.sizes) == [1, 2 * SMALL]


# --- a real SuperLink ---


class Server(Machines):
    """A server without keys: anybody who reaches its port may use it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self.start("server", KINDRED, "server", "--port", self.port, "--state", folder / "server")
        self.wait_for("server", "the server is ready")
        (self.superlink,) = (child for child in psutil.Process(self.running["server"].pid).children()
                             if "flower-superlink" in " ".join(child.cmdline()))  # fmt: skip

    def memory(self) -> int:
        return self.superlink.memory_info().rss

    def status(self, path: str, **headers: str) -> int:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request("GET" if path == "/health" else "POST", path, headers=headers)
            return connection.getresponse().status


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("guard"))
    try:
        yield server
        assert server.end("server") == {"server": 0}
    finally:
        server.kill()


@pytest.mark.deployment
@pytest.mark.parametrize("path", [PUSH, START, "/v1/runtime/push-object", "/health"])
@pytest.mark.parametrize("head", [b"Content-Length: 600000000", b"Transfer-Encoding: chunked", b"X: "])
def test_a_body_of_600_megabytes_is_cut_off_and_does_not_reach_memory(real, path, head) -> None:
    before, sent = real.memory(), 0
    part = b"100000\r\n" + bytes(2**20) + b"\r\n" if b"chunked" in head else b"a" * 2**20
    with closing(socket.create_connection(("127.0.0.1", real.port), timeout=30)) as connection:
        with suppress(ConnectionError):
            connection.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/protobuf\r\n%b"
                               % (path.encode(), head + (b"" if head == b"X: " else b"\r\n\r\n")))  # fmt: skip
            while sent < 600 * 10**6:
                connection.sendall(part)
                sent += len(part)
                assert real.memory() - before < 60 * 10**6
    assert sent < 100 * 10**6
    assert real.memory() - before < 60 * 10**6
    assert real.status("/health") == 200


@pytest.mark.deployment
def test_a_web_page_reaches_nothing_under_a_foreign_name_or_origin(real) -> None:
    for path in ("/v1/control/list-runs", "/v1/fleet/register-node", "/v1/runtime/acquire-task", "/health"):
        assert real.status(path, Host="evil.example") == real.status(path, Host=f"evil.example:{real.port}") == 421
        assert real.status(path, Origin="http://evil.example") == 403
        expected = 200 if path == "/health" else 415  # it passed, and is no protobuf
        assert real.status(path, Origin=f"http://127.0.0.1:{real.port}") == expected


@pytest.mark.deployment
def test_a_site_connects_while_others_hold_all_connections(real) -> None:
    before, limits = real.memory(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        guard.bound_open_files()  # those of this process, which holds the other ends
        for count in range(guard.CONNECTIONS + 200):
            connection = stack.enter_context(closing(socket.create_connection(("127.0.0.1", real.port), timeout=10)))
            if count % 2:
                connection.sendall(HEAD + b"Content-Length: 10000\r\n\r\n")
        assert real.status("/health") == 200
        held = [each for each in real.superlink.net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]
        assert len(held) <= guard.CONNECTIONS
        assert real.memory() - before < 60 * 10**6
        data = write_digits(real.folder / "lyon.npz")
        real.start("lyon", KINDRED, "site", "lyon", "--server", f"localhost:{real.port}", "--data-dir", data,
                   "--state-dir", "lyon", "--threads", 1)  # fmt: skip
        real.wait_for("lyon", "SuperNode ID")
    assert real.end("lyon") == {"lyon": 0}
