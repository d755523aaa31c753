"""What is asked over HTTP and what the answers mean; how the bytes travel is the business of each client."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from tritonclient.http import InferenceServerClient, InferInput, InferResult

from ._codec import make_inputs, read_output
from ._http_wire import Answer
from ._requests import InferRequest, InferResponse
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
    body, json_length = InferenceServerClient.generate_request_body(
        make_inputs(InferInput, request),
        request_id=request.request_id,
        parameters=dict(request.call.parameters),
        **request.call.options,
    )
    headers = dict(request.call.headers)
    if json_length is not None:
        headers[_HEADER_LENGTH] = str(json_length)
    return HttpRequest("POST", f"{model_path(request.model_name, request.model_version)}/infer", headers, body)


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
        result = InferResult(_Body(answer), verbose=False)
        head = result.get_response()
        outputs = head.get("outputs", [])
        return InferResponse(
            {item["name"]: read_output(result, item["name"], item["datatype"]) for item in outputs},
            head.get("parameters") or {},
            str(head.get("id", "")),
            str(head.get("model_name", "")),
            head.get("model_version"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _not_understood(operation, error) from error


class _Body:
    """What tritonclient's ``InferResult`` asks of a response: headers, and the body piece by piece."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._position = 0

    def get(self, header: str) -> str | None:
        return self._answer.headers.get(header.lower())

    def read(self, length: int = -1) -> bytearray:
        start = self._position
        end = len(self._answer.body) if length < 0 else start + length
        self._position = end
        return self._answer.body[start:end]


def _error_text(status: int, body: bytes | bytearray) -> str:
    text = body.decode("utf-8", errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (KeyError, TypeError, ValueError):
        return text or f"(HTTP status {status} without a text)"


def _not_understood(operation: Operation, error: Exception) -> PyTritonClientInferenceServerError:
    return server_error(operation, "200", f"the answer cannot be read ({type(error).__name__}: {error}).")
