"""One region of POSIX shared memory, and the names by which regions of processes that are gone are found.

tritonserver maps a region by its name when it is registered. The name is not needed after that, and is removed at once:
a client that is killed then leaves nothing in the folder. What one leaves that is killed before, the next one removes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import mmap
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

FOLDER = "/dev/shm"
_PREFIX = "pytriton-client"
_NAME = re.compile(re.escape(_PREFIX) + r"\.([0-9a-f]+)\.([0-9]{1,9})\.([0-9]+)\.[0-9a-f]+")


class Region:
    """Shared memory of this process, which a server of the same user can map by its name.

    The memory is reserved at once, so that no later write fails. It is freed when nothing refers to the region or its
    array.
    """

    def __init__(self, size: int) -> None:
        self.name = f"{_PREFIX}.{_place()}.{os.getpid()}.{_start_of(os.getpid())}.{secrets.token_hex(8)}"
        self.size = size
        self._path = f"{FOLDER}/{self.name}"
        if room()[1] < size:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {size} bytes are needed", FOLDER)
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            # Without this, a full tmpfs would end this process, or the server, by SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            self.memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Give the memory back to the system at once, although a server may have it mapped; it cannot be used again."""
        # mmap.madvise() holds the GIL: all threads would wait while a large region is freed. If this fails, the memory
        # goes back when the server forgets the region.
        _libc().madvise(self.memory.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(self.size), mmap.MADV_REMOVE)

    def unlink(self) -> None:
        """Remove the name. A second call does nothing."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)


def room() -> tuple[int, int]:
    """Return how many bytes of shared memory this host allows, and how many of them are free."""
    status = os.statvfs(FOLDER)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def is_left_behind(name: str) -> bool:
    """Ask whether a region was made by a client of this host that is gone, and not by any other process."""
    parts = _NAME.fullmatch(name)
    if parts is None or parts[1] != _place():
        return False
    process, start = int(parts[2]), parts[3]
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # a process of another user, which lives
    try:
        return _start_of(process) != start
    except OSError:
        return False


def remove_left_files() -> None:
    """Remove the names of regions whose clients were killed before the server had registered them."""
    for name in filter(is_left_behind, os.listdir(FOLDER)):
        with suppress(OSError):  # the file is another user's, or another client removed it first
            os.unlink(f"{FOLDER}/{name}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@functools.lru_cache(maxsize=1)
def _place() -> str:
    """Return a mark of the host or container whose process ids this process sees."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return hashlib.blake2s(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode(), digest_size=6).hexdigest()


def _start_of(process: int) -> str:
    """Return when a process began, so that another one with its number is not taken for it; "0" if it has ended."""
    status = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    fields = status.rpartition(")")[2].split()
    return "0" if fields[0] in ("Z", "X") else fields[19]
