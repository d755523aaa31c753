"""The worker's end of a connection for calls into the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ..wire import messages
from ..wire.errors import AttachError, ProtocolError
from ..wire.greetings import Hello, Welcome, parse_answer
from ..wire.layout import Capability, MessageType, Operation
from ..wire.messages import BATCH_DONE, INPUT_RELEASED, STREAM, Buffer, Header, pack_call, pack_release, read_header
from .segments import Block, PeerSegments, Place, State

B = TypeVar("B", bound=Block)

_ANSWERS = (messages.RESPONSE, messages.FAIL, messages.RESULT)


class CallsProtocol(Generic[B]):
    """The state of a connection for calls. Not thread-safe, apart from `segments.released`."""

    def __init__(self, hello: Hello, free: Callable[[B], object]) -> None:
        """Begin a connection."""
        self.state = State.GREETING  # of the connection
        self.welcome: Welcome  # what the proxy backend said; there once `state` is ATTACHED
        self.segments = PeerSegments(0)  # those of the proxy backend
        # The calls that are under way, each with the place of its record where the proxy backend still has it.
        self.calls: dict[int, Place | None] = {}
        self._hello = hello
        self._free = free
        self._lent: dict[Place, B] = {}
        self._last = 0

    def greet(self) -> bytes:
        """Return the greeting."""
        return self._hello.pack(MessageType.CALLER)

    def receive(self, packet: Buffer, size: int, descriptors: int = 0) -> Header:
        """Take a packet at the begin of a buffer: check it, note what it says, and return its header."""
        header = read_header(packet, size)
        kind, flags, _, number, _, segment, _, offset, length = header
        if self.state is State.GREETING:
            self.welcome = parse_answer(bytes(packet[:size]))
            if not self.welcome.capabilities & Capability.CALLS:
                raise AttachError("the proxy backend takes no calls into its server")
            self.segments.budget = self.welcome.arena_budget
            self.state = State.ATTACHED
            return header
        if kind == messages.SEGMENT:
            self.segments.announce(segment, length, descriptors)
        elif descriptors:
            raise ProtocolError(f"{messages.name_of(kind)} came with {descriptors} descriptors, and carries none")
        elif kind in _ANSWERS:
            if number not in self.calls:
                raise ProtocolError(f"{messages.name_of(kind)} came for call {number}, which is not under way")
            if kind == messages.RESPONSE:
                self.segments.check(segment, offset, length)
            self._settle(number, flags)
        elif kind == messages.RELEASE:
            self._give_back((segment, offset))
        elif kind == messages.SEGMENT_CLOSE:
            self.segments.close(segment)
        else:
            raise ProtocolError(f"message {kind} came, which a proxy backend does not send over a connection for calls")
        return header

    def call(
        self,
        operation: Operation,
        *,
        block: B | None = None,
        length: int = 0,
        text: str = "",
        subject: int = 0,
        value: float = 0.0,
        parent: tuple[int, int] = (0, 0),
        stream: bool = False,
    ) -> tuple[int, bytes]:
        """Make a call with a record of `length` bytes in a block, into which `next_number` was written.

        Returns its number and the packet.
        """
        place = (0, 0) if block is None else (block.segment, block.offset)
        packet = pack_call(
            self.next_number, operation, (*place, length), text=text, subject=subject, value=value, parent=parent,
            flags=STREAM if stream else 0,
        )  # fmt: skip
        self._last += 1
        if block is not None:
            self._lent[place] = block
        self.calls[self._last] = None if block is None else place
        return self._last, packet

    @property
    def next_number(self) -> int:
        """The number that the next call will have."""
        return self._last + 1

    def cancel(self, number: int) -> bytes | None:
        """Return the packet that cancels a call; `None` if it is over."""
        return messages.pack_cancel(number, 0) if number in self.calls else None

    def release(self) -> list[bytes]:
        """Return the packets that give back blocks which nobody uses any more."""
        released = self.segments.released
        return [pack_release(*released.popleft()) for _ in range(len(released))] if released else []

    def end(self) -> None:
        """Forget all that was under way."""
        self.state = State.CLOSED
        self.calls.clear()
        self._lent.clear()

    def _settle(self, number: int, flags: int) -> None:
        place = self.calls[number]
        if flags & INPUT_RELEASED and place is not None:
            self._give_back(place)
            self.calls[number] = None
        if flags & BATCH_DONE:
            del self.calls[number]

    def _give_back(self, place: Place) -> None:
        block = self._lent.pop(place, None)
        if block is None:
            raise ProtocolError(f"the block at {place[1]} of segment {place[0]} was given back, and was not in use")
        self._free(block)
