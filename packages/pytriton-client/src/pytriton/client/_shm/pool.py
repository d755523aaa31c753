"""The regions of a client: which are free, which a request uses, and which arrays of the caller lie in.

A region belongs to one request at a time, so that no tensor can be written over another one's::

    free -- take --> in use -- give_back --> free
                            -- lend -------> lent to arrays of the caller -- the last one is gone --> free
                            -- leave ------> never used again, as the server may still read or write it
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from .._core.deadline import Watchdog
from .._core.forks import call_in_child
from .regions import Region, room

# At most this fraction (1/n) of the host's shared memory may be free here, and as much may be lent.
_SHARE = 4
# How long a region may be free, in seconds.
_LONGEST_FREE_S = 60.0
# Each region holds a file descriptor.
_MOST_LENT = 32
_LEAST_BYTES = 1 << 16
# A free region may be used for a request that is smaller by up to this factor.
_WASTE = 2


class StaleRegions:
    """The names of regions that one server has mapped and no client of this process uses any more."""

    def __init__(self) -> None:
        # The thread that tells the server takes names from the left, and puts back those for which it is too early.
        self.names: deque[str] = deque()
        self.not_before = 0.0  # when to tell it, by ``time.monotonic``
        call_in_child(self, lambda stale: stale.names.clear())

    def add(self, name: str) -> None:
        """Add the name of a region that the server should forget soon."""
        self.names.append(name)
        self.not_before = 0.0

    def put_back(self, name: str, pause_s: float) -> None:
        """Put back a name that the server still uses, to be tried again after a pause."""
        self.names.append(name)
        self.not_before = time.monotonic() + pause_s

    @property
    def was_early(self) -> bool:
        """Whether the server still used one of the names."""
        return self.not_before > 0.0


_stale: dict[str, StaleRegions] = {}


def stale_regions_of(url: str) -> StaleRegions:
    """Return the stale regions of a server."""
    return _stale.setdefault(url, StaleRegions())


class RegionPool:
    """The registered regions of a client and its views. Threads may share it; no method waits."""

    def __init__(self, url: str) -> None:
        self._stale = stale_regions_of(url)
        self._idleness = _Idleness(self)
        # For each region that the server may have mapped: how often the server had forgotten all regions before.
        self._known: dict[str, int] = {}
        self._begin()
        # A client that is dropped without close() leaves its regions to the next client.
        weakref.finalize(self, _leave_all, self._stale, self._known, self._idleness).atexit = False
        # A forked child leaves the regions to its parent.
        call_in_child(self, RegionPool._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._epoch = 0
        self._known.clear()
        self._free: dict[Region, float] = {}  # the time since which each is free; the oldest first
        # For lent regions: the array of the caller, and the number of forks before it was lent.
        self._lent: dict[Region, tuple[weakref.ref[npt.NDArray[np.uint8]], int] | None] = {}
        # The garbage collector fills this; it may run in a thread that holds the lock.
        self._returned: deque[Region] = deque()
        # Work that waits for the holder of the lock, because the garbage collector ends requests, too.
        self._ended: deque[tuple[Callable[[Region], None], Region]] = deque()
        # Regions that were free and are dropped. Giving large memory back takes long, so it is done without the lock.
        self._dropped: deque[Region] = deque()

    def take(self, size: int) -> Region | None:
        """Return a free region of at least that size; otherwise return ``None`` and drop the next smaller one."""
        with self._exclusive():
            most = max(_WASTE * size, 2 * _LEAST_BYTES)
            fitting = [region for region in self._free if size <= region.size <= most]
            if fitting:
                region = min(fitting, key=_size_of)
                del self._free[region]
                return region
            smaller = [region for region in self._free if region.size < size]
            if smaller:
                self._drop(max(smaller, key=_size_of))
            return None

    def make(self, size: int) -> Region:
        """Make a region of at least that size, to be registered."""
        # The region is at most an eighth larger than needed, so that the next request of about that size fits.
        step = max(_LEAST_BYTES, 1 << max(0, size.bit_length() - 4))
        region = Region(-(-size // step) * step)
        with self._exclusive():
            self._known[region.name] = self._epoch
        return region

    def give_back(self, region: Region) -> None:
        """Free a region: the server has answered, and nobody refers to its memory."""
        self._end(self._set_free, region)

    def may_lend(self, region: Region) -> bool:
        """Return whether arrays of the caller may lie in a region, instead of copies; then it counts as lent."""
        with self._exclusive():
            lent = region.size + sum(map(_size_of, self._lent))
            may = not self._is_closed and len(self._lent) < _MOST_LENT and lent <= room()[0] // _SHARE
            if may:
                self._lent[region] = None
            return may

    def lend(self, region: Region, owner: npt.NDArray[np.uint8]) -> None:
        """Free a region when ``owner`` is gone: an array of its memory that all arrays of the caller refer to."""
        with self._exclusive():
            gone = functools.partial(_put, self._returned, region, self._idleness)
            self._lent[region] = (weakref.ref(owner, gone), _forks)
            if self._is_closed:
                self._drop(region)

    def leave(self, region: Region) -> None:
        """Never use a region again: the server may still read or write it."""
        self._end(self._drop, region)

    def forget(self, region: Region) -> None:
        """Drop a region that the server has forgotten, and all that it knew at that time."""
        with self._exclusive():
            if self._known.get(region.name) == self._epoch:
                self._epoch += 1
            self._drop(region)
            for free in list(self._free):
                self._set_free(free)

    def drop_free(self) -> None:
        """Drop the regions that are free."""
        with self._exclusive():
            for region in list(self._free):
                self._drop(region)

    def close(self) -> None:
        """Drop the regions that no request uses, now and later. Arrays of the caller keep their memory."""
        _watchdog().forget(self._idleness)
        with self._exclusive():
            self._is_closed = True
            for region in (*self._free, *(region for region, lent in self._lent.items() if lent is not None)):
                self._drop(region)

    def _end(self, what: Callable[[Region], None], region: Region) -> None:
        self._ended.append((what, region))
        self._settle()

    def _settle(self) -> None:
        """Do the work that waits, unless another thread holds the lock: that one does it.

        Then give back the memory of dropped regions.
        """
        while self._ended and self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()
        with contextlib.suppress(IndexError):  # no region is left, or another thread has taken the last one
            while self._dropped:
                self._dropped.popleft().release()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            self._collect()
            yield
        self._settle()

    def _collect(self) -> None:
        while self._ended:
            what, ended = self._ended.popleft()
            what(ended)
        while self._returned:
            region = self._returned.popleft()
            lent = self._lent.pop(region, None)
            # A forked child may keep an array alive, and nobody sees when it ends.
            if lent is not None and lent[1] == _forks:
                self._set_free(region)
            else:
                self._drop(region)

    def _set_free(self, region: Region) -> None:
        self._lent.pop(region, None)
        if self._is_closed or self._known.get(region.name) != self._epoch:
            self._drop(region)
            return
        now, most = time.monotonic(), room()[0] // _SHARE
        self._free[region] = now
        for oldest, since in list(self._free.items()):
            if now - since > _LONGEST_FREE_S or sum(map(_size_of, self._free)) > most:
                self._drop(oldest)
        _wait_idle(self._idleness)

    def _drop(self, region: Region) -> None:
        if self._free.pop(region, None) is not None:
            self._dropped.append(region)
        self._lent.pop(region, None)
        if self._known.pop(region.name, None) is not None:
            self._stale.add(region.name)


class _Idleness:
    """Drops the free regions of a pool when none has become free for ``_LONGEST_FREE_S``; does not keep it alive."""

    def __init__(self, pool: RegionPool) -> None:
        self._pool = weakref.ref(pool)

    def end_wait(self) -> None:
        _watchdog().forget(self)  # first, so that a region that becomes free now is dropped, or waits anew
        pool = self._pool()
        if pool is not None:
            pool.drop_free()


@functools.cache
def _watchdog() -> Watchdog:
    return Watchdog()


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)


def _size_of(region: Region) -> int:
    return region.size


def _put(returned: deque[Region], region: Region, idleness: _Idleness, _gone: object) -> None:
    returned.append(region)
    _wait_idle(idleness)


def _wait_idle(idleness: _Idleness) -> None:
    with contextlib.suppress(RuntimeError):  # the system has no thread left: the next call looks at the times
        _watchdog().begin(idleness, _LONGEST_FREE_S)


def _leave_all(stale: StaleRegions, known: dict[str, int], idleness: _Idleness) -> None:
    _watchdog().forget(idleness)
    for name in known:
        stale.add(name)
