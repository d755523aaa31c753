"""Threads of Triton that have to be waited for, though Triton itself does not, and gives nobody a handle of them.

* Triton deletes each model in a thread of its own. That thread first tells that the model is gone, and then takes a
  lock of the server and looks into a table there (`ModelDeleter` and `ModelLifeCycle::CreateModel` in its
  model_lifecycle.cc): a server that is deleted in between leaves it writing into freed memory, and something else in
  the process crashes later.
* Each instance of a model has a thread that takes its name out of a list while it works, and puts it back after it
  has told that it is done (`TritonBackendThread::BackendThread` in backend_model_instance.cc). A model that is deleted
  in between, right after its load or its last answer, is looked for in an empty list, and the process crashes.

Threads inherit the name of the thread that they are made in. So whoever starts a server or unloads models has a name
of its own meanwhile, and the threads are known by it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from pytriton.inprocess.capi.errors import UnsupportedError

_SERVER, _UNLOAD = ":triton", ":unload"
# The kernel cuts longer names of threads.
_LONGEST = 15
_OWN_NAME = "/proc/thread-self/comm"
_THREADS = "/proc/self/task"
# A thread that computes for longer will not return memory soon.
_SETTLED_AFTER_S = 2
_PAUSE_S = 0.0005


def starting() -> contextlib.AbstractContextManager[None]:
    """Name this thread for as long as it starts a server, and with it all threads that the server ever makes."""
    return _named(_SERVER)


@contextlib.contextmanager
def unloading() -> Iterator[None]:
    """Name this thread, and the threads that Triton starts from it, while models are unloaded.

    It first waits until the threads of the instances are idle.
    """
    _settle()
    with _named(_UNLOAD):
        yield


def unloading_threads() -> int:
    """Return how many other threads of this process unload models."""
    return len(_threads(_UNLOAD))


@contextlib.contextmanager
def _named(suffix: str) -> Iterator[None]:
    try:
        with open(_OWN_NAME, encoding="utf-8", errors="surrogateescape") as file:
            name = file.read().rstrip("\n")
    except FileNotFoundError as error:
        raise UnsupportedError(
            f"A server in process looks after Triton's threads by {_OWN_NAME}, which is not there. Mount /proc "
            "(mount -t proc proc /proc)."
        ) from error
    _rename(name[: _LONGEST - len(suffix)] + suffix)
    try:
        yield
    finally:
        _rename(name)


def _rename(name: str) -> None:
    with open(_OWN_NAME, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(name)


def _settle() -> None:
    """Wait until each thread of the servers was asleep once, so that it has returned its memory."""
    deadline = time.monotonic() + _SETTLED_AFTER_S
    awake = _threads(_SERVER)
    while (awake := [thread for thread in awake if not _sleeps(thread)]) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)


def _sleeps(thread: str) -> bool:
    return _read(f"{_THREADS}/{thread}/stat").rpartition(")")[2].split()[:1] in ([], ["S"])


def _threads(suffix: str) -> list[str]:
    own = str(threading.get_native_id())
    return [
        thread
        for thread in os.listdir(_THREADS)
        if thread != own and _read(f"{_THREADS}/{thread}/comm").rstrip("\n").endswith(suffix)
    ]


def _read(path: str) -> str:
    # A thread that has ended cannot be read.
    with (
        contextlib.suppress(FileNotFoundError, ProcessLookupError),
        open(path, encoding="utf-8", errors="surrogateescape") as file,
    ):
        return file.read()
    return ""
