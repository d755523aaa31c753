"""Spans of inference callables, in the traces of their callers, with OpenTelemetry.

A server whose `TritonConfig.trace_config` has `mode=opentelemetry` gives each request a trace context, and the worker
makes its spans in it; `Request.traced_span` adds those of the callable itself. OpenTelemetry is optional and comes with
the extra `telemetry`: nothing is imported before it is used.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pytriton.proxy import trace_export as export
from pytriton.proxy import tracers

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import Span, Tracer

__all__ = [
    "TracableModel",
    "build_proxy_tracer_from_triton_config",
    "end_span",
    "get_span_dict",
    "get_telemetry_tracer",
    "parse_trace_config",
    "raise_if_no_telemetry",
    "set_telemetry_tracer",
    "start_span_from_remote",
    "start_span_from_span",
    "traced_span",
]

_EXIT_FLUSH_TIMEOUT_S = 2.0

# The span of a request, and the innermost span that was opened in it.
_innermost: ContextVar[tuple[Any, Any] | None] = ContextVar("pytriton_traced_span", default=None)


def raise_if_no_telemetry() -> None:
    """Check that OpenTelemetry is installed.

    Raises:
        ImportError: It is not; the text says which extra to install.
    """
    export.require_telemetry()


def set_telemetry_tracer(tracer: Tracer) -> None:
    """Set the tracer for the callables of this process, whatever their models were bound with.

    Not needed where the process has a tracer provider (`opentelemetry.trace.set_tracer_provider`): that is used as it
    is.

    Args:
        tracer: The tracer.

    Raises:
        ValueError: It was set before.
    """
    tracers.choose_tracer(tracer)


def get_telemetry_tracer() -> Tracer | None:
    """Return the tracer in use here.

    Returns:
        The first there is of: the one that was set; inside a callable, that of its model; that of the tracer provider
        of the process. `None` if there is none.
    """
    tracer: Tracer | None = tracers.find_tracer(tracers.worker_tracer())
    return tracer


def parse_trace_config(trace_config_list: Sequence[str]) -> tuple[str, Resource]:
    """Read where the spans of a server go, and as whose.

    Args:
        trace_config_list: Items such as `mode=opentelemetry`, `opentelemetry,url=<url>` and
            `opentelemetry,resource=<name>=<value>`.

    Returns:
        The URL of the collector, and the resource.

    Raises:
        ValueError: The mode is another one, there is no URL, or an item cannot be understood.
        ImportError: OpenTelemetry is not installed.
    """
    if not export.is_opentelemetry(trace_config_list):
        raise ValueError(
            f"Only opentelemetry mode is supported: expected the item {export.MODE!r} in trace_config; got "
            f"{list(trace_config_list)!r}"
        )
    settings = export.read_settings(trace_config_list)
    if not settings.url:
        raise ValueError(
            "expected the item 'opentelemetry,url=<url of the collector>' in trace_config; got "
            f"{list(trace_config_list)!r}"
        )
    export.require_telemetry()
    return settings.url, export.make_resource(settings)


def build_proxy_tracer_from_triton_config(trace_config: Sequence[str]) -> Tracer:
    """Make a tracer whose spans go to the collector that a server is told of.

    What is not sent yet when the interpreter ends is sent then, for 2 s at most.

    Args:
        trace_config: As for `parse_trace_config`.

    Raises:
        ImportError: OpenTelemetry is not installed.
        ValueError: As for `parse_trace_config`.
    """
    raise_if_no_telemetry()
    parse_trace_config(trace_config)
    made = export.SpanExport(trace_config)
    atexit.register(made.close, _EXIT_FLUSH_TIMEOUT_S)
    tracer: Tracer = made.tracer
    return tracer


def get_span_dict(span: Span | None) -> dict[str, str]:
    """Return the context of a span in the form that travels: `traceparent` and, where there is one, `tracestate`.

    Returns:
        The headers of W3C Trace Context; empty for `None`.
    """
    carrier: dict[str, str] = {}
    if span is not None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(span))
    return carrier


def start_span_from_remote(span_dict: Mapping[str, str] | None, name: str) -> Span:
    """Start a span in a trace that began elsewhere. Has to be ended with `end_span`.

    Args:
        span_dict: The headers of W3C Trace Context, as `get_span_dict` gives them.
        name: Name of the span.

    Returns:
        The span. Without a tracer it records nothing, but its context is that of `span_dict`.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """
    raise_if_no_telemetry()
    from opentelemetry.context import Context
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(dict(span_dict or {}), context=Context())
    tracer = get_telemetry_tracer()
    return get_current_span(context) if tracer is None else tracer.start_span(name, context=context)


def start_span_from_span(span: Span, name: str) -> Span:
    """Start a span inside another one. Has to be ended with `end_span`.

    Args:
        span: The span to be its parent.
        name: Name of the new one.

    Returns:
        The span. Without a tracer it records nothing.
    """
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    tracer = tracers.tracer_of(span)
    if tracer is None:
        return NonRecordingSpan(span.get_span_context())
    child: Span = tracer.start_span(name, context=set_span_in_context(span))
    tracers.note_span(child, tracer)
    return child


def end_span(span: Span | None, error: BaseException | str | None = None) -> None:
    """End a span.

    Args:
        span: The span; nothing is done for `None`.
        error: What went wrong, if something did: an exception is recorded, a text is the description of the status.
    """
    if span is None:
        return
    if error is not None:
        from opentelemetry.trace import Status, StatusCode

        if isinstance(error, BaseException):
            span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error) or type(error).__name__))
    span.end()


@contextlib.contextmanager
def traced_span(request: Any, span_name: str, **kwargs: Any) -> Iterator[Span | None]:
    """Make a span for a piece of the work on a request; `Request.traced_span` does the same.

    An exception inside ends the span with it. Spans inside each other are parents and children, and those of libraries
    that use OpenTelemetry are inside, too.

    Args:
        request: A request. Where it is not traced, nothing is done.
        span_name: Name of the span.
        **kwargs: Further arguments of `opentelemetry.trace.Tracer.start_as_current_span`, such as `attributes`.

    Yields:
        The span; `None` if the request is not traced.
    """
    root = request.span
    tracer = None if root is None else tracers.tracer_of(root)
    if tracer is None:
        yield None
        return
    from opentelemetry.trace import set_span_in_context

    innermost = _innermost.get()
    parent = innermost[1] if innermost is not None and innermost[0] is root else root
    kwargs.setdefault("context", set_span_in_context(parent))
    with tracer.start_as_current_span(span_name, **kwargs) as span:
        token = _innermost.set((root, span))
        try:
            yield span
        finally:
            _innermost.reset(token)


class TracableModel:
    """A base for code that serves requests in a way of its own and wants their spans.

    Args:
        tracer: The tracer; `None` is the one in use where the spans are started.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    def configure_tracing(self, trace_config: Sequence[str]) -> None:
        """Send the spans to the collector that a server is told of.

        Args:
            trace_config: As for `parse_trace_config`, with the same errors.
        """
        self._tracer = build_proxy_tracer_from_triton_config(trace_config)

    def start_requests_spans(self, requests: Sequence[Any], name: str) -> list[Span | None]:
        """Start a span inside that of each request.

        Args:
            requests: The requests.
            name: Name of the spans.

        Returns:
            One for each request; `None` for one that is not traced.
        """
        spans: list[Span | None] = []
        for request in requests:
            if request.span is None:
                spans.append(None)
            elif self._tracer is None:
                spans.append(start_span_from_span(request.span, name))
            else:
                from opentelemetry.trace import set_span_in_context

                spans.append(self._tracer.start_span(name, context=set_span_in_context(request.span)))
        return spans

    def end_requests_spans(self, spans: Sequence[Span | None], error: BaseException | str | None = None) -> None:
        """End spans that `start_requests_spans` gave.

        Args:
            spans: The spans.
            error: What went wrong, if something did.
        """
        for span in spans:
            end_span(span, error)
