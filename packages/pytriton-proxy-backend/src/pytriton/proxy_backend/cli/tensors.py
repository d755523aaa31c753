"""Tensors from the command line: written out, or taken from a module of the user's."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..description import TRITON_CODES
from ..errors import DropInError
from ..model import ModelSpec, TensorSpec
from ..wire.dtypes import dtype_of

_STRINGS = ("str", "string", "bytes", "object")
_OPTIONAL = "optional"


def parse_tensor(text: str) -> TensorSpec:
    """Read `NAME:DTYPE:DIMS` or `NAME:DTYPE:DIMS:optional`."""
    parts = text.split(":")
    if len(parts) not in (3, 4) or not parts[0] or (len(parts) == 4 and parts[3] != _OPTIONAL):
        raise ValueError(
            f"expected NAME:DTYPE:DIMS such as x:float32:-1,4, with ':optional' behind it where it may be left out, "
            f"got {text!r}"
        )
    try:
        shape = tuple(int(size) for size in parts[2].split(","))
    except ValueError:
        raise ValueError(
            f"expected sizes with commas between them, -1 for a free one, as in x:float32:-1,4, got {parts[2]!r} in "
            f"{text!r}"
        ) from None
    if any(size == 0 or not -1 <= size < 1 << 63 for size in shape):
        raise ValueError(f"expected sizes above 0 and below 2^63, or -1 for a free one, got {parts[2]!r} in {text!r}")
    return TensorSpec(name=parts[0], dtype=parse_dtype(parts[1]), shape=shape, optional=len(parts) == 4)


def parse_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name: numpy's, Triton's, or "str" or "bytes" for strings."""
    code = TRITON_CODES.get(name.upper().removeprefix("TYPE_"))
    if name.lower() in (*_STRINGS, "type_string"):
        return np.dtype(object)
    try:
        if name.lower() == "bfloat16":
            return dtype_of(TRITON_CODES["BF16"])
        if code is not None:
            return dtype_of(code)
        dtype = np.dtype(name)
        if dtype.name.upper() not in TRITON_CODES and dtype.name not in ("bool", "float16", "float32", "float64"):
            raise TypeError(f"Triton has no data type for numpy's {dtype}")
    except TypeError as error:
        raise ValueError(
            f"expected a dtype such as float32, int64, bool or str (or Triton's name, such as FP32), got {name!r}: "
            f"{error}"
        ) from error
    return dtype


def load_signature(reference: str) -> dict[str, Any]:
    """Import `module:attribute`, which describes what a model takes and gives.

    The attribute is a `ModelSpec`, or a mapping or object with `inputs`, `outputs` and options of a model. Each tensor
    is a `TensorSpec`, a `pytriton.model_config.Tensor`, or a text such as `x:float32:-1,4`.
    """
    module_name, colon, path = reference.partition(":")
    if not colon or not module_name or not path:
        raise DropInError(f"expected --from module:signature, got {reference!r}", path=reference)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `python -m` does this, a console script does not
    try:
        value: Any = importlib.import_module(module_name)
        for name in path.split("."):
            value = getattr(value, name)
    except Exception as error:  # the user's module may raise anything
        raise DropInError(f"{reference} cannot be imported: {type(error).__name__}: {error}", path=reference) from error
    if callable(value) and not _has(value, "inputs"):
        try:
            value = value()
        except Exception as error:
            raise DropInError(
                f"{reference} is a callable, and raised {type(error).__name__} when it was asked for a signature: "
                f"{error}",
                path=reference,
            ) from error
    if not _has(value, "inputs") or not _has(value, "outputs"):
        raise DropInError(
            f"expected {reference} to be something with 'inputs' and 'outputs' (a ModelSpec, a mapping, or an object), "
            f"got {type(value).__name__}",
            path=reference,
        )
    given: dict[str, Any] = {
        kind: tuple(_tensors(_get(value, kind), kind, reference)) for kind in ("inputs", "outputs")
    }
    sources = [value, _get(value, "config")] if _has(value, "config") else [value]
    for name in ("batching", "max_batch_size", "decoupled", "strict"):
        for source in sources:
            if _has(source, name) and _get(source, name) is not None:
                given[name] = _get(source, name)
    for source in sources:
        if _has(source, "cost") and _get(source, "cost") is not None:
            given["cost"] = _cost(_get(source, "cost"), given, reference)
    return given


def _cost(cost: Any, given: Mapping[str, Any], reference: str) -> dict[str, Any]:
    """Return the fields of a `pytriton.model_config.Cost`, which the tensors of the model have to fit."""
    if not callable(getattr(cost, "fields", None)) or not callable(getattr(cost, "validate", None)):
        raise DropInError(
            f"expected a pytriton.model_config.Cost as 'cost' of {reference}, got {type(cost).__name__}", path=reference
        )
    try:
        cost.validate(given["inputs"], given["outputs"])
    except ValueError as error:
        raise DropInError(f"{reference}: {error}", path=reference) from error
    fields: dict[str, Any] = cost.fields()
    return fields


def _has(value: Any, name: str) -> bool:
    return name in value if isinstance(value, Mapping) else hasattr(value, name)


def _get(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, Mapping) else getattr(value, name)


def _tensors(values: Any, kind: str, reference: str) -> Iterable[TensorSpec]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise DropInError(f"expected a list of tensors in '{kind}' of {reference}, got {values!r}", path=reference)
    for number, value in enumerate(values, 1):
        try:
            yield _tensor(value, f"{kind.removesuffix('s').upper()}_{number}")
        except (AttributeError, TypeError, ValueError) as error:
            raise DropInError(f"{reference}: {kind}[{number - 1}] is no tensor: {error}", path=reference) from error


def _tensor(value: Any, default_name: str) -> TensorSpec:
    if isinstance(value, TensorSpec):
        return value
    if isinstance(value, str):
        return parse_tensor(value)
    dtype = value.dtype
    strings = isinstance(dtype, type) and issubclass(dtype, (bytes, str))
    return TensorSpec(
        name=value.name or default_name,
        dtype=np.dtype(object) if strings else np.dtype(dtype),
        shape=tuple(int(size) for size in value.shape),
        optional=bool(value.optional),
    )


def model_of(name: str, version: int, given: Mapping[str, Any]) -> ModelSpec:
    """Make a model from the command line and a signature."""
    size = int(given["max_batch_size"]) if given.get("batching", True) else 0
    return ModelSpec(
        name=name,
        version=version,
        inputs=given["inputs"],
        outputs=given["outputs"],
        batching=size > 0,
        max_batch_size=size,
        decoupled=bool(given.get("decoupled", False)),
        strict=bool(given.get("strict", False)),
        cost=given.get("cost"),
    )
