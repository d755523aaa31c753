"""Deadlines of calls, the check of timeouts, and a thread that ends blocking waits which have no timeout."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Protocol

from ..exceptions import PyTritonClientValueError
from .forks import call_in_child

logger = logging.getLogger(__name__)

# The poll() of the operating systems counts milliseconds in 31 bits; a longer limit means the same to a caller.
_LONGEST_S = 2_000_000.0
_JOIN_TIMEOUT_S = 5.0


def check_timeout(timeout_s: float, name: str) -> float:
    """Return a timeout that sockets can keep: over 23 days it is cut to that."""
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not is_number or math.isnan(timeout_s) or timeout_s <= 0:
        raise PyTritonClientValueError(
            f"Expected {name} to be a number of seconds above zero; received {timeout_s!r}.",
            input_name=name,
            expected="a number of seconds above zero",
            received=repr(timeout_s),
        )
    return min(float(timeout_s), _LONGEST_S)


class Deadline:
    """A point in time, and how long it was away when it was set."""

    __slots__ = ("_end", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.remaining_s() <= 0.0


class Watched(Protocol):
    """An object with a blocking wait that can be ended from another thread."""

    def end_wait(self) -> None:
        """End the wait that goes on in another thread. Must not block."""
        ...


class Watchdog:
    """Ends waits that take too long. Its thread runs from the first ``begin`` until everything is forgotten."""

    def __init__(self) -> None:
        self._begin()
        call_in_child(self, Watchdog._begin)

    def _begin(self) -> None:
        # Reentrant: garbage collection, which may close what is watched, can run anywhere, also in here.
        self._changed = threading.Condition(threading.RLock())
        self._ends: dict[Watched, float] = {}
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None

    def begin(self, watched: Watched, timeout_s: float) -> None:
        """Call ``end_wait`` unless ``finish`` is called within ``timeout_s`` seconds. Call ``forget`` in the end.

        Raises ``RuntimeError``, and watches nothing, where the system has no thread left.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            self._ends[watched] = end
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pytriton-client-watchdog", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    self._thread = None
                    del self._ends[watched]
                    raise
            elif end < self._wakes_at:
                self._changed.notify()

    def finish(self, watched: Watched) -> None:
        """Note that the wait has ended in time."""
        with self._changed:
            if watched in self._ends:
                self._ends[watched] = math.inf

    def forget(self, watched: Watched) -> None:
        """Stop watching an object, which has no more waits."""
        with self._changed:
            self._ends.pop(watched, None)
            if not self._ends:
                self._changed.notify()

    def join(self) -> None:
        """Wait for the end of the thread, if nothing is watched any more."""
        with self._changed:
            thread = None if self._ends else self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._ends:
                    self._wakes_at = math.inf
                    self._thread = None
                    return
                now = time.monotonic()
                # A collection of garbage may forget some at any place, in this very thread.
                expired = [watched for watched, end in list(self._ends.items()) if end <= now]
                for watched in expired:
                    self.finish(watched)
                if not expired:
                    self._wakes_at = min(list(self._ends.values()), default=now)
                    self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
            # This runs outside the lock: ending a wait takes locks of others, whose holders may want this lock.
            for watched in expired:
                try:
                    watched.end_wait()
                except Exception:
                    # The other waits have limits, too.
                    logger.exception("A wait that took too long could not be ended.")
