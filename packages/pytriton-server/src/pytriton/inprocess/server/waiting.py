"""Waiting for a state of the server."""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable

from pytriton.inprocess.capi.errors import TimedOutError, wrong_argument

__all__ = ["check_wait", "wait_until"]


def check_wait(polling_interval: object, timeout: object) -> None:
    """Check the arguments of a wait before anything is done that it is to wait for.

    Raises:
        InvalidArgumentError: If one is not a number of seconds; the timeout may also be `None`.
    """
    for name, value in (("polling_interval", polling_interval), ("timeout", timeout)):
        if value is None and name == "timeout":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
            raise wrong_argument(name, "a number of seconds that is not negative", value)


def wait_until(
    done: Callable[[], bool], what: str, polling_interval: float, timeout: float | None, *, server: str
) -> None:
    """Wait for a server.

    Args:
        done: Tells whether it is over.
        what: What is waited for, as in `"be ready"`.
        polling_interval: How often to ask, in seconds.
        timeout: How long to wait, in seconds; `None` for as long as it takes.
        server: Name of the server.

    Raises:
        TimedOutError: If it was not over in time.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while not done():
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimedOutError(
                f"Expected server {server!r} to {what} within {timeout:g} s, which it did not.",
                expected=what,
                received=f"not within {timeout:g} s",
                where=f"server {server!r}",
            )
        time.sleep(polling_interval if left_s is None else min(polling_interval, left_s))
