"""Triton's wire form of string tensors: for every element, in C order, its length (32 bits) and its bytes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .accelerator import accelerator

_LENGTH = struct.Struct("<I")
_MAX_ELEMENT = 0xFFFFFFFF


def decode_strings(payload: bytes, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Decode a BYTES tensor."""
    count = 1
    for dim in shape:
        count *= dim
    native = accelerator()
    # This check comes before memory is taken.
    if native is not None and count * 4 <= len(payload):
        array = np.empty(count, dtype=object)
        if native.fill_strings(array, payload):
            return array.reshape(shape)
        # The loop below finds what is wrong.
    elements: list[bytes] = []
    append = elements.append
    unpack = _LENGTH.unpack_from
    at = 0
    end = len(payload)
    # `WrongStrings` in native/proxy/wire/record.cc says the same.
    for index in range(count):
        if at + 4 > end:
            raise ValueError(f"string {index} of {count}: expected 4 bytes for its length, got {end - at}")
        size = unpack(payload, at)[0]
        at += 4
        if at + size > end:
            raise ValueError(f"string {index} of {count}: expected {size} bytes, as its length says, got {end - at}")
        append(payload[at : at + size])
        at += size
    if at != end:
        raise ValueError(f"expected nothing behind its {count} strings, got {end - at} bytes")
    array = np.empty(count, dtype=object)
    # Element by element, because numpy would search a list of bytes for a string dtype first.
    array[:] = elements
    return array.reshape(shape)


def encode_strings(array: np.ndarray[Any, Any]) -> bytes:
    """Encode a string array of kind `O` (elements `bytes` or `str`), `S`, `U` or `T`; text becomes UTF-8.

    Trailing NUL bytes of `S` elements are lost, as numpy itself does not keep them.
    """
    flat = array.ravel(order="C")
    native = accelerator()
    if native is not None and flat.dtype == object and flat.__class__ is np.ndarray:
        payload: bytes | None = native.encode_strings(flat)
        if payload is not None:
            return payload
        # There are elements other than bytes and str, or no strings at all.
    parts: list[bytes] = []
    append = parts.append
    pack = _LENGTH.pack
    for index, element in enumerate(flat.tolist()):
        if isinstance(element, str):  # numpy.str_ is a str, too
            element = element.encode("utf-8")
        elif not isinstance(element, (bytes, bytearray)):
            raise TypeError(
                f"element {index} of an array of strings must be bytes or str, got {type(element).__name__}"
            )
        if len(element) > _MAX_ELEMENT:
            raise ValueError(f"element {index} has {len(element)} bytes; a string element must stay below 4 GiB")
        append(pack(len(element)))
        append(element)
    return b"".join(parts)
