"""`triton_python_backend_utils` as a `model.py` imports it: the server's own, made to fit numpy.

This file is not imported by programs. It is linked into the folder of a server's Python backend (see `backends`), where
the stub, which is an interpreter in a process of its own, imports it in place of the original that lies beside it.

The stub of a server before 25.01 was compiled for numpy 1. Under numpy 2 it reads the size of an array's elements where
that was then, and finds the low half of the dtype's flags there, which are 0 for numbers and strings. So inputs would
all be their own first element, outputs would be empty, and strings would end the process. Three things mend that, and
none of them touches an array that anybody else sees:

* The stub makes arrays through a table of numpy's functions, which it looks for where numpy 1 had it. It finds a copy
  in which the function that makes arrays passes over strides that are all 0.
* Numbers go out by DLPack, which says how large they are.
* Strings go out as an array of single bytes whose dtype has the flags 1, for the size 1.

Where the stub is for numpy 2, it never looks at that copy, and none of this is done.

Numbers in the other byte order than the machine's are swapped under any numpy: every stub would send them as they are.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_ORIGINAL = Path(__file__).with_name("triton_python_backend_utils_original.py")
exec(compile(_ORIGINAL.read_bytes(), str(_ORIGINAL), "exec", dont_inherit=True))

import numpy as np  # noqa: E402

_NUMPY_2 = int(np.__version__.partition(".")[0]) >= 2

# How many entries of numpy's table of functions are copied (more than the stub uses), and the place of
# PyArray_NewFromDescr, which numpy's ABI fixes.
_TABLE_LENGTH = 300
_NEW_FROM_DESCR = 94

_Lengths = ctypes.POINTER(ctypes.c_ssize_t)
# type, dtype, number of dimensions, shape, strides, memory, flags, object -> array
_NewFromDescr = ctypes.PYFUNCTYPE(
    ctypes.c_void_p,  # returns the array
    ctypes.c_void_p,  # type
    ctypes.c_void_p,  # dtype
    ctypes.c_int,  # number of dimensions
    _Lengths,  # shape
    _Lengths,  # strides
    ctypes.c_void_p,  # memory
    ctypes.c_int,  # flags
    ctypes.c_void_p,  # the object that the array is made for
)

_serialize: Any = globals()["serialize_byte_tensor"]
# The stub refers to these as long as the process lives.
_kept: list[Any] = []
_was_asked = False


def _offer_table() -> None:
    """Offer the copy of numpy's table to a stub for numpy 1 only, not to extensions for numpy 2."""
    from numpy.core import multiarray

    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    capsule_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    names = vars(multiarray)  # stubs of numpy 1 do not know this type, and those of numpy 2 declare it final
    real = (ctypes.c_void_p * _TABLE_LENGTH).from_address(pointer_of(names["_ARRAY_API"], None))
    table = (ctypes.c_void_p * _TABLE_LENGTH)(*real)
    make = _NewFromDescr(real[_NEW_FROM_DESCR] or 0)

    def make_array(kind: Any, dtype: Any, ndim: int, shape: Any, strides: Any, data: Any, flags: int, base: Any) -> Any:
        global _was_asked
        _was_asked = True
        if strides and not any(strides[:ndim]):
            strides = None
        return make(kind, dtype, ndim, shape, strides, data, flags, base)

    callback = _NewFromDescr(make_array)
    table[_NEW_FROM_DESCR] = ctypes.cast(callback, ctypes.c_void_p).value
    _kept.extend((table, callback))
    names["_ARRAY_API"] = capsule_of(ctypes.addressof(table), None, None)


def _serialize_for_stub(array: Any) -> Any:
    """Return Triton's form of a string tensor, as an array that the stub takes for as long as it is."""
    data = _serialize(array)
    if not _was_asked or not data:
        return data
    # The flags of a dtype are part of its pickled state, which is changed here. The dtype belongs to this array alone,
    # and numpy does not search memory that it does not own for the objects that the flags announce.
    dtype: Any = np.dtype("V1", copy=True)
    serialized = np.frombuffer(data, dtype=dtype)
    dtype.__setstate__((3, "|", None, None, None, 1, 1, 1))
    return serialized


def _fitting(tensor_class: Any) -> Any:
    """Return a replacement for the stub's class of tensors."""

    def by_dlpack(name: str, array: Any) -> Any:
        from _pytriton_dlpack import end_capsule, to_capsule  # type: ignore[import-not-found]

        capsule = to_capsule(array)
        tensor = tensor_class.from_dlpack(name, capsule)
        end_capsule(capsule)
        return tensor

    if _NUMPY_2:
        by_dlpack("probe", np.zeros(1, np.float32)).as_numpy()
    numbers = by_dlpack if _was_asked else tensor_class

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, tensor_class)

    class Tensor(metaclass=Kind):
        __doc__ = tensor_class.__doc__
        from_dlpack = staticmethod(tensor_class.from_dlpack)

        def __new__(cls, name: str, array: Any) -> Any:
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
                return tensor_class(name, array)
            # The stub reads all numbers in the machine's byte order.
            return numbers(name, array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))

    return Tensor


class _Utils(ModuleType):
    """This module, to which the stub adds its own classes."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _fitting(value) if name == "Tensor" else value)


if _NUMPY_2:
    _offer_table()
    globals()["serialize_byte_tensor"] = _serialize_for_stub
sys.modules[__name__].__class__ = _Utils
