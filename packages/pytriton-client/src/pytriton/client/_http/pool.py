"""Keep-alive HTTP connections that several threads share, each exchange under one deadline.

``tritonclient.http`` sends through gevent, whose sockets belong to the thread that made them. One client per thread
would be the way then, but a thread that has used gevent leaves the two file descriptors of its event loop open when it
ends. It has no limit for a whole call either, only one for each read. So requests travel through the standard library.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from .._core.deadline import Deadline
from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from .._core.url import TritonUrl
from .connection import Connection
from .wire import Answer, HttpWireError, StreamedAnswer, read_answer

if TYPE_CHECKING:
    import ssl

__all__ = ["ConnectionPool", "HttpStream", "PoolClosedError"]

_MOST_IDLE = 128

Result = TypeVar("Result")


class PoolClosedError(Exception):
    """The pool has been closed."""


class ConnectionPool:
    """Connections to one server: as many as there are exchanges at one time, kept for the next ones.

    Args:
        url: The server.
        tls: How to encrypt; ``None`` for a connection in the clear.
        most_bytes: The largest body of a response that is taken as a whole.

    Attributes:
        is_closed: Whether ``close`` was called.
    """

    def __init__(
        self, url: TritonUrl, tls: ssl.SSLContext | None = None, most_bytes: int = DEFAULT_MAX_RESPONSE_BYTES
    ) -> None:
        self._url = url
        self._most_bytes = most_bytes
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._pid = os.getpid()
        self.is_closed = False

    def exchange(self, method: str, path: str, headers: Mapping[str, str], body: bytes, deadline: Deadline) -> Answer:
        """Send a request and read the response to its end.

        Args:
            method: ``GET`` or ``POST``.
            path: From the first slash on, quoted.
            headers: Without line breaks.
            body: May be empty.
            deadline: For connecting, sending and reading together. The look-up of a host name alone may take longer, as
                the operating system has no limit to give to it.

        Raises:
            PoolClosedError: The pool has been closed, before the exchange or during it.
            TimeoutError: The deadline is over.
            OSError: The connection cannot be made, or broke.
            HttpWireError: The answer is no HTTP, or ended early.
        """
        idle = self._take_idle()
        if idle is not None:
            try:
                return self._exchange_on(idle, method, path, headers, body, deadline)
            except (ConnectionError, HttpWireError):
                # The server may have closed the idle connection just now. A question can be asked again. An inference
                # can be if the server does not have all of it; else nobody knows whether it has begun with it.
                if method != "GET" and idle.has_sent:
                    raise
        return self._exchange_on(self._connect(deadline), method, path, headers, body, deadline)

    def stream(self, path: str, headers: Mapping[str, str], body: bytes, deadline: Deadline) -> HttpStream:
        """Send a ``POST`` request on a connection of its own, whose response is read piece by piece.

        Args:
            path: From the first slash on, quoted.
            headers: Without line breaks.
            body: May be empty.
            deadline: For connecting and sending together.

        Raises:
            OSError: As ``exchange``; also ``PoolClosedError`` and ``TimeoutError``.
        """
        connection = self._take_idle()
        if connection is not None:
            try:
                self._send_on(connection, path, headers, body, deadline)
                return HttpStream(self, connection)
            except ConnectionError:
                if connection.has_sent:
                    raise
        connection = self._connect(deadline)
        self._send_on(connection, path, headers, body, deadline)
        return HttpStream(self, connection)

    def close(self) -> None:
        """Close the connections. Exchanges and streams in flight end with ``PoolClosedError``."""
        with self._lock:
            self.is_closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy) if self._pid == os.getpid() else []
        for connection in idle:
            connection.close()
        for connection in busy:
            # Its thread closes it: the descriptor of a socket that is waited on must not be given to another one.
            connection.shut_down()

    def _exchange_on(
        self,
        connection: Connection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        deadline: Deadline,
    ) -> Answer:
        try:
            connection.send(method, path, headers, body, deadline)
            answer = read_answer(connection.source_until(deadline), self._most_bytes)
        except BaseException as error:
            self.discard(connection, error)
            raise
        if answer.can_be_kept:
            self.give_back(connection)
        else:
            self.discard(connection)
        return answer

    def _send_on(
        self, connection: Connection, path: str, headers: Mapping[str, str], body: bytes, deadline: Deadline
    ) -> None:
        try:
            connection.send("POST", path, headers, body, deadline)
        except BaseException as error:
            self.discard(connection, error)
            raise

    def _connect(self, deadline: Deadline) -> Connection:
        connection = Connection(self._url, self._tls, deadline)
        with self._lock:
            if not self.is_closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise PoolClosedError

    def _take_idle(self) -> Connection | None:
        while True:
            with self._lock:
                if self.is_closed:
                    raise PoolClosedError
                if self._pid != os.getpid():
                    # After a fork both processes would read from the same sockets.
                    inherited, self._idle, self._busy, self._pid = self._idle, [], set(), os.getpid()
                    for connection in inherited:
                        connection.close()
                if not self._idle:
                    return None
                connection = self._idle.pop()
                self._busy.add(connection)
            if connection.is_alive():
                return connection
            self.discard(connection)

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose exchange is over for the next one."""
        with self._lock:
            self._busy.discard(connection)
            if not self.is_closed and self._pid == os.getpid() and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def discard(self, connection: Connection, error: BaseException | None = None) -> None:
        """Close a connection whose exchange is not over: what it left unread would be the answer to the next request.

        Args:
            connection: The connection.
            error: Why, where something went wrong.

        Raises:
            PoolClosedError: In place of an error that came from closing the pool.
        """
        with self._lock:
            self._busy.discard(connection)
        connection.close()
        if self.is_closed and isinstance(error, (OSError, HttpWireError)):
            raise PoolClosedError from error


class HttpStream:
    """A response that is read piece by piece, by one thread at a time. Must be closed.

    Each read raises what ``ConnectionPool.exchange`` does, and closes the stream then.
    """

    def __init__(self, pool: ConnectionPool, connection: Connection) -> None:
        self._pool = pool
        self._connection: Connection | None = connection
        self._answer: StreamedAnswer | None = None

    def read_head(self, deadline: Deadline) -> tuple[int, Mapping[str, str]]:
        """Wait for the status code and the headers, whose names are in lower case. Must come first."""
        answer = self._answer = self._read(lambda connection: StreamedAnswer(connection.source_until(deadline)))
        return answer.status, answer.headers

    def read_piece(self, deadline: Deadline) -> bytes:
        """Wait for the next piece of the body and return it; ``b""`` after the last one."""
        answer = self._answer
        if answer is None or self._connection is None:
            return b""
        self._connection.source_until(deadline)
        return self._read(lambda connection: answer.read_piece())

    def close(self) -> None:
        """Keep the connection if the response is over; else close it, which the server takes for a cancel."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._answer is not None and self._answer.can_be_kept:
            self._pool.give_back(connection)
        else:
            self._pool.discard(connection)

    def _read(self, read: Callable[[Connection], Result]) -> Result:
        connection = self._connection
        if connection is None:
            raise PoolClosedError
        try:
            if self._pool.is_closed:
                raise PoolClosedError
            return read(connection)
        except BaseException as error:
            self._connection = None
            self._pool.discard(connection, error)
            raise
