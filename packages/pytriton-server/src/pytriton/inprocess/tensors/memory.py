"""Memory of tensors, whoever owns it, and arrays over it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from pytriton.inprocess.capi.enums import DataType, DLDeviceType, MemoryType
from pytriton.inprocess.capi.errors import InvalidArgumentError, UnsupportedError
from pytriton.inprocess.tensors.dlpack import read_capsule
from pytriton.inprocess.tensors.dtypes import BIT_WIDTHS, Array, data_type_of, data_type_of_dlpack

DEVICES: Final[dict[int, MemoryType]] = {
    DLDeviceType.kDLCPU: MemoryType.CPU,
    # To readers, pinned memory is host memory.
    DLDeviceType.kDLCUDAHost: MemoryType.CPU,
    DLDeviceType.kDLCUDA: MemoryType.GPU,
    DLDeviceType.kDLCUDAManaged: MemoryType.GPU,
}


@dataclass
class MemoryBuffer:
    """A stretch of memory, and what keeps it.

    Attributes:
        data_ptr: Its address.
        memory_type: What kind of memory it is.
        memory_type_id: Number of the device, 0 for host memory.
        size: In bytes.
        owner: The object that the memory belongs to. It lives at least as long as this one.
    """

    data_ptr: int
    memory_type: MemoryType
    memory_type_id: int
    size: int
    owner: Any
    _keep: Any = field(default=None, repr=False, compare=False)
    _read_only: bool = field(default=False, repr=False, compare=False)

    def __eq__(self, other: object) -> bool:
        # Owners are compared by identity, because comparing two arrays gives an array.
        return isinstance(other, MemoryBuffer) and self.owner is other.owner and self._place == other._place

    @property
    def _place(self) -> tuple[int, MemoryType, int, int]:
        return self.data_ptr, self.memory_type, self.memory_type_id, self.size

    @classmethod
    def from_dlpack(cls, owner: Any) -> MemoryBuffer:
        """Refer to the memory of an array or tensor, without copying it.

        Args:
            owner: A numpy array, or any object with `__dlpack__`, whose elements lie in C order without gaps.

        Raises:
            InvalidArgumentError: If it is no such object, or not contiguous.
            UnsupportedError: If Triton has no such element type or cannot use memory of that device.
        """
        return import_dlpack(owner)[2]


def import_dlpack(owner: Any) -> tuple[DataType, tuple[int, ...], MemoryBuffer]:
    """Get data type, shape and memory of a contiguous array or tensor."""
    if isinstance(owner, np.ndarray):
        return import_array(owner)
    imported = read_capsule(owner)
    data_type = data_type_of_dlpack(*imported.dtype)
    if data_type is None:
        code, bits, lanes = imported.dtype
        raise UnsupportedError(
            f"Expected elements of a type that Triton has, received DLPack type code {code} with {bits} bits and "
            f"{lanes} lanes from {type(owner).__name__}.",
            expected=tuple(DataType.__members__)[1:],
            received=imported.dtype,
        )
    memory_type = DEVICES.get(imported.device)
    if memory_type is None:
        raise UnsupportedError(
            f"Expected memory of the host or of a CUDA device, received DLPack device {imported.device} from "
            f"{type(owner).__name__}.",
            expected=("host", "CUDA"),
            received=(imported.device, imported.device_id),
        )
    if not imported.contiguous:
        raise InvalidArgumentError(
            f"Expected contiguous memory, received strides {imported.strides} for the shape {imported.shape} from "
            f"{type(owner).__name__}. A contiguous copy of it is accepted.",
            expected="C order without gaps",
            received=imported.strides,
        )
    size = BIT_WIDTHS[data_type] // 8
    for dim in imported.shape:
        size *= dim
    device_id = imported.device_id if memory_type is MemoryType.GPU else 0
    buffer = MemoryBuffer(imported.address, memory_type, device_id, size, owner, imported.capsule, imported.read_only)
    return data_type, imported.shape, buffer


def import_array(array: Array) -> tuple[DataType, tuple[int, ...], MemoryBuffer]:
    """Get data type, shape and memory of a contiguous numpy array that is not one of strings."""
    data_type = data_type_of(array.dtype)
    if data_type is None or data_type is DataType.BYTES or not array.dtype.isnative:
        raise UnsupportedError(
            f"Expected elements of a fixed size that Triton has, in the byte order of this machine, received a numpy "
            f"array of dtype {array.dtype}.",
            expected=tuple(DataType.__members__)[1:],
            received=str(array.dtype),
        )
    if not array.flags.c_contiguous:
        raise InvalidArgumentError(
            f"Expected contiguous memory, received strides {array.strides} for the shape {array.shape} of a numpy "
            "array. numpy.ascontiguousarray() makes a contiguous copy.",
            expected="C order without gaps",
            received=array.strides,
        )
    address = int(array.__array_interface__["data"][0])
    buffer = MemoryBuffer(address, MemoryType.CPU, 0, array.nbytes, array, None, not array.flags.writeable)
    return data_type, array.shape, buffer


class _ExternalMemory:
    """Memory from outside of numpy in the form that numpy reads, with its owner."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, size_bytes: int, owner: object, read_only: bool) -> None:
        self.__array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, read_only),
            "version": 3,
        }
        self.owner = owner


def view_of_address(address: int, size_bytes: int, owner: object, *, read_only: bool = False) -> Array:
    """Return memory as an array of bytes that keeps its owner alive, as long as the array or a view of it lives."""
    if not size_bytes:
        return np.empty(0, np.uint8)
    return np.asarray(_ExternalMemory(address, size_bytes, owner, read_only))


def array_of(buffer: MemoryBuffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return host memory as an array that keeps it."""
    if buffer.memory_type is MemoryType.GPU:
        raise UnsupportedError(
            f"Expected a tensor in host memory, received one on GPU {buffer.memory_type_id}. to_host() copies it.",
            expected=MemoryType.CPU,
            received=buffer.memory_type,
        )
    owner = buffer.owner
    if isinstance(owner, np.ndarray) and owner.dtype == dtype and owner.shape == shape and owner.flags.c_contiguous:
        return owner
    count = 1
    for dim in shape:
        count *= dim
    memory = view_of_address(buffer.data_ptr, count * dtype.itemsize, buffer, read_only=buffer._read_only)
    return memory.view(dtype).reshape(shape)
