"""`InferenceRequest`, and the request of the C API that is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytriton.inprocess.capi.api import Api
from pytriton.inprocess.capi.enums import MemoryType
from pytriton.inprocess.capi.errors import InvalidArgumentError, checked_integer, encoded_text, wrong_argument
from pytriton.inprocess.requests.model_spec import describe
from pytriton.inprocess.requests.named import NamedModel
from pytriton.inprocess.requests.native_calls import NativeCalls
from pytriton.inprocess.requests.response import Parameter
from pytriton.inprocess.requests.tracing import Trace
from pytriton.inprocess.requests.values import to_tensor
from pytriton.inprocess.tensors import gpu

_INT64: Final = range(-(2**63), 2**63)
_UINT64: Final = range(2**64)
_UINT32: Final = range(2**32)


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

    model: NamedModel
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


_new_request = InferenceRequest.__new__


def new_request(model: NamedModel, fields: dict[str, Any]) -> InferenceRequest:
    """Make a request with fields by name: with nothing but inputs in a third of the time that its constructor takes."""
    if len(fields) != 1 or "inputs" not in fields:
        return InferenceRequest(model, **fields)
    request = _new_request(InferenceRequest)
    request.model = model
    request.request_id = None
    request.flags = 0
    request.correlation_id = None
    request.priority = 0
    request.timeout = 0
    request.inputs = fields["inputs"]
    request.parameters = {}
    request.output_memory_type = None
    request.response_queue = None
    request.requested_outputs = ()
    request.response_timeout_s = None
    request.trace = None
    return request


def output_gpu(request: InferenceRequest) -> int | None:
    """Return the number of the GPU that outputs are wanted on; `None` for host memory."""
    memory_type, number = gpu.parse_device(request.output_memory_type)
    if memory_type is not MemoryType.GPU:
        return None
    # This fails here, and not later when Triton needs the memory.
    gpu.allocate(1, number)
    return number


def create(api: Api, calls: NativeCalls, native: Any, server: int, request: InferenceRequest, keep: list[Any]) -> int:
    """Make a request of the C API with everything in it but its callbacks."""
    inputs = request.inputs
    model = request.model
    handle = None
    if inputs.__class__ is dict:
        handle = calls.create(native, server, model.encoded_name, model.version, inputs, keep)
    elif not isinstance(inputs, Mapping):
        raise _wrong(request, "inputs", "a mapping of names to values", inputs)
    if handle is None:
        described = {_checked_name(request, name): _described(request, name, value) for name, value in inputs.items()}
        handle = calls.create(native, server, model.encoded_name, model.version, described, keep)
        assert handle is not None
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
    return handle


def _checked_name(request: InferenceRequest, name: Any) -> str:
    _encoded_text(request, "the name of an input", name)
    return str(name)


def _described(request: InferenceRequest, name: str, value: Any) -> tuple[Any, ...]:
    """Describe an input as the native library wants it; the owner of its memory comes last."""
    tensor = to_tensor(request.model, name, value)
    buffer = tensor.memory_buffer
    place = buffer.data_ptr, buffer.size, int(buffer.memory_type), buffer.memory_type_id
    return int(tensor.data_type), tensor.shape, *place, buffer


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
        # bool first, because a bool is an int.
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


def _encoded_text(request: InferenceRequest, what: str, text: Any) -> bytes:
    return encoded_text(what, text, where=describe(request.model))


def _number(request: InferenceRequest, what: str, value: Any, limits: range, kind: str = "an int") -> int:
    if type(value) is int and value in limits:
        return value
    return checked_integer(what, value, limits, kind, where=describe(request.model))


def _wrong(request: InferenceRequest, what: str, expected: str, value: Any) -> InvalidArgumentError:
    return wrong_argument(what, expected, value, where=describe(request.model))
