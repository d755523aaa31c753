"""numpy arrays as DLPack capsules, and capsules of other frameworks as arrays, both without a copy.

By ctypes, because numpy's own functions know no BF16, and before 2.1 hand out no array that is read-only.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ..python_proxy.dlpack import CPU, KINDS, DLManagedTensor
from ..wire.dtypes import BF16_BITS
from ..wire.record import Array
from .errors import TritonModelException

__all__ = ["CPU", "array_of", "to_capsule"]

_BFLOAT = 4
_CUDA = 2
_CUDA_HOST = 3
_NAME = ctypes.create_string_buffer(b"dltensor")
_USED_NAME = ctypes.create_string_buffer(b"used_dltensor")
_BY_CODE = {code: kind for kind, code in KINDS.items()}
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# By the address of its structure: what a capsule refers to, until its reader has done with it.
_alive: dict[int, tuple[Any, ...]] = {}


@functools.cache
def _api(name: str, *types: Any) -> Callable[..., Any]:
    """Return a function of Python's C API, which takes addresses of objects: one may be about to be freed."""
    result, *arguments = types
    function: Any = ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
    called: Callable[..., Any] = function
    return called


def _is_valid(capsule: int) -> bool:
    return bool(
        _api("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
            capsule, ctypes.cast(_NAME, ctypes.c_char_p)
        )
    )


def _pointer(capsule: int) -> int:
    get = _api("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return int(get(capsule, ctypes.cast(_NAME, ctypes.c_char_p)))


def _delete(address: int) -> None:
    _alive.pop(address, None)


def _destroy(capsule: int) -> None:
    # One that nobody has read; what was read is its reader's to delete.
    if _is_valid(capsule):
        _delete(_pointer(capsule))


@functools.cache
def _callbacks() -> tuple[Any, Any]:
    made = (_DELETER(_delete), ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy))
    for callback in made:
        # For ever: capsules may be freed after everything else, when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
    return made


def to_capsule(array: Array, owner: object) -> Any:
    """Return a capsule over a C-contiguous array of numbers; it holds a reference to an owner, too."""
    deleter, destructor = _callbacks()
    is_bf16 = array.dtype == BF16_BITS
    shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
    managed = DLManagedTensor()
    tensor = managed.tensor
    tensor.data = array.ctypes.data
    tensor.device_type = CPU
    tensor.ndim = array.ndim
    tensor.code = _BFLOAT if is_bf16 else KINDS[array.dtype.kind]
    tensor.bits = array.dtype.itemsize * 8
    tensor.lanes = 1
    tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(deleter, ctypes.c_void_p)
    address = ctypes.addressof(managed)
    _alive[address] = (managed, array, shape, owner)
    make = _api("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(address, ctypes.cast(_NAME, ctypes.c_char_p), ctypes.cast(destructor, ctypes.c_void_p))


def array_of(tensor: Any) -> Array:
    """Return the data of a capsule, or of an object that makes one, as an array over the same memory.

    Raises:
        TritonModelException: It is none, is on a device, not in C order, or of a type that Triton has not.
    """
    if type(tensor).__name__ != "PyCapsule":
        if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule         or have `__dlpack__` and "
                "`__dlpack_device__` attributes"
            )
        _check_device(int(tensor.__dlpack_device__()[0]))
        tensor = tensor.__dlpack__()
    capsule = id(tensor)
    if not _is_valid(capsule):
        raise TritonModelException("the DLPack capsule was read before, or is none of a tensor")
    address = _pointer(capsule)
    managed = DLManagedTensor.from_address(address)
    described = managed.tensor
    _check_device(described.device_type)
    shape = tuple(described.shape[at] for at in range(described.ndim))
    dtype = _dtype_of(described.code, described.bits, described.lanes)
    if described.strides and not _is_contiguous(shape, described.strides):
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    # From here on it is ours to delete.
    _api("PyCapsule_SetName", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
        capsule, ctypes.cast(_USED_NAME, ctypes.c_char_p)
    )
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    # Arrays of ctypes are buffers, which the stubs of some releases of numpy do not know.
    memory: Any = bytearray()
    if size:
        memory = (ctypes.c_char * size).from_address((described.data or 0) + described.byte_offset)
    if managed.deleter:
        deleter = _DELETER(managed.deleter)
        if size:
            # The array refers to the memory by its buffer, and so do all views of it.
            weakref.finalize(memory, deleter, address).atexit = False
        else:
            deleter(address)
    made: Array = np.ndarray(shape, dtype, memory)
    return made


def _check_device(device: int) -> None:
    if device == _CUDA:
        raise TritonModelException(
            "DLPack capsule passed pointer to memory allocated on GPU device,           when GPU is not available"
        )
    if device not in (CPU, _CUDA_HOST):
        raise TritonModelException(f"DLDevice type {device} is not support by Python backend.")


def _dtype_of(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    if code == _BFLOAT and lanes == 1:
        if bits != 16:
            raise TritonModelException(f"Expected BF16 tensor to have 16 bits, but had: {bits}")
        return BF16_BITS
    kind = _BY_CODE.get(code)
    if lanes == 1 and kind is not None and bits in ((8,) if kind == "b" else (16, 32, 64) if kind == "f" else _INTS):
        return np.dtype(f"{kind}{bits // 8}")
    raise TritonModelException(f"DLPack type code {code} with {bits} bits and {lanes} lanes has no Triton data type")


_INTS = (8, 16, 32, 64)


def _is_contiguous(shape: tuple[int, ...], strides: Any) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for at in reversed(range(len(shape))):
        if shape[at] != 1 and strides[at] != expected:
            return False
        expected *= shape[at]
    return True
