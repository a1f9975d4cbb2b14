"""Create, read and check single certificates and private keys; `keys.py` says which of them a folder needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from kindred.lazy import lazy
from kindred.server_app.cli.common import end

from .addresses import Address

if TYPE_CHECKING:
    from cryptography import x509
else:
    x509 = lazy("cryptography.x509")

CA, SERVER = "ca", "server"  # names of the certificates' files; no site may have them
WARNING_DAYS = 60  # before a certificate expires


def check_site_name(option: str, name: str) -> None:
    """End the command if a name is not allowed for a site."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name.lower() in (CA, SERVER):
        end(
            2,
            f"{option} is {name!r}, allowed: up to 64 letters, digits and . _ -, beginning with a letter or digit, "
            f"except {CA} and {SERVER}",
        )


def signed_certificate(
    subject: x509.Name,
    key: Any,
    extensions: Iterable[tuple[x509.ExtensionType, bool]],
    days: int,
    issuer: x509.Name,
    issuer_key: EllipticCurvePrivateKey,
) -> bytes:
    """Return a new certificate in PEM, signed with the issuer's key."""
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


def subject_name(name: str) -> x509.Name:
    """Return a certificate subject with this common name."""
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def key_usage(**used: bool) -> x509.KeyUsage:
    """Return the key usage extension with only the given usages."""
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


def new_key() -> EllipticCurvePrivateKey:
    """Return a new private key."""
    return ec.generate_private_key(ec.SECP384R1())


def private_pem(key: EllipticCurvePrivateKey) -> bytes:
    """Return a private key in PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def private_openssh(key: EllipticCurvePrivateKey) -> bytes:
    """Return a private key in OpenSSH's format, the only one that flower-supernode reads."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def load_pem_key(path: Path) -> Any:
    """Load a private key in PEM; end the command if it cannot be used."""
    return _read(path, lambda content: load_pem_private_key(content, None), "a private key in PEM")


def load_site_key(path: Path) -> EllipticCurvePrivateKey:
    """Load a site's private key; end the command if it cannot be used."""
    allowed = "a private key as `kindred keys` or ssh-keygen -t ecdsa makes it, without a password"
    key = _read(path, lambda content: load_ssh_private_key(content, None), allowed)
    if not isinstance(key, EllipticCurvePrivateKey):
        end(2, f"{path} holds a key of another kind, allowed: {allowed}")
    return key


def load_ca_key(folder: Path) -> EllipticCurvePrivateKey:
    """Load the CA's private key; end the command if it is missing or cannot be used."""
    path = folder / f"{CA}.key"
    if not path.exists():
        end(2, f"{path} is missing, but {SERVER}.crt must be signed with it: put it back")
    return load_pem_key(path)


def check_public_key(path: Path) -> None:
    """End the command if a file is not the public key of a site."""
    allowed = "a public key as `kindred keys` or ssh-keygen -t ecdsa makes it"
    if not isinstance(_read(path, load_ssh_public_key, allowed), EllipticCurvePublicKey):
        end(2, f"{path} holds a key of another kind, allowed: {allowed}")


def load_certificate(path: Path) -> x509.Certificate:
    """Load a certificate in PEM; end the command if it cannot be used."""
    return _read(path, x509.load_pem_x509_certificate, "a certificate in PEM")


def load_certificates(folder: Path) -> tuple[x509.Certificate, x509.Certificate]:
    """Return the certificates of CA and server; end the command if they and the server's key do not match."""
    ca, server = (load_certificate(folder / f"{name}.crt") for name in (CA, SERVER))
    if load_pem_key(folder / f"{SERVER}.key").public_key() != server.public_key():
        end(2, f"{folder / SERVER}.key is not the key of {SERVER}.crt")
    try:
        server.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        end(2, f"{folder / SERVER}.crt is not signed by {CA}.crt")
    return ca, server


def _read(path: Path, load: Callable[[bytes], Any], allowed: str) -> Any:
    try:
        return load(path.read_bytes())
    except OSError as error:
        end(2, f"{path} cannot be read ({error.strerror}), allowed: {allowed}")
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key has a password
        end(2, f"{path} cannot be used, allowed: {allowed}")


def server_names_in(folder: Path) -> list[str | Address]:
    """Return the names and addresses in the server's certificate of a folder."""
    extensions = load_certificate(folder / f"{SERVER}.crt").extensions
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [each for each in names.get_values_for_type(x509.IPAddress) if isinstance(each, Address)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def check_certificate_names(folder: Path, names: Iterable[str | Address]) -> None:
    """End the command if the server's certificate lacks one of these names."""
    there = server_names_in(folder)
    if lacking := [str(name) for name in names if name not in there]:
        path = folder / f"{SERVER}.crt"
        end(
            2,
            f"{path} is for {', '.join(map(str, there)) or 'no name'}, not for {', '.join(lacking)}; remove it "
            "and run `kindred keys DIR --server NAMES`, which makes a new one",
        )


def out_of_date(what: object, certificate: x509.Certificate) -> str | None:
    """Return a line that says why a certificate is not valid now; None if it is valid."""
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not since <= (now := datetime.now(UTC)) <= until:
        return f"{what} is valid from {since:%Y-%m-%d} to {until:%Y-%m-%d}, this machine's clock says {now:%Y-%m-%d}"
    return None


def ending(certificates: Mapping[str, x509.Certificate], todo: str) -> Iterator[str]:
    """Yield a line for each certificate that expires soon, with what to do."""
    for name, certificate in certificates.items():
        until = certificate.not_valid_after_utc
        left = until - datetime.now(UTC)
        if left < timedelta(days=WARNING_DAYS):
            yield f"{name} is valid until {until:%Y-%m-%d}, for {max(left.days, 0)} more days: {todo}"
