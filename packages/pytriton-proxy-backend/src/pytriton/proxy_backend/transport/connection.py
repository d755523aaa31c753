"""The worker's end of a connection over a unix socket: moves packets, maps memory, waits.

What the packets mean is `protocol.worker`'s.
"""

from __future__ import annotations

import array
import contextlib
import math
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..errors import ArenaFullError, AttachError, ConnectionLostError, ProtocolError
from ..model import ModelSpec
from ..protocol.worker import WorkerProtocol
from ..system.forks import close_in_child
from ..wire.batch import Batch, BatchReader
from ..wire.layout import CAPABILITIES, MAX_PACKET, RECORD_LENGTH_OFFSET, Capability, ErrorCode, align
from ..wire.limits import ARENA_TIMEOUT_S, LARGEST_COPIED_BYTES
from ..wire.messages import BATCH, CANCEL, SEGMENT, SEGMENT_CLOSE, pack_segment, pack_segment_close
from ..wire.record import Array, Record
from .arena import (
    NewSegment,
    OwnArena,
    OwnedBlock,
    PeerArena,
    address_of,
    address_of_payloads,
    lent_size,
)
from .link import GREETING_TICK_S, GREETING_TIMEOUT_S, SEND_TIMEOUT_S, TICK_S, Link, hello_for
from .pacing import PacedConnection
from .places import connect_to
from .together import TogetherConnection

if TYPE_CHECKING:
    from pytriton.proxy.outputs import Forms

# Room for more descriptors than any message carries, so that a peer's surplus is seen and closed.
ANCILLARY_SIZE = socket.CMSG_SPACE(4 * array.array("i").itemsize)
_U64 = struct.Struct("<Q")
# With MSG_TRUNC, the size of a packet that is too long is told, too.
RECEIVE_FLAGS = socket.MSG_CMSG_CLOEXEC | socket.MSG_TRUNC


class GreetingTimeoutError(AttachError):
    """The proxy backend did not answer a greeting in time: it is slow or stopped, and may come back."""


def descriptors_of(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came with a packet."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def timeval(seconds: float) -> bytes:
    """Return a time in seconds as the kernel takes it for the timeouts of a socket."""
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1e6))


def _connect(endpoint: Path) -> socket.socket:
    """Return a socket that is connected, and waits for the greeting at most that long."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    close_in_child(made)
    try:
        made.settimeout(GREETING_TIMEOUT_S)
        connect_to(made, endpoint)
    except TimeoutError as error:
        made.close()
        raise GreetingTimeoutError(_late(endpoint)) from error
    except BaseException:
        made.close()
        raise
    return made


def _late(endpoint: Path) -> str:
    return f"the proxy backend at {endpoint} did not answer a greeting within {GREETING_TIMEOUT_S:g} s"


class Connection(PacedConnection, TogetherConnection, Link):
    """An attached worker of a native proxy. Not thread-safe, apart from `detach` and `shutdown`."""

    inputs: PeerArena  # the arena of the proxy backend
    outputs: OwnArena  # that of this side

    def __init__(
        self,
        endpoint: Path,
        name: str,
        *,
        max_in_flight: int = 1,
        model: ModelSpec | None = None,
        capabilities: int = CAPABILITIES,
        stopping: threading.Event | None = None,
    ) -> None:
        """Connect and greet; `stopping` ends the wait for the answer as if it had not come in time.

        `FileNotFoundError` and `ConnectionRefusedError` mean that nobody listens there yet, `ConnectionResetError` that
        the proxy backend went away before it answered; it may also not answer in time, speak another major version, or
        refuse.
        """
        # First: where nobody listens, an attempt costs no more than that.
        self._socket = _connect(endpoint)
        self.buffer = bytearray(MAX_PACKET)  # where packets are received
        self._views = [memoryview(self.buffer)]
        self.outputs = OwnArena(0)
        Link.__init__(self, WorkerProtocol(hello_for(name, model, max_in_flight, capabilities), self.outputs.release))
        TogetherConnection.__init__(self)
        self.inputs = PeerArena(self.protocol.segments.released)
        try:
            self._socket.send(self.protocol.greet())
            packet = self._receive_answer(stopping)
            if not packet:
                # Most likely its server ends just now: as good as nobody listening, so the worker tries again.
                raise ConnectionResetError("the proxy backend closed the connection instead of answering the greeting")
            self.protocol.receive(packet, len(packet))
            # The kernel's own timeouts: unlike Python's they cost no call of poll before each message.
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(TICK_S))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(SEND_TIMEOUT_S))
        except TimeoutError as error:
            self._socket.close()
            raise GreetingTimeoutError(_late(endpoint)) from error
        except BaseException:
            self._socket.close()
            raise
        self.outputs.budget = self.welcome.arena_budget
        self.reader = BatchReader(self.welcome.batching)
        self._may_refer = bool(self.welcome.capabilities & Capability.REFERENCES)

    def _receive_answer(self, stopping: threading.Event | None) -> bytes:
        deadline = time.monotonic() + GREETING_TIMEOUT_S
        self._socket.settimeout(GREETING_TICK_S)
        while True:
            try:
                return self._socket.recv(MAX_PACKET)
            except TimeoutError:
                if time.monotonic() > deadline or (stopping is not None and stopping.is_set()):
                    raise

    # ---- receiving ------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for its readability."""
        return self._socket.fileno()

    def receive(self) -> Batch | None:
        """See `Link.receive`."""
        while True:
            if (batch := self.next_pending()) is not None:
                return batch
            try:
                if not self._read():
                    return None
            except BlockingIOError:
                self.tick()
                self.rest()

    def rest(self) -> None:
        """See `Link.rest`."""
        if self.is_settled:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            # Without a limit: whatever the proxy backend sends, its end, and `shutdown` end it.
            poller.poll()

    @property
    def is_settled(self) -> bool:
        """See `Link.is_settled`."""
        segments, outputs = self.protocol.segments, self.outputs
        is_done = not (self.protocol.batches or segments.held or segments.released)
        return is_done and not (outputs.has_idle() or outputs.is_lent_out)

    def next_pending(self) -> Batch | None:
        """Return a batch that was read already, where there is one."""
        return self._pending.popleft() if self._pending else None

    @property
    def has_pending(self) -> bool:
        """Whether a batch was read already, by whoever waited for room."""
        return bool(self._pending)

    def poll(self) -> list[Batch] | None:
        """Read what is there without waiting; the batches among it, `None` when the connection is closed."""
        try:
            while self._read(socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return self._take_pending()
        return None

    def _read(self, flags: int = 0) -> bool:
        try:
            size, ancillary, _, _ = self._socket.recvmsg_into(self._views, ANCILLARY_SIZE, flags | RECEIVE_FLAGS)
        except BlockingIOError:
            raise
        except ConnectionResetError:
            return False  # closed by the proxy backend with messages of ours unread
        except OSError as error:
            raise ConnectionLostError(f"the connection to the proxy backend broke: {error}") from error
        return self.take(size, descriptors_of(ancillary) if ancillary else [])

    def take(self, size: int, fds: list[int]) -> bool:
        """Take a packet of `size` bytes that lies in `buffer`; says whether the connection goes on.

        A size of 0 is the end of the connection.
        """
        try:
            if size == 0:
                return False
            header = self.protocol.receive(self.buffer, size, len(fds))
            kind, _, _, number, _, segment, index, offset, length = header
            if kind == BATCH:
                block, memory = self.inputs.block(segment, offset, length)
                self._take_batch(block, memory, offset, number)
            elif kind == SEGMENT:
                self.inputs.attach(segment, fds.pop(), length)
            elif kind == SEGMENT_CLOSE:
                self.inputs.detach(segment)
            elif kind == CANCEL and self.on_cancel is not None:
                self.on_cancel(number, index)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    # ---- sending --------------------------------------------------------------------------------------------------

    def respond(self, number: int, record: Record, *, done: bool, executing: bool = False) -> None:
        """See `Link.respond`."""
        self.flush()
        self._check_sent(number)
        length = record.layout.length
        block = self.outputs.block_around(record)
        if block is not None:
            record.write_around(block.memory, block.offset, number)
        elif done and (inputs := self._inputs_in(number, record)) is not None:
            block, length = self._write_inputs(number, record, *inputs)
        else:
            block = self._room_for(length)
            record.write(block.memory, block.offset, number)
        # This comes late because the record may have held the last view of the batch's inputs.
        packet, releases = self.protocol.respond(number, block, length, done=done, executing=executing)
        if releases:
            self._send_all(releases)
        try:
            self._socket.send(packet)
        except OSError as error:
            self.lost(error)

    def fail(self, number: int, text: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """See `Link.fail`."""
        self.flush()
        self._unsent.pop(number, None)
        super().fail(number, text, code)

    def _inputs_in(self, number: int, record: Record) -> tuple[mmap.mmap, int, int] | None:
        """Return where the payloads of a record lie, if they are large, and inputs of its batch.

        That is the segment, where the record of the batch begins in it, and where the first payload begins in that.
        """
        if not self._may_refer or record.layout.payload_bytes <= LARGEST_COPIED_BYTES:
            return None
        place = self.protocol.batches.get(number)
        memory = None if place is None else self.inputs.segment(place[0])
        if place is None or memory is None or (address := address_of_payloads(record)) is None:
            return None
        start = place[1]
        (length,) = _U64.unpack_from(memory, start + RECORD_LENGTH_OFFSET)
        offset = address - address_of(memory) - start
        return (memory, start, offset) if 0 <= offset <= length - record.layout.span else None

    def _write_inputs(
        self, number: int, record: Record, memory: mmap.mmap, start: int, offset: int
    ) -> tuple[OwnedBlock, int]:
        """Write a record whose payloads are inputs, see `_inputs_in`; returns where, and its length.

        They stay where they are once nobody here can write to them any more. Until then they are copied.
        """
        record.payloads = ()
        layout = record.layout
        if self.protocol.batches.get(number) in self.protocol.segments.released:
            block = self._room_for(len(layout.metadata))
            return block, record.write_reference(block.memory, block.offset, number, offset)
        block = self._room_for(layout.length)
        record.write_metadata(block.memory, block.offset, number)
        begin = block.offset + layout.places[0].offset
        target: Array = np.ndarray(layout.span, np.uint8, block.memory, begin)
        target[...] = np.ndarray(layout.span, np.uint8, memory, start + offset)
        return block, layout.length

    def _room_for(self, length: int) -> OwnedBlock:
        return self.outputs.allocate(length) or self._make_room(length)

    def lend_outputs(self, names: Sequence[str], forms: Forms) -> dict[str, Array] | None:
        """See `Link.lend_outputs`."""
        ordered = sorted(forms, key=lambda name: names.index(name) if name in names else len(names))
        lengths = [_nbytes(*forms[name]) for name in ordered]
        room = sum(map(align, lengths))
        if sum(lengths) <= LARGEST_COPIED_BYTES or any(form[1].hasobject for form in forms.values()):
            return None
        if self.protocol.must_wait(self.outputs.in_use, room):
            return None
        block = self.outputs.lend(room)
        if block is None:
            try:
                self._announce(self.outputs.add_segment(lent_size(room)))
            except ArenaFullError:
                return None
            block = self.outputs.lend(room)
        made: dict[str, Array] = {}
        offset = 0
        for name, length in zip(ordered, lengths, strict=True):
            made[name] = np.ndarray(*forms[name], buffer=block, offset=offset)
            offset += align(length)
        return {name: made[name] for name in forms}

    def executed(self, number: int) -> None:
        """Say that the next batch may come, though this one has not all of its responses; see `docs/protocol.md`."""
        self._send_all([self.protocol.executed(number)])

    def _trim(self) -> list[int]:
        return self.outputs.trim(self.welcome.arena_idle_s) if self.outputs.has_idle() else []

    def _make_room(self, length: int) -> OwnedBlock:
        # The responses that were acknowledged meanwhile may have made enough room.
        self._read_acknowledgements()
        block = self.outputs.allocate(length)
        waited = 0.0
        while block is None:
            if self.protocol.must_wait(self.outputs.in_use, length) and waited < ARENA_TIMEOUT_S:
                waited += self._wait_for_room()
            elif self.outputs.can_grow(length):
                self._announce(self.outputs.add_segment(length))
            elif length <= self.outputs.budget and (unused := self.outputs.drop_unused()):
                # Segments that were made for smaller outputs make way for a larger one.
                self._send_all(map(pack_segment_close, unused))
            elif length > self.outputs.budget or not self.protocol.unacknowledged or waited >= ARENA_TIMEOUT_S:
                self.outputs.add_segment(length)  # raises, with the numbers
            else:
                waited += self._wait_for_room()
            block = self.outputs.allocate(length)
        return block

    def _wait_for_room(self) -> float:
        """Read one message; returns how long nothing came, in seconds."""
        try:
            self._read_or_lose(0)
        except BlockingIOError:
            return TICK_S
        return 0.0

    def _read_acknowledgements(self) -> None:
        try:
            while True:
                self._read_or_lose(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return

    def _read_or_lose(self, flags: int) -> None:
        try:
            if not self._read(flags):
                raise ConnectionLostError("the proxy backend closed the connection")
        except ProtocolError as error:
            # This is not the fault of the callable, and its callers must not be told that it is.
            raise ConnectionLostError(f"the proxy backend broke the protocol: {error}") from error

    def _announce(self, segment: NewSegment) -> None:
        try:
            socket.send_fds(self._socket, [pack_segment(segment.number, segment.size)], [segment.fd])
        except OSError as error:
            self.lost(error)
        finally:
            os.close(segment.fd)

    def _send_all(self, packets: Iterable[bytes]) -> None:
        try:
            for packet in packets:
                self._socket.send(packet)
        except OSError as error:
            self.lost(error)

    def lost(self, error: OSError) -> NoReturn:
        """Raise `ConnectionLostError` for an error of the socket."""
        if isinstance(error, BlockingIOError):
            raise ConnectionLostError(
                f"the proxy backend read nothing from its socket for {SEND_TIMEOUT_S:g} s"
            ) from error
        raise ConnectionLostError(f"the connection to the proxy backend broke: {error}") from error

    # ---- leaving --------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Ask for no more batches; the proxy backend closes the connection when the last one is answered."""
        self._send_all([self.protocol.detach()])

    def shutdown(self) -> None:
        """End the connection at once; a `receive` in another thread returns."""
        # The connection may be closed already, which is what this is for.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def hangup_waiter(self) -> Callable[[], None]:
        """Return a function that returns when the proxy backend has detached this worker or the socket is shut down."""
        # A descriptor of its own: the number of one that is closed meanwhile may come to mean something else.
        watched = self._socket.dup()
        close_in_child(watched)

        def wait() -> None:
            with watched:
                poller = select.poll()
                poller.register(watched, select.POLLRDHUP)
                # Without a limit: whichever side shuts the connection down, this returns.
                poller.poll()

        return wait

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize
