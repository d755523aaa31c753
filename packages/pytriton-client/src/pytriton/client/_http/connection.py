"""One HTTP/1.1 connection over a socket, every wait of which ends at a deadline."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping

from .._core.deadline import Deadline
from .._core.url import TritonUrl

__all__ = ["Connection", "TimedSource"]

# Below this a copy costs less than a second system call.
_JOIN_BELOW_BYTES = 1 << 16


class Connection:
    """One connection, used by one thread at a time.

    Args:
        url: The server.
        tls: How to encrypt; ``None`` for a connection in the clear.
        deadline: For connecting, and for the handshake of the encryption.

    Attributes:
        has_sent: Whether the last request left this machine as a whole.

    Raises:
        OSError: The connection cannot be made, or (``TimeoutError``) the deadline is over.
    """

    def __init__(self, url: TritonUrl, tls: ssl.SSLContext | None, deadline: Deadline) -> None:
        self._host = url.without_scheme
        self._socket = _connect(url, deadline)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket.settimeout(_seconds(deadline))
                self._socket = tls.wrap_socket(self._socket, server_hostname=url.hostname)
        except BaseException:
            self._socket.close()
            raise
        self._source = TimedSource(self._socket, deadline)
        self.has_sent = False

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes, deadline: Deadline) -> None:
        """Send a whole request.

        Raises:
            OSError: The connection broke, or (``TimeoutError``) the deadline is over.
        """
        self.has_sent = False
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "\r\n"]).encode("latin-1")
        if len(body) < _JOIN_BELOW_BYTES:
            self._send(head + body, deadline)
        else:
            self._send(head, deadline)
            self._send(body, deadline)
        self.has_sent = True

    def source_until(self, deadline: Deadline) -> TimedSource:
        """Return the reading side, with its deadline set for all reads to come."""
        self._source.deadline = deadline
        return self._source

    def is_alive(self) -> bool:
        """Return whether an idle connection can be used.

        The server has neither closed it nor sent what nobody asked for.
        """
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

    def shut_down(self) -> None:
        """End the reads and writes that another thread waits in; it closes the connection itself then."""
        try:
            # Not the one of SSLSocket, which would let that thread read what is encrypted as if it were not.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            return  # the other side or the other thread was faster

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._socket.close()

    def _send(self, data: bytes, deadline: Deadline) -> None:
        view = memoryview(data)
        while view:
            self._socket.settimeout(_seconds(deadline))
            view = view[self._socket.send(view) :]


class TimedSource:
    """The reading side of a socket, every read of which ends at the deadline.

    Args:
        connected: The socket.
        deadline: May be set anew at any time.
    """

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self._socket = connected
        self.deadline = deadline

    def recv(self, most_bytes: int, /) -> bytes:
        """Return some bytes, or none at the end."""
        self._socket.settimeout(_seconds(self.deadline))
        return self._socket.recv(most_bytes)

    def recv_into(self, buffer: memoryview, /) -> int:
        """Fill some of the buffer and return how much; 0 at the end."""
        self._socket.settimeout(_seconds(self.deadline))
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
