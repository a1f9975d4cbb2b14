"""The page of the runs at `kindred server`: the latest run at `/`, every run at `/run/ID/`.

It reads what the runs write: their status files, and their folders; and which SuperNodes the SuperLink's database has.
On loopback everybody on this machine can read it. Beyond it a request needs the token, and travels by TLS.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import sqlite3
import ssl
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from kindred.server_app.cli.common import end
from kindred.server_app.config import ConfigError
from kindred.server_app.report.live import NEVER, OFFLINE, ONLINE, WITHDRAWN, Node, live_content, outcome
from kindred.server_app.report.watch import PageServer, Request, RunPage

from .addresses import Address, is_loopback, parse_server, with_port
from .certificates import check_certificate_names
from .files import DATABASE, REGISTERED_FILE, RUNS_FOLDER, write_or_end

OPTION = "--watch-address"
COOKIE, BEARER = "kindred-token", {"WWW-Authenticate": "Bearer"}
TOKEN_FILE = "watch-token"  # in the state folder
TOKEN_BYTES = 32
PAGE = re.compile(r"/(?:run/(\d+)/)?", re.ASCII)
MOST_RUNS = 50  # listed on the page


class Runs:
    """The runs of a `kindred server`.

    Parameters
    ----------
    state : Path
        The server's state folder.

    Attributes
    ----------
    problems : list of str
        What the server cannot do now, and why.
    """

    def __init__(self, state: Path) -> None:
        self.problems: list[str] = []
        self._state = state
        self._pages: dict[str, RunPage] = {}

    def content(self, path: str) -> dict[str, Any] | None:
        """Return the content of the page at a path: that of the latest run, or of the run that the path names."""
        runs = self._statuses()
        found = PAGE.fullmatch(path)
        chosen = found[1] if found else ""
        if found is None or (chosen and chosen not in runs):
            return None
        run = chosen or next(iter(runs), "")
        status = runs.get(run, {})
        content = self._of_folder(status.get("folder")) or {
            "kind": "server", "title": "kindred server", "about": [f"run {run}"] if run else [], "finished": False,
            "metric": None,
        }  # fmt: skip
        here = "../../" if chosen else ""
        if content["kind"] == "run" and not content["left-out"]:  # it has them when the run is finished
            content = content | {"left-out": list(map(list, status.get("left-out", {}).items()))}
        return {
            **content,
            "now": {
                **live_content(status, self._nodes(), self._registered(), _seconds_left(content), self.problems),
                "runs": [
                    [f"run {each}", _when(about), outcome(about), f"{here}run/{each}/"]
                    for each, about in list(runs.items())[:MOST_RUNS]
                ],
            },
        }  # fmt: skip

    def _statuses(self) -> dict[str, dict[str, Any]]:
        """Return the status of each run, the latest first."""
        found = {}
        for path in (self._state / RUNS_FOLDER).glob("[0-9]*.json"):
            with suppress(OSError, ValueError):
                found[path.stem] = json.loads(path.read_bytes())
        return dict(sorted(found.items(), key=lambda each: each[1].get("began", 0.0), reverse=True))

    def _of_folder(self, folder: str | None) -> dict[str, Any] | None:
        if folder is None:
            return None
        try:
            return self._pages.setdefault(folder, RunPage(Path(folder))).content()
        except ConfigError:  # the folder has been removed
            return None

    def _registered(self) -> list[str]:
        with suppress(OSError, ValueError):
            return list(map(str, json.loads((self._state / REGISTERED_FILE).read_bytes())))
        return []

    def _nodes(self) -> list[Node]:
        """Return the SuperNodes in the SuperLink's database; none while it cannot be read."""
        database = f"{(self._state / DATABASE).as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(database, uri=True, timeout=1)) as connection:
                rows = connection.execute("select node_id, name, status, online_until from node").fetchall()
        except sqlite3.Error:
            return []
        return [
            Node(str(node % 2**64), name or "", _connection(status, until or 0.0))  # SQLite's integers have a sign
            for node, name, status, until in rows
        ]


def _connection(status: str, until: float) -> str:
    if status == "unregistered":
        return WITHDRAWN
    if status == "registered":
        return NEVER
    return ONLINE if status == "online" and until > time.time() else OFFLINE


def _when(status: Mapping[str, Any]) -> str:
    return f"{datetime.fromtimestamp(status.get('began', 0.0), UTC):%Y-%m-%d %H:%M} UTC"


def _seconds_left(content: Mapping[str, Any]) -> float | None:
    """Return the seconds that the remaining rounds take if they are as long as the rounds so far."""
    if content["kind"] != "run" or content["finished"]:
        return None
    done = len([number for number in content["curve"]["rounds"] if number >= 1])
    return content["figures"]["seconds"] / done * max(0, content["asked"] - done) if done else None


class RunsServer(PageServer):
    """Server of the runs' page.

    Attributes
    ----------
    token : str
        What a request must have; empty on loopback.
    runs : Runs
    """

    token = ""

    def __init__(self, runs: Runs, host: str, port: int) -> None:
        super().__init__(host, port)
        self.runs = runs

    def content(self, path: str) -> Mapping[str, Any] | None:
        return self.runs.content(path)

    def admits(self, request: Request) -> bool:
        """Return whether a request has the token, in its header or cookie; one with `?token=` gets the cookie."""
        if not self.token:
            return super().admits(request)
        path, _, query = request.path.partition("?")
        given = parse_qs(query).get("token", [""])[0]
        if given and self._is_token(given):
            # Lax: the cookie also comes with the redirect after a link in a mail. HttpOnly: no script can read it.
            cookie = f"{COOKIE}={self.token}; Path=/; Secure; HttpOnly; SameSite=Lax"
            request.answer(303, b"", more={"Location": path if PAGE.fullmatch(path) else "/", "Set-Cookie": cookie})
            return False
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        if (scheme.lower() == "bearer" and self._is_token(bearer.strip())) or self._is_token(_cookie_of(request)):
            return True
        request.answer(401, b"open the address that `kindred server` printed, with its token", more=BEARER)
        return False

    def _is_token(self, text: str) -> bool:
        """Compare a text with the token, in a time that does not depend on the text."""
        return hmac.compare_digest(text.encode(errors="surrogateescape"), self.token.encode())


def _cookie_of(request: Request) -> str:
    try:
        found = SimpleCookie(request.headers.get("Cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def serve_runs(state: Path, host: str | Address, port: int, keys: Path | None) -> RunsServer:
    """Return the server of the runs' page; print its address.

    Beyond loopback the address has a token. It is printed when it is made; later starts name only its file.
    """
    beyond = not is_loopback(host)
    try:
        server = RunsServer(Runs(state), str(host), port)
    except OSError as error:
        end(2, f"{OPTION} is {with_port(host, port)}, but listening there fails ({error.strerror}); give another port")
    anywhere = not isinstance(host, str) and host.is_unspecified
    address = f"{with_port('NAME' if anywhere else host, server.server_port)}/"
    if not beyond or keys is None:
        print(f"watch the runs at http://{address} (this machine only)", flush=True)
        return server
    path, new = state / TOKEN_FILE, not (state / TOKEN_FILE).exists()
    if new:
        write_or_end(path, secrets.token_urlsafe(TOKEN_BYTES).encode())
    server.token = path.read_text().strip()
    if len(server.token) < TOKEN_BYTES:
        server.server_close()
        end(
            2, f"{path} holds {len(server.token)} characters, allowed: {TOKEN_BYTES} or more; remove it for a new token"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.crt", keys / "server.key")
    # The handshake is the first thing that a request's thread does: nobody can make the others wait.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    print(
        f"watch the runs at https://{address}?token="
        + (server.token if new else f"... (the token is in {path})")
        + "; NAME: one in the server's certificate" * anywhere,
        flush=True,
    )
    return server


def read_watch_address(text: str, keys: Path | None) -> tuple[str | Address, int]:
    """Return host and port of the runs' page; end the command if others could read it without token and TLS."""
    host, port = parse_server(text, OPTION, least=0)
    if not is_loopback(host):
        if keys is None:
            end(2, f"{OPTION} is {text!r}, which other machines can reach, allowed without --keys: 127.0.0.1:PORT")
        if isinstance(host, str) or not host.is_unspecified:
            check_certificate_names(keys, [host])
    return "127.0.0.1" if host == "localhost" else host, port
