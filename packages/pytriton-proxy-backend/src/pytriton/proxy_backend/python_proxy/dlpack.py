"""numpy arrays as DLPack capsules that every stub of Triton's Python backend can read.

numpy's own capsules have strides that older stubs take for a gap where a dimension is 0, and complain on stderr when
the stub has renamed them. These have no strides (C order, by definition) and no destructor.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}
"""DLPack's type codes by the kinds of numpy's types."""
CPU = 1
"""DLPack's number of the host as a device."""


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


# By the address of the structure: what a capsule refers to, until its reader has done with it.
_alive: dict[int, tuple[Any, ...]] = {}


def _delete(address: int) -> None:
    _alive.pop(address, None)


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_NAME = ctypes.create_string_buffer(b"dltensor")


def to_capsule(array: np.ndarray[Any, Any]) -> Any:
    """Return a capsule over a C-contiguous copy of an array, or over the array itself where it is one."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
    managed = DLManagedTensor()
    managed.tensor.data = array.ctypes.data
    managed.tensor.device_type = CPU
    managed.tensor.ndim = array.ndim
    managed.tensor.code = KINDS[array.dtype.kind]
    managed.tensor.bits = array.dtype.itemsize * 8
    managed.tensor.lanes = 1
    managed.tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_DELETER, ctypes.c_void_p)
    address = ctypes.addressof(managed)
    _alive[address] = (managed, array, shape)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(address, ctypes.cast(_NAME, ctypes.c_char_p), None)
