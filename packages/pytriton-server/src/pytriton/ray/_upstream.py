"""HTTP/1.1 between a replica and its Triton: what callers ask goes on as it came, and so does what is answered.

All requests of a replica pass here, on the event loop that Ray's own work shares, so it does as little as it can:
httptools finds where an answer ends, and nothing else of it is looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools

Headers = Sequence[tuple[bytes, bytes]]

_CONNECT_S = 10.0
# If the caller reads slowly, at most this much of a stream is read ahead.
_UNREAD_BYTES = 1 << 20


class Answer(asyncio.Protocol):
    """A connection, and the answer that comes on it: one at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._begin(has_body=True)

    def _begin(self, *, has_body: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._has_body = has_body
        self.status = 0  # once `headers_have_come` has returned
        self.headers: list[tuple[bytes, bytes]] = []  # with their names in lower case
        self.is_stream = False  # the length of the body is not known, so it is handed on as it comes
        self._parts: list[bytes] = []
        self._unread = 0
        self._is_complete = self._may_be_kept = False

    # -- what the caller does ----------------------------------------------------------------------------------------

    def send(self, head: bytes, body: Sequence[bytes], *, has_body: bool) -> None:
        """Send a request."""
        self._begin(has_body=has_body)
        if self._transport is not None:
            self._transport.writelines([head, *body])

    async def headers_have_come(self) -> None:
        """Wait for the headers, and for the body if its length is known."""
        while not (self._is_complete or (self.is_stream and self.status)):
            await self._wait()

    async def read(self) -> bytes:
        """Return the bytes of the body that have come; nothing at its end."""
        while not (self._parts or self._is_complete):
            await self._wait()
        came = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self._unread = 0
        if self.is_stream and self.is_open and self._transport is not None:
            self._transport.resume_reading()
        return came

    @property
    def can_be_kept(self) -> bool:
        """Whether the connection can carry another request: the answer is over, and the server does not close it."""
        return self.is_open and self._is_complete and self._may_be_kept

    @property
    def is_open(self) -> bool:
        """Whether the connection is there."""
        return self._error is None and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close the connection; what the server still does for it is cancelled."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # -- what asyncio calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # isinstance() would fail for the transports of uvloop.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Understand the next bytes."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"expected HTTP from Triton: {error}"))
            self.close()
            return
        if self._is_complete or (self.is_stream and self.status):
            self._wake()
        if self.is_stream and self._unread > _UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake the coroutine that waits."""
        self._fail(ConnectionError(f"the connection was closed{f': {exc}' if exc else ''}"))

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    # -- what httptools calls ----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Read the length of the body from the headers."""
        self.status = self._parser.get_status_code()
        self.is_stream = not any(name == b"content-length" for name, _ in self.headers)
        if not self._has_body:
            self.is_stream, self._is_complete = False, True

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body."""
        self._parts.append(data)
        self._unread += len(data)

    def on_message_complete(self) -> None:
        """Learn that it is over, or that only an interim answer is."""
        if self.status < 200:
            self.status, self.headers, self.is_stream = 0, [], False
            return
        self._is_complete = True
        self._may_be_kept = self._parser.should_keep_alive()


class Upstream:
    """The connections to one Triton, kept for the next requests."""

    def __init__(self, url: Callable[[], str]) -> None:
        self._url = url
        self._idle: list[Answer] = []

    async def ask(self, method: str, target: str, headers: Headers, body: Sequence[bytes]) -> Answer:
        """Send a request, and return the answer as soon as `Answer.headers_have_come`; give it back with `release`."""
        size = sum(map(len, body))
        lines = [f"{method} {target} HTTP/1.1\r\nHost: triton\r\n".encode()]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if size or method not in ("GET", "HEAD"):
            lines.append(b"Content-Length: %d\r\n" % size)
        answer = await self._connection()
        try:
            answer.send(b"".join([*lines, b"\r\n"]), body, has_body=method != "HEAD")
            await answer.headers_have_come()
        except BaseException:
            answer.close()
            raise
        return answer

    async def _connection(self) -> Answer:
        while self._idle:
            kept = self._idle.pop()
            if kept.is_open:
                return kept
        at = urlsplit(self._url())
        made = asyncio.get_running_loop().create_connection(Answer, str(at.hostname), at.port or 0)
        _, answer = await asyncio.wait_for(made, _CONNECT_S)
        return answer

    def release(self, answer: Answer) -> None:
        """Keep the connection of a complete answer; otherwise close it."""
        if answer.can_be_kept:
            self._idle.append(answer)
        else:
            answer.close()

    def close(self) -> None:
        """Close the unused connections."""
        while self._idle:
            self._idle.pop().close()
