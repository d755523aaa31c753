"""The calls of the gRPC service and the readers of their answers, shared by synchronous and asyncio transports."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._core.requests import InferRequest, InferResponse, SharedTensors
from .._core.startup import IF_READY, Ask, Question, Target, join_states
from .._core.translate import Operation, is_denial, server_error
from .._core.untrusted import UNREADABLE
from ..exceptions import PyTritonClientInferenceServerError
from .messages import (
    DecodeError,
    decode_infer_response,
    decode_model_config,
    encode_infer_request,
    encode_load_request,
    service_pb2,
)

_UNAVAILABLE_STATUSES = ("NOT_FOUND", "UNAVAILABLE")
_NO_MESSAGE = "the answer cannot be read: it is no message of the protocol."


class GrpcCall(NamedTuple):
    """A call that is to be made."""

    operation: Operation  # what is being done, for errors
    method: str  # of the service
    message: Any  # the request; of an inference its bytes

    @property
    def size(self) -> int:
        """The size of the message in bytes."""
        return len(self.message) if isinstance(self.message, bytes) else int(self.message.ByteSize())


def ask(step: Ask, target: Target) -> GrpcCall:
    """Return the call that asks a question; ``read_answer`` reads what comes back."""
    operation = step.operation(target)
    name, version = operation.model_name or "", operation.model_version or ""
    if step.question is Question.LOAD:
        return GrpcCall(operation, "RepositoryModelLoad", encode_load_request(name, step.config, step.files))
    model = {"name": name, "version": version}
    region = {"name": step.region, "key": f"/{step.region}", "offset": 0, "byte_size": step.size}
    questions: dict[Question, tuple[str, str, dict[str, Any]]] = {
        Question.SERVER_READY: ("ServerReady", "ServerReadyRequest", {}),
        Question.MODEL_READY: ("ModelReady", "ModelReadyRequest", model),
        Question.ANY_VERSION_READY: ("ModelReady", "ModelReadyRequest", model),
        Question.MODEL_CONFIG: ("ModelConfig", "ModelConfigRequest", model),
        Question.MODEL_LIST: ("RepositoryIndex", "RepositoryIndexRequest", {}),
        Question.UNLOAD: ("RepositoryModelUnload", "RepositoryModelUnloadRequest", {"model_name": name}),
        Question.REGISTER_REGION: ("SystemSharedMemoryRegister", "SystemSharedMemoryRegisterRequest", region),
        Question.UNREGISTER_REGION: (
            "SystemSharedMemoryUnregister",
            "SystemSharedMemoryUnregisterRequest",
            {"name": step.region},
        ),
        Question.LIST_REGIONS: ("SystemSharedMemoryStatus", "SystemSharedMemoryStatusRequest", {}),
    }
    method, message, fields = questions[step.question]
    return GrpcCall(operation, method, getattr(service_pb2, message)(**fields))


def read_answer(step: Ask, operation: Operation, message: Any) -> Any:
    """Return the answer to a question."""
    if step.question in IF_READY:
        return bool(message.ready)
    if step.question is Question.MODEL_LIST:
        return join_states((model.name, model.state) for model in message.models)
    if step.question is Question.LIST_REGIONS:
        return [region.name for region in message.regions.values()]
    if step.question is Question.MODEL_CONFIG:
        try:
            return decode_model_config(message)
        except UNREADABLE as error:
            raise _unreadable_error(operation, error) from error
    return None


def is_not_ready(step: Ask, error: PyTritonClientInferenceServerError) -> bool:
    """Return whether the error is the answer to the question whether something is ready: there is no such thing."""
    is_denied = is_denial(error.status or "", error.server_message or "")
    return step.question in IF_READY and error.status in _UNAVAILABLE_STATUSES and not is_denied


def infer(url: str, request: InferRequest, timeout_s: float) -> GrpcCall:
    """Carry one inference request."""
    operation = Operation("inference request", url, timeout_s, request.model_name, request.model_version)
    return GrpcCall(operation, "ModelInfer", encode_infer_request(request))


def stream_operation(url: str, request: InferRequest) -> Operation:
    """Return the operation of a stream for its errors."""
    return Operation("streaming inference", url, 0, request.model_name, request.model_version)


def read_infer_response(operation: Operation, answer: Any, shared: SharedTensors | None = None) -> InferResponse:
    """Return the response in a message, or in its bytes."""
    try:
        return decode_infer_response(answer, shared)
    except DecodeError as error:
        raise server_error(operation, "INTERNAL", _NO_MESSAGE) from error
    except UNREADABLE as error:
        raise _unreadable_error(operation, error) from error


def check_message(operation: Operation, message: Any) -> Any:
    """Return the message; grpc.aio gives ``None`` for one that it cannot parse, which raises an error."""
    if message is None:
        raise server_error(operation, "INTERNAL", _NO_MESSAGE)
    return message


def _unreadable_error(operation: Operation, error: Exception) -> PyTritonClientInferenceServerError:
    return server_error(operation, "OK", f"the answer cannot be read ({type(error).__name__}: {error}).")
