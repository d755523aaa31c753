"""Records as the proxy writes and reads them: batches out, responses in."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ProtocolError
from ..transport.arena import OwnedBlock
from ..wire import layout
from ..wire.dtypes import BYTES_CODE, code_of, dtype_of
from ..wire.strings import decode_strings, encode_strings

Array = np.ndarray[Any, Any]
ParameterValue = str | int | bool | float

_MAX_DIMS = 64


@dataclass
class RequestData:
    """What one request is made of.

    Attributes:
        inputs: Its inputs by name; strings are object arrays of bytes.
        outputs: The outputs that it wants.
        request_id: Its id.
        correlation_id: A number or a text.
        flags: Of a sequence.
        timeout_us: Of the queue.
        trace_context: W3C trace context.
        parameters: Its parameters.
    """

    inputs: Mapping[str, Array]
    outputs: Sequence[str] = ()
    request_id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    trace_context: str = ""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


@dataclass
class ResponseData:
    """One response to one request, as it came.

    Attributes:
        request: The request's place in the batch.
        outputs: Its outputs by name, views on the record.
        parameters: Its response parameters.
        error: The text of the error that it is, instead of outputs.
        code: The error's code.
        final: Whether nothing more comes for the request.
        empty: Whether it only ends the request's stream.
    """

    request: int
    outputs: dict[str, Array] = field(default_factory=dict)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    error: str | None = None
    code: int = layout.ErrorCode.INTERNAL
    final: bool = True
    empty: bool = False


@dataclass
class _Input:
    name: str
    owner: int
    shape: tuple[int, ...]
    arrays: Sequence[Array]
    code: int
    length: int
    strings: bytes | None


def _input(name: str, owner: int, arrays: Sequence[Array]) -> _Input:
    shape = arrays[0].shape
    if len(arrays) > 1:
        shape = (sum(array.shape[0] for array in arrays), *shape[1:])
    code = code_of(arrays[0].dtype)
    strings = b"".join([encode_strings(array) for array in arrays]) if code == BYTES_CODE else None
    length = len(strings) if strings is not None else sum(array.nbytes for array in arrays)
    return _Input(name, owner, shape, arrays, code, length, strings)


def _inputs(requests: Sequence[RequestData], batching: bool) -> list[_Input]:
    found: list[_Input] = []
    for name in dict.fromkeys(itertools.chain.from_iterable(request.inputs for request in requests)):
        arrays = [request.inputs.get(name) for request in requests]
        first = arrays[0]
        if (batching or len(requests) == 1) and first is not None:
            alike = [
                array
                for array in arrays
                if array is not None and array.dtype == first.dtype and array.shape[1:] == first.shape[1:]
            ]
            if len(alike) == len(requests) and (not batching or first.ndim):
                found.append(_input(name, layout.WHOLE_BATCH, alike))
                continue
        found += [_input(name, owner, [array]) for owner, array in enumerate(arrays) if array is not None]
    return found


def write_batch(
    number: int,
    requests: Sequence[RequestData],
    allocate: Callable[[int], OwnedBlock],
    *,
    batching: bool,
    received_ns: int,
    sent_ns: int,
) -> tuple[OwnedBlock, int]:
    """Write a batch record, each input once and contiguous.

    Args:
        number: The batch.
        requests: Its requests.
        allocate: Gives a block of so many bytes, or raises.
        batching: Whether tensors have a batch axis.
        received_ns: When Triton gave the batch, on the clock of `time.monotonic_ns`.
        sent_ns: When it goes to the worker, likewise.

    Returns:
        The block, and the length of the record in it.
    """
    inputs = _inputs(requests, batching)
    rows = [_rows(request) if batching else 1 for request in requests]
    entries_at = layout.RECORD.size
    tensors_at = entries_at + len(requests) * layout.REQUEST.size
    tables_at = tensors_at + len(inputs) * layout.TENSOR.size
    tables = bytearray()
    references: list[tuple[int, str]] = []  # where in the tables which text belongs
    outputs: dict[tuple[str, ...], int] = {}
    places = []
    for request in requests:
        wanted = tuple(request.outputs)
        if wanted not in outputs:
            outputs[wanted] = tables_at + len(tables)
            for name in wanted:
                references.append((len(tables), name))
                tables += bytes(layout.STRING_REF.size)
        parameters_at = tables_at + len(tables)
        for name, value in request.parameters.items():
            references.append((len(tables), name))
            kind, bits = _parameter_bits(value)
            if kind == layout.ParameterType.STRING:
                # The text's length and place are the two last fields.
                references.append((-len(tables) - 1, str(value)))
            tables += layout.PARAMETER.pack(0, 0, kind, 0, bits)
        places.append((outputs[wanted], len(wanted), parameters_at, len(request.parameters)))
    dims = []
    for tensor in inputs:
        dims.append(tables_at + len(tables))
        tables += struct.pack(f"<{len(tensor.shape)}q", *tensor.shape)
    texts = _Texts(tables_at + len(tables))
    for at, text in references:
        offset, length = texts.add(text)
        if at >= 0:
            layout.STRING_REF.pack_into(tables, at, offset, length)
        else:
            struct.pack_into("<IQ", tables, -at - 1 + 12, length, offset)
    entries = bytearray()
    for request, row, (outputs_at, outputs_count, parameters_at, parameters_count) in zip(
        requests, rows, places, strict=True
    ):
        correlation = request.correlation_id
        entries += layout.REQUEST.pack(
            row, request.flags, 0, request.timeout_us, correlation if isinstance(correlation, int) else 0,
            *texts.add(request.request_id), *texts.add(correlation if isinstance(correlation, str) else ""),
            *texts.add(request.trace_context), parameters_at, parameters_count, outputs_at, outputs_count, 0,
        )  # fmt: skip
    names = [texts.add(tensor.name) for tensor in inputs]
    metadata_length = layout.align(texts.end)
    table = bytearray()
    payload_at = metadata_length
    offsets = []
    for tensor, place, dims_at in zip(inputs, names, dims, strict=True):
        offsets.append(payload_at)
        table += layout.TENSOR.pack(
            *place, tensor.code, len(tensor.shape), tensor.owner, dims_at, payload_at, tensor.length
        )
        payload_at = layout.align(payload_at + tensor.length)
    block = allocate(payload_at)
    header = layout.RECORD.pack(
        layout.BATCH_MAGIC, len(requests), len(inputs), number, metadata_length, payload_at, entries_at, tensors_at,
        received_ns, sent_ns,
    )  # fmt: skip
    metadata = b"".join([header, entries, table, tables, texts.raw])
    block.memory[block.offset : block.offset + len(metadata)] = metadata
    for tensor, offset in zip(inputs, offsets, strict=True):
        _write_payload(block, tensor, block.offset + offset)
    return block, payload_at


def _write_payload(block: OwnedBlock, tensor: _Input, offset: int) -> None:
    if tensor.strings is not None:
        block.memory[offset : offset + tensor.length] = tensor.strings
    elif tensor.length:
        target: Array = np.ndarray(tensor.shape, tensor.arrays[0].dtype, block.memory, offset)
        if len(tensor.arrays) == 1:
            target[...] = tensor.arrays[0]
        else:
            np.concatenate(tensor.arrays, out=target)


def _rows(request: RequestData) -> int:
    return next((array.shape[0] for array in request.inputs.values() if array.ndim), 1)


def _parameter_bits(value: ParameterValue) -> tuple[int, int]:
    if isinstance(value, bool):
        return layout.ParameterType.BOOL, int(value)
    if isinstance(value, int):
        return layout.ParameterType.INT, value & 0xFFFFFFFFFFFFFFFF
    if isinstance(value, float):
        return layout.ParameterType.DOUBLE, int(struct.unpack("<Q", struct.pack("<d", value))[0])
    return layout.ParameterType.STRING, 0


class _Texts:
    """The texts of a record, each followed by a zero byte."""

    def __init__(self, start: int) -> None:
        self.raw = bytearray()
        self._start = start

    @property
    def end(self) -> int:
        return self._start + len(self.raw)

    def add(self, text: str) -> tuple[int, int]:
        raw = text.encode("utf-8", "surrogateescape")
        place = (self.end, len(raw))
        self.raw += raw + b"\0"
        return place


# ---- responses -----------------------------------------------------------------------------------------------------


def read_responses(record: memoryview, number: int, request_count: int, *, decoupled: bool) -> list[ResponseData]:
    """Read a response record. Numeric outputs are views on it.

    Raises:
        ProtocolError: If it is malformed; says what was expected and what came.
    """
    if len(record) < layout.RECORD.size:
        raise ProtocolError(f"a response record of {len(record)} bytes is shorter than its header")
    magic, count, tensor_count, batch, metadata_length, record_length, entries, tensors, _, _ = (
        layout.RECORD.unpack_from(record)
    )
    if magic != layout.RESPONSE_MAGIC or batch != number:
        raise ProtocolError(f"expected the response record of batch {number}, got magic {magic:#x} and batch {batch}")
    if not layout.RECORD.size <= metadata_length <= record_length <= len(record):
        raise ProtocolError(
            f"lengths do not nest: metadata {metadata_length}, record {record_length}, part {len(record)}"
        )
    metadata = bytes(record[:metadata_length])
    if (
        entries + count * layout.RESPONSE.size > metadata_length
        or tensors + tensor_count * layout.TENSOR.size > metadata_length
    ):
        raise ProtocolError(f"{count} responses and {tensor_count} tensors do not lie inside the metadata")
    found = []
    rows = []
    for place in range(count):
        fields = layout.RESPONSE.unpack_from(metadata, entries + place * layout.RESPONSE.size)
        response = _response(metadata, fields, decoupled)
        if response.request >= request_count:
            raise ProtocolError(f"response {place} is for request {response.request} of {request_count}")
        found.append(response)
        rows.append(0 if response.empty or response.error is not None else fields[2])
    if not decoupled and len({response.request for response in found}) != len(found):
        raise ProtocolError("a request of a model that is not decoupled got two responses")
    for place in range(tensor_count):
        _read_tensor(record, metadata, tensors + place * layout.TENSOR.size, record_length, found, rows)
    return found


def _response(metadata: bytes, fields: tuple[int, ...], decoupled: bool) -> ResponseData:
    request, flags, _, code, error_at, error_length, parameters_at, parameters_count = fields
    if parameters_at + parameters_count * layout.PARAMETER.size > len(metadata):
        raise ProtocolError(f"{parameters_count} parameters at {parameters_at} lie outside the metadata")
    parameters: dict[str, ParameterValue] = {}
    for index in range(parameters_count):
        key_at, key_length, kind, length, value = layout.PARAMETER.unpack_from(
            metadata, parameters_at + index * layout.PARAMETER.size
        )
        key = _text(metadata, key_at, key_length)
        if kind == layout.ParameterType.STRING:
            parameters[key] = _text(metadata, value, length)
        elif kind == layout.ParameterType.BOOL:
            parameters[key] = bool(value)
        elif kind == layout.ParameterType.INT:
            parameters[key] = value - (1 << 64) if value >> 63 else value
        elif kind == layout.ParameterType.DOUBLE:
            parameters[key] = float(struct.unpack("<d", struct.pack("<Q", value))[0])
        else:
            raise ProtocolError(f"parameter '{key}' has the unknown type {kind}")
    is_error = bool(flags & layout.ResponseFlag.ERROR)
    return ResponseData(
        request,
        parameters=parameters,
        error=_text(metadata, error_at, error_length) if is_error else None,
        code=code,
        final=is_error or not decoupled or bool(flags & layout.ResponseFlag.FINAL),
        empty=bool(flags & layout.ResponseFlag.EMPTY),
    )


def _read_tensor(
    record: memoryview, metadata: bytes, at: int, record_length: int, found: list[ResponseData], rows: list[int]
) -> None:
    name_at, name_length, code, dims_count, owner, dims_at, offset, length = layout.TENSOR.unpack_from(metadata, at)
    name = _text(metadata, name_at, name_length)
    if dims_count > _MAX_DIMS or dims_at + dims_count * 8 > len(metadata):
        raise ProtocolError(f"output '{name}': {dims_count} dimensions at {dims_at} lie outside the metadata")
    shape = struct.unpack_from(f"<{dims_count}q", metadata, dims_at)
    if offset < len(metadata) or offset + length > record_length or any(size < 0 for size in shape):
        raise ProtocolError(f"output '{name}': shape {shape}, {length} bytes at {offset} do not lie inside the record")
    payload = record[offset : offset + length]
    try:
        dtype = dtype_of(code)
        array: Array
        if code == BYTES_CODE:
            array = decode_strings(bytes(payload), shape)
        else:
            array = np.frombuffer(payload, dtype).reshape(shape)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"output '{name}': shape {shape} and {length} bytes do not fit: {error}") from error
    if owner != layout.WHOLE_BATCH:
        if owner >= len(found):
            raise ProtocolError(f"output '{name}' belongs to response {owner} of {len(found)}")
        found[owner].outputs[name] = array
        return
    if not shape or shape[0] != sum(rows):
        raise ProtocolError(f"output '{name}': shape {shape} for responses of {sum(rows)} rows")
    begin = 0
    for response, count in zip(found, rows, strict=True):
        if not response.empty and response.error is None:
            response.outputs[name] = array[begin : begin + count]
            begin += count


def _text(metadata: bytes, offset: int, length: int) -> str:
    raw = metadata[offset : offset + length]
    if len(raw) != length:
        raise ProtocolError(f"a text of {length} bytes at {offset} lies outside the metadata")
    return raw.decode("utf-8", "replace")
