"""What to say where the system lacks something: it says neither what is short nor what to do."""

from __future__ import annotations

import errno
import os
import re
import resource

from .control_groups import read_own_group

# The text of ENFILE, a limit of the whole machine, begins with that of EMFILE.
_TEXT = os.strerror(errno.EMFILE)
_WHOLE_MACHINE = os.strerror(errno.ENFILE)
_TOO_LARGE = os.strerror(errno.EFBIG)
_NO_MEMORY = re.compile(rf"std::bad_alloc|{os.strerror(errno.ENOMEM)}")
_NO_LIBRARY = "cannot open shared object file"
# The texts of Python, of a C++ program that ends, and of gRPC.
_NO_THREAD = "can't start new thread"
_NO_THREADS = re.compile(
    rf"{_NO_THREAD}|'std::system_error'\n\W*what\(\): +{os.strerror(errno.EAGAIN)}|pthread_create failed"
)


def is_without_threads(error: BaseException) -> bool:
    """Return whether an error means that no thread can be started."""
    return isinstance(error, RuntimeError) and _NO_THREAD in str(error)


def explain(error: OSError, advice: str = "") -> str:
    """Return the text of a system error with `advice`; if a resource has run out, with the advice for that."""
    text = error.strerror or str(error)
    return " ".join(filter(None, [f"{text}.", advise(text) or advice]))


def advise(text: str) -> str:
    """Return what to do about an error of this process, or of one that it has started.

    Empty if nothing has run out.
    """
    if _WHOLE_MACHINE in text:
        return "The whole machine has run out of file descriptors: close some, or raise the limit (sysctl fs.file-max)."
    if _TEXT in text:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        by_whom = "as root, or where the process is started"
        more = by_whom if soft == hard else f"up to {_shown(hard)} without more rights"
        return f"File descriptors have run out: a process may have {_shown(soft)}. Raise the limit (ulimit -n), {more}."
    if _TOO_LARGE in text:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return (
            f"A file of this process, shared memory included, may have {_shown(limit)} bytes. Raise the limit "
            "(ulimit -f), or lift it."
        )
    if _NO_THREADS.search(text):
        return advise_threads()
    if _NO_MEMORY.search(text):
        return f"No memory is left.{_limits(_MEMORY_LIMITS)}"
    if _NO_LIBRARY in text and not os.path.exists("/proc/self/exe"):
        return "/proc is not there, by which programs find their libraries: mount it (mount -t proc proc /proc)."
    return ""


def advise_threads() -> str:
    """Return what to do if no thread, or no process, can be started."""
    return f"No more threads or processes can be started.{_limits(_THREAD_LIMITS)}"


_MEMORY_LIMITS = (
    ("a process may have {} bytes of addresses (ulimit -v)", resource.RLIMIT_AS),
    ("a process may have {} bytes of data (ulimit -d)", resource.RLIMIT_DATA),
)
_THREAD_LIMITS = (("a user may have {} of them (ulimit -u)", resource.RLIMIT_NPROC), *_MEMORY_LIMITS)


def _limits(named: tuple[tuple[str, int], ...]) -> str:
    """Return a sentence with the limits that are set; empty if there are none."""
    found = []
    for text, limit in named:
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            found.append(text.format(soft))
    if named is _THREAD_LIMITS:
        most = (read_own_group("pids", "pids.max", "pids.max") or "").strip()
        if most.isdecimal():
            found.append(f"the container (control group) may have {most} of them (pids.max)")
    return f" Raise the limit that is reached: {'; '.join(found)}." if found else ""


def _shown(limit: int) -> str:
    return "any number of them" if limit == resource.RLIM_INFINITY else str(limit)
