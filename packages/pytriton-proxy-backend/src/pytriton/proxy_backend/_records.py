"""Batch records in: the requests of one message, as cheap as they are until somebody looks at them."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..proxy.types import ParameterValue, Request, RequestFields
from . import _layout as layout
from ._arena import InputBlock
from ._dtypes import BYTES_CODE, dtype_of
from ._strings import decode_strings
from .errors import ProtocolError

Array = np.ndarray[Any, Any]

_new_request = Request.__new__
_MAX_DIMS = 64
_DIMS = [struct.Struct(f"<{count}q") for count in range(_MAX_DIMS + 1)]


class Batch:
    """One batch: its requests, their inputs as views on the arena, and what travels with them.

    Attributes:
        number: The batch's number on this connection.
        rows: Rows of the batch axis, per request; 1 each where the model does not batch.
        columns: The inputs that all requests share, each one array over the whole batch.
        uniform_outputs: Whether all requests want the same outputs.
    """

    __slots__ = (
        "_batching", "_block", "_brief", "_entries_offset", "_extras", "_metadata", "_starts",
        "columns", "number", "rows", "uniform_outputs",
    )  # fmt: skip

    def __init__(self, block: InputBlock, memory: mmap.mmap, number: int, batching: bool) -> None:
        """Reads a record.

        Args:
            block: The record and nothing else.
            memory: The segment that the block is a piece of: reading from it costs less than from the block.
            number: The batch that the message announced.
            batching: Whether the tensors have a batch axis.

        Raises:
            ProtocolError: If the record is malformed; says what was expected and what came.
            TypeError: If a tensor's dtype has no numpy type here.
        """
        length = len(block)
        if length < layout.RECORD.size:
            raise ProtocolError(f"a batch record of {length} bytes is shorter than its header")
        start = block.place[1]
        magic, count, tensor_count, batch, metadata_length, record_length, entries, tensors = layout.RECORD.unpack_from(
            memory, start
        )
        if magic != layout.BATCH_MAGIC or batch != number:
            raise ProtocolError(f"expected the record of batch {number}, got magic {magic:#x} and batch {batch}")
        if not layout.RECORD.size <= metadata_length <= min(record_length, layout.MAX_METADATA):
            raise ProtocolError(f"{metadata_length} bytes of metadata do not fit into a record of {record_length}")
        if record_length > length:
            raise ProtocolError(f"a record of {record_length} bytes does not fit into its block of {length}")
        # One copy: what is checked is what is used, whatever happens to the memory in between.
        metadata = memory[start : start + metadata_length]
        if count == 0 or entries < layout.RECORD.size or entries + count * layout.REQUEST.size > metadata_length:
            raise ProtocolError(f"{count} requests at {entries} do not lie inside {metadata_length} bytes of metadata")
        if tensors + tensor_count * layout.TENSOR.size > metadata_length:
            raise ProtocolError(
                f"{tensor_count} tensors at {tensors} do not lie inside {metadata_length} bytes of metadata"
            )
        self.number = number
        self._block = block
        self._metadata = metadata
        self._batching = batching
        self._entries_offset = entries
        self._brief = list(layout.REQUEST_BRIEF.iter_unpack(metadata[entries : entries + count * layout.REQUEST.size]))
        self.rows = rows = [brief[0] for brief in self._brief]
        self.uniform_outputs = all(brief[1] == self._brief[0][1] for brief in self._brief)
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row)
        self._starts = starts
        self.columns: dict[str, Array] = {}
        self._extras: list[dict[str, Array]] | None = None
        for index in range(tensor_count):
            self._read_tensor(tensors + index * layout.TENSOR.size, count, metadata_length, record_length)

    def _read_tensor(self, at: int, count: int, metadata_length: int, record_length: int) -> None:
        (name_offset, name_length, code, dims_count, owner, dims_offset, offset, length) = layout.TENSOR.unpack_from(
            self._metadata, at
        )
        name = self._text(name_offset, name_length)
        if dims_count > _MAX_DIMS or dims_offset + dims_count * 8 > metadata_length:
            raise ProtocolError(f"input '{name}': {dims_count} dimensions at {dims_offset} lie outside the metadata")
        shape = _DIMS[dims_count].unpack_from(self._metadata, dims_offset)
        if offset < metadata_length or offset + length > record_length:
            raise ProtocolError(f"input '{name}': {length} bytes at {offset} lie outside the record's payloads")
        elements = 1
        for dim in shape:
            if dim < 0:
                raise ProtocolError(f"input '{name}': negative dimension in shape {shape}")
            elements *= dim
        dtype = dtype_of(code)
        array: Array
        if code == BYTES_CODE:
            try:
                array = decode_strings(self._block[offset : offset + length].tobytes(), shape)
            except ValueError as error:
                raise ProtocolError(f"input '{name}': {error}") from error
        else:
            if elements * dtype.itemsize != length:
                raise ProtocolError(
                    f"input '{name}': shape {shape} of {dtype} takes {elements * dtype.itemsize} bytes, {length} came"
                )
            array = np.ndarray(shape, dtype, self._block, offset)
        if owner == layout.WHOLE_BATCH:
            if self._batching and (not shape or shape[0] != self._starts[-1]):
                raise ProtocolError(f"input '{name}': shape {shape} for a batch of {self._starts[-1]} rows")
            self.columns[name] = array
        elif owner < count:
            if self._extras is None:
                self._extras = [{} for _ in range(count)]
            self._extras[owner][name] = array
        else:
            raise ProtocolError(f"input '{name}' belongs to request {owner} of {count}")

    def __len__(self) -> int:
        return len(self.rows)

    def requests(self) -> list[Request]:
        """The requests, in order."""
        made = []
        for index in range(len(self.rows)):
            request = _new_request(Request)
            request._details = self
            request._index = index
            made.append(request)
        return made

    # ---- RequestDetails ------------------------------------------------------------------------------------------

    def load_inputs(self, index: int) -> dict[str, Array]:
        if self._batching:
            begin = self._starts[index]
            end = self._starts[index + 1]
            data = {name: column[begin:end] for name, column in self.columns.items()}
        else:
            data = dict(self.columns)
        if self._extras is not None:
            data.update(self._extras[index])
        return data

    def load_parameters(self, index: int) -> dict[str, ParameterValue]:
        fields = self._fields(index)
        offset, count = fields[11], fields[12]
        if offset + count * layout.PARAMETER.size > len(self._metadata):
            raise ProtocolError(f"{count} parameters at {offset} lie outside the metadata")
        values: dict[str, ParameterValue] = {}
        for number in range(count):
            key_offset, key_length, kind, length, value = layout.PARAMETER.unpack_from(
                self._metadata, offset + number * layout.PARAMETER.size
            )
            key = self._text(key_offset, key_length)
            if kind == layout.ParameterType.STRING:
                values[key] = self._text(value, length)
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
        correlation_text = self._text(fields[7], fields[8])
        return RequestFields(
            request_id=self._text(fields[5], fields[6]),
            priority=fields[2],
            timeout_us=fields[3],
            correlation_id=correlation_text or fields[4],
            flags=fields[1],
            trace_context=self._text(fields[9], fields[10]),
        )

    def load_requested_outputs(self, index: int) -> list[str]:
        _, offset, count = self._brief[index]
        if offset + count * layout.STRING_REF.size > len(self._metadata):
            raise ProtocolError(f"{count} names of outputs at {offset} lie outside the metadata")
        refs = struct.unpack_from(f"<{2 * count}I", self._metadata, offset)
        return [self._text(refs[2 * i], refs[2 * i + 1]) for i in range(count)]

    def is_cancelled(self, index: int) -> bool:
        at = self._entries_offset + index * layout.REQUEST.size + layout.REQUEST_CANCELLED_OFFSET
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
        return layout.REQUEST.unpack_from(self._metadata, self._entries_offset + index * layout.REQUEST.size)

    def _text(self, offset: int, length: int) -> str:
        raw = self._metadata[offset : offset + length]
        if len(raw) != length:
            raise ProtocolError(f"a text of {length} bytes at {offset} lies outside the metadata")
        return raw.decode("utf-8", "surrogateescape")
