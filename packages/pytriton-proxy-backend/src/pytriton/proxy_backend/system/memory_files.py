"""Memory without a name, which processes share by its descriptor."""

from __future__ import annotations

import errno
import os

# Linux 6.3. If `vm.memfd_noexec` requires this flag, the system refuses memfds without it.
_NOEXEC_SEAL = 0x8
_DENIED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def make_memory_file(name: str, flags: int = os.MFD_CLOEXEC) -> int:
    """Return the descriptor of new memory."""
    try:
        try:
            return os.memfd_create(name, flags)
        except PermissionError:
            return os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno not in _DENIED:
            raise
        # This is no PermissionError, which would suggest another user: a filter of system calls denies it.
        raise _MemoryDeniedError(
            errno.ENOSYS,
            f"memfd_create: {error.strerror}. All tensors pass in memory of that kind: allow the system call in the "
            "seccomp profile of the container or service (`SystemCallFilter=` of systemd)",
        ) from None


class _MemoryDeniedError(OSError):
    """No such memory can be made."""
