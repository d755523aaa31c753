"""Whole answers over HTTP, read from a connection that may hold several, and requests as bytes."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pytriton.triton import Triton
from support.faults.front_end.poisons import post
from support.faults.raw_http import connect


@dataclass(frozen=True)
class Answer:
    status: int
    headers: frozenset[tuple[str, str]]
    body: bytes


class Reader:
    """Reads whole answers from a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rb")

    def next(self, request: bytes) -> Answer | None:
        """Return the answer to a request; None if the connection ends in front of it."""
        line = self._stream.readline()
        if not line:
            return None
        fields = [field.decode().partition(":")[::2] for field in iter(self._stream.readline, b"\r\n") if field]
        headers = {name.lower(): value.strip() for name, value in fields}
        body = b""
        if request.lstrip().startswith(b"HEAD"):
            pass
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(self._stream.readline(), 16):
                body += self._stream.read(size)
                assert self._stream.readline() == b"\r\n"
            assert self._stream.readline() == b"\r\n"
        elif "content-length" in headers:
            body = self._stream.read(int(headers["content-length"]))
        return Answer(int(line.split()[1]), frozenset(headers.items()), body)


def generate(name: str, body: object, endpoint: str = "generate") -> bytes:
    return post(json.dumps(body).encode(), path=f"/v2/models/{name}/{endpoint}")


def infer(name: str, values: Sequence[float], **headers: str) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(values)], "data": list(values)}
    lines = [f"{field}: {value}" for field, value in headers.items()]
    return post(json.dumps({"inputs": [tensor]}).encode(), *lines, path=f"/v2/models/{name}/infer")


def get(path: str, method: str = "GET", *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: h", *headers, "\r\n"]).encode()


def alone(triton: Triton, request: bytes) -> Answer:
    """Send a request on a connection of its own."""
    with connect(triton) as connection:
        connection.sendall(request)
        answer = Reader(connection).next(request)
    assert answer is not None, request[:200]
    return answer


def send_in_pieces(connection: socket.socket, data: bytes, cuts: Sequence[int]) -> None:
    """Send bytes in several calls. Who is refused may find the connection closed meanwhile, which is no error here."""
    with contextlib.suppress(ConnectionError):
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            connection.sendall(data[begin:end])
