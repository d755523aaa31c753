"""Responses of a stream that look like the one before, as most do: they are kept for a moment and go together."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

from ...errors import ArenaFullError
from ...wire import layout
from ...wire.accelerator import accelerator
from ...wire.dtypes import code_of
from ...wire.record import Record, RecordLayout, Tensor
from ...wire.response import ResponseData, ResponseWriter
from ...wire.strings import encode_strings

_MOST_TOGETHER = 64
# In bytes; larger outputs are not copied a second time.
_MOST_BYTES = 1024
_MOST_LAYOUTS = 64


class AlikeResponses:
    """Takes responses to one request that have the outputs, dtypes and shapes of a checked one.

    They are kept as bytes, because a callable may reuse its arrays for the next response.
    """

    __slots__ = ("_layouts", "_looks", "_names", "_native", "_pieces")

    def __init__(self, names: Set[str], outputs: dict[str, np.ndarray[Any, Any]]) -> None:
        self._names = names
        self._looks = [(name, array.dtype, array.shape, array.dtype.kind in "OSUT") for name, array in outputs.items()]
        self._pieces: list[list[bytes]] = []
        self._native = accelerator()
        # Of records with one response, by the lengths of its outputs: where a generator waits, most have one.
        self._layouts: dict[tuple[int, ...], RecordLayout] = {}

    @classmethod
    def of(cls, result: Any, response: ResponseData) -> AlikeResponses | None:
        """Begin with a checked result that was sent unchanged; `None` if no other can be like it."""
        if not _is_plain(result) or response.error is not None or response.parameters or not response.outputs:
            return None
        [given] = result
        # Outputs that have to be cast take the long way each time.
        if any(given[name] is not array for name, array in response.outputs.items()):
            return None
        # They are joined along their first axes, which must exist and be equal for all outputs.
        lengths = {array.shape[:1] for array in response.outputs.values()}
        if len(lengths) > 1 or () in lengths:
            return None
        return cls(frozenset(given), response.outputs)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def is_full(self) -> bool:
        """Whether enough responses are kept to send them."""
        return len(self._pieces) >= _MOST_TOGETHER

    def add(self, result: Any) -> bool:
        """Keep a result; return False, and keep nothing, if it is not alike."""
        if not _is_plain(result):
            return False
        [given] = result
        if given.keys() != self._names:
            return False
        pieces = []
        for name, dtype, shape, has_strings in self._looks:
            array = given.get(name)
            if array.__class__ is not np.ndarray or array.shape != shape or array.dtype != dtype:
                return False
            if array.nbytes > _MOST_BYTES:
                return False
            piece = self._encode(array) if has_strings else array.tobytes()
            if piece is None or len(piece) > _MOST_BYTES:
                return False
            pieces.append(piece)
        self._pieces.append(pieces)
        return True

    def _encode(self, array: np.ndarray[Any, Any]) -> bytes | None:
        """Return the wire form of strings; `None` if they are wrong, which is reported elsewhere."""
        native = self._native
        if native is not None and array.dtype.kind == "O" and array.flags.c_contiguous:
            payload: bytes | None = native.encode_strings(array)
            return payload
        try:
            return encode_strings(array)
        except (TypeError, ValueError):
            return None

    def send(self, writer: ResponseWriter, put: Callable[[Record], None]) -> None:
        """Send the kept responses, in one record if they fit."""
        kept, self._pieces = self._pieces, []
        try:
            put(self._lay_out(writer, kept))
        except ArenaFullError:
            for pieces in kept:
                put(self._lay_out(writer, [pieces]))

    def _lay_out(self, writer: ResponseWriter, pieces: Sequence[Sequence[bytes]]) -> Record:
        count = len(pieces)
        lengths = tuple(map(len, pieces[0]))
        if count == 1 and (known := self._layouts.get(lengths)) is not None:
            return Record(known, pieces[0])
        tensors = []
        for at, (name, dtype, shape, _) in enumerate(self._looks):
            payload = b"".join([each[at] for each in pieces])
            whole = (shape[0] * count, *shape[1:])
            tensors.append(Tensor(name, layout.WHOLE_BATCH, code_of(dtype), whole, dtype, len(payload), payload))
        record = writer.lay_out_alike(count, self._looks[0][2][0], tensors)
        if count == 1 and len(self._layouts) < _MOST_LAYOUTS:
            self._layouts[lengths] = record.layout
        return record


def _is_plain(result: Any) -> bool:
    """Return whether it is one dictionary for one request."""
    return result.__class__ is list and len(result) == 1 and result[0].__class__ is dict
