"""The processes and the shared memory that Triton's Python backend has beside a server, in a process or as one.

Each instance of a `model.py` runs in a process of its own, a *stub*. Where one has died, Triton answers requests with
an error. But it cannot unload the model, which waits for an answer of the stub, and so it does not end in order; then
the shared memory stays behind.
"""

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from pytriton.proxy_backend.hosting.models import STUB

__all__ = ["STUB", "Stub", "remove_shared_memory", "shared_memory_of", "stubs_of"]

_SHARED_MEMORY = "/dev/shm"
_REGION_PREFIX = "triton_python_backend_shm_region_"

logger = logging.getLogger(__name__)


class Stub(NamedTuple):
    """A stub that lives."""

    pid: int  # its process
    model: tuple[str, str]  # name and version of its model; empty while it is being started
    memory: Path  # its shared memory; /dev/shm itself while it is being started


def stubs_of(pid: int | None) -> Iterator[Stub]:
    """Find the stubs of a server."""
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes come and go, and those of other users cannot be read. A process that has ended has no command.
        with contextlib.suppress(OSError, ValueError):
            if int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) != pid:
                continue
            arguments = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")
            # Its start script has the same name, but a shell runs it.
            places = [place for place, argument in enumerate(arguments) if STUB in argument]
            if places:
                # The arguments are the model's file (.../<name>/<version>/model.py) and the name of the memory.
                file, region, *_ = [*arguments[places[0] + 1 :], "", ""]
                _, name, version, _ = ["", "", "", "", *Path(file).parts][-4:]
                yield Stub(int(folder.name), (name, version), Path(_SHARED_MEMORY, region))


def shared_memory_of(pid: int | None, prefix: str = "") -> set[Path]:
    """Return the files in /dev/shm of a server's Python backend; `prefix` is empty for the default one."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        # The server has ended.
        return set()
    found = re.findall(rf"{_SHARED_MEMORY}/{re.escape(prefix or _REGION_PREFIX)}\S*$", maps, re.MULTILINE)
    return {Path(file) for file in found}


def remove_shared_memory(files: Collection[Path]) -> None:
    """Remove the files of an ended server from /dev/shm."""
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s was left behind by tritonserver, and cannot be removed: %s", file, error.strerror)
