"""HTTP/1.1 responses, as much of them as an inference server and the proxies before it send.

``http.client`` reads headers with the email package, which costs a third of a whole inference call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES, describe

__all__ = [
    "MOST_HEAD_BYTES",
    "MOST_INTERIM",
    "NO_BODY",
    "Answer",
    "HttpWireError",
    "ResponseTooLargeError",
    "Source",
    "StreamedAnswer",
    "can_be_kept",
    "check_size",
    "enlarge",
    "parse_head",
    "parse_number",
    "read_answer",
]

MOST_HEAD_BYTES = 1 << 16
"""The most bytes of a head, of the line before a chunk, and of all trailers together."""
MOST_INTERIM = 16
"""The most interim responses before the one that counts."""
NO_BODY = (204, 304)
"""The statuses whose responses end with their head."""
_CHUNK_BYTES = 1 << 16
# Memory is taken in steps: for what a header claims no more than this, then for some times as much as has come.
_FIRST_STEP_BYTES = 1 << 20
_STEP_FACTOR = 4
_MOST_DIGITS = 20  # of any number of 64 bits, with zeros before it


class HttpWireError(Exception):
    """The other side does not speak HTTP/1.1, or stopped in the middle of a response."""


class ResponseTooLargeError(HttpWireError):
    """The response is larger than this client takes."""


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


def read_answer(source: Source, most_bytes: int = DEFAULT_MAX_RESPONSE_BYTES) -> Answer:
    """Read one response to its end; interim responses before it are skipped.

    Args:
        source: Where the bytes come from.
        most_bytes: The largest body that is taken.

    Raises:
        HttpWireError: The response cannot be understood or ends early.
        ResponseTooLargeError: Its body is larger.
    """
    reader = _Reader(source)
    version, status, headers = _read_head(reader)
    may_be_kept = can_be_kept(version, headers)
    if status in NO_BODY:
        body = bytearray()
    elif "chunked" in headers.get("transfer-encoding", "").lower():
        body = _read_chunks(reader, most_bytes)
    elif "content-length" in headers:
        size = parse_number(headers["content-length"], 10)
        check_size(size, most_bytes)
        body = reader.read_exactly(size)
    else:
        body, may_be_kept = reader.read_to_end(most_bytes), False
    return Answer(status, headers, body, may_be_kept and not reader.has_more)


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
        if self.status in NO_BODY:
            self._is_chunked, length = False, "0"
        # What is left of the body, or of its current chunk; None where the end of the connection ends it.
        self._left = 0 if self._is_chunked else None if length is None else parse_number(length, 10)
        self._may_be_kept = self._left is not None and can_be_kept(version, self.headers)
        self._is_over = False

    def read_piece(self) -> bytes:
        """Wait for the next piece of the body and return it; ``b""`` after the last one.

        Raises:
            HttpWireError: The body ends early, or is malformed.
        """
        if self._is_over:
            return b""
        if self._left is None:
            piece = self._reader.read_some(_CHUNK_BYTES)
        else:
            if self._is_chunked and not self._left:
                self._left = _read_chunk_size(self._reader)
            piece = self._reader.read_some(self._left) if self._left else b""
            if len(piece) < min(self._left, 1):
                raise HttpWireError(f"expected {self._left} more bytes of the response, but the connection ended")
            self._left -= len(piece)
            if self._is_chunked and piece and not self._left:
                _read_chunk_end(self._reader)
        if not piece:
            self._is_over = True
            self.can_be_kept = self._may_be_kept and not self._reader.has_more
        return piece


def _read_head(reader: _Reader) -> tuple[str, int, dict[str, str]]:
    for _ in range(MOST_INTERIM):
        version, status, headers = parse_head(reader.read_until(b"\r\n\r\n"))
        if status >= 200:
            return version, status, headers
    raise HttpWireError(f"expected a response, received {MOST_INTERIM} interim ones")


def can_be_kept(version: str, headers: Mapping[str, str]) -> bool:
    """Return whether a connection may carry another request after a response, by what its head says."""
    connection = headers.get("connection", "").lower()
    if "transfer-encoding" in headers and "content-length" in headers:
        return False  # two that do not agree on where the response ends
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
        raise HttpWireError(f"expected an HTTP/1.1 status line, received {describe(status_line)}")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip()
        if name == "content-length" and headers.get(name, value) != value:
            raise HttpWireError(
                f"expected one length of the response, received {describe(headers[name])} and {describe(value)}"
            )
        headers[name] = value
    return version, parse_number(rest[:3], 10), headers


def parse_number(text: str, base: int) -> int:
    """Return a number without a sign.

    Raises:
        HttpWireError: The text is something else.
    """
    # int() alone would take signs, underscores and blanks.
    if not text.isalnum() or not text.isascii() or len(text) > _MOST_DIGITS:
        raise HttpWireError(f"expected a number in the response, received {describe(text)}")
    try:
        return int(text, base)
    except ValueError as error:
        raise HttpWireError(f"expected a number in the response, received {describe(text)}") from error


def check_size(size: int, most_bytes: int) -> None:
    """Refuse a body that is too large.

    Raises:
        ResponseTooLargeError: It is.
    """
    if size > most_bytes:
        raise ResponseTooLargeError(
            f"expected a response of at most {most_bytes} bytes, received one of {size} or more. Give the client a "
            "larger max_response_bytes if such responses are right."
        )


def enlarge(body: bytearray, size: int) -> bytearray:
    """Return a body with room for what comes next.

    What a header claims is believed up to a megabyte. For more, the room is in proportion to what has really come.

    Args:
        body: What has come.
        size: How long the body is to become.
    """
    # A new one, as a bytearray on which somebody holds a view cannot grow.
    larger = bytearray(_step(len(body), size))
    larger[: len(body)] = body
    return larger


def _step(count: int, size: int) -> int:
    """For how many bytes there is to be room, when so many have come of a body of that size."""
    return min(size, max(_STEP_FACTOR * count, _FIRST_STEP_BYTES))


def _read_chunks(reader: _Reader, most_bytes: int) -> bytearray:
    body = bytearray()
    while size := _read_chunk_size(reader):
        check_size(len(body) + size, most_bytes)
        body += reader.read_exactly(size)
        _read_chunk_end(reader)
    return body


def _read_chunk_size(reader: _Reader) -> int:
    """Return the size of the next chunk; 0 at the end of the body, with what follows it."""
    size = parse_number(reader.read_until(b"\r\n").partition(b";")[0].strip().decode("latin-1"), 16)
    if not size:
        trailers = 0
        while trailer := reader.read_until(b"\r\n"):
            # Nobody asked for trailers: they are dropped.
            trailers += len(trailer)
            if trailers > MOST_HEAD_BYTES:
                raise HttpWireError(f"expected at most {MOST_HEAD_BYTES} bytes of trailers, received more")
    return size


def _read_chunk_end(reader: _Reader) -> None:
    if reader.read_until(b"\r\n"):
        raise HttpWireError("expected the end of a chunk of the response, received more bytes")


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
            if len(self._data) > MOST_HEAD_BYTES:
                raise HttpWireError(f"expected at most {MOST_HEAD_BYTES} bytes of headers, received more")
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
        while count < size:
            # In its place, which costs no copy of what has come; `_asyncio_wire` cannot, as its views outlive a step.
            body.extend(bytes(_step(count, size) - count))
            with memoryview(body) as view:
                while count < len(view):
                    received = self._source.recv_into(view[count:])
                    if not received:
                        raise HttpWireError(
                            f"expected a response of {size} bytes, received {count} before the connection ended"
                        )
                    count += received
        return body

    def read_to_end(self, most_bytes: int) -> bytearray:
        body, self._data = self._data, bytearray()
        while received := self._source.recv(_CHUNK_BYTES):
            body += received
            check_size(len(body), most_bytes)
        return body

    def read_some(self, most_bytes: int) -> bytes:
        """Return what is there, after a wait where nothing is; nothing at the end of the connection."""
        if not self._data:
            self._data += self._source.recv(_CHUNK_BYTES)
        data = bytes(self._data[:most_bytes])
        del self._data[:most_bytes]
        return data

    def _receive(self) -> bytes:
        received = self._source.recv(_CHUNK_BYTES)
        if not received:
            raise HttpWireError("expected a response, but the server closed the connection")
        return received
