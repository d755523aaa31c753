"""Traces: what happens to a request inside Triton, and when."""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytriton.inprocess.capi import c_types
from pytriton.inprocess.capi.api import Api
from pytriton.inprocess.capi.enums import DataType, MemoryType, TraceActivity, TraceLevel
from pytriton.inprocess.capi.errors import InvalidArgumentError, TimedOutError, UnsupportedError, wrong_argument
from pytriton.inprocess.tensors.memory import MemoryBuffer
from pytriton.inprocess.tensors.tensor import Tensor
from pytriton.server.tritonserver.version import describe_server_version

logger = logging.getLogger(__name__)

_LEVELS = TraceLevel.TIMESTAMPS | TraceLevel.TENSORS

_started: dict[int, StartedTrace] = {}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class TraceEvent:
    """One thing that happened to a request.

    Attributes:
        activity: What happened.
        timestamp_ns: When, on the clock of `time.monotonic_ns`; `None` for an activity with a tensor.
        trace_id: Number of the trace, unique in the process. The models of an ensemble have one each.
        parent_id: Number of the trace that it belongs to; 0 if it is the request's own.
        model_name: The model.
        model_version: Its version.
        request_id: Id of the request.
        name: Name of the tensor, for an activity with one.
        tensor: A copy of the tensor; `None` if there is none or it is not in host memory.
    """

    activity: TraceActivity
    timestamp_ns: int | None
    trace_id: int
    parent_id: int
    model_name: str
    model_version: int
    request_id: str
    name: str | None = None
    tensor: Tensor | None = None


class Trace:
    """Records what happens to a request: `model.infer(inputs=..., trace=trace)`.

    Triton reports the last activities after the response, so wait for the end before reading `events`.

    Args:
        level: What is recorded: `TIMESTAMPS`, `TENSORS` (copies of the inputs and outputs), or both.
        context: A trace context of the caller's as a JSON text, which is passed on to the model.

    Raises:
        InvalidArgumentError: If there is no such level, or the context is no text.
    """

    def __init__(self, level: TraceLevel = TraceLevel.TIMESTAMPS, context: str | None = None) -> None:
        if not isinstance(level, TraceLevel) or not level or level & ~_LEVELS:
            raise wrong_argument("level", "TraceLevel.TIMESTAMPS, TraceLevel.TENSORS or both", level, where="Trace")
        if context is not None and not isinstance(context, str):
            raise wrong_argument("context", "a str", context, where="Trace")
        self.level = level
        self.context = context
        self.events: list[TraceEvent] = []
        """What happened, in the order in which Triton reported it."""
        self._ended = threading.Event()
        self._started = False

    @property
    def done(self) -> bool:
        """Whether Triton reports no more."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = 60.0) -> list[TraceEvent]:
        """Wait for the end of the request, and give what happened to it.

        Args:
            timeout_s: How long to wait, in seconds; `None` for without a limit.

        Raises:
            TimedOutError: If the request does not end in that time.
        """
        if not self._ended.wait(timeout_s):
            raise TimedOutError(
                f"Waited {timeout_s:g} s for the end of a traced request, in vain." if timeout_s is not None else "",
                expected="the end of the request",
                where="Trace.wait",
            )
        return self.events


def start_trace(api: Api, trace: Trace) -> StartedTrace:
    """Make the trace of the C API, for one request."""
    if trace._started:
        raise InvalidArgumentError(
            "Expected a Trace that no request had, received one that was used. Make one for each request.",
            expected="a new Trace",
            received=trace,
            where="Trace",
        )
    trace._started = True
    try:
        return StartedTrace(api, trace)
    except BaseException:
        trace._started = False
        raise


class StartedTrace:
    """The trace of the C API."""

    def __init__(self, api: Api, trace: Trace) -> None:
        self._api = api
        self._trace = trace
        self._number = next(_numbers)
        handle = c_types.InferenceTraceHandle()
        try:
            if trace.level & TraceLevel.TENSORS:
                api.TRITONSERVER_InferenceTraceTensorNew(
                    handle,
                    int(trace.level),
                    0,
                    _callbacks.activity,
                    _callbacks.tensor,
                    _callbacks.release,
                    self._number,
                )
            else:
                api.TRITONSERVER_InferenceTraceNew(
                    handle, int(trace.level), 0, _callbacks.activity, _callbacks.release, self._number
                )
        except UnsupportedError as error:
            library = api.library
            raise UnsupportedError(
                f"Expected a tritonserver that was built with tracing; {library.path}, which is "
                f"{describe_server_version(library.binary)}, says: {error}. Leave out trace=, or use the server that "
                "comes with pytriton-server.",
                expected="a tritonserver with tracing",
                received=str(error),
                where=str(library.path),
            ) from error
        _started[self._number] = self
        self.handle: int | None = handle.value
        if trace.context is not None:
            try:
                api.TRITONSERVER_InferenceTraceSetContext(handle, trace.context.encode())
            except BaseException:
                self.withdraw()
                raise

    def withdraw(self) -> None:
        """Delete it, if Triton did not take it."""
        handle, self.handle = self.handle, None
        if self._number in _started and handle is not None:
            self.release(handle)
        self._trace._started = False

    def record(self, handle: int, activity: int, timestamp_ns: int | None, **tensor: Any) -> None:
        """Note an activity of the trace or of one that belongs to it."""
        self._trace.events.append(
            TraceEvent(
                TraceActivity(activity),
                timestamp_ns,
                self._ask(handle, "TRITONSERVER_InferenceTraceId", ctypes.c_uint64()),
                self._ask(handle, "TRITONSERVER_InferenceTraceParentId", ctypes.c_uint64()),
                (self._ask(handle, "TRITONSERVER_InferenceTraceModelName", ctypes.c_char_p()) or b"").decode(
                    errors="replace"
                ),
                self._ask(handle, "TRITONSERVER_InferenceTraceModelVersion", ctypes.c_int64()),
                (self._ask(handle, "TRITONSERVER_InferenceTraceRequestId", ctypes.c_char_p()) or b"").decode(
                    errors="replace"
                ),
                **tensor,
            )
        )

    def release(self, handle: int) -> None:
        """Delete a trace that Triton has done with. With the one of the request, all is over."""
        # The same callback releases the traces of an ensemble's models.
        parent = self._ask(handle, "TRITONSERVER_InferenceTraceParentId", ctypes.c_uint64())
        self._api.TRITONSERVER_InferenceTraceDelete(handle)
        if not parent:
            _started.pop(self._number, None)
            self._trace._ended.set()

    def _ask(self, handle: int, function: str, value: Any) -> Any:
        getattr(self._api, function)(handle, ctypes.byref(value))
        return value.value


class _Callbacks:
    """The callbacks that Triton calls for all traces."""

    def __init__(self) -> None:
        self.activity = c_types.InferenceTraceActivityCallback(self._activity)
        self.tensor = c_types.InferenceTraceTensorActivityCallback(self._tensor)
        self.release = c_types.InferenceTraceReleaseCallback(self._release)

    def _activity(self, handle: int, activity: int, timestamp_ns: int, number: int) -> None:
        try:
            _started[number].record(handle, activity, timestamp_ns)
        except BaseException:
            logger.exception("an activity of a trace could not be recorded")

    def _tensor(
        self,
        handle: int,
        activity: int,
        name: bytes,
        data_type: int,
        base: int | None,
        size: int,
        shape: Any,
        dim_count: int,
        memory_type: int,
        memory_type_id: int,
        number: int,
    ) -> None:
        try:
            copy = None
            if memory_type != MemoryType.GPU:
                data = ctypes.string_at(base, size) if base and size else b""
                buffer = MemoryBuffer.from_dlpack(np.frombuffer(data, np.uint8))
                copy = Tensor(DataType(data_type), tuple(shape[:dim_count]), buffer)
            _started[number].record(handle, activity, None, name=name.decode(errors="replace"), tensor=copy)
        except BaseException:
            logger.exception("a tensor of a trace could not be recorded")

    def _release(self, handle: int, number: int) -> None:
        try:
            _started[number].release(handle)
        except BaseException:
            logger.exception("a trace could not be released")


# They live as long as the process, because Triton may call them until then.
_callbacks = _Callbacks()
