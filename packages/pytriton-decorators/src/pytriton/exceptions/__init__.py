"""Errors of inference callables, model descriptions and the server.

```
PyTritonError
├── PyTritonBadParameterError       a value given by the user breaks a rule
├── PyTritonInvalidOperationError   a call that is not possible in the present state
├── PyTritonModelConfigError        a model configuration cannot be read
├── PyTritonRuntimeError            a call that cannot be carried out where it was made
├── PyTritonUnrecoverableError      raised by a callable: this model can never answer again
└── PyTritonValidationError         requests, results or a description do not fit together
    └── PyTritonBatchSizeError      (also a ValueError) arrays do not have the rows of their batch
```

Every class takes its text as the only positional argument and keeps it as `message`. The keyword arguments describe
the same facts for programs; all of them survive pickling.
"""

from pytriton.exceptions._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()

from typing import Any

__all__ = [
    "PyTritonBadParameterError",
    "PyTritonBatchSizeError",
    "PyTritonError",
    "PyTritonInvalidOperationError",
    "PyTritonModelConfigError",
    "PyTritonRuntimeError",
    "PyTritonUnrecoverableError",
    "PyTritonValidationError",
]


class PyTritonError(Exception):
    """Base of all errors of pytriton's server side.

    Args:
        message: What was expected, what was received, where, and what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        """The text of the error, the same as `str(error)`."""

    def __str__(self) -> str:
        # `Exception` would use the arguments, and a subclass may pass others to its constructor.
        return self.message


class PyTritonBadParameterError(PyTritonError):
    """A value given by the user breaks a rule.

    Args:
        message: The text of the error.
        parameter: Name of the field or argument, such as `"DynamicBatcher.priority_levels"`.
        value: What was given for it.
        rule: What is accepted, in words.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, value: object = None, rule: str | None = None
    ) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value
        self.rule = rule


class PyTritonInvalidOperationError(PyTritonError):
    """The call is not possible in the present state, such as binding the same model name twice."""


class PyTritonModelConfigError(PyTritonError):
    """A model configuration cannot be read: a part is missing or has an unknown value."""


class PyTritonRuntimeError(PyTritonError):
    """The call cannot be carried out where it was made, such as reading the requests outside a request."""


class PyTritonUnrecoverableError(PyTritonError):
    """To be raised by an inference callable that can never answer again, such as after a lost device.

    The caller of the request gets the text, then the server stops, so that whatever supervises it starts a fresh one.
    """


class PyTritonValidationError(PyTritonError):
    """Requests, results or a model's description do not fit together.

    Args:
        message: The text of the error.
        tensor: Name of the input or output concerned, if it is one.
        request_index: Position of the request in the list that the callable got, if it is one.
        expected: What would have been right.
        received: What came instead.
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str | None = None,
        request_index: int | None = None,
        expected: Any = None,
        received: Any = None,
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.request_index = request_index
        self.expected = expected
        self.received = received


class PyTritonBatchSizeError(PyTritonValidationError, ValueError):
    """Arrays do not have as many rows as the batch that they belong to.

    It is a `ValueError`, too, because that is what callers of the decorators have always caught for it.
    """
