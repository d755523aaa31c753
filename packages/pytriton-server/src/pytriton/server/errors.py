"""Errors of the server process and of its surroundings.

```
PyTritonError
├── TritonServerNotFoundError           there is no tritonserver to start
├── ServerVersionUnknownError           a tritonserver does not tell its version
├── ModelError                          a request to a model under test failed
├── EndpointError                       the endpoints of a guest cannot be served
└── PyTritonRuntimeError
    ├── TritonServerError               tritonserver cannot do what was asked
    │   ├── TritonServerStartError      it did not come up
    │   │   └── PortInUseError          a port that it needs is taken
    │   ├── TritonServerTimeoutError    (also a TimeoutError) it did not answer in time
    │   ├── TritonServerExitedError     it ended by itself
    │   ├── ControlError                a call to it failed
    │   └── TritonModelLoadError        it refused a model, or the model's callable could not attach
    ├── TritonWorkerError               a process worker was given up
    └── WorkspaceError                  the folder for the server's files cannot be made or used
```
"""

from collections.abc import Sequence

from pytriton.exceptions import PyTritonRuntimeError
from pytriton.proxy_backend.system.processes import quote_lines
from pytriton.proxy_backend.system.shortage import advise

__all__ = [
    "PortInUseError",
    "TritonModelLoadError",
    "TritonServerError",
    "TritonServerExitedError",
    "TritonServerStartError",
    "TritonServerTimeoutError",
    "WorkspaceError",
    "quote_log",
]


def quote_log(lines: Sequence[str]) -> str:
    """Render the last log lines of the server for the end of an error's text; empty when there are none."""
    # At its start, tritonserver prints tables of settings, which do not explain why it ended.
    return quote_lines([line for line in lines if not line.startswith(("+-", "| "))], "log lines")


class TritonServerError(PyTritonRuntimeError):
    """tritonserver cannot do what was asked.

    Args:
        message: The text of the error. Where it, or the log, is about file descriptors, it goes on with what to do.
        exit_code: How the process ended, negative for a signal; None while it runs or when it never ran.
        log_lines: The last lines that it wrote, oldest first.
    """

    def __init__(self, message: str, *, exit_code: int | None = None, log_lines: Sequence[str] = ()) -> None:
        advice = advise(message) or advise("\n".join(log_lines))
        if advice not in message:
            # It comes on a line of its own, after the lines of a log.
            separator = "\n" if "\n" in message else ". " if message[-1:].isalnum() else " "
            message = f"{message}{separator}{advice}"
        super().__init__(message)
        self.exit_code = exit_code
        self.log_lines = tuple(log_lines)


class TritonServerStartError(TritonServerError):
    """tritonserver did not come up."""


class PortInUseError(TritonServerStartError):
    """A port that tritonserver needs is taken.

    Args:
        message: The text of the error.
        setting: Name of the `TritonConfig` field, such as `"http_port"`.
        address: Address that was to be bound.
        port: The taken port.
        holder: Who listens on it, in words, where that could be found out.
        exit_code: How the process ended, if it was started at all.
        log_lines: The last lines that it wrote, oldest first.
    """

    def __init__(
        self,
        message: str,
        *,
        setting: str | None = None,
        address: str | None = None,
        port: int | None = None,
        holder: str | None = None,
        exit_code: int | None = None,
        log_lines: Sequence[str] = (),
    ) -> None:
        super().__init__(message, exit_code=exit_code, log_lines=log_lines)
        self.setting = setting
        self.address = address
        self.port = port
        self.holder = holder


class TritonServerTimeoutError(TritonServerError, TimeoutError):
    """tritonserver did not answer in time."""


class TritonServerExitedError(TritonServerError):
    """tritonserver ended although nobody stopped it."""


class TritonModelLoadError(TritonServerError):
    """tritonserver refused a model, or the model's inference callable could not attach to it.

    Args:
        message: The text of the error.
        model_name: Name of the model.
        model_version: Version of the model.
        reason: What the server said.
        log_lines: The last lines that the server wrote, oldest first.
    """

    def __init__(
        self,
        message: str,
        *,
        model_name: str | None = None,
        model_version: int | None = None,
        reason: str | None = None,
        log_lines: Sequence[str] = (),
    ) -> None:
        super().__init__(message, log_lines=log_lines)
        self.model_name = model_name
        self.model_version = model_version
        self.reason = reason


class WorkspaceError(PyTritonRuntimeError):
    """The folder for the server's files cannot be made, written or read.

    Args:
        message: The text of the error.
        path: The folder concerned.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path
