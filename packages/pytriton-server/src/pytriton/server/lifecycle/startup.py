"""Wait until a server that was just started is up, or say why it is not."""

import errno
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from pytriton.server.control.http import Control
from pytriton.server.errors import TritonModelLoadError, TritonServerStartError, TritonServerTimeoutError, quote_log
from pytriton.server.models.workers import StartCancelled
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.preflight import check_settings
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.tritonserver.binary import TritonServerBinary, find_tritonserver
from pytriton.server.tritonserver.guard import Guard, GuardConfig, find_guard
from pytriton.server.tritonserver.options import check_options, explain_misfit
from pytriton.server.tritonserver.ports import Endpoint
from pytriton.server.tritonserver.process import ServerProcess

POLL_S = 0.01
"""Time between two questions to a server that is coming up, in seconds."""

# How long lines of the server may take to arrive here, in seconds.
_LOG_DEADLINE_S = 2.0
# libevent or the guard writes these.
_NONE_TO_ACCEPT = (f"accept() call: {os.strerror(errno.EMFILE)}", f"{os.strerror(errno.EMFILE)}: callers over HTTP")
_ERROR_LINE = re.compile(r"E\d{4} ")


def find_server(
    config: TritonConfig, security: TritonSecurityConfig, guard: GuardConfig | None, folder: Path | None = None
) -> tuple[TritonServerBinary, Guard]:
    """Find a server and its guard, and check the settings against them, as far as that takes no start."""
    check_settings(config, security)
    binary = find_tritonserver(folder)
    check_options(config, binary)
    found = find_guard(guard, binary.executable)
    check_cors(config, found)
    return binary, found


def check_cors(config: TritonConfig, guard: Guard) -> None:
    """Refuse origins that only the guard could let read answers, where there is none."""
    if config.cors_origins and guard.library is None:
        raise TritonServerStartError(
            "TritonConfig.cors_origins needs the guard, which is switched off or cannot be loaded: "
            f"{guard.obstacle or 'GuardConfig(enabled=False), or PYTRITON_GUARD=off'}. Leave it unset, and let a proxy "
            "in front of the server answer browsers."
        )


def wait_until_up(
    process: ServerProcess,
    control: Control,
    endpoints: Iterable[Endpoint],
    *,
    timeout_s: float,
    cancelled: Callable[[], bool],
) -> None:
    """Wait until the server answers and all of its ports are open. Some of its models may have failed to load."""
    deadline = time.monotonic() + timeout_s
    # The server opens its ports after it has tried to load all models, and that of the metrics last.
    waiting: list[Callable[[], bool]] = [control.is_listening, *(partial(is_open, endpoint) for endpoint in endpoints)]
    while waiting:
        if waiting[0]():
            waiting.pop(0)
            continue
        if cancelled():
            raise StartCancelled
        if process.wait(POLL_S):
            lines = process.log_tail
            raise TritonServerStartError(
                f"tritonserver {process.ending} while it was starting.{quote_log(lines)}",
                exit_code=process.exit_code,
                log_lines=lines,
            )
        _refuse_without_descriptors(process)
        if time.monotonic() >= deadline:
            lines = process.log_tail
            raise TritonServerTimeoutError(
                f"tritonserver (pid {process.pid}) did not answer within {timeout_s:g} s of its start. If it loads "
                f"something large, look at its log; if this machine is overloaded, try again.{quote_log(lines)}",
                log_lines=lines,
            )
    process.wipe_secrets()
    if control.has_failed():
        # If failed models are allowed, the server opens its ports in any case.
        reported = time.monotonic() + _LOG_DEADLINE_S
        while not any(_ERROR_LINE.match(line) for line in process.log_tail) and time.monotonic() < reported:
            time.sleep(POLL_S)
        lines = process.log_tail
        raise TritonServerStartError(
            "tritonserver runs and says that it cannot serve anything: one of its settings is most likely wrong."
            f"{quote_log(lines)}",
            log_lines=lines,
        )


def _refuse_without_descriptors(process: ServerProcess) -> None:
    """End the wait if a process is out of descriptors, so that it cannot open connections."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise TritonServerStartError(
            f"tritonserver cannot be asked whether it is there: {error.strerror}.", log_lines=process.log_tail
        ) from error
    if any(text in process.last_line for text in _NONE_TO_ACCEPT):
        # It repeats the message, and takes a whole processor for that.
        lines = process.log_tail
        raise TritonServerStartError(
            f"tritonserver (pid {process.pid}) cannot accept connections.{quote_log(lines)}", log_lines=lines
        )


def wait_guarded(process: ServerProcess, control: Control, *, cancelled: Callable[[], bool]) -> bool:
    """Wait until the guard of a server that was just started has reported, and return whether it is there.

    If the process ends first, this returns True: others report that end.
    """
    # The guard reports before the server's own code runs, but libraries that the user preloads may write earlier. Once
    # a port is open, it is too late.
    while not process.is_guarded:
        if cancelled():
            raise StartCancelled
        if control.is_listening():
            return process.maps_guard()
        if process.wait(POLL_S):
            return True
    return True


def is_open(endpoint: Endpoint) -> bool:
    """Return whether somebody listens, by connecting for a moment."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def find_misfit(
    error: BaseException, binary: TritonServerBinary, process: ServerProcess | None, note: str = ""
) -> TritonServerStartError | None:
    """Return a better error if the server lacks something that this package needs; otherwise None."""
    if process is None or not isinstance(error, (TritonServerStartError, TritonModelLoadError)):
        return None
    text = explain_misfit(binary, process.command, [str(error), *error.log_lines])
    if text is None:
        return None
    return TritonServerStartError(f"{note}{text}", exit_code=error.exit_code, log_lines=error.log_lines)
