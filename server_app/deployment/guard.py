"""The guard on the SuperLink's port: decide which requests pass, and limit the memory that strangers can take.

Flower reads a whole request before it checks who sent it. Here the head of a request decides whether its body is read:

- `Guard`, an ASGI middleware, limits which requests pass, how large their bodies are and how many are held at once;
- `Connection`, a connection of uvicorn's, limits a head's size and time, and the number of connections.

Honest requests pass unchanged. Where there is no room they wait; a SuperNode that is cut off tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
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

from .addresses import address_of, can_tell_users, user_of

Scope = MutableMapping[str, Any]

# Limit in bytes of a head, and of a body from anybody. SuperNodes send less, except in messages that carry a model.
SMALL = 2**14
# Limit in bytes of a body with which a SuperNode replies. The size of a reply does not follow from what the server has
# sent: a reply may hold class probabilities where nothing was sent, or control variates, or several models. But Flower
# cuts every array into chunks and sends each chunk in its own body. So one chunk is enough for every method, with room
# for its envelope and for what is sent in one piece: metrics, settings, and the list of the objects of a reply.
CHUNK = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + 2**20
# Limit in bytes of a body from this machine: chunks, the code of a run (10 MB at most), the state of a ServerApp.
OWN = 2**25
# Limits on the number of bodies above SMALL held at once: from SuperNodes, and from this machine.
CHUNKS_AT_ONCE, OWN_AT_ONCE = 64, 8
# Limit on connections at once. The same number of file descriptors is left for other files and for TLS handshakes.
CONNECTIONS = 1024
# A head must be complete after PATIENCE s. So must a body, but every PACE bytes received extend its time by 1 s.
PATIENCE, PACE = 20.0, 2**13

FLEET, SENDS_MESSAGES = "/v1/fleet/", "/v1/runtime/push-messages"
# ASGI extensions: a function that protects a connection from being closed to make room, and one that returns the user
# whose process sends, see `Connection.user`.
TRUST, USER = "kindred.trust", "kindred.user"


class Refused(Exception):
    """A request that the guard answers itself, with a status and a line that says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Room:
    """Limits on bodies: the largest size in bytes, and places for those that are held at once."""

    most: int
    places: contextlib.AbstractAsyncContextManager[Any]


class Guard:
    """ASGI middleware: other machines and users reach only what SuperNodes need, and cannot exhaust the memory.

    Flower's SuperLink serves everything on one port. Whoever reaches it could register their own key, or start a run.
    Authentication of SuperNodes alone keeps nobody out. Nor is a request safe because it comes from this machine:
    others may have accounts here, and a browser sends what a web page asks for, to that page's host name, and that
    name may be made to resolve to this machine.

    Parameters
    ----------
    app : callable
        The SuperLink.
    names : iterable of str
        Names and addresses of this server, in addition to loopback; 0.0.0.0 or :: represents every address.
    """

    OPEN = (FLEET, "/health")

    def __init__(self, app: Any, names: Iterable[str] = ()) -> None:
        self.app = app
        own = {name: address_of(name) for name in ("localhost", *names)}
        self.names = [name.lower() for name, address in own.items() if address is None]
        self.addresses = {address for address in own.values() if address}
        self.any_address = any(address.is_unspecified for address in self.addresses)
        self.small = Room(SMALL, contextlib.nullcontext())  # the limit on connections bounds their number
        self.chunks = Room(CHUNK, asyncio.Semaphore(CHUNKS_AT_ONCE))
        self.own = Room(OWN, asyncio.Semaphore(OWN_AT_ONCE))
        self.has_run = False  # whether a ServerApp has sent anything that could be answered

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on with its body, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            self._check_sender(scope)
            room = await self._room(scope)
            async with room.places:
                await self.app(scope, _repeat(await _read(receive, room.most), receive), send)
        except Refused as refused:
            body = json.dumps({"detail": str(refused)}).encode()  # `flwr` shows such a text
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),  # the body of the request may still be on its way
            ]
            await send({"type": "http.response.start", "status": refused.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _check_sender(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            raise Refused(421, "Host is not a name of this server, allowed: a name in its certificate, or its --host")
        if any(origin.lower() != f"{scope['scheme']}://{hosts[0]}".lower() for origin in headers.getlist("origin")):
            raise Refused(403, "not allowed from a web page")
        if scope["path"].startswith(self.OPEN):
            return
        if not _comes_from_here(scope):
            raise Refused(403, "allowed only from the server's own machine")
        if can_tell_users() and scope["extensions"][USER]() not in (os.geteuid(), 0):
            raise Refused(403, f"allowed only to the user who runs the server (uid {os.geteuid()}) and to root")
        self.has_run |= scope["path"] == SENDS_MESSAGES

    def _is_own(self, host: str) -> bool:
        found = re.fullmatch(r"(?:\[([^][]*)\]|([^:]*))(?::\d*)?", host)
        name = ((found[1] or found[2]) if found else "").lower()
        if address := address_of(name):
            return self.any_address or address.is_loopback or address in self.addresses
        return any(fnmatchcase(name, own) for own in self.names)  # a certificate may have *.example.org

    async def _room(self, scope: Scope) -> Room:
        """Return the limits for the body of a request, chosen by its head."""
        headers, path = Headers(scope=scope), scope["path"]
        room = self.chunks if path.startswith(FLEET) else self.small if path.startswith(self.OPEN) else self.own
        length = int(headers.get("content-length", room.most if "transfer-encoding" in headers else 0))
        if length > room.most:
            raise Refused(413, f"the body has {length} bytes, allowed: at most {room.most}")
        if length <= SMALL:
            return self.small
        if room is self.chunks:
            if not self.has_run:  # a SuperNode takes 403 to mean that there is no run, and drops its reply
                raise Refused(403, f"the body has more than {SMALL} bytes, and no run has sent a message to answer")
            if not await run_in_threadpool(is_signed_by_known_node, scope):
                raise Refused(401, f"the body has more than {SMALL} bytes, and no known SuperNode has signed it")
        scope["extensions"][TRUST]()
        return room


def _comes_from_here(scope: Scope) -> bool:
    client, server = (address_of(str(end[0])) if end else None for end in (scope["client"], scope["server"]))
    return client is not None and (client.is_loopback or client == server)


def is_signed_by_known_node(scope: Scope) -> bool:
    """Return whether a registered SuperNode signed the head of a request, by the check that Flower makes later."""
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
    """Read the body of a request, at most `most` bytes, whatever length its head states."""
    parts, length = [b""], 0
    try:
        async with asyncio.timeout(PATIENCE) as patience:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the sender has disconnected")
                part = message.get("body", b"")
                length += len(part)
                if length > most:
                    raise Refused(413, f"the body has more than {most} bytes")
                if len(parts[-1]) < SMALL:  # bytes that come one at a time share an object
                    parts[-1] += part
                else:
                    parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
                patience.reschedule(cast(float, patience.when()) + len(part) / PACE)
    except TimeoutError:  # SuperNodes try again after 503, and not after 408
        raise Refused(503, f"the body is not complete after {PATIENCE:g} s, at less than {PACE} bytes/s") from None


def _repeat(body: bytes, receive: Any) -> Any:
    """Return an ASGI `receive` that yields a body already read, then the messages after it."""
    read = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Any:
        return read.pop() if read else await receive()

    return next_message


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's that a stranger can neither hold for long nor fill.

    Uvicorn limits neither a head's size nor its time, nor the requests that are sent before the first is answered.
    When there are too many connections, one is closed: the oldest that has neither a complete request nor a
    known sender. So idle connections keep nobody out.
    """

    idle: ClassVar[dict[Connection, None]] = {}  # connections that may be closed, in this order

    def connection_made(self, transport: Any) -> None:
        """Take a place; if none is free, close the oldest connection that may be closed."""
        super().connection_made(transport)
        self.beside_body = 0
        self._expect_head()
        if len(self.connections) > CONNECTIONS:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the place."""
        self.patience.cancel()
        self.trust()
        super().connection_lost(exc)

    def trust(self) -> None:
        """Keep the connection until its request is answered."""
        self.idle.pop(self, None)

    @functools.cached_property
    def user(self) -> int | None:
        """The uid of the process at the other end, whatever address its requests claim; None if it is not known."""
        return user_of(self.client, self.server) if self.client and self.server else None

    def _expect_head(self) -> None:
        self.idle[self] = None
        self.patience = self.loop.call_later(PATIENCE, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        """Read on; abort if too much is not body: a head, or bytes between and after chunks."""
        self.beside_body += len(data)
        super().data_received(data)
        if self.beside_body > SMALL:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Begin a request. One may wait: a sender may have its answer before uvicorn has finished the last request."""
        if self.pipeline:
            raise ValueError("more than one request before the last is answered")  # uvicorn answers 400
        super().on_message_begin()
        extensions = {TRUST: self.trust, USER: lambda: self.user}
        self.scope["extensions"] = extensions  # type: ignore[typeddict-item]  # ASGI lets an extension be anything

    def on_headers_complete(self) -> None:
        """Have the request answered; from here on `Guard` limits how long its body may take."""
        self.patience.cancel()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body."""
        self.beside_body -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Protect the connection: its request is complete."""
        self.beside_body = 0
        self.trust()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it is already there."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self.patience.cancel()
            self._expect_head()


def server_names(host: str, certificate: str | None) -> list[str]:
    """Return the names of a server: its machine's name, the host it listens on, the names in its certificate."""
    names = [socket.gethostname(), host]
    if certificate:
        extensions = x509.load_pem_x509_certificate(Path(certificate).read_bytes()).extensions
        with contextlib.suppress(x509.ExtensionNotFound):
            there = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            names += there.get_values_for_type(x509.DNSName)
            names += map(str, there.get_values_for_type(x509.IPAddress))
    return names


def bound_open_files() -> None:
    """Limit the open files of this process: nothing else limits connections in their TLS handshake."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * CONNECTIONS
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
