"""Timeouts for blocking waits that have none of their own: a thread ends them from outside."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Protocol

from .._core.forks import call_in_child

logger = logging.getLogger(__name__)


_JOIN_TIMEOUT_S = 5.0


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
                expired = [watched for watched, end in self._ends.items() if end <= now]
                for watched in expired:
                    self._ends[watched] = math.inf
                if not expired:
                    self._wakes_at = min(self._ends.values())
                    self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
            # This runs outside the lock: ending a wait takes locks of others, whose holders may want this lock.
            for watched in expired:
                try:
                    watched.end_wait()
                except Exception:
                    # The other waits have limits, too.
                    logger.exception("A wait that took too long could not be ended.")
