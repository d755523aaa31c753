"""Every error that a client raises.

::

    PyTritonClientError
     +-- PyTritonClientValueError                      the call itself is wrong; nothing was sent
     |    +-- PyTritonClientInvalidUrlError
     |    +-- PyTritonClientInputError                 ... for its inputs; also below
     +-- PyTritonClientTimeoutError                    a deadline passed
     |    +-- PyTritonClientModelNotReadyError         ... while waiting for the model; also the next one
     +-- PyTritonClientModelUnavailableError           the model is not there
     |    +-- PyTritonClientModelNotReadyError
     +-- PyTritonClientConnectionError                 no connection, or it broke
     +-- PyTritonClientInferenceServerError            the server answered with an error
     |    +-- PyTritonClientInputError                 ... or would have, for its inputs
     +-- PyTritonClientSharedMemoryError               shared memory was asked for, and cannot be had
     +-- PyTritonClientModelDoesntSupportBatchingError
     +-- PyTritonClientClosedError
     +-- PyTritonClientQueueFullError

``str(error)`` and ``error.message`` are the whole text. What the text says is there as attributes too; an attribute
that does not apply is ``None``. All of them pickle, so that they can cross a process border.
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "PyTritonClientClosedError",
    "PyTritonClientConnectionError",
    "PyTritonClientError",
    "PyTritonClientInferenceServerError",
    "PyTritonClientInputError",
    "PyTritonClientInvalidUrlError",
    "PyTritonClientModelDoesntSupportBatchingError",
    "PyTritonClientModelNotReadyError",
    "PyTritonClientModelUnavailableError",
    "PyTritonClientQueueFullError",
    "PyTritonClientSharedMemoryError",
    "PyTritonClientTimeoutError",
    "PyTritonClientValueError",
]


class PyTritonClientError(Exception):
    """Base of every error that a client raises.

    Args:
        message: The whole text for a human.
        url: The server that the client talks to.
        model_name: The model that the client was made for.
        model_version: The version that the client was made for; ``None`` is the latest.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        model_name: str | None = None,
        model_version: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.url = url
        self.model_name = model_name
        self.model_version = model_version

    def __str__(self) -> str:
        return self.message


class PyTritonClientValueError(PyTritonClientError):
    """The arguments of a call are wrong. Nothing was sent to the server.

    Args:
        message: The whole text for a human.
        url: The server that the client talks to.
        model_name: The model that the client was made for.
        model_version: The version that the client was made for; ``None`` is the latest.
        input_name: The input, parameter or header that is wrong.
        expected: What would have been right, in words.
        received: What was given, in words.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        model_name: str | None = None,
        model_version: str | None = None,
        input_name: str | None = None,
        expected: str | None = None,
        received: str | None = None,
    ) -> None:
        super().__init__(message, url=url, model_name=model_name, model_version=model_version)
        self.input_name = input_name
        self.expected = expected
        self.received = received


class PyTritonClientInvalidUrlError(PyTritonClientValueError):
    """The address of the server cannot be understood."""


class PyTritonClientTimeoutError(PyTritonClientError):
    """A deadline passed before the answer was there.

    Args:
        message: The whole text for a human.
        url: The server that the client talks to.
        model_name: The model that the client was made for.
        model_version: The version that the client was made for; ``None`` is the latest.
        timeout_s: How long was waited, in seconds.
        waited_for: What was waited for, in words.
        missing: What was not there when the wait for a server or a model ended.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        model_name: str | None = None,
        model_version: str | None = None,
        timeout_s: float | None = None,
        waited_for: str | None = None,
        missing: Literal["server", "model", "version"] | None = None,
    ) -> None:
        super().__init__(message, url=url, model_name=model_name, model_version=model_version)
        self.timeout_s = timeout_s
        self.waited_for = waited_for
        self.missing = missing


class PyTritonClientModelUnavailableError(PyTritonClientError):
    """The model is not there."""


class PyTritonClientModelNotReadyError(PyTritonClientTimeoutError, PyTritonClientModelUnavailableError):
    """The model was not ready when the wait for it ended. ``missing`` says what was not there."""


class PyTritonClientConnectionError(PyTritonClientError):
    """The server cannot be reached, or the connection broke before the answer was complete.

    When the connection broke, the server may or may not have carried out the request.
    """


class PyTritonClientInferenceServerError(PyTritonClientError):
    """The server answered with an error.

    Args:
        message: The whole text for a human; it contains the text of the server.
        url: The server that the client talks to.
        model_name: The model that the client was made for.
        model_version: The version that the client was made for; ``None`` is the latest.
        status: Triton's status: a number in text over HTTP (``"400"``), a name over gRPC (``"INVALID_ARGUMENT"``),
            ``None`` if the client itself found that it cannot talk to this model.
        server_message: The text of the server alone.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        model_name: str | None = None,
        model_version: str | None = None,
        status: str | None = None,
        server_message: str | None = None,
    ) -> None:
        super().__init__(message, url=url, model_name=model_name, model_version=model_version)
        self.status = status
        self.server_message = server_message


class PyTritonClientInputError(PyTritonClientValueError, PyTritonClientInferenceServerError):
    """The inputs are not those that the model takes: their names, shapes, data types or batch sizes.

    Nothing was sent to the server, so ``status`` and ``server_message`` are ``None``. PyTriton leaves most of these
    checks to the server; scripts that catch ``PyTritonClientInferenceServerError`` for them catch this one.
    """


class PyTritonClientSharedMemoryError(PyTritonClientError):
    """Shared memory was asked for, and cannot be made here, or the server does not take it. Nothing was inferred.

    Args:
        message: The whole text for a human.
        url: The server that the client talks to.
        model_name: The model that the client was made for.
        model_version: The version that the client was made for; ``None`` is the latest.
        size: How many bytes were asked for.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        model_name: str | None = None,
        model_version: str | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(message, url=url, model_name=model_name, model_version=model_version)
        self.size = size


class PyTritonClientModelDoesntSupportBatchingError(PyTritonClientError):
    """``infer_batch`` was called for a model that takes one sample at a time."""


class PyTritonClientClosedError(PyTritonClientError):
    """The client was used after ``close()``."""


class PyTritonClientQueueFullError(PyTritonClientError):
    """The queue of a futures client has no room for another call."""
