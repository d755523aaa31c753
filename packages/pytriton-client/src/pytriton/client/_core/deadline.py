"""A deadline for all steps of a call together, and the check of timeouts."""

from __future__ import annotations

import math
import time

from ..exceptions import PyTritonClientValueError

# The poll() of the operating systems counts milliseconds in 31 bits; a longer limit means the same to a caller.
_LONGEST_S = 2_000_000.0


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
