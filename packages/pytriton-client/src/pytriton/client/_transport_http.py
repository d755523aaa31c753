"""KServe v2 over HTTP. The only module that imports ``tritonclient.http``, which brings gevent."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from tritonclient.http import InferenceServerClient, InferInput, InferResult

from ._codec import make_inputs, read_output
from ._deadline import Deadline
from ._generate import GenerateReader, encode_generate_request
from ._http_pool import ConnectionPool, HttpStream, PoolClosedError
from ._http_wire import Answer, HttpWireError
from ._requests import InferRequest, InferResponse
from ._spec import ModelSpec
from ._tls import TlsSettings, make_ssl_context
from ._translate import Operation, closed_error, connection_error, is_denial, server_error, timeout_error
from ._url import TritonUrl
from .exceptions import PyTritonClientError, PyTritonClientInferenceServerError

__all__ = ["HttpTransport", "make_tritonclient"]

_HEADER_LENGTH = "Inference-Header-Content-Length"


def make_tritonclient(url: TritonUrl, network_timeout_s: float, tls: TlsSettings | None) -> InferenceServerClient:
    """Return a client of tritonclient itself, for code that wants one."""
    return InferenceServerClient(
        url.without_scheme,
        ssl=url.is_encrypted,
        connection_timeout=network_timeout_s,
        network_timeout=network_timeout_s,
        ssl_context_factory=(lambda: make_ssl_context(tls)) if url.is_encrypted else None,
    )


class HttpTransport:
    """The ``Transport`` for HTTP: tritonclient makes and reads the bodies, a pool of connections carries them.

    Args:
        url: The server.
        headers: Sent with every request.
        tls: Certificates for an encrypted connection.
    """

    def __init__(self, url: TritonUrl, headers: Mapping[str, str], tls: TlsSettings | None = None) -> None:
        self._url = url.with_scheme
        self._headers = dict(headers)
        self._pool = ConnectionPool(url, make_ssl_context(tls) if url.is_encrypted else None)

    def is_server_ready(self, timeout_s: float) -> bool:
        """Ask whether the server is ready."""
        return self._is_ready("/v2/health/ready", Operation("server readiness request", self._url, timeout_s))

    def is_model_ready(self, model_name: str, model_version: str | None, timeout_s: float) -> bool:
        """Ask whether a model is ready; a model that is not known is not ready."""
        operation = Operation("model readiness request", self._url, timeout_s, model_name, model_version)
        return self._is_ready(f"{_model_path(model_name, model_version)}/ready", operation)

    def get_model_config(self, model_name: str, model_version: str | None, timeout_s: float) -> Mapping[str, Any]:
        """Return the model configuration."""
        operation = Operation("model configuration request", self._url, timeout_s, model_name, model_version)
        answer = self._exchange("GET", f"{_model_path(model_name, model_version)}/config", operation)
        try:
            config: Mapping[str, Any] = json.loads(answer.body)
        except ValueError as error:
            raise _not_understood(operation, error) from error
        return config

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        operation = Operation("inference request", self._url, timeout_s, request.model_name, request.model_version)
        body, json_length = InferenceServerClient.generate_request_body(
            make_inputs(InferInput, request),
            request_id=request.request_id,
            parameters=dict(request.call.parameters),
            **request.call.options,
        )
        headers = dict(request.call.headers)
        if json_length is not None:
            headers[_HEADER_LENGTH] = str(json_length)
        path = f"{_model_path(request.model_name, request.model_version)}/infer"
        answer = self._exchange("POST", path, operation, headers, body)
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

    def stream(self, spec: ModelSpec, request: InferRequest) -> HttpResponseStream:
        """Prepare an inference request that any number of responses may answer. The first ``receive`` sends it."""
        body = encode_generate_request(spec, request)
        path = f"{_model_path(request.model_name, request.model_version)}/generate_stream"
        headers = {**self._headers, **request.call.headers}

        def send(deadline: Deadline) -> HttpStream:
            return self._pool.stream(path, headers, body, deadline)

        return HttpResponseStream(send, self._url, request, GenerateReader(spec, request))

    def load_model(
        self, model_name: str, config: str | None, files: Mapping[str, bytes] | None, timeout_s: float
    ) -> None:
        """Load a model, or load it anew."""
        operation = Operation("loading of the model", self._url, timeout_s, model_name)
        parameters = {path: base64.b64encode(content).decode("ascii") for path, content in (files or {}).items()}
        if config is not None:
            parameters["config"] = config
        body = json.dumps({"parameters": parameters} if parameters else {}).encode()
        self._exchange("POST", f"/v2/repository/models/{quote(model_name, safe='')}/load", operation, body=body)

    def unload_model(self, model_name: str, timeout_s: float) -> None:
        """Unload a model."""
        operation = Operation("unloading of the model", self._url, timeout_s, model_name)
        self._exchange("POST", f"/v2/repository/models/{quote(model_name, safe='')}/unload", operation, body=b"{}")

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _is_ready(self, path: str, operation: Operation) -> bool:
        try:
            self._exchange("GET", path, operation)
        except PyTritonClientInferenceServerError as error:
            # Triton says "not ready" with an error status, and most often without a text.
            if is_denial(error.status or "", error.server_message or ""):
                raise
            return False
        return True

    def _exchange(
        self,
        method: str,
        path: str,
        operation: Operation,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answer:
        all_headers = {**self._headers, **headers} if headers else self._headers
        try:
            answer = self._pool.exchange(method, path, all_headers, body, Deadline(operation.timeout_s))
        except (PoolClosedError, OSError, HttpWireError) as error:
            raise _translate(operation, error) from error
        if answer.status != 200:
            raise server_error(operation, str(answer.status), _error_text(answer.status, answer.body))
        return answer


class HttpResponseStream:
    """The responses to one request, a ``ResponseStream``.

    Args:
        send: Sends the request.
        url: The server, for errors.
        request: The request, for errors.
        reader: Understands the body of the answer.
    """

    def __init__(
        self, send: Callable[[Deadline], HttpStream], url: str, request: InferRequest, reader: GenerateReader
    ) -> None:
        self._send = send
        self._url = url
        self._request = request
        self._reader = reader
        self._stream: HttpStream | None = None

    def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one."""
        name, version = self._request.model_name, self._request.model_version
        operation = Operation("streaming inference", self._url, timeout_s, name, version)
        deadline = Deadline(timeout_s)
        try:
            if self._stream is None:
                self._stream = self._send(deadline)
                status, _ = self._stream.read_head(deadline)
                if status != 200:
                    raise self._reader.error_of(status, _read_rest(self._stream, deadline), operation)
            while (response := self._reader.next_response(operation)) is None:
                piece = self._stream.read_piece(deadline)
                if not piece:
                    return None
                self._reader.feed(piece)
        except (PoolClosedError, OSError, HttpWireError) as error:
            raise _translate(operation, error) from error
        return response

    def close(self) -> None:
        """Cancel the request if it is not over."""
        if self._stream is not None:
            self._stream.close()


def _read_rest(stream: HttpStream, deadline: Deadline) -> bytes:
    pieces = []
    while piece := stream.read_piece(deadline):
        pieces.append(piece)
    return b"".join(pieces)


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


def _model_path(model_name: str, model_version: str | None) -> str:
    path = f"/v2/models/{quote(model_name, safe='')}"
    return path if model_version is None else f"{path}/versions/{model_version}"


def _error_text(status: int, body: bytes | bytearray) -> str:
    text = body.decode("utf-8", errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (KeyError, TypeError, ValueError):
        return text or f"(HTTP status {status} without a text)"


def _translate(operation: Operation, error: Exception) -> PyTritonClientError:
    if isinstance(error, PoolClosedError):
        return closed_error(operation.model_name, operation.url)
    if isinstance(error, TimeoutError):
        return timeout_error(operation)
    return connection_error(operation, f"{type(error).__name__}: {error}")


def _not_understood(operation: Operation, error: Exception) -> PyTritonClientInferenceServerError:
    return server_error(operation, "200", f"the answer cannot be read ({type(error).__name__}: {error}).")
