"""`Tensor`: elements of one type with a shape, in memory of any owner.

A tensor of strings (`BYTES`) lies in memory in the form that Triton wants: for every element, in C order, its length in
32 bits and its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pytriton.inprocess.capi.enums import DataType, DLDeviceType, MemoryType
from pytriton.inprocess.capi.errors import InvalidArgumentError, UnsupportedError
from pytriton.inprocess.tensors import gpu
from pytriton.inprocess.tensors.dlpack import array_to_capsule
from pytriton.inprocess.tensors.dtypes import NUMPY_TYPES, Array, bfloat16_values, data_type_of
from pytriton.inprocess.tensors.memory import MemoryBuffer, array_of, import_array, import_dlpack
from pytriton.proxy_backend.wire.strings import decode_strings, encode_strings


class Tensor:
    """Elements of one type with a shape.

    numpy, torch and all that know `__dlpack__` read it without a copy: `numpy.from_dlpack(tensor)`,
    `torch.from_dlpack(tensor)`; `numpy.asarray(tensor)` also reads strings (as `bytes`) and bfloat16.

    Args:
        data_type: Type of the elements.
        shape: The dimensions.
        memory_buffer: Where the elements are, in C order; strings in Triton's form.

    Raises:
        InvalidArgumentError: If the data type or the shape is none, or the buffer has not the size that they need.
    """

    __slots__ = ("__weakref__", "_array", "_memory_buffer", "data_type", "shape")

    data_type: DataType
    """Type of the elements."""
    shape: tuple[int, ...]
    """The dimensions."""

    def __init__(self, data_type: DataType, shape: Sequence[int], memory_buffer: MemoryBuffer) -> None:
        self.data_type = _checked_type(data_type)
        self.shape = _checked_shape(shape)
        self._memory_buffer: MemoryBuffer | None = memory_buffer
        # The memory as an array, made on demand: of bits for BF16, of the wire form for BYTES.
        self._array: Array | None = None
        if not isinstance(memory_buffer, MemoryBuffer):
            raise InvalidArgumentError(
                f"Expected a MemoryBuffer for a Tensor, received {type(memory_buffer).__name__}. Tensor.from_dlpack() "
                "takes arrays.",
                expected="MemoryBuffer",
                received=type(memory_buffer).__name__,
            )
        if self.data_type is not DataType.BYTES:
            needed = math.prod(self.shape) * NUMPY_TYPES[self.data_type].itemsize
            if memory_buffer.size != needed:
                raise InvalidArgumentError(
                    f"Expected a buffer of {needed} bytes for a tensor of {self.data_type.name} with the shape "
                    f"{self.shape}, received one of {memory_buffer.size} bytes.",
                    expected=needed,
                    received=memory_buffer.size,
                )

    @property
    def memory_buffer(self) -> MemoryBuffer:
        """Where the elements are."""
        if self._memory_buffer is None:
            self._memory_buffer = import_array(self._host_array())[2]
        return self._memory_buffer

    @property
    def data_ptr(self) -> int:
        """Address of the first element."""
        return self.memory_buffer.data_ptr

    @property
    def memory_type(self) -> MemoryType:
        """What kind of memory it is in."""
        return self.memory_buffer.memory_type

    @property
    def memory_type_id(self) -> int:
        """Number of the device that it is on, 0 for host memory."""
        return self.memory_buffer.memory_type_id

    @property
    def size(self) -> int:
        """Size of the elements in bytes."""
        return self.memory_buffer.size

    def __repr__(self) -> str:
        place = "" if self._memory_buffer is None else f", {self.memory_type.name}:{self.memory_type_id}"
        return f"Tensor({self.data_type.name}, shape={self.shape}{place})"

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return device type of DLPack, and number of the device."""
        if self._memory_buffer is None or self.memory_type is not MemoryType.GPU:
            return int(DLDeviceType.kDLCPU), 0
        return int(DLDeviceType.kDLCUDA), self.memory_type_id

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Make a DLPack capsule over the same memory.

        In host memory, whatever is made of it holds one reference to this tensor, and nothing else of ours.

        Args:
            stream: The CUDA stream that the reader uses; must be `None` for host memory.
            max_version: The highest version of DLPack that the reader knows.
            dl_device: Device type and number that the reader wants the elements on.
            copy: Whether to copy: always, never, or (`None`) if it is needed.

        Raises:
            UnsupportedError: If it is a tensor of strings, which DLPack does not have.
            BufferError: If it cannot be exported in the way that is asked for.
        """
        if self.data_type is DataType.BYTES:
            raise UnsupportedError(
                "Expected a tensor of numbers, received one of BYTES: DLPack has no strings. to_bytes_array() and "
                "to_string_array() give them.",
                expected="a data type other than BYTES",
                received=self.data_type,
            )
        if self._memory_buffer is not None and self.memory_type is MemoryType.GPU:
            return gpu.to_capsule(self.memory_buffer, self.data_type, self.shape, stream)
        if stream is not None:
            raise BufferError(f"Expected stream=None for a tensor in host memory, received {stream!r}.")
        return array_to_capsule(
            self._host_array(), self.data_type, self, max_version=max_version, dl_device=dl_device, copy=copy
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the elements as a numpy array: on the same memory where there are numbers that numpy knows.

        Strings become an `object` array of `bytes`; bfloat16 becomes `ml_dtypes.bfloat16` on the same memory if that
        package is installed, otherwise `float32`.

        Raises:
            UnsupportedError: If it is on a device.
            ValueError: If `copy=False` and it cannot be done without.
        """
        array = self._host_array()
        if self.data_type is DataType.BYTES:
            values = self.to_bytes_array()
        elif self.data_type is DataType.BF16:
            values = bfloat16_values(array)
        else:
            values = array
        if dtype is not None and values.dtype != dtype:
            values = values.astype(dtype)
        if copy is False and not np.shares_memory(values, array) and array.size:
            raise ValueError(f"a tensor of {self.data_type.name} cannot be read as {values.dtype} without a copy")
        return values.copy() if copy and np.may_share_memory(values, array) else values

    @staticmethod
    def from_dlpack(obj: Any) -> Tensor:
        """Make a tensor of an array or a tensor of another library.

        The memory is shared, also that of a read-only array. Only a copy is made where the elements do not lie in C
        order without gaps, or not in the byte order of this machine, or are strings.

        Args:
            obj: A numpy array or scalar, or any object with `__dlpack__`.

        Raises:
            InvalidArgumentError: If it is no such object.
            UnsupportedError: If Triton has no such element type or cannot use memory of its device.
        """
        if isinstance(obj, Tensor):
            return obj
        if isinstance(obj, (np.ndarray, np.generic)):
            return _from_array(_without_mask(obj))
        if not hasattr(obj, "__dlpack__") and type(obj).__name__ != "PyCapsule" and hasattr(obj, "__array__"):
            try:
                array = np.asarray(obj)
            except Exception as error:  # What another library says, such as of a tensor on a device.
                raise InvalidArgumentError(
                    f"Expected an array that numpy can read, received a {type(obj).__name__} that cannot become one: "
                    f"{type(error).__name__}: {error}.",
                    expected="an array",
                    received=type(obj).__name__,
                ) from error
            return _from_array(array)
        try:
            return Tensor(*import_dlpack(obj))
        except InvalidArgumentError:
            strings = _strings_of(obj)
            if strings is not None:
                return _encoded(strings)
            contiguous = _contiguous_copy(obj)
            if contiguous is None:
                raise
            return Tensor(*import_dlpack(contiguous))

    @staticmethod
    def from_string_array(string_array: Any) -> Tensor:
        """Make a tensor of strings, which are sent as UTF-8.

        Args:
            string_array: A numpy array, or a string or (nested) lists of strings; `bytes` are sent as they are.

        Raises:
            InvalidArgumentError: If an element is neither text nor `bytes`, or the lists have no common shape.
        """
        return _from_strings(string_array)

    @staticmethod
    def from_bytes_array(bytes_array: Any) -> Tensor:
        """Make a tensor of strings of any bytes.

        Args:
            bytes_array: A numpy array, or a string or (nested) lists of `bytes`; text is sent as UTF-8.

        Raises:
            InvalidArgumentError: If an element is neither text nor `bytes`, or the lists have no common shape.
        """
        return _from_strings(bytes_array)

    def to_bytes_array(self) -> Array:
        """Return the strings as an `object` array of `bytes`, with the shape of the tensor.

        Raises:
            InvalidArgumentError: If it is not a tensor of strings, or its memory is not in Triton's form.
            UnsupportedError: If it is on a device.
        """
        if self.data_type is not DataType.BYTES:
            raise InvalidArgumentError(
                f"Expected a tensor of BYTES, received one of {self.data_type.name}: numpy.from_dlpack(tensor) gives "
                "its elements.",
                expected=DataType.BYTES,
                received=self.data_type,
            )
        try:
            return decode_strings(self._host_array().tobytes(), self.shape)
        except ValueError as error:
            raise InvalidArgumentError(
                f"Expected strings in Triton's form: {error}.", expected="a length and its bytes for each element"
            ) from error

    def to_string_array(self) -> Array:
        """Return the strings as an `object` array of `str`, with the shape of the tensor.

        Raises:
            InvalidArgumentError: If it is not a tensor of strings, or one of them is not UTF-8.
            UnsupportedError: If it is on a device.
        """
        encoded = self.to_bytes_array()
        decoded = np.empty(encoded.size, dtype=object)
        try:
            decoded[:] = [element.decode() for element in encoded.ravel().tolist()]
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"Expected UTF-8 in every element, received {error.object!r}: {error}. to_bytes_array() gives what is "
                "no text.",
                expected="UTF-8",
                received=error.object,
            ) from error
        return decoded.reshape(self.shape)

    def to_host(self) -> Tensor:
        """Return the tensor in host memory: itself if it is there, otherwise a copy.

        Raises:
            UnsupportedError: If it is on a device and the package `cupy` is not installed.
        """
        return self.to_device(MemoryType.CPU)

    def to_device(self, device: Any) -> Tensor:
        """Return the tensor on a device: itself if it is there, otherwise a copy.

        Args:
            device: `"cpu"`, `"gpu"`, `"gpu:0"`, a `MemoryType`, or a pair of a `MemoryType` or a `DLDeviceType` and the
                number of the device.

        Raises:
            InvalidArgumentError: If there is no such device by that name.
            UnsupportedError: If it needs a copy from or to a GPU and the package `cupy` is not installed.
        """
        memory_type, number = gpu.parse_device(device)
        here = MemoryType.GPU if self.memory_type is MemoryType.GPU else MemoryType.CPU
        if memory_type is here and (memory_type is MemoryType.CPU or number == self.memory_type_id):
            return self
        return Tensor(self.data_type, self.shape, gpu.copy_to(self.memory_buffer, memory_type, number))

    def _host_array(self) -> Array:
        if self._array is None:
            buffer = self.memory_buffer
            shape = (buffer.size,) if self.data_type is DataType.BYTES else self.shape
            self._array = array_of(buffer, NUMPY_TYPES[self.data_type], shape)
        return self._array


def tensor_of_array(data_type: DataType, shape: tuple[int, ...], array: Array) -> Tensor:
    """Make a tensor over an array of the dtype of `NUMPY_TYPES`, contiguous, without any check."""
    tensor = _new_tensor(Tensor)
    tensor.data_type = data_type
    tensor.shape = shape
    tensor._memory_buffer = None
    tensor._array = array
    return tensor


_new_tensor = Tensor.__new__


def _checked_type(data_type: Any) -> DataType:
    # A bool is an int.
    if isinstance(data_type, int) and not isinstance(data_type, bool):
        try:
            found = DataType(data_type)
        except ValueError:
            found = DataType.INVALID
        if found is not DataType.INVALID:
            return found
    raise InvalidArgumentError(
        f"Expected a DataType for a Tensor, received {data_type!r}.", expected="DataType", received=data_type
    )


def _checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        dims = tuple(dim.__index__() for dim in shape)
    except (AttributeError, TypeError):
        dims = (-1,)
    if any(dim < 0 for dim in dims):
        raise InvalidArgumentError(
            f"Expected whole numbers from 0 on as the shape of a Tensor, received {shape!r}.",
            expected="a sequence of int",
            received=shape,
        )
    return dims


def _from_array(array: Array) -> Tensor:
    data_type = data_type_of(array.dtype)
    if data_type is None:
        raise UnsupportedError(
            f"Expected elements of a type that Triton has, received a numpy array of dtype {array.dtype}.",
            expected=tuple(DataType.__members__)[1:],
            received=str(array.dtype),
        )
    if data_type is DataType.BYTES:
        return _encoded(array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # Unlike numpy.ascontiguousarray, this keeps an array without dimensions as it is.
    contiguous = array if array.flags.c_contiguous else array.copy(order="C")
    if data_type is DataType.BF16:
        return tensor_of_array(data_type, contiguous.shape, contiguous.view(np.uint16))
    return tensor_of_array(data_type, contiguous.shape, contiguous)


def _without_mask(array: Any) -> Array:
    """Return an array, or scalar, of numpy as a plain one."""
    if isinstance(array, np.ma.MaskedArray) and array.dtype.names is None and np.any(array.mask):
        # numpy.asarray would give what lies below the mask.
        raise InvalidArgumentError(
            f"Expected a value in every place, received an array with {int(np.sum(array.mask))} masked. Fill them, "
            "such as by array.filled(0).",
            expected="a value in every place",
            received="masked values",
        )
    return np.asarray(array)


def _from_strings(strings: Any) -> Tensor:
    if isinstance(strings, np.ndarray) and strings.dtype.kind in "OSUT":
        return _encoded(_without_mask(strings))
    if isinstance(strings, np.ndarray):
        raise InvalidArgumentError(
            f"Expected an array of strings (dtype object, S, U or StringDType), received one of {strings.dtype}.",
            expected="dtype object, S, U or StringDType",
            received=str(strings.dtype),
        )
    try:
        # The array is one of objects, because numpy would cut zero bytes at the end of strings, and convert between
        # text and bytes.
        array = np.array(strings, dtype=object)
        regular = not any(isinstance(element, (list, tuple)) for element in array.flat)
    except ValueError:
        regular = False
    if not regular:
        raise InvalidArgumentError(
            f"Expected (nested) lists of one shape, received {strings!r}.",
            expected="lists of the same lengths",
            received=strings,
        )
    return _encoded(array)


def _encoded(array: Array) -> Tensor:
    try:
        encoded = encode_strings(array)
    except TypeError as error:
        raise InvalidArgumentError(
            f"Expected text or bytes in every element of a tensor of strings: {error}.", expected="str or bytes"
        ) from error
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"Expected text that UTF-8 has in every element of a tensor of strings, received {error.object!r}: "
            f"{error.reason}. Send bytes where it is no text.",
            expected="text that UTF-8 has",
            received=error.object,
        ) from error
    return tensor_of_array(DataType.BYTES, array.shape, np.frombuffer(encoded, np.uint8))


def _strings_of(obj: Any) -> Array | None:
    """Return the strings of another library's array, which DLPack does not know; None for anything else."""
    if not hasattr(obj, "__array__"):
        return None
    try:
        array = np.asarray(obj)
    except Exception:
        # On a device, for example.
        return None
    return array if array.dtype.kind in "OSUT" else None


def _contiguous_copy(obj: Any) -> Any:
    """Make a contiguous copy of a tensor of another library, if it can; otherwise give nothing."""
    for method in ("contiguous", "copy"):
        copy = getattr(obj, method, None)
        if callable(copy):
            return copy()
    return None
