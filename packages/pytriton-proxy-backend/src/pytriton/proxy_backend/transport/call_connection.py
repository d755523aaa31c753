"""`CallConnection`: one connection for calls into the server, by any thread; `Call`: one that is under way."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import AttachError, CallFailedError, ConnectionLostError, ProtocolError, ProxyBackendError
from ..protocol.calls import CallsProtocol
from ..system.forks import call_in_child, replace_descriptors
from ..system.threads import call_safely
from ..wire import messages
from ..wire.batch import RequestData, RequestWriter
from ..wire.greetings import Hello
from ..wire.layout import CAPABILITIES, MAX_PACKET, Capability, ErrorCode, Operation
from ..wire.limits import ARENA_TIMEOUT_S
from ..wire.messages import BATCH_DONE, Header, pack_segment, pack_segment_close, read_reason
from ..wire.record import Array, ParameterValue
from ..wire.response import AnswerReader
from .arena import OwnArena, OwnedBlock, PeerArena
from .connection import ANCILLARY_SIZE, RECEIVE_FLAGS, descriptors_of, timeval
from .link import GREETING_TIMEOUT_S, SEND_TIMEOUT_S, TICK_S
from .places import connect_to

logger = logging.getLogger(__name__)


class CallResult(NamedTuple):
    """One answer to a call."""

    error: CallFailedError | None  # what went wrong, instead of outputs
    outputs: dict[str, Array]  # the outputs by name; numbers are views on shared memory, which lasts as long as they do
    parameters: Mapping[str, ParameterValue]  # the response parameters
    final: bool  # whether nothing more comes
    value: int = 0  # the number of what was made, or the bits of what was asked for, where the call is no inference


class Call:
    """A call that is under way: iterate over its answers, with `for` or `async for`, or take the first one.

    Thread-safe; each answer goes to one of those who wait. What nobody waits for is kept.
    """

    def __init__(self, cancel: Callable[[Call], None], on_response: Callable[[CallResult], object] | None) -> None:
        self.number = 0
        self._cancel = cancel
        self._on_response = on_response
        self._results: collections.deque[CallResult] = collections.deque()
        self._ended = False  # the last answer has been taken
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def cancel(self) -> None:
        """Cancel the call; an answer still comes, mostly an error."""
        self._cancel(self)

    def result(self, timeout_s: float | None = None) -> CallResult:
        """Wait for the next answer."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._results or self._ended, timeout_s):
                self._cancel(self)
                raise TimeoutError(f"the server did not answer a call within {timeout_s:g} s; it was cancelled")
            return self._take()

    def __iter__(self) -> Iterator[CallResult]:
        """Iterate over the answers, as they come."""
        return self

    def __next__(self) -> CallResult:
        """Wait for the next answer."""
        return self.result()

    def __aiter__(self) -> AsyncIterator[CallResult]:
        """Iterate over the answers, as they come, in an event loop."""
        return self

    async def __anext__(self) -> CallResult:
        """Wait for the next answer in an event loop."""
        came = asyncio.Event()
        waiter = (asyncio.get_running_loop(), came)
        while True:
            with self._changed:
                if self._results or self._ended:
                    try:
                        return self._take()
                    except StopIteration:
                        raise StopAsyncIteration from None
                came.clear()
                self._waiters.append(waiter)
            try:
                await came.wait()
            finally:
                with self._changed, contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)

    def _take(self) -> CallResult:
        if not self._results:
            raise StopIteration
        result = self._results.popleft()
        self._ended = result.final
        return result

    def deliver(self, result: CallResult) -> None:
        """Take an answer that came."""
        if self._on_response is not None:
            try:
                self._on_response(result)
            except Exception:
                logger.exception("what an answer of the server was passed to failed")
            return
        with self._changed:
            self._results.append(result)
            self._changed.notify_all()
            waiters = self._waiters
            self._waiters = []
        for loop, came in waiters:
            # The loop may be closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(came.set)


class CallConnection:
    """Sends calls, and gives each its answers. Thread-safe."""

    def __init__(self, endpoint: Path, name: str) -> None:
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._pending: dict[int, Call] = {}
        self._discarded: collections.deque[tuple[Operation, int]] = collections.deque()
        self._ending: ProxyBackendError | None = None
        self._writer = RequestWriter()
        self._reader = AnswerReader()
        self._outputs = OwnArena(0)
        hello = Hello(name=name, capabilities=CAPABILITIES | Capability.CALLS)
        self._protocol: CallsProtocol[OwnedBlock] = CallsProtocol(hello, self._free)
        self._inputs = PeerArena(self._protocol.segments.released)
        self._buffer = bytearray(MAX_PACKET)
        self._socket = self._connect(endpoint)
        self._outputs.budget = self._protocol.welcome.arena_budget
        call_in_child(self, CallConnection._end_in_child)
        self._thread = threading.Thread(target=self._run, name="pytriton-calls", daemon=True)
        self._thread.start()

    def _connect(self, endpoint: Path) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(GREETING_TIMEOUT_S)
            connect_to(connection, endpoint)
            connection.send(self._protocol.greet())
            packet = connection.recv(MAX_PACKET)
            if not packet:
                raise AttachError(
                    f"the proxy backend at {endpoint} closed a connection for calls: its server ends, or it is older "
                    "than this worker and takes none"
                )
            self._protocol.receive(packet, len(packet))
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(TICK_S))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(SEND_TIMEOUT_S))
        except TimeoutError as error:
            connection.close()
            raise AttachError(
                f"the proxy backend at {endpoint} did not answer a greeting within {GREETING_TIMEOUT_S:g} s"
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection

    # ---- sending ----------------------------------------------------------------------------------------------------

    def ask(
        self, operation: Operation, request: RequestData | None = None, *, timeout_s: float | None = None, **fields: Any
    ) -> int:
        """Make a call, see `CallsProtocol.call`, and wait for its value; the call is cancelled after `timeout_s`."""
        result = self.start(operation, request, None, **fields).result(timeout_s)
        if result.error is not None:
            raise result.error
        return result.value

    def start(
        self,
        operation: Operation,
        request: RequestData | None,
        on_response: Callable[[CallResult], object] | None,
        **fields: Any,
    ) -> Call:
        """Make a call, see `CallsProtocol.call`.

        `on_response` gets the answers in the thread of the connection; `None` keeps them in the call.
        """
        record = None if request is None else self._writer.lay_out(request)
        call = Call(self._cancel, on_response)
        with self._lock:
            self._send_discarded()
            length = 0 if record is None else record.layout.length
            block = None if record is None else self._allocate(length)
            try:
                if record is not None and block is not None:
                    record.write(block.memory, block.offset, self._protocol.next_number)
                self._check_open()
                call.number, packet = self._protocol.call(operation, block=block, length=length, **fields)
            except BaseException:
                if block is not None:
                    self._free(block)
                raise
            self._pending[call.number] = call
            try:
                self._send([*self._protocol.release(), packet])
            except ConnectionLostError:
                del self._pending[call.number]
                raise
        return call

    def discard(self, operation: Operation, number: int) -> None:
        """Delete an object of the server soon; a finalizer may call this at any point."""
        self._discarded.append((operation, number))
        # A finalizer may run while this thread holds the lock; then the next message carries it.
        if self._lock.acquire(blocking=False):
            try:
                self._send_discarded()
            finally:
                self._lock.release()

    def _send_discarded(self) -> None:
        while self._discarded and self._ending is None:
            operation, number = self._discarded.popleft()
            call = Call(self._cancel, _discard_refused)
            call.number, packet = self._protocol.call(operation, subject=number)
            self._pending[call.number] = call
            self._send([packet])

    def _cancel(self, call: Call) -> None:
        with self._lock:
            packet = self._protocol.cancel(call.number)
            if packet is not None and self._ending is None:
                self._send([packet])

    def _allocate(self, length: int) -> OwnedBlock:
        deadline = time.monotonic() + ARENA_TIMEOUT_S
        while True:
            self._check_open()
            block = self._outputs.allocate(length)
            if block is not None:
                return block
            if length <= self._outputs.budget and not self._outputs.can_grow(length):
                unused = self._outputs.drop_unused()
                self._send([pack_segment_close(number) for number in unused])
                # Wait until calls in flight give blocks back.
                if not unused and self._room.wait(max(0.0, deadline - time.monotonic())):
                    continue
                if unused:
                    continue
            self._announce(length)

    def _announce(self, length: int) -> None:
        segment = self._outputs.add_segment(length)  # raises an error with the numbers if the budget does not allow it
        try:
            socket.send_fds(self._socket, [pack_segment(segment.number, segment.size)], [segment.fd])
        except OSError as error:
            raise _lost(error) from error
        finally:
            os.close(segment.fd)

    def _free(self, block: OwnedBlock) -> None:
        self._outputs.release(block)
        self._room.notify_all()

    def _send(self, packets: Sequence[bytes]) -> None:
        try:
            for packet in packets:
                self._socket.send(packet)
        except OSError as error:
            raise _lost(error) from error

    def _check_open(self) -> None:
        if self._ending is not None:
            raise ConnectionLostError(f"no calls into the server any more: {self._ending}")

    # ---- receiving --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        views = [memoryview(self._buffer)]
        ending: ProxyBackendError = ConnectionLostError("the proxy backend closed the connection for calls")
        try:
            while True:
                try:
                    size, ancillary, _, _ = self._socket.recvmsg_into(views, ANCILLARY_SIZE, RECEIVE_FLAGS)
                except BlockingIOError:
                    self._tick()
                    continue
                if size == 0:
                    break
                self._take(size, descriptors_of(ancillary) if ancillary else [])
        except ProxyBackendError as error:
            ending = error
        except OSError as error:
            ending = _lost(error)
        except Exception as error:
            # Callers must not wait for ever.
            call_safely(logger.exception, "The answers to calls cannot be read: their connection is closed")
            ending = ConnectionLostError(f"the connection for calls failed: {type(error).__name__}: {error}")
        self._end(ending)

    def _tick(self) -> None:
        with self._lock:
            self._send_discarded()
            self._send(self._protocol.release())
            if self._outputs.has_idle():
                self._send(list(map(pack_segment_close, self._outputs.trim(self._protocol.welcome.arena_idle_s))))

    def _take(self, size: int, fds: list[int]) -> None:
        with self._lock:
            try:
                header = self._protocol.receive(self._buffer, size, len(fds))
                kind, flags, _, number, _, segment, _, _, length = header
                if kind == messages.SEGMENT:
                    self._inputs.attach(segment, fds.pop(), length)
                elif kind == messages.SEGMENT_CLOSE:
                    self._inputs.detach(segment)
            finally:
                for fd in fds:
                    os.close(fd)
            if kind not in (messages.RESPONSE, messages.FAIL, messages.RESULT):
                return
            call = self._pending.pop(number) if flags & BATCH_DONE else self._pending[number]
        result = self._read(header, size)
        # The function that gets the answer may be the model's.
        call_safely(call.deliver, result)

    def _read(self, header: Header, size: int) -> CallResult:
        kind, flags, _, number, _, segment, code, offset, length = header
        final = bool(flags & BATCH_DONE)
        if kind == messages.RESULT:
            return CallResult(None, {}, {}, final, length)
        if kind == messages.FAIL:
            return CallResult(CallFailedError(read_reason(self._buffer[:size]), code=code), {}, {}, final)
        block: Any = self._inputs.block(segment, offset, length)[0]
        try:
            response = self._reader.read(memoryview(block), number)
        except (ProtocolError, ValueError) as reason:
            error = CallFailedError(f"an answer of the server cannot be read: {reason}", code=ErrorCode.INVALID_ARG)
            return CallResult(error, {}, {}, final)
        if response.error is not None:
            return CallResult(CallFailedError(response.error, code=response.code), {}, {}, final)
        return CallResult(None, response.outputs, response.parameters, final)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _end(self, ending: ProxyBackendError) -> None:
        with self._lock:
            self._ending = ending
            pending = list(self._pending.values())
            self._pending.clear()
            self._room.notify_all()
            self._socket.close()
            # Memory that the user has no views of is freed now, and not with the last reference to this object.
            self._protocol.end()
            self._outputs = OwnArena(0)
            self._inputs = PeerArena()
        for call in pending:
            error = CallFailedError(f"the call was lost: {ending}", code=ErrorCode.UNAVAILABLE)
            call.deliver(CallResult(error, {}, {}, True))

    def close(self) -> None:
        """Close the connection: running calls are cancelled and fail, and metrics are deleted."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _end_in_child(self) -> None:
        # A forked child has the descriptor but not the thread, and maybe a lock that stays held.
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._ending = ConnectionLostError("this process was forked from the one that has the connection")
        replace_descriptors([self._socket.fileno()])


def _lost(error: OSError) -> ConnectionLostError:
    if isinstance(error, BlockingIOError):
        return ConnectionLostError(f"the proxy backend read nothing from its socket for {SEND_TIMEOUT_S:g} s")
    return ConnectionLostError(f"the connection for calls broke: {error}")


def _discard_refused(result: CallResult) -> None:
    if result.error is not None:
        logger.warning("a metric was not deleted: %s", result.error)
