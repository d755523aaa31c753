"""The proxy's end of a connection: what a proxy backend knows of one worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..wire import messages
from ..wire.errors import ProtocolError
from ..wire.greetings import GreetingError, Hello, Welcome, pack_refuse, parse_hello
from ..wire.layout import Capability
from ..wire.limits import ACKNOWLEDGED_LATER_BYTES, SILENCE_S
from ..wire.messages import BATCH_DONE, FAIL, INPUT_RELEASED, RESPONSE, Buffer, Header
from ..wire.settings import ServingSettings
from .segments import Block, PeerSegments, Place, State


@dataclass(frozen=True, kw_only=True)
class EndpointSettings(ServingSettings):
    """What an endpoint must know of its model."""

    model_name: str  # the model
    model_version: int  # its version
    batching: bool  # whether tensors have a batch axis in front
    decoupled: bool  # whether a request may get any number of responses
    # `ModelSpec.tensors_digest`, which that of a worker's model must be; empty compares nothing.
    tensors_digest: str = ""


class SentBatch:
    """A batch as the protocol sees it."""

    def __init__(self) -> None:
        self.number = 0  # What it is called at its worker; another one at each. 0 before it was for any.
        self.block: Any = None  # where its record is, while the worker may read it there
        self.active_at = 0.0  # when it was sent or last answered, on the clock of `time.monotonic`
        self.is_expired = False  # whether its time was over


T = TypeVar("T", bound=SentBatch)


class ProxyProtocol(Generic[T]):
    """The state of one worker's connection. Not thread-safe, apart from `segments.released`."""

    def __init__(self, settings: EndpointSettings, free: Callable[[Block], object]) -> None:
        """Wait for a greeting."""
        self.state = State.GREETING  # of the connection
        self.hello: Hello  # what the worker said of itself; there once `greet` has returned
        self.segments = PeerSegments(settings.arena_budget_bytes)  # those of the worker
        self.in_flight: dict[int, T] = {}  # the batches that it has, by number
        self.lent: dict[Place, tuple[Block, T]] = {}  # the blocks that the worker reads, with their batches, by place
        self.refusal = ""  # why the worker was refused; empty if it was not
        # Since when nothing came from it, after a batch of its took too long; `None` if that is not so.
        self.silent_since: float | None = None
        self.acknowledgement_due = False  # whether the worker is to get blocks of its memory back at once
        self._settings = settings
        self._free = free
        self._consumed = 0
        self._acknowledged = 0

    # ---- greeting ---------------------------------------------------------------------------------------------------

    def greet(self, packet: Buffer) -> bytes:
        """Take a worker's HELLO. Returns WELCOME, and `state` is ATTACHED; or REFUSE, and `state` is CLOSED."""
        settings = self._settings
        try:
            hello = self.hello = parse_hello(packet, decoupled=settings.decoupled)
            self._check_model(hello)
        except GreetingError as error:
            self.state = State.CLOSED
            self.refusal = str(error)
            return pack_refuse(self.refusal)
        self.state = State.ATTACHED
        return Welcome(
            model_name=settings.model_name,
            model_version=settings.model_version,
            batching=settings.batching,
            decoupled=settings.decoupled,
            capabilities=Capability(hello.capabilities),
            arena_budget=settings.arena_budget_bytes,
            arena_idle_s=settings.arena_idle_s,
            execution_timeout_s=settings.execution_timeout_s,
            max_in_flight=hello.max_in_flight,
        ).pack()

    def _check_model(self, hello: Hello) -> None:
        settings = self._settings
        if hello.model_name not in ("", settings.model_name) or hello.model_version not in (0, settings.model_version):
            raise GreetingError(
                f"this is model '{settings.model_name}' version {settings.model_version}, the worker is for model "
                f"'{hello.model_name}' version {hello.model_version}"
            )
        if settings.tensors_digest and hello.tensors_digest not in ("", settings.tensors_digest):
            raise GreetingError(
                f"the worker was made for a model '{settings.model_name}' with other tensors: give it the description "
                f"of this one, pytriton.json in its version folder"
            )

    # ---- receiving --------------------------------------------------------------------------------------------------

    def receive(self, packet: Buffer, size: int, descriptors: int = 0) -> tuple[Header, T | None]:
        """Take a packet: check it, note what it says, and return its header and the batch of a RESPONSE or FAIL.

        The caller then calls `answered`, and maps a SEGMENT or unmaps a SEGMENT_CLOSE. `ProtocolError` means that the
        connection cannot go on.
        """
        header = messages.read_header(packet, size)
        kind, _, _, number, _, segment, _, offset, length = header
        self.silent_since = None
        if descriptors and kind != messages.SEGMENT:
            raise ProtocolError(f"{messages.name_of(kind)} came with {descriptors} descriptors, and carries none")
        if kind in (RESPONSE, FAIL):
            batch = self.in_flight.get(number)
            if batch is None:
                raise ProtocolError(f"it answered batch {number}, which it does not have")
            if kind == RESPONSE:
                self._check_record(segment, offset, length)
            return header, batch
        if kind == messages.SEGMENT:
            self.segments.announce(segment, length, descriptors)
        elif kind == messages.SEGMENT_CLOSE:
            self.segments.close(segment)
        elif kind == messages.RELEASE:
            self._take_back((segment, offset))
        elif kind == messages.DETACH:
            self.state = State.DETACHING
        else:
            raise ProtocolError(f"it sent message {kind}, which a worker does not send")
        return header, None

    def _check_record(self, segment: int, offset: int, length: int) -> None:
        self.segments.check(segment, offset, length)

    def _take_back(self, place: Place) -> None:
        block, batch = self.lent.pop(place, (None, None))
        if block is None or batch is None:
            raise ProtocolError(f"the block at {place[1]} of segment {place[0]} was given back, and was not in use")
        batch.block = None
        self._free(block)

    def answered(self, header: Header, batch: T, now: float) -> bool:
        """Note that an answer to a batch was read and handed on; return whether the batch is done."""
        kind, flags, _, number, _, segment, _, _, length = header
        if flags & INPUT_RELEASED and batch.block is not None and batch.block.segment:
            self._take_back((batch.block.segment, batch.block.offset))
        batch.active_at = now
        if kind == RESPONSE and segment:
            self._count_response()
            self.acknowledgement_due = length > ACKNOWLEDGED_LATER_BYTES or self._settings.decoupled
        if kind == FAIL or flags & BATCH_DONE:
            del self.in_flight[number]
            return True
        return False

    def _count_response(self) -> None:
        """Note that a block of the worker may go back to it."""
        self._consumed += 1

    # ---- sending ----------------------------------------------------------------------------------------------------

    def send_batch(self, batch: T, length: int, now: float) -> bytes:
        """Return BATCH; the record of `length` bytes is in the batch's block."""
        block = batch.block
        if block is None:
            raise RuntimeError(f"batch {batch.number} was not written")
        if block.segment:
            self.lent[block.segment, block.offset] = (block, batch)
        batch.active_at = now
        self.in_flight[batch.number] = batch
        self._acknowledged = self._consumed
        return messages.pack_batch(batch.number, block.segment, block.offset, length, self._consumed)

    def withdraw(self, batch: T) -> None:
        """Note that a batch could not be sent."""
        del self.in_flight[batch.number]
        if batch.block.segment:
            del self.lent[batch.block.segment, batch.block.offset]

    def acknowledge(self) -> list[bytes]:
        """Return the packets that give back the worker's blocks which nobody uses here."""
        self.acknowledgement_due = False
        if self._acknowledged == self._consumed:
            return []
        self._acknowledged = self._consumed
        return [messages.pack_acknowledge(self._consumed)]

    def cancel(self, number: int, request: int) -> list[bytes]:
        """Return CANCEL for one request of a batch, if the worker reads it."""
        return [messages.pack_cancel(number, request)] if self.hello.capabilities & Capability.CANCEL else []

    # ---- time, and the end ------------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[T]:
        """Return the batches whose time has ended since the last call."""
        limit_s = self._settings.execution_timeout_s
        late = [
            batch
            for batch in self.in_flight.values()
            if limit_s is not None and not batch.is_expired and now - batch.active_at >= limit_s
        ]
        for batch in late:
            batch.is_expired = True
        if late and self.silent_since is None:
            self.silent_since = now
        return late

    def is_lost(self, now: float) -> bool:
        """Return whether a batch took so long that the connection has to end."""
        # A worker that handles one batch at a time reads nothing meanwhile; it attaches again afterwards.
        return self.silent_since is not None and (self.hello.max_in_flight == 1 or now - self.silent_since >= SILENCE_S)

    @property
    def takes_batches(self) -> bool:
        """Whether it may get another batch, apart from the limit of its number."""
        return self.state is State.ATTACHED and self.silent_since is None

    def close(self) -> list[T]:
        """End the connection; return the batches that are not done."""
        self.state = State.CLOSED
        left = list(self.in_flight.values())
        self.in_flight.clear()
        self.lent.clear()
        return left
