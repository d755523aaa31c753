"""Errors of Triton in process.

```
PyTritonError
└── TritonError
    ├── UnknownError
    ├── InternalError
    ├── NotFoundError
    │   ├── ModelNotFoundError        (also an InternalError) a model is in no repository
    │   ├── RepositoryNotFoundError   (also an InternalError) a model repository is not there
    │   └── NotBoundError             (also a PyTritonInvalidOperationError) no callable is bound under the name
    ├── InvalidArgumentError
    │   └── OptionTypeError           (also a TypeError) an option has a value of the wrong type
    ├── UnavailableError
    │   └── TimedOutError             (also a TimeoutError) a wait was over before what it waited for
    ├── UnsupportedError
    ├── AlreadyExistsError
    │   └── AlreadyBoundError         (also a PyTritonInvalidOperationError) the name of a model to be bound is taken
    └── CancelledError                the request was cancelled
```

The direct subclasses are the codes of `TRITONSERVER_Error`. Errors of Triton come with its text; those that are found
on this side, before Triton is asked, also say what was expected, what was received and where, in their text and as
attributes.
"""

from __future__ import annotations

import operator
from typing import Any

from pytriton.exceptions import PyTritonError, PyTritonInvalidOperationError
from pytriton.proxy_backend.system.shortage import advise
from pytriton.proxy_backend.wire.layout import ErrorCode


class TritonError(PyTritonError):
    """Base of all errors of `pytriton.inprocess`.

    Args:
        message: The text of the error.
        *details: What belongs to the error, such as the response that carried it. They are kept in `args` behind the
            text, and are not part of it.
        expected: What would have been right, if the error was found by a check of a value.
        received: What came instead.
        where: What the value belongs to, such as `"model 'linear', input 'x'"`.
    """

    def __init__(
        self, message: str = "", *details: object, expected: Any = None, received: Any = None, where: str | None = None
    ) -> None:
        advice = advise(message)
        if advice not in message:
            message = f"{message.rstrip(' .')}. {advice}"
        super().__init__(message)
        self.args = (message, *details)
        self.expected = expected
        self.received = received
        self.where = where


class UnknownError(TritonError):
    """Triton failed and does not say of what kind the failure is."""


class InternalError(TritonError):
    """Something went wrong inside Triton, a backend or a model's own code."""


class NotFoundError(TritonError):
    """There is no such model, version or file."""


class ModelNotFoundError(NotFoundError, InternalError):
    """A model that is to be loaded or unloaded is in no repository.

    It is an `InternalError`, too, because that is what Triton reports for the load.
    """


class RepositoryNotFoundError(NotFoundError, InternalError):
    """A model repository is not there.

    It is an `InternalError`, too, because that is what Triton reports for it.
    """


class NotBoundError(NotFoundError, PyTritonInvalidOperationError):
    """No callable is bound under the name and version."""


class InvalidArgumentError(TritonError):
    """A value is not accepted, or the call is not possible in the present state."""


class OptionTypeError(InvalidArgumentError, TypeError):
    """An option has a value of the wrong type."""


class UnavailableError(TritonError):
    """The server or the model cannot answer now."""


class TimedOutError(UnavailableError, TimeoutError):
    """A wait was over before what it waited for happened."""


class UnsupportedError(TritonError):
    """The call is not supported by this server, model or build."""


class AlreadyExistsError(TritonError):
    """What is to be made is there already."""


class AlreadyBoundError(AlreadyExistsError, PyTritonInvalidOperationError):
    """There is a model of the name already, or one of the same name that does not go together with it."""


class CancelledError(TritonError):
    """The request was cancelled before it was answered."""


_CLASSES: dict[int, type[TritonError]] = {
    ErrorCode.UNKNOWN: UnknownError,
    ErrorCode.INTERNAL: InternalError,
    ErrorCode.NOT_FOUND: NotFoundError,
    ErrorCode.INVALID_ARG: InvalidArgumentError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.UNSUPPORTED: UnsupportedError,
    ErrorCode.ALREADY_EXISTS: AlreadyExistsError,
    ErrorCode.CANCELLED: CancelledError,
}


def error_class(code: int) -> type[TritonError]:
    """Return the class for a code of the C API; `UnknownError` for a code that is not known here."""
    return _CLASSES.get(code, UnknownError)


def code_of(error: BaseException) -> ErrorCode:
    """Return the code with which Triton gets an exception: that of a `TritonError`, otherwise `INTERNAL`."""
    for code, cls in _CLASSES.items():
        if isinstance(error, cls):
            return ErrorCode(code)
    return ErrorCode.INTERNAL


def wrong_argument(name: str, expected: str, received: object, *, where: str | None = None) -> InvalidArgumentError:
    """Make the error for an argument of the wrong type."""
    place = f"{where}: " if where else ""
    return InvalidArgumentError(
        f"{place}expected {name} to be {expected}, received {received!r} of type {type(received).__name__}.",
        expected=expected,
        received=received,
        where=where or name,
    )


def checked_integer(name: str, value: object, allowed: range, kind: str = "an int", *, where: str | None = None) -> int:
    """Return an integer, which may be numpy's, as an `int`; raise an error unless it is in `allowed`."""
    integer = None
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        integer = operator.index(value)
    if integer is None or integer not in allowed:
        raise wrong_argument(name, f"{kind} from {allowed[0]} to {allowed[-1]}", value, where=where)
    return integer


def encoded_text(name: str, text: object, *, where: str | None = None) -> bytes:
    """Return a text as the C API takes it, or raise an error if it has zero characters."""
    if not isinstance(text, str):
        raise wrong_argument(name, "a str", text, where=where)
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise wrong_argument(name, "a str that UTF-8 can hold", text, where=where) from None
    if 0 in encoded:
        # C would end the text there.
        raise wrong_argument(name, "a str without zero characters", text, where=where)
    return encoded
