"""Memory of CUDA devices, for tensors that are moved there and for outputs that Triton writes there.

All of it needs the package `cupy`, which is imported when it is used. Triton asks for the memory of outputs through an
allocator in Python; the one for outputs in host memory is in the native library.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_int64, c_size_t, c_void_p, cast
from typing import Any

import numpy as np

from pytriton.inprocess.capi import c_types
from pytriton.inprocess.capi.api import Api, load_api
from pytriton.inprocess.capi.enums import DataType, DLDeviceType, MemoryType
from pytriton.inprocess.capi.errors import InvalidArgumentError, UnsupportedError
from pytriton.inprocess.tensors.dtypes import NUMPY_TYPES
from pytriton.inprocess.tensors.memory import DEVICES, MemoryBuffer, view_of_address

_NAME = re.compile(r"(cpu|gpu)(?::(\d+))?", re.IGNORECASE)
_EXPECTED = '"cpu", "gpu", "gpu:<number>", a MemoryType, or a pair of a MemoryType or DLDeviceType and a number'


def parse_device(device: Any) -> tuple[MemoryType, int]:
    """Return kind of memory and number of a device; pinned host memory counts as host memory."""
    if isinstance(device, str):
        match = _NAME.fullmatch(device)
        if match:
            return MemoryType[match[1].upper()], int(match[2] or 0)
    elif isinstance(device, (MemoryType, DLDeviceType)):
        return parse_device((device, 0))
    elif isinstance(device, tuple) and len(device) == 2 and isinstance(device[1], int) and device[1] >= 0:
        kind, number = device
        if isinstance(kind, MemoryType):
            return (MemoryType.GPU, number) if kind is MemoryType.GPU else (MemoryType.CPU, number)
        # A bare number is a device type of DLPack, as in the pairs of __dlpack_device__().
        memory_type = DEVICES.get(kind) if isinstance(kind, int) else None
        if memory_type is not None:
            return memory_type, number
    raise InvalidArgumentError(
        f"Expected {_EXPECTED} as a device, received {device!r}.", expected=_EXPECTED, received=device
    )


def allocate(size_bytes: int, device_id: int) -> Any:
    """Allocate memory on a GPU."""
    cupy = _cupy()
    try:
        with cupy.cuda.Device(device_id):
            return cupy.empty(size_bytes, dtype=np.uint8)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise _unsupported(f"GPU {device_id}: {error}") from error


def copy_to(buffer: MemoryBuffer, memory_type: MemoryType, device_id: int) -> MemoryBuffer:
    """Copy memory from or to a GPU, or between two."""
    cupy = _cupy()
    if memory_type is MemoryType.GPU:
        target = allocate(buffer.size, device_id)
        with cupy.cuda.Device(device_id):
            if buffer.memory_type is MemoryType.GPU:
                target[...] = _device_array(cupy, buffer, np.dtype(np.uint8), (buffer.size,))
            else:
                target.set(view_of_address(buffer.data_ptr, buffer.size, buffer))
            cupy.cuda.get_current_stream().synchronize()
        return MemoryBuffer(int(target.data.ptr), MemoryType.GPU, device_id, buffer.size, target)
    with cupy.cuda.Device(buffer.memory_type_id):
        host = cupy.asnumpy(_device_array(cupy, buffer, np.dtype(np.uint8), (buffer.size,)))
    return MemoryBuffer.from_dlpack(host)


def to_capsule(buffer: MemoryBuffer, data_type: DataType, shape: tuple[int, ...], stream: Any) -> Any:
    """Make a DLPack capsule over memory of a GPU."""
    if data_type is DataType.BF16:
        raise UnsupportedError(
            "Expected a data type that cupy has, received BF16: to_host() gives a tensor that can be exported.",
            expected="a data type other than BF16",
            received=data_type,
        )
    cupy = _cupy()
    with cupy.cuda.Device(buffer.memory_type_id):
        return _device_array(cupy, buffer, NUMPY_TYPES[data_type], shape).__dlpack__(stream=stream)


def _device_array(cupy: Any, buffer: MemoryBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    memory = cupy.cuda.UnownedMemory(buffer.data_ptr, buffer.size, buffer, buffer.memory_type_id)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise _unsupported(str(error)) from error


def _unsupported(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"Expected the package cupy and a CUDA device to move tensors from or to a GPU: {reason}. Install cupy for "
        "your version of CUDA, such as cupy-cuda12x.",
        expected="cupy",
        received=reason,
    )


# These are the types in `c_types`, but with addresses instead of pointers.
_Allocate = CFUNCTYPE(
    c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p
)


class _Allocator:
    """An allocator of the C API. It lives as long as the process, as Triton may call it that long."""

    def __init__(self, api: Api, find: Callable[[int], tuple[int, dict[int, MemoryBuffer]]]) -> None:
        self._api = api
        self._find = find
        self._functions = _Allocate(self._allocate), c_types.ResponseAllocatorReleaseCallback(_release)
        handle = c_types.ResponseAllocatorHandle()
        api.TRITONSERVER_ResponseAllocatorNew(
            handle,
            cast(self._functions[0], c_types.ResponseAllocatorAllocCallback),
            self._functions[1],
            c_types.ResponseAllocatorStartCallback(),
        )
        self.handle = handle.value

    def _allocate(
        self,
        allocator: int,
        name: int,
        size: int,
        wanted_type: int,
        wanted_id: int,
        number: int,
        buffer: int,
        userp: int,
        memory_type: int,
        memory_type_id: int,
    ) -> int | None:
        try:
            gpu, buffers = self._find(number)
            c_int.from_address(memory_type).value = MemoryType.GPU
            c_int64.from_address(memory_type_id).value = gpu
            if size:
                array = allocate(size, gpu)
                address = int(array.data.ptr)
                buffers[address] = MemoryBuffer(address, MemoryType.GPU, gpu, size, array)
                c_void_p.from_address(buffer).value = address
        except BaseException as error:
            return self._api.new_error(error)
        return None


def _release(allocator: int, buffer: int, userp: int, size: int, memory_type: int, memory_type_id: int) -> int | None:
    # The outputs that were read own the memory.
    return None


_allocator: _Allocator | None = None
_lock = threading.Lock()


def gpu_allocator(find: Callable[[int], tuple[int, dict[int, MemoryBuffer]]]) -> int | None:
    """Return the address of the allocator for outputs on GPUs, of which the process has one."""
    global _allocator
    with _lock:
        if _allocator is None:
            _allocator = _Allocator(load_api(), find)
        return _allocator.handle
