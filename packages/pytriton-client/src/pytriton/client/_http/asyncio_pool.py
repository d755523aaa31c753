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
from .._route.proxies import Route, find_route
from .asyncio_connection import HttpConnection, connect
from .pool import MAX_IDLE_CONNECTIONS
from .wire import HttpRequest, HttpResponse, is_unserved, may_retry

# More requests than this at one time wait for a connection; each one is a file descriptor.
_MAX_CONNECTIONS = 256
_CLOSING_TIMEOUT_S = 1.0


class AsyncConnectionPool:
    """Connections to one server: as many as there are exchanges at one time, kept for the next ones."""

    def __init__(
        self,
        url: TritonUrl,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        max_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
    ) -> None:
        route = find_route(url)
        headers = {**headers, **route.headers}

        def make() -> _Connections:
            return _Connections(route, headers, tls, max_bytes)

        self._per_loop = PerLoop(make, _Connections.close)

    async def exchange(self, request: HttpRequest, deadline: Deadline) -> HttpResponse:
        """Send a request and read the response to its end, within the deadline.

        If the task is cancelled, the connection is closed.
        """
        connections = await self._per_loop.get()
        connection, response = await connections.exchange(request, deadline)
        connections.give_back(connection)
        return response

    def stream(self, request: HttpRequest) -> AsyncHttpStream:
        """Prepare a request, the response to which is read piece by piece; reading its head sends it."""
        return AsyncHttpStream(self._per_loop, request)

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
    """A request and its response, which one task reads piece by piece."""

    def __init__(self, per_loop: PerLoop[_Connections], request: HttpRequest) -> None:
        self._per_loop = per_loop
        self._request = request
        self._connections: _Connections | None = None
        self._connection: HttpConnection | None = None

    async def read_head(self, deadline: Deadline) -> int:
        """Send the request, wait for the response and return its status. To be called once, before all else."""
        self._connections = await self._per_loop.get()
        self._connection, response = await self._connections.exchange(self._request, deadline, is_stream=True)
        return response.status

    async def read_piece(self, deadline: Deadline) -> bytes:
        """Return what has come of the body, at least one byte; none at its end."""
        return b"" if self._connection is None else await self._connection.read_piece(deadline)

    def close(self) -> None:
        """Keep the connection if the response is over; else close it, which cancels the request."""
        connection, self._connection = self._connection, None
        if self._connections is not None and connection is not None:
            self._connections.give_back(connection)


class _Connections:
    """The connections of one event loop, which only its tasks use."""

    def __init__(
        self,
        route: Route,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        max_bytes: int,
    ) -> None:
        self._route = route
        self._headers = headers
        self._tls = tls
        self._max_bytes = max_bytes
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._opening = 0
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self.is_closed = False

    async def exchange(
        self, request: HttpRequest, deadline: Deadline, *, is_stream: bool = False
    ) -> tuple[HttpConnection, HttpResponse]:
        """Send a request and read its response, or the head of a stream.

        Returns the connection, which has to be given back, and the response.
        """
        while True:
            connection, is_fresh = await self.take(deadline)
            try:
                response = await connection.exchange(request, deadline, is_stream=is_stream)
                if is_fresh or not is_unserved(response):
                    return connection, response
                self.discard(connection)
            except BaseException as error:
                self.discard(connection)
                if is_fresh or self.is_closed or not may_retry(request, error, has_sent=connection.has_sent):
                    raise

    async def take(self, deadline: Deadline) -> tuple[HttpConnection, bool]:
        """Return a connection, and whether it is new."""
        has_waited = False
        while True:
            if self.is_closed:
                raise LoopsClosedError
            while self._idle:
                connection = self._idle.pop()
                if connection.is_alive():
                    self._busy.add(connection)
                    return connection, False
                connection.abort()
            if len(self._busy) + self._opening < _MAX_CONNECTIONS:
                return await self._open(deadline), True
            await self._wait_for_another(deadline, is_first=has_waited)
            has_waited = True

    def give_back(self, connection: HttpConnection) -> None:
        """Keep a connection for the next exchange if possible; otherwise close it."""
        self._busy.discard(connection)
        if connection.can_be_kept and not self.is_closed and len(self._idle) < MAX_IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.abort()
        self._wake_next()

    def discard(self, connection: HttpConnection) -> None:
        """Close a connection that cannot be used again."""
        self._busy.discard(connection)
        connection.abort()
        self._wake_next()

    async def close(self) -> None:
        """Close all of them, and wait until the event loop has done so."""
        self.is_closed = True
        connections = [*self._idle, *self._busy]
        self._idle.clear()
        for connection in connections:
            connection.abort()
        while self._waiting:
            self._wake_next()
        if connections:
            await asyncio.wait([connection.lost for connection in connections], timeout=_CLOSING_TIMEOUT_S)

    async def _open(self, deadline: Deadline) -> HttpConnection:
        self._opening += 1
        try:
            connection = await connect(self._route, self._headers, self._tls, self._max_bytes, deadline)
        except BaseException:
            self._wake_next()
            raise
        finally:
            self._opening -= 1
        if self.is_closed:
            connection.abort()
            raise LoopsClosedError
        self._busy.add(connection)
        return connection

    async def _wait_for_another(self, deadline: Deadline, *, is_first: bool) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if is_first:
            # A task that did not wait was faster, so this one keeps its place at the front.
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        timer = loop.call_later(deadline.remaining_s(), _expire, turn)
        try:
            await turn
        except BaseException:
            # A task that was woken and does not take the connection wakes the next one.
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
            TimeoutError(f"no connection was free: {_MAX_CONNECTIONS} requests are under way, the most at one time")
        )
