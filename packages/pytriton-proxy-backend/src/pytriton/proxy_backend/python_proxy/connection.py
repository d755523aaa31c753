"""`ZmqConnection`: the worker's end of a connection to the Python proxy, protocol 1 over ZeroMQ.

Records lie in shared memory where worker and proxy have some, else each is a part of its message.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArenaFullError, AttachError, ConnectionLostError
from ..model import ModelSpec
from ..protocol.segments import State
from ..protocol.worker import STREAM_WINDOW
from ..transport.arena import OwnedBlock, ViewedBlock
from ..transport.link import GREETING_TIMEOUT_S, SEND_TIMEOUT_S, TICK_S, Link, hello_for
from ..wire.batch import Batch, BatchMetadata, BatchReader
from ..wire.layout import ErrorCode
from ..wire.messages import BATCH, CANCEL, SEGMENT_CLOSE, named_segment
from ..wire.record import Record
from .keys import CurveKeys
from .memory import MemoryCaller, SharedMemory
from .protocol import ZmqWorkerProtocol
from .sockets import UnreachableError, WouldBlockError, ZmqSocket

if TYPE_CHECKING:
    from pytriton.proxy.outputs import Forms

_ROOM_POLL_S = 0.1
# If a batch takes this much longer than its limit, the proxy has dropped the worker.
_GRACE_S = 1.0
_ALIGNMENT = 16


class ZmqConnection(Link):
    """An attached worker of a Python proxy. Not thread-safe, apart from `detach` and `shutdown`."""

    protocol: ZmqWorkerProtocol[OwnedBlock]

    def __init__(
        self,
        address: str,
        name: str,
        *,
        max_in_flight: int = 1,
        model: ModelSpec | None = None,
        keys: CurveKeys | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        """Connect and greet; `stopping` ends the wait for the answer as if it had not come in time."""
        # The records that came inside messages, by batch, where requests can be cancelled.
        self._parts: dict[int, tuple[ViewedBlock, BatchMetadata]] = {}
        self._active_at: dict[int, float] = {}  # when each batch came, or was last answered
        self._address = address
        self._max_in_flight = max_in_flight
        self._detach_wanted = False
        self._shut_down = threading.Event()
        self._memory: SharedMemory | None = None
        self._link = ZmqSocket(address, listen=False, client_keys=keys)
        caller = MemoryCaller(address)
        try:
            hello = hello_for(name, model, max_in_flight, memory_token=caller.token)
            super().__init__(ZmqWorkerProtocol(hello, self._free))
            self._greet(stopping)
            self._memory = caller.accepted(self.protocol.segments)
        except BaseException:
            caller.close()
            self._link.close()
            raise
        self.reader = BatchReader(self.welcome.batching)

    def _greet(self, stopping: threading.Event | None) -> None:
        hello = self.protocol.greet()
        deadline = time.monotonic() + GREETING_TIMEOUT_S
        sent = False
        while time.monotonic() < deadline and not (stopping is not None and stopping.is_set()):
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
                self.protocol.receive(message.packet, len(message.packet))
                return
            self._link.wait(_ROOM_POLL_S)
        raise ConnectionRefusedError(f"{self._address} did not answer a greeting within {GREETING_TIMEOUT_S:g} s")

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
        """Read the messages that have come, without waiting; `None` if the connection is closed."""
        self._link.wait(0)
        if not self._read_all():
            return None
        return self._take_pending()

    def _read_all(self) -> bool:
        """Read the messages that have come; return whether the connection goes on."""
        if self._shut_down.is_set():
            return False
        if self._detach_wanted:
            self._detach_wanted = False
            self._send(self.protocol.detach())
        gone = any(event.kind == "gone" for event in self._link.events())
        while (message := self._link.receive()) is not None:
            if not self._take(message.packet, message.parts):
                return False
        if gone and not self._pending:
            raise ConnectionLostError(f"the connection to the proxy at {self._address} broke")
        return True

    def _take(self, packet: bytes, parts: list[memoryview]) -> bool:
        if self._memory is not None:
            self._memory.read_segments_until(named_segment(packet))
        header = self.protocol.receive(packet, len(packet), 0, [len(part) for part in parts])
        kind, _, _, number, _, segment, index, offset, length = header
        if kind == BATCH:
            self._active_at[number] = time.monotonic()
            if self._memory is not None and segment:
                self._take_batch(*self._memory.view(segment, offset, length), offset, number)
            else:
                self._take_part(number, parts[0])
        elif kind == CANCEL:
            self._cancel(number, index)
        elif kind == SEGMENT_CLOSE and self._memory is not None:
            self._memory.forget(segment)
        return self.protocol.state is not State.CLOSED

    def _take_part(self, number: int, part: memoryview) -> None:
        memory: Any = (ctypes.c_char * len(part)).from_buffer(part)
        if ctypes.addressof(memory) % _ALIGNMENT:
            # Small parts may lie at any address; large ones have memory of their own, which is aligned.
            memory = (ctypes.c_char * len(part)).from_buffer(bytearray(part))
        block = ViewedBlock.__new__(ViewedBlock, (len(part),), np.uint8, memory, 0)
        block.released = _NOBODY
        block.place = (0, 0)
        batch = self._take_batch(block, memory, 0, number)
        if batch is not None:
            self._parts[number] = (block, batch.metadata)

    def _cancel(self, number: int, index: int) -> None:
        part = self._parts.get(number)
        if part is not None:  # for shared memory, the proxy has done it
            block, metadata = part
            at = metadata.cancelled_offset(index)
            if at < len(block):
                block[at] = 1
        if self.on_cancel is not None:
            self.on_cancel(number, index)

    # ---- sending --------------------------------------------------------------------------------------------------

    def respond(self, number: int, record: Record, *, done: bool, executing: bool = False) -> None:
        """Write a record and send it, see `ResponseSink`; `executing` is not known over ZeroMQ."""
        length = record.layout.length
        block = self._make_room(length)
        record.write(block.memory, block.offset, number)
        if done:
            self._forget(number)
        else:
            self._active_at[number] = time.monotonic()
        packet, releases = self.protocol.respond(number, block, length, done=done)
        self._send_all(releases)
        self._send(packet, *(() if block.segment else (memoryview(block.memory)[:length],)))

    def lend_outputs(self, names: Sequence[str], forms: Forms) -> None:
        """Make no arrays, because a Python proxy copies or sends outputs in any case."""

    def fail(self, number: int, text: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """End a batch with an error for each open request; this needs no arena."""
        self._forget(number)
        super().fail(number, text, code)

    def _forget(self, number: int) -> None:
        self._parts.pop(number, None)
        self._active_at.pop(number, None)

    def _trim(self) -> list[int]:
        return [] if self._memory is None else self._memory.trim(self.welcome.arena_idle_s)

    def _free(self, block: OwnedBlock) -> None:
        if self._memory is not None:
            self._memory.give_back(block)

    def _make_room(self, length: int) -> OwnedBlock:
        if self._memory is not None:
            if (block := self._memory.allocate(length, grow=False)) is not None:
                return block
            # The memory that came back meanwhile may be enough.
            if not self._read_all():
                raise ConnectionLostError(f"the proxy at {self._address} ended the connection")
            # A stream that is faster than its reader does not fill memory: its messages wait for each other.
            window = STREAM_WINDOW if self.welcome.decoupled else None
            block = self._memory.allocate(length, at_most=window)
            if block is not None:
                return block
        budget = self.welcome.arena_budget
        if length <= budget:
            return OwnedBlock(0, 0, bytearray(length))  # type: ignore[arg-type] # written to as a mapping is
        raise ArenaFullError(
            f"{length} bytes of outputs do not fit: an answer may have {budget} bytes. Raise arena_budget_bytes of the "
            f"model, or return smaller outputs",
            needed=length,
            budget=budget,
            in_use=0,
        )

    def _send_all(self, packets: Iterable[bytes]) -> None:
        for packet in packets:
            self._send(packet)

    def _send(self, packet: bytes, *parts: memoryview) -> None:
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
                if waited >= SEND_TIMEOUT_S:
                    raise ConnectionLostError(
                        f"the proxy at {self._address} read nothing for {SEND_TIMEOUT_S:g} s"
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

    def hangup_waiter(self) -> Callable[[], None]:
        """Return a function that waits until the connection is shut down.

        It also returns when a batch took so long that the proxy has dropped this worker.
        """
        # A worker with several batches gets a moment more.
        limit_s = (self.welcome.execution_timeout_s or 0.0) + _GRACE_S * (1 if self._max_in_flight == 1 else 2)

        def wait() -> None:
            while not self._shut_down.wait(_ROOM_POLL_S):
                since = min(tuple(self._active_at.values()), default=None)
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
