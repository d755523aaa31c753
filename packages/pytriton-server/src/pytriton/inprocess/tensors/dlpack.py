"""DLPack capsules: reading those of other libraries, and making those of ours, unversioned (before 1.0) and not."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_void_p, py_object
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pytriton.inprocess.capi.enums import DataType, DLDeviceType
from pytriton.inprocess.capi.errors import InvalidArgumentError, UnsupportedError
from pytriton.inprocess.capi.library import NativeLibrary, load_library
from pytriton.inprocess.tensors.dtypes import DLPACK_TYPES, Array
from pytriton.proxy_backend.dlpack import DLManagedTensor, DLManagedTensorVersioned

_UNVERSIONED: Final = b"dltensor"
_VERSIONED: Final = b"dltensor_versioned"
_READ_ONLY: Final = 1
_SUPPORTED_MAJOR: Final = 1
# The number that DLPack gives to CUDA's default stream, for which those of Triton's backends wait.
_DEFAULT_STREAM: Final = 1

# The function objects of ctypes.pythonapi are shared by the whole process, so they stay unchanged.
_python = ctypes.PyDLL(None)
_is_valid = _python["PyCapsule_IsValid"]
_is_valid.argtypes = [py_object, c_char_p]
_is_valid.restype = ctypes.c_int
_pointer_of = _python["PyCapsule_GetPointer"]
_pointer_of.argtypes = [py_object, c_char_p]
_pointer_of.restype = c_void_p


@dataclass(frozen=True)
class Imported:
    """What a capsule says of a tensor."""

    address: int  # of its first element; 0 for an empty tensor without memory
    device: int  # the device type of DLPack, as a number: it may be one that is not known here
    device_id: int  # number of the device
    dtype: tuple[int, int, int]  # code, bits and lanes of DLPack
    shape: tuple[int, ...]  # the dimensions
    strides: tuple[int, ...] | None  # in elements; `None` means C order
    read_only: bool  # whether its memory must not be written
    capsule: Any  # keeps the memory: it is not consumed, and releases the tensor when it goes

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        if self.strides is None or 0 in self.shape:
            return True
        expected = 1
        for dim, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if dim != 1 and stride != expected:
                return False
            expected *= dim
        return True


def read_capsule(source: Any) -> Imported:
    """Get a tensor from an object with `__dlpack__`, or from a capsule, without copying it."""
    capsule = source if type(source).__name__ == "PyCapsule" else _ask(source)
    if _is_valid(capsule, _VERSIONED):
        managed = DLManagedTensorVersioned.from_address(_pointer_of(capsule, _VERSIONED))
        if managed.major != _SUPPORTED_MAJOR:
            raise UnsupportedError(
                f"Expected a DLPack tensor of version {_SUPPORTED_MAJOR} from {type(source).__name__}, received "
                f"{managed.major}.{managed.minor}.",
                expected=_SUPPORTED_MAJOR,
                received=(managed.major, managed.minor),
            )
        tensor, read_only = managed.tensor, bool(managed.flags & _READ_ONLY)
    elif _is_valid(capsule, _UNVERSIONED):
        tensor, read_only = DLManagedTensor.from_address(_pointer_of(capsule, _UNVERSIONED)).tensor, False
    else:
        raise InvalidArgumentError(
            f"Expected a DLPack capsule that nobody consumed from {type(source).__name__}, received {capsule!r}.",
            expected="a DLPack capsule",
            received=capsule,
        )
    ndim = tensor.ndim
    return Imported(
        address=(tensor.data or 0) + tensor.byte_offset,
        device=tensor.device_type,
        device_id=tensor.device_id,
        dtype=(tensor.code, tensor.bits, tensor.lanes),
        shape=tuple(tensor.shape[:ndim]),
        strides=tuple(tensor.strides[:ndim]) if tensor.strides else None,
        read_only=read_only,
        capsule=capsule,
    )


def _ask(source: Any) -> Any:
    export = getattr(source, "__dlpack__", None)
    if export is None:
        raise InvalidArgumentError(
            f"Expected an object with __dlpack__, received {type(source).__name__}.",
            expected="an object with __dlpack__",
            received=type(source).__name__,
        )
    gpu = _gpu_of(source)
    options = {} if gpu is None else {"stream": _DEFAULT_STREAM}
    try:
        try:
            capsule = export(max_version=(_SUPPORTED_MAJOR, 0), **options)
        except TypeError:
            # Before DLPack 1.0, the method has no such argument.
            capsule = export(**options)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"Expected a tensor that {type(source).__name__}.__dlpack__ can export, which failed: {error}",
            expected="a tensor that can be exported",
            received=f"{type(error).__name__}: {error}",
        ) from error
    if gpu is not None:
        _wait_for(gpu)
    return capsule


def _gpu_of(source: Any) -> int | None:
    """Return the number of the GPU that has the elements; `None` if no stream has to be waited for."""
    device = getattr(source, "__dlpack_device__", None)
    kind, number = (DLDeviceType.kDLCPU, 0) if device is None else device()
    return int(number) if kind in (DLDeviceType.kDLCUDA, DLDeviceType.kDLCUDAManaged) else None


def _wait_for(gpu: int) -> None:
    """Wait until the default stream of a GPU has done its work, for which the streams of some backends do not wait."""
    wait = NativeLibrary().function("wait_for_device", c_char_p, ctypes.c_int)
    # Triton's library brings the CUDA runtime where no other one has.
    wrong = wait(gpu) and (load_library(), wait(gpu))[1]
    if wrong:
        raise UnsupportedError(
            f"Expected a tensor of GPU {gpu} whose elements are there, which cannot be waited for: {wrong.decode()}.",
            expected="a CUDA device",
            received=wrong.decode(),
        )


def array_to_capsule(
    array: Array,
    data_type: DataType,
    owner: object,
    *,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> Any:
    """Make a capsule over an array in host memory.

    numpy manages the memory, so releasing it needs none of our code, in any thread. `copy` is always (`True`), never
    (`False`) or if needed (`None`); a reader that cannot know that memory is read-only gets a copy.
    """
    if dl_device is not None and dl_device[0] != DLDeviceType.kDLCPU:
        raise BufferError(
            f"Expected the host (1, 0) as the device of a tensor in host memory, received {dl_device}: to_device() "
            "moves it."
        )
    try:
        capsule = _numpy_capsule(array.copy() if copy else _owned(array, owner), max_version)
    except BufferError:
        if array.flags.writeable or copy is False:
            raise
        # A reader of DLPack before 1.0 cannot learn that memory is read-only.
        capsule = _numpy_capsule(array.copy(), max_version)
    if data_type is DataType.BF16:
        # The capsule is changed in place: only the type differs from numpy's, and nobody else uses its structure.
        if _is_valid(capsule, _VERSIONED):
            tensor = DLManagedTensorVersioned.from_address(_pointer_of(capsule, _VERSIONED)).tensor
        else:
            tensor = DLManagedTensor.from_address(_pointer_of(capsule, _UNVERSIONED)).tensor
        tensor.code, tensor.bits = DLPACK_TYPES[data_type]
    return capsule


class _OwnedArray(np.ndarray[Any, Any]):
    """A view of an array that keeps another object alive as well."""

    owner: object


def _owned(array: Array, owner: object) -> Array:
    view = array.view(_OwnedArray)
    view.owner = owner
    return view


def _numpy_capsule(array: Any, max_version: tuple[int, int] | None) -> Any:
    if max_version is not None:
        try:
            return array.__dlpack__(max_version=max_version)
        except TypeError:
            # numpy before 2.1 makes capsules without a version, which every reader must accept.
            return array.__dlpack__()
    return array.__dlpack__()
