"""Waiting for something to come true."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

_LOOK_S = 0.01


def eventually(condition: Callable[[], Found], timeout_s: float = 30.0) -> Found:
    """Wait until a condition holds and give what it gave; fail where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s"
        time.sleep(_LOOK_S)
    return found
