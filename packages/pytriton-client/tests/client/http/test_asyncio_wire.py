from __future__ import annotations

from typing import Any

import pytest

from pytriton.client._http.asyncio_wire import AnswerReader, Filling
from pytriton.client._http.wire import HttpWireError

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Name:  value \r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\nA\r\n, worlds!!\r\n0\r\nTrailer: x\r\n\r\n"
)
TO_END = b"HTTP/1.1 200 OK\r\n\r\nhello"
NO_BODY = b"HTTP/1.1 204 No Content\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN


def feed(steps: Filling[Any], data: bytes, piece_size: int, *, is_end: bool = True) -> tuple[Any, bytes]:
    """Fill what the steps ask for from the data, some bytes at a time; return their result and what is left."""
    try:
        buffer = next(steps)
        while data or is_end:
            assert len(buffer) > 0
            count = min(len(buffer), piece_size, len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            buffer = steps.send(count)
    except StopIteration as end:
        return end.value, data
    raise AssertionError("there should be an answer by now")


@pytest.mark.parametrize("piece_size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("data", "status", "body", "can_be_kept"),
    [
        (PLAIN, 200, b"hello", True),
        (CHUNKED, 200, b"hello, worlds!!", True),
        (TO_END, 200, b"hello", False),
        (NO_BODY, 204, b"", True),
        (INTERIM, 200, b"hello", True),
        (PLAIN.replace(b"X-Name:  value ", b"Connection: close"), 200, b"hello", False),
        (PLAIN.replace(b"1.1", b"1.0"), 200, b"hello", False),
        (PLAIN.replace(b"5\r\nX", b"0\r\nX")[:-5], 200, b"", True),
        (PLAIN.replace(b"200 OK", b"400 Bad"), 400, b"hello", True),
    ],
)
def test_answers_in_pieces(data: bytes, status: int, body: bytes, can_be_kept: bool, piece_size: int) -> None:
    reader = AnswerReader()
    answer, left = feed(reader.answer(), data, piece_size)
    assert (answer.status, bytes(answer.body), answer.can_be_kept, left) == (status, body, can_be_kept, b"")
    assert reader.is_body_read
    if b"X-Name" in data:
        assert answer.headers["x-name"] == "value"


def test_many_answers_on_one_connection() -> None:
    reader = AnswerReader()
    for _ in range(3):
        for data in (PLAIN, CHUNKED, NO_BODY):
            answer, left = feed(reader.answer(), data, 1000)
            assert answer.can_be_kept
            assert left == b""


def test_more_than_was_asked_for_ends_the_connection() -> None:
    reader = AnswerReader()
    answer, _ = feed(reader.answer(), PLAIN + b"more", 1000)
    assert bytes(answer.body) == b"hello"
    assert not answer.can_be_kept
    assert reader.has_more


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, 3_000_000])
@pytest.mark.parametrize("piece_size", [1000, 1 << 16, 1 << 22])
def test_large_bodies(size: int, piece_size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer, left = feed(AnswerReader().answer(), head + body, piece_size)
    assert answer.body == body
    assert left == b""
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    answer, left = feed(AnswerReader().answer(), chunked, piece_size)
    assert answer.body == body
    assert left == b""


@pytest.mark.parametrize("piece_size", [1, 1000])
@pytest.mark.parametrize(
    ("data", "pieces"), [(PLAIN, b"hello"), (CHUNKED, b"hello, worlds!!"), (TO_END, b"hello"), (NO_BODY, b"")]
)
def test_body_piece_by_piece(data: bytes, pieces: bytes, piece_size: int) -> None:
    reader = AnswerReader()
    head, data = feed(reader.head(), data, piece_size)
    received = b""
    while True:
        piece, data = feed(reader.piece(head), data, piece_size)
        if not piece:
            break
        received += piece
    assert received == pieces
    assert reader.is_body_read
    assert data == b""


def test_body_that_is_not_read_to_its_end_is_told() -> None:
    reader = AnswerReader()
    head, data = feed(reader.head(), CHUNKED, 1)
    assert not reader.is_body_read
    piece, _ = feed(reader.piece(head), data, 1)
    assert piece == b"h"
    assert not reader.is_body_read


def test_bytes_that_come_before_they_are_asked_for() -> None:
    reader = AnswerReader()
    head, _ = feed(reader.head(), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 1000)
    data = b"".join(b"1000\r\n" + bytes([number]) * 0x1000 + b"\r\n" for number in range(40)) + b"0\r\n\r\n"
    rest = data
    while rest:
        free = reader.free()
        count = min(len(free), len(rest), 5000)
        free[:count] = rest[:count]
        reader.add(count)
        rest = rest[count:]
    received = b""
    while piece := feed(reader.piece(head), b"", 1)[0]:
        received += piece
    assert received == b"".join(bytes([number]) * 0x1000 for number in range(40))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200",
        PLAIN[:-1],
        CHUNKED[:-1],
        CHUNKED[: CHUNKED.index(b"world")],
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 2xx OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5_0\r\n\r\n",
        CHUNKED.replace(b"A\r\n", b"0x9\r\n"),
        CHUNKED.replace(b"hello\r\n", b"hello!!"),
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * (1 << 18),
    ],
)
@pytest.mark.parametrize("piece_size", [1, 1 << 16])
def test_what_is_no_answer(data: bytes, piece_size: int) -> None:
    with pytest.raises(HttpWireError):
        feed(AnswerReader().answer(), data, piece_size)
