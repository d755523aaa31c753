"""The responses to one request, read over HTTP/2 without gRPC's library."""

from __future__ import annotations

import asyncio
import contextlib

from .._core.asyncio_loops import LoopsClosedError, PerLoop
from .._core.deadline import Deadline
from .._core.requests import InferResponse
from .._core.translate import Operation, closed_error, grpc_error, timeout_error
from ..exceptions import PyTritonClientError
from .http2 import Http2Call, Http2Channel, Http2Error
from .messages import STREAM_METHOD
from .stream_reader import StreamReader
from .transport import ABANDONED_CALL_S, STREAM_END_TIMEOUT_S

__all__ = ["DirectStream", "Http2Channel"]

# More at once would keep others from their turn.
MOST_TEXTS = 64


class DirectStream:
    """The responses to one request, an ``AsyncResponseStream``."""

    def __init__(
        self, channels: PerLoop[Http2Channel], message: bytes, metadata: list[tuple[str, str]], operation: Operation
    ) -> None:
        self._channels = channels
        self._message = message
        self._metadata = metadata
        self._operation = operation
        self._reader = StreamReader(operation)
        self._channel: Http2Channel
        self._call: Http2Call | None = None
        self._has_ended = False
        self._failure: PyTritonClientError | None = None

    async def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one."""
        messages = await self._receive(timeout_s, 1)
        if not messages:
            return None
        try:
            response = self._reader.read(messages[0], is_followed=self._call is not None and self._call.is_readable)
        except PyTritonClientError:
            self._leave(STREAM_END_TIMEOUT_S)
            raise
        if response.is_final:
            # The call is not reset (see ``GrpcStream``), and nobody waits for its end.
            self._leave(STREAM_END_TIMEOUT_S)
        return response

    async def receive_texts(self, timeout_s: float, name: str) -> list[bytes] | None:
        """Return what an output of strings has in the responses that are there, or ``None`` after the last one."""
        if self._failure is not None:
            raise self._failure
        messages = await self._receive(timeout_s, MOST_TEXTS)
        if not messages:
            return None
        texts: list[bytes] = []
        try:
            for message in messages:
                text = self._reader.read_text(message, name)
                if text is None:  # only the end of the stream
                    self._leave(STREAM_END_TIMEOUT_S)
                    break
                texts.append(text)
        except PyTritonClientError as error:
            self._leave(STREAM_END_TIMEOUT_S)
            if not texts:
                raise
            # Messages that came before the failure are returned first.
            self._failure = error
        return texts

    async def _receive(self, timeout_s: float, most: int) -> list[bytes]:
        """Return the messages that are there, ``most`` of them; none after the last one."""
        if self._has_ended:
            return []
        try:
            if self._call is None:
                return await self._receive_first(timeout_s)
            messages = await self._call.receive_some(timeout_s, most)
        except asyncio.CancelledError:
            self.close()
            raise
        except LoopsClosedError as error:
            raise self._closed_error() from error
        except TimeoutError as error:
            self._has_ended = True
            if self._call is not None:
                self._call.reset()
            raise timeout_error(self._operation.with_timeout(timeout_s)) from error
        except Http2Error as error:
            self._has_ended = True
            if self._channels.is_closed:
                raise self._closed_error() from error
            raise grpc_error(self._operation.with_timeout(timeout_s), error.status, error.text) from error
        self._has_ended = self._has_ended or not messages
        return messages

    def close(self) -> None:
        """Cancel the request if it is not over, and does not end by itself within ``ABANDONED_CALL_S``."""
        with contextlib.suppress(RuntimeError):  # the garbage collector closed the stream after its loop had ended
            self._leave(ABANDONED_CALL_S)

    async def _receive_first(self, timeout_s: float) -> list[bytes]:
        """Send the request, and send it once more if the server says that it has not processed it."""
        deadline = Deadline(timeout_s)
        self._channel = await self._channels.get()
        for may_repeat in (True, False):
            self._call = await self._channel.call(STREAM_METHOD, self._metadata, self._message, deadline)
            try:
                messages = await self._call.receive_some(deadline.remaining_s(), 1)
                break
            except Http2Error as error:
                if not (may_repeat and error.is_untouched):
                    raise
        self._message = b""
        self._has_ended = not messages
        return messages

    def _leave(self, timeout_s: float) -> None:
        if self._call is not None and not self._has_ended:
            self._has_ended = True
            self._channel.leave(self._call, timeout_s)

    def _closed_error(self) -> PyTritonClientError:
        return closed_error(self._operation.model_name, self._operation.url, self._operation.client)
