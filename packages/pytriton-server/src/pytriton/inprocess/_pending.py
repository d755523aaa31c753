"""Requests that are in Triton: from the moment that they are submitted until Triton has done with them.

A request has two ends, which come in any order: Triton releases it, and its last response arrives. With both, its C
object is deleted. Until then it can be cancelled.
"""

from __future__ import annotations

import itertools
import logging
import threading
from _thread import start_new_thread
from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, addressof, c_int, c_int64, c_size_t, c_void_p, cast
from typing import TYPE_CHECKING, Any

from pytriton.inprocess import _c_types
from pytriton.inprocess._api import Api, load_api
from pytriton.inprocess._enums import ResponseCompleteFlag
from pytriton.inprocess._errors import CancelledError, InternalError, InvalidArgumentError, TritonError
from pytriton.inprocess._hot_calls import HotCalls
from pytriton.inprocess._inflight import OWNERS
from pytriton.inprocess._model_spec import describe, explain, fetch_spec, forget_spec, known_spec
from pytriton.inprocess._request import InferenceRequest, fill, output_gpu
from pytriton.inprocess._response import InferenceResponse, allocate, read_response
from pytriton.inprocess._values import is_untyped, to_tensor

if TYPE_CHECKING:
    from pytriton.inprocess._session import Session
    from pytriton.inprocess._tracing import StartedTrace

__all__ = ["Pending", "submit"]

logger = logging.getLogger(__name__)

_FINAL = int(ResponseCompleteFlag.FINAL)

# By the number that Triton hands to the callbacks.
_pending: dict[int, Pending] = {}
_numbers = itertools.count(1)


class Pending:
    """A request in Triton.

    Args:
        session: The run of the server that it is in.
        request: What was asked for.
        deliver: Gets the responses, in a thread of Triton's, or in the one that cancels. It must not block.
        callbacks: What Triton calls.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_cancelled",
        "_closed",
        "_deleted",
        "_deliver",
        "_ends",
        "_lock",
        "buffers",
        "gpu",
        "handle",
        "keep",
        "number",
        "request",
        "session",
        "trace",
    )

    def __init__(
        self,
        session: Session,
        request: InferenceRequest,
        deliver: Callable[[InferenceResponse], None],
        callbacks: _Callbacks,
    ) -> None:
        self._callbacks = callbacks
        self.session = session
        self.request = request
        self.handle: int | None = None
        self.number = next(_numbers)
        # Memory for outputs that Triton writes, by its address.
        self.buffers: dict[int, Any] = {}
        # What the inputs lie in.
        self.keep: list[Any] = []
        self.gpu: int | None = None
        self.trace: StartedTrace | None = None
        self._deliver = deliver
        self._cancelled = False
        self._closed = False
        self._deleted = False
        # Taken by each of the two ends; whoever gets False came last. Taking one is safe between threads.
        self._ends = [False, True]
        # For the C object, which is deleted in one thread and cancelled in another. Reentrant, as the garbage collector
        # may drop an iterator, and so cancel a request, in the middle of anything.
        self._lock = threading.RLock()

    def cancel(self) -> None:
        """Ask Triton to cancel the request, and end the wait for its responses with an error. Does not raise."""
        with self._lock:
            if self._cancelled or self._closed:
                return
            self._cancelled = True
            self.cancel_in_triton()
            place = describe(self.request.model)
            self._hand_over(
                InferenceResponse(
                    self.request.model,
                    self.request.request_id,
                    error=CancelledError(f"The request to {place} was cancelled.", where=place),
                    final=True,
                )
            )

    def cancel_in_triton(self) -> None:
        """Pass a cancellation on to Triton, if there was one and the request is still there."""
        with self._lock:
            if not self._cancelled or self._deleted or self.handle is None:
                return
            try:
                self.session.api.TRITONSERVER_InferenceRequestCancel(self.handle)
            except TritonError as error:
                # It is not submitted yet. Whoever submits it looks again afterwards.
                logger.debug("the request to %s is not cancelled: %s", describe(self.request.model), error)

    def respond(self, response: InferenceResponse) -> None:
        """Hand a response over, unless the last one was: that of a cancelled request comes before Triton's."""
        with self._lock:
            if not self._closed:
                self._hand_over(response)

    def _hand_over(self, response: InferenceResponse) -> None:
        self._closed = response.final
        self._deliver(response)

    def end(self) -> None:
        """Note one of the two ends: that Triton released the request, or gave its last response."""
        if self._ends.pop():
            return
        self.discard()
        self.session.finish(self)

    def discard(self) -> None:
        """Forget the request and delete its C object."""
        _pending.pop(self.number, None)
        with self._lock:
            self._deleted = True
        # Nothing that a signal could interrupt, so that it is deleted once.
        handle, self.handle = self.handle, None
        if handle:
            error = self._callbacks.calls.InferenceRequestDelete(handle)
            if error:
                self._callbacks.calls.check(error)

    def withdraw(self, created: c_void_p) -> None:
        """Undo all for a request that Triton did not take. If a signal interrupts that, it can be done again.

        Args:
            created: Where the C API put the address of its request. It is taken from there.
        """
        try:
            OWNERS.pop(created.value or 0, None)
            if created.value is not None:
                self.handle, created.value = created.value, None
            if self.trace is not None:
                self.trace.withdraw()
            self.discard()
        finally:
            # Whatever happens: it would hold up the stop of the server.
            self.session.finish(self)


def submit(request: InferenceRequest, deliver: Callable[[InferenceResponse], None]) -> Pending:
    """Give a request to Triton.

    Args:
        request: The request.
        deliver: Gets the responses, in threads of Triton's. It must not block.

    Raises:
        InvalidArgumentError: If the request does not fit the model, or has a value that cannot be sent.
        NotFoundError: If there is no such model.
        UnavailableError: If the model or the server is not ready.
        TritonError: What else Triton says if it does not accept the request.
    """
    session = request.model._server._running()
    try:
        _check_presence(request)
        return _submit(session, request, deliver)
    except TritonError as error:
        refusal = error
    # Lists get the type that the model had when it was asked: it may have been loaded anew since.
    untyped = isinstance(request.inputs, Mapping) and any(is_untyped(value) for value in request.inputs.values())
    if untyped and forget_spec(request.model):
        try:
            return _submit(session, request, deliver)
        except TritonError as error:
            refusal = error
    if refusal.where is not None:
        # Found here, with all that there is to say.
        raise refusal
    raise _explained(refusal, request)


def _submit(session: Session, request: InferenceRequest, deliver: Callable[[InferenceResponse], None]) -> Pending:
    callbacks = _callbacks or _make_callbacks()
    calls, model = callbacks.calls, request.model
    pending = Pending(session, request, deliver, callbacks)
    if request.output_memory_type is not None:
        pending.gpu = output_gpu(request)
    created = c_void_p()
    submitted = False
    try:
        server = session.admit(pending)
        error = calls.InferenceRequestNew(addressof(created), server, model._c_name, model.version)
        if error:
            calls.check(error)
        handle = pending.handle = created.value or 0
        number = pending.number
        large = fill(session.api, calls, handle, request, pending.keep)
        error = calls.InferenceRequestSetReleaseCallback(handle, callbacks.release, number)
        if error:
            calls.check(error)
        error = calls.InferenceRequestSetResponseCallback(
            handle, callbacks.allocator, number, callbacks.complete, number
        )
        if error:
            calls.check(error)
        trace = None
        if request.trace is not None:
            pending.trace = request.trace._start(session.api)
            trace = pending.trace.handle
        if large:
            OWNERS[handle] = pending.keep
        _pending[number] = pending
        submitted = True
        error = calls.ServerInferAsync(server, handle, trace)
        if error:
            submitted = False
            calls.check(error)
    except BaseException:
        if submitted:
            # Interrupted by a signal just when Triton had taken it: it ends as all do.
            pending.cancel()
            raise
        try:
            pending.withdraw(created)
        except BaseException:
            # Another signal. Again, in a thread, where none comes: Python handles them in the main thread.
            start_new_thread(pending.withdraw, (created,))
            raise
        raise
    if pending._cancelled:
        pending.cancel_in_triton()
    return pending


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


# As in `_c_types`, but with plain addresses in place of pointers, which cost more.
_Allocate = CFUNCTYPE(
    c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p
)


class _Callbacks:
    """What Triton calls, for all requests. It lives as long as the process, as Triton may call it that long."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.calls = HotCalls(api)
        self._functions = (
            _c_types.InferenceResponseCompleteCallback(self._complete),
            _c_types.InferenceRequestReleaseCallback(self._release),
            _Allocate(self._on_allocate),
            _c_types.ResponseAllocatorReleaseCallback(self._on_free),
        )
        self.complete, self.release, _, _ = (cast(function, c_void_p).value for function in self._functions)
        allocator = _c_types.ResponseAllocatorHandle()
        api.TRITONSERVER_ResponseAllocatorNew(
            allocator,
            cast(self._functions[2], _c_types.ResponseAllocatorAllocCallback),
            self._functions[3],
            _c_types.ResponseAllocatorStartCallback(),
        )
        self.allocator = allocator.value

    def _on_allocate(
        self,
        allocator: int,
        name: int,
        size: int,
        wanted_type: int,
        wanted_id: int,
        number: int,
        buffer: int,
        userp: int,
        memory_type: int,
        memory_type_id: int,
    ) -> int | None:
        try:
            pending = _pending[number]
            allocate(pending.buffers, size, pending.gpu, buffer, memory_type, memory_type_id)
        except BaseException as error:
            return self._api.new_error(error)
        return None

    def _on_free(
        self, allocator: int, buffer: int, userp: int, size: int, memory_type: int, memory_type_id: int
    ) -> int | None:
        # The memory belongs to the outputs that were read.
        return None

    def _complete(self, handle: int | None, flags: int, number: int) -> None:
        pending, calls = _pending[number], self.calls
        request = pending.request
        final = bool(flags & _FINAL)
        response = InferenceResponse(request.model, request.request_id, final=final)
        try:
            if handle is not None:
                try:
                    read_response(self._api, calls, handle, response, pending.buffers)
                finally:
                    error = calls.InferenceResponseDelete(handle)
                    if error:
                        calls.check(error)
        except BaseException as failure:
            logger.exception("a response of %s could not be read", describe(request.model))
            response.error = _unread(failure, request)
        try:
            pending.respond(response)
        except BaseException:
            logger.exception("a response of %s could not be handed over", describe(request.model))
        if final:
            pending.end()

    def _release(self, handle: int, flags: int, number: int) -> None:
        pending = _pending[number]
        OWNERS.pop(handle, None)
        pending.keep = []
        pending.end()


_callbacks: _Callbacks | None = None
_callbacks_lock = threading.Lock()


def _make_callbacks() -> _Callbacks:
    global _callbacks
    with _callbacks_lock:
        if _callbacks is None:
            _callbacks = _Callbacks(load_api())
        return _callbacks


def _unread(error: BaseException, request: InferenceRequest) -> TritonError:
    if isinstance(error, TritonError):
        return error
    place = describe(request.model)
    return InternalError(f"A response of {place} could not be read: {type(error).__name__}: {error}", where=place)
