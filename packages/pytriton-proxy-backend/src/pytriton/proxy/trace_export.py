"""From the trace settings of a server to a tracer that sends its spans to the same collector.

The only module that imports the SDK of OpenTelemetry and its exporter, and only when a tracer is made.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

OPENTELEMETRY = "opentelemetry"
MODE = f"mode={OPENTELEMETRY}"
# tritonserver sends its spans to this address, under this name, unless it is configured.
DEFAULT_URL = "http://localhost:4318/v1/traces"
DEFAULT_SERVICE_NAME = "triton-inference-server"

_ABORT_TIMEOUT_S = 0.2

# tritonserver's names for the settings of the batch span processor, and the SDK's.
_PROCESSOR_SETTINGS = {
    "bsp_max_queue_size": "max_queue_size",
    "bsp_schedule_delay": "schedule_delay_millis",
    "bsp_max_export_batch_size": "max_export_batch_size",
}

logger = logging.getLogger(__name__)


def require_telemetry() -> None:
    """Check that the packages of OpenTelemetry are there."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Telemetry needs OpenTelemetry, which is not installed ({error}). Install the extra of the package that "
            "serves the models: pip install 'pytriton-server[telemetry]', or 'pytriton-proxy-backend[telemetry]' where "
            "that one is used alone."
        ) from error


@dataclass(frozen=True)
class TraceSettings:
    """What `trace_config` says about spans."""

    url: str | None = None  # the collector's; `None` if it is not said
    resource: dict[str, str] = field(default_factory=dict)  # attributes of whoever makes the spans
    # How spans are collected and sent: numbers, under the SDK's names.
    processor: dict[str, Any] = field(default_factory=dict)


def is_opentelemetry(trace_config: Sequence[str]) -> bool:
    """Return whether spans are made at all: Triton's other mode writes files."""
    return any(item.strip().lower() == MODE for item in trace_config)


def read_settings(trace_config: Sequence[str]) -> TraceSettings:
    """Read the items of `trace_config` that are about OpenTelemetry."""
    url = None
    resource: dict[str, str] = {}
    processor: dict[str, Any] = {}
    for item in trace_config:
        mode, comma, setting = item.partition(",")
        if not comma or mode.strip() != OPENTELEMETRY:
            continue
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"trace_config: expected 'opentelemetry,<setting>=<value>'; got {item!r}")
        if name == "url":
            url = value
        elif name == "resource":
            key, equals, text = value.partition("=")
            if not equals:
                raise ValueError(f"trace_config: expected 'opentelemetry,resource=<name>=<value>'; got {item!r}")
            resource[key] = text
        elif name in _PROCESSOR_SETTINGS:
            if not value.isdecimal():
                raise ValueError(f"trace_config: {name} must be a whole number; got {item!r}")
            processor[_PROCESSOR_SETTINGS[name]] = int(value)
    return TraceSettings(url, resource, processor)


def make_resource(settings: TraceSettings) -> Resource:
    """Describe the program that makes the spans; the service has the name that tritonserver uses."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    resource = Resource.create(dict(settings.resource))
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: DEFAULT_SERVICE_NAME}))
    return resource


class SpanExport:
    """A tracer whose spans go to a collector over OTLP and HTTP, in a thread of OpenTelemetry.

    If the collector cannot be reached, spans beyond the queue are dropped, and nobody waits.
    """

    tracer: Any

    def __init__(self, trace_config: Sequence[str]) -> None:
        """Make the tracer. Nothing is sent until there are spans."""
        require_telemetry()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        settings = read_settings(trace_config)
        self._url = settings.url or DEFAULT_URL
        self._exporter = OTLPSpanExporter(endpoint=self._url)
        # The SDK's own hook at the end of the interpreter has no deadline.
        self._provider = TracerProvider(resource=make_resource(settings), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, **settings.processor))
        self.tracer = self._provider.get_tracer("pytriton")
        # Started now, because a thread may not start any more when the interpreter ends.
        self._is_closing = threading.Event()
        self._closer = threading.Thread(target=self._shut_down, name="pytriton-span-export", daemon=True)
        self._closer.start()

    def close(self, timeout_s: float) -> bool:
        """Send the remaining spans, and stop; return whether that was done in time.

        Otherwise spans are lost, and the log says so.
        """
        self._is_closing.set()
        self._closer.join(timeout_s)
        if not self._closer.is_alive():
            return True
        logger.warning(
            "The last spans could not be sent to %s within %g s: they are lost. Does a collector for OTLP over HTTP "
            "listen there?",
            self._url,
            timeout_s,
        )
        # This ends further attempts, and with them the threads; a running attempt takes its time.
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # of OpenTelemetry
        self._closer.join(_ABORT_TIMEOUT_S)
        return False

    def _shut_down(self) -> None:
        self._is_closing.wait()
        self._provider.shutdown()
