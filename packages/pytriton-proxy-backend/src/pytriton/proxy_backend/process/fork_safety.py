"""What a process has that its forks would lack, or would share with it and with each other, seen from outside.

A fork has one thread, whatever its parent had: a lock that another thread held stays locked in it, and a pool of
threads waits for work that nobody does. Its descriptors are those of its parent, with one position in each file and one
other end of each connection. A GPU that was used before a fork cannot be used after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path

from ..system.processes import open_pidfd

__all__ = ["Belongings", "reopen_files", "why_not_forked"]

# The devices of CUDA, of Linux on Windows, of ROCm, of OpenGL and Vulkan. A loaded library alone does no harm: it opens
# one of these first.
_DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd", "/dev/dri/")
# The time that a forked child which does nothing may take. Handlers that libraries run in the child after a fork may be
# slow on a busy machine.
_PROBE_TIMEOUT_S = 30.0
_MOST_SHOWN = 4


class Belongings:
    """The descriptors and the shared memory of this process at one moment, before it runs code of others."""

    def __init__(self) -> None:
        # The descriptors are kept with the files that they refer to, because a number may be closed and used again.
        self.descriptors = frozenset(_descriptors().items())
        self.mappings = frozenset(_mappings())

    def find_shared(self) -> str:
        """Return what it has beside these that forks cannot share, as a clause; empty if they can share all."""
        for mapping in _mappings():
            if mapping.startswith(_DEVICES):
                return _uses_device(mapping)
        for descriptor, path in _descriptors().items():
            if (descriptor, path) not in self.descriptors and (why := _why_not_shared(descriptor, path)):
                return why
        shared = sorted(frozenset(_mappings()) - self.mappings)
        if shared:
            return f"it maps memory that processes share and write ({shared[0].split()[0]})"
        return ""

    def files(self) -> list[int]:
        """Return the descriptors of the files that it reads beside those, for `reopen_files`."""
        opened = _descriptors().items() - self.descriptors
        return [descriptor for descriptor, _ in opened if _is_read_only_file(descriptor)]


def why_not_forked(before: Belongings) -> str:
    """Return why forks of this process would not be like it, as a clause; empty if they would.

    It forks a child, which ends at once, and looks which threads are left then: those that a library ends before every
    fork, as OpenBLAS does, and starts again when it needs them, do no harm.

    Args:
        before: What the process had before it ran any code that could make it so.
    """
    # The checks that need no fork come first, because a fork alone could disturb a GPU.
    reason = before.find_shared() or _find_children()
    return reason or _fork_once() or _find_threads()


def reopen_files(descriptors: list[int]) -> None:
    """In a fork: give descriptors of files a position of their own, which is now that of the process it is forked from.

    Raises:
        OSError: A file cannot be opened again.
    """
    for descriptor in descriptors:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
        own = os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
        os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
        os.close(own)


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # The descriptor that reads this list is closed by now.
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _mappings() -> list[str]:
    """Return what this process has mapped to share and to write: the path, and where that is."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        place, mode, _, _, inode, *path = line.split(maxsplit=5)
        if mode[1] == "w" and mode[3] == "s":
            found.append(f"{path[0] if path else 'without a name'} {place} {inode}")
    return found


def _why_not_shared(descriptor: int, path: str) -> str:
    if path.startswith(_DEVICES):
        return _uses_device(path)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            try:
                os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                return f"it reads {path}, which cannot be opened again: {error.strerror}"
            return ""
        return "" if flags & os.O_APPEND else f"it has opened {path} to write to it"
    if stat.S_ISDIR(mode) or (stat.S_ISCHR(mode) and path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")):
        return ""
    what = "a connection" if stat.S_ISSOCK(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a descriptor"
    return f"it holds {what} ({path}), such as that of a client or of an event loop, which forks would share"


def _uses_device(path: str) -> str:
    libraries = "" if "libcuda.so" not in Path("/proc/self/maps").read_text(errors="replace") else " with CUDA"
    return f"it uses a GPU{libraries} ({path.split()[0]}), which a fork cannot"


def _is_read_only_file(descriptor: int) -> bool:
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return is_file and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    except OSError:
        return False


def _find_children() -> str:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    return "it has started another process"


def _fork_once() -> str:
    with warnings.catch_warnings():
        # Python warns of threads, which are looked for next.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    pidfd = open_pidfd(pid)
    try:
        if pidfd is not None:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not poller.poll(_PROBE_TIMEOUT_S * 1000):
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return "" if status == 0 else "what a library does in forked processes fails or does not end"


def _find_threads() -> str:
    own = os.getpid()
    names = _thread_names(Path("/proc/self/task"), own)
    if not names:
        return ""
    shown = ", ".join(sorted(names)[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")
    count = len(names)
    return f"it has started {count} thread{'s' if count > 1 else ''}, which a fork lacks ({shown})"


def _thread_names(folder: Path, own: int) -> list[str]:
    """Return the names of all threads but the main one."""
    import threading

    python: Mapping[int | None, str] = {each.native_id: each.name for each in threading.enumerate()}
    names = []
    for task in folder.iterdir():
        if int(task.name) == own:
            continue
        # A thread that has just ended does not count.
        with contextlib.suppress(OSError):
            names.append(python.get(int(task.name)) or (task / "comm").read_text().strip())
    return names
