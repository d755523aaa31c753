"""KServe v2 over HTTP for asyncio, through connections of our own.

One exchange over an event loop's own protocols costs less than half of what it costs through aiohttp, which
``tritonclient.http.aio`` would bring; see ``benchmarks/README.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .._core.asyncio_loops import LoopsClosedError
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
from .asyncio_pool import AsyncConnectionPool, AsyncHttpStream
from .generate import GenerateReader
from .wire import HttpRequest, HttpResponse, HttpWireError


def make_tritonclient(url: TritonUrl, network_timeout_s: float, tls: TlsSettings | None) -> Any:
    """Return an asyncio client of tritonclient itself, for code that wants one."""
    from tritonclient.http.aio import InferenceServerClient

    return InferenceServerClient(
        url.without_scheme + url.path,
        conn_timeout=network_timeout_s,
        ssl=url.is_encrypted,
        ssl_context=make_ssl_context(tls) if url.is_encrypted else None,
    )


class AsyncHttpTransport:
    """The ``AsyncTransport`` for HTTP."""

    def __init__(
        self,
        url: TritonUrl,
        headers: Mapping[str, str],
        tls: TlsSettings | None,
        max_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
        client: str = "ModelClient",
    ) -> None:
        self._url = url.with_scheme
        self._client = client
        self._note = describe_proxy(url)
        self._max_bytes = max_bytes
        context = make_ssl_context(tls) if url.is_encrypted else None
        self._pool = AsyncConnectionPool(url, dict(headers), context, max_bytes)

    async def ask(self, step: Ask, target: Target) -> Any:
        """Return the answer to a question."""
        operation = replace(step.operation(target), note=self._note, client=self._client)
        plan = messages.ask(step, operation)
        request = next(plan)
        try:
            while True:
                request = plan.send(await self._exchange(request, operation))
        except StopIteration as end:
            return end.value

    async def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        operation = self._operation("inference request", timeout_s, request)
        response = await self._exchange(messages.infer_request(request), operation)
        return messages.read_infer_response(response, operation, request.shared)

    def stream(self, spec: ModelSpec, request: InferRequest) -> AsyncHttpResponseStream:
        """Prepare an inference request that any number of responses may answer. The first ``receive`` sends it."""
        operation = self._operation("streaming inference", 0, request)
        stream = self._pool.stream(messages.stream_request(spec, request))
        reader = GenerateReader(spec, request, self._max_bytes)
        return AsyncHttpResponseStream(stream, operation, reader, self._translate)

    @property
    def has_connections(self) -> bool:
        """Whether a loop that is not closed holds connections."""
        return self._pool.has_connections

    def close_soon(self) -> None:
        """Let every loop close its connections, without waiting for that."""
        self._pool.close_soon()

    async def close(self) -> None:
        """Close the connections; calls in flight end with ``PyTritonClientClosedError``."""
        await self._pool.close()

    def _operation(self, doing: str, timeout_s: float, request: InferRequest) -> Operation:
        name, version = request.model_name, request.model_version
        return Operation(doing, self._url, timeout_s, name, version, self._note, self._client)

    async def _exchange(self, request: HttpRequest, operation: Operation) -> HttpResponse:
        try:
            return await self._pool.exchange(request, Deadline(operation.timeout_s))
        except (LoopsClosedError, OSError, HttpWireError, MemoryError) as error:
            raise self._translate(operation, error) from error

    def _translate(self, operation: Operation, error: Exception) -> PyTritonClientError:
        if self._pool.is_closed:
            return closed_error(operation.model_name, self._url, self._client)
        return messages.failed_exchange(operation, error)


class AsyncHttpResponseStream:
    """The responses to one request, an ``AsyncResponseStream``."""

    def __init__(
        self,
        stream: AsyncHttpStream,
        operation: Operation,
        reader: GenerateReader,
        translate: Callable[[Operation, Exception], PyTritonClientError],
    ) -> None:
        self._stream = stream
        self._operation = operation
        self._reader = reader
        self._translate = translate
        self._has_begun = False

    async def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one."""
        operation = self._operation.with_timeout(timeout_s)
        deadline = Deadline(timeout_s)
        try:
            if not self._has_begun:
                self._has_begun = True
                status = await self._stream.read_head(deadline)
                if status != 200:
                    raise self._reader.error_of(status, await self._read_rest(deadline), operation)
            while (response := self._reader.next_response(operation)) is None:
                piece = await self._stream.read_piece(deadline)
                if not piece:
                    return None
                self._reader.feed(piece)
        except (LoopsClosedError, OSError, HttpWireError, MemoryError) as error:
            raise self._translate(operation, error) from error
        return response

    def close(self) -> None:
        """Cancel the request if it is not over."""
        self._stream.close()

    async def _read_rest(self, deadline: Deadline) -> bytes:
        """Read the useful part of the body of an error."""
        body = bytearray()
        while len(body) < MOST_ERROR_BYTES and (piece := await self._stream.read_piece(deadline)):
            body += piece
        return bytes(body)
