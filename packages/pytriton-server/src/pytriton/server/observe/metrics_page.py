"""The page of metrics: an HTTP server of its own, on the port that the user set for metrics."""

import contextlib
import http.server
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from pytriton.proxy_backend.system.forks import close_in_child

__all__ = ["CONTENT_TYPE", "MetricsPage"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The text form of Prometheus, as every scraper reads it."""

MAX_CALLERS = 8
"""Requests that are answered at the same time; more get status 503."""

_PLAIN = "text/plain; charset=utf-8"
_REQUEST_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 10.0
_REFUSAL_TIMEOUT_S = 0.5
_CLOSE_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class MetricsPage(http.server.HTTPServer):
    """Answers `GET /metrics`, one connection for each request, until it is closed.

    Args:
        listener: The socket to accept on, listening; the page closes it.
        render: Makes the text of the page. Called in a thread for each request.
    """

    def __init__(self, listener: socket.socket, render: Callable[[], bytes]) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.render = render
        """Makes the text of the page."""
        self.deadlines: dict[socket.socket, float] = {}
        """When connections are cut off, on the clock of `time.monotonic`."""
        self._callers: dict[threading.Thread, socket.socket] = {}
        self._is_closed = False
        self._acceptor = threading.Thread(target=self.serve_forever, name="pytriton-metrics", daemon=True)

    def start(self) -> None:
        """Begin to answer, in threads of its own."""
        self._acceptor.start()

    def close(self) -> None:
        """Stop to listen, and break off the answers that are under way. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        # Wakes the thread that accepts, which would notice after its poll interval.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if self._acceptor.ident is not None:
            self.shutdown()
        self.server_close()
        for connection in self._callers.values():
            _cut(connection)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in (self._acceptor, *self._callers):
            if thread.ident is None:
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning(
                    "The metrics are still being collected %g s after the end of their page: a collector of "
                    "prometheus_client.REGISTRY does not return. Its thread is left to end by itself.",
                    _CLOSE_TIMEOUT_S,
                )

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        try:
            connection, address = super().get_request()
        except OSError as error:
            if not self._is_closed:
                # As when no descriptors are left: that may pass.
                logger.warning("A request for the metrics cannot be accepted: %s", error)
                time.sleep(_REFUSAL_TIMEOUT_S)
            raise
        close_in_child(connection)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or refuse where there are too many."""
        # Those that are done are kept until here, so that `close` waits for the last instruction of each.
        self._callers = {thread: peer for thread, peer in self._callers.items() if thread.is_alive()}
        if len(self._callers) >= MAX_CALLERS:
            with contextlib.suppress(OSError):
                request.settimeout(_REFUSAL_TIMEOUT_S)
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        thread = threading.Thread(
            target=self._answer, args=(request, client_address), name="pytriton-metrics-answer", daemon=True
        )
        self._callers[thread] = request
        thread.start()

    def service_actions(self) -> None:
        """Cut off those whose time is over; called between two connections, and twice a second."""
        now = time.monotonic()
        for connection, deadline in list(self.deadlines.items()):
            if now > deadline:
                _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a request has no answer: its caller went away, or no thread can be started."""
        logger.debug("A request for the metrics is not answered.", exc_info=True)

    def _answer(self, connection: socket.socket, address: Any) -> None:
        self.deadlines[connection] = time.monotonic() + _REQUEST_TIMEOUT_S
        try:
            self.finish_request(connection, address)
        except OSError:
            self.handle_error(connection, address)
        finally:
            del self.deadlines[connection]
            self.shutdown_request(connection)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: MetricsPage
    protocol_version = default_request_version = "HTTP/1.1"
    server_version, sys_version = "pytriton", ""
    error_content_type, error_message_format = _PLAIN, "%(message)s\n"

    def do_GET(self) -> None:
        # Whoever has sent the request in time is not blamed for the time that its answer takes.
        self.server.deadlines[self.connection] = float("inf")
        if self.path.partition("?")[0] != "/metrics":
            self._send(HTTPStatus.NOT_FOUND, b"there is nothing but /metrics here\n")
        elif self.command not in ("GET", "HEAD"):
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"expected GET or HEAD\n", allow="GET, HEAD")
        else:
            try:
                page = self.server.render()
            except Exception:
                logger.exception("A request for the metrics cannot be answered.")
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, b"the metrics cannot be collected\n")
            else:
                self._send(HTTPStatus.OK, page, CONTENT_TYPE)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _send(self, status: HTTPStatus, body: bytes, kind: str = _PLAIN, *, allow: str | None = None) -> None:
        self.server.deadlines[self.connection] = time.monotonic() + _SEND_TIMEOUT_S
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        if allow is not None:
            self.send_header("Allow", allow)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
