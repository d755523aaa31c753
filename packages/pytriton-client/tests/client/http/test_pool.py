from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from pytriton.client._core.deadline import Deadline
from pytriton.client._core.url import TritonUrl
from pytriton.client._http.pool import ConnectionPool, PoolClosedError
from pytriton.client._http.wire import HttpRequest, HttpWireError

POST = HttpRequest("POST", "/", body=b"x")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
UNSERVED = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 4\r\n\r\nleft"
Script = Callable[[socket.socket, int], None]


class ScriptedServer:
    """Runs a function on each connection, with its number."""

    def __init__(self, script: Script) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.accepted = 0
        self.ended = threading.Event()
        self.script = script
        self.thread = threading.Thread(target=self._accept)
        self.thread.start()

    def _accept(self) -> None:
        self.listening.settimeout(0.02)
        with ExitStack() as connections:
            while not self.ended.is_set():
                try:
                    connection, _ = self.listening.accept()
                except TimeoutError:
                    continue
                connections.enter_context(connection).settimeout(300)
                self.accepted += 1
                self.script(connection, self.accepted)

    def close(self) -> None:
        self.ended.set()
        self.thread.join(300)
        self.listening.close()

    def pool(self) -> ConnectionPool:
        return ConnectionPool(TritonUrl("http", "127.0.0.1", self.listening.getsockname()[1]), {"X-Every": "one"})


@pytest.fixture
def serve() -> Iterator[Callable[[Script], ScriptedServer]]:
    with ExitStack() as stack:

        def start(script: Script) -> ScriptedServer:
            server = ScriptedServer(script)
            stack.callback(server.close)
            return server

        yield start


def get(pool: ConnectionPool, timeout_s: float = 300.0) -> bytes:
    return bytes(pool.exchange(HttpRequest("GET", "/"), Deadline(timeout_s)).body)


def test_connection_is_kept(serve: Callable[[Script], ScriptedServer]) -> None:
    def script(connection: socket.socket, number: int) -> None:
        for _ in range(3):
            connection.recv(1000)
            connection.sendall(OK)

    server = serve(script)
    pool = server.pool()
    assert [get(pool) for _ in range(3)] == [b"ok"] * 3
    assert server.accepted == 1
    pool.close()


def test_connection_that_the_server_closed_is_replaced(serve: Callable[[Script], ScriptedServer]) -> None:
    def script(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        connection.sendall(OK)
        connection.shutdown(socket.SHUT_RDWR)

    server = serve(script)
    pool = server.pool()
    assert [get(pool) for _ in range(3)] == [b"ok"] * 3
    assert server.accepted == 3
    pool.close()


def test_connection_that_breaks_under_an_inference_is_not_tried_again(
    serve: Callable[[Script], ScriptedServer],
) -> None:
    def script(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        connection.sendall(OK)
        connection.recv(1000)
        connection.shutdown(socket.SHUT_RDWR)

    server = serve(script)
    pool = server.pool()
    assert get(pool) == b"ok"
    with pytest.raises((HttpWireError, ConnectionError)):
        pool.exchange(POST, Deadline(10))
    assert server.accepted == 1
    pool.close()


@pytest.mark.parametrize("is_stream", [False, True])
def test_inference_that_a_replaced_server_has_not_looked_at_is_asked_again(
    serve: Callable[[Script], ScriptedServer], is_stream: bool
) -> None:
    def script(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        if number == 1:
            connection.sendall(OK)
            connection.recv(1000)
        connection.sendall(UNSERVED if number == 1 else OK)

    server = serve(script)
    pool = server.pool()
    assert get(pool) == b"ok"
    if is_stream:
        stream = pool.stream(POST, Deadline(300))
        assert stream.read_piece(Deadline(300)) == b"ok"
        stream.close()
    else:
        assert bytes(pool.exchange(POST, Deadline(300)).body) == b"ok"
    assert server.accepted == 2
    pool.close()


def test_a_new_connection_that_is_refused_so_is_not_replaced(serve: Callable[[Script], ScriptedServer]) -> None:
    def script(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        connection.sendall(UNSERVED)

    server = serve(script)
    pool = server.pool()
    assert pool.exchange(POST, Deadline(300)).status == 408
    assert server.accepted == 1
    pool.close()


def test_inference_that_the_server_does_not_have_is_tried_again(serve: Callable[[Script], ScriptedServer]) -> None:
    received = bytearray()

    def script(connection: socket.socket, number: int) -> None:
        if number == 1:
            connection.recv(1000)
            connection.sendall(OK)
            connection.recv(1000)
            # Closing it with most of the request unread resets the connection in the middle of it.
            connection.close()
            return
        while not received.endswith(b"end"):
            received.extend(connection.recv(1 << 20))
        connection.sendall(OK)

    server = serve(script)
    pool = server.pool()
    assert get(pool) == b"ok"
    body = bytes(1 << 26) + b"end"
    assert pool.exchange(HttpRequest("POST", "/", body=body), Deadline(60)).status == 200
    assert server.accepted == 2
    assert received.partition(b"\r\n\r\n")[2] == body
    pool.close()


def test_closing_the_pool_ends_an_exchange(serve: Callable[[Script], ScriptedServer]) -> None:
    ended = threading.Event()

    def script(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        pool.close()
        ended.wait(300)

    pool = serve(script).pool()
    try:
        with pytest.raises(PoolClosedError):
            get(pool, 20)
    finally:
        ended.set()


CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


def test_stream_gives_its_connection_back(serve: Callable[[Script], ScriptedServer]) -> None:
    def script(connection: socket.socket, number: int) -> None:
        while connection.recv(1000):
            connection.sendall(CHUNKS)

    server = serve(script)
    pool = server.pool()
    for _ in range(2):
        stream = pool.stream(POST, Deadline(300))
        assert stream.status == 200
        received = b""
        while piece := stream.read_piece(Deadline(300)):
            received += piece
        assert received == b"onetwo"
        stream.close()
        stream.close()
        assert stream.read_piece(Deadline(300)) == b""
    assert server.accepted == 1
    pool.close()


def test_stream_that_is_not_read_to_its_end_closes_its_connection(serve: Callable[[Script], ScriptedServer]) -> None:
    ended: list[bytes] = []

    def script(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        connection.sendall(CHUNKS[:-5])
        ended.append(connection.recv(1000))

    server = serve(script)
    pool = server.pool()
    for _ in range(2):
        stream = pool.stream(POST, Deadline(300))
        assert stream.read_piece(Deadline(300)).startswith(b"one")
        stream.close()
    server.close()
    assert ended == [b"", b""]
    pool.close()


def test_stream_that_stands_still_or_is_closed(serve: Callable[[Script], ScriptedServer]) -> None:
    ended = threading.Event()

    def script(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        connection.sendall(CHUNKS[: CHUNKS.index(b"3\r\ntwo")])
        ended.wait(300)

    server = serve(script)
    pool = server.pool()
    try:
        stream = pool.stream(POST, Deadline(300))
        assert stream.read_piece(Deadline(300)) == b"one"
        with pytest.raises(TimeoutError):
            stream.read_piece(Deadline(0.1))
        assert stream.read_piece(Deadline(0.1)) == b""
        stream.close()
    finally:
        ended.set()
    stream = pool.stream(POST, Deadline(300))
    pool.close()
    with pytest.raises(PoolClosedError):
        stream.read_piece(Deadline(300))


def test_deadline_holds_for_an_answer_that_drips(serve: Callable[[Script], ScriptedServer]) -> None:
    ended = threading.Event()

    def script(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        connection.sendall(OK.replace(b"Length: 2", b"Length: 100000"))
        # Each piece comes well within the time limit; all of them together do not.
        while not ended.wait(0.05):
            connection.sendall(b".")

    pool = serve(script).pool()
    try:
        with pytest.raises(TimeoutError):
            get(pool, 0.4)
    finally:
        ended.set()
    pool.close()


def test_deadline_holds_for_a_server_that_does_not_read(serve: Callable[[Script], ScriptedServer]) -> None:
    pool = serve(lambda connection, number: None).pool()
    with pytest.raises(TimeoutError):
        pool.exchange(HttpRequest("POST", "/", body=bytes(1 << 26)), Deadline(0.3))
    pool.close()


def test_large_body_arrives_whole(serve: Callable[[Script], ScriptedServer]) -> None:
    received = bytearray()

    def script(connection: socket.socket, number: int) -> None:
        while not received.endswith(b"end"):
            received.extend(connection.recv(1 << 20))
        connection.sendall(OK)

    pool = serve(script).pool()
    body = bytes(1 << 22) + b"end"
    assert pool.exchange(HttpRequest("POST", "/path", {"X-Name": "value"}, body), Deadline(300)).status == 200
    head, _, arrived = bytes(received).partition(b"\r\n\r\n")
    assert arrived == body
    assert head.startswith(b"POST /path HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nX-Every: one\r\nX-Name: value" in head
    pool.close()


def test_closed_pool(serve: Callable[[Script], ScriptedServer]) -> None:
    pool = serve(lambda connection, number: None).pool()
    pool.close()
    pool.close()
    with pytest.raises(PoolClosedError):
        get(pool)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_process_opens_connections_of_its_own(serve: Callable[[Script], ScriptedServer]) -> None:
    def script(connection: socket.socket, number: int) -> None:
        connection.recv(1000)
        connection.sendall(OK)

    server = serve(script)
    pool = server.pool()
    assert get(pool) == b"ok"
    child = os.fork()
    if child == 0:
        os._exit(0 if get(pool) == b"ok" else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert server.accepted == 2
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_short_lived_threads_leave_nothing_behind(serve: Callable[[Script], ScriptedServer]) -> None:
    def script(connection: socket.socket, number: int) -> None:
        while connection.recv(1000):
            connection.sendall(OK)

    pool = serve(script).pool()
    get(pool)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        thread = threading.Thread(target=get, args=(pool,))
        thread.start()
        thread.join(300)
    assert len(os.listdir("/proc/self/fd")) == before
    pool.close()
