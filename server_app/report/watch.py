"""Servers of pages of runs, made from the present content of their files.

`PageServer` serves pages and their content to requests with GET alone; no file can be requested. `Watcher` is the one
of `kindred watch`, for one run, on this machine. Pages of other origins cannot read it, even through a host name of
their own that resolves to 127.0.0.1: the Host header of a request must be the server's own address.
"""

from __future__ import annotations

import socket
import ssl
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore, Lock, Thread
from typing import Any, Self

from kindred.server_app.config import ConfigError
from kindred.server_app.run_files import is_finished

from .content import run_content
from .reading import naming_damage
from .render import embedded, page

HOST = "127.0.0.1"
POLL_SECONDS = 2.0  # between two requests from a page
CONNECTIONS = 64  # at once
DATA = "data.json"


class RunPage:
    """The content of a run's page, made again only if one of its files has changed.

    Parameters
    ----------
    folder : Path
        The folder of a run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()  # several pages may send requests at the same time
        self._made: tuple[Any, dict[str, Any]] = (None, {})

    def content(self) -> dict[str, Any]:
        """Return the content of the page."""
        with self._lock:
            state = self._state()
            if self._made[0] != state:
                with naming_damage(self.folder):
                    self._made = state, run_content(self.folder)
            return self._made[1]

    def _state(self) -> list[Any]:
        """Return the present state of the files: it changes when one of them changes."""
        found = []
        for name in (
            "config.json",
            "rounds.csv",
            "history.csv",
            "validators.csv",
            "clusters.json",
            "partition.png",
            "summary.json",
            "collaboration",
            "checkpoints",
        ):
            try:
                about = (self.folder / name).stat()
                found.append((name, about.st_size, about.st_mtime_ns))
            except OSError:
                pass
        return found


class PageServer(ThreadingHTTPServer):
    """Server of pages: each path ends in "/", and its content is at `data.json` below it.

    Parameters
    ----------
    host : str
        Address to listen on.
    port : int
        0: any free port.

    Raises
    ------
    OSError
        The server cannot listen there.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Request)
        self.own_hosts = {f"{name}:{self.server_port}" for name in (f"[{host}]" if ":" in host else host, "localhost")}
        if self.server_port == 80:
            self.own_hosts |= {host, "localhost"}
        self._places = BoundedSemaphore(CONNECTIONS)

    def content(self, path: str) -> Mapping[str, Any] | None:
        """Return the content of the page at a path; None if there is no such page."""
        raise NotImplementedError

    def admits(self, request: Request) -> bool:
        """Return whether a request may be answered; if not, answer it with the reason."""
        if request.headers.get("Host") in self.own_hosts:
            return True
        allowed = " or ".join(sorted(self.own_hosts))
        request.answer(403, f"use the address {allowed}: no other host name is allowed".encode())
        return False

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Serve requests in a separate thread."""
        with self:
            thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1})
            thread.start()
            try:
                yield self
            finally:
                self.shutdown()
                thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a thread, if there is a place."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request, then release its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors from a page that was closed before its answer arrived, and from clients without TLS."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError | ssl.SSLError):
            super().handle_error(request, client_address)


class Watcher(PageServer):
    """Server of the page of a run, on this machine alone.

    Parameters
    ----------
    folder : Path
        The folder of a run.
    port : int
        0: any free port.

    Raises
    ------
    ConfigError
        The folder is not the folder of a run, or the server cannot listen on the port.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self._page = folder, RunPage(folder)
        self._page.content()
        if not 0 <= port < 2**16:
            raise ConfigError(f"--port is {port}, allowed: 0 to {2**16 - 1}")
        try:
            super().__init__(HOST, port)
        except OSError as error:
            raise ConfigError(
                f"--port is {port}, on which the server cannot listen ({error.strerror}); 0 takes any free port"
            ) from None

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def finished(self) -> bool:
        """True once the run has finished."""
        return is_finished(self.folder)

    def content(self, path: str) -> Mapping[str, Any] | None:
        return self._page.content() if path == "/" else None


class Request(BaseHTTPRequestHandler):
    """A request to a `PageServer`."""

    server: PageServer
    server_version, sys_version = "kindred", ""
    timeout = 10.0  # seconds, for a request that does not arrive completely

    def do_GET(self) -> None:
        """Answer with a page, or its content."""
        if not self.server.admits(self):
            return None
        folder, _, name = self.path.rpartition("/")
        try:
            content = self.server.content(f"{folder}/") if name in ("", DATA) else None
            if content is None:
                return self.answer(404, f"not found; this server has / and /{DATA}".encode())
            if name == "":
                return self.answer(200, page(content, POLL_SECONDS).encode(), "text/html; charset=utf-8")
            body = embedded(content).encode()
        except (ConfigError, OSError) as error:
            return self.answer(500, str(error).encode())
        tag = f'"{sha256(body).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            return self.answer(304, b"", tag=tag)
        return self.answer(200, body, "application/json", tag)

    def answer(
        self,
        code: int,
        body: bytes,
        kind: str = "text/plain; charset=utf-8",
        tag: str = "",
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Send an answer; `more` are further headers."""
        self.send_response(code)
        for name, value in {
            "Content-Type": kind, "Content-Length": str(len(body)), "ETag": tag, "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin", **(more or {}),
        }.items():  # fmt: skip
            if value and not (code == 304 and name.startswith("Content-")):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a page's requests are of no interest."""
