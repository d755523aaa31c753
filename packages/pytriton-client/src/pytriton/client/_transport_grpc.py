"""KServe v2 over gRPC. The only module that imports ``tritonclient.grpc``, which brings grpc and protobuf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tritonclient.grpc import InferenceServerClient, InferenceServerException, InferInput

from ._codec import make_inputs, read_output
from ._requests import InferRequest, InferResponse
from ._results import ParameterValue
from ._translate import Operation, closed_error, grpc_error, is_denial, server_error
from ._url import TritonUrl
from .exceptions import PyTritonClientInferenceServerError, PyTritonClientValueError

__all__ = ["GrpcTransport", "make_tritonclient"]

_MOST_BYTES = 2**31 - 1
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _MOST_BYTES),
    ("grpc.max_receive_message_length", _MOST_BYTES),
    # A channel that could not connect refuses to try again for 1 s and up to 2 minutes by default: too long for a
    # client that waits for its server to start.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# What a message holds besides the tensors: names, shapes, parameters.
_LONGEST_TENSORS_BYTES = _MOST_BYTES - (1 << 20)
_NOT_THERE = ("NOT_FOUND", "UNAVAILABLE")

Result = TypeVar("Result")


def make_tritonclient(url: TritonUrl) -> InferenceServerClient:
    """Return a client of tritonclient itself, for code that wants one."""
    return InferenceServerClient(url.without_scheme, ssl=url.is_encrypted, channel_args=list(_CHANNEL_OPTIONS))


class GrpcTransport:
    """The ``Transport`` for gRPC: one channel, which threads may share.

    Args:
        url: The server.
        headers: Sent with every request as metadata.
    """

    def __init__(self, url: TritonUrl, headers: Mapping[str, str]) -> None:
        self._url = url.with_scheme
        self._headers = dict(headers)
        self._client = make_tritonclient(url)
        self._is_closed = False

    def is_server_ready(self, timeout_s: float) -> bool:
        """Ask whether the server is ready."""
        operation = Operation("server readiness request", self._url, timeout_s)
        return self._is_ready(operation, self._client.is_server_ready)

    def is_model_ready(self, model_name: str, model_version: str | None, timeout_s: float) -> bool:
        """Ask whether a model is ready; a model that is not known is not ready."""
        operation = Operation("model readiness request", self._url, timeout_s, model_name, model_version)
        return self._is_ready(operation, self._client.is_model_ready, model_name, model_version or "")

    def get_model_config(self, model_name: str, model_version: str | None, timeout_s: float) -> Mapping[str, Any]:
        """Return the model configuration."""
        operation = Operation("model configuration request", self._url, timeout_s, model_name, model_version)
        answer = self._call(operation, self._client.get_model_config, model_name, model_version or "", as_json=True)
        config: Mapping[str, Any] = answer["config"]
        return config

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        operation = Operation("inference request", self._url, timeout_s, request.model_name, request.model_version)
        _check_size(request)
        result = self._call(
            operation,
            self._client.infer,
            request.model_name,
            make_inputs(InferInput, request),
            request.model_version or "",
            headers=request.call.headers,
            request_id=request.request_id,
            parameters=dict(request.call.parameters),
            **request.call.options,
        )
        try:
            message = result.get_response()
            return InferResponse(
                {item.name: read_output(result, item.name, item.datatype) for item in message.outputs},
                {name: _parameter_value(value) for name, value in message.parameters.items()},
                message.id,
                message.model_name,
                message.model_version or None,
            )
        except (AttributeError, TypeError, ValueError) as error:
            text = f"the answer cannot be read ({type(error).__name__}: {error})."
            raise server_error(operation, "OK", text) from error

    def load_model(
        self, model_name: str, config: str | None, files: Mapping[str, bytes] | None, timeout_s: float
    ) -> None:
        """Load a model, or load it anew."""
        operation = Operation("loading of the model", self._url, timeout_s, model_name)
        self._call(operation, self._client.load_model, model_name, config=config, files=files)

    def unload_model(self, model_name: str, timeout_s: float) -> None:
        """Unload a model."""
        operation = Operation("unloading of the model", self._url, timeout_s, model_name)
        self._call(operation, self._client.unload_model, model_name)

    def close(self) -> None:
        """Close the channel; calls in flight end with ``PyTritonClientClosedError``."""
        self._is_closed = True
        self._client.close()

    def _is_ready(self, operation: Operation, ask: Callable[..., bool], *args: str) -> bool:
        try:
            return self._call(operation, ask, *args)
        except PyTritonClientInferenceServerError as error:
            if error.status not in _NOT_THERE or is_denial(error.status, error.server_message or ""):
                raise
            return False

    def _call(
        self,
        operation: Operation,
        method: Callable[..., Result],
        *args: Any,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Result:
        # gRPC refuses capital letters in the keys of metadata.
        metadata = {name.lower(): value for name, value in {**self._headers, **(headers or {})}.items()}
        if self._is_closed:
            raise closed_error(operation.model_name, self._url)
        try:
            return method(*args, headers=metadata, client_timeout=operation.timeout_s, **options)
        except InferenceServerException as error:
            status = (error.status() or "").removeprefix("StatusCode.")
            raise grpc_error(operation, status, error.message() or "") from error
        except ValueError as error:
            # What a channel says that another thread has closed meanwhile.
            if self._is_closed:
                raise closed_error(operation.model_name, self._url) from error
            raise


def _parameter_value(value: Any) -> ParameterValue:
    """Return what an ``InferParameter`` of protobuf holds."""
    chosen: ParameterValue = getattr(value, value.WhichOneof("parameter_choice"))
    return chosen


def _check_size(request: InferRequest) -> None:
    """Refuse what protobuf would refuse later, after copies of gigabytes and without a word about the reason."""
    size = sum(array.nbytes for tensor, array in request.inputs if tensor.datatype != "BYTES")
    if size > _LONGEST_TENSORS_BYTES:
        raise PyTritonClientValueError(
            f"Model {request.model_name}: expected inputs of less than 2 GiB together, all that a gRPC message "
            f"holds; received {size} bytes. Send smaller batches, or use HTTP.",
            model_name=request.model_name,
            model_version=request.model_version,
            expected="less than 2 GiB",
            received=f"{size} bytes",
        )
