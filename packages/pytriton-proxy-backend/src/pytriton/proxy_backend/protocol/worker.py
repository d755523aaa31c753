"""The worker's end of a connection."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Generic, TypeVar

from ..wire import messages
from ..wire.errors import ProtocolError
from ..wire.greetings import Hello, Welcome, parse_answer
from ..wire.layout import ALIGNMENT, Capability
from ..wire.messages import (
    BATCH,
    BATCH_DONE,
    INPUT_RELEASED,
    Buffer,
    Header,
    pack_release,
    pack_response,
    pack_responses,
    read_header,
)
from .segments import Block, PeerSegments, Place, State

# How much of its budget the arena may take for the responses of streams: a fast generator waits for the proxy backend
# instead of filling more.
STREAM_WINDOW = 64 << 20
# How many responses of streams may be on their way, of a worker that waits elsewhere than in its socket. They are
# acknowledged every 16th time.
_MOST_ON_THE_WAY = 64

B = TypeVar("B", bound=Block)


class WorkerProtocol(Generic[B]):
    """The state of a worker's connection. Not thread-safe, apart from `detach` and `segments.released`."""

    def __init__(self, hello: Hello, free: Callable[[B], object]) -> None:
        """Begin a connection; `free` is called with each block of a response that the proxy backend has read."""
        self.state = State.GREETING  # of the connection
        self.welcome: Welcome  # what the proxy backend said; there once `state` is ATTACHED
        self.segments = PeerSegments(0)  # those of the proxy backend
        # The input block of each batch that is not done; `None` where that went back already, or where the record came
        # with the message, see `python_proxy.protocol`.
        self.batches: dict[int, Place | None] = {}
        # Blocks of responses that the proxy backend has not read yet, oldest first.
        self.unacknowledged: collections.deque[B] = collections.deque()
        self.consumed = 0  # how many responses it has read
        # The requests of each batch whose callers do not take their responses for now.
        self.paused: dict[int, set[int]] = {}
        self.resumptions: dict[int, Callable[[], object]] = {}  # what to call when a batch that pauses may go on
        self.is_woken = False  # whether a batch waits, of a worker that is asleep
        self._hello = hello
        self._free = free

    # ---- what comes -------------------------------------------------------------------------------------------------

    def receive(self, packet: Buffer, size: int, descriptors: int = 0) -> Header:
        """Take a packet of `size` bytes that lies at the begin of a buffer, and return its header.

        It is checked, and what it says is noted. The transport maps a SEGMENT, unmaps a SEGMENT_CLOSE, reads the record
        of a BATCH, tells of a CANCEL, and closes the connection where `state` is CLOSED. `ProtocolError` means that the
        connection cannot go on, `AttachError` that the proxy backend refuses this worker.
        """
        if self.state is State.GREETING:
            self._take_answer(packet, size)
            return read_header(packet, size)
        header = read_header(packet, size)
        kind, _, _, number, consumed, segment, _, offset, length = header
        if kind != BATCH or descriptors:
            self._take(header, descriptors)
        else:
            if consumed != self.consumed:
                self.acknowledge(consumed)
            room = self.segments.sizes.get(segment)
            if room is None or offset % ALIGNMENT or offset + length > room:
                self.segments.check(segment, offset, length)
            place = (segment, offset)
            self.batches[number] = place
            self.segments.held.add(place)
        return header

    def _take_answer(self, packet: Buffer, size: int) -> None:
        self.welcome = parse_answer(bytes(packet[:size]))
        self.segments.budget = self.welcome.arena_budget
        self.state = State.ATTACHED

    def _take(self, header: Header, descriptors: int) -> None:
        kind, _, _, number, consumed, segment, index, _, length = header
        if kind == messages.SEGMENT:
            self.segments.announce(segment, length, descriptors)
        elif descriptors:
            raise ProtocolError(f"{messages.name_of(kind)} came with {descriptors} descriptors, and carries none")
        elif kind == messages.RELEASE:
            self.acknowledge(consumed)
        elif kind == messages.SEGMENT_CLOSE:
            self.segments.close(segment)
        elif kind == messages.PAUSE:
            # It may cross the end of its batch.
            if number in self.batches:
                self.paused.setdefault(number, set()).add(index)
        elif kind == messages.RESUME:
            requests = self.paused.get(number, set())
            requests.discard(index)
            if not requests and self.paused.pop(number, None) is not None:
                self.resumptions.pop(number, _nothing)()
        elif kind == messages.WAKE and self.welcome.capabilities & Capability.ASLEEP:
            self.is_woken = True
        elif kind != messages.CANCEL:
            raise ProtocolError(f"message {kind} came, which a proxy backend does not send to an attached worker")

    @property
    def sent(self) -> int:
        """How many responses were sent in blocks of this side."""
        return self.consumed + len(self.unacknowledged)

    def acknowledge(self, consumed: int) -> None:
        """Take note that the proxy backend has read so many responses.

        Raises `ProtocolError` if so many were not sent.
        """
        waiting = self.unacknowledged
        while self.consumed < consumed and waiting:
            self._free(waiting.popleft())
            self.consumed += 1
        self.resume_next()
        # Below: a count that falls says nothing new.
        if self.consumed < consumed:
            raise ProtocolError(f"{consumed} responses acknowledged, {self.consumed} sent")

    def must_pause(self, number: int) -> bool:
        """Return whether a stream has to wait: for its callers, or for the proxy backend to read what was sent."""
        return number in self.paused or len(self.unacknowledged) > _MOST_ON_THE_WAY

    def resume_next(self) -> None:
        """Let one of the streams that wait go on, if it may; it calls this in its turn."""
        if not self.resumptions or len(self.unacknowledged) > _MOST_ON_THE_WAY:
            return
        number = next((number for number in self.resumptions if number not in self.paused), None)
        if number is not None:
            self.resumptions.pop(number)()

    # ---- what goes --------------------------------------------------------------------------------------------------

    def greet(self) -> bytes:
        """Return HELLO."""
        return self._hello.pack()

    def respond(
        self, number: int, block: B, length: int, *, done: bool, executing: bool = False
    ) -> tuple[bytes, list[bytes]]:
        """Return RESPONSE, and what is to be sent before it.

        It answers a batch with a record of `length` bytes in a block. Nothing more comes for a batch that is `done`;
        where it is `executing`, `executed` is still to follow.
        """
        flags, before = self._settle(number, done)
        if executing and done:
            flags |= messages.EXECUTING
        self.unacknowledged.append(block)
        return pack_response(number, block.segment, block.offset, length, flags), before

    def respond_together(self, block: B, length: int) -> bytes:
        """Return RESPONSES, for a proxy backend with the capability TOGETHER.

        Records of `length` bytes in all, which answer several batches that go on, lie behind each other in a block.
        """
        self.unacknowledged.append(block)
        return pack_responses(block.segment, block.offset, length)

    def fail(self, number: int, code: int, text: str) -> tuple[bytes, list[bytes]]:
        """Return FAIL, which ends a batch with an error for each open request, and what is to be sent before it."""
        flags, before = self._settle(number, True)
        return messages.pack_fail(number, code, text, flags), before

    def executed(self, number: int) -> bytes:
        """Return that the callable is through with a batch, for a proxy backend with the capability EXECUTED."""
        return messages.pack_executed(number)

    def release(self) -> list[bytes]:
        """Return what tells of the blocks that nobody uses any more."""
        released = self.segments.released
        return [pack_release(*self.segments.take_released()) for _ in range(len(released))] if released else []

    def detach(self) -> bytes:
        """Return DETACH; may be called from any thread."""
        self.state = State.DETACHING
        return messages.pack_detach()

    def must_wait(self, in_use: int, length: int) -> bool:
        """Return whether a stream must wait, because its arena, with `in_use` bytes on their way, shall not grow."""
        return self.welcome.decoupled and bool(self.unacknowledged) and in_use + length > STREAM_WINDOW

    def _settle(self, number: int, done: bool) -> tuple[int, list[bytes]]:
        """Return the flags of an answer, and releases of blocks other than the batch's own."""
        if done:
            flags = BATCH_DONE
            own = self.batches.pop(number, None)
            self.paused.pop(number, None)
            self.resumptions.pop(number, None)
        else:
            flags = 0
            own = self.batches.get(number)
        before = _NOTHING
        released = self.segments.released
        while released:
            place = self.segments.take_released()
            if place == own:
                flags |= INPUT_RELEASED
                own = None
                if not done:
                    # From now on, the block may be that of another batch.
                    self.batches[number] = None
            else:
                before = [*before, pack_release(*place)]
        return flags, before


_NOTHING: list[bytes] = []


def _nothing() -> None:
    """Do what nobody has asked for."""
