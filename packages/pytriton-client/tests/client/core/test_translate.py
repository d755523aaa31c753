from __future__ import annotations

import pytest

from pytriton.client._core.translate import Operation, connection_error, grpc_error, is_denial, server_error
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientConnectionError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientTimeoutError,
)

OPERATION = Operation("inference request", "grpc://host:1", 2.5, "m", "3")


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", PyTritonClientTimeoutError),
        ("UNAVAILABLE", "failed to connect to all addresses; Connection refused", PyTritonClientConnectionError),
        ("UNAVAILABLE", "failed to connect to all addresses; connection attempt timed out", PyTritonClientTimeoutError),
        ("UNAVAILABLE", "Socket closed", PyTritonClientConnectionError),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", PyTritonClientConnectionError),
        ("UNAVAILABLE", "DNS resolution failed for host:1", PyTritonClientConnectionError),
        ("UNAVAILABLE", "errors resolving host:1: [address lookup failed]", PyTritonClientConnectionError),
        ("UNAVAILABLE", "Stream removed (recvmsg:Connection reset by peer (104))", PyTritonClientConnectionError),
        ("UNAVAILABLE", "Request timeout expired", PyTritonClientInferenceServerError),
        (
            "UNAVAILABLE",
            "model 'm' version 1: worker 'f' (pid 7) was lost while it worked on this: connection reset by peer",
            PyTritonClientInferenceServerError,
        ),
        ("CANCELLED", "Channel closed!", PyTritonClientClosedError),
        ("CANCELLED", "by the server", PyTritonClientInferenceServerError),
        ("INTERNAL", "division by zero", PyTritonClientInferenceServerError),
        ("", "", PyTritonClientInferenceServerError),
    ],
)
def test_grpc_statuses(status: str, text: str, kind: type[PyTritonClientError]) -> None:
    error = grpc_error(OPERATION, status, text)
    assert type(error) is kind
    assert error.url == "grpc://host:1"
    assert error.model_name == "m"


def test_server_error_says_all() -> None:
    error = server_error(OPERATION, "INTERNAL", "division by zero")
    assert error.message == "Error occurred during inference request. Message: division by zero"
    assert (error.status, error.server_message, error.model_version) == ("INTERNAL", "division by zero", "3")


@pytest.mark.parametrize(("shape", "is_sample"), [("[2]", True), ("[1,3]", False), ("[1,1,2]", False)])
def test_errors_of_shape_speak_of_our_configuration(shape: str, is_sample: bool) -> None:
    said = f"[request id: 7] unexpected shape for input 'x' for model 'm'. Expected [-1,2], got {shape}."
    note = (
        " NOTE: Setting a non-zero max_batch_size in the model config requires ... try setting max_batch_size to zero."
    )
    error = server_error(OPERATION, "INVALID_ARGUMENT", said + note)
    assert error.server_message == said + note
    assert error.message.startswith(
        f"Error occurred during inference request. Message: {said} Its first axis is that of"
    )
    assert "to zero" not in error.message
    assert ("did you mean infer_sample?" in error.message) is is_sample


def test_a_batch_that_is_too_large_is_told_what_to_do() -> None:
    said = "[request id: 7] inference request batch-size must be <= 4 for 'm'"
    error = server_error(OPERATION, "INVALID_ARGUMENT", said)
    assert error.message.startswith(f"Error occurred during inference request. Message: {said}. Send no more rows")
    assert "ModelConfig(max_batch_size=...)" in error.message


def test_the_cause_comes_first() -> None:
    error = connection_error(OPERATION, "[Errno 111] Connection refused")
    assert error.message.startswith(
        "Connection to grpc://host:1 failed: [Errno 111] Connection refused. Check that it runs"
    )


def test_a_restricted_endpoint_says_where_its_token_is() -> None:
    error = server_error(OPERATION, "403", "This API is restricted, expecting header 'triton-access-token'")
    assert "access_token=...: what started the server has it as Triton.get_access_token()" in error.message


def test_denials() -> None:
    assert is_denial("403", "")
    assert is_denial("UNAVAILABLE", "This protocol is restricted, expecting header 'x'")
    assert not is_denial("UNAVAILABLE", "")
    assert not is_denial("400", "not found")
