"""What the system has to let a server do, each tried by itself, so that what is denied has a name."""

import contextlib
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

from pytriton.cli.checks.steps import StepFailed, Steps
from pytriton.proxy_backend.system.memory_files import make_memory_file
from pytriton.proxy_backend.system.shortage import advise, advise_threads, explain
from pytriton.server.workspace import Workspace

# tritonserver has about 40 threads with a model on two processors; each worker and connection adds some.
_THREADS = 100
# The files that tritonserver opens for one model and a few connections.
_FILES = 128
# An arena grows in steps, each at most as large as the arena is by then.
_SHARED_BYTES = 64 << 20
# The address space that its libraries and thread stacks take; little of it is memory.
_ADDRESSES = 1 << 30


class SystemDeniedError(Exception):
    """The system does not let a server do something."""


def check_system(steps: Steps, _folder: Path) -> None:
    """Check that the system allows what tritonserver and workers need."""
    steps.heading("What the system lets a server do:")
    for title, attempt in (
        ("write to a folder of its own, and lock a file there", _make_workspace),
        (f"have {_SHARED_BYTES >> 20} MiB of shared memory without a name (memfd_create)", _share_memory),
        (f"have {_THREADS} more threads", _start_threads),
        (f"have {_FILES} files open", _check_files),
        (f"have {_ADDRESSES >> 30} GiB of addresses", _map_memory),
        ("look at its processes (/proc)", _look_at_processes),
    ):
        with contextlib.suppress(StepFailed), steps.step(title):
            attempt()


def _make_workspace() -> None:
    workspace = Workspace()
    workspace.create()
    workspace.clean()


def _share_memory() -> None:
    with _named():
        descriptor = make_memory_file("pytriton-check")
        try:
            os.ftruncate(descriptor, _SHARED_BYTES)
        finally:
            os.close(descriptor)


def _start_threads() -> None:
    done = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(_THREADS):
            thread = threading.Thread(target=done.wait, name="pytriton-check", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise SystemDeniedError(f"{error} after {len(started)}. {advise_threads()}") from None
    finally:
        done.set()
        for thread in started:
            thread.join()


def _check_files() -> None:
    # tritonserver raises its soft limit as far as the hard one.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < _FILES:
        raise SystemDeniedError(
            f"A process may have {most} files open: raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, "
            "--ulimit nofile= of Docker)."
        )


def _map_memory() -> None:
    with _named():
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mmap.mmap(-1, _ADDRESSES, flags=flags, prot=mmap.PROT_READ).close()


def _look_at_processes() -> None:
    if not os.path.exists("/proc/self/exe"):
        raise SystemDeniedError("/proc is not there: mount it (mount -t proc proc /proc).")


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SystemDeniedError(explain(error, advise(error.strerror or ""))) from error
