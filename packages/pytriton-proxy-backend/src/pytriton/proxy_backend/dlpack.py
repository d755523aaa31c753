"""DLPack: its structures, and numpy arrays as capsules that every reader understands.

numpy makes the capsules, so that freeing one needs none of our code: Python code of a destructor would lose the error
that is on its way while a temporary capsule is freed. They differ from those of `ndarray.__dlpack__` in three ways.
They have no strides, which means C order: older stubs of Triton's Python backend take strides for a gap where a
dimension is 0. They may hold BF16, which numpy does not know. They may hold memory that is read-only, which numpy
before 2.1 does not hand out.

This module imports nothing of ours: a stub process of Triton gets this file alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}
"""DLPack's type codes by the kinds of numpy's types."""
CPU = 1
"""DLPack's number of the host as a device."""

_NAME = ctypes.create_string_buffer(b"dltensor")


class DLTensor(ctypes.Structure):
    """Where the data of a tensor are, and what they are."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """What a capsule holds: a tensor, and what is to be called when nobody uses it any more."""

    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class DLManagedTensorVersioned(ctypes.Structure):
    """The same since DLPack 1.0."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


@functools.cache
def python_function(name: str, *types: Any) -> Callable[..., Any]:
    """Return a function of Python's C API, which takes addresses of objects: one may be about to be freed."""
    result, *arguments = types
    function: Any = ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
    called: Callable[..., Any] = function
    return called


def is_capsule(capsule: int) -> bool:
    """Return whether the object at an address is a capsule of a tensor that nobody has read."""
    is_valid = python_function("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
    return bool(is_valid(capsule, ctypes.cast(_NAME, ctypes.c_char_p)))


def address_in(capsule: int) -> int:
    """Return the address of the `DLManagedTensor` that such a capsule holds."""
    get = python_function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return int(get(capsule, ctypes.cast(_NAME, ctypes.c_char_p)))


class _Memory:
    """The memory of an array as a writable array of numpy sees it; that array keeps this object alive."""

    def __init__(self, array: np.ndarray[Any, Any], owner: object) -> None:
        self._kept = (array, owner)
        # Bytes of that size in place of the type, which the capsule gets by itself.
        self.__array_interface__ = {
            "data": (array.ctypes.data, False),
            "shape": array.shape,
            "typestr": f"<u{array.dtype.itemsize}",
            "version": 3,
        }


def to_capsule(array: np.ndarray[Any, Any], owner: object = None, *, code: int | None = None) -> Any:
    """Return a capsule over an array of numbers, or a copy if it is not in C order; it keeps `owner` alive."""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    capsule = np.asarray(_Memory(array, owner)).__dlpack__()
    tensor = DLManagedTensor.from_address(address_in(id(capsule))).tensor
    tensor.code = KINDS[array.dtype.kind] if code is None else code
    tensor.strides = None
    return capsule


def end_capsule(capsule: object) -> None:
    """Have nothing more done with a capsule that was read: a stub names it so that numpy's destructor complains."""
    if not is_capsule(id(capsule)):
        end = python_function("PyCapsule_SetDestructor", ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
        end(capsule, None)
