"""Servers that refuse a large request before they have read it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytriton.client._core.deadline import Deadline
from pytriton.client._core.url import TritonUrl
from pytriton.client._http.asyncio_pool import AsyncConnectionPool
from pytriton.client._http.pool import ConnectionPool
from pytriton.client._http.wire import HttpRequest

# More than the buffers of the sockets of both sides hold.
LARGE = HttpRequest("POST", "/", body=bytes(32 << 20))
TEXT = b"too large"
SIZED = b"HTTP/1.1 413 Payload Too Large\r\nContent-Length: 9\r\n\r\n" + TEXT
CHUNKED = b"HTTP/1.1 413 Payload Too Large\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ntoo \r\n5\r\nlarge\r\n0\r\n\r\n"
UNSIZED = b"HTTP/1.1 413 Payload Too Large\r\nConnection: close\r\n\r\n" + TEXT
Ask = Callable[[], tuple[int, bytes]]


class Refusing:
    """Reads the head of each request, answers, and reads no more; then it does as ``ending`` says.

    ``ended`` is set once that is done.
    """

    def __init__(self, context: ssl.SSLContext | None, ending: str) -> None:
        self.answer, self.ending, self.connections = SIZED, ending, 0
        self.ended = threading.Event()
        self.context = context
        self._over = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            self._threads.append(threading.Thread(target=self._serve, args=(accepted,)))
            self._threads[-1].start()

    def _serve(self, accepted: socket.socket) -> None:
        accepted.settimeout(300)
        raw = accepted.dup()
        connection = accepted if self.context is None else self.context.wrap_socket(accepted, server_side=True)
        with raw, connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(1000)
            connection.sendall(self.answer)
            if self.ending == "half-closed":
                raw.shutdown(socket.SHUT_WR)
            if self.ending == "reset":
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if self.ending in ("closed", "reset"):
                raw.close()
                connection.close()  # also resets the connection if there are bytes that nobody has read
            self.ended.set()
            self._over.wait(300)

    def close(self) -> None:
        self._over.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(300)
        self._listening.close()


# After a write to a connection that was reset, OpenSSL reads nothing more: https has no "closed" here.
@pytest.fixture(params=["http open", "http half-closed", "http closed", "https open", "https half-closed"])
def server(request: pytest.FixtureRequest, certificates: Any) -> Iterator[Refusing]:
    scheme, ending = request.param.split()
    refusing = Refusing(certificates.context(mutual=False) if scheme == "https" else None, ending)
    yield refusing
    refusing.close()


@pytest.fixture(params=["waiting", "asyncio"])
def ask(request: pytest.FixtureRequest, server: Refusing, certificates: Any) -> Iterator[Ask]:
    """Asks with a large request, and returns the status and the body of the response."""
    is_encrypted = server.context is not None
    url = TritonUrl("https" if is_encrypted else "http", "127.0.0.1", server.port)
    tls = ssl.create_default_context(cafile=str(certificates.ca)) if is_encrypted else None
    with contextlib.ExitStack() as stack:
        if request.param == "waiting":
            pool = ConnectionPool(url, {}, tls)
            stack.callback(pool.close)
            exchange = pool.exchange
        else:
            loop = stack.enter_context(contextlib.closing(asyncio.new_event_loop()))
            asyncio_pool = AsyncConnectionPool(url, {}, tls)
            stack.callback(lambda: loop.run_until_complete(asyncio_pool.close()))

            def exchange(request: HttpRequest, deadline: Deadline) -> Any:
                return loop.run_until_complete(asyncio_pool.exchange(request, deadline))

        def one() -> tuple[int, bytes]:
            response = exchange(LARGE, Deadline(300))
            return response.status, bytes(response.body)

        yield one


def test_the_answer_is_returned_when_it_is_complete(server: Refusing, ask: Ask) -> None:
    # The last one ends with its connection, which must not break.
    answers = [SIZED, CHUNKED, UNSIZED] if server.ending == "half-closed" else [SIZED, CHUNKED]
    for server.answer in answers:
        assert ask() == (413, TEXT)
    assert server.connections == len(answers)


@pytest.mark.parametrize("server", ["http closed"], indirect=True)
def test_the_answer_is_returned_if_a_write_sees_first_that_the_connection_broke(
    server: Refusing, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Slow(socket.socket):
        """Sends a large piece once the connection is broken."""

        def send(self, data: Any, *flags: int) -> int:
            if len(data) > 1000:
                assert server.ended.wait(300)
            return super().send(data, *flags)

    monkeypatch.setattr(socket, "socket", Slow)
    assert ask() == (413, TEXT)


@pytest.mark.parametrize("server", ["http half-closed", "https half-closed"], indirect=True)
def test_an_answer_that_begins_and_does_not_end_is_no_answer(server: Refusing, ask: Ask) -> None:
    server.answer = SIZED[:-1]
    with pytest.raises(Exception, match="1 more bytes of a response"):
        ask()


@pytest.mark.parametrize("server", ["http reset"], indirect=True)
def test_an_answer_that_a_broken_connection_ends_is_no_answer(server: Refusing, ask: Ask) -> None:
    server.answer = UNSIZED
    with pytest.raises(ConnectionError):
        ask()
