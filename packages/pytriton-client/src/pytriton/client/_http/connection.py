"""One HTTP/1.1 connection over a socket, every wait of which ends at a deadline."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping

from .._core.deadline import Deadline
from .._core.url import TritonUrl
from .wire import HttpRequest, HttpResponse, ResponseReader, encode_head

__all__ = ["Connection", "is_silent"]

# Below this a copy costs less than a second system call.
_JOIN_BELOW_BYTES = 1 << 16


class Connection:
    """One connection, used by one thread at a time.

    Args:
        url: The server.
        headers: Sent with every request.
        tls: How to encrypt; ``None`` for a connection in the clear.
        max_bytes: The largest body of a response that is taken in one.
        deadline: For connecting, and for the handshake of the encryption.

    Attributes:
        has_sent: Whether all of the last request left this machine.

    Raises:
        OSError: The connection cannot be made, or (``TimeoutError``) the deadline is over.
    """

    def __init__(
        self,
        url: TritonUrl,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        max_bytes: int,
        deadline: Deadline,
    ) -> None:
        self._host = url.without_scheme
        self._headers = headers
        self._socket = _connect(url, deadline)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket.settimeout(_seconds(deadline))
                self._socket = tls.wrap_socket(self._socket, server_hostname=url.hostname)
        except BaseException:
            self._socket.close()
            raise
        self._reader = ResponseReader(max_bytes)
        self.has_sent = False

    def exchange(self, request: HttpRequest, deadline: Deadline, *, is_stream: bool = False) -> HttpResponse:
        """Send a request and read its response, of a stream the head.

        Raises:
            OSError: The connection broke, or (``TimeoutError``) the deadline is over.
            HttpWireError: The response cannot be understood, ends early or is too large.
        """
        self.has_sent = False
        self._reader.begin(is_stream=is_stream)
        head = encode_head(request, self._host, self._headers)
        if len(request.body) < _JOIN_BELOW_BYTES:
            self._send(head + request.body, deadline)
        else:
            self._send(head, deadline)
            self._send(request.body, deadline)
        self.has_sent = True
        while not self._reader.is_complete:
            self._receive(deadline)
        return self._reader.response()

    def read_piece(self, deadline: Deadline) -> bytes:
        """Return what has come of a stream, at least one byte; none at its end. Raises as ``exchange`` does."""
        while not self._reader.has_piece:
            self._receive(deadline)
        return self._reader.take()

    @property
    def can_be_kept(self) -> bool:
        """Whether the last response is over and the connection can carry another request."""
        return self._reader.can_be_kept

    def is_alive(self) -> bool:
        """Ask whether an idle connection can be used: the server has not closed it, nor sent what nobody asked for."""
        self._socket.settimeout(0)
        return is_silent(self._socket, is_encrypted=isinstance(self._socket, ssl.SSLSocket))

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

    def _receive(self, deadline: Deadline) -> None:
        self._socket.settimeout(_seconds(deadline))
        self._reader.received(self._socket.recv_into(self._reader.buffer()))


def is_silent(connected: socket.socket, *, is_encrypted: bool) -> bool:
    """Ask whether a socket that does not block is open, and nothing has come on it."""
    try:
        # An SSLSocket refuses to peek; the socket below it does not.
        pending = socket.socket.recv(connected, 1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return True
    except OSError:
        return False
    # TLS sends tickets of its own accord.
    return bool(pending) and is_encrypted


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
