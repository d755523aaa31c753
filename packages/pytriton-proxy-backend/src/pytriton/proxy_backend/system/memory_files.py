"""Memory without a name, which processes share by its descriptor."""

from __future__ import annotations

import errno
import os

__all__ = ["make_memory_file"]

# Linux 6.3. Where the system wants each program to say so (`vm.memfd_noexec`), it refuses those that do not.
_NOEXEC_SEAL = 0x8
_DENIED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def make_memory_file(name: str, flags: int = os.MFD_CLOEXEC) -> int:
    """Return the descriptor of new memory.

    Args:
        name: What lists of open files show.
        flags: As of `os.memfd_create`.

    Raises:
        OSError: There is none; the text says whether it is denied.
    """
    try:
        try:
            return os.memfd_create(name, flags)
        except PermissionError:
            return os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno not in _DENIED:
            raise
        # No PermissionError, which says that another user might: what denies it is a filter of system calls.
        raise _MemoryDeniedError(
            errno.ENOSYS,
            f"memfd_create: {error.strerror}. All tensors pass in memory of that kind: allow the system call in the "
            "seccomp profile of the container or service (`SystemCallFilter=` of systemd)",
        ) from None


class _MemoryDeniedError(OSError):
    """No such memory can be made."""
