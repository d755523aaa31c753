from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pytriton.client._core.deadline import Deadline
from pytriton.client._core.url import TritonUrl
from pytriton.client._http.asyncio_pool import AsyncConnectionPool
from pytriton.client._http.wire import HttpRequest, HttpWireError

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
POST = HttpRequest("POST", "/", body=b"x")
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(script: Script, call: Callable[[AsyncConnectionPool], Awaitable[None]]) -> None:
    """Make calls to a server that runs a script on each connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pool = AsyncConnectionPool(TritonUrl("http", "127.0.0.1", server.sockets[0].getsockname()[1]), {}, None)
        try:
            await call(pool)
        finally:
            await pool.close()
            server.close()

    asyncio.run(asyncio.wait_for(main(), 300))


def test_stream_is_not_read_far_ahead_of_its_reader() -> None:
    chunk = b"100000\r\n%b\r\n" % bytes(1 << 20)
    taken = 0
    given = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal given
        await reader.readuntil(b"\r\n\r\nx")
        writer.write(HEAD)
        for _ in range(64):
            writer.write(chunk)
            # Returns once the other side has taken nearly all.
            await writer.drain()
            given += 1 << 20
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async def call(pool: AsyncConnectionPool) -> None:
        nonlocal taken
        stream = pool.stream(POST)
        assert await stream.read_head(Deadline(300)) == 200
        for _ in range(1000):
            await asyncio.sleep(0)  # the event loop reads and writes whatever can be
        assert given < 64 << 20
        while piece := await stream.read_piece(Deadline(300)):
            assert len(piece) <= 1 << 19
            taken += len(piece)
        stream.close()

    run(script, call)
    assert taken == given == 64 << 20


def test_stream_that_breaks_after_some_pieces() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\nx")
        writer.write(HEAD + b"3\r\none\r\n3\r\nt")

    async def call(pool: AsyncConnectionPool) -> None:
        stream = pool.stream(POST)
        await stream.read_head(Deadline(300))
        received = b""
        error = None
        while error is None:
            try:
                received += await stream.read_piece(Deadline(300))
            except HttpWireError as broken:
                error = broken
        stream.close()
        assert received == b"onet"
        assert "2 more bytes" in str(error)

    run(script, call)


def test_connection_of_a_stream_is_kept_where_all_of_it_has_come() -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.read(1000):
            writer.write(HEAD + b"3\r\none\r\n0\r\n\r\n")

    async def call(pool: AsyncConnectionPool) -> None:
        for _ in range(3):
            stream = pool.stream(POST)
            await stream.read_head(Deadline(300))
            assert await stream.read_piece(Deadline(300)) == b"one"
            assert await stream.read_piece(Deadline(300)) == b""
            stream.close()

    run(script, call)
    assert connections == 1


def test_inference_that_a_replaced_server_has_not_looked_at_is_asked_again() -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number = connections
        await reader.readuntil(b"\r\n\r\nx")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        if number == 1:
            await reader.readuntil(b"\r\n\r\nx")
            writer.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async def call(pool: AsyncConnectionPool) -> None:
        for _ in range(2):
            assert (await pool.exchange(POST, Deadline(300))).status == 200

    run(script, call)
    assert connections == 2


def test_a_new_connection_that_is_refused_so_is_not_replaced() -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\nx")
        writer.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    async def call(pool: AsyncConnectionPool) -> None:
        assert (await pool.exchange(POST, Deadline(300))).status == 408

    run(script, call)
    assert connections == 1
