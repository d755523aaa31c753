"""Waiting for what must happen, in tests that never fail because they took long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal, TypeVar

Found = TypeVar("Found")

# How long anything that must happen may take, on any machine: only what will never happen takes as long.
PATIENCE_S = 600.0
_LOOK_S = 0.01


def eventually(condition: Callable[[], Found | Literal[False] | None], timeout_s: float = PATIENCE_S) -> Found:
    """Wait until a condition holds and give what it gave; fail where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s"
        time.sleep(_LOOK_S)
    return found


async def eventually_async(
    condition: Callable[[], Found | Literal[False] | None], timeout_s: float = PATIENCE_S
) -> Found:
    """Wait as `eventually`, and let the tasks of the loop run meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s"
        await asyncio.sleep(_LOOK_S)
    return found
