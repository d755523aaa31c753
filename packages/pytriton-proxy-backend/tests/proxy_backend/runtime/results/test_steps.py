from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest

from pytriton.proxy_backend.errors import ConnectionLostError
from pytriton.proxy_backend.runtime.results import steps
from pytriton.proxy_backend.runtime.results.steps import NOTHING, TURN_NS, StepTime, Turns, next_of, stepped


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


# ---- one step ------------------------------------------------------------------------------------------------------


async def fails() -> None:
    await asyncio.sleep(0.001)
    raise ValueError("so")


async def waiting(waits: list[list[str]]) -> AsyncGenerator[int, None]:
    """Wait in some ways before each value."""
    for number, kinds in enumerate(waits):
        for kind in kinds:
            if kind == "fails":
                with pytest.raises(ValueError, match="so"):
                    await asyncio.create_task(fails())
            elif kind == "value":
                assert await asyncio.wait_for(asyncio.sleep(0.001, "slept"), 600) == "slept"
            else:
                await asyncio.sleep(float(kind))
        yield number


def test_a_generator_is_stepped_as_by_anext() -> None:
    generator = random.Random(1)
    for _ in range(20):
        waits = [
            generator.choices(["0", "0.001", "fails", "value"], k=generator.randrange(3))
            for _ in range(generator.randrange(5))
        ]

        async def main(waits: list[list[str]] = waits) -> None:
            results = waiting(waits)
            for number, kinds in enumerate(waits):
                called: list[int] = []
                assert await next_of(results, lambda called=called: called.append(1), StepTime()) == number  # type: ignore[misc]
                assert len(called) == bool(kinds)
            for _ in range(2):
                assert await next_of(results, lambda: pytest.fail("it does not wait"), StepTime()) is NOTHING

        asyncio.run(main())


def test_a_generator_may_end_after_it_has_waited() -> None:
    async def answer() -> AsyncGenerator[int, None]:
        await asyncio.sleep(0.001)
        if not asyncio.get_running_loop():
            yield 1

    async def main() -> None:
        assert await next_of(answer(), lambda: None, StepTime()) is NOTHING

    asyncio.run(main())


@pytest.mark.parametrize("wait_s", [0, 600])
def test_who_is_cancelled_while_a_generator_waits_is_cancelled_in_it(wait_s: float) -> None:
    seen: list[str] = []

    async def answer() -> AsyncGenerator[int, None]:
        try:
            await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        yield 1

    async def main() -> None:
        task = asyncio.create_task(next_of(answer(), lambda: None, StepTime()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == ["cancelled"]


@pytest.mark.parametrize("wait_s", [0, 600])
@pytest.mark.parametrize("answered", ["raises", "yields", "fails", "waits"])
def test_what_a_generator_makes_of_a_lost_connection_matters_to_nobody(wait_s: float, answered: str) -> None:
    seen: list[str] = []

    async def answer() -> AsyncGenerator[int, None]:
        try:
            await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            seen.append("cancelled")
            if answered == "raises":
                raise
            if answered == "fails":
                raise ValueError("of its own") from None
            if answered == "waits":
                await asyncio.sleep(0.001)
                seen.append("cleaned up")
        yield 1

    def lose() -> None:
        raise ConnectionLostError("nobody is there")

    async def main() -> None:
        results = answer()
        with pytest.raises(ConnectionLostError, match="nobody is there"):
            await next_of(results, lose, StepTime())
        await results.aclose()

    asyncio.run(main())
    assert seen == ["cancelled", *["cleaned up"] * (answered == "waits")]


def test_the_time_in_which_a_generator_waits_is_not_that_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**9]
    monkeypatch.setattr(steps, "monotonic_ns", lambda: now[0])

    async def answer(before: int, after: int) -> AsyncGenerator[int, None]:
        while True:
            now[0] += before
            await asyncio.sleep(0)
            now[0] += 100 * TURN_NS
            await asyncio.sleep(0)
            now[0] += after
            yield 1

    async def main() -> None:
        for before, after in ((0, TURN_NS), (TURN_NS, 0), (TURN_NS // 2, TURN_NS // 2)):
            for less in (0, 1):
                time, results = StepTime(), answer(before, after - less)
                for _ in range(2):
                    await next_of(results, lambda: None, time)
                    assert time.is_long() is not bool(less)
                await results.aclose()

    asyncio.run(main())


def test_a_generator_without_async_is_stepped_and_closed(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def answer() -> Generator[int, None, None]:
        try:
            yield from (1, 2, 3)
        finally:
            seen.append("closed")

    async def main() -> None:
        assert [each async for each in stepped(answer(), "model")] == [1, 2, 3]
        assert seen == ["closed"]
        results = stepped(answer(), "model")
        assert await anext(results) == 1
        await results.aclose()
        assert seen == ["closed"] * 2
        assert caplog.records == []

    asyncio.run(main())


def test_a_generator_that_cannot_be_closed_is_told_of_by_its_model(caplog: pytest.LogCaptureFixture) -> None:
    def answer() -> Generator[int, None, None]:
        try:
            yield 1
        finally:
            raise ValueError("so")

    async def answer_async() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            raise ValueError("so")

    async def main() -> None:
        results, results_async, stepping = answer(), answer_async(), stepped(answer(), "by stepped")
        next(results)
        steps.close(results, "by close")
        for each, name in ((results_async, "by close_async"), (stepping, "of no use")):
            await anext(each)
            await steps.close_async(each, name)

    asyncio.run(main())
    told = [record.getMessage().splitlines() for record in caplog.records]
    assert [lines[0] for lines in told] == [
        f"model by {name}: closing the generator failed" for name in ("close", "close_async", "stepped")
    ]
    assert [lines[-1] for lines in told] == ["ValueError: so"] * 3


# ---- callers that do not take what they were sent -------------------------------------------------------------------


class Paced:
    """Lets a stream wait until its test resumes it."""

    def __init__(self, waits: int) -> None:
        self.waits = waits
        self.told: list[Any] = []
        self.then: Callable[[], object] | None = None

    def must_wait(self, number: int) -> bool:
        assert number == 7
        return self.waits > 0

    def wait_taken(self, number: int, is_given_up: Callable[[], bool]) -> None:
        raise AssertionError("a loop must not be held up")

    def when_resumed(self, number: int, then: Callable[[], object]) -> None:
        self.told.append(("when resumed", number))
        self.then = then

    def resume_next(self, number: int) -> None:
        self.told.append(("resume next", number))

    def resume(self) -> None:
        self.waits -= 1
        assert self.then is not None
        self.then()


def test_a_stream_waits_as_often_as_it_has_to() -> None:
    async def main() -> None:
        pacing = Paced(3)
        turns = Turns(asyncio.get_running_loop(), pacing, 7)
        assert turns.is_due()
        task = asyncio.create_task(turns.give_way())
        for _ in range(3):
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done()
            pacing.resume()
        await task
        assert pacing.told == [("when resumed", 7), ("resume next", 7)] * 3
        assert not turns.is_due()
        pacing.waits = 1
        assert turns.is_due()

    asyncio.run(main())


def test_a_stream_that_ends_while_it_waits_leaves_its_place_to_the_next() -> None:
    async def main() -> None:
        pacing = Paced(1)
        task = asyncio.create_task(Turns(asyncio.get_running_loop(), pacing, 7).give_way())
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pacing.told == [("when resumed", 7), ("resume next", 7)]
        # It may be told too late.
        pacing.resume()

    asyncio.run(main())
