"""Triton's names of data types and numpy's: the one table, and bfloat16, which numpy itself lacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..exceptions import PyTritonClientError

_DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.bytes_,
}
_DATATYPES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def dtype_of(datatype: str) -> type[np.generic]:
    """Return the numpy scalar type for a data type of the protocol or of a model configuration."""
    name = datatype.removeprefix("TYPE_")
    if name == "STRING":
        name = "BYTES"
    if name == "BF16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise PyTritonClientError(
                "The model uses BF16 tensors, for which numpy has no type of its own. Install the ml_dtypes package."
            ) from error
        bfloat16: type[np.generic] = ml_dtypes.bfloat16
        return bfloat16
    try:
        return _DTYPES[name]
    except KeyError as error:
        known = ", ".join([*_DTYPES, "BF16"])
        raise PyTritonClientError(f"Expected one of the data types {known}; received {datatype[:80]!r}.") from error


def datatype_of(dtype: Any) -> str | None:
    """Return the data type of the protocol for a numpy type, or ``None`` if it has none."""
    known = np.dtype(dtype)
    if known.kind in "SUOT":
        return "BYTES"
    if known.name == "bfloat16":
        return "BF16"
    return _DATATYPES.get(known.newbyteorder("="))
