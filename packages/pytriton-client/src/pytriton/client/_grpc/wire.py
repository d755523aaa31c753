"""The fields of a message of protobuf, told apart without a copy of what is in them."""

from __future__ import annotations

from collections.abc import Iterator

# The wire types of protobuf, and the sizes of those of fixed length.
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}
# No valid length has more bytes.
_MOST_BITS = 35


def fields(data: bytes, at: int = 0) -> Iterator[tuple[int, int, int, int]]:
    """Yield the key of each field, and where it, its content and the next one begin; ``ValueError`` for other data."""
    while at < len(data):
        start = at
        key, at = read_varint(data, at)
        kind, begin, end = key & 7, at, at
        if kind == _VARINT:
            _, end = read_varint(data, at)
        elif kind == _BYTES:
            size, begin = read_varint(data, at)
            end = begin + size
        elif kind in _FIXED:
            end += _FIXED[kind]
        else:
            end = len(data) + 1
        if end > len(data):
            raise ValueError(f"expected fields of protobuf, received {data[start : start + 16]!r} at {start}")
        yield key, start, begin, end
        at = end


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint and where it ends; one that is cut off counts as larger than all messages."""
    number = shift = 0
    while at < len(data) and shift < _MOST_BITS:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    return len(data) + 1, at


def write_varint(number: int) -> bytes:
    """Return a number as a varint."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
