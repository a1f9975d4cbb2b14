"""Names, addresses and ports of machines: reading, checking and writing them."""

from __future__ import annotations

import ipaddress
import re
import socket

from kindred.server_app.cli.common import end, warn

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def address_of(text: str) -> Address | None:
    """Read an IP address, an IPv4-mapped IPv6 address as IPv4; None if the text is no address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def parse_host(text: str, option: str) -> str | Address:
    """Return a host's name or address; end the command if the text is neither."""
    if not re.fullmatch(r"[A-Za-z0-9.:-]+", text):
        end(2, f"{option} is {text!r}, allowed: a name or an IP address")
    return address_of(text) or text.lower()


def parse_server(text: str, option: str = "--server", least: int = 1) -> tuple[str | Address, int]:
    """Return host and port, `least` or more, of the text HOST:PORT; end the command if it is something else."""
    found = re.fullmatch(r"(\[[^][]+\]|[^:]+):(\d{1,5})", text, re.ASCII)
    if not found or not least <= int(found[2]) <= 65535:
        end(2, f"{option} is {text!r}, allowed: HOST:PORT, with a port from {least} to 65535")
    return parse_host(found[1].strip("[]"), option), int(found[2])


def with_port(host: str | Address, port: int) -> str:
    """Write HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def is_loopback(host: str | Address) -> bool:
    """Return whether a host is a loopback name or address, which means this machine."""
    return host == "localhost" if isinstance(host, str) else host.is_loopback


def warn_of_no_tls(host: str | Address) -> None:
    """Warn that a connection to a host has neither TLS nor authentication."""
    where = "within this machine" if is_loopback(host) else "where ANYONE ON THE NETWORK PATH CAN READ AND CHANGE THEM"
    warn(f"without TLS and authentication, models and metrics are sent unencrypted, {where}")


def check_port(option: str, port: int) -> None:
    """End the command if a port is out of range."""
    if not 1 <= port <= 65535:
        end(2, f"{option} is {port}, allowed: 1 to 65535")


def check_port_is_free(option: str, host: str, port: int) -> None:
    """End the command if this machine cannot listen on a port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the previous server may linger
            probe.bind(address)
    except OSError as error:
        end(2, f"{option} is {port}, but listening at {host} fails ({error.strerror}); give another port")
