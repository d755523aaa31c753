"""One HTTP/1.1 connection over a socket, every wait of which ends at a deadline."""

from __future__ import annotations

import os
import select
import selectors
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import cast

from .._core.deadline import Deadline
from .._route.addresses import (
    ATTEMPT_DELAY_S,
    Address,
    Attempts,
    addresses_of,
    numeric_addresses,
    order_addresses,
    start_look_up,
)
from .._route.proxies import MAX_TUNNEL_BYTES, Route, check_tunnel
from .wire import HttpRequest, HttpResponse, HttpWireError, ResponseReader, encode_head

# Below this a copy costs less than a second system call.
_JOIN_BELOW_BYTES = 1 << 16
# The errors of a non-blocking socket that would have to wait.
_WOULD_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class HttpConnection:
    """One connection, used by one thread at a time."""

    def __init__(
        self,
        route: Route,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        max_bytes: int,
        deadline: Deadline,
    ) -> None:
        self._host = route.url.without_scheme
        self._prefix = route.prefix
        self._headers = headers
        self._socket = _connect(route, deadline)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if route.tunnel:
                self._open_tunnel(route, deadline)
            if tls is not None:
                self._socket.settimeout(_seconds(deadline))
                self._socket = tls.wrap_socket(self._socket, server_hostname=route.url.hostname)
        except BaseException:
            self._socket.close()
            raise
        self._reader = ResponseReader(max_bytes)
        self.has_sent = False

    def exchange(self, request: HttpRequest, deadline: Deadline, *, is_stream: bool = False) -> HttpResponse:
        """Send a request and read its response; of a stream, read the head only."""
        self.has_sent = False
        self._reader.begin(is_stream=is_stream)
        head = encode_head(request, self._host, self._headers, self._prefix)
        if len(request.body) < _JOIN_BELOW_BYTES:
            self.has_sent = self._send(head + request.body, deadline)
        else:
            self.has_sent = self._send(head, deadline) and self._send(request.body, deadline)
        while not self._reader.is_complete:
            self._receive(deadline)
        return self._reader.response()

    def read_piece(self, deadline: Deadline) -> bytes:
        """Return the bytes of a stream that have come, at least one; nothing at its end."""
        while not self._reader.has_piece:
            self._receive(deadline)
        return self._reader.take()

    @property
    def can_be_kept(self) -> bool:
        """Whether the last exchange is over and the connection can carry another request."""
        return self.has_sent and self._reader.can_be_kept

    def is_alive(self) -> bool:
        """Ask whether an idle connection can be used: the server has not closed it, nor sent what nobody asked for."""
        self._socket.settimeout(0)
        has_come = not is_silent(self._socket)
        if not isinstance(self._socket, ssl.SSLSocket):
            return not has_come
        if not has_come and not self._socket.pending():
            return True
        try:
            self._socket.recv(1)
        except ssl.SSLWantReadError:
            return True  # TLS sends tickets and keys without being asked
        except OSError:
            return False
        return False

    def shut_down(self) -> None:
        """End the reads and writes that another thread waits in; that thread then closes the connection."""
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                # The method of the SSL socket would make the other thread read encrypted bytes as plain ones.
                socket.SocketType.shutdown(self._socket, socket.SHUT_RDWR)
            else:
                self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the server, or the other thread, closed it first

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._socket.close()

    def _open_tunnel(self, route: Route, deadline: Deadline) -> None:
        self._socket.settimeout(_seconds(deadline))
        self._socket.sendall(route.tunnel)
        head = b""
        while b"\r\n\r\n" not in head and len(head) < MAX_TUNNEL_BYTES:
            self._socket.settimeout(_seconds(deadline))
            piece = self._socket.recv(MAX_TUNNEL_BYTES)
            if not piece:
                break
            head += piece
        check_tunnel(head)

    def _send(self, data: bytes, deadline: Deadline) -> bool:
        """Send, and return True; False if the response is complete before: who refuses a request may not read it."""
        view = memoryview(data)
        _seconds(deadline)
        self._socket.settimeout(0)
        try:
            view = view[self._send_some(view) :]
            if not view:
                return True
            while view:
                # A send that does not wait for room for a good deal sends many small pieces.
                is_readable, is_writable = _wait(self._socket, _seconds(deadline))
                if is_readable and self._receive_available(deadline):
                    return False
                if is_writable:
                    view = view[self._send_some(view) :]
        except TimeoutError:
            raise
        except OSError:
            # The response may have come before the connection broke; what ends with the connection may be incomplete.
            with suppress(OSError, HttpWireError):
                while _seconds(deadline) and (count := self._socket.recv_into(self._reader.buffer())):
                    self._reader.received(count)
                    if self._reader.is_complete:
                        return False
            raise
        return True

    def _send_some(self, view: memoryview) -> int:
        try:
            return self._socket.send(view)
        except _WOULD_WAIT:
            return 0

    def _receive_available(self, deadline: Deadline) -> bool:
        """Read what has come, without waiting, and return whether the response is complete."""
        with suppress(*_WOULD_WAIT):
            while not self._reader.is_complete and _seconds(deadline):
                self._reader.received(self._socket.recv_into(self._reader.buffer()))
        return self._reader.is_complete

    def _receive(self, deadline: Deadline) -> None:
        self._socket.settimeout(_seconds(deadline))
        self._reader.received(self._socket.recv_into(self._reader.buffer()))


def _wait(connected: socket.socket, timeout_s: float) -> tuple[bool, bool]:
    """Wait until a socket can be read or written, and return whether it can be read, and written."""
    if not hasattr(select, "poll"):  # such as in Windows, or where eventlet has patched the program
        readable, writable, _ = select.select([connected], [connected], [], timeout_s)
        return bool(readable), bool(writable)
    poll = select.poll()  # a third of the cost of a selector
    poll.register(connected, select.POLLIN | select.POLLOUT)
    events = sum(event for _, event in poll.poll(1000 * timeout_s))
    return bool(events & ~select.POLLOUT), bool(events & ~select.POLLIN)


def is_silent(connected: socket.socket) -> bool:
    """Return whether a non-blocking socket is open and nothing has come on it, encrypted or not."""
    try:
        if isinstance(connected, ssl.SSLSocket):
            socket.SocketType.recv(connected, 1, socket.MSG_PEEK)  # an SSL socket itself refuses MSG_PEEK
        else:
            connected.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return True
    except OSError:
        return False
    return False


def _connect(route: Route, deadline: Deadline) -> socket.socket:
    attempts = Attempts(route.hostname)
    found = numeric_addresses(route.hostname, route.port)
    if not found:
        from concurrent.futures import wait

        look_up = start_look_up(route.hostname, route.port)
        attempts.is_looking_up = not wait([look_up], deadline.remaining_s()).done
        if attempts.is_looking_up:
            raise attempts.timeout_error()
        found = addresses_of(look_up.result())
    slow: dict[socket.socket, Address] = {}
    addresses = order_addresses(found, route.hostname)
    try:
        for address in addresses:
            timeout_s = deadline.remaining_s()
            if timeout_s <= 0:
                raise attempts.timeout_error()
            family, kind, protocol, _, place = address
            attempts.failures[address] = connecting = None
            try:
                connecting = socket.socket(family, kind, protocol)
                slow[connecting] = address
                connecting.settimeout(timeout_s if len(addresses) == 1 else min(timeout_s, ATTEMPT_DELAY_S))
                connecting.connect(place)
                del slow[connecting]
                return connecting
            except OSError as error:
                if isinstance(error, TimeoutError) and not error.errno:
                    continue  # a timeout here does not end the attempt
                attempts.failures[address] = error
                if connecting is not None:
                    del slow[connecting]
                    connecting.close()
        return _wait_for_first(slow, attempts, deadline)
    finally:
        for unused in slow:
            unused.close()


def _wait_for_first(slow: dict[socket.socket, Address], attempts: Attempts, deadline: Deadline) -> socket.socket:
    """Return the first of several sockets that is connected; remove it and failed ones from ``slow``."""
    with selectors.DefaultSelector() as selector:
        for connecting in slow:
            selector.register(connecting, selectors.EVENT_WRITE)
        while slow:
            if deadline.is_over:
                raise attempts.timeout_error()
            for key, _ in selector.select(deadline.remaining_s()):
                selector.unregister(key.fileobj)
                connecting = cast("socket.socket", key.fileobj)
                address = slow.pop(connecting)
                number = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not number:
                    return connecting
                attempts.failures[address] = OSError(number, os.strerror(number))
                connecting.close()
    raise attempts.error()


def _seconds(deadline: Deadline) -> float:
    seconds = deadline.remaining_s()
    if seconds <= 0:
        # A timeout of 0 would make the socket non-blocking.
        raise TimeoutError("the deadline is over")
    return seconds
