"""`kindred keys`: create and renew the keys and certificates of the server and the sites.

It prints the equivalent commands of openssl and ssh-keygen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kindred.lazy import lazy
from kindred.server_app.cli.common import app, end, option, warn

from .addresses import LOOPBACK, Address, address_of
from .certificates import (
    CA,
    SERVER,
    check_certificate_names,
    check_site_name,
    key_usage,
    load_ca_key,
    load_certificate,
    load_certificates,
    load_pem_key,
    load_site_key,
    new_key,
    private_openssh,
    private_pem,
    server_names_in,
    signed_certificate,
    subject_name,
)
from .files import absolute_path, own_folder, write_or_end

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.x509 import oid
else:
    x509, oid = lazy("cryptography.x509"), lazy("cryptography.x509.oid")

CA_DAYS, SERVER_DAYS = 3650, 825  # clients on macOS accept at most 825


@app.command()
def keys(
    arguments: Annotated[
        list[Path],
        typer.Argument(metavar="[renew] DIR", help="Folder of the keys; with `renew`, renew its certificates."),
    ],
    server: Annotated[
        str, option("server", "NAMES", "Names and IP addresses under which sites reach the server, as fl.example.org.")
    ] = "",
    sites: Annotated[str, option("sites", "NAMES", "Sites to make a key for, such as lyon,oslo.")] = "",
) -> None:
    """Make the keys and certificates that identify the server and the sites; existing files stay unchanged.

    `kindred keys renew DIR` renews the server's certificate, and the CA's if it would expire first; all keys stay.
    """
    *words, folder = arguments
    if words not in ([], [Path("renew")]):
        end(2, f"{' '.join(map(str, arguments))!r} is given, allowed: DIR, or renew DIR")
    folder = absolute_path(folder, "DIR")
    if words:
        if server or sites:
            end(2, f"--{'server' if server else 'sites'} is given together with renew, allowed: renew DIR alone")
        _renew(folder)
        return
    names, site_names = parse_server_names(server), parse_sites(sites)
    if not names and not (folder / f"{SERVER}.crt").exists():
        end(
            2,
            f"--server is not given, and {folder} has no {SERVER}.crt: name the server, as in "
            "--server fl.example.org,192.0.2.7",
        )
    with own_folder(folder):
        for path, like in make_keys(folder, names, site_names):
            print(f"made {path}\n  same as: {like}", flush=True)
        if not (ignored := folder / ".gitignore").exists():
            write_or_end(ignored, b"*\n", 0o644)
    until = load_certificate(folder / f"{SERVER}.crt").not_valid_after_utc
    print(
        f"\nthe server's certificate is for {', '.join(map(str, server_names_in(folder)))}, until {until:%Y-%m-%d}\n"
        "a site's machine needs ca.crt and the site's .key; ca.key only signs further certificates: keep it elsewhere"
    )
    if tree := next((parent for parent in folder.parents if (parent / ".git").exists()), None):
        warn(
            f"{folder} is in the git work tree {tree}: its .gitignore keeps the keys out of commits; move it elsewhere"
        )


def parse_sites(text: str) -> list[str]:
    """Return the names of sites from a list with commas; end the command if one is not allowed."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        check_site_name("--sites", name)
    for name in names:  # file systems that ignore case must not mix up their keys
        if [other.lower() for other in names].count(name.lower()) > 1:
            end(2, f"--sites is {text!r}, but {name!r} is in it twice (upper and lower case count as the same)")
    return names


def parse_server_names(text: str) -> list[str | Address]:
    """Return the server's names and addresses from a list with commas; end the command if one is not allowed."""
    names: list[str | Address] = []
    label = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name = address_of(part) or part
        digits = re.fullmatch(r"[\d.]+", part)  # a malformed address, not a name
        if isinstance(name, str) and (digits or len(name) > 253 or not re.fullmatch(rf"{label}(\.{label})*", name)):
            end(2, f"--server is {part!r}, allowed: names and IP addresses of the server, with commas between them")
        if not isinstance(name, str) and name.is_unspecified:
            end(2, f"--server is {part!r}, allowed: addresses under which sites reach the server")
        names.append(name.lower() if isinstance(name, str) else name)
    return names


def make_keys(folder: Path, names: Sequence[str | Address], sites: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """Make the keys and certificates that a folder lacks.

    Parameters
    ----------
    folder : Path
    names : sequence of str and IP addresses
        Names and addresses for the server's certificate, in addition to loopback.
    sites : iterable of str

    Yields
    ------
    tuple of Path and str
        A new file, and the equivalent command.
    """

    def files(name: str) -> tuple[Path, Path]:
        return folder / f"{name}.key", folder / f"{name}.crt"

    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -noenc"
    (ca_key, ca), (server_key, server) = files(CA), files(SERVER)
    if not ca.exists():
        if not ca_key.exists():
            if server.exists():
                end(2, f"{ca} is missing, and so is {ca_key.name}, which could make it again: put one of them back")
            write_or_end(ca_key, private_pem(new_key()))
        extensions = [
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (key_usage(key_cert_sign=True, crl_sign=True), True),
        ]
        key, name = load_pem_key(ca_key), subject_name("kindred CA")
        write_or_end(ca, signed_certificate(name, key.public_key(), extensions, CA_DAYS, name, key), 0o644)
        yield (
            ca,
            (
                f'{request} -days {CA_DAYS} -subj "/CN=kindred CA" '
                f"-addext keyUsage=critical,keyCertSign,cRLSign -keyout {ca_key.name} -out {ca.name}"
            ),
        )
    if server.exists():
        check_certificate_names(folder, names)
    else:
        signing_key = load_ca_key(folder)
        if not server_key.exists():
            write_or_end(server_key, private_pem(new_key()))
        all_names = list(dict.fromkeys([*(address_of(name) or name for name in LOOPBACK), *names]))
        extensions = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (key_usage(digital_signature=True), True),
            (x509.ExtendedKeyUsage([oid.ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (
                x509.SubjectAlternativeName(
                    [x509.DNSName(name) if isinstance(name, str) else x509.IPAddress(name) for name in all_names]
                ),
                False,
            ),
        ]
        certificate = signed_certificate(
            subject_name("kindred server"),
            load_pem_key(server_key).public_key(),
            extensions,
            SERVER_DAYS,
            load_certificate(ca).subject,
            signing_key,
        )
        write_or_end(server, certificate, 0o644)
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
            write_or_end(private, private_openssh(new_key()))
        key = load_site_key(private)
        write_or_end(
            public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {site}\n".encode(), 0o644
        )
        yield (
            private,
            (f'ssh-keygen -t ecdsa -b 384 -N "" -C {site} -f {private.name}; mv {private.name}.pub {public.name}'),
        )


def _renew(folder: Path) -> None:
    """Renew certificates, and print which files have to be copied where."""
    server, ca = (folder / f"{name}.crt" for name in (SERVER, CA))
    load_certificate(server)  # ends the command before a missing folder would be made
    with own_folder(folder):
        old, made = load_certificate(ca).not_valid_after_utc, []
        for path in renewed_certificates(folder):
            made.append(path)
            print(f"made {path}, valid until {load_certificate(path).not_valid_after_utc:%Y-%m-%d}", flush=True)
    print(
        "the keys and all other files are unchanged, and sites need not be registered again\n"
        f"the server: restart `kindred server`; if its keys folder is a different one, copy "
        f"{' and '.join(path.name for path in made)} into it first"
    )
    if ca in made:
        print(
            f"the sites: copy {ca.name} to each, over its old one, which is valid until {old:%Y-%m-%d}; then "
            "restart `kindred site`"
        )
    else:
        print(f"the sites: nothing to do; {ca.name} is valid until {old:%Y-%m-%d}")


def renewed_certificates(folder: Path) -> Iterator[Path]:
    """Renew the server's certificate, for the same names, and then the CA's if it would expire sooner.

    All keys stay, and so do the registrations of sites. If this is interrupted, the files still match each other, and
    the next call makes all of them.

    Yields
    ------
    Path
        A new file.
    """
    ca, server = load_certificates(folder)
    key = load_ca_key(folder)
    if key.public_key() != ca.public_key():
        end(2, f"{folder / CA}.key is not the key of {CA}.crt")
    made_anew = (x509.SubjectKeyIdentifier, x509.AuthorityKeyIdentifier)
    renewals = [(SERVER, server, SERVER_DAYS)]
    if ca.not_valid_after_utc < datetime.now(UTC) + timedelta(days=SERVER_DAYS):
        renewals.append((CA, ca, CA_DAYS))
    for name, old, days in renewals:
        path = folder / f"{name}.crt"
        extensions = [(each.value, each.critical) for each in old.extensions if not isinstance(each.value, made_anew)]
        write_or_end(path, signed_certificate(old.subject, old.public_key(), extensions, days, ca.subject, key), 0o644)
        yield path
