"""Keep-alive HTTP connections of an asyncio client: a set of them for each event loop that uses the client."""

from __future__ import annotations

import asyncio
import collections
import ssl
from collections.abc import Mapping

from .._core.asyncio_loops import LoopsClosedError, PerLoop
from .._core.deadline import Deadline
from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from .._core.url import TritonUrl
from .asyncio_connection import Connection, connect
from .asyncio_wire import Head
from .wire import Answer, HttpWireError

__all__ = ["AsyncConnectionPool", "AsyncHttpStream"]

# More requests than this at one time wait for a connection; each one is a file descriptor.
_MOST_CONNECTIONS = 256
_MOST_IDLE = 128
_CLOSING_TIMEOUT_S = 1.0


class AsyncConnectionPool:
    """Connections to one server: as many as there are exchanges at one time, kept for the next ones.

    Args:
        url: The server.
        tls: For encrypted connections; ``None`` for others.
        most_bytes: The largest body of a response that is taken as a whole.
    """

    def __init__(
        self, url: TritonUrl, tls: ssl.SSLContext | None, most_bytes: int = DEFAULT_MAX_RESPONSE_BYTES
    ) -> None:
        self._per_loop = PerLoop(lambda: _Connections(url, tls, most_bytes), _Connections.close)

    async def exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, deadline: Deadline
    ) -> Answer:
        """Send a request and read the response to its end. A task that is cancelled meanwhile closes the connection.

        Args:
            method: ``GET`` or ``POST``.
            path: From the first slash on, quoted.
            headers: Without line breaks.
            body: May be empty.
            deadline: For waiting for a connection, connecting, sending and reading together.

        Raises:
            LoopsClosedError: The pool has been closed.
            TimeoutError: The deadline is over.
            OSError: The connection cannot be made, or broke.
            HttpWireError: The answer is no HTTP, or ended early.
        """
        connections = await self._per_loop.get()
        connection, is_fresh = await connections.take(deadline)
        try:
            answer = await connection.exchange(method, path, headers, body, deadline)
        except (ConnectionError, HttpWireError):
            connections.drop(connection)
            # The server may have closed the idle connection just now. A question can be asked again. An inference can
            # be if the server does not have all of it; else nobody knows whether it has begun with it.
            if is_fresh or connections.is_closed or (method != "GET" and connection.has_sent):
                raise
        except BaseException:
            connections.drop(connection)
            raise
        else:
            connections.give_back(connection, answer.can_be_kept)
            return answer
        return await self.exchange(method, path, headers, body, deadline)

    def stream(self, path: str, headers: Mapping[str, str], body: bytes) -> AsyncHttpStream:
        """Prepare a POST request whose response is read piece by piece; reading its head sends it.

        Args:
            path: From the first slash on, quoted.
            headers: Without line breaks.
            body: May be empty.
        """
        return AsyncHttpStream(self._per_loop, path, headers, body)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._per_loop.is_closed

    @property
    def has_connections(self) -> bool:
        """Whether a loop that is not closed holds connections."""
        return self._per_loop.is_any_open

    def close_soon(self) -> None:
        """Let every loop close its connections, without waiting for that."""
        self._per_loop.close_soon()

    async def close(self) -> None:
        """Close the connections; exchanges that run end with an error. A second call does nothing."""
        await self._per_loop.close()


class AsyncHttpStream:
    """A POST request and its response, read piece by piece by one task. Raises as ``AsyncConnectionPool.exchange``.

    Args:
        per_loop: The connections.
        path: From the first slash on, quoted.
        headers: Without line breaks.
        body: May be empty.
    """

    def __init__(self, per_loop: PerLoop[_Connections], path: str, headers: Mapping[str, str], body: bytes) -> None:
        self._per_loop = per_loop
        self._request = (path, headers, body)
        self._connections: _Connections | None = None
        self._connection: Connection | None = None
        self._head: Head | None = None

    async def read_head(self, deadline: Deadline) -> int:
        """Send the request, wait for the response and return its status. To be called once, before all else."""
        self._connections = connections = await self._per_loop.get()
        path, headers, body = self._request
        while True:
            connection, is_fresh = await connections.take(deadline)
            self._connection = connection
            try:
                self._head = await connection.begin("POST", path, headers, body, deadline)
            except ConnectionError:
                # As in exchange().
                if is_fresh or connections.is_closed or connection.has_sent:
                    raise
                connections.drop(connection)
            else:
                return self._head.status

    async def read_piece(self, deadline: Deadline) -> bytes:
        """Return what has come of the body, at least one byte; none at its end."""
        if self._connection is None or self._head is None:
            return b""
        return await self._connection.read_piece(self._head, deadline)

    def close(self) -> None:
        """Keep the connection if the response was read to its end; else close it, which cancels the request."""
        connections, connection, head = self._connections, self._connection, self._head
        self._connection = None
        if connections is None or connection is None:
            return
        if head is not None and connection.is_body_read:
            connections.give_back(connection, head.can_be_kept)
        else:
            connections.drop(connection)


class _Connections:
    """The connections of one event loop, used by nothing else than tasks of it."""

    def __init__(self, url: TritonUrl, tls: ssl.SSLContext | None, most_bytes: int) -> None:
        self._url = url
        self._most_bytes = most_bytes
        self._tls = tls
        self._idle: list[Connection] = []
        self._used: set[Connection] = set()
        self._opening = 0
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self.is_closed = False

    async def take(self, deadline: Deadline) -> tuple[Connection, bool]:
        """Return a connection, and whether it is a fresh one.

        Raises:
            LoopsClosedError: They have been closed.
            TimeoutError: The deadline is over.
            OSError: The connection cannot be made.
        """
        has_waited = False
        while True:
            if self.is_closed:
                raise LoopsClosedError
            while self._idle:
                connection = self._idle.pop()
                if connection.is_alive():
                    self._used.add(connection)
                    return connection, False
                connection.abort()
            if len(self._used) + self._opening < _MOST_CONNECTIONS:
                return await self._open(deadline), True
            await self._wait_for_another(deadline, is_first=has_waited)
            has_waited = True

    def give_back(self, connection: Connection, can_be_kept: bool) -> None:
        """Keep a connection for the next exchange, if it can be."""
        self._used.discard(connection)
        if connection.rest() and can_be_kept and not self.is_closed and len(self._idle) < _MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()
        self._wake_next()

    def drop(self, connection: Connection) -> None:
        """Close a connection that cannot be used again."""
        self._used.discard(connection)
        connection.abort()
        self._wake_next()

    async def close(self) -> None:
        """Close all of them, and wait until the event loop has done so."""
        self.is_closed = True
        connections = [*self._idle, *self._used]
        self._idle.clear()
        for connection in connections:
            connection.abort()
        while self._waiting:
            self._wake_next()
        if connections:
            await asyncio.wait([connection.lost for connection in connections], timeout=_CLOSING_TIMEOUT_S)

    async def _open(self, deadline: Deadline) -> Connection:
        self._opening += 1
        try:
            connection = await connect(self._url, self._tls, deadline, self._most_bytes)
        except BaseException:
            self._wake_next()
            raise
        finally:
            self._opening -= 1
        if self.is_closed:
            connection.abort()
            raise LoopsClosedError
        self._used.add(connection)
        return connection

    async def _wait_for_another(self, deadline: Deadline, *, is_first: bool) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if is_first:
            # Its turn had come, but a task that did not wait was faster.
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        timer = loop.call_later(deadline.remaining_s(), _expire, turn)
        try:
            await turn
        except BaseException:
            # Whoever was woken and does not take the connection passes the turn on.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._wake_next()
            raise
        finally:
            timer.cancel()

    def _wake_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


def _expire(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_exception(
            TimeoutError(f"no connection was free: {_MOST_CONNECTIONS} requests are under way, the most at one time")
        )
