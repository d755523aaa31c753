"""Response records: the responses to one batch, as workers write them and as the proxy reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import layout
from .batch import BatchMetadata
from .errors import ProtocolError
from .limits import COMPARED_BYTES
from .record import (
    Array,
    Metadata,
    MetadataWriter,
    ParameterValue,
    Payload,
    Record,
    RecordLayout,
    Tensor,
    TensorEntry,
    make_record,
    make_tensor,
    read_header,
)

_MAX_LAYOUTS = 512
_MAX_ERROR_TEXT = 1 << 20
_FINAL = int(layout.ResponseFlag.FINAL)
_ERROR = int(layout.ResponseFlag.ERROR)
_EMPTY = int(layout.ResponseFlag.EMPTY)
_RESCHEDULE = int(layout.ResponseFlag.RESCHEDULE)
_CONTINUES = int(layout.ResponseFlag.CONTINUES)


@dataclass
class ResponseData:
    """One response to one request."""

    request: int  # the request's place in the batch
    # Its outputs by name; where they were read, numbers are views on the record.
    outputs: dict[str, Array] = field(default_factory=dict)
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)  # its response parameters
    error: str | None = None  # the text of the error that it is, instead of outputs
    code: int = layout.ErrorCode.INTERNAL  # the error's code
    final: bool = True  # whether nothing more comes for the request
    empty: bool = False  # whether it only ends the request's stream
    # Whether it gives the request back to Triton's scheduler instead, for a later batch. The proxy backend must have
    # the capability.
    reschedule: bool = False
    # Whether more comes after an error, which else is final. The proxy backend must have the capability.
    continues: bool = False

    @property
    def has_outputs(self) -> bool:
        """Whether it has rows in the tensors over the whole batch."""
        return self.error is None and not self.empty and not self.reschedule


# ---- writing -------------------------------------------------------------------------------------------------------


class ResponseWriter:
    """Lays response records out; keeps the layouts of outputs that come again and again.

    The methods for numeric arrays return `None` if the outputs have to be looked at one by one.
    """

    def __init__(self, join_below: int | None = None, *, batching: bool = True) -> None:
        """Begin without layouts."""
        self._join_below = join_below
        self._batching = batching
        self._layouts: dict[tuple[Any, ...], RecordLayout] = {}

    def lay_out(self, responses: Sequence[ResponseData]) -> Record:
        """Lay a record of any responses out."""
        regular = all(response.has_outputs and not response.parameters for response in responses)
        joined = None
        if regular and len(responses) > 1:
            names = responses[0].outputs.keys()
            if all(response.outputs.keys() == names for response in responses):
                joined = self._join(list(names), [response.outputs for response in responses])
        if joined is not None:
            tensors, rows = joined
        else:
            rows = [0] * len(responses)
            tensors = [
                make_tensor(name, owner, [array])
                for owner, response in enumerate(responses)
                for name, array in response.outputs.items()
            ]
        if not regular:
            return make_record(_lay_out(responses, rows, tensors), tensors)
        key = (
            tuple([(response.request, response.final) for response in responses]),
            tuple(rows),
            tuple([tensor[:4] + tensor[5:6] for tensor in tensors]),
        )
        known = self._layouts.get(key)
        if known is None:
            known = _keep(self._layouts, key, _lay_out(responses, rows, tensors))
        return make_record(known, tensors)

    def lay_out_alike(self, count: int, rows: int, tensors: Sequence[Tensor]) -> Record:
        """Lay a record of further responses to the first request of a batch out."""
        key: tuple[Any, ...] = (rows, *[tensor[:6] for tensor in tensors])
        known = self._layouts.get(key) if count == 1 else None
        if known is None:
            metadata = MetadataWriter(layout.RESPONSE_MAGIC, layout.RESPONSE.size, count, tensors, 0)
            entry = layout.RESPONSE.pack(0, 0, rows, 0, 0, 0, 0, 0)
            known = metadata.finish(bytearray(entry * count))
            if count == 1:
                # Other lengths hardly ever repeat.
                _keep(self._layouts, key, known)
        return make_record(known, tensors)

    def lay_out_results(
        self,
        results: Sequence[dict[str, Array]],
        names: tuple[str, ...],
        fits: Callable[[Sequence[dict[str, Array]], tuple[str, ...]], bool],
    ) -> Record | None:
        """Lay out the last responses to all requests of a batch, if they are dictionaries of numeric arrays.

        `fits` is asked once for results that look alike.
        """
        look: list[object] = [names]
        for name in names:
            for result in results:
                if result.__class__ is not dict or (array := result.get(name)).__class__ is not np.ndarray:
                    return None
                look.append(array.dtype)
                look.append(array.shape)
        look.extend(map(len, results))
        key = tuple(look)
        known = self._layouts.get(key)
        if known is None:
            if not names or not fits(results, names):
                return None
            tensors: list[Tensor] | None = None
            if self._batching:
                joined = self._join(names, results)
                if joined is not None:
                    tensors, rows = joined
            elif len(results) == 1:
                tensors, rows = [make_tensor(name, 0, [results[0][name]]) for name in names], [0]
            if tensors is None:
                return None
            known = _keep(self._layouts, key, _lay_out_last(rows, tensors))
        payloads: list[Payload]
        if len(results) == 1:
            [result] = results
            payloads = [result[name] for name in names]
        else:
            payloads = [[result[name] for result in results] for name in names]
        return Record(known, payloads)

    def _join(
        self, names: Sequence[str], results: Sequence[Mapping[str, Array]]
    ) -> tuple[list[Tensor], list[int]] | None:
        """Join the outputs of several requests over the batch.

        Returns one tensor per name, and the rows of each request; `None` if the outputs do not fit together.
        """
        limit = self._join_below
        if limit is not None and sum([result[name].nbytes for name in names for result in results]) >= limit:
            return None
        tensors: list[Tensor] = []
        rows: list[int] = []
        for name in names:
            arrays = [result[name] for result in results]
            first = arrays[0]
            if any(
                not array.ndim or array.shape[1:] != first.shape[1:] or array.dtype != first.dtype for array in arrays
            ):
                return None
            sizes = [array.shape[0] for array in arrays]
            if tensors and sizes != rows:
                return None
            rows = sizes
            tensors.append(make_tensor(name, layout.WHOLE_BATCH, arrays))
        return (tensors, rows) if tensors else None


def lay_out_columns(
    metadata: BatchMetadata,
    outputs: dict[str, Array],
    names: tuple[str, ...],
    fits: Callable[[dict[str, Array], tuple[str, ...]], bool],
) -> Record | None:
    """Lay out the last responses to all requests of a batch, given as numeric arrays over the whole batch.

    Outputs that look like earlier ones are used without a further check. Returns `None` if the outputs have to be
    checked one by one.
    """
    look: list[object] = [names, len(outputs)]
    arrays: list[Array] = []
    for name in names:
        array = outputs.get(name)
        if array.__class__ is not np.ndarray:
            return None
        arrays.append(array)
        look.append(array.dtype)
        look.append(array.shape)
    key = tuple(look)
    known = metadata.layouts.get(key)
    if known is None:
        rows = metadata.rows
        if not names or not fits(outputs, names) or any(array.shape[:1] != (sum(rows),) for array in arrays):
            return None
        tensors = [make_tensor(name, layout.WHOLE_BATCH, [outputs[name]]) for name in names]
        known = _keep(metadata.layouts, key, _lay_out_last(rows, tensors))
    return Record(known, arrays)


def _keep(layouts: dict[tuple[Any, ...], RecordLayout], key: tuple[Any, ...], made: RecordLayout) -> RecordLayout:
    if len(layouts) >= _MAX_LAYOUTS:
        layouts.clear()
    layouts[key] = made
    return made


def _lay_out_last(rows: Sequence[int], tensors: Sequence[Tensor]) -> RecordLayout:
    return _lay_out([ResponseData(index) for index in range(len(rows))], rows, tensors)


def _lay_out(responses: Sequence[ResponseData], rows: Sequence[int], tensors: Sequence[Tensor]) -> RecordLayout:
    parameter_count = sum([len(response.parameters) for response in responses])
    metadata = MetadataWriter(layout.RESPONSE_MAGIC, layout.RESPONSE.size, len(responses), tensors, parameter_count)
    entries = bytearray()
    for response, row in zip(responses, rows, strict=True):
        error = response.error
        flags = _FINAL * response.final | _ERROR * (error is not None) | _EMPTY * response.empty
        flags |= _RESCHEDULE * response.reschedule | _CONTINUES * response.continues
        text = (0, 0) if error is None else metadata.text(error[:_MAX_ERROR_TEXT])
        entries += layout.RESPONSE.pack(
            response.request, flags, row, response.code, *text, *metadata.parameters(response.parameters)
        )
    return metadata.finish(entries)


# ---- reading -------------------------------------------------------------------------------------------------------


def read_responses(record: memoryview, number: int, request_count: int, *, decoupled: bool) -> list[ResponseData]:
    """Read a response record. Numeric outputs are views on it."""
    _, count, tensor_count, _, metadata_length, record_length, entries, tensors, _, _ = read_header(
        record, 0, len(record), layout.RESPONSE_MAGIC, number
    )
    metadata = Metadata(bytes(record[:metadata_length]))
    metadata.check_table("responses", entries, count, layout.RESPONSE.size)
    responses = []
    rows = []
    for place in range(count):
        request, flags, row, code, error_offset, error_length, *parameters = layout.RESPONSE.unpack_from(
            metadata.raw, entries + place * layout.RESPONSE.size
        )
        if request >= request_count:
            raise ProtocolError(f"response {place} is for request {request} of {request_count}")
        response = ResponseData(
            request,
            parameters=metadata.parameters(*parameters),
            error=metadata.text(error_offset, error_length) if flags & _ERROR else None,
            code=code,
            final=not decoupled or bool(flags & (_FINAL | _RESCHEDULE)) or flags & (_ERROR | _CONTINUES) == _ERROR,
            empty=bool(flags & _EMPTY),
            reschedule=bool(flags & _RESCHEDULE),
            continues=bool(flags & _CONTINUES),
        )
        responses.append(response)
        rows.append(row if response.has_outputs else 0)
    if not decoupled and len({response.request for response in responses}) != count:
        raise ProtocolError("a request of a model that is not decoupled got two responses")
    try:
        found = metadata.read_tensors("output", tensors, tensor_count, record_length)
    except TypeError as error:
        raise ProtocolError(str(error)) from error
    for tensor in found:
        array = tensor.array(record, record, 0)
        if tensor.owner != layout.WHOLE_BATCH:
            if tensor.owner >= count:
                raise ProtocolError(f"{tensor.label} belongs to response {tensor.owner} of {count}")
            responses[tensor.owner].outputs[tensor.name] = array
            continue
        if tensor.shape[:1] != (sum(rows),):
            raise ProtocolError(f"{tensor.label}: shape {tensor.shape} for responses of {sum(rows)} rows")
        begin = 0
        for response, row in zip(responses, rows, strict=True):
            if response.has_outputs:
                response.outputs[tensor.name] = array[begin : begin + row]
                begin += row
    return responses


class AnswerReader:
    """Reads records with one response, the answers to calls; keeps the layouts of those that look alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[TensorEntry]] = {}

    def read(self, record: memoryview, number: int) -> ResponseData:
        """Read a record. Numeric outputs are views on it."""
        _, *head, metadata_length, record_length, entries, tensors, _, _ = read_header(
            record, 0, len(record), layout.RESPONSE_MAGIC, number
        )
        raw = bytes(record[:metadata_length])
        # Without the number: the rest of the header is checked with the metadata.
        key = (head[0], head[1], record_length, entries, tensors, raw[layout.RECORD.size :])
        known = self._known.get(key)
        if known is not None:
            outputs = {tensor.name: tensor.array(record, record, 0) for tensor in known}
            return ResponseData(0, outputs, final=False)
        [response] = read_responses(record, number, 1, decoupled=True)
        if response.has_outputs and not response.parameters and len(raw) <= COMPARED_BYTES:
            if len(self._known) >= _MAX_LAYOUTS:
                self._known.clear()
            self._known[key] = Metadata(raw).read_tensors("output", tensors, head[1], record_length)
        return response
