"""The spans of a batch: imported only when there is a tracer.

For each request that came with a trace context, inside of Triton's own span:

    pytriton.proxy               from the moment that the proxy backend got it until it was answered
      pytriton.batch             of the first one only: the batch, with links to the other requests
        proxy_inference_callable the callable; of the other requests right inside of pytriton.proxy, with a link

Requests that nobody traces have no spans.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic_ns, time_ns
from typing import Any

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pytriton.proxy.tracers import note_span

from ..wire.batch import TRACEPARENT, Batch
from .answers import Answers
from .execution import Execution
from .service import Service
from .texts import error_text
from .trace_context import read_carrier

PROXY_SPAN = "pytriton.proxy"
BATCH_SPAN = "pytriton.batch"
# PyTriton uses this name.
CALLABLE_SPAN = "proxy_inference_callable"

_MAX_CLOCK_GAP_NS = 20_000

_propagator = TraceContextTextMapPropagator()
logger = logging.getLogger(__name__)


def make_traced_execution(service: Service, batch: Batch, tracer: Any) -> Execution:
    """Make the execution of a batch, with spans if any of its requests is traced."""
    if batch.metadata.is_untraced:
        return Execution(service, batch)
    contexts = [_context_of(batch, index) for index in range(len(batch.rows))]
    if not any(contexts):
        # Batches that look alike share their metadata.
        batch.metadata.is_untraced = True
        return Execution(service, batch)
    return TracedExecution(service, batch, Spans(tracer, service, batch, contexts))


class Spans:
    """The spans of one batch. They know nothing of its inputs."""

    def __init__(self, tracer: Any, service: Service, batch: Batch, contexts: Sequence[Context | None]) -> None:
        """Start the spans up to the batch's."""
        self._tracer = tracer
        self._offset_ns = _clock_offset_ns()
        requests, rows, input_bytes = batch.metadata.size
        model = {"triton.model_name": service.model.name, "triton.model_version": service.model.version}
        self._proxies: list[Span | None] = []
        for index, context in enumerate(contexts):
            if context is None:
                self._proxies.append(None)
                continue
            request_id = batch.load_fields(index)[0]
            attributes = {**model, "triton.request_id": request_id} if request_id else model
            self._proxies.append(
                tracer.start_span(
                    PROXY_SPAN,
                    context=context,
                    kind=SpanKind.CONSUMER,
                    attributes=attributes,
                    start_time=self._wall_ns(batch.received_ns),
                )
            )
        self._first = next(index for index, span in enumerate(self._proxies) if span is not None)
        self._batch: Span = tracer.start_span(
            BATCH_SPAN,
            context=set_span_in_context(self._proxies[self._first], Context()),  # type: ignore[arg-type] # a span
            attributes={
                **model,
                "pytriton.batch.requests": requests,
                "pytriton.batch.rows": rows,
                "pytriton.batch.input_bytes": input_bytes,
            },
            links=[
                Link(span.get_span_context())
                for index, span in enumerate(self._proxies)
                if span is not None and index != self._first
            ],
            start_time=self._wall_ns(batch.sent_ns),
        )
        # The spans of the callable by request, `None` for one that is not traced.
        self.of_requests: list[Span | None] = []
        self.current: Context  # the one that the callable runs in
        self._failed: set[int] = set()
        self._is_called = False

    def call(self) -> None:
        """Start the spans of the callable."""
        link = [Link(self._batch.get_span_context())]
        for index, proxy in enumerate(self._proxies):
            if proxy is None:
                self.of_requests.append(None)
                continue
            is_first = index == self._first
            span = self._tracer.start_span(
                CALLABLE_SPAN,
                context=set_span_in_context(self._batch if is_first else proxy, Context()),
                links=None if is_first else link,
            )
            note_span(span, self._tracer)
            self.of_requests.append(span)
        self.current = set_span_in_context(self.of_requests[self._first])  # type: ignore[arg-type] # a span

    def called(self) -> None:
        """End the spans of the callable, once."""
        if not self._is_called:
            self._is_called = True
            for span in self.of_requests:
                if span is not None:
                    span.end()

    def fail(self, error: BaseException) -> None:
        """Record the error that the callable raised, or why its results cannot be sent."""
        _record(self._batch, error)
        status = Status(StatusCode.ERROR, _text(error))
        self._batch.set_status(status)
        for index, (proxy, span) in enumerate(zip(self._proxies, self.of_requests, strict=True)):
            if proxy is not None and span is not None and index not in self._failed:
                span.set_status(status)
                proxy.set_status(status)

    def fail_one(self, index: int, error: BaseException) -> None:
        """Note the error that one request is answered with."""
        self._failed.add(index)
        proxy = self._proxies[index]
        if proxy is not None:
            _record(proxy, error)
            proxy.set_status(Status(StatusCode.ERROR, _text(error)))

    def end(self) -> None:
        """End all spans."""
        self.called()
        self._batch.end()
        for proxy in self._proxies:
            if proxy is not None:
                proxy.end()

    def _wall_ns(self, stamp_ns: int) -> int | None:
        """Return a time stamp as the time of day; `None`, for now, if there is no stamp."""
        return stamp_ns + self._offset_ns if stamp_ns else None


class TracedExecution(Execution):
    """An execution that reports its steps to its spans."""

    __slots__ = ("_spans",)

    def __init__(self, service: Service, batch: Batch, spans: Spans) -> None:
        """Take a batch and its spans."""
        super().__init__(service, batch)
        self._spans = spans

    def run(self, run_async: Callable[[Awaitable[Any]], Any]) -> None:
        """Serve the batch with a synchronous callable, see `Execution.run`."""
        self._spans.call()
        self._request_spans = self._spans.of_requests
        token = attach(self._spans.current)
        try:
            super().run(run_async)
        finally:
            detach(token)
            self._spans.end()

    async def run_async(self) -> None:
        """Serve the batch with an asynchronous callable, see `Execution.run_async`."""
        self._spans.call()
        self._request_spans = self._spans.of_requests
        token = attach(self._spans.current)
        try:
            await super().run_async()
        finally:
            detach(token)
            self._spans.end()

    def _count_call(self) -> None:
        self._spans.called()
        super()._count_call()

    def _make_answers(self) -> Answers:
        return Answers(self._service, self._count, self._access, self._spans.fail_one)

    def _fail(self, error: BaseException) -> None:
        self._spans.fail(error)
        super()._fail(error)


def _clock_offset_ns() -> int:
    """Return the time of day, which spans use, minus the monotonic clock, which the proxy backend uses."""
    before_ns = monotonic_ns()
    wall_ns = time_ns()
    after_ns = monotonic_ns()
    # Try again if another thread ran between the two readings.
    if after_ns - before_ns > _MAX_CLOCK_GAP_NS:
        before_ns = monotonic_ns()
        wall_ns = time_ns()
        after_ns = monotonic_ns()
    return wall_ns - (before_ns + after_ns) // 2


def _context_of(batch: Batch, index: int) -> Context | None:
    """Return the trace context of a request; `None` if it has none."""
    carrier = read_carrier(batch, index)
    if TRACEPARENT not in carrier:
        return None
    context = _propagator.extract(carrier)
    found: SpanContext = get_current_span(context).get_span_context()
    return context if found.is_valid else None


def _record(span: Any, error: BaseException) -> None:
    try:
        span.record_exception(error)
    except Exception as failure:  # the error's own __str__ failed
        logger.debug("a span goes without its error: %s", error_text(failure))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error_text(error)}"
