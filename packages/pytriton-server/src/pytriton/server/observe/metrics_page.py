"""The page of metrics: an HTTP server of its own, on the port that the user set for metrics."""

import contextlib
import gzip
import http.server
import io
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from pytriton.proxy_backend.system.forks import close_in_child
from pytriton.proxy_backend.system.threads import keep_on

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The text form of Prometheus, as every scraper reads it."""

MAX_CALLERS = 8
"""Requests that are answered at the same time; more get status 503."""

MAX_WAITING = 64
"""Connections without a whole request at the same time; of more, the one that waits longest is cut off."""

_PLAIN = "text/plain; charset=utf-8"
_REQUEST_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 10.0
_REFUSAL_TIMEOUT_S = 0.5
_CLOSE_TIMEOUT_S = 2.0
_POLL_S = 0.5
_MAX_HEAD_BYTES = 32 << 10
# Less than this fits into one packet.
_COMPRESSED_FROM_BYTES = 1400
# A page of 60 models shrinks from 380 kB to 16 kB in 3 ms; level 9 takes seven times as long.
_COMPRESSION_LEVEL = 6

logger = logging.getLogger(__name__)


class MetricsPage:
    """Answers `GET /metrics`, with one connection for each request, until it is closed.

    A connection takes a thread when its request is complete, so incomplete requests block nobody.
    """

    def __init__(self, listener: socket.socket, render: Callable[[], bytes]) -> None:
        self.render = render
        """Makes the text of the page."""
        self.deadlines: dict[socket.socket, float] = {}
        """When connections are cut off, on the clock of `time.monotonic`."""
        self._listener = listener
        # Connections in the order in which they came.
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._callers: dict[threading.Thread, socket.socket] = {}
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._run, name="pytriton-metrics", daemon=True)

    def start(self) -> None:
        """Begin to answer, in threads of its own."""
        self._acceptor.start()

    def close(self) -> None:
        """Stop to listen, and break off the answers that are under way. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        # This wakes the accepting thread, which would otherwise notice after its poll interval.
        _cut(self._listener)
        if self._acceptor.ident is not None:
            self._acceptor.join(_CLOSE_TIMEOUT_S)
        self._listener.close()
        for connection in self._callers.values():
            _cut(connection)
        for thread in self._callers:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning(
                    "The metrics are still being collected %g s after the end of their page: a collector of "
                    "prometheus_client.REGISTRY does not return. Its thread is left to end by itself.",
                    _CLOSE_TIMEOUT_S,
                )

    # ---- the thread that accepts -------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.PollSelector() as selector:
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closed:
                if not keep_on(partial(self._turn, selector), "A request for the metrics cannot be answered"):
                    time.sleep(_REFUSAL_TIMEOUT_S)
            for waiting in list(self._waiting.values()):
                self._drop(selector, waiting)

    def _turn(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(_POLL_S):
            if key.fileobj is self._listener:
                self._accept(selector)
            elif key.fileobj in self._waiting:
                self._read(selector, self._waiting[key.fileobj])
        self._cut_late(selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._is_closed:
                # For example, no descriptors are left, which may pass.
                logger.warning("A request for the metrics cannot be accepted: %s", error)
                time.sleep(_REFUSAL_TIMEOUT_S)
            return
        close_in_child(connection)
        connection.setblocking(False)
        if len(self._waiting) >= MAX_WAITING:
            self._drop(selector, next(iter(self._waiting.values())))
        self._waiting[connection] = _Waiting(connection, address)
        selector.register(connection, selectors.EVENT_READ)

    def _read(self, selector: selectors.BaseSelector, waiting: "_Waiting") -> None:
        try:
            piece = waiting.connection.recv(_MAX_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        waiting.head += piece
        if not piece:
            self._drop(selector, waiting)
        elif waiting.is_whole or len(waiting.head) > _MAX_HEAD_BYTES:
            selector.unregister(waiting.connection)
            del self._waiting[waiting.connection]
            self._begin(waiting)

    def _begin(self, waiting: "_Waiting") -> None:
        """Answer in a thread, or refuse if there are too many."""
        # Finished threads are kept until here, so that `close` waits for each to end.
        self._callers = {thread: peer for thread, peer in self._callers.items() if thread.is_alive()}
        if not waiting.is_whole:
            _refuse(waiting.connection, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif len(self._callers) >= MAX_CALLERS:
            _refuse(waiting.connection, HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            thread = threading.Thread(target=self._answer, args=(waiting,), name="pytriton-metrics-answer", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # No thread can be started, which may pass.
                logger.debug("A request for the metrics is not answered.", exc_info=True)
                _refuse(waiting.connection, HTTPStatus.SERVICE_UNAVAILABLE)
            else:
                self._callers[thread] = waiting.connection

    def _cut_late(self, selector: selectors.BaseSelector) -> None:
        """Close connections whose time is over."""
        now = time.monotonic()
        for connection, deadline in list(self.deadlines.items()):
            if now > deadline:
                _cut(connection)
        for waiting in list(self._waiting.values()):
            if now > waiting.until:
                self._drop(selector, waiting)

    def _drop(self, selector: selectors.BaseSelector, waiting: "_Waiting") -> None:
        selector.unregister(waiting.connection)
        del self._waiting[waiting.connection]
        _end(waiting.connection)

    # ---- the threads that answer -------------------------------------------------------------------------------------

    def _answer(self, waiting: "_Waiting") -> None:
        connection = waiting.connection
        # The deadline is for the request, not for the time of its answer.
        self.deadlines[connection] = float("inf")
        try:
            connection.setblocking(True)
            _Handler(waiting, self)
        except OSError:
            logger.debug("A request for the metrics is not answered.", exc_info=True)
        finally:
            del self.deadlines[connection]
            _end(connection)


class _Waiting:
    """A connection whose request is not complete."""

    def __init__(self, connection: socket.socket, address: Any) -> None:
        self.connection = connection
        self.address = address
        self.head = b""
        self.until = time.monotonic() + _REQUEST_TIMEOUT_S

    @property
    def is_whole(self) -> bool:
        return b"\n\r\n" in self.head or b"\n\n" in self.head


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request, which has been read."""

    protocol_version = default_request_version = "HTTP/1.1"
    server_version, sys_version = "pytriton", ""
    error_content_type, error_message_format = _PLAIN, "%(message)s\n"

    def __init__(self, waiting: _Waiting, page: MetricsPage) -> None:
        self._page = page
        self._head = waiting.head
        super().__init__(waiting.connection, waiting.address, None)  # type: ignore[arg-type] # it has no use for a server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self._head)

    def handle(self) -> None:
        self.close_connection = True
        self.handle_one_request()

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._send(HTTPStatus.NOT_FOUND, b"there is nothing but /metrics here\n")
        elif self.command not in ("GET", "HEAD"):
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"expected GET or HEAD\n", allow="GET, HEAD")
        else:
            try:
                page = self._page.render()
            except Exception:
                logger.exception("A request for the metrics cannot be answered.")
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, b"the metrics cannot be collected\n")
            else:
                self._send(HTTPStatus.OK, page, CONTENT_TYPE)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _send(self, status: HTTPStatus, body: bytes, kind: str = _PLAIN, *, allow: str | None = None) -> None:
        is_compressed = len(body) >= _COMPRESSED_FROM_BYTES and _takes_gzip(self.headers.get("Accept-Encoding", ""))
        if is_compressed:
            body = gzip.compress(body, _COMPRESSION_LEVEL)
        self._page.deadlines[self.connection] = time.monotonic() + _SEND_TIMEOUT_S
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Vary", "Accept-Encoding")
        if is_compressed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        if allow is not None:
            self.send_header("Allow", allow)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _takes_gzip(accepted: str) -> bool:
    """Return whether a caller with this header wants gzip, which it may also refuse (`gzip;q=0`)."""
    wants = {}
    for item in accepted.lower().split(","):
        coding, _, weight = item.partition(";")
        wants[coding.strip()] = weight.replace(" ", "").rstrip("0") not in ("q=", "q=0.")
    return wants.get("gzip", wants.get("x-gzip", wants.get("*", False)))


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _end(connection: socket.socket) -> None:
    # This tells the peer that nothing follows, even if a forked process has the connection, too.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
    connection.close()


def _refuse(connection: socket.socket, status: HTTPStatus) -> None:
    # A few bytes fit into the buffer of a new connection, so this does not wait.
    with contextlib.suppress(OSError):
        connection.send(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
    _end(connection)
