"""Keep-alive HTTP connections that several threads share, each exchange under one deadline.

``tritonclient.http`` sends through gevent, whose sockets belong to the thread that made them. One client per thread
would be the way then, but a thread that has used gevent leaves the two file descriptors of its event loop open when it
ends. It has no limit for a call either, only one for each read. So requests travel through the standard library.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .._core.deadline import Deadline
from .._core.forks import call_in_child
from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from .._core.url import TritonUrl
from .._route.proxies import find_route
from .connection import HttpConnection
from .wire import HttpRequest, HttpResponse, HttpWireError, is_unserved, may_retry

if TYPE_CHECKING:
    import ssl

MAX_IDLE_CONNECTIONS = 128


class PoolClosedError(Exception):
    """The pool has been closed."""


class ConnectionPool:
    """Connections to one server: as many as there are exchanges at one time, kept for the next ones."""

    def __init__(
        self,
        url: TritonUrl,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None = None,
        max_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
    ) -> None:
        self._route = find_route(url)
        self._headers = {**headers, **self._route.headers}
        self._tls = tls
        self._max_bytes = max_bytes
        self._idle: list[HttpConnection] = []
        self.is_closed = False  # whether ``close`` was called
        self._begin()
        call_in_child(self, ConnectionPool._begin)

    def _begin(self) -> None:
        # Reentrant: the garbage collector, which may close a stream, can run in a thread that has the lock.
        self._lock = threading.RLock()
        # After a fork both processes would read from the same sockets.
        inherited, self._idle = self._idle, []
        self._busy: set[HttpConnection] = set()
        for connection in inherited:
            connection.close()

    def exchange(self, request: HttpRequest, deadline: Deadline) -> HttpResponse:
        """Send a request and read the response to its end."""
        connection, response = self._exchange(request, deadline)
        self.give_back(connection)
        return response

    def stream(self, request: HttpRequest, deadline: Deadline) -> HttpStream:
        """Send a request and read the head of its response; the caller reads the body piece by piece."""
        connection, response = self._exchange(request, deadline, is_stream=True)
        return HttpStream(self, connection, response.status)

    def close(self) -> None:
        """Close the connections. Exchanges and streams in flight end with ``PoolClosedError``."""
        with self._lock:
            self.is_closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            # Its own thread closes it: a descriptor that a thread still waits on must not be reused.
            connection.shut_down()

    def give_back(self, connection: HttpConnection) -> None:
        """Keep a connection for the next exchange if possible; otherwise close it."""
        with self._lock:
            # A forked child does not own the connection that a stream of its parent used.
            is_own = connection in self._busy
            self._busy.discard(connection)
            has_room = is_own and len(self._idle) < MAX_IDLE_CONNECTIONS
            if connection.can_be_kept and has_room and not self.is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def discard(self, connection: HttpConnection, error: BaseException | None = None) -> None:
        """Close a connection whose exchange is not over: unread bytes would be the response to the next request.

        Raises ``PoolClosedError`` in place of an error that comes from closing the pool.
        """
        with self._lock:
            self._busy.discard(connection)
        connection.close()
        if self.is_closed and isinstance(error, (OSError, HttpWireError)):
            raise PoolClosedError from error

    def _exchange(
        self, request: HttpRequest, deadline: Deadline, *, is_stream: bool = False
    ) -> tuple[HttpConnection, HttpResponse]:
        idle = self._take_idle()
        if idle is not None:
            try:
                response = self._exchange_on(idle, request, deadline, is_stream=is_stream)
                if not is_unserved(response):
                    return idle, response
                self.discard(idle)
            except (OSError, HttpWireError) as error:
                if not may_retry(request, error, has_sent=idle.has_sent):
                    raise
        fresh = self._connect(deadline)
        return fresh, self._exchange_on(fresh, request, deadline, is_stream=is_stream)

    def _exchange_on(
        self, connection: HttpConnection, request: HttpRequest, deadline: Deadline, *, is_stream: bool
    ) -> HttpResponse:
        try:
            return connection.exchange(request, deadline, is_stream=is_stream)
        except BaseException as error:
            self.discard(connection, error)
            raise

    def _connect(self, deadline: Deadline) -> HttpConnection:
        connection = HttpConnection(self._route, self._headers, self._tls, self._max_bytes, deadline)
        with self._lock:
            if not self.is_closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise PoolClosedError

    def _take_idle(self) -> HttpConnection | None:
        while True:
            with self._lock:
                if self.is_closed:
                    raise PoolClosedError
                if not self._idle:
                    return None
                connection = self._idle.pop()
                self._busy.add(connection)
            if connection.is_alive():
                return connection
            self.discard(connection)


class HttpStream:
    """A response that one thread reads piece by piece. It must be closed."""

    def __init__(self, pool: ConnectionPool, connection: HttpConnection, status: int) -> None:
        self._pool = pool
        self._connection: HttpConnection | None = connection
        self.status = status

    def read_piece(self, deadline: Deadline) -> bytes:
        """Wait for the next piece of the body and return it; ``b""`` after the last one. An error closes the stream."""
        connection = self._connection
        if connection is None:
            return b""
        try:
            if self._pool.is_closed:
                raise PoolClosedError
            return connection.read_piece(deadline)
        except BaseException as error:
            self._connection = None
            self._pool.discard(connection, error)
            raise

    def close(self) -> None:
        """Keep the connection if the response is over; else close it, which the server takes for a cancel."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection)
