"""The worker's end of one connection: greeting, messages, both arenas."""

from __future__ import annotations

import array
import collections
import contextlib
import logging
import os
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from ..errors import AttachError, ConnectionLostError, ProtocolError
from ..model import ModelSpec
from ..system.forks import let_go_in_child
from ..wire import layout
from ..wire.batch import Batch, BatchReader
from ..wire.greetings import Hello, Welcome, parse_answer
from ..wire.layout import MessageFlag, MessageType
from ..wire.record import Record
from .arena import NewSegment, OwnArena, OwnedBlock, PeerArena

logger = logging.getLogger(__name__)

_GREETING_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 30.0
# How long a full output arena may wait for the proxy backend to read what is in it.
_ARENA_TIMEOUT_S = 30.0
# How much of its budget the arena may take for the responses of streams: a fast generator waits for the proxy backend
# instead of filling more.
STREAM_WINDOW = 64 << 20
# How late a block that nobody uses any more is given back while no request comes.
TICK_S = 1.0
# Room for more descriptors than any message carries, so that a peer's surplus is seen and closed.
_ANCILLARY_SIZE = socket.CMSG_SPACE(4 * array.array("i").itemsize)
_RECEIVE_FLAGS = socket.MSG_CMSG_CLOEXEC
_MESSAGE_SIZE = layout.MESSAGE.size
_pack = layout.MESSAGE.pack
_unpack = layout.MESSAGE.unpack_from
# Plain integers: arithmetic on members of an enum costs a microsecond.
_RESPONSE = int(MessageType.RESPONSE)
_BATCH = int(MessageType.BATCH)
_BATCH_DONE = int(MessageFlag.BATCH_DONE)
_INPUT_RELEASED = int(MessageFlag.INPUT_RELEASED)


class GreetingTimeoutError(AttachError):
    """The proxy backend did not answer a greeting in time: it is slow or stopped, and may come back."""


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1e6))


class Connection:
    """An attached worker. Not thread-safe, apart from `detach` and `shutdown`.

    Attributes:
        welcome: What the proxy backend said of the model.
        on_cancel: Called with batch and request when a caller is gone.
        on_unreadable: Called when a batch cannot be read, whose requests get the reason.
    """

    tick_s = TICK_S

    def __init__(
        self,
        endpoint: Path,
        name: str,
        *,
        max_in_flight: int = 1,
        model: ModelSpec | None = None,
    ) -> None:
        """Connect and greet.

        Args:
            endpoint: Where the proxy backend listens.
            name: What the worker calls itself.
            max_in_flight: Batches that it takes at once.
            model: What it serves: a proxy backend of another model, or of other tensors, refuses it.

        Raises:
            FileNotFoundError: If nobody listens there yet; `ConnectionRefusedError` likewise.
            ConnectionResetError: If the proxy backend goes away before it has answered.
            VersionMismatchError: If the proxy backend speaks another major version.
            GreetingTimeoutError: If it does not answer in time.
            AttachError: If it refuses for another reason.
            OSError: If the system is out of descriptors or memory.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        let_go_in_child(self._socket)
        self._buffer = bytearray(layout.MAX_PACKET)
        self._views = [memoryview(self._buffer)]
        self._inputs = PeerArena()
        self._unacknowledged: collections.deque[OwnedBlock] = collections.deque()
        self._consumed = 0
        self._pending: collections.deque[Batch] = collections.deque()
        self._held: dict[int, tuple[int, int]] = {}  # place of each batch that is being worked on
        self.on_cancel: Callable[[int, int], None] | None = None
        self.on_unreadable: Callable[[], None] | None = None
        try:
            self._socket.settimeout(_GREETING_TIMEOUT_S)
            self._socket.connect(os.fspath(endpoint))
            self.welcome = self._greet(name, max_in_flight, model)
            # The kernel's own timeouts: unlike Python's they cost no call of poll before each message.
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(TICK_S))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_TIMEOUT_S))
        except TimeoutError as error:
            self._socket.close()
            raise GreetingTimeoutError(
                f"the proxy backend at {endpoint} did not answer a greeting within {_GREETING_TIMEOUT_S:g} s"
            ) from error
        except BaseException:
            self._socket.close()
            raise
        self._outputs = OwnArena(self.welcome.arena_budget)
        self._inputs.budget = self.welcome.arena_budget
        self._reader = BatchReader(self.welcome.batching)

    # ---- greeting -------------------------------------------------------------------------------------------------

    def _greet(self, name: str, max_in_flight: int, model: ModelSpec | None) -> Welcome:
        self._socket.send(hello_for(name, model, max_in_flight).pack())
        packet = self._socket.recv(layout.MAX_PACKET)
        if not packet:
            # Most likely its server ends just now: as good as nobody listening, so the worker tries again.
            raise ConnectionResetError("the proxy backend closed the connection instead of answering the greeting")
        return parse_answer(packet)

    # ---- receiving ------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for its readability."""
        return self._socket.fileno()

    def receive(self) -> Batch | None:
        """Wait for the next batch, and see to everything else that comes meanwhile.

        Returns:
            The batch, or `None` when the proxy backend has closed the connection.

        Raises:
            ProtocolError: If the connection cannot go on.
        """
        while True:
            if self._pending:
                return self._pending.popleft()
            try:
                if not self._read():
                    return None
            except BlockingIOError:
                self.tick()

    def poll(self) -> list[Batch] | None:
        """Read what is there without waiting; the batches among it, `None` when the connection is closed."""
        try:
            while self._read(socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            batches = list(self._pending)
            self._pending.clear()
            return batches
        return None

    def _read(self, flags: int = 0) -> bool:
        try:
            size, ancillary, message_flags, _ = self._socket.recvmsg_into(
                self._views, _ANCILLARY_SIZE, flags | _RECEIVE_FLAGS
            )
        except BlockingIOError:
            raise
        except ConnectionResetError:
            return False  # closed by the proxy backend with messages of ours unread
        except OSError as error:
            raise ConnectionLostError(f"the connection to the proxy backend broke: {error}") from error
        fds = _descriptors(ancillary) if ancillary else []
        try:
            if size == 0:
                return False
            if size < layout.MESSAGE.size or message_flags & socket.MSG_TRUNC:
                raise ProtocolError(f"a packet of {size} bytes came, a message has {layout.MESSAGE.size} or more")
            message = _unpack(self._buffer)
            if message[2] != size:
                raise ProtocolError(f"a message says that it has {message[2]} bytes, {size} came")
            if message[0] == _BATCH:
                self._take_batch(message)
            else:
                self._handle(message, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _handle(self, message: tuple[int, ...], fds: list[int]) -> None:
        kind, _, _, number, consumed, segment, index, _, length = message
        if kind == MessageType.RELEASE:
            self._acknowledge(consumed)
        elif kind == MessageType.SEGMENT:
            if len(fds) != 1:
                raise ProtocolError(
                    f"segment {segment} was announced with {len(fds)} descriptors, expected 1; where this process has "
                    f"too many files open none can be received (see ulimit -n)"
                )
            self._inputs.attach(segment, fds.pop(), length)
        elif kind == MessageType.SEGMENT_CLOSE:
            self._inputs.detach(segment)
        elif kind == MessageType.CANCEL:
            if self.on_cancel is not None:
                self.on_cancel(number, index)
        else:
            raise ProtocolError(f"message {kind} came, which a proxy backend does not send to an attached worker")

    def _take_batch(self, message: tuple[int, ...]) -> None:
        _, _, _, number, consumed, segment, _, offset, length = message
        if consumed != self._consumed:
            self._acknowledge(consumed)
        block, memory = self._inputs.block(segment, offset, length)
        self._held[number] = block.place
        try:
            self._pending.append(self._reader.read(block, memory, offset, number))
        except (ProtocolError, TypeError) as error:
            # The doorbell was fine and the record is not: its requests get the reason, the connection goes on.
            logger.warning("model %s: batch %d cannot be read: %s", self.welcome.model_name, number, str(error))
            if self.on_unreadable is not None:
                self.on_unreadable()
            self.fail(number, f"the worker cannot read the batch: {error}", layout.ErrorCode.INVALID_ARG)

    def _acknowledge(self, consumed: int) -> None:
        while self._consumed < consumed and self._unacknowledged:
            self._outputs.release(self._unacknowledged.popleft())
            self._consumed += 1
        if self._consumed < consumed:
            raise ProtocolError(f"{consumed} responses acknowledged, {self._consumed} sent")

    # ---- sending --------------------------------------------------------------------------------------------------

    def respond(self, number: int, record: Record, *, done: bool) -> None:
        """Write a record and send it, see `ResponseSink`."""
        length = record.layout.length
        block = self._outputs.allocate(length) or self._make_room(length)
        segment, offset, memory = block
        record.write(memory, offset, number)
        self._unacknowledged.append(block)
        # Not before: what the record let go of may be the last view of the batch's inputs.
        flags = self._settle(number, done)
        if done:
            flags |= _BATCH_DONE
        try:
            self._socket.send(_pack(_RESPONSE, flags, _MESSAGE_SIZE, number, 0, segment, 0, offset, length))
        except OSError as error:
            self._lost(error)

    def fail(self, number: int, text: str, code: layout.ErrorCode = layout.ErrorCode.INTERNAL) -> None:
        """End a batch with an error for every request of it that has no answer yet; needs no arena."""
        raw = text.encode("utf-8", "replace")[: layout.MAX_TEXT]
        flags = _BATCH_DONE | self._settle(number, True)
        self._send(MessageType.FAIL, flags, number, 0, code, 0, 0, raw.decode("utf-8", "ignore").encode())

    def _settle(self, number: int, done: bool) -> int:
        """Give released blocks back; return whether the batch's own is among them."""
        flags = 0
        own = self._held.pop(number, None) if done else self._held.get(number)
        released = self._inputs.released
        while released:
            place = released.popleft()
            if place == own:
                flags = _INPUT_RELEASED
                own = None
            else:
                self._send(MessageType.RELEASE, 0, 0, place[0], 0, place[1], 0)
        return flags

    def tick(self) -> None:
        """Do what is due while nothing comes: release blocks that became free, and memory that nobody uses."""
        released = self._inputs.released
        while released:
            segment, offset = released.popleft()
            self._send(MessageType.RELEASE, 0, 0, segment, 0, offset, 0)
        if self._outputs.has_idle():
            for number in self._outputs.trim(self.welcome.arena_idle_s):
                self._send(MessageType.SEGMENT_CLOSE, 0, 0, number, 0, 0, 0)

    def _make_room(self, length: int) -> OwnedBlock:
        # What was acknowledged meanwhile may be enough.
        self._read_acknowledgements()
        block = self._outputs.allocate(length)
        waited = 0.0
        while block is None:
            if self._must_wait(length) and waited < _ARENA_TIMEOUT_S:
                waited += self._wait_for_room()
            elif self._outputs.can_grow(length):
                self._announce(self._outputs.add_segment(length))
            elif length <= self._outputs.budget and (unused := self._outputs.drop_unused()):
                # Segments that were made for smaller outputs make way for a larger one.
                for number in unused:
                    self._send(MessageType.SEGMENT_CLOSE, 0, 0, number, 0, 0, 0)
            elif length > self._outputs.budget or not self._unacknowledged or waited >= _ARENA_TIMEOUT_S:
                self._outputs.add_segment(length)  # raises, with the numbers
            else:
                waited += self._wait_for_room()
            block = self._outputs.allocate(length)
        return block

    def _must_wait(self, length: int) -> bool:
        """Return whether a stream has enough on its way, so that its arena shall not grow for more."""
        return self.welcome.decoupled and bool(self._unacknowledged) and self._outputs.in_use + length > STREAM_WINDOW

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
            # Not the callable's fault, and not to be told to its callers as such.
            raise ConnectionLostError(f"the proxy backend broke the protocol: {error}") from error

    def _announce(self, segment: NewSegment) -> None:
        try:
            packet = layout.MESSAGE.pack(
                MessageType.SEGMENT, 0, layout.MESSAGE.size, 0, 0, segment.number, 0, 0, segment.size
            )
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment.fd]))
            self._checked(lambda: self._socket.sendmsg([packet], [rights]))
        finally:
            os.close(segment.fd)

    def _send(
        self, kind: int, flags: int, number: int, segment: int, index: int, offset: int, length: int, body: bytes = b""
    ) -> None:
        packet = layout.MESSAGE.pack(
            kind, flags, layout.MESSAGE.size + len(body), number, 0, segment, index, offset, length
        )
        try:
            self._socket.send(packet + body if body else packet)
        except OSError as error:
            self._lost(error)

    def _checked(self, send: Callable[[], object]) -> None:
        try:
            send()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        if isinstance(error, BlockingIOError):
            raise ConnectionLostError(
                f"the proxy backend read nothing from its socket for {_SEND_TIMEOUT_S:g} s"
            ) from error
        raise ConnectionLostError(f"the connection to the proxy backend broke: {error}") from error

    # ---- leaving --------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Ask for no more batches; the proxy backend closes the connection when the last one is answered."""
        packet = layout.MESSAGE.pack(MessageType.DETACH, 0, layout.MESSAGE.size, 0, 0, 0, 0, 0, 0)
        self._checked(lambda: self._socket.send(packet))

    def shutdown(self) -> None:
        """End the connection at once; a `receive` in another thread returns."""
        # Not connected any more is what was asked for.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def let_go_waiter(self) -> Callable[[], None]:
        """Return a function that returns when the proxy backend has detached this worker or the socket is shut down."""
        # A descriptor of its own: the number of one that is closed meanwhile may come to mean something else.
        watched = self._socket.dup()
        let_go_in_child(watched)

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


def hello_for(name: str, model: ModelSpec | None, max_in_flight: int, memory_token: bytes = b"") -> Hello:
    """Return the greeting of a worker for a model, or for any where that is `None`."""
    if model is None:
        return Hello(name=name, max_in_flight=max_in_flight, memory_token=memory_token)
    return Hello(
        name=name,
        model_name=model.name,
        model_version=model.version,
        tensors_digest=model.tensors_digest,
        max_in_flight=max_in_flight,
        memory_token=memory_token,
    )
