"""Find out the version of a tritonserver that is not running.

The executable has no option that prints it, and the library builds it out of pieces, so no search in the file finds it.
But every server logs a table of its settings, the version among them, before it looks at its model repository. With a
repository that does not exist that is all it does: no port is opened, no GPU is touched, and it ends by itself.
"""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

from pytriton.exceptions import PyTritonError
from pytriton.server.tritonserver.binary import TritonServerBinary
from pytriton.server.tritonserver.process import shim_command

DEADLINE_S = 60.0
_ROW = re.compile(r"^\|\s*server_version\s*\|\s*(\S+)\s*\|")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_SHOWN_LINES = 5

logger = logging.getLogger(__name__)


class ServerVersionUnknownError(PyTritonError):
    """The server does not print its version; the text says what it did instead."""


def read_server_version(binary: TritonServerBinary) -> str:
    """Start a server for a moment and return the version that it prints, for example `"2.51.0"`."""
    with tempfile.TemporaryDirectory(prefix="pytriton-version-") as folder:
        command = [str(binary.executable), f"--model-repository={Path(folder) / 'none'}"]
        # The pools and metrics of GPUs would only take time.
        environment = {**binary.environment(), "CUDA_VISIBLE_DEVICES": ""}
        try:
            process = subprocess.Popen(
                [*shim_command(signal.SIGKILL), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise ServerVersionUnknownError(
                f"{binary.executable} was to be started for its version, which failed: {error.strerror or error}."
            ) from error
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.daemon = True
        lines: list[str] = []
        try:
            # Inside the block, because a signal may come while the thread starts.
            deadline.start()
            assert process.stdout is not None
            for line in process.stdout:
                found = _ROW.match(line)
                if found:
                    return found.group(1)
                lines.append(line.rstrip())
        finally:
            deadline.cancel()
            process.kill()
            process.communicate()
    ending = "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:]) or "  (nothing)"
    raise ServerVersionUnknownError(
        f"{binary.executable} was started for its version. Expected the row 'server_version' of the table that every "
        f"tritonserver logs first, but it ended with {process.returncode} and these last lines:\n{ending}"
    )


def describe_server_version(binary: TritonServerBinary) -> str:
    """Describe the version of a server for errors: `"version 2.51.0"`, or that it is not known."""
    try:
        return f"version {read_server_version(binary)}"
    except ServerVersionUnknownError as error:
        logger.debug("%s", error)
        return "of a version that it does not tell"


def parse_server_version(version: str) -> tuple[int, int, int] | None:
    """Make a version comparable: `"2.70.0dev"` gives `(2, 70, 0)`; an invalid one gives `None`."""
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None
