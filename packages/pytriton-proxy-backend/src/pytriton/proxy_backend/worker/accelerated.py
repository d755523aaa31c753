"""Serves plain batches with the accelerator, and everything else in Python."""

from __future__ import annotations

import collections
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from pytriton.proxy.tracers import worker_tracer
from pytriton.proxy.types import Request, make_requests

from ..errors import ProtocolError
from ..runtime.execution import Call, Execution
from ..runtime.service import Service
from ..runtime.serving import LazyLoop, OnFailure, begin, make_execution
from ..system.forks import call_in_child
from ..transport.arena import OwnedBlock, address_of
from ..transport.connection import Connection
from ..wire.batch import Batch, BatchMetadata, Head
from ..wire.layout import ALIGNMENT, RECORD
from ..wire.record import Array, Record
from ..wire.response import lay_out_columns

if TYPE_CHECKING:
    from .._accelerator import Lane

# As the accelerator has them.
_MAX_DIMS = 8
_MAX_INPUTS = 32
_MAX_SEEN = 1024
# Of blocks for responses.
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
            # The memory of its inputs goes back while the next batch is waited for.
            del execution
    finally:
        source.close()


class AcceleratedSource:
    """Serves batches, and hands out those that are not plain; it is what the accelerator asks.

    What the two ways share belongs to the connection whenever Python has the say: the accelerator gets it for a run,
    and gives it back after it.
    """

    def __init__(self, service: Service, connection: Connection, lane_type: type[Lane]) -> None:
        self.released: collections.deque[tuple[int, int]] = connection.protocol.segments.released
        self.note_released = self.released.append
        self._service = service
        self._connection = connection
        self._reply: OwnedBlock | None = None
        self._seen: set[int] = set()  # hashes of looks that came once
        columns_func = service.columns_func
        numbers = service.counters.numbers
        self._lane = lane_type(
            connection.fileno(),
            connection.buffer,
            numbers.buffer_info(),
            numbers,
            service.infer_func if columns_func is None else columns_func,
            columns_func is not None,
            self,
        )
        call_in_child(self, AcceleratedSource._end_in_child)

    def _end_in_child(self) -> None:
        self._lane.close_in_child()

    def close(self) -> None:
        """End; blocks that are still in use may be."""
        self._lane.close()

    def next(self) -> Execution | None:
        """Serve plain batches until another one comes, which may have been called already; `None` at the end."""
        connection = self._connection
        while True:
            if (batch := connection.next_pending()) is not None:
                return self.execution(batch)
            told = self._run()
            if told is None:
                connection.tick()
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
            sent, in_flight = self._lane.leave()
            if self._reply is not None:
                if in_flight:
                    protocol.unacknowledged.append(self._reply)
                else:
                    self._connection.outputs.release(self._reply)
                self._reply = None
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
        """Make the execution of a batch, whose callable is not called yet, or was in `called`."""
        if called is None:
            return make_execution(self._service, batch, worker_tracer())
        return Execution(self._service, batch, called)

    # ---- what the accelerator asks ----------------------------------------------------------------------------------

    def describe(self, raw: bytes, head: Head) -> tuple[Any, ...] | None:
        """See `_accelerator.Host`."""
        try:
            metadata = self._connection.reader.metadata(raw, head)
            is_traced = metadata.has_trace()
        except (ProtocolError, TypeError):
            return None  # which Python's way tells of
        wanted = metadata.uniform_outputs
        columns = metadata.columns
        if (
            columns is None
            or wanted is None
            or is_traced
            or len(columns) > _MAX_INPUTS
            or (len(metadata.rows) > 1 and not self._service.model.batching)
        ):
            return None
        gaps = metadata.gaps()
        if not self._is_known(metadata, gaps):
            return None
        inputs = []
        for (name, shape, dtype, offset), tensor in zip(columns, metadata.tensors, strict=True):
            if len(shape) > _MAX_DIMS or 0 in shape or offset % ALIGNMENT:
                return None
            inputs.append((name, shape, dtype, offset, tensor.length))
        _, rows, input_bytes = metadata.size
        return metadata, metadata.rows, rows, input_bytes, tuple(inputs), gaps

    def _is_known(self, metadata: BatchMetadata, gaps: tuple[tuple[int, int], ...]) -> bool:
        """Return whether such metadata came before: many come once, and what is made for them is never used."""
        look = bytearray(metadata.raw[RECORD.size :])
        for offset, length in gaps:
            begin = offset - RECORD.size
            look[begin : begin + length] = bytes(length)
        key = hash((metadata.head, bytes(look)))
        if key in self._seen:
            return True
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return False

    def lay_out(self, metadata: BatchMetadata, result: Any) -> tuple[Any, ...] | None:
        """See `_accelerator.Host`."""
        service = self._service
        assert metadata.uniform_outputs is not None
        names = service.checker.wanted(metadata.uniform_outputs)
        if result.__class__ is list:
            if len(result) != len(metadata.rows):
                return None
            record = service.writer.lay_out_results(result, names, service.checker.fits_results)
            return None if record is None else described(record, names, result, is_list=True)
        if result.__class__ is not dict or service.columns_func is None:
            return None
        record = lay_out_columns(metadata, result, names, service.checker.fits_columns)
        return None if record is None else described(record, names, [result], is_list=False)

    def make_room(self, length: int) -> tuple[int, int, int, int] | None:
        """See `_accelerator.Host`."""
        outputs = self._connection.outputs
        if self._reply is not None:
            outputs.release(self._reply)
            self._reply = None
        # Larger than asked for where that can be, so that the next, which may be larger, need not ask.
        rooms = (length,) if length > _LARGEST_ROUNDED else (max(_LEAST_ROOM, 1 << (length - 1).bit_length()), length)
        for room in rooms:
            block = outputs.allocate(room)
            if block is not None:
                self._reply = block
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
        return make_requests(batch, len(batch.rows))

    def give_back(self) -> None:
        """See `_accelerator.Host`."""
        self._connection.release()

    def _make_batch(
        self,
        metadata: BatchMetadata,
        raw: bytes | None,
        block: Any,
        columns: dict[str, Array],
        number: int,
        received_ns: int,
        sent_ns: int,
    ) -> Batch:
        if raw is not None:
            metadata = metadata.for_record(raw)
        return Batch(metadata, block, number, received_ns, sent_ns, self._service.model.batching, columns)


def described(
    record: Record, names: tuple[str, ...], results: list[dict[str, Array]], *, is_list: bool
) -> tuple[Any, ...] | None:
    """Return a record that is laid out as the accelerator takes it; `None` where it has to be written in Python."""
    ends = [place.offset for place in record.layout.places]
    pieces = []
    for index, result in enumerate(results):
        for at, name in enumerate(names):
            array: np.ndarray[Any, Any] = result[name]
            if not array.flags.c_contiguous or not array.size or array.ndim > _MAX_DIMS:
                return None
            pieces.append((index, (name, array.shape, array.dtype, ends[at], array.nbytes)))
            ends[at] += array.nbytes
    metadata, length, payload_bytes, _ = record.layout
    return metadata, length, payload_bytes, is_list, tuple(map(len, results)), tuple(pieces)
