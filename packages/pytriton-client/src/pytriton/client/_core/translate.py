"""Conversion of failures of connections, servers and gRPC to the errors of this package."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, replace

from ..exceptions import (
    PyTritonClientClosedError,
    PyTritonClientConnectionError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientTimeoutError,
)
from .untrusted import cut_text

# gRPC has the same status for "the server says it is unavailable" and for "there is no server"; only the text differs.
_CONNECTION_TEXTS = (
    "failed to connect to all addresses",
    "connection refused",
    "connection reset",
    "socket closed",
    "stream removed",
    "recvmsg:",
    "sendmsg:",
    "broken pipe",
    "goaway",
    "dns resolution failed",
    "name resolution failure",
    "errors resolving",
    "address lookup failed",
    "endpoint closing",
    "transport closed",
    "handshake failed",
    "handshaker shutdown",
)
_SHAPES = re.compile(r"\[-?[0-9][0-9,-]*\]")
# Texts of Triton and of the proxy backend begin like this; they may be about other connections than the client's.
_ANSWER_BEGINS = ("[request id:", "model '")
# gRPC gives up an attempt to connect after 20 s, whatever time the call still has.
_CONNECT_TIMEOUT_TEXTS = ("connection attempt timed out", "failed to connect before the deadline")
# gRPC says this if an HTTP gateway answers.
_GATEWAY_TEXT = "received http2 header with status: "
_EXHAUSTED_TEXT = os.strerror(errno.EMFILE)
# Python says this if the system lets the process have no more threads.
_NO_THREAD_TEXT = "can't start new thread"
# Permanent failures: an authority that is not trusted, a name that is not in the certificate, a server without TLS.
_UNTRUSTED_TEXTS = ("certificate_verify_failed", "hostname verification check failed")
_UNENCRYPTED_TEXT = "wrong_version_number"
_SHAPE_TEXT = "unexpected shape for input"
# The rest of Triton's text is about configuration files, which a caller does not have.
_SHAPE_NOTE = " NOTE: Setting a non-zero max_batch_size"
_RESTRICTED_TEXT = "restricted, expecting header"
_TOO_LARGE_TEXT = "--http-max-input-size"
# generate_stream says this before tritonserver 2.51 of an array with more than one element.
_ELEMENTS_TEXT = "Shape does not match true shape of 'data' field"
_BATCH_SIZE_TEXT = "inference request batch-size must be <="
_GATEWAY_STATUSES = ("407", "502", "503", "504")
_REFUSED_STATUSES = ("400", "INVALID_ARGUMENT")
_DENIED_STATUSES = ("401", "403", "UNAUTHENTICATED", "PERMISSION_DENIED")


@dataclass(frozen=True)
class Operation:
    """An operation that may fail, for the texts and attributes of errors."""

    doing: str  # in words, to follow "during"
    url: str  # the server
    timeout_s: float  # how long it may take, in seconds
    model_name: str | None = None  # the model; ``None`` if it is about the server alone
    model_version: str | None = None  # the version; ``None`` is the latest
    note: str = ""  # a sentence for errors of the connection, such as one about a proxy
    client: str = "ModelClient"  # the class of the client

    def with_timeout(self, timeout_s: float) -> Operation:
        """Return the same with another time limit, in seconds."""
        return self if timeout_s == self.timeout_s else replace(self, timeout_s=timeout_s)


def timeout_error(operation: Operation) -> PyTritonClientTimeoutError:
    """Make the error of an operation that has timed out."""
    return PyTritonClientTimeoutError(
        f"Timeout occurred during {operation.doing}. Timeout: {operation.timeout_s:.3g} s at {operation.url}; the "
        "server may be stopped or busy. If the request is just slow, raise inference_timeout_s or init_timeout_s."
        f"{operation.note}",
        url=operation.url,
        model_name=operation.model_name,
        model_version=operation.model_version,
        timeout_s=operation.timeout_s,
        waited_for=operation.doing,
    )


def connection_error(operation: Operation, reason: str) -> PyTritonClientConnectionError:
    """Make the error of a connection that could not be made, or that broke."""
    reason = cut_text(reason)
    advice = "Check that it runs and that the address, the protocol and the port are right."
    if _EXHAUSTED_TEXT in reason:
        advice = (
            "This process has run out of file descriptors: close clients that are not used any more, or raise the "
            "limit (ulimit -n)."
        )
    if _NO_THREAD_TEXT in reason:
        advice = (
            "This process can have no more threads, and a call needs one here: end some that are not needed, or raise "
            "the limit (ulimit -u, or that of the container)."
        )
    if any(known in reason.lower() for known in _UNTRUSTED_TEXTS):
        advice = (
            "Its certificate must be for the host of the address, and signed by an authority that this client trusts: "
            "tls=TlsSettings(ca_file=...)."
        )
    return PyTritonClientConnectionError(
        f"Connection to {operation.url} failed: {reason}. {advice} Expected a Triton server there, during "
        f"{operation.doing}.{operation.note}",
        url=operation.url,
        model_name=operation.model_name,
        model_version=operation.model_version,
    )


def is_permanent(error: PyTritonClientConnectionError) -> bool:
    """Return whether the failure is permanent: the next attempt to connect would fail like this one."""
    text = error.message.lower()
    return _UNENCRYPTED_TEXT in text or any(known in text for known in _UNTRUSTED_TEXTS)


def closed_error(model_name: str | None, url: str, client: str) -> PyTritonClientClosedError:
    """Make the error of a client that has been closed."""
    return PyTritonClientClosedError(
        f"{client} is closed: make a new one for the model {model_name!r} at {url}.", url=url, model_name=model_name
    )


def server_error(operation: Operation, status: str | None, text: str) -> PyTritonClientInferenceServerError:
    """Make the error for one that the server answered with."""
    advice = ""
    text = cut_text(text)
    shown = text
    if _RESTRICTED_TEXT in text:
        advice = (
            ". Give the client the server's access token, access_token=...: what started the server has it as "
            "Triton.get_access_token(), or has set it by TritonSecurityConfig(access_token=...)."
        )
    elif _SHAPE_TEXT in text and _SHAPE_NOTE in text:
        shown = text.partition(_SHAPE_NOTE)[0]
        axes = [found.count(",") for found in _SHAPES.findall(shown)]
        advice = (
            " Its first axis is that of the batch (ModelConfig(batching=True)), the others are the shape of its Tensor."
        )
        if axes == sorted(axes, reverse=True) and len(set(axes)) > 1:
            advice += " infer_sample adds that axis to one sample, infer_batch does not: did you mean infer_sample?"
    elif _TOO_LARGE_TEXT in text:
        # Only streams over HTTP are sent as JSON, whose size newer servers limit.
        advice = " Use a grpc:// address, or TritonConfig(http_max_input_size=...) for the server."
    elif _ELEMENTS_TEXT in text:
        # This client always sends shapes that fit, so the server is too old for more elements.
        advice = (
            ". Before tritonserver 2.51, streams over HTTP take tensors of one element alone: use a grpc:// address, "
            "or a newer server."
        )
    elif _BATCH_SIZE_TEXT in text:
        advice = ". Send no more rows at once than that, or bind the model with ModelConfig(max_batch_size=...)."
    elif status in _GATEWAY_STATUSES:
        advice = operation.note
    return PyTritonClientInferenceServerError(
        f"Error occurred during {operation.doing}. Message: {shown}{advice}",
        url=operation.url,
        model_name=operation.model_name,
        model_version=operation.model_version,
        status=status,
        server_message=text,
    )


def may_be_refusal(error: PyTritonClientInferenceServerError, *, is_stream: bool) -> bool:
    """Return whether the server may have refused a request for its form, before the model saw it."""
    # Triton reports no status for a stream over gRPC, and 500 over HTTP for values that are no numbers.
    return error.status in _REFUSED_STATUSES or (is_stream and error.status in (None, "500"))


def is_denial(status: str, text: str) -> bool:
    """Return whether the server denies access, which is permanent."""
    return status in _DENIED_STATUSES or _RESTRICTED_TEXT in text


def grpc_error(operation: Operation, status: str, text: str) -> PyTritonClientError:
    """Make the error for a gRPC status."""
    lower = text.lower()
    if status == "DEADLINE_EXCEEDED":
        return timeout_error(operation)
    is_answer = lower.startswith(_ANSWER_BEGINS)
    if lower.startswith(_GATEWAY_TEXT):
        # gRPC turns the HTTP status into a status of its own, which says less.
        return connection_error(operation, f"it answered with the HTTP status {text[len(_GATEWAY_TEXT) :]}")
    if status == "UNAVAILABLE" and not is_answer and any(known in lower for known in _CONNECT_TIMEOUT_TEXTS):
        return timeout_error(operation)
    if status == "UNAVAILABLE" and not is_answer and any(known in lower for known in _CONNECTION_TEXTS):
        return connection_error(operation, text)
    if status == "CANCELLED" and "channel closed" in lower:
        return closed_error(operation.model_name, operation.url, operation.client)
    return server_error(operation, status, text)
