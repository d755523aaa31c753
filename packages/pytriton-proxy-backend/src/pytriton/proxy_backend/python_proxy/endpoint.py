"""Where workers attach: one thread that owns the sockets, and batches that wait for their answers.

The states of a worker::

    greeting --HELLO--> attached --DETACH--> detaching --nothing in flight--> gone
        |                  |                     |                             ^
        +------------------+---------------------+--- the link ended ----------+
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import ProtocolError
from ..transport.zmq_memory import MemoryListener
from ..transport.zmq_sockets import Message, UnreachableError, WouldBlockError, ZmqSocket
from ..wire import layout
from ..wire.batch import RequestData
from ..wire.greetings import GreetingError, Welcome, pack_refuse, parse_hello
from ..wire.layout import Capability, ErrorCode, MessageFlag, MessageType
from ..wire.response import read_responses
from .workers import AttachedWorker, BatchInFlight, Caller, EndpointSettings, logger

_TICK_S = 0.5
_CANCEL_TICK_S = 0.05
_STOP_TIMEOUT_S = 10.0
# A worker that takes several batches is let go if nothing came from it so long after one of them took too long.
_SILENCE_S = 1.0
# A block of a worker up to this size may wait for the next batch before it goes back.
_SMALL_BYTES = 64 << 10
# Without a worker: how long a batch stays before it is set aside, while Triton collects the requests that come for the
# next one, and for how long batches are set aside as they come then, which empties Triton's queue.
_COLLECT_S = 0.02
_DRAIN_S = 0.005
# So long a model may be without a worker before it says that it is not ready; see kReadyGraceNs in endpoint.cc.
_READY_GRACE_S = 0.5


class ProxyEndpoint:
    """Listens for workers and hands batches to them.

    Args:
        settings: What it must know of its model.
        make_sockets: Makes the socket, and where workers of this machine come to share memory, if they may, in the
            thread that is to own them.
    """

    def __init__(
        self, settings: EndpointSettings, make_sockets: Callable[[], tuple[ZmqSocket, MemoryListener | None]]
    ) -> None:
        self._settings = settings
        self._make_sockets = make_sockets
        self._where = f"model '{settings.model_name}' version {settings.model_version}"
        self._changed = threading.Condition()
        self._workers: dict[bytes, AttachedWorker] = {}
        self._outgoing: collections.deque[tuple[AttachedWorker, BatchInFlight]] = collections.deque()
        # Batches that no worker has any more, or that never reached the one that they were for.
        self._waiting: collections.deque[BatchInFlight] = collections.deque()
        self._drain_until = 0.0  # until when batches are set aside as they come
        self._dismissed: dict[bytes, int] = {}  # the connections of workers that were let go, as long as they last
        self._last_loss = ""
        self._last_end = 0.0  # when the last worker went, or the first could come
        self._next_number = 1
        self._place = 0
        self._stopping = False
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
        """Begin to listen.

        Raises:
            BindError: If nobody can listen at the address.
            KeyFileError: If a key cannot be read.
        """
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        self._last_end = time.monotonic()

    def is_ready(self) -> bool:
        """Tell whether a worker takes batches, or did so a moment ago."""
        with self._changed:
            return self._has_worker() or time.monotonic() - self._last_end < _READY_GRACE_S

    def execute(self, requests: Sequence[RequestData], callers: Sequence[Caller]) -> None:
        """Hand a batch to a worker; returns as soon as another one is idle, or none has anything to do.

        Every caller is answered, now or later, from this thread or another one.
        """
        batch = BatchInFlight(requests, callers)
        worker = self._claim(batch)
        if worker is None:
            return
        if not self._write(worker, batch):
            return
        self._outgoing.append((worker, batch))
        self._socket.wake()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopping
                    or any(other.is_idle for other in self._workers.values())
                    or not any(other.load for other in self._workers.values())
                )
            )

    def _claim(self, batch: BatchInFlight) -> AttachedWorker | None:
        """Return a worker for a batch; sets the batch aside where none is attached.

        Each request may wait for a worker for a time of its own, which begins when it comes. Nobody tells when it came
        to Triton's queue; so what finds no worker is taken out of that, and waits here.
        """
        drains = batch.waiting_since < self._drain_until
        deadline = batch.waiting_since + (0.0 if drains else min(_COLLECT_S, self._settings.attach_timeout_s))
        with self._changed:
            while not self._stopping:
                worker = self._idle_worker()
                if worker is not None:
                    worker.load += 1
                    return worker
                # As long as one is attached it answers sooner or later, or dies: only its absence has a limit.
                if self._has_worker():
                    self._changed.wait(_TICK_S)
                elif (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    self._waiting.append(batch)
                    self._socket.wake()
                    if not drains:
                        self._drain_until = time.monotonic() + _DRAIN_S
                    return None
        batch.fail(ErrorCode.UNAVAILABLE, f"{self._where}: the model is unloaded")
        return None

    def _idle_worker(self) -> AttachedWorker | None:
        workers = list(self._workers.values())
        for index in range(len(workers)):
            place = (self._place + index) % len(workers)
            if workers[place].is_idle:
                self._place = place + 1
                return workers[place]
        return None

    def _has_worker(self) -> bool:
        return any(not worker.detaching for worker in self._workers.values())

    def _write(self, worker: AttachedWorker, batch: BatchInFlight) -> bool:
        """Write a batch for a worker; where that cannot be, it fails and the worker is free again."""
        with self._changed:
            number = self._next_number
            self._next_number += 1
        code = ErrorCode.INVALID_ARG
        try:
            batch.write(number, worker.memory, self._settings)
            return True
        except (ProtocolError, TypeError, ValueError) as error:
            text = str(error)
        except Exception as error:  # of what Triton gives, or the system does not
            code, text = ErrorCode.INTERNAL, f"the batch cannot be written: {type(error).__name__}: {error}"
        self._free(worker)
        batch.fail(code, f"{self._where}: {text}")
        return False

    def _free(self, worker: AttachedWorker) -> None:
        """Note that a worker has one batch less."""
        with self._changed:
            worker.load -= 1
            self._hand_out()
            self._changed.notify_all()

    def _hand_out(self) -> None:
        """Give what waits to idle workers, before anybody else gets one."""
        while self._waiting and (worker := self._idle_worker()) is not None:
            worker.load += 1
            batch = self._waiting.popleft()
            batch.block = None
            self._outgoing.append((worker, batch))
            self._socket.wake()

    def stop(self) -> None:
        """End every connection; what is in flight fails."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
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
            while not self._stopping:
                is_busy = self._waiting or any(worker.in_flight for worker in self._workers.values())
                self._socket.wait(_CANCEL_TICK_S if is_busy else _TICK_S)
                self._turn()
        except BaseException as error:
            logger.exception("%s: the thread of the endpoint failed: %s", self._where, error)
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            for worker in list(self._workers.values()):
                self._dismiss(worker, "the model is unloaded", expected=True)
            for batch in [*(batch for _, batch in self._outgoing), *self._waiting]:
                batch.fail(ErrorCode.UNAVAILABLE, f"{self._where}: the model is unloaded")
            if self._memory is not None:
                self._memory.close()
            self._socket.close()

    def _turn(self) -> None:
        while True:
            # Before each message: a number may be that of an earlier connection, whose end was told before.
            for event in self._socket.events():
                if event.kind == "refused":
                    logger.error("%s: a worker was refused: its keys are not known here", self._where)
                if event.kind == "gone":
                    self._dismissed = {peer: link for peer, link in self._dismissed.items() if link != event.link}
                for worker in [other for other in self._workers.values() if other.link == event.link]:
                    if event.kind == "gone":
                        self._drop(worker, "its connection ended")
            message = self._socket.receive()
            if message is None:
                break
            self._handle(message)
        while self._outgoing:
            self._send(*self._outgoing.popleft())
        now = time.monotonic()
        if now >= self._next_trim:
            self._next_trim = now + _TICK_S
            for worker in list(self._workers.values()):
                self._give_back(worker)
                self._trim(worker)
        # Asking is a round trip to the server for each request.
        if now >= self._next_poll:
            self._next_poll = now + _CANCEL_TICK_S
            self._poll_cancelled()
            self._expire(now)
            self._give_up(now)

    def _handle(self, message: Message) -> None:
        worker = self._workers.get(message.peer)
        if worker is None:
            # What a worker says that was let go is too late.
            if self._dismissed.get(message.peer) != message.link:
                self._greet(message)
            return
        try:
            worker.silent_since = None
            self._take(worker, message)
        except ProtocolError as error:
            self._tell(worker, pack_refuse(str(error)))
            self._drop(worker, str(error))
            self._dismissed[worker.peer] = worker.link
        else:
            if worker.detaching and not worker.load:
                self._dismiss(worker, "it detached", expected=True)

    def _greet(self, message: Message) -> None:
        settings = self._settings
        try:
            hello = parse_hello(message.packet, decoupled=settings.decoupled)
            settings.check(hello)
        except GreetingError as error:
            logger.error("%s: a worker was refused: %s", self._where, error)
            answer = pack_refuse(str(error))
            worker = None
        else:
            memory = None
            if self._memory is not None and hello.memory_token:
                memory = self._memory.claim(hello.memory_token, settings.arena_budget_bytes)
            worker = AttachedWorker(message.peer, message.link, hello, memory)
            answer = Welcome(
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
        try:
            self._socket.send(answer, peer=message.peer)
        except (UnreachableError, WouldBlockError):
            if worker is not None and worker.memory is not None:
                worker.memory.close()
            return
        if worker is not None:
            how = "through messages" if worker.memory is None else "through shared memory"
            logger.info("%s: %s attached, %s", self._where, worker.label, how)
            with self._changed:
                self._workers[worker.peer] = worker
                self._hand_out()
                self._changed.notify_all()

    def _take(self, worker: AttachedWorker, message: Message) -> None:
        packet = message.packet
        if len(packet) < layout.MESSAGE.size:
            raise ProtocolError(f"it sent a packet of {len(packet)} bytes, a message has {layout.MESSAGE.size} or more")
        kind, flags, size, number, _, segment, index, offset, length = layout.MESSAGE.unpack_from(packet)
        if size != len(packet):
            raise ProtocolError(f"its message says {size} bytes, {len(packet)} came")
        if kind == MessageType.DETACH:
            with self._changed:
                worker.detaching = True
            return
        if kind in (MessageType.RELEASE, MessageType.SEGMENT_CLOSE):
            if worker.memory is None:
                raise ProtocolError(f"it sent message {kind}, and shares no memory")
            if kind == MessageType.RELEASE:
                worker.memory.take_back(segment, offset)
            else:
                worker.memory.forget(segment)
            return
        if kind not in (MessageType.RESPONSE, MessageType.FAIL):
            raise ProtocolError(f"it sent message {kind}, which a worker does not send")
        batch = worker.in_flight.get(number)
        if batch is None:
            raise ProtocolError(f"it answered batch {number}, which it does not have")
        if flags & MessageFlag.INPUT_RELEASED and batch.block is not None and worker.memory is not None:
            worker.memory.take_back(batch.block.segment, batch.block.offset)
            batch.block = None
        if kind == MessageType.FAIL:
            batch.fail(index, packet[layout.MESSAGE.size :].decode("utf-8", "replace"))
        else:
            self._take_responses(worker, batch, message.parts, segment, offset, length)
        batch.active_at = time.monotonic()
        if kind == MessageType.FAIL or flags & MessageFlag.BATCH_DONE:
            batch.fail(ErrorCode.INTERNAL, f"{worker.label} ended the batch without an answer to this request")
            del worker.in_flight[number]
            self._free(worker)
        if worker.owes_much:
            worker.owes_much = False
            self._give_back(worker)

    def _take_responses(
        self,
        worker: AttachedWorker,
        batch: BatchInFlight,
        parts: Sequence[memoryview],
        segment: int,
        offset: int,
        length: int,
    ) -> None:
        if segment and worker.memory is not None:
            # Its memory goes back to the worker when the last array on it is gone.
            record = worker.memory.view(segment, offset, length)[0].data
        elif not segment and len(parts) == 1 and len(parts[0]) == length:
            record = parts[0]
        else:
            raise ProtocolError(f"its response announces a record of {length} bytes, which did not come with it")
        # A small block goes back with the next batch, which costs nothing.
        worker.owes_much = bool(segment) and (length > _SMALL_BYTES or self._settings.decoupled)
        for response in read_responses(record, batch.number, len(batch.callers), decoupled=self._settings.decoupled):
            batch.respond(response)

    def _send(self, worker: AttachedWorker, batch: BatchInFlight) -> None:
        if not worker.gone:
            if batch.block is None and not self._write(worker, batch):
                return
            block = batch.block
            if block is None:
                raise RuntimeError(f"batch {batch.number} was not written")
            self._give_back(worker)
            packet = layout.MESSAGE.pack(
                MessageType.BATCH, 0, layout.MESSAGE.size, batch.number, 0, block.segment, 0, block.offset, batch.length
            )
            parts = () if block.segment else (memoryview(block.memory)[: batch.length],)
            if worker.memory is not None and block.segment:
                worker.memory.lend(block, batch.number)
            try:
                self._socket.send(packet, *parts, peer=worker.peer)
            except (UnreachableError, WouldBlockError):
                self._drop(worker, "its connection ended")
            else:
                if not block.segment:
                    batch.block = None  # the socket's now
                if not self._settings.repeatable:
                    batch.requests = ()
                batch.active_at = time.monotonic()
                worker.in_flight[batch.number] = batch
                return
        # Nobody has had it, so it may go to anybody.
        self._wait_for_another(batch)
        self._free(worker)

    def _wait_for_another(self, batch: BatchInFlight) -> None:
        batch.block = None
        batch.cancelled.clear()
        batch.waiting_since = time.monotonic()
        with self._changed:
            # In front of what no worker has had: the first of that came later.
            place = next((at for at, other in enumerate(self._waiting) if not other.number), None)
            self._waiting.insert(len(self._waiting) if place is None else place, batch)
            self._hand_out()

    def _give_up(self, now: float) -> None:
        """Fail what waits for a worker in vain."""
        with self._changed:
            if not self._waiting or self._has_worker():
                return
            oldest = now - self._settings.attach_timeout_s
            late = [batch for batch in self._waiting if batch.waiting_since <= oldest]
            if late:
                self._waiting = collections.deque(batch for batch in self._waiting if batch.waiting_since > oldest)
        for batch in late:
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
        for worker in list(self._workers.values()):
            for batch in worker.in_flight.values():
                if batch.is_expired or now - batch.active_at < limit_s:
                    continue
                batch.is_expired = True
                for index in batch.open - batch.cancelled:
                    self._cancel(worker, batch, index)
                batch.fail(
                    ErrorCode.UNAVAILABLE,
                    f"{self._where}: {worker.label} took longer for this request than the model's execution timeout, "
                    f"{limit_s:g} s. It may still be at it; look into its log for what it does, or allow more time",
                )
                logger.error("%s: %s: batch %d took longer than %g s", self._where, worker.label, batch.number, limit_s)
                worker.silent_since = worker.silent_since or now
            if worker.silent_since is None:
                continue
            # Whoever works on one batch at a time reads nothing before it is done: it attaches again when it is.
            if worker.hello.max_in_flight == 1 or now - worker.silent_since >= _SILENCE_S:
                self._dismiss(worker, f"a batch took longer than the execution timeout of {limit_s:g} s")

    def _give_back(self, worker: AttachedWorker) -> None:
        """Tell a worker which blocks of its memory nobody uses here any more."""
        for segment, offset in () if worker.memory is None else worker.memory.unused():
            self._tell(
                worker, layout.MESSAGE.pack(MessageType.RELEASE, 0, layout.MESSAGE.size, 0, 0, segment, 0, offset, 0)
            )

    def _trim(self, worker: AttachedWorker) -> None:
        for segment in () if worker.memory is None else worker.memory.trim(self._settings.arena_idle_s):
            self._tell(
                worker, layout.MESSAGE.pack(MessageType.SEGMENT_CLOSE, 0, layout.MESSAGE.size, 0, 0, segment, 0, 0, 0)
            )

    def _poll_cancelled(self) -> None:
        for worker in self._workers.values():
            for batch in worker.in_flight.values():
                for index in batch.open - batch.cancelled:
                    if batch.callers[index].is_cancelled():
                        self._cancel(worker, batch, index)

    def _cancel(self, worker: AttachedWorker, batch: BatchInFlight, index: int) -> None:
        batch.cancelled.add(index)
        if batch.block is not None and worker.memory is not None:
            worker.memory.mark_cancelled(batch.block, batch.number, index)
        if worker.hello.capabilities & layout.Capability.CANCEL:
            self._tell(
                worker,
                layout.MESSAGE.pack(MessageType.CANCEL, 0, layout.MESSAGE.size, batch.number, 0, 0, index, 0, 0),
            )

    def _tell(self, worker: AttachedWorker, packet: bytes) -> None:
        """Send what may get lost: who is gone needs it no more."""
        try:
            self._socket.send(packet, peer=worker.peer)
        except (UnreachableError, WouldBlockError):
            logger.debug("%s: %s is gone already", self._where, worker.label)

    def _dismiss(self, worker: AttachedWorker, reason: str, *, expected: bool = False) -> None:
        """Let a worker go that is still connected."""
        self._tell(worker, layout.MESSAGE.pack(MessageType.DETACH, 0, layout.MESSAGE.size, 0, 0, 0, 0, 0, 0))
        self._drop(worker, reason, expected=expected)
        self._dismissed[worker.peer] = worker.link

    def _drop(self, worker: AttachedWorker, reason: str, *, expected: bool = False) -> None:
        if worker.gone:
            return
        logger.log(logging.INFO if expected else logging.ERROR, "%s: %s is gone: %s", self._where, worker.label, reason)
        batches = list(worker.in_flight.values())
        with self._changed:
            worker.gone = True
            worker.load -= len(batches)
            worker.in_flight.clear()
            self._workers.pop(worker.peer, None)
            self._last_end = time.monotonic()
            self._changed.notify_all()
        if worker.memory is not None:
            worker.memory.close()
        if not expected:
            self._last_loss = f" The last that was lost was {worker.label}: {reason}"
        for batch in batches:
            loss = f"{self._where}: {worker.label} was lost while it worked on this request: {reason}"
            once = not (batch.loss or batch.is_answered or batch.is_expired or expected)
            if self._settings.repeatable and once and batch.open:
                batch.loss = loss
                self._wait_for_another(batch)
            else:
                batch.fail(
                    ErrorCode.UNAVAILABLE,
                    f"{loss}. The request may have been carried out; look into the worker's log for the cause, and "
                    f"send it again if that is safe",
                )
