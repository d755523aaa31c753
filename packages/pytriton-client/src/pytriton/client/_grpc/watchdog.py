"""Time limits for waits that have none of their own: one thread ends them from outside."""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol

__all__ = ["Watchdog", "Watched"]


_LONGEST_JOIN_S = 5.0


class Watched(Protocol):
    """What may wait for too long."""

    def end_wait(self) -> None:
        """End the wait that goes on in another thread. Must not block."""
        ...


class Watchdog:
    """Watches any number of waits. Its thread lives from the first ``begin`` on until all that began are forgotten."""

    def __init__(self) -> None:
        # Reentrant: garbage collection, which may close what is watched, can run anywhere, also in here.
        self._changed = threading.Condition(threading.RLock())
        self._ends: dict[Watched, float] = {}
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None

    def begin(self, watched: Watched, timeout_s: float) -> None:
        """End the wait of this one if ``finish`` is not called within so many seconds. ``forget`` it in the end."""
        end = time.monotonic() + timeout_s
        with self._changed:
            self._ends[watched] = end
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pytriton-client-watchdog", daemon=True)
                self._thread.start()
            elif end < self._wakes_at:
                self._changed.notify()

    def finish(self, watched: Watched) -> None:
        """End the wait."""
        with self._changed:
            if watched in self._ends:
                self._ends[watched] = math.inf

    def forget(self, watched: Watched) -> None:
        """Expect no more waits of this one."""
        with self._changed:
            self._ends.pop(watched, None)
            if not self._ends:
                self._changed.notify()

    def join(self) -> None:
        """Wait for the end of the thread where nothing keeps it any more."""
        with self._changed:
            thread = None if self._ends else self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LONGEST_JOIN_S)

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
            # Outside the lock, as ending a wait takes locks of others, whose holders may be about to take this one.
            for watched in expired:
                watched.end_wait()
