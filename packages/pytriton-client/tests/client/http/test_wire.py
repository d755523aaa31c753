from __future__ import annotations

import numpy as np
import pytest

from pytriton.client._http.wire import (
    HttpRequest,
    HttpResponse,
    HttpWireError,
    ResponseReader,
    ResponseTooLargeError,
    encode_head,
    may_retry,
    parse_number,
)

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Name:  a:b \r\n\r\nhello"
IN_CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = IN_CHUNKS + b"5;x=y\r\nhello\r\n0A\r\n, worlds!!\r\n0\r\nTrailer: x\r\n\r\n"
TO_END = b"HTTP/1.1 200 OK\r\n\r\nhello"
NO_BODY = b"HTTP/1.1 204 No Content\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"

RESPONSES = [
    (SIZED, 200, b"hello", True),
    (CHUNKED, 200, b"hello, worlds!!", True),
    (TO_END, 200, b"hello", False),
    (NO_BODY, 204, b"", True),
    (15 * INTERIM + SIZED, 200, b"hello", True),
    (SIZED.replace(b"X-Name:  a:b ", b"Connection: close"), 200, b"hello", False),
    (SIZED.replace(b"X-Name:  a:b ", b"content-length:5"), 200, b"hello", True),
    (SIZED.replace(b"1.1", b"1.0"), 200, b"hello", False),
    (SIZED.replace(b"1.1", b"1.0").replace(b"X-Name:  a:b ", b"connection: Keep-Alive"), 200, b"hello", True),
    (SIZED.replace(b"5\r\nX", b"0\r\nX")[:-5], 200, b"", True),
    (SIZED.replace(b"200 OK", b"400"), 400, b"hello", True),
    (CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n", 1), 200, b"hello, worlds!!", False),
]


class Wire:
    """Gives a reader its bytes in pieces of one size, as a network may."""

    def __init__(self, reader: ResponseReader, data: bytes, size: int) -> None:
        self.reader = reader
        self.data = memoryview(data)
        self.size = size

    def send_piece(self) -> None:
        buffer = self.reader.buffer()
        count = min(len(buffer), self.size, len(self.data))
        assert len(buffer) > 0
        buffer[:count] = self.data[:count]
        self.data = self.data[count:]
        self.reader.received(count)


def read(reader: ResponseReader, data: bytes, size: int) -> HttpResponse:
    wire = Wire(reader, data, size)
    reader.begin()
    while not reader.is_complete:
        wire.send_piece()
    assert reader.is_over
    assert not wire.data
    return reader.response()


def read_stream(reader: ResponseReader, data: bytes, size: int) -> tuple[HttpResponse, list[bytes]]:
    wire = Wire(reader, data, size)
    reader.begin(is_stream=True)
    while not reader.is_complete:
        wire.send_piece()
    response = reader.response()
    pieces: list[bytes] = []
    while True:
        while not reader.has_piece:
            assert not reader.can_be_kept
            wire.send_piece()
        piece = reader.take()
        if not piece:
            return response, pieces
        pieces.append(piece)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize(("data", "status", "body", "can_be_kept"), RESPONSES)
def test_responses(data: bytes, status: int, body: bytes, can_be_kept: bool, size: int) -> None:
    reader = ResponseReader()
    response = read(reader, data, size)
    assert (response.status, bytes(response.body), reader.can_be_kept) == (status, body, can_be_kept)
    reader = ResponseReader(max_bytes=0)  # which is no limit of streams
    response, pieces = read_stream(reader, data, size)
    assert (response.status, b"".join(pieces), reader.can_be_kept) == (status, body, can_be_kept)
    if b"X-Name" in data:
        assert response.headers["x-name"] == "a:b"


def test_many_responses_on_one_connection() -> None:
    reader = ResponseReader()
    large = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000)
    for size in (1000, 100_000):
        for data in (SIZED, CHUNKED, NO_BODY, large, SIZED):
            read(reader, data, size)
            assert reader.can_be_kept
            read_stream(reader, data, size)
            assert reader.can_be_kept


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    reader = ResponseReader()
    assert bytes(read(reader, SIZED + b"more", 1000).body) == b"hello"
    assert not reader.can_be_kept
    reader = ResponseReader()
    read(reader, SIZED, 1000)
    for _ in range(100):
        Wire(reader, bytes(1 << 16), 1 << 16).send_piece()
    assert not reader.can_be_kept


def test_connection_that_ended_is_not_kept() -> None:
    reader = ResponseReader()
    read(reader, SIZED, 1000)
    assert reader.can_be_kept
    reader.received(0)
    assert not reader.can_be_kept


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, (4 << 20) + 1, 17 << 20])
@pytest.mark.parametrize("piece_size", [1000, 1 << 22])
def test_large_bodies(size: int, piece_size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    sized = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    chunked = IN_CHUNKS + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for data in (sized, chunked, b"HTTP/1.1 200 OK\r\n\r\n" + body):
        assert read(ResponseReader(), data, piece_size).body == body


def test_room_is_in_proportion_to_what_has_come() -> None:
    reader = ResponseReader()
    reader.begin()
    Wire(reader, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nabc" % (3 << 30), 1000).send_piece()
    come = 3
    for _ in range(40):
        room = len(reader.buffer())
        assert come + room <= max(4 << 20, 4 * come)
        count = min(room, 1 << 20)
        reader.buffer()[:count] = bytes(count)
        reader.received(count)
        come += count


@pytest.mark.parametrize("json_size", [0, 1, 63, 100])
def test_first_tensor_is_aligned(json_size: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: %d\r\nContent-Length: 100000\r\n\r\n" % json_size
    body = read(ResponseReader(), head + bytes(100_000), 1000).body
    assert np.frombuffer(body[json_size:], np.uint8).ctypes.data % 64 == 0


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 11\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nB\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nA\r\n0123456789\r\n1\r\n",
        b"\r\n01234567890",
    ],
)
def test_largest_body(framing: bytes) -> None:
    with pytest.raises(ResponseTooLargeError, match="at most 10 bytes, received one of 11"):
        read(ResponseReader(max_bytes=10), b"HTTP/1.1 200 OK\r\n" + framing, 7)
    assert bytes(read(ResponseReader(max_bytes=5), SIZED, 7).body) == b"hello"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        SIZED[:-1],
        CHUNKED[:-1],
        CHUNKED[: CHUNKED.index(b"world")],
        SIZED.replace(b"X-Name:  a:b ", b"Content-Length: 6"),
        SIZED.replace(b"5\r\n", b"-5\r\n"),
        SIZED.replace(b"5\r\n", b"5_0\r\n"),
        SIZED.replace(b"5\r\n", b"\xb2\r\n"),
        SIZED.replace(b"5\r\n", b"%d\r\n" % 10**20),
        b"HTTP/2 200\r\n\r\n",
        b"SSH-2.0-server\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        16 * INTERIM + SIZED,
        CHUNKED.replace(b"0A\r\n", b"0x9\r\n"),
        CHUNKED.replace(b"0A\r\n", b"\r\n"),
        CHUNKED.replace(b"hello\r\n", b"hello!!"),
        CHUNKED.replace(b"Trailer: x\r\n", 3 * (b"x" * 30_000 + b"\r\n")),
        b"HTTP/1.1 200 OK\r\nX: " + 100_000 * b"x",
        IN_CHUNKS + 100_000 * b"1",
    ],
)
@pytest.mark.parametrize("size", [1, 100_000])
def test_what_is_no_response(data: bytes, size: int) -> None:
    with pytest.raises(HttpWireError):
        read(ResponseReader(), data, size)
    with pytest.raises(HttpWireError):
        read_stream(ResponseReader(), data, size)


def test_numbers() -> None:
    assert (parse_number("010", 10), parse_number("fF", 16)) == (10, 255)
    for text in ("", " 1", "+1", "1_0", "0x1", "a", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT ONE}", 21 * "1"):
        with pytest.raises(HttpWireError):
            parse_number(text, 10)


def test_request() -> None:
    request = HttpRequest("POST", "/v2", {"b": "first", "B": "own"}, b"body")
    assert encode_head(request, "host:1", {"A": "a", "b": "b"}) == (
        b"POST /v2 HTTP/1.1\r\nHost: host:1\r\nContent-Length: 4\r\nA: a\r\nB: own\r\n\r\n"
    )


@pytest.mark.parametrize("error", [ConnectionResetError(), HttpWireError()])
def test_only_what_the_server_does_not_work_at_is_sent_again(error: Exception) -> None:
    assert may_retry(HttpRequest("GET", "/"), error, has_sent=True)
    assert may_retry(HttpRequest("POST", "/"), error, has_sent=False)
    assert not may_retry(HttpRequest("POST", "/"), error, has_sent=True)
    assert not may_retry(HttpRequest("GET", "/"), TimeoutError(), has_sent=False)
