"""Conversion of the inputs that a user passes to arrays of the types that the model declares."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..exceptions import PyTritonClientInputError
from .options import Casting
from .spec import TensorSpec

# How the hints of values begin that travel as the text of JSON.
_OBJECT, _LIST_OF_OBJECTS = "dict", "list[dict"
_FILL = "Fill them, such as by value.filled(0)."


def to_wire_array(value: object, tensor: TensorSpec, casting: Casting = "safe") -> npt.NDArray[Any]:
    """Convert one input to the declared type if no value changes.

    Arrays follow numpy's safe casting, or ``casting``; of lists and scalars, whose type nobody chose, the values
    decide. Text is encoded as UTF-8, and what the author of the model takes as a dictionary, or as a list of them, as
    the text of JSON. A scalar for a tensor whose every length may be 1 becomes an array of that rank.
    """
    if tensor.dtype is np.bytes_ and tensor.hint.startswith(_LIST_OF_OBJECTS):
        value = _write_lists(value, tensor)
    array = _to_byte_strings(value, tensor) if tensor.dtype is np.bytes_ else _to_numbers(value, tensor, casting)
    if array.ndim == 0 and not isinstance(value, np.ndarray) and all(length in (1, -1) for length in tensor.shape):
        # Triton has no tensor without axes, so a scalar means one element.
        array = array.reshape((1,) * len(tensor.shape))
    return array


def _write_lists(value: object, tensor: TensorSpec) -> object:
    """Return lists of dictionaries as the texts of their JSON: one of them, or each of a batch."""
    if not isinstance(value, list):
        return value
    if _is_of_dictionaries(value):
        return _write_json(value, tensor)
    return [_write_json(each, tensor) if _is_of_dictionaries(each) else each for each in value]


def _is_of_dictionaries(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(element, dict) for element in value)


def _write_json(value: object, tensor: TensorSpec) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(tensor, "what JSON can say", f"{_show(value)} ({error})", cause=error)


def _to_numbers(value: object, tensor: TensorSpec, casting: Casting) -> npt.NDArray[Any]:
    target = np.dtype(tensor.dtype)
    if _has_own_type(value):
        array = _read_array(value, tensor)
        if array.dtype == target:
            # Equal types may still differ in byte order; Triton reads little-endian.
            return array.astype(target, copy=False)
        if np.can_cast(array.dtype, target, "safe"):
            return array.astype(target)
        is_same_kind = np.can_cast(array.dtype, target, "same_kind")
        if is_same_kind and casting == "same_kind":
            return _convert_values(array, target, value, tensor)
        _refuse(
            tensor, f"{target.name}", f"an array of {array.dtype}", _advise(array, target, is_same_kind=is_same_kind)
        )
    try:
        array = np.asarray(value)
        if target.kind in "iu" and array.dtype.kind in "fO":
            # numpy makes floats or objects of whole numbers on both sides of 2**63, and of larger ones.
            array = _to_integers(value, tensor) if _are_integers(value) else array
    except (TypeError, ValueError) as error:
        _refuse(tensor, f"values of {target.name}", f"{_show(value)} ({error})", cause=error)
    if array.size == 0 and array.dtype.kind == "f":
        return array.astype(target)  # numpy reads an empty list as floats
    if array.dtype.kind not in "biuf" and array.dtype != target:
        _refuse(tensor, f"values of {target.name}", f"{_show(value)}, which numpy reads as {array.dtype}")
    return _convert_values(array, target, value, tensor)


def _are_integers(value: object) -> bool:
    elements = np.array(value, dtype=object).ravel().tolist()
    return bool(elements) and all(isinstance(element, (int, np.integer)) for element in elements)


def _to_integers(value: object, tensor: TensorSpec) -> npt.NDArray[Any]:
    dtype: Any = tensor.dtype
    exact, limits = np.array(value, dtype=object), np.iinfo(dtype)
    if any(not limits.min <= element <= limits.max for element in exact.ravel().tolist()):
        _refuse(tensor, f"values in the range of {np.dtype(dtype).name}", _show(value))
    return exact.astype(dtype)


def _advise(array: npt.NDArray[Any], target: np.dtype[Any], *, is_same_kind: bool) -> str:
    """Say how the caller can convert an array to another type without changing its values."""
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        return ""
    part = ".real" if array.dtype.kind == "c" else ""
    with np.errstate(all="ignore"):
        if (part and array.imag.any()) or not _keeps_values(array.real, array.real.astype(target)):
            return f"Some of its values are none of {target.name}."
    # numpy has no bfloat16 of its own, and numpy 1 has no name for its bool.
    name = {"bfloat16": "ml_dtypes.bfloat16", "bool": "np.bool_"}.get(target.name, f"np.{target.name}")
    advice = f"Convert it with {part}.astype({name})"
    return advice + (', or call client.with_options(casting="same_kind").' if is_same_kind else ".")


def _keeps_values(array: npt.NDArray[Any], converted: npt.NDArray[Any]) -> bool:
    """Return whether a conversion to whole numbers keeps all values, and one to others all that are finite."""
    if converted.dtype.kind in "iub":
        return bool(np.array_equal(converted, array)) and bool(np.array_equal(converted < 0, array < 0))
    return bool(np.array_equal(np.isfinite(converted), np.isfinite(array)))


def _convert_values(
    array: npt.NDArray[Any], target: np.dtype[Any], value: object, tensor: TensorSpec
) -> npt.NDArray[Any]:
    """Convert untyped values; whole numbers may become floats, nothing else may change."""
    kind_fits = np.can_cast(array.dtype, target, "same_kind") or (array.dtype.kind in "iu" and target.kind in "iu")
    if not kind_fits:
        _refuse(tensor, f"values of {target.name}", f"{_show(value)}, which numpy reads as {array.dtype}")
    with np.errstate(over="ignore"):
        converted = array.astype(target)
    if not _keeps_values(array, converted):
        _refuse(tensor, f"values in the range of {target.name}", _show(value))
    return converted


def _to_byte_strings(value: object, tensor: TensorSpec) -> npt.NDArray[Any]:
    if _has_own_type(value):
        array = _read_array(value, tensor)
    else:
        try:
            # As objects, because numpy cuts trailing zero bytes when it makes an S array.
            array = np.array(value, dtype=object)
            if array.size and type(array.flat[0]) is int:
                array = np.array(_freeze(value), dtype=object)  # numpy would read a bytearray as a list of numbers
        except (RuntimeError, ValueError) as error:
            _refuse(tensor, "bytes or str", f"{_show(value)} ({error})", cause=error)
    if array.dtype.kind == "S":
        return array
    if array.dtype.kind not in "OUT":
        _refuse(tensor, "bytes or str", f"an array of {array.dtype}")
    elements = array.ravel().tolist()
    if all(type(element) is bytes for element in elements):
        return array
    encoded = np.empty(len(elements), dtype=object)
    encoded[:] = [_encode(element, index if array.ndim else None, tensor) for index, element in enumerate(elements)]
    return encoded.reshape(array.shape)


def _freeze(value: object) -> object:
    """Return a value with ``bytes`` in place of other buffers in its lists."""
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return [_freeze(element) for element in value] if isinstance(value, (list, tuple)) else value


def _encode(element: object, index: int | None, tensor: TensorSpec) -> bytes:
    """Return the bytes of an element; without an index it is the whole value."""
    if isinstance(element, dict) and tensor.hint.startswith(_OBJECT):
        return _write_json(element, tensor)
    where = "" if index is None else f" as element {index}"
    if isinstance(element, (bytes, bytearray, memoryview)):
        return bytes(element)
    if isinstance(element, str):
        try:
            return element.encode("utf-8")
        except UnicodeEncodeError as error:
            _refuse(tensor, "text that UTF-8 can encode", f"{_show(element)}{where} ({error})", cause=error)
    wanted = "bytes or str" + (" in every element" if where else "")
    _refuse(tensor, wanted, f"{_show(element)}{where}")


def _has_own_type(value: object) -> bool:
    """Return whether somebody chose a type for the value: it is an array of numpy or another library."""
    if isinstance(value, np.ndarray):
        return True
    return hasattr(value, "__array__") and not isinstance(value, np.generic)


def _read_array(value: object, tensor: TensorSpec) -> npt.NDArray[Any]:
    """Return the elements of an array of numpy or of another library."""
    if isinstance(value, np.ma.MaskedArray) and value.dtype.names is None and np.any(value.mask):
        # numpy.asarray would give what lies below the mask.
        _refuse(tensor, "a value in every place", f"an array with {int(np.sum(value.mask))} masked", _FILL)
    try:
        return np.asarray(value)
    except Exception as error:  # What another library says, such as of a tensor on a device.
        received = f"{_show(value)}, which cannot become one ({type(error).__name__}: {error})"
        _refuse(tensor, "an array that numpy can read", received, cause=error)


def _show(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _refuse(
    tensor: TensorSpec, expected: str, received: str, advice: str = "", *, cause: Exception | None = None
) -> NoReturn:
    hint = f" (its hint is {tensor.hint})" if tensor.hint else ""
    message = f"Input {tensor.name!r}: expected {expected}{hint}, received {received}."
    raise PyTritonClientInputError(
        f"{message} {advice}".rstrip(), input_name=tensor.name, expected=expected, received=received
    ) from cause
