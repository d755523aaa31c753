"""What the accelerator asks of Python: of the batches and the results that look like none before."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ProtocolError
from ..wire.batch import BatchMetadata, BatchReader, Head
from ..wire.layout import ALIGNMENT
from ..wire.limits import ACCELERATED_DIMS
from ..wire.record import Array, Record
from ..wire.response import lay_out_columns
from .service import Service

_MAX_INPUTS = 32
_MAX_SEEN = 1024


class PlainBatches:
    """Recognises plain batches, and lays out their answers."""

    def __init__(self, service: Service, reader: BatchReader, *, record_limit: int = 0, payload_limit: int = 0) -> None:
        self._service = service
        self._reader = reader
        self._record_limit = record_limit
        self._payload_limit = payload_limit
        self._seen: set[int] = set()  # hashes of batch layouts that came once

    def describe(self, raw: bytes, head: Head) -> tuple[Any, ...] | None:
        """Check the metadata of a record, see `_accelerator.Host`."""
        record_length = head[2]
        if self._record_limit and record_length >= self._record_limit:
            return None
        try:
            metadata = self._reader.metadata(raw, head)
            is_traced = metadata.has_trace()
        except (ProtocolError, TypeError):
            return None  # Python reports the error
        columns = metadata.columns
        if (
            columns is None
            or metadata.uniform_outputs is None
            or is_traced
            or len(columns) > _MAX_INPUTS
            or (len(metadata.rows) > 1 and not self._service.model.batching)
        ):
            return None
        fixed, texts = metadata.fixed()
        if not self._is_known(metadata, fixed):
            return None
        for _, shape, _, offset in columns:
            if len(shape) > ACCELERATED_DIMS or 0 in shape or offset % ALIGNMENT:
                return None
        inputs = tuple((name, shape, dtype, dtype.itemsize) for name, shape, dtype, _ in columns)
        return metadata, inputs, fixed, texts, int(self._reader.batching), self._record_limit

    def _is_known(self, metadata: BatchMetadata, fixed: tuple[tuple[int, int], ...]) -> bool:
        """Return whether such metadata came before, because forms made for single batches are never used."""
        raw = metadata.raw
        names = tuple(tensor.name for tensor in metadata.tensors)
        key = hash((metadata.uniform_outputs, names, b"".join([raw[at : at + length] for at, length in fixed])))
        if key in self._seen:
            return True
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return False

    def metadata_of(self, metadata: BatchMetadata, raw: bytes | None, resized: int) -> BatchMetadata:
        """Return the metadata of a batch that looks like an earlier one; without `raw`, those of the earlier one."""
        if raw is None:
            return metadata
        return metadata.for_record(raw, resized=bool(resized))

    def lay_out(self, metadata: BatchMetadata, raw: bytes | None, resized: int, result: Any) -> tuple[Any, ...] | None:
        """Check the result of a callable, and lay out a record for it, see `_accelerator.Host`."""
        service = self._service
        metadata = self.metadata_of(metadata, raw, resized)
        assert metadata.uniform_outputs is not None
        names = service.checker.wanted(metadata.uniform_outputs)
        if result.__class__ is list:
            if len(result) != len(metadata.rows):
                return None
            record = service.writer.lay_out_results(result, names, service.checker.fits_results)
            results = result
        elif result.__class__ is dict and service.columns_func is not None:
            record = lay_out_columns(metadata, result, names, service.checker.fits_columns)
            results = [result]
        else:
            return None
        if record is None or (self._payload_limit and record.layout.payload_bytes >= self._payload_limit):
            return None
        is_list = result.__class__ is list
        pieces = _pieces(record, names, results)
        if pieces is None:
            return None
        # Over the whole batch, the rows are those of the requests; a model without batching has none.
        shapes = service.checker.shapes(results, names) if is_list or self._reader.batching else None
        head, length, payload_bytes, _ = record.layout
        return head, length, payload_bytes, is_list, tuple(map(len, results)), pieces, shapes, self._payload_limit


def _pieces(record: Record, names: tuple[str, ...], results: list[dict[str, Array]]) -> tuple[Any, ...] | None:
    """Return where each array goes; `None` if Python has to write the record."""
    ends = [place.offset for place in record.layout.places]
    pieces = []
    for index, result in enumerate(results):
        for at, name in enumerate(names):
            array: np.ndarray[Any, Any] = result[name]
            if not array.flags.c_contiguous or not array.size or array.ndim > ACCELERATED_DIMS:
                return None
            pieces.append((index, name, array.shape, array.dtype, ends[at], array.nbytes))
            ends[at] += array.nbytes
    return tuple(pieces)
