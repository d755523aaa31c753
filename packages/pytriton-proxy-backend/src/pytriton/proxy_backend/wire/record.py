"""What batch and response records have in common: header, texts, parameters and tensors, read and written.

Texts are UTF-8; bytes that are not are carried as they are, as surrogates (`surrogateescape`) while they are a `str`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import layout
from .dtypes import BYTES_CODE, code_of, dtype_of
from .errors import ProtocolError
from .limits import SMALL_RECORD_BYTES
from .strings import decode_strings, encode_strings

Array = np.ndarray[Any, Any]
"""An array of any type and shape."""
Memory = mmap.mmap | bytearray
ParameterValue = str | int | bool | float

_MAX_DIMS = 64
_KINDS = {layout.BATCH_MAGIC: "batch", layout.RESPONSE_MAGIC: "response"}
_NUMBER = struct.Struct("<Q")
_BITS = 0xFFFFFFFFFFFFFFFF


# ---- reading -------------------------------------------------------------------------------------------------------


class TensorEntry(NamedTuple):
    """One tensor of a record that was read: everything about it but its payload."""

    name: str  # the input or output
    label: str  # what errors call it
    dtype: np.dtype[Any]  # its dtype; `object` for strings
    strings: bool  # whether it is one of strings
    shape: tuple[int, ...]
    owner: int  # the request or response that it belongs to, or `WHOLE_BATCH`
    offset: int  # where its payload begins in the record
    length: int  # bytes of its payload

    def array(self, buffer: Any, memory: Any, start: int) -> Array:
        """Make its array: a view on `buffer`, for strings a copy."""
        try:
            if self.strings:
                begin = start + self.offset
                return decode_strings(bytes(memory[begin : begin + self.length]), self.shape)
            view: Array = np.ndarray(self.shape, self.dtype, buffer, self.offset)
            return view
        except ValueError as error:
            raise ProtocolError(f"{self.label}: {error}") from error


def read_header(memory: Any, start: int, length: int, magic: int, number: int) -> tuple[int, ...]:
    """Read the header of a record, and check its lengths."""
    if length < layout.RECORD.size:
        raise ProtocolError(f"a {_KINDS[magic]} record of {length} bytes is shorter than its header")
    header = layout.RECORD.unpack_from(memory, start)
    metadata_length = header[4]
    if header[0] != magic or header[3] != number:
        raise ProtocolError(f"expected the record of batch {number}, got magic {header[0]:#x} and batch {header[3]}")
    if not layout.RECORD.size <= metadata_length <= header[5] <= length:
        raise ProtocolError(f"lengths do not nest: metadata {metadata_length}, record {header[5]}, block {length}")
    if metadata_length > layout.MAX_METADATA:
        raise ProtocolError(f"{metadata_length} bytes of metadata, the protocol allows {layout.MAX_METADATA}")
    return header


class Metadata:
    """The metadata of a record that is read: a copy, so that what is checked is what is used."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw  # the record up to its payloads

    def check_table(self, what: str, offset: int, count: int, size: int) -> None:
        """Check that a table lies inside the metadata."""
        if count and (offset < layout.RECORD.size or offset % 8 or offset + count * size > len(self.raw)):
            raise ProtocolError(f"{count} {what} at {offset} do not lie inside {len(self.raw)} bytes of metadata")

    def text(self, offset: int, length: int) -> str:
        """Return a text."""
        raw = self.raw[offset : offset + length]
        if len(raw) != length:
            raise ProtocolError(f"a text of {length} bytes at {offset} lies outside the metadata")
        return raw.decode("utf-8", "surrogateescape")

    def texts(self, what: str, offset: int, count: int) -> list[str]:
        """Return the texts that a table refers to; raises as `text` and `check_table`."""
        self.check_table(what, offset, count, layout.STRING_REF.size)
        refs = struct.unpack_from(f"<{2 * count}I", self.raw, offset if count else 0)
        return [self.text(refs[2 * i], refs[2 * i + 1]) for i in range(count)]

    def parameters(self, offset: int, count: int) -> dict[str, ParameterValue]:
        """Return the parameters in a table."""
        self.check_table("parameters", offset, count, layout.PARAMETER.size)
        values: dict[str, ParameterValue] = {}
        for at in range(offset, offset + count * layout.PARAMETER.size, layout.PARAMETER.size):
            key_offset, key_length, kind, length, value = layout.PARAMETER.unpack_from(self.raw, at)
            key = self.text(key_offset, key_length)
            if kind == layout.ParameterType.STRING:
                values[key] = self.text(value, length)
            elif kind == layout.ParameterType.BOOL:
                values[key] = bool(value)
            elif kind == layout.ParameterType.INT:
                values[key] = value - (1 << 64) if value >> 63 else value
            elif kind == layout.ParameterType.DOUBLE:
                values[key] = float(struct.unpack("<d", struct.pack("<Q", value))[0])
            else:
                raise ProtocolError(f"parameter '{key}' has the unknown type {kind}")
        return values

    def read_tensors(self, what: str, offset: int, count: int, record_length: int) -> list[TensorEntry]:
        """Return the tensors in a table."""
        self.check_table("tensors", offset, count, layout.TENSOR.size)
        return [self._tensor(what, offset + index * layout.TENSOR.size, record_length) for index in range(count)]

    def _tensor(self, what: str, at: int, record_length: int) -> TensorEntry:
        name_offset, name_length, code, dims_count, owner, dims_offset, offset, length, _ = layout.TENSOR.unpack_from(
            self.raw, at
        )
        name = self.text(name_offset, name_length)
        label = f"{what} '{name}'"
        if dims_count > _MAX_DIMS:
            raise ProtocolError(f"{label}: {dims_count} dimensions, numpy has at most {_MAX_DIMS}")
        self.check_table(f"dimensions of {label}", dims_offset, dims_count, 8)
        shape = struct.unpack_from(f"<{dims_count}q", self.raw, dims_offset if dims_count else 0)
        if offset < len(self.raw) or offset + length > record_length:
            raise ProtocolError(f"{label}: {length} bytes at {offset} lie outside the record's payloads")
        elements = 1
        for dim in shape:
            if dim < 0:
                raise ProtocolError(f"{label}: negative dimension in shape {shape}")
            elements *= dim
        dtype = dtype_of(code)
        strings = code == BYTES_CODE
        if not strings and elements * dtype.itemsize != length:
            raise ProtocolError(
                f"{label}: shape {shape} of {dtype} takes {elements * dtype.itemsize} bytes, {length} came"
            )
        return TensorEntry(name, label, dtype, strings, shape, owner, offset, length)


# ---- writing -------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a payload goes."""

    shape: tuple[int, ...]  # of the tensor
    dtype: np.dtype[Any]
    offset: int  # in the record
    length: int  # bytes of the payload


Payload = Array | list[Array] | bytes
"""The content of a tensor: an array, arrays that are joined along axis 0, or the payload of strings."""


class RecordLayout(NamedTuple):
    """A record without its number and its payloads: the same for all that look alike."""

    metadata: bytes
    length: int
    payload_bytes: int  # bytes of its payloads
    places: list[Place]  # where its payloads go

    @property
    def span(self) -> int:
        """Bytes from the first payload to the end of the last one."""
        first, last = self.places[0], self.places[-1]
        return last.offset + last.length - first.offset


class Record:
    """A record that is laid out and not yet written."""

    __slots__ = ("layout", "payloads")

    def __init__(self, layout: RecordLayout, payloads: Sequence[Payload]) -> None:
        self.layout = layout  # what it looks like
        # The payloads of its tensors. This is emptied when they are written, so that nothing refers to the arrays any
        # more.
        self.payloads = payloads

    def write(self, memory: Memory, start: int, number: int) -> None:
        """Write it, once."""
        self.write_metadata(memory, start, number)
        is_small = memory.__class__ is mmap.mmap and self.layout.payload_bytes <= SMALL_RECORD_BYTES
        if not (is_small and self._copy_small(memory, start)):
            for (shape, dtype, offset, length), payload in zip(self.layout.places, self.payloads, strict=True):
                offset += start
                if payload.__class__ is bytes:
                    memory[offset : offset + length] = payload
                    continue
                target: Array = np.ndarray(shape, dtype, memory, offset)
                if payload.__class__ is list:
                    np.concatenate(payload, out=target)
                else:
                    target[...] = payload
        self.payloads = ()

    def write_around(self, memory: Memory, start: int, number: int) -> None:
        """Write it once around payloads that are in place already; they must not be written to any more."""
        self.write_metadata(memory, start, number)
        for payload in self.payloads:
            for array in payload if isinstance(payload, list) else (payload,):
                assert isinstance(array, np.ndarray)
                array.flags.writeable = False
        self.payloads = ()

    def _copy_small(self, memory: Any, start: int) -> bool:
        """Copy small payloads without arrays over the memory, which would cost much more; False if impossible."""
        try:
            for (_, _, offset, length), payload in zip(self.layout.places, self.payloads, strict=True):
                offset += start
                if payload.__class__ is list:
                    for array in payload:
                        end = offset + array.nbytes
                        memory[offset:end] = array
                        offset = end
                else:
                    memory[offset : offset + length] = payload
        except ValueError:
            # The array is not contiguous, or Python's buffers do not support its dtype.
            return False
        return True

    def write_reference(self, memory: Memory, start: int, number: int, offset: int) -> int:
        """Write it once without its payloads, and return its length.

        The payloads lie in the batch's record as they would in this one; the first one begins at `offset` there.
        """
        metadata = bytearray(self.layout.metadata)
        *_, tensors, _, _ = layout.RECORD.unpack_from(metadata)
        places = self.layout.places
        for index, place in enumerate(places):
            at = tensors + index * layout.TENSOR.size + layout.TENSOR_PLACE[0]
            begin = offset + place.offset - places[0].offset
            layout.TENSOR_PAYLOAD.pack_into(metadata, at, begin, place.length, layout.TensorSource.BATCH)
        _NUMBER.pack_into(metadata, layout.RECORD_LENGTH_OFFSET, len(metadata))
        self._write_metadata(bytes(metadata), memory, start, number)
        self.payloads = ()
        return len(metadata)

    def write_metadata(self, memory: Memory, start: int, number: int) -> None:
        """Write everything except the payloads, for a peer in this process that gets their addresses."""
        self._write_metadata(self.layout.metadata, memory, start, number)

    @staticmethod
    def _write_metadata(metadata: bytes, memory: Memory, start: int, number: int) -> None:
        memory[start : start + len(metadata)] = metadata
        _NUMBER.pack_into(memory, start + layout.RECORD_BATCH_OFFSET, number)


class Tensor(NamedTuple):
    """A tensor that is to be written."""

    name: str  # the input or output
    owner: int  # the request or response that it belongs to, or `WHOLE_BATCH`
    code: int  # its Triton data type number
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    length: int  # bytes of its payload
    payload: Payload  # what it is made of


def make_tensor(name: str, owner: int, arrays: list[Array]) -> Tensor:
    """Make a tensor of arrays that are joined along axis 0."""
    first = arrays[0]
    shape = first.shape if len(arrays) == 1 else (sum([array.shape[0] for array in arrays]), *first.shape[1:])
    code = code_of(first.dtype)
    payload: Payload = first if len(arrays) == 1 else arrays
    if code == BYTES_CODE:
        payload = b"".join([encode_strings(array) for array in arrays])
        length = len(payload)
    else:
        length = sum([array.nbytes for array in arrays])
    return Tensor(name, owner, code, shape, first.dtype, length, payload)


def make_record(layout: RecordLayout, tensors: Iterable[Tensor]) -> Record:
    """Make a record of the tensors that it was laid out for."""
    return Record(layout, [tensor.payload for tensor in tensors])


class MetadataWriter:
    """Lays out the metadata of one record: entries, tensors, dimensions, parameters, lists of texts, texts."""

    def __init__(
        self,
        magic: int,
        entry_size: int,
        entry_count: int,
        tensors: Sequence[Tensor],
        parameter_count: int,
        list_length: int = 0,
    ) -> None:
        """Find the place of every table."""
        self._magic = magic
        self._entry_count = entry_count
        self._tensors = tensors
        self._tensors_offset = layout.RECORD.size + entry_count * entry_size
        self._dims_offset = self._tensors_offset + len(tensors) * layout.TENSOR.size
        self._parameters_offset = self._dims_offset + 8 * sum([len(tensor.shape) for tensor in tensors])
        self._lists_offset = self._parameters_offset + parameter_count * layout.PARAMETER.size
        self._texts_offset = self._lists_offset + list_length * layout.STRING_REF.size
        self._parameters = bytearray()
        self._lists = bytearray()
        self._texts = bytearray()

    def text(self, value: str) -> tuple[int, int]:
        """Add a text; returns its offset and length."""
        raw = value.encode("utf-8", "surrogateescape")
        if self._magic == layout.RESPONSE_MAGIC:
            raw = raw.replace(b"\0", b"\\0")
        place = (self._texts_offset + len(self._texts), len(raw))
        self._texts += raw + b"\0"
        return place

    def texts(self, values: Iterable[str]) -> int:
        """Add a list of texts; returns its offset."""
        offset = self._lists_offset + len(self._lists)
        for value in values:
            self._lists += layout.STRING_REF.pack(*self.text(value))
        return offset

    def parameters(self, values: Mapping[str, ParameterValue]) -> tuple[int, int]:
        """Add the parameters of an entry; returns their offset and number."""
        place = (self._parameters_offset + len(self._parameters), len(values))
        for name, value in values.items():
            key = self.text(name)
            length = 0
            if isinstance(value, bool):
                kind, bits = layout.ParameterType.BOOL, int(value)
            elif isinstance(value, int):
                kind, bits = layout.ParameterType.INT, value & _BITS
            elif isinstance(value, float):
                kind, bits = layout.ParameterType.DOUBLE, int(_NUMBER.unpack(struct.pack("<d", value))[0])
            else:
                kind = layout.ParameterType.STRING
                bits, length = self.text(value)
            self._parameters += layout.PARAMETER.pack(*key, kind, length, bits)
        return place

    def finish(self, entries: bytearray, received_ns: int = 0, sent_ns: int = 0) -> RecordLayout:
        """Return the layout of the record."""
        names = [self.text(tensor.name) for tensor in self._tensors]
        metadata_length = layout.align(self._texts_offset + len(self._texts))
        if metadata_length > layout.MAX_METADATA:
            raise ProtocolError(
                f"the parameters, names and other texts of the {_KINDS[self._magic]} take {metadata_length} bytes, the "
                f"protocol allows {layout.MAX_METADATA}: send what is so large as a tensor"
            )
        table = bytearray()
        dims = bytearray()
        places = []
        offset = metadata_length
        for (_, owner, code, shape, dtype, length, _), name in zip(self._tensors, names, strict=True):
            place = (self._dims_offset + len(dims), offset, length, layout.TensorSource.RECORD)
            table += layout.TENSOR.pack(*name, code, len(shape), owner, *place)
            dims += struct.pack(f"<{len(shape)}q", *shape)
            places.append(Place(shape, dtype, offset, length))
            offset = layout.align(offset + length)
        header = layout.RECORD.pack(
            self._magic, self._entry_count, len(self._tensors), 0, metadata_length, offset, layout.RECORD.size,
            self._tensors_offset, received_ns, sent_ns,
        )  # fmt: skip
        metadata = b"".join([header, entries, table, dims, self._parameters, self._lists, self._texts])
        payload_bytes = sum([place.length for place in places])
        return RecordLayout(metadata.ljust(metadata_length, b"\0"), offset, payload_bytes, places)
