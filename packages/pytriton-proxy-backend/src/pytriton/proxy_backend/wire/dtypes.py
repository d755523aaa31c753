"""Triton's data types and numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np

BYTES_CODE = 13
BF16_CODE = 14
BF16_BITS: np.dtype[Any] = np.dtype([("bfloat16", "<u2")])
"""The dtype of BF16 tensors after `carry_bf16_bits`."""

_NUMPY_OF_CODE: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {
        1: "bool",
        2: "uint8",
        3: "uint16",
        4: "uint32",
        5: "uint64",
        6: "int8",
        7: "int16",
        8: "int32",
        9: "int64",
        10: "float16",
        11: "float32",
        12: "float64",
        BYTES_CODE: "object",
    }.items()
}
_CODE_OF_NUMPY = {dtype: code for code, dtype in _NUMPY_OF_CODE.items()}


# The objects that want BF16 tensors as bits.
_carriers: set[object] = set()


def carry_bf16_bits(carrier: object) -> None:
    """Make BF16 tensors arrays of `BF16_BITS` in this process until `carrier` calls `release_bf16_bits`."""
    _carriers.add(carrier)
    _NUMPY_OF_CODE[BF16_CODE] = BF16_BITS


def release_bf16_bits(carrier: object) -> None:
    """Give BF16 tensors numpy's type again, unless another object wants bits."""
    _carriers.discard(carrier)
    if not _carriers:
        _NUMPY_OF_CODE.pop(BF16_CODE, None)


def dtype_of(code: int) -> np.dtype[Any]:
    """Return the numpy dtype of a Triton data type number; `object` (of `bytes`) for strings."""
    dtype = _NUMPY_OF_CODE.get(code)
    if dtype is not None:
        return dtype
    if code == BF16_CODE:
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(
                "a BF16 tensor needs the package 'ml_dtypes', which is not installed where the worker runs: "
                "pip install ml_dtypes"
            ) from None
        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        _NUMPY_OF_CODE[code] = bfloat16
        return bfloat16
    raise TypeError(f"Triton's data type number {code} has no numpy type")


def code_of(dtype: np.dtype[Any]) -> int:
    """Return the Triton data type number of a numpy dtype; strings of any kind (`O`, `S`, `U`, `T`) are BYTES."""
    code = _CODE_OF_NUMPY.get(dtype)
    if code is not None:
        return code
    if dtype.kind in "SUT":
        return BYTES_CODE
    if dtype.name == "bfloat16" or dtype == BF16_BITS:
        return BF16_CODE
    if not dtype.isnative:
        raise TypeError(
            f"numpy's dtype {dtype} has not this machine's byte order, which is what is sent: "
            f"array.astype(array.dtype.newbyteorder('=')) converts it"
        )
    raise TypeError(f"numpy's dtype {dtype} has no counterpart among Triton's data types")
