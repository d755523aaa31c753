"""The element types that Triton can carry: the one table between numpy's types and Triton's names.

A *declared* type is what the user writes in `Tensor(dtype=...)`. Its *canonical* form is a scalar type: the numpy
scalar type, or one of `bytes`, `numpy.bytes_`, `object`, `numpy.object_`, all of which mean strings of any bytes
(Triton's `BYTES`).
"""

import importlib
from typing import Any, Final

import numpy as np

from pytriton.exceptions import PyTritonBadParameterError, PyTritonModelConfigError

CONFIG_PREFIX: Final = "TYPE_"

_NUMERIC: Final[dict[type[np.generic], str]] = {
    np.bool_: "BOOL",
    np.uint8: "UINT8",
    np.uint16: "UINT16",
    np.uint32: "UINT32",
    np.uint64: "UINT64",
    np.int8: "INT8",
    np.int16: "INT16",
    np.int32: "INT32",
    np.int64: "INT64",
    np.float16: "FP16",
    np.float32: "FP32",
    np.float64: "FP64",
}
# numpy has several scalar types of one width (np.intc, np.longlong, ...); kind and width choose one.
_BY_KIND: Final[dict[tuple[str, int], type[np.generic]]] = {
    (np.dtype(scalar).kind, np.dtype(scalar).itemsize): scalar for scalar in _NUMERIC
}
_BY_WIRE_NAME: Final = {name: scalar for scalar, name in _NUMERIC.items()}
_STRINGS: Final[tuple[type[Any], ...]] = (bytes, np.bytes_, object, np.object_)
_ABSTRACT: Final[tuple[type[np.generic], ...]] = (
    np.generic,
    np.number,
    np.integer,
    np.signedinteger,
    np.unsignedinteger,
    np.inexact,
    np.floating,
    np.complexfloating,
    np.flexible,
    np.character,
)
_BUILTINS: Final[dict[type[Any], type[Any]]] = {
    bool: np.bool_,
    # numpy 1 makes int32 of `int` on Windows, but a model's interface must be the same everywhere.
    int: np.int64,
    float: np.float64,
    bytes: bytes,
    str: bytes,
    object: object,
}
_ACCEPTED: Final = (
    "bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, float32, float64, bfloat16 (of "
    "ml_dtypes), bytes, str or object (strings); as numpy dtype, numpy scalar type, name, or Python's bool, int, "
    "float, bytes, str"
)


def canonical_type(declared: Any, *, parameter: str = "dtype") -> type[Any]:
    """Return the scalar type that `declared` means.

    It is one of fixed width, `ml_dtypes.bfloat16`, or for strings the type that was declared.
    """
    if isinstance(declared, type):
        if declared in _BUILTINS:
            return _BUILTINS[declared]
        if not issubclass(declared, np.generic) or declared in _ABSTRACT:
            # np.dtype() would read any other class as `object`, and choose a width for an abstract type.
            raise _rejected(declared, parameter)
    if declared is None:
        # np.dtype(None) would be float64.
        raise _rejected(declared, parameter)
    try:
        dtype = np.dtype(declared)
    except (TypeError, ValueError, SyntaxError) as error:
        raise _rejected(declared, parameter) from error
    if dtype.kind in "SUT":
        return np.bytes_
    if dtype.kind == "O":
        return np.object_
    if _is_bfloat16(dtype):
        bfloat16: type[Any] = dtype.type
        return bfloat16
    found = _BY_KIND.get((dtype.kind, dtype.itemsize))
    if found is None:
        raise _rejected(declared, parameter)
    return found


def is_string(declared: Any) -> bool:
    """Return whether a declared type means strings (`BYTES`)."""
    return canonical_type(declared) in _STRINGS


def array_dtype(declared: Any) -> "np.dtype[Any]":
    """Return the dtype of the arrays that a callable gets for a declared type; `object` (of `bytes`) for strings."""
    scalar = canonical_type(declared)
    return np.dtype(np.object_) if scalar in _STRINGS else np.dtype(scalar)


def wire_name(declared: Any) -> str:
    """Return the name of a declared type in requests and metadata, such as `FP32` or `BYTES`."""
    scalar = canonical_type(declared)
    if scalar in _STRINGS:
        return "BYTES"
    return _NUMERIC.get(scalar, "BF16")


def config_name(declared: Any) -> str:
    """Return the name of a declared type in model configurations, such as `TYPE_FP32` or `TYPE_STRING`."""
    name = wire_name(declared)
    return CONFIG_PREFIX + ("STRING" if name == "BYTES" else name)


def type_from_config_name(name: str) -> type[Any]:
    """Return the scalar type of a name from a model configuration (`TYPE_FP32`) or from the wire (`FP32`).

    It refuses an unknown name, and `BF16` where the package ml_dtypes is not installed.
    """
    short = name.removeprefix(CONFIG_PREFIX)
    if short in ("STRING", "BYTES"):
        return np.bytes_
    if short == "BF16":
        try:
            scalar: type[Any] = importlib.import_module("ml_dtypes").bfloat16
        except ImportError as error:
            raise PyTritonModelConfigError(
                "Data type BF16 needs the package ml_dtypes, because numpy has no bfloat16 of its own: pip install "
                "ml_dtypes"
            ) from error
        return scalar
    found = _BY_WIRE_NAME.get(short)
    if found is None:
        known = ", ".join(CONFIG_PREFIX + known for known in (*_BY_WIRE_NAME, "BF16", "STRING"))
        raise PyTritonModelConfigError(f"Unknown data type {name!r} in a model configuration; expected one of {known}.")
    return found


def _is_bfloat16(dtype: "np.dtype[Any]") -> bool:
    # The type is compared by name, so that ml_dtypes, which is optional, is not imported.
    return dtype.name == "bfloat16" and dtype.itemsize == 2


def _rejected(declared: Any, parameter: str) -> PyTritonBadParameterError:
    wants_bfloat16 = isinstance(declared, str) and declared == "bfloat16"
    advice = " For bfloat16, install ml_dtypes and pass ml_dtypes.bfloat16." if wants_bfloat16 else ""
    return PyTritonBadParameterError(
        f"{parameter}={declared!r} is not an element type that Triton can carry. Accepted: {_ACCEPTED}.{advice}",
        parameter=parameter,
        value=declared,
        rule=f"one of {_ACCEPTED}",
    )
