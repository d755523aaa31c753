"""Memory on GPUs for outputs, which Triton asks for through an allocator in Python.

That for outputs in host memory is in the native library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_int64, c_size_t, c_void_p, cast

from pytriton.inprocess.capi import c_types
from pytriton.inprocess.capi.api import Api, load_api
from pytriton.inprocess.capi.enums import MemoryType
from pytriton.inprocess.tensors import gpu as _gpu
from pytriton.inprocess.tensors.memory import MemoryBuffer

__all__ = ["gpu_allocator"]

# As in `_c_types`, but with plain addresses in place of pointers.
_Allocate = CFUNCTYPE(
    c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p
)


class _Allocator:
    """An allocator of the C API. It lives as long as the process, as Triton may call it that long.

    Args:
        api: The functions.
        find: Gives, for the number of a request, the GPU that it wants its outputs on and where their memory is kept.
    """

    def __init__(self, api: Api, find: Callable[[int], tuple[int, dict[int, MemoryBuffer]]]) -> None:
        self._api = api
        self._find = find
        self._functions = _Allocate(self._allocate), c_types.ResponseAllocatorReleaseCallback(_keep)
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
                array = _gpu.allocate(size, gpu)
                address = int(array.data.ptr)
                buffers[address] = MemoryBuffer(address, MemoryType.GPU, gpu, size, array)
                c_void_p.from_address(buffer).value = address
        except BaseException as error:
            return self._api.new_error(error)
        return None


def _keep(allocator: int, buffer: int, userp: int, size: int, memory_type: int, memory_type_id: int) -> int | None:
    # The memory belongs to the outputs that were read.
    return None


_allocator: _Allocator | None = None
_lock = threading.Lock()


def gpu_allocator(find: Callable[[int], tuple[int, dict[int, MemoryBuffer]]]) -> int | None:
    """Give the address of the allocator for outputs on GPUs, of which the process has one.

    Args:
        find: Gives, for the number of a request, the GPU that it wants its outputs on and where their memory is kept.
            That of the first call counts.
    """
    global _allocator
    with _lock:
        if _allocator is None:
            _allocator = _Allocator(load_api(), find)
        return _allocator.handle
