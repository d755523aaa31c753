"""What the accelerator asks of Python: of the batches and the results that look like none before."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ProtocolError
from ..wire.batch import BatchMetadata, BatchReader, Head
from ..wire.layout import ALIGNMENT, RECORD
from ..wire.record import Array, Record
from ..wire.response import lay_out_columns
from .service import Service

# As the accelerator has them.
_MAX_DIMS = 8
_MAX_INPUTS = 32
_MAX_SEEN = 1024


class PlainBatches:
    """Says which batches are plain, and lays their answers out.

    Args:
        service: The callable and its model.
        reader: Reads metadata.
    """

    def __init__(self, service: Service, reader: BatchReader) -> None:
        self._service = service
        self._reader = reader
        self._seen: set[int] = set()  # hashes of looks that came once

    def describe(self, raw: bytes, head: Head) -> tuple[Any, ...] | None:
        """Check the metadata of a record, see `_accelerator.Host`."""
        try:
            metadata = self._reader.metadata(raw, head)
            is_traced = metadata.has_trace()
        except (ProtocolError, TypeError):
            return None  # which Python's way tells of
        wanted = metadata.uniform_outputs
        columns = metadata.columns
        if (
            columns is None
            or wanted is None
            or is_traced
            or len(columns) > _MAX_INPUTS
            or (len(metadata.rows) > 1 and not self._service.model.batching)
        ):
            return None
        gaps = metadata.gaps()
        if not self._is_known(metadata, gaps):
            return None
        inputs = []
        for (name, shape, dtype, offset), tensor in zip(columns, metadata.tensors, strict=True):
            if len(shape) > _MAX_DIMS or 0 in shape or offset % ALIGNMENT:
                return None
            inputs.append((name, shape, dtype, offset, tensor.length))
        _, rows, input_bytes = metadata.size
        return metadata, metadata.rows, rows, input_bytes, tuple(inputs), gaps

    def _is_known(self, metadata: BatchMetadata, gaps: tuple[tuple[int, int], ...]) -> bool:
        """Return whether such metadata came before: many come once, and what is made for them is never used."""
        look = bytearray(metadata.raw[RECORD.size :])
        for offset, length in gaps:
            begin = offset - RECORD.size
            look[begin : begin + length] = bytes(length)
        key = hash((metadata.head, bytes(look)))
        if key in self._seen:
            return True
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return False

    def lay_out(self, metadata: BatchMetadata, result: Any) -> tuple[Any, ...] | None:
        """Check what a callable returned, and lay a record out for it, see `_accelerator.Host`."""
        service = self._service
        assert metadata.uniform_outputs is not None
        names = service.checker.wanted(metadata.uniform_outputs)
        if result.__class__ is list:
            if len(result) != len(metadata.rows):
                return None
            record = service.writer.lay_out_results(result, names, service.checker.fits_results)
            return None if record is None else described(record, names, result, is_list=True)
        if result.__class__ is not dict or service.columns_func is None:
            return None
        record = lay_out_columns(metadata, result, names, service.checker.fits_columns)
        return None if record is None else described(record, names, [result], is_list=False)


def described(
    record: Record, names: tuple[str, ...], results: list[dict[str, Array]], *, is_list: bool
) -> tuple[Any, ...] | None:
    """Return a record that is laid out as the accelerator takes it; `None` where it has to be written in Python."""
    ends = [place.offset for place in record.layout.places]
    pieces = []
    for index, result in enumerate(results):
        for at, name in enumerate(names):
            array: np.ndarray[Any, Any] = result[name]
            if not array.flags.c_contiguous or not array.size or array.ndim > _MAX_DIMS:
                return None
            pieces.append((index, (name, array.shape, array.dtype, ends[at], array.nbytes)))
            ends[at] += array.nbytes
    metadata, length, payload_bytes, _ = record.layout
    return metadata, length, payload_bytes, is_list, tuple(map(len, results)), tuple(pieces)
