"""What carries a request of an asyncio client to the server and the answer back, and how one is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ._core.requests import InferRequest, InferResponse
from ._core.spec import ModelSpec
from ._core.tls import TlsSettings
from ._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from ._core.url import TritonUrl
from .auth import create_auth_headers

__all__ = ["AsyncResponseStream", "AsyncTransport", "make_async_transport"]


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

    Every call ends within its ``timeout_s`` seconds and raises only errors of ours: ``PyTritonClientTimeoutError``,
    ``PyTritonClientConnectionError``, ``PyTritonClientInferenceServerError`` and, after ``close``,
    ``PyTritonClientClosedError``. Every request carries the access token. Cancelling a task that waits in a call tells
    the server that nobody waits any more, and leaves nothing half read behind.
    """

    async def is_server_ready(self, timeout_s: float) -> bool:
        """Ask whether the server is ready."""
        ...

    async def is_model_ready(self, model_name: str, model_version: str | None, timeout_s: float) -> bool:
        """Ask whether a model is ready; a model that is not known is not ready."""
        ...

    async def get_model_config(self, model_name: str, model_version: str | None, timeout_s: float) -> Mapping[str, Any]:
        """Return the model configuration in the form of its JSON."""
        ...

    async def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        ...

    def stream(self, spec: ModelSpec, request: InferRequest) -> AsyncResponseStream:
        """Prepare an inference request that any number of responses may answer. The first ``receive`` sends it.

        Raises:
            PyTritonClientValueError: The protocol has no way to send it.
        """
        ...

    async def load_model(
        self, model_name: str, config: str | None, files: Mapping[str, bytes] | None, timeout_s: float
    ) -> None:
        """Load a model, or load it anew."""
        ...

    async def unload_model(self, model_name: str, timeout_s: float) -> None:
        """Unload a model."""
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


def make_async_transport(
    url: TritonUrl,
    access_token: str | None,
    tls: TlsSettings | None,
    most_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
) -> AsyncTransport:
    """Return the transport for an address. Nothing is sent yet.

    Args:
        url: The server.
        access_token: Sent with every request; ``None`` for a server that asks for none.
        tls: Certificates for an encrypted connection.
        most_bytes: The largest response that is taken.

    Raises:
        PyTritonClientValueError: The certificates cannot be read.
    """
    headers = create_auth_headers(access_token, url.protocol) if access_token else {}
    if url.protocol == "grpc":
        from ._grpc.asyncio_transport import AsyncGrpcTransport

        return AsyncGrpcTransport(url, headers, tls, most_bytes)
    from ._http.asyncio_transport import AsyncHttpTransport

    return AsyncHttpTransport(url, headers, tls, most_bytes)
