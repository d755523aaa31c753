"""`ServerLife`: starts and stops servers, one after the other, for the program that binds models and for signals."""

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from pytriton.decorators import TritonContext
from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.proxy_backend.system.log_gate import keep_log_from_blocking
from pytriton.proxy_backend.worker.loading import is_loading
from pytriton.server.lifecycle.session import Session
from pytriton.server.models.callers import calling_model, run_in_background
from pytriton.server.models.workers import StartCancelled
from pytriton.triton._bound_models import BoundModels
from pytriton.triton._stop_orders import StopOrders

_EXIT_REPORT_S = 1.0
_POLL_S = 0.005

logger = logging.getLogger(__name__)


def check_may_start() -> None:
    """Check that this process may start a server, and make sure that an unread log does not block it.

    A script that is imported for its definitions may not.
    """
    keep_log_from_blocking()
    if is_loading():
        raise PyTritonInvalidOperationError(
            "This script is imported for what it defines, and must not start servers itself: put what the script "
            'does under `if __name__ == "__main__":`'
        )


class ServerLife:
    """The server of one `Triton` or `RemoteTriton`: `start`, `block` while it serves, `stop`.

    Nothing here refers to the program's object, see `_registry`.
    """

    at_exit: Callable[[], object]
    """Stops the server when the interpreter ends. To be set before the first start."""

    def __init__(self, models: BoundModels, context: TritonContext) -> None:
        self._models = models
        self._context = context
        self.session: Session | None = None
        """The server with its models; None if there is none."""
        self.start_s = 0.0
        """How long it took until the models of the session were served, in seconds."""
        self.failure: BaseException | None = None
        """Why the server has ended, or has to end."""
        self.linger_s: float | None = 0.0
        """How long requests are accepted after SIGTERM, in seconds; None is as long as some come."""
        self.orders = StopOrders()
        """Who wants the server stopped."""
        self.lock = threading.RLock()
        """Held while the server is started, changed or stopped."""
        self._owner = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether the server is one of this process, and not of the one that this process is a fork of."""
        return os.getpid() == self._owner

    @property
    def is_running(self) -> bool:
        """Whether the server runs."""
        session = self.session
        return session is not None and session.is_running

    def check_own(self, kind: str) -> None:
        """Check that the server is one of this process."""
        if not self.is_own:
            raise PyTritonInvalidOperationError(
                f"This process is a fork of process {self._owner}, which owns the server and the inference callables. "
                f"Make a {kind} of its own here, or call the one of process {self._owner} there."
            )

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock, see `StopOrders.changing`."""
        return self.orders.changing(self.lock, self._context)

    def start(self, make_session: Callable[[], Session], timeout_s: float) -> None:
        """Start a server with all models, after removing what an ended one has left. The caller holds the lock."""
        self._close()
        self.failure = None
        began = time.monotonic()
        session = self.session = make_session()
        atexit.register(self.at_exit)
        try:
            session.start(list(self._models.values()), timeout_s=timeout_s, cancelled=self.is_stop_requested)
        except BaseException:
            self._close()
            raise
        self.start_s = time.monotonic() - began

    def wait_exit_reported(self) -> None:
        """Wait until the end of a server, if it has ended, is reported as `failure`."""
        deadline = time.monotonic() + _EXIT_REPORT_S
        while self.failure is None and time.monotonic() < deadline:
            if self.session is None or self.is_running:
                return
            time.sleep(_POLL_S)

    def block(self, period_s: float, find_failure: Callable[[], BaseException | None]) -> None:
        """Wait until the server has stopped or has to stop, because of a signal or a failure."""
        while not self.orders.signals:
            if self.session is None or self.failure is not None:
                return
            failure = find_failure()
            if failure is not None:
                # Another thread may have recorded the first failure.
                self.failure = self.failure or failure
                return
            self.orders.wait(period_s)
        logger.info("Got %s: stopping the server.", signal.Signals(self.orders.signals[0]).name)

    def stop(self) -> bool:
        """Stop the server, or begin to if one of its callables asks. Return whether there was one."""
        if not self.is_own:
            # The process is not a child of this fork.
            return False
        if calling_model(self._context) is not None:
            return self._stop_in_background()
        return self._stop(None)

    def is_stop_requested(self) -> bool:
        """Return whether somebody wants the server stopped."""
        return self.orders.is_for(self.session)

    def check_wanted(self) -> None:
        """Raise `StartCancelled` if somebody wants the server stopped."""
        if self.is_stop_requested():
            raise StartCancelled

    def fail_for_good(self, error: BaseException) -> None:
        """Stop the server because a callable can never answer again."""
        logger.error("An inference callable can never answer again, so the server is stopped: %s", error)
        self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Stop the server after an error, in the background: the stop waits for the thread that reports it."""
        if self.failure is None:
            self.failure = error
        self.orders.wake()
        self._stop_in_background()

    def _close(self) -> bool:
        session, self.session = self.session, None
        if session is None:
            return False
        self._models.note_stop()
        atexit.unregister(self.at_exit)
        # A program that stops its own server usually sends the requests itself, so no time is needed for others.
        linger_s = self.linger_s if self.orders.is_by_system else 0.0
        try:
            session.close(hurried=lambda: self.orders.is_hurried, linger_s=linger_s)
        finally:
            self.orders.wake()
        return True

    def _stop(self, only: Session | None) -> bool:
        """Stop the server, or only that of one session, so that a server started since then goes on."""
        with self.orders.given(only), self.lock:
            return self._close() if only in (None, self.session) else False

    def _stop_in_background(self) -> bool:
        session = self.session
        if session is None:
            return False
        # At the end of the interpreter, its atexit hook stops the server.
        return self.orders.names(session) or run_in_background("stop", lambda: self._stop(session))
