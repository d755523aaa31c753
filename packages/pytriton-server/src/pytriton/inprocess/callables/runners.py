"""Runners: each serves the batches of one model instance with one callable.

A synchronous callable is called in the thread in which Triton executes the instance, which waits for it: Triton goes on
collecting the next batch meanwhile. An `async` one runs on an event loop in a thread of its own; Triton's thread hands
the batch over and waits only where as many are in flight as may be.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from pytriton.inprocess.callables.backend import Backend, Instance
from pytriton.inprocess.callables.batches import IN_PLACE_BYTES, BatchHandle, DirectBatch, DirectSink, Slab, SlabPool
from pytriton.inprocess.callables.lanes import Lane
from pytriton.inprocess.requests.native_calls import load_native_calls
from pytriton.proxy.tracers import worker_tracer
from pytriton.proxy_backend.runtime.batch_loop import (
    ASYNC_MAX_IN_FLIGHT,
    STREAMS_MAX_IN_FLIGHT,
    LazyLoop,
    load_tracing,
    make_execution,
)
from pytriton.proxy_backend.runtime.execution import Execution
from pytriton.proxy_backend.runtime.service import Service
from pytriton.proxy_backend.runtime.texts import error_text
from pytriton.proxy_backend.settings import cost_settings
from pytriton.proxy_backend.system.threads import keep_on
from pytriton.proxy_backend.wire.accelerator import accelerator
from pytriton.proxy_backend.wire.batch import BatchReader
from pytriton.proxy_backend.wire.errors import ProtocolError
from pytriton.proxy_backend.wire.layout import ErrorCode

logger = logging.getLogger(__name__)

# The value of `in_place_from` if nothing stays in place.
_NEVER = (1 << 64) - 1
# An async callable learns within this time that its caller has cancelled a request.
_CANCEL_POLL_S = 0.01
_STACK_ENTRIES = 12
_LONGEST_WATCH_S = 0.5
_LARGEST_KEPT = 64 << 20
_UNLOAD_TIMEOUT_S = 5.0


class Runner:
    """The common base of the runners of both kinds of callables."""

    def __init__(
        self,
        backend: Backend,
        service: Service,
        context: contextvars.Context,
        instance: Instance,
        copy_inputs: bool,
        *,
        execution_timeout_s: float | None = None,
        on_unload: Callable[[Runner], None],
    ) -> None:
        self._on_unload = on_unload
        self._backend = backend
        self._service = service
        self._context = context
        self._instance = instance
        self._copy_inputs = copy_inputs
        self._reader = BatchReader(service.model.batching)
        self._pool = SlabPool()
        self._input_owners = load_native_calls().input_owners
        self._failure: BaseException | None = None
        self.sink = DirectSink(backend)
        service.sink = self.sink
        self._watch_ends: threading.Event | None = None
        if execution_timeout_s is not None:
            self._start_watch(float(execution_timeout_s))
        instance.batching = int(service.model.batching)
        instance.decoupled = int(service.model.decoupled)
        instance.in_place_from = _NEVER if copy_inputs else IN_PLACE_BYTES
        for setting, value in cost_settings(service.model).items():
            setattr(instance, setting, int(value))
        context.run(lambda: load_tracing(worker_tracer()))
        self._put(self._pool.take())

    def _put(self, slab: Slab) -> None:
        self._slab = slab
        self._instance.slab = slab.address
        self._instance.capacity = slab.capacity
        self._instance.owner = slab

    def _renew(self) -> None:
        # Without memory for another slab, the next batch must find no room instead of a slab in use.
        self._instance.capacity = 0
        self._put(self._pool.take())

    def make_room(self, length: int) -> None:
        """See `InstanceRunner`."""
        self._put(self._pool.take(length))

    def _execution(self, handle: BatchHandle, request: int, in_place: list[tuple[int, int]]) -> Execution | None:
        """Read the batch in the slab; `None` if it cannot be served, and its requests got their error."""
        self.sink.hold(handle)
        number = handle.address
        if self._failure is not None:
            failure = self._failure
            name = self._service.model.name
            text = f"model '{name}': its callable cannot go on: {type(failure).__name__}: {error_text(failure)}"
            self.sink.fail(number, text, ErrorCode.UNAVAILABLE)
            return None
        try:
            # A request that was not made here, such as one inside an ensemble, has no owner, so its inputs are copied.
            owner = self._input_owners.get(request) if in_place else None
            batch = DirectBatch.read(self._slab, handle, self._reader, in_place, owner, self._copy_inputs)
        except (ProtocolError, TypeError, ValueError) as error:
            self._service.counters.add_failed("input")
            self.sink.fail(number, f"the inputs cannot be read: {error}", ErrorCode.INVALID_ARG)
            return None
        return make_execution(self._service, batch, worker_tracer())

    def execute(self, handle: BatchHandle, request: int, in_place: list[tuple[int, int]]) -> None:
        """See `InstanceRunner`."""
        raise NotImplementedError

    def unload(self) -> None:
        """See `InstanceRunner`."""
        raise NotImplementedError

    def _start_watch(self, limit_s: float) -> None:
        self.sink.track_progress()
        ends = self._watch_ends = threading.Event()
        name = self._service.model.name
        text = f"model '{name}': the inference callable took longer than the model's execution timeout, {limit_s:g} s"

        def look() -> None:
            if self.sink.fail_late(limit_s, text, ErrorCode.UNAVAILABLE):
                logger.error("%s, and has not returned. What it does right now:\n%s", text, self.stuck_at or "")

        def watch() -> None:
            while not ends.wait(min(limit_s / 4, _LONGEST_WATCH_S)):
                keep_on(look, f"The execution timeout of model '{name}' cannot be looked after")

        threading.Thread(target=watch, name=f"pytriton-{name}-watch", daemon=True).start()

    def _unloaded(self) -> None:
        if self._watch_ends is not None:
            self._watch_ends.set()
        self._on_unload(self)

    def _note(self, failure: BaseException | None) -> None:
        if failure is not None:
            self._failure = failure

    @property
    def stuck_at(self) -> str | None:
        """The current stack of the callable; `None` if it is idle."""
        return None


class SyncRunner(Runner):
    """Serves a synchronous callable."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._loop = LazyLoop()
        self._thread: int | None = None
        self._lane: Lane | None = None
        self._instance.is_timed = 1
        # The limit of a batch is watched from its start, which a lane does not do, and requests of different shapes
        # make no plain batch.
        model = self._service.model
        if accelerator() is not None and self._watch_ends is None and not model.decoupled and model.cost is None:
            self._lane = Lane(
                self._backend, self._service, self._context, self._instance, self._reader, self._go_on, self._renew
            )

    def execute(self, handle: BatchHandle, request: int, in_place: list[tuple[int, int]]) -> None:
        """See `InstanceRunner`; returns when the batch is answered."""
        self._thread = threading.get_ident()
        number = handle.address
        try:
            self._context.run(self._run, handle, request, in_place)
        finally:
            self._thread = None
            del handle
            self.sink.forget(number)
        slab = self._slab
        if not slab.is_free() or slab.capacity > _LARGEST_KEPT:
            self._renew()

    def _go_on(self, handle: BatchHandle, execution: Execution) -> None:
        """Serve the rest of a batch whose callable was called."""
        number = handle.address
        self.sink.hold(handle)
        try:
            self._context.run(execution.run, self._loop.run)
            self._note(execution.failure)
        finally:
            self.sink.forget(number)

    def _note(self, failure: BaseException | None) -> None:
        super()._note(failure)
        if failure is not None and self._lane is not None:
            self._lane.stop()

    def _run(self, handle: BatchHandle, request: int, in_place: list[tuple[int, int]]) -> None:
        execution = self._execution(handle, request, in_place)
        if execution is not None:
            execution.run(self._loop.run)
            self._note(execution.failure)

    def unload(self) -> None:
        """See `InstanceRunner`."""
        try:
            if self._lane is not None:
                self._lane.close()
            self._context.run(self._loop.close)
        finally:
            self._unloaded()

    @property
    def stuck_at(self) -> str | None:
        """See `Runner`."""
        thread = self._thread or (None if self._lane is None else self._lane.thread)
        frame = None if not thread else sys._current_frames().get(thread)
        return None if frame is None else "".join(traceback.format_stack(frame)[-_STACK_ENTRIES:])


class AsyncRunner(Runner):
    """Serves an asynchronous callable: many batches at once, on one event loop in a thread of its own."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        limit = STREAMS_MAX_IN_FLIGHT if self._service.model.decoupled else ASYNC_MAX_IN_FLIGHT
        # Triton forms a batch before it calls, so each call waits at its end for a place for the next one.
        self._places = threading.Semaphore(limit - 1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._wanted: dict[int, BatchHandle] = {}  # of the tasks that were not cancelled
        self._is_polling = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._stopped: asyncio.Event | None = None
        self._thread = threading.Thread(
            target=self._context.run, args=(self._serve,), name=f"pytriton-{self._service.model.name}", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def execute(self, handle: BatchHandle, request: int, in_place: list[tuple[int, int]]) -> None:
        """See `InstanceRunner`; returns when there is a place for one more batch."""
        # The thread of the loop has entered the context of the callable, in which the tracer is looked up.
        execution = self._execution(handle, request, in_place)
        slab = self._slab
        self._put(self._pool.take())
        loop = self._loop
        if execution is None:
            self._pool.give_back(slab)
            return
        if loop is None:
            handle.fail(f"model '{self._service.model.name}' is being unloaded", ErrorCode.UNAVAILABLE)
            return
        # A copy, because the thread of the loop has entered the original.
        loop.call_soon_threadsafe(self._start, execution, handle, slab, context=self._context.copy())
        del execution, slab
        self._places.acquire()

    def _start(self, execution: Execution, handle: BatchHandle, slab: Slab) -> None:
        number = handle.address
        self._wanted[number] = handle
        loop = asyncio.get_running_loop()
        if not self._is_polling:
            self._is_polling = True
            loop.call_later(_CANCEL_POLL_S, self._poll_cancelled)
        # The loop's task factory is not used: one that the callable has set may run the task to its end before it is
        # noted.
        self._tasks[number] = asyncio.Task(self._run(execution, number, slab), loop=loop)

    async def _run(self, execution: Execution, number: int, slab: Slab) -> None:
        try:
            await execution.run_async()
            self._note(execution.failure)
        finally:
            del execution
            self._tasks.pop(number, None)
            self._wanted.pop(number, None)
            self.sink.forget(number)
            self._pool.give_back(slab)
            self._places.release()

    def _poll_cancelled(self) -> None:
        loop = asyncio.get_running_loop()
        for number in [number for number, handle in self._wanted.items() if handle.is_cancelled()]:
            # Once: what the coroutine awaits in its `finally` blocks goes on.
            del self._wanted[number]
            # After the first step of every task: one that is cancelled before it would never see to its end.
            loop.call_soon(self._tasks[number].cancel)
        self._is_polling = bool(self._wanted)
        if self._is_polling:
            loop.call_later(_CANCEL_POLL_S, self._poll_cancelled)

    def _serve(self) -> None:
        loop = LazyLoop()
        try:
            loop.run(self._wait())
        finally:
            self._loop = None
            loop.close()

    async def _wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._ready.set()
        await self._stopped.wait()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def run_coroutine(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine on the loop of the callable, and wait for its end."""
        loop = self._loop
        if loop is None:
            raise RuntimeError(f"the event loop of model '{self._service.model.name}' has ended")
        asyncio.run_coroutine_threadsafe(make(), loop).result()

    def unload(self) -> None:
        """See `InstanceRunner`. Triton unloads a model when its requests are answered: the loop has nothing to do."""
        loop, stopped = self._loop, self._stopped
        if loop is not None and stopped is not None:
            loop.call_soon_threadsafe(stopped.set)
        self._thread.join(_UNLOAD_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("model %s: its event loop is left to end by itself", self._service.model.name)
        self._unloaded()

    @property
    def stuck_at(self) -> str | None:
        """See `Runner`."""
        if not self._tasks:
            return None
        frame = sys._current_frames().get(self._thread.ident or -1)
        return None if frame is None else "".join(traceback.format_stack(frame)[-_STACK_ENTRIES:])
