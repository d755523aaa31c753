"""One keep-alive HTTP connection on an event loop, with a time limit for every wait on it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from .._core.deadline import Deadline
from .._route.addresses import Attempts
from .._route.asyncio_sockets import open_socket
from .._route.proxies import MAX_TUNNEL_BYTES, Route, check_tunnel
from .connection import is_silent
from .wire import HttpRequest, HttpResponse, HttpWireError, ResponseReader, encode_head

# Up to this many bytes of a body are handed to the transport at a time: what it cannot send at once, it copies.
_PIECE_BYTES = 1 << 18
# At most this much of a stream is read before somebody takes it.
_MAX_UNTAKEN_BYTES = 1 << 18


async def connect(
    route: Route, headers: Mapping[str, str], tls: ssl.SSLContext | None, max_bytes: int, deadline: Deadline
) -> HttpConnection:
    """Open a connection."""
    attempts = Attempts(route.hostname)
    task = asyncio.ensure_future(_connect(route, headers, tls, max_bytes, attempts))
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline.remaining_s())
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_close_unused)
        raise
    if not done:
        task.cancel()
        task.add_done_callback(_close_unused)
        raise attempts.timeout_error()
    return task.result()


def _close_unused(task: asyncio.Task[HttpConnection]) -> None:
    """Close a connection that was made although nobody waits for it any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


async def _connect(
    route: Route, headers: Mapping[str, str], tls: ssl.SSLContext | None, max_bytes: int, attempts: Attempts
) -> HttpConnection:
    loop = asyncio.get_running_loop()
    connecting = await open_socket(route.hostname, route.port, attempts)
    attempts.failures.clear()
    if route.tunnel:
        try:
            await _open_tunnel(connecting, route)
        except BaseException:
            connecting.close()
            raise
    # From here on the transport owns the socket, and closes it if the handshake fails.
    _, connection = await loop.create_connection(
        lambda: HttpConnection(route, headers, connecting, max_bytes),
        sock=connecting,
        ssl=tls,
        server_hostname=route.url.hostname if tls is not None else None,
    )
    return connection


async def _open_tunnel(connecting: socket.socket, route: Route) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connecting, route.tunnel)
    head = b""
    while b"\r\n\r\n" not in head and len(head) < MAX_TUNNEL_BYTES:
        piece = await loop.sock_recv(connecting, MAX_TUNNEL_BYTES)
        if not piece:
            break
        head += piece
    check_tunnel(head)


class HttpConnection(asyncio.BufferedProtocol):
    """One exchange at a time: send a request, then read its response at once or piece by piece.

    After an error or a cancellation the caller must ``abort`` it: unread bytes would be taken for the response to the
    next request.
    """

    def __init__(self, route: Route, headers: Mapping[str, str], connected: socket.socket, max_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = route.url.without_scheme
        self._prefix = route.prefix
        self._headers = headers
        self._socket = connected
        self._transport: Any = None
        self._reader = ResponseReader(max_bytes)
        # The task that waits for bytes, and the condition that ends its wait.
        self._reading: asyncio.Future[None] | None = None
        self._is_enough: Callable[[], bool] = bool
        self._writing: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._may_write = True
        self._is_paused = False
        self._is_written = False
        self.lost: asyncio.Future[None] = self._loop.create_future()

    async def exchange(self, request: HttpRequest, deadline: Deadline, *, is_stream: bool = False) -> HttpResponse:
        """Send a request and read its response; of a stream, read the head only."""
        reader = self._reader
        reader.begin(is_stream=is_stream)
        await self._read(lambda: reader.is_complete, deadline, request)
        return reader.response()

    async def read_piece(self, deadline: Deadline) -> bytes:
        """Return what has come of a stream, at least one byte; none at its end. Raises as ``exchange`` does."""
        reader = self._reader
        await self._read(lambda: reader.has_piece, deadline)
        if self._is_paused and not self.lost.done():
            self._is_paused = False
            self._transport.resume_reading()
        return reader.take()

    @property
    def can_be_kept(self) -> bool:
        """Whether the last exchange is over and the connection can carry another request."""
        return self.has_sent and self._reader.can_be_kept and not (self._error or self._is_paused)

    @property
    def has_sent(self) -> bool:
        """Whether the server may have all of the last request."""
        return self._is_written and self._may_write

    def is_alive(self) -> bool:
        """Ask whether an idle connection can be used: the server has not closed it, nor sent what nobody asked for."""
        # Unread bytes may be the end of the connection; TLS sends bytes for that as well.
        return self.can_be_kept and is_silent(self._socket)

    def abort(self) -> None:
        """Close it at once; ``lost`` is done when it is closed."""
        if not self.lost.done() and self._transport is not None and not self._loop.is_closed():
            self._transport.abort()

    # The methods that the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        # A pause then lasts until the system has taken all bytes. With high=0, TLS would pause without any.
        self._transport.set_write_buffer_limits(high=1, low=0)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            # Before Python 3.11, a lost TLS transport that nobody closed causes a warning.
            self._transport.abort()
        if isinstance(exc, BrokenPipeError):
            self._is_written = False
        if isinstance(exc, ConnectionError):
            self._receive_left()
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the connection was closed"))
        if not self.lost.done():
            self.lost.set_result(None)

    def _receive_left(self) -> None:
        """Read what came before the connection broke, if a write saw that first; TLS cannot be read any more."""
        if self._transport is None or self._transport.get_extra_info("ssl_object") is not None:
            return
        with contextlib.suppress(OSError):  # nothing more has come, or the loop has closed the socket
            while self._reading is not None and not self._reading.done():
                count = self._socket.recv_into(self._reader.buffer())
                if not count:
                    break  # what ends with the connection may be incomplete
                self.buffer_updated(count)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._reader.is_over:
            self.abort()  # the server sent bytes that belong to no request
        try:
            self._reader.received(nbytes)
        except (HttpWireError, MemoryError) as error:
            self._fail(error)
            return
        if self._reading is not None and not self._reading.done() and self._is_enough():
            self._reading.set_result(None)
            self._end_wait_to_write()
        if self._reader.untaken > _MAX_UNTAKEN_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self.buffer_updated(0)

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._end_wait_to_write()

    # The helpers of the methods above.

    async def _read(
        self, is_enough: Callable[[], bool], deadline: Deadline, request: HttpRequest | None = None
    ) -> None:
        """Read until that is enough; with a request, send that first."""
        if deadline.is_over:
            # If all bytes have already come, the loop would never run a timer.
            raise TimeoutError("the deadline is over")
        if is_enough():
            return
        if self._error is not None:
            raise self._error
        self._is_enough = is_enough
        self._reading = reading = self._loop.create_future()
        timer = self._loop.call_later(deadline.remaining_s(), self._fail, TimeoutError("the deadline is over"))
        try:
            if request is not None:
                await self._send(request)
            await reading
        finally:
            timer.cancel()
            self._reading = None
            if not reading.done():
                reading.cancel()
            elif not reading.cancelled():
                reading.exception()  # asyncio logs errors that nobody has retrieved

    async def _send(self, request: HttpRequest) -> None:
        head, body = encode_head(request, self._host, self._headers, self._prefix), request.body
        if len(body) <= _PIECE_BYTES:
            self._write(head + body, is_last=True)
            return
        self._write(head)
        view = memoryview(body)
        for start in range(0, len(view), _PIECE_BYTES):
            if not self._may_write:
                self._writing = self._loop.create_future()
                try:
                    await self._writing
                finally:
                    self._writing = None
            is_last = start + _PIECE_BYTES >= len(view)
            if is_last and self._transport.get_extra_info("ssl_object") is not None:
                # A TLS transport accepts bytes until the loop has reported the end to it, which takes two turns.
                for _ in range(2):
                    await asyncio.sleep(0)
            # If the server answers before it has read everything, the rest of the request is not sent.
            if self._reading is None or self._reading.done():
                return
            self._write(view[start : start + _PIECE_BYTES], is_last=is_last)
            if self._transport.is_closing():
                return  # the task that reads gets the error

    def _write(self, data: bytes | memoryview, *, is_last: bool = False) -> None:
        self._is_written = is_last
        self._transport.write(data)
        if self._transport.is_closing():
            self._is_written = False  # the system did not take the bytes

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self._reading is not None and not self._reading.done():
            self._reading.set_exception(error)
        self._end_wait_to_write()

    def _end_wait_to_write(self) -> None:
        if self._writing is not None and not self._writing.done():
            self._writing.set_result(None)
