"""The core without I/O: the arguments of a call become a request, and a response becomes named arrays.

Every client, whatever it waits with, calls the same three functions in this order::

    check_call(...)        before anything is sent, not even a question about the model
    build_request(...)     when the model is known
      (the transport carries the request and brings the response)
    decode_response(...)

Nothing here waits, opens a connection or imports a library that does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ._arrays import to_wire_array
from ._spec import ModelSpec, TensorSpec
from .exceptions import (
    PyTritonClientInferenceServerError,
    PyTritonClientModelDoesntSupportBatchingError,
    PyTritonClientValueError,
)

__all__ = ["Call", "InferRequest", "InferResponse", "build_request", "check_call", "decode_response"]

ParameterValue = str | int | float | bool

# What Triton's clients pass as arguments of their own, under the names that the protocol gives them as parameters.
_OPTIONS: dict[str, tuple[type, ...]] = {
    "priority": (int,),
    "timeout": (int,),
    "sequence_id": (int, str),
    "sequence_start": (bool,),
    "sequence_end": (bool,),
}
_RESERVED = ("headers", "binary_data_output")
_RESERVED_PREFIX = "triton_"
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Call:
    """The checked arguments of one ``infer`` call.

    Attributes:
        inputs: By position, or by name.
        parameters: Custom request parameters.
        options: ``priority``, ``timeout`` in microseconds, ``sequence_id``, ``sequence_start``, ``sequence_end``.
        headers: HTTP headers or gRPC metadata, every value as text.
    """

    inputs: Sequence[object] | Mapping[str, object]
    parameters: Mapping[str, ParameterValue]
    options: Mapping[str, Any]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class InferRequest:
    """One inference request as a transport takes it.

    Attributes:
        model_name: The model.
        model_version: The version; ``None`` is the latest.
        request_id: Comes back in the response and in the server's messages.
        inputs: What the model declares about each input, and its array with the batch axis where there is one.
        call: Parameters, options and headers.
    """

    model_name: str
    model_version: str | None
    request_id: str
    inputs: tuple[tuple[TensorSpec, npt.NDArray[Any]], ...]
    call: Call


@dataclass(frozen=True)
class InferResponse:
    """One inference response as a transport brings it.

    Attributes:
        outputs: Arrays by name, with the batch axis where there is one; strings are object arrays of ``bytes``.
    """

    outputs: Mapping[str, npt.NDArray[Any]]


def check_call(
    args: Sequence[object],
    named: Mapping[str, object],
    parameters: Mapping[str, ParameterValue] | None,
    headers: Mapping[str, str | int | bool] | None,
) -> Call:
    """Check all that can be checked without knowing the model.

    Raises:
        PyTritonClientValueError: No inputs, inputs by position and by name, or parameters or headers that cannot be
            sent.
    """
    if args and named:
        raise PyTritonClientValueError(
            "Use either positional either keyword method arguments convention: expected all inputs by position or all "
            f"by name, received {len(args)} by position and {', '.join(map(repr, named))} by name."
        )
    if not args and not named:
        raise PyTritonClientValueError("Provide input data: expected at least one input, received none.")
    custom, options = _check_parameters(parameters)
    return Call(args or named, custom, options, _check_headers(headers))


def build_request(
    spec: ModelSpec, call: Call, *, model_name: str, model_version: str | None, request_id: str, is_batch: bool
) -> InferRequest:
    """Turn checked arguments into a request for a known model.

    Args:
        spec: The model.
        call: The checked arguments.
        model_name: The model to ask.
        model_version: The version to ask; ``None`` is the latest.
        request_id: The id of the request.
        is_batch: Whether the arrays have a batch axis, ``(batch, *shape)``; else one is added where the model has one.

    Raises:
        PyTritonClientModelDoesntSupportBatchingError: A batch for a model that takes one sample at a time.
        PyTritonClientValueError: The inputs are not those of the model, or differ in their batch size.
    """
    if is_batch and not spec.batching:
        raise PyTritonClientModelDoesntSupportBatchingError(
            f"Model {spec.model_name} doesn't support batching - use infer_sample method instead.",
            model_name=spec.model_name,
            model_version=model_version,
        )
    inputs = [(tensor, to_wire_array(value, tensor)) for tensor, value in _pair(spec, call.inputs)]
    if is_batch:
        _check_batch_sizes(spec, inputs)
    elif spec.batching:
        inputs = [(tensor, array[np.newaxis]) for tensor, array in inputs]
    return InferRequest(model_name, model_version, request_id, tuple(inputs), call)


def decode_response(spec: ModelSpec, response: InferResponse, *, is_batch: bool) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs by name, without the batch axis where the caller gave a sample.

    Raises:
        PyTritonClientInferenceServerError: An output of a batching model does not hold exactly one sample.
    """
    if is_batch or not spec.batching:
        return dict(response.outputs)
    for name, array in response.outputs.items():
        if array.ndim == 0 or array.shape[0] != 1:
            raise PyTritonClientInferenceServerError(
                f"Output {name!r} of model {spec.model_name}: expected one sample, an array of the shape (1, ...), for "
                f"one sample sent; received the shape {array.shape}. The model must keep the batch axis.",
                model_name=spec.model_name,
            )
    # Not array[0], which would give a scalar for an output without further axes.
    return {name: array.reshape(array.shape[1:]) for name, array in response.outputs.items()}


def _pair(spec: ModelSpec, inputs: Sequence[object] | Mapping[str, object]) -> list[tuple[TensorSpec, object]]:
    if not isinstance(inputs, Mapping):
        if len(inputs) > len(spec.inputs):
            _refuse_inputs(spec, f"{len(inputs)} by position")
        inputs = {tensor.name: value for tensor, value in zip(spec.inputs, inputs, strict=False)}
    known = {tensor.name for tensor in spec.inputs}
    missing = [tensor.name for tensor in spec.inputs if not tensor.optional and tensor.name not in inputs]
    if missing or not known.issuperset(inputs):
        _refuse_inputs(spec, ", ".join(map(repr, inputs)) + (f" (without {', '.join(missing)})" if missing else ""))
    return [(tensor, inputs[tensor.name]) for tensor in spec.inputs if tensor.name in inputs]


def _refuse_inputs(spec: ModelSpec, received: str) -> NoReturn:
    names = (repr(tensor.name) + (" (optional)" if tensor.optional else "") for tensor in spec.inputs)
    expected = f"{len(spec.inputs)} inputs {', '.join(names)}" if len(spec.inputs) != 1 else f"the input {next(names)}"
    raise PyTritonClientValueError(
        f"Model {spec.model_name}: expected {expected}; received {received}.",
        model_name=spec.model_name,
        expected=expected,
        received=received,
    )


def _check_batch_sizes(spec: ModelSpec, inputs: list[tuple[TensorSpec, npt.NDArray[Any]]]) -> None:
    for tensor, array in inputs:
        if array.ndim == 0:
            raise PyTritonClientValueError(
                f"Input {tensor.name!r}: expected a batch, an array of the shape (batch, {str(tensor.shape)[1:]}; "
                "received a scalar. Use infer_sample for a single sample.",
                model_name=spec.model_name,
                input_name=tensor.name,
            )
    sizes = {tensor.name: array.shape[0] for tensor, array in inputs}
    if len(set(sizes.values())) > 1:
        received = ", ".join(f"{name!r}: {size}" for name, size in sizes.items())
        raise PyTritonClientValueError(
            f"Model {spec.model_name}: expected one batch size, the first axis, in every input; received {received}.",
            model_name=spec.model_name,
            expected="the same batch size in every input",
            received=received,
        )


def _check_parameters(
    parameters: Mapping[str, ParameterValue] | None,
) -> tuple[dict[str, ParameterValue], dict[str, Any]]:
    custom: dict[str, ParameterValue] = {}
    options: dict[str, Any] = {}
    for name, value in _check_names(parameters, "Parameter").items():
        if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
            raise PyTritonClientValueError(
                f"Parameter {name!r}: Triton keeps this name for itself. Choose another one.", input_name=name
            )
        _check_value(name, value)
        if name in _OPTIONS:
            # By type() and not isinstance(), which would take True for a priority of 1.
            if type(value) not in _OPTIONS[name]:
                types = " or ".join(kind.__name__ for kind in _OPTIONS[name])
                _refuse_value("Parameter", name, f"of the type that Triton gives to it, {types}", value)
            options[name] = value
        else:
            custom[name] = value
    return custom, options


def _check_value(name: str, value: object) -> None:
    if not isinstance(value, (str, int, float)):
        _refuse_value("Parameter", name, "a string, integer, float or boolean", value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        _refuse_value("Parameter", name, "an integer of 64 bits", value)
    if isinstance(value, float) and not math.isfinite(value):
        _refuse_value("Parameter", name, "a finite number, as JSON has no other", value)


def _check_headers(headers: Mapping[str, str | int | bool] | None) -> dict[str, str]:
    checked: dict[str, str] = {}
    for name, value in _check_names(headers, "Header").items():
        if not _HEADER_NAME.fullmatch(name):
            _refuse_value("Header", name, "a name of letters, digits, dots, dashes and underscores", name)
        if not isinstance(value, (str, int)):
            _refuse_value("Header", name, "a string, integer or boolean", value)
        text = str(value)
        # A line break would end the header, and gRPC refuses what is not ASCII.
        if not (text.isascii() and text.isprintable()):
            _refuse_value("Header", name, "printable ASCII", value)
        checked[name] = text
    return checked


def _check_names(mapping: Mapping[str, Any] | None, kind: str) -> Mapping[str, Any]:
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise PyTritonClientValueError(
            f"Parameters and headers must be a dictionary: expected one, received {type(mapping).__name__} {mapping!r}."
        )
    for name in mapping:
        if not isinstance(name, str):
            raise PyTritonClientValueError(f"{kind} key must be a string: received {type(name).__name__} {name!r}.")
    return mapping


def _refuse_value(kind: str, name: str, expected: str, value: object) -> NoReturn:
    raise PyTritonClientValueError(
        f"{kind} value must be {expected}: received {type(value).__name__} {value!r} for {name!r}.",
        input_name=name,
        expected=expected,
        received=repr(value),
    )
