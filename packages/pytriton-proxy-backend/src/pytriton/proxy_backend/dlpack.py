"""DLPack: its structures, and numpy arrays as capsules that every reader understands.

numpy's own capsules have strides that older stubs of Triton's Python backend take for a gap where a dimension is 0, and
complain on stderr when the stub has renamed them; numpy knows no BF16, and before 2.1 hands out no array that is
read-only. Those made here have no strides, which means C order.

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


# The objects that a capsule refers to, by the address of its structure. Its deleter removes them.
_alive: dict[int, tuple[Any, ...]] = {}


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


def _delete(address: int) -> None:
    _alive.pop(address, None)


def _destroy(capsule: int) -> None:
    # This capsule was not read by anybody; the reader of one deletes its tensor.
    if is_capsule(capsule):
        _delete(address_in(capsule))


@functools.cache
def _callbacks() -> tuple[Any, Any]:
    made = (ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete), ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy))
    for callback in made:
        # For ever: capsules may be freed after everything else, when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
    return made


def to_capsule(array: np.ndarray[Any, Any], owner: object = None, *, code: int | None = None) -> Any:
    """Return a capsule over an array of numbers, or a copy if it is not in C order; it keeps `owner` alive."""
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    deleter, destructor = _callbacks()
    shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
    managed = DLManagedTensor()
    tensor = managed.tensor
    tensor.data = array.ctypes.data
    tensor.device_type = CPU
    tensor.ndim = array.ndim
    tensor.code = KINDS[array.dtype.kind] if code is None else code
    tensor.bits = array.dtype.itemsize * 8
    tensor.lanes = 1
    tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(deleter, ctypes.c_void_p)
    address = ctypes.addressof(managed)
    _alive[address] = (managed, array, shape, owner)
    make = python_function("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(address, ctypes.cast(_NAME, ctypes.c_char_p), ctypes.cast(destructor, ctypes.c_void_p))
