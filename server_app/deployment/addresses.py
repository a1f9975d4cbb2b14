"""Names, addresses and ports of machines: reading, checking and writing them; users of connections."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
from pathlib import Path

from kindred.server_app.cli.common import end, warn

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
End = tuple[str, int | None]  # of a connection: address and port
LOOPBACK = ("localhost", "127.0.0.1", "::1")
CONNECTIONS_HERE = Path("/proc/self/net")  # the system's tables of connections, on Linux alone


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


def can_tell_users() -> bool:
    """Return whether the system shows whose process is at the other end of a connection."""
    return (CONNECTIONS_HERE / "tcp").exists()


def user_of(there: End, here: End) -> int | None:
    """Return the uid of the process at the other end of a connection within this machine; None if it is not known.

    Once a process closes its end, the system shows it as root's, in another state, and never in this state again. So
    two looks that agree are right, whatever happens meanwhile.
    """
    found = {_look_for_user(there, here) for _ in range(2)}
    return found.pop() if len(found) == 1 else None


def _look_for_user(there: End, here: End) -> int | None:
    for table, prefix in (("tcp", b""), ("tcp6", b""), ("tcp6", bytes(10) + b"\xff\xff")):  # the last: IPv4 in IPv6
        ends = [f"{_hexadecimal(prefix + _packed(host))}:{port:04X}" for host, port in (there, here)]
        with contextlib.suppress(OSError), open(CONNECTIONS_HERE / table) as lines:
            for line in lines:
                fields = line.split()
                if fields[1:4] == [*ends, "01"]:  # 01: established
                    return int(fields[7])
    return None


def _packed(host: str) -> bytes:
    address = address_of(host)
    return address.packed if address else b""


def _hexadecimal(address: bytes) -> str:
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", address))  # words in the machine's byte order
