"""Response records out: checked answers -> one record in the arena."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..proxy.types import ParameterValue
from . import _layout as layout
from ._arena import OwnedBlock
from ._dtypes import BYTES_CODE, code_of
from ._strings import encode_strings

Array = np.ndarray[Any, Any]

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


@dataclass
class _Tensor:
    name: str
    code: int
    owner: int
    shape: tuple[int, ...]
    length: int
    arrays: Sequence[Array]  # joined along axis 0
    strings: bytes | None = None


def _tensor(name: str, owner: int, shape: tuple[int, ...], arrays: Sequence[Array]) -> _Tensor:
    code = code_of(arrays[0].dtype)
    if code == BYTES_CODE:
        strings = b"".join(encode_strings(array) for array in arrays)
        return _Tensor(name, code, owner, shape, len(strings), arrays, strings)
    length = arrays[0].itemsize
    for dim in shape:
        length *= dim
    return _Tensor(name, code, owner, shape, length, arrays)


def _columns(answers: Sequence[Answer]) -> tuple[list[_Tensor], list[int]] | None:
    """All outputs joined over the batch, and the rows of each answer; `None` where they do not fit together."""
    first = answers[0].outputs
    names = list(first)
    rows: list[int] = []
    for answer in answers:
        outputs = answer.outputs
        if len(outputs) != len(names):
            return None
        row = -1
        for name in names:
            value = outputs.get(name)
            if value is None or value.ndim == 0:
                return None
            model = first[name]
            if value.dtype != model.dtype or value.shape[1:] != model.shape[1:] or row not in (-1, value.shape[0]):
                return None
            row = value.shape[0]
        rows.append(max(row, 0))
    total = sum(rows)
    tensors = [
        _tensor(name, layout.WHOLE_BATCH, (total, *first[name].shape[1:]), [answer.outputs[name] for answer in answers])
        for name in names
    ]
    return tensors, rows


class ResponseWriter:
    """Writes the response records of one connection; keeps the metadata of shapes that come again and again."""

    def __init__(self) -> None:
        self._templates: dict[tuple[Any, ...], tuple[bytes, list[int], int]] = {}

    def write(
        self, number: int, answers: Sequence[Answer], allocate: Callable[[int], OwnedBlock]
    ) -> tuple[OwnedBlock, int]:
        """Writes a record.

        Args:
            number: The batch that it answers.
            answers: At least one.
            allocate: Gives a block of so many bytes of the arena, or raises.

        Returns:
            The block and the length of the record in it.
        """
        joined = None
        plain = all(answer.error is None and not answer.empty and not answer.parameters for answer in answers)
        if len(answers) > 1 and plain:
            joined = _columns(answers)
        if joined is not None:
            tensors, rows = joined
        else:
            rows = [0] * len(answers)
            tensors = [
                _tensor(name, owner, value.shape, [value])
                for owner, answer in enumerate(answers)
                for name, value in answer.outputs.items()
            ]
        if plain:
            key = (
                tuple((answer.request, answer.final) for answer in answers),
                tuple(rows),
                tuple((tensor.name, tensor.code, tensor.owner, tensor.shape, tensor.length) for tensor in tensors),
            )
            template = self._templates.get(key)
            if template is None:
                if len(self._templates) >= _MAX_TEMPLATES:
                    self._templates.clear()
                template = self._templates[key] = _metadata(answers, rows, tensors)
        else:
            template = _metadata(answers, rows, tensors)
        metadata, offsets, length = template

        block = allocate(length)
        memory = block.memory
        start = block.offset
        memory[start : start + len(metadata)] = metadata
        struct.pack_into("<Q", memory, start + layout.RECORD_BATCH_OFFSET, number)
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.strings is not None:
                memory[start + offset : start + offset + tensor.length] = tensor.strings
            elif tensor.length:
                target: Array = np.ndarray(tensor.shape, tensor.arrays[0].dtype, memory, start + offset)
                if len(tensor.arrays) == 1:
                    target[...] = tensor.arrays[0]
                else:
                    np.concatenate(tensor.arrays, out=target)
        return block, length


def _metadata(
    answers: Sequence[Answer], rows: Sequence[int], tensors: Sequence[_Tensor]
) -> tuple[bytes, list[int], int]:
    """The metadata of a record (its batch number left 0), where each payload begins, and the record's length."""
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
        entries += layout.RESPONSE.pack(
            answer.request, flags, row, answer.code, *error, place, len(answer.parameters)
        )
    dims = b"".join(struct.pack(f"<{len(tensor.shape)}q", *tensor.shape) for tensor in tensors)
    names = [text(tensor.name) for tensor in tensors]
    metadata_length = layout.align(texts_offset + len(texts))
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
        layout.RESPONSE_MAGIC, len(answers), len(tensors), 0, metadata_length, payload_at, entries_offset, tensors_offset
    )
    metadata = b"".join([header, entries, table, dims, parameters, texts])
    return metadata.ljust(metadata_length, b"\0"), offsets, payload_at


def _parameter(
    key: tuple[int, int], value: ParameterValue, text: Callable[[str | bytes], tuple[int, int]]
) -> bytes:
    if isinstance(value, bool):
        return layout.PARAMETER.pack(*key, layout.ParameterType.BOOL, 0, int(value))
    if isinstance(value, int):
        return layout.PARAMETER.pack(*key, layout.ParameterType.INT, 0, value & 0xFFFFFFFFFFFFFFFF)
    if isinstance(value, float):
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        return layout.PARAMETER.pack(*key, layout.ParameterType.DOUBLE, 0, bits)
    offset, length = text(value)
    return layout.PARAMETER.pack(*key, layout.ParameterType.STRING, length, offset)
