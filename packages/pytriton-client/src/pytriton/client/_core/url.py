"""The address of a server, parsed from what users write."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote, urlsplit

from ..exceptions import PyTritonClientInvalidUrlError

# Triton has no TLS on its HTTP port: https means a proxy in front of it, whose own port is the usual default.
_DEFAULT_PORTS = {"http": 8000, "https": 443, "grpc": 8001, "grpcs": 8001}
_BALANCING = "load_balancing=round_robin"
_USER = re.compile(r"(?<![^/])[^/?#]*@")
_QUERY = re.compile(r"\?.*", re.DOTALL)
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True)
class TritonUrl:
    """A parsed server address.

    Attributes:
        scheme: ``http``, ``https``, ``grpc`` or ``grpcs``, in lower case.
        hostname: A name or an IP address; an IPv6 address without its brackets.
        port: The port; 8000 for HTTP, 8001 for gRPC and 443 for HTTPS where the address names none.
        is_balanced: Whether calls go in turn to all servers that the name stands for, in place of one of them.
        path: What comes before the paths of the server, of a gateway over HTTP; else empty.
        trust_env: Whether the variables of the environment that name a proxy count.
    """

    scheme: str
    hostname: str
    port: int
    is_balanced: bool = False
    path: str = ""
    trust_env: bool = True

    @classmethod
    def from_url(cls, url: str) -> TritonUrl:
        """Parse ``[scheme://]host[:port]``. Without a scheme it is HTTP.

        Over HTTP a path may follow, behind which a gateway has the server. Over gRPC ``?load_balancing=round_robin``
        may follow.

        Raises:
            PyTritonClientInvalidUrlError: Not a string, another scheme, no host, a port outside 1..65535, a user, a
                fragment, a path over gRPC, or another query.
        """
        if not isinstance(url, str):
            _refuse(url, f"a {type(url).__name__} is no address")
        if not url.isprintable() or " " in url:  # urlsplit() drops line breaks without an error
            _refuse(url, "it has blanks or control characters")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            _refuse(url, str(error), error)
        if "@" in parts.netloc:
            _refuse(url, "a user is not sent; give headers to the calls, or access_token to the client")
        scheme = parts.scheme.lower()
        if scheme not in _DEFAULT_PORTS:
            _refuse(url, f"the scheme {scheme!r} is not known")
        hostname = parts.hostname or ""
        if ":" not in hostname and not _HOST_NAME.fullmatch(hostname):
            _refuse(url, f"{hostname!r} is no host name" if hostname else "the host is missing")
        if parts.netloc.endswith(":"):
            _refuse(url, "the port is missing after the colon")
        if port == 0:
            _refuse(url, "port 0 cannot be connected to")
        is_grpc = scheme.startswith("grpc")
        if parts.fragment:
            _refuse(url, "a fragment has no meaning here")
        if parts.query and not (is_grpc and parts.query == _BALANCING):
            _refuse(url, f"the only query is {_BALANCING}, for a grpc or grpcs address")
        path = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        if path and is_grpc:
            _refuse(url, "gRPC has no path")
        return cls(scheme, hostname, _DEFAULT_PORTS[scheme] if port is None else port, bool(parts.query), path)

    @property
    def protocol(self) -> str:
        """``"http"`` or ``"grpc"``, whether encrypted or not."""
        return "http" if self.scheme in ("http", "https") else "grpc"

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self.scheme in ("https", "grpcs")

    @property
    def is_loopback(self) -> bool:
        """Whether it is an address of this host for sure: a loopback one, or one that stands for all of its own."""
        name = self.hostname.lower().removesuffix(".")
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            try:
                # Resolvers take short forms, too, such as 127.1.
                address = ipaddress.ip_address(socket.inet_aton(name))
            except (OSError, ValueError):
                return name == "localhost"
        # Before Python 3.13 an IPv4 address in the form of IPv6 counts as no loopback address.
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or address.is_unspecified

    @property
    def without_scheme(self) -> str:
        """``host:port``, an IPv6 address in brackets."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{host}:{self.port}"

    @property
    def with_scheme(self) -> str:
        """``scheme://host:port``, an IPv6 address in brackets, with the path or the query."""
        return f"{self.scheme}://{self.without_scheme}{self.path}{f'?{_BALANCING}' if self.is_balanced else ''}"


def _refuse(url: object, reason: str, cause: Exception | None = None) -> NoReturn:
    expected = "[http|https|grpc|grpcs://]host[:port], over HTTP with a /path, an IPv6 address in brackets"
    if isinstance(url, str):
        # The log must not show a password, or a key in a query.
        url = _QUERY.sub("?...", _USER.sub("***@", url))
    raise PyTritonClientInvalidUrlError(
        f"Invalid url {url!r}: {reason}. Expected {expected}, for example grpc://localhost:8001.",
        url=str(url),
        expected=expected,
        received=repr(url),
    ) from cause
