"""The address of a server, parsed from what users write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import parse_qs, urlsplit

from ..exceptions import PyTritonClientInvalidUrlError

__all__ = ["TritonUrl"]

# Triton has no TLS on its HTTP port: https means a proxy in front of it, whose own port is the usual default.
_DEFAULT_PORTS = {"http": 8000, "https": 443, "grpc": 8001, "grpcs": 8001}
_BALANCING = "load_balancing=round_robin"
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True)
class TritonUrl:
    """A parsed server address.

    Attributes:
        scheme: ``http``, ``https``, ``grpc`` or ``grpcs``, in lower case.
        hostname: A name or an IP address; an IPv6 address without its brackets.
        port: The port; 8000 for HTTP, 8001 for gRPC and 443 for HTTPS where the address names none.
        is_balanced: Whether calls go in turn to all servers that the name stands for, in place of one of them.
    """

    scheme: str
    hostname: str
    port: int
    is_balanced: bool = False

    @classmethod
    def from_url(cls, url: str) -> TritonUrl:
        """Parse ``[scheme://]host[:port]``. Without a scheme it is HTTP. User and path are dropped.

        Of a query, ``load_balancing=round_robin`` has a meaning, over gRPC; the rest is dropped, too.

        Raises:
            PyTritonClientInvalidUrlError: Not a string, another scheme, no host, a port outside 1..65535, or load
                balancing of another kind or over HTTP.
        """
        if not isinstance(url, str):
            _refuse(url, f"a {type(url).__name__} is no address")
        if not url.isprintable() or " " in url:  # urlsplit() would drop line breaks without a word
            _refuse(url, "it has blanks or control characters")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            _refuse(url, str(error), error)
        scheme = parts.scheme.lower()
        if scheme not in _DEFAULT_PORTS:
            _refuse(url, f"the scheme {scheme!r} is not known")
        hostname = parts.hostname or ""
        if ":" not in hostname and not _HOST_NAME.fullmatch(hostname):
            _refuse(url, f"{hostname!r} is no host name" if hostname else "the host is missing")
        if parts.netloc.rpartition("@")[2].endswith(":"):
            _refuse(url, "the port is missing after the colon")
        if port == 0:
            _refuse(url, "port 0 cannot be connected to")
        balancing = parse_qs(parts.query, keep_blank_values=True).get("load_balancing")
        if balancing not in (None, ["round_robin"]) or (balancing and not scheme.startswith("grpc")):
            _refuse(url, f"what can be said of load balancing is {_BALANCING}, for a grpc or grpcs address")
        return cls(scheme, hostname, _DEFAULT_PORTS[scheme] if port is None else port, balancing is not None)

    @property
    def protocol(self) -> str:
        """``"http"`` or ``"grpc"``, whether encrypted or not."""
        return "http" if self.scheme in ("http", "https") else "grpc"

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self.scheme in ("https", "grpcs")

    @property
    def without_scheme(self) -> str:
        """``host:port``, an IPv6 address in brackets."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{host}:{self.port}"

    @property
    def with_scheme(self) -> str:
        """``scheme://host:port``, an IPv6 address in brackets, and the query that has a meaning."""
        return f"{self.scheme}://{self.without_scheme}{f'?{_BALANCING}' if self.is_balanced else ''}"


def _refuse(url: object, reason: str, cause: Exception | None = None) -> NoReturn:
    expected = "[http|https|grpc|grpcs://]host[:port], an IPv6 address in brackets"
    raise PyTritonClientInvalidUrlError(
        f"Invalid url {url!r}: {reason}. Expected {expected}, for example grpc://localhost:8001.",
        url=str(url),
        expected=expected,
        received=repr(url),
    ) from cause
