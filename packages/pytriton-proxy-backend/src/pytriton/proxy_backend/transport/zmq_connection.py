"""The worker's end of a connection to the Python proxy: protocol 1 over ZeroMQ.

Records lie in shared memory where worker and proxy have some, else each is a part of its message.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ArenaFullError, AttachError, ConnectionLostError, ProtocolError
from ..model import ModelSpec
from ..wire import layout
from ..wire.batch import Batch, BatchMetadata, BatchReader
from ..wire.greetings import parse_answer
from ..wire.layout import MessageFlag, MessageType
from ..wire.record import Record
from ..zmq_keys import CurveKeys
from .arena import InputBlock, OwnedBlock
from .connection import STREAM_WINDOW, TICK_S, Connection, hello_for
from .zmq_memory import MemoryCaller, SharedMemory
from .zmq_sockets import UnreachableError, WouldBlockError, ZmqSocket

_GREETING_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 30.0
_ROOM_POLL_S = 0.1
# How much later than its time limit a batch that is still being worked on means that the worker was let go.
_GRACE_S = 1.0
_ALIGNMENT = 16


class ZmqConnection(Connection):
    """An attached worker of a Python proxy. Not thread-safe, apart from `detach` and `shutdown`."""

    def __init__(
        self,
        address: str,
        name: str,
        *,
        max_in_flight: int = 1,
        model: ModelSpec | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        """Connect and greet.

        Args:
            address: Where the Python proxy listens, `tcp://host:port` or `ipc:///path`.
            name: What the worker calls itself.
            max_in_flight: Batches that it takes at once.
            model: What it serves: a proxy of another model, or of other tensors, refuses it.
            keys: The keys of the worker, `None`: no encryption.

        Raises:
            ConnectionRefusedError: If nobody listens there yet, or the proxy goes away before it has answered.
            KeyFileError: If a key cannot be read.
            VersionMismatchError: If the proxy speaks another major version.
            AttachError: If it refuses for another reason.
        """
        self._pending: collections.deque[Batch] = collections.deque()
        # Of each batch that is being worked on: what came as a part of its message, or its place in shared memory.
        self._parts: dict[int, tuple[InputBlock, BatchMetadata]] = {}
        self._held: dict[int, tuple[int, int]] = {}
        self._since: dict[int, float] = {}  # when something was last done for it
        self.on_cancel: Callable[[int, int], None] | None = None
        self.on_unreadable: Callable[[], None] | None = None
        self._address = address
        self._max_in_flight = max_in_flight
        self._detach_wanted = False
        self._shut_down = threading.Event()
        self._memory: SharedMemory | None = None
        self._link = ZmqSocket(address, listen=False, client_keys=keys)
        caller = MemoryCaller(address)
        try:
            self.welcome = self._greet_proxy(name, max_in_flight, model, caller.token)
            self._memory = caller.accepted(self.welcome.arena_budget)
        except BaseException:
            caller.close()
            self._link.close()
            raise
        self._reader = BatchReader(self.welcome.batching)
        self._outputs = _Outputs(self.welcome.arena_budget, self._memory)  # type: ignore[assignment]

    def _greet_proxy(self, name: str, max_in_flight: int, model: ModelSpec | None, token: bytes) -> Any:
        hello = hello_for(name, model, max_in_flight, token).pack()
        deadline = time.monotonic() + _GREETING_TIMEOUT_S
        sent = False
        while time.monotonic() < deadline:
            if not sent:
                try:
                    self._link.send(hello)
                    sent = True
                except (WouldBlockError, UnreachableError):
                    sent = False  # not connected yet
            for event in self._link.events():
                if event.kind == "refused":
                    raise AttachError(
                        f"{self._address} refused this worker's keys, or its own are not those in server_key_file: is "
                        f"the worker's public key in the proxy's folder of keys?"
                    )
                if event.kind == "gone":
                    raise ConnectionRefusedError(f"nobody accepts this worker at {self._address}")
            message = self._link.receive()
            if message is not None:
                return parse_answer(message.packet)
            self._link.wait(_ROOM_POLL_S)
        raise ConnectionRefusedError(f"{self._address} did not answer a greeting within {_GREETING_TIMEOUT_S:g} s")

    # ---- receiving ------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return a descriptor to wait for: when it is readable, `poll` may find something."""
        return self._link.fileno()

    def receive(self) -> Batch | None:
        """Wait for the next batch; `None` when the proxy has ended the connection."""
        while not self._pending:
            if not self._read_all():
                return None
            if not self._pending and not self._link.wait(TICK_S):
                self.tick()
        return self._pending.popleft()

    def poll(self) -> list[Batch] | None:
        """Read what is there without waiting; `None` when the connection is closed."""
        self._link.wait(0)
        if not self._read_all():
            return None
        batches = list(self._pending)
        self._pending.clear()
        return batches

    def _read_all(self) -> bool:
        """Read what is there; says whether the connection goes on."""
        if self._shut_down.is_set():
            return False
        if self._detach_wanted:
            self._detach_wanted = False
            self._send(MessageType.DETACH, 0, 0, 0, 0, 0, 0)
        gone = any(event.kind == "gone" for event in self._link.events())
        while (message := self._link.receive()) is not None:
            if not self._take(message.packet, message.parts):
                return False
        if gone and not self._pending:
            raise ConnectionLostError(f"the connection to the proxy at {self._address} broke")
        return True

    def _take(self, packet: bytes, parts: list[memoryview]) -> bool:
        if len(packet) < layout.MESSAGE.size:
            raise ProtocolError(f"a packet of {len(packet)} bytes came, a message has {layout.MESSAGE.size} or more")
        kind, _, size, number, _, segment, index, offset, length = layout.MESSAGE.unpack_from(packet)
        if size != len(packet):
            raise ProtocolError(f"a message says that it has {size} bytes, {len(packet)} came")
        if kind == MessageType.BATCH:
            if segment:
                self._take_block(number, segment, offset, length)
                return True
            if len(parts) != 1 or len(parts[0]) != length:
                sizes = ", ".join(str(len(part)) for part in parts) or "none"
                raise ProtocolError(f"batch {number} announces a record of {length} bytes, its parts have: {sizes}")
            self._take_record(number, parts[0])
        elif kind == MessageType.CANCEL:
            self._cancel(number, index)
        elif kind == MessageType.RELEASE:
            self._shared().take_back(segment, offset)
        elif kind == MessageType.SEGMENT_CLOSE:
            self._shared().forget(segment)
        elif kind == MessageType.DETACH:
            return False
        elif kind == MessageType.REFUSE:
            parse_answer(packet)  # raises, with the reason
        else:
            raise ProtocolError(f"message {kind} came, which a proxy does not send to an attached worker")
        return True

    def _shared(self) -> SharedMemory:
        if self._memory is None:
            raise ProtocolError("a message came about shared memory, of which there is none")
        return self._memory

    def _take_block(self, number: int, segment: int, offset: int, length: int) -> None:
        block, memory = self._shared().view(segment, offset, length)
        self._held[number] = block.place
        self._take_batch_at(block, memory, number)

    def _take_record(self, number: int, part: memoryview) -> None:
        memory: Any = (ctypes.c_char * len(part)).from_buffer(part)
        if ctypes.addressof(memory) % _ALIGNMENT:
            # Small parts lie anywhere in what came; large ones have memory of their own, which is aligned.
            memory = (ctypes.c_char * len(part)).from_buffer(bytearray(part))
        block = InputBlock.__new__(InputBlock, (len(part),), np.uint8, memory, 0)
        block.released = _NOBODY
        block.place = (0, 0)
        batch = self._take_batch_at(block, memory, number)
        if batch is not None:
            self._parts[number] = (block, batch.metadata)

    def _take_batch_at(self, block: InputBlock, memory: Any, number: int) -> Batch | None:
        self._since[number] = time.monotonic()
        try:
            batch = self._reader.read(block, memory, block.place[1], number)
        except (ProtocolError, TypeError) as error:
            if self.on_unreadable is not None:
                self.on_unreadable()
            self.fail(number, f"the worker cannot read the batch: {error}", layout.ErrorCode.INVALID_ARG)
            return None
        self._pending.append(batch)
        return batch

    def _cancel(self, number: int, index: int) -> None:
        part = self._parts.get(number)
        if part is not None:  # in shared memory, the proxy has done it
            block, metadata = part
            at = metadata.cancelled_offset(index)
            if at < len(block):
                block[at] = 1
        if self.on_cancel is not None:
            self.on_cancel(number, index)

    # ---- sending --------------------------------------------------------------------------------------------------

    def respond(self, number: int, record: Record, *, done: bool) -> None:
        """Write a record and send it, see `ResponseSink`."""
        length = record.layout.length
        segment, offset, memory = block = self._outputs.allocate(length) or self._make_room(length)
        record.write(memory, offset, number)
        flags = self._settle(number, done)
        if done:
            flags |= MessageFlag.BATCH_DONE
        parts = () if segment else (memoryview(memory)[:length],)
        if segment:
            self._shared().lend(block, number)
        self._send_parts(
            layout.MESSAGE.pack(
                MessageType.RESPONSE, flags, layout.MESSAGE.size, number, 0, segment, 0, offset, length
            ),
            *parts,
        )

    def _settle(self, number: int, done: bool) -> int:
        own = self._held.get(number)
        if done:
            self._parts.pop(number, None)
            self._held.pop(number, None)
            self._since.pop(number, None)
        else:
            self._since[number] = time.monotonic()
        flags = 0 if own is not None else int(MessageFlag.INPUT_RELEASED)
        for place in () if self._memory is None else self._memory.unused():
            if done and place == own:
                flags = int(MessageFlag.INPUT_RELEASED)
            else:
                self._send(MessageType.RELEASE, 0, 0, place[0], 0, place[1], 0)
        return flags

    def tick(self) -> None:
        """Do what is due while nothing comes: release blocks, and memory that nobody uses.

        ZeroMQ itself sees to the link.
        """
        if self._memory is None:
            return
        for segment, offset in self._memory.unused():
            self._send(MessageType.RELEASE, 0, 0, segment, 0, offset, 0)
        for number in self._memory.trim(self.welcome.arena_idle_s):
            self._send(MessageType.SEGMENT_CLOSE, 0, 0, number, 0, 0, 0)

    def _make_room(self, length: int) -> OwnedBlock:
        if self._memory is not None:
            # What is free again meanwhile may be enough.
            if not self._read_all():
                raise ConnectionLostError(f"the proxy at {self._address} ended the connection")
            # A stream that is faster than its reader fills no more memory: its messages wait for each other.
            window = STREAM_WINDOW if self.welcome.decoupled else None
            block = self._memory.allocate(length, at_most=window)
            if block is not None:
                return block
        budget = self.welcome.arena_budget
        if length <= budget:
            return _part(length)
        raise ArenaFullError(
            f"{length} bytes of outputs do not fit: an answer may have {budget} bytes. Raise arena_budget_bytes of the "
            f"model, or return smaller outputs",
            needed=length,
            budget=budget,
            in_use=0,
        )

    def _send(
        self, kind: int, flags: int, number: int, segment: int, index: int, offset: int, length: int, body: bytes = b""
    ) -> None:
        packet = layout.MESSAGE.pack(
            kind, flags, layout.MESSAGE.size + len(body), number, 0, segment, index, offset, length
        )
        self._send_parts(packet + body)

    def _send_parts(self, packet: bytes, *parts: memoryview) -> None:
        waited = 0.0
        while True:
            try:
                self._link.send(packet, *parts)
                return
            except UnreachableError as error:
                raise ConnectionLostError(f"the connection to the proxy at {self._address} broke") from error
            except WouldBlockError as error:
                if any(event.kind == "gone" for event in self._link.events()):
                    raise ConnectionLostError(f"the connection to the proxy at {self._address} broke") from error
                if waited >= _SEND_TIMEOUT_S:
                    raise ConnectionLostError(
                        f"the proxy at {self._address} read nothing for {_SEND_TIMEOUT_S:g} s"
                    ) from error
            self._link.wait_writable(_ROOM_POLL_S)
            waited += _ROOM_POLL_S

    # ---- leaving --------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Ask for no more batches, as soon as the worker's thread looks; the proxy then ends the connection."""
        self._detach_wanted = True
        self._link.wake()

    def shutdown(self) -> None:
        """End the connection as soon as the worker's thread looks."""
        self._shut_down.set()
        self._link.wake()

    def let_go_waiter(self) -> Callable[[], None]:
        """Return a function that returns when a batch has taken so long that the proxy has let this worker go.

        It returns as well when the connection is shut down.
        """
        # One that takes several batches gets a moment more.
        limit_s = (self.welcome.execution_timeout_s or 0.0) + _GRACE_S * (1 if self._max_in_flight == 1 else 2)

        def wait() -> None:
            while not self._shut_down.wait(_ROOM_POLL_S):
                since = min(tuple(self._since.values()), default=None)
                if since is not None and time.monotonic() - since > limit_s:
                    return

        return wait

    def close(self) -> None:
        """Close the sockets."""
        self._shut_down.set()
        self._link.close()
        if self._memory is not None:
            self._memory.close()


_NOBODY: collections.deque[tuple[int, int]] = collections.deque(maxlen=0)


def _part(length: int) -> OwnedBlock:
    """Return memory for an answer that goes out as a part of its message."""
    return OwnedBlock(0, 0, bytearray(length))  # type: ignore[arg-type] # written to as a mapping is


class _Outputs:
    """Where answers are written, as far as there is room at once."""

    def __init__(self, budget: int, memory: SharedMemory | None) -> None:
        self._budget = budget
        self._memory = memory

    def allocate(self, length: int) -> OwnedBlock | None:
        if self._memory is not None:
            return self._memory.allocate(length, grow=False)
        return _part(length) if length <= self._budget else None
