"""Shared memory between a worker and the proxy backend: sealed memfd segments, each with one owner.

The life of a block of the arena that a side owns::

    free --allocate()--> in use, sent to the peer --the peer says so--> free

where `lend` gives it to a callable as arrays, it is free when these are gone as well. Of a block that the peer owns::

    mapped by the first view --the last view of it dies--> named in `PeerSegments.released`, to be told to the peer
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import fcntl
import functools
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArenaFullError, ProtocolError
from ..protocol.segments import Place
from ..system.memory_files import make_memory_file
from ..system.shortage import explain
from ..wire.layout import align
from ..wire.limits import FIRST_SEGMENT_BYTES
from ..wire.record import Record

# Space for the metadata of a record before lent arrays: enough for the responses to 300 requests.
_BEFORE_LENT = 16 << 10
# Python's mmap does not define these in every version; they are the same on all platforms of tritonserver.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
# Python's fcntl defines these in every supported version; the seals make reading a peer's memory safe.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class OwnedBlock(NamedTuple):
    """A piece of our arena, with the mapping to write it through."""

    segment: int
    offset: int
    memory: mmap.mmap


@dataclass
class _OwnedSegment:
    number: int
    size: int
    memory: mmap.mmap
    # (offset, length), sorted, never adjacent
    free: list[tuple[int, int]] = field(default_factory=list)
    used: dict[int, int] = field(default_factory=dict)
    idle_since: float | None = None


@dataclass(frozen=True)
class NewSegment:
    """A new segment that the peer has to learn of; `fd` is closed once it was sent."""

    number: int
    size: int
    fd: int


@dataclass
class _LentBlock:
    """A block with arrays of a callable: where an unread record begins in it, and whether arrays may be left."""

    block: OwnedBlock
    record: Place | None = None
    has_views: bool = True


class OwnArena:
    """The arena that this side writes and the peer reads. Not thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.size = 0
        self.in_use = 0
        self._segments: list[_OwnedSegment] = []
        self._next = 1
        # The block that was given back last, with its size, because the next one mostly has the same size.
        self._spare: tuple[int, OwnedBlock] | None = None
        self._lent: dict[int, _LentBlock] = {}  # the key is the address of the first array
        self._records: dict[Place, int] = {}  # the records inside lent blocks
        self._returned: collections.deque[tuple[int, int]] = collections.deque()

    def allocate(self, length: int) -> OwnedBlock | None:
        """Take `length` bytes, aligned to 64; `None` if no segment has them free."""
        need = align(length or 1)
        spare = self._spare
        if spare is not None:
            self._spare = None
            if spare[0] == need:
                self.in_use += need
                return spare[1]
            self._free(spare[1])
        for segment in self._segments:
            free = segment.free
            for index, (offset, room) in enumerate(free):
                if room >= need:
                    if room == need:
                        del free[index]
                    else:
                        free[index] = (offset + need, room - need)
                    segment.used[offset] = need
                    self.in_use += need
                    return OwnedBlock(segment.number, offset, segment.memory)
        return None

    def can_grow(self, length: int) -> bool:
        """Return whether the budget allows one more segment for `length` bytes."""
        return self.size + align(max(length, 1)) <= self.budget

    def add_segment(self, length: int) -> NewSegment:
        """Add a segment with room for `length` bytes."""
        if not self.can_grow(length):
            raise ArenaFullError(
                f"{length} bytes of outputs do not fit: the arena may have {self.budget} bytes and {self.in_use} of "
                f"them are in use. Raise arena_budget_bytes of the model, or return smaller outputs",
                needed=length,
                budget=self.budget,
                in_use=self.in_use,
            )
        size = max(FIRST_SEGMENT_BYTES, self.size)
        while size < length:
            size *= 2
        # At least the requested size; unused pages of a memfd take no memory.
        size = align(max(min(size, self.budget - self.size), length))
        try:
            fd, memory = _make_segment(size)
        except OSError as error:
            raise ArenaFullError(
                f"{length} bytes of outputs have no place: the system gives no shared memory of {size} bytes: "
                f"{explain(error)}",
                needed=length,
                budget=self.budget,
                in_use=self.in_use,
            ) from error
        number = self._next
        self._next += 1
        self.size += size
        self._segments.append(_OwnedSegment(number, size, memory, [(0, size)]))
        return NewSegment(number, size, fd)

    def lend(self, length: int) -> ViewedBlock | None:
        """Take `length` bytes for arrays that are sent without a copy; `None` if no segment has them free.

        The block is in use while a view of it, or a record in it, exists.
        """
        self._take_back()
        block = self.allocate(lent_size(length))
        if block is None:
            return None
        view: ViewedBlock = ViewedBlock.__new__(
            ViewedBlock, (length,), np.uint8, block.memory, block.offset + _BEFORE_LENT
        )
        view.released = self._returned
        view.place = (address_of(block.memory) + block.offset + _BEFORE_LENT, length)
        self._lent[view.place[0]] = _LentBlock(block)
        return view

    def is_lent(self, address: int) -> bool:
        """Return whether the first of such arrays begins at an address."""
        return address in self._lent

    def block_around(self, record: Record) -> OwnedBlock | None:
        """Return where a record goes whose payloads are such arrays, in their order, so that they stay where they are.

        `None` if they are not, or if another record there is in use.
        """
        address = address_of_payloads(record) if self._lent else None
        lent = None if address is None else self._lent.get(address)
        before = len(record.layout.metadata)
        if address is None or lent is None or lent.record is not None or before > _BEFORE_LENT:
            return None
        segment, offset, memory = lent.block
        block = OwnedBlock(segment, offset + _BEFORE_LENT - before, memory)
        lent.record = block[:2]
        self._records[lent.record] = address
        return block

    def _take_back(self) -> None:
        while self._returned:
            address, _ = self._returned.popleft()
            lent = self._lent[address]
            lent.has_views = False
            if lent.record is None:
                del self._lent[address]
                self.release(lent.block)

    def release(self, block: OwnedBlock) -> None:
        """Give a block back."""
        address = self._records.pop(block[:2], None) if self._records else None
        if address is not None:
            lent = self._lent[address]
            lent.record = None
            if lent.has_views:
                return
            del self._lent[address]
            block = lent.block
        segment = next(segment for segment in self._segments if segment.number == block.segment)
        need = segment.used[block.offset]
        self.in_use -= need
        if self._spare is not None:
            self._free(self._spare[1])
        self._spare = (need, block)

    def _free(self, block: OwnedBlock) -> None:
        segment = next(segment for segment in self._segments if segment.number == block.segment)
        begin = block.offset
        length = segment.used.pop(begin)
        free = segment.free
        index = bisect.bisect(free, (begin, 0))
        if index < len(free) and begin + length == free[index][0]:
            length += free.pop(index)[1]
        if index > 0 and sum(free[index - 1]) == begin:
            index -= 1
            begin, before = free.pop(index)
            length += before
        free.insert(index, (begin, length))
        segment.idle_since = None

    def has_idle(self) -> bool:
        """Return whether `trim` may free something later."""
        # The spare block counts as used until `trim` takes it back, and so do blocks whose arrays are gone.
        return (
            self._spare is not None
            or bool(self._returned)
            or any(not segment.used for segment in self._segments[1:])
            or (bool(self._segments) and self._segments[0].size > FIRST_SEGMENT_BYTES and not self._segments[0].used)
        )

    @property
    def is_lent_out(self) -> bool:
        """Whether a callable has arrays whose block is given back when they are gone."""
        return bool(self._lent)

    def drop_unused(self) -> list[int]:
        """Drop every segment without a block in use, the first one too; returns their numbers."""
        self._take_back()
        if self._spare is not None:
            self._free(self._spare[1])
            self._spare = None
        unused = [segment for segment in self._segments if not segment.used]
        self._segments = [segment for segment in self._segments if segment.used]
        self.size -= sum(segment.size for segment in unused)
        return [segment.number for segment in unused]

    def trim(self, idle_s: float) -> list[int]:
        """Drop segments that were unused for `idle_s` seconds, except a small first one; return their numbers."""
        self._take_back()
        if self._spare is not None:
            self._free(self._spare[1])
            self._spare = None
        now = time.monotonic()
        gone: list[int] = []
        for index, segment in enumerate(list(self._segments)):
            if segment.used or (index == 0 and segment.size <= FIRST_SEGMENT_BYTES):
                segment.idle_since = None
            elif segment.idle_since is None:
                segment.idle_since = now
            elif now - segment.idle_since >= idle_s:
                gone.append(segment.number)
                self.size -= segment.size
                self._segments.remove(segment)
        return gone


def lent_size(length: int) -> int:
    """Return how much `OwnArena.lend` takes for `length` bytes."""
    return _BEFORE_LENT + length


def address_of_payloads(record: Record) -> int | None:
    """Return the address of a record's payloads, if they lie as they would in the record."""
    places = record.layout.places
    first: int | None = None
    for place, payload in zip(places, record.payloads, strict=True):
        at = place.offset - places[0].offset
        for array in payload if payload.__class__ is list else (payload,):
            if array.__class__ is not np.ndarray or not array.flags.c_contiguous:
                return None
            address = array.__array_interface__["data"][0] - at
            if first is None:
                first = address
            elif address != first:
                return None
            at += array.nbytes
    return first


def _make_segment(size: int) -> tuple[int, mmap.mmap]:
    fd = make_memory_file("pytriton-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, map_shared(fd, size)
    except BaseException:
        os.close(fd)
        raise


def map_shared(fd: int, size: int) -> mmap.mmap:
    """Map a memfd without keeping its descriptor, which a forked child would inherit.

    Python's `mmap` duplicates the descriptor (before 3.13, always), so it maps anonymous memory, whose pages are then
    replaced.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    address = address_of(memory)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _c_mmap()(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        number = ctypes.get_errno()
        memory.close()
        raise OSError(number, os.strerror(number))
    return memory


def address_of(memory: mmap.mmap) -> int:
    """Return the address of a mapping, which is valid while the mapping exists."""
    # The memory cannot be closed while this object exists.
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@functools.cache
def _c_mmap() -> Callable[..., int | None]:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    # off_t is as wide as a long on all of these platforms.
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    made: Callable[..., int | None] = function
    return made


class ViewedBlock(np.ndarray[Any, Any]):
    """A block of an arena that lives as long as any numpy view of it.

    It is a subclass, because numpy keeps the owner of the memory and skips plain arrays in between; views come from
    `numpy.ndarray(buffer=block)` and are plain arrays.
    """

    __slots__ = ("place", "released")

    place: tuple[int, int]
    released: collections.deque[tuple[int, int]]

    def __del__(self) -> None:
        # This runs in whichever thread drops the last view, maybe in the garbage collector, so it may only append.
        place = getattr(self, "place", None)
        if place is not None:
            self.released.append(place)


class PeerArena:
    """The arena that the peer owns: segments mapped by number, blocks handed out as numpy views.

    What the peer says of it is checked before, by `protocol.segments.PeerSegments`.
    """

    def __init__(self, released: collections.deque[tuple[int, int]] | None = None) -> None:
        # The blocks that nobody uses any more.
        self.released: collections.deque[tuple[int, int]] = collections.deque() if released is None else released
        self._segments: dict[int, mmap.mmap] = {}

    def attach(self, number: int, fd: int, size: int) -> None:
        """Map a segment; takes `fd` over."""
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as error:
                raise ProtocolError(f"segment {number} is not a memfd: {error}") from error
            actual = os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK or actual < size or size == 0:
                raise ProtocolError(
                    f"segment {number} must be sealed against shrinking and hold {size} bytes; its seals are "
                    f"{seals:#x} and it holds {actual} bytes"
                )
            self._segments[number] = map_shared(fd, size)
        finally:
            os.close(fd)

    def detach(self, number: int) -> None:
        """Forget a segment; its memory is freed with the last view of it."""
        self._segments.pop(number, None)

    def segment(self, number: int) -> mmap.mmap | None:
        """Return the mapping of a segment, if there is one."""
        return self._segments.get(number)

    def block(self, number: int, offset: int, length: int) -> tuple[ViewedBlock, mmap.mmap]:
        """Return a view of `length` bytes and its segment; the block is released when all views are gone."""
        memory = self._segments[number]
        block = ViewedBlock.__new__(ViewedBlock, (length,), np.uint8, memory, offset)
        block.released = self.released
        block.place = (number, offset)
        return block, memory
