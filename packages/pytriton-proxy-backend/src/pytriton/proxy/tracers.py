"""Which OpenTelemetry tracer is used where. Nothing here imports OpenTelemetry: without it, nothing is ever found."""

from __future__ import annotations

import sys
import weakref
from contextvars import ContextVar
from typing import Any

_TRACE = "opentelemetry.trace"

# The tracer that the user chose for the whole process.
_chosen: Any = None
# The tracer of the provider that the user set up; it never changes.
_provided: Any = None
# The tracer that the model was bound with. Each worker runs in its own context.
_of_worker: ContextVar[Any] = ContextVar("pytriton_worker_tracer", default=None)
# The tracer of each span. It is looked up by the span, because the callable may ask from a thread of its own.
_of_span: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def choose_tracer(tracer: Any) -> None:
    """Take a tracer for the whole process, once."""
    global _chosen
    if _chosen is not None:
        raise ValueError(
            "The telemetry tracer of this process is set already, and spans may have been made with it: call "
            "set_telemetry_tracer once, before the first model is served."
        )
    _chosen = tracer


def use_worker_tracer(tracer: Any) -> None:
    """Give the worker that runs in the current context a tracer."""
    _of_worker.set(tracer)


def worker_tracer() -> Any:
    """Return the tracer of the worker in this context; `None` if it has none of its own."""
    return _of_worker.get()


def find_tracer(own: Any = None) -> Any:
    """Return the tracer to use; every batch calls this, so it is quick if there is none.

    That of the process comes first, then `own`, then that of the process's tracer provider.
    """
    if _chosen is not None:
        return _chosen
    if own is not None:
        return own
    if _TRACE not in sys.modules:
        return None
    return _provided if _provided is not None else _find_provided()


def note_span(span: Any, tracer: Any) -> None:
    """Keep in mind who made a span, as long as the span lives."""
    _of_span[span] = tracer


def tracer_of(span: Any) -> Any:
    """Return the tracer for children of a span; `None` without telemetry."""
    tracer = _of_span.get(span)
    return tracer if tracer is not None else find_tracer(worker_tracer())


def _find_provided() -> Any:
    global _provided
    trace = sys.modules[_TRACE]
    try:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
            _provided = provider.get_tracer("pytriton")
    except AttributeError:
        # Another thread is importing it at this moment.
        return None
    return _provided
