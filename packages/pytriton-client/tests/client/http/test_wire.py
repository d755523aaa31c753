from __future__ import annotations

import pytest

from pytriton.client._http.wire import HttpWireError, StreamedAnswer, read_answer


class Pieces:
    """A source that gives its bytes in pieces of one size, as a network may."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data = data
        self.size = size

    def recv(self, most_bytes: int, /) -> bytes:
        piece = self.data[: min(self.size, most_bytes)]
        self.data = self.data[len(piece) :]
        return piece

    def recv_into(self, buffer: memoryview, /) -> int:
        piece = self.recv(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def read_all(answer: StreamedAnswer) -> None:
    while answer.read_piece():
        pass


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("response", "status", "body", "can_be_kept"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", 200, b"abc", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n", 200, b"", True),
        (b"HTTP/1.1 400\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx", 400, b"x", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", False),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, b"until the end", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", True),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\n0A;x=y\r\n0123456789\r\n0\r\nT: r\r\n\r\n",
            200,
            b"abc0123456789",
            True,
        ),
    ],
)
def test_responses(response: bytes, status: int, body: bytes, can_be_kept: bool, size: int) -> None:
    answer = read_answer(Pieces(response, size))
    assert (answer.status, bytes(answer.body), answer.can_be_kept) == (status, body, can_be_kept)
    streamed = StreamedAnswer(Pieces(response, size))
    pieces = []
    while piece := streamed.read_piece():
        assert not streamed.can_be_kept
        pieces.append(piece)
    assert (streamed.status, b"".join(pieces), streamed.can_be_kept) == (status, body, can_be_kept)
    assert streamed.read_piece() == b""


def test_headers_are_in_lower_case() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nInference-Header-Content-Length:  12 \r\nX: a:b\r\n\r\n"
    headers = read_answer(Pieces(head, 100)).headers
    assert headers["inference-header-content-length"] == "12"
    assert headers["x"] == "a:b"


def test_connection_with_unasked_bytes_is_not_kept() -> None:
    assert not read_answer(Pieces(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxyz", 100)).can_be_kept


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\nab",
        b"HTTP/2 200\r\n\r\n",
        b"SSH-2.0-server\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: " + 100_000 * b"x",
    ],
)
@pytest.mark.parametrize("size", [1, 100_000])
def test_what_is_no_response(response: bytes, size: int) -> None:
    with pytest.raises(HttpWireError):
        read_answer(Pieces(response, size))
    with pytest.raises(HttpWireError):
        read_all(StreamedAnswer(Pieces(response, size)))
