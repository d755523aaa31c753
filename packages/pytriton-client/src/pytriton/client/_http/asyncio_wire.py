"""HTTP/1.1 responses read by generators: each yields the place for the next bytes and is sent how many came.

A synchronous reader waits inside a read. One that is called back when bytes have come cannot, so here the waiting is
left to whoever drives the generators; what they understand is what ``_http_wire`` understands.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from .wire import (
    MOST_HEAD_BYTES,
    MOST_INTERIM,
    NO_BODY,
    Answer,
    HttpWireError,
    can_be_kept,
    check_size,
    enlarge,
    parse_head,
    parse_number,
)

__all__ = ["AnswerReader", "Filling", "Head"]

_SPACE_BYTES = 1 << 16

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
    """Reads the responses of one connection, one after the other.

    Args:
        most_bytes: The largest body that is taken as a whole; one that is read in pieces may have any size.
    """

    def __init__(self, most_bytes: int = DEFAULT_MAX_RESPONSE_BYTES) -> None:
        self._most_bytes = most_bytes
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
        """Return the place for bytes that come, never empty. Tell with ``add`` how many did."""
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
        for _ in range(MOST_INTERIM):
            version, status, headers = parse_head((yield from self._read_until(b"\r\n\r\n")))
            if status >= 200:
                break
        else:
            raise HttpWireError(f"expected a response, received {MOST_INTERIM} interim ones")
        self._left = 0
        self._is_body_read = status in NO_BODY
        may_be_kept = can_be_kept(version, headers)
        if status in NO_BODY:
            return Head(status, headers, _Framing.NONE, 0, may_be_kept)
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return Head(status, headers, _Framing.CHUNKS, 0, may_be_kept)
        if "content-length" in headers:
            self._left = parse_number(headers["content-length"], 10)
            return Head(status, headers, _Framing.LENGTH, self._left, may_be_kept)
        return Head(status, headers, _Framing.TO_END, 0, False)

    def body(self, head: Head) -> Filling[bytearray]:
        """Read the whole body.

        Raises:
            HttpWireError: It ends early.
            ResponseTooLargeError: It is larger than what is taken.
        """
        if head.framing is _Framing.NONE:
            return bytearray()
        if head.framing is _Framing.LENGTH:
            check_size(head.length, self._most_bytes)
            whole = yield from self._read_exactly(head.length)
            self._is_body_read = True
            return whole
        body = bytearray()
        while piece := (yield from self.piece(head)):
            body += piece
            # What is left of a chunk is known before it comes.
            check_size(len(body) + self._left, self._most_bytes)
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
            trailers = 0
            while trailer := (yield from self._read_until(b"\r\n")):
                # Nobody asked for trailers: they are dropped.
                trailers += len(trailer)
                if trailers > MOST_HEAD_BYTES:
                    raise HttpWireError(f"expected at most {MOST_HEAD_BYTES} bytes of trailers, received more")

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
            if self._end - self._start > MOST_HEAD_BYTES:
                raise HttpWireError(f"expected at most {MOST_HEAD_BYTES} bytes of headers, received more")
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
        body = enlarge(self._space[self._start : self._end], size)
        count = self._end - self._start
        self._start = self._end = 0
        while count < size:
            if count == len(body):
                body = enlarge(body, size)
            received = yield memoryview(body)[count:]
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
