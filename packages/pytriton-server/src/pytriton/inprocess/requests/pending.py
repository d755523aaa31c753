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
from ctypes import addressof, c_uint64, string_at
from typing import Any, Final

from pytriton.inprocess.capi.errors import CancelledError, InternalError, InvalidArgumentError, TritonError
from pytriton.inprocess.capi.native_calls import Event, NativeCalls, RecordSlot, load_native_calls
from pytriton.inprocess.requests.access import ServerAccess
from pytriton.inprocess.requests.model_spec import describe, explain, fetch_spec, forget_spec, known_spec
from pytriton.inprocess.requests.request import InferenceRequest, fill, output_gpu
from pytriton.inprocess.requests.response import InferenceResponse, read_response
from pytriton.inprocess.requests.tracing import StartedTrace, start_trace
from pytriton.inprocess.requests.values import is_untyped, to_tensor
from pytriton.inprocess.tensors.gpu import gpu_allocator
from pytriton.inprocess.tensors.memory import MemoryBuffer

__all__ = ["Pending", "submit"]

logger = logging.getLogger(__name__)

# Flags of a record, as in `native/inprocess/calls.cc`.
_FINAL: Final = 1
_CANCELLED: Final = 4
_OVER: Final = 8
_FLAGS_AT: Final = 8
_Handles: Any = c_uint64 * 2
# Numbers, as to combine members of an enum takes longer than most of what is done here.
_RELEASED: Final = int(Event.RELEASED)
_ARRIVED: Final = int(Event.ARRIVED)
_ENDED: Final = int(Event.ENDED)
# A thread that waits handles signals so often.
_SLICE_NS: Final = 50_000_000


class Pending:
    """A request in Triton.

    Args:
        access: The server that it is in.
        request: What was asked for.
        deliver: Gets the responses, in a thread of Triton's, or in the one that cancels. It must not block. `None`
            where they are taken.
        native: The functions.
    """

    __slots__ = (
        "__weakref__",
        "_cancelled",
        "_collecting",
        "_deliver",
        "_lock",
        "_native",
        "access",
        "call",
        "gpu",
        "gpu_buffers",
        "handle",
        "keep",
        "number",
        "request",
        "trace",
    )

    def __init__(
        self,
        access: ServerAccess,
        request: InferenceRequest,
        deliver: Callable[[InferenceResponse], None] | None,
        native: NativeCalls,
    ) -> None:
        self._native = native
        self.access = access
        self.request = request
        # The request of the native library and that of Triton.
        self.call = 0
        self.handle = 0
        self.number = next(native.numbers)
        # What the inputs lie in.
        self.keep: list[Any] = []
        self.gpu: int | None = None
        # Memory for outputs there, by its address.
        self.gpu_buffers: dict[int, MemoryBuffer] = {}
        self.trace: StartedTrace | None = None
        self._deliver = deliver
        self._cancelled = False
        # For the delivery, which is in order. Reentrant, as the garbage collector may drop an iterator, and so cancel a
        # request, in the middle of anything.
        self._lock = None if deliver is None else threading.RLock()
        self._collecting = False

    def __del__(self) -> None:
        if self.call:
            self._native.drop_call(self.call)

    def cancel(self) -> None:
        """Ask Triton to cancel the request, and end the wait for its responses with an error. Does not raise."""
        self._cancelled = True
        # Without a call it is not submitted yet. Whoever submits it looks again afterwards.
        if self.call and not self.access.is_foreign and self._native.cancel_call(self.call):
            self.finish()

    def take(self, timeout_s: float | None) -> InferenceResponse | None:
        """Wait for the next response; `None` if it does not come in that time.

        Raises:
            StopIteration: If none will come.
            InvalidArgumentError: If this process was forked from that of the server.
        """
        taken = RecordSlot()
        deadline = None if timeout_s is None else time.monotonic_ns() + int(timeout_s * 1e9)
        wait_ns = _SLICE_NS
        while True:
            if deadline is not None:
                wait_ns = max(0, min(_SLICE_NS, deadline - time.monotonic_ns()))
            found = self._native.take_record(self.call, wait_ns, addressof(taken))
            if found:
                break
            if deadline is not None and time.monotonic_ns() >= deadline:
                return None
            if self.access.is_foreign:
                raise self.access.refusal()
        if found < 0:
            raise StopIteration
        return self._read(taken)

    def _read(self, taken: Any) -> InferenceResponse:
        record, address, length = taken
        content = string_at(address, length)
        self._native.free_record(record)
        flags = content[_FLAGS_AT]
        request = self.request
        response = InferenceResponse(request.model, request.request_id, final=bool(flags & _FINAL))
        if flags & _CANCELLED:
            place = describe(request.model)
            response.error = CancelledError(f"The request to {place} was cancelled.", where=place)
        else:
            try:
                read_response(content, response, self.gpu_buffers, self._native.free_memory)
            except BaseException as failure:
                logger.exception("a response of %s could not be read", describe(request.model))
                response.error = _unread(failure, request)
        if flags & _OVER:
            self.finish()
        return response

    def on_events(self, events: int) -> None:
        """See `SubmittedRequest`."""
        if events & _RELEASED:
            self._native.input_owners.pop(self.handle, None)
            self.keep = []
        # The end of a request may be reported by another thread than that of its last response, and before it.
        if events & (_ARRIVED | _ENDED):
            self._collect()
        if events & _ENDED:
            self.finish()

    def _collect(self) -> None:
        lock, deliver = self._lock, self._deliver
        if lock is None or deliver is None:
            return
        with lock:
            if self._collecting:
                # In the middle of a delivery by this very thread, which goes on with what is there.
                return
            self._collecting = True
            try:
                taken = RecordSlot()
                while self._native.take_record(self.call, 0, addressof(taken)) > 0:
                    try:
                        deliver(self._read(taken))
                    except BaseException:
                        logger.exception("a response of %s could not be handed over", describe(self.request.model))
            finally:
                self._collecting = False

    def withdraw(self, handles: Any) -> None:
        """Undo all for a request that Triton did not take. If a signal interrupts that, it can be done again.

        Args:
            handles: The request of the native library and that of Triton, each 0 if there is none.
        """
        try:
            self.call, self.handle = handles
            self._native.input_owners.pop(self.handle, None)
            if self.trace is not None:
                self.trace.withdraw()
            if self.call:
                self._native.withdraw_call(self.call)
        finally:
            # Whatever happens: it would hold up the stop of the server.
            self.finish()

    def finish(self) -> None:
        """Note that Triton has done with the request. Does nothing if that is known."""
        self._native.pending.pop(self.number, None)
        self.keep = []
        self.access.finish(self)


def submit(request: InferenceRequest, deliver: Callable[[InferenceResponse], None] | None) -> Pending:
    """Give a request to Triton.

    Args:
        request: The request.
        deliver: Gets the responses, in threads of Triton's. It must not block. `None` if they will be taken.

    Raises:
        InvalidArgumentError: If the request does not fit the model, or has a value that cannot be sent.
        NotFoundError: If there is no such model.
        UnavailableError: If the model or the server is not ready.
        TritonError: What else Triton says if it does not accept the request.
    """
    access = request.model._access()
    try:
        _check_presence(request)
        return _submit(access, request, deliver)
    except TritonError as error:
        refusal = error
    # Lists get the type that the model had when it was asked: it may have been loaded anew since.
    untyped = isinstance(request.inputs, Mapping) and any(is_untyped(value) for value in request.inputs.values())
    if untyped and forget_spec(request.model):
        try:
            return _submit(access, request, deliver)
        except TritonError as error:
            refusal = error
    if refusal.where is not None:
        # Found here, with all that there is to say.
        raise refusal
    raise _explained(refusal, request)


def _submit(
    access: ServerAccess, request: InferenceRequest, deliver: Callable[[InferenceResponse], None] | None
) -> Pending:
    native = load_native_calls()
    model = request.model
    pending = Pending(access, request, deliver, native)
    allocator = None
    if request.output_memory_type is not None:
        pending.gpu = output_gpu(request)
        if pending.gpu is not None:
            allocator = gpu_allocator(_find_gpu)
    handles = _Handles()
    submitted = False
    try:
        server = access.admit(pending)
        error = native.new_call(server, model._c_name, model.version, pending.number, addressof(handles))
        if error:
            native.check(error)
        call, handle = pending.call, pending.handle = handles
        large = fill(access.api, native, handle, request, pending.keep)
        trace = None
        if request.trace is not None:
            pending.trace = start_trace(access.api, request.trace)
            trace = pending.trace.handle
        events = 0 if deliver is None else _ARRIVED
        if large:
            native.input_owners[handle] = pending.keep
            events |= _RELEASED
        native.pending[pending.number] = pending
        submitted = True
        error = native.submit_call(call, server, trace, allocator, events)
        if error:
            submitted = False
            native.check(error)
    except BaseException:
        if submitted:
            # Interrupted by a signal just when Triton had taken it: it ends as all do.
            pending.cancel()
            raise
        try:
            pending.withdraw(handles)
        except BaseException:
            # Another signal. Again, in a thread, where none comes: Python handles them in the main thread.
            start_new_thread(pending.withdraw, (handles,))
            raise
        raise
    if pending._cancelled:
        pending.cancel()
    return pending


def _find_gpu(number: int) -> tuple[int, dict[int, MemoryBuffer]]:
    pending = load_native_calls().pending[number]
    return pending.gpu or 0, pending.gpu_buffers


def _check_presence(request: InferenceRequest) -> None:
    """Find inputs that are missing. Triton only counts them: any input would do for one that is not optional."""
    model, inputs = request.model, request.inputs
    if isinstance(inputs, Mapping) and not inputs.keys() >= known_spec(model).required:
        # What is known may be out of date.
        spec = fetch_spec(model)
        if not inputs.keys() >= spec.required:
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
