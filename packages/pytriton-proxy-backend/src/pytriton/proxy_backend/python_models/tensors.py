"""`Tensor`: a name and an array, which other frameworks may share by DLPack."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..wire.accelerator import accelerator
from ..wire.dtypes import BYTES_CODE, code_of, dtype_of
from ..wire.record import Array
from . import dlpack
from .errors import TritonModelException, text_of


class Tensor:
    """An input or output of a model.

    Args:
        name: Its name.
        array: Its data. Strings are `object` arrays of bytes, or arrays of numpy's `S`.

    Raises:
        TritonModelException: The name is empty, or Triton has no such data type.
        UnicodeEncodeError: A text is none that UTF-8 has a form for.
    """

    __slots__ = ("_array", "_name", "_sent")

    def __init__(self, name: str, array: Array) -> None:
        sent = array
        if (
            array.__class__ is not _ARRAY
            or name.__class__ is not str
            or not name
            or not name.isascii()
            or array.dtype not in _NUMBERS
            or not array.flags.c_contiguous
        ):
            name, array, sent = _checked(name, array)
        self._name = name
        self._array = array
        self._sent: Array | None = sent

    def name(self) -> str:
        """Return its name."""
        return self._name

    def as_numpy(self) -> Array:
        """Return its data.

        Raises:
            TritonModelException: It is BF16, for which numpy has no type.
        """
        array = self._array
        if array.dtype.kind == "V":
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return array

    def triton_dtype(self) -> int:
        """Return the number of its data type."""
        return code_of(self._array.dtype)

    def shape(self) -> list[int]:
        """Return its dimensions."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Return whether it lies in the memory of the host, as all tensors here do."""
        return True

    # ---- DLPack -----------------------------------------------------------------------------------------------------

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule over its data.

        Raises:
            TritonModelException: It is one of strings.
        """
        if self.triton_dtype() == BYTES_CODE:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return dlpack.to_capsule(self._array, self)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Make a tensor over the data of another framework's, without a copy.

        Args:
            name: Its name.
            tensor: A DLPack capsule, or an object with `__dlpack__` and `__dlpack_device__`.

        Raises:
            TritonModelException: The name is empty, the object is none of these, or its data are on a device, not in C
                order, or of a type that Triton has not.
        """
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        return make_tensor(text_of(name, "from_dlpack(name, tensor)"), dlpack.array_of(tensor))

    def __dlpack__(self, *, stream: Any = None, **_options: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0


_ARRAY = np.ndarray
_NUMBERS = frozenset(map(dtype_of, range(1, BYTES_CODE)))


def _checked(name: str, array: Array) -> tuple[str, Array, Array]:
    """Return name and data of a tensor, and the data as they are sent."""
    name = text_of(name, "Tensor(name, array)")
    if not isinstance(array, np.ndarray):
        raise TypeError(f"Tensor(name, array): expected a numpy.ndarray, got a {type(array).__name__}")
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    if not array.dtype.isnative and array.dtype.kind in "iuf":
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype not in _NUMBERS and array.dtype.kind not in "OST":
        raise TritonModelException("NumPy dtype is not supported.")
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    # Encoded here, where the model can answer the single request whose text is wrong.
    return name, array, wire_array(array)


def make_tensor(name: str, array: Array) -> Tensor:
    """Make a tensor of an array that needs no check."""
    made = _new_tensor(Tensor)
    made._name = name
    made._array = array
    made._sent = None
    return made


_new_tensor = Tensor.__new__


def sent_array(tensor: Tensor) -> Array:
    """Return the data of a tensor as they are sent."""
    sent: Array | None = tensor._sent
    # The model may have changed elements of an input.
    return wire_array(tensor._array) if sent is None else sent


def sent_arrays(tensors: Iterable[Tensor]) -> dict[str, Array]:
    """Return the data of tensors as they are sent, by name."""
    arrays: dict[str, Array] = {}
    # In one loop, because every response passes here.
    for tensor in tensors:
        sent = tensor._sent
        arrays[tensor._name] = wire_array(tensor._array) if sent is None else sent
    return arrays


def wire_array(array: Array) -> Array:
    """Return an array whose elements can be sent; like Triton, other objects than bytes and str become text."""
    if array.dtype.kind != "O":
        return array
    native = accelerator()
    if native is not None and native.are_strings(array):
        return array
    made = np.empty(array.size, object)
    made[:] = [_as_bytes(element) for element in array.ravel().tolist()]
    converted: Array = made.reshape(array.shape)
    return converted


def _as_bytes(element: object) -> bytes:
    if isinstance(element, bytes):
        return element
    return str(element).encode()


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Return the wire form of a tensor of strings: for each element its length in 32 bits, then its bytes.

    Args:
        input_tensor: An array of objects, of which all but bytes are sent as their text, or of numpy's `S` or
            `StringDType`.

    Returns:
        The bytes; an empty tuple where there is no element, and `None` if the array is of another kind.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OST":
        return None
    parts = []
    for element in input_tensor.ravel(order="C").tolist():
        raw = _as_bytes(element)
        parts.append(struct.pack("<I", len(raw)))
        parts.append(raw)
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Return a one-dimensional array of the bytes that a wire form holds."""
    strings = []
    at = 0
    while at < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, at)
        strings.append(struct.unpack_from(f"<{length}s", encoded_tensor, at + 4)[0])
        at += 4 + length
    made = np.empty(len(strings), object)
    made[:] = strings
    return made
