"""The calls of the gRPC service and the readers of their answers, shared by synchronous and asyncio transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .._core.requests import InferRequest, InferResponse, SharedTensors
from .._core.translate import Operation, is_denial, server_error
from .._core.untrusted import UNREADABLE
from ..exceptions import PyTritonClientInferenceServerError
from .messages import decode_infer_response, decode_model_config, encode_infer_request, encode_load_request, service_pb2

_UNAVAILABLE_STATUSES = ("NOT_FOUND", "UNAVAILABLE")


class GrpcCall(NamedTuple):
    """A call that is to be made."""

    operation: Operation  # what is being done, for errors
    method: str  # of the service
    message: Any  # the request


def server_ready(url: str, timeout_s: float) -> GrpcCall:
    """Ask whether the server is ready."""
    operation = Operation("server readiness request", url, timeout_s)
    return GrpcCall(operation, "ServerReady", service_pb2.ServerReadyRequest())


def model_ready(url: str, model_name: str, model_version: str | None, timeout_s: float) -> GrpcCall:
    """Ask whether a model is ready."""
    operation = Operation("model readiness request", url, timeout_s, model_name, model_version)
    return GrpcCall(
        operation, "ModelReady", service_pb2.ModelReadyRequest(name=model_name, version=model_version or "")
    )


def is_unavailable(error: PyTritonClientInferenceServerError) -> bool:
    """Return whether the error of a readiness request means that there is no such model or server."""
    return error.status in _UNAVAILABLE_STATUSES and not is_denial(error.status, error.server_message or "")


def model_config(url: str, model_name: str, model_version: str | None, timeout_s: float) -> GrpcCall:
    """Ask for the configuration of a model."""
    operation = Operation("model configuration request", url, timeout_s, model_name, model_version)
    return GrpcCall(
        operation, "ModelConfig", service_pb2.ModelConfigRequest(name=model_name, version=model_version or "")
    )


def list_models(url: str, timeout_s: float) -> GrpcCall:
    """Ask for the models of the server and their states."""
    operation = Operation("request for the list of models", url, timeout_s)
    return GrpcCall(operation, "RepositoryIndex", service_pb2.RepositoryIndexRequest())


def infer(url: str, request: InferRequest, timeout_s: float) -> GrpcCall:
    """Carry one inference request."""
    operation = Operation("inference request", url, timeout_s, request.model_name, request.model_version)
    return GrpcCall(operation, "ModelInfer", encode_infer_request(request))


def stream_operation(url: str, request: InferRequest) -> Operation:
    """Return the operation of a stream for its errors."""
    return Operation("streaming inference", url, 0, request.model_name, request.model_version)


def load_model(
    url: str, model_name: str, config: str | None, files: Mapping[str, bytes] | None, timeout_s: float
) -> GrpcCall:
    """Load a model, or load it anew."""
    operation = Operation("loading of the model", url, timeout_s, model_name)
    return GrpcCall(operation, "RepositoryModelLoad", encode_load_request(model_name, config, files))


def unload_model(url: str, model_name: str, timeout_s: float) -> GrpcCall:
    """Unload a model."""
    operation = Operation("unloading of the model", url, timeout_s, model_name)
    message = service_pb2.RepositoryModelUnloadRequest(model_name=model_name)
    return GrpcCall(operation, "RepositoryModelUnload", message)


def register_shared_memory(url: str, name: str, size: int, timeout_s: float) -> GrpcCall:
    """Map a region of shared memory; its name is the one of its file, too."""
    operation = Operation("registration of shared memory", url, timeout_s)
    message = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", offset=0, byte_size=size)
    return GrpcCall(operation, "SystemSharedMemoryRegister", message)


def unregister_shared_memory(url: str, name: str, timeout_s: float) -> GrpcCall:
    """Forget a region of shared memory."""
    operation = Operation("unregistering of shared memory", url, timeout_s)
    return GrpcCall(
        operation, "SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
    )


def list_shared_memory(url: str, timeout_s: float) -> GrpcCall:
    """Ask which regions of shared memory are registered."""
    operation = Operation("request for the regions of shared memory", url, timeout_s)
    return GrpcCall(operation, "SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest())


def read_infer_response(operation: Operation, message: Any, shared: SharedTensors | None = None) -> InferResponse:
    """Return the response in a message."""
    try:
        return decode_infer_response(message, shared)
    except UNREADABLE as error:
        raise _unreadable_error(operation, error) from error


def read_model_config(operation: Operation, message: Any) -> Mapping[str, Any]:
    """Return the configuration in the form of its JSON."""
    try:
        return decode_model_config(message)
    except UNREADABLE as error:
        raise _unreadable_error(operation, error) from error


def check_message(operation: Operation, message: Any) -> Any:
    """Return the message; grpc.aio gives ``None`` for one that it cannot parse, which raises an error."""
    if message is None:
        raise server_error(operation, "INTERNAL", "the answer cannot be read: it is no message of the protocol.")
    return message


def _unreadable_error(operation: Operation, error: Exception) -> PyTritonClientInferenceServerError:
    return server_error(operation, "OK", f"the answer cannot be read ({type(error).__name__}: {error}).")
