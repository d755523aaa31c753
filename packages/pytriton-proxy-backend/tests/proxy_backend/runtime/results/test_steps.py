from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pytriton.proxy_backend.runtime.results.steps import TURN_NS, Turns


def due(steps: int, work: Callable[[], object]) -> list[bool]:
    """Return whether a generator is to give way after each response, where it does something before each."""

    async def main() -> list[bool]:
        turns = Turns(asyncio.get_running_loop())
        found = []
        for _ in range(steps):
            waiting = work()
            if asyncio.iscoroutine(waiting):
                await waiting
            found.append(turns.is_due())
            if found[-1]:
                await asyncio.sleep(0)
                turns.begin()
        return found

    return asyncio.run(main())


def test_who_waits_by_himself_gives_way_after_the_first_response_alone() -> None:
    assert due(20, lambda: asyncio.sleep(0.001)) == [True, *[False] * 19]


def test_who_computes_gives_way_after_each_response() -> None:
    assert due(20, lambda: time.sleep(2 * TURN_NS / 1e9)) == [True] * 20


def test_who_does_nothing_gives_way_in_time() -> None:
    found = due(200_000, lambda: None)
    assert found[0]
    assert 1 < sum(found) < len(found)
