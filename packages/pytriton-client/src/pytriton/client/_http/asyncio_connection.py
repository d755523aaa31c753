"""One keep-alive HTTP connection on an event loop, with a time limit for every wait on it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from .._core.deadline import Deadline
from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from .._core.url import TritonUrl
from .asyncio_wire import AnswerReader, Filling, Head
from .wire import Answer, HttpWireError

__all__ = ["Connection", "connect"]

# Up to this many bytes of a body are handed to the transport at a time: what it cannot send at once, it copies.
_PIECE_BYTES = 1 << 18

Result = TypeVar("Result")


async def connect(
    url: TritonUrl, tls: ssl.SSLContext | None, deadline: Deadline, most_bytes: int = DEFAULT_MAX_RESPONSE_BYTES
) -> Connection:
    """Open a connection.

    Args:
        url: The server.
        tls: For encrypted connections; ``None`` for others.
        deadline: For the look-up of the name, connecting and the handshake together.
        most_bytes: The largest body of a response that is taken as a whole.

    Raises:
        TimeoutError: The deadline is over.
        OSError: There is no connection to be had; ``ssl.SSLError`` is one of them.
    """
    task = asyncio.ensure_future(_connect(url, tls, most_bytes))
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline.remaining_s())
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_abandon)
        raise
    if not done:
        task.cancel()
        task.add_done_callback(_abandon)
        raise TimeoutError("the deadline is over")
    return task.result()


def _abandon(task: asyncio.Task[Connection]) -> None:
    """Close a connection that was made although nobody waits for it any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


async def _connect(url: TritonUrl, tls: ssl.SSLContext | None, most_bytes: int) -> Connection:
    loop = asyncio.get_running_loop()
    connecting = await _open_socket(url)
    # From here on the transport owns the socket, and closes it where the handshake fails.
    _, connection = await loop.create_connection(
        lambda: Connection(url.without_scheme, connecting, most_bytes),
        sock=connecting,
        ssl=tls,
        server_hostname=url.hostname if tls is not None else None,
    )
    return connection


async def _open_socket(url: TritonUrl) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for family, kind, protocol, _, address in await _addresses(url):
        connecting = socket.socket(family, kind, protocol)
        try:
            connecting.setblocking(False)
            await loop.sock_connect(connecting, address)
            connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connecting
        except OSError as error:
            connecting.close()
            failure = error
        except BaseException:
            connecting.close()
            raise
    raise failure or OSError(f"the host name {url.hostname!r} has no address")


async def _addresses(url: TritonUrl) -> list[Any]:
    try:
        # A number needs no look-up, and so no thread for it.
        return socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        loop = asyncio.get_running_loop()
    try:
        return await loop.getaddrinfo(url.hostname, url.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        # What the look-up says of a name with an empty label or one of more than 63 characters.
        raise OSError(f"{url.hostname!r} cannot be a host name: {error}") from error


class Connection(asyncio.BufferedProtocol):
    """One exchange at a time: send a request, then read its response, whole or piece by piece.

    Whoever gets an error out of it, or is cancelled while waiting for it, must ``abort`` it: whatever was left unread
    would be taken for the response to the next request.

    Args:
        host: For the ``Host`` header.
        connected: The socket below the transport; the transport owns it.
        most_bytes: The largest body of a response that is taken as a whole.

    Attributes:
        has_sent: Whether the server may have the whole of the last request.
        lost: Done when the connection is closed.
    """

    def __init__(self, host: str, connected: socket.socket, most_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._socket = connected
        self._transport: Any = None
        self._reader = AnswerReader(most_bytes)
        # What is being read, where its next bytes go, and who waits for it.
        self._steps: Filling[Any] | None = None
        self._buffer = memoryview(b"")
        self._reading: asyncio.Future[Any] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._may_write = True
        self._is_streaming = False
        self._is_paused = False
        self._is_lost = False
        self._is_at_end = False
        self.has_sent = False
        self.lost: asyncio.Future[None] = self._loop.create_future()

    async def exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, deadline: Deadline
    ) -> Answer:
        """Send a request and read its whole response.

        Raises:
            TimeoutError: The deadline is over.
            OSError: The connection broke.
            HttpWireError: The answer is no HTTP, or ended early.
        """
        self._is_streaming = False
        return await self._read(self._reader.answer(), deadline, self._send(method, path, headers, body))

    async def begin(self, method: str, path: str, headers: Mapping[str, str], body: bytes, deadline: Deadline) -> Head:
        """Send a request and read what comes before the body of its response. Raises as ``exchange`` does."""
        self._is_streaming = True
        return await self._read(self._reader.head(), deadline, self._send(method, path, headers, body))

    async def read_piece(self, head: Head, deadline: Deadline) -> bytes:
        """Read what has come of the body, at least one byte; none at its end. Raises as ``exchange`` does."""
        return await self._read(self._reader.piece(head), deadline)

    async def read_body(self, head: Head, deadline: Deadline) -> bytearray:
        """Read the whole body. Raises as ``exchange`` does."""
        return await self._read(self._reader.body(head), deadline)

    @property
    def is_body_read(self) -> bool:
        """Whether nothing of the body of the last response is left to come."""
        return self._reader.is_body_read

    def rest(self) -> bool:
        """End what was done last, all of which was read. Whether the connection may be kept for another request."""
        if self._is_paused and not self._is_lost:
            self._is_paused = False
            self._transport.resume_reading()
        self._is_streaming = False
        return not (self._is_lost or self._is_at_end or self._reader.has_more)

    def is_alive(self) -> bool:
        """Return whether it can carry a request: the server has neither closed it nor sent what nobody asked for."""
        if self._is_lost or self._is_at_end or self._reader.has_more:
            return False
        try:
            # What the loop has not looked at yet.
            pending = self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        # TLS sends tickets of its own accord.
        return bool(pending) and self._transport.get_extra_info("ssl_object") is not None

    def abort(self) -> None:
        """Close it at once. ``lost`` tells when that is done."""
        if not self._is_lost and self._transport is not None and not self._loop.is_closed():
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        # So that a pause lasts until all has been given to the system. With 0, TLS would pause where nothing is left.
        self._transport.set_write_buffer_limits(high=1, low=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._transport is not None:
            # Before Python 3.11, TLS warns of one that was lost and that nobody has closed.
            self._transport.abort()
        if isinstance(exc, BrokenPipeError):
            self.has_sent = False
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the connection was closed"))
        if not self.lost.done():
            self.lost.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.free() if self._steps is None else self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._steps is not None:
            self._advance(nbytes)
        elif self._is_streaming:
            # TLS gives what it had decrypted before it was told to pause.
            self._reader.add(nbytes)
        else:
            self._is_at_end = True
            self.abort()

    def eof_received(self) -> None:
        self._is_at_end = True
        if self._steps is not None:
            self._advance(0)

    def pause_writing(self) -> None:
        self._may_write = self.has_sent = False

    def resume_writing(self) -> None:
        self._may_write = self.has_sent = True
        self._end_wait_to_write()

    # What is below the methods above.

    async def _send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "\r\n"]).encode("latin-1")
        if len(body) <= _PIECE_BYTES:
            self.has_sent = True
            self._transport.write(head + body)
            return
        self._transport.write(head)
        view = memoryview(body)
        for start in range(0, len(view), _PIECE_BYTES):
            if not self._may_write:
                self._writing = self._loop.create_future()
                try:
                    await self._writing
                finally:
                    self._writing = None
            self.has_sent = False
            # A server that answers before it has read everything has made up its mind.
            if self._reading is None or self._reading.done():
                self._is_at_end = True
                return
            if start + _PIECE_BYTES >= len(view):
                self.has_sent = True
            self._transport.write(view[start : start + _PIECE_BYTES])

    async def _read(
        self, steps: Filling[Result], deadline: Deadline, sending: Coroutine[Any, Any, None] | None = None
    ) -> Result:
        if deadline.is_over:
            # Where all that is read next has come already, no timer would ever have its turn.
            if sending is not None:
                sending.close()
            raise TimeoutError("the deadline is over")
        reading: asyncio.Future[Result] = self._loop.create_future()
        self._reading, self._steps = reading, steps
        timer = self._loop.call_later(deadline.remaining_s(), self._fail, TimeoutError("the deadline is over"))
        try:
            self._advance(None)
            if self._is_lost:
                self._fail(ConnectionResetError("the connection was closed"))
            elif self._is_paused:
                self._is_paused = False
                self._transport.resume_reading()
            if sending is not None:
                await sending
            return await reading
        finally:
            timer.cancel()
            self._steps = self._reading = None
            if not reading.done():
                reading.cancel()
            elif not reading.cancelled():
                reading.exception()  # or asyncio would complain of one that nobody looked at
            if sending is not None:
                sending.close()
            if self._is_streaming and not self._is_lost and not self._is_at_end:
                # Take no more of a body than its reader has asked for.
                self._is_paused = True
                self._transport.pause_reading()

    def _advance(self, nbytes: int | None) -> None:
        """Tell what reads that bytes came (``None`` to begin), and take from it where the next ones go."""
        steps, reading = self._steps, self._reading
        if steps is None or reading is None or reading.done():
            return
        try:
            self._buffer = next(steps) if nbytes is None else steps.send(nbytes)
        except StopIteration as end:
            self._steps = None
            reading.set_result(end.value)
        except (HttpWireError, MemoryError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._steps = None
        if self._reading is not None and not self._reading.done():
            self._reading.set_exception(error)
        self._end_wait_to_write()

    def _end_wait_to_write(self) -> None:
        if self._writing is not None and not self._writing.done():
            self._writing.set_result(None)
