"""The way of plain batches: what the native library asks of Python, where it serves them with the accelerator's forms.

What looks like an earlier batch, and gets results that look like earlier ones, passes no Python but the callable. The
rest does: a batch as it came, or a call that was made. See `native/inprocess/lane.cc`.
"""

from __future__ import annotations

import contextvars
import ctypes
from collections.abc import Callable
from typing import Any

from pytriton.inprocess.callables.backend import Backend, Instance
from pytriton.inprocess.callables.batches import IN_PLACE_BYTES, POINTED_TO_BYTES, BatchHandle, DirectBatch
from pytriton.proxy.types import Request, make_requests
from pytriton.proxy_backend.runtime.execution import Call, Execution
from pytriton.proxy_backend.runtime.plain import PlainBatches
from pytriton.proxy_backend.runtime.service import Service
from pytriton.proxy_backend.wire.batch import BatchMetadata, BatchReader
from pytriton.proxy_backend.wire.record import Array


class Lane(PlainBatches):
    """The lane of one instance, and the functions that it calls."""

    def __init__(
        self,
        backend: Backend,
        service: Service,
        context: contextvars.Context,
        instance: Instance,
        reader: BatchReader,
        run: Callable[[BatchHandle, Execution], None],
        renew: Callable[[], None],
    ) -> None:
        # Large inputs may be read-only, and large outputs are not copied into a record.
        super().__init__(service, reader, record_limit=IN_PLACE_BYTES, payload_limit=POINTED_TO_BYTES)
        self.renew = renew
        self._backend = backend
        self._run = run
        self._instance = instance
        # Each instance has its own part, because instances are threads and none of them locks.
        self._numbers = service.counters.add_part()
        columns_func = service.columns_func
        self._native = backend.new_lane(
            ctypes.addressof(instance),
            context.run,
            service.infer_func if columns_func is None else columns_func,
            columns_func is not None,
            self._numbers.buffer_info(),
            self._numbers,
            self,
        )

    @property
    def thread(self) -> int:
        """The thread in which it serves a batch; 0 if it serves none."""
        return self._backend.lane_thread(self._native)

    def stop(self) -> None:
        """Leave all further batches to Python; called in the thread of the instance."""
        self._instance.lane = None

    def close(self) -> None:
        """End, when no batch comes any more."""
        self._backend.close_lane(self._native)
        self._service.counters.end_part(self._numbers)

    # ---- what the library asks --------------------------------------------------------------------------------------

    def make_handle(self, address: int) -> BatchHandle:
        """Take a batch over."""
        return BatchHandle(self._backend, address)

    def make_requests(self, *parts: Any) -> list[Request]:
        """Make the requests of a batch; `parts` are those of `_make_batch`."""
        batch = self._make_batch(*parts)
        return make_requests(batch, len(batch.rows))

    def resume(self, called: list[Any]) -> None:
        """Finish a batch whose callable the lane has called; nothing else may refer to its inputs."""
        handle = called[0]
        handle.serve(self._resume, called)

    def _resume(self, handle: BatchHandle, called: list[Any]) -> None:
        error, result, called_ns = called.pop(), called.pop(), called.pop()
        batch = self._make_batch(*called)
        called.clear()
        call = Call(called_ns, result, error)
        del result, error
        execution = Execution(self._service, batch, call)
        del batch, call
        self._run(handle, execution)

    def _make_batch(
        self,
        handle: BatchHandle | None,
        metadata: BatchMetadata,
        raw: bytes | None,
        resized: int,
        block: Any,
        columns: dict[str, Array],
        number: int,
        received_ns: int,
        sent_ns: int,
    ) -> DirectBatch:
        metadata = self.metadata_of(metadata, raw, resized)
        batching = self._service.model.batching
        batch = DirectBatch(metadata, block, number, received_ns, sent_ns, batching, columns)
        batch.handle = handle
        return batch
