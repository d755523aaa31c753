"""`InferenceRequest`, and the request of the C API that is made of it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import addressof, c_int64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pytriton.inprocess.capi.api import Api
from pytriton.inprocess.capi.enums import DataType, MemoryType
from pytriton.inprocess.capi.errors import InvalidArgumentError, checked_integer, encoded_text, wrong_argument
from pytriton.inprocess.capi.native_calls import NativeCalls
from pytriton.inprocess.requests.model_spec import describe
from pytriton.inprocess.requests.response import Parameter
from pytriton.inprocess.requests.tracing import Trace
from pytriton.inprocess.requests.values import to_tensor
from pytriton.inprocess.tensors import gpu
from pytriton.inprocess.tensors.dtypes import NUMPY_TYPES
from pytriton.inprocess.tensors.tensor import Tensor

if TYPE_CHECKING:
    from pytriton.inprocess.requests.model import Model

__all__ = ["InferenceRequest", "fill", "output_gpu"]

_SMALL: Final = 2048
"""Inputs up to this size, in bytes, are copied: that costs less than to find out where they are."""

_Byte: Any = ctypes.c_char
_INT64: Final = range(-(2**63), 2**63)
_UINT64: Final = range(2**64)
_UINT32: Final = range(2**32)
_LONGEST_CACHE: Final = 4096

_TYPE_NUMBERS: Final = {
    dtype: int(data_type)
    for data_type, dtype in NUMPY_TYPES.items()
    if data_type not in (DataType.BF16, DataType.BYTES)
}
# What Triton wants to know of an array, by its dtype and shape: number of the data type, address of the dimensions,
# their count, size of the array; and what owns the dimensions.
_layouts: dict[tuple[np.dtype[Any], tuple[int, ...]], tuple[int, int, int, int, Any]] = {}
_names: dict[str, bytes] = {}


@dataclass(slots=True)
class InferenceRequest:
    """A request to a model. It may be sent any number of times, also while it is in flight.

    Attributes:
        model: The model.
        request_id: Comes back with the responses, and appears in Triton's log and traces.
        flags: Place in a sequence: 1 starts one, 2 ends it (`RequestFlag`).
        correlation_id: Sequence that the request belongs to.
        priority: Priority level: 1 is the highest, 0 is the model's default.
        timeout: How long the request may wait in the queue, in microseconds; 0 for the model's default. It takes effect
            where the queue policy of the model allows it.
        inputs: Values by the name of the input: a `Tensor`, a numpy array or scalar, (nested) lists, which get the data
            type of the input, or any object with `__dlpack__`. A single number or string is a tensor of one element.
            The memory of arrays is used as it is, so that they must not be changed before the response.
        parameters: Values for the model, each a `str`, `int`, `bool` or `float`.
        output_memory_type: Where outputs are wanted: see `Tensor.to_device`. `None` is host memory.
        response_queue: Gets all responses, in addition to the iterator: a `queue.SimpleQueue`, or for `async_infer` an
            `asyncio.Queue`.
        requested_outputs: Names of the outputs that are wanted; all of them if there are none.
        response_timeout_s: How long to wait for each next response, in seconds, before a `TimedOutError` is raised;
            `None` waits without a limit.
        trace: Records what happens to the request.
    """

    model: Model
    request_id: str | None = None
    flags: int = 0
    correlation_id: int | str | None = None
    priority: int = 0
    timeout: int = 0
    inputs: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    output_memory_type: Any = None
    response_queue: Any = None
    requested_outputs: Sequence[str] = ()
    response_timeout_s: float | None = None
    trace: Trace | None = None


def output_gpu(request: InferenceRequest) -> int | None:
    """Give the number of the GPU that outputs are wanted on; `None` for host memory.

    Raises:
        InvalidArgumentError: If `output_memory_type` names no kind of memory.
        UnsupportedError: If it is a GPU, and cupy is not installed or finds no such device.
    """
    memory_type, number = gpu.parse_device(request.output_memory_type)
    if memory_type is not MemoryType.GPU:
        return None
    # Found out here, and not when Triton wants the memory.
    gpu.allocate(1, number)
    return number


def fill(api: Api, calls: NativeCalls, handle: int, request: InferenceRequest, keep: list[Any]) -> bool:
    """Put everything into a request of the C API but its callbacks.

    Args:
        api: The functions.
        calls: Those of them that every request needs.
        handle: The request of the C API.
        request: What to put into it.
        keep: Gets all that must live until Triton releases the request.

    Returns:
        Whether an input is large, so that those that want to keep views on it need to find its owner.

    Raises:
        InvalidArgumentError: If a field of the request has a value that cannot be sent.
        UnsupportedError: If Triton has no such element type.
    """
    inputs = request.inputs
    if not isinstance(inputs, Mapping):
        raise _wrong(request, "inputs", "a mapping of names to values", inputs)
    large = False
    for name, value in inputs.items():
        encoded = _names.get(name)
        if encoded is None:
            encoded = _encoded_name(request, name)
        if type(value) is np.ndarray and value.flags.c_contiguous:
            layout = _layouts.get((value.dtype, value.shape)) or _layout_of(value)
            if layout is not None:
                number, dims, count, size, _ = layout
                data: Any
                if size <= _SMALL:
                    data = value.tobytes()
                    keep.append(data)
                else:
                    large = True
                    keep.append(value)
                    if value.flags.writeable:
                        data = addressof(_Byte.from_buffer(value))
                    else:
                        data = value.__array_interface__["data"][0]
                error = calls.add_input(handle, encoded, number, dims, count)
                if error:
                    calls.check(error)
                error = calls.append_input_data(handle, encoded, data, size, 0, 0)
                if error:
                    calls.check(error)
                continue
        large = _add_tensor(api, handle, encoded, to_tensor(request.model, name, value), keep) or large
    if request.request_id is not None:
        api.TRITONSERVER_InferenceRequestSetId(handle, _encoded_text(request, "request_id", request.request_id))
    if request.flags:
        flags = _number(request, "flags", request.flags, _UINT32)
        api.TRITONSERVER_InferenceRequestSetFlags(handle, flags)
    if request.correlation_id is not None:
        _set_correlation_id(api, handle, request)
    if request.priority:
        priority = _number(request, "priority", request.priority, _UINT64)
        api.TRITONSERVER_InferenceRequestSetPriorityUInt64(handle, priority)
    if request.timeout:
        timeout = _number(request, "timeout", request.timeout, _UINT64)
        api.TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(handle, timeout)
    if request.parameters:
        _set_parameters(api, handle, request)
    if request.requested_outputs:
        _set_outputs(api, handle, request)
    if request.trace is not None and not isinstance(request.trace, Trace):
        raise _wrong(request, "trace", "a Trace", request.trace)
    return large


def _layout_of(array: np.ndarray[Any, Any]) -> tuple[int, int, int, int, Any] | None:
    """Describe arrays like this one, and remember it; `None` for one that is no array of numbers."""
    number = _TYPE_NUMBERS.get(array.dtype)
    if number is None or not array.dtype.isnative:
        return None
    dims = (c_int64 * array.ndim)(*array.shape)
    layout = (number, addressof(dims), array.ndim, array.nbytes, dims)
    if len(_layouts) >= _LONGEST_CACHE:
        # Shapes that vary without end: those in use come back.
        _layouts.clear()
    _layouts[array.dtype, array.shape] = layout
    return layout


def _add_tensor(api: Api, handle: Any, encoded: bytes, tensor: Tensor, keep: list[Any]) -> bool:
    shape = tensor.shape
    api.TRITONSERVER_InferenceRequestAddInput(
        handle, encoded, int(tensor.data_type), (c_int64 * len(shape))(*shape), len(shape)
    )
    buffer = tensor.memory_buffer
    keep.append(buffer)
    api.TRITONSERVER_InferenceRequestAppendInputData(
        handle, encoded, buffer.data_ptr, buffer.size, int(buffer.memory_type), buffer.memory_type_id
    )
    return buffer.size > _SMALL


def _set_correlation_id(api: Api, handle: Any, request: InferenceRequest) -> None:
    correlation_id = request.correlation_id
    if isinstance(correlation_id, str):
        api.TRITONSERVER_InferenceRequestSetCorrelationIdString(
            handle, _encoded_text(request, "correlation_id", correlation_id)
        )
    else:
        number = _number(request, "correlation_id", correlation_id, _UINT64, "a str or an int")
        api.TRITONSERVER_InferenceRequestSetCorrelationId(handle, number)


def _set_parameters(api: Api, handle: Any, request: InferenceRequest) -> None:
    if not isinstance(request.parameters, Mapping):
        raise _wrong(request, "parameters", "a mapping of names to values", request.parameters)
    for name, value in request.parameters.items():
        key = _encoded_text(request, "the name of a parameter", name)
        what = f"parameter {name!r}"
        # bool first: it is an int, too.
        if isinstance(value, bool):
            api.TRITONSERVER_InferenceRequestSetBoolParameter(handle, key, value)
        elif isinstance(value, int):
            api.TRITONSERVER_InferenceRequestSetIntParameter(handle, key, _number(request, what, value, _INT64))
        elif isinstance(value, float):
            api.TRITONSERVER_InferenceRequestSetDoubleParameter(handle, key, value)
        elif isinstance(value, str):
            api.TRITONSERVER_InferenceRequestSetStringParameter(handle, key, _encoded_text(request, what, value))
        else:
            raise _wrong(request, what, "a str, int, bool or float", value)


def _set_outputs(api: Api, handle: Any, request: InferenceRequest) -> None:
    names = request.requested_outputs
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise _wrong(request, "requested_outputs", "a sequence of names", names)
    for name in names:
        encoded = _encoded_text(request, "an item of requested_outputs", name)
        api.TRITONSERVER_InferenceRequestAddRequestedOutput(handle, encoded)


def _encoded_name(request: InferenceRequest, name: Any) -> bytes:
    encoded = _encoded_text(request, "the name of an input", name)
    if len(_names) < _LONGEST_CACHE:
        _names[name] = encoded
    return encoded


def _encoded_text(request: InferenceRequest, what: str, text: Any) -> bytes:
    return encoded_text(what, text, where=describe(request.model))


def _number(request: InferenceRequest, what: str, value: Any, limits: range, kind: str = "an int") -> int:
    if type(value) is int and value in limits:
        return value
    return checked_integer(what, value, limits, kind, where=describe(request.model))


def _wrong(request: InferenceRequest, what: str, expected: str, value: Any) -> InvalidArgumentError:
    return wrong_argument(what, expected, value, where=describe(request.model))
