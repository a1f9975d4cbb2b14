"""A federation of real machines: `kindred keys`, `kindred server`, `kindred site`.

Each is a thin wrapper of commands that can be typed just as well, and prints them: `kindred keys` those of openssl
and ssh-keygen that would make the like, the others `flower-superlink`, `flwr supernode register` and
`flower-supernode`. What they add: checks before anything starts, one folder for all that Flower writes, a SuperNode
that is started again, a line that says what keeps it from taking part, an end that leaves no process, and a SuperLink
that takes orders from its own machine alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import math
import os
import re
import shlex
import socket
import ssl
import stat
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from kindred.server_app.cli.run import APP_DIR, _end, _option, app
from kindred.server_app.simulation import (
    CONNECTION,
    MARK,
    STARTUP_TIMEOUT,
    _kill,
    _Signalled,
    _signals_as_exceptions,
    toml,
)

from . import hooks
from .hooks import Address, address_of

if TYPE_CHECKING:
    import httpx
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    from kindred.server_app.config import Config

CA, SERVER = "ca", "server"  # names of certificates, and so of no site
LOOPBACK = ("localhost", "127.0.0.1", "::1")
CA_DAYS, SERVER_DAYS = 3650, 825  # the latter is the most that clients on macOS accept
WARNING_DAYS = 60  # before a certificate ends
REGISTERED = "KINDRED_REGISTERED"  # an environment variable of runs: a file with the names that keys are registered for
PORT = 8000  # Flower's
GRACE = 10.0  # s in which a process that is asked to end may do so; a SuperNode says goodbye to the SuperLink
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # s before a SuperNode is started again, or a server looks for new keys
STEADY = 60.0  # s after which a SuperNode that ends has nothing to do with the time before
KEPT = 4096  # bytes of what a SuperNode has written, to find in its end
NOT_ACTIVATED = b"[code: 2004]"  # Flower's: it does not know a key, or the key is in use
ANSWER_TIMEOUT = 5.0  # s that a site waits for the server's answer when it looks what is wrong
DAY = 86400.0  # s
DATE_STEP = 2.0  # s by which a server's Date may be late: it has no fractions, and is made anew once a second

# One process registers all sites: importing flwr takes longer than the rest. A line of JSON says how each went.
REGISTER = f"""
import contextlib, io, json, sys
from flwr.cli.app import app
app.rich_markup_mode = None  # errors in a line, not in a box
for public_key, name in zip(sys.argv[1::2], sys.argv[2::2]):
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            app(["supernode", "register", public_key, {CONNECTION!r}, "--name", name])
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([name, code or 0, said.getvalue()]), flush=True)
"""


# --- kindred keys ---


@app.command()
def keys(
    arguments: Annotated[
        list[Path],
        typer.Argument(metavar="[renew] DIR", help="Folder of the keys; behind `renew`, its certificates are renewed."),
    ],
    server: Annotated[
        str, _option("server", "NAMES", "Names and IP addresses under which sites reach the server: fl.example.org.")
    ] = "",
    sites: Annotated[str, _option("sites", "NAMES", "Sites to make a key for: lyon,oslo.")] = "",
) -> None:
    """Make what the server and the sites prove with who they are; what is there already stays as it is.

    `kindred keys renew DIR` makes the server's certificate anew, and the CA's where it would end before; all keys stay.
    """
    *words, folder = arguments
    if words not in ([], [Path("renew")]):
        _end(2, f"{' '.join(map(str, arguments))!r} is given, allowed: DIR, or renew DIR")
    folder = _absolute(folder, "DIR")
    if words:
        if server or sites:
            _end(2, f"--{'server' if server else 'sites'} is given beside renew, allowed: renew DIR")
        _renew(folder)
        return
    names, site_names = parse_server_names(server), parse_sites(sites)
    if not names and not (folder / f"{SERVER}.crt").exists():
        _end(
            2,
            f"--server is not given, and {folder} has no {SERVER}.crt: name the server, as in "
            "--server fl.example.org,192.0.2.7",
        )
    with _own_folder(folder):
        for path, like in make_keys(folder, names, site_names):
            print(f"made {path}\n  like: {like}", flush=True)
    until = _load_certificate(folder / f"{SERVER}.crt").not_valid_after_utc
    print(
        f"\nthe server's certificate is for {', '.join(map(str, _names_in(folder)))}, until {until:%Y-%m-%d}\n"
        "a site's machine needs ca.crt and the site's .key; ca.key is for further certificates alone: keep it apart"
    )


def parse_sites(text: str) -> list[str]:
    """Read the names of sites; ends the command where one is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        _check_site_name("--sites", name)
    for name in names:  # file systems that ignore case must not mix up their keys
        if [other.lower() for other in names].count(name.lower()) > 1:
            _end(2, f"--sites is {text!r}, but {name!r} is in it twice, upper and lower case aside")
    return names


def _check_site_name(option: str, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name.lower() in (CA, SERVER):
        _end(
            2,
            f"{option} is {name!r}, allowed: up to 64 letters, digits, and . _ - behind the first, "
            f"but for {CA} and {SERVER}",
        )


def parse_server_names(text: str) -> list[str | Address]:
    """Read the names and addresses of the server; ends the command where one is none."""
    names: list[str | Address] = []
    label = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name = address_of(part) or part
        digits = re.fullmatch(r"[\d.]+", part)  # an address with something wrong, rather than a name
        if isinstance(name, str) and (digits or len(name) > 253 or not re.fullmatch(rf"{label}(\.{label})*", name)):
            _end(2, f"--server is {part!r}, allowed: names and IP addresses of the server, with commas between them")
        if not isinstance(name, str) and name.is_unspecified:
            _end(2, f"--server is {part!r}, allowed: addresses under which sites reach the server")
        names.append(name.lower() if isinstance(name, str) else name)
    return names


def make_keys(folder: Path, names: Sequence[str | Address], sites: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """Make the keys and certificates that a folder lacks.

    Parameters
    ----------
    folder : Path
    names : sequence of str and IP addresses
        What the server's certificate is for, besides loopback.
    sites : iterable of str

    Yields
    ------
    tuple of Path and str
        A file, and a command that would make the like.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    def files(name: str) -> tuple[Path, Path]:
        return folder / f"{name}.key", folder / f"{name}.crt"

    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -noenc"
    (ca_key, ca), (server_key, server) = files(CA), files(SERVER)
    if not ca.exists():
        if not ca_key.exists():
            if server.exists():
                _end(2, f"{ca} is not there, nor {ca_key.name}, with which it could be made again")
            _write(ca_key, _private_pem(_new_key()))
        extensions = [
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_key_usage(key_cert_sign=True, crl_sign=True), True),
        ]
        key, name = _load_pem_key(ca_key), _subject("kindred CA")
        _write(ca, _certificate(name, key.public_key(), extensions, CA_DAYS, name, key), 0o644)
        yield (
            ca,
            (
                f'{request} -days {CA_DAYS} -subj "/CN=kindred CA" '
                f"-addext keyUsage=critical,keyCertSign,cRLSign -keyout {ca_key.name} -out {ca.name}"
            ),
        )
    if server.exists():
        _check_certificate_names(folder, names)
    else:
        signing_key = _load_ca_key(folder)
        if not server_key.exists():
            _write(server_key, _private_pem(_new_key()))
        all_names = list(dict.fromkeys([*(address_of(name) or name for name in LOOPBACK), *names]))
        extensions = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(digital_signature=True), True),
            (x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (
                x509.SubjectAlternativeName(
                    [x509.DNSName(name) if isinstance(name, str) else x509.IPAddress(name) for name in all_names]
                ),
                False,
            ),
        ]
        certificate = _certificate(
            _subject("kindred server"),
            _load_pem_key(server_key).public_key(),
            extensions,
            SERVER_DAYS,
            _load_certificate(ca).subject,
            signing_key,
        )
        _write(server, certificate, 0o644)
        kinds = ",".join(f"{'DNS' if isinstance(name, str) else 'IP'}:{name}" for name in all_names)
        yield (
            server,
            (
                f"{request} -CA {ca.name} -CAkey {ca_key.name} -days {SERVER_DAYS} "
                f'-subj "/CN=kindred server" -addext basicConstraints=critical,CA:FALSE '
                f"-addext keyUsage=critical,digitalSignature -addext extendedKeyUsage=serverAuth "
                f"-addext subjectAltName={kinds} -keyout {server_key.name} -out {server.name}"
            ),
        )
    for site in sites:
        private, public = folder / f"{site}.key", folder / f"{site}.pub"
        if public.exists():  # the private key may have gone to the site
            continue
        if not private.exists():
            _write(private, _private_openssh(_new_key()))
        key = _load_site_key(private)
        _write(
            public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {site}\n".encode(), 0o644
        )
        yield (
            private,
            (f'ssh-keygen -t ecdsa -b 384 -N "" -C {site} -f {private.name}; mv {private.name}.pub {public.name}'),
        )


def _renew(folder: Path) -> None:
    """Renew certificates, and print what has to be copied where."""
    server, ca = (folder / f"{name}.crt" for name in (SERVER, CA))
    _load_certificate(server)  # no folder is made where there is none
    with _own_folder(folder):
        old, made = _load_certificate(ca).not_valid_after_utc, []
        for path in renewed_certificates(folder):
            made.append(path)
            print(f"made {path}, valid until {_load_certificate(path).not_valid_after_utc:%Y-%m-%d}", flush=True)
    print(
        "the keys and all other files stay as they are, and sites need not be registered again\n"
        f"the server: start `kindred server` again; if its keys folder is another, copy "
        f"{' and '.join(path.name for path in made)} into it first"
    )
    if ca in made:
        print(
            f"the sites: copy {ca.name} to each, in place of its own, which is valid until {old:%Y-%m-%d}; then "
            "start `kindred site` again"
        )
    else:
        print(f"the sites: nothing; {ca.name} is valid until {old:%Y-%m-%d}")


def renewed_certificates(folder: Path) -> Iterator[Path]:
    """Make the server's certificate anew, for the same names, and then the CA's where that would end sooner.

    All keys stay, and so do the registrations of sites. Where this is cut short, what is left belongs together, and the
    next call makes all of it.

    Yields
    ------
    Path
        A file that has been made.
    """
    from cryptography import x509

    ca, server = load_certificates(folder)
    key = _load_ca_key(folder)
    if key.public_key() != ca.public_key():
        _end(2, f"{folder / CA}.key is not the key of {CA}.crt")
    made_anew = (x509.SubjectKeyIdentifier, x509.AuthorityKeyIdentifier)
    renewals = [(SERVER, server, SERVER_DAYS)]
    if ca.not_valid_after_utc < datetime.now(UTC) + timedelta(days=SERVER_DAYS):
        renewals.append((CA, ca, CA_DAYS))
    for name, old, days in renewals:
        path = folder / f"{name}.crt"
        extensions = [(each.value, each.critical) for each in old.extensions if not isinstance(each.value, made_anew)]
        _write(path, _certificate(old.subject, old.public_key(), extensions, days, ca.subject, key), 0o644)
        yield path


def _load_ca_key(folder: Path) -> EllipticCurvePrivateKey:
    path = folder / f"{CA}.key"
    if not path.exists():
        _end(2, f"{path} is not there, and {SERVER}.crt must be signed with it: put it back for that")
    return _load_pem_key(path)


def _subject(name: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _certificate(
    subject: x509.Name,
    key: Any,
    extensions: Iterable[tuple[x509.ExtensionType, bool]],
    days: int,
    issuer: x509.Name,
    issuer_key: EllipticCurvePrivateKey,
) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA384
    from cryptography.hazmat.primitives.serialization import Encoding

    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=days))  # clocks may be off
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )  # fmt: skip
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(issuer_key, SHA384()).public_bytes(Encoding.PEM)


def _key_usage(**used: bool) -> x509.KeyUsage:
    from cryptography import x509

    usages = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{usage: used.get(usage, False) for usage in usages})


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _private_openssh(key: EllipticCurvePrivateKey) -> bytes:  # the one form that flower-supernode reads
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file, whole or not at all."""
    from kindred.client.state import replacing

    with replacing(path) as temporary:
        temporary.touch(mode=mode)
        temporary.write_bytes(content)


def _load_pem_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return _read(path, lambda content: load_pem_private_key(content, None), "a private key in PEM")


def _load_site_key(path: Path) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    allowed = "a private key as `kindred keys` or ssh-keygen -t ecdsa makes it, without a password"
    key = _read(path, lambda content: load_ssh_private_key(content, None), allowed)
    if not isinstance(key, EllipticCurvePrivateKey):
        _end(2, f"{path} holds a key of another kind, allowed: {allowed}")
    return key


def _check_public_key(path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    allowed = "a public key as `kindred keys` or ssh-keygen -t ecdsa makes it"
    if not isinstance(_read(path, load_ssh_public_key, allowed), EllipticCurvePublicKey):
        _end(2, f"{path} holds a key of another kind, allowed: {allowed}")


def _load_certificate(path: Path) -> x509.Certificate:
    from cryptography import x509

    return _read(path, x509.load_pem_x509_certificate, "a certificate in PEM")


def _read(path: Path, load: Callable[[bytes], Any], allowed: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load(path.read_bytes())
    except OSError as error:
        _end(2, f"{path} cannot be read ({error.strerror}), allowed: {allowed}")
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
        _end(2, f"{path} is none that can be used, allowed: {allowed}")


def _names_in(folder: Path) -> list[str | Address]:
    """What the server's certificate in a folder is for."""
    from cryptography import x509

    extensions = _load_certificate(folder / f"{SERVER}.crt").extensions
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *names.get_values_for_type(x509.IPAddress)]


def _check_certificate_names(folder: Path, names: Iterable[str | Address]) -> None:
    there = _names_in(folder)
    if lacking := [str(name) for name in names if name not in there]:
        path = folder / f"{SERVER}.crt"
        _end(
            2,
            f"{path} is for {', '.join(map(str, there)) or 'no name'}, not for {', '.join(lacking)}; remove it to "
            "have `kindred keys DIR --server NAMES` make another",
        )


# --- kindred server ---


@app.command("server")
def serve(
    keys: Annotated[
        Path | None, _option("keys", "DIR", "What `kindred keys` made: TLS, and sites must prove who they are.")
    ] = None,
    host: Annotated[
        str, _option("host", "HOST", "Address to listen on (default 127.0.0.1; 0.0.0.0: all of this machine).")
    ] = LOOPBACK[1],
    port: Annotated[int, _option("port", "PORT", f"Port to listen on (default {PORT}).")] = PORT,
    state: Annotated[Path | None, _option("state", "DIR", "Folder of the database and all else that is kept.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and authentication.")] = False,
) -> None:
    """Start the server: a SuperLink, on which runs are then started from this machine."""
    from kindred.client.state import default_root

    name = _host(host, "--host")
    if keys and insecure:
        _end(2, "--keys and --insecure are both given, allowed: one of them")
    if not keys and not insecure and not _is_loopback(name):
        _end(2, f"--host is {host!r}, which is reached from outside: give --keys DIR (or --insecure)")
    _check_port("--port", port)
    if keys:
        keys = _absolute(keys, "--keys")
        certificates = _check_server_keys(keys, name)
    state = _absolute(state or default_root() / "server", "--state")
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(name), str(name))
    address = _with_port(reached, port)
    command = ["flower-superlink", "--host", str(name), "--port", str(port), "--database", str(state / "superlink.db")]
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
        _warn_of_no_tls(name)

    with _own_folder(state), _processes_that_end() as mark:
        _check_port_is_free("--port", str(name), port)
        _write(state / "config.toml", (
            f"[superlink]\n{toml({'default': CONNECTION})}[superlink.{CONNECTION}]\n{toml(connection)}"
        ).encode())  # fmt: skip
        settings = {
            "FLWR_HOME": str(state), "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", **_QUIET,
            # What would lead past the guard: an address that a client claims, and ports of their own.
            "FORWARDED_ALLOW_IPS": LOOPBACK[1], "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
            "FLWR_INTERNAL_GRPC_FLEET_API": "0",
        }  # fmt: skip
        registration = None
        if keys:
            settings[REGISTERED] = str(state / "registered.json")
            registration = _Registration(keys, settings, state, mark)
        superlink = _start(command, settings, state, mark, hooks.guard_superlink)
        _wait_until_it_answers(superlink, reached, port, keys)
        if registration and not registration.look():
            _end(1, "not all sites can be registered")
        print(
            f"the server is ready, and listens on {_with_port(name, port)}; it takes runs and registrations from "
            "this machine alone. To run:"
        )
        _show_command(["flwr", "run", str(APP_DIR), CONNECTION, "--stream"], {"FLWR_HOME": str(state)})
        pause, next_warning, renew = FIRST_PAUSE, 0.0, f"`kindred keys renew {keys}`, and start this again"
        while superlink.poll() is None:
            if keys and time.monotonic() >= next_warning:
                next_warning = time.monotonic() + DAY
                for line in ending(certificates, renew):
                    _tell(line)
            time.sleep(pause)
            if registration:
                pause = FIRST_PAUSE if registration.look() else LONGEST_PAUSE
        _end(1, f"flower-superlink ended with code {superlink.returncode}")


def load_certificates(folder: Path) -> tuple[x509.Certificate, x509.Certificate]:
    """Load those of the CA and of the server; ends the command where they and the server's key are not one set."""
    from cryptography.exceptions import InvalidSignature

    ca, server = (_load_certificate(folder / f"{name}.crt") for name in (CA, SERVER))
    if _load_pem_key(folder / f"{SERVER}.key").public_key() != server.public_key():
        _end(2, f"{folder / SERVER}.key is not the key of {SERVER}.crt")
    try:
        server.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        _end(2, f"{folder / SERVER}.crt is not signed by {CA}.crt")
    return ca, server


def _check_server_keys(folder: Path, host: str | Address) -> dict[str, x509.Certificate]:
    """Check all that is in a folder of keys; the certificates, by their paths."""
    ca, server = load_certificates(folder)
    certificates = {f"{folder / CA}.crt": ca, f"{folder / SERVER}.crt": server}
    for path, certificate in certificates.items():
        if fault := _out_of_date(path, certificate):
            _end(2, f"{fault}: `kindred keys renew {shlex.quote(str(folder))}` makes another")
    if isinstance(host, str) or not host.is_unspecified:
        _check_certificate_names(folder, [host])
    _check_public_keys(_public_keys(folder))
    for path in (folder, *sorted(folder.glob("[!.]*"))):
        if doubt := open_to_others(path):
            _end(2, doubt)
    return certificates


def _out_of_date(what: object, certificate: x509.Certificate) -> str | None:
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not since <= (now := datetime.now(UTC)) <= until:
        return f"{what} is valid from {since:%Y-%m-%d} to {until:%Y-%m-%d}, this machine's clock says {now:%Y-%m-%d}"
    return None


def ending(certificates: Mapping[str, x509.Certificate], todo: str) -> Iterator[str]:
    """Yield a line for each certificate that ends soon, with what to do."""
    for name, certificate in certificates.items():
        until = certificate.not_valid_after_utc
        left = until - datetime.now(UTC)
        if left < timedelta(days=WARNING_DAYS):
            yield f"{name} is valid until {until:%Y-%m-%d}, for {max(left.days, 0)} more days: {todo}"


def open_to_others(path: Path) -> str | None:
    """Say why a file or a folder of keys is not safe from others on this machine, and what to do.

    Nobody else may be able to change it, or to read it if it is a private key.
    """
    try:
        about = path.stat()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    mode, quoted = stat.S_IMODE(about.st_mode), shlex.quote(str(path))
    if about.st_uid not in (os.geteuid(), 0):
        return (
            f"{path} belongs to user {about.st_uid}, allowed: {os.geteuid()}, who runs this, or root; "
            f"chown {os.geteuid()} {quoted}"
        )
    private = path.suffix == ".key"
    if mode & (0o077 if private else 0o022):
        others, letters = ("read it", "go=") if private else ("write to it", "go-w")
        return (
            f"{path} has permissions {mode:04o}, allowed: such that nobody else can {others}; chmod {letters} {quoted}"
        )
    return None


def _public_keys(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.pub")) if not path.name.startswith(".")]  # but not one in the making


def _check_public_keys(paths: Iterable[Path]) -> None:
    for path in paths:
        _check_public_key(path)
        _check_site_name(f"the name of {path}", path.stem)


def _wait_until_it_answers(superlink: subprocess.Popen[bytes], host: str, port: int, keys: Path | None) -> None:
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
        _end(1, f"flower-superlink does not answer on {host}:{port} after {STARTUP_TIMEOUT:.0f} s")
    _end(1, f"flower-superlink ended with code {superlink.returncode}")


class _Registration:
    """Registers the sites whose public keys are put into a folder.

    Parameters
    ----------
    folder : Path
    settings : mapping
        Environment of Flower's processes. Runs read the names that keys are registered for in its file `REGISTERED`,
        so that nobody else can have one of these from the start of a run, before its site is there.
    state : Path
    mark : str
    """

    def __init__(self, folder: Path, settings: Mapping[str, str], state: Path, mark: str) -> None:
        self._folder, self._settings, self._state, self._mark = folder, settings, state, mark
        self._known: set[bytes] = set()  # contents of files that are registered, or are no keys
        self._doubts: set[str] = set()
        self._names: set[str] = set()
        self._file = Path(settings[REGISTERED])
        with contextlib.suppress(OSError, ValueError):  # the database knows them too, though their files may be gone
            self._names.update(json.loads(self._file.read_bytes()))
        self._write_names(path.stem for path in _public_keys(folder))

    def look(self) -> bool:
        """Register the keys that are new; False if that failed."""
        new: dict[Path, bytes] = {}
        doubts = {open_to_others(self._folder)} - {None}
        for path in [] if doubts else _public_keys(self._folder):
            if doubt := open_to_others(path):
                doubts.add(doubt)
                continue
            with contextlib.suppress(OSError, typer.Exit):  # it has gone, or a line has said what is wrong with it
                if (content := path.read_bytes()) not in self._known:
                    self._known.add(content)
                    _check_public_keys([path])
                    new[path] = content
        for doubt in doubts - self._doubts:  # once, as long as it lasts
            _tell(f"{doubt}; until then no key is taken from it")
        self._doubts = doubts
        if not new:
            return True
        self._write_names(path.stem for path in new)
        failed = _register(list(new), self._settings, self._state, self._mark)
        self._known.difference_update(new[path] for path in failed)
        return not failed

    def _write_names(self, names: Iterable[str]) -> None:
        self._names.update(names)
        _write(self._file, json.dumps(sorted(self._names)).encode())


def _register(public_keys: Sequence[Path], settings: Mapping[str, str], state: Path, mark: str) -> list[Path]:
    """Register the sites whose public keys these are; those with which that failed."""
    for path in public_keys:
        _show_command(
            ["flwr", "supernode", "register", str(path), CONNECTION, "--name", path.stem], {"FLWR_HOME": str(state)}
        )
    arguments = [text for path in public_keys for text in (str(path), path.stem)]
    flwr = subprocess.run(
        [sys.executable, "-P", "-c", REGISTER, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        env=_environment(settings, mark), cwd=state, start_new_session=True, encoding="utf-8",
    )  # fmt: skip
    outcomes = {name: (code, said) for name, code, said in map(json.loads, flwr.stdout.splitlines())}
    failed = []
    for path in public_keys:
        code, said = outcomes.get(path.stem, (flwr.returncode, "flwr ended before"))
        node = re.search(r"SuperNode (\d+)", said)
        if code and "already in use" not in said:
            failed.append(path)
            _tell(f"{path.stem} cannot be registered: {' '.join(said.split())}")
        elif code:
            print(f"{path.stem} is known already: registered, or withdrawn", flush=True)
        else:
            print(f"{path.stem} is registered{f' as SuperNode {node[1]}' if node else ''}", flush=True)
    return failed


# --- kindred site ---


@app.command()
def site(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the site is called; whole numbers are numbers.")],
    server: Annotated[str, _option("server", "HOST:PORT", "Where the server is.")],
    data_dir: Annotated[Path, _option("data-dir", "PATH", "The site's data: .npz file, folder of images, or tables.")],
    public_data: Annotated[
        Path | None, _option("public-data", "FILE", "Unlabelled images, the same at each site: an .npz file with x.")
    ] = None,
    ca: Annotated[Path | None, _option("ca", "FILE", "The ca.crt of `kindred keys`.")] = None,
    key: Annotated[Path | None, _option("key", "FILE", "The site's private key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and authentication.")] = False,
    state_dir: Annotated[Path | None, _option("state-dir", "DIR", "Folder of what the site keeps.")] = None,
    threads: Annotated[int | None, _option("threads", "N", "CPU threads to compute with (default: all CPUs).")] = None,
    port: Annotated[int | None, _option("port", "PORT", "Port that the SuperNode uses within this machine.")] = None,
    no_share_model: Annotated[
        bool, typer.Option("--no-share-model", help="Keep the model from other sites; FedeRiCo.")
    ] = False,
    report_weights: Annotated[
        bool, typer.Option("--report-weights", help="Let the server know the site's weights; FedeRiCo.")
    ] = False,
    class_names: Annotated[
        str,
        _option("class-names", "NAMES", "The run's class-names, where the data have names for classes: to check them."),
    ] = "",
    run_config: Annotated[
        list[str] | None,
        _option(
            "run-config",
            "FILE_OR_SETTINGS",
            "The settings of a run, as for `flwr run`: to check that the site fits it.",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check and print, start nothing.")] = False,
) -> None:
    """Take part as a site with data of its own: check the data, then keep a SuperNode running."""
    from kindred.client.state import default_root

    _check_site_name("NAME", name)
    host, superlink_port = parse_server(server)
    if insecure and (ca or key):
        _end(2, "--insecure is given beside --ca or --key, allowed: --insecure, or both of these")
    if (ca is None) != (key is None):
        _end(2, f"--{'key' if ca else 'ca'} is not given, allowed: --ca and --key together")
    if not (ca and key) and not insecure and not _is_loopback(host):
        _end(2, f"--server is {server!r}, another machine: give --ca FILE and --key FILE (or --insecure)")
    cpus = os.cpu_count() or 1
    threads = cpus if threads is None else threads
    if not 1 <= threads <= cpus:
        _end(2, f"--threads is {threads}, allowed: 1 to {cpus}, the CPUs of this machine")
    if port is not None:
        _check_port("--port", port)
    node: dict[str, str | int | bool] = {"client-id": client_id(name)}
    node["data-dir"] = str(_absolute(data_dir, "--data-dir"))
    if public_data:
        node["public-data"] = str(_absolute(public_data, "--public-data"))
    state = _absolute(state_dir or default_root(), "--state-dir")
    node["state-dir"] = str(state)
    if no_share_model:
        node["share-model"] = False
    if report_weights:
        node["report-weights"] = True
    if ca and key:
        ca, key = _absolute(ca, "--ca"), _absolute(key, "--key")
        _load_site_key(key)
        if doubt := _out_of_date(ca, _load_certificate(ca)) or open_to_others(key):
            _end(2, doubt)
        proof = ["--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]
    else:
        proof = ["--insecure"]
        _warn_of_no_tls(host)
    run = _run_config(run_config, class_names) if run_config else None
    names = run.class_names if run else class_names
    _tell_about_data(name, node, [part.strip() for part in names.split(",") if part.strip()])
    if run:
        _check_fit(name, node, run)

    def command(port: int) -> list[str]:
        return [
            "flower-supernode",
            "--superlink",
            _with_port(host, superlink_port),
            *proof,
            "--host",
            LOOPBACK[1],
            "--port",
            str(port),
            "--node-config",
            node_config(node),
        ]

    home = state / f"flower-{name}"
    settings = {
        "FLWR_HOME": str(home),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        **_QUIET,
    }  # s; a poll costs some ms
    if check:
        _show_command(command(port or 9094), settings)
        return
    with _own_folder(state, alone=False), _own_folder(home):
        _keep_running(lambda: command(_port_for_supernode(port)), settings, home, Link(host, superlink_port, ca, key))


def client_id(name: str) -> str | int:
    """What a site is called in its node config: a name, or the number that it writes."""
    return int(name) if re.fullmatch(r"0|[1-9]\d{0,17}", name, re.ASCII) else name


def parse_server(text: str) -> tuple[str | Address, int]:
    """Read HOST:PORT; ends the command where it is none."""
    found = re.fullmatch(r"(\[[^][]+\]|[^:]+):(\d{1,5})", text, re.ASCII)
    if not found or not 1 <= int(found[2]) <= 65535:
        _end(2, f"--server is {text!r}, allowed: HOST:PORT, with a port from 1 to 65535")
    return _host(found[1].strip("[]"), "--server"), int(found[2])


def node_config(values: Mapping[str, str | int | bool]) -> str:
    """Write a node config as flower-supernode reads it: TOML, in which no text may contain a quotation mark."""

    def text(value: str | int | bool) -> str:
        if isinstance(value, str):
            return '"' + value.replace("\\", "\\\\").replace('"', "\\u0022") + '"'
        return str(value).lower()

    return " ".join(f"{key}={text(value)}" for key, value in values.items())


def _tell_about_data(name: str, node: Mapping[str, Any], class_names: Sequence[str]) -> None:
    """Check a site's data, and print what the server learns of them."""
    from kindred.data import DataError
    from kindred.data.public import read_public
    from kindred.data.sites import read_site

    try:
        images = read_site(node["data-dir"], class_names)
        public = read_public(node["public-data"]) if "public-data" in node else None
    except DataError as error:
        _end(2, str(error))
    shape, told = "x".join(map(str, images.x_train.shape[1:])), ""
    if public is not None:
        if public.shape[1:] != images.x_train.shape[1:]:
            _end(
                2,
                f"public-data has images of {'x'.join(map(str, public.shape[1:]))}, the site's are {shape} "
                "(channels x height x width)",
            )
        told = f", with PerFed-CKT that it has {len(public)} public images and their fingerprint"
    share = "others may" if node.get("share-model", True) else "no other site may"
    train, test, top = len(images.x_train), len(images.x_test), images.num_classes - 1
    print(
        f"{name}: {train} images of {shape} to train on, {test} to test on, labels up to {top}\n"
        f"told to the server at first: the name {name}, {train} training samples, the name and the number of classes "
        f"of the run's network, that {share} have its model, which methods the run's program knows{told}; then what "
        "the method sends, see `kindred strategies`\n"
        f"stays here: the data in {node['data-dir']}, and what the site keeps in {node['state-dir']}",
        flush=True,
    )


def _run_config(given: Sequence[str], class_names: str) -> Config:
    """The settings of a run that the site is to fit; ends the command where they are none."""
    from kindred.server_app.config import ConfigError

    from .site_check import read_run_config

    if class_names:
        _end(2, "--class-names and --run-config are both given, allowed: one of them, for the run's class-names count")
    try:
        return read_run_config(given)
    except ConfigError as error:
        _end(2, str(error))


def _check_fit(name: str, node: Mapping[str, Any], run: Config) -> None:
    """Say that a site fits a run, or end the command with the reason for which it does not."""
    from kindred.data import DataError
    from kindred.server_app.config import ConfigError

    from .site_check import fit

    try:
        print(f"fits the run: {fit(run, node, APP_DIR)}", flush=True)
    except ConfigError as error:
        _end(2, str(error))
    except DataError as error:
        _end(2, f"{name} does not fit the run: {' '.join(str(error).split())}")


def _port_for_supernode(port: int | None) -> int:
    if port is not None:
        _check_port_is_free("--port", LOOPBACK[1], port)
        return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK[1], 0))
        return probe.getsockname()[1]


def _keep_running(command: Callable[[], list[str]], settings: Mapping[str, str], home: Path, link: Link) -> None:
    """Run a SuperNode, and start it again when it ends, until this process is asked to end."""
    with _processes_that_end() as mark:
        pause = FIRST_PAUSE
        _tell_faults(link)
        while True:
            began = time.monotonic()
            supernode = _start(command(), settings, home, mark, hooks.quicken_supernode, stderr=subprocess.PIPE)
            output = _Output(supernode.stderr)
            code = supernode.wait()
            _kill(mark)  # what it started, such as a client at work on a message
            output.join(GRACE)
            if time.monotonic() - began > STEADY:
                pause = FIRST_PAUSE
            _tell(f"flower-supernode ended with code {code}, and is started again in {pause:g} s")
            _tell_faults(link, output.end if code >= 0 else None)  # below 0: it was killed
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


class _Output(threading.Thread):
    """Passes on what a process writes, when it writes it, and keeps the end of it."""

    def __init__(self, source: IO[bytes]) -> None:
        super().__init__()
        self._source = source
        self.end = b""
        self.start()

    def run(self) -> None:
        """Read until every process that writes has ended."""
        with self._source:
            while written := self._source.read1():
                self.end = (self.end + written)[-KEPT:]
                with contextlib.suppress(OSError):  # nobody reads it any more; the process is not to wait for that
                    sys.stderr.buffer.write(written)
                    sys.stderr.buffer.flush()


class Link(NamedTuple):
    """Where a site finds the server, and the files by which they know each other; None without TLS."""

    host: str | Address
    port: int
    ca: Path | None = None
    key: Path | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return _with_port(self.host, self.port)


def _tell_faults(link: Link, output: bytes | None = None) -> None:
    with contextlib.suppress(typer.Exit, OSError):  # a file cannot be used, as a line has said; it may be being copied
        for fault in faults(link, output):
            _tell(fault)


def faults(link: Link, output: bytes | None = None) -> Iterator[str]:
    """Ask the server, and yield what keeps a SuperNode from taking part or soon will, with what to do.

    Parameters
    ----------
    link : Link
    output : bytes, optional
        The end of what a SuperNode has written that ended by itself; None if none did.
    """
    import httpx
    from cryptography import x509

    context: ssl.SSLContext | bool = False
    if link.ca:
        ca = _load_certificate(link.ca)
        if fault := _out_of_date(link.ca, ca):
            yield f"{fault}: take the ca.crt that the server has now"
            return
        yield from ending({str(link.ca): ca}, "take the ca.crt that the server has after `kindred keys renew` there")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(link.ca)
    try:
        # A proxy, as the SuperNode would take it.
        with httpx.Client(
            base_url=f"http{'s' if link.ca else ''}://{link.address}",
            verify=context,
            timeout=ANSWER_TIMEOUT,
            trust_env=not _is_loopback(link.host),
        ) as client:
            sent = time.time()
            with client.stream("GET", "/health") as answer:  # as the connection is there
                received = time.time()
                tls = answer.extensions["network_stream"].get_extra_info("ssl_object")
            if answer.status_code != 200:
                yield f"{link.address} answers with status {answer.status_code}: it is no server of kindred's"
                return
            if tls:
                server = x509.load_der_x509_certificate(tls.getpeercert(True))
                yield from ending(
                    {f"the certificate of {link.address}": server},
                    "it is renewed on the server's machine by `kindred keys renew`",
                )
            status = _key_status(client, link.key) if link.key and output is not None else None
            if fault := clock_fault(answer.headers.get("date", ""), sent, received, refused=status == "refused"):
                yield fault
            elif status == "unknown":
                yield (
                    f"the server does not know the key {link.key}, or has withdrawn it: put the site's .pub into "
                    "the server's keys folder; for one that was withdrawn make a new key"
                )
            elif status == "known" and NOT_ACTIVATED in output:
                yield (
                    f"the key {link.key} is in use by another SuperNode, or was less than a minute ago: end the "
                    "other `kindred site`, or wait"
                )
    except httpx.HTTPError as error:
        yield _connection_fault(link, error)


def clock_fault(date: str, sent: float, received: float, refused: bool = False) -> str | None:
    """Say by how much this machine's clock is off, where Flower tolerates less.

    Parameters
    ----------
    date : str
        The date in the server's answer.
    sent, received : float
        When the request was sent and the answer received, by this machine's clock.
    refused : bool
        The server has refused a message that was signed now: the clock is off, be it by less than the date can show.
    """
    from flwr.supercore.constant import MAX_TIMESTAMP_DIFF_SECONDS, MIN_TIMESTAMP_DIFF_SECONDS

    try:
        earliest = parsedate_to_datetime(date).timestamp()
    except ValueError:  # it says nothing of the time
        ahead = unknown = math.inf
    else:
        ahead = (sent + received - DATE_STEP) / 2 - earliest
        unknown = (received - sent + DATE_STEP) / 2
    least, most = -MAX_TIMESTAMP_DIFF_SECONDS, -MIN_TIMESTAMP_DIFF_SECONDS
    if not refused and least - unknown <= ahead <= most + unknown:
        return None
    off = f"about {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}" if math.isfinite(ahead) else "not that of"
    return (
        f"this machine's clock is {off} the server's, allowed: up to {most} s ahead or {-least} s behind; set it, "
        "as with NTP (timedatectl set-ntp true)"
    )


def _key_status(client: httpx.Client, path: Path) -> Literal["refused", "unknown", "known"] | None:
    """Ask the server about a site's key; None if it answers something else.

    The request is a SuperNode's first, with a heartbeat interval that Flower refuses: after it has looked at the time
    of the signature and for the key, and before it changes anything.
    """
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supercore.protobuf.client import ProtobufRequestContext
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key = _load_site_key(path)
    question = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=0)
    request = client.build_request(
        "POST", "/v1/fleet/activate-node", content=question.SerializeToString(),
        headers={"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE},
    )  # fmt: skip
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    answer = signed.intercept(ProtobufRequestContext("", question, request), lambda each: client.send(each.request))
    if answer.status_code == 401:
        return "refused"
    error = FlowerError.from_json(answer.text)
    if error and error.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        return "unknown"
    return "known" if error and error.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL else None


def _connection_fault(link: Link, error: BaseException) -> str:
    """Say why no answer came."""
    import httpx

    reason: BaseException | None = error
    while reason and not isinstance(reason, OSError):
        reason = reason.__context__
    certificate = f"the certificate of {link.address}"
    if isinstance(reason, ssl.SSLCertVerificationError):
        if reason.verify_code in (9, 10):  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, _HAS_EXPIRED
            return (
                f"{certificate} is not valid on {datetime.now(UTC):%Y-%m-%d}, the date of this machine's clock "
                f"({reason.verify_message}): it is renewed on the server's machine by `kindred keys renew`"
            )
        if reason.verify_code in (62, 64):  # X509_V_ERR_HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH
            return (
                f"{certificate} is not for this name ({reason.verify_message}): give --server a name that it is "
                "for, or remove server.crt on the server's machine, and `kindred keys DIR --server NAMES` there"
            )
        return (
            f"{certificate} is not signed by the CA of {link.ca} ({reason.verify_message}): take the ca.crt of "
            "this server, or see whether --server names the right one"
        )
    if isinstance(reason, ssl.SSLError):
        return f"{link.address} does not speak TLS ({reason.reason}): see whether `kindred server --keys` listens there"
    if not link.ca and isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError)):
        return f"{link.address} does not answer without TLS ({error}): a server with --keys needs --ca and --key"
    return (
        f"{link.address} cannot be reached ({getattr(reason, 'strerror', None) or error}), and is tried again: see "
        "whether `kindred server` runs there, --server names it, and a firewall lets this machine through"
    )


# --- what they share ---

_QUIET = {"FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_TELEMETRY_ENABLED": "0"}


def _tell(line: str) -> None:
    print(f"kindred: {line}", file=sys.stderr, flush=True)


def _host(text: str, option: str) -> str | Address:
    """A host's name or address; ends the command where it is none."""
    if not re.fullmatch(r"[A-Za-z0-9.:-]+", text):
        _end(2, f"{option} is {text!r}, allowed: a name or an IP address")
    return address_of(text) or text.lower()


def _with_port(host: str | Address, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _is_loopback(host: str | Address) -> bool:
    return host == "localhost" if isinstance(host, str) else host.is_loopback


def _warn_of_no_tls(host: str | Address) -> None:
    where = "within this machine" if _is_loopback(host) else "FOR ALL TO READ AND CHANGE on the way"
    _tell(f"without TLS and authentication: models and metrics travel as they are, {where}")


def _absolute(path: Path, option: str) -> Path:
    text = os.path.abspath(os.path.expanduser(path))
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text):
        _end(2, f"{option} is {text!r}, allowed: a path in UTF-8 without control characters")
    return Path(text)


def _check_port(option: str, port: int) -> None:
    if not 1 <= port <= 65535:
        _end(2, f"{option} is {port}, allowed: 1 to 65535")


def _check_port_is_free(option: str, host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last server may linger
            probe.bind(address)
    except OSError as error:
        _end(2, f"{option} is {port}, which cannot be listened on at {host}: {error.strerror}")


@contextmanager
def _own_folder(folder: Path, alone: bool = True) -> Iterator[None]:
    """Make a folder that its user alone can enter, and have it for this process alone unless told otherwise."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            _end(
                2,
                f"{folder} is open to others on this machine, allowed: a folder of yours alone; "
                f"chmod 700 {shlex.quote(str(folder))}",
            )
        lock = open(folder / ".lock", "w") if alone else None
    except OSError as error:
        _end(2, f"{folder} cannot be used as a folder: {error.strerror}")
    if lock is None:
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _end(2, f"{folder} is in use by another `kindred` that runs")
        from kindred.client.state import partial_files

        for partial, _ in partial_files(folder):  # of one that was killed as it wrote
            partial.unlink()
        yield


@contextmanager
def _processes_that_end() -> Iterator[str]:
    """Yield a mark for processes; at the end of the block, which a signal may bring about, none is left that has it."""
    mark = uuid.uuid4().hex
    with _signals_as_exceptions() as signals:
        try:
            try:
                yield mark
            finally:
                signals.heeded = False
                _ask_to_end(mark)
                _kill(mark)
        except _Signalled as signalled:
            print(f"kindred: ended by {signalled.number.name}", file=sys.stderr, flush=True)


def _ask_to_end(mark: str) -> None:
    import psutil

    children = [child for child in psutil.Process().children() if _has_mark(child, mark)]
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.terminate()
    psutil.wait_procs(children, GRACE)


def _has_mark(process: Any, mark: str) -> bool:
    import psutil

    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def _environment(settings: Mapping[str, str], mark: str) -> dict[str, str]:
    proxied = [os.environ[name] for name in ("no_proxy", "NO_PROXY") if os.environ.get(name)]
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    inherited = {name: value for name, value in os.environ.items() if name != REGISTERED}
    return inherited | {MARK: mark, "PATH": path, "no_proxy": ",".join([*LOOPBACK, *proxied[:1]])} | dict(settings)


def _start(
    command: Sequence[str],
    settings: Mapping[str, str],
    directory: Path,
    mark: str,
    hook: Callable[[], None],
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Print a command of Flower's and start it; what it says goes where this process's words go, or into a pipe."""
    _show_command(command, settings)
    script = os.path.join(sysconfig.get_path("scripts"), command[0])
    return subprocess.Popen(
        hooks.command(script, command[1:], hook), stdin=subprocess.DEVNULL, stderr=stderr,
        env=_environment(settings, mark), cwd=directory, start_new_session=True,
    )  # fmt: skip


def _show_command(command: Sequence[str], settings: Mapping[str, str]) -> None:
    words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    print(f"$ {' '.join(words)} {shlex.join(command)}", flush=True)
