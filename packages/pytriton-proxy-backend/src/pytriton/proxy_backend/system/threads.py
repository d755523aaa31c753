"""What happens where a thread that looks after something raises: it is said, and the thread goes on."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["call_safely", "keep_on"]

logger = logging.getLogger(__name__)


def keep_on(step: Callable[[], object], what: str) -> bool:
    """Do one step of a thread that looks after something, and goes on whatever the step raises.

    Args:
        step: What to do.
        what: What has failed where it raises, for the log.

    Returns:
        Whether it has raised nothing.
    """
    try:
        step()
    except Exception:
        call_safely(logger.exception, "%s; it goes on", what)
        return False
    return True


def call_safely(function: Callable[..., object], *arguments: Any, **more: Any) -> bool:
    """Call what is not ours, or must not stop what is to follow; return whether it has raised nothing.

    What it raises is written to standard error, as logging does where a handler fails: a filter of the program that
    fails may be what was called.

    Args:
        function: What to call.
        arguments: Its arguments.
        more: Its keyword arguments.
    """
    try:
        function(*arguments, **more)
    except Exception:
        if sys.stderr is not None:
            try:
                traceback.print_exc(file=sys.stderr)
            except (OSError, ValueError):
                # Nobody is there to be told.
                return False
        return False
    return True
