"""The loops of a worker over a source of batches that a test moves: no socket, no thread, no server."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pytriton.proxy.tracers import use_worker_tracer
from pytriton.proxy.types import Request
from pytriton.proxy_backend.errors import ConnectionLostError
from pytriton.proxy_backend.model import ModelSpec, TensorSpec
from pytriton.proxy_backend.runtime.batch_loop import LazyLoop, serve, serve_async
from pytriton.proxy_backend.runtime.service import Service, Together
from pytriton.proxy_backend.wire.batch import Batch, BatchReader, RequestData, lay_out_batch
from pytriton.proxy_backend.wire.layout import ErrorCode
from pytriton.proxy_backend.wire.record import Record
from support.waiting import drive, eventually_async

F4 = np.dtype("float32")
Wait = Callable[[Callable[[], object]], Any]


def spec(*, decoupled: bool = False) -> ModelSpec:
    tensors = {name: (TensorSpec(name=name, dtype=F4, shape=(1,)),) for name in "xy"}
    return ModelSpec(
        name="model",
        version=1,
        inputs=tensors["x"],
        outputs=tensors["y"],
        batching=True,
        max_batch_size=8,
        decoupled=decoupled,
    )


def batch(number: int, count: int = 1, **fields: Any) -> Batch:
    """Return a batch whose requests have its number as input."""
    requests = [RequestData({"x": np.full((1, 1), number, F4)}, ["y"], **fields)] * count
    record = lay_out_batch(requests, batching=True)
    memory = bytearray(record.layout.length)
    record.write(memory, 0, number)
    raw = bytes(memory)
    return BatchReader(True).read(np.frombuffer(raw, np.uint8), raw, 0, number)


class Source:
    """Has the batches that a test has put there, and keeps what is answered."""

    def __init__(self) -> None:
        self.tick_s = 0.001
        self.on_cancel: Callable[[int, int], None] | None = None
        self.on_unreadable: Callable[[], None] | None = None
        self.pacing = None
        self.coming: list[Any] = []
        self.answered: list[int] = []
        self.failed: dict[int, ErrorCode] = {}
        self.ticks = 0
        self.is_settled = True
        self.gathers: Gathers | None = None
        self._reads, self._writes = os.pipe()

    def close(self) -> None:
        os.close(self._reads)
        os.close(self._writes)

    def put(self, *coming: Any) -> None:
        """Have batches come together; `None` is the end, a pair a cancelled request, an error what reading raises."""
        self.coming.extend(coming)
        os.write(self._writes, b".")

    def take(self, most: int | None = None) -> list[Batch] | None:
        """Return batches that have come, `None` at the end."""
        batches: list[Batch] = []
        while self.coming and len(batches) != most:
            found = self.coming.pop(0)
            if isinstance(found, BaseException):
                raise found
            if found is None:
                return None
            if isinstance(found, tuple):
                assert self.on_cancel is not None
                self.on_cancel(*found)
            else:
                batches.append(found)
        return batches

    def receive(self) -> Batch | None:
        batches = self.take(1)
        return batches[0] if batches else None

    def poll(self) -> list[Batch] | None:
        os.set_blocking(self._reads, False)
        try:
            os.read(self._reads, 100)
        except BlockingIOError:
            assert not self.coming
        return self.take()

    def tick(self) -> None:
        self.ticks += 1

    def fileno(self) -> int:
        return self._reads

    def together(self, schedule: Callable[[], object]) -> Together | None:
        if self.gathers is not None:
            self.gathers.schedule = schedule
        return self.gathers

    def respond(self, number: int, record: Record, *, done: bool) -> None:
        if done:
            self.answered.append(number)

    def fail(self, number: int, text: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self.failed[number] = code


class Gathers:
    """Keeps records, and asks to be flushed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.schedule: Callable[[], object] = lambda: None
        self.kept: list[int] = []
        self.flushed: list[list[int]] = []
        self._error = error

    def respond_soon(self, number: int, record: Record) -> None:
        if not self.kept:
            self.schedule()
        self.kept.append(number)

    def flush(self) -> None:
        if self._error is not None:
            raise self._error
        self.flushed.append(self.kept)
        self.kept = []


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.close()


class StopServing(Exception):
    """After it, the callable must not be called again."""


def answer(requests: Sequence[Request]) -> list[dict[str, Any]]:
    return [{"y": request["x"]} for request in requests]


def number_of(requests: Sequence[Request]) -> int:
    return int(requests[0]["x"][0, 0])


def refuse(error: BaseException) -> None:
    raise AssertionError from error


def test_batches_are_served_one_by_one_until_there_are_no_more(source: Source) -> None:
    unrecoverable = StopServing()

    def infer(requests: Sequence[Request]) -> Any:
        if number_of(requests) == 2:
            raise unrecoverable
        return answer(requests)

    service = Service(infer, spec(), (StopServing,))
    failures: list[BaseException] = []
    source.put(batch(1), (1, 0), batch(2, 3), None, batch(3))
    serve(service, source, LazyLoop(), failures.append)
    assert (source.answered, source.failed) == ([1], {2: ErrorCode.INTERNAL})
    assert failures == [unrecoverable]
    assert (service.sink, service.pacing) == (source, None)
    assert source.on_unreadable is not None
    source.on_unreadable()
    counted = service.counters.snapshot()
    assert (counted.cancelled_requests, counted.failed_requests["input"]) == (1, 1)


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_streams_of_a_decoupled_model_alone_are_paced(source: Source, decoupled: bool) -> None:
    source.pacing = pacing = object()  # type: ignore[assignment] # nobody asks it
    source.put(None)
    service = Service(answer, spec(decoupled=decoupled))
    serve(service, source, LazyLoop(), refuse)
    assert service.pacing is (pacing if decoupled else None)


class Many:
    """A coroutine that answers batches as a test wants it."""

    def __init__(self) -> None:
        self.begun: dict[int, asyncio.Future[None]] = {}
        self.ended: list[int] = []

    async def __call__(self, requests: Sequence[Request]) -> Any:
        number = number_of(requests)
        self.begun[number] = asyncio.get_running_loop().create_future()
        try:
            await self.begun[number]
        finally:
            self.ended.append(number)
        return answer(requests)


def test_many_batches_at_once_and_in_any_order(source: Source) -> None:
    infer = Many()

    async def main() -> None:
        service = Service(infer, spec())
        # What is there before is read at once.
        source.coming.append(batch(1))
        source.put()
        task = asyncio.create_task(serve_async(service, source, refuse))
        await eventually_async(lambda: 1 in infer.begun)
        source.put(batch(2), batch(3, 2))
        await eventually_async(lambda: len(infer.begun) == 3)
        for number in (3, 1):
            infer.begun[number].set_result(None)
            await eventually_async(lambda number=number: number in source.answered)  # type: ignore[misc]
        assert source.answered == [3, 1]
        source.put(None)
        await task
        # Nobody waits for what is left.
        assert infer.ended == [3, 1, 2]
        assert source.failed == {2: ErrorCode.CANCELLED}
        assert service.counters.snapshot().requests == 4
        assert not asyncio.get_running_loop().remove_reader(source.fileno())

    drive(main)


def test_a_batch_that_nobody_waits_for_is_cancelled(source: Source) -> None:
    infer = Many()

    async def main() -> None:
        service = Service(infer, spec())
        task = asyncio.create_task(serve_async(service, source, refuse))
        source.put(batch(1), batch(2, 2), batch(3))
        await eventually_async(lambda: len(infer.begun) == 3)
        # One that is over is nobody's any more.
        infer.begun[3].set_result(None)
        await eventually_async(lambda: source.answered == [3])
        source.put((3, 0), (2, 1), (1, 0))
        await eventually_async(lambda: 1 in source.failed)
        assert infer.ended == [3, 1]
        source.put((2, 0))
        await eventually_async(lambda: 2 in source.failed)
        assert source.failed == dict.fromkeys((1, 2), ErrorCode.CANCELLED)
        # It may be known before the batch is.
        source.put((4, 0), batch(4))
        await eventually_async(lambda: 4 in source.failed)
        assert service.counters.snapshot().cancelled_requests == 5
        source.put(None)
        await task

    drive(main)


@pytest.mark.parametrize("where", ["reading", "answering", "flushing"])
def test_what_fails_on_the_way_ends_it(source: Source, where: str) -> None:
    lost = ConnectionLostError("nobody is there")

    async def infer(requests: Sequence[Request]) -> Any:
        for _ in range(3):
            yield answer(requests)
            await asyncio.sleep(0)

    def respond(number: int, record: Record, *, done: bool) -> None:
        raise lost

    async def main() -> None:
        service = Service(infer, spec(decoupled=True))
        if where == "answering":
            source.respond = respond  # type: ignore[method-assign] # it fails
        elif where == "flushing":
            source.gathers = Gathers(lost)
        task = asyncio.create_task(serve_async(service, source, refuse))
        source.put(batch(1))
        if where == "reading":
            await eventually_async(lambda: source.answered == [1])
            source.put(lost)
        with pytest.raises(ConnectionLostError):
            await task
        assert service.together is None

    drive(main)


def test_a_failure_after_which_it_cannot_go_on_is_told(source: Source) -> None:
    async def infer(requests: Sequence[Request]) -> Any:
        raise StopServing

    async def main() -> None:
        failures: list[BaseException] = []
        service = Service(infer, spec(), (StopServing,))
        task = asyncio.create_task(serve_async(service, source, failures.append))
        source.put(batch(1))
        await eventually_async(lambda: failures)
        assert [type(each) for each in failures] == [StopServing]
        source.put(None)
        await task

    drive(main)


def test_what_comes_while_a_response_is_sent_is_read(source: Source) -> None:
    """Sending may have read it already, and then no socket tells of it."""
    infer = Many()

    def respond(number: int, record: Record, *, done: bool) -> None:
        source.answered.append(number)
        if number == 1:
            source.coming.append(batch(2))
            source.poll = lambda: source.take()  # type: ignore[method-assign] # there is nothing to wait for

    async def main() -> None:
        source.respond = respond  # type: ignore[method-assign] # it reads, too
        task = asyncio.create_task(serve_async(Service(infer, spec()), source, refuse))
        source.put(batch(1))
        await eventually_async(lambda: 1 in infer.begun)
        infer.begun[1].set_result(None)
        await eventually_async(lambda: 2 in infer.begun)
        infer.begun[2].set_result(None)
        await eventually_async(lambda: source.answered == [1, 2])
        source.put(None)
        await task

    drive(main)


def test_the_source_is_looked_after_while_there_is_something_to_look_after(source: Source) -> None:
    infer = Many()

    async def main() -> None:
        task = asyncio.create_task(serve_async(Service(infer, spec()), source, refuse))
        source.is_settled = False
        await eventually_async(lambda: source.ticks > 3)
        source.is_settled = True
        for _ in range(3):
            # At most one is due still.
            await asyncio.sleep(0.02)
            ticks = source.ticks
        await asyncio.sleep(0.02)
        assert source.ticks == ticks
        # With a batch it goes on, and so it does once for whatever comes.
        source.put(batch(1))
        await eventually_async(lambda: source.ticks > ticks + 3)
        infer.begun[1].set_result(None)
        await eventually_async(lambda: source.answered)
        for _ in range(3):
            await asyncio.sleep(0.02)
            ticks = source.ticks
        await asyncio.sleep(0.02)
        assert source.ticks == ticks
        source.put(None)
        await task

    drive(main)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_tracer_of_the_worker_makes_the_spans(source: Source, is_async: bool) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider

    seen: list[Any] = []

    def infer(requests: Sequence[Request]) -> Any:
        seen.extend(request.span for request in requests)
        return answer(requests)

    async def infer_async(requests: Sequence[Request]) -> Any:
        return infer(requests)

    def run() -> None:
        use_worker_tracer(TracerProvider().get_tracer("test"))
        if not is_async:
            serve(Service(infer, spec()), source, LazyLoop(), refuse)
            return

        async def main() -> None:
            task = asyncio.create_task(serve_async(Service(infer_async, spec()), source, refuse))
            await eventually_async(lambda: source.answered)
            source.put(None)
            await task

        drive(main)

    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    source.put(batch(1, parameters={"traceparent": parent}), *[] if is_async else [None])
    contextvars.copy_context().run(run)
    assert [each is not None for each in seen] == [True]


def test_what_streams_give_in_one_turn_goes_together(source: Source) -> None:
    async def infer(requests: Sequence[Request]) -> Any:
        for _ in range(3):
            yield answer(requests)
            await asyncio.sleep(0)

    async def main() -> None:
        source.gathers = gathers = Gathers()
        service = Service(infer, spec(decoupled=True))
        task = asyncio.create_task(serve_async(service, source, refuse))
        source.put(batch(1), batch(2))
        await eventually_async(lambda: len(source.answered) == 2)
        assert [1, 2] in gathers.flushed
        assert gathers.kept == []
        source.put(None)
        await task
        assert service.together is None

    drive(main)


# ---- the loop of a worker -------------------------------------------------------------------------------------------


def test_a_loop_is_made_when_it_is_needed() -> None:
    loop = LazyLoop()
    loop.close()

    async def running() -> asyncio.AbstractEventLoop:
        await asyncio.sleep(0)
        return asyncio.get_running_loop()

    made = loop.run(running())
    assert made is loop.make() is loop.run(running())
    loop.close()
    assert made.is_closed()


def test_a_callable_that_stops_the_loop_ends_nothing() -> None:
    async def stops() -> int:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.001)
        return 7

    loop = LazyLoop()
    assert loop.run(stops()) == 7
    loop.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_who_awaits_a_task_gets_what_it_raised(error: type[BaseException]) -> None:
    async def raises() -> None:
        raise error

    async def awaits() -> str:
        task = asyncio.create_task(raises())
        try:
            await task
        except error:
            await asyncio.sleep(0)
            return "got it"
        return "got nothing"

    loop = LazyLoop()
    assert loop.run(awaits()) == "got it"
    with pytest.raises(error):
        loop.run(raises())
    loop.close()


def test_what_still_runs_on_a_loop_ends_with_it() -> None:
    seen: list[str] = []

    async def forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(name)

    async def endless() -> Any:
        try:
            while True:
                yield 1
        finally:
            seen.append("generator")

    generator = endless()

    async def begin() -> list[asyncio.Task[None]]:
        assert await anext(generator) == 1
        await asyncio.to_thread(seen.append, "thread")
        tasks = [asyncio.create_task(forever(name)) for name in ("one", "two")]
        await asyncio.sleep(0)
        return tasks

    loop = LazyLoop()
    tasks = loop.run(begin())
    loop.close()
    assert sorted(seen) == ["generator", "one", "thread", "two"]
    assert all(task.cancelled() for task in tasks)
