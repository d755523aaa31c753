"""`Placeholder`: what is attached for a model while its workers sleep, and is told when a request waits."""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import AttachError, ConnectionLostError, ProtocolError
from ..model import ModelSpec
from ..transport.link import Link
from ..wire.layout import CAPABILITIES, Capability
from .attaching import Attaching
from .connect import make_connect

__all__ = ["CannotSleepError", "Placeholder"]

logger = logging.getLogger(__name__)

# How long the proxy backend may take to let a placeholder go that takes nothing.
_DETACH_S = 5.0
_NAME = "placeholder of workers that sleep"


class CannotSleepError(AttachError):
    """The proxy backend cannot hold a place, as one of an earlier version cannot."""


class Placeholder:
    """Holds the place of the workers of one model that sleep. It is used by one thread; any other may call `stop`.

    The proxy backend gives it no batches, and counts the model as ready. When the server was restarted it attaches
    again, as a worker does.
    """

    def __init__(self, model: ModelSpec, endpoint: Path) -> None:
        """Prepare it; nothing happens before `hold`."""
        connect = make_connect(endpoint, model, None, insecure=False)
        self._attaching = Attaching(model, endpoint, connect, self._attached)

    @property
    def is_attached(self) -> bool:
        """Whether it is attached right now."""
        return self._attaching.attached.is_set()

    def hold(self, on_attached: Callable[[], bool]) -> bool:
        """Attach, and wait until a request waits for a worker; return whether one does, or false after `stop`.

        The place is held until `release`, which has to follow.

        Args:
            on_attached: Called when it is attached for the first time: from then on workers may leave. Where it returns
                false, they stay, and so ends the wait.

        Raises:
            CannotSleepError: The proxy backend does not know how to hold a place.
            AttachError: It refuses this one for another reason.
        """
        self._attaching.begin()
        # Whoever puts the workers to sleep says so.
        self._attaching.level = logging.DEBUG
        is_first = True
        for connection in self._attaching.connections(_NAME, 1, CAPABILITIES | Capability.ASLEEP):
            self._attaching.level = logging.DEBUG
            if isinstance(connection, float):
                self._attaching.attempts.wait(connection)
                continue
            if not connection.welcome.capabilities & Capability.ASLEEP:
                # With what it was sent unread, batches included, which go to another worker then.
                self._let_go(connection)
                raise CannotSleepError(
                    "the proxy backend that the server has loaded does not know how to wake workers: it needs the "
                    "version of pytriton-proxy-backend that starts them"
                )
            if is_first and not on_attached():
                return False
            is_first = False
            if self._await_wake(connection):
                return True
            self._let_go(connection)
        return False

    def look(self) -> None:
        """Take note where the place was lost, between `hold` and `release`: the server has ended, say."""
        connection = self._attaching.connection
        if connection is None:
            return
        try:
            is_open = connection.poll() is not None
        except (ConnectionLostError, ProtocolError):
            is_open = False
        if not is_open:
            self._let_go(connection)

    def release(self) -> None:
        """Let the place go."""
        connection = self._attaching.connection
        if connection is not None:
            with contextlib.suppress(ConnectionLostError, ProtocolError):
                connection.detach()
                deadline = time.monotonic() + _DETACH_S
                while connection.poll() is not None and _is_readable(connection, deadline - time.monotonic()):
                    continue
            self._let_go(connection)
        self._attaching.attempts.reset()

    def stop(self) -> None:
        """End the wait, from any thread."""
        self._attaching.stop()
        connection = self._attaching.connection
        if connection is not None:
            connection.shutdown()

    def _await_wake(self, connection: Link) -> bool:
        """Wait until a request waits for a worker; return whether one does, or the connection has ended."""
        try:
            while not self._attaching.stopping.is_set():
                _is_readable(connection, None)
                is_open = connection.poll() is not None
                if connection.protocol.is_woken:
                    return True
                if not is_open:
                    return False
        except (ConnectionLostError, ProtocolError) as error:
            logger.warning(
                "model %s: the place of workers that sleep was lost: %s", connection.welcome.model_name, error
            )
            self._attaching.stopping.wait(1.0)
        return False

    def _let_go(self, connection: Link) -> None:
        self._attaching.attached.clear()
        self._attaching.connection = None
        connection.close()

    def _attached(self) -> None:
        """Do nothing more: the event `attached` is set."""


def _is_readable(connection: Link, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s * 1000)))
