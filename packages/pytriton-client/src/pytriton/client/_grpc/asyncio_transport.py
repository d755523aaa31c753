"""KServe v2 over gRPC for asyncio. The only module that uses ``grpc.aio``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from .._core.asyncio_loops import LoopsClosedError, PerLoop
from .._core.requests import InferRequest, InferResponse
from .._core.spec import ModelSpec
from .._core.tls import TlsSettings
from .._core.translate import Operation, closed_error, grpc_error, server_error, timeout_error
from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from .._core.url import TritonUrl
from ..exceptions import PyTritonClientError, PyTritonClientInferenceServerError
from . import calls
from .calls import GrpcCall, check_message, is_not_there, read_infer_response, read_model_config
from .messages import STREAM_METHOD, channel_options, encode_infer_request, make_metadata, service_pb2, service_pb2_grpc
from .transport import LEAVE_S, LONGEST_QUICK_WRITE_BYTES, STREAM_END_S, make_credentials

__all__ = ["AsyncGrpcTransport", "make_tritonclient"]

_Leave = Callable[[Any, "asyncio.Future[Any] | None"], None]


def make_tritonclient(url: TritonUrl, tls: TlsSettings | None) -> Any:
    """Return an asyncio client of tritonclient itself, for code that wants one."""
    from tritonclient.grpc.aio import InferenceServerClient

    return InferenceServerClient(
        url.without_scheme, creds=make_credentials(url, tls), channel_args=channel_options(DEFAULT_MAX_RESPONSE_BYTES)
    )


class AsyncGrpcTransport:
    """The ``AsyncTransport`` for gRPC: one channel for each event loop.

    Args:
        url: The server.
        headers: Sent with every request as metadata.
        tls: Certificates for an encrypted connection.
        most_bytes: The largest response that is taken.

    Raises:
        PyTritonClientValueError: The certificates cannot be read.
    """

    def __init__(
        self,
        url: TritonUrl,
        headers: Mapping[str, str],
        tls: TlsSettings | None,
        most_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
    ) -> None:
        self._url = url.with_scheme
        self._headers = dict(headers)
        credentials = make_credentials(url, tls)
        self._channels = PerLoop(lambda: _Channel(url.without_scheme, credentials, most_bytes), _Channel.close)

    @property
    def has_connections(self) -> bool:
        """Whether a loop that is not closed holds a channel."""
        return self._channels.is_any_open

    async def is_server_ready(self, timeout_s: float) -> bool:
        """Ask whether the server is ready."""
        return await self._is_ready(calls.server_ready(self._url, timeout_s))

    async def is_model_ready(self, model_name: str, model_version: str | None, timeout_s: float) -> bool:
        """Ask whether a model is ready; a model that is not known is not ready."""
        return await self._is_ready(calls.model_ready(self._url, model_name, model_version, timeout_s))

    async def get_model_config(self, model_name: str, model_version: str | None, timeout_s: float) -> Mapping[str, Any]:
        """Return the model configuration."""
        call = calls.model_config(self._url, model_name, model_version, timeout_s)
        return read_model_config(call.operation, await self._call(call))

    async def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        call = calls.infer(self._url, request, timeout_s)
        return read_infer_response(call.operation, await self._call(call, request.call.headers))

    def stream(self, spec: ModelSpec, request: InferRequest) -> AsyncGrpcStream:
        """Prepare an inference request that any number of responses may answer. The first ``receive`` sends it."""
        message = encode_infer_request(request)
        metadata = make_metadata(request.call.headers, self._headers)
        operation = calls.stream_operation(self._url, request)

        async def send() -> tuple[Any, _Leave]:
            channel = await self._channel(operation)
            return channel.open_stream(message, metadata=metadata), channel.leave

        return AsyncGrpcStream(send, operation, self._translate)

    async def load_model(
        self, model_name: str, config: str | None, files: Mapping[str, bytes] | None, timeout_s: float
    ) -> None:
        """Load a model, or load it anew."""
        await self._call(calls.load_model(self._url, model_name, config, files, timeout_s))

    async def unload_model(self, model_name: str, timeout_s: float) -> None:
        """Unload a model."""
        await self._call(calls.unload_model(self._url, model_name, timeout_s))

    def close_soon(self) -> None:
        """Let every loop close its channel, without waiting for that."""
        self._channels.close_soon()

    async def close(self) -> None:
        """Close the channels; calls and streams in flight end with ``PyTritonClientClosedError``."""
        await self._channels.close()

    async def _is_ready(self, call: GrpcCall) -> bool:
        try:
            return bool((await self._call(call)).ready)
        except PyTritonClientInferenceServerError as error:
            if is_not_there(error):
                return False
            raise

    async def _call(self, request: GrpcCall, headers: Mapping[str, str] | None = None) -> Any:
        operation, message = request.operation, request.message
        channel = await self._channel(operation)
        metadata = make_metadata(headers or {}, self._headers)
        try:
            call = getattr(channel.stub, request.method)(message, metadata=metadata, timeout=operation.timeout_s)
            if message.ByteSize() > LONGEST_QUICK_WRITE_BYTES:
                # gRPC does not keep the time limit of a call that is in the midst of a write.
                return check_message(operation, await asyncio.wait_for(call, operation.timeout_s))
            return check_message(operation, await call)
        except asyncio.TimeoutError as error:
            raise timeout_error(operation) from error
        except grpc.RpcError as error:
            raise self._translate(operation, error) from error
        except asyncio.CancelledError as error:
            # A channel that is closed cancels its calls, which looks as if somebody had cancelled the task.
            if self._channels.is_closed and not _is_being_cancelled():
                raise closed_error(operation.model_name, self._url) from error
            raise

    async def _channel(self, operation: Operation) -> _Channel:
        try:
            return await self._channels.get()
        except LoopsClosedError as error:
            raise closed_error(operation.model_name, self._url) from error

    def _translate(self, operation: Operation, error: Any) -> PyTritonClientError:
        if self._channels.is_closed:
            return closed_error(operation.model_name, self._url)
        return grpc_error(operation, getattr(error.code(), "name", "UNKNOWN"), error.details() or "")


class AsyncGrpcStream:
    """The responses to one request, an ``AsyncResponseStream``.

    Args:
        send: Sends the request and returns the call of gRPC, and what sees to a call whose responses nobody wants any
            more.
        operation: What is being done.
        translate: Makes an error of ours of one of gRPC.
    """

    def __init__(
        self,
        send: Callable[[], Awaitable[tuple[Any, _Leave]]],
        operation: Operation,
        translate: Callable[[Operation, Any], PyTritonClientError],
    ) -> None:
        self._send = send
        self._operation = operation
        self._translate = translate
        self._call: Any = None
        self._leave: _Leave
        self._is_over = False

    async def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one."""
        if self._is_over:
            return None
        operation = self._operation.with_timeout(timeout_s)
        if self._call is None:
            self._call, self._leave = await self._send()
        # A task of its own, since gRPC tells that a call was cancelled by cancelling whoever reads from it.
        reading = asyncio.ensure_future(self._call.read())
        try:
            await asyncio.wait({reading}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._is_over = True
            self._leave(self._call, reading)
            raise
        if not reading.done():
            self._is_over = True
            self._call.cancel()
            await asyncio.wait({reading})
            raise timeout_error(operation)
        if reading.cancelled():
            raise closed_error(operation.model_name, operation.url)
        error = reading.exception()
        if isinstance(error, grpc.RpcError):
            self._is_over = True
            raise self._translate(operation, error) from error
        message = reading.result()
        if message is grpc.aio.EOF:
            self._is_over = True
            return None
        if check_message(operation, message).error_message:
            await self._see_off()
            # Without a status: Triton would tell it with triton_grpc_error, but 2.51 crashes when such a stream fails.
            raise server_error(operation, None, message.error_message)
        response = read_infer_response(operation, message.infer_response)
        if response.is_final:
            await self._see_off()
        return response

    async def _see_off(self) -> None:
        """Wait for the end of the call, as ``GrpcStream`` does, and for the same reason."""
        self._is_over = True
        reading = asyncio.ensure_future(self._call.read())
        try:
            await asyncio.wait({reading}, timeout=STREAM_END_S)
        finally:
            if not reading.done():
                self._call.cancel()
        if not reading.done():
            await asyncio.wait({reading})
        if not reading.cancelled():
            reading.exception()  # the caller has the last response: how the call ends is of no interest any more

    def close(self) -> None:
        """Cancel the request if it is not over, and does not end by itself within `LEAVE_S`."""
        if self._call is not None and not self._is_over:
            self._is_over = True
            self._leave(self._call, None)


class _Channel:
    """A channel of one event loop."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None, most_bytes: int) -> None:
        options = channel_options(most_bytes)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # One request and the end of the stream of requests look the same on the wire, and need no task that sends them.
        self.open_stream = self._channel.unary_stream(
            STREAM_METHOD,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

        self._leaving: set[asyncio.Task[None]] = set()

    def leave(self, call: Any, reading: asyncio.Future[Any] | None) -> None:
        """See to a call whose responses nobody wants any more, and to a ``read`` under way. Does not block."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # closed by the garbage collector, when the loop has gone
            call.cancel()
            return
        task = loop.create_task(_read_to_the_end(call, reading))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=STREAM_END_S)
        await self._channel.close()


async def _read_to_the_end(call: Any, first: asyncio.Future[Any] | None) -> None:
    async def read() -> None:
        message = await (call.read() if first is None else first)
        while message is not grpc.aio.EOF:
            message = await call.read()

    # A task of its own, as gRPC cancels whoever reads from a call that it cancels.
    reading = asyncio.ensure_future(read())
    try:
        await asyncio.wait({reading}, timeout=LEAVE_S)
    finally:
        call.cancel()
        await asyncio.wait({reading})
        if not reading.cancelled():
            reading.exception()  # how it ends is of no interest any more


def _is_being_cancelled() -> bool:
    """Return whether somebody has cancelled the running task; before Python 3.11 nobody can tell."""
    task = asyncio.current_task()
    cancelling: Callable[[], int] | None = getattr(task, "cancelling", None)
    return cancelling is not None and cancelling() > 0
