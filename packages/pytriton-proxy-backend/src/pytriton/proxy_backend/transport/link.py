"""`Link`: what a worker knows of its connection, whatever carries it: messages, and memory for their records."""

from __future__ import annotations

import abc
import collections
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ProtocolError
from ..model import ModelSpec
from ..protocol.worker import WorkerProtocol
from ..wire.batch import Batch, BatchReader
from ..wire.greetings import Hello, Welcome
from ..wire.layout import CAPABILITIES, ErrorCode
from ..wire.messages import pack_segment_close
from ..wire.record import Array, Record
from .arena import OwnedBlock, ViewedBlock
from .pacing import PacedConnection
from .together import TogetherConnection

if TYPE_CHECKING:
    from pytriton.proxy.outputs import Forms

logger = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 10.0
# How often a worker that waits for the answer to its greeting looks whether it is to stop.
GREETING_TICK_S = 0.1
SEND_TIMEOUT_S = 30.0
# How late a block that nobody uses any more is given back while no request comes.
TICK_S = 1.0


class Link(abc.ABC):
    """An attached worker. Not thread-safe, apart from `detach` and `shutdown`."""

    tick_s = TICK_S
    reader: BatchReader  # reads the records of batches; there once the worker is attached

    def __init__(self, protocol: WorkerProtocol[OwnedBlock]) -> None:
        self.protocol = protocol  # what may be said when
        self._pending: collections.deque[Batch] = collections.deque()
        self.on_cancel: Callable[[int, int], None] | None = None  # called with batch and request when a caller is gone
        # Called when a batch cannot be read, whose requests get the reason.
        self.on_unreadable: Callable[[], None] | None = None

    @property
    def welcome(self) -> Welcome:
        """What the proxy backend said of the model."""
        return self.protocol.welcome

    @property
    def pacing(self) -> PacedConnection | None:
        """What says which streams are to pause; `None` if nothing does."""
        return None

    def together(self, schedule: Callable[[], object]) -> TogetherConnection | None:
        """Return what sends records of several batches together; `None` if nothing does.

        `schedule` is called when records wait, and has them sent soon.
        """
        return None

    # ---- receiving ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def fileno(self) -> int:
        """Return a descriptor to wait for: when it is readable, `poll` may find something."""

    @abc.abstractmethod
    def receive(self) -> Batch | None:
        """Wait for the next batch, and see to everything else that comes meanwhile.

        `None` when the connection was closed.
        """

    @abc.abstractmethod
    def poll(self) -> list[Batch] | None:
        """Read what is there without waiting; the batches among it, `None` when the connection is closed."""

    def _take_batch(self, block: ViewedBlock, memory: Any, offset: int, number: int) -> Batch | None:
        try:
            batch = self.reader.read(block, memory, offset, number)
        except (ProtocolError, TypeError) as error:
            # The doorbell was fine and the record is not: its requests get the reason, the connection goes on.
            logger.warning("model %s: batch %d cannot be read: %s", self.welcome.model_name, number, str(error))
            if self.on_unreadable is not None:
                self.on_unreadable()
            self.fail(number, f"the worker cannot read the batch: {error}", ErrorCode.INVALID_ARG)
            return None
        self._pending.append(batch)
        return batch

    def _take_pending(self) -> list[Batch]:
        batches = list(self._pending)
        self._pending.clear()
        return batches

    # ---- sending --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def respond(self, number: int, record: Record, *, done: bool, executing: bool = False) -> None:
        """Write a record and send it, see `ResponseSink`; where it is `executing`, `executed` is still to follow."""

    def fail(self, number: int, text: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """End a batch with an error for every request of it that has no answer yet; needs no arena."""
        packet, releases = self.protocol.fail(number, code, text)
        self._send_all([*releases, packet])

    @abc.abstractmethod
    def lend_outputs(self, names: Sequence[str], forms: Forms) -> dict[str, Array] | None:
        """Make arrays for outputs that are sent from where they are, see `pytriton.proxy.outputs`.

        `names` are all outputs in the order in which they are sent, `forms` shape and dtype of those that are wanted.
        `None` means that they are small, or that there is no room without waiting for the proxy backend.
        """

    def tick(self) -> None:
        """Do what is due while nothing comes: release blocks that became free, and memory that nobody uses."""
        self.release()
        self._send_all(map(pack_segment_close, self._trim()))

    def release(self) -> None:
        """Tell of the blocks that nobody here uses any more."""
        self._send_all(self.protocol.release())

    @property
    def is_settled(self) -> bool:
        """Whether `tick` has nothing to do before something comes."""
        return False

    def rest(self) -> None:
        """Wait until something comes, if `tick` has nothing to do before that: an idle worker wakes nobody."""
        return

    @abc.abstractmethod
    def _trim(self) -> list[int]:
        """Drop memory of this side that nobody uses; return the numbers of its segments."""

    @abc.abstractmethod
    def _send_all(self, packets: Iterable[bytes]) -> None:
        """Send packets without records; raises `ConnectionLostError` if nobody is there any more."""

    # ---- leaving --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def detach(self) -> None:
        """Ask for no more batches; the proxy backend closes the connection when the last one is answered."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the connection at once; a `receive` in another thread returns."""

    @abc.abstractmethod
    def hangup_waiter(self) -> Callable[[], None]:
        """Return a function that returns when the proxy backend has let this worker go, or `shutdown` was called."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what the connection takes of the system."""


def hello_for(
    name: str,
    model: ModelSpec | None,
    max_in_flight: int,
    capabilities: int = CAPABILITIES,
    memory_token: bytes = b"",
) -> Hello:
    """Return the greeting of a worker for a model, or for any where that is `None`."""
    return Hello(
        name=name,
        model_name="" if model is None else model.name,
        model_version=0 if model is None else model.version,
        # A worker that does not know the tensors of its model has nothing to compare.
        tensors_digest=model.tensors_digest if model is not None and (model.inputs or model.outputs) else "",
        max_in_flight=max_in_flight,
        capabilities=capabilities,
        memory_token=memory_token,
    )
