"""Which proxy the environment names for a server, and how requests over HTTP get there."""

from __future__ import annotations

import base64
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from .._core.untrusted import describe
from .._core.url import TritonUrl
from ..exceptions import PyTritonClientValueError

MAX_TUNNEL_BYTES = 1 << 16
"""The longest answer of a proxy that is read before a tunnel is open."""

NO_GRPC_PROXY = ("grpc.enable_http_proxy", 0)
"""The option of a channel that takes no notice of ``http_proxy`` and the other variables of gRPC."""

_DEFAULT_PORT = 80
# gRPC reads these variables itself; the first one that is set counts.
_GRPC_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_GRPC_EXEMPTIONS = ("no_grpc_proxy", "no_proxy")
_OPENED = re.compile(rb"HTTP/1\.[01] 2[0-9][0-9][ \r]")


@dataclass(frozen=True)
class _Proxy:
    variable: str
    hostname: str
    port: int
    authorization: str | None = field(repr=False)


@dataclass(frozen=True)
class Route:
    """Where connections to a server over HTTP lead first, and what its requests need for that."""

    url: TritonUrl  # the server
    hostname: str  # what to connect to: the server, or a proxy
    port: int
    prefix: str = ""  # what comes before the path of each request
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # what each request carries for the proxy
    # What is sent before the encryption begins; empty if nothing is.
    tunnel: bytes = field(default=b"", repr=False)
    tunnel_headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # the headers in that for the proxy


def find_route(url: TritonUrl) -> Route:
    """Return the way to a server over HTTP: through a proxy, if the environment names one and may be heeded.

    The variables are those of requests and httpx: ``http_proxy`` or ``https_proxy``, else ``all_proxy``, but not for
    what ``no_proxy`` lists; in lower case first, then in upper case. A loopback address has no proxy.
    """
    proxy = _find_http_proxy(url)
    if proxy is None:
        return Route(url, url.hostname, url.port, url.path)
    headers = {} if proxy.authorization is None else {"Proxy-Authorization": proxy.authorization}
    if not url.is_encrypted:
        return Route(url, proxy.hostname, proxy.port, url.with_scheme, headers)
    lines = [f"CONNECT {url.without_scheme} HTTP/1.1", f"Host: {url.without_scheme}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    tunnel = "\r\n".join([*lines, "\r\n"]).encode("latin-1")
    return Route(url, proxy.hostname, proxy.port, url.path, tunnel=tunnel, tunnel_headers=headers)


def check_tunnel(head: bytes) -> None:
    """Check what a proxy says to the request for a tunnel."""
    if not _OPENED.match(head):
        line = str(head.partition(b"\r\n")[0], "latin-1")
        raise OSError(f"the proxy opens no tunnel, it answers {describe(line)}")


def describe_proxy(url: TritonUrl) -> str:
    """Return a sentence for errors about the proxy that comes before a server; empty if there is none."""
    proxy = _find_http_proxy(url) if url.protocol == "http" else _find_grpc_proxy(url)
    if proxy is None:
        return ""
    exempt = "no_grpc_proxy or no_proxy" if url.protocol == "grpc" else "no_proxy"
    return (
        f" The variable {proxy.variable} of the environment sends it through the proxy {proxy.hostname}:{proxy.port}: "
        f"list the host in {exempt}, or give the client trust_env=False, if it should not."
    )


def _find_http_proxy(url: TritonUrl) -> _Proxy | None:
    if url.is_loopback or not url.trust_env:
        return None
    variable, address = _read(f"{url.scheme}_proxy")
    if not address:
        variable, address = _read("all_proxy")
    if not address or _is_exempt(url, _read("no_proxy")[1]):
        return None
    return _parse(variable, address, url)


def _find_grpc_proxy(url: TritonUrl) -> _Proxy | None:
    """Return the proxy that gRPC will use."""
    if url.is_loopback or not url.trust_env:
        return None
    variable = next((name for name in _GRPC_VARIABLES if name in os.environ), "")
    address = os.environ.get(variable, "")
    exempt = next(filter(None, map(os.environ.get, _GRPC_EXEMPTIONS)), "")
    if not address or _is_exempt(url, exempt):
        return None
    try:
        return _parse(variable, address, url)
    except PyTritonClientValueError:
        return None  # gRPC ignores values that it does not understand


def _read(name: str) -> tuple[str, str]:
    """Return the spelling of the variable that is set, and its value."""
    for spelled in (name, name.upper()):
        # In a CGI program a caller can set HTTP_PROXY by a header named Proxy.
        if spelled in os.environ and not (spelled == "HTTP_PROXY" and "REQUEST_METHOD" in os.environ):
            return spelled, os.environ[spelled].strip()
    return name, ""


def _is_exempt(url: TritonUrl, listed: str) -> bool:
    host = url.hostname.lower()
    for entry in filter(None, map(str.strip, listed.lower().split(","))):
        if entry == "*":
            return True
        name = entry.removeprefix("*").lstrip(".")
        if any(it == name or it.endswith(f".{name}") for it in (host, f"{host}:{url.port}", url.without_scheme)):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:
            continue  # the host or the entry is a name
    return False


def _parse(variable: str, address: str, url: TritonUrl) -> _Proxy:
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        hostname, port = parts.hostname, parts.port
    except ValueError:
        parts, hostname, port = urlsplit(""), None, None
    if parts.scheme != "http" or not hostname:
        raise PyTritonClientValueError(
            f"Expected http://host:port in the variable {variable} of the environment, which names the proxy for "
            f"{url.with_scheme}; received the scheme {parts.scheme!r} and the host {hostname!r}. List the host of the "
            "server in no_proxy, or give the client trust_env=False, if it needs none.",
            input_name=variable,
            received=repr(parts.scheme),
        )
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
    authorization = f"Basic {base64.b64encode(user).decode()}" if parts.username else None
    return _Proxy(variable, hostname, port or _DEFAULT_PORT, authorization)
