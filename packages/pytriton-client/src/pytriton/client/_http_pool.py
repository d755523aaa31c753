"""Keep-alive HTTP connections that several threads share, each exchange under one deadline.

``tritonclient.http`` sends through gevent, whose sockets belong to the thread that made them. One client per thread
would be the way then, but a thread that has used gevent leaves the two file descriptors of its event loop open when it
ends. It has no limit for a whole call either, only one for each read. So the bytes of tritonclient's requests travel
through the standard library instead.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Mapping

from ._deadline import Deadline
from ._http_wire import Answer, HttpWireError, read_answer
from ._url import TritonUrl

__all__ = ["ConnectionPool", "PoolClosedError"]

# Below this a copy costs less than a second system call.
_JOIN_BELOW_BYTES = 1 << 16
_MOST_IDLE = 128


class PoolClosedError(Exception):
    """The pool has been closed."""


class ConnectionPool:
    """Connections to one server: as many as there are exchanges at one time, kept for the next ones.

    Args:
        url: The server.
    """

    def __init__(self, url: TritonUrl) -> None:
        self._url = url
        self._tls = ssl.create_default_context() if url.is_encrypted else None
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._pid = os.getpid()
        self._is_closed = False

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
            PoolClosedError: The pool has been closed.
            TimeoutError: The deadline is over.
            OSError: The connection cannot be made, or broke.
            HttpWireError: The answer is no HTTP, or ended early.
        """
        idle = self._take_idle()
        if idle is not None:
            try:
                return self._exchange_on(idle, method, path, headers, body, deadline)
            except (ConnectionError, HttpWireError):
                # The server may have closed the idle connection just now. A question can be asked again; an inference
                # cannot, as nobody knows whether the server has begun with it.
                if method != "GET":
                    raise
        fresh = _Connection(self._url, self._tls, deadline)
        return self._exchange_on(fresh, method, path, headers, body, deadline)

    def close(self) -> None:
        """Close the idle connections; those in use are closed at the end of their exchange."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _exchange_on(
        self,
        connection: _Connection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        deadline: Deadline,
    ) -> Answer:
        try:
            answer = connection.exchange(method, path, headers, body, deadline)
        except BaseException:
            # Whatever was left unread would be taken for the answer to the next request.
            connection.close()
            raise
        if answer.can_be_kept:
            self._give_back(connection)
        else:
            connection.close()
        return answer

    def _take_idle(self) -> _Connection | None:
        while True:
            with self._lock:
                if self._is_closed:
                    raise PoolClosedError
                if self._pid != os.getpid():
                    # After a fork both processes would read from the same sockets.
                    inherited, self._idle, self._pid = self._idle, [], os.getpid()
                    for connection in inherited:
                        connection.close()
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_alive():
                return connection
            connection.close()

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            if not self._is_closed and self._pid == os.getpid() and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()


class _Connection:
    def __init__(self, url: TritonUrl, tls: ssl.SSLContext | None, deadline: Deadline) -> None:
        self._host = url.without_scheme
        self._socket = _connect(url, deadline)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=url.hostname)
        except BaseException:
            self._socket.close()
            raise

    def exchange(self, method: str, path: str, headers: Mapping[str, str], body: bytes, deadline: Deadline) -> Answer:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "\r\n"]).encode("latin-1")
        if len(body) < _JOIN_BELOW_BYTES:
            self._send(head + body, deadline)
        else:
            self._send(head, deadline)
            self._send(body, deadline)
        return read_answer(_TimedSource(self._socket, deadline))

    def is_alive(self) -> bool:
        """Whether an idle connection can be used: the server has neither closed it nor sent what nobody asked for."""
        try:
            self._socket.settimeout(0)
            # An SSLSocket refuses to peek; the socket below it does not.
            pending = socket.socket.recv(self._socket, 1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        # TLS sends tickets of its own accord.
        return bool(pending) and isinstance(self._socket, ssl.SSLSocket)

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes, deadline: Deadline) -> None:
        view = memoryview(data)
        while view:
            self._socket.settimeout(_seconds(deadline))
            view = view[self._socket.send(view) :]


class _TimedSource:
    """The reading side of a socket, every read of which ends at the deadline."""

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._socket = connected
        self._deadline = deadline

    def recv(self, most_bytes: int, /) -> bytes:
        self._socket.settimeout(_seconds(self._deadline))
        return self._socket.recv(most_bytes)

    def recv_into(self, buffer: memoryview, /) -> int:
        self._socket.settimeout(_seconds(self._deadline))
        return self._socket.recv_into(buffer)


def _connect(url: TritonUrl, deadline: Deadline) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        # What the look-up says of a name with an empty label or one of more than 63 characters.
        raise OSError(f"{url.hostname!r} cannot be a host name: {error}") from error
    failure: OSError | None = None
    for family, kind, protocol, _, address in addresses:
        connecting = socket.socket(family, kind, protocol)
        try:
            connecting.settimeout(_seconds(deadline))
            connecting.connect(address)
            return connecting
        except OSError as error:
            connecting.close()
            failure = error
        except BaseException:
            connecting.close()
            raise
    raise failure or OSError(f"the host name {url.hostname!r} has no address")


def _seconds(deadline: Deadline) -> float:
    seconds = deadline.remaining_s()
    if seconds <= 0:
        # A timeout of 0 would make the socket non-blocking.
        raise TimeoutError("the deadline is over")
    return seconds
