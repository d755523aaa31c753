"""The extension module from `native/accelerator`; see `wire.accelerator` for where it is and where not."""

from collections import deque
from collections.abc import Callable
from mmap import mmap
from typing import Any, Protocol

def are_strings(array: Any) -> bool:
    """Return whether every element of a contiguous object array is `bytes`, or text with a form in UTF-8.

    It may say no to what is a string of another kind.
    """

def encode_strings(array: Any) -> bytes | None:
    """Return the wire form of a contiguous object array; `None` where `are_strings` says no."""

def fill_strings(array: Any, payload: bytes) -> bool:
    """Put the strings of a wire form into a contiguous object array; says whether it held exactly so many."""

class Host(Protocol):
    """What a lane asks of Python: the first time that something comes, or when something has to be seen to."""

    released: deque[tuple[int, int]]
    """Blocks that are to be given back, which `note_released` adds to from any thread."""

    @property
    def note_released(self) -> Callable[[tuple[int, int]], None]: ...
    def describe(self, raw: bytes, head: tuple[int, int, int, int, int]) -> tuple[Any, ...] | None:
        """Check the metadata of a record.

        Returns:
            The metadata, of each input name, shape, dtype and bytes of an element, offset and length of each piece that
            is the same in records of that form, places of the references to texts that are the same, whether tensors
            have a batch axis, and the bytes that such records have less than, 0 for any; `None` where batches with them
            are Python's.
        """

    def lay_out(self, metadata: Any, raw: bytes | None, resized: int, result: Any) -> tuple[Any, ...] | None:
        """Check what a callable returned, a dictionary or a list of them, and lay a record out for it.

        Args:
            metadata: Those that `describe` returned for a batch that looks like this one.
            raw: The record of this one up to the payloads, where that differs.
            resized: Whether sizes differ as well.
            result: What the callable returned.

        Returns:
            The metadata of the record, its length, bytes of its payloads, whether it is of a list, the size of each
            dictionary, of each array its dictionary and (name, shape, dtype, offset, length), dictionary by dictionary,
            of each tensor the shapes that such results may have, and the bytes that they have less than, 0 for any.
            `None` for shapes: they may have these alone. `None` where such results are Python's.
        """

    def make_room(self, place: int, length: int) -> tuple[int, int, int, int] | None:
        """Return segment, offset, size and address of a block for records, in place of the first or second one.

        `None` where there is none now.
        """

    @property
    def is_lent(self) -> Callable[[int], bool]:
        """Return whether outputs that begin at an address are Python's, who sends them from where they are."""

    def acknowledge(self, consumed: int) -> int:
        """Take note of what the proxy backend has read; returns how many responses are left."""

    def segment(self, number: int) -> tuple[mmap, int, int] | None:
        """Return memory, address and size of a segment of the proxy backend."""

    def make_requests(
        self,
        metadata: Any,
        raw: bytes | None,
        resized: int,
        block: Any,
        columns: dict[str, Any],
        number: int,
        received_ns: int,
        sent_ns: int,
    ) -> list[Any]:
        """Make the requests of a batch; `raw` is its record up to the payloads, where that differs, or sizes do."""

    def give_back(self) -> None:
        """Tell of the blocks in `released`."""

class Lane:
    """The way of plain batches over one connection."""

    def __init__(
        self,
        fd: int,
        buffer: bytearray,
        place: tuple[int, int],
        counters: object,
        callable: Callable[..., Any],
        takes_columns: bool,
        look_ns: int,
        host: Host,
    ) -> None:
        """Make one; `look_ns` is how long it looks for the next batch of a lone caller before it sleeps."""

    def run(self, sent: int, pending: int) -> tuple[int, list[int]] | list[Any] | None:
        """Serve plain batches until something else is to be done.

        Args:
            sent: Responses in all.
            pending: Those of them that are not acknowledged.

        Returns:
            `None` when nothing came for a while; size and descriptors of a packet in the buffer; or a call that was
            made: place, metadata, block, columns, number, times of receiving and sending, time of the call, result and
            error.

        Raises:
            OSError: The connection broke.
        """

    def leave(self) -> tuple[int, int, int]:
        """Forget everything of the connection.

        Returns:
            Responses in all, how many of the two blocks are not acknowledged, and which has the last response.
        """

    def held(self) -> int:
        """Return how many blocks of batches somebody still refers to."""

    def close(self) -> None:
        """Let go of everything."""

    def close_in_child(self) -> None:
        """Send nothing any more; for a forked child."""
