"""Annotations of jaxtyping, such as `Float32[np.ndarray, "n 3"]`. It is the user's choice: nothing here imports it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


class JaxtypingError(Exception):
    """An annotation describes something that no tensor of Triton can be."""


def read_jaxtyping(hint: Any) -> tuple[Any, tuple[int | str, ...]] | None:
    """Return the element type and axes of a jaxtyping annotation; None for any other hint.

    It is an error if it names several dtypes, a varying number of axes, or an array of another library.
    """
    annotation = getattr(sys.modules.get("jaxtyping"), "AbstractArray", None)
    if annotation is None or not isinstance(hint, type) or not issubclass(hint, annotation):
        return None
    array: Any = hint
    if array.array_type is not np.ndarray:
        raise JaxtypingError("the function gets arrays of numpy: annotate them as np.ndarray")
    # `bool` has two names. An annotation without a dtype has no list here.
    dtypes: set[str] = (
        {str(name).removesuffix("_") for name in array.dtypes} if isinstance(array.dtypes, (list, tuple)) else set()
    )
    if len(dtypes) != 1:
        raise JaxtypingError('it does not say one dtype, as Float32[np.ndarray, "n"] does')
    return dtypes.pop(), tuple(_axis(word) for word in array.dim_str.split())


def _axis(word: str) -> int | str:
    if word == "..." or "*" in word:
        raise JaxtypingError("a tensor of Triton has a fixed number of axes: name each of them")
    # A size or a name may have a prefix, and a name as in `width=3`.
    word = word.lstrip("#?").rpartition("=")[2]
    if word.isdecimal():
        return int(word)
    # Anything else, such as `_` or `n-1`, means a size that may vary.
    return word if word.isidentifier() and not word.startswith("_") else -1
