"""Inference requests and responses without I/O: arguments become a request, a response becomes arrays by name.

All clients call the same three functions, in this order::

    check_call(...)        before anything is sent, not even a question about the model
    build_request(...)     when the model is known
      (the transport carries the request and brings the response)
    decode_response(...)

Nothing here waits, opens a connection or imports a library that does.
"""

from __future__ import annotations

import difflib
import itertools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..exceptions import (
    PyTritonClientInferenceServerError,
    PyTritonClientInputError,
    PyTritonClientModelDoesntSupportBatchingError,
    PyTritonClientValueError,
)
from .arrays import to_wire_array
from .forks import call_in_child
from .options import NO_OPTIONS, CallOptions, ParameterValue, check_headers, check_parameters
from .spec import ModelSpec, TensorSpec

# Only so many characters of a longer name are compared.
_MOST_COMPARED = 64


class ModelResult(dict[str, Any]):
    """The outputs of a model by name, and what the response says besides them. Else it is a dictionary like any other.

    Args:
        outputs: Arrays by name; strings are object arrays of ``bytes``. Of a sample, an output without any axis but the
            batch axis is a numpy scalar, or ``bytes``.
        parameters: What the callable added to its response.
        request_id: The id of the request that this answers.
        model_name: The model that answered.
        model_version: The version that answered, also where the client asked for the latest.

    Attributes:
        parameters: What the callable added to its response; empty if it added nothing.
        request_id: The id of the request that this answers; ``""`` where the server did not say.
        model_name: The model that answered.
        model_version: The version that answered, as text; ``None`` if the server did not say.
        is_followed: Whether it is known that the next result, or the end of the stream, is there already, so that what
            hands results on may send several together. The clients that applications use do not tell.
    """

    __slots__ = ("is_followed", "model_name", "model_version", "parameters", "request_id")

    parameters: dict[str, ParameterValue]
    request_id: str
    model_name: str
    model_version: str | None
    is_followed: bool

    def __init__(
        self,
        outputs: Mapping[str, Any] | None = None,
        *,
        parameters: Mapping[str, ParameterValue] | None = None,
        request_id: str = "",
        model_name: str = "",
        model_version: str | None = None,
        is_followed: bool = False,
    ) -> None:
        super().__init__(outputs or {})
        self.parameters = dict(parameters) if parameters else {}
        self.request_id = request_id
        self.model_name = model_name
        self.model_version = model_version
        self.is_followed = is_followed


class RequestIds:
    """Ids of requests that no other client uses, so that the log of a shared server tells clients apart."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._begin()
        call_in_child(self, RequestIds._begin)

    def _begin(self) -> None:
        self._prefix = secrets.token_hex(6)

    def next(self) -> str:
        """Return the next id: what is this client's own, and a number."""
        return f"{self._prefix}-{next(self._numbers)}"


@dataclass(frozen=True)
class InferCall(CallOptions):
    """The checked arguments of one ``infer`` call, and its options."""

    inputs: Sequence[object] | Mapping[str, object] = ()  # by position, or by name
    named: Mapping[str, object] = field(default_factory=dict)  # further ones by name, behind those by position


@dataclass(frozen=True)
class Slice:
    """Where a tensor lies in shared memory."""

    region: str  # the name under which the server has registered the region
    offset: int  # in the region, in bytes
    size: int  # in bytes; of an output the most that it may have


@dataclass(frozen=True)
class SharedTensors:
    """Which tensors of a request go through shared memory."""

    inputs: Mapping[str, Slice]  # Those inputs that are there already. The others travel in the request.
    # The place where the server is to write each output; ``None`` means in its response. Empty if all are in the
    # response.
    outputs: Mapping[str, Slice | None]
    # Returns the array of an output that the server has written there, for its name, data type and shape; raises
    # ``ValueError`` where they do not fit.
    read: Callable[[str, str, Sequence[int]], npt.NDArray[Any]]


@dataclass(frozen=True)
class InferRequest:
    """One inference request as a transport takes it."""

    model_name: str  # the model
    model_version: str | None  # the version; ``None`` is the latest
    request_id: str  # comes back in the response and in the server's messages
    # The declaration of each input, and its array, with the batch axis if there is one.
    inputs: tuple[tuple[TensorSpec, npt.NDArray[Any]], ...]
    call: InferCall  # parameters, options and headers
    shared: SharedTensors | None = None  # the tensors that go through shared memory, if any


@dataclass(frozen=True)
class InferResponse:
    """One inference response as a transport brings it."""

    # Arrays by name, with the batch axis where there is one; strings are object arrays of ``bytes``.
    outputs: Mapping[str, npt.NDArray[Any]]
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)  # what the callable added
    request_id: str = ""  # the id of the request that this answers
    model_name: str = ""  # the model that answered; ``""`` where the server did not say
    model_version: str | None = None  # the version that answered; ``None`` if the server did not say
    is_final: bool = True  # whether no other response to the request follows
    is_followed: bool = False  # whether the next one, or the end, is known to be there already


def check_call(
    args: Sequence[object],
    named: Mapping[str, object],
    parameters: object,
    headers: object,
    options: CallOptions = NO_OPTIONS,
) -> InferCall:
    """Check all that can be checked without knowing the model."""
    if hasattr(parameters, "__array__"):
        named, parameters = {**named, "parameters": parameters}, None
    if hasattr(headers, "__array__"):
        named, headers = {**named, "headers": headers}, None
    custom, special = check_parameters(parameters)
    sent_headers = check_headers(headers)
    joined = vars(options) | {
        "parameters": {**options.parameters, **custom},
        "options": {**options.options, **special},
        "headers": {**options.headers, **sent_headers},
    }
    return InferCall(**joined, inputs=args or named, named=named if args else {})


def build_request(
    spec: ModelSpec, call: InferCall, *, model_name: str, model_version: str | None, request_id: str, is_batch: bool
) -> InferRequest:
    """Turn checked arguments into a request for a known model."""
    if is_batch and not spec.batching:
        raise PyTritonClientModelDoesntSupportBatchingError(
            f"Model {spec.model_name} doesn't support batching - use infer_sample method instead.",
            model_name=spec.model_name,
            model_version=model_version,
        )
    if not call.inputs and spec.inputs:
        # A model without inputs is asked without inputs.
        raise PyTritonClientValueError(
            f"Provide input data: model {spec.model_name} expected at least one of its inputs "
            f"{', '.join(repr(tensor.name) for tensor in spec.inputs)}, received none.",
            model_name=spec.model_name,
        )
    inputs = [(tensor, to_wire_array(value, tensor, call.casting)) for tensor, value in _pair(spec, call)]
    if is_batch:
        # The author of a function with `list[str]` passes one value for each sample.
        inputs = [(tensor, _as_column(array, tensor)) for tensor, array in inputs]
        _check_batch_sizes(spec, inputs)
    elif spec.batching:
        inputs = [(tensor, array[np.newaxis]) for tensor, array in inputs]
    return InferRequest(model_name, model_version, call.request_id or request_id, tuple(inputs), call)


def find_wrong_shape(spec: ModelSpec, request: InferRequest, *, is_batch: bool) -> PyTritonClientInputError | None:
    """Return the error of an input whose shape differs from the declared one; ``None`` if all match."""
    axes = int(spec.batching)
    for tensor, wire_array in request.inputs:
        if _fits(wire_array.shape[axes:], tensor.shape):
            continue
        given = wire_array.shape[1:] if spec.batching and not is_batch else wire_array.shape
        expected = f"the shape ({', '.join(['batch'] * is_batch + list(map(str, tensor.shape)))})"
        if is_batch and _fits(given, tensor.shape):
            advice = " Did you mean infer_sample, which takes one sample, without a batch axis?"
        elif spec.batching and not is_batch and _fits(given[1:], tensor.shape) and given:
            advice = " Did you mean infer_batch, which takes arrays with a batch axis in front?"
        else:
            advice = ""
        origin = f"as its hint {tensor.hint} says" if tensor.hint else "as its Tensor declares it"
        return PyTritonClientInputError(
            f"Model {spec.model_name}, input {tensor.name!r}: expected {expected}, {origin}; received "
            f"the shape ({', '.join(map(str, given))}).{advice}",
            model_name=spec.model_name,
            input_name=tensor.name,
            expected=expected,
            received=f"the shape {given}",
        )
    return None


def is_same_form(request: InferRequest, other: InferRequest) -> bool:
    """Return whether a server that refuses one request for its form would refuse the other one, too."""

    def form(it: InferRequest) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(tensor.name, tensor.datatype, array.shape) for tensor, array in it.inputs]

    return form(request) == form(other)


def _fits(shape: Sequence[int], declared: Sequence[int]) -> bool:
    return len(shape) == len(declared) and all(map(_fits_axis, shape, declared))


def _fits_axis(length: int, wanted: int) -> bool:
    return wanted in (-1, length)


def decode_response(spec: ModelSpec, response: InferResponse, *, is_batch: bool) -> ModelResult:
    """Return the outputs by name, without the batch axis where the caller gave a sample.

    Without it, what had no other axis is a numpy scalar, and ``bytes`` where it is a string.
    """
    outputs = response.outputs
    if not is_batch and spec.batching:
        for name, array in outputs.items():
            if array.ndim == 0 or array.shape[0] != 1:
                raise PyTritonClientInferenceServerError(
                    f"Output {name!r} of model {spec.model_name}: expected one sample, an array of the shape (1, ...), "
                    f"for one sample sent; received the shape {array.shape}. The model must keep the batch axis.",
                    model_name=spec.model_name,
                )
        # This makes a scalar, or ``bytes``, of an output without further axes: result["label"].decode().
        outputs = {name: array[0] for name, array in outputs.items()}
    return ModelResult(
        outputs,
        parameters=response.parameters,
        request_id=response.request_id,
        model_name=response.model_name or spec.model_name,
        model_version=response.model_version,
        is_followed=response.is_followed,
    )


def is_end_of_stream(response: InferResponse) -> bool:
    """Return whether a response says only that no other follows, and carries no result."""
    return response.is_final and not response.outputs and not response.parameters


def _as_column(array: npt.NDArray[Any], tensor: TensorSpec) -> npt.NDArray[Any]:
    return array[:, np.newaxis] if array.ndim == 1 and tensor.shape == (1,) else array


def _pair(spec: ModelSpec, call: InferCall) -> list[tuple[TensorSpec, object]]:
    inputs = call.inputs
    if not isinstance(inputs, Mapping):
        if len(inputs) > len(spec.inputs):
            _refuse_inputs(spec, f"{len(inputs)} by position")
        inputs = {tensor.name: value for tensor, value in zip(spec.inputs, inputs, strict=False)}
        for name in call.named:
            if name in inputs:
                # The text begins as PyTriton's does, because scripts look for it.
                raise PyTritonClientValueError(
                    "Use either positional either keyword method arguments convention for an input: the input "
                    f"{name!r} of model {spec.model_name} is given by position and by name.",
                    model_name=spec.model_name,
                    input_name=name,
                )
        inputs.update(call.named)
    known = {tensor.name for tensor in spec.inputs}
    missing = [tensor.name for tensor in spec.inputs if not tensor.optional and tensor.name not in inputs]
    if missing or not known.issuperset(inputs):
        received = ", ".join(map(repr, inputs)) + (f" (without {', '.join(missing)})" if missing else "")
        _refuse_inputs(spec, received, _find_meant(inputs, spec))
    return [(tensor, inputs[tensor.name]) for tensor in spec.inputs if tensor.name in inputs]


def _find_meant(given: Collection[str], spec: ModelSpec) -> str:
    """Return a question whether an input was meant by a name that is none; empty if none is near."""
    left = [tensor.name for tensor in spec.inputs if tensor.name not in given]
    for name in given:
        if all(tensor.name != name for tensor in spec.inputs):
            for likely in difflib.get_close_matches(name[:_MOST_COMPARED], left, 1):
                return f" Did you mean {likely!r}?"
    return ""


def _refuse_inputs(spec: ModelSpec, received: str, question: str = "") -> NoReturn:
    names = ", ".join(map(_named, spec.inputs))
    count = {0: "no inputs", 1: "the input"}.get(len(spec.inputs), f"{len(spec.inputs)} inputs")
    expected = f"{count} {names}".rstrip()
    raise PyTritonClientInputError(
        f"Model {spec.model_name}: expected {expected}; received {received}.{question}",
        model_name=spec.model_name,
        expected=expected,
        received=received,
    )


def _named(tensor: TensorSpec) -> str:
    facts = [tensor.hint] * bool(tensor.hint) + ["optional"] * tensor.optional
    return repr(tensor.name) + (f" ({', '.join(facts)})" if facts else "")


def _check_batch_sizes(spec: ModelSpec, inputs: list[tuple[TensorSpec, npt.NDArray[Any]]]) -> None:
    for tensor, array in inputs:
        if array.ndim == 0:
            raise PyTritonClientInputError(
                f"Input {tensor.name!r}: expected a batch, an array of the shape (batch, {str(tensor.shape)[1:]}; "
                "received a scalar. Use infer_sample for a single sample.",
                model_name=spec.model_name,
                input_name=tensor.name,
            )
        if array.shape[0] == 0:
            raise PyTritonClientInputError(
                f"Input {tensor.name!r}: expected a batch of one sample at least, received an empty one, an array of "
                f"the shape {array.shape}.",
                model_name=spec.model_name,
                input_name=tensor.name,
                expected="one sample at least",
                received=f"shape {array.shape}",
            )
    sizes = {tensor.name: array.shape[0] for tensor, array in inputs}
    if len(set(sizes.values())) > 1:
        received = ", ".join(f"{name!r}: {size}" for name, size in sizes.items())
        raise PyTritonClientInputError(
            f"Model {spec.model_name}: expected one batch size, the first axis, in every input; received {received}.",
            model_name=spec.model_name,
            expected="the same batch size in every input",
            received=received,
        )
