"""Which tracer the workers of a model get: one that sends its spans where tritonserver sends its own."""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pytriton.proxy.telemetry import parse_trace_config
from pytriton.proxy.trace_export import SpanExport, is_opentelemetry
from pytriton.proxy.tracers import find_tracer

FLUSH_TIMEOUT_S = 2.0
"""How long the end of a model's workers may wait for its last spans to be sent, in seconds."""

_TIMEOUT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")

logger = logging.getLogger(__name__)


def export_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which tritonserver does not wait long for a collector that never answers."""
    if any(environment.get(name) for name in _TIMEOUT_VARIABLES):
        return dict(environment)
    return {**environment, _TIMEOUT_VARIABLES[0]: f"{FLUSH_TIMEOUT_S:g}s"}


class ModelTracing:
    """How a model is traced.

    The setting that it was bound with comes first, then a tracer that the program set up, then the server's setting.
    """

    def __init__(self, bound: Sequence[str] | None = None, inherited: Sequence[str] | None = None) -> None:
        self._is_bound = bool(bound)
        self._trace_config = tuple(bound or inherited or ())
        if self._is_bound:
            parse_trace_config(self._trace_config)

    @property
    def trace_config(self) -> tuple[str, ...]:
        """The setting, for workers that have their tracers in processes of their own."""
        return self._trace_config

    def acquire(self) -> "TracerLease | None":
        """Return the tracer for workers; None if they have none of their own."""
        if not is_opentelemetry(self._trace_config):
            return None
        if not self._is_bound and find_tracer() is not None:
            return None
        try:
            return TracerLease(self._trace_config)
        except (ImportError, ValueError) as error:
            # tritonserver still makes its own spans.
            logger.warning("The inference callables are not traced: %s", error)
            return None


_lock = threading.Lock()
_exports: dict[tuple[str, ...], tuple[SpanExport, int]] = {}


class TracerLease:
    """A share in the tracer for one setting. All workers that have the setting send their spans through one."""

    def __init__(self, trace_config: tuple[str, ...]) -> None:
        self._trace_config = trace_config
        with _lock:
            export, count = _exports.get(trace_config, (None, 0))
            if export is None:
                export = SpanExport(trace_config)
            _exports[trace_config] = (export, count + 1)
        self.tracer: Any = export.tracer
        """The tracer."""

    def release(self) -> None:
        """Give the share back; the last one sends the remaining spans, within `FLUSH_TIMEOUT_S`."""
        with _lock:
            export, count = _exports.pop(self._trace_config)
            if count > 1:
                _exports[self._trace_config] = (export, count - 1)
                return
        export.close(FLUSH_TIMEOUT_S)
