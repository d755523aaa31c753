"""Batches from a connection to a Python model, and responses back, from any thread."""

from __future__ import annotations

import collections
import select
from typing import Any

from ..runtime.batch_loop import STREAMS_MAX_IN_FLIGHT, LazyLoop
from ..runtime.execution import Call
from ..runtime.service import Service
from ..transport.connection import Connection
from ..wire.accelerator import accelerator
from ..wire.batch import Batch
from ..wire.layout import CAPABILITIES, Capability, ErrorCode
from ..wire.record import Record
from ..worker.accelerated import AcceleratedSource
from ..worker.worker import Worker
from .execution import Execution, ModelService
from .senders import OpenBatch


class ModelWorker(Worker):
    """Serves a Python model, in the thread that calls `run`: that of `initialize` and `finalize`."""

    def __init__(self, service: ModelService, endpoint: str, name: str) -> None:
        """Prepare a worker."""
        super().__init__(service.infer_func, service.model, endpoint, counters=service.counters)
        self.name = name
        self._service = service

    _capabilities = (
        CAPABILITIES | Capability.RESCHEDULE | Capability.EXECUTED | Capability.CONTINUES | Capability.REFERENCES
    )
    # It gets one batch at a time, and others may still be unanswered when `execute` has returned.
    _max_in_flight = STREAMS_MAX_IN_FLIGHT

    def _make_service(self) -> Service:
        return self._service

    def _serve(self, service: Service, connection: Any, loop: LazyLoop) -> None:
        assert isinstance(service, ModelService)
        serve_model(service, connection, loop)


def serve_model(service: ModelService, connection: Connection, loop: LazyLoop) -> None:
    """Serve a Python model until the connection closes."""
    source = SharedSource(service, connection)

    def serve_next() -> bool:
        batch = source.receive()
        if batch is None:
            return False
        served = Execution(service, batch)
        del batch
        served.run(loop.run)
        return True

    native = accelerator()
    if native is not None and not service.state.decoupled:
        # While `execute` runs, the accelerator has the connection, and what senders send waits for its end. So the
        # first batches show whether the model sends.
        if not serve_next():
            return
        while source.has_batches:
            serve_next()
        lane = _LaneSource(service, connection, native.Lane)
        try:
            while not (service.has_late or service.state.has_sent):
                execution = lane.next()
                if execution is None:
                    return
                execution.run(loop.run)
                del execution
        finally:
            lane.close()
    while serve_next():
        pass


class _LaneSource(AcceleratedSource):
    """Serves plain batches with the accelerator, which asks for a batch where callables get requests."""

    _service: ModelService

    def make_requests(self, *parts: Any) -> Any:
        """Make the requests of a batch, for the accelerator."""
        return self._make_batch(*parts)

    def execution(self, batch: Batch, called: Call | None = None) -> Any:
        return Execution(self._service, batch, called)


class SharedSource:
    """A connection that one thread reads from, and any thread may send to.

    Everything but waiting happens under the lock of the model's state.
    """

    def __init__(self, service: ModelService, connection: Connection) -> None:
        self._connection = connection
        capabilities = connection.welcome.capabilities
        self.can_reschedule = bool(capabilities & Capability.RESCHEDULE)
        self.can_continue = bool(capabilities & Capability.CONTINUES)
        self._tells_executed = bool(capabilities & Capability.EXECUTED)
        self._lock = service.state.lock
        self._counters = service.counters
        self._batches: collections.deque[Batch] = collections.deque()
        self._dropped: collections.deque[tuple[OpenBatch, int]] = collections.deque()
        self._bell = service.bell
        self._poller = select.poll()
        self._poller.register(connection.fileno(), select.POLLIN)
        self._poller.register(self._bell.fileno(), select.POLLIN)
        connection.on_cancel = self._note_cancelled
        connection.on_unreadable = self._note_unreadable
        service.sink = self

    def _note_cancelled(self, _number: int, _request: int) -> None:
        # The byte in the request is set as well.
        self._counters.add_cancelled()

    def _note_unreadable(self) -> None:
        self._counters.add_failed("input")

    # ---- the thread that reads --------------------------------------------------------------------------------------

    @property
    def has_batches(self) -> bool:
        """Whether `receive` would return a batch that was read already."""
        return bool(self._batches)

    def receive(self) -> Batch | None:
        """Wait for the next batch; `None` when the connection is closed."""
        connection = self._connection
        while True:
            if self._batches:
                return self._batches.popleft()
            while self._dropped:
                dropped, index = self._dropped.popleft()
                dropped.answer_dropped(index)
            with self._lock:
                if (pending := connection.next_pending()) is not None:
                    return pending
            ready = dict(self._poller.poll(connection.tick_s * 1000))
            if self._bell.fileno() in ready:
                self._bell.clear()
            with self._lock:
                if connection.fileno() in ready:
                    batches = connection.poll()
                    if batches is None:
                        return None
                    self._batches.extend(batches)
                elif not ready:
                    connection.tick()

    # ---- any thread -------------------------------------------------------------------------------------------------

    def respond(self, number: int, record: Record, *, done: bool, executing: bool = False) -> None:
        """Write a record and send it, see `Sink`; the lock is held."""
        self._connection.respond(number, record, done=done, executing=executing and self._tells_executed)
        if self._connection.has_pending:
            # It has read messages while it waited for room.
            self._bell.ring()

    def executed(self, number: int) -> None:
        """See `Sink`; the lock is held."""
        if self._tells_executed:
            self._connection.executed(number)

    def fail(self, number: int, text: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """End a batch with an error for each open request; the lock is held."""
        self._connection.fail(number, text, code)

    def note_dropped(self, batch: OpenBatch, index: int) -> None:
        """Note a request that the model dropped. A destructor calls this, so it must not take the lock."""
        self._dropped.append((batch, index))
        self._bell.ring()
