"""Memory for outputs, from where they are sent without being copied first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["empty_outputs"]

Forms = dict[str, tuple[tuple[int, ...], "np.dtype[Any]"]]
Allocate = Callable[[Forms], "dict[str, np.ndarray[Any, Any]] | None"]


class _Thread(threading.local):
    allocate: Allocate | None = None


_thread = _Thread()


def use_allocator(allocate: Allocate | None) -> None:
    """Say who has memory for outputs in this thread; not for users."""
    _thread.allocate = allocate


def empty_outputs(
    outputs: Mapping[str, tuple[Sequence[int] | int, DTypeLike]],
) -> dict[str, np.ndarray[Any, Any]]:
    """Return an array for each output, with undefined values as from `numpy.empty`.

    In the thread of a worker that shares memory with its server, large arrays are made where responses are sent from.
    A callable that fills them and returns them, as all of its outputs, is spared one copy of each, and the memory is
    used again. Anywhere else they are arrays as any others, so a callable need not know where it runs.

    Ask for new ones for every answer: what was sent can no longer be written to.

    Args:
        outputs: Shape and dtype of each output by name. Under `@batch` the first dimension is that of all rows.
    """
    forms: Forms = {}
    for name, (shape, dtype) in outputs.items():
        dims = (shape,) if isinstance(shape, (int, np.integer)) else shape
        forms[name] = tuple(int(dim) for dim in dims), np.dtype(dtype)
    allocate = _thread.allocate
    made = None if allocate is None else allocate(forms)
    if made is None:
        made = {name: np.empty(shape, dtype) for name, (shape, dtype) in forms.items()}
    return made
