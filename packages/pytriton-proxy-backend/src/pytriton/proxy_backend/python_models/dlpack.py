"""numpy arrays as DLPack capsules, and capsules of other frameworks as arrays, both without a copy."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from ..dlpack import CPU, KINDS, DLManagedTensor, address_in, is_capsule, python_function
from ..dlpack import to_capsule as make_capsule
from ..wire.dtypes import BF16_BITS
from ..wire.record import Array
from .errors import TritonModelException

__all__ = ["CPU", "array_of", "to_capsule"]

_BFLOAT = 4
_CUDA = 2
_CUDA_HOST = 3
_USED_NAME = ctypes.create_string_buffer(b"used_dltensor")
_BY_CODE = {code: kind for kind, code in KINDS.items()}
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def to_capsule(array: Array, owner: object) -> Any:
    """Return a capsule over a C-contiguous array of numbers; it holds a reference to an owner, too."""
    return make_capsule(array, owner, code=_BFLOAT if array.dtype == BF16_BITS else None)


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
    if not is_capsule(capsule):
        raise TritonModelException("the DLPack capsule was read before, or is none of a tensor")
    address = address_in(capsule)
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
    python_function("PyCapsule_SetName", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
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
