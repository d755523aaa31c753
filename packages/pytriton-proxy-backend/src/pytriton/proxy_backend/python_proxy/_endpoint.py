"""Where workers attach: one thread that owns the socket, and batches that wait for their answers.

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
from dataclasses import dataclass, field
from typing import Protocol

from .. import _layout as layout
from .._greetings import GreetingError, Hello, pack_greeting, parse_hello
from .._layout import ErrorCode, MessageFlag, MessageType
from .._zmq import Message, UnreachableError, WouldBlockError, ZmqSocket
from ..errors import ProtocolError
from ._records import RequestData, ResponseData, read_responses, write_batch

logger = logging.getLogger("pytriton.python_proxy")

_TICK_S = 0.5
_CANCEL_TICK_S = 0.05
_STOP_TIMEOUT_S = 10.0


class Caller(Protocol):
    """One request of Triton's that waits for its answer."""

    def respond(self, response: ResponseData) -> None:
        """Gives it one response; where that cannot be given, an error."""

    def fail(self, code: int, text: str) -> None:
        """Ends it with an error."""

    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """What the endpoint must know of its model.

    Attributes:
        model_name: The model.
        model_version: Its version.
        batching: Whether tensors have a batch axis in front.
        decoupled: Whether a request may get any number of responses.
        attach_timeout_s: How long a request waits where no worker is attached, in seconds.
        budget_bytes: The largest record, in bytes.
        tensors_digest: `ModelSpec.tensors_digest`, which that of a worker's model must be; empty compares nothing.
    """

    model_name: str
    model_version: int
    batching: bool
    decoupled: bool
    attach_timeout_s: float
    budget_bytes: int
    tensors_digest: str = ""

    def check(self, hello: Hello) -> None:
        """Checks that a worker is for this model.

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


@dataclass
class _Batch:
    number: int
    record: bytearray
    callers: list[Caller]
    open: set[int]
    cancelled: set[int] = field(default_factory=set)

    def respond(self, response: ResponseData) -> None:
        if response.request not in self.open:
            logger.warning("batch %d: a response to request %d came after its end", self.number, response.request)
            return
        if response.final:
            self.open.discard(response.request)
        self.callers[response.request].respond(response)

    def fail(self, code: int, text: str) -> None:
        while self.open:
            self.callers[self.open.pop()].fail(code, text)


@dataclass
class _Worker:
    peer: bytes
    link: int
    hello: Hello
    in_flight: dict[int, _Batch] = field(default_factory=dict)
    load: int = 0  # with what is on its way to the thread
    detaching: bool = False
    gone: bool = False

    @property
    def label(self) -> str:
        return f"worker '{self.hello.name}' (pid {self.hello.pid})"

    @property
    def is_idle(self) -> bool:
        return not self.detaching and not self.gone and self.load < self.hello.max_in_flight


class ProxyEndpoint:
    """Listens for workers and hands batches to them.

    Args:
        settings: What it must know of its model.
        make_socket: Makes the socket, in the thread that is to own it.
    """

    def __init__(self, settings: EndpointSettings, make_socket: Callable[[], ZmqSocket]) -> None:
        self._settings = settings
        self._make_socket = make_socket
        self._where = f"model '{settings.model_name}' version {settings.model_version}"
        self._changed = threading.Condition()
        self._workers: dict[bytes, _Worker] = {}
        self._outgoing: collections.deque[tuple[_Worker, _Batch]] = collections.deque()
        self._next_number = 1
        self._place = 0
        self._stopping = False
        self._next_poll = 0.0
        self._socket: ZmqSocket
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pytriton-python-proxy", daemon=True)
        self.address = ""

    # ---- for the thread of Triton ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to listen.

        Raises:
            BindError: If nobody can listen at the address.
            KeyFileError: If a key cannot be read.
        """
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def execute(self, requests: Sequence[RequestData], callers: Sequence[Caller]) -> None:
        """Hands a batch to a worker; returns as soon as another one is idle, or none has anything to do.

        Every caller is answered, now or later, from this thread or another one.
        """
        received_ns = time.monotonic_ns()
        batch = _Batch(0, bytearray(), list(callers), set(range(len(callers))))
        worker = self._claim()
        if worker is None:
            batch.fail(
                ErrorCode.UNAVAILABLE,
                f"{self._where}: no worker is attached. Waited {self._settings.attach_timeout_s:g} s for one at "
                f"'{self.address}'; is the process that serves this model alive?",
            )
            return
        with self._changed:
            batch.number = self._next_number
            self._next_number += 1
        try:
            batch.record = write_batch(
                batch.number,
                requests,
                batching=self._settings.batching,
                received_ns=received_ns,
                sent_ns=time.monotonic_ns(),
            )
            if len(batch.record) > self._settings.budget_bytes:
                raise ValueError(
                    f"the inputs of the batch take {len(batch.record)} bytes, a message may have "
                    f"{self._settings.budget_bytes}. Raise arena_budget_bytes of the model, or send smaller batches"
                )
        except (TypeError, ValueError) as error:
            self._give_back(worker)
            batch.fail(ErrorCode.INVALID_ARG, f"{self._where}: {error}")
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

    def _claim(self) -> _Worker | None:
        deadline = time.monotonic() + self._settings.attach_timeout_s
        with self._changed:
            while not self._stopping:
                workers = list(self._workers.values())
                for index in range(len(workers)):
                    place = (self._place + index) % len(workers)
                    if workers[place].is_idle:
                        self._place = place + 1
                        workers[place].load += 1
                        return workers[place]
                # As long as one is attached it answers sooner or later, or dies: only its absence has a limit.
                if any(not worker.detaching for worker in workers):
                    self._changed.wait(_TICK_S)
                    deadline = max(deadline, time.monotonic() + _TICK_S)
                elif not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return None
        return None

    def _give_back(self, worker: _Worker) -> None:
        with self._changed:
            worker.load -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends every connection; what is in flight fails."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._started.is_set() and self._error is None:
            self._socket.wake()
        self._thread.join(_STOP_TIMEOUT_S)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._socket = self._make_socket()
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
                self._socket.wait(_CANCEL_TICK_S if any(w.in_flight for w in self._workers.values()) else _TICK_S)
                self._turn()
        except BaseException as error:
            logger.exception("%s: the thread of the endpoint failed: %s", self._where, error)
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            for worker in list(self._workers.values()):
                self._tell(worker, layout.MESSAGE.pack(MessageType.DETACH, 0, layout.MESSAGE.size, 0, 0, 0, 0, 0, 0))
                self._drop(worker, "the model is unloaded", expected=True)
            while self._outgoing:
                self._outgoing.popleft()[1].fail(ErrorCode.UNAVAILABLE, f"{self._where}: the model is unloaded")
            self._socket.close()

    def _turn(self) -> None:
        while True:
            # Before each message: a number may be that of an earlier connection, whose end was told before.
            for event in self._socket.events():
                if event.kind == "refused":
                    logger.error("%s: a worker was refused: its keys are not known here", self._where)
                for worker in [other for other in self._workers.values() if other.link == event.link]:
                    if event.kind == "gone":
                        self._drop(worker, "its connection ended")
            message = self._socket.receive()
            if message is None:
                break
            self._handle(message)
        while self._outgoing:
            self._send(*self._outgoing.popleft())
        # Asking is a round trip to the server for each request.
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + _CANCEL_TICK_S
            self._poll_cancelled()

    def _handle(self, message: Message) -> None:
        worker = self._workers.get(message.peer)
        if worker is None:
            self._greet(message)
            return
        try:
            self._take(worker, message)
        except ProtocolError as error:
            self._tell(worker, pack_greeting(MessageType.REFUSE, str(error)))
            self._drop(worker, str(error))
        else:
            if worker.detaching and not worker.load:
                self._tell(worker, layout.MESSAGE.pack(MessageType.DETACH, 0, layout.MESSAGE.size, 0, 0, 0, 0, 0, 0))
                self._drop(worker, "it detached", expected=True)

    def _greet(self, message: Message) -> None:
        settings = self._settings
        try:
            hello = parse_hello(message.packet, decoupled=settings.decoupled)
            settings.check(hello)
        except GreetingError as error:
            logger.error("%s: a worker was refused: %s", self._where, error)
            answer = pack_greeting(MessageType.REFUSE, str(error))
            worker = None
        else:
            worker = _Worker(message.peer, message.link, hello)
            flags = layout.ModelFlag.BATCHING * settings.batching | layout.ModelFlag.DECOUPLED * settings.decoupled
            answer = pack_greeting(
                MessageType.WELCOME,
                settings.model_name,
                max_in_flight=hello.max_in_flight,
                capabilities=hello.capabilities,
                model_flags=flags,
                model_version=settings.model_version,
                arena_budget=settings.budget_bytes,
            )
        try:
            self._socket.send(answer, peer=message.peer)
        except (UnreachableError, WouldBlockError):
            return
        if worker is not None:
            logger.info("%s: %s attached", self._where, worker.label)
            with self._changed:
                self._workers[worker.peer] = worker
                self._changed.notify_all()

    def _take(self, worker: _Worker, message: Message) -> None:
        packet = message.packet
        if len(packet) < layout.MESSAGE.size:
            raise ProtocolError(f"it sent a packet of {len(packet)} bytes, a message has {layout.MESSAGE.size} or more")
        kind, flags, size, number, _, _, index, _, length = layout.MESSAGE.unpack_from(packet)
        if size != len(packet):
            raise ProtocolError(f"its message says {size} bytes, {len(packet)} came")
        if kind == MessageType.DETACH:
            with self._changed:
                worker.detaching = True
            return
        if kind not in (MessageType.RESPONSE, MessageType.FAIL):
            raise ProtocolError(f"it sent message {kind}, which a worker does not send")
        batch = worker.in_flight.get(number)
        if batch is None:
            raise ProtocolError(f"it answered batch {number}, which it does not have")
        if kind == MessageType.FAIL:
            batch.fail(index, packet[layout.MESSAGE.size :].decode("utf-8", "replace"))
        else:
            if len(message.parts) != 1 or len(message.parts[0]) != length:
                raise ProtocolError(f"its response announces a record of {length} bytes, which did not come with it")
            settings = self._settings
            for response in read_responses(message.parts[0], number, len(batch.callers), decoupled=settings.decoupled):
                batch.respond(response)
        if kind == MessageType.FAIL or flags & MessageFlag.BATCH_DONE:
            batch.fail(ErrorCode.INTERNAL, f"{worker.label} ended the batch without an answer to this request")
            del worker.in_flight[number]
            self._give_back(worker)

    def _send(self, worker: _Worker, batch: _Batch) -> None:
        if not worker.gone:
            packet = layout.MESSAGE.pack(
                MessageType.BATCH, 0, layout.MESSAGE.size, batch.number, 0, 0, 0, 0, len(batch.record)
            )
            try:
                self._socket.send(packet, batch.record, peer=worker.peer)
            except (UnreachableError, WouldBlockError):
                self._drop(worker, "its connection ended")
            else:
                batch.record = bytearray()  # the socket's now
                worker.in_flight[batch.number] = batch
                return
        self._give_back(worker)
        batch.fail(ErrorCode.UNAVAILABLE, f"{self._where}: {worker.label} was lost before it had this request")

    def _poll_cancelled(self) -> None:
        for worker in self._workers.values():
            for batch in worker.in_flight.values():
                for index in batch.open - batch.cancelled:
                    if batch.callers[index].is_cancelled():
                        batch.cancelled.add(index)
                        if worker.hello.capabilities & layout.Capability.CANCEL:
                            self._tell(
                                worker,
                                layout.MESSAGE.pack(
                                    MessageType.CANCEL, 0, layout.MESSAGE.size, batch.number, 0, 0, index, 0, 0
                                ),
                            )

    def _tell(self, worker: _Worker, packet: bytes) -> None:
        """Sends what may get lost: who is gone needs it no more."""
        try:
            self._socket.send(packet, peer=worker.peer)
        except (UnreachableError, WouldBlockError):
            logger.debug("%s: %s is gone already", self._where, worker.label)

    def _drop(self, worker: _Worker, reason: str, *, expected: bool = False) -> None:
        if worker.gone:
            return
        logger.log(logging.INFO if expected else logging.ERROR, "%s: %s is gone: %s", self._where, worker.label, reason)
        batches = list(worker.in_flight.values())
        with self._changed:
            worker.gone = True
            worker.load -= len(batches)
            worker.in_flight.clear()
            self._workers.pop(worker.peer, None)
            self._changed.notify_all()
        for batch in batches:
            batch.fail(
                ErrorCode.UNAVAILABLE,
                f"{self._where}: {worker.label} was lost while it worked on this request: {reason}. The request may "
                f"have been carried out; look into the worker's log for the cause, and send it again if that is safe",
            )
