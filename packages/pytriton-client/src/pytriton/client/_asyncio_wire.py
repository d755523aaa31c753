"""HTTP/1.1 responses read by generators: each yields the place for the next bytes and is sent how many came.

A synchronous reader waits inside a read. One that is called back when bytes have come cannot, so here the waiting is
left to whoever drives the generators; what they understand is what ``_http_wire`` understands.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ._http_wire import Answer, HttpWireError, parse_head, parse_number

__all__ = ["AnswerReader", "Filling", "Head"]

_SPACE_BYTES = 1 << 16
_MOST_HEAD_BYTES = 1 << 16
_NO_BODY = (204, 304)

Result = TypeVar("Result")

# Yields a buffer that is not empty, is sent how many bytes of it were filled (0 at the end), returns its result.
Filling = Generator[memoryview, int, Result]


class _Framing(enum.Enum):
    """How the end of a body is told."""

    NONE = "no body"
    LENGTH = "its length is in the head"
    CHUNKS = "in chunks, the last of which is empty"
    TO_END = "it ends with the connection"


@dataclass(frozen=True)
class Head:
    """What comes before the body of a response.

    Attributes:
        status: The status code.
        headers: Names in lower case, and values.
        framing: How the end of the body is told.
        length: The length of the body in bytes where the head tells it, else 0.
        can_be_kept: Whether the connection may carry another request after the body.
    """

    status: int
    headers: Mapping[str, str]
    framing: _Framing
    length: int
    can_be_kept: bool


class AnswerReader:
    """Reads the responses of one connection, one after the other."""

    def __init__(self) -> None:
        self._space = bytearray(_SPACE_BYTES)
        # The bytes that have come and were not looked at yet are self._space[self._start : self._end].
        self._start = 0
        self._end = 0
        # What is left of the body, or of the current chunk of it.
        self._left = 0
        self._is_body_read = True

    @property
    def has_more(self) -> bool:
        """Whether bytes have come that no one has asked for."""
        return self._end > self._start

    @property
    def is_body_read(self) -> bool:
        """Whether nothing of the body of the last response is left to come."""
        return self._is_body_read

    def free(self) -> memoryview:
        """The place for bytes that come, never empty. Tell with ``add`` how many did."""
        if self._end == len(self._space):
            if self._start:
                count = self._end - self._start
                self._space[:count] = self._space[self._start : self._end]
                self._start, self._end = 0, count
            else:
                self._space = self._space + bytes(len(self._space))
        return memoryview(self._space)[self._end :]

    def add(self, count: int) -> None:
        """Take note of bytes that came into ``free()``."""
        self._end += count

    def answer(self) -> Filling[Answer]:
        """Read a whole response.

        Raises:
            HttpWireError: It cannot be understood or ends early.
        """
        head = yield from self.head()
        body = yield from self.body(head)
        return Answer(head.status, head.headers, body, head.can_be_kept and not self.has_more)

    def head(self) -> Filling[Head]:
        """Read what comes before the body; interim responses are skipped.

        Raises:
            HttpWireError: It cannot be understood or ends early.
        """
        while True:
            version, status, headers = parse_head((yield from self._read_until(b"\r\n\r\n")))
            if status >= 200:
                break
        self._left = 0
        self._is_body_read = status in _NO_BODY
        connection = headers.get("connection", "").lower()
        can_be_kept = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)
        if status in _NO_BODY:
            return Head(status, headers, _Framing.NONE, 0, can_be_kept)
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return Head(status, headers, _Framing.CHUNKS, 0, can_be_kept)
        if "content-length" in headers:
            self._left = parse_number(headers["content-length"], 10)
            return Head(status, headers, _Framing.LENGTH, self._left, can_be_kept)
        return Head(status, headers, _Framing.TO_END, 0, False)

    def body(self, head: Head) -> Filling[bytearray]:
        """Read the whole body.

        Raises:
            HttpWireError: It ends early.
        """
        if head.framing is _Framing.NONE:
            return bytearray()
        if head.framing is _Framing.LENGTH:
            whole = yield from self._read_exactly(head.length)
            self._is_body_read = True
            return whole
        body = bytearray()
        while piece := (yield from self.piece(head)):
            body += piece
        return body

    def piece(self, head: Head) -> Filling[bytes]:
        """Read what has come of a body, at least one byte; none at its end.

        Raises:
            HttpWireError: It ends early.
        """
        if head.framing is _Framing.TO_END:
            if not self.has_more:
                yield from self._receive(may_end=True)
            self._is_body_read = not self.has_more
            return self._take(self._end - self._start)
        if head.framing is _Framing.CHUNKS and not self._left:
            yield from self._next_chunk()
        if not self._left:
            self._is_body_read = True
            return b""
        if not self.has_more:
            yield from self._receive()
        piece = self._take(min(self._left, self._end - self._start))
        self._left -= len(piece)
        if head.framing is _Framing.CHUNKS and not self._left and (yield from self._read_until(b"\r\n")):
            raise HttpWireError("expected the end of a chunk of the response, received more bytes")
        return piece

    def _next_chunk(self) -> Filling[None]:
        size = (yield from self._read_until(b"\r\n")).partition(b";")[0].strip()
        self._left = parse_number(size.decode("latin-1"), 16)
        if not self._left:
            while (yield from self._read_until(b"\r\n")):
                pass  # trailers, which nobody asked for

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._space)[self._start : self._start + size])
        self._skip(size)
        return taken

    def _skip(self, size: int) -> None:
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0

    def _read_until(self, end: bytes) -> Filling[bytes]:
        """Return the bytes before ``end``, and drop ``end``."""
        searched = self._start
        while (position := self._space.find(end, searched, self._end)) < 0:
            if self._end - self._start > _MOST_HEAD_BYTES:
                raise HttpWireError(f"expected at most {_MOST_HEAD_BYTES} bytes of headers, received more")
            looked_at = self._end - self._start
            yield from self._receive()
            searched = self._start + max(0, looked_at - len(end) + 1)
        found = self._take(position - self._start)
        self._skip(len(end))
        return found

    def _read_exactly(self, size: int) -> Filling[bytearray]:
        if self._end - self._start >= size:
            body = self._space[self._start : self._start + size]
            self._skip(size)
            return body
        # What is not there yet goes straight to its place.
        body = bytearray(size)
        count = self._end - self._start
        body[:count] = self._space[self._start : self._end]
        self._start = self._end = 0
        view = memoryview(body)
        while count < size:
            received = yield view[count:]
            if not received:
                raise HttpWireError(
                    f"expected a response of {size} bytes, received {count} before the connection ended"
                )
            count += received
        return body

    def _receive(self, *, may_end: bool = False) -> Filling[None]:
        received = yield self.free()
        if not received and not may_end:
            raise HttpWireError("expected a response, but the server closed the connection")
        self.add(received)
