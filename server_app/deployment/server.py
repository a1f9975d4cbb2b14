"""`kindred server`: check the settings and the keys, then run a SuperLink and register sites with it.

It is a thin wrapper of `flower-superlink` and `flwr supernode register`, and prints these commands. It adds checks
before anything starts, one folder for all that Flower writes, an end that leaves no process, and a SuperLink that takes
orders only from its own machine.
"""

from __future__ import annotations

import contextlib
import http.client
import shlex
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer
from flwr.common.constant import APP_DIR

from kindred.client.state import default_root
from kindred.engine.roster import REGISTERED
from kindred.engine.status import RUNS
from kindred.lazy import lazy
from kindred.server_app.cli.common import app, end, option, warn
from kindred.server_app.flower_app import CONNECTION, toml, write_flower_app
from kindred.server_app.simulation import STARTUP_TIMEOUT

from . import hooks
from .addresses import (
    LOOPBACK,
    Address,
    can_tell_users,
    check_port,
    check_port_is_free,
    is_loopback,
    parse_host,
    warn_of_no_tls,
    with_port,
)
from .bundle import ALLOW_APP, allowed_apps
from .certificates import CA, SERVER, check_certificate_names, ending, load_certificates, out_of_date
from .files import (
    DATABASE,
    REGISTERED_FILE,
    RUNS_FOLDER,
    absolute_path,
    lack_of_space,
    open_to_others,
    own_folder,
    write_or_end,
    written_or_end,
)
from .processes import FIRST_PAUSE, LONGEST_PAUSE, QUIET, processes_that_end, show_command, start_process
from .registration import Registration, check_public_keys, public_keys_in

if TYPE_CHECKING:
    from cryptography import x509

    from . import watch
else:
    watch = lazy("kindred.server_app.deployment.watch")  # imports the report

PORT = 8000  # Flower's
SUPEREXEC = "flower-superexec"
DAY = 86400.0  # s


@app.command("server")
def serve(
    keys: Annotated[
        Path | None, option("keys", "DIR", "Folder made by `kindred keys`: TLS, and sites must prove their identity.")
    ] = None,
    host: Annotated[
        str, option("host", "HOST", "Address to listen on (default 127.0.0.1; 0.0.0.0: all addresses of this machine).")
    ] = LOOPBACK[1],
    port: Annotated[int, option("port", "PORT", f"Port to listen on (default {PORT}).")] = PORT,
    state: Annotated[Path | None, option("state", "DIR", "Folder of the database and all else that is kept.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Use neither TLS nor authentication.")] = False,
    watch_address: Annotated[
        str,
        option(
            "watch-address",
            "HOST:PORT",
            "Where to serve the runs' page (default 127.0.0.1:0, this machine and any free port). Beyond this machine "
            "it needs --keys, and is protected by TLS and a token.",
        ),
    ] = f"{LOOPBACK[1]}:0",
    allow_app: Annotated[list[str] | None, ALLOW_APP] = None,
) -> None:
    """Start the server: a SuperLink, which then accepts runs from you on this machine."""
    allowed = allowed_apps(allow_app or ())
    name = parse_host(host, "--host")
    if keys and insecure:
        end(2, "--keys and --insecure are both given, allowed: one of them")
    if not keys and not insecure and not is_loopback(name):
        end(2, f"--host is {host!r}, which other machines can reach: give --keys DIR (or --insecure)")
    check_port("--port", port)
    if keys:
        keys = absolute_path(keys, "--keys")
        certificates = check_server_keys(keys, name)
    watch_host, watch_port = watch.read_watch_address(watch_address, keys)
    state = absolute_path(state or default_root() / "server", "--state")
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(name), str(name))
    address = with_port(reached, port)
    command = ["flower-superlink", "--host", str(name), "--port", str(port), "--database", str(state / DATABASE)]
    connection: dict[str, Any] = {"address": address}
    if keys:
        command += [
            "--ssl-ca-certfile",
            str(keys / "ca.crt"),
            "--ssl-certfile",
            str(keys / "server.crt"),
            "--ssl-keyfile",
            str(keys / "server.key"),
            "--enable-supernode-auth",
        ]
        connection["root-certificates"] = str(keys / "ca.crt")
    else:
        command.append("--insecure")
        connection["insecure"] = True
        warn_of_no_tls(name)

    with own_folder(state), processes_that_end() as mark:
        check_port_is_free("--port", str(name), port)
        if watch_port:
            check_port_is_free(watch.OPTION, str(watch_host), watch_port)
        write_or_end(state / "config.toml", (
            f"[superlink]\n{toml({'default': CONNECTION})}[superlink.{CONNECTION}]\n{toml(connection)}"
        ).encode())  # fmt: skip
        with written_or_end(state / "app"):
            flower_app = write_flower_app(state / "app")
        settings = {
            "FLWR_HOME": str(state), "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", **QUIET,
            # Closes ways around the guard: an address that a client claims, and separate ports.
            "FORWARDED_ALLOW_IPS": LOOPBACK[1], "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
            "FLWR_INTERNAL_GRPC_FLEET_API": "0", RUNS: str(state / RUNS_FOLDER), **allowed,
        }  # fmt: skip
        registration = None
        if keys:
            settings[REGISTERED] = str(state / REGISTERED_FILE)
            registration = Registration(keys, settings, state, mark)
        shutil.rmtree(state / APP_DIR, ignore_errors=True)  # what is unpacked there may be incomplete
        superlink = start_process(command, settings, state, mark, hooks.guard_superlink)
        wait_until_it_answers(superlink, reached, port, keys)
        if registration and not registration.look():
            end(1, "not all sites can be registered: see the lines above")
        users = "you" if can_tell_users() else "ANY USER (there is no /proc to distinguish them)"
        print(
            f"the server is ready, and listens on {with_port(name, port)}; it accepts runs and registrations only from "
            f"{users} here. To run:"
        )
        show_command(["flwr", "run", str(flower_app), CONNECTION, "--stream"], {"FLWR_HOME": str(state)})
        page = watch.serve_runs(state, watch_host, watch_port, keys)
        with page.serving():
            pause, next_warning, renew = FIRST_PAUSE, 0.0, f"run `kindred keys renew {keys}`, then restart this"
            while superlink.poll() is None:
                problems = [problem for problem in (lack_of_space(state), lack_of_superexec(superlink)) if problem]
                for line in problems:
                    if line not in page.runs.problems:
                        warn(line)
                page.runs.problems = problems
                if keys and time.monotonic() >= next_warning:
                    next_warning = time.monotonic() + DAY
                    for line in ending(certificates, renew):
                        warn(line)
                time.sleep(pause)
                if registration:
                    pause = FIRST_PAUSE if registration.look() else LONGEST_PAUSE
        end(1, f"flower-superlink ended with code {superlink.returncode}")


def lack_of_superexec(superlink: subprocess.Popen[bytes]) -> str:
    """Return a line if the SuperLink has no process that starts runs, else ""."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(superlink.pid).children():
            if child.status() != psutil.STATUS_ZOMBIE and SUPEREXEC in " ".join(child.cmdline()):
                return ""
    return f"{SUPEREXEC} has ended, and is started again: until then no run begins"


def check_server_keys(folder: Path, host: str | Address) -> dict[str, x509.Certificate]:
    """Check everything in a folder of keys, and return its certificates by path."""
    ca, server = load_certificates(folder)
    certificates = {f"{folder / CA}.crt": ca, f"{folder / SERVER}.crt": server}
    for path, certificate in certificates.items():
        if fault := out_of_date(path, certificate):
            end(2, f"{fault}: run `kindred keys renew {shlex.quote(str(folder))}`")
    if isinstance(host, str) or not host.is_unspecified:
        check_certificate_names(folder, [host])
    check_public_keys(public_keys_in(folder))
    for each in (folder, *sorted(folder.glob("[!.]*"))):
        if doubt := open_to_others(each, private=each.suffix == ".key"):
            end(2, doubt)
    return certificates


def wait_until_it_answers(superlink: subprocess.Popen[bytes], host: str, port: int, keys: Path | None) -> None:
    """Return when the SuperLink answers; end the command if it does not within `STARTUP_TIMEOUT` seconds."""
    context = ssl.create_default_context(cafile=keys / "ca.crt") if keys else None
    deadline = time.monotonic() + STARTUP_TIMEOUT
    while superlink.poll() is None and time.monotonic() < deadline:
        connection = (
            http.client.HTTPSConnection(host, port, timeout=1, context=context)
            if context
            else http.client.HTTPConnection(host, port, timeout=1)
        )
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    if superlink.poll() is None:
        end(1, f"flower-superlink does not answer on {host}:{port} after {STARTUP_TIMEOUT:.0f} s")
    end(1, f"flower-superlink ended with code {superlink.returncode}")
