"""`InferenceResponse`: outputs or an error, and parameters, which are JSON for whoever reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..wire.record import Array, ParameterValue
from ..wire.response import ResponseData
from .errors import TritonError, TritonModelException, text_of
from .tensors import Tensor, sent_array, sent_arrays


class ReceivedParameters(dict[str, ParameterValue]):
    """Parameters that came with a response of another model."""


def checked_parameters(parameters: Any) -> Mapping[str, ParameterValue]:
    """Check the parameters that a model gives, a dictionary of text to bool, int or text; `None` is none."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            raise TritonModelException(f"Expect parameters values to fit into 64 bits, found {value} for '{key}'")
    return dict(parameters)


def received_text(parameters: Mapping[str, ParameterValue]) -> str:
    """Return the JSON text of parameters that came with a request: without blanks, as Triton writes it."""
    return json.dumps(parameters, separators=(",", ":"), ensure_ascii=False)


def given_text(parameters: Mapping[str, ParameterValue]) -> str:
    """Return the JSON text of parameters of a request or response, as `json.dumps` writes the model's own."""
    return received_text(parameters) if isinstance(parameters, ReceivedParameters) else json.dumps(parameters)


class InferenceResponse:
    """The response to a request: one that a model makes, or one that it gets from another model.

    Args:
        output_tensors: Its outputs.
        error: An error in their place.
        parameters: A dictionary of text to bool, int or text.

    Raises:
        TritonModelException: An output is `None`, or there is another type among the parameters.
    """

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Any] = (),
        error: Any = None,
        parameters: Any = None,
    ) -> None:
        try:
            tensors: list[Tensor] = list(output_tensors)
        except TypeError:
            if hasattr(output_tensors, "__iter__"):
                raise
            raise TypeError(
                f"output_tensors: expected a list of Tensor, got a {type(output_tensors).__name__}"
            ) from None
        for tensor in tensors:
            if tensor.__class__ is not Tensor:
                _check(tensor)
        self._tensors = tensors
        self._error: TritonError | None = error
        self._parameters: Mapping[str, ParameterValue] | None = None
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error: expected a TritonError, got a {type(error).__name__}")
        if parameters is not None:
            self._parameters = checked_parameters(parameters)
            for text in (*self._parameters, *self._parameters.values()):
                if isinstance(text, str):
                    text_of(text, "parameters")

    def output_tensors(self) -> list[Tensor]:
        """Return its outputs."""
        return self._tensors

    def has_error(self) -> bool:
        """Return whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return its error."""
        return self._error

    def parameters(self) -> str:
        """Return its parameters as a JSON text."""
        return given_text(self._parameters or {})


def _check(tensor: object) -> None:
    if tensor is None:
        raise TritonModelException("Output tensor for inference response should not be empty.")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"output_tensors: expected a list of Tensor, got a {type(tensor).__name__} in it")


def received_response(tensors: Sequence[Tensor], parameters: Mapping[str, ParameterValue]) -> InferenceResponse:
    """Make the response that another model has given."""
    made = InferenceResponse(tensors)
    made._parameters = ReceivedParameters(parameters)
    return made


def plain_outputs(responses: Iterable[Any]) -> list[dict[str, Array]] | None:
    """Return the outputs of responses as they are sent; None if one has more than outputs, or something else."""
    plain = []
    for response in responses:
        if response.__class__ is not InferenceResponse or response._error is not None or response._parameters:
            return None
        plain.append(sent_arrays(response._tensors))
    return plain


def output_names(response: InferenceResponse) -> list[str]:
    """Return the names of the outputs of a response."""
    return [tensor.name() for tensor in response._tensors]


def response_data(
    request: int, response: InferenceResponse | None, wanted: Sequence[str], *, final: bool
) -> ResponseData:
    """Return a response as it is sent; `None` if the model only ends the stream."""
    if response is None:
        return ResponseData(request, empty=True)
    error = response._error
    if error is not None:
        return ResponseData(request, error=error.message(), code=error.code(), final=final, continues=not final)
    return ResponseData(
        request,
        {name: sent_array(tensor) for tensor in response._tensors if (name := tensor.name()) in wanted},
        response._parameters or {},
        final=final,
    )
