"""Where workers attach: one thread that owns the sockets, and batches that wait for their answers.

The states of a worker::

    greeting --HELLO--> attached --DETACH--> detaching --nothing in flight--> gone
        |                  |                     |                             ^
        +------------------+---------------------+--- the link ended ----------+
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import ProtocolError
from ..protocol.proxy import EndpointSettings
from ..protocol.segments import State
from ..system.threads import call_safely, keep_on
from ..wire import messages
from ..wire.batch import RequestData
from ..wire.greetings import pack_refuse
from ..wire.layout import ErrorCode
from ..wire.limits import TIME_LIMIT_TEXT, WORKER_LOST_TEXT
from ..wire.response import read_responses
from .memory import MemoryListener
from .pool import PoolClosedError, WorkerPool
from .sockets import Message, UnreachableError, WouldBlockError, ZmqSocket
from .workers import AttachedWorker, BatchInFlight, Caller, logger

_TICK_S = 0.5
_CANCEL_TICK_S = 0.05
_STOP_TIMEOUT_S = 10.0


class ProxyEndpoint:
    """Listens for workers and hands batches to them."""

    def __init__(
        self, settings: EndpointSettings, make_sockets: Callable[[], tuple[ZmqSocket, MemoryListener | None]]
    ) -> None:
        self._settings = settings
        self._make_sockets = make_sockets
        self._where = f"model '{settings.model_name}' version {settings.model_version}"
        self._pool = WorkerPool(settings, lambda: self._socket.wake())
        self._dismissed: dict[bytes, int] = {}  # connections of dropped workers that are still open
        self._last_loss = ""
        self._end_reason = "the model is unloaded"
        self._next_poll = 0.0
        self._next_trim = 0.0
        self._socket: ZmqSocket
        self._memory: MemoryListener | None = None
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pytriton-python-proxy", daemon=True)
        self.address = ""

    # ---- for the thread of Triton ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        self._pool.open()

    def is_ready(self) -> bool:
        """Return whether a worker takes batches, or did so a moment ago."""
        return self._pool.is_ready()

    def execute(self, requests: Sequence[RequestData], callers: Sequence[Caller]) -> None:
        """Give a batch to a worker; return as soon as another one is idle, or none has anything to do.

        Every caller is answered, now or later, in this thread or another one.
        """
        batch = BatchInFlight(requests, callers)
        try:
            worker = self._pool.reserve(batch)
            if worker is not None and self._write(worker, batch):
                self._pool.send(worker, batch)
        except PoolClosedError:
            batch.fail(ErrorCode.UNAVAILABLE, f"{self._where}: {self._end_reason}")

    def _write(self, worker: AttachedWorker, batch: BatchInFlight) -> bool:
        """Write a batch for a worker; if that fails, the worker is free again.

        The batch is then tried in halves, so that only a request that cannot be written fails.
        """
        number = self._pool.next_number()
        code = ErrorCode.INVALID_ARG
        try:
            batch.write(number, worker.memory, self._settings)
            return True
        except (ProtocolError, TypeError, ValueError) as error:
            text = str(error)
        except Exception as error:  # Triton's data, or the system, may cause any error
            code, text = ErrorCode.INTERNAL, f"the batch cannot be written: {type(error).__name__}: {error}"
        halves = batch.halves() if code is ErrorCode.INVALID_ARG else []
        if not self._pool.free(worker, halves) and halves:
            batch.fail(ErrorCode.UNAVAILABLE, f"{self._where}: {self._end_reason}")
        elif not halves:
            batch.fail(code, f"{self._where}: {text}")
        return False

    def stop(self) -> None:
        """End every connection; requests in flight fail."""
        self._pool.close()
        if self._started.is_set() and self._error is None:
            self._socket.wake()
        self._thread.join(_STOP_TIMEOUT_S)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._socket, self._memory = self._make_sockets()
        except BaseException as error:
            self._error = error
            return
        finally:
            if self._error is not None:
                self._started.set()
        self.address = self._socket.address
        self._started.set()
        try:
            while not self._pool.is_closed:
                self._socket.wait(_CANCEL_TICK_S if self._pool.is_busy() else _TICK_S)
                self._turn()
        except BaseException as error:
            self._end_reason = f"its endpoint failed, load it again: {type(error).__name__}: {error}"
            call_safely(logger.exception, "%s: the thread of the endpoint failed", self._where)
        finally:
            self._pool.close()
            for worker in self._pool.workers:
                self._dismiss(worker, self._end_reason, expected=True)
            for batch in self._pool.take_all():
                batch.fail(ErrorCode.UNAVAILABLE, f"{self._where}: {self._end_reason}")
            if self._memory is not None:
                self._memory.close()
            self._socket.close()

    def _turn(self) -> None:
        while True:
            # Events come before messages, because a number may belong to an earlier connection, whose end comes first.
            for event in self._socket.events():
                if event.kind == "refused":
                    logger.error("%s: a worker was refused: its keys are not known here", self._where)
                if event.kind == "gone":
                    self._dismissed = {peer: link for peer, link in self._dismissed.items() if link != event.link}
                for worker in [other for other in self._pool.workers if other.link == event.link]:
                    if event.kind == "gone":
                        self._drop(worker, "its connection ended")
            message = self._socket.receive()
            if message is None:
                break
            self._handle(message)
        while self._pool.outgoing:
            self._send(*self._pool.outgoing.popleft())
        now = time.monotonic()
        if now >= self._next_trim:
            self._next_trim = now + _TICK_S
            for worker in self._pool.workers:
                self._give_back(worker)
                self._trim(worker)
        # Each question is a round trip to the server.
        if now >= self._next_poll:
            self._next_poll = now + _CANCEL_TICK_S
            self._poll_cancelled()
            self._expire(now)
            self._give_up(now)

    def _handle(self, message: Message) -> None:
        worker = self._pool.get(message.peer)
        if worker is None:
            # Messages of a dropped worker are ignored.
            if self._dismissed.get(message.peer) != message.link:
                # If the worker gets no answer, it greets again.
                keep_on(lambda: self._greet(message), f"{self._where}: a worker cannot be greeted")
            return
        try:
            self._take(worker, message)
        except ProtocolError as error:
            self._tell(worker, pack_refuse(str(error)))
            self._drop(worker, str(error))
            self._dismissed[worker.peer] = worker.link
        except Exception as error:
            # The system may be out of memory or descriptors. In any case the other workers go on.
            call_safely(logger.exception, "%s: what %s has sent cannot be taken", self._where, worker.label)
            self._dismiss(worker, f"what it has sent cannot be taken: {type(error).__name__}: {error}")
        else:
            if worker.protocol.state is State.DETACHING and not worker.load:
                self._dismiss(worker, "it detached", expected=True)

    def _greet(self, message: Message) -> None:
        worker = AttachedWorker(message.peer, message.link, self._settings)
        protocol = worker.protocol
        answer = protocol.greet(message.packet)
        if protocol.refusal:
            logger.error("%s: a worker was refused: %s", self._where, protocol.refusal)
        elif self._memory is not None and protocol.hello.memory_token:
            worker.memory = self._memory.accept(protocol.hello.memory_token, protocol.segments)
        try:
            self._socket.send(answer, peer=message.peer)
        except (UnreachableError, WouldBlockError):
            if worker.memory is not None:
                worker.memory.close()
            return
        if protocol.refusal:
            return
        how = "through messages" if worker.memory is None else "through shared memory"
        logger.info("%s: %s attached, %s", self._where, worker.label, how)
        self._pool.add(worker)

    def _take(self, worker: AttachedWorker, message: Message) -> None:
        packet = message.packet
        protocol = worker.protocol
        if worker.memory is not None:
            worker.memory.read_segments_until(messages.named_segment(packet))
        header, batch = protocol.receive(packet, len(packet), 0, [len(part) for part in message.parts])
        kind, _, _, _, _, segment, code, offset, length = header
        if batch is None:
            if kind == messages.SEGMENT_CLOSE and worker.memory is not None:
                worker.memory.forget(segment)
            return
        if kind == messages.FAIL:
            batch.fail(code, messages.read_reason(packet))
        else:
            if worker.memory is not None and segment:
                # The worker gets its memory back when the last array over it is deleted.
                record = worker.memory.view(segment, offset, length)[0].data
            else:
                record = message.parts[0]
            count = len(batch.callers)
            for response in read_responses(record, batch.number, count, decoupled=self._settings.decoupled):
                batch.respond(response)
        if protocol.answered(header, batch, time.monotonic()):
            batch.fail(ErrorCode.INTERNAL, f"{worker.label} ended the batch without an answer to this request")
            self._pool.free(worker)
        if protocol.acknowledgement_due:
            self._give_back(worker)

    def _send(self, worker: AttachedWorker, batch: BatchInFlight) -> None:
        if worker.protocol.state is not State.CLOSED:
            if batch.block is None and not self._write(worker, batch):
                return
            block = batch.block
            if block is None:
                raise RuntimeError(f"batch {batch.number} was not written")
            self._give_back(worker)
            packet = worker.protocol.send_batch(batch, batch.length, time.monotonic())
            parts = () if block.segment else (memoryview(block.memory)[: batch.length],)
            try:
                self._socket.send(packet, *parts, peer=worker.peer)
            except (UnreachableError, WouldBlockError):
                worker.protocol.withdraw(batch)
                self._drop(worker, "its connection ended")
            else:
                if not block.segment:
                    batch.block = None  # the socket owns it now
                if not self._settings.repeatable:
                    batch.requests = ()
                return
        # No worker had it, so any worker may get it.
        self._pool.wait_for_another(batch)
        self._pool.free(worker)

    def _give_up(self, now: float) -> None:
        """Fail the requests whose time to wait for a worker is over."""
        for batch in self._pool.take_late(now):
            limit = f"{self._settings.attach_timeout_s:g} s"
            if batch.number:
                lost = batch.loss or f"{self._where}: the worker was lost before it had this request"
                text = f"{lost}. No other worker attached within {limit} to take it over"
            else:
                text = (
                    f"{self._where}: no worker is attached. Waited {limit} for one at '{self.address}'; is the process "
                    f"that serves this model alive?{self._last_loss}"
                )
            batch.fail(ErrorCode.UNAVAILABLE, text)

    def _expire(self, now: float) -> None:
        """End batches that have taken too long, and let their workers go unless they work on several."""
        limit_s = self._settings.execution_timeout_s
        if limit_s is None:
            return
        for worker in self._pool.workers:
            for batch in worker.protocol.expire(now):
                for index in batch.open - batch.cancelled:
                    self._cancel(worker, batch, index)
                batch.fail(
                    ErrorCode.UNAVAILABLE,
                    f"{self._where}: {worker.label} {TIME_LIMIT_TEXT}, "
                    f"{limit_s:g} s. It may still be at it; look into its log for what it does, or allow more time",
                )
                logger.error("%s: %s: batch %d took longer than %g s", self._where, worker.label, batch.number, limit_s)
            if worker.protocol.is_lost(now):
                self._dismiss(worker, f"a batch took longer than the execution timeout of {limit_s:g} s")

    def _give_back(self, worker: AttachedWorker) -> None:
        """Give back a worker's blocks that nobody uses here any more."""
        for packet in worker.protocol.acknowledge():
            self._tell(worker, packet)

    def _trim(self, worker: AttachedWorker) -> None:
        for segment in () if worker.memory is None else worker.memory.trim(self._settings.arena_idle_s):
            self._tell(worker, messages.pack_segment_close(segment))

    def _poll_cancelled(self) -> None:
        for worker in self._pool.workers:
            for batch in worker.protocol.in_flight.values():
                for index in batch.open - batch.cancelled:
                    if batch.callers[index].is_cancelled():
                        self._cancel(worker, batch, index)

    def _cancel(self, worker: AttachedWorker, batch: BatchInFlight, index: int) -> None:
        batch.cancelled.add(index)
        if batch.block is not None and worker.memory is not None:
            worker.memory.mark_cancelled(batch.block, index)
        for packet in worker.protocol.cancel(batch.number, index):
            self._tell(worker, packet)

    def _tell(self, worker: AttachedWorker, packet: bytes) -> None:
        """Send a packet that may get lost, because a worker that is gone does not need it."""
        try:
            self._socket.send(packet, peer=worker.peer)
        except (UnreachableError, WouldBlockError):
            logger.debug("%s: %s is gone already", self._where, worker.label)

    def _dismiss(self, worker: AttachedWorker, reason: str, *, expected: bool = False) -> None:
        """Let a worker go that is still connected."""
        self._tell(worker, messages.pack_detach())
        self._drop(worker, reason, expected=expected)
        self._dismissed[worker.peer] = worker.link

    def _drop(self, worker: AttachedWorker, reason: str, *, expected: bool = False) -> None:
        if worker.protocol.state is State.CLOSED:
            return
        logger.log(logging.INFO if expected else logging.ERROR, "%s: %s is gone: %s", self._where, worker.label, reason)
        batches = self._pool.remove(worker)
        if worker.memory is not None:
            worker.memory.close()
        if not expected:
            self._last_loss = f" The last that was lost was {worker.label}: {reason}"
        for batch in batches:
            loss = f"{self._where}: {worker.label} {WORKER_LOST_TEXT}: {reason}"
            once = not (batch.loss or batch.is_answered or batch.is_expired or expected)
            if self._settings.repeatable and once and batch.open:
                batch.loss = loss
                self._pool.wait_for_another(batch)
            else:
                batch.fail(
                    ErrorCode.UNAVAILABLE,
                    f"{loss}. The request may have been carried out; look into the worker's log for the cause, and "
                    f"send it again if that is safe",
                )
