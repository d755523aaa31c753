"""Reads the responses of one stream, most of which differ from the one before in the bytes of their tensors alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .._core.requests import InferResponse, is_end_of_stream
from .._core.tensors import decode_tensor
from .._core.translate import Operation, server_error
from .calls import check_message, read_infer_response
from .messages import DecodeError, service_pb2
from .wire import fields, read_varint

# The keys of the fields `ModelStreamInferResponse.infer_response` and `ModelInferResponse.raw_output_contents`.
_RESPONSE, _CONTENTS = b"\x12", b"\x32"
_MOST_REMEMBERED = 1 << 16
_MOST_SIZES = 256


class StreamReader:
    """Reads the messages of a stream.

    It parses only the bytes of the tensors if the rest of a message is the same as before.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._head = self._tail = b""
        self._known: InferResponse | None = None
        self._around_texts: dict[int, tuple[bytes, bytes]] = {}
        self._tensors: list[tuple[str, str, tuple[int, ...]]] = []

    def read(self, data: bytes, *, is_followed: bool) -> InferResponse:
        """Return the response in a message; ``is_followed`` says whether the next message has already come."""
        known = self._known
        if known is not None and (contents := self._contents_of(data)) is not None:
            try:
                outputs = {
                    name: decode_tensor(content, datatype, shape)
                    for (name, datatype, shape), content in zip(self._tensors, contents, strict=True)
                }
            except ValueError:
                outputs = None  # the full parser below reports the error
            if outputs is not None:
                return _made(outputs, known, is_followed=is_followed)
        return self._read_anew(data, is_followed=is_followed)

    def read_text(self, data: bytes, name: str) -> bytes | None:
        """Return what an output of strings has in a message: all of them, or nothing if it lacks the output.

        None if the message says only that no other follows.
        """
        size = len(data)
        around = self._around_texts.get(size)
        if around is not None and data.startswith(around[0]) and data.endswith(around[1]):
            return data[len(around[0]) : size - len(around[1])]
        contents = None if self._known is None else self._contents_of(data)
        if contents is not None and self._is_one_string(contents, name):
            if len(self._around_texts) < _MOST_SIZES:
                # In front of the text are all lengths, which are the same in messages of the same size.
                begin = size - len(self._tail) - len(contents[0]) + 4
                self._around_texts[size] = data[:begin], self._tail
            return contents[0][4:]
        response = self._read_anew(data, is_followed=False)
        if is_end_of_stream(response):
            return None
        return b"".join(response.outputs[name].ravel().tolist()) if name in response.outputs else b""

    def _is_one_string(self, contents: Sequence[bytes], name: str) -> bool:
        """Return whether the bytes of a response's tensors are one string, of the output ``name``."""
        if len(contents) != 1 or self._tensors[0][:2] != (name, "BYTES") or math.prod(self._tensors[0][2]) != 1:
            return False
        return len(contents[0]) - 4 == int.from_bytes(contents[0][:4], "little")

    def _read_anew(self, data: bytes, *, is_followed: bool) -> InferResponse:
        try:
            message = service_pb2.ModelStreamInferResponse.FromString(data)
        except DecodeError:
            message = None
        if check_message(self._operation, message).error_message:
            raise server_error(self._operation, None, message.error_message)
        response = read_infer_response(self._operation, message.infer_response)
        self._known = None
        if response.outputs and not response.is_final:
            self._remember(data, message.infer_response, response)
        return _made(response.outputs, response, is_followed=is_followed or response.is_final)

    def _remember(self, data: bytes, message: Any, response: InferResponse) -> None:
        """Keep what is around the bytes of the tensors, where these are one behind the other."""
        if len(data) > _MOST_REMEMBERED:
            return
        size, begin = read_varint(data, 1)
        where = _find_contents(data, begin, len(message.raw_output_contents))
        if data[:1] == _RESPONSE and begin + size == len(data) and where is not None:
            self._head, self._tail = data[begin : where[0]], data[where[1] :]
            self._tensors = [(each.name, each.datatype, tuple(each.shape)) for each in message.outputs]
            # The arrays are left out, because they would live as long as the stream.
            self._known = replace(response, outputs={})

    def _contents_of(self, data: bytes) -> list[bytes] | None:
        """Return the bytes of the tensors of a message that is like the one before apart from them; else None."""
        if data[:1] != _RESPONSE:
            return None
        size, at = read_varint(data, 1)
        if at + size != len(data) or not data.startswith(self._head, at):
            return None
        at += len(self._head)
        contents = []
        for _ in self._tensors:
            if data[at : at + 1] != _CONTENTS:
                return None
            size, at = read_varint(data, at + 1)
            if at + size > len(data):
                return None
            contents.append(data[at : at + size])
            at += size
        return contents if data[at:] == self._tail else None


def _made(outputs: Any, like: InferResponse, *, is_followed: bool) -> InferResponse:
    return InferResponse(
        outputs, like.parameters, like.request_id, like.model_name, like.model_version, like.is_final, is_followed
    )


def _find_contents(data: bytes, at: int, count: int) -> tuple[int, int] | None:
    """Return where the bytes of tensors begin and end among the fields of a response; None if they are apart."""
    begin = end = found = 0
    try:
        for key, start, _, after in fields(data, at):
            if key == _CONTENTS[0]:
                if found and start != end:
                    return None
                begin, end, found = begin or start, after, found + 1
    except ValueError:
        return None
    return (begin, end) if found == count > 0 else None
