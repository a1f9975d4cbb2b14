"""The server of `kindred watch`: the page of a run, made of what its files hold at the time.

It listens on 127.0.0.1 alone and knows two addresses, the page and its content; nothing else of the disk can be asked
for. A page of another origin cannot read it, be it through a name of its own that it has resolve to 127.0.0.1: requests
must name the server as it is.
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
POLL_SECONDS = 2.0  # between two requests of a page


class Watcher(ThreadingHTTPServer):
    """Serves the page of a run, made of what its files hold at the time.

    Parameters
    ----------
    folder : Path
        Of a run.
    port : int
        0: any that is free.

    Raises
    ------
    ConfigError
        The folder is none of a run, or nothing can listen on the port.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        run_content(folder)
        self.folder = folder
        self._lock = Lock()  # several pages may ask at a time
        self._made: tuple[str, bytes] = ("", b"")
        if not 0 <= port < 2**16:
            raise ConfigError(f"--port is {port}, allowed: 0 to {2**16 - 1}")
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--port is {port}, on which nothing can listen ({error.strerror}); 0 takes any that is free"
            ) from None
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        if self.server_port == 80:
            self.hosts |= {HOST, "localhost"}

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def finished(self) -> bool:
        """Whether the run is."""
        return is_finished(self.folder)

    @contextmanager
    def serving(self) -> Iterator[Watcher]:
        """Answer, in a thread of its own."""
        with self:
            thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1})
            thread.start()
            try:
                yield self
            finally:
                self.shutdown()
                thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing, of a page that was closed before it had its answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def tag(self) -> str:
        """What the files were when this was asked: a text that differs once one of them does."""
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
        """The tag, and what the page shows, as JSON; made anew only where a file has changed."""
        with self._lock:
            tag = self.tag()
            if self._made[0] != tag:
                self._made = tag, embedded(run_content(self.folder)).encode()
            return self._made


class _Handler(BaseHTTPRequestHandler):
    server: Watcher
    server_version, sys_version = "kindred", ""
    timeout = 10.0  # s, for a request that does not come to its end

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            return self._answer(403, f"this is {self.server.address} and no other name's".encode())
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
        return self._answer(404, b"there is nothing here but / and /data.json")

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
        """Nothing: what a page asks for is of no interest."""
