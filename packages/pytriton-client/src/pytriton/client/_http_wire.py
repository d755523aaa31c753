"""HTTP/1.1 responses, as much of them as an inference server and the proxies before it send.

``http.client`` reads headers with the email package, which costs a third of a whole inference call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Answer", "HttpWireError", "Source", "StreamedAnswer", "parse_head", "parse_number", "read_answer"]

_MOST_HEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16
_NO_BODY = (204, 304)


class HttpWireError(Exception):
    """The other side does not speak HTTP/1.1, or stopped in the middle of a response."""


class Source(Protocol):
    """Where the bytes come from; a socket is one."""

    def recv(self, most_bytes: int, /) -> bytes:
        """Return some bytes, or none at the end."""
        ...

    def recv_into(self, buffer: memoryview, /) -> int:
        """Fill some of the buffer and return how much; 0 at the end."""
        ...


@dataclass(frozen=True)
class Answer:
    """An HTTP response.

    Attributes:
        status: The status code.
        headers: Names in lower case, and values.
        body: The whole body.
        can_be_kept: Whether the connection may carry another request.
    """

    status: int
    headers: Mapping[str, str]
    body: bytearray
    can_be_kept: bool


def read_answer(source: Source) -> Answer:
    """Read one response to its end; interim responses before it are skipped.

    Raises:
        HttpWireError: The response cannot be understood or ends early.
    """
    reader = _Reader(source)
    version, status, headers = _read_head(reader)
    can_be_kept = _can_be_kept(version, headers)
    if status in _NO_BODY:
        body = bytearray()
    elif "chunked" in headers.get("transfer-encoding", "").lower():
        body = _read_chunks(reader)
    elif "content-length" in headers:
        body = reader.read_exactly(parse_number(headers["content-length"], 10))
    else:
        body, can_be_kept = reader.read_to_end(), False
    return Answer(status, headers, body, can_be_kept and not reader.has_more)


class StreamedAnswer:
    """An HTTP response whose body is read piece by piece, as it comes.

    Args:
        source: Where the bytes come from.

    Attributes:
        status: The status code.
        headers: Names in lower case, and values.
        can_be_kept: Whether the connection may carry another request; known at the end of the body.

    Raises:
        HttpWireError: The response cannot be understood or ends early.
    """

    def __init__(self, source: Source) -> None:
        self._reader = _Reader(source)
        version, self.status, self.headers = _read_head(self._reader)
        self.can_be_kept = False
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = None if self._is_chunked else self.headers.get("content-length")
        if self.status in _NO_BODY:
            self._is_chunked, length = False, "0"
        self._length = None if length is None else parse_number(length, 10)
        has_end = self._is_chunked or self._length is not None
        self._may_be_kept = has_end and _can_be_kept(version, self.headers)
        self._is_over = False

    def read_piece(self) -> bytes:
        """Wait for the next piece of the body and return it; ``b""`` after the last one.

        Raises:
            HttpWireError: The body ends early, or is malformed.
        """
        if self._is_over:
            return b""
        if self._is_chunked:
            piece = _read_chunk(self._reader)
        elif self._length is not None:
            piece, self._length = self._reader.read_exactly(self._length), 0
        else:
            piece = self._reader.read_some()
        if not piece:
            self._is_over = True
            self.can_be_kept = self._may_be_kept and not self._reader.has_more
        return bytes(piece)


def _read_head(reader: _Reader) -> tuple[str, int, dict[str, str]]:
    while True:
        version, status, headers = parse_head(reader.read_until(b"\r\n\r\n"))
        if status >= 200:
            return version, status, headers


def _can_be_kept(version: str, headers: Mapping[str, str]) -> bool:
    connection = headers.get("connection", "").lower()
    return "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)


def parse_head(head: bytes) -> tuple[str, int, dict[str, str]]:
    """Return the version, the status code and the headers, with their names in lower case.

    Args:
        head: All before the empty line.

    Raises:
        HttpWireError: It is no head of an HTTP/1 response.
    """
    status_line, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    if not version.startswith("HTTP/1."):
        raise HttpWireError(f"expected an HTTP/1.1 status line, received {status_line[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return version, parse_number(rest[:3], 10), headers


def parse_number(text: str, base: int) -> int:
    """Return a number without a sign.

    Raises:
        HttpWireError: The text is something else.
    """
    # int() alone would take signs, underscores and blanks.
    if not text.isalnum() or not text.isascii():
        raise HttpWireError(f"expected a number in the response, received {text[:80]!r}")
    try:
        return int(text, base)
    except ValueError as error:
        raise HttpWireError(f"expected a number in the response, received {text[:80]!r}") from error


def _read_chunks(reader: _Reader) -> bytearray:
    body = bytearray()
    while chunk := _read_chunk(reader):
        body += chunk
    return body


def _read_chunk(reader: _Reader) -> bytearray:
    """Return the next chunk; an empty one at the end of the body."""
    size = parse_number(reader.read_until(b"\r\n").partition(b";")[0].strip().decode("latin-1"), 16)
    if size == 0:
        while reader.read_until(b"\r\n"):
            pass  # trailers, which nobody asked for
        return bytearray()
    chunk = reader.read_exactly(size)
    if reader.read_until(b"\r\n"):
        raise HttpWireError("expected the end of a chunk of the response, received more bytes")
    return chunk


class _Reader:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._data = bytearray()

    @property
    def has_more(self) -> bool:
        return bool(self._data)

    def read_until(self, end: bytes) -> bytes:
        """Return the bytes before ``end``, and drop ``end``."""
        searched = 0
        while (position := self._data.find(end, searched)) < 0:
            if len(self._data) > _MOST_HEAD_BYTES:
                raise HttpWireError(f"expected at most {_MOST_HEAD_BYTES} bytes of headers, received more")
            searched = max(0, len(self._data) - len(end))
            self._data += self._receive()
        found = bytes(self._data[:position])
        del self._data[: position + len(end)]
        return found

    def read_exactly(self, size: int) -> bytearray:
        if len(self._data) >= size:
            body = self._data[:size]
            del self._data[:size]
            return body
        # What is not there yet goes straight to its place.
        count, body = len(self._data), self._data
        self._data = bytearray()
        body.extend(bytes(size - count))
        with memoryview(body) as view:
            while count < size:
                received = self._source.recv_into(view[count:])
                if not received:
                    raise HttpWireError(
                        f"expected a response of {size} bytes, received {count} before the connection ended"
                    )
                count += received
        return body

    def read_to_end(self) -> bytearray:
        body, self._data = self._data, bytearray()
        while received := self._source.recv(_CHUNK_BYTES):
            body += received
        return body

    def read_some(self) -> bytearray:
        """Return what is there, after a wait where nothing is; nothing at the end of the connection."""
        if not self._data:
            self._data += self._source.recv(_CHUNK_BYTES)
        data, self._data = self._data, bytearray()
        return data

    def _receive(self) -> bytes:
        received = self._source.recv(_CHUNK_BYTES)
        if not received:
            raise HttpWireError("expected a response, but the server closed the connection")
        return received
