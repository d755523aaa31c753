"""KServe v2 over HTTP for clients that wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .._core.deadline import Deadline
from .._core.requests import InferRequest, InferResponse
from .._core.spec import ModelSpec
from .._core.startup import Ask, Target
from .._core.tls import TlsSettings, make_ssl_context
from .._core.translate import Operation, closed_error
from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES, MOST_ERROR_BYTES
from .._core.url import TritonUrl
from .._route.proxies import describe_proxy
from ..exceptions import PyTritonClientError
from . import messages
from .generate import GenerateReader
from .pool import ConnectionPool, HttpStream, PoolClosedError
from .wire import HttpRequest, HttpResponse, HttpWireError


def make_tritonclient(url: TritonUrl, network_timeout_s: float, tls: TlsSettings | None) -> Any:
    """Return a client of tritonclient itself, for code that wants one."""
    from tritonclient.http import InferenceServerClient  # it imports gevent, which these clients do not need

    return InferenceServerClient(
        url.without_scheme + url.path,
        ssl=url.is_encrypted,
        connection_timeout=network_timeout_s,
        network_timeout=network_timeout_s,
        ssl_context_factory=(lambda: make_ssl_context(tls)) if url.is_encrypted else None,
    )


class HttpTransport:
    """The ``Transport`` for HTTP: a pool of connections carries the messages."""

    def __init__(
        self,
        url: TritonUrl,
        headers: Mapping[str, str],
        tls: TlsSettings | None = None,
        max_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
        client: str = "ModelClient",
    ) -> None:
        self._url = url.with_scheme
        self._client = client
        self._note = describe_proxy(url)
        self._max_bytes = max_bytes
        context = make_ssl_context(tls) if url.is_encrypted else None
        self._pool = ConnectionPool(url, dict(headers), context, max_bytes)

    def ask(self, step: Ask, target: Target) -> Any:
        """Return the answer to a question."""
        operation = replace(step.operation(target), note=self._note, client=self._client)
        plan = messages.ask(step, operation)
        request = next(plan)
        try:
            while True:
                request = plan.send(self._exchange(request, operation))
        except StopIteration as end:
            return end.value

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        operation = self._operation("inference request", timeout_s, request)
        response = self._exchange(messages.infer_request(request), operation)
        return messages.read_infer_response(response, operation, request.shared)

    def stream(self, spec: ModelSpec, request: InferRequest) -> HttpResponseStream:
        """Prepare an inference request that any number of responses may answer. The first ``receive`` sends it."""
        question = messages.stream_request(spec, request)

        def send(deadline: Deadline) -> HttpStream:
            return self._pool.stream(question, deadline)

        operation = self._operation("streaming inference", 0, request)
        return HttpResponseStream(send, operation, GenerateReader(spec, request, self._max_bytes))

    def close(self) -> None:
        """Close the connections; calls and streams in flight end with ``PyTritonClientClosedError``."""
        self._pool.close()

    def _operation(self, doing: str, timeout_s: float, request: InferRequest) -> Operation:
        name, version = request.model_name, request.model_version
        return Operation(doing, self._url, timeout_s, name, version, self._note, self._client)

    def _exchange(self, request: HttpRequest, operation: Operation) -> HttpResponse:
        try:
            return self._pool.exchange(request, Deadline(operation.timeout_s))
        except (PoolClosedError, OSError, HttpWireError, MemoryError) as error:
            raise _translate(operation, error) from error


class HttpResponseStream:
    """The responses to one request, a ``ResponseStream``."""

    def __init__(self, send: Callable[[Deadline], HttpStream], operation: Operation, reader: GenerateReader) -> None:
        self._send = send
        self._operation = operation
        self._reader = reader
        self._stream: HttpStream | None = None

    def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one."""
        operation = self._operation.with_timeout(timeout_s)
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
    """Read the useful part of the body of an error."""
    body = bytearray()
    while len(body) < MOST_ERROR_BYTES and (piece := stream.read_piece(deadline)):
        body += piece
    return bytes(body)


def _translate(operation: Operation, error: Exception) -> PyTritonClientError:
    if isinstance(error, PoolClosedError):
        return closed_error(operation.model_name, operation.url, operation.client)
    return messages.failed_exchange(operation, error)
