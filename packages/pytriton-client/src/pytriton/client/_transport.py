"""What carries a request to the server and the answer back, and how one is chosen.

The libraries behind the two protocols are heavy (gevent, grpc), so each is imported when the first client of its scheme
is made, and only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ._requests import InferRequest, InferResponse
from ._url import TritonUrl
from .auth import create_auth_headers

__all__ = ["Transport", "make_transport"]


class Transport(Protocol):
    """A connection, or a pool of them, to one server.

    May be used from several threads. Every call ends within its ``timeout_s`` seconds and raises only errors of ours:
    ``PyTritonClientTimeoutError``, ``PyTritonClientConnectionError``, ``PyTritonClientInferenceServerError`` and, after
    ``close``, ``PyTritonClientClosedError``. Every request carries the access token.
    """

    def is_server_ready(self, timeout_s: float) -> bool:
        """Ask whether the server is ready."""
        ...

    def is_model_ready(self, model_name: str, model_version: str | None, timeout_s: float) -> bool:
        """Ask whether a model is ready; a model that is not known is not ready."""
        ...

    def get_model_config(self, model_name: str, model_version: str | None, timeout_s: float) -> Mapping[str, Any]:
        """Return the model configuration in the form of its JSON."""
        ...

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        ...

    def load_model(
        self, model_name: str, config: str | None, files: Mapping[str, bytes] | None, timeout_s: float
    ) -> None:
        """Load a model, or load it anew."""
        ...

    def unload_model(self, model_name: str, timeout_s: float) -> None:
        """Unload a model."""
        ...

    def close(self) -> None:
        """Give back what is held. A second call does nothing."""
        ...


def make_transport(url: TritonUrl, access_token: str | None) -> Transport:
    """Return the transport for an address. Nothing is sent yet.

    Args:
        url: The server.
        access_token: Sent with every request; ``None`` for a server that asks for none.
    """
    headers = create_auth_headers(access_token, url.protocol) if access_token else {}
    if url.protocol == "grpc":
        from ._transport_grpc import GrpcTransport

        return GrpcTransport(url, headers)
    from ._transport_http import HttpTransport

    return HttpTransport(url, headers)
