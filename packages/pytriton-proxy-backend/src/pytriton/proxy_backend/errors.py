"""What can go wrong between a worker and the proxy backend.

::

    ProxyBackendError
    ├── LibraryNotFoundError    the native library is not in this installation
    ├── EndpointError           the path of the socket cannot be used
    ├── DescriptionError        the description of a model is missing or cannot be used
    ├── DropInError             a model cannot be put into, or taken out of, a model repository
    ├── HostingError            nobody can be asked for processes of Python models
    ├── TargetError             text such as "module:function" names nothing (also a ValueError)
    ├── WorkerProcessError      a worker in a process of its own does not work, and is not started again
    ├── KeyFileError            a file with keys is missing, open to others, or holds none (also a ValueError)
    ├── KeysMissingError        an address that is not of this machine needs keys (also a ValueError)
    ├── GoldenError             a worker process does not give the known answer to its warm-up
    ├── AttachError             the worker could not attach in time, or was refused
    │   ├── CannotSleepError        the proxy backend cannot wake workers that sleep
    │   ├── NoRoomError             the memory budget has no room for the workers of a model
    │   ├── GreetingTimeoutError    nobody answered its greeting
    │   └── VersionMismatchError    worker and proxy backend speak different protocols
    ├── UnsupportedModelError   the Python proxy cannot serve a model
    ├── MalformedRequestError   a request to the Python proxy is not what its model takes
    ├── PythonModelError        a model.py cannot be loaded
    ├── ConnectionLostError     the server went away
    ├── ProtocolError           a message or record that the protocol does not allow
    │   └── JobRefusedError         a worker process has another version, and cannot do what it is asked for
    ├── CallFailedError         the server refused what a worker asked of it
    ├── ArenaFullError          a tensor does not fit into the budget of shared memory
    └── OutputError             the callable returned something that cannot be sent (also a ValueError)
"""

from __future__ import annotations

from collections.abc import Sequence

from .wire.errors import AttachError, ProtocolError, ProxyBackendError, VersionMismatchError

__all__ = [
    "ArenaFullError",
    "AttachError",
    "CallFailedError",
    "ConnectionLostError",
    "DescriptionError",
    "DropInError",
    "EndpointError",
    "GoldenError",
    "HostingError",
    "LibraryNotFoundError",
    "OutputError",
    "ProtocolError",
    "ProxyBackendError",
    "TargetError",
    "VersionMismatchError",
    "WorkerProcessError",
]


class GoldenError(ProxyBackendError):
    """A worker process does not give the known answer to its warm-up; the text says which output differs, and how."""


class LibraryNotFoundError(ProxyBackendError):
    """The native library `libtriton_pytriton.so` is not in this installation."""


class EndpointError(ProxyBackendError, ValueError):
    """The path of an endpoint cannot be used.

    Attributes:
        path: The path in question.
        length: Its length in bytes.
        limit: The largest length that Linux allows, in bytes.
    """

    def __init__(self, message: str, *, path: str, length: int, limit: int) -> None:
        super().__init__(message)
        self.path = path
        self.length = length
        self.limit = limit


class DescriptionError(ProxyBackendError, ValueError):
    """The description of a model is missing, or is none that can be used."""


class DropInError(ProxyBackendError):
    """A model cannot be put into a model repository, or taken out of it. Nothing was changed.

    Attributes:
        path: The folder in question.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class HostingError(ProxyBackendError):
    """The socket at which tritonserver asks for processes of Python models cannot be made.

    Attributes:
        path: The socket.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class TargetError(ProxyBackendError, ValueError):
    """Text such as `module:function` names nothing that can be loaded.

    Attributes:
        target: The text.
    """

    def __init__(self, message: str, *, target: str) -> None:
        super().__init__(message)
        self.target = target


class WorkerProcessError(ProxyBackendError):
    """A worker in a process of its own does not work, and is not started again.

    Attributes:
        reason: The text without the lines that it wrote.
        model_name: The model that it was to serve.
        number: Which of the model's workers it is, from 0 on.
        exit_code: How its last process ended: negative for a signal, `None` if that is not known.
        crashes: How many processes ended by themselves within the time that counts.
        log_lines: The last lines that its processes wrote, oldest first.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        model_name: str,
        number: int = 0,
        exit_code: int | None = None,
        crashes: int = 0,
        log_lines: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.model_name = model_name
        self.number = number
        self.exit_code = exit_code
        self.crashes = crashes
        self.log_lines = tuple(log_lines)


class ConnectionLostError(ProxyBackendError):
    """The proxy backend closed the connection, or its server died."""


class CallFailedError(ProxyBackendError):
    """The server refused, or could not do, what a worker asked of it; the text is Triton's.

    Attributes:
        code: Triton's error code, `ErrorCode`.
    """

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class ArenaFullError(ProxyBackendError):
    """A record does not fit into the shared memory that this model may use.

    Attributes:
        needed: Bytes of the record.
        budget: Bytes that the arena may have.
        in_use: Bytes of it that are in use.
    """

    def __init__(self, message: str, *, needed: int, budget: int, in_use: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.budget = budget
        self.in_use = in_use


class OutputError(ProxyBackendError, ValueError):
    """The inference callable returned something that cannot be sent.

    Attributes:
        model_name: The model that was asked.
        output_name: The output in question, `None` if the whole result is.
        request_index: Its place in the batch, `None` if the whole result is in question.
        expected: What would have been right.
        received: What came.
    """

    def __init__(
        self,
        message: str,
        *,
        model_name: str,
        output_name: str | None = None,
        request_index: int | None = None,
        expected: str = "",
        received: str = "",
    ) -> None:
        super().__init__(message)
        self.model_name = model_name
        self.output_name = output_name
        self.request_index = request_index
        self.expected = expected
        self.received = received
