"""Calls to a server by its address, as users write it."""

from pytriton.client.management import (
    TlsSettings,
    TritonUrl,
    describe_proxy,
    find_route,
    make_grpc_credentials,
    make_ssl_context,
)
from pytriton.server.control.http import Control, HttpControl
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.security import TRITON_ACCESS_HEADER
from pytriton.server.tritonserver.ports import Endpoint


def connect(url: TritonUrl, access_token: str | None, tls: TlsSettings | None) -> Control:
    """Return the calls to a server that somebody else started. Nothing is sent yet."""
    headers = {TRITON_ACCESS_HEADER: access_token} if access_token else {}
    endpoint = Endpoint(setting="url", address=url.hostname, port=url.port, picked=False)
    if url.protocol == "http":
        return HttpControl(endpoint, headers, make_ssl_context(tls) if url.is_encrypted else None, find_route(url))
    # Imported late, because the import takes longer than everything else here.
    from pytriton.server.control.grpc import GrpcControl

    return GrpcControl(
        endpoint,
        headers,
        TritonConfig(),
        credentials=make_grpc_credentials(url, tls),
        may_use_proxy=bool(describe_proxy(url)),
    )
