"""Outputs as numpy arrays, casts of numbers to the declared dtype, and texts of values for errors."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_array(value: Any) -> Any:
    """Return an array of another library, such as a column of pandas or pyarrow, as one of numpy.

    Everything else is returned as it is, and so is what cannot be a numpy array, such as a tensor on a device, or an
    array with masked values: whoever serves the callable refuses it with the reason.
    """
    if type(value) is np.ndarray or not hasattr(value, "__array__") or has_mask(value):
        return value
    try:
        return np.asarray(value)
    except Exception:
        return value


def has_mask(value: Any) -> bool:
    """Return whether it is an array with masked values, which numpy.asarray would replace with what lies below."""
    return isinstance(value, np.ma.MaskedArray) and value.dtype.names is None and bool(np.any(value.mask))


def cast_numbers(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> tuple[np.ndarray[Any, Any], bool]:
    """Cast an array by numpy's rules, and say whether a value has changed.

    Rounding a float is no change, unless it becomes infinite.
    """
    with np.errstate(all="ignore"):
        result = array.astype(dtype)
        if array.dtype.kind not in "biuf" or np.can_cast(array.dtype, dtype, "safe"):
            return result, False
        if dtype.kind in "biu":
            return result, not np.array_equal(result, array)
        is_finite = np.isfinite(result)
        return result, not is_finite.all() and not np.array_equal(is_finite, np.isfinite(array))


def describe_value(value: Any) -> str:
    """Return the type and the beginning of a value, for errors."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
