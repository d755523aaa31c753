"""The page of metrics: a small HTTP server of its own, on the port that the user set for metrics."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from pytriton.proxy_backend.system.forks import let_go_in_child

__all__ = ["CONTENT_TYPE", "MetricsPage"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The text form of Prometheus, as every scraper reads it."""

MAX_CALLERS = 8
"""Requests that are answered at the same time; more get status 503."""

_REQUEST_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 10.0
_REFUSAL_TIMEOUT_S = 0.5
_CLOSE_TIMEOUT_S = 2.0
_MAX_HEAD_BYTES = 16 << 10

logger = logging.getLogger(__name__)


class MetricsPage:
    """Answers `GET /metrics`, one connection for each request, until it is closed.

    Args:
        listener: The socket to accept on, listening; the page closes it.
        render: Makes the text of the page. Called in a thread for each request.
    """

    def __init__(self, listener: socket.socket, render: Callable[[], bytes]) -> None:
        self._listener = listener
        self._render = render
        self._lock = threading.Lock()
        self._callers: dict[threading.Thread, socket.socket] = {}
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, name="pytriton-metrics", daemon=True)

    def start(self) -> None:
        """Begin to answer, in threads of its own."""
        self._acceptor.start()

    def close(self) -> None:
        """Stop to listen, and breaks off the answers that are under way. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            callers = dict(self._callers)
        # Wakes the thread in `accept`. Both fail where the other end is gone already.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in callers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in (self._acceptor, *callers):
            if thread.ident is None or thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning(
                    "The metrics are still being collected %g s after the end of their page: a collector of "
                    "prometheus_client.REGISTRY does not return. Its thread is left to end by itself.",
                    _CLOSE_TIMEOUT_S,
                )

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                let_go_in_child(connection)
            except OSError as error:
                if self._is_closed:
                    return
                # As when no descriptors are left: that may pass.
                logger.warning("A request for the metrics cannot be accepted: %s", error)
                time.sleep(_REFUSAL_TIMEOUT_S)
                continue
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="pytriton-metrics-answer", daemon=True)
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            # Those that are done are kept until here, so that `close` waits for the last instruction of each.
            self._callers = {caller: peer for caller, peer in self._callers.items() if caller.is_alive()}
            is_full = len(self._callers) >= MAX_CALLERS
            if not is_full:
                self._callers[thread] = connection
        if is_full:
            self._send(connection, _answer(503, "too many requests for the metrics at once\n"), _REFUSAL_TIMEOUT_S)
            connection.close()
            return
        try:
            thread.start()
        except RuntimeError:
            # No thread can be had, or the interpreter is ending.
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            head = _read_head(connection, time.monotonic() + _REQUEST_TIMEOUT_S)
            if head is not None:
                self._send(connection, self._respond(head), _SEND_TIMEOUT_S)
        except Exception:
            logger.exception("A request for the metrics cannot be answered.")
            self._send(connection, _answer(500, "the metrics cannot be collected\n"), _SEND_TIMEOUT_S)
        finally:
            connection.close()

    def _respond(self, head: bytes) -> bytes:
        parts = head.partition(b"\n")[0].split()
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/"):
            return _answer(400, "expected a request of HTTP/1\n")
        method, target = parts[0], parts[1].partition(b"?")[0]
        if target != b"/metrics":
            return _answer(404, "there is nothing but /metrics here\n")
        if method not in (b"GET", b"HEAD"):
            return _answer(405, "expected GET or HEAD\n", allow="GET, HEAD")
        body = self._render()
        return _answer(200, body, with_body=method == b"GET")

    def _send(self, connection: socket.socket, answer: bytes, timeout_s: float) -> None:
        # A caller that went away, or does not read, misses nothing.
        with contextlib.suppress(OSError):
            connection.settimeout(timeout_s)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)


def _read_head(connection: socket.socket, deadline: float) -> bytes | None:
    """Read up to the empty line after the headers; None where it does not come in time, or never."""
    head = b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or len(head) > _MAX_HEAD_BYTES:
            return None
        try:
            connection.settimeout(remaining_s)
            piece = connection.recv(4096)
        except OSError:
            return None
        if not piece:
            return None
        head += piece
    return head


_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


def _answer(status: int, body: str | bytes, *, with_body: bool = True, allow: str | None = None) -> bytes:
    content = body.encode() if isinstance(body, str) else body
    kind = CONTENT_TYPE if status == 200 else "text/plain; charset=utf-8"
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(content)}",
        "Connection: close",
    ]
    if allow is not None:
        lines.append(f"Allow: {allow}")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode()
    return head + content if with_body else head
