"""`Placeholder`: what is attached for a model while its workers sleep, and is told when a request waits."""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import AttachError, ConnectionLostError, ProtocolError, ProxyBackendError
from ..model import ModelSpec
from ..transport.activity import ask_activity
from ..transport.link import Link
from ..wire.layout import CAPABILITIES, Capability, ErrorCode
from .attaching import Attaching
from .connect import make_connect

logger = logging.getLogger(__name__)

# How long the proxy backend may take to let a placeholder go that takes nothing.
_DETACH_S = 5.0
# How long turning requests away may take, and how many batches of them are taken at once.
_TURN_AWAY_S = 5.0
_TURNED_AWAY_AT_ONCE = 64
_LOOK_S = 0.02
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
        self._endpoint = endpoint
        self._connect = make_connect(endpoint, model, None, insecure=False)
        self._attaching = Attaching(model, endpoint, self._connect, self._attached)

    @property
    def is_attached(self) -> bool:
        """Whether it is attached right now."""
        return self._attaching.attached.is_set()

    def hold(self, on_attached: Callable[[], bool]) -> bool:
        """Attach, and wait until a request waits for a worker; return whether one does, or false after `stop`.

        The place is held until `release`, which has to follow. `on_attached` is called when it is attached for the
        first time: from then on workers may leave. Where it returns false, they stay, and so ends the wait.
        `CannotSleepError` means that the proxy backend does not know how to hold a place.
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

    def turn_away(self, text: str) -> None:
        """Answer the requests that wait with an error, UNAVAILABLE, between `hold` and `release`.

        Those that come while they are answered wait for workers as any others do.
        """
        deadline = time.monotonic() + _TURN_AWAY_S
        activity = ask_activity(self._endpoint, _TURN_AWAY_S)
        left = 0 if activity is None else activity.in_flight
        if not left:
            return
        try:
            link = self._connect(
                _NAME, _TURNED_AWAY_AT_ONCE, CAPABILITIES | Capability.STANDS_IN, self._attaching.stopping
            )
        except (OSError, ProxyBackendError) as error:
            # Their own time is over soon.
            logger.debug("requests that wait cannot be turned away: %s", error)
            return
        try:
            has_begun = False
            while (left_s := deadline - time.monotonic()) > 0 and not self._attaching.stopping.is_set():
                count = _turn_away(link, text)
                if count is None:
                    return
                left, has_begun = left - count, has_begun or count > 0
                if left <= 0:
                    break
                if not _is_readable(link, min(left_s, _LOOK_S)):
                    # None comes any more that waits for a worker: the others have one, or their callers have gone.
                    activity = ask_activity(self._endpoint, _TURN_AWAY_S)
                    if has_begun or activity is None or not activity.in_flight:
                        break
            link.detach()
            while _turn_away(link, text) is not None and _is_readable(link, deadline - time.monotonic()):
                continue
        except (ConnectionLostError, ProtocolError) as error:
            logger.debug("requests that wait were not turned away: %s", error)
        finally:
            link.close()

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


def _turn_away(link: Link, text: str) -> int | None:
    """Answer the batches that have come with an error; return how many, or `None` if the connection is closed."""
    batches = link.poll()
    if batches is None:
        return None
    numbers = [batch.number for batch in batches]
    for number in numbers:
        link.fail(number, text, ErrorCode.UNAVAILABLE)
    return len(numbers)


def _is_readable(connection: Link, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s * 1000)))
