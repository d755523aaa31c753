"""What happens where a thread that looks after something raises, or cannot be started: the work goes on."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(__name__)


def start_all(threads: Sequence[threading.Thread]) -> int:
    """Start threads one after the other, as long as that is possible; return how many have been started.

    The system may be short of threads, and Python 3.12 starts none while the interpreter ends.
    """
    for count, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError:
            return count
    return len(threads)


def keep_on(step: Callable[[], object], what: str) -> bool:
    """Do one step of a thread that has to go on whatever happens; log an error, and return whether there was none."""
    try:
        step()
    except Exception:
        call_safely(logger.exception, "%s; it goes on", what)
        return False
    return True


def call_safely(function: Callable[..., object], *arguments: Any, **more: Any) -> bool:
    """Call code that is not ours, or that must not stop what follows; return whether it raised nothing.

    Errors go to standard error, because the called code may be a filter of the log.
    """
    try:
        function(*arguments, **more)
    except Exception:
        if sys.stderr is not None:
            try:
                traceback.print_exc(file=sys.stderr)
            except (OSError, ValueError):
                # There is nobody to tell.
                return False
        return False
    return True
