"""KServe v2 over HTTP for clients that wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._core.deadline import Deadline
from .._core.requests import InferRequest, InferResponse
from .._core.spec import ModelSpec
from .._core.tls import TlsSettings, make_ssl_context
from .._core.translate import Operation, closed_error
from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES, MOST_ERROR_BYTES
from .._core.url import TritonUrl
from ..exceptions import PyTritonClientError
from . import messages
from .generate import GenerateReader
from .pool import ConnectionPool, HttpStream, PoolClosedError
from .wire import HttpRequest, HttpResponse, HttpWireError

__all__ = ["HttpTransport", "make_tritonclient"]


def make_tritonclient(url: TritonUrl, network_timeout_s: float, tls: TlsSettings | None) -> Any:
    """Return a client of tritonclient itself, for code that wants one."""
    from tritonclient.http import InferenceServerClient  # which brings gevent, and the clients here have no use for it

    return InferenceServerClient(
        url.without_scheme,
        ssl=url.is_encrypted,
        connection_timeout=network_timeout_s,
        network_timeout=network_timeout_s,
        ssl_context_factory=(lambda: make_ssl_context(tls)) if url.is_encrypted else None,
    )


class HttpTransport:
    """The ``Transport`` for HTTP: a pool of connections carries the messages.

    Args:
        url: The server.
        headers: Sent with every request.
        tls: Certificates for an encrypted connection.
        max_bytes: The largest response that is taken.
    """

    def __init__(
        self,
        url: TritonUrl,
        headers: Mapping[str, str],
        tls: TlsSettings | None = None,
        max_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
    ) -> None:
        self._url = url.with_scheme
        self._max_bytes = max_bytes
        context = make_ssl_context(tls) if url.is_encrypted else None
        self._pool = ConnectionPool(url, dict(headers), context, max_bytes)

    def is_server_ready(self, timeout_s: float) -> bool:
        """Ask whether the server is ready."""
        operation = Operation("server readiness request", self._url, timeout_s)
        return messages.read_readiness(self._exchange(messages.SERVER_READY, operation), operation)

    def is_model_ready(self, model_name: str, model_version: str | None, timeout_s: float) -> bool:
        """Ask whether a model is ready; a model that is not known is not ready."""
        operation = Operation("model readiness request", self._url, timeout_s, model_name, model_version)
        question = messages.model_ready_request(model_name, model_version)
        return messages.read_readiness(self._exchange(question, operation), operation)

    def get_model_config(self, model_name: str, model_version: str | None, timeout_s: float) -> Mapping[str, Any]:
        """Return the model configuration."""
        operation = Operation("model configuration request", self._url, timeout_s, model_name, model_version)
        question = messages.model_config_request(model_name, model_version)
        return messages.read_model_config(self._exchange(question, operation), operation)

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        operation = Operation("inference request", self._url, timeout_s, request.model_name, request.model_version)
        response = self._exchange(messages.infer_request(request), operation)
        return messages.read_infer_response(response, operation, request.shared)

    def stream(self, spec: ModelSpec, request: InferRequest) -> HttpResponseStream:
        """Prepare an inference request that any number of responses may answer. The first ``receive`` sends it."""
        question = messages.stream_request(spec, request)

        def send(deadline: Deadline) -> HttpStream:
            return self._pool.stream(question, deadline)

        return HttpResponseStream(send, self._url, request, GenerateReader(spec, request, self._max_bytes))

    def load_model(
        self, model_name: str, config: str | None, files: Mapping[str, bytes] | None, timeout_s: float
    ) -> None:
        """Load a model, or load it anew."""
        operation = Operation("loading of the model", self._url, timeout_s, model_name)
        messages.check_status(self._exchange(messages.load_request(model_name, config, files), operation), operation)

    def unload_model(self, model_name: str, timeout_s: float) -> None:
        """Unload a model."""
        operation = Operation("unloading of the model", self._url, timeout_s, model_name)
        messages.check_status(self._exchange(messages.unload_request(model_name), operation), operation)

    def register_shared_memory(self, name: str, size: int, timeout_s: float) -> None:
        """Have the server map a region of shared memory."""
        operation = Operation("registration of shared memory", self._url, timeout_s)
        messages.check_status(self._exchange(messages.register_shared_memory_request(name, size), operation), operation)

    def unregister_shared_memory(self, name: str, timeout_s: float) -> None:
        """Have the server forget a region of shared memory."""
        operation = Operation("unregistering of shared memory", self._url, timeout_s)
        messages.check_status(self._exchange(messages.unregister_shared_memory_request(name), operation), operation)

    def list_shared_memory(self, timeout_s: float) -> list[str]:
        """Return the names of the regions that the server has mapped."""
        operation = Operation("request for the regions of shared memory", self._url, timeout_s)
        response = self._exchange(messages.list_shared_memory_request(), operation)
        return messages.read_shared_memory_names(response, operation)

    def close(self) -> None:
        """Close the connections; calls and streams in flight end with ``PyTritonClientClosedError``."""
        self._pool.close()

    def _exchange(self, request: HttpRequest, operation: Operation) -> HttpResponse:
        try:
            return self._pool.exchange(request, Deadline(operation.timeout_s))
        except (PoolClosedError, OSError, HttpWireError, MemoryError) as error:
            raise _translate(operation, error) from error


class HttpResponseStream:
    """The responses to one request, a ``ResponseStream``.

    Args:
        send: Sends the request.
        url: The server, for errors.
        request: The request, for errors.
        reader: Understands the body.
    """

    def __init__(
        self, send: Callable[[Deadline], HttpStream], url: str, request: InferRequest, reader: GenerateReader
    ) -> None:
        self._send = send
        self._url = url
        self._request = request
        self._reader = reader
        self._stream: HttpStream | None = None

    def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one."""
        name, version = self._request.model_name, self._request.model_version
        operation = Operation("streaming inference", self._url, timeout_s, name, version)
        deadline = Deadline(timeout_s)
        try:
            if self._stream is None:
                self._stream = self._send(deadline)
                if self._stream.status != 200:
                    body = _read_rest(self._stream, deadline)
                    raise self._reader.error_of(self._stream.status, body, operation)
            while (response := self._reader.next_response(operation)) is None:
                piece = self._stream.read_piece(deadline)
                if not piece:
                    return None
                self._reader.feed(piece)
        except (PoolClosedError, OSError, HttpWireError, MemoryError) as error:
            raise _translate(operation, error) from error
        return response

    def close(self) -> None:
        """Cancel the request if it is not over."""
        if self._stream is not None:
            self._stream.close()


def _read_rest(stream: HttpStream, deadline: Deadline) -> bytes:
    """Read the body of an error, as much of it as is of use."""
    body = bytearray()
    while len(body) < MOST_ERROR_BYTES and (piece := stream.read_piece(deadline)):
        body += piece
    return bytes(body)


def _translate(operation: Operation, error: Exception) -> PyTritonClientError:
    if isinstance(error, PoolClosedError):
        return closed_error(operation.model_name, operation.url)
    return messages.failed_exchange(operation, error)
