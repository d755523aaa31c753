"""Responses, and how they are read from the records of the native library.

In a record nothing of a response belongs to Triton any more, and the memory of its outputs becomes that of the arrays
here: a response of Triton's that is kept would keep its model and the server alive.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pytriton.inprocess.capi.enums import DataType, ParameterType
from pytriton.inprocess.capi.errors import TritonError, error_class
from pytriton.inprocess.tensors.dtypes import NUMPY_TYPES
from pytriton.inprocess.tensors.memory import MemoryBuffer
from pytriton.inprocess.tensors.tensor import Tensor, tensor_of_array

if TYPE_CHECKING:
    from pytriton.inprocess.requests.model import Model

__all__ = ["InferenceResponse", "Parameter", "read_response"]

Parameter = str | int | bool | float

# As in `native/inprocess/calls.cc`.
_HEADER: Final = struct.Struct("<QIIqIIIII")
_PARAMETER: Final = struct.Struct("<IIQ")
_OUTPUT: Final = struct.Struct("<QQIII")
_FAILED: Final = 2

_TYPES: Final = {int(data_type): (data_type, dtype) for data_type, dtype in NUMPY_TYPES.items()}
_LONGEST_CACHE: Final = 4096
_names: dict[bytes, str] = {}


class InferenceResponse:
    """One response to a request.

    Attributes:
        request_id: Id of the request.
        parameters: Parameters that the model set.
        outputs: The outputs by name. They own their memory: they stay valid after the server is gone.
        error: What went wrong, if anything did.
        classification_label: Label of the largest value, where the model has labels (`label_filename`) for an output
            and the response has one row of it.
        final: Whether no other response follows.
    """

    __slots__ = (
        "_answering",
        "_model",
        "classification_label",
        "error",
        "final",
        "outputs",
        "parameters",
        "request_id",
    )

    def __init__(
        self,
        model: Model,
        request_id: str | None = None,
        parameters: dict[str, Parameter] | None = None,
        outputs: dict[str, Tensor] | None = None,
        error: TritonError | None = None,
        classification_label: str | None = None,
        final: bool = False,
    ) -> None:
        self._model = model
        self._answering: tuple[str, int] | None = None
        self.request_id = request_id
        self.parameters: dict[str, Parameter] = {} if parameters is None else parameters
        self.outputs: dict[str, Tensor] = {} if outputs is None else outputs
        self.error = error
        self.classification_label = classification_label
        self.final = final

    @property
    def model(self) -> Model:
        """The model that answered, with its version. The one of the request is left as it is."""
        if self._answering is not None:
            asked = self._model
            name, version = self._answering
            self._answering = None
            if (name, version) != (asked.name, asked.version):
                self._model = type(asked)(asked._server, name, version)
        return self._model

    def __repr__(self) -> str:
        parts = [f"model={self.model.name!r}", f"request_id={self.request_id!r}", f"outputs={self.outputs}"]
        if self.parameters:
            parts.append(f"parameters={self.parameters}")
        if self.error is not None:
            parts.append(f"error={self.error!r}")
        return f"InferenceResponse({', '.join(parts)}, final={self.final})"


class _Memory:
    """Memory of an output, which ends with it."""

    __slots__ = ("__array_interface__", "_address", "_free")

    def __init__(self, address: int, size: int, free: Callable[[int], None]) -> None:
        self._address = address
        self._free = free
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}

    def __del__(self) -> None:
        self._free(self._address)


def read_response(
    record: bytes, response: InferenceResponse, gpu_buffers: dict[int, MemoryBuffer], free: Callable[[int], None]
) -> None:
    """Read a response as the native library gives it.

    Args:
        record: Its bytes. The memory of its outputs belongs to the response from now on.
        response: Gets what is read.
        gpu_buffers: The memory that was allocated on a GPU for the request, by address. What outputs are in is removed.
        free: Frees the memory of an output, by its address.
    """
    (_, flags, code, version, name_length, text_length, parameter_count, output_count, label_length) = (
        _HEADER.unpack_from(record)
    )
    at = _HEADER.size
    if name_length:
        end = at + name_length
        response._answering = (_text(record[at:end]), version)
        at = end
    for _ in range(parameter_count):
        kind, key_length, value_length = _PARAMETER.unpack_from(record, at)
        key_end = at + _PARAMETER.size + key_length
        key = _text(record[at + _PARAMETER.size : key_end])
        at = key_end + value_length
        response.parameters[key] = _parameter(kind, record[key_end:at])
    if flags & _FAILED:
        text = record[at : at + text_length].decode(errors="replace")
        response.error = error_class(code)(text)
        return
    for _ in range(output_count):
        address, size, number, dims_count, name_length = _OUTPUT.unpack_from(record, at)
        at += _OUTPUT.size
        shape = struct.unpack_from(f"<{dims_count}q", record, at)
        name_at = at + 8 * dims_count
        at = name_at + name_length
        memory: Any
        if not address:
            memory = bytearray(record[at : at + size])
        else:
            memory = gpu_buffers.pop(address, None) or np.asarray(_Memory(address, size, free))
        data_type, dtype = _TYPES[number]
        response.outputs[_text(record[name_at:at])] = _tensor(data_type, dtype, shape, memory, size)
        if not address:
            at += size
    if label_length:
        response.classification_label = record[at : at + label_length].decode(errors="replace")


def _tensor(data_type: DataType, dtype: np.dtype[Any], shape: tuple[int, ...], memory: Any, size: int) -> Tensor:
    if type(memory) is MemoryBuffer:
        return Tensor(data_type, shape, memory)
    if data_type is DataType.BYTES:
        return tensor_of_array(data_type, shape, np.frombuffer(memory, np.uint8, size))
    return tensor_of_array(data_type, shape, np.ndarray(shape, dtype, memory))


def _text(encoded: bytes) -> str:
    text = _names.get(encoded)
    if text is None:
        text = encoded.decode(errors="replace")
        if len(_names) < _LONGEST_CACHE:
            _names[encoded] = text
    return text


def _parameter(kind: int, value: bytes) -> Parameter:
    if kind == ParameterType.STRING:
        return value.decode(errors="replace")
    if kind == ParameterType.INT:
        return int.from_bytes(value, "little", signed=True)
    if kind == ParameterType.BOOL:
        return value != b"\0"
    if kind == ParameterType.DOUBLE:
        number: float = struct.unpack("<d", value)[0]
        return number
    raise ValueError(f"a parameter of the unknown type {kind}")
