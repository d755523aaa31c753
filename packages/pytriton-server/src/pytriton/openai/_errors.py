"""Errors as callers of the OpenAI API know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientConnectionError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)

_UNAVAILABLE = ("503", "UNAVAILABLE")
# Triton answers with these if inputs are wrong.
_INVALID = ("400", "INVALID_ARGUMENT")
# Triton has the same status for a model that is gone; a second request gets the right error.
_GONE_TEXT = "Request for unknown model"


class OpenAIError(Exception):
    """An answer with an error.

    `message` says what was expected, what came and what to do; `retry` tells official clients whether to try again, and
    None leaves that to them.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {} if retry is None else {"x-should-retry": str(retry).lower()}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer, or of an event in a stream."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        # Names of fields that a caller sent may be no valid text.
        shown = {
            name: None if value is None else value.encode("utf-8", "backslashreplace").decode()
            for name, value in fields.items()
        }
        return {"error": shown}


def from_client_error(error: PyTritonClientError, model: str) -> OpenAIError:
    """Return the answer for an inference that failed."""
    if isinstance(error, PyTritonClientValueError):
        return OpenAIError(400, error.message, code="invalid_value")
    if isinstance(error, PyTritonClientTimeoutError):
        return OpenAIError(504, f"Model {model!r} did not answer in time: {error.message}", code="timeout", retry=False)
    if isinstance(error, (PyTritonClientConnectionError, PyTritonClientClosedError)):
        return OpenAIError(503, f"The server of model {model!r} does not answer: {error.message}", code="unavailable")
    text = error.message
    if isinstance(error, PyTritonClientInferenceServerError):
        text = error.server_message or text
        if error.status in _UNAVAILABLE or _GONE_TEXT in text:
            return OpenAIError(503, f"Model {model!r} cannot answer now: {text}", code="unavailable")
        if error.status in _INVALID:
            return OpenAIError(400, f"Model {model!r} does not take the request: {text}", code="invalid_value")
    return model_failed(model, text)


def model_failed(model: str, text: str) -> OpenAIError:
    """Return the answer for a model that failed."""
    # Another try would fail in the same way.
    return OpenAIError(500, f"Model {model!r} failed: {text}", code="model_error", retry=False)


def from_validation(problems: Sequence[Mapping[str, Any]]) -> OpenAIError:
    """Return the answer for a body that does not match its type."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return OpenAIError(400, f"Expected a body of JSON: {first['ctx']['error']}.", code="invalid_json")
    if first["type"] == "too_deep":
        return OpenAIError(400, f"{first['msg']}.", code="invalid_json")
    path = [str(part) for part in first["loc"] if part != "body"]
    if not path:
        return OpenAIError(
            400, "Expected a JSON object, with the header Content-Type: application/json.", code="invalid_json"
        )
    got = f"; got {first['input']!r:.100}" if first["type"] != "missing" else ""
    return OpenAIError(400, f"{'.'.join(path)}: {first['msg']}{got}.", param=path[0], code="invalid_value")
