"""Serves plain batches with the accelerator, and everything else in Python."""

from __future__ import annotations

import collections
import logging
import mmap
import os
from typing import TYPE_CHECKING, Any

from pytriton.proxy.tracers import worker_tracer
from pytriton.proxy.types import Request, make_requests

from ..runtime.batch_loop import LazyLoop, OnFailure, begin, make_execution
from ..runtime.execution import Call, Execution
from ..runtime.plain import PlainBatches
from ..runtime.service import Service
from ..system.forks import call_in_child
from ..system.processors import usable_processors
from ..transport.arena import OwnedBlock, address_of
from ..transport.connection import Connection
from ..wire.batch import Batch, BatchMetadata
from ..wire.record import Array

if TYPE_CHECKING:
    from .._accelerator import Lane

logger = logging.getLogger(__name__)

BUSY_POLL_VARIABLE = "PYTRITON_BUSY_POLL_US"
"""How many microseconds a worker spins for the next batch of a lone caller before it sleeps."""
_BUSY_POLL_US = 400
_MOST_BUSY_POLL_US = 10_000
_LEAST_PROCESSORS = 2
# The smallest block for responses.
_LEAST_ROOM = 4 << 10
_LARGEST_ROUNDED = 1 << 20


def serve_accelerated(
    service: Service, connection: Connection, loop: LazyLoop, on_failure: OnFailure, lane_type: type[Lane]
) -> None:
    """Serve a synchronous callable until the connection closes."""
    begin(service, connection)
    source = AcceleratedSource(service, connection, lane_type)
    try:
        while (execution := source.next()) is not None:
            execution.run(loop.run)
            if execution.failure is not None:
                on_failure(execution.failure)
            # The inputs' memory goes back while the worker waits for the next batch.
            del execution
    finally:
        source.close()


def _busy_poll_us() -> int:
    text = os.environ.get(BUSY_POLL_VARIABLE)
    if text is None:
        # With a single processor, a spinning worker would keep the server from it.
        return _BUSY_POLL_US if usable_processors() >= _LEAST_PROCESSORS else 0
    if text.isdecimal() and int(text) <= _MOST_BUSY_POLL_US:
        return int(text)
    logger.warning(
        "%s: expected microseconds from 0 to %d, got %r; 0 is taken, which is to sleep until a batch comes",
        BUSY_POLL_VARIABLE, _MOST_BUSY_POLL_US, text,
    )  # fmt: skip
    return 0


class AcceleratedSource:
    """Serves batches, and returns those that are not plain; the accelerator calls it.

    The connection's state belongs to Python, which lends it to the accelerator for each run.
    """

    def __init__(self, service: Service, connection: Connection, lane_type: type[Lane]) -> None:
        self.released: collections.deque[tuple[int, int]] = connection.protocol.segments.released
        self.note_released = self.released.append
        self._service = service
        self._connection = connection
        self._replies: list[OwnedBlock | None] = [None, None]
        self._plain = plain = PlainBatches(service, connection.reader)
        self.is_lent = connection.outputs.is_lent
        self.describe = plain.describe
        self.lay_out = plain.lay_out
        columns_func = service.columns_func
        counters = service.counters
        self._lane = lane_type(
            connection.fileno(),
            connection.buffer,
            counters.accelerated,
            counters,
            service.infer_func if columns_func is None else columns_func,
            columns_func is not None,
            _busy_poll_us() * 1000,
            self,
        )
        call_in_child(self, AcceleratedSource._end_in_child)

    def _end_in_child(self) -> None:
        self._lane.close_in_child()

    def close(self) -> None:
        """End; blocks that are still in use may be."""
        self._lane.close()

    def next(self) -> Execution | None:
        """Serve plain batches; return the first other one, maybe with its callable called, or `None` at the end."""
        connection = self._connection
        while True:
            if (batch := connection.next_pending()) is not None:
                return self.execution(batch)
            told = self._run()
            if told is None:
                connection.tick()
                if not self._lane.held():
                    connection.rest()
            elif isinstance(told, list):
                return self._resumed(told)
            elif not connection.take(*told):
                return None

    def _run(self) -> tuple[int, list[int]] | list[Any] | None:
        protocol = self._connection.protocol
        try:
            return self._lane.run(protocol.sent, len(protocol.unacknowledged))
        except OSError as error:
            self._connection.lost(error)
        finally:
            sent, in_flight, newest = self._lane.leave()
            for place, left in ((1 - newest, in_flight == 2), (newest, in_flight > 0)):
                block = self._replies[place]
                if block is None:
                    continue
                if left:
                    protocol.unacknowledged.append(block)
                else:
                    self._connection.outputs.release(block)
                self._replies[place] = None
            protocol.consumed = sent - len(protocol.unacknowledged)

    def _resumed(self, told: list[Any]) -> Execution:
        """Make the execution of a batch whose callable was called; nothing else may refer to its inputs."""
        error, result, called_ns = told.pop(), told.pop(), told.pop()
        place, *parts = told
        told.clear()
        batch = self._make_batch(*parts)
        self._connection.protocol.batches[batch.number] = place
        return self.execution(batch, Call(called_ns, result, error))

    def execution(self, batch: Batch, called: Call | None = None) -> Execution:
        """Make the execution of a batch; `called` is given if its callable was called already."""
        if called is None:
            return make_execution(self._service, batch, worker_tracer())
        return Execution(self._service, batch, called)

    # ---- what the accelerator asks ----------------------------------------------------------------------------------

    def make_room(self, place: int, length: int) -> tuple[int, int, int, int] | None:
        """See `_accelerator.Host`."""
        outputs = self._connection.outputs
        if (before := self._replies[place]) is not None:
            outputs.release(before)
            self._replies[place] = None
        # Larger than requested if possible, so that a larger next response needs no new block.
        rooms = (length,) if length > _LARGEST_ROUNDED else (max(_LEAST_ROOM, 1 << (length - 1).bit_length()), length)
        for room in rooms:
            block = outputs.allocate(room)
            if block is not None:
                self._replies[place] = block
                return block.segment, block.offset, room, address_of(block.memory) + block.offset
        return None

    def acknowledge(self, consumed: int) -> int:
        """See `_accelerator.Host`."""
        protocol = self._connection.protocol
        protocol.acknowledge(consumed)
        return len(protocol.unacknowledged)

    def segment(self, number: int) -> tuple[mmap.mmap, int, int] | None:
        """See `_accelerator.Host`."""
        memory = self._connection.inputs.segment(number)
        return None if memory is None else (memory, address_of(memory), len(memory))

    def make_requests(self, *parts: Any) -> list[Request]:
        """See `_accelerator.Host`."""
        batch = self._make_batch(*parts)
        self._service.count_cost(batch)
        return make_requests(batch, len(batch.rows))

    def give_back(self) -> None:
        """See `_accelerator.Host`."""
        self._connection.release()

    def _make_batch(
        self,
        metadata: BatchMetadata,
        raw: bytes | None,
        resized: int,
        block: Any,
        columns: dict[str, Array],
        number: int,
        received_ns: int,
        sent_ns: int,
    ) -> Batch:
        metadata = self._plain.metadata_of(metadata, raw, resized)
        return Batch(metadata, block, number, received_ns, sent_ns, self._service.model.batching, columns)
