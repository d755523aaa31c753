"""Triton's data types and numpy's: the table between them, and the conversion of bfloat16, which numpy lacks."""

from __future__ import annotations

import importlib
from typing import Any, Final

import numpy as np

from pytriton.inprocess.capi.enums import DataType

Array = np.ndarray[Any, np.dtype[Any]]

NUMPY_TYPES: Final[dict[DataType, np.dtype[Any]]] = {
    DataType.BOOL: np.dtype(np.bool_),
    DataType.UINT8: np.dtype(np.uint8),
    DataType.UINT16: np.dtype(np.uint16),
    DataType.UINT32: np.dtype(np.uint32),
    DataType.UINT64: np.dtype(np.uint64),
    DataType.INT8: np.dtype(np.int8),
    DataType.INT16: np.dtype(np.int16),
    DataType.INT32: np.dtype(np.int32),
    DataType.INT64: np.dtype(np.int64),
    DataType.FP16: np.dtype(np.float16),
    DataType.FP32: np.dtype(np.float32),
    DataType.FP64: np.dtype(np.float64),
    # numpy has no bfloat16, so arrays hold its bits.
    DataType.BF16: np.dtype(np.uint16),
    # Strings have any length, so arrays hold their wire form, one byte per element.
    DataType.BYTES: np.dtype(np.uint8),
}
"""The dtype of the array that holds the memory of a tensor of each type."""

_BY_KIND: Final = {
    (dtype.kind, dtype.itemsize): data_type
    for data_type, dtype in NUMPY_TYPES.items()
    if data_type not in (DataType.BF16, DataType.BYTES)
}

_DLPACK_CODES: Final = {"i": 0, "u": 1, "f": 2, "b": 6}
_DLPACK_BFLOAT: Final = 4

DLPACK_TYPES: Final[dict[DataType, tuple[int, int]]] = {
    **{
        data_type: (_DLPACK_CODES[dtype.kind], dtype.itemsize * 8)
        for data_type, dtype in NUMPY_TYPES.items()
        if data_type is not DataType.BYTES
    },
    DataType.BF16: (_DLPACK_BFLOAT, 16),
}
"""Code and bits of each type in DLPack."""

_OF_DLPACK: Final = {code: data_type for data_type, code in DLPACK_TYPES.items()}

BIT_WIDTHS: Final = {data_type: dtype.itemsize * 8 for data_type, dtype in NUMPY_TYPES.items()}


def data_type_of(dtype: np.dtype[Any]) -> DataType | None:
    """Return the data type of arrays of a numpy dtype, of either byte order; `None` if Triton has no such type."""
    kind = dtype.kind
    if kind in "OSUT":
        return DataType.BYTES
    if kind == "V" or dtype.name == "bfloat16":
        # Compared by name, so that ml_dtypes, which is optional, is not imported.
        return DataType.BF16 if dtype.name == "bfloat16" and dtype.itemsize == 2 else None
    return _BY_KIND.get((kind, dtype.itemsize))


def data_type_of_dlpack(code: int, bits: int, lanes: int) -> DataType | None:
    """Return the data type of a DLPack tensor; `None` if Triton has no such type."""
    return _OF_DLPACK.get((code, bits)) if lanes == 1 else None


def bfloat16_bits(values: Array) -> Array:
    """Round values to the bits of bfloat16, to the nearest, and to even if two are equally near."""
    single = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = single.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    # Rounding could turn a NaN into infinity.
    return np.asarray(np.where(np.isnan(single), ((bits >> 16) | 0x40).astype(np.uint16), rounded))


def bfloat16_values(bits: Array) -> Array:
    """Return the values of bfloat16 bits: `ml_dtypes.bfloat16` on the same memory if installed, else `float32`."""
    try:
        bfloat16 = importlib.import_module("ml_dtypes").bfloat16
    except ImportError:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(bfloat16)
