"""HTTP/1.1 without I/O: requests and bytes in, bytes and responses out, for the waiting and the asyncio clients alike.

Understands as much as an inference server and the proxies before it send. ``http.client`` reads headers with the email
package, which costs a third of an inference call; ``benchmarks/README.md`` compares this with httptools.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import numpy as np

from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES, describe

TENSORS_START = "Inference-Header-Content-Length"
"""The header that says where in a body the JSON ends and the first tensor begins."""

# Limits in bytes: a head, the line before a chunk, all trailers together, one read.
_BUFFER_BYTES = 1 << 16
_MAX_INTERIM_RESPONSES = 16
_NO_BODY = (204, 304)
# Memory for a body grows in steps: first what the header claims up to this limit, then a multiple of what has come.
_FIRST_STEP_BYTES = 4 << 20
_STEP_FACTOR = 4
_ALIGNMENT = 64
_NUMBERS = {10: re.compile(r"[0-9]{1,20}"), 16: re.compile(r"[0-9A-Fa-f]{1,20}")}


class HttpWireError(Exception):
    """The other side does not speak HTTP/1.1, or stopped in the middle of a response."""


class ResponseTooLargeError(HttpWireError):
    """The response is larger than this client takes."""


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request."""

    method: str  # ``GET`` or ``POST``
    path: str  # from the first slash on, quoted
    # Without line breaks, besides those that every request carries.
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""  # may be empty


@dataclass(frozen=True)
class HttpResponse:
    """An HTTP response."""

    status: int  # the status code
    headers: Mapping[str, str]  # names in lower case, and values
    body: memoryview  # the body; of a stream what has come of it with the head


class ResponseReader:
    """Reads the responses on one connection, one after the other.

    Whoever has called ``begin`` receives bytes into ``buffer()`` and tells with ``received`` how many, until what it
    waits for is there: ``is_complete``, or for a stream ``has_piece``.
    """

    # Each state of the reader is a method that understands the next bytes, and returns whether it could:
    # _head -> _body_to_end | _sized_body | _chunk_size | over; _sized_body -> over;
    # _chunk_size -> _chunk -> _chunk_end -> _chunk_size, or for the last chunk _chunk_size -> _trailer -> over.

    def __init__(self, max_bytes: int = DEFAULT_MAX_RESPONSE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        # The bytes that have come and were not understood yet are self._buffer[self._start : self._end].
        self._start = self._end = 0
        self._has_ended = False
        self.begin()
        self.is_over = True  # whether nothing of the response is left to come

    def begin(self, *, is_stream: bool = False) -> None:
        """Expect a response; the body of a stream is taken piece by piece."""
        self.is_over = False
        self._is_stream = is_stream
        self._state: Callable[[], bool] = self._head
        self._searched = self._interim = self._trailers = 0
        self._may_be_kept = False
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._body = bytearray()
        self._left = 0  # bytes that are left of the body, or of the current chunk
        # The memory for a body of known length, and how much of it is filled.
        self._place: memoryview | None = None
        self._filled = 0

    @property
    def is_complete(self) -> bool:
        """Whether ``response`` can be called: the whole response has come, or the head of a stream."""
        return self.is_over or (self._is_stream and self._status > 0)

    @property
    def has_piece(self) -> bool:
        """Whether ``take`` returns at once: bytes have come, or the stream is over."""
        return self.is_over or len(self._body) > 0

    @property
    def untaken(self) -> int:
        """How many bytes of a stream wait for ``take``."""
        return len(self._body) if self._is_stream else 0

    @property
    def can_be_kept(self) -> bool:
        """Whether the connection can carry another request: all was read, nothing more came, and no head forbids it."""
        return self.is_over and self._may_be_kept and self._start == self._end and not self._has_ended

    def response(self) -> HttpResponse:
        """Return the response."""
        body = memoryview(self._body if not self._is_stream else b"") if self._place is None else self._place
        return HttpResponse(self._status, self._headers, body)

    def take(self) -> bytes:
        """Return what has come of a stream since the last call; none at its end."""
        taken = bytes(self._body)
        self._body.clear()
        return taken

    def buffer(self) -> memoryview:
        """Return the place for the next bytes, never empty."""
        return self._view[self._end :] if self._place is None or self.is_over else self._place[self._filled :]

    def received(self, count: int) -> None:
        """Understand the bytes that came into ``buffer()``; 0 is the end of the connection."""
        if self.is_over:
            self._has_ended = True  # the server closed the connection, or sent bytes that belong to no request
        elif not count:
            self._has_ended = True
            if self._state != self._body_to_end:
                more = f"{self._left - self._filled} more bytes" if self._left else "more"
                raise HttpWireError(f"expected {more} of a response, but the server closed the connection")
            self.is_over = True
        elif self._place is not None:
            self._fill(self._place, count)
        else:
            self._end += count
            while self._start < self._end and not self.is_over and self._state():
                pass
            if self._start == self._end:
                self._start = self._end = self._searched = 0
            elif self._end == _BUFFER_BYTES:
                if not self._start:
                    raise HttpWireError(f"expected at most {_BUFFER_BYTES} bytes of headers, received more")
                self._end -= self._start
                self._searched -= self._start
                self._buffer[: self._end] = self._buffer[self._start :]
                self._start = 0

    def _line(self, end: bytes) -> str | None:
        """Take the bytes before ``end``, and drop ``end``; ``None`` if it has not come."""
        position = self._buffer.find(end, max(self._start, self._searched - len(end) + 1), self._end)
        if position < 0:
            self._searched = self._end
            return None
        line = str(self._view[self._start : position], "latin-1")
        self._start = self._searched = position + len(end)
        return line

    def _head(self) -> bool:
        head = self._line(b"\r\n\r\n")
        if head is None:
            return False
        version, status, headers = _parse_head(head)
        if status < 200:
            self._interim += 1
            if self._interim == _MAX_INTERIM_RESPONSES:
                raise HttpWireError(f"expected a response, received {_MAX_INTERIM_RESPONSES} interim ones")
            return True
        self._status, self._headers = status, headers
        self._may_be_kept = _allows_reuse(version, headers)
        if status in _NO_BODY:
            self.is_over = True
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            self._state = self._chunk_size
        elif "content-length" in headers:
            self._state = self._sized_body
            self._left = parse_number(headers["content-length"], 10)
            self._check_size(self._left)
            self.is_over = not self._left
            come = self._view[self._start : self._end]
            if len(come) < self._left and not self._is_stream:
                self._place = self._enlarge(come, self._left)
                self._filled = len(come)
                self._start = self._end
        else:
            self._may_be_kept = False
            self._state = self._body_to_end
        return True

    def _body_to_end(self) -> bool:
        self._left = self._end - self._start
        self._check_size(len(self._body) + self._left)
        return self._add_to_body()

    def _sized_body(self) -> bool:
        self.is_over = self._add_to_body()
        return True

    def _chunk_size(self) -> bool:
        line = self._line(b"\r\n")
        if line is None:
            return False
        self._left = parse_number(line.partition(";")[0].strip(), 16)
        self._check_size(len(self._body) + self._left)
        self._state = self._chunk if self._left else self._trailer
        return True

    def _chunk(self) -> bool:
        if self._add_to_body():
            self._state = self._chunk_end
        return True

    def _chunk_end(self) -> bool:
        if self._end - self._start < 2:
            return False
        if not self._buffer.startswith(b"\r\n", self._start):
            raise HttpWireError("expected the end of a chunk of the response, received more bytes")
        self._start += 2
        self._state = self._chunk_size
        return True

    def _trailer(self) -> bool:
        line = self._line(b"\r\n")
        if line:
            # Trailers were not asked for, so they are dropped.
            self._trailers += len(line)
            if self._trailers > _BUFFER_BYTES:
                raise HttpWireError(f"expected at most {_BUFFER_BYTES} bytes of trailers, received more")
        self.is_over = line == ""
        return line is not None

    def _add_to_body(self) -> bool:
        """Take what has come of the body, or of a chunk; return whether nothing is left of that."""
        end = min(self._end, self._start + self._left)
        self._body += self._view[self._start : end]
        self._left -= end - self._start
        self._start = end
        return not self._left

    def _fill(self, place: memoryview, count: int) -> None:
        self._filled += count
        if self._filled == self._left:
            self.is_over = True
        elif self._filled == len(place):
            self._place = self._enlarge(place, self._left)

    def _enlarge(self, come: memoryview, size: int) -> memoryview:
        """Return a copy of the received bytes with room for more.

        A header is believed up to some megabytes; beyond that the room is in proportion to what has come. ``np.empty``
        takes memory only as bytes come in; a ``bytearray`` would take all at once.
        """
        room = size
        while room > max(_FIRST_STEP_BYTES, _STEP_FACTOR * len(come)):
            room = -(-room // _STEP_FACTOR)  # makes the last step as large as the others
        # The first tensor is aligned, so that its array need not be a copy.
        memory = np.empty(room + _ALIGNMENT, np.uint8)
        tensors = self._headers.get(TENSORS_START.lower(), "0")
        start = -(memory.ctypes.data + (int(tensors) if _NUMBERS[10].fullmatch(tensors) else 0)) % _ALIGNMENT
        place = memory.data[start : start + room]
        place[: len(come)] = come
        return place

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes and not self._is_stream:
            raise ResponseTooLargeError(
                f"expected a response of at most {self._max_bytes} bytes, received one of {size} or more. Give the "
                "client a larger max_response_bytes if such responses are right."
            )


def _parse_head(head: str) -> tuple[str, int, dict[str, str]]:
    """Return the version, the status code and the headers, with their names in lower case."""
    status_line, *lines = head.split("\r\n")
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


def _allows_reuse(version: str, headers: Mapping[str, str]) -> bool:
    """Return whether the headers of a response allow another request on its connection."""
    connection = headers.get("connection", "").lower()
    if "transfer-encoding" in headers and "content-length" in headers:
        return False  # the two headers may disagree on where the response ends
    return "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)


def parse_number(text: str, base: int) -> int:
    """Return a number of base 10 or 16 without a sign."""
    # int() would accept signs, underscores and blanks.
    if not _NUMBERS[base].fullmatch(text):
        raise HttpWireError(f"expected a number in the response, received {describe(text)}")
    return int(text, base)


def encode_head(request: HttpRequest, host: str, headers: Mapping[str, str], prefix: str = "") -> bytes:
    """Return the bytes before the body of a request. Headers of the request replace those of the client."""
    lines = [
        f"{request.method} {prefix}{request.path} HTTP/1.1",
        f"Host: {host}",
        f"Content-Length: {len(request.body)}",
    ]
    # The name of a header is the same in capital letters; a server may take either of two.
    given = (*headers.items(), *request.headers.items())
    lines += {name.lower(): f"{name}: {value}" for name, value in given}.values()
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1")


def is_unserved(response: HttpResponse) -> bool:
    """Return whether the server refused a kept connection (408) without looking at the request.

    A replaced server does so.
    """
    return response.status == HTTPStatus.REQUEST_TIMEOUT


def may_retry(request: HttpRequest, error: BaseException, *, has_sent: bool) -> bool:
    """Return whether a request that failed on a kept connection may be sent again.

    The server may have closed the idle connection just then. An inference may be repeated only if the server does not
    have all of it; ``has_sent`` says that it may have.
    """
    has_broken = isinstance(error, (OSError, HttpWireError)) and not isinstance(error, TimeoutError)
    return has_broken and (request.method == "GET" or not has_sent)
