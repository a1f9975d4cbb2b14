"""The server of `kindred watch`: the page of a run, made from the present content of its files.

It listens on 127.0.0.1 alone and serves two addresses, the page and its content; no other file can be requested. Pages
of other origins cannot read it, even through a host name of their own that resolves to 127.0.0.1: the Host header of a
request must be the server's own address.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from kindred.server_app.config import ConfigError
from kindred.server_app.run_files import is_finished

from .content import run_content
from .render import embedded, page

HOST = "127.0.0.1"
POLL_SECONDS = 2.0  # between two requests from a page


class Watcher(ThreadingHTTPServer):
    """Server of the page of a run, made from the present content of its files.

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

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        run_content(folder)
        self.folder = folder
        self._lock = Lock()  # several pages may send requests at the same time
        self._made: tuple[str, bytes] = ("", b"")
        if not 0 <= port < 2**16:
            raise ConfigError(f"--port is {port}, allowed: 0 to {2**16 - 1}")
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--port is {port}, on which the server cannot listen ({error.strerror}); 0 takes any free port"
            ) from None
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        if self.server_port == 80:
            self.hosts |= {HOST, "localhost"}

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def finished(self) -> bool:
        """True once the run has finished."""
        return is_finished(self.folder)

    @contextmanager
    def serving(self) -> Iterator[Watcher]:
        """Serve requests in a separate thread."""
        with self:
            thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1})
            thread.start()
            try:
                yield self
            finally:
                self.shutdown()
                thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors from a page that was closed before its answer arrived."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def tag(self) -> str:
        """Return a text that identifies the present state of the files: it changes when one of them changes."""
        found = []
        for name in (
            "config.json",
            "rounds.csv",
            "history.csv",
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
        return f'"{sha256(repr(found).encode()).hexdigest()[:32]}"'

    def content(self) -> tuple[str, bytes]:
        """Return the tag and the page's content as JSON; made again only if a file has changed."""
        with self._lock:
            tag = self.tag()
            if self._made[0] != tag:
                self._made = tag, embedded(run_content(self.folder)).encode()
            return self._made


class _Handler(BaseHTTPRequestHandler):
    server: Watcher
    server_version, sys_version = "kindred", ""
    timeout = 10.0  # seconds, for a request that does not arrive completely

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            return self._answer(403, f"use the address {self.server.address}: no other host name is allowed".encode())
        try:
            if self.path == "/":
                text = page(run_content(self.server.folder), POLL_SECONDS)
                return self._answer(200, text.encode(), "text/html; charset=utf-8")
            if self.path == "/data.json":
                tag, content = self.server.content()
                if self.headers.get("If-None-Match") == tag:
                    return self._answer(304, b"", tag=tag)
                return self._answer(200, content, "application/json", tag)
        except (ConfigError, OSError) as error:
            return self._answer(500, str(error).encode())
        return self._answer(404, b"not found; this server has / and /data.json")

    def _answer(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8", tag: str = "") -> None:
        self.send_response(code)
        for name, value in {
            "Content-Type": kind, "Content-Length": str(len(body)), "ETag": tag, "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():  # fmt: skip
            if value and not (code == 304 and name.startswith("Content-")):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a page's requests are of no interest."""
