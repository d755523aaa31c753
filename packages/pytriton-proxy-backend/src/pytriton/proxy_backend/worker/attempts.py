"""`Attempts`: when a worker tries to attach."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from .arrivals import arrivals

FIRST_RETRY_S = 0.005
LAST_RETRY_S = 0.25
# If the system reports new sockets, retries are only for those that it misses.
_WATCHED_RETRY_S = 2.0
_GROWTH = 1.2


class Attempts:
    """The attempts of one worker: when its socket appears, soon after one that failed, and ever later.

    Args:
        endpoint: Where it attaches. One without a path, such as `tcp://host:port`, cannot be watched, and is only tried
            again and again.
    """

    def __init__(self, endpoint: Path | str) -> None:
        self._path = None if "://" in str(endpoint) else Path(endpoint)
        self._is_watched = False
        self._pause_s = FIRST_RETRY_S
        self._woken = threading.Event()
        self._then: Callable[[], object] = _do_nothing

    def pause_after(self, error: Exception) -> float:
        """Return how long to wait after an attempt that failed since nobody listens, in seconds."""
        if self._is_watched and self._path is not None and not arrivals().watches(self._path):
            # Its folder was removed, and may be there again.
            self._unwatch()
        if not self._is_watched and self._path is not None and arrivals().add(self._path, self.wake):
            self._is_watched = True
            # The socket may have appeared just before.
            return 0.0
        if self._is_watched and isinstance(error, FileNotFoundError):
            return _WATCHED_RETRY_S
        pause_s = self._pause_s
        self._pause_s = min(pause_s * _GROWTH, _WATCHED_RETRY_S if self._is_watched else LAST_RETRY_S)
        return pause_s

    def reset(self) -> None:
        """Begin anew, after an attempt that succeeded or with the end of the worker."""
        self._pause_s = FIRST_RETRY_S
        self._unwatch()

    def _unwatch(self) -> None:
        if self._is_watched and self._path is not None:
            arrivals().remove(self._path, self.wake)
            self._is_watched = False

    def wake(self) -> None:
        """End the wait for the next attempt; may be called from any thread."""
        # A socket that has appeared may not be listened at yet.
        self._pause_s = FIRST_RETRY_S
        self._woken.set()
        self._then()

    def wait(self, pause_s: float) -> None:
        """Wait for the next attempt, for so many seconds or until `wake`."""
        self._woken.wait(pause_s)
        self._woken.clear()

    async def wait_async(self, pause_s: float) -> None:
        """Wait as `wait` does, while what else runs on the event loop goes on."""
        import asyncio

        loop = asyncio.get_running_loop()
        is_over = asyncio.Event()

        def end() -> None:
            # A loop that is closed has nobody who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(is_over.set)

        self._then = end
        try:
            if not self._woken.is_set():
                await asyncio.wait_for(is_over.wait(), pause_s)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return
        finally:
            self._then = _do_nothing
            self._woken.clear()


def _do_nothing() -> None:
    """Wake nobody, where no event loop waits."""
