"""Values of inputs, of any kind, as tensors."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np

from pytriton.inprocess.capi.enums import DataType
from pytriton.inprocess.capi.errors import InvalidArgumentError, TritonError
from pytriton.inprocess.requests.model_spec import describe, known_spec
from pytriton.inprocess.requests.named import NamedModel
from pytriton.inprocess.tensors.dtypes import NUMPY_TYPES, Array, bfloat16_bits
from pytriton.inprocess.tensors.tensor import Tensor, tensor_of_array

_EXPECTED = "a Tensor, a numpy array or scalar, (nested) lists, or an object with __dlpack__"


def is_untyped(value: Any) -> bool:
    """Return whether a value has no element type of its own, so that the model's is used."""
    return isinstance(value, (list, tuple, bool, int, float, str, bytes)) and not isinstance(value, np.generic)


def to_tensor(model: NamedModel, name: str, value: Any) -> Tensor:
    """Make the tensor for an input from a tensor, an array or scalar of any library, or numbers or strings in lists.

    Lists get the data type of the model, and a single value gets its dimensions.
    """
    if isinstance(value, Tensor):
        return value
    try:
        if is_untyped(value):
            return _expanded(model, name, _of_numbers_or_strings(model, name, value))
        tensor = Tensor.from_dlpack(value)
        return _expanded(model, name, tensor) if isinstance(value, np.generic) else tensor
    except TritonError as error:
        where = f"{describe(model)}, input {name!r}"
        if error.where is not None:
            raise
        if value is None or not (hasattr(value, "__dlpack__") or hasattr(value, "__array__") or is_untyped(value)):
            text = f"expected {_EXPECTED}, received {value!r} of type {type(value).__name__}."
            raise InvalidArgumentError(
                f"{where[0].upper()}{where[1:]}: {text}", expected=_EXPECTED, received=type(value).__name__, where=where
            ) from error
        spec = known_spec(model).inputs.get(name) if _is_of_objects(value) else None
        if spec is not None and spec.data_type is not DataType.BYTES:
            error = _no_numbers(value, spec.data_type)
        raise type(error)(
            f"{where[0].upper()}{where[1:]}: {error.args[0]}",
            expected=error.expected,
            received=error.received,
            where=where,
        ) from error


def _of_numbers_or_strings(model: NamedModel, name: str, value: Any) -> Tensor:
    spec = known_spec(model).inputs.get(name)
    try:
        array = np.asarray(value)
    except UnicodeDecodeError:
        # This array has text and bytes, which are both strings for a model.
        array = np.array(value, object)
    except ValueError as error:
        raise _irregular(value) from error
    if array.dtype.kind in "SUTO" or (spec is not None and spec.data_type is DataType.BYTES and not array.size):
        return _of_strings(value, array, None if spec is None else spec.data_type)
    if spec is None or spec.data_type is DataType.BYTES:
        # Triton refuses an input that does not exist or has no numbers, and the refusal is explained.
        return Tensor.from_dlpack(array)
    return _converted(array, spec.data_type)


def _expanded(model: NamedModel, name: str, tensor: Tensor) -> Tensor:
    """Give a single value as many dimensions as the model wants, if they may all be 1."""
    spec = known_spec(model).inputs.get(name)
    if tensor.shape or spec is None or not all(dim in (-1, 1) for dim in spec.dims):
        return tensor
    return Tensor(tensor.data_type, (1,) * len(spec.dims), tensor.memory_buffer)


def _of_strings(value: Any, array: Array, wanted: DataType | None) -> Tensor:
    if array.dtype.kind == "O" and not _holds_strings(array):
        if any(isinstance(element, (list, tuple)) for element in array.flat):
            raise _irregular(value)
        if any(hasattr(element, "__dlpack__") or hasattr(element, "__array__") for element in array.flat):
            raise InvalidArgumentError(
                f"expected lists of numbers or strings, received a list of {type(array.flat[0]).__name__}. Stack them.",
                expected="numbers or strings",
                received=type(array.flat[0]).__name__,
            )
    # The array is one of objects, because numpy turns numbers beside text into text.
    if wanted not in (None, DataType.BYTES) and not _holds_strings(np.array(value, dtype=object)):
        # For example, integers that fit no type.
        raise _no_numbers(value, wanted)
    return Tensor.from_string_array(value)


def _no_numbers(value: Any, wanted: DataType) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"expected values of {wanted.name}, received {reprlib.repr(value)}.", expected=wanted, received=value
    )


def _is_of_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "O" and not _holds_strings(value)


def _holds_strings(array: Array) -> bool:
    return all(isinstance(element, (str, bytes)) for element in array.flat)


def _converted(array: Array, data_type: DataType) -> Tensor:
    """Convert numbers to the type that the model wants if it holds them all; floats are rounded."""
    if not array.size:
        array = array.astype(np.float32)
    dtype = NUMPY_TYPES[data_type]
    if data_type is DataType.BF16:
        converted = bfloat16_bits(array)
        exact = True
    elif not array.size:
        converted, exact = array.astype(dtype), True
    elif dtype.kind == "f":
        with np.errstate(over="ignore"):
            converted = array.astype(dtype)
        exact = not np.any(np.isinf(converted) & ~np.isinf(array.astype(np.float64)))
    else:
        # Only integers and booleans are taken: a float that happens to be whole suggests that others are not.
        exact = array.dtype.kind in "biu"
        converted = array.astype(dtype) if exact else array
        exact = exact and bool(np.array_equal(converted, array))
    if not exact:
        raise InvalidArgumentError(
            f"expected values of {data_type.name}, received {array.dtype} values from {array.min()} to {array.max()}.",
            expected=data_type,
            received=str(array.dtype),
        )
    return tensor_of_array(data_type, array.shape, np.ascontiguousarray(converted).reshape(array.shape))


def _irregular(value: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"expected (nested) lists of one shape, received {reprlib.repr(value)}.",
        expected="lists of the same lengths",
        received=value,
    )
