"""Call back when a file appears in a folder, so that nobody who waits for it has to ask again and again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import select
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from ..system.forks import call_in_child

_IN_CREATE = 0x100
_IN_MOVED_TO = 0x80
_IN_IGNORED = 0x8000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_READ_BYTES = 64 << 10

Callback = Callable[[], object]

logger = logging.getLogger(__name__)


class Arrivals:
    """Watches folders with inotify, in one thread that runs while somebody waits. Threads may share it."""

    def __init__(self) -> None:
        # A thread may take the lock twice: garbage collection, which can run anywhere, may call `remove` for a worker.
        self._lock = threading.RLock()
        self._descriptor: int | None = None
        self._over: int | None = None  # written to when the thread is to end
        self._folders: dict[int, set[Path]] = {}
        self._waiting: dict[Path, list[Callback]] = {}
        call_in_child(self, Arrivals._end_in_child)

    def add(self, path: Path, callback: Callback) -> bool:
        """Call back each time when a file appears at a path, in the thread of this object, until `remove`.

        The file may be there already. One that was just removed may be called once more. Returns false if a folder
        does not exist or the system watches no more of them.
        """
        with self._lock:
            try:
                self._watch(path.parent)
            except (OSError, RuntimeError) as error:
                # The second one is said of a system that is short of threads.
                logger.debug("%s cannot be watched: %s", path.parent, error)
                return False
            self._waiting.setdefault(path, []).append(callback)
            return True

    def remove(self, path: Path, callback: Callback) -> None:
        """Call back no more."""
        with self._lock:
            callbacks = self._waiting.get(path, [])
            if callback in callbacks:
                callbacks.remove(callback)
            if not callbacks:
                self._waiting.pop(path, None)
            self._leave()

    def watches(self, path: Path) -> bool:
        """Return whether the folder of a path is watched: not any more where it was removed."""
        with self._lock:
            return any(path.parent in folders for folders in self._folders.values())

    def _watch(self, folder: Path) -> None:
        if self._descriptor is not None:
            self._add(self._descriptor, folder)
            return
        over, descriptor = os.eventfd(0), -1
        try:
            descriptor = _check(_libc().inotify_init1(os.O_CLOEXEC))
            self._add(descriptor, folder)
            threading.Thread(target=self._run, args=(descriptor, over), name="pytriton-arrivals", daemon=True).start()
        except (OSError, RuntimeError):
            self._folders = {}
            for each in (over, descriptor):
                if each >= 0:
                    os.close(each)
            raise
        self._descriptor, self._over = descriptor, over

    def _add(self, descriptor: int, folder: Path) -> None:
        # The number of a folder that is watched already is the same, also where it has another path.
        number = _check(_libc().inotify_add_watch(descriptor, os.fsencode(folder), _IN_CREATE | _IN_MOVED_TO))
        self._folders.setdefault(number, set()).add(folder)

    def _leave(self) -> None:
        """End the thread where nobody waits any more."""
        over = self._over
        if over is None or self._waiting:
            return
        self._descriptor = self._over = None
        self._folders = {}
        # The event is written last, because the thread then closes it.
        os.eventfd_write(over, 1)

    def _run(self, descriptor: int, over: int) -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.register(over, select.POLLIN)
        # Without a limit: an event of a folder ends it, or `_leave`.
        while over not in dict(poller.poll()):
            for callback in self._due(descriptor, os.read(descriptor, _READ_BYTES)):
                callback()
        os.close(descriptor)
        os.close(over)

    def _due(self, descriptor: int, data: bytes) -> list[Callback]:
        due: list[Callback] = []
        at = 0
        with self._lock:
            if self._descriptor != descriptor:
                return due
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                name, at = data[at : at + length].rstrip(b"\0"), at + length
                folders = self._folders.get(number, set())
                if mask & _IN_IGNORED:
                    # The folder is gone. Whoever waits there looks, and finds that out.
                    self._folders.pop(number, None)
                    due += [
                        each for path, some in list(self._waiting.items()) if path.parent in folders for each in some
                    ]
                else:
                    due += [each for folder in folders for each in self._waiting.get(folder / os.fsdecode(name), ())]
        return due

    def _end_in_child(self) -> None:
        """In a forked child: neither the thread nor those who wait are there."""
        for descriptor in (self._descriptor, self._over):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._lock = threading.RLock()
        self._descriptor = self._over = None
        self._folders, self._waiting = {}, {}


_made: dict[str, Arrivals] = {}


def arrivals() -> Arrivals:
    """Return that of this process."""
    # `setdefault` gives the same object to two threads that both come first.
    return _made.get("") or _made.setdefault("", Arrivals())


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
