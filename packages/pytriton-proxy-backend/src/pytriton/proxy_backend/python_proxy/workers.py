"""What the endpoint of the Python proxy knows of its workers, and of the batches that they have."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ..protocol.proxy import EndpointSettings, SentBatch
from ..transport.arena import OwnedBlock
from ..wire.batch import RequestData, lay_out_batch
from ..wire.response import ResponseData
from .memory import SharedMemory
from .protocol import ZmqProxyProtocol

logger = logging.getLogger("pytriton.python_proxy")


class Caller(Protocol):
    """One request of Triton's that waits for its answer."""

    def respond(self, response: ResponseData) -> None:
        """Send it a response, or an error if that fails."""

    def fail(self, code: int, text: str) -> None:
        """End it with an error."""

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for it any more."""


class BatchInFlight(SentBatch):
    """Requests that go to a worker together, from Triton's call to the last answer."""

    def __init__(self, requests: Sequence[RequestData], callers: Sequence[Caller]) -> None:
        super().__init__()
        self.callers = list(callers)  # who waits, by the request's place
        self.requests = requests  # what they ask for, as long as it may have to be sent
        self.open = set(range(len(callers)))  # the places of those that have no last answer yet
        self.cancelled: set[int] = set()  # the places of those whose worker was told that nobody waits
        self.length = 0
        self.is_answered = False  # whether any of it was answered
        self.loss = ""  # what became of a worker that had it, which happens once; empty before
        self.waiting_since = time.monotonic()  # since when it waits for a worker, or for another one
        self._received_ns = time.monotonic_ns()

    def halves(self) -> list[BatchInFlight]:
        """Return two batches of its requests; none if it has a single one. Not for a batch that was sent."""
        middle = len(self.callers) // 2
        if not middle:
            return []
        parts = (slice(middle), slice(middle, None))
        made = [BatchInFlight(self.requests[part], self.callers[part]) for part in parts]
        for batch in made:
            batch.waiting_since = self.waiting_since
        return made

    def write(self, number: int, memory: SharedMemory | None, settings: EndpointSettings) -> None:
        """Write the record, into shared memory if it fits."""
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
        """Answer a request."""
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


class AttachedWorker:
    """A worker that has connected."""

    def __init__(self, peer: bytes, link: int, settings: EndpointSettings) -> None:
        self.peer = peer  # what ZeroMQ calls it
        self.link = link  # the number of its connection
        self.protocol: ZmqProxyProtocol[BatchInFlight] = ZmqProxyProtocol(settings, self._free)  # the state of that
        self.memory: SharedMemory | None = None  # what is shared with it; `None`: nothing
        self.load = 0  # how many batches it has, with those that are on their way to the endpoint's thread

    def _free(self, block: Any) -> None:
        if self.memory is not None:
            self.memory.give_back(block)

    @property
    def label(self) -> str:
        """Its name in logs and errors."""
        return f"worker '{self.protocol.hello.name}' (pid {self.protocol.hello.pid})"

    @property
    def is_idle(self) -> bool:
        """Whether it takes a batch."""
        return self.protocol.takes_batches and self.load < self.protocol.hello.max_in_flight
