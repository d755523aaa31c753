"""Triton's generate extension, by which a stream of responses travels over HTTP: JSON there, events with JSON back.

The JSON names every input with its elements in one flat list, and every output likewise. Neither says a shape: the
server works an input's shape out from the model, and the client an output's. Where that has more than one solution, or
where JSON cannot hold the elements, the request is refused here, before anything is sent. gRPC has no such limits.

Nothing here waits or opens a connection.
"""

from __future__ import annotations

import json
import math
from collections import deque
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .._core.requests import InferRequest, InferResponse
from .._core.spec import ModelSpec, TensorSpec
from .._core.translate import Operation, server_error
from .._core.untrusted import (
    DEFAULT_MAX_RESPONSE_BYTES,
    UNREADABLE,
    array_from_json,
    describe,
    find_error_text,
    parse_json,
)
from ..exceptions import PyTritonClientError, PyTritonClientValueError

_UNSUPPORTED = ("FP16", "BF16")
# These keys of the JSON are no tensors.
_INPUT_KEYS = ("id", "parameters")
_OUTPUT_KEYS = ("id", "model_name", "model_version")
_EVENT_END = b"\n\n"
_EVENT_PREFIX = b"data: "


class GenerateReader:
    """Reads the responses to one request from the body of an HTTP response, however that is cut into pieces."""

    def __init__(self, spec: ModelSpec, request: InferRequest, max_bytes: int = DEFAULT_MAX_RESPONSE_BYTES) -> None:
        self._spec = spec
        self._request = request
        self._max_bytes = max_bytes
        # The unfinished event at the end of the buffer, and how much of it was searched for its end.
        self._data = bytearray()
        self._searched = 0
        self._events: deque[bytes] = deque()

    def feed(self, piece: bytes) -> None:
        """Take the next piece of the body."""
        self._data += piece
        self._events.extend(_split_events(self._data, self._searched))
        self._searched = max(0, len(self._data) - len(_EVENT_END) + 1)

    def next_response(self, operation: Operation) -> InferResponse | None:
        """Return the next response; ``None`` if a piece is missing."""
        if not self._events:
            if len(self._data) > self._max_bytes:
                text = (
                    f"expected a response of at most {self._max_bytes} bytes, received more. Give the client a larger "
                    "max_response_bytes if such responses are right."
                )
                raise server_error(operation, None, text)
            return None
        try:
            content = _parse_event(self._events.popleft())
            # A response always names its model; an output may be called "error".
            if "error" in content and "model_name" not in content:
                # The status was sent before, when nothing had failed.
                said = content["error"]
                raise server_error(operation, None, said if isinstance(said, str) else describe(said))
            return _decode_response(self._spec, self._request, content)
        except UNREADABLE as error:
            text = f"a response of the stream cannot be read ({type(error).__name__}: {error})."
            raise server_error(operation, "200", text) from error

    @staticmethod
    def error_of(status: int, body: bytes | bytearray, operation: Operation) -> PyTritonClientError:
        """Return the error for a status other than 200."""
        # An error of the model comes as an event, one of the server as plain JSON.
        data = bytearray(body)
        text = find_error_text(next(iter(_split_events(data)), bytes(data)))
        return server_error(operation, str(status), text or f"(HTTP status {status} without a text)")


def encode_generate_request(spec: ModelSpec, request: InferRequest) -> bytes:
    """Return the body of a request. Raises an error if the generate extension cannot express it."""
    batch_size = request.inputs[0][1].shape[0] if spec.batching else None
    for tensor in spec.outputs:
        _check_output(spec, tensor)
    # Triton hands the id to the callable as a parameter too, so it is left out where nobody asked for it.
    body: dict[str, Any] = {} if request.call.request_id is None else {"id": request.call.request_id}
    for tensor, array in request.inputs:
        body[tensor.name] = _encode_input(spec, tensor, array, batch_size)
    known = {tensor.name for tensor in spec.inputs}
    if request.call.options:
        _refuse(spec, f"a request without {', '.join(map(repr, request.call.options))}", "Triton takes no such options")
    for name in request.call.parameters:
        if name in known or name in _INPUT_KEYS:
            _refuse(spec, f"another name for the parameter {name!r}", "it is the name of an input there")
    return json.dumps({**body, "parameters": dict(request.call.parameters)}).encode()


def _split_events(data: bytearray, searched: int = 0) -> list[bytes]:
    """Take the complete events from the front of a buffer. No event ends within the first ``searched`` bytes."""
    events = []
    while (end := data.find(_EVENT_END, searched)) >= 0:
        event = bytes(data[:end])
        del data[: end + len(_EVENT_END)]
        searched = 0
        # Triton writes events of one line, without names or numbers.
        if event.startswith(_EVENT_PREFIX):
            events.append(event[len(_EVENT_PREFIX) :])
    return events


def _parse_event(event: bytes) -> dict[str, Any]:
    # Triton writes strings as they are; bytes that are no UTF-8 come back as surrogates, and become bytes again later.
    content = parse_json(event.decode("utf-8", errors="surrogateescape"))
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, received {describe(content)}")
    return content


def _decode_response(spec: ModelSpec, request: InferRequest, content: dict[str, Any]) -> InferResponse:
    batch_size = request.inputs[0][1].shape[0] if spec.batching else None
    outputs = {
        tensor.name: _decode_output(tensor, content.pop(tensor.name), batch_size)
        for tensor in spec.outputs
        if tensor.name in content
    }
    return InferResponse(
        outputs,
        request_id=str(content.pop("id", request.request_id)),
        model_name=str(content.pop("model_name", "")),
        model_version=None if (version := content.pop("model_version", None)) is None else str(version),
        is_final=bool(content.pop("triton_final_response", False)),
        parameters=content,  # everything else
    )


def _encode_input(spec: ModelSpec, tensor: TensorSpec, array: npt.NDArray[Any], batch_size: int | None) -> list[Any]:
    where = f"the input {tensor.name!r}"
    if tensor.name in _INPUT_KEYS:
        _refuse(spec, f"another name for {where}", "the JSON has a key of this name")
    if tensor.datatype in _UNSUPPORTED:
        _refuse(spec, f"{where} of another type than {tensor.datatype}", "Triton does not read it from JSON")
    if array.size == 0:
        _refuse(spec, f"{where} with at least one element", f"the shape is {array.shape}")
    # Triton treats the batch axis as one of free length.
    shape = _shape_of(tensor.shape if batch_size is None else (-1, *tensor.shape), array.size)
    if shape != array.shape:
        _refuse(
            spec,
            f"{where} with a shape that Triton can work out from the number of its elements",
            f"from {array.size} elements it would make {shape}, in place of {array.shape}",
        )
    if tensor.datatype == "BYTES":
        return [_encode_string(spec, where, element) for element in array.ravel().tolist()]
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        _refuse(spec, f"{where} with finite numbers", "JSON has no others")
    elements: list[Any] = array.ravel().tolist()
    return elements


def _encode_string(spec: ModelSpec, where: str, element: bytes) -> str:
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(spec, f"{where} with text in UTF-8", f"JSON cannot hold {element[:40]!r}", error)


def _check_output(spec: ModelSpec, tensor: TensorSpec) -> None:
    where = f"the output {tensor.name!r}"
    if tensor.name in _OUTPUT_KEYS:
        _refuse(spec, f"another name for {where}", "the JSON has a key of this name")
    if tensor.datatype in _UNSUPPORTED:
        _refuse(spec, f"{where} of another type than {tensor.datatype}", "Triton does not write it as JSON")
    if tensor.shape.count(-1) > 1:
        _refuse(spec, f"{where} with one free axis at most", f"its shape is {tensor.shape} and the JSON says none")


def _shape_of(declared: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape of ``size`` elements: the last free axis takes what is left, the other free axes are 1."""
    fixed = math.prod(length for length in declared if length != -1)
    rest = size // fixed if fixed else 0
    shape = []
    for length in reversed(declared):
        if length == -1:
            length, rest = rest, 1
        shape.append(length)
    return tuple(reversed(shape))


def _decode_output(tensor: TensorSpec, value: Any, batch_size: int | None) -> npt.NDArray[Any]:
    elements: list[Any] = value if isinstance(value, list) else [value]
    declared = tensor.shape if batch_size is None else (batch_size, *tensor.shape)
    return array_from_json(elements, tensor.datatype, _shape_of(declared, len(elements)))


def _refuse(spec: ModelSpec, expected: str, reason: str, cause: Exception | None = None) -> NoReturn:
    raise PyTritonClientValueError(
        f"Model {spec.model_name}: a stream over HTTP carries JSON, and expects {expected}; {reason}. Use a grpc:// "
        "address, where streams carry any tensors.",
        model_name=spec.model_name,
        expected=expected,
        received=reason,
    ) from cause
