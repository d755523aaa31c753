"""What is asked over HTTP and what the responses mean; how the bytes travel is the business of each client."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Generator
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import numpy.typing as npt

from .._core.requests import InferRequest, InferResponse, SharedTensors, Slice
from .._core.spec import ModelSpec
from .._core.startup import IF_READY, SHOWN, Ask, Question, join_states
from .._core.tensors import decode_tensor, encode_tensor
from .._core.translate import Operation, connection_error, is_denial, server_error, timeout_error
from .._core.untrusted import (
    MOST_ERROR_BYTES,
    UNREADABLE,
    array_from_json,
    check_parameters,
    check_shape,
    describe,
    find_error_text,
    parse_json,
)
from .._route.addresses import ConnectTimeoutError
from ..exceptions import PyTritonClientError, PyTritonClientInferenceServerError
from .generate import encode_generate_request
from .wire import TENSORS_START, HttpRequest, HttpResponse, HttpWireError, ResponseTooLargeError, parse_number

_FIRST_LINE_BYTES = 1 << 10

# The page of pytriton-server's guard, for callers who may not list the models: see ``GuardConfig.page``.
_SHOW_MODELS = HttpRequest("GET", "/")
_OK = 200


def model_path(model_name: str, model_version: str | None) -> str:
    """Return the path under which a model is asked."""
    path = f"/v2/models/{quote(model_name, safe='')}"
    return path if model_version is None else f"{path}/versions/{model_version}"


def ask(step: Ask, operation: Operation) -> Generator[HttpRequest, HttpResponse, Any]:
    """Yield the requests of a question, which is sent their responses, and return the answer."""
    question = step.question
    response = yield _request(step, operation)
    if question in IF_READY:
        return _read_readiness(response, operation)
    if question is Question.MODEL_LIST and response.status == HTTPStatus.FORBIDDEN:
        shown = _read_shown_models((yield _SHOW_MODELS))
        if shown is not None:
            return shown
    check_status(response, operation)
    if question in (Question.MODEL_CONFIG, Question.MODEL_LIST, Question.LIST_REGIONS):
        try:
            return _read_answer(question, parse_json(bytes(response.body)))
        except UNREADABLE as error:
            raise _not_understood(operation, response, error) from error
    return None


def _request(step: Ask, operation: Operation) -> HttpRequest:
    name = operation.model_name or ""
    model, repository = model_path(name, operation.model_version), f"/v2/repository/models/{quote(name, safe='')}"
    region = f"/v2/systemsharedmemory/region/{step.region}"
    if step.question is Question.SERVER_READY:
        return HttpRequest("GET", "/v2/health/ready")
    if step.question in IF_READY:
        return HttpRequest("GET", f"{model}/ready")
    if step.question is Question.MODEL_CONFIG:
        return HttpRequest("GET", f"{model}/config")
    if step.question is Question.LIST_REGIONS:
        return HttpRequest("GET", "/v2/systemsharedmemory/status")
    path, fields = {
        Question.MODEL_LIST: ("/v2/repository/index", {}),
        Question.LOAD: (f"{repository}/load", _load_fields(step)),
        Question.UNLOAD: (f"{repository}/unload", {}),
        Question.REGISTER_REGION: (
            f"{region}/register",
            {"key": f"/{step.region}", "offset": 0, "byte_size": step.size},
        ),
        Question.UNREGISTER_REGION: (f"{region}/unregister", {}),
    }[step.question]
    return HttpRequest("POST", path, body=json.dumps(fields).encode())


def _load_fields(step: Ask) -> dict[str, Any]:
    parameters = {path: base64.b64encode(content).decode("ascii") for path, content in (step.files or {}).items()}
    if step.config is not None:
        parameters["config"] = step.config
    return {"parameters": parameters} if parameters else {}


def _read_answer(question: Question, content: Any) -> Any:
    """Return what is to be known of the JSON of an answer."""
    if question is Question.LIST_REGIONS:
        return [str(region["name"]) for region in content]
    if question is Question.MODEL_LIST:
        return join_states((str(model["name"]), str(model.get("state", ""))) for model in content)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, received {describe(content)}")
    return content


def _read_shown_models(page: HttpResponse) -> dict[str, str] | None:
    """Return the ready models on a server's page; ``None`` if there is no such page."""
    if page.status == _OK:
        with contextlib.suppress(*UNREADABLE):
            shown = parse_json(bytes(page.body))["models"]
            return join_states((str(model["name"]), SHOWN) for model in shown if model["ready"] is True)
    return None


def infer_request(request: InferRequest) -> HttpRequest:
    """Ask for one inference; ``read_infer_response`` reads the response."""
    inputs = []
    pieces = [b""]
    shared = request.shared
    for tensor, array in request.inputs:
        where = None if shared is None else shared.inputs.get(tensor.name)
        if where is None:
            data = encode_tensor(array, tensor.datatype)
            pieces.append(data)
        inputs.append(
            {
                "name": tensor.name,
                "shape": array.shape,
                "datatype": tensor.datatype,
                "parameters": {"binary_data_size": len(data)} if where is None else _slice_parameters(where),
            }
        )
    parameters = {**request.call.parameters, **request.call.options, "binary_data_output": True}
    fields: dict[str, Any] = {"id": request.request_id, "parameters": parameters, "inputs": inputs}
    if shared is not None and shared.outputs:
        fields["outputs"] = [
            {"name": name, "parameters": {"binary_data": True} if where is None else _slice_parameters(where)}
            for name, where in shared.outputs.items()
        ]
    head = json.dumps(fields).encode()
    pieces[0] = head
    headers = {**request.call.headers, TENSORS_START: str(len(head))}
    path = f"{model_path(request.model_name, request.model_version)}/infer"
    return HttpRequest("POST", path, headers, b"".join(pieces))


def stream_request(spec: ModelSpec, request: InferRequest) -> HttpRequest:
    """Ask for an inference with any number of responses; a ``GenerateReader`` reads them."""
    path = f"{model_path(request.model_name, request.model_version)}/generate_stream"
    return HttpRequest("POST", path, request.call.headers, encode_generate_request(spec, request))


def check_status(response: HttpResponse, operation: Operation) -> None:
    """Check that a response is no error."""
    if response.status != _OK:
        text = find_error_text(response.body)
        raise server_error(operation, str(response.status), text or f"(HTTP status {response.status} without a text)")


def failed_exchange(operation: Operation, error: Exception) -> PyTritonClientError:
    """Return our error for an exchange that ended before its response was complete."""
    if isinstance(error, TimeoutError):
        reason = f" {error}" if isinstance(error, ConnectTimeoutError) else ""
        return timeout_error(replace(operation, note=reason + operation.note))
    if isinstance(error, ResponseTooLargeError):
        return server_error(operation, None, str(error))
    if isinstance(error, MemoryError):
        return server_error(operation, None, "the response does not fit into the memory of this process.")
    return connection_error(operation, f"{type(error).__name__}: {error}")


def _read_readiness(response: HttpResponse, operation: Operation) -> bool:
    """Return whether the server, or a model, says that it is ready."""
    try:
        check_status(response, operation)
    except PyTritonClientInferenceServerError as error:
        if is_denial(error.status or "", error.server_message or ""):
            raise
        if not _is_of_triton(response):
            raise connection_error(operation, f"it answered with {_page(response)}") from None
        return False
    return True


def _is_of_triton(response: HttpResponse) -> bool:
    """Ask whether Triton says "not ready": with an error status, and most often without a text."""
    if not response.body:
        return response.status == HTTPStatus.BAD_REQUEST
    try:
        content = parse_json(bytes(response.body[:MOST_ERROR_BYTES]))
    except UNREADABLE:
        return False
    return isinstance(content, dict) and "error" in content


def _page(response: HttpResponse) -> str:
    """Return the status of an answer and the first line of its text, escaped and cut."""
    text = str(response.body[:_FIRST_LINE_BYTES], "utf-8", errors="replace").strip().partition("\n")[0].rstrip()
    return f"the HTTP status {response.status} and {describe(text) if text else 'no text'}"


def read_infer_response(
    response: HttpResponse, operation: Operation, shared: SharedTensors | None = None
) -> InferResponse:
    """Return the response to an inference."""
    check_status(response, operation)
    try:
        length = response.headers.get(TENSORS_START.lower())
        head_length = len(response.body) if length is None else parse_number(length, 10)
        if head_length > len(response.body):
            raise ValueError(f"expected {describe(head_length)} bytes of JSON, received {len(response.body)} bytes")
        head = parse_json(bytes(response.body[:head_length]))
        outputs = _read_outputs(head.get("outputs", ()), response.body[head_length:], shared)
        version = head.get("model_version")
        return InferResponse(
            outputs,
            parameters=check_parameters(head.get("parameters")),
            request_id=str(head.get("id", "")),
            model_name=str(head.get("model_name", "")),
            model_version=None if version is None else str(version),
        )
    except (*UNREADABLE, HttpWireError) as error:
        raise _not_understood(operation, response, error) from error


def _slice_parameters(where: Slice) -> dict[str, str | int]:
    return {
        "shared_memory_region": where.region,
        "shared_memory_offset": where.offset,
        "shared_memory_byte_size": where.size,
    }


def _read_outputs(described: Any, data: memoryview, shared: SharedTensors | None) -> dict[str, npt.NDArray[Any]]:
    outputs: dict[str, npt.NDArray[Any]] = {}
    start = 0
    for output in described:
        name, datatype, shape = output["name"], output["datatype"], check_shape(output["shape"])
        if not isinstance(name, str) or name in outputs:
            raise ValueError(f"expected each output once and by its name, received {describe(name)}")
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None and "data" not in output and shared is not None and shared.outputs.get(name) is not None:
            # Nothing else shows that the server has written the output to the place that it was given.
            outputs[name] = shared.read(name, datatype, shape)
            continue
        if size is None:
            # Servers other than Triton may send it inside the JSON.
            outputs[name] = array_from_json(output["data"], datatype, shape)
            continue
        if type(size) is not int or not 0 <= size <= len(data) - start:
            raise ValueError(
                f"expected {describe(size)} bytes of the output {describe(name)}, received {len(data) - start}"
            )
        # Only large outputs share the memory of the response: a small one must not keep all of it alive.
        outputs[name] = decode_tensor(data[start : start + size], datatype, shape, may_share=2 * size >= len(data))
        start += size
    if start != len(data):
        raise ValueError(f"expected {start} bytes of outputs, received {len(data)}")
    return outputs


def _not_understood(
    operation: Operation, response: HttpResponse, error: Exception
) -> PyTritonClientInferenceServerError:
    coding = response.headers.get("content-encoding", "identity")
    hint = "" if coding == "identity" else f" It came with the content encoding {describe(coding)}, unasked for."
    return server_error(operation, "200", f"the answer cannot be read ({type(error).__name__}: {error}).{hint}")
