"""The interfaces of transports, which carry requests to a server, and the choice of one by protocol.

The libraries of gRPC are heavy, so they are imported only when the first client with such an address is made.
"""

from __future__ import annotations

from typing import Any, Protocol

from ._core.requests import InferRequest, InferResponse
from ._core.spec import ModelSpec
from ._core.startup import Ask, Target
from ._core.tls import TlsSettings
from ._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from ._core.url import TritonUrl
from .auth import create_auth_headers


class ResponseStream(Protocol):
    """The responses to one request, read by one thread at a time."""

    def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one, within ``timeout_s``.

        The first call sends the request; nothing can be received after an error.
        """
        ...

    def close(self) -> None:
        """Cancel the request on the server if it is not over, and give back what is held. May be called twice."""
        ...


class Transport(Protocol):
    """A connection, or a pool of them, to one server.

    May be used from several threads. Every call ends within its ``timeout_s`` seconds and raises only these errors:
    ``PyTritonClientTimeoutError``, ``PyTritonClientConnectionError``, ``PyTritonClientInferenceServerError`` and, after
    ``close``, ``PyTritonClientClosedError``. Every request carries the access token.
    """

    def ask(self, step: Ask, target: Target) -> Any:
        """Return the answer to a question: whether something is ready, a model configuration, states of models, ..."""
        ...

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        ...

    def stream(self, spec: ModelSpec, request: InferRequest) -> ResponseStream:
        """Prepare an inference request with any number of responses. The first ``receive`` sends it."""
        ...

    def close(self) -> None:
        """Give back what is held. A second call does nothing."""
        ...


class AsyncResponseStream(Protocol):
    """The responses to one request. Raises as ``AsyncTransport`` does."""

    async def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one."""
        ...

    def close(self) -> None:
        """Cancel the request on the server if it is not over. A second call does nothing."""
        ...


class AsyncTransport(Protocol):
    """Connections to one server, for the tasks of any number of event loops.

    Every call ends within its ``timeout_s`` seconds and raises only ``PyTritonClientTimeoutError``,
    ``PyTritonClientConnectionError``, ``PyTritonClientInferenceServerError`` and, after ``close``,
    ``PyTritonClientClosedError``. Every request carries the access token. Cancelling a task that waits in a call tells
    the server that nobody waits any more, and leaves nothing half read behind.
    """

    async def ask(self, step: Ask, target: Target) -> Any:
        """Return the answer to a question: whether something is ready, a model configuration, states of models, ..."""
        ...

    async def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        ...

    def stream(self, spec: ModelSpec, request: InferRequest) -> AsyncResponseStream:
        """Prepare an inference request with any number of responses. The first ``receive`` sends it."""
        ...

    @property
    def has_connections(self) -> bool:
        """Whether a loop that is not closed holds connections."""
        ...

    def close_soon(self) -> None:
        """Let every loop close what it holds, without waiting for that."""
        ...

    async def close(self) -> None:
        """Give back what is held. A second call does nothing."""
        ...


def make_transport(
    url: TritonUrl,
    access_token: str | None,
    tls: TlsSettings | None = None,
    max_response_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
    client: str = "ModelClient",
) -> Transport:
    """Return the transport for an address. Nothing is sent yet."""
    headers = create_auth_headers(access_token, url.protocol) if access_token else {}
    if url.protocol == "grpc":
        from ._grpc.transport import GrpcTransport

        return GrpcTransport(url, headers, tls, max_response_bytes, client)
    from ._http.transport import HttpTransport

    return HttpTransport(url, headers, tls, max_response_bytes, client)


def make_async_transport(
    url: TritonUrl,
    access_token: str | None,
    tls: TlsSettings | None,
    max_response_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
    client: str = "ModelClient",
    *,
    direct_streams: bool = False,
) -> AsyncTransport:
    """Return the transport of an asyncio client for an address. Nothing is sent yet."""
    headers = create_auth_headers(access_token, url.protocol) if access_token else {}
    if url.protocol == "grpc":
        from ._grpc.asyncio_transport import AsyncGrpcTransport

        return AsyncGrpcTransport(url, headers, tls, max_response_bytes, client, direct_streams=direct_streams)
    from ._http.asyncio_transport import AsyncHttpTransport

    return AsyncHttpTransport(url, headers, tls, max_response_bytes, client)


def make_tritonclient(url: TritonUrl, network_timeout_s: float, tls: TlsSettings | None) -> Any:
    """Return a client of tritonclient for an address; nothing is sent yet.

    ``network_timeout_s`` limits connecting and each read over HTTP; gRPC takes its limit with each call.
    """
    if url.protocol == "grpc":
        from ._grpc import transport as grpc_transport

        return grpc_transport.make_tritonclient(url, tls)
    from ._http import transport as http_transport

    return http_transport.make_tritonclient(url, network_timeout_s, tls)
