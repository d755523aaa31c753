"""KServe v2 over gRPC for asyncio clients. The only module that uses ``grpc.aio``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from .._core.asyncio_loops import LoopsClosedError, PerLoop
from .._core.requests import InferRequest, InferResponse
from .._core.spec import ModelSpec
from .._core.startup import Ask, Target
from .._core.tls import TlsSettings, make_ssl_context
from .._core.translate import Operation, closed_error, connection_error, grpc_error, server_error, timeout_error
from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from .._core.url import TritonUrl
from .._route.proxies import describe_proxy
from ..exceptions import PyTritonClientError, PyTritonClientInferenceServerError
from . import calls
from .calls import GrpcCall, check_message, read_infer_response
from .forked import check_fork, watch_forks
from .messages import (
    INFER_METHOD,
    STREAM_METHOD,
    channel_options,
    encode_infer_request,
    make_metadata,
    service_pb2,
    service_pb2_grpc,
)
from .transport import ABANDONED_CALL_S, MAX_BUFFERED_WRITE_BYTES, STREAM_END_TIMEOUT_S, make_credentials

if TYPE_CHECKING:
    from .direct_stream import DirectStream, Http2Channel

_Abandon = Callable[[Any, "asyncio.Future[Any] | None"], None]


def make_tritonclient(url: TritonUrl, tls: TlsSettings | None) -> Any:
    """Return an asyncio client of tritonclient itself, for code that wants one."""
    from tritonclient.grpc.aio import InferenceServerClient

    return InferenceServerClient(
        url.without_scheme,
        creds=make_credentials(url, tls),
        channel_args=channel_options(url, DEFAULT_MAX_RESPONSE_BYTES),
    )


class AsyncGrpcTransport:
    """The ``AsyncTransport`` for gRPC: one channel for each event loop.

    With ``direct_streams`` it reads streams without gRPC's library, which costs less and needs hpack, unless a proxy,
    several servers in turn or gRPC's own authorities are involved.
    """

    def __init__(
        self,
        url: TritonUrl,
        headers: Mapping[str, str],
        tls: TlsSettings | None,
        max_response_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
        client: str = "ModelClient",
        *,
        direct_streams: bool = False,
    ) -> None:
        self._url = url.with_scheme
        self._client = client
        self._note = describe_proxy(url)
        self._headers = dict(headers)
        credentials = make_credentials(url, tls)
        self._channels = PerLoop(lambda: _Channel(url, credentials, max_response_bytes), _Channel.close)
        self._direct: PerLoop[Http2Channel] | None = None
        trusts_own = not url.is_encrypted or (tls is not None and tls.ca_file is not None)
        if direct_streams and trusts_own and not self._note and not url.is_balanced:
            from .direct_stream import Http2Channel

            context = None
            if url.is_encrypted:
                context = make_ssl_context(tls)
                context.set_alpn_protocols(["h2"])
            self._direct = PerLoop(lambda: Http2Channel(url, context, max_response_bytes), Http2Channel.close)

    @property
    def has_connections(self) -> bool:
        """Whether a loop that is not closed holds a channel."""
        return self._channels.is_any_open or (self._direct is not None and self._direct.is_any_open)

    async def ask(self, step: Ask, target: Target) -> Any:
        """Return the answer to a question."""
        call = calls.ask(step, target)
        try:
            message = await self._call(call)
        except PyTritonClientInferenceServerError as error:
            if calls.is_not_ready(step, error):
                return False
            raise
        return calls.read_answer(step, call.operation, message)

    async def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        call = calls.infer(self._url, request, timeout_s)
        message = await self._call(call, request.call.headers)
        return read_infer_response(call.operation, message, request.shared)

    def stream(self, spec: ModelSpec, request: InferRequest) -> AsyncGrpcStream | DirectStream:
        """Prepare an inference request that any number of responses may answer. The first ``receive`` sends it."""
        message = encode_infer_request(request)
        metadata = make_metadata(self._headers, request.call.headers)
        operation = replace(calls.stream_operation(self._url, request), client=self._client)
        if self._direct is not None:
            from .direct_stream import DirectStream

            return DirectStream(self._direct, message, metadata, operation)

        async def send() -> tuple[Any, _Abandon]:
            channel = await self._channel(operation)
            return channel.open_stream(message, metadata=metadata), channel.abandon

        return AsyncGrpcStream(send, operation, self._translate)

    def close_soon(self) -> None:
        """Let every loop close its channel, without waiting for that."""
        self._channels.close_soon()
        if self._direct is not None:
            self._direct.close_soon()

    async def close(self) -> None:
        """Close the channels; calls and streams in flight end with ``PyTritonClientClosedError``."""
        if self._direct is not None:
            await self._direct.close()
        await self._channels.close()

    async def _call(self, request: GrpcCall, headers: Mapping[str, str] | None = None) -> Any:
        operation, message = request.operation, request.message
        channel = await self._channel(operation)
        metadata = make_metadata(self._headers, headers or {})
        call = getattr(channel.stub, request.method)(message, metadata=metadata, timeout=operation.timeout_s)
        # gRPC does not end a call during a write, whatever its timeout.
        is_large = request.size > MAX_BUFFERED_WRITE_BYTES
        if not await _has_ended(call, operation.timeout_s if is_large else None):
            raise timeout_error(replace(operation, note=self._note))
        try:
            return check_message(operation, await call)
        except grpc.RpcError as error:
            raise self._translate(operation, error) from error
        except asyncio.CancelledError as error:
            if self._channels.is_closed:  # closing the transport has cancelled the call
                raise closed_error(operation.model_name, self._url, self._client) from error
            raise

    async def _channel(self, operation: Operation) -> _Channel:
        check_fork(self._url)
        watch_forks()
        try:
            return await self._channels.get()
        except LoopsClosedError as error:
            raise closed_error(operation.model_name, self._url, self._client) from error
        except RuntimeError as error:  # the system has no thread left
            raise connection_error(operation, str(error)) from error

    def _translate(self, operation: Operation, error: Any) -> PyTritonClientError:
        if self._channels.is_closed:
            return closed_error(operation.model_name, self._url, self._client)
        operation = replace(operation, note=self._note, client=self._client)
        return grpc_error(operation, getattr(error.code(), "name", "UNKNOWN"), error.details() or "")


class AsyncGrpcStream:
    """The responses to one request, an ``AsyncResponseStream``."""

    def __init__(
        self,
        send: Callable[[], Awaitable[tuple[Any, _Abandon]]],
        operation: Operation,
        translate: Callable[[Operation, Any], PyTritonClientError],
    ) -> None:
        self._send = send
        self._operation = operation
        self._translate = translate
        self._call: Any = None
        self._abandon: _Abandon
        self._has_ended = False

    async def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one."""
        if self._has_ended:
            return None
        operation = self._operation.with_timeout(timeout_s)
        if self._call is None:
            self._call, self._abandon = await self._send()
        # A task of its own: if a call is cancelled, gRPC cancels the task that reads from it.
        reading = asyncio.ensure_future(self._call.read())
        try:
            await asyncio.wait({reading}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._has_ended = True
            self._abandon(self._call, reading)
            raise
        if not reading.done():
            self._has_ended = True
            self._call.cancel()
            await asyncio.wait({reading})
            raise timeout_error(operation)
        if reading.cancelled():
            raise closed_error(operation.model_name, operation.url, operation.client)
        error = reading.exception()
        if isinstance(error, grpc.RpcError):
            self._has_ended = True
            raise self._translate(operation, error) from error
        message = reading.result()
        if message is grpc.aio.EOF:
            self._has_ended = True
            return None
        if check_message(operation, message).error_message:
            await self._await_end()
            # No status is known: Triton would send it with triton_grpc_error, but 2.51 crashes when such a stream
            # fails.
            raise server_error(operation, None, message.error_message)
        response = read_infer_response(operation, message.infer_response)
        if response.is_final:
            await self._await_end()
        return response

    async def _await_end(self) -> None:
        """Wait for the end of the call, as ``GrpcStream`` does, and for the same reason."""
        self._has_ended = True
        reading = asyncio.ensure_future(self._call.read())
        try:
            await asyncio.wait({reading}, timeout=STREAM_END_TIMEOUT_S)
        finally:
            if not reading.done():
                self._call.cancel()
        if not reading.done():
            await asyncio.wait({reading})
        if not reading.cancelled():
            # asyncio would log an error that nobody has retrieved; the caller has the last response
            reading.exception()

    def close(self) -> None:
        """Cancel the request if it is not over, and does not end by itself within ``ABANDONED_CALL_S``."""
        if self._call is not None and not self._has_ended:
            self._has_ended = True
            self._abandon(self._call, None)


class _Channel:
    """A channel of one event loop."""

    def __init__(self, url: TritonUrl, credentials: grpc.ChannelCredentials | None, max_response_bytes: int) -> None:
        # grpc.aio starts a thread with its first channel; where it cannot, it ends the process.
        threading.Thread(target=int, name="pytriton-client-probe", daemon=True).start()
        options = channel_options(url, max_response_bytes)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(url.without_scheme, options)
        else:
            self._channel = grpc.aio.secure_channel(url.without_scheme, credentials, options)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.stub.ModelInfer = self._channel.unary_unary(INFER_METHOD)  # bytes in and out
        # The method takes a stream of requests. A unary call sends the same bytes for one request, without a task.
        self.open_stream = self._channel.unary_stream(
            STREAM_METHOD,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

        self._abandoned: set[asyncio.Task[None]] = set()

    def abandon(self, call: Any, reading: asyncio.Future[Any] | None) -> None:
        """Take over a call whose responses nobody wants, with a ``read`` under way. Does not block."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the garbage collector closed the stream after its loop had ended
            call.cancel()
            return
        task = loop.create_task(_drain(call, reading))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def close(self) -> None:
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=STREAM_END_TIMEOUT_S)
        await self._channel.close()


async def _drain(call: Any, first: asyncio.Future[Any] | None) -> None:
    async def read() -> None:
        message = await (call.read() if first is None else first)
        while message is not grpc.aio.EOF:
            message = await call.read()

    # A task of its own: when a call is cancelled, gRPC cancels the task that reads from it.
    reading = asyncio.ensure_future(read())
    try:
        await asyncio.wait({reading}, timeout=ABANDONED_CALL_S)
    finally:
        call.cancel()
        await asyncio.wait({reading})
        if not reading.cancelled():
            reading.exception()  # asyncio would log an error that nobody has retrieved


async def _has_ended(call: Any, timeout_s: float | None) -> bool:
    """Wait for the end of a unary call; cancel it if it takes too long or the task is cancelled.

    If a task awaits the call itself, gRPC replaces its ``CancelledError`` by one without the message that anyio needs.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end(_: Any = None) -> None:
        if not ended.done():
            ended.set_result(None)

    call.add_done_callback(end)
    timer = None if timeout_s is None else loop.call_later(timeout_s, end)
    try:
        await ended
    finally:
        if timer is not None:
            timer.cancel()
        has_ended: bool = call.done()
        if not has_ended:
            call.cancel()
    return has_ended
