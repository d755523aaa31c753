"""Tells when a worker was let go while its callable is still at a batch.

Where batches have a time limit the proxy backend closes the connection of a worker that passes it. The worker's own
thread does not see that before the callable returns, which may be never: so somebody else looks.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable

from ..system.threads import call_safely
from ..transport.link import Link

logger = logging.getLogger(__name__)

# How long the thread has to see for itself that its connection is closed.
_GRACE_S = 1.0
_STACK_ENTRIES = 12


class ConnectionWatch:
    """Looks at one connection in a thread of its own, at no cost for the batches that pass through it.

    Args:
        connection: What to look at.
        name: Name of the thread.
        on_stuck: Called in that thread, at most once, if the connection was closed by the proxy backend and `end` has
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


def stack_of(thread: threading.Thread | None) -> str:
    """Return what a thread does right now, as the last entries of its stack; empty where it is not running."""
    frame = sys._current_frames().get(-1 if thread is None or thread.ident is None else thread.ident)
    if frame is None:
        return ""
    return "".join(traceback.format_stack(frame)[-_STACK_ENTRIES:])
