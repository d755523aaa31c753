"""Responses: the memory for their outputs, and what is read from Triton's response before it is deleted.

Triton gets the memory for outputs from here, so that nothing of a response belongs to Triton once it is read. That is
done in the callback that brings it, which also deletes it: one that is kept would keep its model and the server alive.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import byref, c_bool, c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pytriton.inprocess import _gpu
from pytriton.inprocess._api import Api
from pytriton.inprocess._dtypes import NUMPY_TYPES
from pytriton.inprocess._enums import DataType, MemoryType, ParameterType
from pytriton.inprocess._errors import TritonError
from pytriton.inprocess._hot_calls import HotCalls
from pytriton.inprocess._memory import MemoryBuffer
from pytriton.inprocess._tensor import Tensor

if TYPE_CHECKING:
    from pytriton.inprocess._model import Model

__all__ = ["LABELLED", "InferenceResponse", "Parameter", "allocate", "read_response"]

logger = logging.getLogger(__name__)

Parameter = str | int | bool | float

_SMALL: Final = 4096
_Byte: Any = ctypes.c_char
_new_tensor: Final = Tensor.__new__
_TYPES: Final = {int(data_type): (data_type, dtype) for data_type, dtype in NUMPY_TYPES.items()}
_LONGEST_CACHE: Final = 4096


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


def allocate(buffers: dict[int, Any], size: int, gpu: int | None, buffer: int, memory_type: int, number: int) -> None:
    """Allocate memory for an output.

    Args:
        buffers: Where it is kept, by its address, until the response is read.
        size: In bytes.
        gpu: Number of the GPU that it is wanted on; `None` for host memory.
        buffer: Where Triton takes the address from.
        memory_type: Where it takes the kind of memory from.
        number: Where it takes the number of the device from.
    """
    c_int.from_address(memory_type).value = MemoryType.CPU if gpu is None else MemoryType.GPU
    c_int64.from_address(number).value = gpu or 0
    if not size:
        return
    if gpu is not None:
        array = _gpu.allocate(size, gpu)
        address = int(array.data.ptr)
        buffers[address] = MemoryBuffer(address, MemoryType.GPU, gpu, size, array)
    else:
        # Bytes are quicker to make than arrays, but are filled with zeros first.
        memory: Any = bytearray(size) if size <= _SMALL else np.empty(size, np.uint8)
        address = ctypes.addressof(_Byte.from_buffer(memory))
        buffers[address] = memory
    c_void_p.from_address(buffer).value = address


class _Scratch:
    """Where Triton writes what it says of a response. Made anew for every call, it would cost more than the call."""

    __slots__ = ("name", "places", "words")

    def __init__(self) -> None:
        # Every value has 64 bits of its own. The upper half of the shorter ones is never written, and stays 0.
        self.words = (c_uint64 * 9)()
        start = ctypes.addressof(self.words)
        self.places = tuple(range(start, start + 72, 8))
        self.name = c_char_p.from_buffer(self.words)


# Taken from the end and put back there, which is safe between threads. Not by thread: a thread of Triton's is a new one
# to Python in every callback.
_scratches: list[_Scratch] = []

LABELLED: set[str] = set()
"""Names of models that have labels for their outputs, as far as they were asked for."""

_names: dict[bytes, str] = {}


def read_response(api: Api, calls: HotCalls, handle: int, response: InferenceResponse, buffers: dict[int, Any]) -> None:
    """Read all of Triton's response.

    Args:
        api: The functions.
        calls: Those of them that every response needs.
        handle: The response of Triton. It is not deleted.
        response: Gets what is read.
        buffers: The memory that was allocated for the request, by address. What the outputs are in is taken out.
    """
    try:
        scratch = _scratches.pop()
    except IndexError:
        scratch = _Scratch()
    places, words, name = scratch.places, scratch.words, scratch.name
    name_at, count_at = places[0], places[3]
    error = calls.InferenceResponseModel(handle, name_at, places[7])
    if error:
        calls.check(error)
    model_name = _text(name.value)
    response._answering = (model_name, words[7])
    error = calls.InferenceResponseParameterCount(handle, count_at)
    if error:
        calls.check(error)
    if words[3]:
        _read_parameters(api, handle, words[3], response.parameters)
    error = calls.InferenceResponseError(handle)
    if error:
        # It belongs to the response.
        response.error = api.error_from(error)
    else:
        error = calls.InferenceResponseOutputCount(handle, count_at)
        if error:
            calls.check(error)
        outputs = response.outputs
        for index in range(words[3]):
            error = calls.InferenceResponseOutput(handle, index, *places)
            if error:
                calls.check(error)
            _, number, dims, dim_count, base, size, _, _, _ = words[:]
            data_type, dtype = _TYPES[number]
            shape = tuple((c_int64 * dim_count).from_address(dims)) if dim_count else ()
            outputs[_text(name.value)] = _tensor(data_type, dtype, shape, buffers.pop(base, None), size)
        if LABELLED and model_name in LABELLED:
            response.classification_label = _label(api, handle, outputs)
    _scratches.append(scratch)


def _label(api: Api, handle: int, outputs: dict[str, Tensor]) -> str | None:
    label = c_char_p()
    for index, tensor in enumerate(outputs.values()):
        size = 0 if tensor._array is None or tensor.data_type is DataType.BYTES else tensor._array.size
        if not size or tensor.shape[-1:] != (size,):
            continue
        best = int(np.argmax(np.asarray(tensor)))
        api.TRITONSERVER_InferenceResponseOutputClassificationLabel(handle, index, best, byref(label))
        if label.value is not None:
            return label.value.decode(errors="replace")
    return None


def _read_parameters(api: Api, handle: int, count: int, parameters: dict[str, Parameter]) -> None:
    name, kind, value = c_char_p(), c_int(), c_void_p()
    for index in range(count):
        api.TRITONSERVER_InferenceResponseParameter(handle, index, byref(name), byref(kind), byref(value))
        parameters[_text(name.value)] = _parameter(kind.value, value.value)


def _tensor(data_type: DataType, dtype: np.dtype[Any], shape: tuple[int, ...], memory: Any, size: int) -> Tensor:
    if type(memory) is MemoryBuffer:
        return Tensor(data_type, shape, memory)
    if memory is None:
        # Nothing was allocated, as it is empty.
        memory = bytearray()
    if data_type is DataType.BYTES:
        return Tensor._of_array(data_type, shape, np.frombuffer(memory, np.uint8, size))
    tensor = _new_tensor(Tensor)
    tensor.data_type = data_type
    tensor.shape = shape
    tensor._memory_buffer = None
    tensor._array = np.ndarray(shape, dtype, memory)
    return tensor


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
