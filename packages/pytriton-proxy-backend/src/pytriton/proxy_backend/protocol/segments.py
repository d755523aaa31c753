"""The segments of an arena that a peer has announced, and the states of a connection."""

from __future__ import annotations

import collections
import enum
from typing import Protocol

from ..wire.errors import ProtocolError
from ..wire.layout import ALIGNMENT, align
from ..wire.limits import MAX_SEGMENTS

Place = tuple[int, int]
"""Segment and offset of a block."""


class Block(Protocol):
    """A block of an arena."""

    @property
    def segment(self) -> int:
        """The number of its segment."""

    @property
    def offset(self) -> int:
        """The offset in the segment."""


class State(enum.Enum):
    """The states of a connection, see `docs/protocol.md`."""

    GREETING = "greeting"
    ATTACHED = "attached"
    DETACHING = "detaching"
    CLOSED = "closed"


class PeerSegments:
    """What of a peer's memory may be named."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # bytes that all segments may have together
        self.sizes: dict[int, int] = {}  # the size of each segment by its number, in bytes
        self.held: set[Place] = set()  # the blocks of batches that somebody here may use
        # Blocks that are not used here any more, added from any thread, of which the peer must be told.
        self.released: collections.deque[Place] = collections.deque()

    def take_released(self) -> Place:
        """Return the next block that nobody here uses any more; there must be one."""
        place = self.released.popleft()
        self.held.discard(place)
        return place

    def announce(self, number: int, size: int, descriptors: int) -> None:
        """Note a segment that came with this many descriptors."""
        if descriptors != 1:
            raise ProtocolError(
                f"segment {number} was announced with {descriptors} descriptors, expected 1; where this process has "
                f"too many files open none can be received (see ulimit -n)"
            )
        if number in self.sizes or len(self.sizes) >= MAX_SEGMENTS:
            raise ProtocolError(f"segment {number} was announced twice, or is one of more than {MAX_SEGMENTS}")
        total = size + sum(self.sizes.values())
        if total > align(self.budget):
            raise ProtocolError(
                f"with segment {number} the arena would have {total} bytes, its budget is {self.budget}"
            )
        self.sizes[number] = size

    def close(self, number: int) -> None:
        """Forget a segment."""
        self.sizes.pop(number, None)

    def check(self, segment: int, offset: int, length: int) -> None:
        """Check a place."""
        size = self.sizes.get(segment)
        if size is None or offset % ALIGNMENT or offset + length > size:
            raise ProtocolError(
                f"a block of {length} bytes at {offset} of segment {segment} does not lie inside it (its size: "
                f"{'unknown' if size is None else size})"
            )
