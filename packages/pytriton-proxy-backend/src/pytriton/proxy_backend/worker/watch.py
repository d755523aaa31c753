"""Tells when a worker was let go while its callable is still at a batch, and when the event loop of one is blocked.

Where batches have a time limit the proxy backend closes the connection of a worker that passes it. The worker's own
thread does not see that before the callable returns, which may be never: so somebody else looks. Likewise, nothing on
an event loop can tell that a coroutine blocks it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sized

from ..system.threads import call_safely, keep_on
from ..transport.link import Link

logger = logging.getLogger(__name__)

# How long the thread has to see for itself that its connection is closed.
_GRACE_S = 1.0
_STACK_ENTRIES = 12
# A loop that does not come round for so long blocks what runs on it.
_BLOCKED_S = 1.0
# How often a loop with something to do is asked.
_ASK_EVERY_S = 0.5
# How often it is said that a loop was blocked, after the first time.
_TELL_EVERY_S = 60.0


class ConnectionWatch:
    """Looks at one connection in a thread of its own, at no cost for the batches that pass through it.

    `on_stuck` is called in that thread, at most once, if the connection was closed by the proxy backend and `end` has
    not been called a moment later.
    """

    def __init__(self, connection: Link, name: str, on_stuck: Callable[[], None]) -> None:
        self._connection = connection
        self._on_stuck = on_stuck
        self._ended = threading.Event()
        self._wait_for_hangup = connection.hangup_waiter()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop looking, and shut the connection down: the descriptor of this watch would keep it open."""
        self._ended.set()
        self._connection.shutdown()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._wait_for_hangup()
            if not self._ended.wait(_GRACE_S):
                self._on_stuck()
        except Exception:
            # The worker attaches anew, with another watch.
            call_safely(logger.exception, "A connection of a worker cannot be watched: it is closed")
            self._connection.shutdown()


class LoopWatch:
    """Asks the running event loop again and again, in a thread of its own, whether it comes round.

    Where it does not, that is logged as a warning: the first time with the stack of what blocks it and with how long it
    was blocked, later at most once a minute. It is asked while it has something to do, so that an idle worker stays
    idle.

    Args:
        model_name: Whose loop it is, for the log.
        work: What it is at: empty if it has nothing to do.
    """

    def __init__(self, model_name: str, work: Sized) -> None:
        import asyncio

        self._model_name = model_name
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._ended = threading.Event()
        self._came_round = threading.Event()
        self._told_at: float | None = None  # the last time
        self._untold: list[float] = []  # how long it was blocked since then, in seconds
        self._owner = threading.current_thread()
        self._thread = threading.Thread(target=self._run, name=f"pytriton-{model_name}-loop", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            # The system has no more threads to give. What only watches a worker must not end it.
            logger.warning("model %s: its event loop is not watched: %s", model_name, error)

    def __enter__(self) -> LoopWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._came_round.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_ASK_EVERY_S):
            keep_on(self._ask, f"The event loop of model {self._model_name} could not be asked")

    def _ask(self) -> None:
        if not len(self._work):
            return
        self._came_round.clear()
        # This is checked after `clear`, because the end of this watch sets both events.
        if self._ended.is_set():
            return
        began = time.monotonic()
        self._loop.call_soon_threadsafe(self._came_round.set)
        if self._came_round.wait(_BLOCKED_S):
            return
        is_first = self._told_at is None
        if is_first:
            self._told_at = began
            logger.warning(
                "model %s: the event loop is blocked, for %.1f s so far: nothing else that runs on it goes on, such as "
                "the streams of other callers. Await what takes long, or run it in a thread (asyncio.to_thread). It is "
                "at\n%s",
                self._model_name,
                time.monotonic() - began,
                stack_of(self._owner),
            )
        while not self._came_round.wait(_ASK_EVERY_S):
            pass
        self._untold.append(time.monotonic() - began)
        if is_first or time.monotonic() - (self._told_at or 0.0) >= _TELL_EVERY_S:
            self._tell()

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        times = "" if len(self._untold) == 1 else f", the longest of {len(self._untold)} times"
        logger.warning("model %s: the event loop was blocked for %.1f s%s", self._model_name, max(self._untold), times)
        self._untold.clear()


def stack_of(thread: threading.Thread | None) -> str:
    """Return what a thread does right now, as the last entries of its stack; empty if it is not running."""
    frame = sys._current_frames().get(-1 if thread is None or thread.ident is None else thread.ident)
    if frame is None:
        return ""
    return "".join(traceback.format_stack(frame)[-_STACK_ENTRIES:])
