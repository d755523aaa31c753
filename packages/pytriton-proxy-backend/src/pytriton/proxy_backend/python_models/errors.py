"""Errors that a model raises, answers with, or gets; and their texts, as Triton's Python backend words them."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from ..runtime.texts import is_utf8
from ..wire.errors import ProxyBackendError
from ..wire.layout import ErrorCode

__all__ = [
    "ErrorCode",
    "ModelFailure",
    "PythonModelError",
    "TritonError",
    "TritonModelException",
    "calls_model",
    "text_of",
    "told",
]

_OURS = os.path.dirname(__file__) + os.sep
_callers: set[CodeType] = set()
# Py_TPFLAGS_HEAPTYPE: the class was made by a `class` statement, or by the C API at run time.
_HEAP_TYPE = 1 << 9


_F = TypeVar("_F", bound=Callable[..., Any])


class TritonModelException(Exception):
    """Raised by whatever `triton_python_backend_utils` refuses to do; models raise it as well."""


class ModelFailure(Exception):
    """The model made a mistake; its caller gets the text alone, without a type and a place."""


class PythonModelError(ProxyBackendError):
    """A Python model cannot be loaded; the text is the load error."""


def text_of(value: Any, what: str) -> str:
    """Return a text that a model gives, which may be bytes, as an element of a string tensor is.

    Raises `TypeError` if it is something else, or has the half of a surrogate pair, which cannot be sent.
    """
    if isinstance(value, str):
        if not is_utf8(value):
            raise TypeError(f"{what}: expected a text that UTF-8 has a form for, got {value!r}")
        return value
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "surrogateescape")
    raise TypeError(f"{what}: expected a str, got a {type(value).__name__}")


class TritonError:
    """An error in the place of the outputs of a response.

    Args:
        message: Its text.
        code: One of the codes that are attributes of this class.
    """

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        if not isinstance(code, ErrorCode):
            raise TypeError(f"TritonError: expected a code of TritonError, got a {type(code).__name__}")
        self._message = text_of(message, "TritonError")
        self._code = code

    @staticmethod
    def of_number(number: int) -> ErrorCode:
        """Return the code with a number; one that Triton has not is that of what is unknown."""
        return ErrorCode(number) if number in ErrorCode.__members__.values() else ErrorCode.UNKNOWN

    def code(self) -> ErrorCode:
        """Return its code."""
        return self._code

    def message(self) -> str:
        """Return its text."""
        return self._message


def told(error: BaseException) -> str:
    """Return the text of an error of a model: type, text and the model's frames, the innermost first.

    Frames of this package are left out, because in Triton's stub they would be C++.
    """
    kind = type(error)
    name = kind.__name__
    if not kind.__flags__ & _HEAP_TYPE and kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    try:
        text = str(error) or "<EMPTY MESSAGE>"
    except Exception as failure:
        text = f"<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION: {type(failure).__name__}>"
    places = _places(error)
    return f"{name}: {text}" + ("\n\nAt:\n" + "".join(places) if places else "")


def _places(error: BaseException) -> list[str]:
    trace = error.__traceback__
    if trace is None:
        return []
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame: FrameType | None = trace.tb_frame
    places: list[str] = []
    while frame is not None and frame.f_code not in _callers:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            places.append(f"  {code.co_filename}({frame.f_lineno}): {code.co_name}\n")
        frame = frame.f_back
    return places


def calls_model(function: _F) -> _F:
    """Mark a function that calls the model: errors show no frames above it."""
    _callers.add(function.__code__)
    return function
