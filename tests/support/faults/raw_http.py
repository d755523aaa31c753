"""HTTP byte by byte, for requests that no client would send."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

from pytriton.triton import Triton
from support.waiting import PATIENCE_S


def connect(triton: Triton, receive_buffer: int | None = None) -> socket.socket:
    """Open a connection to a server that runs; with a small buffer, the server soon has to wait for what is read."""
    assert triton.http_url is not None
    host, port = triton.http_url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE_S)
    connection.connect((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_answer(connection: socket.socket) -> tuple[int, str]:
    """Read status and body of the next answer; 100 Continue is none."""
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            data += _more(connection, data)
        head, _, data = data.partition(b"\r\n\r\n")
        if not head.split()[1].startswith(b"1"):
            break
    length = re.search(rb"(?im)^content-length: *(\d+)", head)
    while length is not None and len(data) < int(length[1]):
        data += _more(connection, data)
    return int(head.split()[1]), data.decode(errors="replace")


def ask_ahead(triton: Triton, requests: Sequence[bytes]) -> list[tuple[int, str]]:
    """Send each request before the answer to the one in front of it was read; return all answers but the last.

    Triton has read a request that comes so, and looks at it when the next one comes.
    """
    answers = []
    with connect(triton) as connection, connection.makefile("rb") as stream:
        connection.sendall(requests[0] + requests[1])
        for request in [*requests[2:], b""]:
            line = stream.readline()
            head = list(iter(stream.readline, b"\r\n")) if line else []
            (length,) = (int(field.split(b":")[1]) for field in head if field.lower().startswith(b"content-length:"))
            answers.append((int(line.split()[1]), stream.read(length).decode()))
            connection.sendall(request)
    return answers


def ask(triton: Triton, request: bytes) -> tuple[int, str]:
    """Send bytes and return status and body of the answer, which may come before all is sent."""
    with connect(triton) as connection:
        connection.sendall(request)
        return read_answer(connection)


def _more(connection: socket.socket, before: bytes) -> bytes:
    part = connection.recv(65536)
    assert part, f"the connection was closed after {before[-1000:]!r}"
    return part
