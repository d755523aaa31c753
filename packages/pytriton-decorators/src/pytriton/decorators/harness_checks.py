"""Checks and converts the arrays of requests and results in unit tests as the server does when it serves the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pytriton.decorators._calls.inputs import get_arrays, replace_arrays
from pytriton.decorators._calls.outputs import convert_output
from pytriton.decorators._casts import as_array, cast_numbers, has_mask
from pytriton.decorators._fake_request import request_type
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig


class Result(dict[str, Any]):
    """The outputs of one request by name, as a client would get them.

    Attributes:
        parameters: Response parameters.
    """

    def __init__(self, outputs: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> None:
        """Make a result.

        Args:
            outputs: Arrays by name.
            parameters: Response parameters.
        """
        super().__init__(outputs)
        self.parameters: dict[str, Any] = dict(parameters or {})


class Checker:
    """Converts the requests of a test to those of a callable, and the callable's results to those of a client."""

    def __init__(
        self,
        config: TritonModelConfig,
        *,
        inputs: Sequence[TensorSpec] | None,
        outputs: Sequence[TensorSpec] | None,
        max_rows: int | None,
        strict: bool,
    ) -> None:
        self._config = config
        self._inputs = None if inputs is None else {spec.name: spec for spec in inputs}
        self._outputs = None if outputs is None else {spec.name: spec for spec in outputs}
        self._max_rows = max_rows
        self._strict = strict

    # --- requests ----------------------------------------------------------------------------------------------------

    def requests(self, given: Sequence[Any]) -> list[Any]:
        """Make requests of mappings; raise an error if the server would refuse one or not batch them together."""
        requests = [self._request(one, index) for index, one in enumerate(given)]
        if not requests:
            raise PyTritonValidationError("Expected at least one request, received none.", expected=1, received=0)
        if self._max_rows is not None and self._config.batching:
            sizes = [len(next(iter(request.values()))) if len(request) else 1 for request in requests]
            if sum(sizes) > self._max_rows:
                raise PyTritonValidationError(
                    f"The requests have {sizes} rows, together {sum(sizes)}: expected at most the max_batch_size of "
                    f"{self._max_rows}. A server would refuse a request of more, and make several batches of several "
                    "requests; call the harness once for each.",
                    expected=self._max_rows,
                    received=sum(sizes),
                )
        return requests

    def _request(self, given: Any, index: int) -> Any:
        data = {name: self._input(name, value, index) for name, value in get_arrays(given, index).items()}
        missing = [name for name, spec in (self._inputs or {}).items() if not spec.optional and name not in data]
        if missing:
            raise PyTritonValidationError(
                f"Request {index} lacks the inputs {missing}, which are not optional; it has {sorted(data)}.",
                tensor=missing[0],
                request_index=index,
                expected=sorted(self._inputs or ()),
                received=sorted(data),
            )
        if self._config.batching:
            sizes = {name: array.shape[0] for name, array in data.items() if array.ndim}
            if len(sizes) != len(data) or len(set(sizes.values())) > 1:
                shapes = ", ".join(f"{name}: {array.shape}" for name, array in data.items())
                raise PyTritonValidationError(
                    f"The inputs of request {index} have the shapes {shapes}. Expected a batch axis in front, of the "
                    "same size for all of them; a model without one has ModelConfig(batching=False).",
                    request_index=index,
                    received={name: array.shape for name, array in data.items()},
                )
        kind = request_type()
        return kind(data) if not hasattr(given, "parameters") else replace_arrays(given, data)

    def _input(self, name: str, value: Any, index: int) -> Any:
        where = f"Input {name!r} of request {index}"
        spec: TensorSpec | None = None
        if self._inputs is not None:
            spec = self._inputs.get(name)
            if spec is None:
                raise PyTritonValidationError(
                    f"{where} is none of the model's inputs {sorted(self._inputs)}.",
                    tensor=name,
                    request_index=index,
                    expected=sorted(self._inputs),
                    received=name,
                )
        declared = None if spec is None else np.dtype(spec.dtype)
        if has_mask(value):
            raise _mismatch_error(where, name, index, "values", "a value in every place", "masked ones")
        try:
            array = _read(value)
        except ValueError as error:
            raise _mismatch_error(where, name, index, "values", "lists of one length for each axis", error) from error
        if not isinstance(value, np.ndarray) and declared is not None and declared.kind not in "OSUT":
            array = _cast_untyped(array, declared, where, name, index)
        if array.dtype.kind in "OSUT":
            array = _as_bytes(array, where, name)
        if declared is None or spec is None:
            return array
        if (array.dtype.kind == "O") != (declared.kind in "OSUT") or (
            array.dtype.kind != "O" and array.dtype != declared
        ):
            raise _mismatch_error(where, name, index, "dtype", declared, array.dtype)
        self._check_shape(where, array, spec, index)
        return array

    # --- results -----------------------------------------------------------------------------------------------------

    def results(self, returned: Any, requests: Sequence[Any], *, stream: bool) -> list[Any]:
        """Make results of what a callable returned or yielded: a `Result`, an exception or None for each request."""
        if not isinstance(returned, (list, tuple)) or len(returned) != len(requests):
            received = f"a {type(returned).__name__}"
            if isinstance(returned, (list, tuple)):
                received += f" of {len(returned)}"
            raise PyTritonValidationError(
                f"The callable returned {received}, expected a list with a result for each of {len(requests)} "
                "requests.",
                expected=len(requests),
                received=returned,
            )
        return [
            self._result(one, index, request.requested_output_names, stream)
            for index, (one, request) in enumerate(zip(returned, requests, strict=True))
        ]

    def _result(self, one: Any, index: int, requested: Sequence[str] | None, stream: bool) -> Any:
        if isinstance(one, BaseException) or (one is None and stream):
            return one
        outputs = dict(convert_output(one, model_config=self._config).items())
        declared_names = outputs.keys() if self._outputs is None else self._outputs.keys()
        # A callable may omit outputs that its caller did not request.
        wanted = {name for name in declared_names if requested is None or name in requested}
        # A response of a stream may omit outputs that come later.
        has_none = bool(outputs) and outputs.keys().isdisjoint(declared_names) if stream else wanted.isdisjoint(outputs)
        if (self._strict and not wanted <= outputs.keys() <= declared_names) or (has_none and wanted):
            raise PyTritonValidationError(
                f"The result of request {index} has the outputs {sorted(outputs)}, expected those of the model, "
                f"{sorted(declared_names)}.",
                request_index=index,
                expected=sorted(declared_names),
                received=sorted(outputs),
            )
        checked = {}
        for name, value in outputs.items():
            declared = self._outputs is None or name in self._outputs
            if declared and (requested is None or name in requested):
                checked[name] = self._output(name, value, index)
        # If the callable returns a request, its parameters are not those of the response.
        parameters = None if isinstance(one, request_type()) else getattr(one, "parameters", None)
        return Result(checked, parameters)

    def _output(self, name: str, value: Any, index: int) -> Any:
        where = f"Output {name!r} of request {index}"
        value = as_array(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            raise _mismatch_error(where, name, index, "type", "a numpy array", f"{type(value).__name__} {value!r:.100}")
        if has_mask(value):
            raise _mismatch_error(where, name, index, "values", "a value in every place", "masked ones")
        array = np.asarray(value)
        if self._config.batching and not array.ndim:
            raise _mismatch_error(where, name, index, "shape", "a batch axis in front", array.shape)
        if array.dtype.kind not in "biufOSUT" and array.dtype.name != "bfloat16":
            raise _mismatch_error(where, name, index, "dtype", "one that Triton can carry", array.dtype)
        spec = None if self._outputs is None else self._outputs[name]
        declared = None if spec is None else np.dtype(spec.dtype)
        if array.dtype.kind in "OSUT" and (declared is None or declared.kind in "OSUT"):
            array = _as_bytes(array, where, name)
        elif declared is not None and array.dtype != declared:
            if declared.kind in "OSUT" or (self._strict and not np.can_cast(array.dtype, declared, "safe")):
                raise _mismatch_error(where, name, index, "dtype", declared, array.dtype)
            try:
                result, is_changed = cast_numbers(array, declared)
            except (ArithmeticError, TypeError, ValueError) as error:
                raise _mismatch_error(where, name, index, "dtype", declared, f"{array.dtype}: {error}") from error
            if is_changed:
                warnings.warn(
                    f"{where} has values of {array.dtype} that {declared} has not, which a server sends as others.",
                    stacklevel=2,
                )
            array = result
        if self._strict and spec is not None:
            self._check_shape(where, array, spec, index)
        return array

    def _check_shape(self, where: str, array: Any, spec: TensorSpec, index: int) -> None:
        batching = self._config.batching
        shape = array.shape[1:] if batching else array.shape
        if (
            (batching and not array.ndim)
            or len(shape) != len(spec.shape)
            or any(wanted not in (-1, got) for wanted, got in zip(spec.shape, shape, strict=True))
        ):
            expected = ("rows", *spec.shape) if batching else tuple(spec.shape)
            raise _mismatch_error(where, spec.name, index, "shape", f"({', '.join(map(str, expected))})", array.shape)


def _cast_untyped(array: Any, declared: np.dtype[Any], where: str, name: str, index: int) -> Any:
    """Cast an array made from lists and numbers to the declared dtype, by the rules of the clients."""
    source = array.dtype
    fits = np.can_cast(source, declared, "same_kind") or (source.kind in "iu" and declared.kind in "iu")
    # numpy reads an empty list as floats, and reports no number kind for bfloat16.
    if array.size and not fits and not (declared.name == "bfloat16" and source.kind in "biuf"):
        raise _mismatch_error(where, name, index, "values", declared, f"{source} {array.tolist()!r:.100}")
    # Integers that are too large would wrap around.
    with np.errstate(all="ignore"):
        cast = array.astype(declared)
    if declared.kind in "iu" and not np.array_equal(cast, array):
        raise _mismatch_error(where, name, index, "values", declared, f"{source} {array.tolist()!r:.100}")
    return cast


def _read(value: Any) -> Any:
    """Return a value as an array; strings in lists as objects, of which numpy would else cut zero bytes at the end."""
    if not hasattr(value, "__array__"):
        objects = np.array(value, dtype=object)
        if any(isinstance(element, (bytes, str)) for element in objects.ravel().tolist()):
            return objects
    return np.asarray(value)


def _as_bytes(array: Any, where: str, name: str) -> Any:
    """Return an object array of `bytes`, the form in which callables and clients get strings."""
    strings = np.empty(array.shape, object)
    flat = array.reshape(-1).tolist()
    for position, element in enumerate(flat):
        if isinstance(element, str):
            try:
                flat[position] = element.encode()
            except UnicodeEncodeError as error:
                raise PyTritonValidationError(
                    f"{where} has no form in UTF-8 at place {position}: expected text, received {element!r:.100}.",
                    tensor=name,
                    expected="text that UTF-8 can encode",
                    received=element,
                ) from error
        elif not isinstance(element, (bytes, bytearray)):
            raise PyTritonValidationError(
                f"{where} is an array of objects with a {type(element).__name__} at place {position}, expected "
                "bytes or str.",
                tensor=name,
                expected=bytes,
                received=type(element),
            )
    strings.reshape(-1)[:] = flat
    return strings


def _mismatch_error(
    where: str, name: str, index: int, what: str, expected: Any, received: Any
) -> PyTritonValidationError:
    return PyTritonValidationError(
        f"{where} has not the {what} that the server takes: expected {expected}, received {received}.",
        tensor=name,
        request_index=index,
        expected=expected,
        received=received,
    )
