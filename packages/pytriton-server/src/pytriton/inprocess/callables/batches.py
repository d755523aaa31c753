"""Batches of requests as Triton hands them over inside the process, and the sink of their responses.

Both have the form of the records of the proxy's protocol, so that everything between the two is the worker's: what
differs is only where the memory is. A batch is written to a *slab* before Python is called. Arrays are views on the
slab, and a slab that anything still refers to is replaced instead of being written again, so views may be kept.

An input of `IN_PLACE_BYTES` or more that is alone in its batch is not copied: the callable gets a view on the memory
that the caller gave to Triton. That memory is the caller's, so such views are read-only, and the view keeps the
caller's objects alive. Inputs of that size are read-only also where they had to be gathered: whether an input may be
written to depends on its own size only.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pytriton.inprocess.tensors.memory import view_of_address
from pytriton.proxy_backend.wire import layout
from pytriton.proxy_backend.wire.batch import Batch, BatchReader
from pytriton.proxy_backend.wire.record import Array, Payload, Record
from pytriton.proxy_backend.wire.strings import decode_strings

logger = logging.getLogger(__name__)

IN_PLACE_BYTES = 1 << 20
"""Inputs of this size are read-only views of the caller's memory if possible."""
POINTED_TO_BYTES = 64 << 10
"""Outputs of so many bytes are copied once, from where they are to where Triton wants them; those of several requests
are not joined for that."""
_FIRST_SLAB_BYTES = 64 << 10
# Larger slabs are freed with their batch.
_KEPT_SLAB_BYTES = 64 << 20
_KEPT_SLABS = 16
# The usual references to a slab's memory: the attribute, and the argument of getrefcount.
_OWN_REFERENCES = 2
_ALL_REQUESTS = 0xFFFFFFFF

_HEADER = layout.RECORD.unpack_from


class Slab:
    """Memory for one record."""

    __slots__ = ("address", "capacity", "memory")

    def __init__(self, length: int) -> None:
        """Take memory for `length` bytes or more."""
        # Its bytes.
        self.capacity = max(_FIRST_SLAB_BYTES, 1 << (length - 1).bit_length()) if length < _KEPT_SLAB_BYTES else length
        # The memory of the views, each of which refers to it.
        self.memory = mmap.mmap(-1, self.capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))  # where it begins

    def is_free(self) -> bool:
        """Return whether no view is left, and it may be written again."""
        return sys.getrefcount(self.memory) <= _OWN_REFERENCES


class SlabPool:
    """Slabs that are free, for one model instance. Every method is one step for other threads."""

    def __init__(self) -> None:
        self._free: list[Slab] = []

    def take(self, length: int = 1) -> Slab:
        """Return a slab of `length` bytes or more."""
        try:
            slab = self._free.pop()
        except IndexError:
            return Slab(length)
        return slab if slab.capacity >= length else Slab(length)

    def give_back(self, slab: Slab) -> None:
        """Take a slab back, if it is free; the last view of any other one ends it."""
        if slab.is_free() and slab.capacity < _KEPT_SLAB_BYTES and len(self._free) < _KEPT_SLABS:
            self._free.append(slab)


class BatchHandle:
    """A batch on the other side. It is deleted with the last reference; requests that are open then get an error."""

    __slots__ = ("_library", "address")

    def __init__(self, library: Any, address: int) -> None:
        self._library = library
        self.address = address  # where it is; the number of the batch, too

    def is_cancelled(self, index: int = _ALL_REQUESTS) -> bool:
        """Return whether the caller of a request has given it up; of all that are open by default."""
        return bool(self._library.is_cancelled(self.address, index))

    def fail(self, text: str, code: int) -> None:
        """Answer every request that is open with an error; from any thread."""
        # C ends a text at a zero byte.
        self._library.fail(self.address, code, text.encode("utf-8", "replace").replace(b"\0", b"\\0"))

    def serve(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function that answers the batch; if it fails, its requests get an error."""
        try:
            function(self, *arguments)
        except BaseException as error:
            logger.exception("pytriton.inprocess: a batch failed outside of its callable")
            self.fail(f"the batch could not be served: {type(error).__name__}: {error}", layout.ErrorCode.INTERNAL)

    def __del__(self) -> None:
        # This runs in whichever thread drops the last reference, maybe in the garbage collector.
        if not self._library.delete(self.address):
            self.fail("the request was given up without an answer", layout.ErrorCode.INTERNAL)
            self._library.delete(self.address)


class DirectBatch(Batch):
    """One batch: its requests, their inputs as views on a slab or on memory of the caller."""

    __slots__ = ("handle",)

    # The batch on the other side; `None` if it is answered. Set by whoever makes the object: a constructor of its
    # own, which hands its arguments on, would cost as much as all else about it.
    handle: BatchHandle | None

    @classmethod
    def read(
        cls,
        slab: Slab,
        handle: BatchHandle,
        reader: BatchReader,
        in_place: Sequence[tuple[int, int]] = (),
        owner: object = None,
        writable: bool = False,
    ) -> DirectBatch:
        """Read a batch that was written to a slab.

        Tensors in `in_place` are in memory that `owner` keeps alive; without an owner they are copied.
        """
        memory = slab.memory
        _, count, tensor_count, number, length, record_length, entries, tensors, received_ns, sent_ns = _HEADER(memory)
        metadata = reader.metadata(memory[:length], (count, tensor_count, record_length, entries, tensors))
        batch = cls(metadata, memory, number, received_ns, sent_ns, reader.batching, {})
        batch.handle = handle
        if metadata.columns is not None and not in_place:
            for name, shape, dtype, offset in metadata.columns:
                batch.columns[name] = np.ndarray(shape, dtype, memory, offset)
        else:
            batch._read_all(memory, dict(in_place), owner)
        if record_length >= IN_PLACE_BYTES and not writable:
            batch._freeze()
        return batch

    def _read_all(self, memory: mmap.mmap, in_place: Mapping[int, int], owner: object) -> None:
        for index, tensor in enumerate(self.metadata.tensors):
            address = in_place.get(index)
            array: Array
            if address is None:
                array = tensor.array(memory, memory, 0)
            elif tensor.strings:
                array = decode_strings(ctypes.string_at(address, tensor.length), tensor.shape)
            else:
                source = view_of_address(address, tensor.length, owner, read_only=True)
                if owner is None:
                    source = source.copy()
                array = np.ndarray(tensor.shape, tensor.dtype, source)
            self.add_input(tensor, array)

    def _freeze(self) -> None:
        rows = self.metadata.starts[-1] if self._batching else 1
        for tensor in self.metadata.tensors:
            length = tensor.length
            if tensor.owner == layout.WHOLE_BATCH and rows:
                length = length // rows * max(self.rows) if self._batching else length
            if length >= IN_PLACE_BYTES and not tensor.strings:
                inputs = self.columns if tensor.owner == layout.WHOLE_BATCH else (self._own_inputs or [])[tensor.owner]
                inputs[tensor.name].flags.writeable = False

    def is_cancelled(self, index: int) -> bool:
        """Return whether the caller of a request is gone."""
        return self.handle is not None and self.handle.is_cancelled(index)


class DirectSink:
    """Sends records straight into Triton's responses. For one thread at a time, apart from `hold` and `fail_late`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._slab = Slab(1)
        self._held: dict[int, BatchHandle] = {}
        # The times at which each batch was taken or last got a response, while progress is watched.
        self._progress_at: dict[int, float] | None = None

    def track_progress(self) -> None:
        """Record from now on when each batch made progress, for `fail_late`."""
        self._progress_at = {}

    def hold(self, handle: BatchHandle) -> None:
        """Keep a batch until its last answer is sent."""
        self._held[handle.address] = handle
        if self._progress_at is not None:
            self._progress_at[handle.address] = time.monotonic()

    def fail_late(self, limit_s: float, text: str, code: int) -> bool:
        """Fail the requests whose callable has sent nothing for `limit_s` seconds; return whether there were any.

        Any thread may call this.
        """
        progress_at = self._progress_at
        oldest = time.monotonic() - limit_s
        late = [number for number, at in list((progress_at or {}).items()) if at < oldest]
        for number in late:
            handle = self._held.get(number)
            if progress_at is not None and progress_at.pop(number, None) is not None and handle is not None:
                handle.fail(text, code)
        return bool(late)

    def forget(self, number: int) -> None:
        """Release a batch; requests without an answer get an error."""
        self._held.pop(number, None)
        if self._progress_at is not None:
            self._progress_at.pop(number, None)

    def respond(self, number: int, record: Record, *, done: bool) -> None:
        """Give Triton the responses in a record, see `ResponseSink`."""
        made = record.layout
        if made.payload_bytes < POINTED_TO_BYTES:
            memory = self._room(made.length)
            record.write(memory, 0, number)
            self._library.respond(number, self._slab.address, made.length, None)
        else:
            # The bytes are copied once, from where they are to where Triton wants them.
            memory = self._room(len(made.metadata))
            kept = [_address(payload) for payload in record.payloads]
            record.write_metadata(memory, 0, number)
            self._library.respond(number, self._slab.address, made.length, [address for address, _ in kept])
        if done:
            self.forget(number)
        elif self._progress_at is not None and number in self._progress_at:
            self._progress_at[number] = time.monotonic()

    def fail(self, number: int, text: str, code: layout.ErrorCode = layout.ErrorCode.INTERNAL) -> None:
        """End a batch with an error for each open request."""
        handle = self._held.get(number)
        if handle is not None:
            handle.fail(text, code)
        self.forget(number)

    def _room(self, length: int) -> mmap.mmap:
        if length > self._slab.capacity:
            self._slab = Slab(length)
        return self._slab.memory


def _address(payload: Payload) -> tuple[int, object]:
    """Return the address of a payload, and the object that must live as long as it is used."""
    if isinstance(payload, bytes):
        return ctypes.cast(ctypes.c_char_p(payload), ctypes.c_void_p).value or 0, payload
    array = np.ascontiguousarray(np.concatenate(payload) if isinstance(payload, list) else payload)
    return array.ctypes.data, array
