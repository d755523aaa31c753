"""SIGINT and SIGTERM while a server is served in the foreground, and before."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from pytriton.proxy_backend.system.forks import call_in_child

_SIGNALED = 128
"""A process that a signal ended has this exit code plus the number of the signal, as in a shell."""


class StopRequested(SystemExit):
    """SIGTERM has come, before a server is served or after."""


def end_on_sigterm_as_init() -> None:
    """Make SIGTERM end this process if it is the first one of a container and has no handler.

    Linux ignores unhandled signals to that process, so `docker stop` would wait in vain. The main thread ends with
    `SystemExit`, so that servers stop. In another thread this does nothing.
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
    """Context manager: calls a function on SIGINT and SIGTERM in the main thread, and restores the handlers.

    It does nothing if another handler is set, or in another thread. The function runs between any two instructions, so
    it may only set plain attributes or put into a `queue.SimpleQueue`.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._replaced: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        """Take over the signals that have no handler."""
        if threading.current_thread() is threading.main_thread():
            ours = ((signal.SIGINT, (signal.default_int_handler,)), (signal.SIGTERM, (signal.SIG_DFL, _end)))
            for number, unhandled in ours:
                if signal.getsignal(number) in unhandled:
                    self._replaced[number] = signal.signal(number, self._handle)
            # A process that a callable forks must end by these signals.
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
