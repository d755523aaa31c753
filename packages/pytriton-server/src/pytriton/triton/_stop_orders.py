"""`StopOrders`: who wants a server stopped; and the lock under which it is changed, for callers who know that."""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterator

from pytriton.decorators import TritonContext
from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.proxy_backend.system.shortage import is_without_threads
from pytriton.server.errors import TritonServerError
from pytriton.server.lifecycle.session import Session
from pytriton.server.models.callers import calling_model

_LOCK_POLL_S = 0.05
# A signal that comes right before a wait of the system, or to another thread, does not end it: Python handles it after.
_SIGNAL_POLL_S = 0.5


class StopOrders:
    """The signals and calls that want a server stopped. Wakes the thread that serves."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        """The signals that have come since the server is served, oldest first."""
        # Orders to stop the server (None), or a certain session only; the holder of the lock reads them while it waits.
        self._calls: list[Session | None] = []
        # A SimpleQueue, because a signal handler may put into it at any point of the main thread.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._calls or self.signals)

    @property
    def is_hurried(self) -> bool:
        """Whether a second signal has ended the patience."""
        return len(self.signals) > 1

    @property
    def is_by_system(self) -> bool:
        """Whether SIGTERM was the reason, which a service manager sends, and not Ctrl+C at a terminal."""
        return self.signals[:1] == [signal.SIGTERM]

    def on_signal(self, number: int) -> None:
        """Note a signal. Runs between any two instructions of the main thread: no locks, no logging."""
        self.signals.append(number)
        self._wake.put(None)

    def wake(self) -> None:
        """Wake the thread that serves, so that it checks what has happened."""
        self._wake.put(None)

    def wait(self, timeout_s: float) -> None:
        """Wait for `wake` or a signal, at most this many seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.signals and (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self._wake.get(timeout=min(left_s, _SIGNAL_POLL_S))

    @contextlib.contextmanager
    def given(self, only: Session | None) -> Iterator[None]:
        """Order a stop during this block, of one session or of any server."""
        self._calls.append(only)
        try:
            yield
        finally:
            self._calls.remove(only)

    def is_for(self, session: Session | None) -> bool:
        """Return whether the server of a session has to stop."""
        return bool(self.signals) or any(only in (None, session) for only in list(self._calls))

    def names(self, session: Session) -> bool:
        """Return whether somebody already stops the server of this session."""
        return session in self._calls

    @contextlib.contextmanager
    def changing(self, lock: "threading.RLock", context: TritonContext) -> Iterator[None]:
        """Hold the lock of a server.

        A callable of that server does not wait for a stop, because the stop waits for the callable.
        """
        is_callable = calling_model(context) is not None
        while not lock.acquire(timeout=_LOCK_POLL_S if is_callable else -1):
            if self:
                raise PyTritonInvalidOperationError(
                    "The server is being stopped, and waits for the inference callable that asks for this. Let it "
                    "return."
                )
        try:
            yield
        except RuntimeError as error:
            if is_callable or not is_without_threads(error):
                raise
            # The text says what to do.
            raise TritonServerError(f"This process cannot serve: {error}.") from error
        finally:
            lock.release()
