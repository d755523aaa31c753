"""Kept connections that the server ends while nobody uses them, or in the middle of a request, with TLS and without."""

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
from pytriton.client._http.wire import HttpRequest, HttpWireError

LIMIT_S = 60.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
SMALL = HttpRequest("POST", "/", body=b"x")
LARGE = HttpRequest("POST", "/", body=bytes(1 << 24) + b"end")


def say_goodbye(connected: socket.socket) -> None:
    """Send the close_notify of TLS, and leave the connection open."""
    if isinstance(connected, ssl.SSLSocket):
        connected.settimeout(0)
        with contextlib.suppress(OSError):  # nobody says goodbye to us, or closes at once
            connected.unwrap()


def close(connected: socket.socket) -> None:
    say_goodbye(connected)
    connected.close()


def shut_down(connected: socket.socket) -> None:
    socket.socket.shutdown(connected, socket.SHUT_RDWR)


def reset(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connected.close()


def answer_nobody(connected: socket.socket) -> None:
    connected.sendall(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")


ENDS: dict[str, Callable[[socket.socket], None]] = {
    function.__name__: function for function in (say_goodbye, close, shut_down, reset, answer_nobody)
}


class Server:
    """Answers one request on each connection, then ends that in some way."""

    def __init__(self, context: ssl.SSLContext | None, script: Callable[[Server, socket.socket, int], None]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._context = context
        self._script = script
        self.port = self._listening.getsockname()[1]  # where it listens
        self.may_end = threading.Semaphore(0)  # released for each answer that has come
        self.has_ended = threading.Semaphore(0)  # released for each connection that it has ended
        self.received: list[bytearray] = []  # what came on each connection
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            while True:
                connected: socket.socket = self._listening.accept()[0]
                connected.settimeout(LIMIT_S)
                if self._context is not None:
                    connected = self._context.wrap_socket(connected, server_side=True)
                stack.enter_context(connected)
                self.received.append(bytearray())
                self._script(self, connected, len(self.received))

    def read(self, connected: socket.socket, end: bytes) -> None:
        while not self.received[-1].endswith(end):
            piece = connected.recv(1 << 20)
            assert piece
            self.received[-1] += piece

    def close(self) -> None:
        shut_down(self._listening)
        self._thread.join(LIMIT_S)
        self._listening.close()


class SyncPool:
    """The pool of the clients that wait."""

    def __init__(self, url: TritonUrl, tls: ssl.SSLContext | None) -> None:
        self._pool = ConnectionPool(url, {}, tls)

    def ask(self, request: HttpRequest) -> bytes:
        return bytes(self._pool.exchange(request, Deadline(LIMIT_S)).body)

    def let(self, wait: Callable[..., Any]) -> None:
        assert wait(timeout=LIMIT_S)

    def close(self) -> None:
        self._pool.close()


class AsyncPool:
    """The pool of the asyncio clients, whose loop looks at nothing between two calls."""

    def __init__(self, url: TritonUrl, tls: ssl.SSLContext | None) -> None:
        self._pool = AsyncConnectionPool(url, {}, tls)
        self.runner = asyncio.new_event_loop()

    def ask(self, request: HttpRequest) -> bytes:
        return bytes(self.runner.run_until_complete(self._pool.exchange(request, Deadline(LIMIT_S))).body)

    def let(self, wait: Callable[..., Any]) -> None:
        assert wait(timeout=LIMIT_S)

    def close(self) -> None:
        self.runner.run_until_complete(self._pool.close())
        self.runner.close()


class WatchfulPool(AsyncPool):
    """The same with a loop that runs while nobody calls."""

    def let(self, wait: Callable[..., Any]) -> None:
        assert self.runner.run_until_complete(asyncio.to_thread(wait, timeout=LIMIT_S))


@pytest.fixture(params=["plain", "tls"])
def start(request: pytest.FixtureRequest, certificates: Any) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:

        def begin(script: Callable[[Server, socket.socket, int], None]) -> Server:
            server = Server(certificates.context(mutual=False) if request.param == "tls" else None, script)
            stack.callback(server.close)
            return server

        yield begin


@pytest.fixture(params=[SyncPool, AsyncPool, WatchfulPool])
def connect(request: pytest.FixtureRequest, certificates: Any) -> Iterator[Callable[[Server], Any]]:
    with contextlib.ExitStack() as stack:

        def make(server: Server) -> Any:
            tls = None if server._context is None else ssl.create_default_context(cafile=certificates.ca)
            url = TritonUrl("http" if tls is None else "https", "127.0.0.1", server.port)
            pool = request.param(url, tls)
            stack.callback(pool.close)
            return pool

        yield make


@pytest.mark.parametrize("end", ENDS)
def test_no_request_goes_to_a_connection_that_has_ended(
    start: Callable[..., Server], connect: Callable[[Server], Any], end: str
) -> None:
    def script(server: Server, connected: socket.socket, number: int) -> None:
        server.read(connected, SMALL.body)
        connected.sendall(OK)
        assert server.may_end.acquire(timeout=LIMIT_S)
        ENDS[end](connected)
        server.has_ended.release()

    server = start(script)
    pool = connect(server)
    ends = 1 if end == "say_goodbye" and server._context is None else 4
    for _ in range(ends):
        assert pool.ask(SMALL) == b"ok"
        server.may_end.release()
        pool.let(server.has_ended.acquire)
    assert len(server.received) == ends


def test_an_answer_that_comes_before_its_request_is_none(
    start: Callable[..., Server], connect: Callable[[Server], Any]
) -> None:
    def script(server: Server, connected: socket.socket, number: int) -> None:
        server.read(connected, SMALL.body)
        # In one piece, of which the first answer takes a part.
        connected.sendall(OK if number > 1 else OK + OK.replace(b"ok", b"no"))
        server.has_ended.release()

    server = start(script)
    pool = connect(server)
    for _ in range(2):
        assert pool.ask(SMALL) == b"ok"
        pool.let(server.has_ended.acquire)
    assert len(server.received) == 2


def test_what_a_server_cannot_have_is_sent_again_in_whole(
    start: Callable[..., Server], connect: Callable[[Server], Any]
) -> None:
    def script(server: Server, connected: socket.socket, number: int) -> None:
        if number == 1:
            server.read(connected, SMALL.body)
            connected.sendall(OK)
            connected.recv(1000)
            reset(connected)
        else:
            server.read(connected, b"end")
            connected.sendall(OK)

    server = start(script)
    pool = connect(server)
    assert pool.ask(SMALL) == b"ok"
    assert pool.ask(LARGE) == b"ok"
    assert server.received[1].partition(b"\r\n\r\n")[2] == LARGE.body


@pytest.mark.parametrize("end", ["close", "shut_down", "reset"])
def test_what_a_server_may_have_is_never_sent_again(
    start: Callable[..., Server], connect: Callable[[Server], Any], end: str
) -> None:
    def script(server: Server, connected: socket.socket, number: int) -> None:
        server.read(connected, SMALL.body)
        connected.sendall(OK)
        server.received[-1].clear()
        server.read(connected, SMALL.body)
        ENDS[end](connected)

    server = start(script)
    pool = connect(server)
    assert pool.ask(SMALL) == b"ok"
    with pytest.raises((HttpWireError, OSError)):
        pool.ask(SMALL)
    assert len(server.received) == 1
