"""Ends a tritonserver that is alive but answers nothing any more."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

from pytriton.server.tritonserver.ports import Endpoint
from pytriton.server.tritonserver.process import ServerProcess

UNRESPONSIVE_TIMEOUT_S = 120.0
"""Seconds that a server may not answer, by default."""

_LEAST_QUESTIONS = 4
_MOST_PAUSE_S = 10.0
_LEAST_PAUSE_S = 0.1
# A client of HTTP/2 begins with this preface and its settings, and a server answers with its own.
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HTTP = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

# Front ends that did not answer, by process and name: since when, and the number of questions.
_Silent = dict[tuple[int | None, str], tuple[float, int]]

logger = logging.getLogger(__name__)


class Watchdog:
    """Asks a server again and again over each of its front ends; any answer is a sign of life.

    A busy machine answers late, so only a server that misses several questions for the whole time is ended: with
    SIGABRT, to learn where it was, and then SIGKILL. The end is reported like any other unexpected one.
    """

    def __init__(
        self, server: Callable[[], tuple[ServerProcess, Mapping[str, Endpoint]] | None], timeout_s: float
    ) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._pause_s = min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, timeout_s / (2 * _LEAST_QUESTIONS)))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pytriton-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more. A question that is under way is not waited for; its answer counts for nothing."""
        self._stopped.set()

    def _watch(self) -> None:
        silent: _Silent = {}
        asked = time.monotonic()
        while not self._stopped.wait(self._pause_s):
            # If this thread had to wait itself, the server may have had to, too.
            if time.monotonic() - asked > 3 * self._pause_s + self._timeout_s:
                silent.clear()
            asked = time.monotonic()
            try:
                silent = self._ask(silent)
            except Exception:
                logger.exception("The watchdog could not look after tritonserver; it goes on.")

    def _ask(self, before: "_Silent") -> "_Silent":
        """Ask each front end once; return those that did not answer, with their history."""
        server = self._server()
        silent: _Silent = {}
        if server is None:
            return silent
        process, endpoints = server
        for name, endpoint in endpoints.items():
            begun = time.monotonic()
            if self._stopped.is_set() or not process.is_running:
                return {}
            if _answers(endpoint, _HTTP if name == "HTTP" else _HTTP2, self._pause_s):
                continue
            since, count = before.get((process.pid, name), (begun, 0))
            silent[process.pid, name] = since, count + 1
            spent_s = time.monotonic() - since
            is_over = spent_s >= self._timeout_s and count + 1 >= _LEAST_QUESTIONS
            if is_over and process.is_running and not self._stopped.is_set():
                process.abort(
                    f"tritonserver (pid {process.pid}) is alive, but has not answered {count + 1} questions over "
                    f"{name} at {endpoint.authority} for {spent_s:.0f} s: it is ended. "
                    "Triton(unresponsive_timeout_s=...) says how long it may be silent, None for ever."
                )
                return {}
        return silent


def _answers(endpoint: Endpoint, question: bytes, timeout_s: float) -> bool:
    """Return whether a front end answers anything."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout_s) as connection:
            connection.sendall(question)
            return bool(connection.recv(1))
    except OSError:
        return False
