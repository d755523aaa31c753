"""What Triton's Python backend has beside the server: a process for each instance of a `model.py`, and shared memory.

Where such a process, a *stub*, has died, Triton answers requests with an error. But it cannot unload the model, which
waits for an answer of the stub, and so it does not end in order; then the shared memory stays behind.
"""

import contextlib
import logging
import re
import time
from collections.abc import Collection
from pathlib import Path

from pytriton.server.control.http import Control, ControlError

__all__ = ["LOST", "LostStubs", "remove_shared_memory", "shared_memory_of"]

LOST = "The process of model %s has died, and Triton waits for it without end. It is not waited for any longer."
"""For the log."""

# Between the end of a stub in order and the word of its model's end.
_QUIET_S = 1.0
_STUB = "triton_python_backend_stub"
_REGION = re.compile(r"/dev/shm/triton_python_backend_shm_region_\S+")

logger = logging.getLogger(__name__)


class LostStubs:
    """Finds out that models cannot be unloaded because their stubs have died. For one wait.

    Args:
        pid: The process of the server.
        control: How it is asked.
        names: The models that may be some of the Python backend; they are loaded.
    """

    def __init__(self, pid: int | None, control: Control, names: Collection[str]) -> None:
        self._pid = pid
        self._models = {name for name in names if _is_of_python_backend(control, name)}
        self._since: float | None = None

    def look(self, pending: Collection[str]) -> bool:
        """Tell whether all models that are still waited for are such ones, and have had no stub for long enough.

        A stub does not say which model it is for, at least not by its name. Those of models that are unloaded in order
        end before long.
        """
        if not set(pending) <= self._models or _has_stubs(self._pid):
            self._since = None
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since >= _QUIET_S


def shared_memory_of(pid: int | None) -> set[Path]:
    """Return the files in /dev/shm that the Python backend of a server has made."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        # It has ended.
        return set()
    return {Path(found) for found in _REGION.findall(maps)}


def remove_shared_memory(files: Collection[Path]) -> None:
    """Remove what a server that has ended has left of its files in /dev/shm."""
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s was left behind by tritonserver, and cannot be removed: %s", file, error.strerror)


def _is_of_python_backend(control: Control, name: str) -> bool:
    try:
        return bool(control.model_config(name).get("backend") == "python")
    except ControlError as error:
        logger.debug("Model %r is not known to be one of the Python backend: %s", name, error)
        return False


def _has_stubs(pid: int | None) -> bool:
    """Tell whether a server has any stub that lives."""
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes come and go, and those of other users are not to be looked into.
        with contextlib.suppress(OSError, ValueError):
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state == "Z" or int(parent) != pid:
                continue
            # Its start script has the same name, and is run by a shell.
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(_STUB in part for part in command):
                return True
    return False
