"""Waiting for what must happen, in tests that never fail because they took long."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

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


def wait_for_threads() -> None:
    """Wait until no thread of pytriton runs in this process any more."""

    def left() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("pytriton")]

    try:
        eventually(lambda: not left())
    except AssertionError as error:
        raise AssertionError(f"threads that do not end: {left()}") from error


async def eventually_async(
    condition: Callable[[], Found | Literal[False] | None], timeout_s: float = PATIENCE_S
) -> Found:
    """Wait as `eventually`, and let the tasks of the loop run meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s"
        await asyncio.sleep(_LOOK_S)
    return found


def drive(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run an asynchronous test; asyncio complains of tasks whose error nobody looked at only in its log."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await main()
        gc.collect()
        await eventually_async(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    asyncio.run(watched())
    gc.collect()
    assert complaints == []


class Held:
    """A callable that waits in the middle of a request: it has begun when `entered` is set, and ends with `release`."""

    def __init__(self, infer: Callable[[Any], Any]) -> None:
        self._infer = infer
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(self, requests: Any) -> Any:
        self.entered.set()
        assert self.release.wait(PATIENCE_S)
        return self._infer(requests)
