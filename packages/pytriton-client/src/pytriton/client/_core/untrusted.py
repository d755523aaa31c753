"""Validation of data from a server, before memory is allocated for it or code relies on it.

The checks raise ``ValueError`` with what was expected and what was received. ``UNREADABLE`` has all classes of errors
that decoding an invalid answer can raise, for the code that converts them.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import dtype_of

DEFAULT_MAX_RESPONSE_BYTES = 4 << 30
"""The default limit of the bytes of one response."""

MOST_ERROR_BYTES = 1 << 20
"""Longer bodies of errors are shown without being parsed: parsed JSON takes many times its size in memory."""

# numpy, json and Python raise these for invalid values. OverflowError is an ArithmeticError.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)

_LONGEST_TEXT = 8000
_MOST_AXES = 32  # the most that every version of numpy supports
_MOST_LENGTH = 2**63 - 1
_JSON_TYPES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}, "V": {int, float}}

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 200


def parse_json(data: bytes | bytearray | str) -> Any:
    """Parse JSON."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("the JSON nests too deep") from error


def describe(value: object) -> str:
    """Return a short text for any value, however deep or large it is."""
    return _repr.repr(value)


def cut_text(text: str) -> str:
    """Return a text, without its middle if it is very long."""
    left_out = len(text) - _LONGEST_TEXT
    if left_out <= 0:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]} ... ({left_out} characters are left out here) ... {text[-half:]}"


def find_error_text(body: bytes | memoryview) -> str:
    """Return the text in the body of an error, cut: the member ``error`` of a JSON object, else the whole body."""
    if len(body) > MOST_ERROR_BYTES:
        half = 4 * _LONGEST_TEXT
        return cut_text(str(bytes(body[:half]) + bytes(body[-half:]), "utf-8", errors="replace"))
    text = str(body, "utf-8", errors="replace")
    try:
        content = parse_json(text)
        if isinstance(content, dict) and "error" in content:
            said = content["error"]
            text = said if isinstance(said, str) else describe(said)
    except ValueError:
        return cut_text(text)
    return cut_text(text)


def check_shape(shape: object) -> tuple[int, ...]:
    """Return the shape of a received tensor."""
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes)):
        # Protobuf's own lists are sequences, too.
        raise ValueError(f"expected a list of lengths as the shape, received {describe(shape)}")
    if len(shape) > _MOST_AXES:
        raise ValueError(f"expected a shape of at most {_MOST_AXES} axes, received {len(shape)}")
    lengths = tuple(shape)
    if not all(type(length) is int and 0 <= length <= _MOST_LENGTH for length in lengths):
        raise ValueError(f"expected whole numbers of at least 0 in the shape, received {describe(list(lengths))}")
    return lengths


def array_from_json(elements: object, datatype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Return the tensor whose elements JSON gives in lists; strings are an object array of ``bytes``."""
    flat = _flatten(elements)
    if len(flat) != math.prod(shape):
        raise ValueError(f"expected {math.prod(shape)} elements for the shape {list(shape)}, received {len(flat)}")
    if datatype == "BYTES":
        _check_types(flat, {str}, datatype)
        strings = np.empty(len(flat), dtype=object)
        # Bytes that are not UTF-8 were read as surrogates; they become bytes again here.
        strings[:] = [text.encode("utf-8", errors="surrogateescape") for text in flat]
        return strings.reshape(shape)
    dtype: np.dtype[Any] = np.dtype(dtype_of(datatype))
    _check_types(flat, _JSON_TYPES[dtype.kind], datatype)
    if dtype.kind in "iu" and flat:
        # numpy 1 would wrap what the type cannot hold.
        limits = np.iinfo(dtype)
        if min(flat) < limits.min or max(flat) > limits.max:
            raise ValueError(f"expected numbers of the type {datatype}, received one that it cannot hold")
    try:
        with np.errstate(over="raise"):
            return np.array(flat, dtype=dtype).reshape(shape)
    except ArithmeticError as error:
        raise ValueError(f"expected numbers of the type {datatype}, received one that it cannot hold") from error


def _flatten(elements: object) -> list[Any]:
    if not isinstance(elements, list):
        raise ValueError(f"expected a list of elements, received {describe(elements)}")
    while elements and any(isinstance(element, list) for element in elements):
        if not all(isinstance(element, list) for element in elements):
            raise ValueError(f"expected elements, or lists of them, received both: {describe(elements)}")
        elements = [inner for element in elements for inner in element]
    return elements


def _check_types(flat: list[Any], allowed: set[type], datatype: str) -> None:
    if not allowed.issuperset(map(type, flat)):
        wrong = next(element for element in flat if type(element) not in allowed)
        raise ValueError(f"expected elements of the type {datatype}, received {describe(wrong)}")


def check_parameters(parameters: object) -> Mapping[str, Any]:
    """Return the parameters of a response; none where they are left out."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"expected an object of parameters, received {describe(parameters)}")
    return parameters
