"""`InferenceResponse`: outputs or an error, and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..wire.record import Array, ParameterValue
from ..wire.response import ResponseData
from .errors import TritonError, TritonModelException
from .parameters import checked_parameters, given_text
from .tensors import Tensor, wire_array


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
        tensors = list(output_tensors)
        for tensor in tensors:
            if tensor.__class__ is not Tensor and not isinstance(tensor, Tensor):
                if tensor is None:
                    raise TritonModelException("Output tensor for inference response should not be empty.")
                raise TypeError(f"output_tensors: expected a list of Tensor, got a {type(tensor).__name__} in it")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error: expected a TritonError, got a {type(error).__name__}")
        self._tensors: list[Tensor] = tensors
        self._error: TritonError | None = error
        self._parameters: Mapping[str, ParameterValue] | None = (
            None if parameters is None else checked_parameters(parameters)
        )

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


def plain_outputs(response: InferenceResponse) -> dict[str, Array] | None:
    """Return the outputs of a response, where it has nothing else."""
    if response._error is not None or response._parameters:
        return None
    return {tensor._name: tensor._array for tensor in response._tensors}


def response_data(
    request: int, response: InferenceResponse | None, wanted: Sequence[str], *, final: bool
) -> ResponseData:
    """Return a response as it is sent.

    Args:
        request: The request's place in its batch.
        response: What the model made; `None` where it only ends the stream.
        wanted: The outputs that are wanted.
        final: Whether nothing more comes for the request.
    """
    if response is None:
        return ResponseData(request, empty=True)
    error = response._error
    if error is not None:
        return ResponseData(request, error=error.message(), code=error.code())
    return ResponseData(
        request,
        {tensor._name: wire_array(tensor._array) for tensor in response._tensors if tensor._name in wanted},
        response._parameters or {},
        final=final,
    )
