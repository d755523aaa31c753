"""The accelerator: an extension module that does the most common things faster, wherever it can be loaded.

One file serves every CPython with a GIL: it is made of the stable ABI. Without it everything is done in Python, with
the same results.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

VARIABLE = "PYTRITON_ACCELERATOR"
OBJECT_BYTES = 16
"""The size of the head of an object in an interpreter with a GIL: its count of references and its type."""


@functools.cache
def _load() -> ModuleType | None:
    if object.__basicsize__ != OBJECT_BYTES:
        # A free-threaded interpreter does not look for a file of this name, and would crash with it.
        return None
    try:
        return importlib.import_module(f"{__name__.rpartition('.wire.')[0]}._accelerator")
    except ImportError:
        # The module is not built for this platform or interpreter, or this folder was copied without it.
        return None


def accelerator() -> ModuleType | None:
    """Return the accelerator; `None` if it is missing, or `PYTRITON_ACCELERATOR` is 0."""
    return None if os.environ.get(VARIABLE) == "0" else _load()
