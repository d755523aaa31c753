"""Batch records in: the requests of one message, as cheap as they are until somebody looks at them."""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pytriton.proxy.types import ParameterValue, Request, RequestFields

from ..errors import ProtocolError
from ..runtime.statistics import batch_size
from ..transport.arena import InputBlock
from . import layout
from .dtypes import BYTES_CODE, dtype_of
from .strings import decode_strings

Array = np.ndarray[Any, Any]

_new_request = Request.__new__
_MAX_DIMS = 64
_MAX_PLANS = 256
_KEY_OFFSET = layout.RECORD.size
_MAX_PLAN_BYTES = 64 << 10


class TensorPlan(NamedTuple):
    """One tensor of a record: everything about it but its payload."""

    name: str
    dtype: np.dtype[Any]
    strings: bool
    shape: tuple[int, ...]
    owner: int
    offset: int
    length: int


class Plan:
    """The metadata of a record, read and checked. Batches of the same form share one."""

    __slots__ = (
        "entries_offset",
        "forms",
        "head",
        "metadata",
        "outputs",
        "plain",
        "rows",
        "size",
        "starts",
        "tensors",
        "uniform_outputs",
    )

    def __init__(
        self,
        metadata: bytes,
        count: int,
        tensor_count: int,
        record_length: int,
        entries: int,
        tensors: int,
        batching: bool,
    ) -> None:
        length = len(metadata)
        if count == 0 or entries < layout.RECORD.size or entries + count * layout.REQUEST.size > length:
            raise ProtocolError(f"{count} requests at {entries} do not lie inside {length} bytes of metadata")
        if tensors + tensor_count * layout.TENSOR.size > length:
            raise ProtocolError(f"{tensor_count} tensors at {tensors} do not lie inside {length} bytes of metadata")
        self.metadata = metadata
        self.forms: dict[tuple[object, ...], Any] = {}
        self.head = (count, tensor_count, record_length, entries, tensors)
        self.entries_offset = entries
        briefs = list(layout.REQUEST_BRIEF.iter_unpack(metadata[entries : entries + count * layout.REQUEST.size]))
        self.rows = [brief[0] for brief in briefs]
        self.starts = [0, *itertools.accumulate(self.rows)]
        self.outputs = [(brief[1], brief[2]) for brief in briefs]
        uniform = all(outputs == self.outputs[0] for outputs in self.outputs)
        self.uniform_outputs = tuple(self.requested_outputs(0)) if uniform else None
        self.tensors = [
            self._read_tensor(tensors + index * layout.TENSOR.size, record_length, batching)
            for index in range(tensor_count)
        ]
        self.size = batch_size(count, self.starts[-1], sum(tensor.length for tensor in self.tensors))
        # Nothing but numbers over the whole batch, as nearly always: made without a look at each tensor.
        self.plain: list[tuple[str, tuple[int, ...], np.dtype[Any], int]] | None = None
        if all(tensor.owner == layout.WHOLE_BATCH and not tensor.strings for tensor in self.tensors):
            self.plain = [(tensor.name, tensor.shape, tensor.dtype, tensor.offset) for tensor in self.tensors]

    def _read_tensor(self, at: int, record_length: int, batching: bool) -> TensorPlan:
        (name_offset, name_length, code, dims_count, owner, dims_offset, offset, length) = layout.TENSOR.unpack_from(
            self.metadata, at
        )
        name = self.text(name_offset, name_length)
        metadata_length = len(self.metadata)
        if dims_count > _MAX_DIMS or dims_offset + dims_count * 8 > metadata_length:
            raise ProtocolError(f"input '{name}': {dims_count} dimensions at {dims_offset} lie outside the metadata")
        shape = struct.unpack_from(f"<{dims_count}q", self.metadata, dims_offset)
        if offset < metadata_length or offset + length > record_length:
            raise ProtocolError(f"input '{name}': {length} bytes at {offset} lie outside the record's payloads")
        elements = 1
        for dim in shape:
            if dim < 0:
                raise ProtocolError(f"input '{name}': negative dimension in shape {shape}")
            elements *= dim
        dtype = dtype_of(code)
        strings = code == BYTES_CODE
        if not strings and elements * dtype.itemsize != length:
            raise ProtocolError(
                f"input '{name}': shape {shape} of {dtype} takes {elements * dtype.itemsize} bytes, {length} came"
            )
        if owner == layout.WHOLE_BATCH:
            if batching and (not shape or shape[0] != self.starts[-1]):
                raise ProtocolError(f"input '{name}': shape {shape} for a batch of {self.starts[-1]} rows")
        elif owner >= len(self.rows):
            raise ProtocolError(f"input '{name}' belongs to request {owner} of {len(self.rows)}")
        return TensorPlan(name, dtype, strings, shape, owner, offset, length)

    def requested_outputs(self, index: int) -> list[str]:
        """Return the outputs that a request wants."""
        offset, count = self.outputs[index]
        if offset + count * layout.STRING_REF.size > len(self.metadata):
            raise ProtocolError(f"{count} names of outputs at {offset} lie outside the metadata")
        refs = struct.unpack_from(f"<{2 * count}I", self.metadata, offset)
        return [self.text(refs[2 * i], refs[2 * i + 1]) for i in range(count)]

    def text(self, offset: int, length: int) -> str:
        """Return a string of the metadata."""
        raw = self.metadata[offset : offset + length]
        if len(raw) != length:
            raise ProtocolError(f"a text of {length} bytes at {offset} lies outside the metadata")
        return raw.decode("utf-8", "surrogateescape")


def find_plan(
    metadata: bytes, head: tuple[int, int, int, int, int], batching: bool, plans: dict[bytes, Plan] | None
) -> Plan:
    """Return what the metadata of a record say, from earlier ones that were the same where there are any.

    Args:
        metadata: The record up to its payloads.
        head: Of its header, as it was read before: how many requests, how many tensors, the record's length, where the
            requests are, where the tensors are.
        batching: Whether the tensors have a batch axis.
        plans: The earlier ones; `None` where they are not kept.

    Raises:
        ProtocolError: If the record is malformed; says what was expected and what came.
        TypeError: If a tensor's dtype has no numpy type here.
    """
    # All but the header, whose numbers are compared below: they were read before this copy was made.
    key = metadata[_KEY_OFFSET:]
    plan = None if plans is None else plans.get(key)
    if plan is None or plan.head != head:
        plan = Plan(metadata, *head, batching)
        if plans is not None and len(metadata) <= _MAX_PLAN_BYTES:
            if len(plans) >= _MAX_PLANS:
                plans.clear()
            plans[key] = plan
    return plan


class Batch:
    """One batch: its requests, their inputs as views on the arena, and what travels with them.

    Attributes:
        number: The batch's number on this connection.
        received_ns: When the proxy backend got it, on the clock of `time.monotonic_ns`.
        sent_ns: When the proxy backend sent it, likewise.
        rows: Rows of the batch axis, per request; 1 each where the model does not batch.
        size: What the batch adds to the counters.
        columns: The inputs that all requests share, each one array over the whole batch.
        spans: What `Request.span` is, for each request; `None` where no request is traced.
        uniform_outputs: The outputs that all requests want; `None` where they want different ones.
    """

    __slots__ = (
        "_batching",
        "_block",
        "_extras",
        "_plan",
        "columns",
        "number",
        "received_ns",
        "rows",
        "sent_ns",
        "size",
        "spans",
        "uniform_outputs",
    )

    def __init__(
        self,
        block: InputBlock,
        memory: mmap.mmap,
        number: int,
        batching: bool,
        plans: dict[bytes, Plan] | None = None,
    ) -> None:
        """Read a record.

        Args:
            block: The record and nothing else.
            memory: The segment that the block is a piece of: reading from it costs less than from the block.
            number: The batch that the message announced.
            batching: Whether the tensors have a batch axis.
            plans: Metadata that were read before. Most batches look like an earlier one in all but their payloads.

        Raises:
            ProtocolError: If the record is malformed; says what was expected and what came.
            TypeError: If a tensor's dtype has no numpy type here.
        """
        length = len(block)
        if length < layout.RECORD.size:
            raise ProtocolError(f"a batch record of {length} bytes is shorter than its header")
        start = block.place[1]
        magic, count, tensor_count, batch, metadata_length, record_length, entries, tensors, received_ns, sent_ns = (
            layout.RECORD.unpack_from(memory, start)
        )
        if magic != layout.BATCH_MAGIC or batch != number:
            raise ProtocolError(f"expected the record of batch {number}, got magic {magic:#x} and batch {batch}")
        if not layout.RECORD.size <= metadata_length <= record_length <= length:
            raise ProtocolError(
                f"lengths do not nest: metadata {metadata_length}, record {record_length}, block {length}"
            )
        if metadata_length > layout.MAX_METADATA:
            raise ProtocolError(f"{metadata_length} bytes of metadata, the protocol allows {layout.MAX_METADATA}")
        # One copy: what is checked is what is used, whatever happens to the memory in between.
        metadata = memory[start : start + metadata_length]
        plan = find_plan(metadata, (count, tensor_count, record_length, entries, tensors), batching, plans)
        self._block = block
        self._take(plan, number, received_ns, sent_ns, batching)
        if plan.plain is not None:
            try:
                self.columns = {
                    name: np.ndarray(shape, dtype, block, offset) for name, shape, dtype, offset in plan.plain
                }
            except ValueError as error:  # of dimensions that are too many or, beside a 0, too large
                raise ProtocolError(f"the inputs of batch {number}: {error}") from error
        else:
            self.columns = {}
            self._read_tensors(plan, block, memory)

    def _take(self, plan: Plan, number: int, received_ns: int, sent_ns: int, batching: bool) -> None:
        self.number = number
        self.received_ns = received_ns
        self.sent_ns = sent_ns
        self.rows = plan.rows
        self.size = plan.size
        self.spans: list[Any] | None = None
        self.uniform_outputs = plan.uniform_outputs
        self._plan = plan
        self._batching = batching
        self._extras: list[dict[str, Array]] | None = None

    def _read_tensors(self, plan: Plan, block: InputBlock, memory: mmap.mmap) -> None:
        start = block.place[1]
        for tensor in plan.tensors:
            array: Array
            try:
                if tensor.strings:
                    payload = memory[start + tensor.offset : start + tensor.offset + tensor.length]
                    array = decode_strings(payload, tensor.shape)
                else:
                    array = np.ndarray(tensor.shape, tensor.dtype, block, tensor.offset)
            except ValueError as error:
                raise ProtocolError(f"input '{tensor.name}': {error}") from error
            self._place(tensor, array)

    def _place(self, tensor: TensorPlan, array: Array) -> None:
        if tensor.owner == layout.WHOLE_BATCH:
            self.columns[tensor.name] = array
        else:
            if self._extras is None:
                self._extras = [{} for _ in self.rows]
            self._extras[tensor.owner][tensor.name] = array

    def __len__(self) -> int:
        return len(self.rows)

    def requests(self) -> list[Request]:
        """Return the requests, in order."""
        made = []
        for index in range(len(self.rows)):
            request = _new_request(Request)
            request._details = self
            request._index = index
            made.append(request)
        if self.spans is not None:
            for request, span in zip(made, self.spans, strict=True):
                request.span = span
        return made

    @property
    def is_uniform(self) -> bool:
        """Whether every input is one array over the whole batch."""
        return self._extras is None and self._batching

    @property
    def forms(self) -> dict[tuple[object, ...], Any]:
        """A place for what answers to batches that look like this one have in common."""
        return self._plan.forms

    def split(self, outputs: dict[str, Array]) -> list[dict[str, Array]]:
        """Take outputs over the whole batch apart, a dictionary for each request."""
        starts = self._plan.starts
        return [
            {name: array[begin:end] for name, array in outputs.items()} for begin, end in itertools.pairwise(starts)
        ]

    # ---- RequestDetails ------------------------------------------------------------------------------------------

    def load_inputs(self, index: int) -> dict[str, Array]:
        if self._batching:
            begin = self._plan.starts[index]
            end = self._plan.starts[index + 1]
            data = {name: column[begin:end] for name, column in self.columns.items()}
        else:
            data = dict(self.columns)
        if self._extras is not None:
            data.update(self._extras[index])
        return data

    def load_parameters(self, index: int) -> dict[str, ParameterValue]:
        fields = self._fields(index)
        offset, count = fields[11], fields[12]
        if offset + count * layout.PARAMETER.size > len(self._plan.metadata):
            raise ProtocolError(f"{count} parameters at {offset} lie outside the metadata")
        values: dict[str, ParameterValue] = {}
        for number in range(count):
            key_offset, key_length, kind, length, value = layout.PARAMETER.unpack_from(
                self._plan.metadata, offset + number * layout.PARAMETER.size
            )
            key = self._plan.text(key_offset, key_length)
            if kind == layout.ParameterType.STRING:
                values[key] = self._plan.text(value, length)
            elif kind == layout.ParameterType.BOOL:
                values[key] = bool(value)
            elif kind == layout.ParameterType.INT:
                values[key] = value - (1 << 64) if value >> 63 else value
            elif kind == layout.ParameterType.DOUBLE:
                values[key] = float(struct.unpack("<d", struct.pack("<Q", value))[0])
            else:
                raise ProtocolError(f"parameter '{key}' has the unknown type {kind}")
        return values

    def load_fields(self, index: int) -> RequestFields:
        fields = self._fields(index)
        correlation_text = self._plan.text(fields[7], fields[8])
        return RequestFields(
            request_id=self._plan.text(fields[5], fields[6]),
            priority=fields[2],
            timeout_us=fields[3],
            correlation_id=correlation_text or fields[4],
            flags=fields[1],
            trace_context=self._plan.text(fields[9], fields[10]),
        )

    def load_requested_outputs(self, index: int) -> list[str]:
        return self._plan.requested_outputs(index)

    def is_cancelled(self, index: int) -> bool:
        at = self._plan.entries_offset + index * layout.REQUEST.size + layout.REQUEST_CANCELLED_OFFSET
        return bool(self._block[at])

    def whole_batch(self, requests: Sequence[Any]) -> tuple[dict[str, Array], list[int]] | None:
        if self._extras is not None or len(requests) != len(self.rows) or not (self._batching or len(requests) == 1):
            return None
        columns = self.columns
        for index, request in enumerate(requests):
            if type(request) is not Request or request._details is not self or request._index != index:
                return None
            data = request._data
            if data is not None:
                issued = request._issued
                if issued is None or len(data) != len(columns):
                    return None
                for name, expected in zip(columns, issued, strict=True):
                    if data.get(name) is not expected:
                        return None
        return dict(columns), list(self.rows)

    # ---------------------------------------------------------------------------------------------------------------

    def _fields(self, index: int) -> tuple[Any, ...]:
        return layout.REQUEST.unpack_from(self._plan.metadata, self._plan.entries_offset + index * layout.REQUEST.size)
