"""Tensors in Triton's binary format: numbers in row-major order, strings each with its length in front."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import dtype_of

_LENGTH = struct.Struct("<I")


def encode_tensor(array: npt.NDArray[Any], datatype: str) -> bytes:
    """Return the bytes of a tensor."""
    if datatype != "BYTES":
        return array.tobytes()
    pieces: list[bytes] = []
    for element in array.ravel().tolist():
        pieces += (_LENGTH.pack(len(element)), element)
    return b"".join(pieces)


def decode_tensor(
    data: bytes | memoryview, datatype: str, shape: Sequence[int], *, may_share: bool = False
) -> npt.NDArray[Any]:
    """Return a tensor as an array that the caller may keep and change; strings are an object array of ``bytes``."""
    count = math.prod(shape)
    if datatype == "BYTES":
        # Each string takes at least its length field, so no more memory is taken than the bytes justify.
        if count > len(data) // _LENGTH.size:
            raise ValueError(f"expected {count} strings, received {len(data)} bytes")
        return _decode_strings(bytes(data), count).reshape(shape)
    dtype = np.dtype(dtype_of(datatype))
    if count * dtype.itemsize != len(data):
        raise ValueError(
            f"expected {count * dtype.itemsize} bytes of {datatype} for the shape {list(shape)}, received {len(data)}"
        )
    if may_share:
        view = np.frombuffer(data, dtype)
        if view.flags.writeable and view.flags.aligned:
            return view.reshape(shape)
    # A bytearray, because an array on bytes could not be written to.
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def _decode_strings(data: bytes, count: int) -> npt.NDArray[Any]:
    strings = np.empty(count, dtype=object)
    if count == 1 and _LENGTH.unpack_from(data)[0] == len(data) - _LENGTH.size:
        strings[0] = data[_LENGTH.size :]  # a short way for streams of text, which consist of single strings
        return strings
    position = 0
    for index in range(count):
        if position + _LENGTH.size > len(data):
            raise ValueError(f"expected {count} strings, received {index}")
        start = position + _LENGTH.size
        position = start + _LENGTH.unpack_from(data, position)[0]
        strings[index] = data[start:position]
    if position != len(data):
        raise ValueError(f"expected {position} bytes of {count} strings, received {len(data)}")
    return strings
