"""Batch records: the requests of one batch, as the proxy writes them and as workers read them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import layout
from .errors import ProtocolError
from .limits import COMPARED_BYTES
from .record import (
    Array,
    Metadata,
    MetadataWriter,
    ParameterValue,
    Record,
    RecordLayout,
    Tensor,
    TensorEntry,
    make_record,
    make_tensor,
    read_header,
)

Head = tuple[int, int, int, int, int]
"""The part of a header that is the same for batches that look alike: numbers of requests and tensors, length of the
record, places of the requests and of the tensors."""

TRACEPARENT = "traceparent"
"""The header of a W3C trace context, without which there is none."""

_MAX_KNOWN = 256


# ---- reading -------------------------------------------------------------------------------------------------------


class BatchMetadata(Metadata):
    """The metadata of a batch record, read and checked; batches that look alike share one.

    Attributes:
        head: What the header says of the rest.
        rows: Rows of the batch axis, per request; 1 each where the model does not batch.
        starts: Where the rows of each request begin, and the sum of all.
        tensors: The inputs.
        columns: Name, shape, dtype and offset of each input, where all are numbers over the whole batch, as nearly
            always; else `None`.
        uniform_outputs: The outputs that all requests want; `None` if they want different ones.
        size: Number of requests, rows, and bytes of the inputs.
        layouts: The layouts of the responses to such batches.
        is_untraced: Whether somebody looked, and found no trace context.
    """

    __slots__ = (
        "_lists", "columns", "head", "is_untraced", "layouts", "rows", "size", "starts", "tensors", "uniform_outputs",
    )  # fmt: skip

    def __init__(self, raw: bytes, head: Head, batching: bool) -> None:
        """Read and check."""
        super().__init__(raw)
        count, tensor_count, record_length, entries, tensors = self.head = head
        if count == 0:
            raise ProtocolError("0 requests, a batch has 1 or more")
        self.check_table("requests", entries, count, layout.REQUEST.size)
        briefs = list(layout.REQUEST_BRIEF.iter_unpack(raw[entries : entries + count * layout.REQUEST.size]))
        self.rows = [brief[0] for brief in briefs]
        self.starts = [0, *itertools.accumulate(self.rows)]
        self._lists = [(brief[1], brief[2]) for brief in briefs]
        uniform = all(place == self._lists[0] for place in self._lists)
        self.uniform_outputs = tuple(self.requested_outputs(0)) if uniform else None
        self.tensors = self.read_tensors("input", tensors, tensor_count, record_length)
        for tensor in self.tensors:
            if tensor.owner != layout.WHOLE_BATCH:
                if tensor.owner >= count:
                    raise ProtocolError(f"{tensor.label} belongs to request {tensor.owner} of {count}")
            elif batching and tensor.shape[:1] != (self.starts[-1],):
                raise ProtocolError(f"{tensor.label}: shape {tensor.shape} for a batch of {self.starts[-1]} rows")
        self.size = (count, self.starts[-1], sum(tensor.length for tensor in self.tensors))
        self.columns: list[tuple[str, tuple[int, ...], np.dtype[Any], int]] | None = None
        if all(tensor.owner == layout.WHOLE_BATCH and not tensor.strings for tensor in self.tensors):
            self.columns = [(tensor.name, tensor.shape, tensor.dtype, tensor.offset) for tensor in self.tensors]
        self.layouts: dict[tuple[object, ...], RecordLayout] = {}
        self.is_untraced = False

    def for_record(self, raw: bytes, *, resized: bool) -> BatchMetadata:
        """Return the metadata of another record that differs only in what `fixed` leaves out.

        If `resized`, rows, dimensions or places of payloads differ, which the caller has checked; the result then has
        no `tensors` and `columns`.
        """
        made = object.__new__(BatchMetadata)
        for name in BatchMetadata.__slots__:
            setattr(made, name, getattr(self, name))
        made.raw = raw
        if resized:
            count, tensor_count, _, entries, tensors = self.head
            made.rows = [
                layout.REQUEST_ROWS.unpack_from(raw, at)[0]
                for at in range(entries, entries + count * layout.REQUEST.size, layout.REQUEST.size)
            ]
            made.starts = [0, *itertools.accumulate(made.rows)]
            lengths = [
                layout.TENSOR_LENGTH.unpack_from(raw, at)[0]
                for at in range(tensors, tensors + tensor_count * layout.TENSOR.size, layout.TENSOR.size)
            ]
            made.size = (count, made.starts[-1], sum(lengths))
            made.layouts = {}
            del made.tensors, made.columns
        return made

    def fixed(self) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Return the pieces that are equal in all batches which look alike, and the places of text references.

        Pieces are pairs of offset and length. Left out are sizes (rows, dimensions, places of payloads), and what
        nothing reads before it is asked for (ids, priorities, timeouts, sequences, values of parameters). `has_trace`
        must have been called.
        """
        count, tensor_count, _, entries, tensors = self.head
        fixed: dict[tuple[int, int], None] = {}
        texts: dict[int, None] = {}
        for index in range(count):
            at = entries + index * layout.REQUEST.size
            begin = at + layout.REQUEST_TRACE_LENGTH_OFFSET
            fixed[begin, at + layout.REQUEST.size - begin] = None
            *_, parameters, parameter_count, outputs, output_count, _ = self.entry(index)
            texts.update(dict.fromkeys(outputs + place * layout.STRING_REF.size for place in range(output_count)))
            for place in range(parameter_count):
                at = parameters + place * layout.PARAMETER.size
                texts[at] = None
                begin, end = layout.PARAMETER_TYPE
                fixed[at + begin, end - begin] = None
        begin, end = layout.TENSOR_PLACE
        for at in range(tensors, tensors + tensor_count * layout.TENSOR.size, layout.TENSOR.size):
            texts[at] = None
            fixed[at + layout.STRING_REF.size, begin - layout.STRING_REF.size] = None
            fixed[at + end, layout.TENSOR.size - end] = None
        return tuple(fixed), tuple(texts)

    def requested_outputs(self, index: int) -> list[str]:
        """Return the outputs that a request wants."""
        return self.texts("names of outputs", *self._lists[index])

    def entry(self, index: int) -> tuple[Any, ...]:
        """Return the fields of `layout.REQUEST` of a request."""
        return layout.REQUEST.unpack_from(self.raw, self.head[3] + index * layout.REQUEST.size)

    def has_trace(self) -> bool:
        """Return whether any request came with a trace context, of Triton or in the headers of its caller."""
        for index in range(self.head[0]):
            *_, length, parameters, count = self.entry(index)[:13]
            if length or any(name.lower() == TRACEPARENT for name in self.parameters(parameters, count)):
                return True
        return False

    def cancelled_offset(self, index: int) -> int:
        """Return the offset of the byte in the record that says whether a request is cancelled."""
        return self.head[3] + index * layout.REQUEST.size + layout.REQUEST_CANCELLED_OFFSET


class Batch:
    """One batch: its requests, their inputs as views on the record, and what travels with them."""

    __slots__ = (
        "_batching", "_block", "_own_inputs", "columns", "metadata", "number", "received_ns", "rows", "sent_ns",
        "uniform_outputs",
    )  # fmt: skip

    def __init__(
        self,
        metadata: BatchMetadata,
        block: Any,
        number: int,
        received_ns: int,
        sent_ns: int,
        batching: bool,
        columns: dict[str, Array],
    ) -> None:
        """Make a batch from its parsed record."""
        self.metadata = metadata  # everything that it has in common with batches that look alike
        self.number = number  # the batch's number on its connection
        self.received_ns = received_ns  # when the proxy backend got it, on the clock of `time.monotonic_ns`
        self.sent_ns = sent_ns  # when the proxy backend sent it, likewise
        self.rows = metadata.rows  # rows of the batch axis, per request; 1 each where the model does not batch
        self.columns = columns  # the inputs that all requests share, each one array over the whole batch
        # The outputs that all requests want; `None` if they want different ones.
        self.uniform_outputs = metadata.uniform_outputs
        self._block = block
        self._batching = batching
        self._own_inputs: list[dict[str, Array]] | None = None  # by request, if inputs differ

    def add_input(self, tensor: TensorEntry, array: Array) -> None:
        """Add an input of all requests, or of one request."""
        if tensor.owner == layout.WHOLE_BATCH:
            self.columns[tensor.name] = array
        else:
            if self._own_inputs is None:
                self._own_inputs = [{} for _ in self.rows]
            self._own_inputs[tensor.owner][tensor.name] = array

    @property
    def is_uniform(self) -> bool:
        """Whether every input is one array over the whole batch."""
        return self._own_inputs is None and self._batching

    def split(self, outputs: Mapping[str, Array]) -> list[dict[str, Array]]:
        """Take outputs over the whole batch apart, a dictionary for each request."""
        return [
            {name: array[begin:end] for name, array in outputs.items()}
            for begin, end in itertools.pairwise(self.metadata.starts)
        ]

    def shapes_of(self, name: str) -> list[tuple[int, ...]]:
        """Return the shapes of an input in the requests that have it; a single one where they share an array."""
        column = self.columns.get(name)
        if column is not None:
            return [column.shape]
        return [own[name].shape for own in self._own_inputs or () if name in own]

    def load_inputs(self, index: int) -> dict[str, Array]:
        """Return the inputs of a request."""
        if self._batching and len(self.rows) > 1:
            begin, end = self.metadata.starts[index : index + 2]
            data = {name: column[begin:end] for name, column in self.columns.items()}
        else:
            data = dict(self.columns)
        if self._own_inputs is not None:
            data.update(self._own_inputs[index])
        return data

    def load_parameters(self, index: int) -> dict[str, ParameterValue]:
        """Return the parameters of a request."""
        fields = self.metadata.entry(index)
        return self.metadata.parameters(fields[11], fields[12])

    def load_fields(self, index: int) -> tuple[str, int, int, int | str, int, str]:
        """Return id, priority, timeout in microseconds, correlation id, flags and trace context of a request."""
        _, flags, priority, timeout_us, correlation_id, *refs = self.metadata.entry(index)[:11]
        request_id, correlation_text, trace_context = (self.metadata.text(*refs[at : at + 2]) for at in (0, 2, 4))
        return request_id, priority, timeout_us, correlation_text or correlation_id, flags, trace_context

    def load_requested_outputs(self, index: int) -> list[str]:
        """Return the outputs that a request wants."""
        return self.metadata.requested_outputs(index)

    def is_cancelled(self, index: int) -> bool:
        """Return whether the caller of a request is gone."""
        return bool(self._block[self.metadata.cancelled_offset(index)])

    def whole_batch(self) -> tuple[dict[str, Array], list[int]] | None:
        """Return the inputs over the whole batch and the rows of each request; `None` if inputs differ."""
        if self._own_inputs is not None or not (self._batching or len(self.rows) == 1):
            return None
        return self.columns, self.rows


class BatchReader:
    """Reads batch records, and keeps their metadata, because most differ from an earlier one in payloads only."""

    def __init__(self, batching: bool) -> None:
        self.batching = batching
        self._known: dict[bytes, BatchMetadata] = {}

    def metadata(self, raw: bytes, head: Head) -> BatchMetadata:
        """Read metadata, or find those of an equal earlier record; raises as `BatchMetadata`."""
        # Without the header, whose numbers are compared: they were read before this copy was made.
        key = raw[layout.RECORD.size :]
        known = self._known.get(key)
        if known is None or known.head != head:
            known = BatchMetadata(raw, head, self.batching)
            if len(raw) <= COMPARED_BYTES:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[key] = known
        return known

    def read(self, block: Any, memory: Any, start: int, number: int) -> Batch:
        """Read a record in `block`, a piece of `memory` at `start`, from which reading costs less.

        `number` is the batch that was announced.
        """
        _, count, tensor_count, _, metadata_length, record_length, entries, tensors, received_ns, sent_ns = read_header(
            memory, start, len(block), layout.BATCH_MAGIC, number
        )
        # The metadata are copied once, so that what is checked is what is used, even if the memory changes.
        metadata = self.metadata(
            memory[start : start + metadata_length], (count, tensor_count, record_length, entries, tensors)
        )
        columns: dict[str, Array] = {}
        batch = Batch(metadata, block, number, received_ns, sent_ns, self.batching, columns)
        if metadata.columns is None:
            for tensor in metadata.tensors:
                batch.add_input(tensor, tensor.array(block, memory, start))
            return batch
        try:
            for name, shape, dtype, offset in metadata.columns:
                columns[name] = np.ndarray(shape, dtype, block, offset)
        except ValueError as error:  # too many dimensions, or too large ones beside a 0
            raise ProtocolError(f"input '{name}': {error}") from error
        return batch


# ---- writing -------------------------------------------------------------------------------------------------------


@dataclass
class RequestData:
    """What one request is made of."""

    inputs: Mapping[str, Array]  # its inputs by name; strings are object arrays of bytes
    outputs: Sequence[str] = ()  # the outputs that it wants
    request_id: str = ""  # its id
    priority: int = 0  # its priority, 0 is none
    timeout_us: int = 0  # of the queue
    correlation_id: int | str = 0  # a number or a text
    flags: int = 0  # of a sequence
    trace_context: str = ""  # W3C trace context
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


def lay_out_batch(requests: Sequence[RequestData], *, batching: bool, received_ns: int = 0, sent_ns: int = 0) -> Record:
    """Lay a batch record out, each input once and contiguous."""
    tensors = _join_inputs(requests, batching)
    lists = list(dict.fromkeys(tuple(request.outputs) for request in requests))
    parameter_count = sum([len(request.parameters) for request in requests])
    metadata = MetadataWriter(
        layout.BATCH_MAGIC, layout.REQUEST.size, len(requests), tensors, parameter_count, sum(map(len, lists))
    )
    places = {names: (metadata.texts(names), len(names)) for names in lists}
    entries = bytearray()
    for request in requests:
        correlation = request.correlation_id
        number, text = (0, correlation) if isinstance(correlation, str) else (correlation, "")
        entries += layout.REQUEST.pack(
            _rows(request, batching), request.flags, request.priority, request.timeout_us, number,
            *metadata.text(request.request_id), *metadata.text(text), *metadata.text(request.trace_context),
            *metadata.parameters(request.parameters), *places[tuple(request.outputs)], 0,
        )  # fmt: skip
    return make_record(metadata.finish(entries, received_ns, sent_ns), tensors)


class RequestWriter:
    """Lays out the records of single requests, and keeps the layouts."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[object, ...], RecordLayout] = {}

    def lay_out(self, request: RequestData) -> Record:
        """Lay a record out; raises as `lay_out_batch`."""
        look: list[object] = [
            request.request_id, request.correlation_id, request.flags, request.priority, request.timeout_us,
            *request.outputs, None,
        ]  # fmt: skip
        arrays = list(request.inputs.values())
        for name, array in request.inputs.items():
            if array.dtype.kind not in "biufV":  # the length of strings does not follow from their shape
                return lay_out_batch([request], batching=False)
            look += (name, array.dtype, array.shape)
        if request.parameters or request.trace_context:
            return lay_out_batch([request], batching=False)
        key = tuple(look)
        known = self._layouts.get(key)
        if known is None:
            record = lay_out_batch([request], batching=False)
            if len(record.layout.metadata) <= COMPARED_BYTES:
                if len(self._layouts) >= _MAX_KNOWN:
                    self._layouts.clear()
                self._layouts[key] = record.layout
            return record
        return Record(known, arrays)


def _rows(request: RequestData, batching: bool) -> int:
    return next((array.shape[0] for array in request.inputs.values() if array.ndim), 1) if batching else 1


def _join_inputs(requests: Sequence[RequestData], batching: bool) -> list[Tensor]:
    tensors: list[Tensor] = []
    rows = [_rows(request, batching) for request in requests]
    for name in dict.fromkeys(itertools.chain.from_iterable(request.inputs for request in requests)):
        arrays = {owner: request.inputs[name] for owner, request in enumerate(requests) if name in request.inputs}
        first = next(iter(arrays.values()))
        if (
            len(arrays) == len(requests)
            and (batching or len(requests) == 1)
            and all(
                array.dtype == first.dtype and (not batching or array.shape == (rows[owner], *first.shape[1:]))
                for owner, array in arrays.items()
            )
        ):
            tensors.append(make_tensor(name, layout.WHOLE_BATCH, list(arrays.values())))
        else:
            tensors += [make_tensor(name, owner, [array]) for owner, array in arrays.items()]
    return tensors
