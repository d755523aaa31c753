"""Threads in which Triton ends unloaded models, and for which it does not wait.

Triton deletes each model in a thread of its own. That thread first tells that the model is gone, and then takes a lock
of the server and looks into a table there (`ModelDeleter` and `ModelLifeCycle::CreateModel` in its
model_lifecycle.cc): a server that is deleted in between leaves it writing into freed memory, and something else in the
process crashes later.

Such a thread has no handle that anybody could wait for, but it inherits the name of the thread that it was made in. So
whoever unloads has a name of its own meanwhile, and whoever deletes a server waits until no other thread has it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["unloading", "unloading_threads"]

_SUFFIX = ":unload"
# As long as the kernel lets the name of a thread be, without the end of line that it is read with.
_LONGEST = 15
_OWN_NAME = "/proc/thread-self/comm"
_THREADS = "/proc/self/task"


@contextlib.contextmanager
def unloading() -> Iterator[None]:
    """Name this thread for as long as it has Triton unload models, and with it the threads that Triton makes."""
    with open(_OWN_NAME, encoding="utf-8", errors="surrogateescape") as file:
        name = file.read().rstrip("\n")
    _rename(name[: _LONGEST - len(_SUFFIX)] + _SUFFIX)
    try:
        yield
    finally:
        _rename(name)


def _rename(name: str) -> None:
    with open(_OWN_NAME, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(name)


def unloading_threads() -> int:
    """Return how many threads of this process unload models, this one left out."""
    own, count = str(threading.get_native_id()), 0
    for thread in os.listdir(_THREADS):
        # One that has ended by now cannot be read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if thread != own:
                with open(f"{_THREADS}/{thread}/comm", encoding="utf-8", errors="surrogateescape") as file:
                    count += file.read().rstrip("\n").endswith(_SUFFIX)
    return count
