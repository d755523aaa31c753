"""What the endpoint of the Python proxy knows: of its model, of the workers, and of the batches that they have."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..transport.arena import OwnedBlock
from ..transport.zmq_memory import SharedMemory
from ..wire.batch import RequestData, lay_out_batch
from ..wire.greetings import GreetingError, Hello
from ..wire.response import ResponseData
from ..wire.settings import ServingSettings

logger = logging.getLogger("pytriton.python_proxy")


class Caller(Protocol):
    """One request of Triton's that waits for its answer."""

    def respond(self, response: ResponseData) -> None:
        """Give it one response; where that cannot be given, an error."""

    def fail(self, code: int, text: str) -> None:
        """End it with an error."""

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for it any more."""


@dataclass(frozen=True, kw_only=True)
class EndpointSettings(ServingSettings):
    """What the endpoint must know of its model.

    Attributes:
        model_name: The model.
        model_version: Its version.
        batching: Whether tensors have a batch axis in front.
        decoupled: Whether a request may get any number of responses.
        tensors_digest: `ModelSpec.tensors_digest`, which that of a worker's model must be; empty compares nothing.
    """

    model_name: str
    model_version: int
    batching: bool
    decoupled: bool
    tensors_digest: str = ""

    def check(self, hello: Hello) -> None:
        """Check that a worker is for this model.

        Raises:
            GreetingError: If it is for another one, another version, or other tensors.
        """
        if hello.model_name not in ("", self.model_name) or hello.model_version not in (0, self.model_version):
            raise GreetingError(
                f"this is model '{self.model_name}' version {self.model_version}, the worker is for model "
                f"'{hello.model_name}' version {hello.model_version}"
            )
        if self.tensors_digest and hello.tensors_digest not in ("", self.tensors_digest):
            raise GreetingError(
                f"the worker was made for a model '{self.model_name}' with other tensors: give it the description of "
                f"this one, pytriton.json in its version folder"
            )


class BatchInFlight:
    """Requests that go to a worker together, from Triton's call to the last answer.

    Attributes:
        number: What it is called at its worker; another one at each. 0 before it was for any.
        callers: Who waits, by the request's place.
        requests: What they ask for, as long as it may have to be sent.
        open: The places of those that have no last answer yet.
        cancelled: The places of those whose worker was told that nobody waits.
        block: Where its record is, while it is in shared memory or was not sent.
        active_at: When it was sent or last answered, on the clock of `time.monotonic`.
        is_answered: Whether any of it was answered.
        is_expired: Whether its time was over.
        loss: What became of a worker that had it, which happens once; empty before.
        waiting_since: Since when it waits for a worker, or for another one.
    """

    def __init__(self, requests: Sequence[RequestData], callers: Sequence[Caller]) -> None:
        self.number = 0
        self.callers = list(callers)
        self.requests = requests
        self.open = set(range(len(callers)))
        self.cancelled: set[int] = set()
        self.block: OwnedBlock | None = None
        self.length = 0
        self.active_at = 0.0
        self.is_answered = False
        self.is_expired = False
        self.loss = ""
        self.waiting_since = time.monotonic()
        self._received_ns = time.monotonic_ns()

    def write(self, number: int, memory: SharedMemory | None, settings: EndpointSettings) -> None:
        """Write the record, into shared memory where there is room for it.

        Raises:
            ProtocolError: If it has more text than the protocol allows.
            TypeError: If it cannot be written.
            ValueError: If it is too large.
            MemoryError: If there is no memory for it.
        """
        self.number = number
        record = lay_out_batch(
            self.requests,
            batching=settings.batching,
            received_ns=self._received_ns,
            sent_ns=time.monotonic_ns(),
        )
        self.length = length = record.layout.length
        if length > settings.arena_budget_bytes:
            raise ValueError(
                f"the inputs of the batch take {length} bytes, a batch may have {settings.arena_budget_bytes}. "
                f"Raise arena_budget_bytes of the model, or send smaller batches"
            )
        block = None if memory is None else memory.allocate(length)
        if block is None:
            block = OwnedBlock(0, 0, bytearray(length))  # type: ignore[arg-type] # written to as a mapping is
        try:
            record.write(block.memory, block.offset, number)
        except BaseException:
            if memory is not None and block.segment:
                memory.give_back(block)
            raise
        self.block = block

    def respond(self, response: ResponseData) -> None:
        """Give a request an answer."""
        if response.request not in self.open:
            if not self.is_expired:
                logger.warning("batch %d: an answer to request %d came after its end", self.number, response.request)
            return
        self.is_answered = True
        if response.final:
            self.open.discard(response.request)
        self.callers[response.request].respond(response)

    def fail(self, code: int, text: str) -> None:
        """End every request that is still open with an error."""
        while self.open:
            self.callers[self.open.pop()].fail(code, text)


@dataclass
class AttachedWorker:
    """A worker that has greeted.

    Attributes:
        peer: What ZeroMQ calls it.
        link: The number of its connection.
        hello: What it said of itself.
        memory: What is shared with it; `None`: nothing.
        in_flight: The batches that it has, by number.
        load: How many those are, with those that are on their way to the endpoint's thread.
        detaching: Whether it wants no more of them.
        gone: Whether it was let go.
        silent_since: Since when nothing came from it, after a batch of its took too long; `None` where that is not so.
        owes_much: Whether blocks of its memory are to go back at once.
    """

    peer: bytes
    link: int
    hello: Hello
    memory: SharedMemory | None = None
    in_flight: dict[int, BatchInFlight] = field(default_factory=dict)
    load: int = 0
    detaching: bool = False
    gone: bool = False
    silent_since: float | None = None
    owes_much: bool = False

    @property
    def label(self) -> str:
        """What logs and errors call it."""
        return f"worker '{self.hello.name}' (pid {self.hello.pid})"

    @property
    def is_idle(self) -> bool:
        """Whether it takes a batch."""
        return not (self.detaching or self.gone or self.silent_since) and self.load < self.hello.max_in_flight
