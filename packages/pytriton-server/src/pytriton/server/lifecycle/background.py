"""What an inference callable asks for, and would wait for itself if it waited for that: it is only begun."""

import contextvars
import logging
import threading
from collections.abc import Callable

__all__ = ["begin"]

logger = logging.getLogger(__name__)


def begin(what: str, action: Callable[[], object], *, daemon: bool = True) -> bool:
    """Do something in a thread of its own, which is not the callable's: errors go to the log.

    Args:
        what: What it is, for the log.
        action: What to do.
        daemon: Whether the interpreter may end before it is done.

    Returns:
        Whether it was begun; at the end of the interpreter no thread is to be had.
    """

    def run() -> None:
        try:
            # Of no callable, whatever a thread inherits.
            contextvars.Context().run(action)
        except Exception as error:
            logger.error("%s() failed after its caller was let go: %s", what, error)

    try:
        threading.Thread(target=run, name="pytriton-begun", daemon=daemon).start()
    except RuntimeError:
        logger.debug("%s: no thread can be started any more.", what)
        return False
    return True
