from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import pytest

from pytriton.proxy_backend.errors import ConnectionLostError
from pytriton.proxy_backend.runtime.results.steps import TURN_NS, StepTime, Turns, next_of


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
                await turns.give_way()
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


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_generator_awaits_is_cancelled_where_its_connection_has_ended(ends: bool) -> None:
    seen: list[str] = []

    async def answer() -> AsyncGenerator[int, None]:
        begun = asyncio.Event()

        async def work() -> None:
            try:
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("the work was cancelled")
                raise

        task = asyncio.create_task(work())
        await begun.wait()
        yield 1
        try:
            await task
        except asyncio.CancelledError:
            seen.append("so was the generator")
            if not ends:
                yield 2
            raise

    def lose() -> None:
        raise ConnectionLostError("nobody is there")

    async def main() -> None:
        results = answer()
        assert await next_of(results, lambda: None, StepTime()) == 1
        with pytest.raises(ConnectionLostError, match="nobody is there"):
            await next_of(results, lose, StepTime())
        await results.aclose()

    asyncio.run(main())
    assert seen == ["the work was cancelled", "so was the generator"]


def test_of_those_who_give_way_a_few_go_on_in_each_turn_of_the_loop() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    seen: list[str] = []

    async def stream(name: str) -> None:
        turns = Turns(asyncio.get_running_loop())
        for _ in range(5):
            await turns.give_way()
            seen.append(name)

    async def beside() -> None:
        while True:
            seen.append(" ")
            await asyncio.sleep(0)

    async def main() -> None:
        other = asyncio.create_task(beside())
        await asyncio.gather(*map(stream, names))
        other.cancel()

    asyncio.run(main())
    turns = "".join(seen).split()
    assert "".join(turns) == names * 5
    assert max(map(len, turns)) == 2


@pytest.mark.parametrize("cancelled", ["a", "b", "abcd", "fgh", "abcdefghij"])
def test_who_is_cancelled_keeps_nobody_from_his_turn(cancelled: str) -> None:
    ended: list[str] = []

    async def stream(name: str) -> None:
        turns = Turns(asyncio.get_running_loop())
        for _ in range(5):
            await turns.give_way()
        ended.append(name)

    async def main(turns: int) -> None:
        ended.clear()
        tasks = {name: asyncio.create_task(stream(name)) for name in "abcdefghij"}
        for _ in range(turns):
            await asyncio.sleep(0)
        for name in cancelled:
            tasks[name].cancel()
        await asyncio.wait(tasks.values())
        assert ended == [name for name in "abcdefghij" if name not in cancelled]
        # Whoever comes later finds no turn that is still given.
        await asyncio.gather(*map(stream, "klmnop"))

    for turns in range(1, 12):
        asyncio.run(main(turns))


def test_who_is_dropped_keeps_nobody_from_his_turn() -> None:
    async def main() -> None:
        turns = [Turns(asyncio.get_running_loop()) for _ in range(8)]
        dropped = [each.give_way() for each in turns]
        for each in dropped:
            each.send(None)
        # Those that wait in the queue first.
        for each in reversed(dropped):
            each.close()
        await asyncio.gather(*(each.give_way() for each in turns))

    asyncio.run(main())
