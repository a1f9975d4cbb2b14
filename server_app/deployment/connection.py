"""Ask the server why a site's SuperNode cannot take part: connection, certificate, clock, key."""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import httpx
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.constant import MAX_TIMESTAMP_DIFF_SECONDS, MIN_TIMESTAMP_DIFF_SECONDS
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from kindred.lazy import lazy

from .addresses import Address, is_loopback, with_port
from .certificates import ending, load_certificate, load_site_key, out_of_date

if TYPE_CHECKING:
    from cryptography import x509
    from flwr.supercore import error as flower_error
    from flwr.supernode import node_auth_http_interceptor as node_auth
else:
    x509, flower_error = lazy("cryptography.x509"), lazy("flwr.supercore.error")
    node_auth = lazy("flwr.supernode.node_auth_http_interceptor")

NOT_ACTIVATED = b"[code: 2004]"  # Flower's error: the server does not know a key, or the key is in use
ANSWER_TIMEOUT = 5.0  # s that a site waits for the server's answer when it looks for faults
DATE_STEP = 2.0  # s by which the Date header may be late: it has no fractions, and the server updates it once a second


class Link(NamedTuple):
    """The server's address, and the files that prove server and site to each other; None without TLS."""

    host: str | Address
    port: int
    ca: Path | None = None
    key: Path | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return with_port(self.host, self.port)


def faults(link: Link, output: bytes | None = None) -> Iterator[str]:
    """Ask the server, and yield each reason why a SuperNode cannot take part, or soon cannot, with what to do.

    Parameters
    ----------
    link : Link
    output : bytes, optional
        The last bytes that a SuperNode wrote before it ended without being killed; None if none did.
    """
    context: ssl.SSLContext | bool = False
    if link.ca:
        ca = load_certificate(link.ca)
        if fault := out_of_date(link.ca, ca):
            yield f"{fault}: copy the ca.crt that the server has now"
            return
        yield from ending({str(link.ca): ca}, "run `kindred keys renew` on the server's machine, then copy its ca.crt")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(link.ca)
    try:
        # trust_env: use a proxy where the SuperNode would use one.
        with httpx.Client(
            base_url=f"http{'s' if link.ca else ''}://{link.address}",
            verify=context,
            timeout=ANSWER_TIMEOUT,
            trust_env=not is_loopback(link.host),
        ) as client:
            sent = time.time()
            with client.stream("GET", "/health") as answer:  # the connection is open meanwhile
                received = time.time()
                tls = answer.extensions["network_stream"].get_extra_info("ssl_object")
            if answer.status_code != 200:
                what = (
                    "it is tried again; see the log of `kindred server`, or of the proxy before it"
                    if answer.status_code >= 500
                    else "it is not a kindred server"
                )
                yield f"{link.address} answers with status {answer.status_code}: {what}"
                return
            if tls:
                server = x509.load_der_x509_certificate(tls.getpeercert(True))
                yield from ending(
                    {f"the certificate of {link.address}": server},
                    "run `kindred keys renew` on the server's machine",
                )
            status = _key_status(client, link.key) if link.key and output is not None else None
            if fault := clock_fault(answer.headers.get("date", ""), sent, received, refused=status == "refused"):
                yield fault
            elif status == "unknown":
                yield (
                    f"the server does not know the key {link.key}, or has withdrawn it: put the site's .pub into "
                    "the server's keys folder; if the key was withdrawn, make a new one"
                )
            elif status == "known" and output and NOT_ACTIVATED in output:
                yield (
                    f"the key {link.key} is in use by another SuperNode, or was less than a minute ago: end the "
                    "other `kindred site`, or wait"
                )
    except httpx.HTTPError as error:
        yield _connection_fault(link, error)


def clock_fault(date: str, sent: float, received: float, refused: bool = False) -> str | None:
    """Return a line with this machine's clock error, if Flower would refuse it; else None.

    Parameters
    ----------
    date : str
        The date in the server's answer.
    sent, received : float
        Times of the request and of the answer, by this machine's clock, in s.
    refused : bool
        Whether the server has refused a message that was signed now. Then the clock is wrong, even if the date is too
        coarse to show it.
    """
    try:
        earliest = parsedate_to_datetime(date).timestamp()
    except ValueError:  # the date cannot be read
        ahead = unknown = math.inf
    else:
        ahead = (sent + received - DATE_STEP) / 2 - earliest
        unknown = (received - sent + DATE_STEP) / 2
    least, most = -MAX_TIMESTAMP_DIFF_SECONDS, -MIN_TIMESTAMP_DIFF_SECONDS
    if not refused and least - unknown <= ahead <= most + unknown:
        return None
    off = f"about {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}" if math.isfinite(ahead) else "unlike"
    return (
        f"this machine's clock is {off} the server's, allowed: up to {most} s ahead or {-least} s behind; set it, "
        "for example with NTP (timedatectl set-ntp true)"
    )


def _key_status(client: httpx.Client, path: Path) -> Literal["refused", "unknown", "known"] | None:
    """Ask the server about a site's key; None if it answers something else.

    The request is the first one of a SuperNode, with a heartbeat interval that Flower refuses. Flower checks the time
    of the signature and the key before it refuses the interval, and changes nothing.
    """
    key = load_site_key(path)
    question = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=0)
    request = client.build_request(
        "POST", "/v1/fleet/activate-node", content=question.SerializeToString(),
        headers={"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE},
    )  # fmt: skip
    signed = node_auth.NodeAuthHttpInterceptor(key, key.public_key())
    answer = signed.intercept(ProtobufRequestContext("", question, request), lambda each: client.send(each.request))
    if answer.status_code == 401:
        return "refused"
    error = flower_error.FlowerError.from_json(answer.text)
    if error and error.code == flower_error.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        return "unknown"
    return "known" if error and error.code == flower_error.ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL else None


def _connection_fault(link: Link, error: BaseException) -> str:
    """Return a line that says why no answer came, and what to do."""
    reason: BaseException | None = error
    while reason and not isinstance(reason, OSError):
        reason = reason.__context__
    certificate = f"the certificate of {link.address}"
    if isinstance(reason, ssl.SSLCertVerificationError):
        if reason.verify_code in (9, 10):  # OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, _HAS_EXPIRED
            return (
                f"{certificate} is not valid on {datetime.now(UTC):%Y-%m-%d}, the date of this machine's clock "
                f"({reason.verify_message}): run `kindred keys renew` on the server's machine"
            )
        if reason.verify_code in (62, 64):  # X509_V_ERR_HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH
            return (
                f"{certificate} is not for this name ({reason.verify_message}): give --server a name that the "
                "certificate has; or remove server.crt on the server's machine and run `kindred keys DIR --server "
                "NAMES` there"
            )
        return (
            f"{certificate} is not signed by the CA of {link.ca} ({reason.verify_message}): copy the ca.crt of "
            "this server, or check that --server names the right one"
        )
    if isinstance(reason, ssl.SSLError):
        return f"{link.address} does not speak TLS ({reason.reason}): check that `kindred server --keys` listens there"
    if not link.ca and isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError)):
        return f"{link.address} does not answer without TLS ({error}): for a server with --keys give --ca and --key"
    return (
        f"{link.address} cannot be reached ({getattr(reason, 'strerror', None) or error}), and is tried again: check "
        "that `kindred server` runs there, that --server names it, and that the firewall admits this machine"
    )
