"""Addresses, certificates and models of a server, for the sibling distributions that manage one.

Not part of what users import: the versions of the distributions are pinned to each other, and this module may change
with any of them. Importing it brings neither gRPC nor an HTTP library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._asyncio import DirectStreamsClient
from ._core.deadline import Deadline
from ._core.spec import parse_model_config
from ._core.tls import TlsSettings, check_tls, make_ssl_context
from ._core.translate import is_denial
from ._core.url import TritonUrl
from ._route.proxies import NO_GRPC_PROXY, Route, describe_proxy, find_route

if TYPE_CHECKING:
    import grpc

    from ._grpc.http2 import Http2Channel, Http2Error

__all__ = [
    "NO_GRPC_PROXY",
    "Deadline",
    "DirectStreamsClient",
    "Http2Channel",
    "Http2Error",
    "Route",
    "TlsSettings",
    "TritonUrl",
    "check_tls",
    "describe_proxy",
    "find_route",
    "is_denial",
    "make_grpc_credentials",
    "make_ssl_context",
    "parse_model_config",
]


def __getattr__(name: str) -> Any:
    if name in ("Http2Channel", "Http2Error"):  # they need hpack, which is for few
        from ._grpc import http2

        return getattr(http2, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_grpc_credentials(url: TritonUrl, tls: TlsSettings | None) -> grpc.ChannelCredentials | None:
    """Return what a gRPC channel needs for its encryption; ``None`` for an address without."""
    from ._grpc.transport import make_credentials  # it imports gRPC

    return make_credentials(url, tls)
