"""What is asked over HTTP and what the answers mean; how the bytes travel is the business of each client."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from ._dtypes import dtype_of
from ._http_wire import Answer
from ._requests import InferRequest, InferResponse
from ._tensors import decode_tensor, encode_tensor
from ._translate import Operation, is_denial, server_error
from .exceptions import PyTritonClientInferenceServerError

__all__ = [
    "SERVER_READY",
    "HttpRequest",
    "check_answer",
    "check_status",
    "infer_request",
    "load_request",
    "model_config_request",
    "model_path",
    "model_ready_request",
    "read_infer_response",
    "read_model_config",
    "read_readiness",
    "unload_request",
]

_HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class HttpRequest:
    """A request without what goes with all of them.

    Attributes:
        method: ``GET`` or ``POST``.
        path: From the first slash on, quoted.
        headers: Besides those that every request carries.
        body: May be empty.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


SERVER_READY = HttpRequest("GET", "/v2/health/ready")


def model_path(model_name: str, model_version: str | None) -> str:
    """Return the path under which a model is asked."""
    path = f"/v2/models/{quote(model_name, safe='')}"
    return path if model_version is None else f"{path}/versions/{model_version}"


def model_ready_request(model_name: str, model_version: str | None) -> HttpRequest:
    """Ask whether a model is ready; ``read_readiness`` reads the answer."""
    return HttpRequest("GET", f"{model_path(model_name, model_version)}/ready")


def model_config_request(model_name: str, model_version: str | None) -> HttpRequest:
    """Ask for a model's configuration; ``read_model_config`` reads the answer."""
    return HttpRequest("GET", f"{model_path(model_name, model_version)}/config")


def infer_request(request: InferRequest) -> HttpRequest:
    """Ask for one inference; ``read_infer_response`` reads the answer."""
    inputs = []
    pieces = [b""]
    for tensor, array in request.inputs:
        data = encode_tensor(array, tensor.datatype)
        pieces.append(data)
        inputs.append(
            {
                "name": tensor.name,
                "shape": array.shape,
                "datatype": tensor.datatype,
                "parameters": {"binary_data_size": len(data)},
            }
        )
    parameters = {**request.call.parameters, **request.call.options, "binary_data_output": True}
    head = json.dumps({"id": request.request_id, "parameters": parameters, "inputs": inputs}).encode()
    pieces[0] = head
    headers = {**request.call.headers, _HEADER_LENGTH: str(len(head))}
    path = f"{model_path(request.model_name, request.model_version)}/infer"
    return HttpRequest("POST", path, headers, b"".join(pieces))


def load_request(model_name: str, config: str | None, files: Mapping[str, bytes] | None) -> HttpRequest:
    """Ask to load a model, or to load it anew."""
    parameters = {path: base64.b64encode(content).decode("ascii") for path, content in (files or {}).items()}
    if config is not None:
        parameters["config"] = config
    body = json.dumps({"parameters": parameters} if parameters else {}).encode()
    return HttpRequest("POST", f"/v2/repository/models/{quote(model_name, safe='')}/load", body=body)


def unload_request(model_name: str) -> HttpRequest:
    """Ask to unload a model."""
    return HttpRequest("POST", f"/v2/repository/models/{quote(model_name, safe='')}/unload", body=b"{}")


def check_answer(answer: Answer, operation: Operation) -> None:
    """Check that an answer is no error.

    Raises:
        PyTritonClientInferenceServerError: It is one.
    """
    check_status(answer.status, answer.body, operation)


def check_status(status: int, body: bytes | bytearray, operation: Operation) -> None:
    """Check that a status is no error; the body says why it is one.

    Raises:
        PyTritonClientInferenceServerError: It is one.
    """
    if status != 200:
        raise server_error(operation, str(status), _error_text(status, body))


def read_readiness(answer: Answer, operation: Operation) -> bool:
    """Return whether the server, or a model, says that it is ready.

    Raises:
        PyTritonClientInferenceServerError: The server refuses to say it to this caller.
    """
    try:
        check_answer(answer, operation)
    except PyTritonClientInferenceServerError as error:
        # Triton says "not ready" with an error status, and most often without a text.
        if is_denial(error.status or "", error.server_message or ""):
            raise
        return False
    return True


def read_model_config(answer: Answer, operation: Operation) -> Mapping[str, Any]:
    """Return the model configuration in the form of its JSON.

    Raises:
        PyTritonClientInferenceServerError: The answer is an error, or cannot be read.
    """
    check_answer(answer, operation)
    try:
        config: Mapping[str, Any] = json.loads(answer.body)
    except ValueError as error:
        raise _not_understood(operation, error) from error
    return config


def read_infer_response(answer: Answer, operation: Operation) -> InferResponse:
    """Return the response to an inference.

    Raises:
        PyTritonClientInferenceServerError: The answer is an error, or cannot be read.
    """
    check_answer(answer, operation)
    try:
        head_length = int(answer.headers.get(_HEADER_LENGTH.lower(), len(answer.body)))
        with memoryview(answer.body) as body:
            head = json.loads(bytes(body[:head_length]))
            outputs = {}
            start = head_length
            for output in head.get("outputs", ()):
                size = output.get("parameters", {}).get("binary_data_size")
                if size is None:
                    outputs[output["name"]] = _read_json_output(output)
                    continue
                data = body[start : start + size]
                outputs[output["name"]] = decode_tensor(data, output["datatype"], output["shape"])
                start += size
        return InferResponse(
            outputs,
            parameters=head.get("parameters") or {},
            request_id=str(head.get("id", "")),
            model_name=str(head.get("model_name", "")),
            model_version=head.get("model_version"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _not_understood(operation, error) from error


def _read_json_output(output: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Read a tensor from the JSON itself, as servers other than Triton may send it."""
    datatype, shape = output["datatype"], output["shape"]
    if datatype == "BYTES":
        flat = np.empty(len(output["data"]), dtype=object)
        flat[:] = [text.encode() for text in output["data"]]
    else:
        flat = np.array(output["data"], dtype=dtype_of(datatype))
    array: npt.NDArray[Any] = flat.reshape(shape)
    return array


def _error_text(status: int, body: bytes | bytearray) -> str:
    text = body.decode("utf-8", errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (KeyError, TypeError, ValueError):
        return text or f"(HTTP status {status} without a text)"


def _not_understood(operation: Operation, error: Exception) -> PyTritonClientInferenceServerError:
    return server_error(operation, "200", f"the answer cannot be read ({type(error).__name__}: {error}).")
