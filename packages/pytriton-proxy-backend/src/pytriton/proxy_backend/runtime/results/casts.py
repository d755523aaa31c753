"""What a cast to the declared dtype makes of values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_TRUE = ("1", "True", "true", b"1", b"True", b"true")


def is_safe(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return whether the target has all values of the source; an integer may be rounded to the next float."""
    return np.can_cast(source, target, "safe")


def cast(array: Array, target: np.dtype[Any]) -> Array:
    """Cast an array, by numpy's rules."""
    # numpy warns of some changed values and ignores others; `changed_value` finds all of them.
    with np.errstate(all="ignore"):
        return array.astype(target)


def changed_value(source: Array, result: Array) -> tuple[object, object] | None:
    """Return the first value that a cast has changed, before and after; `None` if there is none.

    Rounding a float is no change, unless it becomes infinite.
    """
    if is_safe(source.dtype, result.dtype):
        return None
    # numpy can hardly compare bfloat16, which has the kind "V".
    source, result = (array.astype(np.float32) if array.dtype.kind == "V" else array for array in (source, result))
    if source.dtype.kind in "OSUT":
        for before, after in zip(source.ravel().tolist(), result.ravel().tolist(), strict=True):
            if not _is_same(before, after):
                return before, after
        return None
    if result.dtype.kind in "biu":
        wrong = np.asarray(result != source)
    else:
        wrong = ~np.isfinite(result)
        if wrong.any():
            wrong &= np.isfinite(source)
    if not wrong.any():
        return None
    place = int(np.argmax(wrong))
    return source.ravel()[place].item(), result.ravel()[place].item()


def _is_same(before: Any, after: bool | int | float) -> bool:
    if isinstance(before, (str, bytes)):
        if isinstance(after, bool):
            # numpy treats every text except the empty one as true.
            return before in _TRUE if after else not before
        before = type(after)(before)
    if isinstance(after, float):
        return math.isfinite(after) or (before is not None and not math.isfinite(before))
    return bool(before == after)
