"""Requests that are in Triton: from the moment that they are submitted until Triton has done with them.

The native library holds the C object of a request, and a queue of its responses, until Triton has released the request
and given its last response. Whoever waits for a response takes it from that queue. Only for those who do not wait (an
event loop, a queue of the caller's) the library calls back for each response; and for all, when a request ends later
than its last response was taken.
"""

from __future__ import annotations

import logging
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Mapping
from typing import Any, Final

from pytriton.inprocess.capi.errors import CancelledError, InternalError, InvalidArgumentError, TritonError
from pytriton.inprocess.requests.access import ServerAccess
from pytriton.inprocess.requests.model_spec import describe, explain, fetch_spec, forget_spec
from pytriton.inprocess.requests.named import access_of
from pytriton.inprocess.requests.native_calls import (
    Event,
    NativeCalls,
    ResponseContent,
    ResponseFlag,
    load_native_calls,
)
from pytriton.inprocess.requests.request import InferenceRequest, create, output_gpu
from pytriton.inprocess.requests.response import InferenceResponse, new_response, read_response
from pytriton.inprocess.requests.tracing import StartedTrace, start_trace
from pytriton.inprocess.requests.values import is_untyped, to_tensor
from pytriton.inprocess.tensors.gpu import gpu_allocator
from pytriton.inprocess.tensors.memory import MemoryBuffer

logger = logging.getLogger(__name__)

# Plain integers, because combining members of an enum takes longer than the rest of this code.
_FINAL: Final = int(ResponseFlag.FINAL)
_CANCELLED: Final = int(ResponseFlag.CANCELLED)
_COMPLETE: Final = int(ResponseFlag.COMPLETE)
_RELEASED: Final = int(Event.RELEASED)
_RESPONDED: Final = int(Event.RESPONDED)
_COMPLETED: Final = int(Event.COMPLETED)
# A waiting thread handles signals this often.
_SLICE_NS: Final = 50_000_000


class Pending:
    """A request in Triton."""

    __slots__ = (
        "__weakref__",
        "_calls",
        "_collecting",
        "_deliver",
        "_lock",
        "access",
        "gpu",
        "gpu_buffers",
        "handle",
        "keep",
        "native",
        "number",
        "request",
        "trace",
    )

    def __init__(
        self,
        access: ServerAccess,
        request: InferenceRequest,
        deliver: Callable[[InferenceResponse], None] | None,
        calls: NativeCalls,
    ) -> None:
        self._calls = calls
        self.access = access
        self.request = request
        self.handle = 0  # the request of the C API; 0 before there is one
        self.number = next(calls.numbers)
        self.native = calls.new(self.number)  # the native side of the request
        self.keep: list[Any] = []  # what the inputs lie in
        self.gpu: int | None = None  # the GPU that outputs are wanted on
        self.gpu_buffers: dict[int, MemoryBuffer] = {}  # memory for outputs there, by its address
        self.trace: StartedTrace | None = None  # its trace, if it has one
        self._deliver = deliver
        # Keeps deliveries in order. Reentrant, because the garbage collector may drop an iterator, and so cancel a
        # request, at any time.
        self._lock = None if deliver is None else threading.RLock()
        self._collecting = False

    def cancel(self) -> None:
        """Ask Triton to cancel the request, and end the wait for its responses with an error. Does not raise."""
        # In a forked child, the request belongs to the parent.
        if not self.access.is_foreign and self._calls.cancel(self.native):
            self.finish()

    def take(self, timeout_s: float | None) -> InferenceResponse | None:
        """Wait for the next response; `None` if it does not come in that time."""
        deadline = None if timeout_s is None else time.monotonic_ns() + int(timeout_s * 1e9)
        wait_ns = _SLICE_NS
        while True:
            if deadline is not None:
                wait_ns = max(0, min(_SLICE_NS, deadline - time.monotonic_ns()))
            content = self._calls.take(self.native, wait_ns)
            if content:
                return self._read(content)
            if content is False:
                raise StopIteration
            if deadline is not None and time.monotonic_ns() >= deadline:
                return None
            if self.access.is_foreign:
                raise self.access.refusal()

    def _read(self, content: ResponseContent) -> InferenceResponse:
        flags = content[0]
        request = self.request
        response = new_response(request.model, request.request_id, bool(flags & _FINAL))
        if flags & _CANCELLED:
            place = describe(request.model)
            response.error = CancelledError(f"The request to {place} was cancelled.", where=place)
        else:
            try:
                read_response(content, response, self.gpu_buffers)
            except BaseException as failure:
                logger.exception("a response of %s could not be read", describe(request.model))
                response.error = _unread(failure, request)
        if flags & _COMPLETE:
            self.finish()
        return response

    def on_events(self, events: int) -> None:
        """See `SubmittedRequest`."""
        if events & _RELEASED:
            self._calls.input_owners.pop(self.handle, None)
            self.keep = []
        # The end of a request may be reported by another thread than its last response, and before it.
        if events & (_RESPONDED | _COMPLETED):
            self._collect()
        if events & _COMPLETED:
            self.finish()

    def _collect(self) -> None:
        lock, deliver = self._lock, self._deliver
        if lock is None or deliver is None:
            return
        with lock:
            if self._collecting:
                # This thread is in the middle of a delivery, which continues with the new response.
                return
            self._collecting = True
            try:
                while content := self._calls.take(self.native, 0):
                    try:
                        deliver(self._read(content))
                    except BaseException:
                        logger.exception("a response of %s could not be handed over", describe(self.request.model))
            finally:
                self._collecting = False

    def abandon(self) -> None:
        """Undo all for a request that could not be submitted. If a signal interrupts that, it can be done again."""
        if not self._calls.withdraw(self.native):
            # A signal came just after Triton had taken the request, so it is cancelled.
            self.cancel()
            return
        try:
            self._calls.input_owners.pop(self.handle, None)
            if self.trace is not None:
                self.trace.withdraw()
        finally:
            # In any case, because an unfinished request would block the stop of the server.
            self.finish()

    def finish(self) -> None:
        """Note that Triton has done with the request. Does nothing if that is known."""
        self._calls.pending.pop(self.number, None)
        self.keep = []
        self.access.finish(self)


def submit(request: InferenceRequest, deliver: Callable[[InferenceResponse], None] | None) -> Pending:
    """Give a request to Triton."""
    access = access_of(request.model)
    try:
        _check_presence(access, request)
        return _submit(access, request, deliver)
    except TritonError as error:
        refusal = error
    # Lists have the type that the model had at the last look; it may have been loaded again since.
    untyped = isinstance(request.inputs, Mapping) and any(is_untyped(value) for value in request.inputs.values())
    if untyped and forget_spec(request.model):
        try:
            return _submit(access, request, deliver)
        except TritonError as error:
            refusal = error
    if refusal.where is not None:
        # This error says more than Triton's.
        raise refusal
    raise _explained(refusal, request)


def _submit(
    access: ServerAccess, request: InferenceRequest, deliver: Callable[[InferenceResponse], None] | None
) -> Pending:
    calls = load_native_calls()
    pending = Pending(access, request, deliver, calls)
    allocator = None
    if request.output_memory_type is not None:
        pending.gpu = output_gpu(request)
        if pending.gpu is not None:
            allocator = gpu_allocator(_find_gpu)
    try:
        server = access.admit(pending).value or 0
        handle = pending.handle = create(access.api, calls, pending.native, server, request, pending.keep)
        trace = None
        if request.trace is not None:
            pending.trace = start_trace(access.api, request.trace)
            trace = pending.trace.handle
        events = 0 if deliver is None else _RESPONDED
        if pending.keep:
            calls.input_owners[handle] = pending.keep
            events |= _RELEASED
        calls.pending[pending.number] = pending
        calls.submit(pending.native, server, trace, allocator, events)
    except BaseException:
        try:
            pending.abandon()
        except BaseException:
            # Another signal came. A thread tries again, because Python handles signals in the main thread only.
            start_new_thread(pending.abandon, ())
            raise
        raise
    return pending


def _find_gpu(number: int) -> tuple[int, dict[int, MemoryBuffer]]:
    pending = load_native_calls().pending[number]
    return pending.gpu or 0, pending.gpu_buffers


def _check_presence(access: ServerAccess, request: InferenceRequest) -> None:
    """Find inputs that are missing. Triton only counts them: any input would do for one that is not optional."""
    model, inputs = request.model, request.inputs
    if inputs.__class__ is dict or isinstance(inputs, Mapping):
        known = access.model_specs.get((model.name, model.version)) or fetch_spec(model)
        for name in known.required:
            # The cached description may be out of date.
            if name not in inputs and not inputs.keys() >= fetch_spec(model).required:
                raise InvalidArgumentError("An input is missing.")


def _explained(error: TritonError, request: InferenceRequest) -> TritonError:
    tensors = {name: to_tensor(request.model, name, value) for name, value in request.inputs.items()}
    sent = {name: (tensor.data_type, tensor.shape) for name, tensor in tensors.items()}
    return explain(error, request.model, sent, tuple(request.requested_outputs))


def _unread(error: BaseException, request: InferenceRequest) -> TritonError:
    if isinstance(error, TritonError):
        return error
    place = describe(request.model)
    return InternalError(f"A response of {place} could not be read: {type(error).__name__}: {error}", where=place)
