"""Batches from a connection through a callable: one at a time, or many at once on an event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pytriton.proxy.tracers import find_tracer, worker_tracer

from ..wire.batch import Batch
from .execution import Execution
from .service import BatchSource, Service

# asyncio is imported where a coroutine runs: most worker processes have none, and are smaller by 6 MB without.
if TYPE_CHECKING:
    import asyncio

OnFailure = Callable[[BaseException], None]
ASYNC_MAX_IN_FLIGHT = 64
"""Batches that one async callable works on at once: what comes while it has so many is joined to larger batches."""
STREAMS_MAX_IN_FLIGHT = 1024
"""Likewise of a decoupled model. A stream may last, and its place is that of no other: what the protocol allows."""


class LazyLoop:
    """The event loop of one worker, made when it is first needed: by many a synchronous callable, never."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def make(self) -> asyncio.AbstractEventLoop:
        """Make it, where it is not there yet; raises `OSError` if the system is out of descriptors or memory."""
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Run it to its end."""
        import asyncio

        loop = self.make()
        task = asyncio.ensure_future(awaitable, loop=loop)
        task.add_done_callback(lambda _: loop.stop())
        # Not `run_until_complete`, which gives up where a callable stops the loop: that would end the worker for good.
        while not task.done():
            # asyncio ends the loop for what one of the callable's own tasks raised. Who awaits that task gets it.
            with suppress(KeyboardInterrupt, SystemExit):
                loop.run_forever()
        return task.result()

    def close(self) -> None:
        """End the loop, where one was made, with what is still running on it."""
        loop = self._loop
        if loop is None:
            return
        import asyncio

        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        self.run(_ended(left))
        self.run(loop.shutdown_asyncgens())
        self.run(loop.shutdown_default_executor())
        loop.close()


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    import asyncio

    await asyncio.gather(*tasks, return_exceptions=True)


def serve(service: Service, source: BatchSource, loop: LazyLoop, on_failure: OnFailure) -> None:
    """Serve a synchronous callable until the connection closes."""
    begin(service, source)
    tracer = worker_tracer()
    while (batch := source.receive()) is not None:
        execution = make_execution(service, batch, tracer)
        # No name here may hold on to it: the memory of its inputs goes back while its answer is sent.
        del batch
        execution.run(loop.run)
        if execution.failure is not None:
            on_failure(execution.failure)


def begin(service: Service, source: BatchSource, cancelled: list[tuple[int, int]] | None = None) -> None:
    """Tie a service to the source of its batches, to which its responses go.

    `cancelled` gets requests of lost callers.
    """
    counters = service.counters

    def note_cancelled(number: int, request: int) -> None:
        counters.add_cancelled()
        if cancelled is not None:
            cancelled.append((number, request))

    def note_unreadable() -> None:
        counters.add_failed("input")

    load_tracing(worker_tracer())
    source.on_cancel = note_cancelled
    source.on_unreadable = note_unreadable
    service.sink = source
    service.pacing = source.pacing if service.model.decoupled else None


def load_tracing(own_tracer: Any) -> None:
    """Import what makes spans, where there is a tracer, so that the first batch does not wait for it."""
    if find_tracer(own_tracer) is not None:
        from . import tracing  # noqa: F401


def make_execution(service: Service, batch: Batch, own_tracer: Any) -> Execution:
    """Make the execution of a batch. It makes spans if there is a tracer, `own_tracer` or the one in use."""
    tracer = find_tracer(own_tracer)
    if tracer is None:
        return Execution(service, batch)
    # This is imported late because it imports OpenTelemetry, which is needed only with a tracer.
    from .tracing import make_traced_execution

    return make_traced_execution(service, batch, tracer)


async def serve_async(service: Service, source: BatchSource, on_failure: OnFailure) -> None:
    """Serve an asynchronous callable until the connection closes, with as many batches at once as come."""
    await _AsyncLoop(service, source, on_failure).serve()


class _AsyncLoop:
    """The batches of an asynchronous callable, each of which is a task of the running loop."""

    def __init__(self, service: Service, source: BatchSource, on_failure: OnFailure) -> None:
        import asyncio

        self._service = service
        self._source = source
        self._on_failure = on_failure
        self._own_tracer = worker_tracer()
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._something_came = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, set[int]] = {}  # requests of a batch whose callers still wait
        # Cancellations that were read. Some may be ahead of their batch, which was read with them.
        self._cancelled: list[tuple[int, int]] = []

    async def serve(self) -> None:
        """Start, run until the connection closes or fails, and stop."""
        ticking = self._start()
        try:
            self._read()
            await self._closed
        finally:
            await self._stop(ticking)

    def _start(self) -> asyncio.Task[None]:
        begin(self._service, self._source, self._cancelled)
        if self._service.model.decoupled:
            # What all streams give in one turn of the loop goes in one message.
            self._service.together = self._source.together(lambda: self._loop.call_soon(self._flush))
        self._loop.add_reader(self._source.fileno(), self._read)
        return self._loop.create_task(self._tick())

    async def _stop(self, ticking: asyncio.Task[None]) -> None:
        self._loop.remove_reader(self._source.fileno())
        ticking.cancel()
        running = list(self._tasks.values())
        for task in running:
            task.cancel()
        await _ended([ticking, *running])
        self._service.together = None

    def _end(self, error: BaseException | None) -> None:
        if self._closed.done():
            return
        if error is None:
            self._closed.set_result(None)
        else:
            self._closed.set_exception(error)

    def _read(self) -> None:
        """Take what has come, and begin a task for each batch."""
        self._something_came.set()
        try:
            batches = self._source.poll()
        except Exception as error:
            self._end(error)
            return
        if batches is None:
            self._end(None)
            return
        while batches:
            self._begin_batch(batches.pop(0))
        if self._cancelled:
            # After the first step of every task: one that is cancelled before it would never answer.
            self._loop.call_soon(self._cancel)

    def _begin_batch(self, batch: Batch) -> None:
        import asyncio

        self._waiting[batch.number] = set(range(len(batch.rows)))
        execution = make_execution(self._service, batch, self._own_tracer)
        # The loop's task factory is not used: one that the callable has set may run the task to its end before it is
        # noted.
        self._tasks[batch.number] = asyncio.Task(self._run(execution, batch.number), loop=self._loop)

    async def _run(self, execution: Execution, number: int) -> None:
        try:
            await execution.run_async()
            if execution.failure is not None:
                self._on_failure(execution.failure)
        except Exception as error:
            self._end(error)
        finally:
            self._tasks.pop(number, None)
            self._waiting.pop(number, None)
        # Sending may have read messages while it waited for room.
        self._read()

    def _cancel(self) -> None:
        """Cancel the tasks of the batches that no caller waits for any more."""
        while self._cancelled:
            number, request = self._cancelled.pop(0)
            left = self._waiting.get(number)
            if left is None:
                continue
            left.discard(request)
            # The other requests of the batch still want their answers.
            if not left:
                self._tasks[number].cancel()

    async def _tick(self) -> None:
        """Look after the source at intervals, except while there is nothing to look after."""
        import asyncio

        while True:
            await asyncio.sleep(self._source.tick_s)
            self._source.tick()
            if self._source.is_settled and not self._tasks:
                self._something_came.clear()
                await self._something_came.wait()

    def _flush(self) -> None:
        """Send what the streams have given in this turn of the loop."""
        try:
            if self._service.together is not None:
                self._service.together.flush()
        except Exception as error:
            self._end(error)
