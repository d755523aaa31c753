"""Both ends of a connection over ZeroMQ. They differ from those over a unix socket in how memory is told of.

Segments are announced on a socket beside this one, a record may come as a part of its message, and a block goes back by
its name: messages of other blocks may be on their way, so none can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..protocol.proxy import ProxyProtocol, SentBatch
from ..protocol.segments import Block, Place, State
from ..protocol.worker import WorkerProtocol
from ..wire import messages
from ..wire.errors import ProtocolError
from ..wire.greetings import Hello, parse_answer
from ..wire.messages import Buffer, Header, pack_response, read_header

B = TypeVar("B", bound=Block)
T = TypeVar("T", bound=SentBatch)


class ZmqWorkerProtocol(WorkerProtocol[B]):
    """The state of a worker's connection. Not thread-safe, apart from `detach` and `segments.released`."""

    def __init__(self, hello: Hello, free: Callable[[B], object]) -> None:
        super().__init__(hello, free)
        self._lent: dict[Place, B] = {}

    def receive(self, packet: Buffer, size: int, descriptors: int = 0, parts: Sequence[int] = ()) -> Header:
        """Take a packet that came with parts of these sizes, in bytes; see `WorkerProtocol.receive`."""
        if self.state is State.GREETING:
            return super().receive(packet, size, descriptors)
        header = read_header(packet, size)
        kind, _, _, number, _, segment, _, offset, length = header
        if kind == messages.BATCH:
            if segment:
                self.segments.check(segment, offset, length)
            else:
                _check_part(f"batch {number}", length, parts)
            self.batches[number] = (segment, offset) if segment else None
        elif kind == messages.RELEASE:
            block = self._lent.pop((segment, offset), None)
            if block is None:
                raise ProtocolError(f"the block at {offset} of segment {segment} was given back, and was not in use")
            self._free(block)
        elif kind == messages.DETACH:
            self.state = State.CLOSED
        elif kind == messages.REFUSE:
            parse_answer(bytes(packet[:size]))  # raises an error with the reason
        else:
            self._take(header, descriptors)
        return header

    def respond(
        self, number: int, block: B, length: int, *, done: bool, executing: bool = False
    ) -> tuple[bytes, list[bytes]]:
        """See `WorkerProtocol.respond`; `executing` is not known over ZeroMQ."""
        flags, before = self._settle(number, done)
        if block.segment:
            self._lent[block.segment, block.offset] = block
        return pack_response(number, block.segment, block.offset, length, flags), before


class ZmqProxyProtocol(ProxyProtocol[T]):
    """The state of one worker's connection. Not thread-safe, apart from `segments.released`."""

    def receive(
        self, packet: Buffer, size: int, descriptors: int = 0, parts: Sequence[int] = ()
    ) -> tuple[Header, T | None]:
        """Take a packet that came with parts of these sizes, in bytes; see `ProxyProtocol.receive`."""
        header, batch = super().receive(packet, size, descriptors)
        kind, _, _, number, _, segment, _, _, length = header
        if kind == messages.RESPONSE and not segment:
            _check_part(f"its response to batch {number}", length, parts)
        return header, batch

    def _check_record(self, segment: int, offset: int, length: int) -> None:
        if segment:
            super()._check_record(segment, offset, length)

    def _count_response(self) -> None:
        """Do nothing: a message gives the block back when no view of it is left here."""

    def acknowledge(self) -> list[bytes]:
        """Return the packets that give back the worker's blocks which nobody uses here."""
        self.acknowledgement_due = False
        released = self.segments.released
        return [messages.pack_release(*released.popleft()) for _ in range(len(released))]


def _check_part(what: str, length: int, parts: Sequence[int]) -> None:
    if len(parts) != 1 or parts[0] != length:
        came = ", ".join(map(str, parts)) or "none"
        raise ProtocolError(f"{what} announces a record of {length} bytes, its parts have: {came}")
