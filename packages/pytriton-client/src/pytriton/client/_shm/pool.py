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

from .._core.forks import call_in_child
from .regions import Region, room

__all__ = ["RegionPool", "StaleRegions", "stale_regions_of"]

# How much may be free, and how much lent: a part of all shared memory of the host.
_SHARE = 4
# How long a region may be free, in seconds.
_LONGEST_FREE_S = 60.0
# Each region holds a file descriptor.
_MOST_LENT = 32
_LEAST_BYTES = 1 << 16
# A region may be larger than what is asked for by this factor.
_WASTE = 2


class StaleRegions:
    """The names of regions that one server has mapped and no client of this process uses any more.

    Attributes:
        names: Whoever tells the server takes them from the left, and puts back what it is too early for.
        not_before: When to tell it, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.names: deque[str] = deque()
        self.not_before = 0.0
        call_in_child(self, lambda stale: stale.names.clear())

    def add(self, name: str) -> None:
        """Add a name, to be told soon."""
        self.names.append(name)
        self.not_before = 0.0

    def put_back(self, name: str, pause_s: float) -> None:
        """Put a name back that it is too early for, to be told after a pause."""
        self.names.append(name)
        self.not_before = time.monotonic() + pause_s

    @property
    def was_early(self) -> bool:
        """Whether it was too early for one of them."""
        return self.not_before > 0.0


_stale: dict[str, StaleRegions] = {}


def stale_regions_of(url: str) -> StaleRegions:
    """Return those of a server."""
    return _stale.setdefault(url, StaleRegions())


class RegionPool:
    """The registered regions of a client and its views. May be used from several threads; never waits.

    Args:
        url: The server.
    """

    def __init__(self, url: str) -> None:
        self._stale = stale_regions_of(url)
        # Of each region that the server may have mapped, how often the server had forgotten all of them before.
        self._known: dict[str, int] = {}
        self._begin()
        # A client that is dropped without close() leaves its regions to the next one.
        weakref.finalize(self, _leave_all, self._stale, self._known).atexit = False
        # A child leaves the regions to the parent.
        call_in_child(self, RegionPool._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._epoch = 0
        self._known.clear()
        self._free: dict[Region, float] = {}  # since when; the oldest first
        # With the number of forks before, once there are arrays of the caller.
        self._lent: dict[Region, tuple[weakref.ref[npt.NDArray[np.uint8]], int] | None] = {}
        # Filled by the garbage collector, which may run in a thread that holds the lock.
        self._returned: deque[Region] = deque()
        # What is to be done with regions, for who has the lock: the garbage collector, too, ends requests.
        self._ended: deque[tuple[Callable[[Region], None], Region]] = deque()

    def take(self, size: int) -> Region | None:
        """Return a free region of at least that size; ``None`` where there is none, and the next smaller one goes."""
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
        """Make a region of at least that size, to be registered.

        Raises:
            OSError: It cannot be made.
        """
        # At most an eighth more than what is needed, so that the next one of about that size fits.
        step = max(_LEAST_BYTES, 1 << max(0, size.bit_length() - 4))
        region = Region(-(-size // step) * step)
        with self._exclusive():
            self._known[region.name] = self._epoch
        return region

    def give_back(self, region: Region) -> None:
        """Free a region: the server has answered, and nobody refers to its memory."""
        self._end(self._set_free, region)

    def may_lend(self, region: Region) -> bool:
        """Ask whether arrays of the caller may keep a region, or are to be copies. It counts as lent then."""
        with self._exclusive():
            lent = region.size + sum(map(_size_of, self._lent))
            may = not self._is_closed and len(self._lent) < _MOST_LENT and lent <= room()[0] // _SHARE
            if may:
                self._lent[region] = None
            return may

    def lend(self, region: Region, owner: npt.NDArray[np.uint8]) -> None:
        """Free a region when ``owner`` is gone: an array of its memory that all arrays of the caller refer to."""
        with self._exclusive():
            gone = functools.partial(_put, self._returned, region)
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

    def close(self) -> None:
        """Drop the regions that no request uses, now and later. Arrays of the caller keep their memory."""
        with self._exclusive():
            self._is_closed = True
            for region in (*self._free, *(region for region, lent in self._lent.items() if lent is not None)):
                self._drop(region)

    def _end(self, what: Callable[[Region], None], region: Region) -> None:
        self._ended.append((what, region))
        self._settle()

    def _settle(self) -> None:
        """Do what is to be done, unless somebody has the lock, who does it."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

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
            # An array may live on in a child of a fork, where nobody sees its end.
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

    def _drop(self, region: Region) -> None:
        self._free.pop(region, None)
        self._lent.pop(region, None)
        if self._known.pop(region.name, None) is not None:
            self._stale.add(region.name)


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)


def _size_of(region: Region) -> int:
    return region.size


def _put(returned: deque[Region], region: Region, _gone: object) -> None:
    returned.append(region)


def _leave_all(stale: StaleRegions, known: dict[str, int]) -> None:
    for name in known:
        stale.add(name)
