"""OpenTelemetry spans of calls, whose context is sent to the server in the headers of requests.

Without a tracer provider (``opentelemetry.trace.set_tracer_provider``) nothing is made and nothing is imported. This is
the only module that uses OpenTelemetry.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .requests import InferCall
from .startup import Target

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

SPAN_NAME = "pytriton.client"

_TRACE = "opentelemetry.trace"
_HEADER = "traceparent"

Result = TypeVar("Result")

# The tracer of the process's provider, which is set only once.
_tracer: Tracer | None = None


class TracedCall:
    """A call and its span, if it has one: to be used in a ``with`` statement, which ends the span."""

    __slots__ = ("_span", "call")

    def __init__(self, call: InferCall, span: Span | None) -> None:
        self.call = call  # the call as it is to be sent
        self._span = span

    def __enter__(self) -> InferCall:
        return self.call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        span = self._span
        if span is None:
            return
        # A cancelled task and a stream that the caller leaves are not recorded as errors.
        if isinstance(error, Exception):
            from opentelemetry.trace import Status, StatusCode

            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end()


def trace_call(call: InferCall, target: Target) -> TracedCall:
    """Start the span of a call; if it is sampled, its context travels in the headers, unless the caller set them."""
    tracer = _find_tracer()
    return TracedCall(call, None) if tracer is None else _start(tracer, call, target)


def in_context_of_caller(function: Callable[[], Result]) -> Callable[[], Result]:
    """Return a function that can run in another thread and makes its spans children of the current span."""
    return function if _find_tracer() is None else functools.partial(contextvars.copy_context().run, function)


def _find_tracer() -> Tracer | None:
    if _TRACE not in sys.modules:
        return None
    return _tracer if _tracer is not None else _ask_provider()


def _ask_provider() -> Tracer | None:
    global _tracer
    trace = sys.modules[_TRACE]
    try:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
            _tracer = provider.get_tracer("pytriton.client")
    except AttributeError:
        # Another thread is importing it at this moment.
        return None
    return _tracer


def _start(tracer: Tracer, call: InferCall, target: Target) -> TracedCall:
    from opentelemetry.propagate import inject
    from opentelemetry.trace import SpanKind, set_span_in_context

    attributes: dict[str, Any] = {"triton.model_name": target.model_name, "server.address": target.url}
    if target.model_version is not None:
        attributes["triton.model_version"] = target.model_version
    span = tracer.start_span(SPAN_NAME, kind=SpanKind.CLIENT, attributes=attributes)
    # Triton traces a request with the header in full, whatever its flag says.
    is_sampled = span.get_span_context().trace_flags.sampled
    if is_sampled and not any(name.lower() == _HEADER for name in call.headers):
        carrier: dict[str, str] = {}
        inject(carrier, context=set_span_in_context(span))
        call = dataclasses.replace(call, headers={**carrier, **call.headers})
    return TracedCall(call, span)
