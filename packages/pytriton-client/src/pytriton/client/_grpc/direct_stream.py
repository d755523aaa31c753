"""The responses to one request, read over HTTP/2 without gRPC's library."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from .._core.asyncio_loops import LoopsClosedError, PerLoop
from .._core.requests import InferResponse
from .._core.translate import Operation, closed_error, grpc_error, server_error, timeout_error
from ..exceptions import PyTritonClientError
from .calls import check_message, read_infer_response
from .http2 import Http2Call, Http2Channel, Http2Error
from .messages import STREAM_METHOD, DecodeError, service_pb2
from .transport import ABANDONED_CALL_S, STREAM_END_TIMEOUT_S

__all__ = ["DirectStream", "Http2Channel"]


class DirectStream:
    """The responses to one request, an ``AsyncResponseStream``.

    Args:
        channels: Where it is sent.
        message: The request.
        metadata: Its headers.
        operation: What is being done.
    """

    def __init__(
        self, channels: PerLoop[Http2Channel], message: bytes, metadata: list[tuple[str, str]], operation: Operation
    ) -> None:
        self._channels = channels
        self._message = message
        self._metadata = metadata
        self._operation = operation
        self._call: Http2Call | None = None
        self._has_ended = False

    async def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one."""
        if self._has_ended:
            return None
        try:
            call = self._call
            data = await self._receive_first(timeout_s) if call is None else await call.receive(timeout_s)
        except asyncio.CancelledError:
            self.close()
            raise
        except LoopsClosedError as error:
            raise self._closed_error() from error
        except TimeoutError as error:
            self._end()
            raise timeout_error(self._operation.with_timeout(timeout_s)) from error
        except Http2Error as error:
            self._has_ended = True
            if self._channels.is_closed:
                raise self._closed_error() from error
            raise grpc_error(self._operation.with_timeout(timeout_s), error.status, error.text) from error
        if data is None:
            self._has_ended = True
            return None
        operation = self._operation
        try:
            message = service_pb2.ModelStreamInferResponse.FromString(data)
        except DecodeError:
            message = None
        if check_message(operation, message).error_message:
            await self._await_end()
            raise server_error(operation, None, message.error_message)
        response = read_infer_response(operation, message.infer_response)
        if response.is_final:
            await self._await_end()
        is_followed = self._call is not None and self._call.is_readable
        return replace(response, is_followed=True) if is_followed else response

    async def _receive_first(self, timeout_s: float) -> bytes | None:
        """Send the request, once more where the server says that it has done nothing for it."""
        channel = await self._channels.get()
        for may_repeat in (True, False):
            self._call = await channel.call(STREAM_METHOD, self._metadata, self._message, timeout_s)
            try:
                data = await self._call.receive(timeout_s)
                break
            except Http2Error as error:
                if not (may_repeat and error.is_untouched):
                    raise
        self._message = b""
        return data

    def close(self) -> None:
        """Cancel the request if it is not over, and does not end by itself within ``ABANDONED_CALL_S``."""
        if self._call is not None and not self._has_ended:
            self._has_ended = True
            with contextlib.suppress(RuntimeError):  # closed by the garbage collector, when the loop has gone
                asyncio.get_running_loop().call_later(ABANDONED_CALL_S, self._call.reset)

    async def _await_end(self) -> None:
        """Wait for the end of the call, as ``GrpcStream`` does, and for the same reason."""
        self._has_ended = True
        assert self._call is not None
        try:
            with contextlib.suppress(Http2Error, TimeoutError):  # the caller has the last response
                await self._call.receive(STREAM_END_TIMEOUT_S)
        finally:
            self._call.reset()

    def _end(self) -> None:
        self._has_ended = True
        if self._call is not None:
            self._call.reset()

    def _closed_error(self) -> PyTritonClientError:
        return closed_error(self._operation.model_name, self._operation.url, self._operation.client)
