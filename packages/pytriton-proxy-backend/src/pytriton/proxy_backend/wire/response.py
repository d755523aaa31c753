"""Response records out: checked answers -> one record in the arena."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytriton.proxy.types import ParameterValue

from ..errors import ProtocolError
from ..transport.arena import OwnedBlock
from . import layout
from .batch import Batch
from .dtypes import BYTES_CODE, code_of
from .strings import encode_strings

Array = np.ndarray[Any, Any]

# A block, the length of the record in it, and the bytes of its payloads.
Written = tuple[OwnedBlock, int, int]

# The metadata of a record (its batch number left 0), where each payload begins, and the record's length.
_Metadata = tuple[bytes, list[int], int]

# A tensor with a payload: its name, shape, dtype and offset in the record.
_Place = tuple[str, tuple[int, ...], np.dtype[Any], int]
# Metadata, the record's length, the bytes of its payloads, and these.
_Form = tuple[bytes, int, int, list[_Place]]

_NUMBER = struct.Struct("<Q")
_MAX_TEMPLATES = 512
_MAX_ERROR_TEXT = 1 << 20


@dataclass
class Answer:
    """One response to one request.

    Attributes:
        request: The request's place in the batch.
        outputs: Its outputs by name.
        parameters: Its response parameters.
        error: The text of the error that it is, instead of outputs.
        code: The error's code.
        final: Whether nothing more comes for the request.
        empty: Whether it only ends the request's stream.
    """

    request: int
    outputs: Mapping[str, Array] = field(default_factory=dict)
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    error: str | None = None
    code: layout.ErrorCode = layout.ErrorCode.INTERNAL
    final: bool = True
    empty: bool = False


class Tensor:
    """One tensor of a record, ready to be written.

    Attributes:
        name: The output.
        code: Its Triton data type number.
        owner: The answer it belongs to, or `WHOLE_BATCH`.
        shape: Its shape.
        length: Bytes of its payload.
        arrays: What it is made of, joined along axis 0.
        strings: The payload of a string tensor.
    """

    __slots__ = ("arrays", "code", "length", "name", "owner", "shape", "strings")

    def __init__(self, name: str, owner: int, shape: tuple[int, ...], arrays: Sequence[Array]) -> None:
        self.name = name
        self.owner = owner
        self.shape = shape
        self.arrays = arrays
        self.strings: bytes | None = None
        dtype = arrays[0].dtype
        self.code = code_of(dtype)
        if self.code == BYTES_CODE:
            self.strings = b"".join([encode_strings(array) for array in arrays])
            self.length = len(self.strings)
        else:
            length = dtype.itemsize
            for dim in shape:
                length *= dim
            self.length = length

    def write(self, memory: mmap.mmap, offset: int) -> None:
        """Write the payload."""
        if self.strings is not None:
            memory[offset : offset + self.length] = self.strings
        elif self.length:
            target: Array = np.ndarray(self.shape, self.arrays[0].dtype, memory, offset)
            if len(self.arrays) == 1:
                target[...] = self.arrays[0]
            else:
                np.concatenate(self.arrays, out=target)


def join(names: Sequence[str], results: Sequence[Mapping[str, Array]]) -> tuple[list[Tensor], list[int]] | None:
    """Join the outputs of several requests over the batch.

    Returns:
        One tensor per name, and the rows of each request; `None` where the outputs do not fit together.
    """
    tensors: list[Tensor] = []
    rows: list[int] = []
    for name in names:
        arrays = [result[name] for result in results]
        first = arrays[0]
        dtype = first.dtype
        tail = first.shape[1:]
        sizes: list[int] = []
        for array in arrays:
            shape = array.shape
            if not shape or shape[1:] != tail or array.dtype != dtype:
                return None
            sizes.append(shape[0])
        if tensors and sizes != rows:
            return None
        rows = sizes
        tensors.append(Tensor(name, layout.WHOLE_BATCH, (sum(sizes), *tail), arrays))
    return (tensors, rows) if tensors else None


class ResponseWriter:
    """Writes the response records of one connection; keeps the metadata of shapes that come again and again."""

    def __init__(self) -> None:
        self._templates: dict[tuple[Any, ...], _Metadata] = {}
        self._forms: dict[tuple[object, ...], _Form] = {}

    def write(self, number: int, answers: Sequence[Answer], allocate: Callable[[int], OwnedBlock]) -> Written:
        """Write a record.

        Args:
            number: The batch that it answers.
            answers: At least one.
            allocate: Gives a block of so many bytes of the arena, or raises.

        Returns:
            The block, the length of the record in it, and the bytes of its payloads.

        Raises:
            ProtocolError: If parameters, names and errors are more than the protocol allows.
        """
        plain = all(answer.error is None and not answer.empty and not answer.parameters for answer in answers)
        joined = None
        if plain and len(answers) > 1:
            names = list(answers[0].outputs)
            if all(answer.outputs.keys() == answers[0].outputs.keys() for answer in answers):
                joined = join(names, [answer.outputs for answer in answers])
        if joined is not None:
            tensors, rows = joined
        else:
            rows = [0] * len(answers)
            tensors = [
                Tensor(name, owner, value.shape, [value])
                for owner, answer in enumerate(answers)
                for name, value in answer.outputs.items()
            ]
        if not plain:
            return self._place(number, tensors, _metadata(answers, rows, tensors), allocate)
        key = (tuple([(answer.request, answer.final) for answer in answers]), tuple(rows), _layout_key(tensors))
        return self._place(number, tensors, self._template(key, lambda: _metadata(answers, rows, tensors)), allocate)

    def write_plain(
        self,
        number: int,
        results: Sequence[dict[str, Array]],
        names: tuple[str, ...],
        fits: Callable[[Sequence[dict[str, Array]], tuple[str, ...]], bool],
        allocate: Callable[[int], OwnedBlock | None],
        make_room: Callable[[int], OwnedBlock | None],
    ) -> Written | None:
        """Write the last answers to all requests of a batch, where they are dictionaries of plain numeric arrays.

        The way that nearly every batch takes: what was checked and laid out for arrays of the same types and shapes
        is not checked and laid out again.

        Args:
            number: The batch that is answered.
            results: The outputs of each request.
            names: The outputs that are wanted.
            fits: Whether the arrays are what the model declares; asked once for results that look alike.
            allocate: Gives a block of so many bytes of the arena, or `None`.
            make_room: Gives it where `allocate` could not, or raises; or `None`, where nothing is to be written.

        Returns:
            As `write`; `None` where that must take each answer by itself.
        """
        look: list[object] = [names]
        for name in names:
            for result in results:
                if result.__class__ is not dict or (array := result.get(name)) is None:
                    return None
                if array.__class__ is not np.ndarray:
                    return None
                look.append((array.dtype, array.shape))
        if not names:
            return None
        look.extend(map(len, results))
        key = tuple(look)
        form = self._forms.get(key)
        if form is None:
            form = _form(names, results, fits)
            if form is None:
                return None
            if len(self._forms) >= _MAX_TEMPLATES:
                self._forms.clear()
            self._forms[key] = form
        metadata, length, payload, tensors = form
        block = allocate(length) or make_room(length)
        if block is None:
            return None
        _, start, memory = block
        memory[start : start + len(metadata)] = metadata
        _NUMBER.pack_into(memory, start + layout.RECORD_BATCH_OFFSET, number)
        for name, shape, dtype, offset in tensors:
            target: Array = np.ndarray(shape, dtype, memory, start + offset)
            if len(results) == 1:
                target[...] = results[0][name]
            else:
                np.concatenate([result[name] for result in results], out=target)
        return block, length, payload

    def write_apart(
        self, number: int, answers: Sequence[Answer], allocate: Callable[[int], OwnedBlock]
    ) -> tuple[Written, list[Tensor]]:
        """Write a record without its payloads, for a peer in this process that is told where they are.

        Args:
            number: The batch that it answers.
            answers: At least one.
            allocate: Gives a block of so many bytes, or raises.

        Returns:
            As `write`, where the length counts the payloads as if they were there; and the tensors in the order of the
            record, each of one array.
        """
        tensors = [
            Tensor(name, owner, value.shape, [value])
            for owner, answer in enumerate(answers)
            for name, value in answer.outputs.items()
        ]
        metadata, _, length = _metadata(answers, [0] * len(answers), tensors)
        block = allocate(len(metadata))
        start = block.offset
        block.memory[start : start + len(metadata)] = metadata
        _NUMBER.pack_into(block.memory, start + layout.RECORD_BATCH_OFFSET, number)
        return (block, length, _payload_bytes(tensors)), tensors

    def _template(self, key: tuple[Any, ...], make: Callable[[], _Metadata]) -> _Metadata:
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            template = self._templates[key] = make()
        return template

    def _place(
        self, number: int, tensors: Sequence[Tensor], template: _Metadata, allocate: Callable[[int], OwnedBlock]
    ) -> Written:
        metadata, offsets, length = template
        block = allocate(length)
        memory = block.memory
        start = block.offset
        memory[start : start + len(metadata)] = metadata
        _NUMBER.pack_into(memory, start + layout.RECORD_BATCH_OFFSET, number)
        for tensor, offset in zip(tensors, offsets, strict=True):
            tensor.write(memory, start + offset)
        return block, length, _payload_bytes(tensors)


def write_whole(
    batch: Batch,
    outputs: dict[str, Array],
    names: tuple[str, ...],
    fits: Callable[[dict[str, Array], tuple[str, ...]], bool],
    allocate: Callable[[int], OwnedBlock | None],
    make_room: Callable[[int], OwnedBlock | None],
) -> Written | None:
    """Write the last answers to all requests of a batch, where they are numeric arrays over the whole batch.

    The shortest way there is: a batch and outputs that look like earlier ones are written without a further look.

    Args:
        batch: The batch that is answered.
        outputs: Its outputs, each of shape `(rows of all requests, *tensor.shape)`.
        names: The outputs that are wanted.
        fits: Whether the arrays are what the model declares; asked once for outputs that look alike.
        allocate: Gives a block of so many bytes of the arena, or `None`.
        make_room: Gives it where `allocate` could not, or raises; or `None`, where nothing is to be written.

    Returns:
        The block, the length of the record in it, and the bytes of its payloads; `None` where the outputs have to be
        looked at one by one.
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
    form: _Form | None = batch.forms.get(key)
    if form is None:
        rows = batch.rows
        if not names or not fits(outputs, names) or any(array.shape[:1] != (sum(rows),) for array in arrays):
            return None
        tensors = [
            Tensor(name, layout.WHOLE_BATCH, array.shape, [array]) for name, array in zip(names, arrays, strict=True)
        ]
        metadata, offsets, length = _metadata([Answer(index) for index in range(len(rows))], rows, tensors)
        if len(batch.forms) >= _MAX_TEMPLATES:
            batch.forms.clear()
        form = batch.forms[key] = metadata, length, _payload_bytes(tensors), _placed(tensors, offsets)
    metadata, length, payload, placed = form
    block = allocate(length) or make_room(length)
    if block is None:
        return None
    _, start, memory = block
    memory[start : start + len(metadata)] = metadata
    _NUMBER.pack_into(memory, start + layout.RECORD_BATCH_OFFSET, batch.number)
    for name, shape, dtype, offset in placed:
        target: Array = np.ndarray(shape, dtype, memory, start + offset)
        target[...] = outputs[name]
    return block, length, payload


def _payload_bytes(tensors: Sequence[Tensor]) -> int:
    return sum([tensor.length for tensor in tensors])


def _placed(tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[_Place]:
    return [
        (tensor.name, tensor.shape, tensor.arrays[0].dtype, offset)
        for tensor, offset in zip(tensors, offsets, strict=True)
        if tensor.length
    ]


def _form(
    names: tuple[str, ...],
    results: Sequence[dict[str, Array]],
    fits: Callable[[Sequence[dict[str, Array]], tuple[str, ...]], bool],
) -> _Form | None:
    if not fits(results, names):
        return None
    joined = join(names, results)
    if joined is None or any(tensor.strings is not None for tensor in joined[0]):
        return None
    tensors, rows = joined
    metadata, offsets, length = _metadata([Answer(index) for index in range(len(rows))], rows, tensors)
    return metadata, length, _payload_bytes(tensors), _placed(tensors, offsets)


def _layout_key(tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], ...]:
    return tuple([(tensor.name, tensor.code, tensor.owner, tensor.shape, tensor.length) for tensor in tensors])


def _metadata(answers: Sequence[Answer], rows: Sequence[int], tensors: Sequence[Tensor]) -> _Metadata:
    entries_offset = layout.RECORD.size
    tensors_offset = entries_offset + len(answers) * layout.RESPONSE.size
    dims_offset = tensors_offset + len(tensors) * layout.TENSOR.size
    parameters_offset = dims_offset + 8 * sum(len(tensor.shape) for tensor in tensors)
    parameter_count = sum(len(answer.parameters) for answer in answers)
    texts = bytearray()
    texts_offset = parameters_offset + parameter_count * layout.PARAMETER.size

    def text(value: str | bytes) -> tuple[int, int]:
        raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
        raw = raw.replace(b"\0", b"\\0")
        place = (texts_offset + len(texts), len(raw))
        texts.extend(raw)
        texts.append(0)
        return place

    entries = bytearray()
    parameters = bytearray()
    for answer, row in zip(answers, rows, strict=True):
        flags = layout.ResponseFlag(0)
        error = (0, 0)
        if answer.final:
            flags |= layout.ResponseFlag.FINAL
        if answer.empty:
            flags |= layout.ResponseFlag.EMPTY
        if answer.error is not None:
            flags |= layout.ResponseFlag.ERROR
            error = text(answer.error[:_MAX_ERROR_TEXT])
        place = parameters_offset + len(parameters)
        for name, value in answer.parameters.items():
            parameters += _parameter(text(name), value, text)
        entries += layout.RESPONSE.pack(answer.request, flags, row, answer.code, *error, place, len(answer.parameters))
    dims = b"".join(struct.pack(f"<{len(tensor.shape)}q", *tensor.shape) for tensor in tensors)
    names = [text(tensor.name) for tensor in tensors]
    metadata_length = layout.align(texts_offset + len(texts))
    if metadata_length > layout.MAX_METADATA:
        raise ProtocolError(
            f"the parameters, names and errors of the responses take {metadata_length} bytes, the protocol allows "
            f"{layout.MAX_METADATA}: send what is so large as an output"
        )
    table = bytearray()
    offsets: list[int] = []
    dims_at = dims_offset
    payload_at = metadata_length
    for tensor, name_place in zip(tensors, names, strict=True):
        table += layout.TENSOR.pack(
            *name_place, tensor.code, len(tensor.shape), tensor.owner, dims_at, payload_at, tensor.length
        )
        offsets.append(payload_at)
        dims_at += 8 * len(tensor.shape)
        payload_at = layout.align(payload_at + tensor.length)
    header = layout.RECORD.pack(
        layout.RESPONSE_MAGIC,
        len(answers),
        len(tensors),
        0,
        metadata_length,
        payload_at,
        entries_offset,
        tensors_offset,
        0,
        0,
    )
    metadata = b"".join([header, entries, table, dims, parameters, texts])
    return metadata.ljust(metadata_length, b"\0"), offsets, payload_at


def _parameter(key: tuple[int, int], value: ParameterValue, text: Callable[[str | bytes], tuple[int, int]]) -> bytes:
    if isinstance(value, bool):
        return layout.PARAMETER.pack(*key, layout.ParameterType.BOOL, 0, int(value))
    if isinstance(value, int):
        return layout.PARAMETER.pack(*key, layout.ParameterType.INT, 0, value & 0xFFFFFFFFFFFFFFFF)
    if isinstance(value, float):
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        return layout.PARAMETER.pack(*key, layout.ParameterType.DOUBLE, 0, bits)
    offset, length = text(value)
    return layout.PARAMETER.pack(*key, layout.ParameterType.STRING, length, offset)
