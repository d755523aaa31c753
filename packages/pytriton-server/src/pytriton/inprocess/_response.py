"""Responses: the memory for their outputs, and what is read from Triton's response before it is deleted.

Triton gets the memory for outputs from here, so that nothing of a response belongs to Triton once it is read. That is
done in the callback that brings it, which also deletes it: one that is kept would keep its model and the server alive.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, byref, c_bool, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pytriton.inprocess import _gpu
from pytriton.inprocess._api import Api
from pytriton.inprocess._dtypes import NUMPY_TYPES
from pytriton.inprocess._enums import DataType, MemoryType, ParameterType
from pytriton.inprocess._errors import TritonError
from pytriton.inprocess._memory import MemoryBuffer
from pytriton.inprocess._tensor import Tensor

if TYPE_CHECKING:
    from pytriton.inprocess._model import Model

__all__ = ["InferenceResponse", "Parameter", "allocate", "read_response"]

logger = logging.getLogger(__name__)

Parameter = str | int | bool | float

_SMALL: Final = 4096
_Byte: Any = ctypes.c_char
_TYPES: Final = {int(data_type): (data_type, dtype) for data_type, dtype in NUMPY_TYPES.items()}
_LONGEST_CACHE: Final = 4096


class InferenceResponse:
    """One response to a request.

    Attributes:
        request_id: Id of the request.
        parameters: Parameters that the model set.
        outputs: The outputs by name. They own their memory: they stay valid after the server is gone.
        error: What went wrong, if anything did.
        classification_label: Not set. It is there as Triton's own Python API has it.
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


def allocate(
    buffers: dict[int, Any], size: int, gpu: int | None, buffer: Any, memory_type: Any, memory_type_id: Any
) -> None:
    """Allocate memory for an output.

    Args:
        buffers: Where it is kept, by its address, until the response is read.
        size: In bytes.
        gpu: Number of the GPU that it is wanted on; `None` for host memory.
        buffer: Pointer to where Triton takes the address from.
        memory_type: Pointer to where it takes the kind of memory from.
        memory_type_id: Pointer to where it takes the number of the device from.
    """
    if gpu is not None and size:
        array = _gpu.allocate(size, gpu)
        address = int(array.data.ptr)
        memory_type[0], memory_type_id[0] = MemoryType.GPU, gpu
        buffers[address] = MemoryBuffer(address, MemoryType.GPU, gpu, size, array)
        buffer[0] = address
        return
    memory_type[0] = memory_type_id[0] = 0
    if not size:
        return
    # Bytes are quicker to make and to find than arrays, but are filled with zeros first.
    memory: Any = bytearray(size) if size <= _SMALL else np.empty(size, np.uint8)
    address = ctypes.addressof(_Byte.from_buffer(memory))
    buffers[address] = memory
    buffer[0] = address


class _Scratch:
    """Where Triton writes what it says of an output. Made anew for every call, it would cost more than the call."""

    __slots__ = ("base", "count", "data_type", "dims", "kind", "name", "pointers", "size", "version")

    def __init__(self) -> None:
        self.name = c_char_p()
        self.data_type = c_int()
        self.dims = POINTER(c_int64)()
        self.count = c_uint64()
        self.base = c_void_p()
        self.size = c_size_t()
        self.kind = c_int()
        self.version = c_int64()
        self.pointers = (
            byref(self.name),
            byref(self.data_type),
            byref(self.dims),
            byref(self.count),
            byref(self.base),
            byref(self.size),
            byref(self.kind),
            byref(self.version),
            byref(c_void_p()),
        )


# Taken from the end and put back there, which is safe between threads. Not by thread: a thread of Triton's is a new one
# to Python in every callback.
_scratches: list[_Scratch] = []
_names: dict[bytes, str] = {}


def read_response(api: Api, handle: int, response: InferenceResponse, buffers: dict[int, Any]) -> None:
    """Read all of Triton's response.

    Args:
        api: The functions.
        handle: The response of Triton. It is not deleted.
        response: Gets what is read.
        buffers: The memory that was allocated for the request, by address. What the outputs are in is taken out.
    """
    try:
        scratch = _scratches.pop()
    except IndexError:
        scratch = _Scratch()
    name, kind, number = scratch.name, scratch.kind, scratch.version
    name_at, type_at, dims_at, dim_count_at, base_at, size_at, kind_at, number_at, userp_at = scratch.pointers
    count = c_uint32()
    count_at = byref(count)

    api.TRITONSERVER_InferenceResponseModel(handle, name_at, number_at)
    response._answering = (_text(name.value), number.value)
    api.TRITONSERVER_InferenceResponseParameterCount(handle, count_at)
    for index in range(count.value):
        api.TRITONSERVER_InferenceResponseParameter(handle, index, name_at, kind_at, base_at)
        response.parameters[_text(name.value)] = _parameter(kind.value, scratch.base.value)

    error = api.TRITONSERVER_InferenceResponseError(handle)
    if error:
        response.error = api.error_from(error)
    else:
        api.TRITONSERVER_InferenceResponseOutputCount(handle, count_at)
        outputs = response.outputs
        for index in range(count.value):
            api.TRITONSERVER_InferenceResponseOutput(
                handle, index, name_at, type_at, dims_at, dim_count_at, base_at, size_at, kind_at, number_at, userp_at
            )
            data_type, dtype = _TYPES[scratch.data_type.value]
            shape = tuple(scratch.dims[: scratch.count.value])
            memory = buffers.pop(scratch.base.value or 0, None)
            outputs[_text(name.value)] = _tensor(data_type, dtype, shape, memory, scratch.size.value)
    _scratches.append(scratch)


def _tensor(data_type: DataType, dtype: np.dtype[Any], shape: tuple[int, ...], memory: Any, size: int) -> Tensor:
    if type(memory) is MemoryBuffer:
        return Tensor(data_type, shape, memory)
    if memory is None:
        # Nothing was allocated, as it is empty.
        memory = bytearray()
    if data_type is DataType.BYTES:
        return Tensor._of_array(data_type, shape, np.frombuffer(memory, np.uint8, size))
    return Tensor._of_array(data_type, shape, np.ndarray(shape, dtype, memory))


def _text(encoded: bytes | None) -> str:
    if encoded is None:
        return ""
    text = _names.get(encoded)
    if text is None:
        text = encoded.decode(errors="replace")
        if len(_names) < _LONGEST_CACHE:
            _names[encoded] = text
    return text


def _parameter(kind: int, address: int | None) -> Parameter:
    if kind == ParameterType.STRING:
        # The address is that of the text itself.
        return ctypes.string_at(address).decode(errors="replace") if address else ""
    if address is None:
        raise ValueError(f"a parameter of the type {kind} without a value")
    if kind == ParameterType.INT:
        return c_int64.from_address(address).value
    if kind == ParameterType.BOOL:
        return c_bool.from_address(address).value
    if kind == ParameterType.DOUBLE:
        return c_double.from_address(address).value
    raise ValueError(f"a parameter of the unknown type {kind}")
