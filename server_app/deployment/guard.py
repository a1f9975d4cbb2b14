"""The guard on the SuperLink's port: which requests pass, and how much memory strangers can take.

Flower reads a request as a whole before it looks at who sends it. Here its head decides whether its body is read:

- `Guard`, an ASGI middleware: which requests pass, how large their bodies are, how many are held at once;
- `Connection`, a connection of uvicorn's: how large a head is, how long it takes, how many connections there are.

Honest requests pass as they are. Where there is no room they wait; a SuperNode that is cut off tries again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
from base64 import b64decode
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, cast

from cryptography import x509
from fastapi import HTTPException, Request
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.superlink.dependencies.linkstate import get_linkstate
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .addresses import address_of

Scope = MutableMapping[str, Any]

# Bytes of a head, and of a body from anybody. What SuperNodes send takes less, but for what a model is sent in.
SMALL = 2**14
# Bytes of a body with which a SuperNode answers. How large a reply is does not follow from what the server has sent: a
# reply may hold class probabilities where nothing was sent, or control variates, or several models. But Flower cuts
# every array into chunks and sends each in a body of its own. So a chunk is enough for every method, with room for what
# is around it, and for what is sent in one piece: metrics, settings, and the list of the objects of a reply.
CHUNK = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + 2**20
# Bytes of a body from this machine: chunks again, the code of a run (10 MB at the most), what a ServerApp keeps.
OWN = 2**25
# Bodies above SMALL that are held at once: of SuperNodes, and of this machine.
CHUNKS_AT_ONCE, OWN_AT_ONCE = 64, 8
# Connections at once. As many file descriptors again are left for what else is open, and for TLS handshakes.
CONNECTIONS = 1024
# A head must be there after PATIENCE s, and a body too; every PACE bytes that come give it a second more.
PATIENCE, PACE = 20.0, 2**13

FLEET, SENDS_MESSAGES = "/v1/fleet/", "/v1/runtime/push-messages"
TRUST = "kindred.trust"  # an ASGI extension: a function that keeps a connection from being closed for others' sake


class Refused(Exception):
    """A request that is answered here, with a status and a line that says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Room:
    """How large a body may be, and places for those that are held at once."""

    most: int
    places: contextlib.AbstractAsyncContextManager[Any]


class Guard:
    """ASGI middleware: other machines reach what SuperNodes need, nothing else, and do not take all memory.

    Flower's SuperLink has everything on one port: whoever reaches it could register a key of his own, or start a run,
    which is code, at the server and at every site. Authentication of SuperNodes alone keeps nobody out. Nor does it
    help that a request comes from this machine: a browser on it sends what a web page wants, to the name of that page,
    which may be made to lead here.

    Parameters
    ----------
    app : callable
        The SuperLink.
    names : iterable of str
        Names and addresses of this server, besides loopback; 0.0.0.0 or :: represents every address.
    """

    OPEN = (FLEET, "/health")

    def __init__(self, app: Any, names: Iterable[str] = ()) -> None:
        self.app = app
        own = {name: address_of(name) for name in ("localhost", *names)}
        self.names = [name.lower() for name, address in own.items() if address is None]
        self.addresses = {address for address in own.values() if address}
        self.any_address = any(address.is_unspecified for address in self.addresses)
        self.small = Room(SMALL, contextlib.nullcontext())  # connections bound how many there are
        self.chunks = Room(CHUNK, asyncio.Semaphore(CHUNKS_AT_ONCE))
        self.own = Room(OWN, asyncio.Semaphore(OWN_AT_ONCE))
        self.has_run = False  # whether a ServerApp has sent anything that could be answered

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on, with its body, or answer it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            self._check_sender(scope)
            room = await self._room(scope)
            async with room.places:
                await self.app(scope, _repeat(await _read(receive, room.most), receive), send)
        except Refused as refused:
            body = f"{refused}\n".encode()
            headers = [
                (b"content-type", b"text/plain"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]  # the body of the request may still be on its way
            await send({"type": "http.response.start", "status": refused.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _check_sender(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            raise Refused(421, "not a name of this server; it has those of its certificate, and that it listens on")
        if any(origin.lower() != f"{scope['scheme']}://{hosts[0]}".lower() for origin in headers.getlist("origin")):
            raise Refused(403, "not allowed from a web page")
        if scope["path"].startswith(self.OPEN):
            return
        if not _comes_from_here(scope):
            raise Refused(403, "allowed from the server's own machine alone")
        self.has_run |= scope["path"] == SENDS_MESSAGES

    def _is_own(self, host: str) -> bool:
        found = re.fullmatch(r"(?:\[([^][]*)\]|([^:]*))(?::\d*)?", host)
        name = ((found[1] or found[2]) if found else "").lower()
        if address := address_of(name):
            return self.any_address or address.is_loopback or address in self.addresses
        return any(fnmatchcase(name, own) for own in self.names)  # in a certificate, *.example.org is one

    async def _room(self, scope: Scope) -> Room:
        """Where the body of a request has room, by its head."""
        headers, path = Headers(scope=scope), scope["path"]
        room = self.chunks if path.startswith(FLEET) else self.small if path.startswith(self.OPEN) else self.own
        length = int(headers.get("content-length", room.most if "transfer-encoding" in headers else 0))
        if length > room.most:
            raise Refused(413, f"a body of {length} bytes, allowed: {room.most}")
        if length <= SMALL:
            return self.small
        if room is self.chunks:
            if not self.has_run:  # a SuperNode knows 403: there is no run, and it drops its reply
                raise Refused(403, f"a body of more than {SMALL} bytes, and no run has sent what it could answer")
            if not await run_in_threadpool(is_signed_by_known_node, scope):
                raise Refused(401, f"a body of more than {SMALL} bytes, without the signature of a known SuperNode")
        scope["extensions"][TRUST]()
        return room


def _comes_from_here(scope: Scope) -> bool:
    client, server = (address_of(str(end[0])) if end else None for end in (scope["client"], scope["server"]))
    return client is not None and (client.is_loopback or client == server)


def is_signed_by_known_node(scope: Scope) -> bool:
    """Whether the head of a request is signed by a registered SuperNode, by the check that Flower makes later."""
    request = Request({**scope, "state": {}})
    try:
        public_key = b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        if get_linkstate(request).get_node_id_by_public_key(public_key) is None:
            return False
        request.state.protobuf_request = ActivateNodeRequest(public_key=public_key)
        authenticate_node(request)
    except (KeyError, ValueError, HTTPException):
        return False
    return True


async def _read(receive: Any, most: int) -> bytes:
    """Read the body of a request, whatever length its head says."""
    parts, length = [b""], 0
    try:
        async with asyncio.timeout(PATIENCE) as patience:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the sender has left")
                part = message.get("body", b"")
                length += len(part)
                if length > most:
                    raise Refused(413, f"a body of more than {most} bytes")
                if len(parts[-1]) < SMALL:  # no object for every byte that comes alone
                    parts[-1] += part
                else:
                    parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
                patience.reschedule(cast(float, patience.when()) + len(part) / PACE)
    except TimeoutError:  # SuperNodes try again after 503, and not after 408
        raise Refused(503, f"a body that takes {PATIENCE:g} s, at less than {PACE} bytes/s") from None


def _repeat(body: bytes, receive: Any) -> Any:
    """A `receive` that gives a body that has been read, then what comes after it."""
    read = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Any:
        return read.pop() if read else await receive()

    return next_message


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's that a stranger cannot hold for long, nor fill.

    Uvicorn bounds neither a head's size nor its time, nor the requests that are sent before the first is answered.
    Where there are too many connections the oldest is closed of which no request is there as a whole, or whose sender
    is not known. So connections that do nothing keep nobody out.
    """

    idle: ClassVar[dict[Connection, None]] = {}  # what may be closed, in this order

    def connection_made(self, transport: Any) -> None:
        """Take a place, from another connection if there is none."""
        super().connection_made(transport)
        self.beside_body = 0
        self._expect_head()
        if len(self.connections) > CONNECTIONS:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self.patience.cancel()
        self.trust()
        super().connection_lost(exc)

    def trust(self) -> None:
        """Keep the connection until its request is answered."""
        self.idle.pop(self, None)

    def _expect_head(self) -> None:
        self.idle[self] = None
        self.patience = self.loop.call_later(PATIENCE, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        """Read on, unless there is too much that is no body: a head, or what stands between and behind chunks."""
        self.beside_body += len(data)
        super().data_received(data)
        if self.beside_body > SMALL:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Begin a request; one may wait for the last, whose sender may have its answer before uvicorn is done."""
        if self.pipeline:
            raise ValueError("more requests than one before the last is answered")  # uvicorn answers 400
        super().on_message_begin()
        self.scope["extensions"] = {TRUST: self.trust}  # type: ignore[dict-item]  # ASGI lets an extension be anything

    def on_headers_complete(self) -> None:
        """Have the request answered; from here on `Guard` knows how long its body may take."""
        self.patience.cancel()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self.beside_body -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there as a whole."""
        self.beside_body = 0
        self.trust()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it is there."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self.patience.cancel()
            self._expect_head()


def server_names(host: str, certificate: str | None) -> list[str]:
    """Return what a server may be called: its machine's name, the host it listens on, the names in its certificate."""
    names = [socket.gethostname(), host]
    if certificate:
        extensions = x509.load_pem_x509_certificate(Path(certificate).read_bytes()).extensions
        with contextlib.suppress(x509.ExtensionNotFound):
            there = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            names += there.get_values_for_type(x509.DNSName)
            names += map(str, there.get_values_for_type(x509.IPAddress))
    return names


def bound_open_files() -> None:
    """Bound the open files of this process: nothing else bounds connections in their TLS handshake."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * CONNECTIONS
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
