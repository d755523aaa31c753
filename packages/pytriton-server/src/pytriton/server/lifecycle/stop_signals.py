"""SIGINT and SIGTERM while a server is served in the foreground, and before."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from pytriton.proxy_backend.system.forks import call_in_child

__all__ = ["StopRequested", "StopSignals", "end_on_sigterm", "end_on_sigterm_as_init"]

_SIGNALED = 128
"""With the number of a signal, the exit code by which a shell tells that it has ended a process."""


class StopRequested(SystemExit):
    """SIGTERM has come, before a server is served or after."""


def end_on_sigterm_as_init() -> None:
    """Make SIGTERM end this process where it is the first one of a container, and the program does not handle it.

    The system lets a signal that nobody handles end any process but the first one, which it spares: `docker stop` would
    wait in vain. What ends here is the main thread, with `SystemExit`, so that servers are stopped. Called in another
    thread, it does nothing: Python allows no handlers there.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if os.getpid() == 1 and is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        end_on_sigterm()


def end_on_sigterm() -> None:
    """Make SIGTERM end the main thread with `SystemExit`, from which on `StopSignals` takes it over."""
    signal.signal(signal.SIGTERM, _end)
    call_in_child(_end, _let_end)


def _end(number: int, _frame: FrameType | None) -> None:
    raise StopRequested(_SIGNALED + number)


def _let_end(_: object) -> None:
    if signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StopSignals:
    """Context manager: calls a function on SIGINT and SIGTERM, and puts the old handlers back at its end.

    Only where nobody else handles the signal, and only in the main thread: in another one Python allows no handlers.

    Args:
        on_signal: Called with the number of the signal in the main thread, between any two instructions. It may only do
            what is safe there: set plain attributes, put into a `queue.SimpleQueue`.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._replaced: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        """Take over the signals that nobody handles."""
        if threading.current_thread() is threading.main_thread():
            ours = ((signal.SIGINT, (signal.default_int_handler,)), (signal.SIGTERM, (signal.SIG_DFL, _end)))
            for number, unhandled in ours:
                if signal.getsignal(number) in unhandled:
                    self._replaced[number] = signal.signal(number, self._handle)
            # A process that a callable forks shall end by them, as others do.
            call_in_child(self, StopSignals._restore)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Put the old handlers back."""
        self._restore()

    def _restore(self) -> None:
        while self._replaced:
            number, handler = self._replaced.popitem()
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._on_signal(number)
